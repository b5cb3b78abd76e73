"""Comparison of systems for per-iteration checkpoints, after the experiments of LowDiff (section VIII).

`base` says what a system is, a file each holds the published ones, `ours` puts LowDiff and LowDiff+ behind the same
interface, and `systems` makes one by its name. `loop` is the one training loop that all of them run in, `process` runs
it in a process of its own and kills it, and the experiments, built on those, give rows of plain numbers.
"""
