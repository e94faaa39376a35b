"""The stages of an iteration: sample, score, curate, log-mu, train, evaluate (arXiv 2503.14286, Sec. 4).

`sample` writes rows, shard by shard; `score`, `curate` and `log-mu` add columns to them, in the same folder or in
another. A shard is replaced as a whole and says which stages it has been through, so a stage that is started again goes
on with the shards that are missing. Each stage can be run alone, on rows from elsewhere too.
"""

import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from accelerate import PartialState
from datasets import Dataset
from numpy.typing import NDArray
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from trl import get_peft_config

from topr_trl.checkpoints import STATE, is_whole_checkpoint
from topr_trl.config import CurationArguments
from topr_trl.curation import compose
from topr_trl.data.rows import finite_rewards, hash_prompts, id_column
from topr_trl.data.tables import (
    atomic_write,
    columns_of,
    from_table,
    load_candidates,
    read_shard,
    rows_of,
    shard_path,
    shards_of,
)
from topr_trl.evaluation.answers import labels, read_samples
from topr_trl.evaluation.report import write_report
from topr_trl.generation.transformers import sample_candidates
from topr_trl.generation.vllm import sample_candidates_with_vllm, start_engine
from topr_trl.offline_trainer import OfflineTOPRTrainer
from topr_trl.pipeline import inputs, manifest
from topr_trl.pipeline.arguments import (
    CurateArguments,
    EvaluateArguments,
    SampleArguments,
    ScoreArguments,
    TrainArguments,
    load_tokenizer,
    loading,
    model_path,
    seed_of,
)
from topr_trl.pipeline.lineage import ADAPTER, lineage
from topr_trl.pipeline.problems import load_problems
from topr_trl.rewards import VERDICTS, score_candidates
from topr_trl.tasks import TASKS

REPORT = "evaluation.txt"  # the tables of the stage `evaluate`
CHOSEN = "reward_after_baseline"  # R of the rows that `curate` has chosen; null in the others
MU_COLUMNS = ("mu_logps", "mu_fingerprint")
LOG_MU = "log_mu.parquet"  # what the trainer has computed, before it is in the shards
_STAGES = b"topr_trl.stages"  # in the metadata of a shard: the stages that it has been through

Made = tuple[int, dict[str, Any]]  # rows, and notes for the manifest


# Shards.


def count_rows(folder: Path) -> int:
    """Rows of all shards."""
    return sum(map(rows_of, shards_of(folder)))


def write_shard(table: pa.Table, path: Path, stage: str) -> None:
    """Write rows that a stage has worked on; the file appears, or is replaced, as a whole."""
    stages = [*_stages_of(table.schema), stage]
    schema = from_table(table).features.arrow_schema  # `datasets` finds its types again
    schema = schema.with_metadata({**schema.metadata, _STAGES: json.dumps(stages).encode()})
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as partial:
        pq.write_table(table.cast(schema), partial, row_group_size=16_384)


def _stages_of(schema: pa.Schema) -> list[str]:
    stages: list[str] = json.loads((schema.metadata or {}).get(_STAGES, b"[]"))
    return stages


def _is_done(path: Path, stage: str) -> bool:
    return path.is_file() and stage in _stages_of(pq.read_schema(path))


def add_columns(
    source: Path, folder: Path, stage: str, columns: Callable[[int, pa.Table], pa.Table], description: str
) -> None:
    """Let a stage add columns to each shard of `source`, into the shards of `folder`, those that are missing.

    Args:
        columns: from the number of a shard and its rows to the same rows with the columns.
        description: for the progress bar.
    """
    shards = shards_of(source)
    same = source.resolve() == folder.resolve()
    for k, shard in enumerate(tqdm(shards, desc=description, unit="shard")):
        path = shard if same else shard_path(folder, k, len(shards))
        if not _is_done(path, stage):
            write_shard(columns(k, read_shard(shard)), path, stage)


