import itertools
import math
from math import inf, nan

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from topr_trl import PRESETS, TruncationLimits
from topr_trl.loss import (
    MAX_LOG_WEIGHT,
    RATIO_LEVELS,
    objective,
    sequence_logps,
    taper,
    topr_loss,
    truncated_weights,
)

LIMITS = [*PRESETS.values(), TruncationLimits(0.5, 2.0, 0.1, 1.5), TruncationLimits(0, 0, 0, 0)]


def log_ratios(policy, mu, mask, level="sequence", segment_tokens=64):
    rewards = torch.ones(len(policy))  # The ratio does not depend on the rewards.
    return topr_loss(policy, mu, rewards, mask, PRESETS["topr"], level, segment_tokens=segment_tokens).log_ratios


def loop_loss(policy, mu, rewards, mask, limits, normalize):
    """Compute the loss of Algorithm 1 with a loop over rows and tokens."""
    losses = []
    for pi_row, mu_row, reward, mask_row in zip(policy, mu, rewards, mask, strict=True):
        log_pi = torch.stack([p for p, m in zip(pi_row, mask_row, strict=True) if m]).sum()
        log_mu = sum(p for p, m in zip(mu_row, mask_row, strict=True) if m)
        ratio = math.exp(log_pi.item() - float(log_mu))
        a, b = (limits.a_pos, limits.b_pos) if reward >= 0 else (limits.a_neg, limits.b_neg)
        weight = min(max(ratio, a), b)
        losses.append(-weight * reward * log_pi / (sum(mask_row) if normalize else 1))
    return torch.stack(losses)


def batch(seed=0, rows=6, tokens=5):
    generator = torch.Generator().manual_seed(seed)
    policy = -torch.rand(rows, tokens, generator=generator, dtype=torch.float64)
    mu = -torch.rand(rows, tokens, generator=generator, dtype=torch.float64)
    rewards = torch.tensor([1.0, -1.0, 0.5, -2.0, 0.0, -0.1], dtype=torch.float64)[:rows]
    mask = (torch.arange(tokens) < torch.tensor([5, 4, 3, 2, 1, 5])[:rows, None]).long()
    return policy, mu, rewards, mask


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("normalize", [True, False])
def test_agrees_with_a_loop_in_value_and_gradient(limits, normalize):
    policy, mu, rewards, mask = batch()
    ours, loops = policy.clone().requires_grad_(), policy.clone().requires_grad_()
    loss = topr_loss(ours, mu, rewards, mask, limits, length_normalization=normalize).losses_B
    expected = loop_loss(loops, mu, rewards, mask, limits, normalize)
    torch.testing.assert_close(loss, expected)
    (gradient,) = torch.autograd.grad(loss.sum(), ours)
    (expected_gradient,) = torch.autograd.grad(expected.sum(), loops)
    torch.testing.assert_close(gradient, expected_gradient)


@pytest.mark.parametrize("limits", LIMITS)
def test_gradient_is_that_of_the_objective(limits):
    # Autograd through J = Σ μ ρ(π/μ) R gives -Σ μ ∇ℓ without length division (Eq. 7 and 11).
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(12, generator=generator, dtype=torch.float64)
    mu = torch.log_softmax(torch.randn(12, generator=generator, dtype=torch.float64), 0)
    rewards = torch.randn(12, generator=generator, dtype=torch.float64)
    a, b = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    (through_j,) = torch.autograd.grad(objective(torch.log_softmax(a, 0), mu, rewards, limits), a)
    policy = torch.log_softmax(b, 0)[:, None]
    losses = topr_loss(policy, mu, rewards, torch.ones(12, 1), limits, length_normalization=False).losses_B
    (of_loss,) = torch.autograd.grad(-(mu.exp() * losses).sum(), b)
    torch.testing.assert_close(through_j, of_loss)


