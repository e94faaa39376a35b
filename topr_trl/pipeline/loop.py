"""Run the loop over the stages: sample, score, curate, log-mu, train, evaluate, once per iteration.

Sampling and training take turns, or run at the same time with `overlap`. A loop can be killed at any moment. Started
again with the same command, the loop skips finished stages, and continues an unfinished stage from its last shard or
checkpoint.
"""

import shlex
import time
from pathlib import Path
from typing import Any

import torch

from topr_trl.data.rows import TURN_REWARDS, have_rewards, training_temperatures
from topr_trl.data.sampler_logps import TEMPERATURE
from topr_trl.data.tables import from_table, read_shard, shards_of
from topr_trl.data.usable_rows import in_all_shards, refuse_rewards_of_turns
from topr_trl.evaluation.report import EVALUATION, Evaluations, plain_table, read_evaluation
from topr_trl.pipeline import locks, manifest, stages
from topr_trl.pipeline import run_folders as layout
from topr_trl.pipeline.launch import check_launch
from topr_trl.pipeline.lineage import sampling_of, weights_of
from topr_trl.pipeline.model_loading import model_path
from topr_trl.pipeline.problems import check_rewards, check_rows, load_problems
from topr_trl.pipeline.run_folders import MODEL, ROLLOUTS, TEST, iteration_folder, results_folder, test_folder
from topr_trl.pipeline.settings import IterateArguments, RewardArguments, field_names, stage_args
from topr_trl.pipeline.shards import naming
from topr_trl.pipeline.stage import Stage
from topr_trl.pipeline.stage_inputs import task_of_rows, weights_read
from topr_trl.pipeline.stages.evaluate import Evaluate, EvaluateArguments
from topr_trl.pipeline.stages.sample import Sample, SampleArguments
from topr_trl.pipeline.stages.score import Score, ScoreArguments
from topr_trl.pipeline.stages.train import Train
from topr_trl.pipeline.steps import Step, run_sides, run_steps
from topr_trl.pipeline.trainer_of_rows import TrainArguments
from topr_trl.trainers.checkpoints import check_files
from topr_trl.user_warnings import warn_user

SAMPLING_SIDE, TRAINING_SIDE = "sampling", "training"  # the sides of an overlapped loop


def sides_of(loop: IterateArguments) -> dict[str, list[Step]]:
    """Return the steps of the loop in order, by side.

    Without `overlap`, there is one side, named `""`. With `overlap` N, the sides `sampling` and `training` run at the
    same time. The rows of iteration i are then sampled from the model of iteration max(i - 1 - N, 0), which also
    computes their log μ. Iteration 0 is the starting model. Training in iteration i always starts from the model of
    iteration i - 1.
    """
    parts = _StepsOfIterations(loop)
    training = parts.training
    rows = [parts.rows(i) for i in range(1, loop.iterations + 1)]
    tests = [parts.testing(i) if loop.tests else [] for i in range(loop.iterations + 1)]
    for step, of_iteration in zip(training, rows, strict=True):
        step.after = of_iteration[-1]
    if not loop.overlap:
        together = [[*of_rows, step, *test] for of_rows, step, test in zip(rows, training, tests[1:], strict=True)]
        return {"": [*tests[0], *(step for of_iteration in together for step in of_iteration)]}
    # The starting model writes the rows of the first `ahead` iterations. Sample these rows before the test of the
    # starting model, because training waits for rows.
    ahead = loop.overlap + 1
    sampling = [step for of_rows in rows[:ahead] for step in of_rows] + tests[0]
    for i in range(1, loop.iterations + 1):
        sampling += [*(rows[i + ahead - 1] if i + ahead <= loop.iterations else []), *tests[i]]
    return {SAMPLING_SIDE: sampling, TRAINING_SIDE: training}


