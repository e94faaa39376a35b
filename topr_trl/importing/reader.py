"""Records of other systems' files as rows: what the format says of them, and settings and second files."""

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
from topr_trl.importing.records import (
    Evaluated,
    Format,
    NotOfFormat,
    Record,
    Row,
    Unrewarded,
    has_broken_call,
    parsed,
    read_records,
)
from topr_trl.settings.checks import check_choice, check_types, existing


@dataclass
class ReadingArguments:
    """Settings for reading records of other systems."""

    format: str = field(default="", metadata={"help": f"What the files are: {', '.join(FORMATS)}. Required."})
    reward_fields: list[str] | None = field(
        default=None,
        metadata={"help": "Fields whose sum is the reward (info.score is inside info), if not the format's."},
    )
    rewards: str | None = field(
        default=None, metadata={"help": "File of rewards: lines of JSON with id and reward, joined by --id_field."}
    )
    requests: str | None = field(
        default=None, metadata={"help": "Requests of a batch (OpenAI, vLLM), joined by their custom_id."}
    )
    id_field: str = field(default="id", metadata={"help": "Field that --rewards knows a record by."})
    skip_unrewarded: bool = field(
        default=False, metadata={"help": "Leave out records whose reward is missing; they are counted and named."}
    )
    problem_field: str | None = field(
        default=None,
        metadata={"help": "Field with the name of the problem, whose records are compared; else equal prompts are."},
    )
    rollout_field: str | None = field(
        default=None,
        metadata={"help": "Field with the name of the run, where each request of a run is a record of its own."},
    )
    temperature: float | None = field(
        default=None, metadata={"help": "Temperature at which all were sampled, whatever the files say."}
    )
    logprobs_mode: str | None = field(
        default=None,
        metadata={
            "help": "What the logged log-probabilities are of: raw_logprobs (the model) or processed_logprobs (after "
            "temperature and filters)."
        },
    )
    ignore_fields: list[str] | None = field(
        default=None, metadata={"help": "Fields that are not the format's and are left out."}
    )

    def __post_init__(self) -> None:
        check_types(self, ReadingArguments)
        if not self.format:
            raise ValueError(f"Say what the files are with --format: {', '.join(FORMATS)}.")
        check_choice(self, format=tuple(FORMATS))
        if self.ignore_fields and FORMATS[self.format].optional is None:
            raise ValueError(f"ignore_fields: records of format {self.format} may have any fields. Leave it out.")
        if self.temperature is not None and not 0 < self.temperature < float("inf"):
            raise ValueError(f"temperature must be above 0, not {self.temperature}.")
        if self.logprobs_mode is not None:
            check_choice(self, logprobs_mode=LOGPROBS_MODES)
        if self.rollout_field is not None and ROLLOUT in FORMATS[self.format].columns:
            raise ValueError(f"rollout_field: a record of format {self.format} is a whole run. Leave it out.")
        for name in ("rewards", "requests"):
            if getattr(self, name) is not None:
                existing(getattr(self, name), f"--{name}")
        if self.rewards is not None and self.reward_fields:
            raise ValueError("rewards and reward_fields both say what a record is worth. Keep one of them.")


class Part(NamedTuple):
    """Rows of some records with the places of these, and the places of records that gave no row, by reason."""

    rows: list[Row]
    places: list[str]
    left_out: dict[str, list[str]]


def short_place(place: str, source: Path) -> str:
    """A file, or a record in it, by its path inside of what is imported: what is kept may be published."""
    return place.removeprefix(f"{source if source.is_dir() else source.parent}{os.sep}")


@dataclass
class _Run:
    """Problem and reward that the records of a run share."""

    problem: str | None = None
    reward: float | None = None


def numbers_in(record: Any, inside: str = "") -> list[str]:
    """The fields of a record that hold a number, or true or false: `reward`, `info.score`."""
    if not isinstance(record, dict):
        return []
    return [
        name
        for field, value in record.items()
        for name in ([f"{inside}{field}"] if isinstance(value, int | float) else numbers_in(value, f"{inside}{field}."))
    ]