def test_padding_may_hold_garbage():
    policy, mu, rewards, mask = batch()
    clean = topr_loss(policy, mu, rewards, mask, PRESETS["tis"]).losses_B
    garbage = mask == 0
    dirty_policy = policy.masked_fill(garbage, float("nan")).requires_grad_()
    loss = topr_loss(dirty_policy, mu.masked_fill(garbage, float("-inf")), rewards, mask, PRESETS["tis"]).losses_B
    torch.testing.assert_close(loss, clean)
    loss.sum().backward()
    assert torch.isfinite(dirty_policy.grad).all()
    assert (dirty_policy.grad[garbage] == 0).all()


@pytest.mark.parametrize("level", RATIO_LEVELS)
def test_empty_completion_has_zero_loss(level):
    policy = torch.full((1, 3), -1.0, requires_grad=True)
    zero = torch.zeros(1, 3)
    loss = topr_loss(policy, policy.detach(), torch.tensor([-1.0]), zero, PRESETS["topr"], level).losses_B
    loss.sum().backward()
    assert loss.tolist() == [0.0]
    assert policy.grad.abs().sum() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("log_ratio", [-1000.0, -50.0, 0.0, 50.0, 1000.0])
@pytest.mark.parametrize("name", list(PRESETS))
def test_extreme_ratios_are_finite(dtype, log_ratio, name):
    policy = torch.full((2, 100), -1.0, dtype=dtype, requires_grad=True)
    mu = torch.full((2, 100), -1.0 - log_ratio / 100, dtype=dtype)
    loss = topr_loss(policy, mu, torch.tensor([1.0, -1.0]), torch.ones(2, 100), PRESETS[name]).losses_B
    loss.sum().backward()
    assert torch.isfinite(loss).all()
    if dtype != torch.float16 or log_ratio <= 0:  # The gradient of a large ratio overflows float16.
        assert torch.isfinite(policy.grad.float()).all()
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_plain_importance_weights_stop_at_the_documented_ceiling():
    weights = truncated_weights(torch.tensor([1000.0, -1000.0, 3.0]), torch.tensor([1.0, 1.0, -1.0]), PRESETS["opr"])
    assert weights.tolist() == pytest.approx([math.exp(40), 0.0, math.exp(3.0)], rel=1e-5)


@pytest.mark.parametrize("a", [1e30, 1e300])  # the second overflows float32
def test_limits_beyond_the_ceiling_are_the_ceiling(a):
    ratio, rewards = torch.zeros(2), torch.tensor([1.0, -1.0])
    assert truncated_weights(ratio, rewards, TruncationLimits(a, a, a, math.inf)).tolist() == pytest.approx(
        [math.exp(40)] * 2, rel=1e-5
    )


def test_sums_are_taken_in_float32():
    # In bfloat16, -1.01 is -1.0078125. The sum of 4,096 such tokens in bfloat16 would get stuck at a power of two.
    logps = torch.full((1, 4096), -1.01, dtype=torch.bfloat16)
    assert sequence_logps(logps, torch.ones(1, 4096)).item() == pytest.approx(-1.0078125 * 4096)


def test_a_reward_of_zero_has_the_weight_of_a_positive():
    weight = truncated_weights(torch.tensor([-3.0, -3.0]), torch.tensor([0.0, -1e-9]), PRESETS["topr"])
    assert weight.tolist() == [1.0, pytest.approx(math.exp(-3))]


def test_unknown_ratio_is_fine_where_it_does_not_matter():
    nan = torch.tensor([float("nan")] * 2)
    assert truncated_weights(nan, torch.tensor([1.0, 0.0]), PRESETS["topr"]).tolist() == [1.0, 1.0]
    assert truncated_weights(nan, torch.tensor([-1.0, -1.0]), PRESETS["topr"]).isnan().all()
    assert truncated_weights(nan, torch.tensor([0.0, 0.0]), PRESETS["opr"]).tolist() == [1.0, 1.0]


def test_the_loss_comes_with_its_weights_and_log_ratios():
    policy, mu, rewards, mask = batch()
    policy.requires_grad_()
    outputs = topr_loss(policy, mu, rewards, mask, PRESETS["tis"])
    logps = sequence_logps(policy, mask)
    assert torch.equal(outputs.policy_logps_B, logps)
    assert torch.equal(outputs.log_ratios, logps - sequence_logps(mu, mask))
    assert torch.equal(outputs.weights, truncated_weights(outputs.log_ratios, rewards, PRESETS["tis"]))
    assert torch.equal(outputs.losses_B, -outputs.weights * rewards * logps / mask.sum(1))
    assert [each.requires_grad for each in outputs] == [True, False, False, False]
    assert not truncated_weights(policy[:, 0], rewards, PRESETS["tis"]).requires_grad


