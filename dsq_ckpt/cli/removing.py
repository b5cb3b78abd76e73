"""`dsq rm`: checkpoints that go, and the files of theirs that stay for others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dsq_ckpt.cli import output
from dsq_ckpt.errors import ConfigError
from dsq_ckpt.storage import removal
from dsq_ckpt.storage.manifest import iter_checkpoints as checkpoints_of
from dsq_ckpt.storage.runs import canonicalize


def run(checkpoints: Sequence[Path], dry_run: bool, as_json: bool) -> None:
    """Remove checkpoints, in this order, and print a line or an object of JSON for each.

    Raises:
        DSQError: one of them cannot be removed, or is named twice; then none is.
        typer.Exit: the directory of one stays, with files of others.
    """
    with output.meter("removing", hidden=as_json):
        _refuse_twice(checkpoints)
        done: list[removal.RemovalResult] = []
        for checkpoint in checkpoints:
            done.append(removal.remove_checkpoint(checkpoint, dry_run=True, after=done))
        runs = _without_refinement([one.path for one in done])
        if not dry_run:
            done = [removal.remove_checkpoint(checkpoint) for checkpoint in checkpoints]
    if as_json:
        output.print_json([{
            "path": str(one.path), "dry_run": dry_run, "bytes": one.bytes, "files": [str(file) for file in one.files],
            "kept": [str(file) for file in one.kept], "linked": [str(file) for file in one.linked],
            "others": [str(file) for file in one.others],
        } for one in done])
    else:
        _print(done, runs, dry_run)
    if stay := [one for one in done if one.others]:
        raise output.fail("; ".join(
            f"{len(one.others)} other file(s) {'would stay' if dry_run else 'stay'} in '{one.path}', such as "
            f"'{one.others[0].relative_to(one.path)}': delete them by hand if they are not needed" for one in stay
        ))


def _print(done: Sequence[removal.RemovalResult], runs: Sequence[Path], dry_run: bool) -> None:
    """Print a line for each checkpoint, and one for each run that has base layers alone then."""
    verb = "would remove" if dry_run else "removed"
    for one in done:
        kept = f"; {len(one.kept)} file(s) stay, which others need" if one.kept else ""
        linked = f"; the bytes of {len(one.linked)} file(s) stay, by links elsewhere" if one.linked else ""
        output.console().print(
            f"{verb} {one.path}: {len(one.files)} file(s), {output.size(one.bytes)}{linked}{kept}", soft_wrap=True
        )
    for directory in runs:
        output.console().print(
            f"'{directory}' {'would have' if dry_run else 'has'} no checkpoint with a refinement layer any more: what "
            "is left are base layers alone, from which a restart loses steps", soft_wrap=True,
        )


def _without_refinement(removed: Sequence[Path]) -> list[Path]:
    """Return the runs that lose their last checkpoints with a refinement layer, and keep others."""
    found = []
    for run_directory in dict.fromkeys(path.parent for path in removed):
        saved = list(checkpoints_of(run_directory, lambda *_: None))
        left = [manifest for path, manifest in saved if path not in removed]
        had = any(manifest.refinement == "kept" for _, manifest in saved)
        if had and left and all(manifest.refinement == "dropped" for manifest in left):
            found.append(run_directory)
    return found


def _refuse_twice(checkpoints: Sequence[Path]) -> None:
    """Refuse a checkpoint that is named twice."""
    seen: set[Path] = set()
    for checkpoint in map(canonicalize, checkpoints):
        if checkpoint in seen:
            raise ConfigError(f"'{checkpoint}' is named twice; name each checkpoint once")
        seen.add(checkpoint)
