"""Assignment of tensors to groups, which decides how they are stored.

A *kind* is the role of a tensor in training (weights, exp_avg, exp_avg_sq, momentum). A *group* is the tensors of one
kind and one layer type, which share a codebook (Inshrinkerator, section 4.2: per layer type). The following tensors are
exact: norms, biases, one-dimensional, small and non-float tensors; tensors below a key such as `state` or `optimizer`
that are neither known moments nor known to be the model's; the base points of torch's parametrizations; parameters
marked as lying on a manifold; tensors known to be frozen, or rounded by the model; and tensors whose values no training
leaves in weights (see `exact_values`). All other float tensors of two or more dimensions count as weights, buffers too,
unless rules say otherwise.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypeVar

import torch
from torch import nn

from dsq_ckpt.codebooks.update import Relative
from dsq_ckpt.config.schema import DSQConfig, QuantizeConfig, Rule, TensorConfig
from dsq_ckpt.core.tensor_subclasses import is_class_key
from dsq_ckpt.core.wrappers import strip_wrappers
from dsq_ckpt.quantization.manifolds import is_on_manifold

_T = TypeVar("_T")
QUANTIZABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
EXACT = "exact"
_MOST = 1 << 17
"""Names in a cache. A cache smaller than the names of a save, which are requested in order, would never have a hit."""
_SMALL = QuantizeConfig.model_fields["min_elements"].default

# Names of the state per parameter in optimizers of PyTorch and DeepSpeed.
_MOMENTS = {
    "exp_avg": "exp_avg",
    "exp_avg_sq": "exp_avg_sq",
    "max_exp_avg_sq": "exp_avg_sq",
    "momentum_buffer": "momentum",
}
_SECOND = {"exp_avg": "exp_avg_sq"}
"""Name of the second moment whose root divides a first moment in Adam, by the name of the first."""
_OPTIMIZER_PART = re.compile(r"state|(.*_)?(opt|optim|optimizer|adam|adamw)s?(_(state|states|dict|state_dict))?")
_MANIFOLD = "manifold"
MODEL_KEYS = {"model", "module"}
_PARAMETERS = {"weight", "bias"}
_EMBEDDING_PARTS = ("embed", "embedding", "wte", "wpe", "emb")


@dataclass(frozen=True)
class Assignment:
    """Storage of one tensor.

    Attributes:
        kind: weights, exp_avg, exp_avg_sq, momentum or exact.
        group: name of the group; its tensors share a codebook.
        config: None if the tensor is exact.
        settings: key of the entry of `groups` that applies.
        second_moment: name of the tensor whose roots are the units of the values, or None.
        by_rule: whether a rule names the group.
    """

    kind: str
    group: str
    config: TensorConfig | None
    settings: str | None = None
    second_moment: str | None = None
    by_rule: bool = False


def layer_types(model: nn.Module) -> dict[str, str]:
    """Return the layer type of every parameter, by its name in the module; that of buffers is other.

    Types are embedding, linear, conv, norm and other, and manifold for parameters that are marked so.
    """
    types = {strip_wrappers(name): "other" for name, _ in model.named_buffers(remove_duplicate=False)}
    for module_name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            layer = "embedding"
        elif isinstance(module, nn.Linear | nn.Bilinear):
            layer = "linear"
        elif isinstance(module, nn.modules.conv._ConvNd):
            layer = "conv"
        elif "norm" in type(module).__name__.lower():
            layer = "norm"
        else:
            layer = "other"
        for name, parameter in module.named_parameters(recurse=False):
            own_type = _MANIFOLD if is_on_manifold(parameter) else layer
            types[strip_wrappers(f"{module_name}.{name}" if module_name else name)] = own_type
    return types


def assign(
    fqn: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    config: QuantizeConfig,
    types: Mapping[str, str] | None = None,
    measured: bool = False,
) -> Assignment:
    """Return kind, group and storage of a tensor.

    Args:
        fqn: fully qualified name.
        shape: global shape.
        dtype: dtype of the tensor.
        config: settings of quantization.
        types: layer types by name of parameter or buffer (see `layer_types`). A name matches if the fully qualified
            name ends with it: state dicts put prefixes such as `model.` before it.
        measured: whether the tensor is a first moment whose second moment is in the same save, in the same chunks; one
            without it is stored relative to its own size.
    """
    kind, parameter = _kind(fqn, _is_model_tensor(fqn, types))
    if dtype not in QUANTIZABLE or kind == EXACT:
        return Assignment(EXACT, EXACT, None)
    rule = next((rule for rule in config.rules if fnmatchcase(fqn, rule.pattern)), None)
    if rule is not None and rule.exact:
        return Assignment(EXACT, EXACT, None)
    group = rule.group if rule is not None else None
    if group is None:
        layer = find_by_suffix(parameter, types) if types else None
        if layer == _MANIFOLD and kind == "weights":
            return Assignment(EXACT, EXACT, None)
        if layer in (None, "other", _MANIFOLD):
            layer = _layer_from_name(parameter, shape)
        one_dimensional = len([size for size in shape if size > 1]) < 2
        if layer == "norm" or parameter.endswith("bias") or (one_dimensional and layer != "flat"):
            return _assign_unquantized(kind, dtype, config)
        group = "other" if layer == "flat" else layer
    settings = group if kind == "weights" and group in config.groups else None
    if math.prod(shape) < config.min_elements:
        if math.prod(shape) >= _SMALL:  # a raised limit is meant to keep smaller tensors exact
            return Assignment(EXACT, EXACT, None, settings)
        return _assign_unquantized(kind, dtype, config, settings)
    chosen: TensorConfig = config.groups[settings] if settings is not None else getattr(config, kind)
    if chosen.method == "exact":
        return Assignment(EXACT, EXACT, None, settings)
    suffix = f"/{fqn}" if config.granularity == "tensor" else ""
    second = None
    if chosen.codebook.coordinates == "update":
        if measured:
            second = _usable_second_moment(fqn, shape, dtype, config, types)
        if second is None:
            chosen = to_relative_config(chosen)
    if chosen.codebook.coordinates != "values":
        suffix += f"/{chosen.codebook.fit}"  # its codes have another meaning than those of a parent without it
    by_rule = rule is not None and rule.group is not None
    return Assignment(kind, f"{kind}/{group}{suffix}", chosen, settings, second, by_rule)


def to_relative_config(config: TensorConfig) -> TensorConfig:
    """Return the settings of first moments without a second moment, from those of Adam's."""
    return config.model_copy(update={"codebook": Relative(error=config.codebook.update_bound)})


