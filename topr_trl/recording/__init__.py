"""Record what an application asks a model server, collect rewards for the answers, and keep both for training."""
