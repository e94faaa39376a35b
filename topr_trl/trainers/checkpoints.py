"""Rejects unusable weights (pickles, truncated files, NaN or infinity), and tells models apart by their weights."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, is_peft_model
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

_MAY_BE_NAN = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # float8 has no norm


def check_files(name: str | Path, model: nn.Module | None = None) -> None:
    """Raise a FileNotFoundError for a missing folder, a ValueError for truncated weights or those of another model.

    Only headers are read. Models of the Hub are not looked at. Weights named like parameters of `model` must have
    their shapes.
    """
    if str(name).startswith((".", "/", "~")) and not Path(name).is_dir():
        raise FileNotFoundError(f"There is no folder {name}: name one with a model, or a model of the Hub.")
    parameters = dict(model.named_parameters()) if model is not None else {}
    for path in sorted(Path(name).glob("*.safetensors")):
        try:
            with safe_open(path, "pt") as file:
                known = sorted(parameters.keys() & set(file.keys()))
                shapes = {key: tuple(file.get_slice(key).get_shape()) for key in known}
        except SafetensorError as error:
            raise ValueError(
                f"{path} cannot be read ({error}): it is damaged, or was not written to its end. Write or download it "
                "again, or use an earlier checkpoint."
            ) from error
        for key, there in shapes.items():
            here = tuple(getattr(parameters[key], "ds_shape", parameters[key].shape))  # of the whole, under ZeRO-3
            if there != here:
                raise ValueError(f"{path} belongs to another model: {key} has shape {there} there, {here} here.")


def refuse_adapter(name: str | Path) -> None:
    """Raise a ValueError if a folder holds only an adapter, which transformers would load frozen."""
    folder = Path(name)
    config = folder / "adapter_config.json"
    if not config.is_file() or (folder / "config.json").is_file():
        return
    base = json.loads(config.read_text()).get("base_model_name_or_path")
    if (folder.parent / "config.json").is_file():
        remedy = f"The folder above it, {folder.parent}, holds a whole model. Give the trainer that folder."
    else:
        remedy = (
            "To train it further, load both in Python, and give the trainer that model: "
            f"AutoPeftModelForCausalLM.from_pretrained({str(folder)!r}, is_trainable=True). A command needs the merged "
            "model: save what merge_and_unload() returns."
        )
    raise ValueError(f"{folder} holds an adapter{f' of {base}' if base else ''}, and no model. {remedy}")


def from_safetensors(name: str, loading: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return arguments of `from_pretrained` that read safetensors alone, unless `loading` has a `use_safetensors`.

    Raises:
        FileNotFoundError, ValueError: see `check_files`; or the folder holds pickled weights alone (of models of the
            Hub transformers itself says so).
    """
    check_files(name)
    loading = {"use_safetensors": True, **(loading or {})}
    folder = Path(name)
    pickles = sorted(path.name for path in folder.glob("*_model*.bin"))
    if loading["use_safetensors"] and pickles and not any(folder.glob("*.safetensors")):
        raise ValueError(
            f"{folder} holds pickled weights ({pickles[0]}) and no safetensors. Reading a pickle can run code: load it "
            "where you trust it, and save it again with model.save_pretrained, which writes safetensors."
        )
    return loading


# Elements of each parameter that enter the fingerprint. One step moves nearly all of them, so a sample is enough.
_SAMPLED = 512


