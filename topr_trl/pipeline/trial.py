"""A trial: short trainings with a few settings on a part of the rows, tested on problems that none of them has seen.

First each share of positives at the learning rate that is given, then the two best at a third and at three times of it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from os.path import relpath
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset
from numpy.typing import NDArray

from topr_trl.checkpoints import check_files
from topr_trl.data.rows import problem_column, reward_column
from topr_trl.data.tables import load_rows, read_shard, save_rows, shards_of, write_parquet
from topr_trl.evaluation.answers import read_samples
from topr_trl.evaluation.exact import expected_pass
from topr_trl.evaluation.off_policy import off_policy_values
from topr_trl.pipeline import inputs, manifest
from topr_trl.pipeline.arguments import (
    SampleArguments,
    ScoreArguments,
    TrainArguments,
    TrialArguments,
    existing,
    model_path,
    take,
)
from topr_trl.pipeline.shards import CHOSEN
from topr_trl.pipeline.steps import Step, check_launch, run_steps
from topr_trl.pipeline.training import MU_COLUMNS

GIVEN_LOG_MU = "given_log_mu"  # of held-out rows that brought log μ: its sum
_FACTORS = (1 / 3, 3.0)  # of the learning rate, in the second round
_IN_SECOND_ROUND = 2


@dataclass(frozen=True)
class Arm:
    """A setting that is tried.

    Attributes:
        name: of its folder.
        label: in tables.
        settings: of `topr train`, besides the learning rate.
        factor: of the learning rate that was given.
    """

    name: str
    label: str
    settings: dict[str, Any] = field(hash=False)
    factor: float = 1.0

    def rate(self, trial: TrialArguments) -> float:
        """The learning rate, to three digits."""
        return float(f"{trial.learning_rate * self.factor:.3g}")

    def at(self, factor: float) -> "Arm":
        """The same at another learning rate."""
        word = "low" if factor < 1 else "high"
        return Arm(f"{self.name}-{word}-rate", self.label, self.settings, factor)


ARMS = (
    Arm("paper", "c = 0 (the paper)", {}),
    *(
        Arm(f"share-{percent}", f"p~ {percent} %", {"effective_positive_share": percent / 100})
        for percent in (20, 50, 80)
    ),
    Arm("group-mean", "group mean", {"baseline": "group_mean"}),
    Arm("positives-only", "positives only", {"preset": "positives_only"}),
)


@dataclass(frozen=True)
class Outcome:
    """What a trial has found.

    Attributes:
        values: by arm, and before any training under None, the mean reward or accuracy on each held-out problem.
        by_answers: whether values are shares of right answers that were sampled; otherwise mean rewards, estimated.
        effective_samples: by arm; see `OffPolicyValues`. Empty where completions were sampled.
        trained_rows: rows that each training has read.
    """

    values: dict[Arm | None, NDArray[np.float64]]
    by_answers: bool
    effective_samples: dict[Arm | None, float]
    trained_rows: int


def run_trial(trial: TrialArguments) -> Outcome:
    """Run a trial to its end, or from where it stopped.

    Raises:
        ValueError, FileNotFoundError: settings or rows do not fit; before anything is trained, where it can be known.
        ChildProcessError: a stage failed; its messages say why.
    """
    check_launch("trial", trial)
    if trial.input is None:
        raise ValueError("A trial needs rows: name their folder or file with --input.")
    source = existing(trial.input, "--input")
    manifest.check_whole(source)
    check_files(model_path(trial))
    out = trial.folder
    with manifest.lock(out):
        by_answers, trained_rows = split(trial, source, out / "rows")
        parts = _Parts(trial, out, by_answers)
        run_steps(parts.steps(), trial, out, parts.count)
        return Outcome(*parts.values(), trained_rows)


# Rows to train on, and problems that are held out.


def split(trial: TrialArguments, source: Path, folder: Path) -> tuple[bool, int]:
    """Write the rows to train on and the held-out ones, of other problems.

    Returns:
        Whether the held-out problems are sampled and judged, and the number of rows to train on.
    """
    names = ("trial_rows", "held_out_problems", "test_by", "seed")
    wanted = {"input": manifest.fingerprint(source), **{name: getattr(trial, name) for name in names}}
    if manifest.begin(folder, "split", wanted, {"input": relpath(source.resolve(), folder.resolve())}):
        known = manifest.read(folder)
        assert known is not None
        return known.stages["split"]["by_answers"], known.stages["split"]["rows"]
    try:
        rows = load_rows(source, cache_dir=folder / manifest.WORK)
        rewards, problems = reward_column(rows), np.unique(problem_column(rows), return_inverse=True)[1]
        count = int(problems.max()) + 1
        held_out = min(trial.held_out_problems, count // 3)
        if held_out < 2:
            raise ValueError(
                f"A trial tests on problems that it does not train on, and needs at least 6; the rows of {source} are "
                f"of {count}."
            )
        by_answers = _by_answers(trial, rows)
    except ValueError:
        manifest.forget(folder, "split")
        raise
    rng = np.random.default_rng(trial.seed)
    is_held_out = np.isin(problems, rng.permutation(count)[:held_out])
    training = np.flatnonzero(~is_held_out)
    training = np.sort(rng.permutation(training)[: trial.trial_rows])
    rows = rows.remove_columns([name for name in (CHOSEN, "label") if name in rows.column_names])
    if "reward" not in rows.column_names:
        rows = rows.add_column("reward", rewards)
    save_rows(rows.select(training), folder / "training")
    places = np.flatnonzero(is_held_out)
    _, first = np.unique(problems[places], return_index=True)
    tested = rows.select(places[np.sort(first)] if by_answers else places)
    if by_answers:
        ids = np.arange(len(tested))  # that of the rows may be missing
        kept = tested.select_columns(["prompt", "answer"]).add_column("problem_id", ids)
        write_parquet(kept, folder / "problems.parquet")
    else:
        if MU_COLUMNS[0] in tested.column_names:
            tested = tested.add_column(GIVEN_LOG_MU, [float(np.sum(x)) for x in tested[MU_COLUMNS[0]]])
        # The trained models are no samplers of these rows.
        gone = [name for name in (*MU_COLUMNS, "sampler_logps", "problem_id") if name in tested.column_names]
        numbers = np.unique(problems[places], return_inverse=True)[1]
        save_rows(tested.remove_columns(gone).add_column("problem_id", numbers), folder / "held-out")
    manifest.finish(folder, "split", len(training), by_answers=by_answers)
    return by_answers, len(training)


def _by_answers(trial: TrialArguments, rows: Dataset) -> bool:
    """Whether held-out problems can be sampled and judged: texts as prompts, and right answers."""
    texts = "prompt" in rows.column_names and isinstance(rows[0]["prompt"], str)
    possible = texts and "answer" in rows.column_names and "extracted" in rows.column_names
    if trial.test_by == "answers" and not possible:
        raise ValueError(
            "test_by='answers' needs the columns prompt (text), answer and extracted, as topr score writes them; "
            f"found {rows.column_names}. With test_by='rewards' the rewards of held-out rows are weighed instead."
        )
    return possible and trial.test_by != "rewards"


# Stages.


class _Parts:
    """The steps of a trial, in order; later ones depend on what earlier ones have found."""

    def __init__(self, trial: TrialArguments, out: Path, by_answers: bool) -> None:
        self.trial, self.out, self.by_answers = trial, out, by_answers
        self.tried: list[Arm] = []
        of_testing = 2 if by_answers else 1
        arms = len(ARMS) + _IN_SECOND_ROUND * len(_FACTORS)
        self.count = of_testing + arms * (1 + of_testing)

    def steps(self) -> Iterator[Step]:
        yield from self._testing(None)
        for arm in ARMS:
            yield from self._arm(arm)
        best = sorted(ARMS, key=lambda arm: -float(self._values_of(arm)[0].mean()))[:_IN_SECOND_ROUND]
        for arm in best:
            for factor in _FACTORS:
                yield from self._arm(arm.at(factor))

    def _arm(self, arm: Arm) -> Iterator[Step]:
        model = str(self._folder(arm) / "model")
        rows = str(self.out / "rows" / "training")
        changes = {"input": rows, "output_dir": model, "learning_rate": arm.rate(self.trial)}
        yield Step("train", take(TrainArguments, self.trial, **changes, **arm.settings))
        yield from self._testing(arm)
        self.tried.append(arm)

    def _testing(self, arm: Arm | None) -> Iterator[Step]:
        rows = str(self._folder(arm) / "rollouts")
        model = self.trial.model_name_or_path if arm is None else str(self._folder(arm) / "model")
        if self.by_answers:
            problems = str(self.out / "rows" / "problems.parquet")
            sampling: dict[str, Any] = {
                "output_dir": rows, "model_name_or_path": model, "split": "test", "dataset_name": problems,
                "test_dataset_name": problems, "num_generations": self.trial.num_generations_eval,
                "task": self._task(),
            }  # fmt: skip
            yield Step("sample", take(SampleArguments, self.trial, **sampling))
            yield Step("score", ScoreArguments(input=rows, output_dir=rows))
        else:
            held_out = self.out / "rows" / "held-out"
            rewards = np.unique(_read(held_out)["reward"])
            # Every row needs its log-probability: none is to be 0 after the baseline.
            between = float(rewards[:2].mean()) if len(rewards) > 1 else float(rewards[0]) - 1
            every = {"preset": "opr", "baseline": str(between), "log_mu": "trainer"}
            changes = {"input": str(held_out), "output_dir": rows, "model_name_or_path": model, **every}
            yield Step("log-mu", take(TrainArguments, self.trial, **changes))

    def _task(self) -> str:
        return inputs.task_of_rows(ScoreArguments(input=self.trial.input, task=self.trial.task))

    def _folder(self, arm: Arm | None) -> Path:
        return self.out / ("base" if arm is None else arm.name)

    def values(self) -> tuple[dict[Arm | None, NDArray[np.float64]], bool, dict[Arm | None, float]]:
        """What `Outcome` holds, of all arms that were tried and of the model before."""
        found = {arm: self._values_of(arm) for arm in (None, *self.tried)}
        samples = {} if self.by_answers else {arm: samples for arm, (_, samples) in found.items()}
        return {arm: values for arm, (values, _) in found.items()}, self.by_answers, samples

    def _values_of(self, arm: Arm | None) -> tuple[NDArray[np.float64], float]:
        rows = self._folder(arm) / "rollouts"
        if self.by_answers:
            samples = read_samples(rows)
            return expected_pass(samples, 1)[np.argsort(samples.problem_ids)], float(samples.num_samples)
        table = _read(rows)
        base = table if arm is None else _read(self._folder(None) / "rollouts")
        mu = base[GIVEN_LOG_MU].to_numpy() if GIVEN_LOG_MU in base.column_names else _sums(base)
        own = mu if arm is None else _sums(table)
        values = off_policy_values(own - mu, table["reward"].to_numpy(), table["problem_id"].to_numpy())
        return values.values_P, values.effective_samples


def _read(folder: Path) -> pa.Table:
    columns = ("reward", "problem_id", "mu_logps", GIVEN_LOG_MU)
    return pa.concat_tables([read_shard(shard, columns) for shard in shards_of(folder)])


def _sums(table: pa.Table) -> NDArray[np.float64]:
    return np.array([float(np.sum(logps)) for logps in table["mu_logps"].to_pylist()])
