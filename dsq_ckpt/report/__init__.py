"""What the manifests of a run tell: its history, the page of `dsq report`, and scalars for loggers of experiments."""

from dsq_ckpt.report import scalars

__all__ = ["scalars"]
