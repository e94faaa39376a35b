"""What a claim comes to: the paper's number, ours, and whether it holds."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

HOLDS, DOES_NOT, PARTLY, MEASURED = "holds", "does not hold here", "holds in part", "measured"


@dataclass(frozen=True)
class Verdict:
    """A row of docs/evidence.md.

    Attributes:
        claim: what is claimed, and where.
        paper: the paper's number or curve.
        ours: ours, with intervals.
        verdict: one of the above; `MEASURED` where the paper claims nothing.
        why: the likely reason, where it does not hold.
        picture: file name of the PNG, or "".
        details: a table in Markdown, or "".
        headline: what the top of docs/evidence.md says of it, with its numbers, in Markdown; or "".
    """

    claim: str
    paper: str
    ours: str
    verdict: str
    why: str = ""
    picture: str = ""
    details: str = ""
    headline: str = ""


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [" | ".join(header), "|".join(["---"] * len(header)), *(" | ".join(row) for row in rows)]
    return "\n".join(f"|{line}|" if line.startswith("---") else f"| {line} |" for line in lines)


def not_seen(parts: Mapping[str, bool]) -> str:
    """The parts of a claim that do not hold, by name, to be added to what was measured."""
    failed = [part for part, holds in parts.items() if not holds]
    return f". Not seen: {', '.join(failed)}" if failed else ""


def judge(*parts: bool) -> str:
    """Holds if every part of the claim does, in part if some do."""
    return HOLDS if all(parts) else PARTLY if any(parts) else DOES_NOT
