"""Settings for importing files, shared by all commands that read rows."""

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from topr_trl.importing import FORMATS
from topr_trl.importing.format import NotOfFormat
from topr_trl.importing.openai_messages import message
from topr_trl.importing.row_table import Row
from topr_trl.settings.checks import check_choice

# Tokens that start a turn in common chat templates. A user's own text is unlikely to have them.
_TEMPLATE_TOKENS = ("<|im_start|>", "<|start_header_id|>", "<start_of_turn>", "<|start_of_role|>", "[INST]", "<|user|>",
                    "<|User|>", "<\uff5cUser\uff5c>", "<|turn>")  # fmt: skip
# Labels with the same meaning in every file, and their rewards: 1 for good and -1 for bad. `--label_values` replaces
# these labels.
_KNOWN_LABELS = {
    **dict.fromkeys(("true", "yes", "up", "thumbs up", "thumbs_up", "good", "positive", "like", "correct", "👍"), 1.0),
    **dict.fromkeys(("false", "no", "down", "thumbs down", "thumbs_down", "bad", "negative", "dislike"), -1.0),
    **dict.fromkeys(("incorrect", "👎"), -1.0),
}  # fmt: skip
ALL_TURNS, LAST_TURN = "all_turns", "last_turn"
_PAIR = re.compile(r"(?P<label>.+)=(?P<value>[^=]*)")


@dataclass
class InputArguments:
    """Settings for importing files. All commands that read rows have these settings."""

    format: str | None = field(
        default=None, metadata={"help": f"Format of the files. Default: detected. One of {', '.join(FORMATS)}."}
    )
    reward_fields: list[str] | None = field(
        default=None,
        metadata={"help": "Fields to add up as the reward, such as info.score. Default: the format's reward."},
    )
    label_values: list[str] | None = field(
        default=None,
        metadata={"help": "Number for each label, such as great=1 poor=-1. An empty value means no reward."},
    )
    skip_unrewarded: bool = field(
        default=False, metadata={"help": "Skip records without a reward. The summary counts and lists them."}
    )
    skip_unusable: bool = field(
        default=False,
        metadata={
            "help": "Skip records that cannot be used, such as those with an image or a NaN reward. The summary counts "
            "and lists them."
        },
    )
    completion: str = field(
        default=ALL_TURNS,
        metadata={
            "help": "Turns to learn from: all_turns of a conversation, or last_turn, if the reward is only for "
            "that turn."
        },
    )
    prompt_field: list[str] | None = field(
        default=None,
        metadata={
            "help": "Column of a table with the prompt, or several columns to join. Default: prompt, question, ..."
        },
    )
    completion_field: str | None = field(
        default=None, metadata={"help": "Column of a table with the completion. Default: completion, response, ..."}
    )
    messages_field: str | None = field(
        default=None, metadata={"help": "Field with the messages, such as history or run.messages."}
    )
    ignore_fields: list[str] | None = field(
        default=None,
        metadata={"help": "Fields that the import ignores: unknown fields, and text that is in no row on purpose."},
    )
    chat: bool | None = field(
        default=None,
        metadata={
            "help": "Convert text to chat messages, so that the chat template applies. Default: true for tables, false "
            "for other formats."
        },
    )

    def check_input(self) -> None:
        """Check the settings of this class.

        Raises:
            ValueError: a setting has a wrong value, or does not fit the format.
        """
        if self.format is not None:
            check_choice(self, format=tuple(FORMATS))
        check_choice(self, completion=(ALL_TURNS, LAST_TURN))
        self.labels  # noqa: B018  # raises for an invalid pair
        if self.messages_field and self.format not in (None, "messages"):
            raise ValueError(
                f"messages_field: format {self.format} does not use this setting. Remove messages_field or format."
            )
        if self.completion_field in (self.prompt_field or ()):
            raise ValueError(f"prompt_field and completion_field both name {self.completion_field}. Name two columns.")
        for name in ("prompt_field", "completion_field"):
            if getattr(self, name) and self.format not in (None, "table"):
                raise ValueError(f"{name} is for tables, not for format {self.format}. Remove {name}.")

    @property
    def labels(self) -> dict[str, float | None] | None:
        """Return the number of each label, also under its spelling in lower case. Return None without `label_values`.

        The number is None for a label with an empty value, such as `skipped=`. This label means "no reward".

        Raises:
            ValueError: a pair is not of the form label=number or label=.
        """
        if self.label_values is None:
            return None
        found: dict[str, float | None] = {}
        for pair in self.label_values:
            match = _PAIR.fullmatch(pair)
            try:
                found[match["label"].strip()] = float(match["value"]) if match["value"].strip() else None  # type: ignore[index]
            except (TypeError, ValueError):
                raise ValueError(f"label_values must be pairs such as great=1 poor=-1, not {pair!r}.") from None
        return {**{label.casefold(): number for label, number in found.items()}, **found}

    @property
    def reads_other_files(self) -> bool:
        """Return whether a setting implies that the input must be imported."""
        names = ("format", "reward_fields", "label_values", "prompt_field", "completion_field", "messages_field",
                 "ignore_fields")  # fmt: skip
        return self.chat is not None or any(getattr(self, name) for name in names)


