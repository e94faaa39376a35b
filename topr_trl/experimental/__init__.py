"""Experimental trainers. They can change without notice, as TRL's experimental trainers can, and need TRL 1.16."""

from topr_trl.trainers.asynchronous import AsyncTOPRConfig, AsyncTOPRTrainer

__all__ = ["AsyncTOPRConfig", "AsyncTOPRTrainer"]