class _StepsOfIterations:
    """Make the steps of each iteration. Iteration 0 is the starting model.

    Attributes:
        training (`list[Step]`): Training steps of all iterations. Sampling waits for their models.
    """

    def __init__(self, loop: IterateArguments) -> None:
        self.loop = loop
        self.training = [self._train(i) for i in range(1, loop.iterations + 1)]

    def model(self, iteration: int) -> str | None:
        return str(self._folder(iteration) / "model") if iteration else self.loop.model_name_or_path

    def rows(self, iteration: int) -> list[Step]:
        """Return the steps that make the rows of an iteration, in order: `sample`, and all stages that add columns.

        If the user gave rows, the first iteration does not sample, and scores only rows without rewards.
        """
        loop, rows = self.loop, str(self._folder(iteration) / ROLLOUTS)
        source = loop.rows if iteration == 1 and loop.rows else rows
        writer = max(iteration - 1 - loop.overlap, 0)
        steps = [] if source != rows else [self._sampling(rows, writer, iteration, greedy=False)]
        for stage in stages.row_stages():
            # The stage `score` would replace rewards that it wrote before.
            keeps_rewards = stage is Score and source != rows and in_all_shards(Path(source), have_rewards)
            if stage.adds_columns and not keeps_rewards:
                changes = {"input": source, "output_dir": rows, "iteration": iteration,
                           "model_name_or_path": self.model(writer)}  # fmt: skip
                known = {name: value for name, value in changes.items() if name in field_names(stage.settings)}
                steps.append(Step(stage(stage_args(stage.settings, loop, **known))))
                source = rows
        return steps

    def _train(self, iteration: int) -> Step:
        folder = self._folder(iteration)
        args = stage_args(
            TrainArguments, self.loop, input=str(folder / ROLLOUTS), output_dir=str(folder / MODEL),
            model_name_or_path=self.model(iteration - 1), iteration=iteration,
        )  # fmt: skip
        return Step(Train(args))

    def testing(self, iteration: int) -> list[Step]:
        """Return the steps that test the model of an iteration: sample, score, evaluate."""
        loop, folder = self.loop, self._folder(iteration)
        rows = str(test_folder(folder) / ROLLOUTS)
        return [
            self._sampling(rows, iteration, iteration, split="test", num_generations=loop.num_generations_eval),
            Step(Score(stage_args(ScoreArguments, loop, input=rows, output_dir=rows))),
            Step(Evaluate(stage_args(EvaluateArguments, loop, input=rows, output_dir=str(results_folder(folder))))),
        ]

    def _sampling(self, rows: str, writer: int, iteration: int, **more: object) -> Step:
        """Return the step that samples with the model of iteration `writer`, after its training."""
        named = {"output_dir": rows, "model_name_or_path": self.model(writer), "iteration": iteration, **more}
        sampling = Sample(stage_args(SampleArguments, self.loop, **named))
        return Step(sampling, after=self.training[writer - 1] if writer else None)

    def _folder(self, iteration: int) -> Path:
        return iteration_folder(self.loop.folder, iteration)


def iterate(loop: IterateArguments) -> None:
    """Run the loop, or continue it where it stopped.

    A script that calls this function needs `if __name__ == "__main__":`, as for Python's `multiprocessing`.

    Args:
        loop (`IterateArguments`): Settings of the loop.

    Raises:
        ValueError: a folder holds results for other settings, or `check` rejects settings, problems or rows.
        FileNotFoundError, ImportError: a file or a package is missing, see `check`.
        ChildProcessError: a stage failed.
    """
    check(loop)
    began, out = time.monotonic(), loop.folder
    with locks.lock(out):
        sides = sides_of(loop)
        if loop.overlap:
            spent = run_sides(sides, loop, out)
        else:
            spent = {name: run_steps(steps, loop, out) for name, steps in sides.items()}
        finished = [step.stage for steps in sides.values() for step in steps]
        results = Evaluations({
            stage.folder.parent.parent.name: read_evaluation(stage.folder / EVALUATION)
            for stage in finished if isinstance(stage, Evaluate)
        })  # fmt: skip
        rewards = {} if loop.reward_funcs is None else _mean_rewards(finished)
    total = time.monotonic() - began
    untested = "No model was tested: there are no test problems. See --test_dataset_name and --num_test_problems."
    reported = [str(results) if results else untested]
    if rewards:
        reported += [plain_table(["", *rewards], [["mean reward of the sampled rows", *rewards.values()]])]
    reported += [
        f"Models, rows and results are in {out}/. To read what the models wrote, run: topr look {shlex.quote(str(out))}"
    ]
    busy = [f", {seconds:.0f} s in the stages of {side}" for side, seconds in spent.items() if side]
    print("\n" + "\n\n".join(reported), f"{total:.0f} s{''.join(busy)}.", sep="\n", flush=True)


