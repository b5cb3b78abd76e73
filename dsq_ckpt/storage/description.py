"""Sizes and errors of a checkpoint, from its manifest."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from dsq_ckpt.core import figures
from dsq_ckpt.storage.backend import get_storage
from dsq_ckpt.storage.manifest import MANIFEST, GroupReport, Manifest, ManifestFile
from dsq_ckpt.storage.paths import require_checkpoint_path


class CheckpointSizes(NamedTuple):
    """Bytes of a checkpoint: uncompressed, written by its save, and kept now, without linked ancestors."""

    logical: int
    written: int
    kept: int


def compute_restore_loss(quality: Mapping[str, Any] | None) -> float | None:
    """Return the change of the metric by a restore, relative to the metric; None if it was not measured."""
    metric, loses = (quality or {}).get("metric"), (quality or {}).get("restore_loses")
    return loses / abs(metric) if loses is not None and metric else None


def format_losses(quality: Mapping[str, Any] | None) -> list[str]:
    """Return parts of a line on the measured losses: by the base layer, which the history keeps, and by a restore."""
    losses = {"base": (quality or {}).get("degradation"), "restore": compute_restore_loss(quality)}
    return [f"{name} loses {figures.percent(loss)}" for name, loss in losses.items() if loss is not None]


def compute_sizes(manifest: Manifest, overhead: int) -> CheckpointSizes:
    """Return the bytes of a checkpoint whose manifest has `overhead` bytes."""
    dropped = sum(sizes.refinement for sizes in manifest.kinds.values()) if manifest.refinement == "dropped" else 0
    size_kept = manifest.sum_bytes("own", "index", "refinement", "attachment") + overhead
    return CheckpointSizes(compute_logical_size(manifest), size_kept + dropped, size_kept)


def list_linked_refinement(manifests: Collection[Manifest]) -> list[ManifestFile]:
    """Return the refinement files that checkpoints of a run link, and whose own checkpoints do not have them any more.

    The refinement of the checkpoints that link them is the difference to that in these files.
    """
    own = {file.name for manifest in manifests for file in manifest.files if file.role == "refinement"}
    linked = {file.name: file for manifest in manifests for file in manifest.files if file.role == "older_refinement"}
    return [file for name, file in linked.items() if name not in own]


def compute_logical_size(manifest: Manifest) -> int:
    """Return the uncompressed bytes of a checkpoint: its tensors, and its attachments as they are."""
    return sum(sizes.logical for sizes in manifest.kinds.values()) + manifest.sum_bytes("attachment")


def compute_restored_error(group: GroupReport) -> float | None:
    """Return the relative error of a group after a restore with the refinement layer; None without a refinement layer.

    First moments are quantized in units of the optimizer's next update. Their `update_error` is computed from the
    sketch; `refined_error` assumes that values are distributed evenly over their cells.
    """
    return group.refined_error if group.update_error is None else group.update_error


def describe(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the sizes of a checkpoint as plain numbers.

    Args:
        path: a complete checkpoint: a directory, or a URL.

    Returns:
        bytes_logical (the uncompressed size, with DeepSpeed's own files as they are), bytes_written (by its save),
        bytes_kept (now, without linked ancestors), keyframe, depth, seconds, refinement, created, and by_kind: {kind:
        {bytes_logical, bytes_base, bytes_refinement}}.

    Raises:
        CheckpointNotFound: there is no checkpoint at `path`, or `path` is None.
        CorruptCheckpoint, UnsupportedFormat: the manifest cannot be read.

    Example:
        >>> result = dsq_ckpt.save({"w": torch.randn(256, 256)}, "run/step-000500")
        >>> sizes = dsq_ckpt.describe("run/step-000500")
        >>> sizes["bytes_logical"], sizes["keyframe"], list(sizes["by_kind"])
        (262144, True, ['weights'])
    """
    directory = require_checkpoint_path(path)
    manifest = Manifest.read(directory)
    sizes = compute_sizes(manifest, get_storage(directory).size(directory / MANIFEST))
    return {
        "bytes_logical": sizes.logical,
        "bytes_written": sizes.written,
        "bytes_kept": sizes.kept,
        "keyframe": manifest.depth == 0,
        "depth": manifest.depth,
        "seconds": manifest.seconds,
        "refinement": manifest.refinement,
        "created": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.created)),
        "by_kind": {
            kind: {"bytes_logical": s.logical, "bytes_base": s.base, "bytes_refinement": s.refinement}
            for kind, s in manifest.kinds.items()
        },
    }
