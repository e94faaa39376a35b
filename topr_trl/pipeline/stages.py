"""The stages of an iteration: sample, score, curate, log μ, train, evaluate (arXiv 2503.14286, Sec. 4).

Each reads a folder and writes another, shard by shard, and can be run alone, on other people's rows too. A shard is
there whole or not at all; a stage that is started again goes on with the shards that are missing. No stage holds all
rows as Python objects.
"""

import copy
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from accelerate import PartialState
from datasets import Dataset
from numpy.typing import NDArray
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from trl import get_peft_config

from topr_trl.checkpoints import STATE, is_whole_checkpoint
from topr_trl.config import TOPRArguments
from topr_trl.curation import compose
from topr_trl.data.rows import finite_rewards, hash_prompts, id_column
from topr_trl.data.tables import (
    columns_of,
    from_table,
    load_candidates,
    read_shard,
    rows_of,
    save_candidates,
    shard_path,
    shards_of,
)
from topr_trl.evaluation.answers import labels, read_samples
from topr_trl.evaluation.report import write_report
from topr_trl.generation.transformers import sample_candidates
from topr_trl.generation.vllm import sample_candidates_with_vllm, start_engine
from topr_trl.offline_trainer import OfflineTOPRTrainer
from topr_trl.pipeline import manifest
from topr_trl.pipeline.arguments import CHOICE, Settings, inputs_of, load_problems, task_of_rows
from topr_trl.pipeline.lineage import ADAPTER, lineage
from topr_trl.rewards import score_candidates
from topr_trl.tasks import TASKS

REPORT = "evaluation.txt"  # the tables of the stage `evaluate`


def count_rows(folder: Path) -> int:
    return sum(map(rows_of, shards_of(folder)))


# Stages. Each is called once its folder is open and locked, and returns its rows and notes for the manifest.

Made = tuple[int, dict[str, Any]]


def sample(settings: Settings) -> Made:
    """Candidates of the problems, `problems_per_shard` problems a shard."""
    draw_shards(settings)
    return count_rows(settings.folder), {}


