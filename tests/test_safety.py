"""Check the promises of docs/safety.md. Code that must not run would create a folder named `ran`."""

import io
import json
import os
import pickle
import shutil
import time
from itertools import product

import pytest
import torch
import yaml
from jinja2.exceptions import SecurityError
from transformers import AutoModelForCausalLM, AutoTokenizer, dynamic_module_utils

from topr_trl import OfflineTOPRConfig, OfflineTOPRTrainer, TOPRConfig, TOPRTrainer
from topr_trl.cli import main as cli
from topr_trl.cli.memory_plan import PlanArguments, plan_command
from topr_trl.pipeline import manifest
from topr_trl.pipeline.problems import load_problems
from topr_trl.pipeline.settings import ProblemArguments
from topr_trl.pipeline.stages.sample import SampleArguments, _sampler
from topr_trl.tasks import arithmetic, gsm8k, hendrycks_math

RUNS = {"use_cpu": True, "bf16": False, "report_to": "none", "gradient_checkpointing": False, "disable_tqdm": True}


@pytest.fixture
def ran(tmp_path):
    return tmp_path / "ran"


class Payload:
    """Object that creates the folder `ran` when it is unpickled."""

    def __init__(self, ran):
        self.ran = ran

    def __reduce__(self):
        return os.mkdir, (str(self.ran),)


def settings(model, **more):
    return SampleArguments(model_name_or_path=str(model), use_cpu=True, **more)


def doors(model, rows, tmp_path, **more):
    """Return functions that load a model by name, one for each way to load it."""
    config = {"output_dir": str(tmp_path / "out"), **RUNS, **more}
    problems = rows.select_columns(["prompt"])
    return {
        "offline": lambda: OfflineTOPRTrainer(str(model), OfflineTOPRConfig(**config), rows),
        "online": lambda: TOPRTrainer(str(model), len, TOPRConfig(**config, num_generations=2), problems),
        "sampling": lambda: _sampler(settings(model, **more), ()),
    }


