"""Score completions with judges, reward functions and reward models."""

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