def draw_shards(settings: Settings) -> None:
    """The shards that are missing: all, or those of this worker."""
    args, folder, problems = settings.stage, settings.folder, load_problems(settings.stage)
    count = -(-len(problems) // args.problems_per_shard)
    first, step = map(int, (args.worker or "0/1").split("/"))
    own = range(first, count, step)
    missing = [k for k in own if not shard_path(folder, k, count).is_file()]
    if not missing:
        return
    draw = _sampler(settings)
    progress = {"desc": f"Sampling {args.split} problems", "unit": "shard", "initial": len(own) - len(missing)}
    for k in tqdm(missing, total=len(own), **progress):
        start = k * args.problems_per_shard
        part = problems.select(range(start, min(start + args.problems_per_shard, len(problems))))
        save_candidates(draw(part, settings.seed("sample", k)), folder, k, count)


def _sampler(settings: Settings) -> Callable[[Dataset, int], Dataset]:
    sampling, stops = settings.samples_of_split, settings.stage.task_of_problems.stop_strings
    if settings.stage.sampling_backend == "vllm":
        engine = start_engine(
            settings.model_path,
            settings.vllm,
            settings.training.seed,
            settings.model.model_revision,
            settings.training.trust_remote_code,
        )
        return lambda problems, seed: sample_candidates_with_vllm(engine, problems, sampling, stops, seed)
    model = AutoModelForCausalLM.from_pretrained(settings.model_path, **settings.loading).to(settings.training.device)
    tokenizer = settings.tokenizer()
    return lambda problems, seed: sample_candidates(
        model, tokenizer, problems, sampling, stops, seed, "Sampling a shard"
    )


def score(settings: Settings) -> Made:
    """Verdicts and rewards of the candidates. Rows that carry a reward keep it."""
    shards, judge, kept = shards_of(settings.source), TASKS[task_of_rows(settings)].judge, 0
    for k, shard in enumerate(tqdm(shards, desc="Scoring", unit="shard")):
        if shard_path(settings.folder, k, len(shards)).is_file():
            continue
        rows = from_table(read_shard(shard))
        if "reward" in rows.column_names:
            kept += len(rows)
            with _naming(shard):
                finite_rewards(rows)
        else:
            _need(rows.column_names, ("completion", "answer"), f"{shard}: rows without a reward")
            with _naming(shard):
                rows = score_candidates(rows, judge, f"Judging {shard.name}")
        save_candidates(rows, settings.folder, k, len(shards))
    if kept:
        print(f"{kept:,} rows keep the reward that they came with; none of them was judged.", flush=True)
    return count_rows(settings.folder), {}


def check_candidates(path: Path) -> None:
    """Whether rows can be scored and trained on, by their columns.

    Raises:
        FileNotFoundError, ValueError: see `shards_of`; or columns are missing.
    """
    for shard in shards_of(path):
        names = columns_of(shard)
        _need(names, ("prompt",), f"{shard}: rows to train on")
        if "reward" not in names:
            _need(names, ("completion", "answer"), f"{shard}: rows without a reward")


def _need(columns: list[str], needed: tuple[str, ...], what: str) -> None:
    if not set(needed) <= set(columns):
        raise ValueError(f"{what} need the columns {', '.join(needed)}; found {columns}.")


def curate(settings: Settings) -> Made:
    """The rows to train on, their reward after the baseline (before it: `raw_reward`)."""
    training, shards = settings.training, shards_of(settings.source)
    columns = [_columns(shard) for shard in shards]
    sampling_order = [samples for _, _, samples in columns if samples is not None]
    chosen_rewards, curated = compose(
        np.concatenate([rewards for rewards, _, _ in columns]),
        np.concatenate([problems for _, problems, _ in columns]),
        baseline=training.baseline_value,
        effective_positive_share=training.effective_positive_share,
        rule=training.curation,
        size=training.iteration_size,
        positive_share=training.curation_positive_share,
        # Without it in every shard, the order of the rows is the sampling order.
        sample_ids=np.concatenate(sampling_order) if len(sampling_order) == len(columns) else None,
        seed=settings.seed("curate"),
    )
    if len(chosen_rewards) == 0:
        raise ValueError(f"curation={training.curation!r} chose no row: {curated}. Change curation or baseline.")
    start = 0
    for k, shard in enumerate(tqdm(shards, desc="Curating", unit="shard")):
        end = start + len(columns[k][0])
        low, high = np.searchsorted(curated.indices, [start, end])
        if not shard_path(settings.folder, k, len(shards)).is_file():
            rows = read_shard(shard).take(curated.indices[low:high] - start)
            if "raw_reward" not in rows.column_names:
                rows = rows.append_column("raw_reward", rows["reward"])
            rows = rows.drop_columns(["reward"]).append_column("reward", pa.array(chosen_rewards[low:high]))
            save_candidates(from_table(rows), settings.folder, k, len(shards))
        start = end
    print(f"Curated: {curated}.", flush=True)
    return len(chosen_rewards), {"curated": {n: v for n, v in asdict(curated).items() if n != "indices"}}


def _columns(shard: Path) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any] | None]:
    """Rewards and problems of a shard's rows, and their places in the sampling order, if known."""
    names = columns_of(shard)
    _need(names, ("prompt", "reward"), f"{shard}: rows to choose from (run the stage score first?)")
    problem = "problem_id" if "problem_id" in names else "prompt"
    table = read_shard(shard, ("reward", "sample_id", problem))
    rows = from_table(table)
    with _naming(shard):
        rewards = finite_rewards(rows)
        samples = id_column(rows, "sample_id") if "sample_id" in names else None
        if problem == "problem_id":
            return rewards, id_column(rows, "problem_id").astype(str), samples
    return rewards, hash_prompts(table["prompt"][i].as_py() for i in range(len(table))), samples


