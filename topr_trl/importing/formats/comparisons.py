"""Read comparisons of two completions. Names of fields, or a field with a verdict, tell which completion is better.

OpenAI's format for preferences has `preferred_output` and `non_preferred_output`. LLaMA-Factory's format has a message
in `chosen` and a message in `rejected`. ms-swift's format has `rejected_response` beside the messages. Arenas have a
field `winner`.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from topr_trl.importing.content_blocks import text_or_messages
from topr_trl.importing.field_names import normalized, words_of
from topr_trl.importing.format import IGNORED, Choices, Format, LeftOut, NotOfFormat, Record, Unrewarded
from topr_trl.importing.formats import pairs
from topr_trl.importing.formats.table import has_columns
from topr_trl.importing.message_parts import is_messages, parsed_json
from topr_trl.importing.openai_messages import message
from topr_trl.importing.row_table import Row

# Name of a compared completion, such as `response_a`, `output_1` or `conversation_left`. `side` is the name's end.
_ONE_OF_TWO = re.compile(
    r"(?P<stem>(\w+_)?(response|answer|output|completion|conversation|generation|reply|text|summary|ref))"
    r"_?(?P<side>[a-k]|[0-9]|left|right)"
)
_COMPLETION = {"response", "answer", "output", "completion", "conversation", "generation", "reply", "text", "message",
               "messages", "summary"}  # fmt: skip
_BETTER = {"chosen", "preferred", "better", "winning", "accepted"}
_WORSE = {"rejected", "dispreferred", "worse", "losing"}
_VERDICT = {"winner", "preference", "preferred", "better", "best", "choice", "chosen", "verdict", "vote", "win",
            "label"}  # fmt: skip
_STRICT = {"winner", "vote", "verdict"}  # Words of fields that have only verdicts, so each value must be understood.
# Last words of fields with details of a verdict, such as its strength or its reason.
_ABOUT = {"strength", "statement", "reason", "reasoning", "rationale", "explanation", "elaboration", "justification",
          "comment", "confidence", "score", "margin", "count", "time", "id", "ids"}  # fmt: skip
# Fields of HelpSteer 2 and 3, with values from -3 (response 1 is better) to 3 (response 2 is better).
_SCALES = ("overall_preference", "preference_strength")
_LARGEST = 3
_NUMBER = re.compile(r"[+-]?\d+(\.\d*)?")
_BEFORE_SIDE = re.compile(
    r"(model|response|assistant|answer|output|completion|conversation|generation|reply|text|summary|option|candidate)_?"
)
_TIES = {"tie", "ties", "tied", "both", "bothbad", "equal", "neither", "none", "same", "draw"}
# Marks that judge prompts ask for, as in MT-Bench (`[[C]]` is a tie) and Arena-Hard (`[[A>>B]]`).
_MARKED = re.compile(r"\[\[([^\[\]]+)\]\]")
_MARKS = {"a": "a", "b": "b", "c": "tie", "a=b": "tie", "b=a": "tie", "a>b": "a", "b>a": "b"}
_BESIDE_TIES = {"bad", "good", "are", "equally"}


def rows(record: Record) -> list[Row | LeftOut]:
    """Return a row with reward 1 for the better completion, and a row with reward -1 for the worse completion.

    Return `[LeftOut.TIED]` for a tie or for equal completions, and [] if a completion, or an answer or a question in a
    list, is empty.

    Raises:
        NotOfFormat: there are not two completions, no field names the better completion, several fields disagree, a
            verdict is not understood, the numbers of questions and answers differ, or see `pairs.rows`.
        Unusable: see `pairs.rows`.
    """
    names = _by_name(record) or _by_verdict(record)
    if names is None:
        return [LeftOut.TIED]
    if any(isinstance(value := parsed_json(record.get(name)), list) and None in value for name in ("prompt", *names)):
        return []  # Some lists of the Chatbot Arena lack an answer or a question.
    request = record.get("input")
    rest = {**record, **request} if isinstance(request, Mapping) else record  # OpenAI's format has an object `input`.
    rest = {name: value for name, value in rest.items() if name not in names}
    better, worse = (_completion(record, name) for name in names)
    if names[0] == "messages" and (isinstance(worse, str) or not worse or worse[0]["role"] == "assistant"):
        rest["messages"], better = better[:-1], better[-1:]
        worse = [message({"role": "assistant", "content": worse})] if isinstance(worse, str) else worse
    lists = [name for name, value in rest.items() if is_messages(parsed_json(value))]
    if "prompt" not in rest and len(lists) == 1:
        rest["messages"] = text_or_messages(parsed_json(rest.pop(lists[0])))
    elif _is_texts(parsed_json(rest.get("prompt"))):
        del rest["prompt"]  # The completions now have the questions, see `_completion`.
    return pairs.rows({**rest, "chosen": better, "rejected": worse})


def _completion(record: Record, name: str) -> Any:
    """Return a completion as text or messages.

    A list of texts becomes a conversation: each text answers the text with the same index in the list `prompt`. In
    MT-Bench, `turn` is the number of the judged answer, with which the conversation ends.

    Raises:
        NotOfFormat: the completion is a list of texts, and `prompt` is not a list of as many texts, or the conversation
            has no question with the number `turn`.
    """
    value = parsed_json(record[name])
    if isinstance(value, Mapping):
        return text_or_messages([value])
    if is_messages(value):
        found = text_or_messages(value)
        asked = [n for n, each in enumerate(found) if each["role"] == "user"]
        ends = {str(n): end for n, end in enumerate([*asked[1:], None], 1)}
        turn = _text(record.get("turn"))
        if asked and turn not in (*ends, "", "none", "nan"):
            raise NotOfFormat(
                f"its turn is {turn!r}, and its {name} has {len(asked)} questions. Count turns from 1. To read whole "
                "conversations, set --ignore_fields turn"
            )
        return found[: ends.get(turn)]
    if not _is_texts(value):
        return record[name]
    asked = parsed_json(record.get("prompt"))
    if not _is_texts(asked) or len(asked) != len(value):
        raise NotOfFormat(f"its {name} is a list of {len(value)} texts, and its prompt must be a list of as many texts")
    said = chain.from_iterable(zip(asked, value, strict=True))
    return [message({"role": ("user", "assistant")[n % 2], "content": text}) for n, text in enumerate(said)]


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, str) for each in value)


def _by_name(record: Record) -> tuple[str, str] | None:
    """Return the names of the better and the worse completion, such as `chosen_answer` and `rejected_answer`.

    If only the worse completion has such a name, the better completion is in `messages`. Return None if the names do
    not tell both completions.
    """
    found: dict[tuple[str, ...], dict[bool, str]] = defaultdict(dict)
    for name in record:
        words = words_of(name)
        is_worse = bool({*words} & _WORSE) or {"non", "preferred"} <= {*words}
        others = tuple(word for word in words if word not in _BETTER | _WORSE | {"non"})
        if len(others) < len(words) and {*others} <= _COMPLETION:
            found[others][is_worse] = name
    pair = next(((each[False], each[True]) for each in found.values() if len(each) == 2), None)
    lone = next((each[True] for each in found.values() if True in each), None)
    return pair or (("messages", lone) if lone and is_messages(parsed_json(record.get("messages"))) else None)


def _by_verdict(record: Record) -> tuple[str, str] | None:
    """Return the names of the better and the worse completion, from a field such as `winner`. Return None for a tie.

    Raises:
        NotOfFormat: there are not two completions, no field names the better completion, several fields disagree, or a
            verdict is not understood.
        Unrewarded: no field has a verdict.
    """
    if not (sides := _two_sides(record)):
        raise NotOfFormat("it lacks two completions, such as response_a and response_b")
    first, second = sides
    verdicts = dict(_verdicts(record, sides))
    if len(set(verdicts.values())) == 1:
        better = next(iter(verdicts.values()))
        return None if better is None else (better, second if better == first else first)
    why = (
        f"{', '.join(verdicts)} name different ones as the better one" if verdicts else "no field names the better one"
    )
    others = {name: value for name, value in record.items() if name not in sides and value != ""}
    has_verdict = any(_may_be_verdict(name, value, [*sides.values()]) for name, value in others.items())
    error = NotOfFormat if has_verdict else Unrewarded
    raise error(
        f"it has two completions, {first} and {second}, and {why}. Write {first}, {second} or tie in a field winner, "
        "and set --ignore_fields to other fields that name one"
    )


def _two_sides(record: Record) -> dict[str, str]:
    """Return the sides of two completions by their names: the side of `response_a` is `a`.

    Return {} unless exactly two names differ only in their side, see `_ONE_OF_TWO`. A field with a number as its value
    does not count.
    """
    stems: dict[str, dict[str, str]] = defaultdict(dict)
    for name, value in record.items():
        if (found := _ONE_OF_TWO.fullmatch(normalized(name))) and not isinstance(value, int | float):
            stems[found["stem"]][name] = found["side"]
    return next((sides for sides in stems.values() if len(sides) == 2), {})


def _verdicts(record: Record, sides: dict[str, str]) -> Iterator[tuple[str, str | None]]:
    """Yield each field that names the better completion, with the name of this completion, or None for a tie.

    Raises:
        NotOfFormat: a value is not understood and one of these conditions holds: the field is a scale or has only
            verdicts, the value is negative, or a different field says that there is a tie.
    """
    found, unclear = dict[str, str | None](), list[str]()
    for field, value in record.items():
        if field in sides or not _may_be_verdict(field, value, [*sides.values()]):
            continue
        text = _verdict(field, value, [*sides.values()])
        names = [name for name, side in sides.items() if text in (side, normalized(name))]
        if names or text == "tie":
            found[field] = names[0] if names else None
        elif text:
            unclear.append(field)
            is_strict = _STRICT & {*words_of(field)} or _is_scale(field, value, [*sides.values()])
            if is_strict or text.startswith("-"):
                raise NotOfFormat(_not_understood(field, value, sides))
    if unclear and None in found.values():
        raise NotOfFormat(_not_understood(unclear[0], record[unclear[0]], sides))
    yield from found.items()


def _may_be_verdict(field: str, value: Any, sides: list[str]) -> bool:
    words = words_of(field)
    if value is None or value != value or not _VERDICT & {*words} or isinstance(parsed_json(value), list | Mapping):
        return False  # NaN is not equal to itself.
    names_side = words[-1] == "id" and bool({"better", "preferred", "chosen"} & {*words}) and _text(value) in sides
    return words[-1] not in _ABOUT or names_side or _is_scale(field, value, sides)


def _is_scale(field: str, value: Any, sides: list[str]) -> bool:
    return normalized(field) in _SCALES and sides == ["1", "2"] and bool(_NUMBER.fullmatch(_text(value)))


def _text(value: Any) -> str:
    """Return a verdict in lower case, without brackets, quotes and punctuation around it."""
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text.strip().lower().strip("[](){}\"'`*.: ")


def _verdict(field: str, value: Any, sides: list[str]) -> str:
    """Return the better side, the name of the better completion, or `tie`.

    Return `""` if the verdict only says that one side is not better. Return the text of a verdict that is not
    understood.
    """
    text = _text(value)
    marked = {re.sub(r"\s|>(?=>)", "", found.lower()) for found in _MARKED.findall(str(value))}
    if len(marked) == 1 and sorted(sides) == ["a", "b"] and marked <= set(_MARKS):
        return _MARKS[marked.pop()]
    number = float(text) if _NUMBER.fullmatch(text) else None
    if number is not None and _is_scale(field, value, sides):
        return text if abs(number) > _LARGEST else "tie" if not number else "12"[number > 0]
    if normalized(field).startswith("winner_") and text in ("1", "1.0", "0", "0.0", "true", "false"):
        # The side is in the name of the field, such as `winner_model_a`.
        return normalized(field).rpartition("_")[2] if text in ("1", "1.0", "true") else ""
    if number is not None:
        return f"{number:g}"
    words = {*normalized(text).split("_")}
    if words & _TIES and words <= _TIES | _BESIDE_TIES:
        return "tie"
    text = re.sub(r"[\s_-]+", "_", text)
    before = _BEFORE_SIDE.match(text)
    return text[before.end() :] if before and text[before.end() :] in sides else text


def _not_understood(field: str, value: Any, sides: dict[str, str]) -> str:
    names = " and ".join(sides)
    return (
        f"it has two completions, {names}, and {field} is {str(value)[:60]!r}, which is not understood. Write "
        f"{', '.join(sides)} or tie in {field}. To leave {field} out, set --ignore_fields {field}"
    )


def _is_comparison(record: Record) -> bool:
    if {"chosen", "rejected"} <= set(record) and not isinstance(parsed_json(record["chosen"]), Mapping):
        return False  # The format `pairs` reads this record.
    has_completion = has_columns({name: value for name, value in record.items() if not isinstance(value, list)})
    return _by_name(record) is not None or (bool(_two_sides(record)) and not has_completion)


def _choices(record: Record) -> Choices:
    names = _by_name(record)
    read = [name for name, value in record.items() if _VERDICT & {*words_of(name)} or is_messages(parsed_json(value))]
    return IGNORED._replace(completions=frozenset(), read=(*(names or _two_sides(record)), *read))


FORMAT = Format(
    source="comparisons of two completions, such as OpenAI's, LLaMA-Factory's and ms-swift's formats for preferences",
    rank=3,
    test=_is_comparison,
    rows=rows,
    columns=("reward", "problem_id", "tools", "chat_template_kwargs"),
    required=frozenset(),
    chat=True,
    choices=_choices,
    loses="Each comparison is two rows: the better completion with reward 1 and the other one with reward -1. Scores "
    "beside it are not read.",
)
