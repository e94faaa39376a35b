"""Make the trainer of the stages `log-mu` and `train`: an `OfflineTOPRTrainer` on the rows of `input`."""

import shutil
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path

import torch
from accelerate import PartialState
from torch import nn
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from trl import ModelConfig, get_peft_config

from topr_trl.data.tables import atomic_write, read_table, shards_of
from topr_trl.pipeline import manifest
from topr_trl.pipeline.lineage import lineage, older_weights, weights_of
from topr_trl.pipeline.manifest import Json
from topr_trl.pipeline.model_loading import ADAPTER, adapter_of, load_model, load_tokenizer, loading, model_path
from topr_trl.pipeline.settings import ADAPTER_SETTINGS, RowsArguments, SeedArguments, seed_of, validate_model
from topr_trl.pipeline.shards import MU_COLUMNS
from topr_trl.pipeline.stage_inputs import absolute, values_of
from topr_trl.pipeline.stages.curate import CHOICE
from topr_trl.settings.checks import check_at_least
from topr_trl.settings.config import OfflineTOPRConfig
from topr_trl.settings.shared import CurationArguments
from topr_trl.trainers.checkpoints import is_whole_checkpoint
from topr_trl.trainers.offline import OfflineTOPRTrainer

# Settings, besides the weights, that determine log π of a row.
FORWARD = ("bf16", "fp16", "model_init_kwargs", "chat_template_path", "eos_token", "pad_token")
# Settings that determine the limits and the level of π/μ, and the source of log μ. `segment_tokens` is not among them,
# because log μ does not depend on it.
RATIO = ("preset", "a_pos", "b_pos", "a_neg", "b_neg", "ratio_level", "log_mu")


@dataclass
class TrainArguments(RowsArguments, OfflineTOPRConfig, ModelConfig):
    """Settings of `topr train`. `topr log-mu` uses a subset of them."""

    output_dir: str | None = field(default=None, metadata={"help": "Folder to write the model to."})
    save_total_limit: int | None = field(default=1, metadata={"help": "Number of checkpoints to keep during training."})
    iteration: int = SeedArguments.iteration

    def __post_init__(self) -> None:
        output_dir = self.output_dir
        validate_model(self, whole=True)
        OfflineTOPRConfig.__post_init__(self)
        self.output_dir = output_dir  # transformers replaces None with a default name.
        check_at_least(0, self, "iteration")
        if self.push_to_hub:
            raise ValueError(
                "push_to_hub is a setting for trainers in your own script. Push the result of a command after it has "
                "finished: topr push --input FOLDER --repo_id NAME."
            )


def adapter_settings(args: TrainArguments) -> Json:
    """Return the LoRA settings as `peft`, for the inputs of a stage. The value is None without LoRA."""
    return {"peft": values_of(args, ADAPTER_SETTINGS) if args.use_peft else None}


def check_rows_per_step(trainer: OfflineTOPRTrainer, work: Path, state: PartialState) -> None:
    """Check that a resumed run has the same number of rows per step as when it started.

    A new run writes this number to a file in `work`. All processes must call this function together.

    Raises:
        ValueError: the number of rows per step has changed.
    """
    args, path = trainer.args, work / "rows_per_step"
    rows = str(args.per_device_train_batch_size * args.gradient_accumulation_steps * state.num_processes)
    known = path.read_text() if path.is_file() else rows
    state.wait_for_everyone()
    if known != rows:
        raise ValueError(
            f"This training run started with {known} rows per step, and now there are {rows}. Use the same number of "
            f"processes as before, or remove {work.parent} to start again."
        )
    if state.is_main_process and not path.is_file():
        work.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as partial:
            partial.write_text(rows)


def trainer_of_rows(args: TrainArguments, columns: Sequence[str] | None = None) -> OfflineTOPRTrainer:
    """Make a trainer for the rows of `args.source`.

    Args:
        args (`TrainArguments`): Settings.
        columns (`Sequence[str]`, *optional*): Columns to read. `None` reads all.

    Raises:
        ValueError: the rows cannot be trained on, or the settings differ from those of `curate`.
    """
    work, own = args.folder / manifest.WORK, copy(args)
    own.output_dir, own.seed = str(work), seed_of("train", args.seed, args.iteration)
    how = {**loading(args), **(args.model_init_kwargs or {})}
    further = adapter_of(args, how.get("dtype"), "quantization_config" in how)
    tokenizer = load_tokenizer(args)
    with PartialState().main_process_first():
        rows = read_table(*shards_of(args.source), cache_dir=work / "cache", columns=columns)
    done = lineage(args.source)
    if MU_COLUMNS[1] in rows.column_names and _has_log_mu_of_writer(done, model_path(args)):
        # The trainer refuses the fingerprint of an older model. That model wrote the rows, so its log μ is right.
        rows = rows.remove_columns(MU_COLUMNS[1])
    _check_choice(args, done.get("curate"))
    if further is not None:
        _check_adapter(args, further)
        own.model_init_kwargs = None
        return OfflineTOPRTrainer(load_model(args, how, trainable=True), own, rows, processing_class=tokenizer)
    own.model_init_kwargs, model, adapter = how, model_path(args), get_peft_config(args)
    if adapter is not None:
        # PEFT saves the base model and its revision with the adapter, which other commands load from anywhere.
        model, adapter.revision = absolute(model), how.get("revision")
    return OfflineTOPRTrainer(model, own, rows, processing_class=tokenizer, peft_config=adapter)