@pytest.mark.parametrize("level", RATIO_LEVELS)
def test_log_pi_of_a_completion_is_summed_once(monkeypatch, level):
    policy, mu, rewards, mask = batch()
    summed = []
    monkeypatch.setattr("topr_trl.loss.sequence_logps", lambda x, mask: summed.append(x) or sequence_logps(x, mask))
    topr_loss(policy, mu, rewards, mask, PRESETS["topr"], level)
    assert sum(each is policy for each in summed) == 1


def test_mu_as_sums_or_per_token():
    policy, mu, rewards, mask = batch()
    sums = sequence_logps(mu, mask)
    of_tokens, of_sums = (topr_loss(policy, each, rewards, mask, PRESETS["tis"]).losses_B for each in (mu, sums))
    torch.testing.assert_close(of_tokens, of_sums)
    with pytest.raises(ValueError, match=r"^ratio_level='segment' needs .* shape \(B, T\); .* sums, shape \(B,\)\.$"):
        topr_loss(policy, sums, rewards, mask, PRESETS["tis"], "segment")


@pytest.mark.parametrize("segment_tokens", [1, 2, 3, 100])
def test_segment_ratio_equals_a_plain_loop(segment_tokens):
    policy, mu, rewards, mask = batch()
    policy.requires_grad_()
    mask[1, 1] = 0  # a tool wrote this token
    outputs = topr_loss(policy, mu, rewards, mask, PRESETS["topr"], "segment", segment_tokens=segment_tokens)
    outputs.losses_B.sum().backward()
    expected = torch.zeros_like(policy)
    for i, reward in enumerate(rewards.tolist()):
        own = [t for t, is_own in enumerate(mask[i].tolist()) if is_own]
        for start in range(0, len(own), segment_tokens):
            segment = own[start : start + segment_tokens]
            ratio = math.exp(sum(policy[i, t].item() - mu[i, t].item() for t in segment))
            weight = 1.0 if reward >= 0 else min(ratio, 1.0)
            expected[i, segment] = -weight * reward / len(own)
    torch.testing.assert_close(policy.grad, expected, check_dtype=False)
    assert (outputs.log_ratios[mask == 0] == 0).all()


def test_unknown_log_mu_of_a_token_spoils_only_its_segment():
    mu = torch.tensor([[-1.0, math.nan, -1.0, -1.0]])
    log_ratio = log_ratios(torch.full((1, 4), -1.0), mu, torch.ones(1, 4), "segment", 2)
    assert log_ratio.isnan().tolist() == [[True, True, False, False]]