class UnknownLabel(NotOfFormat):
    """Error for a reward that is neither a number nor a known label.

    Args:
        label (`str`): The label.
        message (`str`): Message of the error.
    """

    def __init__(self, label: str, message: str) -> None:
        super().__init__(message)
        self.label = label


def as_number(name: str, value: Any, labels: dict[str, float | None] | None) -> Any:
    """Convert the value of a reward field to a number, or to None if it means "no reward".

    If `labels` is given, each label becomes its number, whatever its case. Otherwise, words such as "up" become 1, and
    words such as "down" become -1. In both cases, text such as "0.5" becomes a number, blank text becomes None, and a
    boolean that is not a label becomes 1 or -1.

    Args:
        name (`str`): Name of the field, for error messages.
        value (`Any`): Boolean, text, or a list of values to convert. Numbers that are not labels, and values of other
            types, are returned unchanged.
        labels (`dict`, *optional*): Number of each label.

    Raises:
        UnknownLabel: the text is neither a label nor a number.
    """
    if isinstance(value, list):
        return [as_number(name, each, labels) for each in value]
    for spelling in (*spellings(value), str(value).strip().casefold()):
        if labels is not None and spelling in labels:
            return labels[spelling]
    if isinstance(value, bool):
        return 1.0 if value else -1.0
    if not isinstance(value, str):
        return value
    if not (text := value.strip()):
        return None
    if labels is None and text.casefold() in _KNOWN_LABELS:
        return _KNOWN_LABELS[text.casefold()]
    try:
        return float(text)
    except ValueError:
        why = "which is not in --label_values" if labels else "and a reward must be a finite number"
        raise UnknownLabel(
            text,
            f"{name} is {text[:40]!r}, {why}. Give each label a number, or nothing for no reward: --label_values "
            "great=1 unsure= poor=-1",
        ) from None


def spellings(value: Any) -> Iterator[str]:
    """Yield the spellings of a value in settings such as `--label_values`: `0.0` and `0`, or `True` and `true`.

    Args:
        value (`Any`): Value of a field.
    """
    text = str(value).strip()
    yield text
    if isinstance(value, bool):
        yield text.lower()
    with suppress(TypeError, ValueError, OverflowError):
        yield f"{float(value):g}"


def as_chat(row: Row) -> Row:
    """Convert a text prompt to a user message, and a text completion to an assistant message.

    Args:
        row (`Row`): Row. Messages, and rows with token ids, are returned unchanged.
    """
    prompt, completion = row.get("prompt"), row.get("completion")
    if row.get("completion_ids"):
        return row
    if isinstance(prompt, str):
        row = {**row, "prompt": [message({"role": "user", "content": prompt})]}
    if isinstance(completion, str) and isinstance(row.get("prompt"), list):
        row = {**row, "completion": [message({"role": "assistant", "content": completion})]}
    return row


def check_not_rendered(row: Row) -> None:
    """Check that no chat template was applied to the prompt of a row, because the trainer would apply it again.

    Args:
        row (`Row`): Row of text or messages.

    Raises:
        NotOfFormat: the prompt is text with the special tokens of a chat template.
    """
    prompt = row.get("prompt")
    if not isinstance(prompt, str) or row.get("completion_ids"):
        return
    if token := next((each for each in _TEMPLATE_TOKENS if each in prompt), None):
        raise NotOfFormat(
            f"its prompt has {token}, so a chat template was already applied. To keep the text as it is, set --chat "
            "false. To apply the template to it, set --chat true"
        )
