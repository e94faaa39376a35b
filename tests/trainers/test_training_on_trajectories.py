"""Tests of trajectories, offline and online: the model wrote some tokens of a completion, and read the others."""

import copy
import json

import pyarrow.parquet as pq
import pytest
import torch
import transformers
from datasets import Dataset
from packaging.version import Version
from reference import logps_of, of_level
from transformers.utils import get_json_schema

from topr_trl import OfflineTOPRConfig, OfflineTOPRTrainer, TOPRConfig, TOPRTrainer
from topr_trl.data.tokenization import tokenize_row

pytestmark = pytest.mark.slow

SETTINGS = {"report_to": "none", "bf16": False, "use_cpu": True, "gradient_checkpointing": False,
            "save_strategy": "no", "disable_tqdm": True, "per_device_train_batch_size": 4, "baseline": 0}  # fmt: skip
ROWS = {
    "prompt": ["a", "b", "c", "d"],
    "prompt_ids": [[30, 31], [32], [33, 34, 35], [36]],
    "completion_ids": [[40, 41, 50, 51, 42, 0], [43, 0], [44, 52, 45, 0], [46, 53, 53, 53, 53, 0]],
    "completion_mask": [[1, 1, 0, 0, 1, 1], [1, 1], [1, 0, 1, 1], [1, 0, 0, 0, 0, 1]],
    "mu_logps": [[-1.0, -2.0, -1.0, -0.5], [-3.0, -0.1], [-1.0, -1.0, -0.2], [-2.0, -9.0]],
    "reward": [-1.0, 1.0, -1.0, -1.0],
}  # fmt: skip


def offline(model, tokenizer, rows, tmp_path, **settings):
    args = OfflineTOPRConfig(str(tmp_path / "offline"), **{**SETTINGS, **settings})
    trainer = OfflineTOPRTrainer(model, args, rows, processing_class=tokenizer)
    trainer.model.train()
    return trainer


def loss_and_gradient(trainer):
    trainer.model.zero_grad()
    loss = trainer.compute_loss(trainer.model, dict(next(iter(trainer.get_train_dataloader()))))
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in trainer.model.parameters()]


def at_level(log_ratio, level):
    """Return the log-ratios at a level. Segments have two tokens."""
    if level == "segment":
        return torch.cat([pair.sum().expand(len(pair)) for pair in log_ratio.split(2)])
    return log_ratio.sum()


def assert_same(found, expected):
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-6)
    for ours, theirs in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=5e-4, atol=5e-6)


