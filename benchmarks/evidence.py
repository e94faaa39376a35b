"""Writes the pages of what was measured from the finished cells: claim, expectation, ours, verdict, picture."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from benchmarks.cells import Cell, Store, Unfinished
from benchmarks.hypotheses import HYPOTHESES
from benchmarks.setting import TASK_STEPS, Profile
from benchmarks.verdicts import DOES_NOT, HOLDS, MEASURED, PARTLY, Verdict


def write(
    claims: dict[str, ModuleType],
    store: Store,
    profile: Profile,
    page: Path,
    hypotheses: bool = False,
    more_headlines: Sequence[str] = (),
) -> list[str]:
    """Draw every picture beside the page, judge every claim that is finished or reports its part, write the page.

    Args:
        hypotheses: the page is that of "When do wrong answers pay?", whose claims are our own.
        more_headlines: of other pages.

    Returns:
        The headlines of the page, with links to it.
    """
    planned = {name: _cells(claim, store, profile) for name, claim in claims.items()}
    finished = [
        name
        for name, cells in planned.items()
        if cells and (not store.unfinished(cells) or getattr(claims[name], "REPORTS_WHAT_IS_FINISHED", False))
    ]
    pictures = page.parent / page.stem
    verdicts = {name: _report(claims[name], store, profile, pictures) for name in finished}
    page.parent.mkdir(parents=True, exist_ok=True)
    listed = {_anchor(name, n): verdict for name, part in verdicts.items() for n, verdict in enumerate(part, 1)}
    headlines = [
        f"* {verdict.headline} ([more]({page.name}#{anchor}))" for anchor, verdict in listed.items() if verdict.headline
    ]
    opening = (
        _of_hypotheses(listed) if hypotheses else _of_the_paper(listed, profile, store, [*headlines, *more_headlines])
    )
    lines = [*opening, *_sections(listed, pictures.name, hypotheses), *_what_was_run(planned, store)]
    page.write_text("\n".join(lines) + "\n")
    return headlines


def _cells(claim: ModuleType, store: Store, profile: Profile) -> list[Cell]:
    try:
        return claim.cells(profile, store)
    except Unfinished:
        return []


def _report(claim: ModuleType, store: Store, profile: Profile, out: Path) -> list[Verdict]:
    try:
        return claim.report(store, profile, out)
    except Unfinished:
        return []


# Greedy accuracy of the published base models, measured apart from these results.
SHARPENING = (
    "The most likely answer of some base models is right all along. Decoded greedily, `main` is right for 89% of the "
    "problems, `hard` for 81%, `slips-10`, `slips-30` and `misconception-30` for 85 to 96%. There a lower temperature "
    "beats every method, and the comparisons measure sharpening. The most likely answer of `sure-17`, `sure-3`, "
    "`wanders-3` and `misconception-10` is wrong (greedy 2 to 12%): there training has to teach something."
)

# Of the published results.
_WHAT_FOLLOWS = (
    "**What follows**: no rule that was tried predicts a share that is better than always 50% by an interval. From "
    "50 to 100% it matters little on most base models; below that it costs accuracy unless the model is sure of its "
    "mistakes, whatever the optimizer. Right answers repeated to as much computation end above all shares after one "
    "pass. What to set: [Settings](settings.md#effective-share-of-positives).",
    "",
)


_LIMITS = (
    "**What it cannot say.** Rates are chosen on one seed: measured again on other rows, those cells differ by 4 "
    "points (root mean square of 40), and another rate is chosen now and then. Intervals are over seeds, not over "
    "base models, of which there are a few of each kind, all of 0.3 million parameters. 679 of the cells that are "
    "reported were measured twice, on other rows of the same seeds: pass@1 differed by 4 points (root mean square). "
    f"All accuracies are of answers sampled at temperature 1. {SHARPENING}",
    "",
)


def _of_hypotheses(listed: dict[str, Verdict]) -> list[str]:
    follows = {HYPOTHESES[name].title for name in ("protocol", "predictor")} <= {v.claim for v in listed.values()}
    tested = [verdict for verdict in listed.values() if verdict.verdict != MEASURED]
    judged = {verdict.claim: f"[{verdict.claim}](#{anchor}) | {verdict.verdict}" for anchor, verdict in listed.items()}
    return [
        "# When do wrong answers pay?",
        "",
        "What was expected (`benchmarks/hypotheses.py`), written down before it was run, and what became of it. Base "
        "models of 0.3 million parameters that are wrong in four ways (`benchmarks/bases.py`): they slip at random, "
        "have a misconception (adding for multiplying) beside the slips, have it and are sure of it, or wander off "
        "without an answer; the number in a name is about the share of right answers in percent. Unless it says "
        "otherwise: one pass over 2,560 rows of 400 problems, gradient clip 1, each arm at its own best rate (and "
        "rows per step, in the comparison of protocols) found on a seed and on problems apart, tests on 400 other "
        "problems. ± is a 95% interval over seeds.",
        "",
        *(_WHAT_FOLLOWS if follows else ()),
        f"{sum(verdict.verdict == HOLDS for verdict in tested)} of {len(tested)} expectations held:",
        "",
        "| expected | outcome |",
        "|---|---|",
        *(f"| {judged.pop(h.title, f'{h.expected} | not yet run')} |" for h in HYPOTHESES.values()),
        *(f"| {of_no_hypothesis} |" for of_no_hypothesis in judged.values()),
        "",
        "**Words.** A row is *positive* if its answer is right (R = +1), *negative* if it is wrong or missing (R = "
        "-1). p: share of positives among the rows. c: baseline, subtracted from R. p~: share of positives in the "
        "sum of |R - c|; at c = 0 it is p, at 100% nothing is learned from negatives (*positives only*). An *arm* "
        "is a way to train: share, protocol, optimizer, rate, rows per step. *Regret*: points of pass@1 below the "
        "best share of the same base model. G⁺, G⁻: mean squared norm of the gradient of log π of a positive, of a "
        "negative; *second moment* and *variance* are those of the gradient of a batch, and stand for the share "
        "that makes them least. *Gain*: the share at which the first step of an optimizer gains most for its size; "
        "*whole*: the whole gradient is divided by its norm, *tensors*: each tensor by its own, *signs*: only "
        "signs are kept.",
        "",
        *(_LIMITS if follows else ()),
    ]


def _of_the_paper(listed: dict[str, Verdict], profile: Profile, store: Store, headlines: list[str]) -> list[str]:
    return [
        "# Evidence",
        "",
        "The paper's figures and propositions, measured on a model of 0.3 million parameters that solves generated "
        "word problems "
        f"carelessly ({TASK_STEPS['main']} steps per problem, {TASK_STEPS['hard']} in the harder task). Written by "
        f"`python -m benchmarks` from `{os.path.relpath(store.directory)}/`; do not edit. `make reproduce` measures "
        "all of it again.",
        "",
        *([*headlines, ""] if headlines else []),
        "| claim | verdict (*measured*: the paper claims nothing) |",
        "|---|---|",
        *(f"| [{verdict.claim}](#{anchor}) | {verdict.verdict} |" for anchor, verdict in listed.items()),
        "",
        "**How it was measured.** All methods start from the same model, read the same rows in the same order, "
        f"{profile.steps} steps of 32 rows per epoch (AdamW, constant learning rate, gradient clip 1), and are tested "
        f"on {profile.test_problems} other problems. Each has its own best learning rate from one grid, chosen on "
        "validation problems with a seed that nothing else uses, after one epoch; runs of several epochs keep that "
        "rate, which need not be their best. (DPO reads pairs of the completions that the rows were chosen from, as "
        "many rows per step.) ± is a 95% t-interval over the seeds, and never less "
        "than two bootstrap errors of the evaluations (of the answers; the test problems are always the same). *Above* "
        "and *below* compare seed by seed: same rows, same test problems. Seeds: 5 for Fig. 1, 3, 4, 7, the harder "
        "task, old rows, online, beside sampling and Table 2, 2 for long responses, 1 for the base model and the "
        "learning rates, 3 for the others.",
        "",
        "**Words.** A row is *positive* if its answer is right (R = +1), *negative* if it is wrong or missing (R = "
        "-1). p: share of positives among the rows; the base model's unless stated otherwise. c: baseline, subtracted"
        " from R; 0 unless stated otherwise. p~: share of positives in the sum of |R - c|; at c = 0 it is p. Methods "
        "that normalize rewards within a group (GRPO and its variants, M2PO, “TOPR” with GRPO's advantages) have p~ = "
        "50% for that reason, so they differ from TOPR at c = 0 in their share as much as in their loss. "
        "Positives only, unless a claim says otherwise: TOPR's batches with its negatives at weight 0, so as many "
        "steps; the paper removes them and passes over the rest once, which are fewer steps "
        "([all three protocols](wrong_answers.md)). log μ: "
        "log-probability of a completion under the model that wrote it. a⁻: lower limit of a negative's weight. Plain"
        " IS and TIS: importance sampling, with the ratio as it is or truncated at 1, for both signs. maj@n: majority"
        " of n answers. Anna Karenina sampling: the first right answer to each problem, wrong ones for the rest.",
        "",
        "**What it cannot say.** These are not GSM8K and 8 billion parameters: a slip and a missing answer are the "
        "only kinds of "
        f"error, a completion has about forty tokens, and the whole model moves within {profile.steps} steps. Where a "
        "claim does not hold here, the page says so; that is no statement about large models. Left out are the paper's "
        "results on MATH and with 70 billion parameters, and its appendices B and C. All accuracies are of answers "
        f"sampled at temperature 1. {SHARPENING}",
        "",
    ]


def _sections(listed: dict[str, Verdict], pictures: str, hypotheses: bool) -> list[str]:
    expected = "Expected" if hypotheses else "Paper"
    lines: list[str] = []
    shown = set()
    for anchor, verdict in listed.items():
        # Our own are titled as what was expected, which must not be read as what was found.
        was_tested = hypotheses and verdict.verdict != MEASURED
        heading = f"“{verdict.claim}” {verdict.verdict}" if was_tested else verdict.claim
        lines += [f'<a id="{anchor}"></a>', "", f"## {heading}", ""]
        if verdict.paper:
            lines += [f"*{expected}:* {verdict.paper}.", ""]
        lines += [
            f"*Here:* {verdict.ours}.",
            "",
            *([verdict.details, ""] if verdict.details else []),
            f"**{verdict.verdict[0].upper()}{verdict.verdict[1:]}.**",
            "",
        ]
        if verdict.why and verdict.verdict in (DOES_NOT, PARTLY):
            lines += [f"Likely because: {verdict.why}", ""]
        if verdict.picture and verdict.picture not in shown:
            shown.add(verdict.picture)
            lines += [f"![{verdict.claim}]({pictures}/{verdict.picture})", ""]
    return lines


def _what_was_run(planned: dict[str, list[Cell]], store: Store) -> list[str]:
    lines = ["## What was run", "", "| part | cells finished | core-minutes |", "|---|---|---|"]
    lines += [
        f"| {name} | {len(found)} of {len(planned[name])} | {sum(entry['seconds'] for entry in found) / 60:.0f} |"
        for name, found in ((name, store.entries(cells)) for name, cells in planned.items())
    ]
    lines += ["", "A cell that several parts read counts in each."]
    entries = store.entries([cell for cells in planned.values() for cell in cells])
    for what in ("machine", "versions", "date") if entries else ():
        values = sorted({json.dumps(entry[what]) for entry in entries})
        lines += [
            "",
            f"{what.capitalize()}: " + "; ".join(value.strip('{}"').replace('"', "") for value in values) + ".",
        ]
    return lines


def _anchor(claim: str, number: int) -> str:
    """Of the first verdict, the second... of a claim: other pages link to it, whatever else is measured."""
    return claim.replace("_", "-") + (f"-{number}" if number > 1 else "")