class RecordReader:
    """Reads records of a format, with what the settings and second files say of them."""

    def __init__(self, args: ReadingArguments, source: Path) -> None:
        self.args, self.source = args, source
        self.format: Format = FORMATS[args.format]
        self.rewards = _by_id(args.rewards, "id", "reward")
        self.requests = _by_id(args.requests, "custom_id", "body")
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
        """Look for the problem and the reward of each run in all records, before `read` gives them to its rows."""
        for place, raw in records:
            if (record := parsed(raw)) is None:
                continue
            with self._place_named(place), suppress(Evaluated):
                record = self._checked(record)
                name = self._run_name(record)
                run = self.runs.setdefault(name, _Run())
                with suppress(Unrewarded):
                    for reward in self._rewards(record, 1) or ():
                        if run.reward not in (None, reward):
                            raise NotOfFormat(
                                f"its reward is {reward:g}, where an earlier record of run {name} has {run.reward:g}: "
                                "a run has one reward, at one of its records or at all"
                            )
                        run.reward = reward
                if run.problem is None and (rows := self._made(record)):
                    run.problem = self._problem(record, rows)

    def read(self, records: Iterable[tuple[str, bytes | Record]]) -> Part:
        """Rows of the records of a shard."""
        part = Part([], [], {"broken": [], "calls": [], "empty": [], "evaluated": [], "unrewarded": []})

        def leave_out(why: str) -> None:
            part.left_out[why].append(short_place(place, self.source))

        for place, raw in records:
            if (record := parsed(raw)) is None:
                if isinstance(raw, bytes) and raw.strip() == b"[":
                    raise ValueError(f"{place}: it begins a JSON array: write one record per line.")
                leave_out("broken")
                continue
            try:
                with self._place_named(place):
                    rows = self._rows(self._checked(record))
            except Unrewarded as error:
                if not self.args.skip_unrewarded:
                    raise ValueError(f"{place}: {error}. --skip_unrewarded leaves such records out.") from None
                leave_out("unrewarded")
                continue
            except Evaluated:
                leave_out("evaluated")
                continue
            usable = [row for row in rows if not has_broken_call(row)]
            part.rows.extend(usable)
            part.places.extend([place] * len(usable))
            if len(usable) < len(rows):
                leave_out("calls")
            elif not rows:
                leave_out("empty")
        return part

    @contextmanager
    def _place_named(self, place: str) -> Iterator[None]:
        """Turn an error in a record into a ValueError that says where the record is."""
        try:
            yield
        except Unrewarded:
            raise
        except NotOfFormat as error:
            raise ValueError(f"{place}: {error}.") from None
        except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
            raise ValueError(
                f"{place}: it is malformed ({type(error).__name__}: {error}). The format is that of "
                f"{self.format.source}."
            ) from error

    def _checked(self, record: Any) -> Record:
        args = self.args
        named = [*(args.reward_fields or ()), args.problem_field or "", args.rollout_field or ""]
        self.format.check(record, [*(args.ignore_fields or ()), *(name.partition(".")[0] for name in named)])
        if self.requests is None:
            return record
        return {**record, "request": _found(self.requests, record, "custom_id", "--requests", NotOfFormat)}

    def _made(self, record: Record) -> list[Row | None]:
        found = [row if row and _holds_completion(row) else None for row in self.format.rows(record)]
        return found if any(found) else []

    def _rows(self, record: Record) -> list[Row]:
        found = self._made(record)
        rows = [row for row in found if row]
        if not rows:
            return []
        if self.args.rollout_field:
            self._add_run(record, found)
        else:
            self._add_rewards(record, found)
            problem = self._problem(record, rows)
            for row in rows:
                row["problem_id"] = problem if self.args.problem_field else row.get("problem_id") or problem
        if "reward" in self.columns:
            _check_rewards(rows)
        for row in rows:
            if row.get("prompt") is None and not row.get("prompt_ids"):
                raise NotOfFormat("its prompt is null")
            row.update(self._for_all)
        return rows

    def _problem(self, record: Record, rows: Sequence[Row | None]) -> str:
        """The name of a record's problem: by the settings, or else by the format or the prompt of the first row."""
        if self.args.problem_field:
            return str(_dig(record, self.args.problem_field, NotOfFormat))
        first = next(row for row in rows if row)
        return str(first.get("problem_id") or hash_prompts([first.get("prompt_ids") or first["prompt"]])[0])

    def _run_name(self, record: Record) -> str:
        return str(_dig(record, self.args.rollout_field or "", NotOfFormat))

    def _add_run(self, record: Record, found: Sequence[Row | None]) -> None:
        """To the row of a record: its run, with the problem and the reward of that."""
        if len(found) > 1:
            raise NotOfFormat(f"it has {len(found)} completions, which cannot all be a part of one run")
        name = self._run_name(record)
        run = self.runs[name]
        if "reward" in self.columns and run.reward is None:
            raise Unrewarded(f"no record of its run {name} has a reward")
        for row in found:
            if row:
                row.update({ROLLOUT: name, "problem_id": run.problem, "reward": run.reward})

    def _add_rewards(self, record: Record, rows: Sequence[Row | None]) -> None:
        rollouts = Rollouts.of([row and row.get(ROLLOUT) for row in rows])
        rewards = self._rewards(record, len(rollouts.counts_R))
        if rewards is not None:
            for n, reward in zip(rollouts.order_N, np.repeat(rewards, rollouts.counts_R), strict=True):
                if row := rows[n]:
                    row["reward"] = float(reward)

    def _rewards(self, record: Record, rollouts: int) -> list[float] | None:
        """Return the rewards of a record's rollouts, by the settings or the format; None if its rows have them."""
        if self.rewards is not None:
            values = {"reward": _found(self.rewards, record, self.args.id_field, "--rewards", Unrewarded)}
        elif self.args.reward_fields:
            values = {name: _dig(record, name, Unrewarded) for name in self.args.reward_fields}
        elif self.format.rewards is None:
            return None
        elif len(values := self.format.rewards(record)) != 1:
            which = f"{', '.join(values)} may all be" if values else "no number can be"
            raise NotOfFormat(f"{which} the reward: name the fields to add up with --reward_fields")
        # A reward function may have had nothing to say, if another had.
        known = {name: value for name, value in values.items() if value is not None}
        if not known:
            raise Unrewarded(f"its reward is null ({', '.join(values)})")
        by_rollout = {name: value if isinstance(value, list) else [value] for name, value in known.items()}
        for name, numbers in by_rollout.items():
            for number in numbers:
                _check_number(name, number)
            if len(numbers) != rollouts:
                raise NotOfFormat(
                    f"{name} holds {len(numbers)} reward(s) for {rollouts} completion(s): it must be a list with one "
                    "for each"
                )
        return [float(sum(numbers)) for numbers in zip(*by_rollout.values(), strict=True)]


