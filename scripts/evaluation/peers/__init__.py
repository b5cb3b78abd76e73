"""Published compressors of checkpoints that are no configuration of `dsq_ckpt`, on the same recorded runs.

`states` reads recorded checkpoints, `excp`, `bitsnap` and `packaged` are the peers, `walk` compresses a run with each
and searches for the knob that keeps a bound, `comparison` puts rows side by side.
"""
