"""Judge the answers of rows: write verdicts and rewards."""

from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from topr_trl.data.rows import finite_rewards, need_columns
from topr_trl.data.tables import from_table, read_shard, rows_of, shards_of
from topr_trl.pipeline.manifest import Json
from topr_trl.pipeline.settings import FolderArguments
from topr_trl.pipeline.shards import count_rows, naming, stages_of
from topr_trl.pipeline.stage import Made, Stage
from topr_trl.pipeline.stage_inputs import rows_read, task_of_rows
from topr_trl.rewards import VERDICTS, score_completions
from topr_trl.settings.checks import check_choice
from topr_trl.tasks import TASKS


@dataclass
class ScoreArguments(FolderArguments):
    """Settings of `topr score`."""

    task: str = field(
        default="gsm8k",
        metadata={"help": f"Task of the rows: {' or '.join(TASKS)}. Rows written by topr sample have their own."},
    )

    def __post_init__(self) -> None:
        check_choice(self, task=tuple(TASKS))


class Score(Stage[ScoreArguments]):
    """Stage that writes verdicts and rewards. Rows that already have a reward keep it."""

    settings = ScoreArguments
    outcome = "Rows with rewards in {folder}/: {rows:,}."
    order = 10
    adds_columns = True
    in_loop = True

    def inputs(self) -> Json:
        """Return the rows and their task."""
        return {**rows_read(self.args.source, self.folder), "task": self._task}

    def make(self) -> Made:
        """Judge the completions of each shard, and count the verdicts."""
        judge, shards = TASKS[self._task].judge, shards_of(self.args.source)

        def scored(k: int, table: pa.Table) -> pa.Table:
            rows = from_table(table)
            with naming(shards[k]):
                if "reward" in rows.column_names:
                    finite_rewards(rows)
                    return table
                need_columns(rows.column_names, ("completion", "answer"), "rows without a reward")
                return score_completions(rows, judge, f"Scoring {shards[k].name}").with_format("arrow")[:]

        self.add_columns(scored, "Scoring")
        counts = dict.fromkeys((*VERDICTS, "kept"), 0)
        for shard in shards_of(self.folder):
            if "verdict" in stages_of(shard)[self.name]:
                for each in pc.value_counts(read_shard(shard, ["verdict"])["verdict"]).to_pylist():
                    counts[each["values"]] += each["counts"]
            else:
                counts["kept"] += rows_of(shard)
        return count_rows(self.folder), {"scored": counts}

    @classmethod
    def summary(cls, done: Json) -> str:
        """Return the number of rows by verdict."""
        counts = {**done["scored"]}
        kept = counts.pop("kept", 0)
        parts = [f"{n:,} {verdict}" for verdict, n in counts.items() if n]
        return ", ".join(parts + ([f"{kept:,} kept their reward"] if kept else [])) + "."

    @property
    def _task(self) -> str:
        return task_of_rows(self.args.source, self.args.task)