@contextmanager
def _naming(shard: Path) -> Iterator[None]:
    """Rows are counted by shard, so errors name theirs."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{shard}: {error}") from error


def _need(columns: Sequence[str], needed: tuple[str, ...], what: str) -> None:
    if not set(needed) <= set(columns):
        raise ValueError(f"{what} need the columns {', '.join(needed)}; found {list(columns)}.")


def _set_column(table: pa.Table, name: str, values: Any) -> pa.Table:
    place = table.schema.get_field_index(name)
    return table.append_column(name, values) if place < 0 else table.set_column(place, name, values)


# Stages. Each is called once its folder is open and locked.


def sample(args: SampleArguments) -> Made:
    """Completions of the problems, `problems_per_shard` problems per shard."""
    draw_shards(args)
    return count_rows(args.folder), {}


def draw_shards(args: SampleArguments) -> None:
    """The shards that are missing: all, or those of this worker."""
    folder, problems = args.folder, load_problems(args, args.split)
    count = -(-len(problems) // args.problems_per_shard)
    first, step = map(int, (args.worker or "0/1").split("/"))
    own = range(first, count, step)
    missing = [k for k in own if not shard_path(folder, k, count).is_file()]
    if not missing:
        return
    draw = _sampler(args)
    progress = {"desc": f"Sampling {args.split} problems", "unit": "shard", "initial": len(own) - len(missing)}
    for k in tqdm(missing, total=len(own), **progress):
        start = k * args.problems_per_shard
        part = problems.select(range(start, min(start + args.problems_per_shard, len(problems))))
        rows = draw(part, seed_of("sample", args.seed, args.iteration, args.split, k))
        write_shard(rows.with_format("arrow")[:], shard_path(folder, k, count), "sample")


def _sampler(args: SampleArguments) -> Callable[[Dataset, int], Dataset]:
    stops = args.task_of_problems.stop_strings
    if args.sampling_backend == "vllm":
        engine = start_engine(model_path(args), args, args.seed, args.model_revision, args.trust_remote_code)
        return lambda problems, seed: sample_candidates_with_vllm(engine, problems, args, stops, seed)
    model = AutoModelForCausalLM.from_pretrained(model_path(args), **loading(args)).to(PartialState().device)
    tokenizer = load_tokenizer(args)
    return lambda problems, seed: sample_candidates(model, tokenizer, problems, args, stops, seed, "Sampling a shard")


def score(args: ScoreArguments) -> Made:
    """Verdicts and rewards of the rows. Rows that came with a reward keep it."""
    judge, counts = TASKS[inputs.task_of_rows(args)].judge, dict.fromkeys((*VERDICTS, "kept"), 0)
    shards = shards_of(args.source)

    def scored(k: int, table: pa.Table) -> pa.Table:
        rows = from_table(table)
        with _naming(shards[k]):
            if "reward" in rows.column_names:
                finite_rewards(rows)
                return table
            _need(rows.column_names, ("completion", "answer"), "rows without a reward")
            return score_candidates(rows, judge, f"Scoring {shards[k].name}").with_format("arrow")[:]

    add_columns(args.source, args.folder, "score", scored, "Scoring")
    for shard in shards_of(args.folder):
        if "verdict" in columns_of(shard):
            for verdict, n in _counted(read_shard(shard, ["verdict"])["verdict"]):
                counts[verdict] += n
        else:
            counts["kept"] += rows_of(shard)
    return count_rows(args.folder), {"scored": counts}


def _counted(column: pa.ChunkedArray) -> Iterator[tuple[str, int]]:
    for each in pc.value_counts(column).to_pylist():
        yield each["values"], each["counts"]


def check_rows(path: Path) -> None:
    """Whether rows can be scored and trained on, by their columns.

    Raises:
        FileNotFoundError, ValueError: see `shards_of`; or columns are missing.
    """
    for shard in shards_of(path):
        names = columns_of(shard)
        _need(names, ("prompt",), f"{shard}: rows to train on")
        if "reward" not in names:
            _need(names, ("completion", "answer"), f"{shard}: rows without a reward")


def curate(args: CurateArguments) -> Made:
    """R of the rows to train on, in the column `reward_after_baseline`; null in the others."""
    shards = shards_of(args.source)
    columns = [_choice_columns(shard) for shard in shards]
    sampling_order = [samples for _, _, samples in columns if samples is not None]
    rewards = np.concatenate([rewards for rewards, _, _ in columns])
    chosen_rewards, curated = compose(
        rewards,
        np.concatenate([problems for _, problems, _ in columns]),
        baseline=args.baseline_value,
        effective_positive_share=args.effective_positive_share,
        rule=args.curation,
        size=args.iteration_size,
        positive_share=args.curation_positive_share,
        # Without it in every shard, the order of the rows is the sampling order.
        sample_ids=np.concatenate(sampling_order) if len(sampling_order) == len(columns) else None,
        seed=seed_of("curate", args.seed, args.iteration),
    )
    if len(chosen_rewards) == 0:
        raise ValueError(f"curation={args.curation!r} chose no row: {curated}. Change curation or baseline.")
    all_rewards = np.full(len(rewards), np.nan)
    all_rewards[curated.indices] = chosen_rewards
    starts = np.cumsum([0, *(len(rewards) for rewards, _, _ in columns)])

    def chosen(k: int, table: pa.Table) -> pa.Table:
        return _set_column(table, CHOSEN, pa.array(all_rewards[starts[k] : starts[k + 1]], from_pandas=True))

    add_columns(args.source, args.folder, "curate", chosen, "Curating")
    return len(rewards), {"chosen": len(chosen_rewards), "curated": str(curated)}


def _choice_columns(shard: Path) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any] | None]:
    """Rewards and problems of a shard's rows, and their places in the sampling order, if known."""
    names = columns_of(shard)
    _need(names, ("prompt", "reward"), f"{shard}: rows to choose from (run topr score first?)")
    problem = "problem_id" if "problem_id" in names else "prompt"
    table = read_shard(shard, ("reward", "sample_id", problem))
    rows = from_table(table)
    with _naming(shard):
        rewards = finite_rewards(rows)
        samples = id_column(rows, "sample_id") if "sample_id" in names else None
        if problem == "problem_id":
            return rewards, id_column(rows, "problem_id").astype(str), samples
    return rewards, hash_prompts(table["prompt"][i].as_py() for i in range(len(table))), samples


