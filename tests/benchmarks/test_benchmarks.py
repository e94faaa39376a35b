"""The benchmarks' own parts: rivals, the loop, the store. What they measure is checked by `make reproduce-quick`."""

import copy
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import trl
from datasets import Dataset
from packaging.version import Version

from benchmarks import rivals
from benchmarks.cells import Store, run
from benchmarks.rivals import RIVALS, m2po_loss, ppo_loss
from benchmarks.rows import Rows, response_logps
from benchmarks.setting import BUNDLED, ONE_WORDING, base_model, problems, sample, tokenizer
from benchmarks.statistics import difference, interval
from benchmarks.training import batches, train
from topr_trl import OfflineTOPRConfig, OfflineTOPRTrainer
from topr_trl.tasks import arithmetic

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        Version(trl.__version__) < Version("1.16"), reason="the benchmarks are of the newest TRL; 1.15 is slow on a CPU"
    ),
]


@pytest.fixture(scope="module")
def rows():
    model = base_model("main")
    candidates = Rows.of(sample(model, "main", problems("main", 12, 7), 8, seed=3)).scored_by(model)
    assert 0 < (candidates.rewards > 0).mean() < 1
    return candidates


def gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("name", RIVALS)
def test_every_rival_learns_right_from_wrong(name, rows):
    """A few small steps raise the log-probability of right answers against that of wrong ones."""
    model = base_model("main")
    objective = RIVALS[name].make(model, rows, rows)
    trained = train(model, objective, 6, 1e-4, seed=0)
    assert np.isfinite(trained["gradient_norms"]).all()
    after = rows.scored_by(model).mu_logps
    change = np.array([(new.mean() - old.mean()).item() for new, old in zip(after, rows.mu_logps, strict=True)])
    assert change[rows.rewards > 0].mean() > change[rows.rewards < 0].mean() + 1e-4


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


@pytest.mark.parametrize("name", ["trl_grpo", "trl_gspo"])
def test_grpo_is_reinforce_with_its_advantage_where_pi_is_mu(name, rows):
    """At ratio 1 nothing is clipped: TRL's own loss must give the gradient of REINFORCE."""
    model, other = base_model("main"), base_model("main")
    model.train(), other.train()
    RIVALS[name].make(model, rows, rows).loss(np.arange(16)).backward()
    rivals.Direct(other, rows, rivals.tapered("reinforce"), rivals.whitened).loss(np.arange(16)).backward()
    torch.testing.assert_close(gradient(model), gradient(other), atol=1e-5, rtol=1e-3)


def test_trls_cispo_weighs_tokens_by_the_stored_log_mu(rows):
    """Away from μ the weight of a token is its ratio: TRL must get the log μ that is stored."""
    model, other = base_model("main"), base_model("main")
    shifted = replace(rows, mu_logps=[logps - 0.5 for logps in rows.mu_logps])
    model.train(), other.train()
    RIVALS["trl_cispo"].make(model, shifted, shifted).loss(np.arange(16)).backward()
    RIVALS["trl_cispo"].make(other, rows, rows).loss(np.arange(16)).backward()
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
    # Squares 0.01, 0.04, 0.25, 1: their mean is over 0.04 until the two largest are gone, (0.01 + 0.04) / 2 = 0.025.
    shift = torch.tensor([[0.1, 0.2, 0.5, 1.0]])
    logps = torch.full((1, 4), -2.0, requires_grad=True)
    m2po_loss(logps, logps.detach() - shift, torch.ones(1, 4, dtype=torch.bool), torch.tensor([1.0])).backward()
    assert logps.grad[0].tolist() == pytest.approx([-np.exp(0.1) / 4, -np.exp(0.2) / 4, 0.0, 0.0])
    # Where the advantage pulls the ratio back, nothing is dropped.
    logps = torch.full((1, 4), -2.0, requires_grad=True)
    m2po_loss(logps, logps.detach() - shift, torch.ones(1, 4, dtype=torch.bool), torch.tensor([-1.0])).backward()
    assert (logps.grad != 0).all()


def test_dpo_pairs_a_right_with_a_wrong_answer_of_a_problem(rows):
    objective = RIVALS["dpo"].make(base_model("main"), rows, rows)
    keys = ((tuple(p), tuple(r)) for p, r in zip(rows.prompts, rows.responses, strict=True))
    reward = dict(zip(keys, rows.rewards, strict=True))
    assert objective.size == len(rows) // 2
    for pair in objective.items:
        assert reward[tuple(pair["prompt_ids"]), tuple(pair["chosen_ids"])] > 0
        assert reward[tuple(pair["prompt_ids"]), tuple(pair["rejected_ids"])] < 0


