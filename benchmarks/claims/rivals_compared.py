"""Figures 1 and 3: all rivals on the same completions, over one epoch and over several."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.cells import Cell, Store
from benchmarks.claims import base
from benchmarks.claims.learning_rates import best
from benchmarks.pictures import COLOURS, curve, figure, save
from benchmarks.rivals import PUBLISHED_AS_TOPR, RIVALS
from benchmarks.setting import Profile, base_model, epoch_rows, evaluate, summary
from benchmarks.statistics import Interval, Measured, difference, over_seeds
from benchmarks.training import train
from benchmarks.verdicts import MEASURED, Verdict, judge, markdown_table, not_seen

Done = list[tuple[Cell, dict[str, Any]]]

QUICK_RIVALS = ("topr", "positives_only", "reinforce", "topr_geometric")
MARKS = (0.5, 1, 2, 4, 6)  # epochs


def cells(profile: Profile, store: Store) -> list[Cell]:
    names = QUICK_RIVALS if len(profile.learning_rates) == 1 else tuple(RIVALS)
    return [
        {
            "claim": "rivals", "task": "main", "rival": rival, "seed": seed,
            "learning_rate": best(store, profile, rival), "epochs": profile.epochs,
        }
        for seed in range(profile.seeds)
        for rival in names
    ]  # fmt: skip


def _marks(profile: Profile, epochs: int) -> list[int]:
    """The steps at which the curves are measured."""
    return [round(mark * profile.steps) for mark in MARKS if mark <= epochs]


def work(cell: Cell, profile: Profile) -> dict[str, Any]:
    task, seed = cell["task"], cell["seed"]
    model = base_model(task)
    rows, pool = epoch_rows(task, profile, seed)
    objective = RIVALS[cell["rival"]].make(model, rows, pool)
    steps = profile.steps * cell["epochs"]
    marks = tuple(_marks(profile, cell["epochs"]))
    ends = (profile.steps, steps)  # measured better: these are compared

    def measure(step: int) -> dict[str, float]:
        return summary(evaluate(model, task, profile, 4 if step in ends else 2, seed))

    trained = train(model, objective, steps, cell["learning_rate"], seed, marks, measure)
    return {"curve": trained["curve"], "gradient_norms": trained["gradient_norms"][:: max(steps // 100, 1)]}


# Report.

PAPERS_RIVALS = ("topr", "positives_only", "reinforce", "opr", "tis", "ppo", "dpo")


def report(store: Store, profile: Profile, out: Path) -> list[Verdict]:
    done, start = store.results(cells(profile, store)), base.point(store, profile)
    names = [name for name in RIVALS if name in {cell["rival"] for cell, _ in done}]
    one, last = profile.steps, profile.steps * profile.epochs
    _fig1(done, profile, out, names, start)
    _fig3(done, profile, out, [name for name in names if name in PAPERS_RIVALS], start)
    return [
        _papers_figure_1(done, names, start, one, last),
        Verdict(
            "Fig. 1 with all rivals, each at its best learning rate for one epoch, over one and over several",
            "",
            ranking(done, names, (one, last)),
            MEASURED,
            picture="fig1.png",
            details=table(done, names, (one, last)),
            headline=_headline(done, profile, names, start),
        ),
        _papers_figure_3(done, start, last),
        _published_as_topr(done, names, one, last),
    ]


def _headline(done: Done, profile: Profile, names: list[str], start: dict[str, float]) -> str:
    last = profile.steps * profile.epochs
    shown = ("topr", "topr_group_sign", "positives_only", "trl_dapo", "ppo", "dpo", "reinforce")
    ends = ", ".join(f"{RIVALS[name].label} {at(done, name, last).percent()}" for name in shown if name in names)
    positives = measured(done, "positives_only", last)
    gaps = " and ".join(
        f"{difference(measured(done, name, last), positives).percent(signed=True)} ({said})"
        for name, said in (("topr_group_sign", "p~ = 50%, GRPO's advantages"), ("topr", "the paper's c = 0"))
        if name in names
    )
    return (
        f"**The same rows {profile.epochs} times**, at the rates that are best for one: pass@1 of "
        f"{100 * start['pass@1']:.1f}% becomes {ends}%. TOPR minus positives only in as many steps: {gaps} points."
    )


def _papers_figure_1(done: Done, names: list[str], start: dict[str, float], one: int, last: int) -> Verdict:
    rivals = [name for name in ("ppo", "dpo", "reinforce") if name in names]

    def line(step: int) -> str:
        return ", ".join(f"{RIVALS[name].label} {at(done, name, step).percent()}" for name in ("topr", *rivals))

    def gain(name: str) -> Measured:
        early, late = (measured(done, name, step) for step in (one, last))
        return {seed: (late[seed][0] - early[seed][0], late[seed][1]) for seed in late}

    parts = {
        "TOPR improves": at(done, "topr", last).low > start["pass@1"],
        "naive REINFORCE collapses": at(done, "reinforce", last).high < start["pass@1"] / 2,
    }
    parts |= {f"TOPR ends above {RIVALS[name].label}": against(done, name, last).low > 0 for name in rivals}
    parts |= {f"TOPR is above {RIVALS[n].label} after {one} steps": against(done, n, one).low > 0 for n in rivals}
    if "ppo" in names:
        parts["PPO gains less than TOPR after the first epoch"] = difference(gain("topr"), gain("ppo")).low > 0
    return Verdict(
        "Fig. 1: of TOPR, DPO, PPO and naive REINFORCE, TOPR improves most, PPO stalls, REINFORCE collapses",
        "GSM8K, one epoch: TOPR highest, DPO below it, PPO stalled near the base model, naive REINFORCE at 0",
        f"pass@1 of {100 * start['pass@1']:.1f}% becomes, after {one} steps, {line(one)}; after {last}: {line(last)}%"
        + not_seen(parts),
        judge(*parts.values()),
        "Within one epoch none of the four has moved far at the learning rate that is best for it then; they diverge "
        "in the epochs after it, on rows that become staler.",
        "fig1.png",
    )


def _papers_figure_3(done: Done, start: dict[str, float], last: int) -> Verdict:
    topr, reinforce = (at(done, name, last, "invalid") for name in ("topr", "reinforce"))
    others = {
        RIVALS[n].label: at(done, n, last, "invalid") for n in ("ppo", "dpo") if any(c["rival"] == n for c, _ in done)
    }
    parts = {
        "TOPR ends invalid answers": topr.high < start["invalid"] / 10,
        "naive REINFORCE ends in them": reinforce.low > 0.5,
        **{f"{label} does not reduce them": other.low > start["invalid"] / 2 for label, other in others.items()},
    }
    return Verdict(
        "Fig. 3: of the four only TOPR ends invalid answers, and naive REINFORCE ends in them",
        "TOPR about 0%, naive REINFORCE almost all; PPO and DPO do not reduce them",
        f"invalid answers after {last} steps: base {100 * start['invalid']:.1f}%, TOPR {topr.percent()}%, naive "
        f"REINFORCE {reinforce.percent()}%"
        + "".join(f", {label} {i.percent()}%" for label, i in others.items())
        + not_seen(parts),
        judge(*parts.values()),
        "At its best learning rate naive REINFORCE collapses into wrong answers first and into invalid ones later; at "
        "ten times that rate all its answers are invalid within one epoch. An invalid answer is a negative here as "
        "much as a wrong one, and any method that lowers negatives or raises positives makes it rarer.",
        "fig3.png",
    )


def _published_as_topr(done: Done, names: list[str], one: int, last: int) -> Verdict:
    variants = [name for name in PUBLISHED_AS_TOPR if name in names]
    worse = {name: against(done, name, last).low > 0 for name in variants}
    said = "; ".join(
        f"{RIVALS[n].label} {at(done, n, one).percent()} → {at(done, n, last).percent()}%" for n in ("topr", *variants)
    )
    return Verdict(
        "Beyond the paper: what others ship as TOPR does worse (ratio per token, geometric mean, GRPO's advantages as "
        "rewards)",
        "",
        f"{said} ({one} → {last} steps)",
        judge(*worse.values()),
        "GRPO's advantages are rewards less the mean of their group, divided by its standard deviation. "
        '(`baseline="group_mean"` does not divide, and is not measured here.) The ratio is still that of the whole '
        "completion. These advantages set p~ to 50% in every group, while TOPR at c = 0 has the share of right "
        "answers, under 30%; Fig. 5 shows how much that is worth.",
        "fig1.png",
    )


def measured(done: Done, rival: str, step: int, what: str = "pass@1") -> Measured:
    return {
        cell["seed"]: (point[what], point["error"] if what == "pass@1" else float("nan"))
        for cell, result in done
        if cell["rival"] == rival
        for point in result["curve"]
        if point["step"] == step
    }


def at(done: Done, rival: str, step: int, what: str = "pass@1") -> Interval:
    return over_seeds(measured(done, rival, step, what))


def against(done: Done, rival: str, step: int) -> Interval:
    """pass@1 of TOPR less that of the rival."""
    return difference(measured(done, "topr", step), measured(done, rival, step))


def ranking(done: Done, names: list[str], steps: Sequence[int]) -> str:
    """Who is above TOPR and who below, by the paired difference."""
    said = []
    for step in steps:
        gaps = {name: against(done, name, step) for name in names if name != "topr"}
        above = [RIVALS[name].label for name, gap in gaps.items() if gap.high < 0]
        below = sum(gap.low > 0 for gap in gaps.values())
        said.append(
            f"after {step} steps TOPR is above {below} of {len(gaps)} rivals, below {', '.join(above) or 'none'}, and "
            f"cannot be told from {len(gaps) - below - len(above)}"
        )
    return "; ".join(said) + f" (95% intervals; of {len(steps) * (len(names) - 1)} comparisons 1 in 20 may be wrong)"


def table(done: Done, names: list[str], steps: Sequence[int]) -> str:
    rates = {cell["rival"]: cell["learning_rate"] for cell, _ in done}
    compared = [title for step in steps for title in (f"pass@1 after {step} steps, %", "TOPR minus this, points")]
    lines = []
    for name in sorted(names, key=lambda name: -at(done, name, steps[-1]).mean):
        row = [f"**{RIVALS[name].label}**" if name == "topr" else RIVALS[name].label, f"{rates[name]:g}"]
        for step in steps:
            row += [
                at(done, name, step).percent(),
                "" if name == "topr" else against(done, name, step).percent(signed=True),
            ]
        lines.append([*row, at(done, name, steps[-1], "invalid").percent()])
    return markdown_table(["method", "learning rate", *compared, "invalid at the end, %"], lines)


def _fig1(done: Done, profile: Profile, out: Path, names: list[str], start: dict[str, float]) -> None:
    steps = [0, *_marks(profile, profile.epochs)]
    origin = Interval(start["pass@1"], 2 * start["error"])
    picture, (papers, others, ends) = figure(3, 4.4, 4.6)
    for name in names:
        axes = papers if name in PAPERS_RIVALS else others
        points = [origin] + [at(done, name, step) for step in steps[1:]]
        style = {"lw": 2.6, "zorder": 5} if name == "topr" else {"ls": "--" if name in PUBLISHED_AS_TOPR else "-"}
        curve(axes, steps, points, RIVALS[name].label, color=COLOURS[name], **style)
    curve(others, steps, [origin] + [at(done, "topr", s) for s in steps[1:]], "TOPR", color=COLOURS["topr"], lw=2.6)
    papers.set(title="TOPR and the paper's rivals", ylabel="pass@1 (%)")
    others.set(title="Other methods in use today")
    for axes in (papers, others):
        axes.axvline(profile.steps, color="#999999", lw=0.8, ls=":")
        axes.set(xlabel="optimizer steps of 32 rows (dotted: one epoch)", ylim=(-2, None))
        axes.legend(fontsize=7.5, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.16))
    last = steps[-1]
    order = sorted(names, key=lambda name: at(done, name, last).mean)
    for row, name in enumerate(order):
        for step, marker, shift in ((profile.steps, "o", 0.16), (last, "s", -0.16)):
            point = at(done, name, step)
            axes_style = {"color": COLOURS[name], "mfc": "white" if marker == "o" else COLOURS[name], "capsize": 2}
            ends.errorbar(100 * point.mean, row + shift, xerr=100 * point.half, fmt=marker, ms=5, **axes_style)
    ends.axvline(100 * start["pass@1"], color=COLOURS["base"], ls=":")
    ends.set_yticks(range(len(order)), [RIVALS[name].label for name in order])
    for label, name in zip(ends.get_yticklabels(), order, strict=True):
        label.set_fontweight("bold" if name == "topr" else "normal")
    ends.set(
        title=f"○ one epoch, ■ {profile.epochs} epochs; dotted: base model",
        xlabel="pass@1 (%), at the best rates for one epoch",
    )
    save(picture, out, "fig1")


def _fig3(done: Done, profile: Profile, out: Path, names: list[str], start: dict[str, float]) -> None:
    steps = [0, *_marks(profile, profile.epochs)]
    picture, all_axes = figure(3)
    for axes, share in zip(all_axes, ("correct", "incorrect", "invalid"), strict=True):
        for name in names:
            points = [Interval(start[share], 0.0)] + [at(done, name, step, share) for step in steps[1:]]
            curve(axes, steps, points, RIVALS[name].label, color=COLOURS[name], lw=2.6 if name == "topr" else 1.4)
        axes.set(title=share, xlabel="optimizer steps", ylim=(-2, 102))
    all_axes[0].set(ylabel="answers (%)")
    all_axes[-1].legend(fontsize=7.5, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    save(picture, out, "fig3")
