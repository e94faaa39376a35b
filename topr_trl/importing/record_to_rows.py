"""Convert records of other systems to rows, with the format, the settings, and files of rewards and requests."""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from topr_trl.data.rows import LARGEST_REWARD, ROLLOUT, hash_prompts
from topr_trl.data.sampler_logps import LOGPROBS_MODE, LOGPROBS_MODES, TEMPERATURE
from topr_trl.data.trajectories import Rollouts
from topr_trl.importing import FORMATS
from topr_trl.importing.completions import check_last_turn, holds_completion, last_turn, turns_of, without_unknown_logps
from topr_trl.importing.input_settings import (
    LAST_TURN,
    InputArguments,
    as_chat,
    as_number,
    check_not_rendered,
    with_named_fields,
)
from topr_trl.importing.message_parts import parsed_json
from topr_trl.importing.recognition import format_of, messages_fields, recognize
from topr_trl.importing.records import (
    Format,
    LeftOut,
    NotOfFormat,
    Record,
    Row,
    Unrewarded,
    Unusable,
    files_of,
    has_broken_call,
    parsed,
    read_records,
)
from topr_trl.settings.checks import check_choice, check_types, existing


@dataclass
class ReadingArguments(InputArguments):
    """Settings for reading records of other systems."""

    rewards: str | None = field(
        default=None,
        metadata={"help": "File of rewards: one JSON object per line with id and reward. See --id_field."},
    )
    requests: str | None = field(
        default=None,
        metadata={"help": "Input file of a batch (OpenAI, vLLM), whose requests are matched by custom_id."},
    )
    where: list[str] | None = field(
        default=None, metadata={"help": "Read only records with these values, such as filter=strict-match."}
    )
    id_field: str = field(default="id", metadata={"help": "Field of a record that matches an id in --rewards."})
    problem_field: str | None = field(
        default=None,
        metadata={"help": "Field with the id of the problem. Default: the format's field, or a hash of the prompt."},
    )
    rollout_field: str | None = field(
        default=None,
        metadata={"help": "Field with the id of the run, if each record is one request of a longer run."},
    )
    temperature: float | None = field(
        default=None, metadata={"help": "Sampling temperature of all rows. It replaces values in the files."}
    )
    logprobs_mode: str | None = field(
        default=None,
        metadata={
            "help": "Kind of the logged log-probabilities: raw_logprobs (of the model) or processed_logprobs (after "
            "temperature and filters)."
        },
    )
    ignore_fields: list[str] | None = field(
        default=None, metadata={"help": "Fields to ignore that the format does not have."}
    )

    def __post_init__(self) -> None:
        check_types(self, ReadingArguments)
        self.check_input()
        self.where_values  # noqa: B018  # raises for a wrong pair
        if self.format is not None:
            self.check_format(self.format)
        if self.temperature is not None and not 0 < self.temperature < float("inf"):
            raise ValueError(f"temperature must be above 0, not {self.temperature}.")
        if self.logprobs_mode is not None:
            check_choice(self, logprobs_mode=LOGPROBS_MODES)
        if self.rollout_field is not None and self.completion == LAST_TURN:
            raise ValueError(
                "completion='last_turn' and rollout_field: all turns of a run share one reward. Remove one of the two "
                "settings."
            )
        for name in ("rewards", "requests"):
            if getattr(self, name) is not None:
                existing(getattr(self, name), f"--{name}")
        if self.rewards is not None and self.reward_fields:
            raise ValueError("rewards and reward_fields both set the reward of a record. Keep one of them.")

    def check_format(self, name: str) -> None:
        """Check that the settings fit a format.

        Args:
            name (`str`): Name of the format.

        Raises:
            ValueError: a setting has no effect with this format.
        """
        if self.ignore_fields and FORMATS[name].optional is None:
            raise ValueError(f"ignore_fields: records of format {name} may have any fields. Remove ignore_fields.")
        if self.rollout_field is not None and ROLLOUT in FORMATS[name].columns:
            raise ValueError(f"rollout_field: a record of format {name} is a whole run. Remove rollout_field.")

    @property
    def where_values(self) -> dict[str, str]:
        """Return the values that fields must have, by the name of the field.

        Raises:
            ValueError: a pair is not of the form field=value.
        """
        pairs = [pair.partition("=") for pair in self.where or ()]
        if wrong := [name for name, is_pair, _ in pairs if not (name and is_pair)]:
            raise ValueError(f"where must be pairs such as filter=strict-match, not {wrong[0]!r}.")
        return {name: value for name, _, value in pairs}


