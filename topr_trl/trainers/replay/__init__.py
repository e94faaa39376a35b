"""Replay rows of earlier generation batches, and logged rows."""
