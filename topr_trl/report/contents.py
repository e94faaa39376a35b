"""Read a folder: rows, tests of models, logs of training, settings."""

import json
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from topr_trl.curation import counted
from topr_trl.data.rows import OF_FUNCTION, TURN_REWARDS
from topr_trl.data.tables import columns_of, read_shard
from topr_trl.data.usable_rows import in_all_shards, is_scored
from topr_trl.evaluation.answers import run_names
from topr_trl.pipeline import manifest
from topr_trl.pipeline import run_folders as layout
from topr_trl.recording.store import read_rollouts, recording_in

STATE = "trainer_state.json"
TRIAL = "trial.json"
RECORDING = "Recording"  # kind of a recording's contents
# Columns that the page shows or counts. Token ids and log-probabilities take most of the space, so the page does not
# read them, except `prompt_ids` in rows without `prompt`.
COLUMNS = (
    "prompt", "completion", "answer", "extracted", "verdict", "reward", "label", "reward_after_baseline",
    "times_chosen", "turn_rewards", "problem_id", "rollout_id", "temperature", "model", "finish_reason",
)  # fmt: skip
_UNTRAINED = ("base", "before")  # folders of the untrained model in a loop or a trial, and in the demo
_RECENT_ROWS = 2_000  # maximum number of logged rows to keep, newest first
_NO_ROWS = pa.table({"prompt": [], "completion": []})
Log = list[dict[str, Any]]


@dataclass(frozen=True)
class Rows:
    """Completions that belong together.

    Attributes:
        name (`str`): Name of the model, or heading of the rows.
        read (`Callable`): Function that returns the table with `COLUMNS` and the columns of reward functions.
        path (`Path`, *optional*): Folder or file of the rows.
    """

    name: str
    read: Callable[[], pa.Table]
    path: Path | None = None

    def is_finished(self) -> bool:
        """Return whether the rows of a folder are all there, with rewards or answers."""
        assert self.path is not None
        try:
            return in_all_shards(self.path, is_scored)
        except FileNotFoundError:
            return False


@dataclass
class Contents:
    """Rows, logs and settings that a page shows.

    Attributes:
        name (`str`): Name of the folder.
        kind (`str`): Description of the folder, such as `"Loop of 2 iterations"`.
        tests (`list[Rows]`): Completions of the same test problems by each model, in order of training.
        read_rows (`list[Rows]`): Completions that models were trained on, or that the user wants to look at.
        logged (`list[Rows]`): Rows that trainers logged with weights.
        histories (`dict[str, list]`): `log_history` of each training run, by name.
        settings (`dict[str, dict]`): Settings by name of the stage.
        trial (`dict`, *optional*): Results of a trial.
        pass_threshold (`float`, *optional*): Threshold that `topr evaluate` used for the tests.
        notes (`list[str]`): Sentences about parts that the page cannot show, with the reason or a remedy.
    """

    name: str
    kind: str
    tests: list[Rows] = field(default_factory=list)
    read_rows: list[Rows] = field(default_factory=list)
    logged: list[Rows] = field(default_factory=list)
    histories: dict[str, Log] = field(default_factory=dict)
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    trial: dict[str, Any] | None = None
    pass_threshold: float | None = None
    notes: list[str] = field(default_factory=list)


def read_contents(path: Path) -> Contents:
    """Find the rows, logs and settings in a folder or a file.

    Args:
        path (`Path`): Folder that a command, a trainer or the demo wrote, or a file or folder of rows.

    Raises:
        FileNotFoundError: there is no such path, or nothing in it can be shown.
        ValueError: a manifest or the results of a trial are damaged.
    """
    if not path.exists():
        raise FileNotFoundError(f"There is no {path} (--input).")
    name = path.resolve().name
    for reader in (_recording, _trial, _loop, _evaluation, _training, _rows):
        if found := reader(path, name):
            return found
    raise FileNotFoundError(
        f"{path} has nothing to show: no rows (*.parquet), no {STATE}, no results of a loop, a trial or an evaluation, "
        f"and no recording. A trainer writes {STATE} at its first checkpoint, after save_steps steps (default: 500). "
        "To look at a table or a log, first run topr import."
    )


def _recording(path: Path, name: str) -> Contents | None:
    database = recording_in(path)
    if database is None:
        return None
    found = Contents(name, RECORDING)
    found.read_rows = [Rows("Recorded answers", partial(_recorded, database, found.notes))]
    return found


