"""Check weights and checkpoints."""

import errno
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils.constants import FSDP_MODEL_NAME
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME

from topr_trl.settings.checks import check_model_folder

ADAPTER_CONFIG = "adapter_config.json"
SHARDS = f"{FSDP_MODEL_NAME}_0"  # folder of a checkpoint with the sharded weights of FSDP
STATE = TRAINER_STATE_NAME  # the last file that Trainer writes to a checkpoint
_MAY_BE_NAN = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # torch computes no norm of float8


def check_files(name: str | Path, model: nn.Module | None = None) -> None:
    """Check the headers of the safetensors files in a folder. A model on the Hub is not checked.

    Args:
        name (`str` or `Path`):
            Folder of the model, or its id on the Hub.
        model (`torch.nn.Module`, *optional*):
            Model to load the weights into. If given, a weight must have the shape of the parameter with the same name.

    Raises:
        FileNotFoundError: there is no such folder, and `name` looks like a folder, see `check_model_folder`.
        ValueError: a file is damaged, or the shape of a weight differs from `model`.
    """
    check_model_folder(str(name))
    parameters = dict(model.named_parameters()) if model is not None else {}
    for path in sorted(Path(name).glob("*.safetensors")):
        try:
            with safe_open(path, "pt") as file:
                known = sorted(parameters.keys() & set(file.keys()))
                shapes = {key: tuple(file.get_slice(key).get_shape()) for key in known}
        except SafetensorError as error:
            raise ValueError(
                f"{path} cannot be read ({error}): it is damaged or incomplete. Write or download it again, or "
                "use an earlier checkpoint."
            ) from error
        for key, there in shapes.items():
            # Under ZeRO-3, parameters are empty, and `ds_shape` is the full shape.
            here = tuple(getattr(parameters[key], "ds_shape", parameters[key].shape))
            if there != here:
                raise ValueError(
                    f"{path} belongs to another model: {key} has shape {there} in the file and {here} in the model."
                )


def holds_only_adapter(folder: Path) -> bool:
    """Whether a folder has an adapter and no model."""
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file()


def refuse_adapter(name: str | Path) -> None:
    """Raise a ValueError if a folder has an adapter but no model. transformers would load the adapter frozen."""
    folder = Path(name)
    if not holds_only_adapter(folder):
        return
    base = json.loads((folder / ADAPTER_CONFIG).read_text()).get("base_model_name_or_path")
    if (folder.parent / "config.json").is_file():
        remedy = f"Its parent folder, {folder.parent}, holds a complete model. Use that folder."
    else:
        remedy = (
            "To train it further in Python, pass the trainer this model: "
            f"AutoPeftModelForCausalLM.from_pretrained({str(folder)!r}, is_trainable=True). A command needs the merged "
            "model: load it with dtype='float32', and save the model that merge_and_unload() returns."
        )
    raise ValueError(f"{folder} holds an adapter{f' of {base}' if base else ''}, and no model. {remedy}")


def read_adapter_config(adapter: Path) -> dict[str, Any]:
    """Return the configuration of an adapter.

    Raises:
        FileNotFoundError: the base model is given as an absolute path, and there is no such folder.
    """
    config: dict[str, Any] = json.loads((adapter / ADAPTER_CONFIG).read_text())
    base = str(config.get("base_model_name_or_path"))
    if Path(base).is_absolute() and not Path(base).is_dir():
        raise FileNotFoundError(
            f"{adapter} is an adapter of {base}, and there is no such folder. Put the base model there. Or set --dtype "
            "float32 (with vLLM, --vllm_dtype float32), which reads the merged weights of topr train."
        )
    return config


def from_safetensors(name: str, loading: dict[str, Any] | None = None) -> dict[str, Any]:
    """Add `use_safetensors=True` to arguments of `from_pretrained`, because reading a pickle can run code.

    Args:
        name (`str`):
            Folder of the model, or its id on the Hub.
        loading (`dict[str, Any]`, *optional*):
            Arguments of `from_pretrained`. If they set `use_safetensors`, their value is kept.

    Returns:
        `dict[str, Any]`: the arguments with `use_safetensors`.

    Raises:
        FileNotFoundError: there is no such folder, see `check_files`.
        ValueError: a file is damaged (see `check_files`), or the folder has only pickled weights and
            `use_safetensors` is not `False`. If a model on the Hub has only pickled weights, transformers raises an
            error when it loads them.
    """
    check_files(name)
    loading = {"use_safetensors": True, **(loading or {})}
    folder = Path(name)
    pickles = sorted(path.name for path in folder.glob("*_model*.bin"))
    if loading["use_safetensors"] and pickles and not any(folder.glob("*.safetensors")):
        raise ValueError(
            f"{folder} holds pickled weights ({pickles[0]}) and no safetensors. Reading a pickle can run code. If you "
            "trust the file, load the model and save it with model.save_pretrained, which writes safetensors."
        )
    return loading


def is_whole_checkpoint(folder: Path) -> bool:
    """Whether a checkpoint is complete: its `trainer_state.json`, which Trainer writes last, can be read."""
    try:
        json.loads((folder / STATE).read_text())
    except (OSError, ValueError):
        return False
    return True


