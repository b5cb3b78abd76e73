"""Layout of a save: its lossy tensors by group, and the settings fixed by its parent."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from dsq_ckpt.config.schema import TensorConfig
from dsq_ckpt.errors import ConfigError
from dsq_ckpt.quantization.codebook import Codebook
from dsq_ckpt.quantization.frozen_tensors import FrozenTensors
from dsq_ckpt.quantization.groups import to_relative_config
from dsq_ckpt.quantization.model_tensors import find_model_tensors
from dsq_ckpt.quantization.update_rules import BETAS, find_extra_state, find_weight_bound_state, with_finer_error

_BY_UPDATE, _BY_SIZE = "/update", "/relative"
"""Suffixes of groups whose first moments are in units of Adam's update, and of their own size."""
MEASURE_ONLY = ""
"""Group of chunks that are only measured: optimizer state that shows the size of gradients."""
GRADIENT_PREFIX = "gradient of "
"""Prefix of a weight's name, for its averaged gradient."""


@dataclass(frozen=True)
class Fractions:
    """Fractions of elements that some configuration may prune or protect by sensitivity."""

    prune: tuple[float, ...] = ()
    protect: tuple[float, ...] = ()


@dataclass(frozen=True)
class Layout:
    """Lossy tensors of a save and their groups, in one order: the agreement of all ranks before they merge sketches.

    Attributes:
        tensors: group of every lossy tensor, by fully qualified name.
        groups: configuration of every group.
        state: kind (exp_avg_sq, momentum) of optimizer tensors that show the size of gradients.
        has_gradients: whether chunks of weights have averaged gradients.
        fractions: fractions that a search will use; those of the configuration itself may be omitted.
        residual: whether differences to the parent's values are coded; without a parent, chunks are exact.
        settings: entries of `quantize.groups` that apply to a tensor.
        shapes: shapes of all whole tensors, lossy or not, to match state with weights.
        objects: names from `find_optimizer_objects`.
        frozen: weights of the model that are frozen and do not change, by fully qualified name. These are exact, so
            they are not among `tensors` once all ranks have agreed.
        known_updates: first moments that are quantized for an update like Adam's or SGD's, without a rule for them.
        rounded_moments: `exp_avg` among them beside which the optimizer keeps state that is not Adam's, with the names
            of that state, once all ranks have agreed. Their update is not known, and they are rounded to bf16. Groups
            with such momentum are quantized more finely.
        unknown_updates: state prefixes of optimizers whose settings are not SGD's, so that the update is not known.
        prenormalized: state prefixes of optimizers whose update is `exp_avg` itself, which is therefore quantized
            relative to its own size, even beside second moments.
        rule_weights: weights that are quantized by a rule.
        weight_bound_state: state of L-BFGS or Rprop, once all ranks have agreed. It holds differences of gradients, or
            steps that have shrunk, and is valid only for the exact weights at which it was computed. So weights are
            exact beside it, except `rule_weights`.
        rounded_weights: weights that a module of the model rounds as it uses them, except `rule_weights`. These are
            exact, so they are not among `tensors` once all ranks have agreed; frozen ones are omitted here.
        bf16_weights: weights that are rounded to bf16, except those that are exact for one of these reasons once all
            ranks have agreed.
    """

    tensors: dict[str, str]
    groups: dict[str, TensorConfig]
    state: dict[str, str] = field(default_factory=dict)
    has_gradients: bool = False
    fractions: Fractions = Fractions()
    residual: bool = False
    settings: frozenset[str] = frozenset()
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    frozen: FrozenTensors = field(default_factory=FrozenTensors)
    known_updates: frozenset[str] = frozenset()
    rounded_moments: dict[str, set[str]] = field(default_factory=dict)
    unknown_updates: frozenset[str] = frozenset()
    prenormalized: frozenset[str] = frozenset()
    rule_weights: frozenset[str] = frozenset()
    weight_bound_state: frozenset[str] = frozenset()
    rounded_weights: frozenset[str] = frozenset()
    objects: frozenset[str] = frozenset()
    bf16_weights: frozenset[str] = frozenset()

    @classmethod
    def union(cls, parts: Iterable[Layout]) -> Layout:
        """Return one sorted layout from the layouts of all ranks, or from an earlier agreement.

        Raises:
            ConfigError: ranks save with different configurations.
        """
        parts = list(parts)
        tensors: dict[str, str] = {}
        groups: dict[str, TensorConfig] = {}
        state: dict[str, str] = {}
        for part in parts:
            for name, group in part.tensors.items():
                if tensors.get(name, group).endswith(_BY_UPDATE) != group.endswith(_BY_UPDATE):
                    raise ConfigError(
                        f"'{name}' lies beside its second moment on some ranks only: save both in one layout, or set "
                        "quantize.exp_avg.method to exact"
                    )
            tensors.update(part.tensors)
            state.update(part.state)
            for name, config in part.groups.items():
                if groups.setdefault(name, config) != config:
                    raise ConfigError(f"ranks save with different configurations: group '{name}' differs")
        frozen = FrozenTensors.merge(part.frozen for part in parts)
        shapes = {name: shape for part in parts for name, shape in part.shapes.items()}
        known_updates = frozenset[str]().union(*(part.known_updates for part in parts))
        objects = frozenset[str]().union(*(part.objects for part in parts))
        large = [name for name, shape in shapes.items() if known_updates and math.prod(shape) > 1]
        extra = find_extra_state([*large, *objects] if known_updates else [])
        unlike = frozenset[str]().union(*(part.unknown_updates for part in parts))
        momentum = {name for name in known_updates if tensors.get(name, "").startswith("momentum/")}
        rounded = {
            name: names for name, names in extra.items() if name in known_updates and name not in momentum
            and (names != {BETAS} or tensors.get(name, "").endswith(_BY_UPDATE))
        }
        fine = {tensors[name] for name in momentum if name in extra or name.startswith(tuple(unlike))}
        divided = frozenset[str]().union(*(part.prenormalized for part in parts))
        prefixes = tuple(divided)
        for name in known_updates if divided else ():
            group = tensors.get(name, "")
            if group.endswith(_BY_UPDATE) and name.startswith(prefixes):
                tensors[name] = group.removesuffix(_BY_UPDATE) + _BY_SIZE
                groups[tensors[name]] = to_relative_config(groups[group])
        ruled = frozenset[str]().union(*(part.rule_weights for part in parts))
        exact, agreed = set[str](), any(part.weight_bound_state for part in parts)
        halved = frozenset[str]().union(*(part.bf16_weights for part in parts))
        if fitted_to := find_weight_bound_state(shapes):
            exact = {*halved, *(name for name, group in tensors.items() if group.startswith("weights/"))} - ruled
        rounding = frozenset(name for part in parts for name in part.rounded_weights if name not in frozen)
        tensors = {
            name: group for name, group in tensors.items()
            if name not in frozen and name not in rounded and name not in exact and name not in rounding
        }
        used = set(tensors.values())
        groups = {
            name: with_finer_error(config) if name in fine else config
            for name, config in groups.items() if name in used
        }
        averaged = any(part.has_gradients for part in parts)
        fractions = parts[0].fractions if parts else Fractions()
        if len({part.residual for part in parts}) > 1:
            raise ConfigError("ranks save with different configurations: delta.against differs")
        return cls(dict(sorted(tensors.items())), dict(sorted(groups.items())), dict(sorted(state.items())), averaged,
                   fractions, any(part.residual for part in parts),
                   frozenset().union(*(part.settings for part in parts)),
                   shapes, frozen, known_updates, rounded, unlike, divided, ruled,
                   fitted_to if exact or agreed else frozenset(), rounding, objects,
                   frozenset(name for name in halved - exact - rounding if name not in frozen))

    def rank_part(self) -> Layout:
        """Return the part that is known to one rank alone: its frozen and rounded weights, and objects of its
        optimizers.
        """
        return Layout(
            {}, {}, fractions=self.fractions, residual=self.residual, frozen=self.frozen,
            rounded_weights=self.rounded_weights, objects=self.objects,
        )

    def weights(self) -> frozenset[str]:
        """Return the names of lossy weights."""
        return frozenset(fqn for fqn, group in self.tensors.items() if group.startswith("weights/"))

    @cached_property
    def model_tensors(self) -> frozenset[str]:
        """Names of parameters and buffers of models, found by all names of the save."""
        return frozenset(find_model_tensors(self.shapes, self.weights()))

    def octave_names(self) -> list[str]:
        """Return the names of all tensors and gauges whose octaves are counted."""
        averages = [GRADIENT_PREFIX + fqn for fqn, group in self.tensors.items() if group.startswith("weights/")]
        return list(dict.fromkeys([*self.tensors, *self.state, *(averages if self.has_gradients else ())]))

    def octave_groups(self) -> set[str]:
        """Return the groups coded by octave; their octaves are counted without the frame of their chunks."""
        return {group for group, config in self.groups.items() if config.codebook.coordinates == "octaves"}

    def sensitivity_groups(self) -> list[str]:
        """Return the groups whose elements are also pruned and protected by sensitivity."""
        return [
            group for group, config in self.groups.items() if self.has_gradients and group.startswith("weights/")
            and config.codebook.weighing is not None
        ]


@dataclass(frozen=True)
class ParentModel:
    """Settings that a child inherits from its parent checkpoint.

    Attributes:
        books: codebooks by group.
        exponents: log2 of the factor taken out of a tensor, by tensor.
        depth: number of deltas between the parent and its keyframe.
    """

    books: dict[str, Codebook]
    exponents: dict[str, float]
    depth: int = 0

    @classmethod
    def from_index(cls, index: Mapping[str, Any], depth: int) -> ParentModel:
        """Return the model in the index of a checkpoint, as it was read or is written."""
        books = {name: Codebook.from_json(tree) for name, tree in index["codebooks"].items()}
        return cls(books, dict(index["exponents"]), depth)

    def restrict_to(self, layout: Layout) -> ParentModel:
        """Return the model without groups that change between linear and log: a linear window misses small values."""
        return replace(self, books={
            group: book for group, book in self.books.items()
            if group in layout.groups and (book.domain == "log") == layout.groups[group].codebook.logarithmic
        })