def _holds_completion(row: Row) -> bool:
    """Whether there is a token or a text to learn from."""
    completion = row["completion"]
    if isinstance(completion, list) and all(isinstance(said, dict) for said in completion):
        completion = any(value for said in completion for name, value in said.items() if name != "role")
    return bool(row.get("completion_ids") or completion)


def _check_rewards(rows: Sequence[Row]) -> None:
    for row in rows:
        if row.get("reward") is None:
            raise Unrewarded("it has no reward")
        _check_number("its reward", row["reward"])


def _check_number(name: str, number: Any) -> None:
    if not isinstance(number, int | float) or not abs(number) <= LARGEST_REWARD:
        raise NotOfFormat(f"{name} is {number!r}, and a reward must be a finite number")


def _by_id(path: str | None, by: str, name: str) -> dict[Any, Any] | None:
    """Values of a second file by id; None if there is none."""
    if path is None:
        return None
    file, found = Path(path), {}
    for place, raw in read_records(file):
        record = parsed(raw)
        if not isinstance(record, dict) or not {by, name} <= set(record) or not isinstance(record[by], str | int):
            raise ValueError(f"{place} must be JSON with the fields {by} (text or a number) and {name}.")
        if record[by] in found:
            raise ValueError(f"{place} has the {by} {record[by]!r}, which an earlier line has, too.")
        found[record[by]] = record[name]
    return found


def _found(values: dict[Any, Any], record: Record, by: str, option: str, error: type[NotOfFormat]) -> Any:
    known_by = _dig(record, by, NotOfFormat)
    if not isinstance(known_by, str | int) or known_by not in values:
        raise error(f"{option} has nothing for the {by} {known_by!r}")
    return values[known_by]


def _dig(record: Record, path: str, error: type[NotOfFormat]) -> Any:
    """The value of a field, or of one inside it: `info.score`; an error if there is none."""
    value: Any = record
    for name in path.split("."):
        if not isinstance(value, dict) or name not in value:
            raise error(f"it has no field {path}; it has {', '.join(sorted(record))}")
        value = value[name]
    return value
