"""Measurements, apart from the package.

    python -m benchmarks                # experiments on small models
    python -m benchmarks.real_model     # GSM8K with a pretrained model
    python -m benchmarks.performance    # time and memory beside TRL's other trainers
    python -m benchmarks.memory         # memory of processes beside the plan of `topr plan`

How they are run:

- `experiments/`: one declaration for each: methods, rates, seeds, how a cell is run.
- `experiment.py` tunes rates and plans cells. `cells.py` stores their results and runs them in a pool.
- `methods.py`: methods by name. `loops/`: offline, rounds, online, stale.

On what:

- `setting.py`: sizes, problems, base models, tests. `bases.py`: base models that are wrong in different ways, in
  `models/`. `code_task.py`: the rows of `examples/code_generation.py`.
- `rows.py`: completions as training sees them. `decoding.py` draws them, `decoded.py` counts right answers.

What comes out: `results/` (one line a cell), `report.py` and `statistics.py` (tables), `results_page.py`
(docs/results.md), `appendix/` (tables of all experiments, and pages of version 0.2).
"""
