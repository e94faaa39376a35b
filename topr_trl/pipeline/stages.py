"""The stages of an iteration: sample, score, curate, log-mu, train, evaluate (arXiv 2503.14286, Sec. 4).

`sample` writes rows, shard by shard; `score`, `curate` and `log-mu` add columns to them, in the same folder or in
another. A shard is replaced as a whole and says which stages it has been through, so a stage that is started again goes
on with the shards that are missing. Each stage can be run alone, on rows from elsewhere too.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from accelerate import PartialState
from numpy.typing import NDArray

from topr_trl.data.rollouts import Rollouts, rollout_ids
from topr_trl.data.rows import ROLLOUT, finite_rewards, id_column, need_columns, problem_column
from topr_trl.data.sampled import TEMPERATURE, training_temperatures
from topr_trl.data.tables import columns_of, from_table, read_shard, rows_of, set_column, shards_of
from topr_trl.evaluation.answers import read_samples, run_names
from topr_trl.evaluation.report import EVALUATION, read_evaluation, write_report
from topr_trl.pipeline import inputs, locks, manifest
from topr_trl.pipeline.arguments import (
    CurateArguments,
    EvaluateArguments,
    ImportArguments,
    SampleArguments,
    ScoreArguments,
    TrainArguments,
    seed_of,
)
from topr_trl.pipeline.importing import import_rows
from topr_trl.pipeline.manifest import Json
from topr_trl.pipeline.sampling import draw_shards, sample
from topr_trl.pipeline.shards import (
    CHOSEN,
    Made,
    add_columns,
    count_rows,
    has_shards_of,
    naming,
    stages_of,
)
from topr_trl.pipeline.training import log_mu, train
from topr_trl.rewards import VERDICTS, score_completions
from topr_trl.tasks import TASKS

REPORT = "evaluation.txt"  # the tables of the stage `evaluate`


def score(args: ScoreArguments) -> Made:
    """Verdicts and rewards of the rows. Rows that came with a reward keep it."""
    judge, counts = TASKS[inputs.task_of_rows(args)].judge, dict.fromkeys((*VERDICTS, "kept"), 0)
    shards = shards_of(args.source)

    def scored(k: int, table: pa.Table) -> pa.Table:
        rows = from_table(table)
        with naming(shards[k]):
            if "reward" in rows.column_names:
                finite_rewards(rows)
                return table
            need_columns(rows.column_names, ("completion", "answer"), "rows without a reward")
            return score_completions(rows, judge, f"Scoring {shards[k].name}").with_format("arrow")[:]

    add_columns(args.source, args.folder, "score", scored, "Scoring")
    for shard in shards_of(args.folder):
        if "verdict" in stages_of(shard)["score"]:
            for each in pc.value_counts(read_shard(shard, ["verdict"])["verdict"]).to_pylist():
                counts[each["values"]] += each["counts"]
        else:
            counts["kept"] += rows_of(shard)
    return count_rows(args.folder), {"scored": counts}


def check_trainable(path: Path) -> None:
    """Raise a ValueError if rows cannot be scored and trained on: columns are missing, or rows are greedy.

    Raise a FileNotFoundError as `shards_of` does.
    """
    for shard in shards_of(path):
        names = columns_of(shard)
        need_columns(names, ("prompt",), f"{shard}: rows to train on")
        if "reward" not in names:
            need_columns(names, ("completion", "answer"), f"{shard}: rows without a reward")
        if TEMPERATURE in names:
            with naming(shard):
                training_temperatures(from_table(read_shard(shard, (TEMPERATURE,))))


def curate(args: CurateArguments) -> Made:
    """R of the rows to train on, in the column `reward_after_baseline`; null in the others."""
    shards = shards_of(args.source)
    columns = [_choice_columns(shard) for shard in shards]
    sampling_order = [of_shard.samples for of_shard in columns if of_shard.samples is not None]
    rewards = np.concatenate([of_shard.rewards for of_shard in columns])
    rollouts = Rollouts.of([rollout for of_shard in columns for rollout in of_shard.rollouts])
    problems = np.concatenate([of_shard.problems for of_shard in columns])
    rollouts.check_same("reward", rewards)
    if all("problem_id" in columns_of(shard) for shard in shards):
        rollouts.check_same("problem_id", problems)
    firsts = rollouts.firsts_R
    chosen_rewards, curated = args.choose(
        rewards[firsts],
        problems[firsts],
        seed_of("curate", args.seed, args.iteration),
        # Without it in every shard, the order of the rows is the sampling order.
        np.concatenate(sampling_order)[firsts] if len(sampling_order) == len(columns) else None,
    )
    if len(chosen_rewards) == 0:
        raise ValueError(f"curation={args.curation!r} chose no row: {curated}. Change curation or baseline.")
    all_rewards = np.full(len(rewards), np.nan)
    chosen_rows = rollouts.rows_of(curated.indices)
    all_rewards[chosen_rows] = np.repeat(chosen_rewards, rollouts.counts_R[curated.indices])
    starts = np.cumsum([0, *(len(of_shard.rewards) for of_shard in columns)])

    def chosen(k: int, table: pa.Table) -> pa.Table:
        return set_column(table, CHOSEN, pa.array(all_rewards[starts[k] : starts[k + 1]], from_pandas=True))

    add_columns(args.source, args.folder, "curate", chosen, "Curating")
    return len(rewards), {"chosen": len(chosen_rewards), "curated": str(curated)}


class _Choice(NamedTuple):
    """Columns that decide which rows of a shard are chosen; `samples` are places in the sampling order."""

    rewards: NDArray[np.float64]
    problems: NDArray[Any]
    samples: NDArray[Any] | None
    rollouts: list[Any]


def _choice_columns(shard: Path) -> _Choice:
    names = columns_of(shard)
    need_columns(names, ("prompt", "reward"), f"{shard}: rows to choose from, as topr score writes them,")
    problem = ("problem_id",) if "problem_id" in names else ("prompt", "prompt_ids")
    rows = from_table(read_shard(shard, ("reward", "sample_id", *problem, ROLLOUT, TEMPERATURE)))
    with naming(shard):
        training_temperatures(rows)
        samples = id_column(rows, "sample_id") if "sample_id" in names else None
        return _Choice(finite_rewards(rows), problem_column(rows).astype(str), samples, rollout_ids(rows))


def evaluate(args: EvaluateArguments) -> Made:
    """Evaluate scored rows, alone or beside those of another run, see `write_report`."""
    assert args.input is not None
    sources = [Path(path) for path in (args.input, args.compare) if path is not None]
    names = run_names(*sources) if len(sources) == 2 else ["estimate"]
    runs = {name: read_samples(source) for name, source in zip(names, sources, strict=True)}
    report = write_report(args.folder, runs, args.seed)
    (args.folder / REPORT).write_text(f"{report}\n", encoding="utf-8")
    found = read_evaluation(args.folder / EVALUATION)
    notes = {"pass@1": str(found.pass_at[1])} | ({"greedy": str(found.greedy)} if found.greedy else {})
    return sum(samples.num_rows for samples in runs.values()), notes


Settings = ImportArguments | SampleArguments | ScoreArguments | CurateArguments | TrainArguments | EvaluateArguments


class Stage(NamedTuple):
    """The function of a stage, and the function that returns its inputs."""

    make: Callable[[Any], Made]
    inputs_of: Callable[[Any], Json]


STAGES = {
    "import": Stage(import_rows, inputs.of_import),
    "sample": Stage(sample, inputs.of_sampling),
    "score": Stage(score, inputs.of_scoring),
    "curate": Stage(curate, inputs.of_curation),
    "log-mu": Stage(log_mu, inputs.of_log_mu),
    "train": Stage(train, inputs.of_training),
    "evaluate": Stage(evaluate, inputs.of_evaluation),
}

ON_SEVERAL_PROCESSES = ("log-mu", "train")
_ADD_COLUMNS = ("score", "curate", "log-mu")


def is_finished(name: str, args: Settings) -> bool:
    """Whether a stage was finished with the same inputs; a ValueError if its folder holds results for others."""
    known = manifest.read(args.folder)
    if known is None or name not in known.stages:
        return False
    _check_sources(args)
    return _begin(name, args)


def _check_sources(args: Settings) -> None:
    """Refuse to read what is not named, not there or not whole."""
    if isinstance(args, EvaluateArguments):
        found = [Path(path) for path in (args.input, args.compare) if path is not None]
    else:
        found = [] if isinstance(args, SampleArguments) else [args.source]
    for path in found:
        if path.resolve() != args.folder.resolve():
            manifest.check_whole(path)


def _begin(name: str, args: Settings, others_work: bool = False) -> bool:
    made = others_work or _has_made(name, args.folder)
    now = STAGES[name].inputs_of(args)
    return manifest.begin(args.folder, name, now, inputs.sources_of(args), made, inputs.defaults_of(args, now))


def _has_made(name: str, folder: Path) -> bool:
    """Whether a stage has made anything in a folder that would be lost, or mixed with what is made now."""
    work = folder / manifest.WORK
    kept = [*work.glob("checkpoint-*"), *work.glob("final"), *work.glob("log_mu*")]
    return bool(kept) or (has_shards_of(name, folder) if name in _ADD_COLUMNS else bool(manifest.results(folder)))


def run(name: str, args: Settings) -> Json:
    """Run a stage to its end, or do nothing if it has been finished.

    Returns:
        What the folder's manifest says of it; empty for a worker, and for all but the main process.

    Raises:
        ValueError: the folder holds results for other settings, its input is not finished, or a stage that runs in one
            process was launched in several.
    """
    state = PartialState(cpu=getattr(args, "use_cpu", False))
    if state.num_processes > 1 and name not in ON_SEVERAL_PROCESSES:
        more = " For several sampling processes start each with --worker k/n." if name == "sample" else ""
        raise ValueError(f"The stage {name} runs in one process; start it without accelerate launch.{more}")
    _check_sources(args)  # before the folder to write is made
    if isinstance(args, SampleArguments) and args.worker is not None:  # one of several; who started them finishes
        with ExitStack() as held:
            with locks.lock(args.folder):  # not while another process finishes the stage
                part = f"-{args.worker.replace('/', '-of-')}"
                held.enter_context(locks.lock(args.folder, part))
                finished = _begin(name, args, locks.others_work(args.folder, part))
            if not finished:
                draw_shards(args)
        return {}
    with locks.lock_all(args.folder) if state.is_main_process else nullcontext():
        with state.main_process_first():
            finished = _begin(name, args)
        if not finished:
            started = time.monotonic()
            try:
                rows, notes = STAGES[name].make(args)
            except Exception:
                if state.is_main_process and not _has_made(name, args.folder):
                    manifest.forget(args.folder, name)  # or what was wrong could not be corrected
                raise
            # The other processes end here: merging and checksums of a large model take longer than they would wait.
            if state.is_main_process:
                manifest.finish(args.folder, name, rows, **notes, seconds=round(time.monotonic() - started, 3))
    known = manifest.read(args.folder)
    return known.stages[name] if known is not None and state.is_main_process else {}
