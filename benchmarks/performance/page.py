"""Fill in the tables and numbers of docs/performance.md. The text is written by hand."""

import re
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks import gpu
from benchmarks.cells import Store
from benchmarks.report import bold, fill_page, table

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "performance.json"
PAGE = ROOT / "docs" / "performance.md"

Results = dict[str, Any]


def write(content: dict[str, Any], page: Path = PAGE) -> Path:
    """Write the page with the tables and numbers of the results."""
    found = content["results"]
    tables: dict[str, Callable[[], str]] = {
        "runs": lambda: runs(content["runs"]),
        "goals": lambda: goals_table(found),
        "shared": lambda: shared(found["shared prompts"]),
        "gpu": lambda: gpu.table(Store(RESULT.parent, "gpu")),
    }
    demo = median(paired(found["shared prompts, as the demo"], "topr, not shared", "topr"))
    return fill_page(PAGE, page, tables, {"demo": lambda: f"{demo:.2f}×"})


def paired(results: dict[str, list[float]], name: str, other: str) -> list[float]:
    """Return the ratio of two variants in each round."""
    return [a / b for a, b in zip(results[name], results[other], strict=True)]


# Goals.


class Goal(NamedTuple):
    """Limit for a ratio of measurements.

    Attributes:
        measure: description of the ratio.
        ratios: function that returns the ratio of each round.
        most, least: upper and lower limit.
    """

    measure: str
    ratios: Callable[[Results], list[float]]
    most: float = float("inf")
    least: float = 0.0

    @property
    def limit(self) -> str:
        """Return the limit as text."""
        return f"≥ {self.least:g}×" if self.least else f"≤ {self.most:g}×"

    def is_met(self, found: Results) -> bool:
        """Return whether the median of the rounds is within the limits."""
        return self.least <= median(self.ratios(found)) <= self.most


def _of(part: str, name: str, other: str) -> Callable[[Results], list[float]]:
    return lambda found: paired(found[part], name, other)


def _peaks(part: str, name: str, other: str) -> Callable[[Results], list[float]]:
    return lambda found: [found[part][name] / found[part][other]]


_TURNS = "rewards of turns"
_MU = "log mu, seconds by share of positives"
GOALS = (
    Goal("step, offline TOPR / SFT, same rows, neither sorted", _of("gsm8k", "topr, unsorted", "sft"), 1.03),
    Goal("the same, TOPR's rows sorted by length (the default)", _of("gsm8k", "topr", "sft"), 1.03),
    Goal("the same, both padding-free", _of("padding-free", "topr, padding-free", "sft, padding-free"), 1.03),
    Goal("peak memory, offline TOPR / SFT", _peaks("memory", "topr", "sft"), 1.02),
    Goal("rows per second, offline TOPR / GRPO's update", _of("gsm8k", "grpo", "topr"), least=2),
    Goal("the same, lengths with long tails", _of("long tails", "grpo", "topr"), least=2),
    Goal("time, TOPR / GRPO with a frozen copy (`beta` > 0)", _of("gsm8k", "topr", "grpo, frozen copy"), 0.6),
    Goal("time, TOPR / TOPR with a frozen copy", _of("gsm8k", "topr", "topr, frozen copy"), 0.6),
    Goal("log μ pass, half of the rows positive / none", _of(_MU, "0.5", "0.0"), 0.6),
    Goal("log μ pass, memory / a forward with logits", _peaks("log mu, memory", "log mu pass", "with logits"), 0.6),
    Goal("step, online TOPR / GRPO, same settings", _of("gsm8k", "online topr", "grpo"), 1.0),
    Goal("the same, generation included", _of("generating", "online topr, generating", "grpo, generating"), 1.0),
    Goal("the same, each generation batch used 4 times",
         _of("generating", "online topr, generating, 4 uses", "grpo, generating, 4 uses"), 1.0),
    Goal("step, a reward for each of 8 turns / one reward", _of(_TURNS, "a reward per turn", "one reward"), 1.1),
    Goal("step, a row for each of 8 turns / one row", _of(_TURNS, "a row per turn", "a reward per turn"), least=2),
    Goal("online, Anna Karenina keeps 1/4 of the rows / all", _of("gsm8k", "online topr, 1/4", "online topr"), 0.3),
)  # fmt: skip


def goals_table(found: Results) -> str:
    """Return the table of goals. Goals that are not met are bold."""
    rows = []
    for goal in GOALS:
        ratios = goal.ratios(found)
        spread = f" ({min(ratios):.2f} to {max(ratios):.2f})" if len(ratios) > 1 else ""
        rows.append([goal.measure, goal.limit, bold(f"{median(ratios):.2f}×{spread}", not goal.is_met(found))])
    return table(["measure", "goal", "measured"], rows)


# Further tables.


def shared(found: dict[str, dict[str, list[float]]]) -> str:
    """Return the table of shared prompts, as ratios."""
    rows = []
    for name, times in found.items():
        prompt, completion, samples = (int(number) for number in re.findall(r"\d+", name))
        ratios = [
            median(paired(times, other, one))
            for other, one in (("sft", "topr"), ("topr, not shared", "topr"), ("log mu, not shared", "log mu"))
        ]
        once = " (once)" if len(times["topr"]) == 1 else ""
        rows.append([f"{prompt:,}", f"{completion}", f"{samples}", f"{median(times['topr']):.1f} s{once}",
                     *(f"{ratio:.2f}×" for ratio in ratios)])  # fmt: skip
    header = ["prompt", "completion", "completions", "step", "faster than SFT", "than not shared", "log μ"]
    return table(header, rows)


def runs(found: dict[str, dict[str, Any]]) -> str:
    """Return the machine, versions and date of each part."""
    of_run: dict[str, list[str]] = {}
    for part, run in found.items():
        named = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
        where = f"{run['machine']}, threads: {run['threads']}; {named}; {run['date']}"
        of_run.setdefault(where, []).append(part.replace("_", " "))
    return "\n".join(f"* {where}: {', '.join(parts)}." for where, parts in of_run.items())
