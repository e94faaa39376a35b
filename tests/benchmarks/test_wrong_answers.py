"""The parts of "When do wrong answers pay?": base models, arms, optimizers, gradients; verdicts on planted results."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
import trl
from packaging.version import Version

from benchmarks import arms, evidence
from benchmarks.__main__ import HYPOTHESES as CLAIMS
from benchmarks.arms import TUNING_SEED, Arm
from benchmarks.bases import AUTHORS, Author, one_product, solution
from benchmarks.cells import Store
from benchmarks.claims import long_run, optimizers_compared, protocols, trials
from benchmarks.gradients import Moments, gains, moments, share_of_second_moment, shares_of_least_noise
from benchmarks.hypotheses import HYPOTHESES
from benchmarks.losses import LOSSES, bapo_loss, oapl, optimal_advantages, powered
from benchmarks.optimizers import OPTIMIZERS
from benchmarks.rivals import Direct
from benchmarks.rows import Rows, response_logps
from benchmarks.setting import PROFILES, base_model, folder, problems, sample, tokenizer
from benchmarks.training import train
from topr_trl import effective_positive_share
from topr_trl.tasks import gsm8k

pytestmark = pytest.mark.skipif(
    Version(trl.__version__) < Version("1.16"), reason="the benchmarks are of the newest TRL; 1.15 is slow on a CPU"
)
PROFILE = replace(PROFILES["full"], seeds=3)


# Base models.


def verdicts_of(author, count=400):
    rng = random.Random(0)
    problems = [one_product(rng) for _ in range(count)]
    texts = [solution(problem, author, rng) for problem in problems]
    return problems, texts, gsm8k.judge(texts, [str(problem.answer) for problem in problems])


def test_an_author_errs_as_often_as_asked():
    _, texts, found = verdicts_of(Author(), 50)
    assert {verdict for verdict, _ in found} == {"correct"}
    assert all(text.count("*") == 1 for text in texts)
    _, texts, found = verdicts_of(Author(add=0.8))
    assert np.mean([verdict == "correct" for verdict, _ in found]) == pytest.approx(0.2, abs=0.06)
    assert np.mean(["*" not in text for text in texts]) == pytest.approx(0.8, abs=0.06)
    _, _, found = verdicts_of(Author(wander=0.6))
    assert np.mean([verdict == "invalid" for verdict, _ in found]) == pytest.approx(0.6, abs=0.06)


@pytest.mark.parametrize("name", AUTHORS)
def test_wrong_answers_are_at_most_three_times_as_long(name):
    _, texts, found = verdicts_of(AUTHORS[name])
    lengths = {kind: [len(t) for t, (v, _) in zip(texts, found, strict=True) if (v == "correct") is kind]
               for kind in (True, False)}  # fmt: skip
    assert np.mean(lengths[False]) < 2 * np.mean(lengths[True])
    assert np.percentile(lengths[False], 99) < 3.5 * np.mean(lengths[True])


def test_problems_of_these_tasks_have_one_product():
    answers = problems("sure-17", 30, 5)
    assert len(answers) == 30
    assert (
        problems("sure-17", 30, 5)["question"][:] == answers["question"][:] != problems("sure-17", 30, 6)["question"][:]
    )
    assert all("bags" in q or "of" in q for q in answers["question"])


# Arms.


@pytest.fixture(scope="module")
def rows():
    model = base_model("main")
    return Rows.of(sample(model, "main", problems("main", 8, 7), 8, seed=3))


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8, 1.0])
def test_the_share_is_what_an_arm_says(rows, share):
    assert effective_positive_share(arms.after_baseline(rows, share)) == pytest.approx(share)
    right = rows[np.flatnonzero(rows.rewards > 0)]
    assert set(arms.after_baseline(right, 1.0)) == {1.0}


def test_shares_by_name(rows):
    assert (arms.after_baseline(rows, "p") == rows.rewards).all()
    assert arms.after_baseline(rows, "group_mean") == pytest.approx(rows.rewards - rows.group_means)


@pytest.mark.parametrize(
    ("protocol", "steps", "right_only"), [("removed", 1, True), ("rows", 2, True), ("steps", 2, False)]
)
def test_protocols_of_positives_only(rows, monkeypatch, protocol, steps, right_only):
    seen = []
    monkeypatch.setattr(arms, "base_model", lambda base: None)
    monkeypatch.setattr(arms, "epoch_rows", lambda *_: (rows, rows))
    monkeypatch.setattr(
        arms, "train", lambda model, objective, steps, *_, **__: seen.append((objective, steps)) or
        {"curve": [], "gradient_norms": [1.0]},
    )  # fmt: skip
    arms.trained(Arm("main", 1.0, protocol), PROFILE, 0)
    ((objective, found),) = seen
    assert found == steps == {"removed": -(-int((rows.rewards > 0).sum()) // 32)}.get(protocol, len(rows) // 32)
    assert (objective.rows.rewards > 0).all() == right_only


def test_balanced_rows_repeat_right_answers(rows):
    found = arms.balanced(rows, seed=0)
    assert len(found) == len(rows)
    assert (found.rewards > 0).mean() == 0.5
    of_sign = {sign: {tuple(r) for r, reward in zip(rows.responses, rows.rewards, strict=True) if (reward > 0) == sign}
               for sign in (True, False)}  # fmt: skip
    assert {tuple(r) for r, reward in zip(found.responses, found.rewards, strict=True) if reward > 0} == of_sign[True]
    seen = [tuple(r) for r, reward in zip(found.responses, found.rewards, strict=True) if reward < 0]
    assert set(seen) <= of_sign[False]


def test_an_arm_is_reported_at_the_rate_that_was_best_when_tuned(tmp_path, monkeypatch):
    monkeypatch.setattr(arms, "model_hash", str)
    store, arm = Store(tmp_path), Arm("sure-17", 0.5)
    choices = [{"learning_rate": rate} for rate in (3e-5, 1e-4, 3e-4)]
    tuning = arms.planned(store, {arm: choices}, [0, 1])
    assert [cell["seed"] for cell in tuning] == [TUNING_SEED] * 3
    for cell, accuracy in zip(tuning, (0.2, 0.4, 0.3), strict=True):
        store.add(cell, {"end": {"pass@1": accuracy}, "p": 0.1}, 1.0, "")
    cells = arms.planned(store, {arm: choices}, [0, 1])
    assert [(cell["seed"], cell["learning_rate"]) for cell in cells[3:]] == [(0, 1e-4), (1, 1e-4)]
    assert Arm.of(cells[3]) == replace(arm, learning_rate=1e-4)


@pytest.mark.parametrize(("peak", "tried"), [(3e-3, [3e-4, 1e-3, 3e-3, 1e-2]), (3e-5, [1e-4, 3e-5, 1e-5]), (1.0, None)])
def test_rates_are_tried_until_the_best_lies_between_others(tmp_path, monkeypatch, peak, tried):
    """Of each number of rows per step; a peak too far away ends the search."""
    monkeypatch.setattr(arms, "model_hash", str)
    store, arm = Store(tmp_path), Arm("sure-17", 0.5, batch_rows=8)
    choices = [{"learning_rate": rate, "batch_rows": batch} for batch in (32, 8) for rate in (1e-4, 3e-4)]
    while todo := store.unfinished(arms.planned(store, {arm: choices}, [])):
        for cell in todo:
            accuracy = -abs(np.log(cell["learning_rate"] / peak)) + 0.1 * (cell["batch_rows"] == 8)
            store.add(cell, {"end": {"pass@1": accuracy}, "p": -10.0}, 1.0, "")
    found = arms.planned(store, {arm: choices}, [])
    assert all(cell["batch_rows"] == 8 for cell in found[4:])
    rates = {cell["learning_rate"] for cell in found if cell["batch_rows"] == 8}
    assert len(rates) == 5 if tried is None else set(tried) <= rates
    if tried:
        assert arms.best(store, arm, choices) == replace(arm, learning_rate=peak)


def test_lower_rates_are_tried_where_all_harm():
    choices = [{"learning_rate": rate} for rate in (1e-4, 3e-4, 1e-3)]
    ends = {1e-4: 0.0, 3e-4: 0.01, 1e-3: 0.0, 3e-5: 0.05, 1e-5: 0.2, 3e-6: 0.15}
    tried, best = arms.tune(choices, 3, lambda choice: ends[choice["learning_rate"]], untrained=0.1)
    assert [one["learning_rate"] for one in tried[3:]] == [3e-5, 1e-5, 3e-6]
    assert best == {"learning_rate": 1e-5}


def test_rows_that_another_sampler_drew_are_another_cell(monkeypatch):
    """Arms are compared seed by seed, which needs the same rows; the choice of a rate does not."""
    before = [Arm("sure-17", 0.5).cell(seed) for seed in (0, TUNING_SEED)]
    monkeypatch.setattr(arms, "DRAWS", arms.DRAWS + 1)
    after = [Arm("sure-17", 0.5).cell(seed) for seed in (0, TUNING_SEED)]
    assert [cell != other for cell, other in zip(before, after, strict=True)] == [True, False]


# Losses.


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_learns_right_from_wrong(name, rows):
    model = base_model("main")
    loss, rewards = LOSSES[name]
    objective = Direct(model, rows, loss, rewards or (lambda rows: rows.rewards))
    train(model, objective, 4, 1e-4, seed=0)
    after = rows.scored_by(model).mu_logps
    change = np.array([(new.mean() - old.mean()).item() for new, old in zip(after, rows.mu_logps, strict=True)])
    counted = np.abs(rows.group_means) < 1  # Reinforce-Rej leaves the others out
    assert change[(rows.rewards > 0) & counted].mean() > change[(rows.rewards < 0) & counted].mean() + 1e-4


def test_the_power_of_the_taper(rows):
    """At 1 it is TOPR's loss; a higher one weighs a negative less that has become unlikely."""
    logps, mask = torch.full((2, 3), -1.0, requires_grad=True), torch.ones(2, 3, dtype=torch.bool)
    mu, rewards = torch.full((2, 3), -0.5), torch.tensor([1.0, -1.0])
    gradients = {}
    for power in (0.5, 1.0, 2.0):
        (gradients[power],) = torch.autograd.grad(powered(power)(logps, mu, mask, rewards), logps)
    (topr,) = torch.autograd.grad(LOSSES["taper"].loss(logps, mu, mask, rewards), logps)
    torch.testing.assert_close(gradients[1.0], topr)
    assert gradients[2.0][1, 0] == pytest.approx(float(topr[1, 0]) * np.exp(-1.5), rel=1e-4)
    assert gradients[0.5][1, 0] == pytest.approx(float(topr[1, 0]) * np.exp(0.75), rel=1e-4)