def _recorded(path: Path, notes: list[str]) -> pa.Table:
    """Return the answers of a recording. Rollouts that cannot become rows are left out, and get a note."""
    from topr_trl.importing.format import GRADED, NotOfFormat  # This import also imports torch and TRL.
    from topr_trl.importing.formats import recording

    rows: list[dict[str, Any]] = []
    left_out: list[str] = []
    for rollout in read_rollouts(path):
        ratings = {f"{OF_FUNCTION}{name}": value for name, value in rollout["rewards"].items()}
        by_answer = any(_sum(call["rewards"].values()) is not None for call in rollout["calls"])
        is_rated = by_answer or _sum(ratings.values()) is not None
        try:
            found = recording.rows(rollout if is_rated else {**rollout, "rewards": {"none": 0.0}})
        except NotOfFormat as error:
            left_out.append(f"{rollout['rollout_id']}: {error}.")
            continue
        for row in found:
            if isinstance(row, dict):
                texts = {name: row[name] for name in ("prompt", "completion")}
                # A recording can have text and messages, and a column has one type, so messages become JSON text.
                texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in texts.items()}
                turns = [_sum(turn["rewards"].values()) for turn in row.get(GRADED, ())]
                rewards = {"reward": _sum(ratings.values()), "turn_rewards": turns}
                rows.append({**texts, "rollout_id": str(rollout["rollout_id"]), **ratings, **rewards})
    if left_out:
        notes.append(f"{counted(len(left_out), 'rollout')} cannot be shown as rows. The first is {left_out[0]}")
    return _by_turn(pa.Table.from_pylist(rows)) if rows else _NO_ROWS


def _sum(rewards: Iterable[float | None]) -> float | None:
    known = [value for value in rewards if value is not None]
    return sum(known) if known else None


def _trial(path: Path, name: str) -> Contents | None:
    if not (path / TRIAL).is_file():
        return None
    trial = json.loads((path / TRIAL).read_text())
    found = Contents(name, f"Trial of {len(trial['arms'])} settings", trial=trial, settings=_settings(path))
    found.read_rows = _rows_in(path / "rows" / "training", "Rows of the trial")
    if trial["by_answers"]:
        arms = sorted(trial["arms"], key=lambda arm: not arm["recommended"])  # otherwise the best comes first
        best = [arm["folder"] for arm in arms if arm["folder"] != "base"][:1]
        for folder in ("base", *best):
            found.tests += _rows_in(path / folder / layout.ROLLOUTS, _model_name(folder))
    return found


def _loop(path: Path, name: str) -> Contents | None:
    """Read a loop, or a folder such as the demo's, which has a folder with a test for each model."""
    models = [one for one in path.glob("*") if layout.test_folder(one).is_dir()]
    models += [one for one in layout.iteration_folders(path) if one not in models]
    if not models:
        return None
    models.sort(key=lambda one: (one.name not in _UNTRAINED, _number_in(one.name), one.name))
    iterations = len(layout.iteration_folders(path))
    kind = f"Loop of {counted(iterations, 'iteration')}" if iterations else counted(len(models), "model")
    found = Contents(name, kind, settings=_settings(path))
    for folder in models:
        found.tests += _test_rows(folder)
        evaluated = _settings(layout.results_folder(folder)).get("evaluate", {})
        found.pass_threshold = evaluated.get("pass_threshold", found.pass_threshold)
        found.read_rows += _rows_in(folder / layout.ROLLOUTS, f"Rows of {folder.name}")
        for training in (folder / layout.MODEL, folder):
            _add_training(found, training, folder.name)
    return found


def _number_in(name: str) -> int:
    """Return the number at the end of a name, or 0, so that iteration-10 comes after iteration-9."""
    match = re.search(r"\d+$", name)
    return int(match.group()) if match else 0


def _test_rows(folder: Path) -> list[Rows]:
    test = layout.test_folder(folder)
    rows = test / layout.ROLLOUTS
    return _rows_in(rows if rows.is_dir() else test, _model_name(folder.name))


def _model_name(folder: str) -> str:
    return "before training" if folder in _UNTRAINED else folder


