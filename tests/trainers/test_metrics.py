import math
import re
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from topr_trl import PRESETS, topr_loss
from topr_trl.trainers.messages import log_line
from topr_trl.trainers.metrics import RowLog, completion_means, row_metrics, row_values, without_ratio

NAN = float("nan")
# Users' dashboards depend on these names, so the changelog must list each removed name.
NAMES = [
    "topr/weight_mean", "topr/weight_not_one", "topr/positive_share", "topr/reward", "topr/effective_positive_share",
    "topr/realized_positive_share", "topr/weight_mean_negatives", "topr/negatives_tapered", "topr/negatives_dead",
    "topr/negatives_effective",
    "topr/log_ratio/positives/mean", "topr/log_ratio/positives/q05", "topr/log_ratio/positives/q50",
    "topr/log_ratio/positives/q95", "topr/log_ratio/negatives/mean", "topr/log_ratio/negatives/q05",
    "topr/log_ratio/negatives/q50", "topr/log_ratio/negatives/q95",
    "topr/logps/positives/token", "topr/logps/positives/completion", "topr/tokens/positives",
    "topr/logps/negatives/token", "topr/logps/negatives/completion", "topr/tokens/negatives",
]  # fmt: skip


def rows_of(*rows):
    """Return the values of rows for `RowLog`, from their weights, log-ratios and rewards. Each has two tokens."""
    return torch.tensor([[*row, -1.5, -3.0, 2.0] for row in rows])


def names_of(table):
    """Return the names of TOPR's metrics in the first column of Markdown tables."""
    cells = [line.split("|")[1] for line in table.splitlines() if line.strip().startswith("| `topr/")]
    found = [name for cell in cells for name in re.findall(r"`(.*?)`", cell)]
    while open_ := [name for name in found if "{" in name]:
        head, choices, tail = re.split(r"[{}]", open_[0], maxsplit=2)
        found.remove(open_[0])
        found += [head + choice + tail for choice in choices.split(",")]
    return {name for name in found if name.startswith("topr/")}


def test_names_are_stable():
    logps = torch.tensor([[-0.5, -3.0, 6.0], [-1.0, -4.0, 4.0]])
    metrics = row_metrics(torch.tensor([1.0, 0.5]), torch.tensor([0.1, -0.7]), torch.tensor([1.0, -1.0]), logps)
    assert list(metrics) == NAMES
    assert names_of(row_metrics.__doc__) == set(NAMES)
    page = Path(__file__).parents[2] / "docs" / "metrics.md"
    now_and_then = {
        "rows_kept", "split_total", "computed_tokens", *(f"replay/{what}" for what in ("share", "age", "kept")),
        *(f"sampler_distance/{what}" for what in ("token", "token_max", "response")),
    }  # fmt: skip
    assert names_of(page.read_text()) == {*NAMES, *(f"topr/{name}" for name in now_and_then)}


def test_hand_made_rows():
    metrics = row_metrics(
        weights_N=torch.tensor([1.0, 1.0, 0.5, 0.001]),
        log_ratio_N=torch.tensor([NAN, NAN, math.log(0.5), -7.0]),
        rewards_N=torch.tensor([1.0, 0.0, -1.0, -2.0]),
    )
    assert metrics["topr/weight_mean"] == pytest.approx(2.501 / 4)
    assert metrics["topr/weight_not_one"] == 0.5
    assert metrics["topr/positive_share"] == 0.25
    assert metrics["topr/effective_positive_share"] == pytest.approx(1 / 4)
    assert metrics["topr/realized_positive_share"] == pytest.approx(1 / (1 + 0.5 * 1 + 0.001 * 2))
    assert metrics["topr/reward"] == -0.5
    assert metrics["topr/weight_mean_negatives"] == pytest.approx(0.2505)
    assert metrics["topr/negatives_tapered"] == 1.0
    assert metrics["topr/negatives_dead"] == 0.5
    assert metrics["topr/negatives_effective"] == pytest.approx(0.501**2 / (2 * (0.5**2 + 0.001**2)))
    assert metrics["topr/log_ratio/negatives/mean"] == pytest.approx((math.log(0.5) - 7) / 2)
    assert metrics["topr/log_ratio/negatives/q50"] == pytest.approx((math.log(0.5) - 7) / 2)
    assert not any("log_ratio/positives" in name for name in metrics)


def test_rows_without_weight_have_no_realized_share():
    metrics = row_metrics(torch.tensor([0.0]), torch.tensor([NAN]), torch.tensor([-1.0]))
    assert metrics["topr/effective_positive_share"] == 0
    assert "topr/realized_positive_share" not in metrics


def test_padding_is_in_no_mean_over_tokens():
    values, mask = torch.tensor([[0.2, 0.4, 9.0], [0.6, NAN, NAN]]), torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert completion_means(values, mask).tolist() == pytest.approx([0.3, 0.6])
    assert completion_means(values[:, 0], mask).tolist() == values[:, 0].tolist()
    assert completion_means(values, torch.zeros(2, 3)).tolist() == [0, 0]


def test_each_reader_gets_each_pass_once():
    log, alone = RowLog(), Accelerator(cpu=True)
    assert log.read_metrics("train", alone) == {}
    log.add(["train", "table"], torch.tensor([3, 4]), rows_of([1.0, 0.0, 1.0], [1.0, 0.0, -1.0]))
    log.add(["train"], torch.tensor([5]), rows_of([0.5, -1.0, -1.0]))
    assert log.read_metrics("train", alone)["topr/weight_mean"] == pytest.approx(2.5 / 3)
    assert log.read_metrics("train", alone) == {}
    assert log.read("table") == [(3, 1.0, 0.0), (4, 1.0, 0.0)]
    assert log.read("table") == []
    log.add(["train"], torch.tensor([5]), rows_of([0.5, -1.0, -1.0]))
    log.discard("train")
    log.discard("train")
    assert log.read("train") == []


