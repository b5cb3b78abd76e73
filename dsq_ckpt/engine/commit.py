"""The commit of a save, on the coordinator: check that all files exist, then write index and manifest."""

from __future__ import annotations

import platform
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dsq_ckpt.config.schema import DSQConfig
from dsq_ckpt.config.systems import SYSTEMS
from dsq_ckpt.core.hints import pattern_hint
from dsq_ckpt.core.notices import warn_safely
from dsq_ckpt.core.urls import is_remote
from dsq_ckpt.engine.context import SaveContext
from dsq_ckpt.engine.history import ParentRef
from dsq_ckpt.engine.options import SaveOptions
from dsq_ckpt.engine.other_jobs import is_own
from dsq_ckpt.engine.writing import RankResult
from dsq_ckpt.errors import SaveFailed
from dsq_ckpt.quantization.chunk import ChunkKey
from dsq_ckpt.quantization.codebook import GroupFit
from dsq_ckpt.quantization.groups import find_unused_rules
from dsq_ckpt.quantization.layout import ParentModel
from dsq_ckpt.quantization.plan import QuantizationPlan
from dsq_ckpt.quantization.worst_tensor import WorstTensor
from dsq_ckpt.storage import local_commit, references
from dsq_ckpt.storage.backend import read_sizes
from dsq_ckpt.storage.container import FileInfo, write_index
from dsq_ckpt.storage.index import find_coverage_error
from dsq_ckpt.storage.links import get_holder, read_parent_manifest
from dsq_ckpt.storage.manifest import GroupReport, KindSizes, Manifest, ManifestFile
from dsq_ckpt.storage.manifest_names import is_plain_name
from dsq_ckpt.storage.paths import expand_path
from dsq_ckpt.storage.predecessors import choose_creation_time, list_replaced
from dsq_ckpt.storage.runs import get_run
from dsq_ckpt.storage.shard import WrittenRecord
from dsq_ckpt.version import __version__

_warned: set[tuple[Path, str]] = set()  # run directories and the rules and groups that were warned of


class CommitResult(NamedTuple):
    """A complete checkpoint.

    Attributes:
        manifest: its manifest.
        flushed: whether its name is on the device, so that older files may be deleted.
        model: codebooks and scales that a child is coded with.
    """

    manifest: Manifest
    flushed: bool
    model: ParentModel


@dataclass
class SaveContents:
    """The planned and the written contents of a checkpoint, of all ranks.

    Attributes:
        results: results of all ranks, in rank order.
        tensors: {name: {"dtype", "shape", "chunks": [ChunkKey, ...]}} of all planned tensors.
        objects: names of all planned objects.
        nesting: keys of the index that define the nesting of the state dict.
        attachments: files of other formats that lie beside the data files and belong to the checkpoint.
    """

    results: Sequence[RankResult]
    tensors: dict[str, dict[str, Any]]
    objects: Sequence[str]
    nesting: Mapping[str, Any]
    attachments: Sequence[FileInfo] = ()

    @cached_property
    def written(self) -> dict[ChunkKey | str, WrittenRecord]:
        """Records of all ranks, by chunk or name of an object."""
        return {name: record for result in self.results for name, record in result.written.items()}

    @cached_property
    def required_files(self) -> list[str]:
        """Names of the ancestors' files that the files of all ranks need."""
        return sorted({name for result in self.results for name in result.requires})

    @cached_property
    def required_refinement(self) -> list[str]:
        """Names of the ancestors' refinement files that the refinement of all ranks needs."""
        return sorted({name for result in self.results for name in result.refinement_requires})

    @property
    def is_other_training(self) -> bool:
        """Whether its weights are unrelated to those of the previous checkpoint."""
        return {result.related for result in self.results} - {None} == {False}