class Part(NamedTuple):
    """Rows of the records of a shard.

    Attributes:
        rows (`list[Row]`): Rows.
        places (`list[str]`): File and position of the record of each row.
        left_out (`dict[str, list[str]]`): Files and positions of completions and records without a row, by the reason.
        several_turns (`int`): Number of rows whose completion had several turns of the model.
    """

    rows: list[Row]
    places: list[str]
    left_out: dict[str, list[str]]
    several_turns: int


def short_place(place: str, source: Path) -> str:
    """Return a place relative to the imported folder or file, because manifests with absolute paths may be published.

    Args:
        place (`str`): Path of a file, or the place of a record in it.
        source (`Path`): Folder or file that is imported.
    """
    return place.removeprefix(f"{source if source.is_dir() else source.parent}{os.sep}")


def recognize_source(args: InputArguments, source: Path) -> str:
    """Return the format of a file or folder, from the settings or from its first records.

    Args:
        args (`InputArguments`): Settings.
        source (`Path`): Folder or file that is imported.
    """
    if args.messages_field:
        return "messages"
    if args.prompt_field and args.completion_field:
        return "table"
    return recognize(files_of(source, ""))


@dataclass
class _Run:
    """Problem and reward of a run, which its records share."""

    problem: str | None = None
    reward: float | None = None


# Fields with numbers that no summary suggests as the reward.
_NEVER_REWARDS = ("temperature", "top_p", "top_k", "seed", "n", "max_tokens", "chat_template_kwargs")


def numbers_in(record: Any, inside: str = "") -> list[str]:
    """Return the names of the fields of a record that hold a number or a bool, such as `reward` or `info.score`.

    Fields that are never a reward, such as `temperature`, are left out.

    Args:
        record (`Any`): Record.
        inside (`str`, *optional*): Prefix of the names, for fields of an inner record.
    """
    if not isinstance(record, dict):
        return []
    return [
        name
        for field, value in record.items()
        for name in ([f"{inside}{field}"] if isinstance(value, int | float) else numbers_in(value, f"{inside}{field}."))
        if field not in _NEVER_REWARDS
    ]


