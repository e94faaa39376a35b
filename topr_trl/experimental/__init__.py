"""Experimental trainers. They can change without notice, as TRL's experimental trainers can."""

from topr_trl.trainers.asynchronous import AsyncTOPRConfig, AsyncTOPRTrainer

__all__ = ["AsyncTOPRConfig", "AsyncTOPRTrainer"]
