"""What a claim comes to: the paper's number, ours, and whether it holds."""

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
    """

    claim: str
    paper: str
    ours: str
    verdict: str
    why: str = ""
    picture: str = ""
    details: str = ""


def judge(*parts: bool) -> str:
    """Holds if every part of the claim does, in part if some do."""
    return HOLDS if all(parts) else PARTLY if any(parts) else DOES_NOT
