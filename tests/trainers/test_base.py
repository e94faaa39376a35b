"""Tests of the base class of the trainers: weights of the loss, the model card's evaluation section, and warnings."""

import io
import sys

import pytest
import torch

from topr_trl import PRESETS, OfflineTOPRConfig, OfflineTOPRTrainer, TOPRConfig, TOPRTrainer, loss
from topr_trl.trainers import base as trainer_base
from topr_trl.trainers import messages

SETTINGS = {
    "per_device_train_batch_size": 8, "report_to": "none", "use_cpu": True, "bf16": False, "disable_tqdm": True,
    "gradient_checkpointing": False, "save_strategy": "no", "preset": "tis", "baseline": 0,
    "length_normalization": False,
}  # fmt: skip


def offline(model, tokenizer, rows, folder):
    rows = rows.add_column("mu_logps", [-1.0] * len(rows))
    return OfflineTOPRTrainer(model, OfflineTOPRConfig(str(folder), **SETTINGS), rows, processing_class=tokenizer)


def online(model, tokenizer, rows, folder):
    def reward(completions, **_):
        return [(-1.0) ** i for i in range(len(completions))]

    args = TOPRConfig(str(folder), num_generations=4, max_completion_length=8, **SETTINGS)
    return TOPRTrainer(model, reward, args=args, train_dataset=rows, processing_class=tokenizer)


def gradient(trainer):
    """Return the gradient of one batch. Online, completions are always sampled with the same seed."""
    torch.manual_seed(0)
    trainer.model.train()
    trainer.model.zero_grad()
    trainer.current_gradient_accumulation_steps = 1
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    trainer.compute_loss(trainer.model, dict(batch)).backward()
    return torch.cat([p.grad.flatten() for p in trainer.model.parameters()])


@pytest.mark.parametrize("make", [offline, online])
def test_the_weights_are_those_of_the_public_loss(model, tokenizer, rows, tmp_path, make, monkeypatch):
    calls = []

    def watched(policy_logps, mu_logps, rewards, mask, **settings):
        calls.append((rewards, settings))
        return loss.topr_loss(policy_logps, mu_logps, rewards, mask, **settings)

    monkeypatch.setattr(trainer_base, "topr_loss", watched)
    trainer = make(model, tokenizer, rows, tmp_path)
    gradient(trainer)
    ((rewards, settings),) = calls
    assert sorted(rewards.tolist()) == ([-1.0] * 6 + [1.0] * 2 if make is offline else [-1.0] * 4 + [1.0] * 4)
    assert settings == trainer.args.loss_settings
    assert settings["limits"] == PRESETS["tis"]


class Measured:
    """Stand-in for `topr_trl.Evaluations`."""

    def write_card_section(self, folder):
        (folder / "drawn.png").write_bytes(b"picture")
        return "## Evaluation\n\nAll right.\n"


def test_the_card_shows_what_is_handed_in(model, tokenizer, rows, tmp_path):
    trainer = offline(model, tokenizer, rows, tmp_path)
    assert trainer.evaluations is None
    trainer.evaluations = Measured()
    trainer.create_model_card()
    trainer.create_model_card()
    card = (tmp_path / "README.md").read_text()
    assert card.count("## Evaluation\n\nAll right.\n\n## Training procedure") == 1
    assert (tmp_path / "drawn.png").is_file()
    trainer.evaluations = None
    trainer.create_model_card()
    assert "## Evaluation" not in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize(
    ("make_optimizer", "said"),
    [
        (lambda model: {}, "0, learning rate 5e-07, adafactor"),
        (lambda model: {"optimizers": (torch.optim.AdamW(model.parameters(), lr=2e-3), None)},
         "0, learning rate 0.002, AdamW"),
        (lambda model: {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"momentum": 0.9})}, "0, SGD"),
    ],
)  # fmt: skip
def test_the_card_names_the_optimizer(model, tokenizer, rows, tmp_path, make_optimizer, said):
    args = OfflineTOPRConfig(str(tmp_path), **SETTINGS)
    OfflineTOPRTrainer(model, args, rows, processing_class=tokenizer, **make_optimizer(model)).create_model_card()
    assert f"| steps | {said} |" in (tmp_path / "README.md").read_text()


def test_float64_is_not_half_precision(model, tokenizer, rows, tmp_path):
    trainer = offline(model, tokenizer, rows, tmp_path)
    for dtype, is_half in ((torch.float32, False), (torch.float64, False), (torch.bfloat16, True)):
        trainer.model.to(dtype)
        assert trainer._is_half == is_half


def test_messages_fit_the_encoding_of_the_output(monkeypatch, tmp_path):
    args = TOPRConfig(str(tmp_path), use_cpu=True, bf16=False, disable_tqdm=False)

    class Unencoded:
        text = ""

        def write(self, text):
            self.text += text

        def flush(self):
            pass

    monkeypatch.setattr(sys, "stdout", latin := io.TextIOWrapper(io.BytesIO(), "latin-1"))
    messages.say("log μ of ä", args)
    assert latin.buffer.getvalue() == "TOPR: log ? of ä\n".encode("latin-1")
    monkeypatch.setattr(sys, "stdout", unencoded := Unencoded())
    messages.say("log μ", args)
    args.was_said = True
    messages.say("log π", args)
    assert unencoded.text == "TOPR: log μ\n"
