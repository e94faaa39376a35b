"""Benchmarks of topr_trl. They are not part of the package.

    python -m benchmarks                # experiments on small models
    python -m benchmarks.real_model     # GSM8K with a pretrained model
    python -m benchmarks.gpu            # steps of full-size models on one GPU
    python -m benchmarks.performance    # time and memory compared with TRL's other trainers
    python -m benchmarks.memory         # memory of processes compared with the plan of `topr plan`
    python -m benchmarks.recording      # overhead of `topr record`

Modules that run experiments:

- `experiments/`: one module per experiment, with its methods, learning rates, seeds and a function that runs a cell.
- `experiment.py` tunes learning rates and plans cells. `cells.py` runs cells in a pool and stores their results.
- `methods.py`: methods by name. `loops/`: four ways to train.

Models, problems and rows:

- `setting.py`: sizes, problems, base models, tests. `bases.py` makes base models with different kinds of errors in
  `models/`. `conversations.py`: problems with two answers. `code_task.py`: the rows of `examples/code_generation.py`.
- `rows.py`: rows for training. `decoding.py` samples completions. `decoded.py` computes accuracies.

Results: `results/` has one line per cell. `report.py` and `statistics.py` make tables. `results_page.py` and
`real_page.py` fill in docs/results.md, docs/which_method.md and real_model.md. `appendix/` has the tables of all
experiments, and pages of version 0.2.
"""
