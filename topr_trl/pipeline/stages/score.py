"""Score completions with the judge of a task or with reward functions: write rewards and verdicts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset

from topr_trl.data.rows import OF_FUNCTION, TURN_REWARDS, finite_rewards, have_rewards
from topr_trl.data.tables import columns_of, from_table, read_shard, rows_of, shards_of
from topr_trl.data.usable_rows import check_usable, refuse_rewards_of_turns
from topr_trl.pipeline.manifest import Json
from topr_trl.pipeline.settings import TASK_HELP, TASK_NAMES, FolderArguments, RewardArguments
from topr_trl.pipeline.shards import Part, columns_before, count_rows, naming, remove_columns, stages_of
from topr_trl.pipeline.stage import Result, Stage
from topr_trl.pipeline.stage_inputs import rows_read, task_of_rows
from topr_trl.rewards import INVALID, VERDICTS, score_completions
from topr_trl.rewards.functions import prepare_rewards, score_rows
from topr_trl.rewards.load_functions import (
    code_fingerprint,
    is_model,
    load_reward_funcs,
    name_without_folder,
)
from topr_trl.settings.checks import check_choice
from topr_trl.tasks import OWN_PROMPTS, TASKS


@dataclass
class ScoreArguments(RewardArguments, FolderArguments):
    """Settings of `topr score`."""

    task: str | None = field(
        default=None,
        metadata={"help": f"{TASK_HELP} Rows written by topr sample have their own task.", "choices": TASK_NAMES},
    )

    def __post_init__(self) -> None:
        RewardArguments.__post_init__(self)
        check_choice(self, task=(None, *TASKS, OWN_PROMPTS.name))


class Score(Stage[ScoreArguments]):
    """Stage that writes rewards, and verdicts if a judge gives them.

    Without reward functions, rows that already have a reward keep it.
    """

    settings = ScoreArguments
    outcome = "Rows with rewards in {folder}/: {rows:,}."
    order = 10
    adds_columns = True

    def __init__(self, args: ScoreArguments) -> None:
        super().__init__(args)
        # A loop creates all stages when it starts. With this hash, a stage that runs later detects changed code.
        self._code = None if args.reward_funcs is None else code_fingerprint(args.reward_funcs)

    def needs_process(self, in_thread: bool) -> bool:
        """Return whether the stage has a reward model, or would call reward functions in a thread.

        In a thread, a reward function cannot use signals.

        Args:
            in_thread (`bool`): Whether the loop would otherwise run the stage in a thread.
        """
        names = self.args.reward_funcs or []
        return bool(names) and (in_thread or any(map(is_model, names)))

    def inputs(self) -> Json:
        """Return the rows, and either their task or the reward functions with their weights and a hash of their code.

        Raises:
            ValueError: a file of reward functions has changed since the loop started.
        """
        args, names = self.args, self.args.reward_funcs
        known = {**rows_read(args.source, self.folder), "reward_funcs": None, "reward_weights": None}
        if names is None:
            return {**known, "task": self._task}
        if code_fingerprint(names) != self._code:
            raise ValueError(
                f"The code of reward_funcs {' '.join(names)} has changed since this run started, so rewards would not "
                "be comparable. Undo the change and run the same command again, or use another output_dir."
            )
        return known | {
            "task": None,
            "reward_funcs": list(map(name_without_folder, names)),
            "reward_weights": args.reward_weights or [1.0] * len(names),
            "reward_code": self._code,
        }

    def begin(self) -> bool:
        """Prepare the folder, see `Stage.begin`.

        Remove rewards that an unfinished run computed with different reward functions, weights or code.
        """
        if self._was_begun_with_other_functions():
            remove_columns(self.folder, self.name)
        return super().begin()

    def _has_results(self) -> bool:
        return not self._was_begun_with_other_functions() and super()._has_results()

    def _was_begun_with_other_functions(self) -> bool:
        entry = self.entry()
        if not entry or "finished" in entry:
            return False
        there, now = entry["inputs"], self.inputs()
        return any(there.get(name) != now.get(name) for name in ("reward_funcs", "reward_weights", "reward_code"))

    def make(self) -> Result:
        """Score the completions of each shard. Return the number of rows, counts of verdicts, and mean rewards."""
        score = self._judge() if self.args.reward_funcs is None else self._reward(self.args.reward_funcs)

        def scored(part: Part, table: pa.Table) -> pa.Table:
            with naming(part.file, part.rows.start):
                return score(table, f"Scoring {part.file.name}")

        self.add_columns(scored, "Scoring")
        counts = dict.fromkeys((*VERDICTS, "kept"), 0)
        for shard in shards_of(self.folder):
            if "verdict" in stages_of(shard)[self.name]:
                for each in pc.value_counts(read_shard(shard, ["verdict"])["verdict"]).to_pylist():
                    counts[each["values"]] += each["counts"]
            elif "reward" not in stages_of(shard)[self.name]:
                counts["kept"] += rows_of(shard)
        return count_rows(self.folder), {"scored": counts, "rewards": self._mean_rewards()}

    def _judge(self) -> Callable[[pa.Table, str], pa.Table]:
        if self._task == OWN_PROMPTS.name:
            for shard in shards_of(self.args.source):
                if not have_rewards(columns_of(shard)):
                    OWN_PROMPTS.judge([], [])  # This judge only raises an error.
        judge = OWN_PROMPTS.judge if self._task == OWN_PROMPTS.name else TASKS[self._task].judge

        def score(table: pa.Table, description: str) -> pa.Table:
            rows = from_table(table)
            if have_rewards(rows.column_names):
                if TURN_REWARDS in rows.column_names:
                    refuse_rewards_of_turns(table[TURN_REWARDS], "topr score")
                finite_rewards(rows)
                return table
            check_usable(rows.column_names, "score")
            return score_completions(rows, judge, description).with_format("arrow")[:]

        return score

    def _reward(self, names: Sequence[str]) -> Callable[[pa.Table, str], pa.Table]:
        columns = columns_before(self.name, self.args.source)
        with naming(self.args.source):
            check_usable(columns, "score", by_functions=True)
        rewards = prepare_rewards(load_reward_funcs(names), columns)
        weights = self.args.reward_weights

        def score(table: pa.Table, description: str) -> pa.Table:
            rows: Dataset = score_rows(from_table(table), rewards, weights, description)
            return rows.with_format("arrow")[:]

        return score

    def _mean_rewards(self) -> Json:
        """Return the mean of the reward and of each function's reward, each with the number of rows without a value.

        A mean without any value is None. Return {} if no reward functions are set.
        """
        if self.args.reward_funcs is None:
            return {}
        shards = shards_of(self.folder)
        added = [name for shard in shards for name in stages_of(shard)[self.name]]
        found: Json = {}
        for name in ("reward", *dict.fromkeys(name for name in added if name.startswith(OF_FUNCTION))):
            columns = [read_shard(shard, [name]).column(name).cast(pa.float64()).to_numpy() for shard in shards]
            known = (values := np.concatenate(columns))[~np.isnan(values)]
            found[name] = {"mean": float(known.mean()) if len(known) else None, "missing": len(values) - len(known)}
        return found

    @classmethod
    def summary(cls, done: Json) -> str:
        """Return the number of rows by verdict, the mean rewards, and the number of rows without a new reward."""
        counts = {**done["scored"]}
        kept = counts.pop("kept", 0)
        parts = [f"{n:,} {verdict}" for verdict, n in counts.items() if n]
        rewards = done["rewards"]
        for name, found in rewards.items():
            if found["mean"] is not None:
                parts.append(f"mean {name.removeprefix(OF_FUNCTION)} {found['mean']:.3f}")
        if missing := rewards.get("reward", {}).get("missing"):
            parts.append(f"{missing:,} without a reward, which topr curate leaves out")
        task, invalid = TASKS.get(done["inputs"]["task"] or ""), counts[INVALID]
        text = ", ".join(parts + ([f"{kept:,} kept their reward"] if kept else [])) + "."
        return f"{text} The judge reads {task.reads}." if task and invalid > 0.9 * sum(counts.values()) else text

    @property
    def _task(self) -> str:
        return task_of_rows(self.args.source, self.args.task)
