"""Replay rows of earlier generation batches and logged rows."""

from topr_trl.trainers.replay.batches import batch_of, check_columns, with_rows
from topr_trl.trainers.replay.buffer import ReplayBuffer, ReplayRow
from topr_trl.trainers.replay.logged_rows import check_logged, logged_rows

__all__ = ["ReplayBuffer", "ReplayRow", "batch_of", "check_columns", "check_logged", "logged_rows", "with_rows"]
