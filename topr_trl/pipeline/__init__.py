"""Run the stages of TOPR: `import`, `sample`, `score`, `curate`, `log-mu`, `train` and `evaluate`."""
