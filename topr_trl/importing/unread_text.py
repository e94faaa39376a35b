"""Find text of a record that no row has, and tell whether it may be the completion or a part of the prompt."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from topr_trl.importing.field_names import Kind, is_often_short, kind_of
from topr_trl.importing.format import Choices, NotOfFormat, Record
from topr_trl.importing.message_parts import parsed_json
from topr_trl.importing.record_fields import inner_value
from topr_trl.importing.row_table import Row

_LONG = 16  # characters; shorter text can occur in a row by chance
_WORDS_OF_PROSE = 4
_MARGIN = 40  # characters that a template adds behind a completion
_ASSISTANT = ("assistant", "model", "ai", "bot", "gpt")
_RENDERED = ("text", "content", "full_text", "formatted", "conversation", "transcript")  # may hold a rendered row
# Fields without text of their own: long lists, signatures of thinking, and encrypted thinking.
_TOKENS = ("logprobs", "token_ids", "prompt_token_ids", "prompt_logprobs", "signature", "thoughtSignature",
           "thought_signature", "redactedContent", "encrypted_content")  # fmt: skip
_ENCRYPTED = ("redacted_thinking", "reasoning.encrypted")  # types of parts with encrypted thinking


class Unread(NamedTuple):
    """Names of fields with text that no row has.

    Attributes:
        completions (`list[str]`): Fields that may hold the completion.
        prompts (`list[str]`): Fields that may be a part of the prompt.
        others (`list[str]`): Other fields at the top of the record that have no text in any column of the rows.
    """

    completions: list[str]
    prompts: list[str]
    others: list[str]


class _Text(NamedTuple):
    """Text in a record, with the path and the kind of its field.

    `name` is the path up to the first list of objects, with dots, as settings such as `--completion_field` take it.
    `is_said` is whether the text is in a message with a role.
    """

    path: tuple[str, ...]
    name: str
    text: str
    kind: Kind
    is_said: bool = False


class _Read:
    """Texts of rows, apart for the model's completions, for other messages, and for all of them."""

    def __init__(self, rows: Sequence[Row], choices: Choices) -> None:
        self.has_answer = choices.has_answer
        self.ends = [_ends_of(row) for row in rows]
        texts: dict[Kind, set[str]] = {Kind.WRITTEN: set(), Kind.ASKED: set(), Kind.ABOUT: set()}
        for row in rows:
            for kind, text in _texts_of_row(row):
                texts[kind].add(text)
        self.longest = max((len(text.split()) for text in texts[Kind.WRITTEN]), default=0)
        self.exact = set().union(*texts.values())
        texts[Kind.ABOUT] = self.exact
        if not self.has_answer:
            texts[Kind.WRITTEN] = set()
        parts = {kind: (found, "\n".join(found)) for kind, found in texts.items()}
        # A sentence in an unknown field can be a part of the prompt, also if the completion quotes it.
        unknown = parts[Kind.ASKED if Kind.UNKNOWN in choices.prompts else Kind.ABOUT]
        self.parts = {**parts, Kind.ANSWER: parts[Kind.WRITTEN], Kind.UNKNOWN: unknown}

    def has(self, given: _Text) -> bool:
        """Return whether the rows have a text. A short text must equal a text of the rows, unless it may be asked."""
        text = _plain(given.text)
        exact, everything = self.parts[Kind.ABOUT if given.is_said and self.has_answer else given.kind]
        if not text or text in exact or (given.path[-1].lower() in _RENDERED and self._renders(text)):
            return True
        if (len(text) < _LONG and given.kind is not Kind.ASKED) or text not in everything:
            return False
        return re.search(rf"(?<!\w){re.escape(text)}(?!\w)", everything) is not None

    def _renders(self, text: str) -> bool:
        """Return whether a text is a rendered row: a prompt, followed by its completion at the end."""
        for prompt, completion in self.ends:
            start, end = text.find(prompt), text.rfind(completion)
            if 0 <= start < end and len(text) - end - len(completion) <= _MARGIN and start + len(prompt) <= end:
                return True
        return False


def find_unread(record: Record, rows: Sequence[Row], read: Collection[str], choices: Choices) -> Unread:
    """Return the fields of a record that have text which no row has.

    Args:
        record (`Record`): Record.
        rows (`Sequence[Row]`): Rows of the record.
        read (`Collection[str]`): Paths of fields that count as read, because settings name them.
        choices (`Choices`): Kinds of fields that may hold the completion or a part of the prompt.
    """
    known, paths = _Read(rows, choices), {*read, *choices.read}
    found, tops = Unread([], [], []), set[str]()
    for each in _texts_in(record, known.exact):
        if any(each.name == path or each.name.startswith(f"{path}.") for path in paths) or known.has(each):
            tops.add(each.path[0])
            continue
        if _plain(each.text) in known.exact:
            tops.add(each.path[0])  # The text is in another column, such as `answer`.
        is_top, words = len(each.path) == 1, len(each.text.split())
        is_word = words == 1 and not each.is_said and is_often_short(each.path)
        # One word in a field of an unknown name is rarely a completion, unless the rows lack the answer.
        is_rare = each.kind is Kind.UNKNOWN and words == 1 and choices.has_answer
        longer = each.kind is Kind.ANSWER and words >= _WORDS_OF_PROSE and words > known.longest
        if is_word or (not is_top and each.kind in (Kind.ABOUT, Kind.UNKNOWN)):
            found.others.append(each.path[0])
        elif (each.kind in choices.completions and not is_rare) or longer:
            found.completions.append(each.name)
        elif each.kind in choices.prompts and (each.kind is not Kind.UNKNOWN or words >= _WORDS_OF_PROSE):
            found.prompts.append(each.name)
        else:
            found.others.append(each.path[0])
    if choices.counts_numbers:
        found.completions.extend(_numbers_in(record, paths, choices))
    others = [name for name in found.others if name not in tops]
    return Unread(*(list(dict.fromkeys(names)) for names in (found.completions, found.prompts, others)))