def commit(
    path: Path, options: SaveOptions, context: SaveContext, contents: SaveContents, plan: QuantizationPlan,
    parent: Manifest | None = None,
) -> CommitResult:
    """Check that all files exist, then write index and manifest; on the coordinator.

    Args:
        path: directory of the checkpoint.
        options: options of the save.
        context: context of the save.
        contents: contents of the checkpoint.
        plan: quantization plan of the save.
        parent: manifest of the parent; None: it is read.

    Raises:
        SaveFailed: a planned item was not written, or chunks do not cover a tensor; the checkpoint stays invisible.
        CheckpointExists: another save completed a checkpoint here meanwhile.
    """
    config = plan.config
    _check_complete(path, contents)
    files = _list_data_files(path, context, contents, parent)
    places = [file.path_in(path) for file in files]
    sizes = read_sizes(places)
    absent = [file for file, file_path in zip(files, places, strict=True) if sizes[file_path] != file.size]
    if absent:
        raise SaveFailed(_describe_missing_files(path, absent, contents.results))
    index = _make_index(context, contents, plan)
    files.append(ManifestFile.from_info(write_index(path, context.save_id, index, config.storage.fsync), "index"))
    manifest = _make_manifest(path, options, context, contents, plan, files)
    model = ParentModel.from_index(index, manifest.depth)
    flushed = _publish(path, manifest, options.overwrite, config, context.parent if contents.required_files else None)
    if contents.is_other_training and context.previous is not None:
        _warn_of_other_training(get_run(path), expand_path(context.previous.path))
    _warn_of_unused_settings(path, config, contents.tensors, context.layout.settings)
    return CommitResult(manifest, flushed, model)


def _check_complete(path: Path, contents: SaveContents) -> None:
    """Check that all planned chunks and objects were written, and that chunks cover their tensors.

    Raises:
        SaveFailed: they were not, or a chunk that measures a first moment is missing.
    """
    planned = [key for tensor in contents.tensors.values() for key in tensor["chunks"]] + list(contents.objects)
    if not planned and not contents.attachments:
        warn_safely(f"the state dict is empty: the checkpoint '{path}' holds nothing")
    missing = [key for key in planned if key not in contents.written]
    if missing:
        raise SaveFailed(
            f"{len(missing)} of {len(planned)} planned items were not written, among them {missing[0]!r}; "
            "the checkpoint was not committed"
        )
    for fqn, tensor in contents.tensors.items():
        if problem := find_coverage_error(tensor["shape"], [(key.offsets, key.shape) for key in tensor["chunks"]]):
            raise SaveFailed(f"'{fqn}' of shape {tensor['shape']} was planned so that {problem}; it was not committed")
    missing_units = sorted({key for result in contents.results for key in result.units} - set(contents.written))
    if missing_units:
        unit = missing_units[0]
        raise SaveFailed(
            f"'{unit.fqn}' has no chunk at {unit.offsets} of shape {unit.shape}, which measures a first "
            "moment that was saved; save both in the same layout, or store quantize.exp_avg exactly"
        )


def _list_data_files(
    path: Path, context: SaveContext, contents: SaveContents, manifest: Manifest | None
) -> list[ManifestFile]:
    """Return all files of the checkpoint except the index."""
    files = [ManifestFile.from_info(file, "own") for result in contents.results for file in result.files]
    files += [
        ManifestFile.from_info(result.refinement, "refinement") for result in contents.results if result.refinement
    ]
    files += [ManifestFile.from_info(file, "attachment") for file in contents.attachments]
    if not contents.required_files:
        return files
    assert context.parent is not None
    parent = expand_path(context.parent.path)
    by_name = {file.name: file for file in (manifest or read_parent_manifest(parent, context.parent.save_id)).files}
    for name in contents.required_files:
        update = {"role": "ancestor", "held_by": get_holder(by_name[name], parent, path)}
        files.append(by_name[name].model_copy(update=update))
    for name in contents.required_refinement:
        if name not in by_name:
            raise SaveFailed(
                f"'{parent}' lost its refinement while this checkpoint was being saved, as another job that goes on "
                "from it saved in the same directory: save again, and give each job a directory of its own"
            )
        files.append(by_name[name].model_copy(update={"role": "older_refinement"}))
    return files


