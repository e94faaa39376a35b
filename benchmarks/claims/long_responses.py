"""Beyond the paper: how long a negative keeps its weight, by its length, and by who computed log μ.

A long response is a session: answers of the base model to many problems, one after the other, each read without the
others, with one ratio over all of them, as a trajectory of several rows has (`rollout_id`). It is right if a larger
share of its answers is than of all answers. So lengths of 40 to 8,000 tokens can be compared on one small model.

log μ is the trainer's, or that of a sampler: with weights in bfloat16, or of what top-k leaves of the vocabulary.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.cells import Cell, Store
from benchmarks.optimizers import OPTIMIZERS
from benchmarks.pictures import curve, figure, save
from benchmarks.rows import Rows, response_logps
from benchmarks.setting import Profile, base_model, candidates
from benchmarks.statistics import Interval
from benchmarks.training import update
from benchmarks.verdicts import MEASURED, Verdict, markdown_table
from topr_trl import PRESETS, topr_loss, truncated_weights
from topr_trl.trainers.metrics import row_metrics

PARTS = (1, 12, 50, 200)  # of a session; an answer has about 40 tokens
SOURCES = ("trainer", "bfloat16", "top-k")
TOP_K = 3  # leaves 99.4% of the probability of a token, on average
LEARNING_RATES = (1e-4, 1e-5)
SEEDS, SESSIONS, HELD_OUT = 2, 8, 32  # sessions of an update, and those whose weights are watched
MEASURED_AT = (0, 1, 2, 5, 10, 20)


def cells(profile: Profile, store: Store) -> list[Cell]:
    """The sampler's log μ at the higher rate alone."""
    if profile.is_quick:
        return []
    return [
        {"claim": "long_responses", "parts": parts, "source": source, "learning_rate": rate, "seed": seed}
        for seed in range(SEEDS)
        for parts in PARTS
        for source in SOURCES
        for rate in LEARNING_RATES
        if source == "trainer" or rate == LEARNING_RATES[0]
    ]


