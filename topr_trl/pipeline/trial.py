"""A trial: short trainings with a few settings on a part of the rows, tested on problems that none of them has seen.

First each share of positives at the learning rate that is given, then the two best at a third and at three times of it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from topr_trl.data.tables import read_shard, shards_of
from topr_trl.evaluation.answers import read_samples
from topr_trl.evaluation.off_policy import off_policy_values
from topr_trl.evaluation.pass_at_k import expected_pass
from topr_trl.pipeline import locks, manifest
from topr_trl.pipeline.arguments import TrialArguments, stage_args
from topr_trl.pipeline.fingerprints import task_of_rows
from topr_trl.pipeline.launch import check_launch
from topr_trl.pipeline.layout import ROLLOUTS
from topr_trl.pipeline.model_loading import model_path
from topr_trl.pipeline.stages.log_mu import ComputeLogMu
from topr_trl.pipeline.stages.sample import Sample, SampleArguments
from topr_trl.pipeline.stages.score import Score, ScoreArguments
from topr_trl.pipeline.stages.train import Train
from topr_trl.pipeline.steps import Step, run_steps
from topr_trl.pipeline.training import TrainArguments
from topr_trl.pipeline.trial_split import GIVEN_LOG_MU, HELD_OUT, PROBLEMS, TRAINING_ROWS, Split, split
from topr_trl.trainers.checkpoints import check_files

_FACTORS = (1 / 3, 3.0)  # of the learning rate, in the second round
_ARMS_IN_SECOND_ROUND = 2


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

    def with_equal_steps(self, epochs: float, positive_share: float) -> "Arm":
        """The same with as many steps as `epochs` over all rows have, if it reads the positives alone."""
        if self.settings.get("curation") != "positives":
            return self
        return replace(self, settings={**self.settings, "num_train_epochs": round(epochs / positive_share, 2)})


ARMS = (
    Arm("paper", "c = 0 (the paper)", {"baseline": "0"}),
    *(
        Arm(f"share-{percent}", f"p~ {percent}%", {"effective_positive_share": percent / 100})
        for percent in (20, 50, 80)
    ),
    Arm("group-mean", "group mean", {"baseline": "group_mean"}),
    Arm("positives-only", "positives only", {"preset": "positives_only"}),
    Arm("positives-repeated", "positives, repeated", {"curation": "positives"}),  # see `with_equal_steps`
)
DEFAULT = "share-50"  # the name of the arm that trains as the default baseline, the mean, does


@dataclass(frozen=True)
class Outcome:
    """The results of a trial.

    Attributes:
        values: by arm, and before any training under None, the mean reward or accuracy on each held-out problem.
        by_answers: whether values are shares of right answers that were sampled; otherwise mean rewards, estimated.
        effective_samples: by arm; see `OffPolicyValues`. Empty where completions were sampled.
        trained_rows: rows that each training has read.
        greedy: by arm, whether the greedy answer to each held-out problem is right. Empty without greedy answers.
    """

    values: dict[Arm | None, NDArray[np.float64]]
    by_answers: bool
    effective_samples: dict[Arm | None, float]
    trained_rows: int
    greedy: dict[Arm | None, NDArray[np.bool_]]


def run_trial(trial: TrialArguments) -> Outcome:
    """Run a trial to its end, or from where it stopped.

    Raises:
        ValueError, FileNotFoundError: settings or rows do not fit; before anything is trained, where it can be known.
        ChildProcessError: a stage failed; its messages say why.
    """
    check_launch("trial", trial)
    source = trial.source
    manifest.check_whole(source)
    check_files(model_path(trial))
    out = trial.folder
    if out.resolve().is_relative_to(source.resolve()):
        raise ValueError(f"The results cannot be in the folder of the rows: name another --output_dir than {out}.")
    with locks.lock(out):
        rows = split(trial, source, out / "rows", {arm.name: arm.settings for arm in ARMS})
        parts = _StepsOfTrial(trial, out, rows)
        run_steps(parts.steps(), trial, out, parts.count)
        return parts.outcome()


# Stages.


class _Tested(NamedTuple):
    """Results of one arm: values by problem, effective samples, and greedy answers by problem, if there are any."""

    values_P: NDArray[np.float64]
    effective_samples: float
    greedy_P: NDArray[np.bool_] | None = None


class _StepsOfTrial:
    """The steps of a trial, in order; later ones depend on what earlier ones have found."""

    def __init__(self, trial: TrialArguments, out: Path, rows: Split) -> None:
        self.trial, self.out, self.rows = trial, out, rows
        epochs = trial.num_train_epochs
        self.first = [arm.with_equal_steps(epochs, rows.positive_share) for arm in ARMS if arm.name in rows.settings]
        self.found: dict[Arm | None, _Tested] = {}
        of_testing = 2 if rows.by_answers else 1
        arms = len(self.first) + _ARMS_IN_SECOND_ROUND * len(_FACTORS)
        self.count = of_testing + arms * (1 + of_testing)

    def steps(self) -> Iterator[Step]:
        yield from self._testing(None)
        for arm in self.first:
            yield from self._arm(arm)
        best = sorted(self.first, key=lambda arm: -float(self.found[arm].values_P.mean()))[:_ARMS_IN_SECOND_ROUND]
        for arm in best:
            for factor in _FACTORS:
                yield from self._arm(arm.at(factor))

    def _arm(self, arm: Arm) -> Iterator[Step]:
        model = str(self._folder(arm) / "model")
        rows = str(self.out / "rows" / TRAINING_ROWS)
        changes = {"input": rows, "output_dir": model, "learning_rate": arm.rate(self.trial)}
        yield Step(Train(stage_args(TrainArguments, self.trial, **changes, **arm.settings)))
        yield from self._testing(arm)
        manifest.discard(self._folder(arm) / "model")  # eleven of them would fill a disk

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
            # Every row needs its log-probability: none is to be 0 after the baseline.
            between = float(rewards[:2].mean()) if len(rewards) > 1 else float(rewards[0]) - 1
            every = {"preset": "opr", "baseline": str(between), "log_mu": "trainer"}
            changes = {"input": str(held_out), "output_dir": rows, "model_name_or_path": model, **every}
            yield Step(ComputeLogMu(stage_args(TrainArguments, self.trial, **changes)))
        self.found[arm] = self._values_of(arm)

    def _folder(self, arm: Arm | None) -> Path:
        return self.out / ("base" if arm is None else arm.name)

    def outcome(self) -> Outcome:
        """Return the results of all arms, and of the model before training."""
        by_answers, found = self.rows.by_answers, self.found.items()
        values = {arm: tested.values_P for arm, tested in found}
        samples = {} if by_answers else {arm: tested.effective_samples for arm, tested in found}
        greedy = {arm: tested.greedy_P for arm, tested in found if tested.greedy_P is not None}
        return Outcome(values, by_answers, samples, self.rows.rows, greedy)

    def _values_of(self, arm: Arm | None) -> "_Tested":
        rows = self._folder(arm) / ROLLOUTS
        if self.rows.by_answers:
            samples = read_samples(rows)
            order = np.argsort(samples.problem_ids)
            greedy_P = None if samples.greedy_P is None else samples.greedy_P[order]
            return _Tested(expected_pass(samples, 1)[order], float(samples.num_samples), greedy_P)
        table, base = _read(rows), _read(self._folder(None) / ROLLOUTS)
        # The log μ that rows brought is of who wrote them; rows without any were written by the model before.
        mu = base[GIVEN_LOG_MU].to_numpy() if GIVEN_LOG_MU in base.column_names else _sums(base)
        values = off_policy_values(_sums(table) - mu, table["reward"].to_numpy(), table["problem_id"].to_numpy())
        return _Tested(values.values_P, values.effective_samples)


def _read(folder: Path) -> pa.Table:
    columns = ("reward", "problem_id", "mu_logps", GIVEN_LOG_MU)
    return pa.concat_tables([read_shard(shard, columns) for shard in shards_of(folder)])


def _sums(table: pa.Table) -> NDArray[np.float64]:
    return np.array([float(np.sum(logps)) for logps in table["mu_logps"].to_pylist()])
