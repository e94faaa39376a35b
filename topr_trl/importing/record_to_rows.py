"""Convert records to rows with rewards and problem ids."""

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from topr_trl.baseline import is_missing, is_rounded
from topr_trl.data.rows import ROLLOUT, TURN_DISCOUNT, TURN_REWARDS, hash_prompts
from topr_trl.data.sampler_logps import LOGPROBS_MODE, TEMPERATURE
from topr_trl.data.trajectories import Rollouts
from topr_trl.importing import FORMATS
from topr_trl.importing.completions import (
    PARTIAL,
    as_chat,
    check_last_turn,
    check_not_rendered,
    check_one_turn,
    cut_turns,
    holds_completion,
    notes_of,
    turns_of,
    without_unknown_logps,
)
from topr_trl.importing.format import (
    CALL,
    GRADED,
    Choices,
    Format,
    LeftOut,
    NotOfFormat,
    Placed,
    Record,
    Unrewarded,
    Unusable,
)
from topr_trl.importing.input_settings import LAST_TURN
from topr_trl.importing.openai_messages import FAILED, has_broken_call, row_of_run
from topr_trl.importing.rated_turns import RATED, check_turns, join_answers, with_turn_rewards
from topr_trl.importing.reading_settings import ReadingArguments
from topr_trl.importing.recognition import explain, format_of, recognize_source
from topr_trl.importing.record_fields import field_value, with_named_fields, without_fields
from topr_trl.importing.record_files import files_of, has_unpaired_surrogate, parsed, read_records
from topr_trl.importing.record_rewards import (
    RecordRewards,
    UnknownLabel,
    check_rewards,
    read_by_id,
    spellings,
    value_by_id,
)
from topr_trl.importing.redacted_rows import redact_row
from topr_trl.importing.refused_formats import refused
from topr_trl.importing.row_table import PLACE, Row
from topr_trl.importing.unread_text import check_unread, find_unread
from topr_trl.recording.redaction import Redactor


class Part(NamedTuple):
    """Rows of one shard, and the places of records without a row.

    Attributes:
        rows (`list[Row]`): Rows, each with the place of its record in `PLACE`.
        left_out (`dict[str, list[str]]`): Places of completions and records without a row, by `LeftOut` reason.
        noted (`dict[str, list[str]]`): Places of rows that the summary mentions, by the reason (see `notes_of`).
        not_read (`dict[str, int]`): Number of records in which a field has text that no row has, by the field.
        read_from (`dict[str, list[str]]`): Fields of the prompt, the completion and the reward, if they can have other
            names.
    """

    rows: list[Row]
    left_out: dict[str, list[str]]
    noted: dict[str, list[str]]
    not_read: dict[str, int]
    read_from: dict[str, list[str]]


def short_place(place: str, source: Path) -> str:
    """Return a place relative to the imported folder, or to the folder of the imported file.

    Manifests may be published, so they must not contain absolute paths.

    Args:
        place (`str`): Path of a file, or place of a record.
        source (`Path`): Folder or file that is imported.
    """
    return place.removeprefix(f"{source if source.is_dir() else source.parent}{os.sep}")


_RECORDS = 100  # number of first records in which to look for rewards and for fields with numbers


