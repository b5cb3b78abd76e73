"""Every error of the package, in one tree with `DSQError` at its root.

Messages name the key, tensor or file, what was found, what was expected and what to do next.
"""

from __future__ import annotations


class DSQError(Exception):
    """Root of all errors raised by `dsq_ckpt`."""


class ConfigError(DSQError, ValueError):
    """A configuration has unknown keys or values out of range; all offending keys are named at once."""


class CodingError(DSQError):
    """Encoded bytes do not decode, or symbols do not fit the model they are to be coded with."""


class CorruptCheckpoint(DSQError):
    """A file is truncated, altered, foreign, or missing although a manifest promises it."""


class UnsupportedFormat(DSQError):
    """A checkpoint was written in a newer format than this version of the package reads."""


class CheckpointExists(DSQError, FileExistsError):
    """The target holds a complete checkpoint and `overwrite` was not given."""


class CheckpointNotFound(DSQError, FileNotFoundError):
    """There is no complete checkpoint at a path (of a load, or of a parent named by the caller)."""


class NonFiniteTensor(DSQError):
    """A tensor holds NaN or Inf and the configuration asks for an error."""


class LossyTensor(DSQError):
    """A tensor was asked for exactly but is stored lossy, or into a dtype it was not stored in."""


class SaveFailed(DSQError):
    """A save did not complete; the message names the rank and cause. Earlier checkpoints are untouched."""


class LoadFailed(DSQError):
    """A load did not complete, for a reason outside of the checkpoint, such as a name that is not in it."""


class NotLocal(DSQError):
    """A path is a URL, and what was called works on local directories only."""


def described(error: BaseException) -> str:
    """Return the class of an error and its text, if it has one: `KeyboardInterrupt` has none."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
