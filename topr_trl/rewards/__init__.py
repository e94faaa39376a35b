"""Verdicts of judges, and rewards of completions by judges, functions and models."""

from topr_trl.rewards.verdicts import (
    CORRECT,
    INCORRECT,
    INVALID,
    VERDICTS,
    Judge,
    Judgement,
    answer_reward,
    checked,
    score_completions,
    text_of,
    verdict,
)

__all__ = [
    "CORRECT",
    "INCORRECT",
    "INVALID",
    "VERDICTS",
    "Judge",
    "Judgement",
    "answer_reward",
    "checked",
    "score_completions",
    "text_of",
    "verdict",
]
