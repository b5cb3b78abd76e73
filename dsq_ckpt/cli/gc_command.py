"""`dsq gc`: removal of files that interrupted saves, copies and exports left behind."""

from __future__ import annotations

from pathlib import Path

from dsq_ckpt.cli import output
from dsq_ckpt.core.urls import is_remote
from dsq_ckpt.storage import gc, remote_gc
from dsq_ckpt.storage.links import compute_freed_space
from dsq_ckpt.storage.manifest import iter_checkpoints
from dsq_ckpt.storage.runs import find_run_below


def run(path: Path, dry_run: bool, older_than: float, as_json: bool) -> None:
    """Delete orphaned files, or list them with `dry_run`; print other leftovers and why they stay."""
    collector = remote_gc if is_remote(path) else gc
    with output.meter("looking for garbage", hidden=as_json):
        skipped = collector.find_skipped(path, older_than)
        orphans = collector.find_garbage(path, older_than)
        linked, freed = set[Path](), sum(orphan.bytes for orphan in orphans)
        if not is_remote(path):
            linked, freed = compute_freed_space(file for orphan in orphans for file in gc.list_files(orphan))
        if not dry_run:
            orphans = collector.collect_garbage(path, older_than)
    if as_json:
        output.print_json({
            "path": str(path), "dry_run": dry_run, "bytes": freed,
            "too_young": [str(entry.path) for entry in skipped if entry.is_young],
            "left": [{"path": str(entry.path), "reason": entry.reason} for entry in skipped],
            "linked": sorted(map(str, linked)),
            "files": [{**orphan._asdict(), "path": str(orphan.path)} for orphan in orphans],
        })
        return
    screen = output.console()
    if orphans:
        rows = output.table("<file", "size", "<why")
        for orphan in orphans:
            rows.add_row(str(orphan.path.relative_to(path)), output.size(orphan.bytes), orphan.reason)
        screen.print(rows)
        screen.print()
    verb = "would delete" if dry_run else "deleted"
    suffix = f"; the bytes of {len(linked)} file(s) stay, by links elsewhere" if linked else ""
    screen.print(f"{verb} {len(orphans)} file(s), {output.size(freed)}{suffix}" if orphans else "nothing to delete")
    has_checkpoints = any(True for _ in iter_checkpoints(path, lambda *_: None))
    if not orphans and not has_checkpoints and (below := find_run_below(path)):
        screen.print(f"'{path}' holds no checkpoint; directories in it do, such as '{below}': name one", soft_wrap=True)
    for entry in skipped:
        younger = f" (younger than {output.seconds(older_than)}; --older-than)" if entry.is_young else ""
        screen.print(f"left alone: {entry.path}: {entry.reason}{younger}", soft_wrap=True)
