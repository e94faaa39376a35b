"""The rows of a trial: problems that are held out, rows of the others to train on, and what can be tried on them."""

from collections.abc import Mapping
from dataclasses import dataclass
from os.path import relpath
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray

from topr_trl.baseline import FloatArray, baseline_for_positive_share
from topr_trl.data.masks import explicit_masks
from topr_trl.data.rows import ROLLOUT, checked_column, problem_column, reward_column
from topr_trl.data.sampler_logps import training_temperatures
from topr_trl.data.tables import load_rows, save_rows, write_parquet
from topr_trl.data.trajectories import rollouts_of
from topr_trl.pipeline import manifest
from topr_trl.pipeline.arguments import TrialArguments
from topr_trl.pipeline.fingerprints import task_of_rows
from topr_trl.pipeline.shards import CHOSEN, MU_COLUMNS
from topr_trl.rewards import CORRECT, text_of
from topr_trl.tasks import TASKS

TRAINING_ROWS, HELD_OUT, PROBLEMS = "training", "held-out", "problems.parquet"  # in the folder of a split
GIVEN_LOG_MU = "given_log_mu"  # of held-out rows that brought log μ: its sum
_JUDGED = 200  # rows that are judged again, to see whether the judge is theirs
_ALIKE = 0.95  # share of them that must get the verdict that they have


@dataclass(frozen=True)
class Split:
    """The rows of a trial after they were split.

    Attributes:
        by_answers: whether the held-out problems are sampled and judged; otherwise their rows' rewards are weighted.
        rows: to train on.
        positive_share: of them, by their rewards as they are.
        settings: names of those that can be tried on these rows, and differ on them.
    """

    by_answers: bool
    rows: int
    positive_share: float
    settings: list[str]


def split(trial: TrialArguments, source: Path, folder: Path, settings: Mapping[str, Mapping[str, Any]]) -> Split:
    """Write the rows to train on and the held-out ones, of other problems; once.

    Args:
        settings: of `topr train`, by name.

    Raises:
        ValueError: the rows are of too few problems, their rewards are all the same, or they cannot be tested.
    """
    names = ("trial_rows", "held_out_problems", "test_by", "seed")
    wanted = {"input": manifest.fingerprint(source), **{name: getattr(trial, name) for name in names}}
    if trial.test_by != "rewards":
        wanted["task"] = task_of_rows(trial.source, trial.task)
    if not manifest.begin(folder, "split", wanted, {"input": relpath(source.resolve(), folder.resolve())}, made=False):
        try:
            rows, training, tested, made = _plan(trial, source, folder, settings)
        except Exception:
            manifest.forget(folder, "split")  # nothing is written yet, and other rows may follow
            raise
        save_rows(rows.select(training), folder / TRAINING_ROWS)
        if made.by_answers:
            write_parquet(tested, folder / PROBLEMS)
        else:
            save_rows(tested, folder / HELD_OUT)
        manifest.finish(
            folder, "split", made.rows, by_answers=made.by_answers, positive_share=made.positive_share,
            settings=made.settings,
        )  # fmt: skip
    known = manifest.read(folder)
    assert known is not None
    entry = known.stages["split"]
    return Split(entry["by_answers"], entry["rows"], entry["positive_share"], entry["settings"])


