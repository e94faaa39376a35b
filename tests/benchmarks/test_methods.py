"""Methods match hand arithmetic and TRL's losses. Protocols and shares choose the rows and rewards."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks import methods, pretrained
from benchmarks.decoding import draw_ids
from benchmarks.loops.training import train
from benchmarks.methods import METHODS, at_share, m2po_loss, ppo_loss, read
from benchmarks.rows import Rows, response_logps
from benchmarks.setting import base_model, problems, sample, tokenizer
from topr_trl import effective_positive_share


@pytest.fixture(scope="module")
def rows():
    model = base_model("main")
    candidates = Rows.of(sample(model, "main", problems("main", 12, 7), 8, seed=3)).scored_by(model)
    assert 0 < (candidates.rewards > 0).mean() < 1
    return candidates


def gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.weekly
@pytest.mark.parametrize("name", METHODS)
def test_every_method_learns_right_from_wrong(name, rows):
    """A few small steps raise the log-probability of right answers relative to wrong answers."""
    model = base_model("main")
    objective = METHODS[name].make(model, rows, rows)
    trained = train(model, objective, 6, 1e-4, seed=0)
    assert np.isfinite(trained["gradient_norms"]).all()
    after = rows.scored_by(model).mu_logps
    change = np.array([(new.mean() - old.mean()).item() for new, old in zip(after, rows.mu_logps, strict=True)])
    assert change[rows.rewards > 0].mean() > change[rows.rewards < 0].mean() + 1e-4


@pytest.mark.slow
def test_log_mu_is_the_models_own_log_probability(rows):
    model = base_model("main").eval()
    row = rows[[5]]
    ids = torch.tensor([row.prompts[0] + row.responses[0]])
    with torch.no_grad():
        logps = model(ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
    torch.testing.assert_close(row.mu_logps[0], logps[len(row.prompts[0]) - 1 :], atol=1e-5, rtol=1e-5)


def test_padding_changes_no_log_probability(rows):
    model = base_model("main").eval()
    with torch.no_grad():
        logps, mask = response_logps(model, rows.prompts, rows.responses)
    assert mask.sum() == sum(map(len, rows.responses))
    torch.testing.assert_close(logps[mask], torch.cat(rows.mu_logps), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["trl_grpo", "trl_gspo"])
def test_grpo_is_reinforce_with_its_advantage_where_pi_is_mu(name, rows):
    """At ratio 1 nothing is clipped: TRL's own loss must give the gradient of REINFORCE."""
    model, other = base_model("main"), base_model("main")
    model.train(), other.train()
    METHODS[name].make(model, rows, rows).loss(np.arange(16)).backward()
    methods.Direct(other, rows, methods.tapered("reinforce"), methods.whitened).loss(np.arange(16)).backward()
    torch.testing.assert_close(gradient(model), gradient(other), atol=1e-5, rtol=1e-3)


@pytest.mark.slow
def test_trls_cispo_weighs_tokens_by_the_stored_log_mu(rows):
    """Lowering the stored log μ by 0.5 multiplies each token's weight π/μ, and so the gradient, by e^0.5."""
    model, other = base_model("main"), base_model("main")
    shifted = replace(rows, mu_logps=[logps - 0.5 for logps in rows.mu_logps])
    model.train(), other.train()
    METHODS["trl_cispo"].make(model, shifted, shifted).loss(np.arange(16)).backward()
    METHODS["trl_cispo"].make(other, rows, rows).loss(np.arange(16)).backward()
    torch.testing.assert_close(gradient(model), float(np.exp(0.5)) * gradient(other), atol=1e-5, rtol=1e-3)


def test_group_advantages_are_of_all_candidates(rows):
    group = rows.groups == rows.groups[np.flatnonzero(rows.rewards > 0)[0]]
    rewards = torch.tensor(rows.rewards[group])
    expected = ((rewards - rewards.mean()) / (rewards.std() + 1e-4)).numpy()
    np.testing.assert_allclose(rows.group_advantages()[group], expected)
    chosen = np.flatnonzero(group)[:2]
    np.testing.assert_allclose(rows[chosen].group_advantages(), expected[:2])


def test_ppo_has_no_gradient_past_its_clip():
    logps = torch.tensor([[-1.0, -1.0]] * 4, requires_grad=True)
    mu = torch.tensor([[-1.5, -1.0], [-1.5, -1.0], [-0.5, -1.0], [-0.5, -1.0]])  # ratios e^.5 and e^-.5
    rewards = torch.tensor([1.0, -1.0, 1.0, -1.0])
    ppo_loss(logps, mu, torch.ones(4, 2, dtype=torch.bool), rewards).backward()
    moved = logps.grad.abs().sum(-1) > 0
    assert moved.tolist() == [False, True, True, False]
    # -ratio R / |y|, over four rows
    assert logps.grad[1, 0].item() == pytest.approx(np.exp(0.5) / 2 / 4)


