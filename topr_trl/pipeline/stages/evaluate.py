"""Evaluate a model or rows with pass@k, maj@k, greedy accuracy and mean reward, and compare two runs."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from topr_trl.data.rows import have_rewards
from topr_trl.data.tables import read_shard, shards_of
from topr_trl.data.usable_rows import have_answers, in_all_shards
from topr_trl.evaluation.answers import read_samples, run_names
from topr_trl.evaluation.report import EVALUATION, read_evaluation, write_report
from topr_trl.evaluation.rewards import read_reward_samples
from topr_trl.pipeline import manifest
from topr_trl.pipeline.manifest import Json
from topr_trl.pipeline.settings import ADAPTER_SETTINGS, GREEDY_HELP, RewardTestArguments, field_names
from topr_trl.pipeline.stage import Result, Stage
from topr_trl.pipeline.stages.sample import SampleArguments

REPORT = "evaluation.txt"  # file with the tables


@dataclass
class EvaluateArguments(RewardTestArguments, SampleArguments):
    """Settings of `topr evaluate`."""

    compare: str | None = field(default=None, metadata={"help": "Folder or file of rows of another run."})
    greedy: bool = field(default=True, metadata={"help": GREEDY_HELP})
    split: str = "test"

    def __post_init__(self) -> None:
        RewardTestArguments.__post_init__(self)
        self.dataset_name = self.dataset_name or self.test_dataset_name
        self.task = self.implied_task(self.task, self.dataset_name)
        SampleArguments.__post_init__(self)


class Evaluate(Stage[EvaluateArguments]):
    """Stage that writes tables, JSON and a plot for the scored rows of one run, or for a comparison of two runs."""

    settings = EvaluateArguments

    @classmethod
    def setting_names(cls) -> tuple[str, ...]:
        """Return the names of the sampling settings that apply to test problems, and of the settings of this stage."""
        without = ("num_generations", "split", "worker", "iteration", *ADAPTER_SETTINGS)
        return field_names(EvaluateArguments, without=without)

    def sources(self) -> dict[str, Path]:
        """Return the paths of the rows, and of the rows to compare with."""
        compare = {} if self.args.compare is None else {"compare": Path(self.args.compare)}
        return super().sources() | compare

    def inputs(self) -> Json:
        """Return the rows, the rows to compare with, the threshold, and the seed of the bootstrap."""
        rows = {name: manifest.fingerprint(path) for name, path in self.sources().items()}
        return {**rows, "seed": self.args.seed, "pass_threshold": self.args.pass_threshold}

    def make(self) -> Result:
        """Write the report, see `write_report`."""
        args, sources = self.args, list(self.sources().values())
        names = run_names(*sources) if len(sources) == 2 else ["estimate"]
        places = dict(zip(names, sources, strict=True))
        judged = all(in_all_shards(source, have_answers) for source in sources)
        scored = all(in_all_shards(source, have_rewards) for source in sources)
        by_reward = not judged or args.pass_threshold is not None or (scored and any(map(_has_other_rewards, sources)))
        runs = {name: read_samples(source) for name, source in places.items()} if judged else {}
        rewards = {name: read_reward_samples(source) for name, source in places.items()} if by_reward else {}
        report = write_report(self.folder, runs, args.seed, rewards, args.pass_threshold)
        (self.folder / REPORT).write_text(f"{report}\n", encoding="utf-8")
        found = read_evaluation(self.folder / EVALUATION)
        shown = {"greedy": found.greedy, "pass@1": found.pass_at.get(1), "greedy reward": found.greedy_reward,
                 "reward": found.reward}  # fmt: skip
        count = sum(samples.num_rows for samples in (runs or rewards).values())
        return count, {name: str(estimate) for name, estimate in shown.items() if estimate}

    @classmethod
    def summary(cls, done: Json) -> str:
        """Return greedy accuracy, pass@1 and mean rewards, if they are known."""
        names = ("greedy", "pass@1", "greedy reward", "reward")
        return ", ".join(f"{name} {done[name]}" for name in names if name in done)


def _has_other_rewards(source: Path) -> bool:
    """Return whether any reward is null or differs from 1 and -1, the rewards of a judge.

    Return False if a shard has no column `reward`.
    """
    if not in_all_shards(source, lambda columns: "reward" in columns):
        return False
    rewards = (read_shard(shard, ["reward"])["reward"].to_numpy().astype(np.float64) for shard in shards_of(source))
    return any(bool((np.abs(rewards_N) != 1).any()) for rewards_N in rewards)
