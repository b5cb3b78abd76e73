"""Saves that no framework plans, in few words."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from dsq_ckpt.config.schema import DSQConfig
from dsq_ckpt.distributed.comm import Communicator
from dsq_ckpt.engine.collective import save_collectively
from dsq_ckpt.engine.local_state import LocalState
from dsq_ckpt.engine.options import SaveOptions
from dsq_ckpt.quantization.plan import QuantizationPlan


def save_parts(
    path: Path, state: Callable[[], LocalState], config: DSQConfig, comm: Communicator, **options: Any
) -> QuantizationPlan:
    return save_collectively(path, state, SaveOptions(config, **options), comm)
