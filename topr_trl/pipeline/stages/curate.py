"""Choose the rows to train on."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from topr_trl.curation import REPEATING
from topr_trl.data.preparation import CHOICE_COLUMNS, ScoredRows
from topr_trl.data.rows import AFTER_BASELINE, TIMES_CHOSEN, TURN_REWARDS
from topr_trl.data.tables import read_table, shards_of
from topr_trl.data.usable_rows import refuse_rewards_of_turns
from topr_trl.pipeline import manifest
from topr_trl.pipeline.manifest import Json
from topr_trl.pipeline.settings import RowsArguments, SeedArguments, seed_of
from topr_trl.pipeline.shards import columns_before, stages_of
from topr_trl.pipeline.stage import Result, Stage
from topr_trl.pipeline.stage_inputs import rows_read, values_of
from topr_trl.settings.checks import check_at_least
from topr_trl.settings.shared import CurationArguments

# Settings that determine the chosen rows and their reward after the baseline.
CHOICE = ("baseline", "effective_positive_share", "curation", "iteration_size", "curation_positive_share")

# Token ids are most of the data. The stage does not read a column of ids if the rows have the column that replaces it.
_INSTEAD_OF_IDS = {"completion_ids": "completion", "prompt_ids": "problem_id"}


@dataclass
class CurateArguments(RowsArguments, SeedArguments, CurationArguments):
    """Settings of `topr curate`."""

    def __post_init__(self) -> None:
        self.validate_curation()
        check_at_least(0, self, "iteration")


class Curate(Stage[CurateArguments]):
    """Stage that writes `reward_after_baseline` for the chosen rows, and null for the remaining rows.

    With the rules `balanced` and `repeated_positives`, or if the input has the column, the stage also writes
    `times_chosen`.
    """

    settings = CurateArguments
    outcome = "Rows in {folder}/: {rows:,}. The column reward_after_baseline is set in the rows to train on."
    order = 20
    adds_columns = True

    def inputs(self) -> Json:
        """Return the fingerprint of the rows, and the settings that determine the choice."""
        return {**rows_read(self.args.source, self.folder), **values_of(self.args, (*CHOICE, "seed", "iteration"))}

    def make(self) -> Result:
        """Choose rows from all shards, and write the new columns."""
        args = self.args
        names = columns_before(self.name, args.source)
        unread = {ids for ids, instead in _INSTEAD_OF_IDS.items() if instead in names}
        columns = [name for name in names if name in CHOICE_COLUMNS and name not in unread]
        rows = read_table(*shards_of(args.source), cache_dir=self.folder / manifest.WORK / "cache", columns=columns)
        if TURN_REWARDS in columns:
            refuse_rewards_of_turns(rows.data[TURN_REWARDS], "topr curate")
        kept = np.arange(len(rows))
        by_score = all("reward" in stages_of(shard).get("score", ()) for shard in shards_of(args.source))
        if by_score and "reward" in columns:
            kept = np.flatnonzero(rows.data["reward"].is_valid())  # Reward functions can leave rows without a reward.
        scored = ScoredRows.read(str(args.source), rows if len(kept) == len(rows) else rows.select(kept))
        scored.check_values(args)
        rewards, curated = scored.choose(args, seed_of("curate", args.seed, args.iteration))
        scored.check_signal(rewards, args)
        after_baseline_R = np.full(len(scored.rewards_U), np.nan)
        after_baseline_R[curated.indices] = rewards
        after_baseline_N = np.full(len(rows), np.nan)
        after_baseline_N[kept] = scored.rollouts.of_each_row(after_baseline_R)
        added = {AFTER_BASELINE: pa.array(after_baseline_N, from_pandas=True)}
        if args.curation in REPEATING or TIMES_CHOSEN in names:  # Replace the column of an earlier choice.
            times_N = np.zeros(len(rows), dtype=np.int64)
            times_N[kept] = scored.rollouts.of_each_row(np.bincount(curated.indices, minlength=len(scored.rewards_U)))
            added[TIMES_CHOSEN] = pa.array(times_N)
        self.add_arrays(added, "Curating")
        diagnosis = scored.diagnose()
        return len(rows), {
            "chosen": len(rewards), "curated": str(curated), "diagnosis": str(diagnosis or ""),
            "advice": diagnosis.advice if diagnosis else "",
        }  # fmt: skip

    @classmethod
    def summary(cls, done: Json) -> str:
        """Return a line about the chosen rows with advice, then the kinds of problems. A loop shows only the line."""
        return f"Chosen: {done['curated']}. {done['advice']}".rstrip() + f"\n{done['diagnosis']}".rstrip()
