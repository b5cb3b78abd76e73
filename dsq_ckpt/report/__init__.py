"""Reports on a run from its manifests: history, the page of `dsq report`, and scalars for experiment loggers."""

from dsq_ckpt.report import scalars

__all__ = ["scalars"]