def test_kto_keeps_trls_blocks_whole(rows):
    objective = RIVALS["kto"].make(base_model("main"), rows, rows)
    assert (objective.size, objective.rows_per_item) == (len(rows) // 32, 32)
    answers = [tuple(item["completion_ids"]) for item in objective.items]
    mismatched = [tuple(item["KL_completion_ids"]) for item in objective.items]
    for block in range(objective.size):
        rows_ = slice(32 * block, 32 * (block + 1))
        assert sorted(answers[rows_]) == sorted(mismatched[rows_])


def test_the_loop_is_the_offline_trainer(rows, tmp_path):
    """TOPR as measured here is TOPR as `OfflineTOPRTrainer` trains it."""
    chosen = rows[np.arange(16)]
    ours, theirs = base_model("main"), base_model("main")
    objective = RIVALS["topr"].make(ours, chosen, chosen)
    train(ours, objective, 3, 1e-3, seed=0)  # 32 rows a step are each of these twice
    dataset = Dataset.from_dict(
        {
            "prompt": [""] * 16,
            "prompt_ids": chosen.prompts,
            "completion_ids": chosen.responses,
            "reward": chosen.rewards,
        }
    )
    args = OfflineTOPRConfig(
        str(tmp_path), baseline=0, per_device_train_batch_size=16, num_train_epochs=3, learning_rate=1e-3,
        optim="adamw_torch", use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
        save_strategy="no", disable_tqdm=True, lr_scheduler_type="constant", max_grad_norm=1.0,
    )  # fmt: skip
    OfflineTOPRTrainer(theirs, args, dataset, processing_class=tokenizer("main")).train()
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-3, msg=name)
    start = base_model("main")
    assert max((a - b).abs().max() for a, b in zip(ours.parameters(), start.parameters(), strict=True)) > 1e-3


def test_a_gradient_that_is_not_finite_changes_nothing(rows):
    model = base_model("main")
    before = copy.deepcopy(model.state_dict())

    class Broken:
        size, rows_per_item = len(rows), 1

        def loss(self, indices):
            return next(model.parameters()).sum() * torch.tensor(torch.inf)

    trained = train(model, Broken(), 2, 1e-3, seed=0)
    assert not np.isfinite(trained["gradient_norms"]).any()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_batches_are_shuffled_epochs():
    order = batches(10, 4, seed=1)
    drawn = np.concatenate([next(order) for _ in range(5)])
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == list(range(10))
    assert not np.array_equal(drawn[:10], drawn[10:])


def test_store_survives_a_killed_run(tmp_path):
    store = Store(tmp_path)
    cell, other = {"claim": "a", "seed": 0}, {"claim": "a", "seed": 1}
    store.add(cell, {"x": 1.5}, 2.0, "command")
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write('{"cell": {"claim": "a", "se')  # killed while writing
    again = Store(tmp_path)
    assert again.get(cell) == {"x": 1.5}
    assert again.get(other) is None
    again.add(other, {"x": 2.5}, 2.0, "command")
    assert Store(tmp_path).get(other) == {"x": 2.5}
    assert {"command", "date", "machine", "versions", "seconds"} <= set(
        json.loads((tmp_path / "a.jsonl").read_text().splitlines()[0])
    )


def test_only_unfinished_cells_are_run(tmp_path):
    store = Store(tmp_path)
    cells = [{"claim": "a", "seed": seed} for seed in range(3)]
    store.add(cells[1], {"seed": "kept"}, 0.0, "")
    run(cells, _echo, store, 2, "command", "test")
    assert [store.get(cell) for cell in cells] == [{"seed": 0}, {"seed": "kept"}, {"seed": 2}]


def _echo(cell):
    return {"seed": cell["seed"]}


def test_interval_is_students_and_never_below_the_bootstraps():
    # Values 0.1, 0.2, 0.3: deviation 0.1, over the root of three seeds, times 4.30 for two degrees of freedom.
    got = interval([0.1, 0.2, 0.3], [0.01] * 3)
    assert (got.mean, got.half) == pytest.approx((0.2, 4.30 * 0.1 / 3**0.5))
    assert interval([0.2, 0.2, 0.2], [0.03] * 3).half == pytest.approx(2 * 0.03 / 3**0.5)
    assert interval([0.4], [0.05]).half == pytest.approx(0.1)
    assert np.isnan(interval([0.4]).half)


def test_difference_is_paired():
    nan = float("nan")
    got = difference({0: (0.5, nan), 1: (0.7, nan), 2: (0.9, nan)}, {0: (0.4, nan), 1: (0.6, nan), 5: (0.0, nan)})
    assert (got.mean, got.half) == pytest.approx((0.1, 0.0))
    assert difference({0: (0.5, 0.03)}, {0: (0.4, 0.04)}).half == pytest.approx(2 * 0.05)


def test_tasks_are_the_packages_own():
    asked = problems("hard", 3, 1)["prompt"][:]
    assert [row.count(".") for row in asked] == [6, 6, 6]  # the start and five steps
    assert arithmetic.arithmetic_dataset(3, 1, 5, ONE_WORDING)["question"][0] in asked[0]
    assert arithmetic.arithmetic_dataset(3, 1)["question"][0] in problems(BUNDLED, 3, 1)["prompt"][0]
