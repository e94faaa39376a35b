"""Replay rows of earlier generation batches, and logged rows."""

from topr_trl.trainers.replay.batches import batch_of, check_columns, with_rows
from topr_trl.trainers.replay.buffer import ReplayBuffer, ReplayRow
from topr_trl.trainers.replay.logged_rows import logged_rows, read_logged

__all__ = ["ReplayBuffer", "ReplayRow", "batch_of", "check_columns", "logged_rows", "read_logged", "with_rows"]
