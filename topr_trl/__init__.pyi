from .baseline import baseline_for_positive_share, effective_positive_share, subtract_baseline
from .curation import Curated, curate
from .data.tables import load_rows, save_rows
from .diagnosis import Diagnosis, diagnose
from .evaluation.answers import Samples, samples_of
from .evaluation.bootstrap import Difference, compare
from .evaluation.estimates import Evaluation, evaluate_rows, evaluate_samples
from .evaluation.report import Evaluations
from .generation.settings import SamplingArguments
from .generation.transformers import sample_completions
from .limits import PRESETS, TruncationLimits
from .loss import objective, taper, topr_loss, truncated_weights
from .rewards import score_completions
from .rewards.functions import reward_completions
from .settings.config import OfflineTOPRConfig, TOPRConfig
from .trainers.offline import OfflineTOPRTrainer
from .trainers.online import TOPRTrainer

__version__: str
__all__ = [
    "PRESETS",
    "Curated",
    "Diagnosis",
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
    "diagnose",
    "effective_positive_share",
    "evaluate_rows",
    "evaluate_samples",
    "load_rows",
    "objective",
    "reward_completions",
    "sample_completions",
    "samples_of",
    "save_rows",
    "score_completions",
    "subtract_baseline",
    "taper",
    "topr_loss",
    "truncated_weights",
]