@contextmanager
def _naming(shard: Path) -> Iterator[None]:
    """Rows are counted by shard, so what is wrong with one is said with its shard."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{shard}: {error}") from error


def log_mu(settings: Settings) -> Made:
    """log μ of the rows whose weight depends on it, by the model that training starts from."""
    folder, state, shards = settings.folder, PartialState(), shards_of(settings.source)
    trainer = _trainer(settings, all_rows=True)
    distance = trainer.compute_log_mu()
    scored = folder / manifest.WORK / "log_mu.parquet"
    if state.is_main_process:
        known = pq.read_table(scored) if scored.is_file() else None  # no row needs it, or all have brought it
        start = 0
        for k, shard in enumerate(shards):
            rows = read_shard(shard)
            if known is not None:
                rows = rows.drop_columns([name for name in rows.column_names if name == "mu_fingerprint"])
                model = (known.schema.metadata or {})[b"model"].decode()
                rows = rows.append_column("mu_logps", known["mu_logps"].slice(start, len(rows)))
                rows = rows.append_column("mu_fingerprint", pa.array([model] * len(rows), pa.string()))
                start += len(rows)
            save_candidates(from_table(rows), folder, k, len(shards))
    if distance:
        print(
            f"Sampler and trainer are apart by {distance['token']:.2g} a token, {distance['response']:.2g} a response."
        )
    return len(trainer.train_dataset), {"sampler_distance": distance}


def train(settings: Settings) -> Made:
    """Offline TOPR on the rows, one epoch unless the settings say otherwise; the folder then holds the model.

    An adapter (PEFT) is merged into the model, on the CPU, and kept in `adapter/` beside it.
    """
    folder, state = settings.folder, PartialState()
    work = folder / manifest.WORK
    trainer = _trainer(settings)
    _check_batch(trainer, work, state)
    trainer.train(resume_from_checkpoint=_last_whole_checkpoint(work, state))
    trainer.save_model(str(work / "final"))
    state.wait_for_everyone()
    if state.is_main_process:  # alone, see `run`
        if settings.model.use_peft:
            _merge_adapter(work / "final", folder, settings)
        else:
            for path in (work / "final").iterdir():
                path.replace(folder / path.name)
        for name in ("completions", "runs"):  # the tables of `log_completions`, TensorBoard's
            if (work / name).is_dir():
                shutil.copytree(work / name, folder / name, dirs_exist_ok=True)
        shutil.copyfile(work / STATE, folder / STATE)
    return len(trainer.train_dataset), {}


def _check_batch(trainer: OfflineTOPRTrainer, work: Path, state: PartialState) -> None:
    """Refuse to go on with another number of rows a step: the weights would be neither run's."""
    args, path = trainer.args, work / "rows_per_step"
    rows = str(args.per_device_train_batch_size * args.gradient_accumulation_steps * state.num_processes)
    known = path.read_text() if path.is_file() else rows
    state.wait_for_everyone()
    if known != rows:
        raise ValueError(
            f"This training was started with {known} rows a step, and now there are {rows}: use as many processes as "
            f"then, or remove {work.parent} to start it anew."
        )
    if state.is_main_process:
        work.mkdir(parents=True, exist_ok=True)
        path.write_text(rows)


def _trainer(settings: Settings, all_rows: bool = False) -> OfflineTOPRTrainer:
    """For the rows of `settings.source`; those that the stage `curate` has chosen are after the baseline already."""
    args, work = copy.copy(settings.training), settings.folder / manifest.WORK
    args.output_dir, args.seed = str(work), settings.seed("train")
    args.model_init_kwargs = {**settings.loading, **(args.model_init_kwargs or {})}
    with PartialState().main_process_first():
        rows = load_candidates(settings.source, work / "cache")
    curated = "raw_reward" in rows.column_names
    if curated:
        _refuse_another_choice(settings)
        args.baseline, args.effective_positive_share = "0", None
    if curated or all_rows:
        args.curation, args.iteration_size = "none", None
    return OfflineTOPRTrainer(
        settings.model_path, args, rows, processing_class=settings.tokenizer(),
        peft_config=get_peft_config(settings.model),
    )  # fmt: skip


