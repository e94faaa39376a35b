"""Record the calls of an application to a model server, and collect rewards for the answers, for training."""
