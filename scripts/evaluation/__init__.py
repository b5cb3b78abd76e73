"""Evaluation harness: workloads that train the same way every time, and recordings of their runs.

`workloads` says what a workload is and makes them by name, `language`, `vision` and `factorization` hold them,
`recording` trains one without failures and keeps exact checkpoints, which systems of compression are then compared on.
"""

from __future__ import annotations

from evaluation import factorization, language, vision  # noqa: F401 - importing them registers their workloads
from evaluation.workloads import Workload, create, names

__all__ = ["Workload", "create", "names"]
