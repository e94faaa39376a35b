"""Run a trial: short training runs with several settings on some of the rows, tested on held-out problems.

The settings of one training run are an arm, see `topr_trl.pipeline.arms`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from topr_trl.data.tables import read_shard, shards_of
from topr_trl.evaluation.answers import read_samples
from topr_trl.evaluation.off_policy import OffPolicyValues, off_policy_values
from topr_trl.evaluation.pass_and_maj_at_k import expected_pass
from topr_trl.pipeline import locks, manifest
from topr_trl.pipeline.arms import Arm, arms_of
from topr_trl.pipeline.launch import check_launch
from topr_trl.pipeline.manifest import Json
from topr_trl.pipeline.model_loading import model_path
from topr_trl.pipeline.run_folders import ROLLOUTS
from topr_trl.pipeline.settings import TrialArguments, stage_args
from topr_trl.pipeline.split import GIVEN_LOG_MU, HELD_OUT, PROBLEMS, TRAINING_ROWS, Split
from topr_trl.pipeline.stage_inputs import task_of_rows
from topr_trl.pipeline.stages.log_mu import ComputeLogMu
from topr_trl.pipeline.stages.sample import Sample, SampleArguments
from topr_trl.pipeline.stages.score import Score, ScoreArguments
from topr_trl.pipeline.stages.train import Train
from topr_trl.pipeline.steps import Step, run_steps
from topr_trl.pipeline.trainer_of_rows import TrainArguments
from topr_trl.trainers.checkpoints import check_files


@dataclass(frozen=True)
class Outcome:
    """Results of a trial. In each dictionary, the key None stands for the model before training.

    Attributes:
        sampled (`dict`): Accuracy or mean reward on each held-out problem, by arm.
        by_answers (`bool`): Whether `sampled` has accuracies of sampled completions. Otherwise, `sampled` has mean
            rewards, estimated from the logged rows.
        effective_samples (`dict`): Effective sample size by arm, see `OffPolicyValues`. The dictionary is empty if
            `by_answers` is True.
        trained_rows (`int`): Number of rows that each training run read.
        greedy (`dict`): Whether the greedy answer to each held-out problem is correct, by arm. The dictionary is empty
            if no greedy answers were drawn.
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

    A script that calls this function needs `if __name__ == "__main__":`, as for Python's `multiprocessing`.

    Args:
        trial (`TrialArguments`): Settings of the trial.

    Returns:
        The results.

    Raises:
        ValueError: the rows cannot be used for a trial, or two settings contradict each other.
        FileNotFoundError: a file does not exist.
        ImportError: a package that the settings need is not installed.
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
        rows = Split(trial).run()
        if rows["diagnosis"]:
            print(rows["diagnosis"], flush=True)
        if rows["by_answers"]:
            trial.check_sampling()
        arms = arms_of(rows["settings"])
        run_steps(steps_of(trial, rows, arms), trial, out)
        return outcome_of(trial, rows, arms)


def steps_of(trial: TrialArguments, rows: Json, arms: Sequence[Arm | None]) -> list[Step]:
    """Return the steps that train and test each arm, and then discard its model.

    Args:
        trial (`TrialArguments`): Settings of the trial.
        rows (`dict`): Entry of the stage `Split`.
        arms (`Sequence`): Arms, see `arms_of`.
    """
    steps = []
    for arm in arms:
        if arm is None:
            steps += _test(trial, rows, arm, trial.model_name_or_path)
            continue
        model = _folder(trial, arm) / "model"
        changes = {
            "input": str(trial.folder / "rows" / TRAINING_ROWS), "output_dir": str(model),
            "learning_rate": arm.rate(trial), **arm.settings,
        }  # fmt: skip
        steps += [Step(Train(stage_args(TrainArguments, trial, **changes))), *_test(trial, rows, arm, str(model))]
        steps[-1].discards = model  # The models of all arms could fill the disk.
    return steps


def _test(trial: TrialArguments, rows: Json, arm: Arm | None, model: str | None) -> list[Step]:
    """Return the steps that test the model of an arm."""
    out = str(_folder(trial, arm) / ROLLOUTS)
    if rows["by_answers"]:
        problems = str(trial.folder / "rows" / PROBLEMS)
        sampling = stage_args(
            SampleArguments, trial, output_dir=out, model_name_or_path=model, split="test", dataset_name=problems,
            test_dataset_name=problems, num_generations=trial.num_generations_eval,
            task=task_of_rows(trial.source, trial.task),
        )  # fmt: skip
        return [Step(Sample(sampling)), Step(Score(ScoreArguments(input=out, output_dir=out)))]
    held_out = trial.folder / "rows" / HELD_OUT
    rewards = np.unique(_read(held_out)["reward"])
    # The trainer skips rows whose reward equals the baseline, so choose a baseline that no reward equals.
    baseline = float(rewards[:2].mean()) if len(rewards) > 1 else float(rewards[0]) - 1
    changes = {"input": str(held_out), "output_dir": out, "model_name_or_path": model, "preset": "opr",
               "baseline": str(baseline), "log_mu": "trainer"}  # fmt: skip
    return [Step(ComputeLogMu(stage_args(TrainArguments, trial, **changes)))]


def _folder(trial: TrialArguments, arm: Arm | None) -> Path:
    return trial.folder / ("base" if arm is None else arm.name)


def outcome_of(trial: TrialArguments, rows: Json, arms: Sequence[Arm | None]) -> Outcome:
    """Return the results of all arms and of the model before training. All steps must have finished.

    Args:
        trial (`TrialArguments`): Settings of the trial.
        rows (`dict`): Entry of the stage `Split`.
        arms (`Sequence`): Arms, see `arms_of`.
    """
    results = Outcome({}, rows["by_answers"], {}, rows["rows"], {}, trial.decode)
    for arm in arms:
        folder = _folder(trial, arm) / ROLLOUTS
        if not rows["by_answers"]:
            values = _values_by_rewards(_read(folder), _read(_folder(trial, None) / ROLLOUTS))
            results.sampled[arm], results.effective_samples[arm] = values.values_P, values.effective_samples
            continue
        samples = read_samples(folder)
        order = np.argsort(samples.problem_ids)
        results.sampled[arm] = expected_pass(samples, 1)[order]
        if samples.greedy_P is not None:
            results.greedy[arm] = samples.greedy_P[order]
    return results


def _values_by_rewards(table: pa.Table, base: pa.Table) -> OffPolicyValues:
    """Return the mean rewards that the model of an arm would get, from its log-probabilities and those of `base`."""
    # Without log μ in the given rows, assume that the model before training wrote them.
    mu = base[GIVEN_LOG_MU].to_numpy() if GIVEN_LOG_MU in base.column_names else _sum_log_mu(base)
    return off_policy_values(_sum_log_mu(table) - mu, table["reward"].to_numpy(), table["problem_id"].to_numpy())


def _read(folder: Path) -> pa.Table:
    columns = ("reward", "problem_id", "mu_logps", GIVEN_LOG_MU)
    return pa.concat_tables([read_shard(shard, columns) for shard in shards_of(folder)])


def _sum_log_mu(table: pa.Table) -> NDArray[np.float64]:
    return np.array([float(np.sum(logps)) for logps in table["mu_logps"].to_pylist()])