def log_mu(args: TrainArguments) -> Made:
    """log μ of the chosen rows whose weight depends on it, by the model that training starts from."""
    trainer, places = _trainer(args, all_rows=True)
    distance = trainer.compute_log_mu()
    computed = args.folder / manifest.WORK / LOG_MU
    if PartialState().is_main_process:
        known = pq.read_table(computed) if computed.is_file() else None  # no row needs it, or all have brought it
        shards = shards_of(args.source)
        starts = np.cumsum([0, *map(rows_of, shards)])
        places_in_known = np.full(starts[-1], -1)
        places_in_known[places] = np.arange(len(places))

        def with_log_mu(k: int, table: pa.Table) -> pa.Table:
            if known is None:
                return table
            here = places_in_known[starts[k] : starts[k + 1]]
            mu_logps = known["mu_logps"].take(pa.array(here, mask=here < 0))
            model = pa.array([known.schema.metadata[b"model"].decode()] * len(table), pa.string())
            for name, values in zip(MU_COLUMNS, (mu_logps, model), strict=True):
                table = _set_column(table, name, values)
            return table

        add_columns(args.source, args.folder, "log-mu", with_log_mu, "Writing log μ")
    return len(trainer.train_dataset), {"sampler_distance": distance}


def train(args: TrainArguments) -> Made:
    """Offline TOPR on the rows, one epoch unless the settings say otherwise; the folder then holds the model.

    An adapter (PEFT) is merged into the model, on the CPU, and kept in `adapter/` beside it.
    """
    folder, state = args.folder, PartialState()
    work = folder / manifest.WORK
    trainer, _ = _trainer(args)
    _check_batch(trainer, work, state)
    trainer.train(resume_from_checkpoint=_last_whole_checkpoint(work, state))
    trainer.save_model(str(work / "final"))
    state.wait_for_everyone()
    if state.is_main_process:  # alone, see `run`
        if args.use_peft:
            _merge_adapter(work / "final", args)
        else:
            for path in (work / "final").iterdir():
                path.replace(folder / path.name)
        for name in ("completions", "runs"):  # the tables of `log_completions`, TensorBoard's
            if (work / name).is_dir():
                shutil.copytree(work / name, folder / name, dirs_exist_ok=True)
        shutil.copyfile(work / STATE, folder / STATE)
    return len(trainer.train_dataset), {}


