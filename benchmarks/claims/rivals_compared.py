"""Figures 1 and 3: all rivals on the same candidates, over one epoch and over several; and on the harder task."""

from typing import Any

from benchmarks.cells import Cell, Store
from benchmarks.claims.learning_rates import best, training_rows
from benchmarks.pictures import COLOURS, curve, figure, save
from benchmarks.rivals import PUBLISHED_AS_TOPR, RIVALS
from benchmarks.setting import Profile, base_model, evaluate, summary
from benchmarks.statistics import Interval, difference, interval
from benchmarks.training import train
from benchmarks.verdicts import MEASURED, Verdict, judge

Done = list[tuple[Cell, dict[str, Any]]]

QUICK_RIVALS = ("topr", "positives_only", "reinforce", "topr_geometric")
MARKS = (0.5, 1, 2, 4)  # epochs


def cells(profile: Profile, store: Store) -> list[Cell]:
    names = QUICK_RIVALS if len(profile.learning_rates) == 1 else tuple(RIVALS)
    return [
        {
            "claim": "rivals", "profile": profile.name, "task": "main", "rival": rival, "seed": seed,
            "learning_rate": best(store, profile, rival) if rival != "base" else None, "epochs": profile.epochs,
        }
        for seed in range(profile.seeds)
        for rival in (("base", *names) if seed == 0 else names)
    ]  # fmt: skip


