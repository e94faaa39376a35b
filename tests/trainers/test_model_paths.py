"""Tests of models that are given as a folder: as text or as a path, complete or with only an adapter."""

from pathlib import Path

import pytest
from datasets import Dataset

from topr_trl import OfflineTOPRConfig, OfflineTOPRTrainer, TOPRConfig, TOPRTrainer
from topr_trl.cli import main as cli
from topr_trl.cli.parsing import parse
from topr_trl.tasks import arithmetic
from topr_trl.trainers.checkpoints import refuse_adapter

peft = pytest.importorskip("peft")

QUIET = {"use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
ROWS = Dataset.from_dict({"prompt": ["3 + 4 ="] * 2, "completion": [" 7", " 8"], "reward": [1.0, -1.0]})
PROMPTS = Dataset.from_dict({"prompt": ["3 + 4 =", "9 - 2 ="]})


@pytest.fixture
def adapter(model, tokenizer, tmp_path):
    """Return a folder with an adapter, as a trainer saves it."""
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    folder = tmp_path / "run" / "adapter"
    peft.get_peft_model(model, lora).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def offline(model, folder, **settings):
    return OfflineTOPRTrainer(model, OfflineTOPRConfig(str(folder), **QUIET, **settings), ROWS)


def online(model, folder):
    settings = {"per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 4, "max_steps": 1}
    args = TOPRConfig(str(folder), **QUIET, **settings)
    return TOPRTrainer(model, lambda completions, **_: [1.0, -1.0] * 2, args, PROMPTS)


@pytest.mark.parametrize("trainer_of", [offline, online])
def test_a_path(trainer_of, tmp_path):
    trainer = trainer_of(Path(arithmetic.CARELESS_MODEL), tmp_path / "out")
    trainer.train()
    assert trainer.state.global_step == 1


@pytest.mark.parametrize("trainer_of", [offline, online])
def test_an_adapter_alone(trainer_of, adapter, tmp_path):
    with pytest.raises(ValueError, match=r"adapter of .*careless_model.*is_trainable=True") as error:
        trainer_of(adapter, tmp_path / "out")
    assert str(adapter) in str(error.value)
    whole = peft.AutoPeftModelForCausalLM.from_pretrained(adapter, is_trainable=True)  # as the error advises
    trainer_of(whole, tmp_path / "out").train()


@pytest.mark.parametrize("command", ["train", "log-mu", "trial", "iterate"])
def test_an_adapter_alone_on_the_command_line(command, adapter, tmp_path):
    ROWS.to_json(tmp_path / "rows.jsonl")
    given = ["--model_name_or_path", adapter, "--output_dir", tmp_path / "out", "--use_cpu", "true", "--bf16", "false"]
    given += [] if command == "iterate" else ["--input", tmp_path / "rows.jsonl"]
    with pytest.raises(ValueError, match=r"adapter of .*merge_and_unload"):
        cli.main([command, *map(str, given)])
    assert not (tmp_path / "out").exists()


def test_sampling_with_an_adapter_alone(adapter):
    """Sampling accepts the adapter, because it also loads the base model."""
    given = ["--model_name_or_path", str(adapter), "--output_dir", "out"]
    assert parse("sample", given).model_name_or_path == str(adapter)
    assert parse("sample", [*given, "--sampling_backend", "vllm"]).model_name_or_path == str(adapter)


def test_the_path_of_the_whole_model(adapter):
    (adapter / "adapter_config.json").write_text("{}")  # names no base model
    with pytest.raises(ValueError, match="holds an adapter, and no model"):
        refuse_adapter(adapter)
    (adapter.parent / "config.json").write_text("{}")  # `topr train` writes the merged model there
    with pytest.raises(ValueError, match=f"{adapter.parent}, holds a complete model"):
        refuse_adapter(adapter)
    (adapter / "config.json").write_text("{}")
    refuse_adapter(adapter)
    refuse_adapter(arithmetic.CARELESS_MODEL)
    refuse_adapter("somebody/a-model-of-the-hub")
