"""`dsq rm`: removal of checkpoints, except for files that other checkpoints need."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dsq_ckpt.cli import output
from dsq_ckpt.errors import ConfigError
from dsq_ckpt.storage import removal
from dsq_ckpt.storage.manifest import iter_checkpoints
from dsq_ckpt.storage.runs import canonicalize


def run(checkpoints: Sequence[Path], dry_run: bool, as_json: bool) -> None:
    """Remove checkpoints in order, and print a line or a JSON object for each.

    Raises:
        DSQError: a checkpoint cannot be removed, or is named twice. Nothing was removed.
        typer.Exit: the directory of a checkpoint stays, with foreign files.
    """
    with output.meter("removing", hidden=as_json):
        _check_unique(checkpoints)
        results: list[removal.RemovalResult] = []
        for checkpoint in checkpoints:
            results.append(removal.remove_checkpoint(checkpoint, dry_run=True, after=results))
        runs = _runs_without_refinement([result.path for result in results])
        if not dry_run:
            results = [removal.remove_checkpoint(checkpoint) for checkpoint in checkpoints]
    if as_json:
        output.print_json([{
            "path": str(result.path), "dry_run": dry_run, "bytes": result.bytes,
            "files": [str(file) for file in result.files], "kept": [str(file) for file in result.kept],
            "linked": [str(file) for file in result.linked], "others": [str(file) for file in result.others],
        } for result in results])
    else:
        _print_results(results, runs, dry_run)
    if with_others := [result for result in results if result.others]:
        raise output.fail("; ".join(
            f"{len(result.others)} other file(s) {'would stay' if dry_run else 'stay'} in '{result.path}', such as "
            f"'{result.others[0].relative_to(result.path)}': delete them by hand if they are not needed"
            for result in with_others
        ))


def _print_results(results: Sequence[removal.RemovalResult], runs: Sequence[Path], dry_run: bool) -> None:
    """Print a line for each checkpoint, and a line for each run that loses its last refinement layer."""
    verb = "would remove" if dry_run else "removed"
    for result in results:
        suffix = f"; {len(result.kept)} file(s) stay, which others need" if result.kept else ""
        linked = f"; the bytes of {len(result.linked)} file(s) stay, by links elsewhere" if result.linked else ""
        output.console().print(
            f"{verb} {result.path}: {len(result.files)} file(s), {output.size(result.bytes)}{linked}{suffix}",
            soft_wrap=True,
        )
    for directory in runs:
        output.console().print(
            f"'{directory}' {'would have' if dry_run else 'has'} no checkpoint with a refinement layer any more: what "
            "is left are base layers alone, from which a restart loses steps", soft_wrap=True,
        )


def _runs_without_refinement(removed: Sequence[Path]) -> list[Path]:
    """Return the runs that lose all checkpoints with a refinement layer, and keep others."""
    runs = []
    for run_directory in dict.fromkeys(path.parent for path in removed):
        saved = list(iter_checkpoints(run_directory, lambda *_: None))
        remaining = [manifest for path, manifest in saved if path not in removed]
        had_refinement = any(manifest.refinement == "kept" for _, manifest in saved)
        if had_refinement and remaining and all(manifest.refinement == "dropped" for manifest in remaining):
            runs.append(run_directory)
    return runs


def _check_unique(checkpoints: Sequence[Path]) -> None:
    """Raise a `ConfigError` if a checkpoint is named twice."""
    seen: set[Path] = set()
    for checkpoint in map(canonicalize, checkpoints):
        if checkpoint in seen:
            raise ConfigError(f"'{checkpoint}' is named twice; name each checkpoint once")
        seen.add(checkpoint)