def _evaluation(path: Path, name: str) -> Contents | None:
    if not (path / "evaluation.json").is_file():
        return None
    found = Contents(name, "Evaluation", settings=_settings(path))
    found.pass_threshold = found.settings.get("evaluate", {}).get("pass_threshold")
    sources = _sources(path, "evaluate")
    places = [sources[role] for role in ("input", "compare") if role in sources]
    names = run_names(*places) if len(places) == 2 else ["model"]
    for label, source in zip(names, places or [path / "scored"], strict=True):
        found.tests += _rows_there(found, source, label)
    return found


def _training(path: Path, name: str) -> Contents | None:
    if not any(_newest_files(path, STATE, f"checkpoint-*/{STATE}", "completions/*.parquet")):
        return None
    found = Contents(name, "Training run", settings=_settings(path))
    _add_training(found, path, name)
    sources = _sources(path, "train")
    if "input" in sources:
        found.read_rows += _rows_there(found, sources["input"], "Rows that it learned from")
    found.read_rows += _rows_in(path / layout.ROLLOUTS, "Rows that it learned from")
    if not found.logged:
        found.notes.append(
            "To see rows with their weights and log-ratios, train with log_completions=True (--log_completions). With "
            "ratio_level='segment' (--ratio_level segment), you also see those of each token."
        )
    return found


def _sources(folder: Path, stage: str) -> dict[str, Path]:
    """Return the paths that a stage read, by name, if the folder has a manifest."""
    record = manifest.read(folder)
    named = record.stages.get(stage, {}).get("sources", {}) if record else {}
    return {name: (folder / source).resolve() for name, source in named.items()}


def _rows(path: Path, name: str) -> Contents | None:
    rows = _rows_in(path, name)
    return Contents(name, "Rows", read_rows=rows, settings=_settings(path)) if rows else None


def _add_training(found: Contents, folder: Path, name: str) -> None:
    """Add the log, the logged rows and the settings of a training run."""
    if history := _read_history(folder):
        found.histories[name] = history
    if any(_newest_files(folder, "completions/completions_*.parquet")):
        found.logged.append(Rows(f"Logged rows of {name}", partial(_read_logged, folder)))
    found.settings |= {f"{name}: {stage}": values for stage, values in _settings(folder).items()}


def _rows_in(path: Path, name: str) -> list[Rows]:
    """Return the rows of a file, or of a folder of parquet files, or [] if there are no such files."""
    are_rows = path.is_file() and path.suffix in (".parquet", ".json", ".jsonl")
    return [Rows(name, partial(_read_table, path), path)] if are_rows or any(path.glob("*.parquet")) else []


def _rows_there(found: Contents, path: Path, name: str) -> list[Rows]:
    """Return the rows that a stage read. If the rows were removed, return [] and add a note."""
    rows = _rows_in(path, name)
    if not rows:
        found.notes.append(f"{path} holds no rows any more, so the page does not show them.")
    return rows


def _read_table(path: Path) -> pa.Table:
    tables = []
    # A running stage has written only some of the shards.
    for shard in sorted(path.glob("*.parquet")) if path.is_dir() else [path]:
        known = columns_of(shard)
        names = [name for name in known if name in COLUMNS or name.startswith(OF_FUNCTION)]
        if "prompt" not in known and "prompt_ids" in known:
            names.append("prompt_ids")
        tables.append(read_shard(shard, names).select(names))
    try:
        return _by_turn(pa.concat_tables(tables, promote_options="permissive"))
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise ValueError(f"The files of {path} have columns of different types. Write them again: {error}") from error


def _by_turn(table: pa.Table) -> pa.Table:
    """Return a numbered row for each turn that has its own reward. The completion of the row ends with this turn.

    If the rewards do not match the turns, or the completion is not a list of messages, keep one row with the mean
    reward. A row without rewards of turns keeps its reward.
    """
    if TURN_REWARDS not in table.column_names:
        return table
    if table[TURN_REWARDS].null_count == table.num_rows:  # Some importers add the column even if no turn is rated.
        return table.drop_columns(TURN_REWARDS)
    of_turns = numbers_in(table, TURN_REWARDS, pa.list_(pa.float64())).to_pylist()
    found: list[dict[str, Any]] = []
    for row, rewards in zip(table.drop_columns(TURN_REWARDS).to_pylist(), of_turns, strict=True):
        said = messages_of(row.get("completion")) or []
        own = [n for n, turn in enumerate(said) if turn["role"] == "assistant" and turn.get("weight") != 0]
        row |= {name: json.dumps(row[name]) for name in ("prompt", "completion") if isinstance(row.get(name), list)}
        known = [reward for reward in rewards or () if reward is not None]
        if known and len(own) == len(rewards):
            found += [
                {**row, "rollout_id": None, "turn": number, "completion": json.dumps(said[: n + 1]), "reward": reward}
                for number, (n, reward) in enumerate(zip(own, rewards, strict=True), 1) if reward is not None
            ]  # fmt: skip
        else:
            mean = sum(known) / len(known) if known else row.get("reward")
            found.append({**row, "turn": None, "reward": mean})
    return pa.Table.from_pylist(found)


