"""The layout of a save: its lossy tensors by group, and the settings that its parent fixes."""

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
from dsq_ckpt.quantization.groups import by_own_size
from dsq_ckpt.quantization.model_tensors import find_model_tensors
from dsq_ckpt.quantization.update_rules import find_extra_state, find_weight_bound_state, with_finer_error

_BY_UPDATE, _BY_SIZE = "/update", "/relative"
"""Ends of the names of groups whose first moments are in units of Adam's update, and of their own size."""
MEASURED = ""
"""Group of chunks that are only measured: optimizer state from which the size of gradients is known."""
GRADIENT = "gradient of "
"""Prefix of a weight's name, for its averaged gradient."""


@dataclass(frozen=True)
class Fractions:
    """Fractions of elements that some configuration may prune or protect by sensitivity."""

    prune: tuple[float, ...] = ()
    protect: tuple[float, ...] = ()


@dataclass(frozen=True)
class Layout:
    """The lossy tensors of a save and their groups, in one order: what all ranks agree on before they merge.

    Attributes:
        tensors: group of every lossy tensor, by fully qualified name.
        groups: configuration of every group.
        state: kind (exp_avg_sq, momentum) of the optimizer's tensors from which the size of gradients is known.
        averaged: whether chunks of weights have averaged gradients.
        fractions: fractions that a search will ask for; those of the configuration itself need not be named.
        residual: whether differences to the parent's values are coded; without a parent, chunks are exact.
        settings: entries of `quantize.groups` that apply to a tensor.
        shapes: shapes of all whole tensors, lossy or not, by which a state is recognised.
        objects: what optimizers keep that is no tensor, and more than a setting (`objects_of_optimizers`).
        frozen: weights of the model that are frozen and stay as they are, by fully qualified name; these are exact, and
            so are not among `tensors` once all ranks have agreed.
        usual: first moments that are quantized for an update like Adam's or SGD's, and no rule asks for it.
        rounded: `exp_avg` among them beside which the optimizer keeps state that is none of Adam's, with the names of
            it, once all ranks have agreed: their update is not known, and they are rounded to bf16. Groups with such
            momentum are quantized more finely.
        unlike: prefixes of the state of optimizers whose settings are not SGD's, so that the update is not known.
        divided: prefixes of the state of optimizers whose update is `exp_avg` itself, which is so quantized by its own
            size, though there are second moments beside it.
        ruled: weights that are quantized as a rule asks for.
        fitted_to: state of L-BFGS or Rprop, once all ranks have agreed. It holds differences of gradients, or steps
            that have shrunk, which are of use at the very weights that they were made at, so weights are exact beside
            it, but for those that are `ruled`.
        rounding: weights that a module of the model rounds as it uses them, without those that are `ruled`; these are
            exact, and so are not among `tensors` once all ranks have agreed, nor frozen ones here.
    """

    tensors: dict[str, str]
    groups: dict[str, TensorConfig]
    state: dict[str, str] = field(default_factory=dict)
    averaged: bool = False
    fractions: Fractions = Fractions()
    residual: bool = False
    settings: frozenset[str] = frozenset()
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    frozen: FrozenTensors = field(default_factory=FrozenTensors)
    usual: frozenset[str] = frozenset()
    rounded: dict[str, set[str]] = field(default_factory=dict)
    unlike: frozenset[str] = frozenset()
    divided: frozenset[str] = frozenset()
    ruled: frozenset[str] = frozenset()
    fitted_to: frozenset[str] = frozenset()
    rounding: frozenset[str] = frozenset()
    objects: frozenset[str] = frozenset()

    @classmethod
    def union(cls, parts: Iterable[Layout]) -> Layout:
        """Return one layout, sorted, from the layouts of all ranks, or the one that they have agreed on before.

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
        usual = frozenset[str]().union(*(part.usual for part in parts))
        objects = frozenset[str]().union(*(part.objects for part in parts))
        large = [name for name, shape in shapes.items() if usual and math.prod(shape) > 1]
        beside = find_extra_state([*large, *objects] if usual else [])
        unlike = frozenset[str]().union(*(part.unlike for part in parts))
        momentum = {name for name in usual if tensors.get(name, "").startswith("momentum/")}
        rounded = {name: names for name, names in beside.items() if name in usual and name not in momentum}
        fine = {tensors[name] for name in momentum if name in beside or name.startswith(tuple(unlike))}
        divided = frozenset[str]().union(*(part.divided for part in parts))
        prefixes = tuple(divided)
        for name in usual if divided else ():
            group = tensors.get(name, "")
            if group.endswith(_BY_UPDATE) and name.startswith(prefixes):
                tensors[name] = group.removesuffix(_BY_UPDATE) + _BY_SIZE
                groups[tensors[name]] = by_own_size(groups[group])
        ruled = frozenset[str]().union(*(part.ruled for part in parts))
        exact, agreed = set[str](), any(part.fitted_to for part in parts)
        if fitted_to := find_weight_bound_state(shapes):
            exact = {name for name, group in tensors.items() if group.startswith("weights/")} - ruled
        rounding = frozenset(name for part in parts for name in part.rounding if name not in frozen)
        tensors = {
            name: group for name, group in tensors.items()
            if name not in frozen and name not in rounded and name not in exact and name not in rounding
        }
        used = set(tensors.values())
        groups = {
            name: with_finer_error(config) if name in fine else config
            for name, config in groups.items() if name in used
        }
        averaged = any(part.averaged for part in parts)
        fractions = parts[0].fractions if parts else Fractions()
        if len({part.residual for part in parts}) > 1:
            raise ConfigError("ranks save with different configurations: delta.against differs")
        return cls(dict(sorted(tensors.items())), dict(sorted(groups.items())), dict(sorted(state.items())), averaged,
                   fractions, any(part.residual for part in parts),
                   frozenset().union(*(part.settings for part in parts)),
                   shapes, frozen, usual, rounded, unlike, divided, ruled,
                   fitted_to if exact or agreed else frozenset(), rounding, objects)

    def of_model(self) -> Layout:
        """Return what a rank alone knows: frozen and rounded weights of its model, and objects of its optimizers."""
        return Layout(
            {}, {}, fractions=self.fractions, residual=self.residual, frozen=self.frozen, rounding=self.rounding,
            objects=self.objects,
        )

    def weights(self) -> frozenset[str]:
        """Return the names of lossy weights."""
        return frozenset(fqn for fqn, group in self.tensors.items() if group.startswith("weights/"))

    @cached_property
    def of_models(self) -> frozenset[str]:
        """The names of parameters and buffers of models, told by all names of the save."""
        return frozenset(find_model_tensors(self.shapes, self.weights()))

    def rows(self) -> list[str]:
        """Return the names of all tensors and gauges whose octaves are counted."""
        averages = [GRADIENT + fqn for fqn, group in self.tensors.items() if group.startswith("weights/")]
        return list(dict.fromkeys([*self.tensors, *self.state, *(averages if self.averaged else ())]))

    def octaves(self) -> set[str]:
        """Return the groups coded by octave; their octaves are counted without the frame of their chunks."""
        return {group for group, config in self.groups.items() if config.codebook.coordinates == "octaves"}

    def weighed(self) -> list[str]:
        """Return the groups whose elements are pruned and protected by sensitivity too."""
        return [
            group for group, config in self.groups.items() if self.averaged and group.startswith("weights/")
            and config.codebook.weighing is not None
        ]


@dataclass(frozen=True)
class ParentModel:
    """The settings that a child takes over from its parent checkpoint.

    Attributes:
        books: codebooks by group.
        exponents: log2 of the factor taken out of a tensor, by tensor.
        depth: number of deltas between the parent and its keyframe.
    """

    books: dict[str, Codebook]
    exponents: dict[str, float]
    depth: int = 0

    @classmethod
    def of_index(cls, index: Mapping[str, Any], depth: int) -> ParentModel:
        """Return the model that the index of a checkpoint tells, as it was read or is written."""
        books = {name: Codebook.from_json(tree) for name, tree in index["codebooks"].items()}
        return cls(books, dict(index["exponents"]), depth)

    def usable_for(self, layout: Layout) -> ParentModel:
        """Return the model without groups that change between linear and log: a linear window misses small values."""
        return replace(self, books={
            group: book for group, book in self.books.items()
            if group in layout.groups and (book.domain == "log") == layout.groups[group].codebook.logarithmic
        })
