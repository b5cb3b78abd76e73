"""Gradient compressors by name: `gradient_compressor("topk:0.01")`.

====================  ==============================================================================================
`topk:RATIO`          the largest RATIO of each gradient's elements, 0 < RATIO <= 1, default 0.01
`kmeans:LEVELS`       one byte per element, a code of LEVELS k-means levels, 2..256, default 16
`fp16`, `bf16`        averaging in 16 bits
`none`                no compression: DDP averages as usual
====================  ==============================================================================================

The first two use error feedback, unless `,feedback=off` follows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from difflib import get_close_matches
from typing import ClassVar

from torch import nn

from dsq_ckpt.errors import ConfigError
from dsq_ckpt.lowdiff.base_compressor import GradientCompressor, GradientInfo
from dsq_ckpt.lowdiff.kmeans import KMeansCompressor
from dsq_ckpt.lowdiff.rounding import Bf16, Fp16
from dsq_ckpt.lowdiff.topk import TopK

__all__ = [
    "Bf16", "Fp16", "GradientCompressor", "GradientInfo", "KMeansCompressor", "TopK", "Uncompressed",
    "gradient_compressor",
]

_SIMILARITY = 0.5  # names are short, so that one problems letter of four matters


class Uncompressed(GradientCompressor):
    """A compressor that does not change gradients, and does not describe them."""

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


def gradient_compressor(spec: str | GradientCompressor | None) -> GradientCompressor:
    """Create a compressor from its spec, such as "topk:0.01" or "topk:0.01,feedback=off".

    Args:
        spec: kind, argument and options; see the table in the module's docstring. A compressor is returned unchanged;
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
    problems: list[str] = []
    head, *options = (option.strip() for option in spec.lower().split(","))
    kind, colon, argument = head.partition(":")
    factory = _KINDS.get(kind)
    if factory is None:
        problems.append(f"there is no '{kind}', expected {', '.join(_KINDS)}{_suggest_name(kind, list(_KINDS))}")
    feedback = _parse_feedback(options, factory is None or kind in _WITH_FEEDBACK, kind, problems)
    if colon and not argument:
        problems.append("there is nothing after the colon")
    created = Uncompressed() if factory is None else factory(argument, feedback, problems)
    if problems:
        raise ConfigError(f"compressor '{spec}': {'; '.join(problems)}")
    return created


CompressorFactory = Callable[[str, bool, list[str]], GradientCompressor]
"""A function that creates a compressor from the argument and `feedback`, and appends problems to the list."""


def _make_topk(argument: str, feedback: bool, problems: list[str]) -> GradientCompressor:
    try:
        ratio = float(argument or 0.01)
    except ValueError:
        ratio = math.nan
    if not 0 < ratio <= 1:
        problems.append(f"the ratio is '{argument}', expected a number above 0 and up to 1")
    return TopK(ratio, feedback)


def _make_kmeans(argument: str, feedback: bool, problems: list[str]) -> GradientCompressor:
    levels = int(argument or 16) if argument.isdecimal() or not argument else 0
    if not 2 <= levels <= 256:
        problems.append(f"the number of levels is '{argument}', expected an integer from 2 to 256")
    return KMeansCompressor(levels, feedback)


def _without_argument(kind: Callable[[], GradientCompressor]) -> CompressorFactory:
    """Return a factory that rejects an argument."""
    def create(argument: str, feedback: bool, problems: list[str]) -> GradientCompressor:
        created = kind()
        if argument:
            problems.append(f"'{created.name}' takes no argument, found '{argument}'")
        return created

    return create


_WITH_FEEDBACK = ("topk", "kmeans")
_KINDS: dict[str, CompressorFactory] = {
    "topk": _make_topk, "kmeans": _make_kmeans, "fp16": _without_argument(Fp16), "bf16": _without_argument(Bf16),
    "none": _without_argument(Uncompressed),
}


def _parse_feedback(options: list[str], supported: bool, kind: str, problems: list[str]) -> bool:
    """Parse the options; return the value of `feedback`, the only one. Append problems to the list.

    Args:
        options: options of the spec, such as "feedback=off".
        supported: True if compressors of this kind have error feedback.
        kind: kind of the compressor, for messages.
        problems: list of problems.
    """
    values = {"on": True, "off": False}
    parsed: list[bool] = []
    for option in options:
        key, _, value = (text.strip() for text in option.partition("="))
        if key != "feedback":
            hint = _suggest_name(key, ["feedback"])
            problems.append(f"there is no option '{key}', expected feedback=on or feedback=off{hint}")
        elif not supported:
            problems.append(f"'{kind}' has no option 'feedback', it feeds nothing back")
        elif value not in values:
            problems.append(f"feedback is '{value}', expected on or off")
        else:
            parsed.append(values[value])
    if len(parsed) > 1:
        problems.append("feedback is given twice")
    return parsed[0] if parsed else True


def _suggest_name(name: str, names: list[str]) -> str:
    close = get_close_matches(name, names, 1, _SIMILARITY)
    return f"; did you mean '{close[0]}'?" if close else ""
