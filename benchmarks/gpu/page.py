"""`docs/full_size.md`: what was measured on a GPU, and what was not yet."""

from pathlib import Path
from typing import Any

from benchmarks.arms import TUNING_SEED
from benchmarks.cells import Store
from benchmarks.statistics import interval
from benchmarks.verdicts import markdown_table

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "gpu"
MISSING = "Not measured yet"
_TITLES = {
    "offline": "Steps on stored rows",
    "memory": "Memory beside the plan",
    "offload": "Memory of ZeRO-3 with weights and optimizer on the host",
    "log μ": "The pass that computes log μ",
    "online": "Whole online steps, generation included",
    "precision": "bfloat16 beside float32",
    "learning": "What is learned from the same completions",
}
_INTRODUCTION = """# Figures at full size

What one GPU of 80 to 140 GB says. Written by `make gpu` (`python -m benchmarks.gpu`, which begins nothing after nine
minutes and goes on from there when it is run again) from `benchmarks/results/gpu`; do not edit. Weights are random, in
bfloat16 unless said otherwise, with Adafactor: what is measured is time and memory. What is learned is measured with
models that are trained from scratch first. [Performance](performance.md) has
the CPU's figures, and [Scaling](scaling.md) what is computed.
"""


def write(store: Store) -> Path:
    path = ROOT / "docs" / "full_size.md"
    path.write_text(text(store))
    return path


def text(store: Store) -> str:
    done: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {}
    for entry in store.finished.values():
        cell, result = entry["cell"], entry["result"]
        done.setdefault(cell.get("what", cell["claim"]), []).append((cell, result))
    missing = [f"* {title}" for what, title in _TITLES.items() if what not in done]
    parts = [_INTRODUCTION, *(["\n".join([f"**{MISSING}:**", "", *missing, ""])] if missing else [])]
    parts += [f"## {title}\n\n{_table(what, done[what])}\n" for what, title in _TITLES.items() if what in done]
    devices = sorted({result["device"] for of_part in done.values() for _, result in of_part})
    return "\n".join(parts + ([f"On: {', '.join(devices)}.\n"] if devices else []))


def _table(what: str, done: list[tuple[dict[str, Any], dict[str, Any]]]) -> str:
    if what == "precision":
        header = ["tokens", "per token: mean", "spread", "per completion: mean", "spread", "entropy per token (nats)"]
        names = ("token_mean", "token_spread", "completion_mean", "completion_spread", "entropy")
        return markdown_table(
            header, [[f"{c['tokens']:,}", *(_number(r, n, "{:.2g}") for n in names)] for c, r in done]
        )
    if what == "learning":
        return _learning(done)
    setting = ["model", "rows", "recomputes activations"]

    def place(cell: dict[str, Any]) -> list[str]:
        return [cell["model"], cell["rows"], "yes" if cell["checkpointing"] else "no"]

    if what in ("memory", "offload"):
        weights = " (float32 weights)" if what == "memory" else ""
        rows = [[*place(c), _number(r, "measured_gib", "{:.1f}"), _number(r, "planned_gib", "{:.1f}")] for c, r in done]
        return markdown_table([*setting, f"measured, GiB{weights}", "topr plan, GiB"], rows)
    if what == "log μ":
        rows = [[*place(c), _number(r, "seconds", "{:.1f}"), _number(r, "share", "{:.2f}")] for c, r in done]
        return markdown_table([*setting, "seconds", "of an epoch of training"], rows)
    header = [*setting, "trainer", "s per step", "tokens per s", "of the peak", "peak GiB"]
    columns = {"seconds": "{:.2f}", "tokens_per_second": "{:,.0f}", "mfu": "{:.0%}", "peak_gib": "{:.1f}"}
    rows = []
    for cell, result in done:
        if "failed" in result:
            rows.append([*place(cell), "all", result["failed"], "", "", ""])
        for name, found in result.items():
            if isinstance(found, dict):
                rows.append(
                    [*place(cell), name, *(_number(found, column, form, "") for column, form in columns.items())]
                )
    return markdown_table(header, rows)


def _learning(done: list[tuple[dict[str, Any], dict[str, Any]]]) -> str:
    """Means over seeds; those of the choice of rates are left out."""
    found: dict[tuple[str, ...], list[dict[str, float]]] = {}
    for cell, result in done:
        if cell["seed"] == TUNING_SEED:
            continue
        for kind, test in result.get("tests", {}).items():
            rate = f"{cell['learning_rate']:g}" if "learning_rate" in cell else ""
            found.setdefault((cell["model"], cell["task"], kind, cell["method"], rate), []).append(test)
    shown = ("pass@1", "maj@8", "pass@8", "invalid")
    rows = [
        [*key, *(interval([test[name] for test in tests]).percent() for name in shown)]
        for key, tests in sorted(found.items())
    ]
    return markdown_table(
        ["parameters", "learned from", "tested on", "method", "rate", *(f"{n}, %" for n in shown)], rows
    )


def _number(result: dict[str, Any], name: str, form: str, missing: str | None = None) -> str:
    """`missing`, or why there is none, where it was not measured."""
    if name in result:
        return form.format(result[name])
    return str(result["failed"]) if missing is None else missing