@pytest.fixture
def with_code(tmp_path, ran, monkeypatch):
    """Create a model whose Python classes are in its own folder."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))  # answers "y" to every question
    folder = tmp_path / "with_code"
    shutil.copytree(arithmetic.CARELESS_MODEL, folder)
    (folder / "evil.py").write_text(
        f"import os\nos.mkdir({str(ran)!r})\nfrom transformers import Qwen2Config, Qwen2ForCausalLM\n\n"
        "class Config(Qwen2Config):\n    pass\n\nclass Model(Qwen2ForCausalLM):\n    config_class = Config\n"
    )
    config = json.loads((folder / "config.json").read_text())
    classes = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "evil", "auto_map": classes}))
    return folder


@pytest.mark.parametrize("door", ["offline", "online", "sampling"])
def test_code_of_a_model_is_not_run(door, with_code, rows, ran, tmp_path):
    with pytest.raises(ValueError, match="trust_remote_code"):
        doors(with_code, rows, tmp_path)[door]()
    assert not ran.exists()


def test_code_of_a_model_is_run_for_those_who_ask_for_it(with_code, ran):
    _sampler(settings(with_code, trust_remote_code=True), ())
    assert ran.exists()


def test_planning_runs_no_code_of_a_model(with_code, ran):
    with pytest.raises(ValueError, match="There is no model"):
        plan_command(PlanArguments(model_name_or_path=str(with_code)))
    assert not ran.exists()


@pytest.fixture
def pickled(tmp_path, ran):
    folder = tmp_path / "pickled"
    shutil.copytree(arithmetic.CARELESS_MODEL, folder)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(ran)))
    return folder


@pytest.mark.parametrize("door", ["offline", "online", "sampling"])
def test_pickled_weights_are_refused(door, pickled, rows, ran, tmp_path):
    with pytest.raises(ValueError, match=r"pickled .*\(pytorch_model\.bin\)"):
        doors(pickled, rows, tmp_path)[door]()
    assert not ran.exists()


@pytest.mark.parametrize("door", ["offline", "online"])
def test_pickled_weights_are_read_for_those_who_ask_for_them(door, pickled, rows, tmp_path):
    weights = AutoModelForCausalLM.from_pretrained(arithmetic.CARELESS_MODEL).state_dict()
    torch.save(weights, pickled / "pytorch_model.bin")
    doors(pickled, rows, tmp_path, model_init_kwargs={"use_safetensors": False})[door]()


def test_a_checkpoint_runs_no_code(rows, tokenizer, ran, tmp_path):
    def trainer():
        args = OfflineTOPRConfig(
            str(tmp_path / "out"), **RUNS, max_steps=2, save_steps=1, per_device_train_batch_size=2
        )
        return OfflineTOPRTrainer(str(arithmetic.CARELESS_MODEL), args, rows, processing_class=tokenizer)

    trainer().train()
    checkpoint = tmp_path / "out" / "checkpoint-1"
    assert (checkpoint / "model.safetensors").is_file()
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        good = (checkpoint / name).read_bytes()
        (checkpoint / name).write_bytes(pickle.dumps(Payload(ran)))
        with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
            trainer().train(resume_from_checkpoint=str(checkpoint))
        (checkpoint / name).write_bytes(good)
    # Trainer writes this file, but nothing reads it.
    (checkpoint / "training_args.bin").write_bytes(pickle.dumps(Payload(ran)))
    trainer().train(resume_from_checkpoint=str(checkpoint))
    assert not ran.exists()


def test_a_payload_would_run(ran):
    """The payload creates the folder when it is unpickled. Otherwise, the tests above would prove nothing."""
    pickle.loads(pickle.dumps(Payload(ran)))
    assert ran.exists()


def test_a_data_set_runs_no_script(ran, tmp_path):
    folder = tmp_path / "problems"
    folder.mkdir()
    (folder / "problems.py").write_text(f"import os\nos.mkdir({str(ran)!r})\n")
    with pytest.raises((RuntimeError, ValueError, FileNotFoundError)):
        load_problems(ProblemArguments(dataset_name=str(folder)), "train")
    assert not ran.exists()


def test_a_config_file_runs_no_code(ran, tmp_path):
    (tmp_path / "evil.yaml").write_text(f"seed: !!python/object/apply:os.mkdir ['{ran}']\n")
    with pytest.raises(yaml.YAMLError):
        cli.main(["train", "--config", str(tmp_path / "evil.yaml"), "--input", "in", "--output_dir", "out"])
    assert not ran.exists()


def test_a_chat_template_runs_in_a_sandbox():
    tokenizer = AutoTokenizer.from_pretrained(arithmetic.CARELESS_MODEL)
    tokenizer.chat_template = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(SecurityError):
        tokenizer.apply_chat_template([{"role": "user", "content": "1 + 1"}], tokenize=False)


def test_answers_are_not_run(ran):
    pytest.importorskip("math_verify")
    code = f"__import__('os').mkdir('{ran}')"
    forms = [code, rf"\text{{{code}}}", rf"\operatorname{{{code}}}", f"x = {code}", f"({code}, 1)", f"1 + {code}"]
    hendrycks_math.judge([rf"\boxed{{{form}}}" for form in forms], ["5"] * len(forms))
    gsm8k.judge([f"The answer is {form}" for form in forms], ["5"] * len(forms))
    assert not ran.exists()


@pytest.mark.parametrize("extract", [gsm8k.extract_answer, hendrycks_math.extract_boxed])
def test_reading_an_answer_takes_time_in_proportion_to_the_response(extract):
    pieces = ["The answer is ", "1", "1,", "1.", "-", "- ", " ", "*", ":", "=", "\n", "1/", "$", "\\boxed{", "\\boxed ",
              "\\", "{", "}", "\\boxed\\frac{", "\\boxed\\frac1", "\\\\boxed", "\\boxed{\\frac{"]  # fmt: skip
    for first, piece in product(("", "The answer is ", "\\boxed{"), pieces):
        response = first + piece * (200_000 // len(piece))
        start = time.process_time()
        extract(response)
        assert time.process_time() - start < 1, f"{response[:40]!r}..."  # quadratic time would take hours


def test_a_file_that_is_a_link_goes_without_what_it_links_to(tmp_path):
    """Removing a link, as in the cache of the Hub, keeps the file it points to."""
    folder, blob = tmp_path / "stage", tmp_path / "blob"
    manifest.begin(folder, "score", {})
    blob.write_text("rows")
    (folder / "rows.parquet").symlink_to(blob)
    manifest.finish(folder, "score", rows=1)
    manifest.check_whole(folder)
    blob.write_text("rows that are others")  # now the checksum is wrong, so the stage removes the link
    assert not manifest.begin(folder, "score", {})
    assert not (folder / "rows.parquet").is_symlink()
    assert blob.read_text() == "rows that are others"
