"""`dsq export`: conversion of a checkpoint to the format of another program."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Any, Literal

from dsq_ckpt.cli import output
from dsq_ckpt.storage.manifest import Manifest


class Format(str, Enum):
    """Formats that `dsq export` writes."""

    dcp = "dcp"
    torch = "torch"
    safetensors = "safetensors"
    deepspeed = "deepspeed"


class Layers(str, Enum):
    """Layers that `dsq export` reads."""

    auto = "auto"
    required = "required"
    base = "base"


_LAYERS: dict[Layers, Literal["auto"] | bool] = {Layers.auto: "auto", Layers.required: True, Layers.base: False}
_SUFFIXES = {
    ".safetensors": Format.safetensors, ".pt": Format.torch, ".pth": Format.torch, ".bin": Format.torch,
    ".ckpt": Format.torch,
}


def run(
    checkpoint: Path, target: Path, form: Format | None, layers: Layers, part: str | None, overwrite: bool,
    allow_pickle: bool, as_json: bool,
) -> None:
    """Export, and print what was written."""
    form = form or _format_from_suffix(target)
    if allow_pickle and form not in (Format.torch, Format.deepspeed):
        raise output.fail(f"--allow-pickle is for --format torch and deepspeed; {form.value} unpickles nothing")
    if part is not None and form is Format.deepspeed:
        raise output.fail("--part is for other formats; a tag of DeepSpeed has all its files")
    options: dict[str, Any] = {"refinement": _LAYERS[layers], "overwrite": overwrite}
    if form is not Format.deepspeed:
        options["part"] = part
    if form in (Format.torch, Format.deepspeed):
        options["allow_pickle"] = allow_pickle
    manifest = Manifest.read(checkpoint)
    total = sum(sizes.logical for sizes in manifest.kinds.values())
    export = _export_function(form)
    with output.meter(f"export to {form.value}", total, hidden=as_json) as meter:
        result = export(checkpoint, target, progress=meter.advance, **options)
    if as_json:
        output.print_json({
            "path": str(result.path), "format": form.value, "tensors": result.tensors, "bytes": result.bytes,
            "refined": result.refined, "left_out": result.left_out,
        })
        return
    layer = "base and refinement" if result.refined else "base layer alone" if manifest.lossy else "exact"
    screen = output.console()
    screen.print(
        f"{result.path}: {result.tensors} tensors, {output.size(result.bytes)}, {form.value}, {layer}", soft_wrap=True
    )
    files = {file.name for file in manifest.files if file.role == "attachment"}  # a warning has named them
    if names := [name for name in result.left_out if name not in files]:
        screen.print(f"left out, not tensors or not saved: {', '.join(names)}", soft_wrap=True)


def _export_function(form: Format) -> Any:
    """Return the function that exports to a format. Import DeepSpeed's only for its own format."""
    if form is Format.deepspeed:
        from dsq_ckpt.deepspeed.export import export_deepspeed

        return export_deepspeed
    from dsq_ckpt.convert import export

    return {Format.dcp: export.export_dcp, Format.torch: export.export_torch,
            Format.safetensors: export.export_safetensors}[form]


def _format_from_suffix(target: Path) -> Format:
    """Return the format of a target's suffix, or DCP if it has none."""
    suffix = target.suffix.lower()
    if suffix and suffix not in _SUFFIXES:
        raise output.fail(
            f"'{target}' has the suffix '{suffix}', which names no format: use {', '.join(_SUFFIXES)}, or say which "
            "with --format (a DCP directory, the default without a suffix, is --format dcp)"
        )
    return _SUFFIXES[suffix] if suffix else Format.dcp
