"""Run the stages of TOPR from the command line: sample, score, curate, log μ, train, evaluate."""