def _check_batch(trainer: OfflineTOPRTrainer, work: Path, state: PartialState) -> None:
    """Refuse to go on with another number of rows per step: the weights would be neither run's."""
    args, path = trainer.args, work / "rows_per_step"
    rows = str(args.per_device_train_batch_size * args.gradient_accumulation_steps * state.num_processes)
    known = path.read_text() if path.is_file() else rows
    state.wait_for_everyone()
    if known != rows:
        raise ValueError(
            f"This training was started with {known} rows per step, and now there are {rows}: use as many processes as "
            f"then, or remove {work.parent} to start again."
        )
    if state.is_main_process:
        work.mkdir(parents=True, exist_ok=True)
        path.write_text(rows)


def _trainer(args: TrainArguments, all_rows: bool = False) -> tuple[OfflineTOPRTrainer, NDArray[np.int64]]:
    """A trainer for the rows of `args.source`, and which of them it got: those that `curate` has chosen, if it has."""
    work, own = args.folder / manifest.WORK, copy(args)
    own.output_dir, own.seed = str(work), seed_of("train", args.seed, args.iteration)
    own.model_init_kwargs = {**loading(args), **(args.model_init_kwargs or {})}
    with PartialState().main_process_first():
        rows = load_candidates(args.source, work / "cache")
    if all_rows and (work / LOG_MU).is_file():  # columns of this stage itself, killed while it added them
        rows = rows.remove_columns([name for name in MU_COLUMNS if name in rows.column_names])
    places, curated = np.arange(len(rows)), {CHOSEN, "raw_reward"} & set(rows.column_names)  # the second by version 0.1
    if CHOSEN in rows.column_names:
        places = np.flatnonzero(rows.data[CHOSEN].is_valid())
        rows = rows.remove_columns("reward").rename_column(CHOSEN, "reward").select(places)
    if curated:
        _refuse_another_choice(args)
        own.baseline, own.effective_positive_share = "0", None
    if curated or all_rows:
        own.curation, own.iteration_size = "none", None
    trainer = OfflineTOPRTrainer(
        model_path(args), own, rows, processing_class=load_tokenizer(args), peft_config=get_peft_config(args)
    )
    return trainer, places


def _refuse_another_choice(args: TrainArguments) -> None:
    """Rows that `curate` has chosen are not chosen again, so settings that say otherwise would have no effect.

    A default may have been given or not, so it is no contradiction.
    """
    defaults = CurationArguments()
    there = lineage(args.source).get("curate", {}).get("inputs", {})
    for name in inputs.CHOICE if there else ():
        value = getattr(args, name)
        if not any(_equal(value, other) for other in (there[name], getattr(defaults, name))):
            raise ValueError(
                f"{name}={value}, but the rows of {args.source} were chosen with {name}={there[name]} by topr curate. "
                f"Leave {name} out, or curate them again."
            )


def _equal(one: Any, other: Any) -> bool:
    """Of settings; a baseline is a number as text, or a name."""
    try:
        return float(one) == float(other)
    except (TypeError, ValueError):
        return bool(one == other)


