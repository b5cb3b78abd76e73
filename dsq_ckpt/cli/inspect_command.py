"""`dsq inspect`: the contents of one checkpoint."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

from dsq_ckpt.cli import output
from dsq_ckpt.errors import DSQError
from dsq_ckpt.storage.checkpoint import Checkpoint
from dsq_ckpt.storage.description import compute_restored_error, describe
from dsq_ckpt.storage.manifest import ANCESTOR_ROLES, Manifest, iter_checkpoints

_SHARE = "share of the metric"
_AS_METRIC = "units of the metric"
_UNITS = {
    "metric": "as evaluate gives it", "check_metric": "as check gives it", "degradation": _SHARE,
    "check_degradation": _SHARE, "predicted_degradation": _SHARE, "noise": _SHARE,
    "restore_loses": _AS_METRIC, "restore_may_lose": _AS_METRIC, "run_lost": _SHARE, "predicted_bytes": "bytes",
    "compensated": "share of the weights", "refinement_bits": "bits per weight", "evaluations": "calls of evaluate",
    "checks": "calls of check", "seconds": "s",
}
_OUTLIER_FACTOR = 2.0  # times the error of its group, above which the worst tensor is named
_ROLES = {"own": 1, "ancestor": 0, "refinement": 2, "older_refinement": 3, "index": 4, "attachment": 5}


def as_json(path: Path, tensors: bool) -> dict[str, Any]:
    """Return the manifest, derived sizes and, if `tensors` is True, every tensor, as JSON data."""
    manifest = Manifest.read(path)
    info = describe(path)
    document = {
        **manifest.model_dump(mode="json"), "path": str(path),
        **{name: info[name] for name in ("bytes_logical", "bytes_written", "bytes_kept", "keyframe")},
        "ratio_written": output.quotient(info["bytes_logical"], info["bytes_written"]),
        "ratio_kept": output.quotient(info["bytes_logical"], info["bytes_kept"]),
    }
    if tensors:
        document["tensors"] = list_tensors(path)
    return document


def print_checkpoint(path: Path, tensors: bool) -> None:
    """Print the tables of a checkpoint."""
    manifest = Manifest.read(path)
    screen = output.console()
    screen.print(output.field_table(_header_fields(path, manifest)))
    screen.print()
    print_contents(path, manifest)
    if manifest.quality:
        screen.print()
        screen.print(_quality_table(manifest.quality))
    screen.print()
    screen.print(_file_table(path, manifest))
    if manifest.nonfinite:
        screen.print()
        screen.print("not quantized, for NaN, Inf or values that cannot be: " + ", ".join(manifest.nonfinite))
    if tensors:
        screen.print()
        screen.print(_tensor_table(path))


def print_contents(path: Path, manifest: Manifest) -> None:
    """Print sizes and errors by kind of tensor and by group."""
    screen = output.console()
    screen.print(_kind_table(path, manifest))
    screen.print("ratio: uncompressed over stored bytes; KiB: 1024 bytes; base: what history keeps")
    if manifest.get_setting("quantize", "small_moments") == "bf16":
        screen.print("moments of norms, biases, one-dimensional and small tensors: bf16, 0.4 % off at most")
    if not manifest.groups:
        return
    wide = screen.width >= output.WIDE_COLUMNS  # else there is room for whole names, which tell most of the codebook
    codebook = ("<codebook", "levels") if wide else ()
    rows = output.table("<group", "elements", *codebook, "step", "coded", "bits", "base error", "restored")
    for name, group in sorted(manifest.groups.items()):
        restored = compute_restored_error(group)
        rows.add_row(
            name, output.number(group.elements), *((_codebook_fit(name, manifest), str(group.levels)) if wide else ()),
            f"{group.step:.3g}" if group.step else "-", "delta" if group.delta else "keyframe",
            f"{max(group.bits_per_element, 0):.3f}", f"{100 * group.relative_error:.2f} %",
            "-" if restored is None else f"{100 * restored:.2f} %",
        )
    screen.print()
    screen.print(rows)
    screen.print(
        f"elements: k is 1000{'; levels: values besides zero' if wide else ''}\n"
        "step: of a lattice, in units of the tensors once divided by their powers of two\n"
        "bits (per element), base error (relative, root mean square): of the base layer\n"
        "restored: the error after a restore with the refinement layer\n"
        "errors of first moments: those of the optimizer's next update"
    )
    for name, group in sorted(manifest.groups.items()):
        restored = compute_restored_error(group)
        group_error = group.relative_error if restored is None else restored
        if group.worst_error is not None and group.worst_error > _OUTLIER_FACTOR * group_error:
            tensor = output.escape_controls(group.worst_tensor or "")
            screen.print(f"loses most of {name}: {tensor}, {group.worst_error:.1%} off")


def _codebook_fit(group: str, manifest: Manifest) -> str:
    """Return the setting `codebook.fit` of a group, as text."""
    kind, _, layer = group.partition("/")
    group_key = ("groups", layer.partition("/")[0]) if kind == "weights" else ()
    key = ("quantize", *group_key) if group_key and manifest.get_setting("quantize", *group_key) else ("quantize", kind)
    fit = manifest.get_setting(*key, "codebook", "fit") or "-"
    # A first moment without its second moment is stored by its size alone; see `groups.assign`.
    return "kmeans" if fit == "update" and not group.endswith("/update") else str(fit)


def _quality_table(record: dict[str, Any]) -> Any:
    """Return a table of the search record of the configuration."""
    rows = output.table("<search", "<measured", "<unit")
    for name, value in record.items():
        if isinstance(value, dict):
            text = output.settings(value)
        elif isinstance(value, bool):
            text = "yes" if value else "no"
        else:
            text = "none" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
        rows.add_row(name.replace("_", " "), text, _unit(name, value))
    return rows


def _unit(name: str, value: Any) -> str:
    """Return the unit of a field of the search record; empty if the value is not a number."""
    if isinstance(value, dict):
        return "step: root mean squares" if "step" in value else ""
    return _UNITS.get(name, "") if isinstance(value, int | float) and not isinstance(value, bool) else ""


def list_tensors(path: Path) -> list[dict[str, Any]]:
    """Return name, dtype, shape, chunks and group (or `exact`, `bf16`) of every tensor and object."""
    tensors: list[dict[str, Any]] = []
    with Checkpoint(path) as checkpoint, checkpoint.translate_errors():
        stored: dict[str, str] = {}
        for key, ref in checkpoint.iter_chunks():
            record = checkpoint.read_record(ref)
            storage = {"coded": str(record.get("group")), "merged": "merged"}.get(record["type"])
            storage = storage or str(record.get("stored", "exact"))
            # A part with NaN on one rank is exact, but the tensor is lossy.
            if stored.get(key.fqn, "exact") == "exact":
                stored[key.fqn] = storage
        for fqn, tensor in checkpoint.index["tensors"].items():
            tensors.append({
                "name": fqn, "dtype": tensor["dtype"], "shape": tensor["shape"], "chunks": len(tensor["chunks"]),
                "stored": stored.get(fqn, "exact"),
            })
        tensors += [
            {"name": fqn, "dtype": "object", "shape": [], "chunks": 1, "stored": "exact"}
            for fqn in checkpoint.index["objects"]
        ]
    return tensors


def _header_fields(path: Path, manifest: Manifest) -> list[tuple[str, str]]:
    info = describe(path)
    parent = "none: a keyframe"
    if manifest.parent is not None:
        name = "" if manifest.parent_name is None else f" ({manifest.parent_name})"
        parent = f"{manifest.parent}{name}, {manifest.depth} from the keyframe"
    refinement = manifest.refinement + (", pinned" if manifest.pinned else "")
    zone = time.strftime("%Z", time.localtime(manifest.created))
    logical = info["bytes_logical"]
    return [
        ("checkpoint", str(path)),
        ("save id", manifest.save_id),
        ("saved", f"{info['created']} {zone}, in {output.seconds(manifest.seconds)}, by {manifest.ranks} rank(s)"),
        ("parent", parent),
        ("refinement", refinement),
        *([("lossy resumes", str(manifest.lossy_resumes))] if manifest.lossy_resumes else []),
        ("uncompressed", output.size(logical)),
        ("written", f"{output.size(info['bytes_written'])} ({output.ratio(logical, info['bytes_written'])})"),
        ("kept", f"{output.size(info['bytes_kept'])} ({output.ratio(logical, info['bytes_kept'])}), without linked "
                 f"ancestors ({output.size(manifest.sum_bytes(*ANCESTOR_ROLES))})"),
        ("writer", ", ".join(f"{name} {version}" for name, version in manifest.writer.items())
                   + f", format {manifest.version}"),
    ]


def _kind_table(path: Path, manifest: Manifest) -> Any:
    """Return a table of sizes by kind. A dropped refinement is shown, but does not count as stored."""
    kept = manifest.refinement == "kept"
    rows = output.table("<kind", "uncompressed", "base", "refinement", "base ratio", "ratio now")
    order = sorted(manifest.kinds, key=lambda kind: (kind == "exact", kind != "weights", kind))
    for kind in order:
        sizes = manifest.kinds[kind]
        rows.add_row(
            kind, output.size(sizes.logical), output.size(sizes.base),
            (output.size(sizes.refinement) + ("" if kept else " dropped")) if sizes.refinement else "-",
            output.ratio(sizes.logical, sizes.base),
            output.ratio(sizes.logical, sizes.base + (sizes.refinement if kept else 0)),
        )
    info = describe(path)
    if attached := manifest.sum_bytes("attachment"):
        ratio = output.ratio(attached, attached)
        rows.add_row("DeepSpeed's own files", output.size(attached), output.size(attached), "-", ratio, ratio)
    stored = sum(sizes.base + (sizes.refinement if kept else 0) for sizes in manifest.kinds.values()) + attached
    rows.add_row("tables, index, manifest", "-", output.size(info["bytes_kept"] - stored))
    rows.add_row(
        "all", output.size(info["bytes_logical"]), output.size(info["bytes_kept"] - manifest.sum_bytes("refinement")),
        output.size(manifest.sum_bytes("refinement")) if kept else "-",
        output.ratio(info["bytes_logical"], info["bytes_kept"] - manifest.sum_bytes("refinement")),
        output.ratio(info["bytes_logical"], info["bytes_kept"]),
    )
    return rows


def _file_table(path: Path, manifest: Manifest) -> Any:
    """Return a table of the chain, keyframe first: a row per save and role, with the save's directory if it exists.

    The table would be long with a row per file, ranks x depth; `--json` has all files.
    """
    directories: dict[str, str] = {}
    with contextlib.suppress(OSError):  # the parent directory may be unreadable
        run = path.absolute().parent
        directories = {saved.save_id: directory.name for directory, saved in iter_checkpoints(run, lambda *_: None)}
    depths = _depths(path, manifest)
    rows: dict[tuple[int, int, str, str], list[int]] = {}
    for file in manifest.files:
        save_id = manifest.save_id if file.role == "attachment" else _save_id(file.name)
        rows.setdefault((_ROLES[file.role], depths.get(save_id, -1), save_id, file.role), []).append(file.size)
    shown = output.table("<save", "<role", "<coded", "files", "size", "<saved as")
    for (_, depth, save_id, role), sizes in sorted(rows.items()):
        coded = "-" if depth < 0 or role not in ("own", "ancestor") else f"delta {depth}" if depth else "keyframe"
        directory = path.absolute().name if role not in ANCESTOR_ROLES else directories.get(save_id, "(deleted)")
        shown.add_row(save_id, role, coded, str(len(sizes)), output.size(sum(sizes)), directory)
    return shown


def _save_id(name: str) -> str:
    """Return the save id, with which a file's name begins."""
    return name[:16]


def _depths(path: Path, manifest: Manifest) -> dict[str, int]:
    """Return the distance from the keyframe of each save of the chain, by the files that its first file requires."""
    depths = {manifest.save_id: manifest.depth}
    with contextlib.suppress(DSQError, OSError), Checkpoint(path) as checkpoint, checkpoint.translate_errors():
        for file in manifest.files:
            if file.role == "ancestor" and _save_id(file.name) not in depths:
                needed = {_save_id(name) for name in checkpoint.required_files(file.name)}
                depths[_save_id(file.name)] = len(needed) - 1
    return depths


def _tensor_table(path: Path) -> Any:
    rows = output.table("<tensor", "<dtype", "shape", "chunks", "<stored")
    for tensor in list_tensors(path):
        shape = "x".join(map(str, tensor["shape"])) or "scalar"
        rows.add_row(
            tensor["name"], tensor["dtype"], "-" if tensor["dtype"] == "object" else shape, str(tensor["chunks"]),
            tensor["stored"],
        )
    return rows
