"""Evaluate sampled answers: pass@k, maj@k, intervals and comparisons."""

from topr_trl.evaluation.estimates import (
    Estimate,
    Evaluation,
    Group,
    Measures,
    evaluate,
    evaluate_rows,
    evaluate_samples,
)

__all__ = ["Estimate", "Evaluation", "Group", "Measures", "evaluate", "evaluate_rows", "evaluate_samples"]
