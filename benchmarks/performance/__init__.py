"""Compare time and memory of TOPR and of TRL's other trainers. See `docs/performance.md`.

`work` builds trainers on the same rows, and `timing` runs them in turn. `data` times curation, import and the start of
training. `loop` times `topr iterate`. `page` compares the results with the goals.
"""