@pytest.mark.parametrize("preset", ["opr", "topr", "tis"])
@pytest.mark.parametrize("segment_tokens", [1, 2, 3])
def test_segment_ratio_follows_its_objective(segment_tokens, preset):
    """The gradient is that of J = Σ_k E_{y ~ μ} [ρ(x_k, a, b) R(y)], where x_k is the ratio of segment k.

    The sum over y includes all completions of up to four tokens. Token 0 ends a completion.
    """
    torch.manual_seed(0)
    size, length, limits = 3, 4, PRESETS[preset]
    completions = [tokens for n in range(1, length + 1) for tokens in itertools.product(range(size), repeat=n)
                   if 0 not in tokens[:-1] and (tokens[-1] == 0 or n == length)]  # fmt: skip
    nodes = sorted({tokens[:t] for tokens in completions for t in range(len(tokens))})
    policy, mu = (torch.randn(len(nodes), size, dtype=torch.float64) for _ in "πμ")
    policy.requires_grad_()
    rewards = torch.randn(len(completions), dtype=torch.float64)

    def by_token(logits):
        logps = logits.log_softmax(1)
        rows = [torch.stack([logps[nodes.index(y[:t]), y[t]] for t in range(len(y))]) for y in completions]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    policy_BT, mu_BT = by_token(policy), by_token(mu)
    mask_BT = torch.tensor([[t < len(y) for t in range(length)] for y in completions])
    mu_B = mu_BT.sum(1).exp()
    assert mu_B.sum().item() == pytest.approx(1)
    j = 0
    for y, reward, probability, row, mu_row in zip(completions, rewards, mu_B, policy_BT, mu_BT, strict=True):
        a, b = (limits.a_pos, limits.b_pos) if reward >= 0 else (limits.a_neg, limits.b_neg)
        for start in range(0, len(y), segment_tokens):
            inside = slice(start, min(start + segment_tokens, len(y)))
            j = j + probability * taper((row[inside] - mu_row[inside]).sum().exp(), a, b) * reward
    (expected,) = torch.autograd.grad(j, policy, retain_graph=True)
    losses_B = topr_loss(policy_BT, mu_BT, rewards, mask_BT, limits, "segment", False, segment_tokens).losses_B
    (found,) = torch.autograd.grad(-(mu_B * losses_B).sum(), policy)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("level", RATIO_LEVELS)
@pytest.mark.parametrize("segment_tokens", [0, -1])
def test_a_segment_has_at_least_one_token(segment_tokens, level):
    with pytest.raises(ValueError, match=rf"^segment_tokens must be at least 1, not {segment_tokens}\.$"):
        log_ratios(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1), level, segment_tokens)


def test_unknown_ratio_level():
    with pytest.raises(ValueError, match="ratio_level must be one of"):
        log_ratios(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1), "word")


@settings(max_examples=300, deadline=None)
@given(
    log_x=st.floats(-700, 700),
    a=st.floats(0, 10, allow_subnormal=False),
    width=st.one_of(st.floats(0, 10), st.just(math.inf)),
)
def test_taper_is_below_its_argument_and_has_the_clipped_slope(log_x, a, width):
    b = a + width
    x = torch.tensor(math.exp(log_x), dtype=torch.float64, requires_grad=True)
    value = taper(x, a, b)
    assert value <= x * (1 + 1e-12)
    (slope,) = torch.autograd.grad(value, x)
    clipped = min(max(x.item(), a), b)
    assert slope.item() == pytest.approx(clipped / x.item(), rel=1e-9)


@settings(max_examples=200, deadline=None)
@given(
    log_ratio=st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=8), a=st.floats(0, 5),
    width=st.one_of(st.floats(0, 5), st.just(math.inf)), reward=st.floats(-2, 2),
)  # fmt: skip
def test_weights_stay_within_the_limits_of_their_sign(log_ratio, a, width, reward):
    limits = TruncationLimits(a, a + width, 2 * a, 2 * a + width)
    low, high = (a, a + width) if reward >= 0 else (2 * a, 2 * a + width)
    ratio = torch.tensor(log_ratio, dtype=torch.float64)
    weights = truncated_weights(ratio, torch.full_like(ratio, reward), limits)
    assert (weights >= low * (1 - 1e-9)).all()
    assert (weights <= high * (1 + 1e-9)).all()
    inside = (ratio.exp() >= low) & (ratio.exp() <= high) & (ratio < MAX_LOG_WEIGHT)
    torch.testing.assert_close(weights[inside], ratio.exp()[inside])


def test_objective_is_bounded_only_without_a_lower_limit_for_negatives():
    # Prop. 3.2: compare J while the probability of the only negative completion goes to 0.
    mu = torch.tensor([0.5, 0.5], dtype=torch.float64).log()
    rewards = torch.tensor([1.0, -1.0], dtype=torch.float64)

    def j(epsilon, name):
        policy = torch.tensor([1 - epsilon, epsilon], dtype=torch.float64).log()
        return objective(policy, mu, rewards, PRESETS[name]).item()

    assert j(1e-200, "topr") == pytest.approx(j(1e-100, "topr"), abs=1e-6)
    assert j(1e-200, "reinforce") > j(1e-100, "reinforce") + 50


