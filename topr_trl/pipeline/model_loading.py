"""The model and tokenizer that a stage's settings name."""

from typing import TYPE_CHECKING, Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase
from trl import ModelConfig, get_quantization_config

from topr_trl.tasks import arithmetic
from topr_trl.trainers.checkpoints import from_safetensors

if TYPE_CHECKING:
    from topr_trl.pipeline.stages.sample import SampleArguments
    from topr_trl.pipeline.training import TrainArguments

BUNDLED = "the bundled model of 0.3"  # in manifests; version 0.2 had another model


def model_path(settings: ModelConfig) -> str:
    """The model's folder or name; that of the bundled one if there is none."""
    return settings.model_name_or_path or str(arithmetic.CARELESS_MODEL)


def loading(settings: "SampleArguments | TrainArguments") -> dict[str, Any]:
    """How a model is loaded, for `from_pretrained`."""
    given = {"dtype": settings.dtype, "revision": settings.model_revision,
             "attn_implementation": settings.attn_implementation,
             "quantization_config": get_quantization_config(settings)}  # fmt: skip
    # Never None, with which transformers asks on the terminal.
    trust = {"trust_remote_code": bool(settings.trust_remote_code)}
    known = {name: value for name, value in given.items() if value is not None}
    return from_safetensors(model_path(settings), {**known, **trust})


def load_tokenizer(settings: "SampleArguments | TrainArguments") -> PreTrainedTokenizerBase:
    """The model's tokenizer; its stop token pads if it has no pad token."""
    tokenizer = AutoTokenizer.from_pretrained(
        model_path(settings), revision=settings.model_revision, trust_remote_code=bool(settings.trust_remote_code)
    )
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer
