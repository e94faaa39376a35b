"""Return the inputs of each stage. A finished stage is not run again while its inputs stay the same."""

from collections.abc import Iterable
from dataclasses import MISSING, fields
from os.path import relpath
from pathlib import Path

from trl import ModelConfig

from topr_trl.pipeline import manifest
from topr_trl.pipeline.arguments import (
    ADAPTER_SETTINGS,
    CurateArguments,
    EvaluateArguments,
    FolderArguments,
    ImportArguments,
    SampleArguments,
    ScoreArguments,
    TrainArguments,
    TrialArguments,
)
from topr_trl.pipeline.manifest import Json
from topr_trl.pipeline.models import BUNDLED, model_path
from topr_trl.tasks import TASKS, arithmetic

# Which rows are trained on, and their R.
CHOICE = ("baseline", "effective_positive_share", "curation", "iteration_size", "curation_positive_share")
_SAMPLING = ("num_generations", "greedy", "temperature", "top_p", "top_k", "max_new_tokens", "sampling_backend",
             "split", "num_shots", "training_shots", "problems_per_shard", "seed", "iteration")  # fmt: skip
_QUANTIZATION = ("load_in_8bit", "load_in_4bit", "bnb_4bit_quant_type", "use_bnb_nested_quant")
# What log π of a row depends on, besides the weights.
_FORWARD = ("bf16", "fp16", "model_init_kwargs", "chat_template_path", "eos_token", "pad_token")
_RATIO = ("preset", "a_pos", "b_pos", "a_neg", "b_neg", "ratio_level", "log_mu")
_STEPS = (
    *_FORWARD, *_RATIO, "length_normalization", "tf32", "max_length", "padding_free", "sort_by_length",
    "share_prompts",
    "per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "max_steps", "learning_rate",
    "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "weight_decay", "max_grad_norm", "optim", "optim_args",
    "optim_target_modules", "adam_beta1", "adam_beta2", "adam_epsilon", "neftune_noise_alpha", "shuffle_dataset",
    "train_sampling_strategy", "data_seed", "dataloader_drop_last", "full_determinism", "use_liger_kernel",
    "router_aux_loss_coef", "accelerator_config",
)  # fmt: skip


def of_sampling(args: SampleArguments) -> Json:
    """Return the inputs of the stage `sample`."""
    names = {*_SAMPLING, f"num_{args.split}_problems"}
    if args.sampling_backend == "vllm":
        names.add("vllm_dtype")  # and the engine forms its own batches
    else:
        names.add("sampling_batch_size")
    data = ["dataset_name", *(["test_dataset_name"] if args.split == "test" else [])]
    return {
        "task": args.task_of_problems.name,
        **{name: getattr(args, name) for name in sorted(names)},
        **{name: _absolute(getattr(args, name)) for name in data},
        **_problems(args),
        **_weights(args),
    }


def _problems(args: SampleArguments) -> Json:
    """The content of files of problems; what is on the Hub has a name alone."""
    names = (args.dataset_name, args.test_dataset_name if args.split == "test" else None)
    here = [Path(name) for name in names if name and Path(name).exists()]
    return {"problems": [manifest.fingerprint(path) for path in here]} if here else {}


def of_import(args: ImportArguments) -> Json:
    """Return the inputs of the stage `import`."""
    named = {"rewards": args.rewards, "requests": args.requests}
    second = {name: manifest.fingerprint(Path(path)) for name, path in named.items() if path}
    own = [f.name for f in fields(args) if f.name not in ("input", "output_dir", *named)]
    return {"input": manifest.fingerprint(args.source), **second, **_named(args, own)}


def of_scoring(args: ScoreArguments) -> Json:
    """Return the inputs of the stage `score`."""
    return {**_rows(args.source, args.folder), "task": task_of_rows(args)}


