"""Figures at full size, on one GPU of 80 to 140 GB, see `docs/full_size.md`.

`steps` times trainers and compares their memory with `topr plan`, `precision` compares log-probabilities in bfloat16
and float32, `page` writes the page. Weights are random, so nothing is downloaded; PyTorch, transformers and TRL are
enough.

    python -m benchmarks.gpu                  # all parts; finished cells are not run again
    python -m benchmarks.gpu steps            # one part
    python -m benchmarks.gpu --tiny           # does it all work? on a CPU, without results
"""
