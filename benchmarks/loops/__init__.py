"""Four ways to train: offline on stored rows, in rounds, online, and on rows of an older policy."""