class Assignments:
    """Cache of assignments under a configuration and layer types, for the next save of the same tensors."""

    def __init__(self, config: QuantizeConfig, types: Mapping[str, str] | None) -> None:
        self._config = config.model_copy(deep=True)  # dicts in the caller's may change
        self._types = None if types is None else dict(types)
        self._found: dict[tuple[str, tuple[int, ...], torch.dtype, bool], Assignment] = {}

    @classmethod
    def cached(cls, config: QuantizeConfig, types: Mapping[str, str] | None) -> Assignments:
        """Return the last cache, if its configuration and types are equal to these, or a new one."""
        global _last
        cached = _last
        if cached is None or cached._config != config or cached._types != types or len(cached._found) > _MOST:
            cached = _last = cls(config, types)
        return cached

    def get(self, fqn: str, shape: Sequence[int], dtype: torch.dtype, measured: bool = False) -> Assignment:
        """Return the result of `assign`."""
        key = fqn, tuple(shape), dtype, measured
        assignment = self._found.get(key)
        if assignment is None:
            assignment = self._found[key] = assign(fqn, shape, dtype, self._config, self._types, measured)
        return assignment


_last: Assignments | None = None


def _assign_unquantized(
    kind: str, dtype: torch.dtype, config: QuantizeConfig, settings: str | None = None
) -> Assignment:
    """Assign a tensor too small or too sensitive for a codebook: weights exact, moments by `small_moments`."""
    chosen: TensorConfig = getattr(config, kind)
    exact = "exact" in (chosen.method, config.small_moments)
    if kind == "weights" or exact or dtype == torch.float64:  # bf16 does not have its range
        return Assignment(EXACT, EXACT, None, settings)
    return Assignment(kind, f"{kind}/small", chosen.model_copy(update={"method": "bf16"}), settings)


def _usable_second_moment(
    fqn: str, shape: Sequence[int], dtype: torch.dtype, config: QuantizeConfig, types: Mapping[str, str] | None
) -> str | None:
    """Return the name of the second moment of a first one, if it is stored by its octaves or exactly."""
    name = second_moment_of(fqn)
    if name is None:
        return None
    chosen = assign(name, shape, dtype, config, types).config
    is_usable = chosen is None or (chosen.method == "quantize" and chosen.codebook.coordinates == "octaves")
    return name if is_usable else None


def second_moment_of(fqn: str) -> str | None:
    """Return the name of the second moment of a first one; None for other tensors."""
    parent, _, leaf = fqn.rpartition(".")
    return f"{parent}.{_SECOND[leaf]}" if leaf in _SECOND else None


@functools.lru_cache(_MOST)
def optimizer_prefix(fqn: str) -> str:
    """Return the beginning of a name up to its first key that is an optimizer's; empty if there is none."""
    parts = fqn.split(".")
    ends = (end for end, key in enumerate(parts, 1) if _is_state_key(key))
    return ".".join(parts[: next(ends, 0)])


def _is_state_key(key: str) -> bool:
    return is_optimizer_key(key) or key.lower() in _MOMENTS


def is_optimizer_key(key: str) -> bool:
    """Return whether tensors below a key are taken for optimizer state."""
    return _OPTIMIZER_PART.fullmatch(key.lower()) is not None