def test_ratios_of_tokens_by_hand():
    # Completions of one and two tokens. log π - log μ is -2 in the first, and -1 and -3 in the second.
    policy = torch.tensor([[-3.0, 9.0], [-2.0, -4.0]], dtype=torch.bfloat16)
    mu, mask = torch.full((2, 2), -1.0, dtype=torch.bfloat16), torch.tensor([[1, 0], [1, 1]])
    outputs = topr_loss(policy, mu, torch.tensor([-1.0, -1.0]), mask, PRESETS["topr"], "segment", segment_tokens=1)
    assert outputs.log_ratios.tolist() == [[-2.0, 0.0], [-1.0, -3.0]]
    assert outputs.log_ratios.dtype == torch.float32
    # The loss is -Σ_t w_t R log π_t / |y|, with w = e^ratio and R = -1.
    expected = [-3 * math.exp(-2), (-2 * math.exp(-1) - 4 * math.exp(-3)) / 2]
    assert outputs.losses_B.tolist() == pytest.approx(expected)


def test_a_single_token_is_divided_by_one_and_rewards_do_not_widen_the_loss():
    policy, one = torch.tensor([[-2.0]]), torch.ones(1, 1)
    half = TruncationLimits(0.5, 0.5, 0, 1)
    loss = topr_loss(policy, policy, torch.tensor([3.0], dtype=torch.float64), one, half).losses_B
    assert loss.tolist() == [3.0]  # -0.5 · 3 · -2 / 1
    assert loss.dtype == torch.float32
    four = policy.expand(1, 4)
    assert topr_loss(four, four, torch.ones(1), torch.ones(1, 4), PRESETS["topr"]).losses_B.item() == 2  # 4 · 2 / 4


def test_presets_are_table_1():
    assert PRESETS["topr"] == TruncationLimits(1, 1, 0, 1)
    assert PRESETS["positives_only"] == TruncationLimits(1, 1, 0, 0)
    assert PRESETS["reinforce"] == TruncationLimits(1, 1, 1, 1)
    assert PRESETS["opr"] == TruncationLimits(0, inf, 0, inf)
    assert PRESETS["tis"] == TruncationLimits(0, 1, 0, 1)
    assert len(PRESETS) == 5


def test_rows_that_need_log_mu():
    assert (PRESETS["topr"].ratio_matters_pos, PRESETS["topr"].ratio_matters_neg) == (False, True)
    assert (PRESETS["tis"].ratio_matters_pos, PRESETS["tis"].ratio_matters_neg) == (True, True)
    assert (PRESETS["reinforce"].ratio_matters_pos, PRESETS["reinforce"].ratio_matters_neg) == (False, False)


def test_bounded_is_prop_3_2():
    assert [name for name, limits in PRESETS.items() if not limits.bounded] == ["reinforce"]


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ((2, 1, 0, 1), "a_pos=2 is above"),
        ((1, 1, 0.5, 0.1), "a_neg=0.5 is above"),
        ((-1, 1, 0, 1), "a_pos=-1"),
        ((1, 1, 0, -1), "b_neg=-1"),
        ((nan, 1, 0, 1), "a_pos=nan"),
        ((1, nan, 0, 1), "b_pos=nan"),
        ((inf, inf, 0, 1), "finite"),
    ],
)
def test_bad_limits_are_named(limits, message):
    with pytest.raises(ValueError, match=message):
        TruncationLimits(*limits)


