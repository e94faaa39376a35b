"""Compare the memory of processes with the plan of `topr plan`, for a small model on the CPU and each config.

    python -m benchmarks.memory

The peak is the maximum of PyTorch's recorded allocations, from before the model is loaded to the end of the third step.
The results are written to `benchmarks/results/memory.json`.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from datasets import Dataset
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, training_args
from trl.kernels import chunked_logprob

from benchmarks.cells import versions
from topr_trl import OfflineTOPRConfig, OfflineTOPRTrainer
from topr_trl.cli.memory_estimate import Shape, memory
from topr_trl.tasks.arithmetic import CARELESS_MODEL

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "memory.json"
# The model has large matrices and a small vocabulary, because without a GPU, the head keeps seven float32 copies of a
# tile. The plan does not include these copies.
MODEL = LlamaConfig(vocab_size=1_000, hidden_size=512, intermediate_size=2_048, num_hidden_layers=10,
                    num_attention_heads=8, num_key_value_heads=4, pad_token_id=1, eos_token_id=0)  # fmt: skip
BUCKET = 4_000_000  # elements; DeepSpeed's default of 5e8 would dominate the memory of a small model
ROWS, PROMPT, RESPONSE = 2, 192, 192
CASES = [
    (config, optim, checkpointing)
    for config in ("one", "ddp", "fsdp2", "zero1", "zero2", "zero3")
    for optim in ("adamw_torch_fused", "adafactor")
    for checkpointing in (True, False)
    if (config, optim) != ("fsdp2", "adafactor")  # not supported
]


def measure(folder: Path, optim: str, checkpointing: bool) -> None:
    """Train for three steps in one of the processes, and write its peak."""
    deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
    _prepare_for_the_cpu(deepspeed)
    args = OfflineTOPRConfig(
        str(folder / "run"), per_device_train_batch_size=ROWS, gradient_accumulation_steps=2, max_steps=3, optim=optim,
        bf16=True, gradient_checkpointing=checkpointing, use_cpu=not deepspeed,
        ddp_backend="gloo" if deepspeed else None, report_to="none", save_strategy="no",
        disable_tqdm=True, model_init_kwargs={"dtype": "float32"},
        accelerator_config={"gradient_accumulation_kwargs": {"sync_each_batch": True}},
    )  # fmt: skip
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(2, MODEL.vocab_size, (24, PROMPT + RESPONSE), generator=draw).tolist()
    rows = Dataset.from_list(
        [
            {"prompt": "", "completion": "", "prompt_ids": row[:PROMPT], "completion_ids": row[PROMPT:],
             "reward": float((-1) ** k)}
            for k, row in enumerate(ids)
        ]
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(CARELESS_MODEL)
    with allocations() as profile:
        trainer = OfflineTOPRTrainer(str(folder / "model"), args, rows, processing_class=tokenizer)
        trainer.train()
    peak = peak_of(profile, folder / f"trace-{args.process_index}.json")
    (folder / f"peak-{args.process_index}").write_text(str(peak))
    trainer.accelerator.wait_for_everyone()
    os._exit(0)  # gloo can hang at shutdown


def _prepare_for_the_cpu(deepspeed: bool) -> None:
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        # Accelerate only shards on accelerators. With this distributed type, FSDP2 also runs on the CPU.
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
        torch.distributed.init_process_group("gloo")
        PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_GPU)  # type: ignore[method-assign]
    if deepspeed:
        from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

        DeepSpeedZeroConfig.model_fields["reduce_bucket_size"].default = BUCKET
        DeepSpeedZeroConfig.model_rebuild(force=True)
        training_args.is_torch_bf16_gpu_available = lambda: True  # so that bf16 is accepted without use_cpu
    chunked_logprob.TOKEN_CHUNK_SIZE = 64


def allocations() -> torch.profiler.profile:
    """Return a profiler that records PyTorch's allocations on the CPU, for `peak_of`."""
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)


def peak_of(profile: torch.profiler.profile, trace: Path) -> int:
    """Return the peak of allocated bytes. `trace` is a file to write."""
    profile.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    alive: dict[int, int] = {}
    now = peak = 0
    for event in sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: e["ts"]):
        address, size = event["args"]["Addr"], event["args"]["Bytes"]
        now -= alive.pop(address, 0)  # freed, or freed without a record and allocated again
        if size > 0:
            alive[address] = size
            now += size
        peak = max(peak, now)
    return peak


def run(config: str, optim: str, checkpointing: bool) -> int:
    """Return the peak of two processes with a config of `examples/accelerate_configs`, or of one process for "one"."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        LlamaForCausalLM._from_config(MODEL, dtype=torch.float32).save_pretrained(folder / "model")
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment |= {"DS_ACCELERATOR": "cpu"} if config.startswith("zero") else {"ACCELERATE_USE_CPU": "true"}
        launcher = [sys.executable, "-m", "accelerate.commands.launch", "--num_machines=1", "--main_process_port=0"]
        launcher += ["--mixed_precision=bf16", "--dynamo_backend=no"]
        launcher += [f"--num_processes={1 if config == 'one' else 2}"]
        if config != "one":
            launcher.append(f"--config_file={ROOT / 'examples' / 'accelerate_configs' / config}.yaml")
        command = [*launcher, "-m", "benchmarks.memory", str(folder), optim, str(int(checkpointing))]
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{config}, {optim}: {(done.stdout + done.stderr)[-4_000:]}")
        return max(int(path.read_text()) for path in folder.glob("peak-*"))


def main() -> None:
    shape, results = Shape.of(MODEL), []
    for config, optim, checkpointing in CASES:
        strategy, processes = ("ddp", 1) if config == "one" else (config, 2)
        tokens = ROWS * (PROMPT + RESPONSE)
        plan = memory(shape, strategy, processes, optim, tokens, checkpointing, bucket=BUCKET).total
        found = run(config, optim, checkpointing)
        results.append({"config": config, "optim": optim, "gradient_checkpointing": checkpointing,
                        "measured": found, "planned": round(plan)})  # fmt: skip
        how = "checkpointing" if checkpointing else "-"
        print(f"{config:<7}{optim:<18}{how:<14}{found / 1e6:>8.0f} MB, planned {plan / 1e6:>6.0f} MB "
              f"({plan / found - 1:+.0%})", flush=True)  # fmt: skip
    content = {"parameters": shape.total, "tokens": ROWS * (PROMPT + RESPONSE), "versions": versions(), "runs": results}
    RESULT.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure(Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "1")
    else:
        main()
