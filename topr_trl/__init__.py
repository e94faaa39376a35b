"""Tapered Off-Policy REINFORCE (arXiv 2503.14286) for TRL."""

from topr_trl.baseline import baseline_for_positive_share, effective_positive_share, subtract_baseline
from topr_trl.candidates import load_candidates, save_candidates
from topr_trl.comparison import Difference, compare
from topr_trl.config import OfflineTOPRConfig, TOPRConfig
from topr_trl.curation import Curated, curate
from topr_trl.evaluation import Evaluation, evaluate_candidates, evaluate_samples
from topr_trl.limits import PRESETS, TruncationLimits
from topr_trl.loss import objective, taper, topr_loss, truncated_weights
from topr_trl.offline_trainer import OfflineTOPRTrainer
from topr_trl.rewards import score_candidates
from topr_trl.samples import Samples, samples_of
from topr_trl.sampling import SamplingArguments, sample_candidates
from topr_trl.trainer import TOPRTrainer

__version__ = "0.1.0"
__all__ = [
    "PRESETS",
    "Curated",
    "Difference",
    "Evaluation",
    "OfflineTOPRConfig",
    "OfflineTOPRTrainer",
    "Samples",
    "SamplingArguments",
    "TOPRConfig",
    "TOPRTrainer",
    "TruncationLimits",
    "baseline_for_positive_share",
    "compare",
    "curate",
    "effective_positive_share",
    "evaluate_candidates",
    "evaluate_samples",
    "load_candidates",
    "objective",
    "sample_candidates",
    "samples_of",
    "save_candidates",
    "score_candidates",
    "subtract_baseline",
    "taper",
    "topr_loss",
    "truncated_weights",
]
