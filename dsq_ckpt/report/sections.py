"""The charts of a run's page, by sections."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import accumulate

from dsq_ckpt.report.charts import Chart, Series, SeriesValues, Unit
from dsq_ckpt.report.history import History, RunCheckpoint
from dsq_ckpt.storage.manifest import GroupReport, Manifest

_TONES = "abcdefg"
_OTHER_TONE = "h"
_LOG_RANGE = 50
_MAX_LINES = 8  # in one chart; further groups are averaged


def size_charts(history: History) -> list[Chart]:
    """Return charts of bytes: of each checkpoint, of the whole run, and by parts."""
    entries = history.entries
    totals = [entry.classes["everything"] for entry in entries]
    return [
        Chart("size", "Size of each checkpoint", "Uncompressed; written by its save; kept now, without files that it "
              "shares with checkpoints before it.", "bytes", [
                  Series("plain", [counts.logical for counts in totals], "h"),
                  Series("written", [counts.written for counts in totals], "a"),
                  Series("kept", [counts.kept for counts in totals], "b"),
              ], log=True),
        Chart("growth", "All checkpoints so far", "Summed up from the first checkpoint on. On disk: what is there now "
              "of these checkpoints, each shared file once.", "bytes", [
                  Series("plain", _running_total([counts.logical for counts in totals]), "h"),
                  Series("written", _running_total([counts.written for counts in totals]), "a"),
                  Series("on disk", _running_total([entry.growth for entry in entries]), "b"),
              ], log=True),
        Chart("parts", "Base and refinement", "Bytes written by each save. History keeps the base layers; refinement "
              "is dropped when newer checkpoints come.", "bytes", _size_parts(entries)),
    ]


def _running_total(values: Sequence[int]) -> SeriesValues:
    return list(accumulate(values))


def _size_parts(entries: Sequence[RunCheckpoint]) -> list[Series]:
    weights = [entry.manifest.kinds["weights"].base if "weights" in entry.manifest.kinds else 0 for entry in entries]
    base = [sum(kind.base for name, kind in e.manifest.kinds.items() if name != "exact") for e in entries]
    refinement = [sum(kind.refinement for kind in entry.manifest.kinds.values()) for entry in entries]
    written = [entry.classes["everything"].written for entry in entries]
    parts = [count if e.manifest.refinement == "kept" else 0 for count, e in zip(refinement, entries, strict=True)]
    series = [
        Series("weights, base", weights, "b", "bar"),
        Series("moments, base", _subtract(base, weights), "a", "bar"),
        Series("exact, tables, index", _subtract(_subtract(written, base), refinement), "h", "bar"),
        Series("refinement, kept", parts, "c", "bar"),
        Series("refinement, dropped", _subtract(refinement, parts), "faint", "bar"),
    ]
    return [bar for bar in series if any(bar.values)] or series[2:3]


def _subtract(values: Sequence[int], others: Sequence[int]) -> list[int]:
    return [max(value - other, 0) for value, other in zip(values, others, strict=True)]


def chain_charts(history: History) -> list[Chart]:
    """Return charts of chains and of save times."""
    manifests = [entry.manifest for entry in history.entries]
    searched = [float((manifest.quality or {}).get("seconds") or 0.0) for manifest in manifests]
    saving = [max(manifest.seconds - search, 0.0) for manifest, search in zip(manifests, searched, strict=True)]
    return [
        Chart("chain", "Chain", "Checkpoints whose files a load reads: one for a keyframe, and one more for each delta "
              "since.", "count", [
                  Series("keyframe", [1 if manifest.depth == 0 else None for manifest in manifests], "c", "bar"),
                  Series("delta", [manifest.depth + 1 if manifest.depth else None for manifest in manifests], "a",
                         "bar"),
              ]),
        Chart("time", "Time of each save", "From the call to the commit, in the background too.", "seconds", [
            Series("saving", saving, "a", "bar"),
            *([Series("searching", searched, "d", "bar")] if any(searched) else []),
        ]),
    ]


def quality_charts(history: History) -> list[Chart]:
    """Return charts of the quality that searches measured, and its bounds; empty without a search."""
    manifests = [entry.manifest for entry in history.entries]
    epsilon = [manifest.get_setting("search", "epsilon") if manifest.quality else None for manifest in manifests]
    loses, allowed = _quality_values(manifests, "restore_loses"), _quality_values(manifests, "restore_may_lose")
    used = [None if loss is None or not limit else loss / limit for loss, limit in zip(loses, allowed, strict=True)]
    charts: list[tuple[str, str, str, Unit, list[Series]]] = [
        ("base", "Quality of the base layer", "Degradation of the metric by what history keeps, against its bound "
         "(search.epsilon). Negative: it improved.", "share", [
             Series("by evaluate", _quality_values(manifests, "degradation"), "a"),
             Series("by check", _quality_values(manifests, "check_degradation"), "b"),
             Series("bound", [_as_number(value) for value in epsilon], "e", "dashed"),
         ]),
        ("restore", "Quality of a restore", "Change of the metric by a restore with refinement, as a share of its "
         "bound, which follows from what training gained since the checkpoint before.", "share", [
             Series("restore", used, "a"),
             Series("bound", [None if share is None else 1.0 for share in used], "e", "dashed"),
         ]),
        ("metric", "Metric", "Of the model as it was when it was saved.", "metric", [
            Series("by evaluate", _quality_values(manifests, "metric"), "a"),
            Series("by check", _quality_values(manifests, "check_metric"), "b"),
        ]),
    ]
    return [
        Chart(
            key, title, note, unit, [one for one in series if _has_values(one.values)],
            log=key == "metric" and _spans_decades(series),
        )
        for key, title, note, unit, series in charts
        if any(_has_values(one.values) for one in series if one.style == "line")
    ]


def _spans_decades(series: Sequence[Series]) -> bool:
    """Return whether all values are positive, and span several orders of magnitude."""
    values = [value for one in series for value in one.values if value is not None]
    return bool(values) and min(values) > 0 and max(values) > _LOG_RANGE * min(values)


def _quality_values(manifests: Sequence[Manifest], name: str) -> SeriesValues:
    return [_as_number((manifest.quality or {}).get(name)) for manifest in manifests]


def _as_number(value: object) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _has_values(values: SeriesValues) -> bool:
    return any(value is not None for value in values)


def group_charts(history: History) -> list[Chart]:
    """Return charts of bits per element and of errors for each kind of tensor, with a line for each layer type."""
    manifests = [entry.manifest for entry in history.entries]
    elements: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for manifest in manifests:
        for name, group in manifest.groups.items():
            kind, _, layer = name.partition("/")
            elements[kind][layer] = max(elements[kind][layer], group.elements)
    charts = []
    for kind in sorted(elements, key=lambda kind: (kind != "weights", kind)):
        layers = sorted(elements[kind], key=lambda layer: (-elements[kind][layer], layer))
        largest = layers[: _MAX_LINES if len(layers) == _MAX_LINES else _MAX_LINES - 1]
        lines = [(layer or "all", {f"{kind}/{layer}" if layer else kind}) for layer in largest]
        if len(layers) > len(largest):
            rest = layers[len(largest) :]
            lines.append((f"{len(rest)} smaller ones", {f"{kind}/{layer}" if layer else kind for layer in rest}))
        charts += [
            Chart(f"bits {kind}", f"Bits per element: {kind}", "Of the base layer, by layer type.", "bits",
                  _group_series(manifests, lines, lambda group: max(group.bits_per_element, 0.0))),
            Chart(f"error {kind}", f"Error: {kind}", "Relative error, root mean square, of the base layer by layer "
                  "type. Restores have the refinement too: see the table below.", "share",
                  _group_series(manifests, lines, lambda group: group.relative_error)),
        ]
    return charts


def _group_series(
    manifests: Sequence[Manifest], lines: Sequence[tuple[str, set[str]]], value: Callable[[GroupReport], float]
) -> list[Series]:
    """Return a series for each line, which is a name and a set of groups."""
    return [
        Series(
            name, [_weighted_mean([m.groups[g] for g in groups if g in m.groups], value) for m in manifests],
            _TONES[index % len(_TONES)] if len(groups) == 1 else _OTHER_TONE,
        )
        for index, (name, groups) in enumerate(lines)
    ]


def _weighted_mean(groups: Sequence[GroupReport], value: Callable[[GroupReport], float]) -> float | None:
    """Return the mean of a value over the elements of groups; None without elements."""
    total = sum(group.elements for group in groups)
    if not groups or total <= 0:
        return None
    return sum(value(group) * group.elements for group in groups) / total