def numbers_in(table: pa.Table, name: str, type_: pa.DataType) -> pa.ChunkedArray:
    """Return a column of numbers as the given type, or raise a ValueError that names the column."""
    try:
        return table[name].cast(type_)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        kind = "lists of numbers" if pa.types.is_list(type_) else "numbers"
        raise ValueError(
            f"Column `{name}` must hold {kind}: {error}. Import the file with topr import, which reads words, too."
        ) from error


def messages_of(value: Any) -> list[dict[str, Any]] | None:
    """Return messages, which importers write as JSON text. Return None for other text."""
    if isinstance(value, str) and value.startswith("[{"):
        with suppress(ValueError, RecursionError):  # A model can write text that starts like messages.
            value = json.loads(value)
    turns = value if isinstance(value, list) else []
    return turns if turns and all(isinstance(one, dict) and isinstance(one.get("role"), str) for one in turns) else None


def _settings(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the inputs of each stage in the manifest of a folder, without null values, or {} without a manifest."""
    record = manifest.read(folder)
    return {
        stage: {name: value for name, value in entry["inputs"].items() if value is not None}
        for stage, entry in (record.stages.items() if record else ())
    }


def _newest_files(training: Path, *patterns: str) -> list[Path]:
    """Return the files of a training run that match a pattern, newest first, including files of a running stage."""
    places = (training, training / manifest.WORK)
    names = {path: path.relative_to(place) for place in places for pattern in patterns for path in place.glob(pattern)}
    # Files with the same time are ordered by the step in their names. The file written at the end has no step.
    step = {path: float(re.sub(r"\D", "", str(name)) or "inf") for path, name in names.items()}
    times = dict[Path, int]()
    for path in names:
        with suppress(FileNotFoundError):  # A running trainer removes old checkpoints.
            times[path] = path.stat().st_mtime_ns
    return sorted(times, key=lambda path: (times[path], step[path]), reverse=True)


def _read_history(training: Path) -> Log:
    """Return the newest `log_history`, or [] if there is none. Trainers write it at each checkpoint and at the end."""
    for path in _newest_files(training, STATE, f"checkpoint-*/{STATE}"):
        with suppress(OSError, ValueError, KeyError, TypeError):  # A trainer may be writing the file.
            history = [entry for entry in json.loads(path.read_text())["log_history"] if _is_log_entry(entry)]
            if history:
                return history
    return []


def _is_log_entry(entry: Any) -> bool:
    step = entry.get("step") if isinstance(entry, dict) else None
    return type(step) is int and 0 <= step < 2**53  # plots use float64, which is exact only below 2**53


def _read_logged(training: Path) -> pa.Table:
    """Return up to 2,000 of the latest logged rows, without repeats of a prompt with the same completion."""
    tables: list[pa.Table] = []
    for path in _newest_files(training, "completions/completions_*.parquet"):
        with suppress(OSError, pa.ArrowInvalid):  # A trainer may be writing the file.
            tables.append(pq.read_table(path))
        if sum(table.num_rows for table in tables) >= _RECENT_ROWS:
            break
    if not tables:
        return _NO_ROWS
    table = pa.concat_tables(tables, promote_options="permissive")
    texts = zip(table["prompt"].to_pylist(), table["completion"].to_pylist(), strict=True)
    # A prompt or completion can be a list of messages, which cannot be a dictionary key, so the key is the `repr`.
    latest = {repr(text): place for place, text in reversed(list(enumerate(texts)))}
    return table.take(sorted(latest.values())).slice(0, _RECENT_ROWS)