def test_the_optimum_of_oapl(rows):
    """Where β log π/μ is the optimal advantage the loss is 0, and π is μ exp(r / β), normalized."""
    beta, mu = 0.5, np.array([0.2, 0.3, 0.5])
    raw = np.array([1.0, -1.0, -1.0])
    best = mu * np.exp(raw / beta)
    best /= best.sum()
    some = replace(rows[np.arange(3)], rewards=raw, group_means=np.full(3, mu @ raw))
    advantages = optimal_advantages(beta)(some)
    assert advantages == pytest.approx(beta * np.log(best / mu))
    ones = torch.ones(3, 1, dtype=torch.bool)
    logs = [torch.tensor(np.log(x))[:, None] for x in (best, mu)]
    assert oapl(beta)(*logs, ones, torch.tensor(advantages)) == pytest.approx(0, abs=1e-12)


def test_bapo_moves_its_limits_until_positives_are_half():
    """One positive at ratio 2 beside three negatives at ratio 1: it counts only once the upper limit is above 2."""
    mu, mask = torch.zeros(4, 1), torch.ones(4, 1, dtype=torch.bool)
    logps = torch.tensor([[np.log(2.0)], [0.0], [0.0], [0.0]], dtype=torch.float32, requires_grad=True)
    bapo_loss(logps, mu, mask, torch.tensor([3.0, -1.0, -1.0, -1.0])).backward()
    assert logps.grad[0, 0] < 0
    logps.grad = None
    bapo_loss(logps, mu, mask, torch.tensor([3.0, 3.0, -1.0, -1.0])).backward()  # another positive is enough
    assert logps.grad[0, 0] == 0
    assert logps.grad[1, 0] < 0


