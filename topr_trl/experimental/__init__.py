"""Names that can change without notice, because they build on TRL's experimental trainer. TRL 1.15 lacks it."""

from topr_trl.trainers.asynchronous import AsyncTOPRConfig, AsyncTOPRTrainer

__all__ = ["AsyncTOPRConfig", "AsyncTOPRTrainer"]