def _refuse_another_choice(settings: Settings) -> None:
    """Rows that `curate` has chosen are not chosen again, so settings that say otherwise would go unheard.

    A default may have been given or not, so it is no contradiction.
    """
    training, defaults = settings.training, TOPRArguments()
    steps = [step for step in lineage(settings.source) if "curated" in step]
    for name in CHOICE if steps else ():
        value, there = getattr(training, name), steps[0]["inputs"][name]
        if not any(_equal(value, other) for other in (there, getattr(defaults, name))):
            raise ValueError(
                f"{name}={value}, but the rows of {settings.source} were chosen with {name}={there} by topr curate. "
                f"Leave {name} out, or curate them anew."
            )


def _equal(one: Any, other: Any) -> bool:
    """Of settings; a baseline is a number as text, or a name."""
    try:
        return float(one) == float(other)
    except (TypeError, ValueError):
        return bool(one == other)


def _merge_adapter(adapter: Path, folder: Path, settings: Settings) -> None:
    from peft import AutoPeftModelForCausalLM

    unset_hf_deepspeed_config()  # under ZeRO-3 loading would shard the model and wait for the other processes
    loading = {name: value for name, value in settings.loading.items() if name != "quantization_config"}
    AutoPeftModelForCausalLM.from_pretrained(adapter, **loading).merge_and_unload().save_pretrained(folder)
    settings.tokenizer().save_pretrained(folder)
    shutil.copytree(adapter, folder / ADAPTER, dirs_exist_ok=True)


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


def evaluate(settings: Settings) -> Made:
    """pass@k, maj@k and more of scored test candidates, alone or beside those of another run, see `write_report`."""
    sources = [source for source in (settings.source, settings.compared) if source is not None]
    names = labels(*sources) if len(sources) == 2 else ["estimate"]
    runs = {name: read_samples(source) for name, source in zip(names, sources, strict=True)}
    report = write_report(settings.folder, runs, settings.training.seed)
    (settings.folder / REPORT).write_text(f"{report}\n")
    return sum(samples.codes_PS.size for samples in runs.values()), {}


STAGES: dict[str, Callable[[Settings], Made]] = {
    "sample": sample, "score": score, "curate": curate, "log-mu": log_mu, "train": train, "evaluate": evaluate,
}  # fmt: skip
ON_SEVERAL_PROCESSES = ("log-mu", "train")


def run(name: str, settings: Settings) -> None:
    """Run a stage to its end, or do nothing if it has been finished.

    Raises:
        ValueError: the folder holds results for other settings, its input is not finished, or a stage that runs in one
            process was launched in several.
    """
    state = PartialState()
    if settings.stage.worker is not None and name != "sample":
        raise ValueError(f"worker={settings.stage.worker!r} is for the stage sample, not for {name}.")
    if state.num_processes > 1 and name not in ON_SEVERAL_PROCESSES:
        more = " For several sampling processes start each with --worker k/n." if name == "sample" else ""
        raise ValueError(f"The stage {name} runs in one process; start it without accelerate launch.{more}")
    folder, worker = settings.folder, settings.stage.worker
    inputs = inputs_of(name, settings)
    if worker is not None:  # one of several; whoever started them finishes the stage
        with manifest.lock(folder, shared=True), manifest.lock(folder, f"-{worker.replace('/', '-of-')}"):
            if not manifest.begin(folder, inputs):
                draw_shards(settings)
        return
    with manifest.lock(folder) if state.is_main_process else nullcontext():
        with state.main_process_first():
            finished = manifest.begin(folder, inputs)
        if not finished:
            if settings.stage.input is not None:
                manifest.check_kept(settings.source)
            rows, notes = STAGES[name](settings)
            # The other processes end here: merging and checksums of a large model take longer than they would wait.
            if state.is_main_process:
                manifest.finish(folder, rows, **notes)
        if state.is_main_process:
            manifest.clean(folder)