def check_resumable(folder: str | Path, is_deepspeed: bool, fsdp_type: str | None = None) -> None:
    """Raise a ValueError if a checkpoint lacks the state of training, the optimizer, the schedule or random generators.

    Without the error, Trainer would silently continue with a new state. Only a run with DeepSpeed (`is_deepspeed`)
    reads DeepSpeed's folder, which has the optimizer and the schedule. A run with FSDP reads only weights that were
    saved with its own `fsdp_state_dict_type`.
    """
    folder = Path(folder)
    saved = {"SHARDED_STATE_DICT": SHARDS, "FULL_STATE_DICT": f"{FSDP_MODEL_NAME}.bin"}
    saved_type = next((kind for kind, name in saved.items() if (folder / name).exists()), fsdp_type)
    if fsdp_type and saved_type != fsdp_type:
        raise ValueError(
            f"{folder} was saved with fsdp_state_dict_type: {saved_type}, and this run uses {fsdp_type}. Set "
            f"fsdp_state_dict_type: {saved_type} in the config file of Accelerate."
        )
    of_deepspeed = is_deepspeed and any(folder.glob("global_step*"))
    found = {
        "optimizer": of_deepspeed or any(folder.glob("optimizer*")),
        "schedule": of_deepspeed or (folder / "scheduler.pt").is_file(),
        "random": any(folder.glob("rng_state*")),
        "training": is_whole_checkpoint(folder),
    }
    missing = [what for what, is_there in found.items() if not is_there]
    if missing:
        raise ValueError(
            f"{folder} has no {' and no '.join(missing)} state, so the run cannot be resumed exactly. The checkpoint "
            "was saved with save_only_model=True, or with DeepSpeed, which this run does not use; or files were "
            "removed or damaged. Resume from another checkpoint; or use this one as the model of a new run, in another "
            "output_dir."
        )


def fsdp_plugin(accelerator: Accelerator) -> Any:
    """Return Accelerate's settings of FSDP, or None without FSDP."""
    return getattr(accelerator.state, "fsdp_plugin", None)


@contextmanager
def whole_fsdp_weights(accelerator: Accelerator) -> Iterator[None]:
    """Make `Trainer.save_model` save whole weights. With FSDP's `SHARDED_STATE_DICT`, it would save none."""
    if (plugin := fsdp_plugin(accelerator)) is None:
        yield
        return
    before = plugin.state_dict_type
    plugin.set_state_dict_type("FULL_STATE_DICT")
    try:
        yield
    finally:
        plugin.set_state_dict_type(before)


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Parts of the error messages of torch, and of libraries written in Rust, if they cannot write a file.
_NOT_WRITTEN = ("(os error ", "iostream error", "inline_container")


@contextmanager
def writing_to(folder: str | Path) -> Iterator[None]:
    """Turn errors of libraries that cannot write a file into an OSError that names the folder.

    safetensors, tokenizers and torch raise errors of other types. Like Python's own error for a full disk, most of them
    do not name the file.

    Args:
        folder (`str` or `Path`):
            Folder that is written.

    Raises:
        OSError: a file cannot be written.
    """
    try:
        yield
    except (Exception, CheckpointException) as raised:  # tokenizers raises an Exception.
        # Sharded checkpoints of FSDP raise this error, which has the error of each process.
        failures = raised.failures.values() if isinstance(raised, CheckpointException) else ()
        error = next((error for error, _ in failures), raised)
        is_full = isinstance(error, OSError) and error.errno in _FULL and error.filename is None
        of_library = isinstance(error, SafetensorError) or any(text in str(error) for text in _NOT_WRITTEN)
        if not (is_full or (of_library and not isinstance(error, OSError))):
            raise
        raise OSError(
            f"{folder} cannot be written: {error}. The disk may be full, or the quota used up. Make room, and run the "
            "same command again, or resume from an earlier checkpoint."
        ) from error


def check_finite(model: nn.Module, what: str) -> None:
    """Raise a FloatingPointError if a weight is NaN or infinite. `what` is the start of the error message.

    Each process checks its own part of sharded weights. Under ZeRO-3 the parameters are empty, so nothing is checked.
    """
    if not _all_finite(model.parameters()):
        bad = [name for name, parameter in model.named_parameters() if not _all_finite([parameter])]
        raise FloatingPointError(
            f"{what}: {len(bad)} of its parameters hold NaN or infinite values; the first is {bad[0]}. Start from an "
            "earlier checkpoint."
        )


def _all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether all values are finite. If their norm is finite, the function waits for the device only once."""
    local = [x.to_local() if isinstance(x, DTensor) else x for x in tensors]
    values = [x.detach() for x in local if x.dtype in _MAY_BE_NAN and x.numel() and not x.is_meta]
    if not values or nn.utils.get_total_norm(values).isfinite():  # On a CPU, the norm is the fastest reduction.
        return True
    return all(bool(x.isfinite().all()) for x in values)  # The norm can overflow even if all values are finite.


class StopAtNaN(TrainerCallback):
    """Callback that stops training at a NaN or infinite gradient, before the optimizer uses the gradient.

    The check waits for the device once per step. With float16 mixed precision nothing is checked, because the loss
    scaler skips steps with infinite gradients. Under DeepSpeed, the callback runs only after the optimizer step.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_pre_optimizer_step(self, args: Any, state: Any, *_: Any, **kwargs: Any) -> None:
        """Raise a FloatingPointError if a gradient is NaN or infinite."""
        gradients = [p.grad for p in self.trainer.model.parameters() if p.grad is not None]
        if self.trainer.accelerator.mixed_precision != "fp16" and not _all_finite(gradients):
            raise not_finite(f"The gradient of step {state.global_step + 1}", args.output_dir)


def not_finite(what: str, output_dir: str) -> FloatingPointError:
    """Return the error that stops training at a NaN or infinite value. `what` names the value."""
    return FloatingPointError(
        f"{what} is NaN or infinite, so training stops. Checkpoints in {output_dir} are from earlier steps. Look for "
        "extreme rewards or log μ in the rows, lower learning_rate, or compute in float32 or bfloat16."
    )
