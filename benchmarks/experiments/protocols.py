"""Compare TOPR at several shares of positives with protocols of positives only, on models with four kinds of errors.

Other experiments also use cells of these arms (base model, share of positives, protocol, rate, rows per step).
"""

from typing import Any

from benchmarks.cells import Cell, Store
from benchmarks.decoding import DRAWS
from benchmarks.experiment import TUNING_SEED, Choice, Experiment, rates
from benchmarks.loops import offline
from benchmarks.methods import topr
from benchmarks.setting import Profile, evaluate, model_hash, summary

BASES = ("slips-30", "slips-3", "misconception-10", "misconception-3", "sure-17", "sure-3", "wanders-10", "wanders-3")
END = "end/pass@1"
TOPR, REMOVED, STEPS, REPEATED = "TOPR, p~ 50%", "positives, once", "positives, as many steps", "positives, repeated"
BALANCED, HALF = "TOPR, balanced rows", "positives, repeated, half the steps"
ARMS: dict[str, Cell] = {
    TOPR: {"share": 0.5, "protocol": "steps"},
    "TOPR, c = 0": {"share": "p", "protocol": "steps"},
    "TOPR, p~ 20%": {"share": 0.2, "protocol": "steps"},
    "TOPR, group mean": {"share": "group_mean", "protocol": "steps"},
    BALANCED: {"share": 0.5, "protocol": "balanced"},
    REMOVED: {"share": 1.0, "protocol": "removed"},
    STEPS: {"share": 1.0, "protocol": "steps"},
    REPEATED: {"share": 1.0, "protocol": "rows"},
    HALF: {"share": 1.0, "protocol": "half"},
}
AT_32 = [{**choice, "batch_rows": 32} for choice in rates(1e-4, 3e-4, 1e-3)]
AT_8 = [{**choice, "batch_rows": 8} for choice in AT_32]


def arms(base: str, methods: dict[str, Cell], choices: list[Choice], title: str = "", seeds: int = 5) -> Experiment:
    """Return a comparison of arms. A new value of `DRAWS` gives new cells, except for the choice of rates."""
    return Experiment(
        "arms", methods, choices, range(seeds), (END,), title, further=3, untrained={END: "p"},
        fields={"base": base, "optimizer": "adamw", "loss": "taper", "weights": model_hash(base)},
        reported_fields={"draws": DRAWS},
    )  # fmt: skip


def of_base(base: str) -> Experiment:
    """Return the comparison on one base model: each arm at its best rate and rows per step."""
    return arms(base, ARMS, AT_32 + AT_8, f"One pass, by protocol: {base}")


def at_32(base: str) -> Experiment:
    """Return the comparison with equal steps: the same rows, 32 per step."""
    return arms(base, {name: ARMS[name] for name in (TOPR, STEPS)}, AT_32, f"One pass, 32 rows per step: {base}")


def experiments(store: Store) -> list[Experiment]:
    """Return the comparisons on all base models."""
    return [one(base) for base in BASES for one in (of_base, at_32)]


QUICK = [arms("main", ARMS, AT_32).cell(TOPR, AT_32[0], 0)]


def work(cell: Cell, profile: Profile) -> dict[str, Any]:
    """Run a cell."""
    base, seed = cell["base"], cell["seed"]
    method = topr(cell["share"], cell["protocol"])
    model, found = offline.trained(base, method, profile, seed, cell["learning_rate"], cell["batch_rows"])
    split = "validation" if seed == TUNING_SEED else "test"
    return {"end": summary(evaluate(model, base, profile, seed=seed, split=split)), **found}