# Optimizers.


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_a_gradient_is_divided_by(name):
    torch.manual_seed(0)
    model = base_model("main")
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = OPTIMIZERS[name](model, 0.01)
    for p in model.parameters():
        p.grad = torch.randn_like(p) * 7
    optimizer.zero_grad()
    for p in model.parameters():
        p.grad = torch.randn_like(p) * 7
    optimizer.step()
    steps = [(b - p).detach() for b, p in zip(before, model.parameters(), strict=True)]
    assert all(step.any() for step in steps)
    whole = float(torch.cat([step.flatten() for step in steps]).norm())
    if name == "whole":
        assert whole == pytest.approx(0.01, rel=1e-3)
    if name == "tensors":
        assert [float(step.norm()) for step in steps] == pytest.approx([0.01] * len(steps), rel=1e-3)
    if name in ("signs", "adamw"):  # at the first step AdamW has no memory either
        assert whole == pytest.approx(0.01 * sum(step.numel() for step in steps) ** 0.5, rel=1e-2)
    if name in ("sgd", "momentum"):
        assert steps[0].norm() == pytest.approx(0.07 * steps[0].numel() ** 0.5, rel=0.05)


# Gradients.


def test_moments_of_rows(rows):
    of = [np.flatnonzero(rows.groups == problem)[:3] for problem in (0, 1)]
    model, some = base_model("main").eval(), rows[np.stack(of, axis=1).ravel()]  # of the two problems by turns
    found = moments(model, some)
    own = []
    for n in range(6):
        model.zero_grad()
        logps, mask = response_logps(model, [some.prompts[n]], [some.responses[n]])
        logps[mask].sum().backward()
        own.append(torch.cat([p.grad.flatten() for p in model.parameters()]).double())
    u = [whole / len(response) for whole, response in zip(own, some.responses, strict=True)]
    torch.testing.assert_close(found.means_2D[1], torch.stack(u[1::2]).mean(0), rtol=1e-3, atol=1e-7)
    torch.testing.assert_close(found.squares_2D[0], torch.stack(u[::2]).square().mean(0), rtol=1e-2, atol=1e-8)
    torch.testing.assert_close(found.whole_means_2D[0], torch.stack(own[::2]).mean(0), rtol=1e-3, atol=1e-6)
    assert found.norms_N == pytest.approx([float(x.square().sum()) for x in u], rel=1e-3)
    logps = rows.mu_logps[0].exp()
    assert found.token_norms_N[0] == pytest.approx(float((1 - logps).square().sum()) / len(logps) ** 2, rel=1e-3)
    assert found.logit_norms_N[0] > found.token_norms_N[0]  # the same and the other tokens'