def work(cell: Cell, profile: Profile) -> dict[str, Any]:
    model, parts = base_model("main"), cell["parts"]
    pool = as_the_sampler_says(candidates("main", profile, cell["seed"]), cell["source"])
    rng = np.random.default_rng(cell["seed"])
    watched_groups = rng.permutation(np.unique(pool.groups))[: profile.problems // 4]
    is_watched = np.isin(pool.groups, watched_groups)
    watched = _Sessions(pool, rng.choice(np.flatnonzero(is_watched), (HELD_OUT, parts)))
    optimizer = OPTIMIZERS["adamw"](model, cell["learning_rate"])
    curve_, trained = [{"update": 0, **watched.weights(model)}], {}
    for step in range(1, MEASURED_AT[-1] + 1):
        batch = _Sessions(pool, rng.choice(np.flatnonzero(~is_watched), (SESSIONS, parts)))
        update(model, optimizer, batch.loss(model))
        if step == 1:  # what a step does to the negatives that it has learned from
            trained = batch.weights(model)
        if step in MEASURED_AT:
            curve_.append({"update": step, **watched.weights(model)})
    return {"curve": curve_, "trained": trained, "tokens": watched.tokens}


def as_the_sampler_says(rows: Rows, source: str) -> Rows:
    """Rows with the log μ of one of `SOURCES`; they have the trainer's."""
    if source == "bfloat16":
        return rows.scored_by(base_model("main").to(torch.bfloat16))
    return rows.scored_by(base_model("main"), TOP_K) if source == "top-k" else rows


class _Sessions:
    """Sessions with R and log μ.

    Args:
        rows_SP: which rows of the pool are the parts of each session.
    """

    def __init__(self, pool: Rows, rows_SP: np.ndarray) -> None:
        self.rows, self.parts = pool[rows_SP.ravel()], rows_SP.shape[1]
        right_S = (self.rows.rewards.reshape(rows_SP.shape) > 0).mean(1)
        usual = (pool.rewards > 0).mean()
        self.rewards_S = torch.from_numpy(np.where(right_S > usual, 1.0, -1.0)).float()

    @property
    def tokens(self) -> float:
        """Mean length of a session."""
        return sum(map(len, self.rows.responses)) / len(self.rewards_S)

    def loss(self, model: PreTrainedModel) -> Tensor:
        """Algorithm 1 over whole sessions."""
        logps, mask = response_logps(model, self.rows.prompts, self.rows.responses)
        policy_S, mu_S = (x.sum(1).view(-1, self.parts).sum(1) for x in (logps * mask, self.rows.mu_BT(mask)))
        ones_S1 = torch.ones(len(policy_S), 1)
        losses_S = topr_loss(
            policy_S[:, None], mu_S[:, None], self.rewards_S, ones_S1, PRESETS["topr"], length_normalization=False
        ).losses_B
        return (losses_S / mask.sum(1).view(-1, self.parts).sum(1)).mean()

    @torch.no_grad()
    def log_ratios(self, model: PreTrainedModel) -> Tensor:
        """(S,) log π/μ of sessions."""
        now = self.rows.scored_by(model).mu_logps
        per_row = torch.stack([(new - old).sum() for new, old in zip(now, self.rows.mu_logps, strict=True)])
        return per_row.view(-1, self.parts).sum(1)

    def weights(self, model: PreTrainedModel) -> dict[str, float]:
        """Of the negatives, as trainers log them: mean weight, share dead, mean log-ratio; NaN without any."""
        log_ratio_S = self.log_ratios(model)
        weights_S = truncated_weights(log_ratio_S, self.rewards_S, PRESETS["topr"])
        logged = row_metrics(weights_S, log_ratio_S, self.rewards_S)
        names = {"weight": "weight_mean_negatives", "dead": "negatives_dead", "log_ratio": "log_ratio/negatives/mean"}
        return {short: logged.get(f"topr/{name}", float("nan")) for short, name in names.items()}


# Report.


def report(store: Store, profile: Profile, out: Path) -> list[Verdict]:
    done = store.results(cells(profile, store))

    def runs(parts: int, source: str = "trainer", rate: float = LEARNING_RATES[0]) -> list[dict[str, Any]]:
        return [
            result for cell, result in done
            if (cell["parts"], cell["source"], cell["learning_rate"]) == (parts, source, rate)
        ]  # fmt: skip

    def at(place: int, name: str, *which: Any) -> float:
        return float(np.mean([run["curve"][place][name] for run in runs(*which)]))

    tokens = {parts: float(np.mean([run["tokens"] for run in runs(parts)])) for parts in PARTS}
    picture, (left, right) = figure(2, 4.6, 3.4)
    for parts in PARTS:
        weights = [Interval(at(place, "weight", parts), 0.0) for place in range(len(MEASURED_AT))]
        curve(left, list(range(len(MEASURED_AT))), weights, f"{tokens[parts]:,.0f} tokens", marker="o", ms=3)
    left.set_xticks(range(len(MEASURED_AT)), list(map(str, MEASURED_AT)))
    left.set(
        xlabel="updates", ylabel="mean weight of negatives (%)", title=f"trainer's log μ, rate {LEARNING_RATES[0]:g}"
    )
    left.legend()
    for source in SOURCES:
        first = [Interval(at(0, "weight", parts, source), 0.0) for parts in PARTS]
        curve(right, list(range(len(PARTS))), first, _LABELS[source], marker="o", ms=3)
    right.set_xticks(range(len(PARTS)), [f"{tokens[parts]:,.0f}" for parts in PARTS])
    right.set(xlabel="tokens", title="before the first update, by log μ")
    right.legend()
    name = save(picture, out, "long_responses")
    last = len(MEASURED_AT) - 1
    table = [
        [
            f"{tokens[parts]:,.0f}",
            *(
                f"{100 * at(place, 'weight', parts, source):.0f} / {100 * at(place, 'dead', parts, source):.0f}"
                for source in SOURCES for place in (0, last)
            ),
            f"{100 * at(last, 'weight', parts, 'trainer', LEARNING_RATES[1]):.0f} / "
            f"{100 * at(last, 'dead', parts, 'trainer', LEARNING_RATES[1]):.0f}",
            f"{np.mean([run['trained']['log_ratio'] for run in runs(parts)]):.1f}",
        ]
        for parts in PARTS
    ]  # fmt: skip
    of_source = [
        f"{_LABELS[source]}, {when}" for source in SOURCES for when in ("at first", f"after {MEASURED_AT[-1]}")
    ]
    header = [
        "tokens",
        *of_source,
        f"rate {LEARNING_RATES[1]:g}, after {MEASURED_AT[-1]}",
        "log π/μ of those learned from, after 1",
    ]
    return [
        Verdict(
            "Beyond the paper: the longer a negative, the sooner its weight is gone",
            "",
            "negatives that were not trained on: mean weight / share with a weight under 0.01, in %, before the first "
            f"update and after {MEASURED_AT[-1]} updates of {SESSIONS} rows (AdamW at {LEARNING_RATES[0]:g}, and at "
            f"{LEARNING_RATES[1]:g}; c = 0; {SEEDS} seeds). A long row is a trajectory of up to {PARTS[-1]} answers "
            "with one ratio, each answer read without the others: this measures the product over many tokens, not long "
            "contexts. bfloat16: the sampler's weights are rounded, which is more noise than an engine adds that "
            f"computes in it. top-k: k = {TOP_K}, which leaves 99.4% of the probability of a token on average",
            MEASURED,
            "",
            name,
            markdown_table(header, table),
        )
    ]


_LABELS = {"trainer": "trainer", "bfloat16": "bfloat16 weights", "top-k": "sampler with top-k"}
