"""Train an adapter from stage to stage, and merge it into float32 weights for other programs."""

import shutil
from pathlib import Path

import torch
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from trl import ModelConfig

from topr_trl.pipeline import manifest
from topr_trl.pipeline.manifest import Json
from topr_trl.pipeline.model_loading import ADAPTER, load_with_adapter, loading
from topr_trl.pipeline.settings import ADAPTER_SETTINGS
from topr_trl.pipeline.stage_inputs import values_of
from topr_trl.trainers.checkpoints import read_adapter_config
from topr_trl.trainers.offline import OfflineTOPRTrainer


def adapter_settings(args: ModelConfig) -> Json:
    """Return `{"peft": SETTINGS}` for the inputs of a stage: the LoRA settings, or None if LoRA is off."""
    return {"peft": values_of(args, ADAPTER_SETTINGS) if args.use_peft else None}


def check_adapter(args: ModelConfig, adapter: Path) -> None:
    """Raise a ValueError if an adapter cannot be trained further with these settings."""
    record, now = manifest.read(adapter.parent), adapter_settings(args)["peft"]
    assert record is not None  # Without a manifest, the folder has no merged weights, and no command trains from it.
    before = record.stages["train"]["inputs"]["peft"]
    if now is None:
        raise ValueError(
            f"{args.model_name_or_path} has an adapter, and its merged weights would lose a part of the update if they "
            "are not loaded in float32. Set use_peft=True to train the adapter further, or dtype='float32'."
        )
    if changed := [name for name in now if now[name] != before.get(name)]:
        given = ", ".join(f"{name}={now[name]} (before: {before[name]})" for name in changed)
        raise ValueError(
            f"{given}: training goes on with the adapter of {args.model_name_or_path}. Use its settings, or start from "
            f"its base model, {read_adapter_config(adapter)['base_model_name_or_path']}."
        )


def merge_adapter(adapter: Path, args: ModelConfig, trainer: OfflineTOPRTrainer, folder: Path) -> None:
    """Merge an adapter into its model, and save the model, the tokenizer and the adapter to a folder.

    The merged weights are float32, whatever the dtype of training was. A weight has 8 bits of precision in bfloat16, so
    most weights would not change in a short training run.

    Args:
        adapter (`Path`): Folder of the adapter.
        args ([`~trl.ModelConfig`]): Settings of the model.
        trainer ([`OfflineTOPRTrainer`]): Trainer of the adapter. The chat template and the stop tokens of its tokenizer
            and its model can differ from those of the starting model.
        folder (`Path`): Folder to write to.
    """
    unset_hf_deepspeed_config()  # Under ZeRO-3, loading would shard the model and wait for the other processes.
    # Merge into weights that are not quantized.
    how = {name: value for name, value in loading(args).items() if name != "quantization_config"}
    model = load_with_adapter(adapter, {**how, "dtype": torch.float32})
    tokens, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(tokens, torch.nn.Embedding) and tokens.weight is head.weight:
        # The adapter of the embedding must not change the output head, which shares the weights.
        head.weight = torch.nn.Parameter(head.weight.clone())
        model.config.tie_word_embeddings = False
    merged = model.merge_and_unload()
    trained = trainer.model
    merged.generation_config = trained.generation_config
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(merged.config.get_text_config(), name, getattr(trained.config.get_text_config(), name))
    merged.save_pretrained(folder)
    trainer.processing_class.save_pretrained(folder)
    shutil.copytree(adapter, folder / ADAPTER, dirs_exist_ok=True)