def test_the_loss_is_two_kl_terms_and_the_baseline_a_third():
    """Prop. 3.1: Σ μ (R - c) log π = -R⁺ KL(μ⁺‖π) + R⁻ KL(μ⁻‖π) + c KL(μ‖π) + C, where C does not depend on π."""
    generator = torch.Generator().manual_seed(0)

    def draw():
        return torch.randn(12, generator=generator, dtype=torch.float64)

    def kl(p, logps):
        return (torch.special.xlogy(p, p) - p * logps).sum()

    for c in (-1.0, 0.0, 0.7):
        mu, policy, rewards = draw().log_softmax(0), draw().log_softmax(0), draw()

        def direct(logps, mu=mu, rewards=rewards, c=c):  # naive REINFORCE, each completion has a single token
            losses_B = topr_loss(logps[:, None], mu, rewards - c, torch.ones(12, 1), PRESETS["reinforce"]).losses_B
            return -(mu.exp() * losses_B).sum()

        def by_parts(logps, mu=mu, rewards=rewards, c=c):
            total = c * kl(mu.exp(), logps)
            for sign in (1, -1):
                mass = mu.exp() * (sign * rewards).clamp(min=0)
                total = total - sign * mass.sum() * kl(mass / mass.sum(), logps)
            return total

        # C cancels in the difference between two policies.
        ours, parts = (loss(policy) - loss(mu) for loss in (direct, by_parts))
        assert ours.item() == pytest.approx(parts.item(), abs=1e-12)


@pytest.mark.parametrize("name", list(PRESETS))
@pytest.mark.parametrize("gap", [-inf, -1e4, -300.0, -104.0, -60.0, 60.0, 89.0, 300.0, 399.0])
@pytest.mark.parametrize("reward", [1.0, -1.0])
def test_objective_far_from_mu_has_the_gradient_of_eq_7(gap, name, reward):
    # With log μ = -1,000 in float64, μ underflows, and so do its terms of Eq. 7. With log μ = -2, they do not.
    for mu in (-1000.0, -2.0):
        logps = torch.tensor([mu + gap, -1.0], dtype=torch.float64, requires_grad=True)
        value = objective(
            logps, torch.tensor([mu, -1.0], dtype=torch.float64), torch.tensor([reward, 1.0]), PRESETS[name]
        )
        limits = PRESETS[name]
        a, b = (limits.a_pos, limits.b_pos) if reward > 0 else (limits.a_neg, limits.b_neg)
        value.backward()
        log_a, log_b = (math.log(x) if x else -inf for x in (a, b))
        expected = reward * math.exp(min(mu + min(max(gap, log_a), log_b), 700))
        assert logps.grad[0].item() == pytest.approx(expected, rel=1e-9)
        if gap > -inf or a == 0:
            assert value.isfinite()


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("reward", [1.0, -1.0])
def test_completions_that_mu_cannot_write_or_with_r_0_are_not_in_the_objective(limits, reward):
    policy = torch.tensor([-0.5, -inf, -0.5], requires_grad=True)
    mu, rewards = torch.tensor([-inf, -0.5, -0.5]), torch.tensor([reward, 0.0, reward])
    value = objective(policy, mu, rewards, limits)
    torch.testing.assert_close(value, objective(policy[2:], mu[2:], rewards[2:], limits))
    assert torch.autograd.grad(value, policy)[0][:2].tolist() == [0, 0]


def test_taper_at_and_near_0():
    ratio = torch.tensor([0.0, 1e-30, 1e-45, 2.0], requires_grad=True)
    value = taper(ratio, 0.0, 1.0)
    value.sum().backward()
    assert value.tolist() == pytest.approx([0.0, 1e-30, 1e-45, 1 + math.log(2)])
    assert ratio.grad.tolist() == [1.0, 1.0, 1.0, 0.5]


@pytest.mark.parametrize("level", RATIO_LEVELS)
def test_a_negative_that_the_policy_cannot_write_contributes_nothing(level):
    logits = torch.tensor([[0.0, 1.0, -inf], [0.0, 1.0, 2.0]], dtype=torch.float64, requires_grad=True)
    policy = logits.log_softmax(-1)[:, [2, 0]]
    mu, mask = torch.full((2, 2), -1.0, dtype=torch.float64), torch.ones(2, 2)
    both = topr_loss(policy, mu, torch.tensor([-1.0, -1.0]), mask, PRESETS["topr"], level).losses_B
    both.sum().backward()
    assert both[0] == 0
    assert logits.grad[0].tolist() == [0.0, 0.0, 0.0]
    assert both.isfinite().all()
    assert logits.grad.isfinite().all()
    # R = 0 has no loss either.
    assert topr_loss(policy, mu, torch.zeros(2), mask, PRESETS["topr"], level).losses_B.tolist() == [0.0, 0.0]
    # The loss of a positive is infinite, as in maximum likelihood, and NaN of the model is not hidden.
    assert topr_loss(policy, mu, torch.ones(2), mask, PRESETS["topr"], level).losses_B[0] == inf
    broken = topr_loss(policy * nan, mu, -torch.ones(2), mask, PRESETS["positives_only"], level).losses_B
    assert broken.isnan().all()


