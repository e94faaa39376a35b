from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser

CONFIGS = sorted((Path(__file__).parents[2] / "examples" / "accelerate_configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_accelerate_reads_it(path):
    config = load_config_from_file(str(path))
    assert config.mixed_precision == "bf16"
    assert config.num_processes == 8 * config.num_machines
    args = ["--config_file", str(path), "--machine_rank", "0", "--main_process_ip", "localhost", "train.py"]
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(args))
    kind = path.stem.split("_")[0]
    assert (args.use_deepspeed, args.use_fsdp) == (kind.startswith("zero"), kind.startswith("fsdp"))
    if args.use_deepspeed:
        pytest.importorskip("deepspeed")
        assert args.zero_stage == int(kind[-1])
    if args.use_fsdp:
        assert int(args.fsdp_version) == 2


def test_there_is_one_for_each():
    assert [path.stem for path in CONFIGS] == [
        "ddp", "fsdp2", "fsdp2_nodes", "zero1", "zero2", "zero3", "zero3_nodes", "zero3_offload",
    ]  # fmt: skip
