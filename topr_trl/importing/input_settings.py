"""Settings for importing files, shared by all commands that read rows."""

import re
from dataclasses import dataclass, field

from topr_trl.importing import FORMATS
from topr_trl.settings.checks import check_choice
from topr_trl.settings.import_settings import IMPORT_SETTINGS

ALL_TURNS, LAST_TURN = "all_turns", "last_turn"
# Format that each of these settings selects.
FORMAT_OF_SETTING = {"messages_field": "messages", "prompt_field": "table", "completion_field": "table"}
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
            ValueError: a setting has a wrong value or does not fit the format, or the prompt and the completion are
                the same column.
        """
        if self.format is not None:
            check_choice(self, format=tuple(FORMATS))
        check_choice(self, completion=(ALL_TURNS, LAST_TURN))
        self.labels  # noqa: B018  # The property raises an error for an invalid pair.
        if self.completion_field in (self.prompt_field or ()):
            raise ValueError(f"prompt_field and completion_field both name {self.completion_field}. Name two columns.")
        for name, format in FORMAT_OF_SETTING.items():
            if getattr(self, name) and self.format not in (None, format):
                raise ValueError(f"{name} is for format {format}, not for format {self.format}. Remove {name}.")

    @property
    def labels(self) -> dict[str, float | None] | None:
        """Return the number of each label, also under its spelling in lower case. Return None without `label_values`.

        The number of a label with an empty value, such as `skipped=`, is None, which means "no reward".

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
        return self.chat is not None or any(getattr(self, name) for name in IMPORT_SETTINGS)