class RecordReader:
    """Reader that converts records of a format to rows.

    Args:
        args (`ReadingArguments`): Settings.
        source (`Path`): Folder or file that is imported.
    """

    def __init__(self, args: ReadingArguments, source: Path) -> None:
        self.args, self.source = args, source
        self.name: str = args.format or recognize_source(args, source)
        args.check_format(self.name)
        self.format: Format = FORMATS[self.name]
        self.chat = self.format.chat if args.chat is None else args.chat
        self.labels, self.where = args.labels, args.where_values
        self.same: Any = None  # value of the field that must be the same in all records
        self.rewards = _read_by_id(args.rewards, "id", "reward")
        self.requests = _read_by_id(args.requests, "custom_id", "body")
        self.runs: dict[str, _Run] = {}
        has_reward = self.format.rewards is not None or args.reward_fields or self.rewards is not None
        self._for_all = {
            name: value
            for name, value in ((TEMPERATURE, args.temperature), (LOGPROBS_MODE, args.logprobs_mode))
            if value
        }
        named = {"problem_id": True, ROLLOUT: args.rollout_field, "reward": has_reward}
        more = (name for name, is_there in named.items() if is_there)
        self.columns = tuple(dict.fromkeys((*self.format.columns, *more, *self._for_all)))

    def find_runs(self, records: Iterable[tuple[str, bytes | Record]]) -> None:
        """Collect the problem and the reward of each run from all records. Call this before `read`.

        Args:
            records (`Iterable`): Place and content of each record.

        Raises:
            ValueError: a record does not match the format, or a run has two rewards.
        """
        for place, record in self._split(records):
            if record is None or self._is_other(record):
                continue
            with suppress(Unusable), self._errors_with(place, record):
                record = self._check_fields(record)
                name = self._run_name(record)
                run = self.runs.setdefault(name, _Run())
                with suppress(Unrewarded):
                    for reward in self._rewards(record, 1) or ():
                        if run.reward not in (None, reward):
                            raise NotOfFormat(
                                f"its reward is {reward:g}, and an earlier record of run {name} has {run.reward:g}: "
                                "give the same reward to all records of a run, or only to one of them"
                            )
                        run.reward = reward
                if run.problem is None and (rows := _rows_in(self._completions(record))):
                    run.problem = self._problem(record, rows)

    def read(self, records: Iterable[tuple[str, bytes | Record]]) -> Part:
        """Convert the records of a shard.

        Args:
            records (`Iterable`): Place and content of each record.

        Raises:
            ValueError: a record does not match the format, or has no reward.
        """
        part, several_turns = Part([], [], {reason.value: [] for reason in LeftOut}, 0), 0
        for place, record in self._split(records):
            try:
                with self._errors_with(place, record):
                    found = [LeftOut.BROKEN] if record is None else self._rows_of(record)
            except Unusable as error:
                found = [error.reason]
            for row in found or [LeftOut.EMPTY]:
                if isinstance(row, LeftOut):
                    part.left_out[row].append(short_place(place, self.source))
                else:
                    several_turns += turns_of(row) > 1
                    part.rows.append(self._cut(row))
                    part.places.append(place)
        return part._replace(several_turns=several_turns)

    def _rows_of(self, record: Any) -> list[Row | LeftOut]:
        """Return the rows of a record, or the reason why it is left out."""
        return [LeftOut.WHERE] if self._is_other(record) else self._rows(self._check_fields(record))

    def _split(self, records: Iterable[tuple[str, bytes | Record]]) -> Iterator[tuple[str, Any]]:
        """Yield the place and the content of each record, split as the format does. A broken line is None."""
        split = self.format.records
        for place, raw in records:
            record = parsed(raw)
            if split is None or not isinstance(record, dict):
                yield place, record
                continue
            with self._errors_with(place, record):
                inner = list(split(record))
            if len(inner) == 1:
                yield place, inner[0]
            else:
                yield from ((f"{place}, part {n}", each) for n, each in enumerate(inner, 1))

    def _is_other(self, record: Any) -> bool:
        """Return whether a record differs from the values in `where`."""
        return isinstance(record, dict) and any(str(record.get(name)) != value for name, value in self.where.items())

    @contextmanager
    def _errors_with(self, place: str, record: Any) -> Iterator[None]:
        """Turn an error in a record into a ValueError with its place, and the format that it looks like."""
        try:
            yield
        except Unusable as error:
            if not getattr(self.args, error.option):
                raise ValueError(f"{place}: {error}. To skip such records, use --{error.option}.") from None
            raise
        except NotOfFormat as error:
            raise ValueError(f"{place}: {self._hint(record)}{error}.") from None
        except (KeyError, TypeError, AttributeError, IndexError, OverflowError, ValueError) as error:
            raise ValueError(
                f"{place}: {self._hint(record)}the record is malformed ({type(error).__name__}: {error}). The format "
                f"{self.name} is defined by {self.format.source}."
            ) from error

    def _hint(self, record: Any) -> str:
        """Return the start of a message that names another format, if a record looks like one. Otherwise, return ""."""
        likely = format_of(record)
        if likely in (None, self.name):
            return ""
        return (
            f"it looks like {likely} ({FORMATS[likely].source}). Use --format {likely}, or leave --format out. As "
            f"{self.name}, it is refused: "
        )

    def _check_fields(self, record: Any) -> Record:
        args = self.args
        named = [*(args.reward_fields or ()), args.problem_field or "", args.rollout_field or "", *self.where]
        if isinstance(record, dict):
            record = self._with_names_of_format(record)
        self.format.check(record, [*(args.ignore_fields or ()), *(name.partition(".")[0] for name in named)])
        if self.requests is None:
            return record
        return {**record, "request": _value_by_id(self.requests, record, "custom_id", "--requests", NotOfFormat)}

    def _with_names_of_format(self, record: Record) -> Record:
        """Return a record whose fields have the names of the format, and check the field that must be the same."""
        record = with_named_fields(record, self.args)
        if self.name == "messages" and (self.args.messages_field or "messages" not in record):
            fields = [self.args.messages_field] if self.args.messages_field else messages_fields(record)
            if len(fields) > 1:
                raise NotOfFormat(f"{', '.join(fields)} may all hold its messages: name one with --messages_field")
            for name in fields:
                record = {**record, "messages": parsed_json(_field_value(record, name, NotOfFormat))}
        if (same := self.format.same) is not None:
            value = record.get(same)
            if self.same not in (None, value):
                raise NotOfFormat(
                    f"its {same} is {value}, and an earlier record has {self.same}: both have the same completions. "
                    f"Choose one with --where {same}={self.same}"
                )
            self.same = value
        return record

    def _completions(self, record: Record) -> list[Row | LeftOut]:
        """Return the rows of a record, without a reward, and the reason for each completion without a row."""
        found = [
            row if isinstance(row, LeftOut) else row if row and holds_completion(row) else LeftOut.EMPTY
            for row in self.format.rows(record)
        ]
        if not self.chat:
            return found
        if self.args.chat is None:
            for row in found:
                if not isinstance(row, LeftOut):
                    check_not_rendered(row)
        return [row if isinstance(row, LeftOut) else as_chat(row) for row in found]

    def _rows(self, record: Record) -> list[Row | LeftOut]:
        found = self._completions(record)
        if not (rows := _rows_in(found)):
            return found
        # An empty completion has a place in a list of rewards.
        placed = [row for row in found if not isinstance(row, LeftOut) or row is LeftOut.EMPTY]
        if self.args.rollout_field:
            self._add_run(record, placed)
        else:
            self._add_rewards(record, placed)
            problem = self._problem(record, rows)
            for row in rows:
                row["problem_id"] = problem if self.args.problem_field else row.get("problem_id") or problem
        if "reward" in self.columns:
            _check_rewards(rows)
        for row in rows:
            if not row.get("prompt") and not row.get("prompt_ids"):
                raise Unusable("its prompt is empty")
            if self.args.completion == LAST_TURN:
                check_last_turn(row)
            row.update(self._for_all)
        return [
            row if isinstance(row, LeftOut) else LeftOut.CALLS if has_broken_call(row) else without_unknown_logps(row)
            for row in found
        ]

    def _cut(self, row: Row) -> Row:
        """Return a row with the turns that `completion` asks for."""
        return last_turn(row) if self.args.completion == LAST_TURN and turns_of(row) > 1 else row

    def _problem(self, record: Record, rows: Sequence[Row]) -> str:
        """Return the id of a record's problem, from `problem_field`, or from the first row: its id or its prompt."""
        if self.args.problem_field:
            return str(_field_value(record, self.args.problem_field, NotOfFormat))
        first = rows[0]
        return str(first.get("problem_id") or hash_prompts([first.get("prompt_ids") or first["prompt"]])[0])

    def _run_name(self, record: Record) -> str:
        return str(_field_value(record, self.args.rollout_field or "", NotOfFormat))

    def _add_run(self, record: Record, found: Sequence[Row | LeftOut]) -> None:
        """Add the id, the problem and the reward of its run to the row of a record."""
        if len(found) > 1:
            raise NotOfFormat(
                f"it has {len(found)} completions, and a record of a run must have one: remove --rollout_field"
            )
        name = self._run_name(record)
        run = self.runs[name]
        if "reward" in self.columns and run.reward is None:
            raise Unrewarded(f"no record of its run {name} has a reward")
        for row in found:
            if not isinstance(row, LeftOut):
                row.update({ROLLOUT: name, "problem_id": run.problem, "reward": run.reward})

    def _add_rewards(self, record: Record, rows: Sequence[Row | LeftOut]) -> None:
        rollouts = Rollouts.of([None if isinstance(row, LeftOut) else row.get(ROLLOUT) for row in rows])
        rewards = self._rewards(record, len(rollouts.counts_R))
        if rewards is not None:
            for n, reward in zip(rollouts.order_N, np.repeat(rewards, rollouts.counts_R), strict=True):
                if not isinstance(row := rows[n], LeftOut):
                    row["reward"] = float(reward)

    def _rewards(self, record: Record, rollouts: int) -> list[float] | None:
        """Return one reward per rollout of a record. Return None if the rows of the format have their own rewards."""
        if self.rewards is not None:
            values = {"reward": _value_by_id(self.rewards, record, self.args.id_field, "--rewards", Unrewarded)}
        elif self.args.reward_fields:
            values = {name: _field_value(record, name, Unrewarded) for name in self.args.reward_fields}
        elif self.format.rewards is None:
            return None
        elif len(values := self.format.rewards(record)) != 1:
            which = (
                f"{', '.join(values)} may all be the reward"
                if values
                else f"it has {', '.join(record)}, and none of these fields is a known reward"
            )
            raise NotOfFormat(f"{which}: name the fields to add up with --reward_fields")
        # A reward function can return None for a completion that another function rewards.
        numbers_by_name = {name: as_number(name, value, self.labels) for name, value in values.items()}
        known = {name: value for name, value in numbers_by_name.items() if value is not None}
        if not known:
            raise Unrewarded(f"its reward is null ({', '.join(values)})")
        by_rollout = {name: value if isinstance(value, list) else [value] for name, value in known.items()}
        for name, numbers in by_rollout.items():
            for number in numbers:
                _check_number(name, number)
            if len(numbers) != rollouts:
                raise NotOfFormat(
                    f"{name} holds {len(numbers)} reward(s) for {rollouts} completion(s): it must be a list with one "
                    "reward per completion"
                )
        return [float(sum(numbers)) for numbers in zip(*by_rollout.values(), strict=True)]


