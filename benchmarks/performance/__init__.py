"""Time and memory of TOPR compared with TRL's other trainers, see `docs/performance.md`.

`work` builds the trainers on the same rows, `timing` runs them in turn, `data` times what comes before the first
step, `loop` times `topr iterate`, `page` compares with the goals.
"""
