"""Define the class of import formats, and errors for records that cannot be imported."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from topr_trl.importing.field_names import Kind
from topr_trl.importing.row_table import Row

Record = dict[str, Any]
Placed = tuple[str, bytes | Record]  # place and content of a record
GRADED = "graded"  # key of a row whose turns can have separate rewards: a list with one record of rewards per turn
CALL = "call"  # key of a row with the name of its call, see `Format.names_calls`


def has(*names: str) -> Callable[[Record], bool]:
    """Return a function that returns whether a record has all fields with the given names."""
    return lambda record: all(name in record for name in names)


class NotOfFormat(ValueError):
    """Error for a record that does not match its format: a field is missing or unknown, or has a wrong type."""


class LeftOut(StrEnum):
    """Reason why a completion, a record or a file gives no row. The summary of an import counts each reason.

    Attributes:
        text (`str`): Text of the reason in the summary. A pair such as {is|are} has the forms for one record and for
            several records.
    """

    text: str

    def __new__(cls, value: str, text: str) -> "LeftOut":
        """Return a member with its text."""
        member = str.__new__(cls, value)
        member._value_, member.text = value, text
        return member

    BROKEN = "broken", "line{|s} {is|are} not valid JSON, or contain{s an|} unpaired surrogate{|s},"
    COPIED = "copied", "call{|s} of the model {was|were} copied from an earlier session"
    CALLS = (
        "calls",
        "completion{|s} without token ids {has a tool call|have tool calls} whose arguments are not valid JSON,",
    )
    UNREWARDED = "unrewarded", "record{|s} {has|have} no reward"
    UNUSABLE = "unusable", "record{|s} cannot be used"
    EMPTY = "empty", "completion{|s} {is|are} empty or missing"
    FAILED = "failed", "request{|s} or run{|s} failed"
    MASKED = "masked", "sample{|s} {was|were} masked in the loss"
    UNGRADED = "ungraded", "generation{|s} {was|were} not graded"
    FROZEN = "frozen", "run{|s} come{s|} from {an agent that was|agents that were} not trained"
    EVALUATED = "evaluated", "run{|s} come{s|} from {an evaluation|evaluations}"
    WHERE = "where", "record{|s} {does|do} not match --where"
    OTHER = "other", "record{|s} {is not a model call|are not model calls}"
    TIED = "tied", "pair{|s} {is a tie|are ties}, or {has|have} the same text twice,"
    REPEATED = "repeated", "file{|s} repeat{s|} the previous file"


class Unusable(NotOfFormat):
    """Error for a record that matches its format but cannot be used, for instance because of an image.

    Attributes:
        reason (`LeftOut`): Reason that the summary gives for a skipped record.
        option (`str`): Setting that skips these records.
    """

    reason, option = LeftOut.UNUSABLE, "skip_unusable"


# Message for a row of text that has a stop token where the model wrote none.
CUT_TURN = "a turn before the last one was cut at the limit of tokens, and a row can only have such a turn at its end"


class Unrewarded(Unusable):
    """Error for a record without a reward."""

    reason, option = LeftOut.UNREWARDED, "skip_unrewarded"


class Choices(NamedTuple):
    """Rules for text that no row has. They decide whether the field of the text stops the import, and give the remedy.

    Attributes:
        completions (`frozenset[Kind]`): Kinds of fields that may hold the completion. A field of the kind `ANSWER`
            always counts if its text is longer than the completions and has at least four words.
        prompts (`frozenset[Kind]`): Kinds of fields that may be a part of the prompt. In a field of an unknown kind,
            only text with at least four words counts.
        completion (`str`): Remedy if the fields `{names}` may hold the completion. `{fields}` are the same names
            without commas, and `{messages}` is the field of the messages.
        prompt (`str`): Remedy if the fields `{names}` may be a part of the prompt. `{joined}` are these names and the
            first of `columns`: lists first, and otherwise in the order of the record.
        columns (`tuple[str, ...]`, defaults to `()`): Fields of the prompt and of the completion, if other records may
            have them in other fields. The import stops if a later record does.
        read (`tuple[str, ...]`, defaults to `()`): Fields that count as completely read.
        has_answer (`bool`, defaults to `True`): Whether the rows have the answer to the last message of the record.
        counts_numbers (`bool`, defaults to `False`): Whether a number may be the completion.
    """

    completions: frozenset[Kind]
    prompts: frozenset[Kind]
    completion: str
    prompt: str
    columns: tuple[str, ...] = ()
    read: tuple[str, ...] = ()
    has_answer: bool = True
    counts_numbers: bool = False


IGNORED = Choices(
    completions=frozenset({Kind.WRITTEN}),
    prompts=frozenset({Kind.ASKED}),
    completion="To leave {names} out, set --ignore_fields {fields}",
    prompt="To keep it, add it to the prompts in the file. To leave it out, set --ignore_fields {fields}",
)


@dataclass(frozen=True)
class Format:
    """File format, with its conversion to rows.

    Attributes:
        source (`str`): Project, version and source file that define the format and its fields.
        test (`Callable`): Function that returns whether a record looks like this format.
        rows (`Callable`): Function that converts a record to a list of rows, which may have a `reward`. In place of a
            row, the list has None for an empty completion, or a `LeftOut` for another reason to leave the completion
            out. An empty list counts as one empty completion. The function raises `NotOfFormat` or `Unusable` for a
            record that it cannot convert.
        columns (`tuple[str, ...]`): Columns of `COLUMNS` that `rows` may set. The importer always adds `problem_id`.
            It adds `reward` if a setting names the rewards or `rewards` finds one in the first records, and columns
            such as `temperature` if a setting gives their values.
        required (`frozenset[str]`): Required fields of a record.
        rewards (`Callable`, *optional*): Function that returns the possible rewards of a record, by name. None if the
            rows have a `reward`, or the files have no rewards.
        optional (`frozenset[str]`, *optional*): Other fields that a record may have. None allows all fields.
        rank (`int`, defaults to 0): Order of the tests. It is 0 for fields that only one program writes, 1 for exports
            of calls and of annotation tools, 2 for other logs of calls, and 3 or more for fields that many programs
            write.
        loses (`str`, defaults to `""`): Limitations of the format, which the summary of an import shows.
        without_repeats (`Callable`, defaults to `list`): Function that takes a list of files, sorted by name, and
            returns the files to read. It leaves out each file that repeats the records of another file, or raises a
            ValueError if it cannot choose. The default, `list`, leaves out no file.
        records (`Callable`, *optional*): Function that splits a JSON document, such as a log, into records.
        join (`Callable`, defaults to `iter`): Function that takes the places and the contents of a file's records, and
            yields the place and the content of each joined record, such as a session of several lines. `test` gets the
            records before they are joined. `iter`, the default, joins nothing.
        same (`str`, *optional*): Field that must have the same value in all records of an import.
        messages (`str`, defaults to `""`): Field with the messages of a conversation. With such a field, `rows` takes
            the argument `rated`: the indices of the messages whose reward a setting names. It is None if no setting
            names a reward.
        find_messages (`Callable`, *optional*): Function that returns the fields of a record that may hold the messages.
        rates_turns (`bool`, defaults to `False`): Whether a reward can be for one turn of a conversation, so that rows
            can have `turn_rewards`. `rows` sets `rated_turns.RATED` or `GRADED` in rows with such rewards.
        names_calls (`bool`, defaults to `False`): Whether rows have the name of their call in the field `CALL`. Only
            the first row of a call is kept, because a session can start with a copy of another session.
        names_rollouts (`bool`, defaults to `False`): Whether users name the rollouts, so that two files can have
            rollouts of the same name. The importer then adds the subfolder of the file to the name.
        chat (`bool`, defaults to `False`): Whether text becomes chat messages by default.
        labels (`dict`, *optional*): Rewards of the format's own labels. `--label_values` has precedence.
        skips_unrewarded (`bool`, defaults to `False`): Whether rewards can come later. Records without a reward are
            then skipped by default, and a missing field of `reward_fields` counts as null.
        choices (`Callable`, *optional*): Function that returns the `Choices` of a record, for a format whose fields
            many programs name differently. The import then stops at text that may be the completion or a part of the
            prompt, and that no row has. None if one program defines all fields.
    """

    source: str
    test: Callable[[Record], bool]
    rows: Callable[..., Sequence[Row | LeftOut | None]]
    columns: tuple[str, ...]
    required: frozenset[str]
    rewards: Callable[[Record], dict[str, Any]] | None = None
    optional: frozenset[str] | None = None
    rank: int = 0
    loses: str = ""
    without_repeats: Callable[[list[Path]], list[Path]] = list
    records: Callable[[Record], Iterable[Record]] | None = None
    join: Callable[[Iterable[Placed]], Iterator[Placed]] = iter
    same: str | None = None
    messages: str = ""
    find_messages: Callable[[Record], list[str]] | None = None
    rates_turns: bool = False
    names_calls: bool = False
    names_rollouts: bool = False
    chat: bool = False
    labels: dict[str, float | None] | None = None
    skips_unrewarded: bool = False
    choices: Callable[[Record], Choices] | None = None

    def check(self, record: Any, ignored: Iterable[str] = ()) -> None:
        """Check the fields of a record.

        Args:
            record (`Any`): Record.
            ignored (`Iterable[str]`, defaults to `()`): Unknown fields to accept.

        Raises:
            NotOfFormat: the record is not a JSON object, or a field is missing or unknown.
        """
        if not isinstance(record, dict):
            raise NotOfFormat(f"it must be a JSON object, and is a {type(record).__name__}: write one record per line")
        if missing := sorted(self.required - set(record)):
            more = "; --format messages reads lists of messages" * ("messages" in record)
            raise NotOfFormat(f"it lacks {', '.join(missing)}; it has {', '.join(sorted(record))}{more}")
        known = self.required | (set(record) if self.optional is None else self.optional) | set(ignored)
        if unknown := sorted(set(record) - known):
            raise NotOfFormat(
                f"it has {', '.join(unknown)}, which {self.source} does not define. To ignore these fields, list them "
                "in --ignore_fields"
            )
