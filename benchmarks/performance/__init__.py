"""Compare time and memory of TOPR and of TRL's other trainers. See `docs/performance.md`.

`work` builds trainers on the same rows, and `timing` runs them in turn. `page` compares the results with the goals.
"""