def of_curation(args: CurateArguments) -> Json:
    """Return the inputs of the stage `curate`."""
    return {**_rows(args.source, args.folder), **_named(args, (*CHOICE, "seed", "iteration"))}


def of_log_mu(args: TrainArguments) -> Json:
    """Return the inputs of the stage `log-mu`. The rows tell which of them were chosen."""
    names = ("baseline", "effective_positive_share", *_RATIO, *_FORWARD, "seed", "iteration")
    return {**_rows(args.source, args.folder), **_weights(args), **_adapter(args), **_named(args, names)}


def of_training(args: TrainArguments) -> Json:
    """Return the inputs of the stage `train`, without the number of processes, which the loop does not know."""
    names = (*CHOICE, *_STEPS, "seed", "iteration")
    return {**_rows(args.source, args.folder), **_weights(args), **_adapter(args), **_named(args, names)}


def of_evaluation(args: EvaluateArguments) -> Json:
    """Return the inputs of the stage `evaluate`."""
    assert args.input is not None
    second = {"compare": manifest.fingerprint(Path(args.compare))} if args.compare else {}
    return {"input": manifest.fingerprint(Path(args.input)), **second, "seed": args.seed}


def defaults_of(args: FolderArguments, now: Json) -> Json:
    """Return inputs that a manifest of an older version lacks: default settings, and the content of files.

    `now` are the inputs of today.
    """
    known = {f.name: f.default for f in fields(args) if f.default is not MISSING}
    return {**known, "problems": now.get("problems")}


def sources_of(args: FolderArguments) -> dict[str, str]:
    """Where a stage has read, relative to its folder: what `lineage` follows."""
    found = {}
    if args.input and Path(args.input).resolve() != args.folder.resolve():
        found["input"] = args.input
    if isinstance(args, ModelConfig) and (Path(model_path(args)) / manifest.NAME).is_file():
        found["weights"] = model_path(args)
    return {name: relpath(Path(path).resolve(), args.folder.resolve()) for name, path in found.items()}


def _rows(source: Path, folder: Path) -> Json:
    """The rows that are read; those of the folder itself are known by the stages before."""
    return {} if source.resolve() == folder.resolve() else {"input": manifest.fingerprint(source)}


def _named(args: object, names: Iterable[str]) -> Json:
    values = {name: getattr(args, name) for name in names if hasattr(args, name)}  # older versions lack some
    return {name: value.to_dict() if hasattr(value, "to_dict") else value for name, value in values.items()}


def _adapter(args: TrainArguments) -> Json:
    return {"peft": _named(args, ADAPTER_SETTINGS) if args.use_peft else None}


def _absolute(name: str | None) -> str | None:
    """Return the absolute path of a local file or folder; a name that may be one of the Hub stays as it is."""
    return str(Path(name).absolute()) if name and Path(name).exists() else name


def _weights(args: ModelConfig) -> Json:
    """The weights if a stage made them, wherever they are now; else the name."""
    path = Path(model_path(args))
    how = {"dtype": args.dtype, "attention": args.attn_implementation}
    if args.load_in_8bit or args.load_in_4bit:
        how |= _named(args, _QUANTIZATION)
    if (path / manifest.NAME).is_file():
        return {"weights": manifest.fingerprint(path), **how}
    name = BUNDLED if path == arithmetic.CARELESS_MODEL else _absolute(str(path))
    return {"model": name, "revision": args.model_revision, **how}


def task_of_rows(args: ScoreArguments | TrialArguments) -> str:
    """The task that the rows were sampled for, if the stage `sample` wrote them; else the one that is named."""
    known = manifest.read(args.source)
    sampled = known.stages.get("sample") if known else None
    task: str = sampled["inputs"].get("task", args.task) if sampled else args.task
    if task not in TASKS:
        raise ValueError(
            f"{args.source / manifest.NAME} says that its rows are of the task {task!r}, and there are "
            f"{', '.join(TASKS)}: they were sampled by another version."
        )
    return task
