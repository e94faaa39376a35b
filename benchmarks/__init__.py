"""What is measured: the paper's claims, what was expected of wrong answers, time and memory. Not part of the package.

    python -m benchmarks                # claims: which cells they need, run what is missing, write the pages
    python -m benchmarks.performance    # time and memory beside TRL's other trainers
    python -m benchmarks.memory         # memory of processes beside what `topr plan` says
    python -m benchmarks.gpu            # the same at full size, on a GPU

What is run:

- `claims/`: one file for each claim: its cells, the work of one, picture and verdict. `hypotheses.py`: what was
  expected.
- `cells.py`: a cell is the smallest piece of work that is kept; runs what is missing, and goes on where it was killed.
- `arms.py`: ways to train on stored rows, each at its own best rate. `online.py`: ways to train online. `rounds.py`: a
  round of the paper's loop.

What is compared:

- `rivals.py`: the methods, those of TRL among them. `losses.py`: what was published since. `optimizers.py`: the
  optimizers; `gradients.py`: what can be predicted from gradients.

On what:

- `setting.py`: sizes, problems, base models, tests. `bases.py`: base models that are wrong in different ways, in
  `models/`. `code_task.py`: the rows of `examples/code_generation.py`.
- `rows.py`: completions as training sees them. `decoding.py`: draws them. `training.py`: the one training loop.

What comes out, from `results/`:

- `statistics.py`: means with intervals. `verdicts.py`, `pictures.py`: for a claim's report. `evidence.py`: the pages.
"""
