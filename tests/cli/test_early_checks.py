"""Test that errors about paths, packages and columns come before the imports of PyTorch and TRL."""

import subprocess
import sys
from importlib.util import find_spec

import pytest
from datasets import Dataset

from topr_trl import save_rows
from topr_trl.cli import early_checks
from topr_trl.cli.command_names import values_given
from topr_trl.cli.main import main
from topr_trl.cli.parsing import choices_of, settings_of
from topr_trl.pipeline import manifest

ROW = '{"prompt": "1 + 1 =", "completion": " 2", "rewrd": 1}\n'
CASES = [
    (["train", "--input", "nowhere"], "--input: nowhere"),
    (["iterate", "--rows=nowhere"], "--rows: nowhere"),
    (["sample", "--dataset_name", "nowhere.jsonl"], "--dataset_name: nowhere.jsonl"),
    (["train", "--config", "nowhere.yaml"], "--config: nowhere.yaml"),
    (["score", "--input", "rows.jsonl", "--reward_funcs", "nowhere.py:f"], "reward_funcs: there is no file nowhere.py"),
    (["train", "--input", "rows.jsonl", "--model_name_or_path", "./nowhere"], "There is no folder ./nowhere"),
    (["train", "--input", "rows.jsonl"], "reward"),
    (["iterate", "--rows", "rows.jsonl"], "answer"),
    (["score", "--input", "rows.jsonl"], "answer"),
    (["evaluate", "--input", "rows.jsonl"], "answer"),
    (["curate", "--input", "folder"], "Is 'rewrd' meant to be 'reward'?"),
    (["train", "--curation", "balancd"], "curation must be one of none, "),
    (["train", "--ratio_level", "token"], "ratio_level must be one of sequence, segment"),
    (["curate", "--baseline", "man"], "baseline must be a number or one of mean, "),
    (["iterate", "--sampling_backend", "vlm"], "sampling_backend must be one of transformers, vllm"),
    (["trial", "--decode", "greed"], "decode must be one of greedy, sample"),
    (["trial", "--test_by", "answer"], "test_by must be one of auto, "),
    (["sample", "--split", "tests"], "split must be one of train, test"),
]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text(ROW)
    save_rows(Dataset.from_dict({"prompt": ["a"], "completion": ["b"], "rewrd": [1.0]}), "folder")


def check(command, *given):
    names = settings_of(command)
    values = {name: value for name, value in values_given(given).items() if name in names}
    early_checks.check_early(command, values, names, choices_of(command))


@pytest.mark.parametrize(("given", "words"), CASES, ids=[" ".join(given) for given, _ in CASES])
def test_errors_come_before_anything_is_imported(given, words, monkeypatch):
    monkeypatch.setattr("topr_trl.cli.main.start_server", lambda: pytest.fail("the server starts"))
    monkeypatch.setitem(sys.modules, "topr_trl.cli.commands", None)  # An import would fail.
    with pytest.raises((ValueError, FileNotFoundError)) as raised:
        main(given)
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("given", "extra"),
    [
        (["sample", "--sampling_backend", "vllm"], "vllm"),
        (["train", "--report_to", "tensorboard", "wandb"], "trackers"),
        (["iterate", "--task", "math"], "math"),
        (["evaluate", "--task", "math"], "math"),
        (["iterate", "--use_peft"], "peft"),
        (["record"], "record"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(given, extra, monkeypatch):
    monkeypatch.setattr(early_checks, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=rf"needs .*: run pip install \"\.\[{extra}\]\""):
        check(*given)


def test_valid_arguments_pass(tmp_path, monkeypatch):
    check(
        "iterate", "--dataset_name", "openai/gsm8k", "--sampling_backend", "vllm", "--sampling_python", sys.executable
    )
    check("evaluate", "--input", "rows.jsonl", "--reward_funcs", "f", "--model_name_or_path", "./nowhere")
    with monkeypatch.context() as patched:
        # `plan` trains nothing, and `evaluate` with rows needs no vLLM.
        patched.setattr(early_checks, "find_spec", lambda name: None)
        check("plan", "--use_peft", "--lora_parameters", "42_000_000")
        check("iterate", "--use_peft", "f")
        check("evaluate", "--input", "rows.jsonl", "--reward_funcs", "f", "--sampling_backend", "vllm")
    (tmp_path / "log.jsonl").write_text('{"input": "1 + 1 =", "output": "2"}\n')  # `topr train` may import this file.
    check("train", "--input", "log.jsonl")
    check("iterate", "--rows", "rows.jsonl", "--reward_fields", "rewrd")
    for command in ("train", "curate", "log-mu", "trial"):
        check(command, "--input", "rows.jsonl", "--reward_fields", "rewrd")
    check("train", "--input", "folder", "--format", "trl")
    check("train", "--input", "rows.jsonl", "--chat")
    (tmp_path / "folder" / manifest.NAME).touch()
    check("score", "--input", "folder")
    (tmp_path / "damaged.jsonl").write_text('{"prompt": ')  # The command names the damaged file.
    check("score", "--input", "damaged.jsonl")
    (tmp_path / "damaged.parquet").write_text("no parquet")
    check("score", "--input", "damaged.parquet")


def test_env_is_set_before_libraries_are_imported(tmp_path):
    (tmp_path / "score.yaml").write_text(f"env: {{HF_HOME: {tmp_path / 'hub'}}}\n")
    code = (
        "import sys\nfrom types import SimpleNamespace\nfrom topr_trl.cli.main import main\n"
        "assert 'huggingface_hub' not in sys.modules\n"
        "def run(*_):\n    from huggingface_hub import constants\n    print(constants.HF_HOME)\n"
        "sys.modules['topr_trl.cli.commands'] = SimpleNamespace(run=run)\n"
        "main(['score', '--config', 'score.yaml'])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == f"{tmp_path / 'hub'}\n"


def test_the_checks_import_no_pytorch():
    assert find_spec("torch")
    code = (
        "import sys\nfrom topr_trl.cli.early_checks import check_early\n"
        "try:\n    check_early('score', {'input': 'folder'}, ['input'], {})\n"
        "except ValueError as error:\n    assert 'answer' in str(error)\n"
        "print({'torch', 'transformers', 'trl'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "set()\n"
