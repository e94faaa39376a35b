import errno
import resource
import shutil
from contextlib import contextmanager
from traceback import StackSummary

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from topr_trl import OfflineTOPRConfig, OfflineTOPRTrainer
from topr_trl.tasks import arithmetic
from topr_trl.trainers.checkpoints import check_files, check_finite, check_resumable, writing_to
from topr_trl.trainers.fingerprints import model_fingerprint


def linear(dtype=torch.float32, **kwargs):
    return nn.Linear(3, 2, dtype=dtype, **kwargs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_one_value_is_found(dtype, value):
    model = nn.Sequential(linear(dtype), linear(dtype))
    model[0].weight.data.fill_(torch.finfo(dtype).max)  # finite, although the sum of squares overflows
    check_finite(model, "It")
    model[1].bias.data[1] = value
    with pytest.raises(FloatingPointError, match=r"^It: 1 of its parameters .* the first is 1\.bias"):
        check_finite(model, "It")


def test_weights_that_cannot_be_looked_at():
    check_finite(nn.Sequential(), "nothing")
    check_finite(linear(device="meta"), "not loaded yet")
    quantized = linear()
    quantized.weight = nn.Parameter(torch.zeros(2, 3, dtype=torch.uint8), requires_grad=False)
    quantized.bias = nn.Parameter(torch.zeros(0))  # empty, like a parameter that ZeRO-3 has sharded
    check_finite(quantized, "neither can be NaN")


@contextmanager
def short_files(limit):
    """Let the system refuse to write more than `limit` bytes to a file, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("library", ["torch", "safetensors", "tokenizers", "python"])
def test_a_full_disk_is_an_oserror_that_names_the_folder(library, tmp_path):
    values = {"weight": torch.zeros(10_000)}
    write = {
        "torch": lambda: torch.save(values, tmp_path / "optimizer.pt"),
        "safetensors": lambda: save_file(values, tmp_path / "model.safetensors"),
        "tokenizers": lambda: Tokenizer.from_file(f"{arithmetic.CARELESS_MODEL}/tokenizer.json").save(f"{tmp_path}/t"),
        "python": lambda: (tmp_path / "state.json").write_text("0" * 10_000),
    }[library]
    with pytest.raises(OSError, match="disk may be full") as caught, short_files(4_000), writing_to(tmp_path):
        write()
    assert str(tmp_path) in str(caught.value)


def test_other_errors_while_writing_keep_their_type():
    for error in (RuntimeError("CUDA error"), ValueError("a setting")):
        with pytest.raises(type(error), match=str(error)), writing_to("out"):
            raise error


def test_sharded_weights(monkeypatch):
    for name, value in {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    model = linear()
    mesh = init_device_mesh("cpu", (1,))
    try:
        model.weight = nn.Parameter(distribute_tensor(torch.tensor([[1.0, 2.0], [float("nan"), 3.0]]), mesh))
        with pytest.raises(FloatingPointError, match="the first is weight"):
            check_finite(model, "It")
    finally:
        torch.distributed.destroy_process_group()


def test_files_are_of_the_model_with_their_names(tmp_path, model):
    shutil.copy(arithmetic.CARELESS_MODEL / "model.safetensors", tmp_path)
    check_files(tmp_path, model)
    other = Qwen2ForCausalLM(
        Qwen2Config(vocab_size=8, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
    )
    with pytest.raises(ValueError, match="belongs to another model"):
        check_files(tmp_path, other)
    check_files(tmp_path, nn.Sequential(linear()))  # no name in common, as with an adapter
    check_files("somebody/a-model-of-the-hub")


def test_a_logged_nan_ends_a_training(model, tokenizer, rows, tmp_path, monkeypatch):
    """A NaN or infinite value in the log stops training. Under DeepSpeed, the check of gradients comes too late."""
    settings = {"report_to": "none", "bf16": False, "use_cpu": True, "gradient_checkpointing": False}
    trainer = OfflineTOPRTrainer(model, OfflineTOPRConfig(str(tmp_path), **settings), rows, processing_class=tokenizer)
    trainer.log({"loss": 1.0, "grad_norm": None})
    for logs in ({"loss": float("nan")}, {"loss": 1.0, "grad_norm": float("inf")}):
        with pytest.raises(FloatingPointError, match=f"`{list(logs)[-1]}` at step 0 is NaN or infinite"):
            trainer.log(logs)
    # With float16, the loss scaler skips steps with infinite gradients and lowers its scale.
    monkeypatch.setattr(trainer.accelerator.state, "_mixed_precision", "fp16")
    trainer.log({"loss": 1.0, "grad_norm": float("inf")})
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, torch.inf)
    stop = next(c for c in trainer.callback_handler.callbacks if type(c).__name__ == "StopAtNaN")
    stop.on_pre_optimizer_step(trainer.args, trainer.state, trainer.control)
    monkeypatch.setattr(trainer.accelerator.state, "_mixed_precision", "no")
    with pytest.raises(FloatingPointError, match="The gradient of step 1"):
        stop.on_pre_optimizer_step(trainer.args, trainer.state, trainer.control)


def test_a_checkpoint_of_deepspeed_is_resumed_only_with_deepspeed(tmp_path):
    (tmp_path / "global_step2").mkdir()
    (tmp_path / "rng_state_0.pth").touch()
    (tmp_path / "trainer_state.json").write_text("{}")
    check_resumable(tmp_path, is_deepspeed=True)
    with pytest.raises(ValueError, match=r"no optimizer and no schedule state.*with DeepSpeed"):
        check_resumable(tmp_path, is_deepspeed=False)


def test_a_checkpoint_of_fsdp_is_resumed_with_its_own_type(tmp_path):
    for name in ("optimizer_0", "pytorch_model_fsdp_0"):
        (tmp_path / name).mkdir()
    for name in ("rng_state_0.pth", "scheduler.pt"):
        (tmp_path / name).touch()
    (tmp_path / "trainer_state.json").write_text("{}")
    check_resumable(tmp_path, False, "SHARDED_STATE_DICT")
    with pytest.raises(
        ValueError, match=r"this run uses FULL_STATE_DICT\. Set fsdp_state_dict_type: SHARDED_STATE_DICT"
    ):
        check_resumable(tmp_path, False, "FULL_STATE_DICT")


def test_a_full_disk_during_a_sharded_checkpoint(tmp_path):
    full = OSError(errno.ENOSPC, "No space left on device")
    with (
        pytest.raises(OSError, match=rf"{tmp_path} cannot be written: .*No space left.* Make room"),
        writing_to(tmp_path),
    ):
        raise CheckpointException("", {1: (full, StackSummary())})


def test_fingerprint(model):
    first = model_fingerprint(model)
    assert first == model_fingerprint(model)
    assert model_fingerprint(model.to(torch.bfloat16)) == first  # lossless, as the file has bfloat16 weights
    with torch.no_grad():
        model.model.norm.weight.mul_(1.01)
    assert model_fingerprint(model) != first


def test_fingerprint_of_a_parameter_too_long_for_float32():
    # float32 rounds 17,825,791 up to 17,825,792, one past the end.
    assert model_fingerprint(torch.nn.Linear(1, 17_825_792, bias=False))
