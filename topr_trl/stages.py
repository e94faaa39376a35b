"""The stages of an iteration: sample, score, curate, log μ, train, evaluate (arXiv 2503.14286, Sec. 4).

Each reads a folder and writes another, shard by shard, and can be run alone, on other people's rows too. A shard is
there whole or not at all; a stage that is started again goes on with the shards that are missing. No stage holds all
rows as Python objects.
"""

import copy
import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from accelerate import PartialState
from datasets import Dataset, load_dataset
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from trl import ModelConfig, get_peft_config

from topr_trl import manifest
from topr_trl.candidates import TABLE_SUFFIXES, read_table, save_candidates
from topr_trl.config import OfflineTOPRConfig
from topr_trl.curation import compose
from topr_trl.evaluation import evaluate_candidates
from topr_trl.offline_trainer import OfflineTOPRTrainer
from topr_trl.rewards import score_candidates
from topr_trl.sampling import SamplingArguments, sample_candidates
from topr_trl.tasks import arithmetic, gsm8k
from topr_trl.vllm_sampling import VLLMArguments, sample_candidates_with_vllm, start_engine

BACKENDS = ("transformers", "vllm")


@dataclass
class StageArguments:
    """Problems, and where a stage reads and writes.

    Parameters:
        dataset_name (`str`, *optional*): Problems of GSM8K's shape: Hub name or file; default: embedded ones.
        test_dataset_name (`str`, *optional*): The same for the test problems; default: the test split of the first.
        num_train_problems, num_test_problems (`int`, *optional*): Use the first so many; default: all.
        num_shots (`int`, defaults to `8`): Worked examples in the prompt.
        eval_samples (`int`, defaults to `16`): Samples of each test problem (the paper: 64).
        problems_per_shard (`int`, defaults to `64`): Problems a shard of candidates; what a kill loses at most.
        sampling_backend (`str`, defaults to `"transformers"`): `"transformers"` or `"vllm"`.
        split (`str`, defaults to `"train"`): `"train"` or `"test"` problems.
        input, output (`str`): Folders that a stage reads and writes.
        iteration (`int`, defaults to `0`): Enters the seed.
        worker (`str`, *optional*): `k/n`: sample every n-th shard only, from the k-th on, k < n.
    """

    dataset_name: str | None = field(default=None, metadata={"help": "Hub name or file; default: embedded problems."})
    test_dataset_name: str | None = field(default=None, metadata={"help": "The same for the test problems."})
    num_train_problems: int | None = field(default=None, metadata={"help": "Use the first so many. Default: all."})
    num_test_problems: int | None = field(default=None, metadata={"help": "Use the first so many. Default: all."})
    num_shots: int = field(default=8, metadata={"help": "Worked examples in the prompt."})
    eval_samples: int = field(default=16, metadata={"help": "Samples of each test problem (the paper: 64)."})
    problems_per_shard: int = field(default=64, metadata={"help": "Problems a shard of candidates."})
    sampling_backend: str = field(default="transformers", metadata={"help": " or ".join(BACKENDS) + "."})
    split: str = field(default="train", metadata={"help": "Problems to sample: train or test."})
    input: str | None = field(default=None, metadata={"help": "Folder (or file of rows) that the stage reads."})
    output: str | None = field(default=None, metadata={"help": "Folder that the stage writes."})
    iteration: int = field(default=0, metadata={"help": "Enters the seed."})
    worker: str | None = field(default=None, metadata={"help": "k/n: sample only the shards k, k + n, ..."})

    def __post_init__(self) -> None:
        for name, choices in (("sampling_backend", BACKENDS), ("split", ("train", "test"))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be {' or '.join(choices)}, not {getattr(self, name)!r}.")
        for name in ("eval_samples", "problems_per_shard", "num_train_problems", "num_test_problems"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}.")
        if self.test_dataset_name is None and str(self.dataset_name).endswith(TABLE_SUFFIXES):
            raise ValueError("A file has no test split: name the test problems with --test_dataset_name.")


@dataclass
class Settings:
    """All that stages are told."""

    stage: StageArguments
    sampling: SamplingArguments
    vllm: VLLMArguments
    training: OfflineTOPRConfig
    model: ModelConfig

    @property
    def source(self) -> Path:
        if self.stage.input is None:
            raise ValueError("This stage reads rows: name their folder or file with --input.")
        if not Path(self.stage.input).exists():
            raise FileNotFoundError(f"There is no {self.stage.input} to read (--input).")
        return Path(self.stage.input)

    @property
    def folder(self) -> Path:
        if self.stage.output is None:
            raise ValueError("Name the folder to write with --output.")
        return Path(self.stage.output)

    @property
    def model_path(self) -> str:
        return self.model.model_name_or_path or str(arithmetic.CARELESS_MODEL)

    def seed(self, *more: int) -> int:
        """A seed for this iteration and what else is given, far from those of others."""
        entropy = [self.training.seed, self.stage.iteration, *more]
        return int(np.random.SeedSequence(entropy).generate_state(1)[0])


def load_problems(args: StageArguments) -> Dataset:
    """The problems of `args.split`: columns `problem_id`, `prompt`, `answer`."""
    train = args.split == "train"
    count = args.num_train_problems if train else args.num_test_problems
    if args.dataset_name is None:
        rows = arithmetic.arithmetic_dataset(count or 400, seed=1 if train else 2)
    else:
        rows = gsm8k.load((not train and args.test_dataset_name) or args.dataset_name, args.split)
    return gsm8k.prepare(rows.select(range(min(count or len(rows), len(rows)))), args.num_shots)


def shards_of(path: Path) -> list[Path]:
    """The parquet files of a folder of candidates, or the one file.

    Raises:
        FileNotFoundError: there is none.
    """
    shards = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    if not shards or not shards[0].is_file():
        raise FileNotFoundError(f"There are no candidates (*.parquet) in {path}.")
    return shards


def count_rows(folder: Path) -> int:
    return sum(pq.read_metadata(shard).num_rows for shard in shards_of(folder))


# What the results of each stage depend on.


def inputs_of(name: str, settings: Settings) -> dict[str, Any]:
    """What a stage's results depend on, for its manifest; settings that only say how it is run are left out."""
    stage, training = settings.stage, settings.training
    read = {"input": manifest.fingerprint(settings.source)} if name != "sample" else {}
    model = {"model": settings.model_path, "dtype": str(settings.model.dtype)}
    if (Path(settings.model_path) / manifest.NAME).is_file():
        model["weights"] = manifest.fingerprint(Path(settings.model_path))
    seed = {"seed": training.seed, "iteration": stage.iteration}
    topr = ("preset", "a_pos", "b_pos", "a_neg", "b_neg", "ratio_level", "log_mu")
    chosen = ("baseline", "effective_positive_share", "curation", "iteration_size", "curation_positive_share")
    if name == "sample":
        problems = {n: getattr(stage, n) for n in (
            "dataset_name", "test_dataset_name", "num_train_problems", "num_test_problems", "num_shots", "split",
            "problems_per_shard", "sampling_backend",
        )}  # fmt: skip
        if stage.split == "test":
            problems["eval_samples"] = stage.eval_samples
        return {**problems, **asdict(settings.sampling), **model, **seed}
    if name == "score":
        return read
    if name == "curate":
        return {**read, **seed, **{n: getattr(training, n) for n in chosen}}
    if name == "log-mu":
        return {**read, **model, **{n: getattr(training, n) for n in topr}}
    if name == "train":
        how = {n: v for n, v in training.to_dict().items() if n not in chosen and not n.startswith(_HOW_IT_IS_RUN)}
        return {**read, **model, **seed, **how, "peft": asdict(settings.model) if settings.model.use_peft else None}
    return {**read, "seed": training.seed}


_HOW_IT_IS_RUN = (
    "output_dir", "logging", "log_", "save", "report_to", "run_name", "push", "hub", "disable_tqdm", "dataloader",
    "eval", "per_device_eval", "dataset_num_proc", "project", "trackio", "ddp", "use_cpu", "deepspeed", "fsdp", "seed",
)  # fmt: skip


# Stages. Each is called once its folder is open and locked, and returns its rows and notes for the manifest.

Made = tuple[int, dict[str, Any]]


def sample(settings: Settings) -> Made:
    """Candidates of the problems, `problems_per_shard` problems a shard."""
    stage, folder = settings.stage, settings.folder
    sampling = settings.sampling
    if stage.split == "test":
        sampling = SamplingArguments(**{**asdict(sampling), "num_candidates": stage.eval_samples})
    problems = load_problems(stage)
    count = -(-len(problems) // stage.problems_per_shard)
    first, step = map(int, (stage.worker or "0/1").split("/"))
    missing = [k for k in range(first, count, step) if not _shard_path(folder, k, count).is_file()]
    if missing:
        draw = _sampler(settings, sampling)
        own = len(range(first, count, step))
        progress = {"desc": f"Sampling {stage.split} problems", "unit": "shard", "initial": own - len(missing)}
        for k in tqdm(missing, total=own, **progress):
            start = k * stage.problems_per_shard
            part = problems.select(range(start, min(start + stage.problems_per_shard, len(problems))))
            save_candidates(draw(part, settings.seed(k)), folder, k, count)
    return count_rows(folder), {}


def _sampler(settings: Settings, sampling: SamplingArguments) -> Callable[[Dataset, int], Dataset]:
    path = settings.model_path
    if settings.stage.sampling_backend == "vllm":
        engine = start_engine(path, settings.vllm, settings.training.seed)
        return lambda problems, seed: sample_candidates_with_vllm(engine, problems, sampling, gsm8k.STOP_STRINGS, seed)
    model = AutoModelForCausalLM.from_pretrained(path, **_loading(settings)).to(settings.training.device)
    tokenizer = load_tokenizer(settings)
    return lambda problems, seed: sample_candidates(
        model, tokenizer, problems, sampling, gsm8k.STOP_STRINGS, seed, "Sampling a shard"
    )


def _loading(settings: Settings) -> dict[str, Any]:
    model = settings.model
    given = {"dtype": model.dtype, "revision": model.model_revision, "attn_implementation": model.attn_implementation}
    return {name: value for name, value in given.items() if value is not None}


def load_tokenizer(settings: Settings) -> PreTrainedTokenizerBase:
    tokenizer = AutoTokenizer.from_pretrained(settings.model_path, revision=settings.model.model_revision)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer


def _shard_path(folder: Path, shard: int, count: int) -> Path:
    return folder / f"candidates-{shard:05d}-of-{count:05d}.parquet"


def score(settings: Settings) -> Made:
    """Verdicts and rewards of the candidates. Rows that carry a reward keep it."""

    def scored(rows: Dataset) -> Dataset:
        if "reward" in rows.column_names:
            return rows
        if not {"completion", "answer"} <= set(rows.column_names):
            raise ValueError(
                f"Rows without a reward need the columns completion and answer to be scored; found {rows.column_names}."
            )
        return score_candidates(rows, gsm8k.extract_answer)

    return _shard_by_shard(settings, scored, "Scoring"), {}


def _shard_by_shard(settings: Settings, change: Callable[[Dataset], Dataset], description: str) -> int:
    shards = shards_of(settings.source)
    for k, shard in enumerate(tqdm(shards, desc=description, unit="shard")):
        if not _shard_path(settings.folder, k, len(shards)).is_file():
            save_candidates(change(_in_memory(shard)), settings.folder, k, len(shards))
    return count_rows(settings.folder)


def _in_memory(shard: Path) -> Dataset:
    """One shard, without a copy in the cache."""
    return Dataset(pq.read_table(shard)) if shard.suffix == ".parquet" else read_table(shard)


def curate(settings: Settings) -> Made:
    """The rows to train on, their reward after the baseline (before it: `raw_reward`)."""
    training, shards = settings.training, shards_of(settings.source)
    tables = [_columns(shard) for shard in shards]
    rewards, problems, samples = (np.concatenate(column) for column in zip(*tables, strict=True))
    chosen_rewards, curated = compose(
        rewards,
        problems,
        baseline=training.baseline_value,
        effective_positive_share=training.effective_positive_share,
        rule=training.curation,
        size=training.iteration_size,
        positive_share=training.curation_positive_share,
        sample_ids=samples,
        seed=settings.seed(),
    )
    if len(chosen_rewards) == 0:
        raise ValueError(f"curation={training.curation!r} chose no row: {curated}.")
    ends = np.cumsum([len(rewards_) for rewards_, _, _ in tables])
    for k, (shard, end) in enumerate(zip(tqdm(shards, desc="Curating", unit="shard"), ends, strict=True)):
        if _shard_path(settings.folder, k, len(shards)).is_file():
            continue
        start = end - len(tables[k][0])
        low, high = np.searchsorted(curated.indices, [start, end])
        rows = _in_memory(shard).select(curated.indices[low:high] - start)
        rows = rows.rename_column("reward", "raw_reward") if "raw_reward" not in rows.column_names else rows
        rows = rows.remove_columns([n for n in ("reward",) if n in rows.column_names])
        save_candidates(rows.add_column("reward", chosen_rewards[low:high]), settings.folder, k, len(shards))
    print(f"Curated: {curated}.", flush=True)
    return len(chosen_rewards), {"curated": {n: v for n, v in asdict(curated).items() if n != "indices"}}


def _columns(shard: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rewards, problems and places in the sampling order of a shard's rows."""
    table = pq.read_table(shard)
    if "reward" not in table.column_names:
        raise ValueError(f"{shard} has no column reward: run the stage score first. Found {table.column_names}.")
    rewards = table["reward"].to_numpy().astype(np.float64)
    if "problem_id" in table.column_names:
        problems = table["problem_id"].to_numpy(zero_copy_only=False).astype(str)
    else:  # rows with equal prompts share a problem
        problems = np.array([repr(prompt) for prompt in table["prompt"].to_pylist()])
    samples = table["sample_id"].to_numpy() if "sample_id" in table.column_names else np.arange(len(rewards))
    return rewards, problems, samples


def _trainer(settings: Settings) -> OfflineTOPRTrainer:
    """For rows that are chosen already, and whose rewards are after the baseline."""
    args, work = copy.copy(settings.training), settings.folder / manifest.WORK
    args.output_dir, args.seed = str(work), settings.seed() % 2**31
    args.baseline, args.effective_positive_share, args.curation, args.iteration_size = "0", None, "none", None
    args.model_init_kwargs = {**_loading(settings), **(args.model_init_kwargs or {})}
    files = [str(shard) for shard in shards_of(settings.source) if pq.read_metadata(shard).num_rows]
    with PartialState().main_process_first():
        rows = load_dataset("parquet", data_files=files, split="train", cache_dir=str(work / "cache"))
    return OfflineTOPRTrainer(
        settings.model_path, args, rows, processing_class=load_tokenizer(settings),
        peft_config=get_peft_config(settings.model),
    )  # fmt: skip


def log_mu(settings: Settings) -> Made:
    """log μ of the rows whose weight depends on it, by the model that training starts from."""
    folder, state, shards = settings.folder, PartialState(), shards_of(settings.source)
    trainer = _trainer(settings)
    distance = trainer.score_log_mu()
    scored = folder / manifest.WORK / "log_mu.parquet"
    if state.is_main_process:
        known = pq.read_table(scored) if scored.is_file() else None  # no row needs it, or all have brought it
        start = 0
        for k, shard in enumerate(shards):
            rows = pq.read_table(shard)
            if known is not None:
                model = (known.schema.metadata or {})[b"model"].decode()
                rows = rows.append_column("mu_logps", known["mu_logps"].slice(start, len(rows)))
                rows = rows.append_column("mu_fingerprint", pa.array([model] * len(rows), pa.string()))
                start += len(rows)
            save_candidates(Dataset(rows), folder, k, len(shards))
    state.wait_for_everyone()
    return count_rows(folder), {"sampler_distance": distance}


def train(settings: Settings) -> Made:
    """Offline TOPR on the rows, one epoch unless the settings say otherwise; the folder then holds the model."""
    folder, state = settings.folder, PartialState()
    work = folder / manifest.WORK
    trainer = _trainer(settings)
    trainer.train(resume_from_checkpoint=_last_whole_checkpoint(work, state))
    trainer.save_model(str(work / "final"))
    state.wait_for_everyone()
    if state.is_main_process:
        for path in (work / "final").iterdir():
            path.replace(folder / path.name)
        (folder / "log_history.json").write_text(json.dumps(trainer.state.log_history, indent=1))
    state.wait_for_everyone()
    return count_rows(settings.source), {}


def _last_whole_checkpoint(run: Path, state: PartialState) -> str | None:
    """The newest checkpoint that was written to its end (its trainer_state.json comes last); torn ones are removed."""
    found = sorted(run.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    whole = [path for path in found if _is_json(path / "trainer_state.json")]
    state.wait_for_everyone()
    if state.is_main_process:
        for path in set(found) - set(whole):
            shutil.rmtree(path)
    state.wait_for_everyone()
    return str(whole[-1]) if whole else None


def _is_json(path: Path) -> bool:
    try:
        json.loads(path.read_text())
    except (OSError, ValueError):
        return False
    return True


def evaluate(settings: Settings) -> Made:
    """pass@1 and maj@k of scored test candidates, as `evaluation.json`."""
    rows = load_dataset("parquet", data_files=[str(s) for s in shards_of(settings.source)], split="train",
                        cache_dir=str(settings.folder / manifest.WORK))  # fmt: skip
    samples = len(rows) // max(len(set(rows["problem_id"])), 1)
    ks = [k for k in (2, 4, 8, 16, 32) if k < samples]  # maj@k has an interval for k below the samples
    result = evaluate_candidates(rows, maj_ks=ks[-1:], seed=settings.training.seed)
    (settings.folder / "evaluation.json").write_text(json.dumps(result.to_dict(), indent=1))
    return result.num_problems, {}


STAGES: dict[str, Callable[[Settings], Made]] = {
    "sample": sample, "score": score, "curate": curate, "log-mu": log_mu, "train": train, "evaluate": evaluate,
}  # fmt: skip


def run(name: str, settings: Settings) -> None:
    """Run a stage to its end, or do nothing if it has been finished.

    Raises:
        ValueError: the folder holds results for other settings.
    """
    folder, state = settings.folder, PartialState()
    inputs = inputs_of(name, settings)
    if settings.stage.worker is not None:  # one of several; whoever started them finishes the stage
        if not manifest.begin(folder, inputs):
            sample(settings)
        return
    with manifest.lock(folder) if state.is_main_process else nullcontext():
        with state.main_process_first():
            finished = manifest.begin(folder, inputs)
        if not finished:
            rows, notes = STAGES[name](settings)
            if state.is_main_process:
                manifest.finish(folder, rows, **notes)
        if state.is_main_process:
            shutil.rmtree(folder / manifest.WORK, ignore_errors=True)
        state.wait_for_everyone()
