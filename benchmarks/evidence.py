"""Writes docs/evidence.md from the finished cells: claim, the paper's number, ours, verdict, picture."""

import json
from pathlib import Path
from types import ModuleType

from benchmarks.cells import Cell, Store, Unfinished
from benchmarks.pictures import folder
from benchmarks.setting import TASK_STEPS, Profile
from benchmarks.verdicts import Verdict


def write(claims: dict[str, ModuleType], store: Store, profile: Profile) -> Path:
    """Draw every picture, judge every claim, write the page; returns where it is."""
    planned = {name: _cells(claim, store, profile) for name, claim in claims.items()}
    verdicts = {name: claim.report(store, profile) if planned[name] else [] for name, claim in claims.items()}
    pictures = folder(profile)
    page = pictures.parent / "evidence.md"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(_page(planned, verdicts, store, profile, pictures.name))
    return page


def _cells(claim: ModuleType, store: Store, profile: Profile) -> list[Cell]:
    try:
        return claim.cells(profile, store)
    except Unfinished:
        return []


def _page(
    planned: dict[str, list[Cell]], verdicts: dict[str, list[Verdict]], store: Store, profile: Profile, pictures: str
) -> str:
    listed = [verdict for part in verdicts.values() for verdict in part]
    lines = [
        "# Evidence",
        "",
        "Every claim of the paper, measured on a model of 0.3 million parameters that solves generated word problems "
        f"carelessly ({TASK_STEPS['main']} steps a problem, {TASK_STEPS['hard']} in the harder task). Written by "
        "`python -m benchmarks --report` from the results in `benchmarks/results/`; do not edit. `make reproduce` "
        "measures all of it again.",
        "",
        "**How it was measured.** All methods start from the same model, read the same candidates in the same order, "
        f"{profile.steps} steps of 32 rows an epoch (AdamW, constant learning rate, gradient clip 1), and are tested "
        f"on {profile.test_problems} other problems. Each has its own best learning rate from one grid, chosen on "
        "validation problems with a seed that nothing else uses, after one epoch. ± is two standard errors over seeds "
        "and over the bootstrap of each evaluation. *Above* and *below* compare seed by seed on the same candidates.",
        "",
        "**What it cannot say.** These are not GSM8K and 8 billion parameters: an arithmetic slip is the only kind of "
        "error, a response has about 36 tokens, and the whole model moves in 80 steps. Where a claim does not hold "
        "here, that is said, and is no statement about large models.",
        "",
        "| claim | verdict |",
        "|---|---|",
        *(f"| [{verdict.claim}](#{_anchor(i)}) | {verdict.verdict} |" for i, verdict in enumerate(listed, 1)),
        "",
    ]
    shown = set()
    for i, verdict in enumerate(listed, 1):
        lines += [f'<a id="{_anchor(i)}"></a>', "", f"## {verdict.claim}", ""]
        if verdict.paper:
            lines += [f"*Paper:* {verdict.paper}.", ""]
        lines += [
            f"*Here:* {verdict.ours}.",
            "",
            *([verdict.details, ""] if verdict.details else []),
            f"**{verdict.verdict[0].upper()}{verdict.verdict[1:]}.**",
            "",
        ]
        if verdict.why and verdict.verdict != "holds":
            lines += [f"Likely because: {verdict.why}", ""]
        if verdict.picture and verdict.picture not in shown:
            shown.add(verdict.picture)
            lines += [f"![{verdict.claim}]({pictures}/{verdict.picture})", ""]
    lines += ["## What was run", "", "| part | cells finished | core-minutes |", "|---|---|---|"]
    lines += [
        f"| {name} | {len(store.results(cells))} of {len(cells)} | {store.seconds(cells) / 60:.0f} |"
        for name, cells in planned.items()
    ]
    entries = list(store.finished.values())
    for what in ("machine", "versions", "date"):
        values = sorted({json.dumps(entry[what]) for entry in entries})
        lines += [
            "",
            f"{what.capitalize()}: " + "; ".join(value.strip('{}"').replace('"', "") for value in values) + ".",
        ]
    return "\n".join(lines) + "\n"


def _anchor(number: int) -> str:
    return f"claim-{number}"
