"""Settings of the trainers: the configs, TRL settings that are not supported, and checks."""