def _plan(
    trial: TrialArguments, source: Path, folder: Path, settings: Mapping[str, Mapping[str, Any]]
) -> tuple[Dataset, NDArray[np.int64], Dataset, Split]:
    """The rows, which of them to train on, the held-out problems or rows, and what is said of them."""
    rows = _as_they_came(load_rows(source, cache_dir=folder / manifest.WORK))
    training_temperatures(rows)
    rewards, of_row = reward_column(rows), rollouts_of(rows).of_first_row(problem_column(rows))
    problems = np.unique(of_row, return_inverse=True)[1]
    count = int(problems.max()) + 1
    if count < 6:
        raise ValueError(
            f"A trial tests on problems that it does not train on, and needs at least 6; {source} has {count}."
        )
    rng = np.random.default_rng(trial.seed)
    order = rng.permutation(count)
    held_out = min(trial.held_out_problems, count // 3)
    tested = np.flatnonzero(np.isin(problems, order[:held_out]))
    # Whole problems: the mean of a problem is one of the baselines.
    sizes = np.bincount(problems)[order[held_out:]].cumsum()
    enough = int(np.searchsorted(sizes, trial.trial_rows)) + 1
    training = np.flatnonzero(np.isin(problems, order[held_out:][:enough]))
    names = [name for name, given in settings.items() if _is_worth_trying(given, rewards[training], problems[training])]
    if len(names) < 2:
        raise ValueError(
            f"There is nothing to choose between: the rewards of the {len(training)} rows to train on are all "
            f"{rewards[training][0]:g}. A trial needs good and bad rows."
        )
    positive_share = float((rewards[training] >= rewards[training].mean()).mean())
    if "reward" not in rows.column_names:
        rows = rows.add_column("reward", rewards)
    by_answers = _by_answers(trial, rows.select(tested), rewards[tested])
    _, first, numbers = np.unique(problems[tested], return_index=True, return_inverse=True)
    if by_answers:
        kept = rows.select(tested[first]).select_columns(["prompt", "answer"])
        kept = kept.add_column("problem_id", np.arange(held_out))
    elif len(tested) < 2 * held_out:
        raise ValueError(
            f"The {held_out} held-out problems have {len(tested)} rows: to weight their rewards a trial needs several "
            "completions of each problem."
        )
    else:
        kept = _to_weight(rows.select(tested), numbers)
    return rows, training, kept, Split(by_answers, len(training), positive_share, names)


def _as_they_came(rows: Dataset) -> Dataset:
    """Without what stages have added to choose rows and to train on them."""
    gone = {CHOSEN}
    if MU_COLUMNS[1] in rows.column_names:  # computed by a stage, for the rows that were chosen
        gone |= set(MU_COLUMNS)
    return rows.remove_columns(sorted(gone & set(rows.column_names)))


def _is_worth_trying(settings: Mapping[str, Any], rewards: FloatArray, problems: NDArray[np.int64]) -> bool:
    """Whether a setting can be tried on rows, and is not the same as another on them."""
    if settings.get("baseline") == "group_mean":
        means = np.bincount(problems, rewards) / np.maximum(np.bincount(problems), 1)
        return bool((rewards != means[problems]).any())
    if (share := settings.get("effective_positive_share")) is not None:
        try:
            baseline_for_positive_share(rewards, share)
        except ValueError:
            return False
        return True
    if settings.get("baseline") == "0":  # without a negative it is positives only
        return bool((rewards < 0).any())
    return bool((rewards != rewards[0]).any())


def _by_answers(trial: TrialArguments, rows: Dataset, rewards: FloatArray) -> bool:
    """Whether held-out problems can be sampled and judged, by a judge that agrees with the rows' rewards."""
    if trial.test_by == "rewards":
        return False
    some = rows.select(range(min(_JUDGED, len(rows))))
    texts = (
        {"prompt", "completion", "answer"} <= set(rows.column_names)
        and all(isinstance(text, str) for name in ("prompt", "answer") for text in some[name])
        and not any(isinstance(token, int) for completion in some["completion"] for token in completion[:1])
    )
    task = task_of_rows(trial.source, trial.task)
    agreed = 0.0
    if texts:
        written = [text_of(completion, i) for i, completion in enumerate(some["completion"])]
        verdicts = [verdict for verdict, _ in TASKS[task].judge(written, some["answer"][:])]
        agreed = float(np.mean([(v == CORRECT) == (r > 0) for v, r in zip(verdicts, rewards, strict=False)]))
    if agreed >= _ALIKE:
        return True
    if trial.test_by == "answers":
        why = (
            f"the judge of the task {task} agrees with the rewards of {agreed:.0%} of the rows" if texts
            else f"the rows need the columns prompt and answer (text) and completion; found {rows.column_names}"
        )  # fmt: skip
        raise ValueError(
            f"test_by='answers': {why}. Name another --task, or weight the rewards of held-out rows: --test_by rewards."
        )
    return False


def _to_weight(rows: Dataset, numbers: NDArray[np.int64]) -> Dataset:
    """Held-out rows for the log-probabilities of each model."""
    if ROLLOUT in rows.column_names:
        raise ValueError(
            f"A trial cannot weight the rewards of rollouts that are split into several rows ({ROLLOUT}). If the "
            "answers can be judged, use --test_by answers; otherwise give it the rollouts that are one row."
        )
    rows = explicit_masks(rows)
    if MU_COLUMNS[0] in rows.column_names:
        known = checked_column(rows, MU_COLUMNS[0], lambda logps: logps is not None, "log μ", "Drop the column.")
        rows = rows.add_column(GIVEN_LOG_MU, [float(np.sum(logps)) for logps in known])
    # The trained models are no samplers of these rows.
    gone = [name for name in (*MU_COLUMNS, "sampler_logps", "problem_id") if name in rows.column_names]
    return rows.remove_columns(gone).add_column("problem_id", numbers)
