"""Choose the rows to train on."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from topr_trl.data.rows import ROLLOUT, finite_rewards, id_column, need_columns, problem_column, rewards_or_nan
from topr_trl.data.sampler_logps import TEMPERATURE, training_temperatures
from topr_trl.data.tables import columns_of, from_table, read_shard, set_column, shards_of
from topr_trl.data.trajectories import Rollouts, rollout_ids
from topr_trl.pipeline.manifest import Json
from topr_trl.pipeline.settings import FolderArguments, SeedArguments, seed_of
from topr_trl.pipeline.shards import CHOSEN, naming, stages_of
from topr_trl.pipeline.stage import Made, Stage
from topr_trl.pipeline.stage_inputs import rows_read, values_of
from topr_trl.settings.checks import check_at_least
from topr_trl.settings.shared import CurationArguments

# Settings that determine the chosen rows and their reward after the baseline.
CHOICE = ("baseline", "effective_positive_share", "curation", "iteration_size", "curation_positive_share")


@dataclass
class CurateArguments(FolderArguments, SeedArguments, CurationArguments):
    """Settings of `topr curate`."""

    def __post_init__(self) -> None:
        self.validate_curation()
        check_at_least(0, self, "iteration")


class Curate(Stage[CurateArguments]):
    """Stage that writes `reward_after_baseline` for the chosen rows, and null for all others."""

    settings = CurateArguments
    outcome = "Rows in {folder}/: {rows:,}. The column reward_after_baseline is set in the rows to train on."
    order = 20
    adds_columns = True
    in_loop = True

    def inputs(self) -> Json:
        """Return the rows and the curation settings."""
        return {**rows_read(self.args.source, self.folder), **values_of(self.args, (*CHOICE, "seed", "iteration"))}

    def make(self) -> Made:
        """Choose rows from all shards, and write the new column."""
        args, shards = self.args, shards_of(self.args.source)
        columns = [_read_columns(shard) for shard in shards]
        sampling_order = [of_shard.samples for of_shard in columns if of_shard.samples is not None]
        rewards = np.concatenate([of_shard.rewards for of_shard in columns])
        rollouts = Rollouts.of([rollout for of_shard in columns for rollout in of_shard.rollouts])
        problems = np.concatenate([of_shard.problems for of_shard in columns])
        rollouts.check_same("reward", np.nan_to_num(rewards, nan=np.inf))
        if all("problem_id" in columns_of(shard) for shard in shards):
            rollouts.check_same("problem_id", problems)
        with_reward = np.flatnonzero(~np.isnan(rewards[rollouts.firsts_R]))
        firsts = rollouts.firsts_R[with_reward]
        chosen_rewards, curated = args.choose(
            rewards[firsts],
            problems[firsts],
            seed_of("curate", args.seed, args.iteration),
            # If a shard lacks `sample_id`, rows are in sampling order.
            np.concatenate(sampling_order)[firsts] if len(sampling_order) == len(columns) else None,
        )
        if len(chosen_rewards) == 0:
            raise ValueError(f"curation={args.curation!r} chose no row: {curated}. Change curation or baseline.")
        all_rewards = np.full(len(rewards), np.nan)
        chosen_rollouts = with_reward[curated.indices]
        chosen_rows = rollouts.rows_of(chosen_rollouts)
        all_rewards[chosen_rows] = np.repeat(chosen_rewards, rollouts.counts_R[chosen_rollouts])
        starts = np.cumsum([0, *(len(of_shard.rewards) for of_shard in columns)])

        def chosen(k: int, table: pa.Table) -> pa.Table:
            values = pa.array(all_rewards[starts[k] : starts[k + 1]], from_pandas=True)
            return set_column(table, CHOSEN, values)

        self.add_columns(chosen, "Curating")
        return len(rewards), {"chosen": len(chosen_rewards), "curated": str(curated)}

    @classmethod
    def summary(cls, done: Json) -> str:
        """Return a description of the chosen rows."""
        return f"Chosen: {done['curated']}."


class _Columns(NamedTuple):
    """Columns of a shard that the choice depends on. `samples` are positions in the sampling order."""

    rewards: NDArray[np.float64]
    problems: NDArray[Any]
    samples: NDArray[Any] | None
    rollouts: list[Any]


def _read_columns(shard: Path) -> _Columns:
    names = columns_of(shard)
    need_columns(names, ("prompt", "reward"), f"{shard}: rows to choose from, as topr score writes them,")
    problem = ("problem_id",) if "problem_id" in names else ("prompt", "prompt_ids")
    rows = from_table(read_shard(shard, ("reward", "sample_id", *problem, ROLLOUT, TEMPERATURE)))
    with naming(shard):
        training_temperatures(rows)
        samples = id_column(rows, "sample_id") if "sample_id" in names else None
        # Reward functions can leave rows without a reward.
        rewards = rewards_or_nan(rows) if "reward" in stages_of(shard).get("score", ()) else finite_rewards(rows)
        return _Columns(rewards, problem_column(rows).astype(str), samples, rollout_ids(rows))