def _mean_rewards(finished: list[Stage[Any]]) -> dict[str, str]:
    """Return the mean reward of the sampled rows of each iteration as text, by the name of the iteration's folder.

    The text is empty if the mean of an iteration is not known.
    """
    found = {}
    for stage in finished:
        if isinstance(stage, Score) and stage.folder.parent.name != TEST:
            mean = stage.entry().get("rewards", {}).get("reward", {}).get("mean")
            found[stage.folder.parent.name] = "" if mean is None else f"{mean:.3f}"
    return found


def check(loop: IterateArguments) -> None:
    """Check settings, problems, rows and weights before the loop starts. Otherwise, a stage could fail after hours.

    Raises:
        ValueError: settings contradict each other, problems or rows cannot be used, or topr did not write the files of
            the folder.
        FileNotFoundError: a file does not exist.
        ImportError: a package that the settings need is not installed.
    """
    layout.check_own(loop.folder)
    check_launch("iterate", loop)
    for split in ("train", "test"):
        if loop.tests if split == "test" else not loop.rows or loop.iterations > 1:
            loop.check_sampling()
            problems = load_problems(loop, split)
            check_rewards(problems, loop)
    if loop.rows:
        manifest.check_whole(Path(loop.rows))
        task, other = task_of_rows(Path(loop.rows), loop.task), loop.task_of_problems.name
        if task != other and (loop.tests or loop.iterations > 1):
            raise ValueError(
                f"--rows: the rows in {loop.rows} were sampled for the task {task}, and the loop would also use "
                f"problems of the task {other}. Set --task {task} and --dataset_name, or set --num_test_problems 0 and "
                "--iterations 1."
            )
        _check_writer(Path(loop.rows), loop)
        check_trainable(Path(loop.rows), loop)
    check_files(model_path(loop))
    _check_overlap(loop)
    if loop.log_mu == "sampler" and loop.temperature != 1:
        raise ValueError(
            f"log_mu='sampler' and temperature={loop.temperature:g}: `topr sample` keeps the model's own "
            "log-probabilities, which are at temperature 1. Set log_mu='trainer', or temperature=1."
        )


def check_trainable(path: Path, rewards: RewardArguments) -> None:
    """Check that rows can be scored and trained on.

    Args:
        path (`Path`): File or folder of the rows.
        rewards (`RewardArguments`): Settings for rewards.

    Raises:
        ValueError: columns are missing, rows are greedy or have rewards of turns, or a reward function cannot be used.
        FileNotFoundError: the path does not exist, or the folder has no complete set of shards.
    """
    check_rows(path, "loop", rewards.reward_funcs)
    for shard in shards_of(path):
        read = read_shard(shard, (TURN_REWARDS, TEMPERATURE))
        with naming(shard):
            if TURN_REWARDS in read.column_names:
                refuse_rewards_of_turns(read[TURN_REWARDS], "topr iterate")
            training_temperatures(from_table(read))


def _check_writer(path: Path, loop: IterateArguments) -> None:
    """Warn if another model wrote the rows, because the loop computes log μ with the starting model."""
    sampling = sampling_of(path)
    weights = [weights_of(inputs) for inputs in (sampling, weights_read(loop))]
    if sampling and weights[0] != weights[1] and loop.log_mu != "sampler":
        writer, starting = (", ".join(f"{name} {each[name]}" for name in each if each[name]) for each in weights)
        warn_user(
            f"The rows in {path} were written by {writer}, and the loop would compute their log μ with {starting}, so "
            "the taper would restart. Set --model_name_or_path to the model that wrote the rows, unless it is the same "
            "model at another path."
        )


def _check_overlap(loop: IterateArguments) -> None:
    is_here = not (loop.sampling_launcher or loop.training_launcher)
    if loop.overlap and is_here and torch.cuda.device_count() and not (loop.sampling_devices and loop.training_devices):
        raise ValueError(
            "overlap runs sampling and training at the same time, and each would use all GPUs. Set "
            "--sampling_devices and --training_devices. Both can list the same GPU if its memory is large enough."
        )