def test_m2po_drops_the_largest_until_the_second_moment_fits():
    # The squares are 0.01, 0.04, 0.25 and 1. Their mean exceeds 0.04 until the two largest are dropped:
    # (0.01 + 0.04) / 2 = 0.025.
    shift = torch.tensor([[0.1, 0.2, 0.5, 1.0]])
    logps = torch.full((1, 4), -2.0, requires_grad=True)
    m2po_loss(logps, logps.detach() - shift, torch.ones(1, 4, dtype=torch.bool), torch.tensor([1.0])).backward()
    assert logps.grad[0].tolist() == pytest.approx([-np.exp(0.1) / 4, -np.exp(0.2) / 4, 0.0, 0.0])
    # A negative advantage moves the ratios back toward 1, so no token is dropped.
    logps = torch.full((1, 4), -2.0, requires_grad=True)
    m2po_loss(logps, logps.detach() - shift, torch.ones(1, 4, dtype=torch.bool), torch.tensor([-1.0])).backward()
    assert (logps.grad != 0).all()


@pytest.mark.slow
def test_dpo_pairs_a_right_with_a_wrong_answer_of_a_problem(rows):
    objective = METHODS["dpo"].make(base_model("main"), rows, rows)
    keys = ((tuple(p), tuple(r)) for p, r in zip(rows.prompts, rows.responses, strict=True))
    reward = dict(zip(keys, rows.rewards, strict=True))
    assert objective.size == len(rows) // 2
    for pair in objective.items:
        assert reward[tuple(pair["prompt_ids"]), tuple(pair["chosen_ids"])] > 0
        assert reward[tuple(pair["prompt_ids"]), tuple(pair["rejected_ids"])] < 0


@pytest.mark.slow
def test_kto_keeps_trls_blocks_whole(rows):
    objective = METHODS["kto"].make(base_model("main"), rows, rows)
    assert (objective.size, objective.rows_per_item) == (len(rows) // 32, 32)
    answers = [tuple(item["completion_ids"]) for item in objective.items]
    mismatched = [tuple(item["KL_completion_ids"]) for item in objective.items]
    for block in range(objective.size):
        rows_ = slice(32 * block, 32 * (block + 1))
        assert sorted(answers[rows_]) == sorted(mismatched[rows_])


# Shares and protocols.


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8, 1.0])
def test_shares(rows, share):
    assert effective_positive_share(at_share(share)(rows)) == pytest.approx(share)
    right = rows[np.flatnonzero(rows.rewards > 0)]
    assert set(at_share(share)(right)) == {1.0}


def test_shares_by_name(rows):
    assert (at_share("p")(rows) == rows.rewards).all()
    assert at_share("mean")(rows).mean() == pytest.approx(0)
    assert at_share("group_mean")(rows) == pytest.approx(rows.rewards - rows.group_means)


def test_protocols(rows):
    right = rows.rewards > 0
    assert read(rows, "steps", 32, seed=0)[1] == len(rows) // 32 == 3
    for protocol, steps in {"removed": -(-right.sum() // 32), "rows": 3, "half": 1}.items():
        found, found_steps = read(rows, protocol, 32, seed=0)
        assert found_steps == steps
        assert len(found) == right.sum()
        assert (found.rewards > 0).all()


def test_balanced_rows_repeat_right_answers(rows):
    found, _ = read(rows, "balanced", 32, seed=0)
    assert len(found) == len(rows)
    assert (found.rewards > 0).mean() == 0.5
    for sign in (1, -1):
        answers = [tuple(r) for r, reward in zip(rows.responses, rows.rewards, strict=True) if reward == sign]
        seen = [tuple(r) for r, reward in zip(found.responses, found.rewards, strict=True) if reward == sign]
        assert set(seen) == set(answers) if sign == 1 else set(seen) <= set(answers)


def test_examples_before_each_input_are_part_of_the_prompt(rows):
    model, beginning = base_model("main").eval(), rows.prompts[0] * 2
    with torch.no_grad():
        prompts = [beginning + prompt for prompt in rows.prompts]
        expected, mask = response_logps(model, prompts, rows.responses, temperature=0.5)
        model.base_model.forward = pretrained.after(torch.tensor([beginning]), model.base_model)
        logps, own = response_logps(model, rows.prompts, rows.responses, temperature=0.5)
        drawn = draw_ids(model, tokenizer("main"), rows.prompts[:3], 2, 60, seed=3)
    torch.testing.assert_close(logps[own], expected[mask], atol=1e-4, rtol=1e-4)  # Sums have another order.
    for prompt, of_problem in zip(prompts[:3], drawn, strict=True):
        for ids, drawn_logps, _ in of_problem:
            model.base_model.__dict__.pop("forward", None)
            with torch.no_grad():
                logps, own = response_logps(model, [prompt], [ids])
            torch.testing.assert_close(torch.tensor(drawn_logps), logps[own], atol=2e-4, rtol=1e-4)
