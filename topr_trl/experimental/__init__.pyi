from .async_trainer import AsyncTOPRConfig, AsyncTOPRTrainer

__all__ = ["AsyncTOPRConfig", "AsyncTOPRTrainer"]
