"""Find weights that their module rounds in the forward pass: quantization-aware training, binary and ternary layers.

An error of a percent of such a weight is not one of a percent to the network: near a threshold, it changes the rounded
value. Late in a run, when steps are short, a restore of lossy weights changes more rounded weights than many steps do,
so all of them are stored exactly. The following modules are recognized:

* layers with a quantizer of their weights, as of torch.ao, torchao and Brevitas, or with any fake quantization;
* layers and parametrizations with a known class name, or whose base class has one.

Parameters of a tensor subclass with a known name are recognized too, whatever their module.

No code of the model is run: it may count calls, draw random numbers or change its state, which no save may do. A layer
that is recognized by mistake costs only bytes.
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

Not Linear4bit or Linear8bitLt, whose weights are integers, and not networks such as a BinaryConvClassifier.
"""
_FUNCTION = re.compile(rf"{_METHOD}|(?:Sign|Round|STE)(?![a-z])")
"""Names of parametrizations, such as Ternary, WeightQuantizer, RoundSTE and Sign."""
_TENSOR = re.compile(
    r"(?:FakeQuant(?:i[sz]e[dr]?)?|QAT|Bit(?:[Nn]et|Linear)|Binar(?:y|i[sz]e[dr]?)|Tern(?:ary|ari[sz]e[dr]?))(?![a-z])"
    r"(?!\w*Packed)\w*(?:Weight|Tensor|Parameter)$"
)
"""Names of tensor subclasses, such as BitNetTrainingLinearWeight of torchao, whose operations round the weights.

Not Int8MixedPrecisionTrainingLinearWeight: its rounding to 8 bits has steps of the size of a restore's errors.
"""
_QUANTIZER = re.compile("weight.*quant(?!il|it)|quant(?!il|it).*weight")


def find_rounded_weights(model: nn.Module | None) -> dict[str, bool]:
    """Return, for each name of a parameter, whether a module of the model rounds it; empty if none is rounded."""
    if model is None:
        return {}
    weights = set[int]()
    for module in model.modules():
        if _quantizes_weights(module):
            weights.update(map(id, _layer_parameters(module)))
        elif (
            isinstance(module, parametrize.ParametrizationList)
            and any(_has_class_name(parametrization, _FUNCTION) for parametrization in module)
        ) or any(
            _is_fake_quantizer(child) for name, child in module.named_children() if not name.startswith("activation")
        ):
            weights.update(map(id, module.parameters(recurse=False)))
    weights.update(id(parameter) for parameter in model.parameters() if _rounds_itself(parameter))
    if not weights:
        return {}
    pairs = model.named_parameters(remove_duplicate=False)
    return {strip_wrappers(name): id(parameter) in weights for name, parameter in pairs}


def _quantizes_weights(module: nn.Module) -> bool:
    """Return whether a layer quantizes its weights, by the name of its class or by an attribute."""
    if _has_class_name(module, _LAYER):
        return True
    attributes = itertools.chain(module.named_children(), vars(module).items())
    return any(_QUANTIZER.search(name) is not None and _may_quantize(attribute) for name, attribute in attributes)


def _rounds_itself(parameter: nn.Parameter) -> bool:
    """Return whether a parameter is of a tensor subclass that is rounded when it is used, also within a DTensor."""
    kind = type(getattr(parameter, "_local_tensor", parameter))
    return any(_matches(_TENSOR, base.__name__) for base in kind.__mro__)


def _may_quantize(attribute: object) -> bool:
    return attribute is True or (callable(attribute) and not isinstance(attribute, nn.Identity))


def _has_class_name(module: nn.Module, names: re.Pattern[str]) -> bool:
    """Return whether the class of a module, or a base class, has a matching name."""
    return any(_matches(names, cls.__name__) for cls in _module_classes(module))


@functools.lru_cache(1 << 10)
def _matches(names: re.Pattern[str], name: str) -> bool:
    return names.search(name) is not None


def _module_classes(module: nn.Module) -> Iterable[type]:
    """Return the classes of a module in method resolution order, up to `nn.Module`."""
    return type(module).__mro__[: type(module).__mro__.index(nn.Module)]


def _is_fake_quantizer(module: nn.Module) -> bool:
    return any("fakequant" in cls.__name__.lower().replace("_", "") for cls in _module_classes(module))


def _layer_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of a layer, of its direct children, and of its parametrizations."""
    layers = [module, *module.children()]
    if parametrize.is_parametrized(module):
        assert isinstance(module.parametrizations, nn.ModuleDict)
        layers += module.parametrizations.values()
    for layer in layers:
        yield from layer.parameters(recurse=False)
