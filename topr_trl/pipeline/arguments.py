"""What the stages of an iteration are told, and what of it their results depend on."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from trl import ModelConfig, get_quantization_config

from topr_trl.checkpoints import from_safetensors
from topr_trl.config import OfflineTOPRConfig, check_types
from topr_trl.data.tables import TABLE_SUFFIXES
from topr_trl.generation.sampling import SamplingArguments
from topr_trl.generation.vllm import VLLMArguments
from topr_trl.pipeline import manifest
from topr_trl.tasks import TASKS, Task, arithmetic, hendrycks_math

BACKENDS = ("transformers", "vllm")


@dataclass
class StageArguments:
    """Problems, and where a stage reads and writes.

    Parameters:
        task (`str`, defaults to `"gsm8k"`): `"gsm8k"` or `"math"`: shape of the problems, prompt, who judges answers.
            The embedded problems are always of GSM8K's kind; sampled rows are judged by the task of their problems.
        dataset_name (`str`, *optional*): Problems of the task's shape: Hub name or file; default: embedded ones.
        test_dataset_name (`str`, *optional*): The same for the test problems; default: the test split of the first.
        num_train_problems, num_test_problems (`int`, *optional*): Use the first so many; default: all.
        num_shots (`int`, *optional*): Worked examples in the prompt; default: the task's (8 for GSM8K, 4 for MATH).
        training_shots (`bool`, defaults to `False`): Draw them from the training problems (MATH).
        eval_samples (`int`, defaults to `16`): Samples of each test problem (the paper: 64).
        problems_per_shard (`int`, defaults to `64`): Problems a shard of candidates; what a kill loses at most.
        sampling_backend (`str`, defaults to `"transformers"`): `"transformers"` or `"vllm"`.
        split (`str`, defaults to `"train"`): `"train"` or `"test"` problems.
        input, output (`str`): Folders that a stage reads and writes.
        compare (`str`, *optional*): Candidates of another run, for `evaluate` to set beside those of the input.
        iteration (`int`, defaults to `0`): Enters the seed.
        worker (`str`, *optional*): `k/n`: sample every n-th shard only, from the k-th on, k < n.
    """

    task: str = field(default="gsm8k", metadata={"help": " or ".join(TASKS) + "."})
    dataset_name: str | None = field(default=None, metadata={"help": "Hub name or file; default: embedded problems."})
    test_dataset_name: str | None = field(default=None, metadata={"help": "The same for the test problems."})
    num_train_problems: int | None = field(default=None, metadata={"help": "Use the first so many. Default: all."})
    num_test_problems: int | None = field(default=None, metadata={"help": "Use the first so many. Default: all."})
    num_shots: int | None = field(
        default=None, metadata={"help": "Worked examples in the prompt. Default: the task's."}
    )
    training_shots: bool = field(default=False, metadata={"help": "Draw them from the training problems (MATH)."})
    eval_samples: int = field(default=16, metadata={"help": "Samples of each test problem (the paper: 64)."})
    problems_per_shard: int = field(default=64, metadata={"help": "Problems a shard of candidates."})
    sampling_backend: str = field(default="transformers", metadata={"help": " or ".join(BACKENDS) + "."})
    split: str = field(default="train", metadata={"help": "Problems to sample: train or test."})
    input: str | None = field(default=None, metadata={"help": "Folder (or file of rows) that the stage reads."})
    output: str | None = field(default=None, metadata={"help": "Folder that the stage writes."})
    compare: str | None = field(default=None, metadata={"help": "evaluate: candidates of a second run."})
    iteration: int = field(default=0, metadata={"help": "Enters the seed."})
    worker: str | None = field(default=None, metadata={"help": "k/n: sample only the shards k, k + n, ..."})

    def __post_init__(self) -> None:
        check_types(self, StageArguments)
        for name, choices in (("task", tuple(TASKS)), ("sampling_backend", BACKENDS), ("split", ("train", "test"))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be {' or '.join(choices)}, not {getattr(self, name)!r}.")
        for name in ("eval_samples", "problems_per_shard", "num_train_problems", "num_test_problems"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}.")
        for name in ("num_shots", "iteration"):
            if getattr(self, name) is not None and getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, not {getattr(self, name)}.")
        if self.worker is not None:
            k, _, n = self.worker.partition("/")
            if not (k.isdecimal() and n.isdecimal() and int(k) < int(n)):
                raise ValueError(f"worker must be k/n with k < n, as in 0/8, not {self.worker!r}.")
        if self.test_dataset_name is None and str(self.dataset_name).endswith(TABLE_SUFFIXES):
            raise ValueError("A file has no test split: name the test problems with --test_dataset_name.")
        if self.training_shots and self.task_of_problems is not TASKS["math"]:
            raise ValueError(
                "training_shots draws from MATH's training problems: it needs task=math and a dataset_name."
            )
        if self.num_shots is None:
            self.num_shots = self.task_of_problems.num_shots

    @property
    def task_of_problems(self) -> Task:
        """The task, or that of the embedded problems."""
        return TASKS["gsm8k" if self.dataset_name is None else self.task]


def loading_of(model: ModelConfig) -> dict[str, Any]:
    """How a model is loaded, for `from_pretrained`."""
    given = {"dtype": model.dtype, "revision": model.model_revision, "attn_implementation": model.attn_implementation,
             "quantization_config": get_quantization_config(model)}  # fmt: skip
    return {name: value for name, value in given.items() if value is not None}


@dataclass
class Settings:
    """All that stages are told."""

    stage: StageArguments
    sampling: SamplingArguments
    vllm: VLLMArguments
    training: OfflineTOPRConfig
    model: ModelConfig

    def __post_init__(self) -> None:
        if self.training.push_to_hub:
            raise ValueError(
                "push_to_hub is for a trainer in a script of yours. Push what a stage has made when it is finished: "
                "topr push --input FOLDER --repo_id NAME."
            )

    @property
    def source(self) -> Path:
        if self.stage.input is None:
            raise ValueError("This stage reads rows: name their folder or file with --input.")
        return _readable(self.stage.input, "--input")

    @property
    def compared(self) -> Path | None:
        return _readable(self.stage.compare, "--compare") if self.stage.compare is not None else None

    @property
    def folder(self) -> Path:
        if self.stage.output is None:
            raise ValueError("Name the folder to write with --output.")
        return Path(self.stage.output)

    @property
    def model_path(self) -> str:
        return self.model.model_name_or_path or str(arithmetic.CARELESS_MODEL)

    @property
    def loading(self) -> dict[str, Any]:
        # Never None, with which transformers asks on the terminal.
        trust = {"trust_remote_code": bool(self.training.trust_remote_code)}
        return from_safetensors(self.model_path, {**loading_of(self.model), **trust})

    def tokenizer(self) -> PreTrainedTokenizerBase:
        tokenizer = AutoTokenizer.from_pretrained(
            self.model_path,
            revision=self.model.model_revision,
            trust_remote_code=bool(self.training.trust_remote_code),
        )
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        return tokenizer

    @property
    def samples_of_split(self) -> SamplingArguments:
        """How the problems of the split are sampled: test problems `eval_samples` times."""
        count = self.stage.eval_samples if self.stage.split == "test" else self.sampling.num_candidates
        return SamplingArguments(**{**asdict(self.sampling), "num_candidates": count})

    def seed(self, stage: str, shard: int = 0) -> int:
        """A seed for a stage of this iteration and split, and a shard of it; below 2^31."""
        of_stage = 2 * ("sample", "curate", "train").index(stage) + (self.stage.split == "test")
        entropy = [self.training.seed, self.stage.iteration, of_stage, shard + 1]  # ends in no zero: those are ignored
        return int(np.random.SeedSequence(entropy).generate_state(1)[0] >> 1)


def _readable(name: str, option: str) -> Path:
    path = Path(name)
    if not path.exists():
        raise FileNotFoundError(f"There is no {path} to read ({option}).")
    manifest.check_whole(path)
    return path


def load_problems(args: StageArguments) -> Dataset:
    """The problems of `args.split`: columns `problem_id`, `prompt`, `answer`, and what else the task has."""
    train, task, shots = args.split == "train", args.task_of_problems, args.num_shots
    assert shots is not None
    count = args.num_train_problems if train else args.num_test_problems
    if args.dataset_name is None:
        rows = arithmetic.arithmetic_dataset(count or 400, seed=1 if train else 2)
    else:
        rows = task.load((not train and args.test_dataset_name) or args.dataset_name, args.split)
    rows = rows.select(range(min(count or len(rows), len(rows))))
    if args.training_shots and args.dataset_name is not None:
        # One more than needed: a problem is not its own example.
        exemplars = hendrycks_math.draw_exemplars(task.load(args.dataset_name, "train"), shots + 1)
        return hendrycks_math.prepare(rows, shots, exemplars)
    return task.prepare(rows, shots)


def task_of_rows(settings: Settings) -> str:
    """The task that the rows were sampled for, if the stage `sample` wrote them; else the one that is named.

    Raises:
        ValueError: this version does not know it.
    """
    made = manifest.read(settings.source) or {"inputs": {}}
    task: str = made["inputs"].get("task", settings.stage.task)
    if task not in TASKS:
        raise ValueError(
            f"{settings.source / manifest.NAME} says that its rows are of the task {task!r}, and there are "
            f"{', '.join(TASKS)}: they were sampled by another version."
        )
    return task


# Which rows are trained on, and their R.
CHOICE = ("baseline", "effective_positive_share", "curation", "iteration_size", "curation_positive_share")
_RATIO = ("preset", "a_pos", "b_pos", "a_neg", "b_neg", "ratio_level", "log_mu")
# Of the training arguments: what does not change the weights, or is an input under another name.
_HOW_IT_IS_RUN = (
    "output_dir", "logging", "log_level", "log_on", "log_completions", "num_completions", "save", "report_to",
    "run_name", "push", "hub", "disable_tqdm", "dataloader_num", "dataloader_pin", "dataloader_pers",
    "dataloader_pre", "eval", "per_device_eval", "dataset_num_proc", "project", "trackio", "ddp", "use_cpu",
    "deepspeed", "fsdp", "seed",
)  # fmt: skip


def inputs_of(stage: str, settings: Settings) -> dict[str, Any]:
    """What a stage's results depend on, for its manifest; settings that only say how it is run are left out."""
    args, training, config = settings.stage, settings.training, settings.model
    read = {"input": manifest.fingerprint(settings.source)} if stage != "sample" else {}
    seed = {"seed": training.seed, "iteration": args.iteration}
    if stage == "sample":
        return {**_problems(args), **_sampling(settings), **_model(settings), **seed}
    if stage == "score":
        return {**read, "task": task_of_rows(settings)}
    if stage == "curate":
        return {**read, **seed, **{name: getattr(training, name) for name in CHOICE}}
    if stage == "evaluate":
        second = {"compare": manifest.fingerprint(settings.compared)} if settings.compared else {}
        return {**read, **second, "seed": training.seed}
    model = {**_model(settings), "peft": asdict(config) if config.use_peft else None, **seed}
    if stage == "log-mu":
        precision = ("bf16", "fp16", "model_init_kwargs")
        return {**read, **model, **{name: getattr(training, name) for name in (*CHOICE, *_RATIO, *precision)}}
    how = {n: v for n, v in training.to_dict().items() if not n.startswith(_HOW_IT_IS_RUN)}
    return {**read, **model, **how}


