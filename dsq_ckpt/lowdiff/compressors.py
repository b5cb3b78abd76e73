"""Gradient compressors by name: `compressor("topk:0.01")`.

====================  ==============================================================================================
``topk:RATIO``        the largest RATIO of each gradient's elements, 0 < RATIO <= 1, default 0.01
``kmeans:LEVELS``     one byte per element, a code of LEVELS k-means levels, 2..256, default 16
``fp16``, ``bf16``    averaging in 16 bits
``none``              no compression: DDP averages as usual
====================  ==============================================================================================

The first two use error feedback, unless ``,feedback=off`` follows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from difflib import get_close_matches
from typing import ClassVar

from torch import nn

from dsq_ckpt.errors import ConfigError
from dsq_ckpt.lowdiff.contract import GradientCompressor, GradientInfo
from dsq_ckpt.lowdiff.quantized import KMeans
from dsq_ckpt.lowdiff.rounding import Bf16, Fp16
from dsq_ckpt.lowdiff.topk import TopK

__all__ = ["Bf16", "Fp16", "GradientCompressor", "GradientInfo", "KMeans", "TopK", "Uncompressed", "compressor"]

_CLOSE = 0.5  # names are short: one wrong letter of four is far


class Uncompressed(GradientCompressor):
    """A compressor that does not change gradients, and has no information about them."""

    name: ClassVar[str] = "none"

    def __init__(self) -> None:
        super().__init__(self.name)

    def attach(self, model: nn.Module) -> None:
        """Do nothing."""

    def detach(self) -> None:
        """Do nothing."""

    def take(self) -> dict[nn.Parameter, GradientInfo]:
        """Return an empty dictionary."""
        return {}


def compressor(spec: str | GradientCompressor | None) -> GradientCompressor:
    """Create a compressor from its spec, such as "topk:0.01" or "topk:0.01,feedback=off".

    Args:
        spec: kind, argument and options of the table in the module's docstring. A compressor is returned unchanged;
            None means "none".

    Raises:
        ConfigError: the spec is invalid; the message names every problem.
    """
    if isinstance(spec, GradientCompressor):
        return spec
    if spec is None:
        return Uncompressed()
    if not isinstance(spec, str):
        raise ConfigError(f"compressor is {spec!r}, expected a string such as 'topk:0.01'")
    wrong: list[str] = []
    head, *options = (part.strip() for part in spec.lower().split(","))
    kind, colon, argument = head.partition(":")
    make = _KINDS.get(kind)
    if make is None:
        wrong.append(f"there is no '{kind}', expected {', '.join(_KINDS)}{_hint(kind, list(_KINDS))}")
    feedback = _feedback(options, make is None or kind in _FED_BACK, kind, wrong)
    if colon and not argument:
        wrong.append("there is nothing after the colon")
    made = Uncompressed() if make is None else make(argument, feedback, wrong)
    if wrong:
        raise ConfigError(f"compressor '{spec}': {'; '.join(wrong)}")
    return made


Maker = Callable[[str, bool, list[str]], GradientCompressor]


def _topk(argument: str, feedback: bool, wrong: list[str]) -> GradientCompressor:
    try:
        ratio = float(argument or 0.01)
    except ValueError:
        ratio = math.nan
    if not 0 < ratio <= 1:
        wrong.append(f"the ratio is '{argument}', expected a number above 0 and up to 1")
    return TopK(ratio, feedback)


def _kmeans(argument: str, feedback: bool, wrong: list[str]) -> GradientCompressor:
    levels = int(argument or 16) if argument.isdecimal() or not argument else 0
    if not 2 <= levels <= 256:
        wrong.append(f"the number of levels is '{argument}', expected an integer from 2 to 256")
    return KMeans(levels, feedback)


def _plain(make: Callable[[], GradientCompressor]) -> Maker:
    def without_argument(argument: str, feedback: bool, wrong: list[str]) -> GradientCompressor:
        made = make()
        if argument:
            wrong.append(f"'{made.name}' takes no argument, found '{argument}'")
        return made

    return without_argument


_FED_BACK = ("topk", "kmeans")
_KINDS: dict[str, Maker] = {
    "topk": _topk, "kmeans": _kmeans, "fp16": _plain(Fp16), "bf16": _plain(Bf16), "none": _plain(Uncompressed),
}


def _feedback(options: list[str], known: bool, kind: str, wrong: list[str]) -> bool:
    """Parse the options; return the value of `feedback`, the only one."""
    values = {"on": True, "off": False}
    found: list[bool] = []
    for option in options:
        key, _, value = (part.strip() for part in option.partition("="))
        if key != "feedback":
            wrong.append(f"there is no option '{key}', expected feedback=on or feedback=off{_hint(key, ['feedback'])}")
        elif not known:
            wrong.append(f"'{kind}' has no option 'feedback', it feeds nothing back")
        elif value not in values:
            wrong.append(f"feedback is '{value}', expected on or off")
        else:
            found.append(values[value])
    if len(found) > 1:
        wrong.append("feedback is given twice")
    return found[0] if found else True


def _hint(given: str, names: list[str]) -> str:
    close = get_close_matches(given, names, 1, _CLOSE)
    return f"; did you mean '{close[0]}'?" if close else ""
