"""Refresh of a module's parameters from changed master weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def create_refresh(engine: Any) -> Callable[[], None]:
    """Return a collective function that casts an engine's masters to its module's parameters."""

    @torch.no_grad()
    def refresh() -> None:
        optimizer = engine.optimizer
        if hasattr(optimizer, "update_lp_params"):  # ZeRO 1 and 2, BF16_Optimizer
            optimizer.update_lp_params()
        elif hasattr(optimizer, "fp32_partitioned_groups_flat"):  # ZeRO 3, as at the end of its step
            optimizer._partition_all_parameters()
            for number in range(len(optimizer.fp32_partitioned_groups_flat)):
                optimizer._reassign_or_swap_out_partitioned_parameters(number)
            if optimizer.persistent_parameters:
                optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)
            optimizer.invalidate_secondary_tensor()
        elif hasattr(optimizer, "fp32_groups_flat"):  # FP16_Optimizer, whose parameters are views of the flat group
            for parameter, master in zip(optimizer.fp16_groups_flat, optimizer.fp32_groups_flat, strict=True):
                parameter.data.copy_(master.data)
        elif hasattr(optimizer, "fp32_groups"):  # FP16_UnfusedOptimizer
            for parameters, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
                for parameter, master in zip(parameters, masters, strict=True):
                    parameter.data.copy_(master.data)

    return refresh
