"""Tests that scripts from TRL's documentation run with only the names of the trainer and its config changed."""

import pytest
from datasets import Dataset

from topr_trl.tasks import arithmetic

pytestmark = pytest.mark.slow

# These scripts follow TRL's quickstart and its page on GRPO: reward function, config, trainer, train.
MINIMAL = """
dataset = load_dataset("trl-lib/ultrafeedback-prompt", split="train")

def reward_num_unique_letters(completions, **kwargs):
    completion_contents = [completion[0]["content"] for completion in completions]
    return [float(len(set(content))) for content in completion_contents]

trainer = GRPOTrainer(
    model="Qwen/Qwen2-0.5B-Instruct",
    reward_funcs=reward_num_unique_letters,
    train_dataset=dataset,
)
trainer.train()
"""

CONFIGURED = """
dataset = load_dataset("trl-lib/tldr", split="train")

def reward_len(completions, **kwargs):
    return [-abs(20 - len(completion)) for completion in completions]

training_args = GRPOConfig(output_dir="Qwen2-0.5B-GRPO", logging_steps=1, num_generations=4, max_steps=2,
                           per_device_train_batch_size=4, gradient_accumulation_steps=2, max_completion_length=64)
trainer = GRPOTrainer(
    model="Qwen/Qwen2-0.5B-Instruct",
    reward_funcs=[reward_len],
    args=training_args,
    train_dataset=dataset,
)
trainer.train()
trainer.save_model()
"""


REPLAYED = CONFIGURED.replace("max_steps=2", "max_steps=4, replay_share=0.5")


@pytest.mark.parametrize("script", [pytest.param(MINIMAL, id="minimal"), pytest.param(REPLAYED, id="replayed")])
def test_two_names_changed(script, model, tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # Without a GPU, TRL's default bf16=True raises an error unless `use_cpu` is set, and the scripts do not set it.
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
    model.save_pretrained(tmp_path / "local")
    tokenizer.save_pretrained(tmp_path / "local")
    texts = arithmetic.arithmetic_dataset(2, seed=1)["question"][:]
    prompts = texts if "tldr" in script else [[{"role": "user", "content": text}] for text in texts]

    changed = "from topr_trl import TOPRTrainer, TOPRConfig\n" + script
    changed = changed.replace("GRPOTrainer", "TOPRTrainer").replace("GRPOConfig", "TOPRConfig")
    changed = changed.replace("Qwen/Qwen2-0.5B-Instruct", str(tmp_path / "local"))  # tests do not use the Hub
    names = {"load_dataset": lambda *_, **__: Dataset.from_dict({"prompt": prompts})}
    exec(changed, names)
    losses = [entry for entry in names["trainer"].state.log_history if "train_loss" in entry]
    assert losses
    shares = [e["topr/replay/share"] for e in names["trainer"].state.log_history if "topr/replay/share" in e]
    assert max(shares, default=0.0) == (0.5 if script is REPLAYED else 0.0)
    assert names["trainer"].args.learning_rate == 5e-7