def find_unused_rules(rules: Sequence[Rule], names: Iterable[str]) -> dict[str, str | None]:
    """Return the patterns of rules that apply to none of these tensors.

    Returns:
        By pattern, the pattern of an earlier rule that takes precedence for a matching tensor; None if no tensor
            matches.
    """
    idle: dict[str, str | None] = dict.fromkeys(rule.pattern for rule in rules)
    decided: set[str] = set()
    for name in names:
        matching = [rule for rule in rules if fnmatchcase(name, rule.pattern)]
        for rule in matching[1:]:
            # A rule is hidden only if it would store the tensor differently.
            if (rule.exact, rule.group) == (matching[0].exact, matching[0].group):
                decided.add(rule.pattern)
            else:
                idle[rule.pattern] = matching[0].pattern
        decided |= {rule.pattern for rule in matching[:1]}
    return {pattern: earlier for pattern, earlier in idle.items() if pattern not in decided}


def is_inner_tensor(fqn: str) -> bool:
    """Return whether a name is that of an inner tensor of a tensor subclass, which is exact."""
    return any(map(is_class_key, fqn.split(".")))


@functools.lru_cache(_MOST)
def _kind(fqn: str, in_model: bool = False) -> tuple[str, str]:
    """Return (kind, name of the parameter): `optimizer.state.layer.weight.exp_avg` -> (exp_avg, ...layer.weight).

    Args:
        fqn: fully qualified name.
        in_model: whether the tensor is known to be the model's, whose modules may have names of moments and optimizers.
    """
    parent, _, leaf = fqn.rpartition(".")
    if is_inner_tensor(fqn):
        return EXACT, fqn
    parts = fqn.lower().split(".")
    if leaf in _MOMENTS:
        of_optimizers = any(map(is_optimizer_key, parts))
        # `model.layer.weight.exp_avg` is a moment, in a state dict with moments beside the weights.
        is_in_model = parts[0] in MODEL_KEYS and len(parts) > 1 and parts[-2] not in _PARAMETERS
        if not in_model and (of_optimizers or not is_in_model):
            return _MOMENTS[leaf], parent
        parts.pop()
    if leaf == "base" and "parametrizations" in parts:
        return EXACT, fqn  # a point of torch's `orthogonal`: no step would bring it back to its manifold
    if not in_model and any(map(_is_state_key, parts)):
        return EXACT, fqn  # state of an unknown optimizer: no error bound is known for it
    return "weights", fqn


def _is_model_tensor(fqn: str, types: Mapping[str, str] | None) -> bool:
    """Return whether a tensor with the name of optimizer state is a parameter or buffer of the model."""
    if not types or _kind(fqn)[0] == "weights":
        return False
    parts = strip_wrappers(fqn).split(".")
    for start in range(len(parts)):
        if ".".join(parts[start:]) in types:
            return not any(map(_is_state_key, parts[:start]))
        if ".".join(parts[start:-1]) in types:
            return False
    return False


def kind_of(fqn: str, types: Mapping[str, str] | None = None) -> str:
    """Return the kind of a tensor by its name and the layer types of the model: weights, a moment's kind, or exact."""
    return _kind(fqn, _is_model_tensor(fqn, types))[0]


def parameter_of(fqn: str) -> str:
    """Return the name of a parameter, from its own name or from that of its optimizer state."""
    kind, name = _kind(fqn)
    if kind != "weights":
        name = f".{name}".partition(".state.")[2] or name
    return strip_wrappers(name)


def is_lossy(config: DSQConfig) -> bool:
    """Return whether values from a checkpoint under this configuration may differ from the saved ones."""
    quantize = config.quantize
    kinds = [quantize.weights, quantize.exp_avg, quantize.exp_avg_sq, quantize.momentum, *quantize.groups.values()]
    return any(kind.method != "exact" for kind in kinds)


def group_config(group: str, config: QuantizeConfig) -> TensorConfig:
    """Return the settings of a group, named as by `assign`, under another configuration."""
    kind, _, layer = group.partition("/")
    chosen: TensorConfig = getattr(config, kind)
    return config.groups.get(layer.partition("/")[0], chosen) if kind == "weights" else chosen


def find_by_suffix(fqn: str, tree: Mapping[str, _T]) -> _T | None:
    """Return the value of a mapping for the longest suffix of a fully qualified name that is a key; None if there is
    none.
    """
    tail = strip_wrappers(fqn)
    while tail:
        if tail in tree:
            return tree[tail]
        tail = tail.partition(".")[2]
    return None


def _layer_from_name(parameter: str, shape: Sequence[int]) -> str:
    lowered = parameter.lower()
    parts = lowered.replace("_", ".").split(".")
    if any("norm" in part or part in ("ln", "bn") for part in parts):
        return "norm"
    if "flat" in parts:
        return "flat"  # FSDP1's FlatParameter: many layers in one dimension
    if len(shape) == 2 and any(part in _EMBEDDING_PARTS or "embed" in part for part in parts):
        return "embedding"
    if len(shape) == 2:
        return "linear"
    return "conv" if len(shape) in (3, 4, 5) else "other"