def _merge_adapter(adapter: Path, args: TrainArguments) -> None:
    from peft import AutoPeftModelForCausalLM

    unset_hf_deepspeed_config()  # under ZeRO-3 loading would shard the model and wait for the other processes
    how = {name: value for name, value in loading(args).items() if name != "quantization_config"}
    AutoPeftModelForCausalLM.from_pretrained(adapter, **how).merge_and_unload().save_pretrained(args.folder)
    load_tokenizer(args).save_pretrained(args.folder)
    shutil.copytree(adapter, args.folder / ADAPTER, dirs_exist_ok=True)


def _last_whole_checkpoint(run: Path, state: PartialState) -> str | None:
    """The newest checkpoint that was written to its end (its trainer_state.json comes last); torn ones are removed."""
    found = sorted(run.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    whole = [path for path in found if is_whole_checkpoint(path)]
    state.wait_for_everyone()
    if state.is_main_process:
        for path in set(found) - set(whole):
            shutil.rmtree(path)
    state.wait_for_everyone()
    return str(whole[-1]) if whole else None


def evaluate(args: EvaluateArguments) -> Made:
    """pass@k, maj@k and more of scored rows, alone or beside those of another run, see `write_report`."""
    assert args.input is not None
    sources = [Path(path) for path in (args.input, args.compare) if path is not None]
    names = labels(*sources) if len(sources) == 2 else ["estimate"]
    runs = {name: read_samples(source) for name, source in zip(names, sources, strict=True)}
    report = write_report(args.folder, runs, args.seed)
    (args.folder / REPORT).write_text(f"{report}\n")
    return sum(samples.codes_PS.size for samples in runs.values()), {}


Settings = SampleArguments | ScoreArguments | CurateArguments | TrainArguments | EvaluateArguments

# What a stage does, and what its results depend on.
STAGES: dict[str, tuple[Callable[[Any], Made], Callable[[Any], inputs.Inputs]]] = {
    "sample": (sample, inputs.of_sampling),
    "score": (score, inputs.of_scoring),
    "curate": (curate, inputs.of_curation),
    "log-mu": (log_mu, inputs.of_log_mu),
    "train": (train, inputs.of_training),
    "evaluate": (evaluate, inputs.of_evaluation),
}
ON_SEVERAL_PROCESSES = ("log-mu", "train")


def is_finished(name: str, args: Settings) -> bool:
    """Whether a stage was finished with the same inputs.

    Raises:
        ValueError: its folder holds results for other settings.
    """
    known = manifest.read(args.folder)
    return known is not None and name in known.stages and _begin(name, args)


def _begin(name: str, args: Settings) -> bool:
    for path in (getattr(args, "input", None), getattr(args, "compare", None)):
        if path is not None and Path(path).resolve() != args.folder.resolve():
            manifest.check_whole(Path(path))
    _, inputs_of = STAGES[name]
    return manifest.begin(args.folder, name, inputs_of(args), inputs.sources_of(args))


def run(name: str, args: Settings) -> dict[str, Any]:
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
    if isinstance(args, SampleArguments) and args.worker is not None:  # one of several; who started them finishes
        with manifest.lock(args.folder, f"-{args.worker.replace('/', '-of-')}"):
            if not _begin(name, args):
                draw_shards(args)
        return {}
    with manifest.lock_all(args.folder) if state.is_main_process else nullcontext():
        with state.main_process_first():
            finished = _begin(name, args)
        if not finished:
            started = time.monotonic()
            make, _ = STAGES[name]
            rows, notes = make(args)
            # The other processes end here: merging and checksums of a large model take longer than they would wait.
            if state.is_main_process:
                manifest.finish(args.folder, name, rows, **notes, seconds=round(time.monotonic() - started, 3))
        if state.is_main_process:
            manifest.clean(args.folder)
    known = manifest.read(args.folder)
    return known.stages[name] if known is not None and state.is_main_process else {}
