"""`SaveOptions`: the arguments of a save."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from dsq_ckpt.config.schema import DSQConfig
from dsq_ckpt.engine.history import ParentRef, SaveHistory, default_history
from dsq_ckpt.engine.result import OnSave
from dsq_ckpt.quantization.frozen_tensors import FrozenTensors
from dsq_ckpt.quantization.layout import Fractions
from dsq_ckpt.quantization.plan import ConfigPolicy, plan_as_configured


@dataclass(frozen=True)
class CompressorInputs:
    """Arguments of a save that `Compressor` makes; the defaults are those of a save without one.

    Attributes:
        policy: chooses the configuration when the global sketch is known.
        gradients: averaged gradients of local shards, by parameter name, float32 on the CPU.
        fractions: fractions that the policy may prune and protect by sensitivity.
        excluded: checksums of weights that are left out of the checkpoint, by name; None: all are saved.
    """

    policy: ConfigPolicy = plan_as_configured
    gradients: Mapping[str, torch.Tensor] = field(default_factory=dict)
    fractions: Fractions = field(default_factory=Fractions)
    excluded: Mapping[str, str] | None = None


@dataclass(frozen=True)
class SaveOptions:
    """The arguments of a save, except its path and the state; see `DSQStorageWriter`.

    Attributes:
        config: the configuration, equal on all ranks except for the keys that `consistency` exempts.
        parent: "auto" (the last checkpoint of this state in `history`), None (a keyframe) or a checkpoint's path.
        overwrite: whether to replace a complete checkpoint.
        pinned: whether to keep its refinement layer for good.
        layer_types: layer types by tensor name; None: they are inferred from names and shapes.
        frozen: tensors of the model that training does not change, by their names in the module.
        rounding: whether a module of the model rounds a parameter in its forward pass, by name; see `rounding`.
        policy: chooses the configuration from the global sketch.
        fractions: fractions that the policy may prune and protect by sensitivity.
        history: earlier checkpoints that the save may continue.
        after: finds the previous checkpoint if `history` has none; called on the coordinator.
        on_save: called with the `SaveResult` once the checkpoint is committed, on the coordinator.
        excluded: checksums of weights that are left out of the checkpoint, for the manifest; None: all are saved.
    """

    config: DSQConfig
    parent: str | os.PathLike[str] | None = "auto"
    overwrite: bool = False
    pinned: bool = False
    layer_types: Mapping[str, str] | None = None
    frozen: FrozenTensors = field(default_factory=FrozenTensors)
    rounding: Mapping[str, bool] = field(default_factory=dict)
    policy: ConfigPolicy = plan_as_configured
    fractions: Fractions = field(default_factory=Fractions)
    history: SaveHistory = field(default_factory=default_history)
    after: Callable[[], ParentRef | None] | None = None
    on_save: OnSave | None = None
    excluded: dict[str, str] | None = None