def _rows_in(found: Iterable[Row | LeftOut]) -> list[Row]:
    return [row for row in found if not isinstance(row, LeftOut)]


def _check_rewards(rows: Sequence[Row]) -> None:
    for row in rows:
        if row.get("reward") is None:
            raise Unrewarded("it has no reward")
        _check_number("its reward", row["reward"])


def _check_number(name: str, number: Any) -> None:
    if not isinstance(number, int | float) or not abs(number) <= LARGEST_REWARD:
        error = Unusable if isinstance(number, float) else NotOfFormat
        raise error(f"{name} is {number!r}, and a reward must be a finite number")


def _read_by_id(path: str | None, by: str, name: str) -> dict[Any, Any] | None:
    """Return the values of the field `name` in a file of records, by the value of `by`. Return None without a file."""
    if path is None:
        return None
    file, found = Path(path), {}
    for place, raw in read_records(file):
        record = parsed(raw)
        if not isinstance(record, dict) or not {by, name} <= set(record) or not isinstance(record[by], str | int):
            raise ValueError(f"{place} must be JSON with the fields {by} (text or a number) and {name}.")
        if record[by] in found:
            raise ValueError(f"{place} has the same {by} as an earlier line: {record[by]!r}. Remove one of the lines.")
        found[record[by]] = record[name]
    return found


def _value_by_id(values: dict[Any, Any], record: Record, by: str, option: str, error: type[NotOfFormat]) -> Any:
    """Return the value for the id of a record. Raise `error` if there is none."""
    identifier = _field_value(record, by, NotOfFormat)
    if not isinstance(identifier, str | int) or identifier not in values:
        raise error(f"the file of {option} has no line for the {by} {identifier!r}")
    return values[identifier]


def _field_value(record: Record, path: str, error: type[NotOfFormat]) -> Any:
    """Return the value of a field, or of an inner field such as `info.score`. Raise `error` if it does not exist."""
    value: Any = record
    for name in path.split("."):
        if not isinstance(value, dict) or name not in value:
            raise error(f"it has no field {path}; it has {', '.join(sorted(record))}")
        value = value[name]
    return value