def _make_index(context: SaveContext, contents: SaveContents, plan: QuantizationPlan) -> dict[str, Any]:
    written, analysis = contents.written, plan.analysis
    names = [file.name for result in contents.results for file in result.files]
    numbers = {name: number for number, name in enumerate(names)}
    nesting = contents.nesting
    if not {*contents.tensors, *contents.objects} <= set(nesting["planner"] or ()):
        nesting = {**nesting, "planner": None}  # with paths for a part of the names the others would be lost
    return {
        "files": names,
        "tensors": {
            fqn: {"dtype": tensor["dtype"], "shape": tensor["shape"], "chunks": [
                [list(key.offsets), list(key.shape), numbers[written[key].ref.file], written[key].ref.record]
                for key in tensor["chunks"]
            ]} for fqn, tensor in contents.tensors.items()
        },
        "objects": {fqn: [numbers[written[fqn].ref.file], written[fqn].ref.record] for fqn in contents.objects},
        "codebooks": {
            # The codebook of a group of zeros is of no use to the next checkpoint.
            name: fitted.codebook.to_json() for name, fitted in analysis.fitted.items()
            if fitted.mean_square > 0 and not context.layout.residual
        },
        "exponents": {} if context.layout.residual else analysis.exponents,
        "tied": _resolve_tied(contents.results),
        "planner_data": None, **nesting,
    }


def _make_manifest(
    path: Path, options: SaveOptions, context: SaveContext, contents: SaveContents, plan: QuantizationPlan,
    files: list[ManifestFile],
) -> Manifest:
    analysis, config, results = plan.analysis, plan.config, contents.results
    parent = context.parent if contents.required_files else None
    before = None if contents.is_other_training else context.previous
    if context.previous is None and options.after is not None:
        before = options.after()
    previous, previous_name = _get_previous(path, before)
    follows_newest = previous is not None and previous_name is not None and is_own(previous)
    return Manifest(
        save_id=context.save_id, created=choose_creation_time(get_run(path), follows_newest), ranks=context.ranks,
        parent=parent.save_id if parent else None,
        parent_name=_to_plain_name(expand_path(parent.path)) if parent else None,
        previous=previous, previous_name=previous_name, replaced=list_replaced(path) if options.overwrite else [],
        depth=parent.depth + 1 if parent else 0,
        siblings=parent.position if parent else 0,
        refinement="kept" if any(result.refinement for result in results) else "none", pinned=options.pinned,
        files=files, kinds=_sum_kinds(results),
        groups={
            name: _make_group_report(fitted, context.layout.residual, analysis.worst_tensors.get(name))
            for name, fitted in analysis.fitted.items()
            if fitted.counts.any()
        },
        nonfinite=sorted(analysis.nonfinite), quality=plan.quality,
        lossy_resumes=context.lossy_resumes, excluded=options.excluded,
        seconds=time.time() - context.started, config=config.model_dump(mode="json"),
        writer={"dsq_ckpt": __version__, "torch": torch.__version__, "python": platform.python_version()},
    )


def _warn_of_other_training(run: Path, before: Path) -> None:
    """Warn, once per run directory, that it has consecutive checkpoints of several trainings."""
    if (run, "") not in _warned:
        _warned.add((run, ""))
        warn_safely(
            f"the weights saved in '{run}' now have nothing in common with those of '{before.name}', the checkpoint "
            "before it: they are taken for another training of the same names and shapes (or they changed entirely), "
            "which keeps its refinement apart. Give each training a directory of its own, or "
            "history=dsq_ckpt.SaveHistory() each: saved by turns, their checkpoints are mostly keyframes, and none "
            "loses its refinement later"
        )


def _sum_kinds(results: Sequence[RankResult]) -> dict[str, KindSizes]:
    kinds: dict[str, KindSizes] = {}
    for result in results:
        for kind, counts in result.kinds.items():
            total = kinds.setdefault(kind, KindSizes())
            total.logical += counts.logical
            total.base += counts.base
            total.refinement += counts.refinement
    return kinds


def _publish(path: Path, manifest: Manifest, overwrite: bool, config: DSQConfig, parent: ParentRef | None) -> bool:
    """Make the checkpoint visible; return whether its name is on the device.

    Raises:
        CheckpointExists: another save completed a checkpoint here meanwhile.
        SaveFailed: the parent was removed or replaced meanwhile, perhaps with files that the checkpoint needs.
    """
    if is_remote(path):
        against = None if parent is None else (expand_path(parent.path), parent.save_id)
        references.commit_manifest(path, manifest, overwrite, against)
        return True
    return local_commit.commit_manifest(path, manifest, overwrite, config.storage.fsync)


