from .baseline import baseline_for_positive_share, effective_positive_share, subtract_baseline
from .config import OfflineTOPRConfig, TOPRConfig
from .curation import Curated, curate
from .data.tables import load_candidates, save_candidates
from .evaluation.answers import Samples, samples_of
from .evaluation.bootstrap import Difference, compare
from .evaluation.estimates import Evaluation, evaluate_candidates, evaluate_samples
from .evaluation.report import Evaluations
from .generation.sampling import SamplingArguments
from .generation.transformers import sample_candidates
from .loss import PRESETS, TruncationLimits, objective, taper, topr_loss, truncated_weights
from .offline_trainer import OfflineTOPRTrainer
from .rewards import score_candidates
from .trainer import TOPRTrainer

__version__: str
__all__ = [
    "PRESETS",
    "Curated",
    "Difference",
    "Evaluation",
    "Evaluations",
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