class RecordReader:
    """Reader that converts records of a format to rows.

    Args:
        args (`ReadingArguments`): Settings.
        source (`Path`): Folder or file that is imported.

    Raises:
        ValueError: the format is not recognized, a setting does not fit the format or the first records, or the file
            of `rewards` or `requests` is malformed.
    """

    def __init__(self, args: ReadingArguments, source: Path) -> None:
        self.args, self.source = args, source
        self.name: str = args.format or recognize_source(args, source)
        args.check_format(self.name)
        self.format: Format = FORMATS[self.name]
        self.chat = self.format.chat if args.chat is None else args.chat
        self.where = args.where_values
        self.redactor = Redactor(args.redact or ())
        self.calls = set[str]()  # names of calls whose rows were read
        self.same: Any = None  # value of the field that `Format.same` names, in earlier records
        self.read_from: dict[str, list[str]] = {}  # see `Part`
        self.rewards = RecordRewards(args, self.format)
        self.messages_field: str | None = None  # field of the current record that was copied to `Format.messages`
        self.has_rewards = self.rewards.are_set or self._first_records_have_rewards()
        self.requests = read_by_id(args.requests, ("custom_id", "key"), ("body", "params", "request"))
        self.runs: dict[str, Row] = {}  # columns that all records of a run share; a value is None while it is unknown
        self._for_all = {name: value for name in (TEMPERATURE, LOGPROBS_MODE) if (value := getattr(args, name))}
        by_turn = self.has_rewards and self.format.rates_turns
        if args.turn_discount and not by_turn:
            raise ValueError(
                f"turn_discount: the first records of {source} have no rewards. Remove turn_discount, or see "
                "--reward_fields."
            )
        named = {"problem_id": True, ROLLOUT: args.rollout_field, "reward": self.has_rewards,
                 TURN_REWARDS: by_turn, TURN_DISCOUNT: args.turn_discount}  # fmt: skip
        more = (name for name, is_there in named.items() if is_there)
        self.joins_answers = by_turn and args.completion != LAST_TURN and not (args.rollout_field or args.rewards)
        self.columns = tuple(dict.fromkeys((*self.format.columns, *more, *self._for_all)))
        self.not_read = Counter[str]()

    def records_of(self, file: Path) -> Iterator[Placed]:
        """Yield the place and the content of each record of a file. See `Format.join`."""
        return self.format.join(read_records(file))

    def _first_records_have_rewards(self) -> bool:
        """Return whether one of the first records has a field that is a known reward.

        If none of them has such a field, the file is imported without rewards. Return True if none of them can be
        read, and False if `Format.rewards` is None.
        """
        if self.format.rewards is None:
            return False
        found = list[bool]()
        with suppress(ValueError):
            for record in self.first_records():
                with suppress(KeyError, TypeError, AttributeError, IndexError, ValueError):
                    found.append(bool(self.format.rewards(self._with_names_of_format(record))))
        return any(found) or not found

    def first_records(self) -> Iterator[Any]:
        """Yield the content of those of the first `_RECORDS` records that are not broken and match `where`."""
        first = files_of(self.source)[0]
        for _, record in islice(self._split(self.records_of(first)), _RECORDS):
            if record is not None and not self._is_other(record):
                yield record

    def find_runs(self, records: Iterable[Placed], rollout_field: str) -> None:
        """Collect the problem id and the reward of each run. With `rollout_field`, call this method before `read`.

        Args:
            records (`Iterable`): Place and content of each record.
            rollout_field (`str`): Field with the id of the run.

        Raises:
            ValueError: a record does not match the format, cannot be used and no setting skips it, or has a different
                reward than an earlier record of its run.
        """
        for place, record in self._split(records):
            if record is None or self._is_other(record):
                continue
            with suppress(Unusable), self._errors_with(place, record):
                record = self._check_fields(record)
                name = _id_of(record, rollout_field)
                run = self.runs.setdefault(name, {"problem_id": None, "reward": None})
                if (reward := self._reward_or_none(record)) is not None:
                    if run["reward"] not in (None, reward):
                        raise NotOfFormat(
                            f"its reward is {reward:g}, and an earlier record of run {name} has {run['reward']:g}: "
                            "give the same reward to all records of a run, or only to one of them"
                        )
                    run["reward"] = reward
                if run["problem_id"] is None and (rows := _rows_in(self._completions(record))):
                    run["problem_id"] = self._problem(record, rows)

    def read(self, records: Iterable[Placed]) -> Part:
        """Convert the records of a shard.

        Args:
            records (`Iterable`): Place and content of each record.

        Raises:
            ValueError: a record does not match the format, or cannot be used and no setting skips it.
        """
        self.not_read = Counter()
        part = Part([], {reason.value: [] for reason in LeftOut}, {}, {}, {})
        for raw in records:
            answers: list[Row] = []
            for place, record in self._split([raw]):
                try:
                    with self._errors_with(place, record):
                        found = [LeftOut.BROKEN] if record is None else self._rows_of(record)
                except Unusable as error:
                    found = [error.reason]
                for row in found or [LeftOut.EMPTY]:
                    if isinstance(row, LeftOut):
                        part.left_out[row].append(short_place(place, self.source))
                    elif row.pop(RATED, False) and self.joins_answers:
                        answers.append({**row, PLACE: place})
                    else:
                        self._add(part, {**row, PLACE: place})
            for row in join_answers(answers, self.args.turn_discount):
                self._add(part, row)
        return part._replace(not_read=dict(self.not_read), read_from=self._columns_read())

    def unknown_labels(self, records: Iterable[Placed]) -> Iterator[str]:
        """Yield the first label without a number of each record, cut to 40 characters.

        Args:
            records (`Iterable`): Place and content of each record. Records with other errors are skipped.
        """
        for raw in records:
            with suppress(ValueError):
                for place, record in self._split([raw]):
                    with suppress(ValueError), self._errors_with(place, record):
                        try:
                            self._rows_of(record)
                        except UnknownLabel as error:
                            yield error.label[:40]

    def _add(self, part: Part, row: Row) -> None:
        """Add a row to a shard, with its notes."""
        place = short_place(row[PLACE], self.source)
        for note in notes_of(row):
            part.noted.setdefault(note, []).append(place)
        if self.format.names_rollouts and row.get(ROLLOUT):
            folder = Path(place.rpartition(", ")[0]).parent
            row[ROLLOUT] = row[ROLLOUT] if folder == Path() else f"{folder.as_posix()}/{row[ROLLOUT]}"
        if self.args.completion == LAST_TURN and turns_of(row) > 1:
            row = cut_turns(row, turns_of(row) - 1)
        part.rows.append(row)

    def _rows_of(self, record: Any) -> list[Row | LeftOut]:
        """Return the rows of a record, and a reason for each completion, or for the whole record, that gives no row."""
        found = [LeftOut.WHERE] if self._is_other(record) else self._rows(self._check_fields(record))
        return [LeftOut.COPIED if self._is_copied(row) else row for row in found]

    def _is_copied(self, row: Row | LeftOut) -> bool:
        """Return whether an earlier row has the same call. Move the name of the call from the row to `calls`."""
        name = None if isinstance(row, LeftOut) else row.pop(CALL, None)
        if name is None or name in self.calls:
            return name is not None
        self.calls.add(name)
        return False

    def _split(self, records: Iterable[Placed]) -> Iterator[tuple[str, Any]]:
        """Split documents into records, and yield the place and the content of each record.

        The content of a broken line, and of a record with an unpaired surrogate, is None.
        """
        split = self.format.records
        for place, raw in records:
            record = parsed(raw)
            inner = [record]
            if split is not None and isinstance(record, dict):
                with self._errors_with(place, record):
                    inner = list(split(record))
            for n, each in enumerate(inner, 1):
                # `parsed` has checked a line, but not the records of other files.
                is_broken = not isinstance(raw, bytes) and has_unpaired_surrogate(each)
                yield place if len(inner) == 1 else f"{place}, part {n}", None if is_broken else each

    def _is_other(self, record: Any) -> bool:
        """Return whether a field of a record differs from the value that `where` requires."""
        return isinstance(record, dict) and not all(_matches(record, *pair) for pair in self.where.items())

    @contextmanager
    def _errors_with(self, place: str, record: Any) -> Iterator[None]:
        """Turn an error in a record into a ValueError with the record's place and likely format.

        An `Unusable` error is raised unchanged if the settings or the format skip such records.
        """
        try:
            yield
        except Unusable as error:
            is_usual = isinstance(error, Unrewarded) and self.format.skips_unrewarded
            if not (is_usual or getattr(self.args, error.option)):
                raise ValueError(
                    f"{place}: {self._hint(record)}{error}. To skip such records, use --{error.option}."
                ) from None
            raise
        except NotOfFormat as error:
            raise ValueError(f"{place}: {self._hint(record)}{error}.") from None
        except (KeyError, TypeError, AttributeError, IndexError, OverflowError, ValueError) as error:
            raise ValueError(
                f"{place}: {self._hint(record)}the record is malformed ({type(error).__name__}: {error}). The format "
                f"{self.name} is defined by {self.format.source}."
            ) from error

    def _hint(self, record: Any) -> str:
        """Return the start of an error message if a record looks like a different format. Otherwise, return ""."""
        if unread := refused(record):
            return f"{explain(unread)}. With --format {self.name}, the error is: "
        likely = format_of(record)
        if likely in (None, self.name) or FORMATS[likely].rows is self.format.rows:
            return ""
        return (
            f"it looks like {likely} ({FORMATS[likely].source}). Use --format {likely}, or omit --format. With "
            f"--format {self.name}, the error is: "
        )

    def _check_fields(self, record: Any) -> Record:
        """Rename and check the fields of a record, and add its request from the file of requests, if there is one."""
        if isinstance(record, dict):
            record = self._with_names_of_format(record)
            if (same := self.format.same) is not None:
                value = record.get(same)
                if self.same not in (None, value):
                    raise NotOfFormat(
                        f"its {same} is {value}, and an earlier record has {self.same}: both have the same "
                        f"completions. Choose one with --where {same}={self.same}"
                    )
                self.same = value
        self.format.check(record, [name.partition(".")[0] for name in self._named_fields])
        if self.requests is None:
            return record
        by = "key" if "key" in record and "custom_id" not in record else "custom_id"  # Gemini's batches have `key`.
        return {**record, "request": value_by_id(self.requests, record, by, "--requests", NotOfFormat)}

    def _rated_by_settings(self) -> dict[str, list[int]]:
        """Return the argument `rated` of `Format.rows`. Return {} if no setting names the reward of a conversation.

        The argument is a list with the index of the message in `reward_fields`, such as [1] for `messages.1.score`. It
        is [] if `reward_fields` has no field of a message.

        Raises:
            NotOfFormat: `reward_fields` has fields of several messages.
        """
        if not (self.format.messages and self.rewards.are_set):
            return {}
        inside = re.compile(rf"{re.escape(self.messages_field or self.format.messages)}\.(\d+)\.")
        found = {match[1] for name in self.args.reward_fields or () if (match := inside.match(name))}
        if len(found) > 1:
            raise NotOfFormat(
                f"reward_fields names ratings of several messages ({', '.join(sorted(found))}). Name one message, or "
                "omit --reward_fields, if the ratings have a name such as rating"
            )
        return {"rated": [int(n) for n in found]}

    @property
    def _named_fields(self) -> list[str]:
        """Names and paths of the fields that settings name."""
        args = self.args
        single = (args.problem_field, args.rollout_field, args.completion_field, args.messages_field,
                  args.id_field if args.rewards else None)  # fmt: skip
        lists = (args.reward_fields, args.prompt_field, args.ignore_fields, self.where)
        return [*filter(None, single), *chain.from_iterable(each or () for each in lists)]

    def _with_names_of_format(self, record: Record) -> Record:
        """Rename fields to the names of the format, and remove the fields that the user ignores."""
        record = with_named_fields(record, self.args.prompt_field, self.args.completion_field)
        record = without_fields(record, self.args.ignore_fields or ())
        self.messages_field = None
        if self.format.find_messages and (self.args.messages_field or self.format.messages not in record):
            fields = [self.args.messages_field] if self.args.messages_field else self.format.find_messages(record)
            if len(fields) > 1:
                raise NotOfFormat(f"{', '.join(fields)} may all hold its messages: set --messages_field to one of them")
            for self.messages_field in fields:
                record = {**record, self.format.messages: field_value(record, self.messages_field, NotOfFormat)}
        return record

    def _completions(self, record: Record) -> list[Row | LeftOut]:
        """Return the rows of a record, and a reason for each completion that gives no row."""
        found = [
            row if isinstance(row, LeftOut)
            else LeftOut.FAILED if row and row.get("finish_reason") == FAILED
            else LeftOut.BROKEN if has_unpaired_surrogate(row)  # It was inside JSON text.
            else row if row and holds_completion(row) else LeftOut.EMPTY
            for row in self.format.rows(record, **self._rated_by_settings())
        ]  # fmt: skip
        for row in _rows_in(found):
            if self.format.chat and isinstance(row["completion"], str):
                check_one_turn(row["completion"])
            if self.chat and self.args.chat is None:  # With --chat, users choose what to do with rendered prompts.
                check_not_rendered(row)
        return [as_chat(row) if self.chat and not isinstance(row, LeftOut) else row for row in found]

    def _rows(self, record: Record) -> list[Row | LeftOut]:
        found = self._completions(record)
        if not (rows := _rows_in(found)):
            return found
        if self.format.choices is not None:
            choices = self.format.choices(record)
            self._check_columns(record, choices.columns)
            self._check_unread(record, rows, choices)
        # A list of rewards has a value for each row, and for each empty, failed or broken completion.
        empty = (LeftOut.EMPTY, LeftOut.FAILED, LeftOut.BROKEN)
        placed = [row for row in found if not isinstance(row, LeftOut) or row in empty]
        if self.args.rollout_field:
            self._add_run(record, self.args.rollout_field, placed)
        else:
            self._add_rewards(record, placed)
            if self.args.turn_discount:
                check_turns(rows)
            problem = self._problem(record, rows)
            for row in rows:
                row["problem_id"] = problem if self.args.problem_field else row.get("problem_id") or problem
        if "reward" in self.columns:
            check_rewards(rows)
            self._mark_partial(record, rows)
        for row in rows:
            if not row.get("prompt") and not row.get("prompt_ids"):
                raise Unusable("its prompt is empty")
            if self.args.completion == LAST_TURN:
                check_last_turn(row)
            row.update(self._for_all)
            redact_row(row, self.redactor)
        if any(row.get(TURN_REWARDS) for row in rows):
            left_out = [row for row in found if isinstance(row, LeftOut)]
            found = [*left_out, *with_turn_rewards(rows, self.args.turn_discount)]
        return [
            row if isinstance(row, LeftOut) else LeftOut.CALLS if has_broken_call(row) else without_unknown_logps(row)
            for row in found
        ]

    def _mark_partial(self, record: Record, rows: Sequence[Row]) -> None:
        """Mark rows whose reward is the sum of some of the `reward_fields`, because the other fields are null."""
        if len(self.args.reward_fields or ()) > 1:
            is_partial = self.rewards.is_partial(record)
            for row in rows:
                row[PARTIAL] = is_partial or any(map(self.rewards.is_partial, row.get(GRADED, ())))

    def _check_columns(self, record: Record, columns: Sequence[str]) -> None:
        """Check that the prompt and the completion are in the same fields as in earlier records with these fields."""
        for what, name in zip(("prompt", "completion"), columns, strict=False):
            names = self.read_from.setdefault(what, [])
            if others := [earlier for earlier in names if earlier != name and earlier in record]:
                raise NotOfFormat(
                    f"its {what} would be read from {name}, and that of an earlier record from {others[0]}, because "
                    f"each has a value where the other is empty. Set --{what}_field to one of them; records in which "
                    "it is empty are then left out"
                )
            if name not in names:
                names.append(name)

    def _columns_read(self) -> dict[str, list[str]]:
        named = {"prompt": " and ".join(self.args.prompt_field or ()), "completion": self.args.completion_field}
        found = {what: [given] if (given := named[what]) else list(names) for what, names in self.read_from.items()}
        return {**found, "reward": [self.rewards.read_from]} if found and self.rewards.read_from else found

    def _check_unread(self, record: Record, rows: Sequence[Row], choices: Choices) -> None:
        """Check that the rows have all text of a record that may belong in them.

        Fields with unread text are counted in `not_read`.
        """
        rewards = self.format.rewards(record) if self.format.rewards and not self.rewards.are_set else ()
        read = [*self._named_fields, *rewards, "finish_reason", *filter(None, [self.messages_field])]
        unread, args = find_unread(record, rows, read, choices), self.args
        check_unread(
            unread._replace(
                completions=[] if args.completion_field or args.messages_field else unread.completions,
                prompts=[] if args.prompt_field or args.messages_field else unread.prompts,
            ),
            choices,
            record,
            self.messages_field or "messages",
        )
        self.not_read.update(chain(*unread))

    def _problem(self, record: Record, rows: Sequence[Row]) -> str:
        """Return the problem id of a record.

        The problem id is the value of `problem_field`. Without this setting, it is the problem id of the first row, the
        record's field `problem_id`, or a hash of the row's prompt: the first of these that has a value.
        """
        if self.args.problem_field:
            return _id_of(record, self.args.problem_field)
        first = rows[0]
        if self.args.turn_discount and first.get(RATED):  # The row will start at the first turn of the conversation.
            first = {**first, **row_of_run([*first["prompt"], *first["completion"]])[0]}
        given = record.get("problem_id")
        if not first.get("problem_id") and not is_missing(given) and given != "":
            return _id_of(record, "problem_id")
        return str(first.get("problem_id") or hash_prompts([first.get("prompt_ids") or first["prompt"]])[0])

    def _add_run(self, record: Record, rollout_field: str, found: Sequence[Row | LeftOut]) -> None:
        """Add the id, the problem id and the reward of a run to the row of one of its records."""
        if len(found) > 1:
            raise NotOfFormat(
                f"it has {len(found)} completions, and a record of a run must have one: remove --rollout_field"
            )
        name = _id_of(record, rollout_field)
        self._reward_or_none(record)  # This call raises Unusable if the record's own reward is NaN.
        if "reward" in self.columns and self.runs[name]["reward"] is None:
            raise Unrewarded(f"no record of its run {name} has a reward, see --reward_fields")
        for row in _rows_in(found):
            row |= {ROLLOUT: name, **self.runs[name]}

    def _add_rewards(self, record: Record, rows: Sequence[Row | LeftOut]) -> None:
        """Add the rewards of a record to its rows. All rows of a rollout get the same reward."""
        if self._add_turn_rewards(record, [row for row in _rows_in(rows) if GRADED in row]):
            return
        rollouts = Rollouts.of([None if isinstance(row, LeftOut) else row.get(ROLLOUT) for row in rows])
        rewards = self.rewards.of(record, len(rollouts.counts_R)) if self.has_rewards else None
        if rewards is None and self.format.rewards is not None and (names := self.format.rewards(record)):
            raise NotOfFormat(
                f"its {', '.join(names)} may be the reward, and the first records have no reward. Set --reward_fields"
            )
        if rewards is not None:
            for n, reward in zip(rollouts.order_N, np.repeat(rewards, rollouts.counts_R), strict=True):
                if not isinstance(row := rows[n], LeftOut):
                    row["reward"] = float(reward)

    def _add_turn_rewards(self, record: Record, rows: Sequence[Row]) -> bool:
        """Add the rewards of single turns to the rows of a rollout, and return whether a turn has a reward.

        Raises:
            NotOfFormat: the rollout also has a reward for all its turns, or the first records have no rewards.
        """
        if self.args.rewards:  # The file has rewards of whole records.
            return False
        graded = [[self._reward_or_none(turn) for turn in row[GRADED]] for row in rows]
        if all(each is None for turns in graded for each in turns):
            return False
        if self._reward_or_none(record) is not None:
            raise NotOfFormat(
                "the whole rollout has a reward, and its answers have rewards. Set --reward_fields to the names of one "
                "kind"
            )
        if not self.has_rewards:
            raise NotOfFormat("its turns have rewards, and the first records have no reward. Set --reward_fields")
        for row, turns in zip(rows, graded, strict=True):
            row |= {"reward": turns[-1]} if self.args.completion == LAST_TURN else {TURN_REWARDS: turns}
        return True

    def _reward_or_none(self, record: Record) -> float | None:
        with suppress(Unrewarded):
            for reward in self.rewards.of(record, 1) or ():
                return reward
        return None


def _id_of(record: Record, name: str) -> str:
    """Return the id in a field as text. A float such as 1.0 becomes "1".

    Raises:
        NotOfFormat: there is no such field, or the id is a float that may be rounded.
        Unusable: the field is empty.
    """
    value = field_value(record, name, NotOfFormat)
    if value in (None, "") or value != value:  # NaN differs from itself.
        raise Unusable(f"its {name} is empty. Fill it")
    if is_rounded(value):
        raise NotOfFormat(f"its {name} is {value:.0f}, a float that may be rounded. Write the column as int64 or text")
    return str(int(value) if isinstance(value, float) and value.is_integer() else value)


def _matches(record: Record, name: str, value: str) -> bool:
    """Return whether a field, or an inner field such as `info.split`, has the value."""
    try:
        found = field_value(record, name, NotOfFormat)
    except NotOfFormat:
        return False
    return value == found if isinstance(found, str) else value in spellings(found)


def _rows_in(found: Iterable[Row | LeftOut]) -> list[Row]:
    return [row for row in found if not isinstance(row, LeftOut)]
