"""Four ways to train: offline on stored rows, in rounds, online, and on rows of a policy that is many updates old."""