def test_logit_norms_are_those_of_the_logits(rows):
    model, row = base_model("main").eval(), rows[[0]]
    ids = torch.tensor([row.prompts[0] + row.responses[0]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(row.prompts[0]) - 1 : -1]
    logits = logits.float().requires_grad_()
    logits.log_softmax(-1).gather(1, torch.tensor(row.responses[0])[:, None]).mean().backward()
    assert moments(model, row).logit_norms_N[0] == pytest.approx(float(logits.grad.square().sum()), rel=1e-4)


def _moments(mean, deviation, size=200):
    """Of gradients that are independent of each other, with a mean and a deviation in every coordinate."""
    means = torch.full((2, size), mean, dtype=torch.float64)
    squares = torch.full((2, size), mean**2 + deviation**2, dtype=torch.float64)
    norms = np.full(4, float(squares[0].sum()))
    return Moments(means, squares, means, norms, norms, norms)


def test_where_noise_is_all_the_whole_gradient_gains_most_at_the_least_second_moment():
    right, wrong = _moments(1e-3, 3.0), _moments(-1e-3 * 0.25 / 0.75, 1.0)  # E[u] over all rows is 0, as on policy
    shares = np.linspace(0.01, 1.0, 100)
    found = gains(right, wrong, 0.25, shares, [100, 100])
    least = share_of_second_moment(right.norms_N.mean(), wrong.norms_N.mean())
    assert least == pytest.approx(0.1, abs=0.01)
    for name in ("whole", "tensors", "adamw"):  # all coordinates are alike here, so every metric is
        assert shares[np.argmax(found[name])] == pytest.approx(least, abs=0.03), name


def test_a_coordinate_of_one_sign_counts_in_adams_metric_alone():
    """Wrong rows are noise in a few coordinates in which nothing can be gained: only SGD minds."""
    right, wrong = _moments(1e-2, 1.0), _moments(-1e-2, 1.0)
    wrong.squares_2D[:, :4] += 2_000.0
    shares = np.linspace(0.01, 1.0, 100)
    found = {name: shares[np.argmax(values)] for name, values in gains(right, wrong, 0.5, shares, [200]).items()}
    assert found["whole"] > 0.9
    assert found["adamw"] == pytest.approx(0.5, abs=0.1)


def test_noise_is_measured_around_zero_around_the_mean_and_by_coordinate():
    right, wrong = _moments(1.0, 1.0), _moments(-3.0, 1.0)
    found = shares_of_least_noise(right, wrong, 0.5)
    assert found["gradients"] == pytest.approx(10 / 12)  # 3² + 1 against 1² + 1
    assert found["variance"] == pytest.approx(0.5)
    assert found["scaled gradients"] == pytest.approx(10 / 12)  # all coordinates are alike
    right, wrong = _moments(0.1, 1.0), _moments(-0.3, 1.0)
    wrong.squares_2D[:, :4] += 2_000.0
    found = shares_of_least_noise(right, wrong, 0.5)
    assert found["variance"] > 0.97
    assert found["scaled variance"] == pytest.approx(0.5, abs=0.05)


# Verdicts on planted results.


def planted(cell):
    wobble = 0.001 * cell.get("seed", 0) if cell.get("seed") != TUNING_SEED else 0.0
    if cell.get("part") == "gradients":
        grid = np.linspace(0.02, 1.0, 50)
        peak = (1 - (grid - 0.5) ** 2).tolist()
        least = dict.fromkeys(("gradients", "logits", "log-probabilities", "variance"), 0.5)
        return {"p": 0.1, "least_noise": least, "shares": grid.tolist(),
                "gains": dict.fromkeys(("whole", "tensors", "adamw", "signs"), peak)}  # fmt: skip
    if cell["claim"] == "long_run":
        better = 0.2 if cell["run"] == "p~ 50%" else 0.0
        slower = cell["learning_rate"] < long_run.CHOICES[0]["learning_rate"]
        ends = {str(k): 0.5 + wobble + (better if k > 1 else 0.0) for k in long_run.KS}
        ends["1"] += 0.1 if cell["run"] == "positives, repeated" else 0.0
        curve = [{"pass@1": 0.5 + wobble}] * (long_run.ITERATIONS // long_run.EVERY)
        ends["64"] += 0.1 if slower else 0.0
        maj = {"64": 0.6 if slower else 0.5}
        return {"curve": curve, "pass": ends, "maj": maj, "never_solved": 0.1, "entropy": 3.0, "different_answers": 9.0}
    if cell.get("part") == "trial":
        return {"recommended": ["share-80", 1e-4]}
    if cell["claim"] == "trials":
        return {"end": {"pass@1": 0.5 - 0.05 * (cell["setting"] != "share-50") + wobble}}
    share = cell["share"] if isinstance(cell["share"], float) else 0.1
    accuracy = 0.5 - 0.1 * abs(share - 0.5) + wobble
    if cell["protocol"] == "removed":
        accuracy -= 0.2
    if cell["loss"] == "no taper":
        accuracy -= 0.3
    return {"end": {"pass@1": accuracy, "error": 0.002}, "p": 0.1, "steps": 9, "gradient_norm": 1.0}


@pytest.fixture
def store(filled):
    return filled(CLAIMS, PROFILE, planted)


def test_verdicts_follow_the_results(store, tmp_path):
    """Planted: p~ = 50% is a little best, one pass over right answers alone is far behind, the taper is needed."""
    found = {v.claim: v for claim in CLAIMS.values() for v in claim.report(store, PROFILE, tmp_path)}
    by_name = {name: found[h.title].verdict for name, h in HYPOTHESES.items()}
    assert "sure-3 9 to 9 of 32 rows" in found[HYPOTHESES["protocol"].title].ours
    few = "On the 13 base models with under 25% right answers, c = 0 loses 4.0, 50% 0.0 and 80% 3.0"
    assert few in found[HYPOTHESES["predictor"].title].details
    assert by_name == {
        "protocol": "does not hold here",  # at equal computation it is above by 5 points, which was not expected
        "few": "holds",
        "balanced": "does not hold here",
        "added": "holds",
        "second_moment": "holds",
        "coordinates": "does not hold here",  # signs and AdamW agree, but not on 100%
        "tensors": "holds",
        "own_metric": "does not hold here",  # 50% is a constant, too
        "kind_of_error": "does not hold here",  # 20% is above 100% on all four
        "taper": "holds",
        "long_run": "holds",
        "long_repeated": "holds",
        "long_rate": "holds",
        "long_slow": "holds",
        "predictor": "does not hold here",
        "surprise": "does not hold here",
    }
    (of_trials,) = trials.report(store, PROFILE, tmp_path)
    assert of_trials.verdict == "does not hold here"  # 80% is 3 points below 50%, and 5 on the programs
    assert "sure-17 3.0 ± 0.0" in of_trials.ours
    assert "code 5.0 ± 0.0" in of_trials.ours
    assert "| slips-30 | share-50, 3.33e-05: 50.1 |" in of_trials.details
    assert "0 of 15 recommendations are positives-repeated" in of_trials.ours
    assert "the trial loses 3.40 points" in of_trials.ours  # 3 on four kinds, 5 on the programs
    assert of_trials.ours.endswith("the trials were not repeated")  # planted results are of the earlier rule


def test_what_is_best_may_depend_on_the_kind_of_error_and_be_predicted(filled, tmp_path):
    def of_kinds(cell):
        best, result = 0.2 if cell["base"].startswith("sure") else 0.8, planted(cell)
        if cell.get("part") == "gradients":
            return {**result, "least_noise": {**result["least_noise"], "log-probabilities": best}}
        share = cell["share"] if isinstance(cell["share"], float) else 0.1
        return {**result, "end": {"pass@1": 0.5 - 0.1 * abs(share - best), "error": 0.002}}

    claims = {name: CLAIMS[name] for name in ("optimizers", "predictors")}
    store = filled(claims, PROFILE, of_kinds)
    found = {v.claim: v.verdict for claim in claims.values() for v in claim.report(store, PROFILE, tmp_path)}
    held = {name for name, h in HYPOTHESES.items() if found.get(h.title) == "holds"}
    assert held == {"kind_of_error", "surprise", "tensors"}


def test_the_page(store, tmp_path):
    page = tmp_path / "wrong_answers.md"
    evidence.write(CLAIMS, store, PROFILE, page, hypotheses=True)
    text = page.read_text()
    assert "not yet run" not in text
    assert "nan" not in text
    assert all(h.expected in text and h.refuted_if in text for h in HYPOTHESES.values())
    assert (tmp_path / "wrong_answers" / "long_run.png").is_file()
    evidence.write(CLAIMS, Store(tmp_path / "nothing"), PROFILE, page, hypotheses=True)
    assert page.read_text().count("not yet run") == len(HYPOTHESES)


def test_base_models_share_a_tokenizer():
    assert tokenizer("sure-17").get_vocab() == tokenizer("main").get_vocab()
    assert folder("sure-17").parent == folder("main").parent


def test_protocols_are_compared_on_each_kind():
    kinds = {name.rpartition("-")[0] for name in AUTHORS}
    assert kinds == {name.rpartition("-")[0] for name in protocols.BASES}
    assert kinds == {name.rpartition("-")[0] for name in optimizers_compared.BASES}
