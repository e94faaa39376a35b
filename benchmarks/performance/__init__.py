"""Time and memory of TOPR compared with TRL's other trainers, see `docs/performance.md`.

`work` builds trainers on the same rows, `timing` runs them in turn, `data` times curation, import and the start of
training, `loop` times `topr iterate`, and `page` compares the results with the goals.
"""
