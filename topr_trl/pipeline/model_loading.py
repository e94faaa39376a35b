"""Load the tokenizer of a stage, and prepare the arguments for loading its model."""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase
from trl import ModelConfig, get_quantization_config

from topr_trl.tasks import arithmetic
from topr_trl.trainers.checkpoints import from_safetensors

# Name of the bundled model in manifests. It has a version, because version 0.2 bundled a different model.
BUNDLED = "the bundled model of 0.3"


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
    # If trust_remote_code is None, transformers asks the user on the terminal.
    trust = {"trust_remote_code": bool(settings.trust_remote_code)}
    known = {name: value for name, value in given.items() if value is not None}
    return from_safetensors(model_path(settings), {**known, **trust})


def _check_holds_model(folder: Path) -> None:
    if not folder.is_dir() or any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        return
    inside = sorted({str(file.parent) for depth in ("*", "*/*") for file in folder.glob(f"{depth}/config.json")})
    hint = f" There are models in {', '.join(inside[:4])}{' and others' if inside[4:] else ''}." if inside else ""
    raise FileNotFoundError(f"{folder} holds no model, because it has no config.json.{hint} Use the folder of a model.")


def load_tokenizer(settings: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer of the model. If it has no pad token, use its EOS token for padding.

    Raises:
        OSError: there is no such model.
    """
    name = model_path(settings)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            name, revision=settings.model_revision, trust_remote_code=bool(settings.trust_remote_code)
        )
    except OSError as error:
        if Path(name).is_dir():
            raise
        raise OSError(
            f"There is no folder {name} here, and no such model could be loaded from the Hub: {error}"
        ) from error
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer
