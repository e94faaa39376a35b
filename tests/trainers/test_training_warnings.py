import re
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from topr_trl import TOPRConfig
from topr_trl.trainers.training_warnings import (
    SilentBatches,
    sampler_distance,
    warn_if_far,
    warn_if_merged_coarsely,
    warn_of_many_reads,
    warn_of_pushed_rows,
    warn_of_scale,
    warn_of_weights,
)


def said(check, *args):
    """Return the warnings that a check gives, and its result."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        returned = check(*args)
    return [str(warning.message) for warning in caught], returned


@pytest.mark.parametrize(("dtype", "is_warned"), [(torch.bfloat16, True), (torch.float32, False)])
def test_an_adapter_that_trl_merges_into_coarse_weights(model, dtype, is_warned):
    peft = pytest.importorskip("peft")
    assert said(warn_if_merged_coarsely, model.to(dtype)) == ([], None)  # no adapter
    lora = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    adapted = peft.get_peft_model(model, lora)
    name, before = next((n, p.detach().clone()) for n, p in adapted.named_parameters() if "base_layer" in n)
    messages, _ = said(warn_if_merged_coarsely, adapted)
    assert ["dtype='float32'" in message for message in messages] == [True] * is_warned
    adapted.merge_adapter()
    adapted.unmerge_adapter()  # as TRL does when it sends weights
    after = dict(adapted.named_parameters())[name]
    assert torch.allclose(before, after, atol=1e-6, rtol=0) != is_warned


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({}, None),
        ({"log_completions": True}, "completions/*.parquet"),
        ({"replay_share": 0.5, "hub_strategy": "checkpoint"}, "replay_*.pt"),
        ({"log_completions": True, "replay_share": 0.5}, "completions/*.parquet"),
        ({"log_completions": True, "hub_private_repo": True}, None),
        ({"log_completions": True, "push_to_hub": False}, None),
    ],
)
def test_training_rows_that_a_push_publishes(settings, named, tmp_path):
    args = TOPRConfig(str(tmp_path), **{"use_cpu": True, "bf16": False, "push_to_hub": True, **settings})
    messages, _ = said(warn_of_pushed_rows, args)
    assert [f"rows to the Hub: {named} (" in message for message in messages] == [True] * bool(named)
    assert all("hub_private_repo=True" in message for message in messages)


DEAD = {"topr/negatives_dead": 0.6}
LONG = {"topr/tokens/negatives": 128.0, "topr/weight_mean_negatives": 0.49}


@pytest.mark.parametrize(
    ("metrics", "step", "steps", "first_log", "warned"),
    [
        (DEAD, 10, 100, 1, r"^60% of the negatives .* below 0\.01 at step 10 of 100 .*Otherwise use .*\"Metrics\""),
        (DEAD, 10, 40, 10, "at step 10 of 40"),  # the first log
        (DEAD | LONG, 1, 100, 1, r"of the negatives.* Completions .*='segment' first\. Then use a "),
        (LONG, 50, 100, 1, "^Negatives have 128 tokens.* Set ratio_level='segment'"),
        (DEAD, 11, 100, 1, None),
        ({"topr/negatives_dead": 0.5}, 1, 100, 1, None),
        (LONG | {"topr/tokens/negatives": 127.0}, 50, 100, 1, None),
        (LONG | {"topr/weight_mean_negatives": 0.5}, 50, 100, 1, None),
        ({}, 1, 100, 1, None),
    ],
)
def test_weights_of_negatives_are_warned_about_once(metrics, step, steps, first_log, warned):
    state = SimpleNamespace(global_step=step, max_steps=steps, logging_steps=first_log)
    earlier = set()
    messages, _ = said(warn_of_weights, metrics, state, "sequence", earlier)
    assert [bool(re.search(warned, message)) for message in messages] == [True] if warned else messages == []
    assert said(warn_of_weights, metrics, state, "sequence", earlier) == ([], None)
    assert said(warn_of_weights, LONG, state, "segment", set()) == ([], None)
    later, _ = said(warn_of_weights, LONG, state, "sequence", earlier)
    assert len(later) == (not LONG.items() <= metrics.items())


@pytest.mark.parametrize(
    ("rewards", "may_be_small", "is_said"),
    [
        ([-5, 5], [], True),
        (range(-5, 6), [True], True),
        ([-0.01, 0.01], [], True),
        ([-0.01, 0.01], [True], False),
        ([-0.1, 0.1], [], False),
        ([-4, 4], [], False),
        ([-0.01] * 99 + [0.99], [], False),
        ([0, 0], [], False),  # Equal rewards have another warning.
        ([], [], False),
    ],
)
def test_rewards_of_another_scale_are_said(rewards, may_be_small, is_said):
    rewards, earlier = np.array(rewards, dtype=float), set()
    messages, _ = said(warn_of_scale, rewards, earlier, *may_be_small)
    assert ["magnitude of about 1" in message for message in messages] == [True] * is_said
    assert said(warn_of_scale, rewards, earlier, *may_be_small) == ([], None)


def test_a_far_sampler_is_warned_about():
    mu = [[-1.0, -2.0], [-0.5]]
    assert said(sampler_distance, mu, [None, None]) == ([], {})
    near = {"token": pytest.approx(0.015), "token_max": pytest.approx(0.02), "response": pytest.approx(0.01)}
    assert said(sampler_distance, mu, [[-1.01, -1.98], None]) == ([], near)
    (message,), _ = said(sampler_distance, mu, [[-1.5, -2.5], [-1.0]])
    assert re.fullmatch(
        r"The sampler's log-probabilities .* by 0\.50 nats per token: .* had different weights, .* Sample from the .* "
        r"the rows, set log_mu='sampler'\.", message,
    )  # fmt: skip
    earlier = set()
    assert said(warn_if_far, 0.1, earlier) == ([], None)
    (message,), _ = said(warn_if_far, 0.11, earlier)
    assert "by 0.11 nats per token" in message
    assert said(warn_if_far, 0.11, earlier) == ([], None)
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        sampler_distance(mu, [[-1.0, -2.0]])


def test_other_tokens_than_the_samplers_are_warned_about_and_not_compared():
    same = {name: pytest.approx(0.01) for name in ("token", "token_max", "response")}
    for count, mu, sampler, found in (
        (2, [[-1.0, -2.0], [-0.5]], [[-1.0], [-0.51]], same), (1, [[-1.0, -2.0]], [[-1.0]], {})
    ):  # fmt: skip
        (message,), distance = said(sampler_distance, mu, sampler)
        assert distance == found
        assert re.fullmatch(
            rf"1 of {count} rows .*sampler_logps .* different tokens than .*completion_ids with the rows\.", message
        )
    assert said(sampler_distance, [[]], [[]]) == ([], {})


@pytest.mark.parametrize(("positive", "epochs", "warned"), [(0.5, 6.5, []), (0.5, 6.6, ["14"]), (-0.5, 99.0, [])])
def test_a_right_answer_that_is_read_often_is_warned_about(positive, epochs, warned):
    choice = SimpleNamespace(indices=np.array([1, 1, 2, 3, 3, 3]))  # the rows with R = 0 teach nothing
    messages, _ = said(warn_of_many_reads, choice, np.array([positive, positive, -1.0, 0.0, 0.0, 0.0]), epochs)
    assert [re.search(r"(\d+) times.* num_train_epochs, or", message)[1] for message in messages] == warned


class Batches:
    """Generation batches for `SilentBatches`. All rows of a batch have the same R and the same raw reward."""

    def __init__(self):
        self.silent, self.said = SilentBatches(), set()

    def add(self, rows, reward=0.0, raw=1.0):
        """Add a batch. Return the warning after it, or None."""
        self.silent.add(np.full(rows, reward), torch.full((rows,), raw))
        messages, _ = said(self.silent.warn, "mean", self.said)
        return messages[0] if messages else None


def test_a_first_batch_without_any_signal_is_said_once():
    batches = Batches()
    first = r"All 1 completions so far have R = 0 after baseline=mean, .* the reward functions\."
    assert re.fullmatch(first, batches.add(1))
    assert [batches.add(4) for _ in range(12)] == [None] * 12


def test_ten_batches_in_a_row_without_signal_are_said():
    batches = Batches()
    assert batches.add(4, reward=0.5) is None
    assert [batches.add(4) for _ in range(9)] == [None] * 9
    assert batches.add(4, reward=-0.5) is None
    assert [batches.add(2) for _ in range(9)] == [None] * 9
    assert batches.add(2).startswith("All 20 completions of the last 10 generation batches")


def test_rows_that_nobody_scored_are_no_sign():
    batches = Batches()
    assert batches.add(4, raw=torch.nan) is None
    assert batches.add(3).startswith("All 3 completions so far")
