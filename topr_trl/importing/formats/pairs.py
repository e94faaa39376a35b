"""Read preference pairs, such as datasets for DPO. Each pair becomes two rows with the same prompt."""

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from topr_trl.importing.completions import check_one_turn
from topr_trl.importing.field_names import PROMPTS, Kind, normalized
from topr_trl.importing.format import IGNORED, Format, LeftOut, NotOfFormat, Record, Unusable, has
from topr_trl.importing.formats.table import column_of, plain, system_of, with_system
from topr_trl.importing.openai_messages import check_only_text, template_columns
from topr_trl.importing.row_table import Row

_MARKERS = ("\n\nAssistant:", "<|im_start|>assistant\n", "<|assistant|>\n", "[/INST]")  # text before an assistant turn


def rows(record: Record) -> list[Row | LeftOut]:
    """Return a row with reward 1 for `chosen` and a row with reward -1 for `rejected`.

    Return [] if `chosen` or `rejected` has no completion, and `[LeftOut.TIED]` if `chosen` equals `rejected`.

    Raises:
        NotOfFormat: the prompt is missing, the system prompt may be a name, or see `table.plain`.
        Unusable: the pair has images, sounds or videos, `chosen` and `rejected` have different types, there are two
            system prompts, the provider defines a tool, or see `check_one_turn`, `_split_messages` and `table.plain`.
    """
    check_only_text(record, "it")
    chosen, rejected = (plain(record[name], name) for name in ("chosen", "rejected"))
    if not chosen or not rejected:
        return []
    if chosen == rejected:
        return [LeftOut.TIED]
    if type(chosen) is not type(rejected):
        raise Unusable("one of chosen and rejected is text, and the other is a list of messages")
    name = _prompt_name(record, chosen)
    prompt = None if name is None else plain(record[name], name)
    if name == "instruction" and isinstance(prompt, str) and isinstance(record.get("input"), str):
        prompt = "\n".join(filter(None, (prompt, record["input"])))  # LLaMA-Factory joins the two texts in this way.
    if isinstance(chosen, list):
        prompt, chosen, rejected = _split_messages(prompt, chosen, rejected)
    elif prompt is None:
        prompt, chosen, rejected = _split_texts(chosen, rejected)
    elif isinstance(prompt, str) and chosen.startswith(prompt) and rejected.startswith(prompt) and prompt:
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    elif isinstance(prompt, str) and normalized(name) != "prompt":  # TRL does not apply a template to a text `prompt`.
        prompt = plain([{"role": "user", "content": prompt}], "prompt")
    for text in (chosen, rejected):
        if isinstance(text, str):
            check_one_turn(text)
    system = system_of(record)
    own = None if isinstance(prompt, str) or prompt[0]["role"] != "system" else prompt[0]["content"]
    if system and own != system:
        prompt = with_system(prompt, system)
    if isinstance(prompt, list) and isinstance(chosen, str):
        chosen, rejected = (plain([{"role": "assistant", "content": text}], "chosen") for text in (chosen, rejected))
    options = template_columns(record)
    if not chosen or not rejected:
        return []
    return [
        {"prompt": prompt, "completion": completion, "reward": reward, **options}
        for completion, reward in ((chosen, 1.0), (rejected, -1.0))
    ]


def _prompt_name(record: Record, chosen: Any) -> str | None:
    """Return the name of the field with the prompt. The fields `prompt` and `messages` come first.

    If these two are missing or empty, return None if `chosen` is a list of messages that starts with the prompt, or if
    no field has the name of a prompt.
    """
    if name := next((name for name in ("prompt", "messages") if record.get(name)), None):
        return name
    has_prompt_inside = isinstance(chosen, list) and chosen[0]["role"] != "assistant"
    if has_prompt_inside or not any(normalized(name) in PROMPTS for name in record):
        return None
    return column_of(record, PROMPTS, "prompt")


def _split_messages(prompt: Any, chosen: list[Row], rejected: list[Row]) -> tuple[Any, list[Row], list[Row]]:
    """Return the prompt, and the messages of `chosen` and `rejected` after it.

    If `chosen` and `rejected` start with an assistant turn, the prompt is the argument `prompt`, as messages.
    Otherwise, the prompt consists of the messages with which `chosen` and `rejected` start. If the argument `prompt` is
    a longer list that ends with these messages, the whole list is the prompt. Any other `prompt` must be the start of
    these messages, or the text of one of them.

    Raises:
        NotOfFormat: `chosen` and `rejected` start with an assistant turn, and `prompt` is None.
        Unusable: `chosen` and `rejected` do not start with the same messages, followed by an assistant turn, or
            `prompt` does not agree with these messages.
    """
    if chosen[0]["role"] == rejected[0]["role"] == "assistant":
        if prompt is None:
            raise NotOfFormat("chosen and rejected start with an assistant turn, and there is no prompt")
        if isinstance(prompt, str):
            prompt = plain([{"role": "user", "content": prompt}], "prompt")
        return prompt, chosen, rejected
    shared = _count_shared(chosen, rejected)
    if not shared or any(run[shared:] and run[shared]["role"] != "assistant" for run in (chosen, rejected)):
        raise Unusable("chosen and rejected do not start with the same messages, followed by an assistant turn")
    own = chosen[:shared]
    if isinstance(prompt, list) and prompt[-len(own) :] == own:
        own = prompt  # `prompt` can have a system message that chosen and rejected lack.
    elif not (prompt is None or (own[: len(prompt)] == prompt if isinstance(prompt, list) else _is_among(prompt, own))):
        raise Unusable("its prompt differs from the prompt in the messages of chosen. Remove one of the two prompts")
    return own, chosen[shared:], rejected[shared:]


def _count_shared(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return the number of messages or characters with which both sequences start."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def _is_among(text: str, messages: list[Row]) -> bool:
    return any((each["content"] or "").strip() == text.strip() for each in messages)


def _split_texts(chosen: str, rejected: str) -> tuple[str, str, str]:
    """Split two texts after the last marker of an assistant turn in their common start.

    Return the prompt, the chosen completion and the rejected completion.

    Raises:
        NotOfFormat: the common start has no marker.
    """
    shared = _count_shared(chosen, rejected)
    ends = [place + len(marker) for marker in _MARKERS if (place := chosen.rfind(marker, 0, shared)) >= 0]
    if not ends:
        raise NotOfFormat(
            "it has no prompt, and chosen and rejected are text without a marker of the assistant's turn. Add a field "
            "prompt, or write both as lists of messages"
        )
    end = max(ends)
    return chosen[:end], chosen[end:], rejected[end:]


FORMAT = Format(
    source="preference pairs, the format of TRL's DPOTrainer",
    rank=3,
    test=has("chosen", "rejected"),
    rows=rows,
    columns=("reward", "problem_id", "tools", "chat_template_kwargs"),
    required=frozenset({"chosen", "rejected"}),
    choices=lambda record: IGNORED._replace(
        completions=frozenset(), prompts=frozenset({Kind.ASKED, Kind.UNKNOWN}), read=("chosen", "rejected")
    ),
    loses="Each pair is two rows: chosen with reward 1 and rejected with reward -1.",
)