def check_unread(unread: Unread, choices: Choices, record: Record, messages: str) -> None:
    """Check that no field with unread text may hold the completion or a part of the prompt.

    Args:
        unread (`Unread`): Fields with unread text. A setting that names the field of the completion or of the prompt
            answers the question: then the list is empty.
        choices (`Choices`): Remedies.
        record (`Record`): Record.
        messages (`str`): Field with the messages, for the remedies.

    Raises:
        NotOfFormat: there is such a field.
    """
    questions = (
        (unread.completions, "the completion", choices.completion),
        (unread.prompts, "a part of the prompt", choices.prompt),
    )
    # A history comes before the question.
    order = {name: (not isinstance(parsed_json(value), list), n) for n, (name, value) in enumerate(record.items())}
    for names, what, remedy in questions:
        if names:
            both = sorted(
                [*names, choices.column], key=lambda name: order.get(name.partition(".")[0], (True, len(order)))
            )
            given = {
                "names": ", ".join(names),
                "fields": " ".join(names),
                "joined": " ".join(both),
                "messages": messages,
            }
            advice = remedy
            for place, text in given.items():  # Not `format`: the name of a column can have braces.
                advice = advice.replace(f"{{{place}}}", text)
            raise NotOfFormat(f"the text of {', '.join(names)} is in no row, and may be {what}. {advice}")


def _numbers_in(record: Record, read: Collection[str], choices: Choices) -> list[str]:
    """Return the fields at the top of a record whose number may be the completion."""
    numbers = (name for name, value in record.items() if type(value) in (int, float) and name not in read)
    return [name for name in numbers if kind_of((name,)) in choices.completions - {Kind.UNKNOWN}]


def _texts_of_row(row: Row) -> Iterator[tuple[Kind, str]]:
    """Yield each text of a row: `WRITTEN` if the model wrote it for this row, `ASKED` in the prompt, or `ABOUT`."""
    for name, value in row.items():
        is_prompt = name in ("prompt", "completion", "tools", "chat_template_kwargs")
        value = parsed_json(value) if name in ("tools", "chat_template_kwargs") else value
        for each in value if isinstance(value, list) and is_prompt else [value]:
            is_own = name == "completion" and (isinstance(value, str) or inner_value(each, "role") == "assistant")
            kind = Kind.WRITTEN if is_own else Kind.ASKED if is_prompt else Kind.ABOUT
            # Some APIs write the arguments of a tool call as an object, and rows have them as JSON text.
            calls = inner_value(each, "tool_calls") or ()
            arguments = [parsed_json(inner_value(call, "function", "arguments")) for call in calls]
            yield from ((kind, _plain(text.text)) for text in _texts_in({name: [each, *arguments]}, ()))
    if isinstance(row.get("prompt"), str) and isinstance(row.get("completion"), str):
        yield Kind.WRITTEN, _plain(row["prompt"] + row["completion"])  # A record may have both in one field.


def _ends_of(row: Row) -> tuple[str, str]:
    """Return the last text of a row's prompt and the last text of its completion."""
    ends = []
    for name in ("prompt", "completion"):
        value = row.get(name)
        last = value[-1] if isinstance(value, list) and value else value
        ends.append(str((last.get("content") if isinstance(last, Mapping) else last) or ""))
    return _plain(ends[0]) or "\0", _plain(ends[1]) or "\0"  # No text contains a null character.


def _plain(text: str) -> str:
    """Return text with single spaces, because formats change white space."""
    return " ".join(text.split())


def _texts_in(
    value: Any, whole: Collection[str], path: tuple[str, ...] = (), kind: Kind | None = None, name: str = ""
) -> Iterator[_Text]:
    """Yield each text in a value. The role of a message gives the kind of its content.

    Args:
        value (`Any`): Value.
        whole (`Collection[str]`): Texts that stay whole if they are JSON. If empty, all texts stay whole.
        path (`tuple[str, ...]`, defaults to `()`): Path of the value.
        kind (`Kind`, *optional*): Kind of the message that holds the value.
        name (`str`, defaults to `""`): Path of a list that holds the value.
    """
    if whole and not (isinstance(value, str) and _plain(value) in whole):
        value = parsed_json(value)
    if isinstance(value, str):
        own = kind_of(path)
        is_said = kind is not None and own is not Kind.ABOUT
        yield _Text(path, name or ".".join(path), value, kind if is_said and kind else own, is_said)
    elif isinstance(value, Mapping):
        said = None
        if isinstance(role := value.get("role"), str):
            said = Kind.WRITTEN if role.lower() in _ASSISTANT else Kind.ASKED
        for key, inner in value.items():
            if key not in _TOKENS:
                yield from _texts_in(_joined(inner) if said else inner, whole, (*path, str(key)), said or kind, name)
    elif isinstance(value, list | tuple):
        for inner in () if value and isinstance(value[0], int | float) else value:
            if inner_value(inner, "type") not in _ENCRYPTED:
                yield from _texts_in(inner, whole, path, kind, name or ".".join(path))


def _joined(content: Any) -> Any:
    """Return the content of a message as one text if it is a list of parts with text, and none is thinking."""
    if not isinstance(content, list):
        return content
    texts: list[Any] = [None if inner_value(part, "thought") else inner_value(part, "text") for part in content]
    return "".join(texts) if all(isinstance(text, str) for text in texts) else content
