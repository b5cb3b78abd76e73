"""Weights that their module rounds in the forward pass: quantization-aware training, binary and ternary layers.

An error of a percent of such a weight is none of a percent to the network: where the weight lies near a threshold, what
it is rounded to is another value. Late in a run, when steps are short, a restore of lossy weights changes more rounded
ones than many steps do, so all of them are stored exactly. Told of are

* layers with a quantizer of their weights, as of torch.ao, torchao and Brevitas, or with any fake quantization;
* parameters below parametrizations of torch that leave few of their values distinct;
* layers known by the name of their class, or of a class that it comes from: what a forward pass of its own does to the
  weights cannot be seen. A layer that is taken for one by its name costs bytes alone.
"""

from __future__ import annotations

import copy
import functools
import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from dsq_ckpt.quantization.groups import unwrapped

_METHOD = "(?:Fake)?Quant(?:i[sz]ed?)?|QAT|LSQ|Lsq|XNOR|Xnor|DoReFa|Binar(?:y|i[sz]ed?)|Tern(?:ary|ari[sz]ed?)"
_LAYER = "Linear|Dense|Conv|Embed"
_NAME = re.compile(
    rf"(?:{_METHOD}|Bin|Sign|Bit(?:[Nn]et)?|Q)[\d_]*(?:{_LAYER})"
    rf"|(?:{_LAYER})(?:Transpose|ding)?(?:\dd)?_?(?:{_METHOD}|Q$)"
)
"""Names such as BitLinear, TernaryLinear, BinaryConv2d, QuantConv2d, FakeQuantizedEmbedding and LinearLSQ.

Not Linear4bit or Linear8bitLt, whose weights are whole numbers.
"""
_SEEN = 1 << 16  # elements of a parametrized weight that tell
_FEWER = 2.2  # times: a symmetric matrix has two elements of each value, and four bits some three in a group of 32


def rounding(model: nn.Module | None) -> dict[str, bool]:
    """Return whether a module of a model rounds a parameter as it uses it, by all names; nothing where none is rounded.

    Parametrizations that are not torch's own are evaluated once, on copies of all but the weights.
    """
    if model is None:
        return {}
    found, parameters = set[int](), _Parameters(model)
    for module in model.modules():
        if _quantizes_weights(module):
            found.update(map(id, _weights(module)))
        elif isinstance(module, parametrize.ParametrizationList):
            if _merges_values(module, parameters):
                found.update(map(id, module.parameters(recurse=False)))
        elif any(_is_fake(one) for name, one in module.named_children() if not name.startswith("activation")):
            found.update(map(id, module.parameters(recurse=False)))
    if not found:
        return {}
    named = model.named_parameters(remove_duplicate=False)
    return {unwrapped(name): id(parameter) in found for name, parameter in named}


def _quantizes_weights(module: nn.Module) -> bool:
    """Return whether a layer is known by its name, or by an attribute, to quantize its weights."""
    if any(_is_telling(one.__name__) for one in _classes(module)):
        return True
    attributes = itertools.chain(module.named_children(), vars(module).items())
    return any("weight" in name and "quant" in name and not _is_nothing(one) for name, one in attributes)


@functools.lru_cache(1 << 10)
def _is_telling(name: str) -> bool:
    return _NAME.search(name) is not None


def _is_nothing(attribute: object) -> bool:
    return attribute is None or attribute is False or isinstance(attribute, nn.Identity)


def _classes(module: nn.Module) -> Iterable[type]:
    """Return the classes that a module is of, up to the one that all are of."""
    return type(module).__mro__[: type(module).__mro__.index(nn.Module)]


def _is_fake(module: nn.Module) -> bool:
    return any("fakequant" in one.__name__.lower().replace("_", "") for one in _classes(module))


def _weights(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of a layer, of layers right inside it, and of its parametrizations."""
    layers = [module, *module.children()]
    if parametrize.is_parametrized(module):
        assert isinstance(module.parametrizations, nn.ModuleDict)
        layers += module.parametrizations.values()
    for layer in layers:
        yield from layer.parameters(recurse=False)


class _Parameters:
    """The parameters of a model, for copies of its modules that shall hold them themselves."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._found: dict[int, torch.Tensor] | None = None

    def memo(self, module: nn.Module) -> dict[int, Any]:
        """Return a memo for `copy.deepcopy` of a module, whose parameters are finer ones in it (see `_finer`).

        Of what is sharded it has this rank's part, for which no other rank is needed.
        """
        if self._found is None:
            self._found = {
                id(one): getattr(one, "_local_tensor", one).detach() for one in self._model.parameters()
                if not nn.parameter.is_lazy(one)
            }
        return self._found | {id(one): _finer(self._found[id(one)]) for one in module.parameters()}


def _merges_values(module: parametrize.ParametrizationList, parameters: _Parameters) -> bool:
    """Return whether parametrizations give many elements of a parameter one value; no if they cannot be evaluated.

    They may count calls, as observers and power iterations do, or draw numbers: training is to see none of that.
    """
    if any(map(_is_fake, module.modules())):
        return True
    if all(type(one).__module__.startswith("torch.nn.utils.") for one in module):
        return False
    devices = {one.get_device() for one in module.parameters() if one.is_cuda}
    try:
        with torch.no_grad(), torch.random.fork_rng(devices):
            trial = copy.deepcopy(module, parameters.memo(module))
            values = _beginning(trial())
            values = values[values != 0]  # which pruning leaves many of
            few = _distinct(values)
            if not 0 < few * _FEWER <= values.numel():
                return False
            own = [_distinct(_beginning(one)) for one in trial._parameters.values() if one is not None]
            return few * _FEWER <= max(own, default=0)
    except Exception:  # of the user's functions, or of a tensor that is not there
        return False


def _finer(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of half precision in float32, with digits behind its last: its type merges values too."""
    if tensor.dtype not in (torch.bfloat16, torch.float16):
        return tensor
    values = tensor.float()
    return values * (1 + torch.rand_like(values) * torch.finfo(tensor.dtype).eps / 2)


def _beginning(tensor: torch.Tensor) -> torch.Tensor:
    """Return about the first elements of a tensor, row by row."""
    if tensor.numel() <= _SEEN:
        return tensor.flatten()
    return tensor[: -(-len(tensor) * _SEEN // tensor.numel())].flatten()[:_SEEN]


def _distinct(values: torch.Tensor) -> int:
    return len(values.unique())
