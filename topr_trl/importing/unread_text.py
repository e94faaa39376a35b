"""Find text of a record that no row has, and judge by its field whether a row should have it."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from topr_trl.importing.completions import split_turns
from topr_trl.importing.field_names import Kind, is_often_short, kind_of
from topr_trl.importing.format import Choices, NotOfFormat, Record
from topr_trl.importing.message_parts import parsed_json
from topr_trl.importing.openai_messages import ROLE_NAMES
from topr_trl.importing.record_fields import inner_value
from topr_trl.importing.row_table import JSON_COLUMNS, Row
from topr_trl.recording.protocols.messages import without_request_hash

_LONG = 16  # characters; shorter text can occur in a row by chance
_SENTENCE = 4  # words
_MARGIN = 40  # maximum number of characters that a template adds after a completion
_OF_CONVERSATION = ("prompt", "completion", *JSON_COLUMNS)  # columns with text that the model read or wrote
_RENDERED = ("text", "content", "full_text", "formatted", "conversation", "transcript")  # fields for a rendered row
# Fields without text of their own: long lists, signatures of thinking, and encrypted thinking.
_TOKENS = ("logprobs", "token_ids", "prompt_token_ids", "prompt_logprobs", "signature", "thoughtSignature",
           "thought_signature", "redactedContent", "encrypted_content")  # fmt: skip
_UNSPACED = re.compile("[\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff]")  # Thai, Japanese and Chinese: about two a word
_ENCRYPTED = ("redacted_thinking", "reasoning.encrypted")  # types of parts with encrypted thinking


class Unread(NamedTuple):
    """Names of fields with text that no row has.

    Attributes:
        completions (`list[str]`): Fields that may hold the completion.
        prompts (`list[str]`): Fields that may be a part of the prompt.
        others (`list[str]`): Other top-level fields of the record, if no column of the rows has any of their text.
    """

    completions: list[str]
    prompts: list[str]
    others: list[str]


class _Text(NamedTuple):
    """Text in a record, with the path and the kind of its field.

    `name` is the path up to the first list, with dots between the names, as in settings such as `--completion_field`.
    `is_said` is whether the text is in a message with a role.
    """

    path: tuple[str, ...]
    name: str
    text: str
    kind: Kind
    is_said: bool = False


class _Rule(NamedTuple):
    """Rule for text in fields of one kind.

    Attributes:
        texts (`set[str]`): Texts of the rows. A text that equals one of them is read.
        part_from (`int`): Minimum number of characters of a text that is also read if it is a part of one of `texts`.
        completion_from (`int`): Minimum number of words of an unread text that may be the completion.
        prompt_from (`int`): Minimum number of words of an unread text that may be a part of the prompt.
    """

    texts: set[str]
    part_from: int
    completion_from: int
    prompt_from: int


def _rules(rows: Sequence[Row], choices: Choices) -> dict[Kind, _Rule]:
    """Return the rule for each kind of field."""
    written, asked, about = _texts_of(rows)
    everything = written | asked | about
    # If the rows lack the answer, the texts of the model in them are earlier turns. An equal text in another field can
    # still be the answer.
    own = written if choices.has_answer else set[str]()
    # A correct answer beside the completion is rarely a sentence, or longer than the completion.
    longer = max(_SENTENCE, 1 + max(map(_count_words, written), default=0))
    answer = 1 if Kind.ANSWER in choices.completions else longer
    # The completion can quote a part of the prompt, so text in the completion does not count as read.
    unknown = asked if Kind.UNKNOWN in choices.prompts else everything
    return {
        Kind.WRITTEN: _Rule(own, _LONG, 1, 1),
        Kind.ANSWER: _Rule(own, _LONG, answer, 1),
        Kind.ASKED: _Rule(asked, 1, 1, 1),
        Kind.UNKNOWN: _Rule(unknown, _LONG, 1 + choices.has_answer, _SENTENCE),
        Kind.ABOUT: _Rule(everything, _LONG, 1, 1),
    }


def find_unread(record: Record, rows: Sequence[Row], read: Collection[str], choices: Choices) -> Unread:
    """Return the fields of a record with text that no row has.

    Args:
        record (`Record`): Record.
        rows (`Sequence[Row]`): Rows of the record.
        read (`Collection[str]`): Paths of fields that count as read, because settings name them.
        choices (`Choices`): Rules for fields with unread text.
    """
    rules, read = _rules(rows, choices), tuple(f"{path}." for path in (*read, *choices.read))
    everything = rules[Kind.ABOUT].texts
    found, tops = Unread([], [], []), set[str]()
    for each in _texts_in(record, everything):
        text, rule, top = _plain(each.text), rules[each.kind], each.path[0]
        # Earlier turns can be in any part of a row.
        texts = everything if each.is_said and choices.has_answer else rule.texts
        is_read = not text or f"{each.name}.".startswith(read) or _has(texts, text, rule.part_from)
        is_read = is_read or (each.path[-1].lower() in _RENDERED and _renders(text, rows))
        is_read = is_read or all(_plain(turn) in texts for _, turn in split_turns(each.text))
        if is_read or text in everything:  # The text can be in another column, such as `answer`.
            tops.add(top)
        if not is_read:
            may_be = _may_be(each, rule, choices)
            getattr(found, may_be).append(top if may_be == "others" else each.name)
    if choices.counts_numbers:
        kinds = choices.completions - {Kind.UNKNOWN}
        numbers = (name for name, value in record.items() if type(value) in (int, float) and kind_of((name,)) in kinds)
        found.completions.extend(name for name in numbers if not f"{name}.".startswith(read))
    others = [name for name in found.others if name not in tops]
    return Unread(*(list(dict.fromkeys(names)) for names in (found.completions, found.prompts, others)))


def _may_be(unread: _Text, rule: _Rule, choices: Choices) -> str:
    """Return the list of `Unread` for a text: `completions`, `prompts` or `others`."""
    words = _count_words(unread.text)
    is_id = words == 1 and not unread.is_said and is_often_short(unread.path)
    if is_id or (len(unread.path) > 1 and unread.kind in (Kind.ABOUT, Kind.UNKNOWN)):
        return "others"
    if unread.kind in {*choices.completions, Kind.ANSWER} and words >= rule.completion_from:
        return "completions"
    return "prompts" if unread.kind in choices.prompts and words >= rule.prompt_from else "others"


def check_unread(unread: Unread, choices: Choices, record: Record, messages: str) -> None:
    """Check that no field with unread text may hold the completion or a part of the prompt.

    Args:
        unread (`Unread`): Fields with unread text. If a setting names the field of the completion or of the prompt, the
            caller passes an empty list for it.
        choices (`Choices`): Remedies.
        record (`Record`): Record.
        messages (`str`): Field with the messages, for the remedies.

    Raises:
        NotOfFormat: a field may hold the completion or a part of the prompt.
    """
    if not (names := unread.completions or unread.prompts):
        return
    what, remedy = (
        ("the completion", choices.completion) if unread.completions else ("a part of the prompt", choices.prompt)
    )
    # A history comes before the question.
    order = {name: (not isinstance(parsed_json(value), list), n) for n, (name, value) in enumerate(record.items())}
    both = [*names, *choices.columns[:1]]
    both.sort(key=lambda name: order.get(name.partition(".")[0], (True, len(order))))
    given = {"names": ", ".join(names), "fields": " ".join(names), "joined": " ".join(both), "messages": messages}
    # `str.format` would also replace braces in the name of a column.
    advice = re.sub(rf"\{{({'|'.join(given)})\}}", lambda place: given[place[1]], remedy)
    raise NotOfFormat(f"the text of {given['names']} is in no row, and may be {what}. {advice}")


def _texts_of(rows: Sequence[Row]) -> tuple[set[str], set[str], set[str]]:
    """Return the texts of rows in three sets: text that the model wrote, other text of conversations, and the rest."""
    written, asked, about = set[str](), set[str](), set[str]()
    for row in rows:
        for name, value in row.items():
            value = parsed_json(value) if name in JSON_COLUMNS else value
            for each in value if isinstance(value, list) and name in _OF_CONVERSATION else [value]:
                is_own = name == "completion" and (isinstance(value, str) or inner_value(each, "role") == "assistant")
                # Some APIs write the arguments of a tool call as an object, and rows have them as JSON text.
                calls = inner_value(each, "tool_calls") or ()
                arguments = [parsed_json(inner_value(call, "function", "arguments")) for call in calls]
                kind = written if is_own else asked if name in _OF_CONVERSATION else about
                kind.update(_plain(text.text) for text in _texts_in({name: [each, *arguments]}, ()))
        if isinstance(row.get("prompt"), str) and isinstance(row.get("completion"), str):
            written.add(_plain(row["prompt"] + row["completion"]))  # A field of a record may have both texts.
    return written, asked, about


def _has(texts: Collection[str], text: str, part_from: int) -> bool:
    """Return whether a text equals one of `texts`, or occurs in one of them without cutting a word.

    The second condition is only for a text with at least `part_from` characters.
    """
    if text in texts or len(text) < part_from:
        return text in texts
    for each in texts:
        start = each.find(text)
        while start >= 0:
            end = start + len(text)
            if not re.search(r"\w", each[max(start - 1, 0) : start] + each[end : end + 1]):
                return True
            start = each.find(text, start + 1)
    return False


def _renders(text: str, rows: Sequence[Row]) -> bool:
    """Return whether a text is a rendered row: a prompt, and then the completion near the end of the text.

    Only the last text of the prompt and the last text of the completion are compared.
    """
    for row in rows:
        prompt, completion = _end_of(row.get("prompt")), _end_of(row.get("completion"))
        start, end = text.find(prompt), text.rfind(completion)
        if 0 <= start < end and len(text) - end - len(completion) <= _MARGIN and start + len(prompt) <= end:
            return True
    return False


def _end_of(value: Any) -> str:
    """Return the last text of a prompt or completion. If there is none, return a character that occurs in no text."""
    last = value[-1] if isinstance(value, list) and value else value
    return _plain(str((last.get("content") if isinstance(last, Mapping) else last) or "")) or "\0"


def _count_words(text: str) -> int:
    return len(text.split()) + len(_UNSPACED.findall(text)) // 2


def _plain(text: str) -> str:
    """Return text with single spaces, because formats change whitespace."""
    return " ".join(text.split())


def _texts_in(
    value: Any, whole: Collection[str], path: tuple[str, ...] = (), kind: Kind | None = None, name: str = ""
) -> Iterator[_Text]:
    """Yield each text in the value at `path`. JSON text is parsed, unless `whole` is empty or has the text.

    The role of a message gives the kind of its content. `kind` is the kind of the message around the value, and `name`
    is the path of a list around it.
    """
    if whole and not (isinstance(value, str) and _plain(value) in whole):
        value = parsed_json(value)
    if isinstance(value, str):
        own = kind_of(path)
        is_said = kind is not None and own is not Kind.ABOUT
        yield _Text(path, name or ".".join(path), value, kind if is_said and kind else own, is_said)
    elif isinstance(value, Mapping):
        if is_message := isinstance(role := value.get("role"), str):
            kind = Kind.WRITTEN if ROLE_NAMES.get(role.lower()) == "assistant" else Kind.ASKED
        for key, inner in value.items():
            if key not in _TOKENS:
                found = _joined(inner) if is_message or key in _IN_BLOCKS else inner
                yield from _texts_in(found, whole, (*path, str(key)), kind, name)
    elif isinstance(value, list | tuple):
        for inner in () if value and isinstance(value[0], int | float) else value:
            if inner_value(inner, "type") not in _ENCRYPTED:
                yield from _texts_in(inner, whole, path, kind, name or ".".join(path))


_IN_BLOCKS = ("system", "parts")  # fields of a request whose blocks become one text


def _joined(content: Any) -> Any:
    """Return the content of a message. A list of parts becomes one text if all parts have text and none is thinking."""
    content = without_request_hash(content)
    if not isinstance(content, list):
        return content
    texts: list[Any] = [None if inner_value(part, "thought") else inner_value(part, "text") for part in content]
    return "".join(texts) if all(isinstance(text, str) for text in texts) else content