@pytest.mark.parametrize("level", RATIO_LEVELS)
@pytest.mark.parametrize("unknown", [-inf, inf, nan])
def test_log_mu_that_is_infinite_is_unknown(unknown, level):
    policy = torch.full((2, 2), -1.0)
    mu = torch.tensor([[unknown, -1.0], [-1.0, -1.0]])
    outputs = topr_loss(policy, mu, torch.tensor([-1.0, -1.0]), torch.ones(2, 2), PRESETS["topr"], level)
    assert outputs.losses_B.isnan().tolist() == [True, False]
    positives = topr_loss(policy, mu, torch.ones(2), torch.ones(2, 2), PRESETS["topr"], level)
    assert positives.losses_B.isfinite().all()


@pytest.mark.parametrize("level", RATIO_LEVELS)
def test_any_value_but_0_in_the_mask_counts_one_token(level):
    policy, mu, rewards, mask = batch()
    expected = topr_loss(policy, mu, rewards, mask, PRESETS["tis"], level).losses_B
    for other in (mask.bool(), mask.float() * 0.5, (mask * 255).to(torch.uint8)):
        torch.testing.assert_close(topr_loss(policy, mu, rewards, other, PRESETS["tis"], level).losses_B, expected)


B, T = 3, 4
LOGPS, MASK, REWARDS = -torch.rand(B, T), torch.ones(B, T), torch.ones(B)
TOPR = PRESETS["topr"]
WRONG_SHAPES = {
    "policy_logps_BT": lambda: topr_loss(LOGPS[0], LOGPS, REWARDS, MASK, TOPR),
    "mask_BT": lambda: topr_loss(LOGPS, LOGPS, REWARDS, MASK[:1], TOPR),
    "mask_BT of tokens": lambda: topr_loss(LOGPS, LOGPS, REWARDS, MASK[0], TOPR),
    "mu_logps": lambda: topr_loss(LOGPS, LOGPS[:, :1], REWARDS, MASK, TOPR),
    "mu_logps of one row": lambda: topr_loss(LOGPS, LOGPS[:1], REWARDS, MASK, TOPR),
    "mu_logps without a dimension": lambda: topr_loss(LOGPS, torch.tensor(-1.0), REWARDS, MASK, TOPR),
    "mu_logps per token": lambda: topr_loss(LOGPS, LOGPS[:, :1], REWARDS, MASK, TOPR, "segment"),
    "rewards_B": lambda: topr_loss(LOGPS, LOGPS, REWARDS[:, None], MASK, TOPR),
    "rewards_B of one row": lambda: topr_loss(LOGPS, LOGPS, REWARDS[:1], MASK, TOPR),
    "rewards_B without a dimension": lambda: truncated_weights(LOGPS[:, 0], torch.tensor(1.0), TOPR),
    "rewards_B of tokens": lambda: truncated_weights(LOGPS, REWARDS[:, None], TOPR),
    "log_ratio": lambda: truncated_weights(LOGPS[None], REWARDS, TOPR),
    "mu_logps_B": lambda: objective(LOGPS[:, 0], LOGPS[:1, 0], REWARDS, TOPR),
    "rewards_B of the objective": lambda: objective(LOGPS[:, 0], LOGPS[:, 0], REWARDS[:, None], TOPR),
    "policy_logps_B": lambda: objective(LOGPS[:, :1], LOGPS[:, 0], REWARDS, TOPR),
}


@pytest.mark.parametrize("name", list(WRONG_SHAPES))
def test_a_wrong_shape_is_named(name):
    with pytest.raises(ValueError, match=f"^{name.split()[0]} must have the shape .*, not "):
        WRONG_SHAPES[name]()
