"""Run a trial: short training runs with several settings on some of the rows, tested on held-out problems.

The settings of one training run are an *arm*. A trial tries each arm at the given learning rate, and the recipes
also at a third of the learning rate and at three times the learning rate.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from topr_trl.data.tables import read_shard, shards_of
from topr_trl.evaluation.answers import read_samples
from topr_trl.evaluation.off_policy import off_policy_values
from topr_trl.evaluation.pass_and_maj_at_k import expected_pass
from topr_trl.pipeline import locks, manifest
from topr_trl.pipeline.launch import check_launch
from topr_trl.pipeline.model_loading import model_path
from topr_trl.pipeline.run_folders import ROLLOUTS
from topr_trl.pipeline.settings import TrialArguments, stage_args
from topr_trl.pipeline.stage_inputs import task_of_rows
from topr_trl.pipeline.stages.log_mu import ComputeLogMu
from topr_trl.pipeline.stages.sample import Sample, SampleArguments
from topr_trl.pipeline.stages.score import Score, ScoreArguments
from topr_trl.pipeline.stages.train import Train
from topr_trl.pipeline.steps import Step, run_steps
from topr_trl.pipeline.trainer_of_rows import TrainArguments
from topr_trl.pipeline.trial_split import GIVEN_LOG_MU, HELD_OUT, PROBLEMS, TRAINING_ROWS, Split, split
from topr_trl.trainers.checkpoints import check_files

_FACTORS = (1 / 3, 3.0)  # further factors of the learning rate, for the recipes


@dataclass(frozen=True)
class Arm:
    """Settings that a trial tests.

    Attributes:
        name (`str`): Name of the arm's folder.
        label (`str`): Name of the arm in tables.
        settings (`dict[str, Any]`): Settings of `topr train`, without the learning rate.
        factor (`float`, defaults to `1.0`): Factor that multiplies the given learning rate.
    """

    name: str
    label: str
    settings: dict[str, Any] = field(hash=False)
    factor: float = 1.0

    @property
    def recipe(self) -> str:
        """Return the name of the arm at the given learning rate."""
        return self.name.removesuffix("-low-rate").removesuffix("-high-rate")

    def rate(self, trial: TrialArguments) -> float:
        """Return the learning rate of the arm.

        The rate is rounded to three significant digits, so that reports can show a third of a learning rate exactly.
        """
        return float(f"{trial.learning_rate * self.factor:.3g}")

    def at(self, factor: float) -> "Arm":
        """Return this arm under a new name, with `factor` for the learning rate."""
        word = "low" if factor < 1 else "high"
        return Arm(f"{self.name}-{word}-rate", self.label, self.settings, factor)


ARMS = (
    Arm("paper", "c = 0 (the paper)", {"baseline": "0"}),
    Arm("share-20", "p~ 20%", {"effective_positive_share": 0.2}),
    Arm("share-50", "default (p~ 50%)", {}),
    Arm("share-80", "p~ 80%", {"effective_positive_share": 0.8}),
    Arm("group-mean", "group mean", {"baseline": "group_mean"}),
    Arm("positives-only", "positives only", {"preset": "positives_only"}),
    # These rules repeat positives, so these two arms train on as many rows as the other arms. There is one
    # exception: if most rows are positives, the arm `balanced` trains on fewer rows.
    Arm("positives-repeated", "positives, repeated", {"curation": "repeated_positives"}),
    Arm("balanced", "balanced", {"curation": "balanced"}),
)
# Arms that a trial tries at three rates. If several arms cannot be distinguished from the best one, a trial recommends
# the first of these. The default subtracts the mean reward, which gives p~ (effective positive share) = 50%.
RECIPES = ("positives-repeated", "balanced", "share-50")


@dataclass(frozen=True)
class Outcome:
    """Results of a trial. In each dictionary, the key None stands for the model before training.

    Attributes:
        sampled (`dict`): Accuracy or mean reward on each held-out problem, by arm.
        by_answers (`bool`): Whether `sampled` are accuracies of sampled completions. Otherwise, they are mean rewards,
            estimated from the logged rows.
        effective_samples (`dict`): Effective sample size by arm, see `OffPolicyValues`. Empty if `by_answers`.
        trained_rows (`int`): Number of rows that each training run read.
        greedy (`dict`): Whether the greedy answer to each held-out problem is correct, by arm. Empty without
            greedy answers.
        decode (`str`): The setting `decode`.
    """

    sampled: dict[Arm | None, NDArray[np.float64]]
    by_answers: bool
    effective_samples: dict[Arm | None, float]
    trained_rows: int
    greedy: dict[Arm | None, NDArray[np.bool_]]
    decode: str

    @property
    def by_greedy(self) -> bool:
        """Whether greedy answers rank the arms. Trials that are tested by rewards have no greedy answers."""
        return self.decode == "greedy" and bool(self.greedy)

    @property
    def values(self) -> dict[Arm | None, NDArray[np.float64]]:
        """Return the results that rank the arms, on each held-out problem, by arm."""
        return {arm: right_P.astype(float) for arm, right_P in self.greedy.items()} if self.by_greedy else self.sampled


def run_trial(trial: TrialArguments) -> Outcome:
    """Run a trial, or continue it where it stopped.

    Args:
        trial (`TrialArguments`): Settings of the trial.

    Returns:
        The results.

    Raises:
        ValueError: the rows cannot be used for a trial, or two settings contradict each other.
        FileNotFoundError: a file does not exist.
        ChildProcessError: a stage failed.
    """
    check_launch("trial", trial)
    source = trial.source
    manifest.check_whole(source)
    check_files(model_path(trial))
    out = trial.folder
    if out.resolve().is_relative_to(source.resolve()):
        raise ValueError(
            f"--output_dir={out} is inside {source}, and results cannot be in the folder of the rows. Use a "
            "different folder."
        )
    with locks.lock(out):
        rows = split(trial, source, out / "rows", {arm.name: arm.settings for arm in ARMS})
        if rows.diagnosis:
            print(rows.diagnosis, flush=True)
        parts = _StepsOfTrial(trial, out, rows)
        run_steps(parts.steps(), trial, out, parts.count)
        return parts.outcome()


class _Tested(NamedTuple):
    """Test results of one arm; see `Outcome` for the fields."""

    values_P: NDArray[np.float64]
    effective_samples: float
    greedy_P: NDArray[np.bool_] | None = None


class _StepsOfTrial:
    """Make the steps of a trial, and collect the results."""

    def __init__(self, trial: TrialArguments, out: Path, rows: Split) -> None:
        self.trial, self.out, self.rows = trial, out, rows
        self.arms = [
            arm.at(factor) if factor else arm
            for arm in ARMS
            for factor in (None, *(_FACTORS if arm.name in RECIPES else ()))
            if arm.name in rows.settings
        ]
        self.found: dict[Arm | None, _Tested] = {}
        test_steps = 2 if rows.by_answers else 1
        self.count = test_steps + len(self.arms) * (1 + test_steps)

    def steps(self) -> Iterator[Step]:
        yield from self._testing(None)
        for arm in self.arms:
            yield from self._arm(arm)

    def _arm(self, arm: Arm) -> Iterator[Step]:
        model = str(self._folder(arm) / "model")
        rows = str(self.out / "rows" / TRAINING_ROWS)
        changes = {"input": rows, "output_dir": model, "learning_rate": arm.rate(self.trial)}
        yield Step(Train(stage_args(TrainArguments, self.trial, **changes, **arm.settings)))
        yield from self._testing(arm)
        manifest.discard(self._folder(arm) / "model")  # The models of all arms could fill the disk.

    def _testing(self, arm: Arm | None) -> Iterator[Step]:
        rows = str(self._folder(arm) / ROLLOUTS)
        model = self.trial.model_name_or_path if arm is None else str(self._folder(arm) / "model")
        if self.rows.by_answers:
            problems = str(self.out / "rows" / PROBLEMS)
            sampling: dict[str, Any] = {
                "output_dir": rows, "model_name_or_path": model, "split": "test", "dataset_name": problems,
                "test_dataset_name": problems, "num_generations": self.trial.num_generations_eval,
                "task": task_of_rows(self.trial.source, self.trial.task),
            }  # fmt: skip
            yield Step(Sample(stage_args(SampleArguments, self.trial, **sampling)))
            yield Step(Score(ScoreArguments(input=rows, output_dir=rows)))
        else:
            held_out = self.out / "rows" / HELD_OUT
            rewards = np.unique(_read(held_out)["reward"])
            # The trainer skips rows whose reward equals the baseline, so choose a baseline that no reward equals.
            baseline = float(rewards[:2].mean()) if len(rewards) > 1 else float(rewards[0]) - 1
            changes = {
                "input": str(held_out), "output_dir": rows, "model_name_or_path": model,
                "preset": "opr", "baseline": str(baseline), "log_mu": "trainer",
            }  # fmt: skip
            yield Step(ComputeLogMu(stage_args(TrainArguments, self.trial, **changes)))
        self.found[arm] = self._values_of(arm)

    def _folder(self, arm: Arm | None) -> Path:
        return self.out / ("base" if arm is None else arm.name)

    def outcome(self) -> Outcome:
        """Return the results of all arms and of the model before training."""
        by_answers, found = self.rows.by_answers, self.found.items()
        values = {arm: tested.values_P for arm, tested in found}
        samples = {} if by_answers else {arm: tested.effective_samples for arm, tested in found}
        greedy = {arm: tested.greedy_P for arm, tested in found if tested.greedy_P is not None}
        return Outcome(values, by_answers, samples, self.rows.rows, greedy, self.trial.decode)

    def _values_of(self, arm: Arm | None) -> "_Tested":
        rows = self._folder(arm) / ROLLOUTS
        if self.rows.by_answers:
            samples = read_samples(rows)
            order = np.argsort(samples.problem_ids)
            greedy_P = None if samples.greedy_P is None else samples.greedy_P[order]
            return _Tested(expected_pass(samples, 1)[order], float(samples.num_samples), greedy_P)
        table, base = _read(rows), _read(self._folder(None) / ROLLOUTS)
        # Without log μ in the given rows, assume that the model before training wrote them.
        mu = base[GIVEN_LOG_MU].to_numpy() if GIVEN_LOG_MU in base.column_names else _sum_log_mu(base)
        values = off_policy_values(_sum_log_mu(table) - mu, table["reward"].to_numpy(), table["problem_id"].to_numpy())
        return _Tested(values.values_P, values.effective_samples)


def _read(folder: Path) -> pa.Table:
    columns = ("reward", "problem_id", "mu_logps", GIVEN_LOG_MU)
    return pa.concat_tables([read_shard(shard, columns) for shard in shards_of(folder)])


def _sum_log_mu(table: pa.Table) -> NDArray[np.float64]:
    return np.array([float(np.sum(logps)) for logps in table["mu_logps"].to_pylist()])