def _warn_of_unused_settings(
    directory: Path, config: DSQConfig, names: Collection[str], settings: Collection[str]
) -> None:
    """Warn, once per run, of rules and groups that match no tensor: a typo in them leaves tensors lossy."""
    texts = []
    for pattern, earlier in find_unused_rules(config.quantize.rules, names).items():
        text = f"quantize.rules: the pattern '{pattern}' matches no tensor"
        if earlier is None:
            texts.append(text + pattern_hint(pattern, names))
        else:
            texts.append(f"{text} that no earlier rule does, such as '{earlier}'; the first match wins: move it up")
    system_groups = SYSTEMS[config.system].defaults.get("quantize", {}).get("groups", {})
    texts += [
        f"quantize.groups: no tensor belongs to '{name}', so its settings have no effect; name layers by a rule, or "
        "pass model= for their types" for name in config.quantize.groups if name not in {*settings, *system_groups}
    ]
    if is_remote(directory) and config.storage.keyframe_copies > 1:
        texts.append("storage.replicate_keyframes: it has no effect on an object store, which keeps copies by itself")
    for text in texts:
        key = get_run(directory), text.partition(";")[0]
        if key not in _warned:
            _warned.add(key)
            warn_safely(text)


def _describe_missing_files(directory: Path, absent: Sequence[ManifestFile], results: Sequence[RankResult]) -> str:
    """Return a message on files that ranks wrote but the coordinator does not see."""
    host = platform.node()
    wrote = {file.name: result for result in results for file in (*result.files, result.refinement) if file is not None}
    lines = []
    for file in absent[:3]:
        size, author = read_sizes([file.path_in(directory)])[file.path_in(directory)], wrote.get(file.name)
        notes = [f"written by rank {author.rank} on host {author.host}"] if author is not None else []
        notes += [] if isinstance(size, OSError) else [f"{size} of {file.size} bytes"]
        lines.append(f"{file.name} ({', '.join(notes)})" if notes else file.name)
    suffix = f" and {len(absent) - 3} more" if len(absent) > 3 else ""
    text = f"after all ranks wrote, host {host}, which commits, lacks in '{directory}' {', '.join(lines)}{suffix}: "
    if any(wrote[file.name].host != host for file in absent if file.name in wrote):
        text += "the directory is not shared by all hosts; save to one that is; "
    return text + "the checkpoint was not committed"


def _resolve_tied(results: Sequence[RankResult]) -> dict[str, str]:
    """Return the stored name by tied name, merged over the tied items of all ranks."""
    stored_names: dict[str, str] = {}

    def find(name: str) -> str:
        while name in stored_names:
            name = stored_names[name]
        return name

    for result in results:
        for pair in result.tied.items():
            name, first = map(find, pair)
            if name != first:
                stored_names[name] = first
    return {name: find(name) for name in stored_names}


def _get_previous(directory: Path, previous: ParentRef | None) -> tuple[str | None, str | None]:
    """Return the save id of the previous checkpoint, and its name if it lies in the same run directory.

    If the new checkpoint overwrites the previous one, its predecessor is returned, which only its manifest names.
    """
    if previous is None:
        return None, None
    path = expand_path(previous.path)
    if get_run(path) != get_run(directory):
        return previous.save_id, None
    if path.absolute().name == directory.absolute().name:
        replaced = Manifest.read(path)
        return replaced.previous, replaced.previous_name
    return previous.save_id, _to_plain_name(path)


def _to_plain_name(path: Path) -> str | None:
    """Return the name of a directory as text, with undecodable bytes as question marks; None if it has a backslash."""
    name = path.name.encode("utf-8", "replace").decode()
    return name if is_plain_name(name) else None


def _make_group_report(fitted: GroupFit, residual: bool, worst: WorstTensor | None) -> GroupReport:
    elements = int(fitted.counts.sum())
    energy = fitted.mean_square or 1.0
    base, refined = (worst.plain, worst.plain_refined) if worst else (1.0, 1.0)
    return GroupReport(
        elements=elements, levels=len(fitted.codebook.levels) - 1, delta=fitted.uses_parent or residual,
        bits_per_element=fitted.bits / max(elements, 1), relative_error=base * (fitted.error / energy) ** 0.5,
        refined_error=refined * (fitted.refined_error / energy) ** 0.5 if fitted.refinement_bits else None,
        update_error=fitted.update_error, step=fitted.codebook.step,
        worst_tensor=worst.tensor if worst else None, worst_error=worst.error if worst else None,
    )
