"""The charts of a run's page: which figures of the manifests are in which chart."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import accumulate

from dsq_ckpt.report.charts import Chart, Series, Unit, Values
from dsq_ckpt.report.history import History, RunCheckpoint
from dsq_ckpt.storage.manifest import GroupReport, Manifest

_TONES = "abcdefg"
_OTHERS = "h"
_WIDE = 50
_SEVERAL = 8  # lines of one chart; more groups are summed up


def sizes(history: History) -> list[Chart]:
    """Return charts of bytes: by checkpoint, of the whole run, and their parts."""
    entries = history.entries
    everything = [entry.classes["everything"] for entry in entries]
    return [
        Chart("size", "Size of each checkpoint", "Uncompressed; written by its save; kept now, without files that it "
              "shares with checkpoints before it.", "bytes", [
                  Series("plain", [part.logical for part in everything], "h"),
                  Series("written", [part.written for part in everything], "a"),
                  Series("kept", [part.kept for part in everything], "b"),
              ], log=True),
        Chart("growth", "All checkpoints so far", "Summed up from the first checkpoint on. On disk: what is there now "
              "of these checkpoints, each shared file once.", "bytes", [
                  Series("plain", _summed([part.logical for part in everything]), "h"),
                  Series("written", _summed([part.written for part in everything]), "a"),
                  Series("on disk", _summed([entry.growth for entry in entries]), "b"),
              ], log=True),
        Chart("parts", "Base and refinement", "Bytes written by each save. History keeps the base layers; refinement "
              "is dropped when newer checkpoints come.", "bytes", _parts(entries)),
    ]


def _summed(values: Sequence[int]) -> Values:
    return list(accumulate(values))


def _parts(entries: Sequence[RunCheckpoint]) -> list[Series]:
    weights = [entry.manifest.kinds["weights"].base if "weights" in entry.manifest.kinds else 0 for entry in entries]
    base = [sum(one.base for name, one in e.manifest.kinds.items() if name != "exact") for e in entries]
    refinement = [sum(one.refinement for one in entry.manifest.kinds.values()) for entry in entries]
    written = [entry.classes["everything"].written for entry in entries]
    kept = [count if e.manifest.refinement == "kept" else 0 for count, e in zip(refinement, entries, strict=True)]
    series = [
        Series("weights, base", weights, "b", "bar"),
        Series("moments, base", _minus(base, weights), "a", "bar"),
        Series("exact, tables, index", _minus(_minus(written, base), refinement), "h", "bar"),
        Series("refinement, kept", kept, "c", "bar"),
        Series("refinement, dropped", _minus(refinement, kept), "faint", "bar"),
    ]
    return [one for one in series if any(one.values)] or series[2:3]


def _minus(values: Sequence[int], others: Sequence[int]) -> list[int]:
    return [max(one - other, 0) for one, other in zip(values, others, strict=True)]


def chain(history: History) -> list[Chart]:
    """Return the charts of chains and of time."""
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


def quality(history: History) -> list[Chart]:
    """Return charts of what searches measured, against the bounds that they had to keep; none without a search."""
    manifests = [entry.manifest for entry in history.entries]
    epsilon = [manifest.get_setting("search", "epsilon") if manifest.quality else None for manifest in manifests]
    loses, allowed = _measured(manifests, "restore_loses"), _measured(manifests, "restore_may_lose")
    used = [None if one is None or not most else one / most for one, most in zip(loses, allowed, strict=True)]
    charts: list[tuple[str, str, str, Unit, list[Series]]] = [
        ("base", "Quality of the base layer", "Degradation of the metric by what history keeps, against its bound "
         "(search.epsilon). Negative: it improved.", "share", [
             Series("by evaluate", _measured(manifests, "degradation"), "a"),
             Series("by check", _measured(manifests, "check_degradation"), "b"),
             Series("bound", [_number(value) for value in epsilon], "e", "dashed"),
         ]),
        ("restore", "Quality of a restore", "Change of the metric by a restore with refinement, as a share of its "
         "bound, which follows from what training gained since the checkpoint before.", "share", [
             Series("restore", used, "a"),
             Series("bound", [None if share is None else 1.0 for share in used], "e", "dashed"),
         ]),
        ("metric", "Metric", "Of the model as it was when it was saved.", "metric", [
            Series("by evaluate", _measured(manifests, "metric"), "a"),
            Series("by check", _measured(manifests, "check_metric"), "b"),
        ]),
    ]
    return [
        Chart(
            key, title, note, unit, [one for one in series if _has(one.values)], log=key == "metric" and _wide(series)
        )
        for key, title, note, unit, series in charts if any(_has(one.values) for one in series if one.style == "line")
    ]


def _wide(series: Sequence[Series]) -> bool:
    """Return whether figures are positive, and of several orders of magnitude."""
    values = [value for one in series for value in one.values if value is not None]
    return bool(values) and min(values) > 0 and max(values) > _WIDE * min(values)


def _measured(manifests: Sequence[Manifest], name: str) -> Values:
    return [_number((manifest.quality or {}).get(name)) for manifest in manifests]


def _number(value: object) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _has(values: Values) -> bool:
    return any(value is not None for value in values)


def groups(history: History) -> list[Chart]:
    """Return, for each kind of tensor, charts of bits per element and of errors, with a line for each layer type."""
    manifests = [entry.manifest for entry in history.entries]
    elements: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for manifest in manifests:
        for name, group in manifest.groups.items():
            kind, _, layer = name.partition("/")
            elements[kind][layer] = max(elements[kind][layer], group.elements)
    found = []
    for kind in sorted(elements, key=lambda kind: (kind != "weights", kind)):
        layers = sorted(elements[kind], key=lambda layer: (-elements[kind][layer], layer))
        several = layers[: _SEVERAL if len(layers) == _SEVERAL else _SEVERAL - 1]
        lines = [(layer or "all", {f"{kind}/{layer}" if layer else kind}) for layer in several]
        if len(layers) > len(several):
            rest = layers[len(several) :]
            lines.append((f"{len(rest)} smaller ones", {f"{kind}/{layer}" if layer else kind for layer in rest}))
        found += [
            Chart(f"bits {kind}", f"Bits per element: {kind}", "Of the base layer, by layer type.", "bits",
                  _lines(manifests, lines, lambda group: max(group.bits_per_element, 0.0))),
            Chart(f"error {kind}", f"Error: {kind}", "Relative error, root mean square, of the base layer by layer "
                  "type. Restores have the refinement too: see the table below.", "share",
                  _lines(manifests, lines, lambda group: group.relative_error)),
        ]
    return found


def _lines(
    manifests: Sequence[Manifest], lines: Sequence[tuple[str, set[str]]], figure: Callable[[GroupReport], float]
) -> list[Series]:
    return [
        Series(name, [_mean([m.groups[group] for group in members if group in m.groups], figure) for m in manifests],
               _TONES[place % len(_TONES)] if len(members) == 1 else _OTHERS)
        for place, (name, members) in enumerate(lines)
    ]


def _mean(reports: Sequence[GroupReport], figure: Callable[[GroupReport], float]) -> float | None:
    """Return the mean over elements; None where no group is there."""
    total = sum(report.elements for report in reports)
    if not reports or total <= 0:
        return None
    return sum(figure(report) * report.elements for report in reports) / total