def _problems(args: StageArguments) -> dict[str, Any]:
    own = ["num_shots", "training_shots", "split", "problems_per_shard", f"num_{args.split}_problems"]
    data = ["dataset_name", *(["test_dataset_name"] if args.split == "test" else [])]
    return {
        "task": args.task_of_problems.name,
        **{name: getattr(args, name) for name in own},
        **{name: _absolute(getattr(args, name)) for name in data},
    }


def _absolute(name: str | None) -> str | None:
    """Of a file or folder that is here its whole path, of others the name: elsewhere it could be one of the Hub."""
    return str(Path(name).absolute()) if name and Path(name).exists() else name


def _sampling(settings: Settings) -> dict[str, Any]:
    backend = {"sampling_backend": settings.stage.sampling_backend}
    if settings.stage.sampling_backend == "vllm":
        backend["vllm_dtype"] = settings.vllm.vllm_dtype
    own = asdict(settings.samples_of_split)
    if settings.stage.sampling_backend == "vllm":
        del own["sampling_batch_size"]
    return {**own, **backend}


def _model(settings: Settings) -> dict[str, Any]:
    """The weights if a stage made them, wherever they lie now; else the name."""
    path = Path(settings.model_path)
    how = {"dtype": settings.model.dtype, "attention": settings.model.attn_implementation}
    if (path / manifest.NAME).is_file():
        return {"weights": manifest.fingerprint(path), **how}
    embedded = path == arithmetic.CARELESS_MODEL
    name = "the embedded model" if embedded else _absolute(settings.model_path)
    return {"model": name, "revision": settings.model.model_revision, **how}
