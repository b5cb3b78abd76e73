"""Formatting of numbers for people: sizes, counts, ratios, durations, fractions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def size(count: int) -> str:
    """Format bytes in binary units, three or four digits: 12.3 MiB."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if abs(value) < 999.5:
            break
        value, unit = value / 1024, larger
    return f"{count} B" if unit == "B" else f"{_three_digits(value)} {unit}"


def number(count: int) -> str:
    """Format a count in decimal units: 180 k, 1.21 G."""
    value, unit = float(count), ""
    for larger in (" k", " M", " G", " T"):
        if abs(value) < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{_three_digits(value)}{unit}" if unit else str(count)


def ratio(logical: int, stored: int) -> str:
    """Format a compression ratio: 56.8x; "-" if a size is 0."""
    return f"{_three_digits(logical / stored)}x" if logical and stored else "-"


def quotient(logical: int, stored: int) -> float | None:
    """Return the compression ratio for JSON; None if a size is 0."""
    return round(logical / stored, 4) if logical and stored else None


def seconds(duration: float) -> str:
    """Format a duration: 0.07 s, 12.3 s, 2 min 05 s."""
    if duration >= 60:
        return f"{int(duration // 60)} min {int(duration % 60):02d} s"
    return f"{duration:.2f} s" if duration < 10 else f"{duration:.1f} s"


def percent(share: float) -> str:
    """Format a fraction in two digits: 1.2 %, 0.034 %, -0.5 %."""
    return f"{100 * share:.2g} %" if abs(share) < 1 else f"{100 * share:.0f} %"


def settings(values: Mapping[str, Any]) -> str:
    """Format a mapping in one line: step 2.8, bins 16."""
    return ", ".join(f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
                     for name, value in values.items())


def _three_digits(value: float) -> str:
    """Format a number with three significant digits and no exponent."""
    if abs(value) < 9.995:
        return f"{value:.2f}"
    return f"{value:.1f}" if abs(value) < 99.95 else f"{value:.0f}"