def work(cell: Cell, profile: Profile) -> dict[str, Any]:
    task, seed = cell["task"], cell["seed"]
    model = base_model(task)
    if cell["rival"] == "base":
        return {"curve": [{"step": 0, **summary(evaluate(model, task, profile, 16, seed))}]}
    objective = RIVALS[cell["rival"]][1](model, training_rows(task, profile, seed))
    steps = profile.steps * cell["epochs"]
    marks = tuple(round(mark * profile.steps) for mark in MARKS if mark <= cell["epochs"])
    ends = (profile.steps, steps)  # measured better: these are compared

    def measure(step: int) -> dict[str, float]:
        return summary(evaluate(model, task, profile, 4 if step in ends else 2, seed))

    trained = train(model, objective, steps, cell["learning_rate"], seed, marks, measure)
    return {"curve": trained["curve"], "gradient_norms": trained["gradient_norms"][:: max(steps // 100, 1)]}


# Report.

PAPERS_RIVALS = ("topr", "positives_only", "reinforce", "opr", "tis", "ppo", "dpo")


def report(store: Store, profile: Profile) -> list[Verdict]:
    done = store.results(cells(profile, store))
    base = base_point(done)
    if not base or not values_by_seed(done, "topr", profile.steps):
        return []
    names = [name for name in RIVALS if values_by_seed(done, name, profile.steps * profile.epochs)]
    one, last = profile.steps, profile.steps * profile.epochs
    _fig1(done, profile, names, base)
    _fig3(done, profile, [name for name in names if name in PAPERS_RIVALS], base)

    def against(name: str, step: int) -> Interval:
        return difference(values_by_seed(done, "topr", step), values_by_seed(done, name, step))

    def line(chosen: list[str], step: int) -> str:
        return ", ".join(f"{RIVALS[name][0]} {at(done, name, step).percent()}" for name in chosen)

    said, table = _ranking(done, names, against, one, last)
    topr = at(done, "topr", one)
    present = [name for name in ("ppo", "dpo", "reinforce") if name in names]
    verdicts = [
        Verdict(
            "Fig. 1: TOPR improves most; DPO less; PPO stalls; naive REINFORCE collapses",
            "curves on GSM8K",
            f"pass@1 of {100 * base['pass@1']:.1f} % becomes, after one epoch, {line(['topr', *present], one)}; after "
            f"{profile.epochs} epochs {line(['topr', *present], last)} %",
            judge(
                topr.low > base["pass@1"],
                *(against(name, one).low > 0 and against(name, last).low > 0 for name in present),
            ),
            picture="fig1.png",
        ),
        Verdict(
            "Fig. 1, all rivals: each at its own best learning rate",
            "",
            said,
            MEASURED,
            picture="fig1.png",
            details=table,
        ),
        Verdict(
            "Fig. 3: TOPR ends invalid answers, naive REINFORCE ends in them",
            "about 0 % and almost all",
            f"invalid: base {100 * base['invalid']:.1f} %, TOPR {at(done, 'topr', last, 'invalid').percent()} %, "
            f"naive REINFORCE {at(done, 'reinforce', last, 'invalid').percent()} %",
            judge(
                at(done, "topr", last, "invalid").high < base["invalid"] / 10,
                at(done, "reinforce", last, "invalid").low > base["invalid"],
            ),
            picture="fig3.png",
        ),
    ]
    variants = [name for name in PUBLISHED_AS_TOPR if name in names]
    return [
        *verdicts,
        Verdict(
            "What other systems ship as TOPR (token ratio, geometric mean, group-centred sign) is not TOPR",
            "",
            f"TOPR {at(done, 'topr', one).percent()} → {at(done, 'topr', last).percent()} %; "
            + "; ".join(
                f"{RIVALS[n][0]} {at(done, n, one).percent()} → {at(done, n, last).percent()} %" for n in variants
            )
            + f" (one → {profile.epochs} epochs)",
            judge(*(against(name, last).low > 0 for name in variants)),
            picture="fig1.png",
        ),
    ]


def _ranking(done: Done, names: list[str], against: Any, one: int, last: int) -> tuple[str, str]:
    """Who is above TOPR and who below, by the paired difference; and the table of all."""
    said = []
    for step in (one, last):
        gaps = {name: against(name, step) for name in names if name != "topr"}
        above = [RIVALS[name][0] for name, gap in gaps.items() if gap.high < 0]
        below = sum(gap.low > 0 for gap in gaps.values())
        said.append(
            f"after {step} steps TOPR is above {below} of {len(gaps)} rivals, and below "
            + (", ".join(above) or "none")
            + f"; {len(gaps) - below - len(above)} cannot be told apart"
        )
    rates = {cell["rival"]: cell["learning_rate"] for cell, _ in done}
    table = [
        f"| | learning rate | pass@1, {one} steps | TOPR less this | pass@1, {last} steps | TOPR less this "
        "| invalid at the end |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in sorted(names, key=lambda name: -at(done, name, one).mean):
        cells_ = [f"**{RIVALS[name][0]}**" if name == "topr" else RIVALS[name][0], f"{rates[name]:g}"]
        for step in (one, last):
            cells_ += [
                at(done, name, step).percent(),
                "" if name == "topr" else against(name, step).percent(signed=True),
            ]
        table.append("| " + " | ".join([*cells_, at(done, name, last, "invalid").percent()]) + " |")
    return "; ".join(said), "\n".join(table)


def base_point(done: Done) -> dict[str, float] | None:
    """The base model's measurement among these results."""
    return next((result["curve"][0] for cell, result in done if cell["rival"] == "base"), None)


def values_by_seed(done: Done, rival: str, step: int, what: str = "pass@1") -> dict[int, float]:
    return {
        cell["seed"]: point[what]
        for cell, result in done
        if cell["rival"] == rival
        for point in result["curve"]
        if point["step"] == step
    }


def at(done: Done, rival: str, step: int, what: str = "pass@1") -> Interval:
    errors = values_by_seed(done, rival, step, "error") if what == "pass@1" else {}
    return interval(list(values_by_seed(done, rival, step, what).values()), list(errors.values()))


def _fig1(done: Done, profile: Profile, names: list[str], base: dict[str, float]) -> None:
    steps = [0] + [round(mark * profile.steps) for mark in MARKS if mark <= profile.epochs]
    start = Interval(base["pass@1"], 2 * base["error"])
    picture, (papers, others, ends) = figure(3, 4.4, 4.6)
    for name in names:
        axes = papers if name in PAPERS_RIVALS else others
        points = [start] + [at(done, name, step) for step in steps[1:]]
        style = {"lw": 2.6, "zorder": 5} if name == "topr" else {"ls": "--" if name in PUBLISHED_AS_TOPR else "-"}
        curve(axes, steps, points, RIVALS[name][0], color=COLOURS[name], **style)
    curve(others, steps, [start] + [at(done, "topr", s) for s in steps[1:]], "TOPR", color=COLOURS["topr"], lw=2.6)
    papers.set(title="TOPR and the paper's rivals", ylabel="pass@1 (%)")
    others.set(title="What else one would pick today")
    for axes in (papers, others):
        axes.axvline(profile.steps, color="#999999", lw=0.8, ls=":")
        axes.set(xlabel="optimiser steps of 32 rows (dotted: one epoch)", ylim=(-2, None))
        axes.legend(fontsize=7.5, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.16))
    last = steps[-1]
    order = sorted(names, key=lambda name: at(done, name, last).mean)
    for row, name in enumerate(order):
        for step, marker, shift in ((profile.steps, "o", 0.16), (last, "s", -0.16)):
            point = at(done, name, step)
            axes_style = {"color": COLOURS[name], "mfc": "white" if marker == "o" else COLOURS[name], "capsize": 2}
            ends.errorbar(100 * point.mean, row + shift, xerr=100 * point.half, fmt=marker, ms=5, **axes_style)
    ends.axvline(100 * base["pass@1"], color=COLOURS["base"], ls=":")
    ends.set_yticks(range(len(order)), [RIVALS[name][0] for name in order])
    for label, name in zip(ends.get_yticklabels(), order, strict=True):
        label.set_fontweight("bold" if name == "topr" else "normal")
    ends.set(title=f"○ one epoch, ■ {profile.epochs} epochs; dotted: base model", xlabel="pass@1 (%)")
    save(picture, profile, "fig1")


def _fig3(done: Done, profile: Profile, names: list[str], base: dict[str, float]) -> None:
    steps = [0] + [round(mark * profile.steps) for mark in MARKS if mark <= profile.epochs]
    picture, all_axes = figure(3)
    for axes, share in zip(all_axes, ("correct", "incorrect", "invalid"), strict=True):
        for name in names:
            points = [Interval(base[share], 0.0)] + [at(done, name, step, share) for step in steps[1:]]
            curve(axes, steps, points, RIVALS[name][0], color=COLOURS[name], lw=2.6 if name == "topr" else 1.4)
        axes.set(title=share, xlabel="optimiser steps", ylim=(-2, 102))
    all_axes[0].set(ylabel="answers (%)")
    all_axes[-1].legend(fontsize=7.5, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    save(picture, profile, "fig3")