class Environment:
    def reset(self, **_):
        pass

    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: First.
            b: Second.
        """
        return a + b


@pytest.mark.skipif(Version(transformers.__version__) < Version("5.2"), reason="TRL asks for transformers 5.2 for this")
@pytest.mark.parametrize("online", [{"tools": [Environment().add]}, {"environment_factory": Environment}])
def test_messages_become_the_tokens_that_trl_trains_on_online(model, tool_tokenizer, tmp_path, online):
    pytest.importorskip("jmespath")
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call>'
    written = iter((f"{call}<|im_end|>", "It is 4.<|im_end|>"))
    options = {"enable_thinking": False}  # The template then writes an empty block of thinking, which is context.
    model.resize_token_embeddings(len(tool_tokenizer))
    prompt = [{"role": "user", "content": "2 + 2?"}]
    trainer = TOPRTrainer(
        model, lambda completions, **_: [1.0, -1.0] * 2,
        TOPRConfig(str(tmp_path), num_generations=4, max_completion_length=256, chat_template_kwargs=options,
                   **SETTINGS),
        Dataset.from_dict({"prompt": [prompt] * 4}), processing_class=tool_tokenizer, **online,
    )  # fmt: skip
    trainer._generate_single_turn = lambda prompts, *_, **__: (
        [tool_tokenizer(next(written))["input_ids"]] * len(prompts), None
    )  # fmt: skip
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    read, there = (
        batch[f"{part}_ids"][0][batch[f"{part}_mask"][0].bool()].tolist() for part in ("prompt", "completion")
    )
    own = batch["tool_mask"][0][batch["completion_mask"][0].bool()].bool().tolist()

    function = {"name": "add", "arguments": {"a": 2, "b": 2}}
    completion = [
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "name": "add", "content": "4"}, {"role": "assistant", "content": "It is 4."},
    ]  # fmt: skip
    row = {"prompt": prompt, "completion": completion, "tools": json.dumps([get_json_schema(Environment().add)]),
           "chat_template_kwargs": options}  # fmt: skip
    assert tokenize_row(row, tool_tokenizer) == (read, there, own)
    assert not all(own)


PARTED = {
    "prompt": ["a", "b", "c", "d", "e"],
    "prompt_ids": [[30, 31], [32], [30, 31, 40, 41], [36], [30, 31, 45]],
    "completion_ids": [[40, 41, 50, 51, 42], [43, 0], [44, 52, 45, 0], [46, 53, 53, 0], [47, 0]],
    "completion_mask": [[1, 1, 0, 0, 1], None, [1, 0, 1, 1], [1, 0, 0, 1], None],
    "mu_logps": [[-1.0, -2.0, -1.0], [-3.0, -0.1], [-1.0, -1.0, -0.2], [-2.0, -9.0], [-0.5, -0.5]],
    "reward": [-1.0, 1.0, -1.0, -1.0, -1.0],
    "rollout_id": ["x", None, "x", "y", "x"],
}  # fmt: skip


def own_logps(model, row):
    """Return log π of the tokens that the model wrote."""
    mask = torch.tensor(row["completion_mask"] or [1] * len(row["completion_ids"])).bool()
    return logps_of(model, row["prompt_ids"], row["completion_ids"])[mask]


def of_rollouts(model, rows, level="sequence", length_normalization=True):
    """Return loss and gradient of Algorithm 1, with the rows of each rollout joined."""
    model.zero_grad()
    own, mu, rewards = {}, {}, {}
    for n, row in enumerate(rows):
        key = row.get("rollout_id") or n
        own.setdefault(key, []).append(own_logps(model, row))
        mu.setdefault(key, []).extend(row["mu_logps"])
        rewards[key] = row["reward"]
    losses = []
    for key, parts in own.items():
        logps = torch.cat(parts)
        log_ratio = (logps - torch.tensor(mu[key])).detach()
        log_ratio = at_level(log_ratio, level)
        weight = log_ratio.clamp(max=0).exp() if rewards[key] < 0 else torch.ones_like(log_ratio)
        losses.append(-(rewards[key] * weight * logps).sum() / (len(logps) if length_normalization else 1))
    loss = torch.stack(losses).mean()
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("padding_free", [False, True])
@pytest.mark.parametrize("level", ["sequence", "segment"])
@pytest.mark.parametrize("length_normalization", [False, True])
def test_a_rollout_of_several_rows_has_one_ratio_and_one_length(
    model, tokenizer, tmp_path, level, padding_free, length_normalization
):
    rows = Dataset.from_dict(PARTED)
    expected = of_rollouts(copy.deepcopy(model), rows, level, length_normalization)
    trainer = offline(model, tokenizer, rows, tmp_path, **of_level(level, 2), padding_free=padding_free,
                      length_normalization=length_normalization)  # fmt: skip
    assert trainer.train_dataset["row"][:] == [0, 1, 3]
    assert_same(loss_and_gradient(trainer), expected)


def test_log_mu_of_a_rollout_is_computed_over_all_its_rows(model, tokenizer, tmp_path):
    rows = Dataset.from_dict(PARTED).remove_columns("mu_logps")
    trainer = offline(model, tokenizer, rows, tmp_path)
    trainer.compute_log_mu()
    assert trainer._log_mu.values.keys() == {(0, 0), (0, 3)}
    model.eval()
    for first, parts in ((0, (0, 2, 4)), (3, (3,))):
        expected = 0.0
        for row in (rows[n] for n in parts):
            expected += own_logps(model, row).sum().item()
        assert trainer._log_mu.values[0, first] == pytest.approx(expected, abs=1e-3)


def test_the_context_limit_is_that_of_a_part(model, tokenizer, tmp_path):
    rows = Dataset.from_dict(PARTED)
    offline(model, tokenizer, rows, tmp_path, max_length=8)
    with pytest.raises(ValueError, match=r"1 of 3 rows .*max_length, 7 .*row 0 with 8"):
        offline(model, tokenizer, rows, tmp_path / "2", max_length=7)


def test_the_table_of_completions_marks_what_the_model_did_not_write(model, tokenizer, tmp_path):
    rows = Dataset.from_dict(ROWS)
    offline(model, tokenizer, rows, tmp_path, log_completions=True, logging_steps=1, max_steps=1).train()
    table = pq.read_table(next((tmp_path / "offline").glob("completions/*.parquet"))).to_pydict()
    text = dict(zip(table["prompt"], table["completion"], strict=True))
    words = [tokenizer.decode([token]) for token in (40, 41, 50, 51, 42)]
    assert text[tokenizer.decode([30, 31])] == "{}{}⟦{}{}⟧{}".format(*words)
    assert text[tokenizer.decode([32])] == tokenizer.decode([43])