def model_fingerprint(
    model: nn.Module, is_included: Callable[[str, nn.Parameter], bool] = lambda name, parameter: True
) -> str:
    """Return a short hash of a model's weights: names, shapes and evenly spaced values of its parameters.

    Equal weights give equal fingerprints whatever the dtype they were widened to and however they are sharded.
    Adapters count, unless they are new: a LoRA adapter whose B is 0 leaves the model what it is, whatever its random
    A. All processes must call it together, and get the main process's: elsewhere the weights may not be loaded yet.

    Args:
        is_included: whether a parameter counts, from its name and the parameter.
    """
    digest = hashlib.sha256()
    new = _new_adapters(model)
    for name, parameter in sorted(model.named_parameters()):
        if not is_included(name, parameter) or _owner_of_lora(name) in new:
            continue
        with _whole(parameter) as whole:
            flat = whole.detach().reshape(-1)
            count = min(len(flat), _SAMPLED)
            digest.update(f"{_base_name(name)}{tuple(whole.shape)}".encode())
            if not flat.is_meta:
                # In integers: float32 cannot tell the last of over 2^24 elements from the one after it.
                sample = flat[torch.arange(count, device=flat.device) * (len(flat) - 1) // max(count - 1, 1)]
                digest.update(sample.float().cpu().numpy().tobytes())
    result: str = broadcast_object_list([digest.hexdigest()[:16]])[0]
    return result


def _base_name(name: str) -> str:
    """Return the name that a parameter has without an adapter around it."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


def _owner_of_lora(name: str) -> tuple[str, str] | None:
    """Return the layer and the adapter that a parameter of LoRA belongs to; None for other parameters."""
    layer, found, rest = name.partition(".lora_")
    return (layer, rest.split(".")[1]) if found else None


def _new_adapters(model: nn.Module) -> set[tuple[str, str] | None]:
    """Return the layers and LoRA adapters whose product is still 0."""
    is_new: dict[tuple[str, str] | None, bool] = {}
    for name, parameter in model.named_parameters():
        if ".lora_B." in name or ".lora_embedding_A." in name:  # the factors that begin as 0, and their biases
            with _whole(parameter) as whole:
                is_zero = not whole.is_meta and not bool(whole.detach().any())
            owner = _owner_of_lora(name)
            is_new[owner] = is_new.get(owner, True) and is_zero
    return {owner for owner, new in is_new.items() if new}


def mu_fingerprint(model: nn.Module, temperature: float) -> str:
    """Return the fingerprint of the policy that log μ belongs to: the weights, and the temperature unless it is 1."""
    return model_fingerprint(model) + _at(temperature)


def _at(temperature: float) -> str:
    return f"@{temperature:g}" if temperature != 1 else ""


class StartingModel(TrainerCallback, ExportableState):
    """The model that a training started from. Each checkpoint keeps it, in `trainer_state.json`.

    A script that resumes may have built its model in any way: its weights are replaced by the checkpoint's.

    Attributes:
        model: the fingerprint that log μ belongs to, see `mu_fingerprint`.
        base: with an adapter, the fingerprint of the weights below it, which are not in the checkpoint.
    """

    def __init__(self) -> None:
        self.model = self.base = ""

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"model": self.model, "base": self.base}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add this callback to the state of a checkpoint that lacks it, where Trainer expects it when it saves."""
        state.stateful_callbacks.setdefault(type(self).__name__, self.state())

    def begin(self, model: nn.Module, temperature: float, checkpoint: Path | None) -> None:
        """Fingerprint the model, or read the fingerprint from the checkpoint.

        Version 0.2.0 kept none in its checkpoints. For these the model has to be the one that the run started from.

        Raises:
            ValueError: the base model or the temperature of the checkpoint differs.
        """
        base = _base_fingerprint(model)
        state = {} if checkpoint is None else _state_of(checkpoint) or {}
        known = state.get("stateful_callbacks", {}).get(type(self).__name__)
        if known is None:
            self.model, self.base = mu_fingerprint(model, temperature), base
            return
        self.model, self.base = known["attributes"]["model"], known["attributes"]["base"]
        if base != self.base:
            raise ValueError(
                f"{checkpoint} is an adapter for another base model: fingerprint {self.base or 'none'}, and the model "
                f"to resume with has {base or 'none'}. Resume with the base model that the run started with."
            )
        if (at := "".join(self.model.partition("@")[1:])) != _at(temperature):
            raise ValueError(
                f"{checkpoint} is of a run at temperature {at[1:] or 1}, and the rows were sampled at "
                f"{temperature:g}. Resume with the rows that the run started with."
            )


def _base_fingerprint(model: Any) -> str:
    if not is_peft_model(model):
        return ""
    adapters = [f".{name}." for name in model.peft_config]

    def is_base(name: str, parameter: nn.Parameter) -> bool:
        # Biases of the base model may be trained, and are in the checkpoint then.
        return not parameter.requires_grad and not any(adapter in f"{name}." for adapter in adapters)

    return model_fingerprint(model, is_base)


@contextmanager
def _whole(parameter: nn.Parameter) -> Iterator[Tensor]:
    """The whole of a parameter that may be sharded."""
    if hasattr(parameter, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            yield parameter
    else:
        yield parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


# What a trainer has logged; of a checkpoint it is written last.
STATE = "trainer_state.json"


def is_whole_checkpoint(folder: Path) -> bool:
    """Whether a checkpoint was written to its end."""
    return _state_of(folder) is not None


def _state_of(folder: Path) -> Any:
    """Return the training state of a checkpoint; None if it has none."""
    try:
        return json.loads((folder / STATE).read_text())
    except (OSError, ValueError):
        return None


def check_log(folder: str | Path) -> None:
    """Raise a ValueError if another trainer than ours has written a checkpoint."""
    logs = (_state_of(Path(folder)) or {}).get("log_history", [])  # the trainer says what is wrong with a broken one
    of_training = [logged for logged in logs if "loss" in logged]
    if of_training and not any(name.startswith("topr/") for logged in of_training for name in logged):
        raise ValueError(
            f"{folder} was not written by a TOPR trainer: its log has no topr/ metrics. Its optimizer, schedule and "
            "step are of another training. Set another output_dir; to start from its weights, name it as the model."
        )


def check_resumable(folder: str | Path) -> None:
    """Raise a ValueError if a checkpoint has no optimizer, schedule or random state.

    Trainer would silently create new ones.
    """
    folder = Path(folder)
    of_deepspeed = any(folder.glob("global_step*"))  # holds the optimizer and the schedule
    found = {
        "optimizer": of_deepspeed or any(folder.glob("optimizer*")),
        "schedule": of_deepspeed or (folder / "scheduler.pt").is_file(),
        "random": any(folder.glob("rng_state*")),
    }
    missing = [what for what, is_there in found.items() if not is_there]
    if missing:
        raise ValueError(
            f"{folder} has no {' and no '.join(missing)} state, so the run cannot be resumed exactly. The checkpoint "
            "was saved with save_only_model=True, or files were removed. Resume from another checkpoint; or name this "
            "one as the model of a new training, in another output_dir."
        )


def check_finite(model: nn.Module, what: str) -> None:
    """A FloatingPointError if weights hold NaN or infinity; `what` begins its message.

    Of sharded weights each process sees its part (under ZeRO-3 none).
    """
    if not _all_finite(model.parameters()):
        bad = [name for name, parameter in model.named_parameters() if not _all_finite([parameter])]
        raise FloatingPointError(
            f"{what}: {len(bad)} of its parameters hold NaN or infinite values, the first is {bad[0]}. Start from a "
            "checkpoint from before that."
        )


def _all_finite(tensors: Iterable[Tensor]) -> bool:
    """Waits for the device once if all are."""
    local = [x.to_local() if isinstance(x, DTensor) else x for x in tensors]
    values = [x.detach() for x in local if x.dtype in _MAY_BE_NAN and x.numel() and not x.is_meta]
    if not values or nn.utils.get_total_norm(values).isfinite():  # no other reduction is as fast on a CPU
        return True
    return all(bool(x.isfinite().all()) for x in values)  # squares of large values overflow before they do


class StopAtNaN(TrainerCallback):
    """Stops training at a gradient with NaN or infinite values, before the weights take it.

    Waits for the device once a step. With float16 its loss scaler leaves such steps out, as it should; DeepSpeed has
    stepped by then.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_pre_optimizer_step(self, args: Any, state: Any, *_: Any, **kwargs: Any) -> None:
        gradients = [p.grad for p in self.trainer.model.parameters() if p.grad is not None]
        if self.trainer.accelerator.mixed_precision != "fp16" and not _all_finite(gradients):
            raise not_finite(f"The gradient of step {state.global_step + 1}", args.output_dir)


def not_finite(what: str, output_dir: str) -> FloatingPointError:
    """The error that ends a training that has come to NaN."""
    return FloatingPointError(
        f"{what} is NaN or infinite, so training stops. Checkpoints in {output_dir} are from before that. Look for "
        "extreme rewards or log μ in the rows, lower learning_rate, or compute in float32 or bfloat16."
    )
