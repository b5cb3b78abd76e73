"""Weights that their module rounds in the forward pass: quantization-aware training, binary and ternary layers.

An error of a percent of such a weight is none of a percent to the network: where the weight lies near a threshold, what
it is rounded to is another value. Late in a run, when steps are short, a restore of lossy weights changes more rounded
ones than many steps do, so all of them are stored exactly. Told of are

* layers with a quantizer of their weights, as of torch.ao, torchao and Brevitas, or with any fake quantization;
* layers and parametrizations known by the name of their class, or of a class that it comes from.

Nothing of a model is called: it may count calls, draw numbers or change its state, none of which a save may do. A layer
that is taken for one by its name costs bytes alone.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Iterator

from torch import nn
from torch.nn.utils import parametrize

from dsq_ckpt.core.wrappers import strip_wrappers

_METHOD = (
    "(?:Fake)?Quant(?!il|it)(?:i[sz]e[dr]?)?|QAT|LSQ|Lsq|XNOR|Xnor|DoReFa|Binar(?:y|i[sz]e[dr]?)"
    "|Tern(?:ary|ari[sz]e[dr]?)"
)
_LAYER = re.compile(
    rf"(?:(?:{_METHOD}|Bit(?:[Nn]et)?)[\d_]*(?:Linear|Dense|Conv|Embedding)|(?:Bin|Sign|^Q)[\d_]*(?:Linear|Conv))"
    r"(?:Transpose)?(?:\d+[a-z]?)?(?:_\w*)?$"
    rf"|(?:Linear|Dense|Conv|Embedding)(?:Transpose)?(?:\dd)?(?:_?(?:{_METHOD})|_Q)$"
)
"""Names such as BitLinear, TernaryLinear, BinaryConv2d, QuantConv2d, FakeQuantizedEmbedding and LinearLSQ.

Not Linear4bit or Linear8bitLt, whose weights are whole numbers, and no networks, such as a BinaryConvClassifier.
"""
_FUNCTION = re.compile(rf"{_METHOD}|(?:Sign|Round|STE)(?![a-z])")
"""Names of parametrizations, such as Ternary, WeightQuantizer, RoundSTE and Sign."""
_QUANTIZER = re.compile("weight.*quant(?!il|it)|quant(?!il|it).*weight")


def rounding(model: nn.Module | None) -> dict[str, bool]:
    """Return whether a module of a model rounds a parameter as it uses it, by all names; nothing if none is rounded."""
    if model is None:
        return {}
    found = set[int]()
    for module in model.modules():
        if _quantizes_weights(module):
            found.update(map(id, _weights(module)))
        elif (
            isinstance(module, parametrize.ParametrizationList) and any(_is_of(one, _FUNCTION) for one in module)
        ) or any(_is_fake(one) for name, one in module.named_children() if not name.startswith("activation")):
            found.update(map(id, module.parameters(recurse=False)))
    if not found:
        return {}
    named = model.named_parameters(remove_duplicate=False)
    return {strip_wrappers(name): id(parameter) in found for name, parameter in named}


def _quantizes_weights(module: nn.Module) -> bool:
    """Return whether a layer is known by its name, or by an attribute, to quantize its weights."""
    if _is_of(module, _LAYER):
        return True
    attributes = itertools.chain(module.named_children(), vars(module).items())
    return any(_QUANTIZER.search(name) is not None and _may_quantize(one) for name, one in attributes)


def _may_quantize(attribute: object) -> bool:
    return attribute is True or (callable(attribute) and not isinstance(attribute, nn.Identity))


def _is_of(module: nn.Module, names: re.Pattern[str]) -> bool:
    """Return whether a module is of a class with such a name, or of one that comes from such a class."""
    return any(_has(names, one.__name__) for one in _classes(module))


@functools.lru_cache(1 << 10)
def _has(names: re.Pattern[str], name: str) -> bool:
    return names.search(name) is not None


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
