"""Texts about the search that chose the configuration of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from dsq_ckpt.core import figures
from dsq_ckpt.storage.description import compute_restore_loss
from dsq_ckpt.storage.manifest import Manifest

VARIANT = "variant"  # as in search.space, which would import torch


@dataclass
class SearchTexts:
    """Texts for the fields of a manifest's `quality`; "-" for a missing field."""

    chosen: str
    degradation: str
    restore: str | None
    """Degradation by a restore from base and refinement layer; None if it was not measured."""
    evaluations: str
    seconds: str
    satisfied: bool

    @classmethod
    def from_manifest(cls, manifest: Manifest) -> SearchTexts | None:
        """Return the search that chose the configuration of a checkpoint, or None if there was no search."""
        record = manifest.quality
        if not record:
            return None
        restore, base = compute_restore_loss(record), record.get("degradation")
        return cls(
            chosen=format_chosen(manifest),
            degradation="-" if base is None else figures.percent(base),
            restore=None if restore is None else figures.percent(restore),
            evaluations=str(record.get("evaluations", "-")),
            seconds="-" if record.get("seconds") is None else figures.seconds(record["seconds"]),
            satisfied=bool(record.get("satisfied", True)),
        )


def format_chosen(manifest: Manifest) -> str:
    """Return the configuration that a search chose, such as "step 2.8, 3 bits", with the bits of the refinement."""
    record = manifest.quality or {}
    chosen = record.get("chosen")
    if not chosen:
        bounded = manifest.get_setting("search", "max_run_loss") is not None
        return f"none: {'exact' if bounded else manifest.get_setting('search', 'fallback') or '-'}"
    variant = str(chosen.get(VARIANT, "default"))
    bits = manifest.get_setting("quantize", "weights", "refinement_bits")
    return ", ".join([
        *([variant] if variant != "default" else []),
        figures.settings({name: value for name, value in chosen.items() if name != VARIANT}),
        *([f"{bits} bits"] if bits else []),
    ])