def test_rows_whose_reward_is_nan_do_not_count():
    log = RowLog()
    log.add(["train", "table"], torch.tensor([3, 4]), rows_of([0.5, 0.0, NAN], [0.25, 0.0, -1.0]))
    assert log.read("table") == [(4, 0.25, 0.0)]
    assert log.read_metrics("train", Accelerator(cpu=True))["topr/weight_mean"] == 0.25
    assert row_metrics(torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([NAN])) == {}


@pytest.mark.parametrize("level", ["sequence", "segment"])
def test_values_of_rows_by_hand(level):
    policy, mu = torch.tensor([[-1.0, -2.0, 9.0], [-1.0, 9, 9]]), torch.tensor([[-0.5, -0.5, 9.0], [-1.0, 9, 9]])
    mask, rewards = torch.tensor([[1, 1, 0], [1, 0, 0]]), torch.tensor([-1.0, -1.0, 0.0, 0.0])
    outputs = topr_loss(policy, mu, rewards[:2], mask, PRESETS["topr"], level, segment_tokens=1)
    computed, short, *skipped = row_values(outputs, rewards, mask).tolist()
    # log π/μ is -0.5 and -1.5.
    weight, log_ratio = {
        "sequence": (math.exp(-2), -2.0), "segment": ((math.exp(-0.5) + math.exp(-1.5)) / 2, -1.0),
    }[level]  # fmt: skip
    assert computed == pytest.approx([weight, log_ratio, -1.0, -1.5, -3.0, 2.0])
    assert short == [1.0, 0.0, -1.0, -1.0, -1.0, 1.0]
    assert skipped == [pytest.approx([1.0, NAN, 0.0, NAN, NAN, NAN], nan_ok=True)] * 2


def test_names_and_quantiles_of_the_ratio():
    # 21 rows with log-ratios 0, ..., 20: their 5, 50 and 95% quantiles are 1, 10 and 19.
    ratio = torch.arange(21.0)
    metrics = row_metrics(torch.ones(21), ratio, torch.ones(21))
    of_ratio = {name: value for name, value in metrics.items() if "log_ratio" in name}
    assert of_ratio == pytest.approx({
        "topr/log_ratio/positives/mean": 10, "topr/log_ratio/positives/q05": 1,
        "topr/log_ratio/positives/q50": 10, "topr/log_ratio/positives/q95": 19,
    })  # fmt: skip


def test_tapered_and_dead_negatives():
    """A weight of 1, or 1 up to rounding, is not tapered. A weight of 0.01 is not dead."""
    weights = torch.tensor([1.0, 0.999, 0.5, 0.01], dtype=torch.float64)
    metrics = row_metrics(weights, torch.zeros(4), torch.full((4,), -1.0))
    assert metrics["topr/negatives_tapered"] == 2 / 4
    assert metrics["topr/negatives_dead"] == 0


def test_the_effective_share_says_how_even_weights_are_not_how_large():
    for weights, effective in (([math.exp(-5)] * 4, 1.0), ([1.0, 0, 0, 0], 0.25), ([0.0] * 4, None)):
        found = row_metrics(torch.tensor(weights), torch.zeros(4), torch.full((4,), -1.0))
        assert found.get("topr/negatives_effective") == (effective and pytest.approx(effective))


def test_log_pi_of_positives_and_negatives():
    logps = torch.tensor([[-0.5, -2.0, 4.0], [-1.5, -3.0, 2.0], [-9.0, -9.0, 1.0], [-4.0, -8.0, 2.0], [NAN] * 3])
    rewards = torch.tensor([1.0, 2.0, 0.0, -1.0, -1.0])  # the row with R = 0 is neither positive nor negative
    metrics = row_metrics(torch.ones(5), torch.zeros(5), rewards, logps)
    assert metrics["topr/logps/positives/token"] == -1.0
    assert metrics["topr/logps/positives/completion"] == -2.5
    assert metrics["topr/logps/negatives/token"] == -4.0
    assert metrics["topr/logps/negatives/completion"] == -8.0
    assert (metrics["topr/tokens/positives"], metrics["topr/tokens/negatives"]) == (3.0, 2.0)
    kept = without_ratio(metrics)
    logged = {name for name in NAMES if name.startswith(("topr/logps/", "topr/tokens/"))}
    assert set(kept) == {"topr/positive_share", "topr/reward", "topr/effective_positive_share", *logged}


def test_the_line_of_a_log_has_the_metrics_that_matter_most():
    logs = {"loss": 1.0, "grad_norm": 0.123, "topr/weight_mean_negatives": 0.5, "topr/negatives_dead": 0.04,
            "topr/logps/positives/token": -0.25, "topr/reward": 0.0, "epoch": 1.0}  # fmt: skip
    shown = "dead negatives 4%, weight of negatives 0.50, gradient norm 0.12"
    assert log_line(logs, 5, 1_000) == f"step 5/1,000: {shown}, log-probability per token of positives -0.25"
    assert log_line({"reward": 0.5, **logs}, 5, 9) == f"step 5/9: reward 0.5, {shown}"
    assert log_line({"train_runtime": 61.2, "train_loss": 1.0}, 9, 9) == "9 steps in 61 s"
    assert log_line({"train_runtime": 2.0}, 1, 1) == "1 step in 2 s"
    of_evaluation = {"eval_new_topr/negatives_dead": 0.5, "eval_new_runtime": 1.0, "eval_new_reward": None}
    assert log_line(of_evaluation, 5, 9) == "step 5/9, eval_new: dead negatives 50%"
    assert log_line({"topr/sampler_distance/token": 0.1}, 0, 9) == ""