def _check_adapter(args: TrainArguments, adapter: Path) -> None:
    """Raise a ValueError if the adapter of the starting model cannot be trained further with these settings."""
    known = manifest.read(adapter.parent)
    before = known.stages["train"]["inputs"]["peft"] if known else None
    now = adapter_settings(args)["peft"]
    if now is None:
        raise ValueError(
            f"{args.model_name_or_path} has an adapter, and its merged weights would lose a part of the update if they "
            "are not loaded in float32. Set use_peft=True to train the adapter further, or dtype='float32'."
        )
    if changed := [name for name in now if before and now[name] != before.get(name)]:
        given = ", ".join(f"{name}={now[name]} (before: {before[name]})" for name in changed)
        raise ValueError(
            f"{given}: training goes on with the adapter of {args.model_name_or_path}. Use the settings of this adapter. "
            "Or set dtype='float32', which starts a new adapter on the merged weights."
        )


def _has_log_mu_of_writer(done: Mapping[str, Json], model: str) -> bool:
    """Return whether the model that wrote the rows computed their log μ, and `model` was trained from that model."""
    if not {"sample", "log-mu"} <= set(done):
        return False
    writer, scorer = (weights_of(done[stage]["inputs"]) for stage in ("sample", "log-mu"))
    return writer == scorer and writer in older_weights(Path(model))


def _check_choice(args: TrainArguments, curate: Json | None) -> None:
    """Raise a ValueError if a curation setting differs from the one that `curate` used, since it would have no effect.

    Default values pass, because the user may not have set them.
    """
    defaults = CurationArguments()
    there = curate["inputs"] if curate else {}
    for name in CHOICE if there else ():
        value = getattr(args, name)
        if not any(manifest.same_value(value, other) for other in (there[name], getattr(defaults, name))):
            raise ValueError(
                f"{name}={value}, but topr curate chose the rows of {args.source} with {name}={there[name]}. Remove "
                f"{name}, or run topr curate again."
            )


def merge_adapter(adapter: Path, args: TrainArguments, trainer: OfflineTOPRTrainer) -> float:
    """Merge an adapter into its model, and save the model, the tokenizer and the adapter to the folder of a stage.

    The merged weights are float32, whatever the dtype of training was. A weight has 8 bits of precision in bfloat16, so
    most weights would not change in a short training.

    Args:
        adapter (`Path`): Folder of the adapter.
        args (`TrainArguments`): Settings of the stage.
        trainer ([`OfflineTOPRTrainer`]): Trainer of the adapter. The chat template and the stop tokens of its tokenizer
            and its model can differ from those of the starting model.

    Returns:
        `float`: estimated share of the changed weights that would not change in bfloat16.
    """
    from peft import AutoPeftModelForCausalLM

    unset_hf_deepspeed_config()  # Under ZeRO-3, loading would shard the model and wait for the other processes.
    # Merge into weights that are not quantized.
    how = {name: value for name, value in loading(args).items() if name != "quantization_config"}
    model = AutoPeftModelForCausalLM.from_pretrained(adapter, **{**how, "dtype": torch.float32})
    before = _samples(model.get_base_model())
    merged = model.merge_and_unload()
    trained = trainer.model
    merged.generation_config = trained.generation_config
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(merged.config.get_text_config(), name, getattr(trained.config.get_text_config(), name))
    merged.save_pretrained(args.folder)
    trainer.processing_class.save_pretrained(args.folder)
    shutil.copytree(adapter, args.folder / ADAPTER, dirs_exist_ok=True)
    pairs = [(before[name], after) for name, after in _samples(merged).items() if name in before]
    old, new = (torch.cat(values) for values in zip(*pairs, strict=True))
    changed = old != new
    return float((old.bfloat16() == new.bfloat16())[changed].float().mean()) if changed.any() else 0.0


def _samples(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return about 4,096 values of each weight of a model, by the name of the weight without an adapter."""
    weights = {name.replace(".base_layer.", "."): weight for name, weight in model.named_parameters()}
    return {n: w.detach().flatten()[:: w.numel() // 4096 + 1].clone() for n, w in weights.items()}


def last_whole_checkpoint(run: Path, state: PartialState) -> str | None:
    """Return the newest complete checkpoint of a run, or None. Remove incomplete checkpoints.

    All processes must call this function together.
    """
    found = sorted(run.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    whole = [path for path in found if is_whole_checkpoint(path)]
    state.wait_for_everyone()
    if state.is_main_process:
        for path in set(found) - set(whole):
            shutil.rmtree(path)
    state.wait_for_everyone()
    return str(whole[-1]) if whole else None
