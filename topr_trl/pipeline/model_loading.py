"""Load the model and the tokenizer of a stage.

`topr train` merges an adapter into float32 weights, and also keeps the adapter in the folder `adapter/`. Rounding the
merged weights to bfloat16, or to 4 bits, would undo most of a small update. So stages read the merged weights only in
float32. In other dtypes, in 4 or 8 bits, and to train the adapter further, stages load the base model and the adapter.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from trl import ModelConfig, get_quantization_config

from topr_trl.data.tokenization import is_of_mistral_common
from topr_trl.pipeline import manifest
from topr_trl.tasks import arithmetic
from topr_trl.trainers.checkpoints import (
    ADAPTER_CONFIG,
    SHARDS,
    from_safetensors,
    holds_only_adapter,
    read_adapter_config,
)

# Name of the bundled model in manifests. It has a version, because version 0.2 bundled a different model.
BUNDLED = "the bundled model of 0.3"
ADAPTER = "adapter"  # subfolder of a model's folder, with the trained adapter that was merged into the model


def model_path(settings: ModelConfig) -> str:
    """Return the folder or name of the model. Without a name, return the folder of the bundled model."""
    return settings.model_name_or_path or str(arithmetic.CARELESS_MODEL)


def loading(settings: ModelConfig) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` for the settings of a stage.

    Raises:
        FileNotFoundError, ValueError: the folder holds no model, or the weights cannot be loaded, see
            `from_safetensors`.
    """
    _check_holds_model(Path(model_path(settings)))
    given = {"dtype": settings.dtype, "revision": settings.model_revision,
             "attn_implementation": settings.attn_implementation,
             "quantization_config": get_quantization_config(settings)}  # fmt: skip
    known = {name: value for name, value in given.items() if value is not None}
    # If trust_remote_code is None, transformers asks the user on the terminal.
    known["trust_remote_code"] = bool(settings.trust_remote_code)
    return from_safetensors(model_path(settings), known)


def _check_holds_model(folder: Path) -> None:
    if not folder.is_dir() or any((folder / name).is_file() for name in ("config.json", ADAPTER_CONFIG)):
        return
    inside = sorted({str(file.parent) for depth in ("*", "*/*") for file in folder.glob(f"{depth}/config.json")})
    hint = f" There are models in {', '.join(inside[:4])}{' and others' if inside[4:] else ''}." if inside else ""
    if (folder / SHARDS).is_dir():
        hint = " It is a sharded checkpoint, which only training can read; see fsdp_state_dict_type in docs/scaling.md."
    raise FileNotFoundError(f"{folder} holds no model, because it has no config.json.{hint} Use the folder of a model.")


def adapter_of(settings: ModelConfig, dtype: str | None, quantized: bool = False) -> Path | None:
    """Return the folder of the adapter to load with its base model. Return None to load the model without an adapter.

    Args:
        settings ([`~trl.ModelConfig`]): Settings of the model.
        dtype (`str`, *optional*): Dtype of the weights to load. In float32, merged weights are used if there are any.
        quantized (`bool`, *optional*, defaults to `False`): Whether the weights are loaded in 4 or 8 bits. Merged
            weights are then not used.
    """
    folder = Path(model_path(settings))
    if holds_only_adapter(folder):
        return folder
    is_merged = (folder / manifest.NAME).is_file() and (folder / ADAPTER / ADAPTER_CONFIG).is_file()
    return folder / ADAPTER if is_merged and (dtype != "float32" or quantized) else None


def load_model(settings: ModelConfig, how: Mapping[str, Any], trainable: bool = False) -> Any:
    """Load a model, or the base model with the adapter that `adapter_of` names.

    Args:
        settings ([`~trl.ModelConfig`]): Settings of the model.
        how (`Mapping[str, Any]`): Arguments of `from_pretrained`, see `loading`.
        trainable (`bool`, *optional*, defaults to `False`): Whether to load an adapter to train it further. The merged
            weights are then not read.

    Raises:
        FileNotFoundError: the base model of the adapter is a local folder that does not exist.
    """
    adapter = adapter_of(settings, None if trainable else how.get("dtype"), "quantization_config" in how)
    if adapter is None:
        return AutoModelForCausalLM.from_pretrained(model_path(settings), **how)
    return load_with_adapter(adapter, how, trainable)


def load_with_adapter(adapter: Path, how: Mapping[str, Any], trainable: bool = False) -> Any:
    """Load an adapter and its base model.

    PEFT's `AutoPeftModelForCausalLM` would give the model a new embedding for each token that only the tokenizer has.

    Args:
        adapter (`Path`): Folder of the adapter.
        how (`Mapping[str, Any]`): Arguments of `from_pretrained` for the base model, see `loading`.
        trainable (`bool`, *optional*, defaults to `False`): Whether to load the adapter to train it further.

    Raises:
        FileNotFoundError: the base model of the adapter is a local folder that does not exist.
    """
    from peft import PeftModel

    config = read_adapter_config(adapter)
    how = {**how, "revision": config.get("revision") or "main"}
    base = AutoModelForCausalLM.from_pretrained(config["base_model_name_or_path"], **how)
    return PeftModel.from_pretrained(base, adapter, is_trainable=trainable)


def load_tokenizer(settings: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer of the model. If the tokenizer has no pad token, the EOS token becomes the pad token.

    Raises:
        OSError: there is no such model, or its folder has no tokenizer.
    """
    name = model_path(settings)
    given = {"revision": settings.model_revision, "trust_remote_code": bool(settings.trust_remote_code)}
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **given)
        if is_of_mistral_common(tokenizer):  # It has no chat template.
            tokenizer = AutoTokenizer.from_pretrained(name, **given, mistral_format=False)
    except OSError as error:
        if Path(name).is_dir():
            raise
        raise OSError(
            f"There is no folder {name} here, and no such model could be loaded from the Hub: {error}"
        ) from error
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer
