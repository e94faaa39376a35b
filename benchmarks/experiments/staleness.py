"""Compare training on rows of a policy that is 256 updates old with training on rows of the current policy.

Each method has the learning rate that is best on fresh rows. Variants of TOPR are only trained on old rows: at the rate
that is best there, and at TOPR's rate.
"""

from typing import Any

from benchmarks.cells import Cell, Store
from benchmarks.decoding import DRAWS
from benchmarks.experiment import TUNING_SEED, Experiment, rates
from benchmarks.loops import stale
from benchmarks.methods import METHODS
from benchmarks.setting import Profile, evaluate, summary

OLD = 256  # updates; published studies see a degradation at this age
END = "curve/-1/pass@1"
TOPR, RECOMPUTED, PER_TOKEN = "TOPR, c = 0", "“TOPR”, log μ recomputed", "“TOPR” per token"
NAMES = {
    TOPR: "topr", **{METHODS[name].label: name for name in ("m2po", "trl_dapo", "trl_vespo")}
}  # fmt: skip
VARIANTS = {RECOMPUTED: stale.RESCORED, PER_TOKEN: "topr_token"}
MEASURED_AT = (256, 512, 1_024)


def _of(names: dict[str, str], age: int, title: str, **more: Any) -> Experiment:
    methods = {label: {"method": name, "age": age} for label, name in names.items()}
    return Experiment(
        "staleness", methods, rates(3e-5, 1e-4), range(5), (END,), title, {"draws": DRAWS}, further=3,
        untrained={END: "curve/0/pass@1"}, **more,
    )  # fmt: skip


FRESH = _of(NAMES, 0, "1,024 updates on fresh rows")
STALE = _of(NAMES, OLD, f"1,024 updates on rows {OLD} updates old", tuned=FRESH.best)
CHANGED = _of(VARIANTS, OLD, f"Variants of TOPR on rows {OLD} updates old, each at its own rate")
AT_TOPRS_RATE = _of(
    VARIANTS, OLD, f"Variants of TOPR on rows {OLD} updates old, at TOPR's rate",
    tuned=lambda store, method, measure: FRESH.best(store, TOPR),
)  # fmt: skip


def experiments(store: Store) -> list[Experiment]:
    """Return the comparisons."""
    return [FRESH, STALE, CHANGED, AT_TOPRS_RATE]


QUICK = [STALE.cell(TOPR, {"learning_rate": 1e-4, "age": 64}, 0)]


def work(cell: Cell, profile: Profile) -> dict[str, Any]:
    """Run a cell."""
    seed, curve = cell["seed"], []
    split = "validation" if seed == TUNING_SEED else "test"
    marks = (profile.updates,) if seed == TUNING_SEED else (*MEASURED_AT, profile.updates)

    def test(model: Any, updates: int) -> None:
        if updates in (0, *marks):
            curve.append({"update": updates, **summary(evaluate(model, "main", profile, 2, seed, split))})

    stale.trained(
        cell["method"], cell["age"], profile.updates, cell["learning_rate"], seed, profile.problems, test
    )  # fmt: skip
    return {"curve": curve}
