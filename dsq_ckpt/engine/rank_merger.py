"""`RankMerger`: the files of one rank in a merged checkpoint. Records keep their numbers; chains get minimal length."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dsq_ckpt.coding import RansCoder, shuffle_compress
from dsq_ckpt.coding.refinement_blocks import without_differences
from dsq_ckpt.coding.scales import pack_scales
from dsq_ckpt.config.schema import StorageConfig
from dsq_ckpt.core.workers import Workers
from dsq_ckpt.engine.recoding import GroupRecoder
from dsq_ckpt.errors import CorruptCheckpoint
from dsq_ckpt.quantization.groups import kind_of
from dsq_ckpt.quantization.superstep import SuperStep
from dsq_ckpt.storage.checkpoint import Checkpoint
from dsq_ckpt.storage.chunk_load import split_blocks
from dsq_ckpt.storage.container import FORMAT_VERSION, Block, ContainerReader, ContainerWriter
from dsq_ckpt.storage.manifest import ManifestFile
from dsq_ckpt.storage.packs import CompressedPack, PackRef
from dsq_ckpt.storage.refinement_layers import get_refinement_name, read_layers, read_refinement
from dsq_ckpt.storage.shard import RecordRef

Tree = dict[str, Any]


def find_residual_chain(checkpoint: Checkpoint, ref: RecordRef) -> list[RecordRef]:
    """Return the records whose values are summed for a record, newest first."""
    return checkpoint.follow_chain(ref, "residual", ("coded", "merged", "plain"))


def find_parent_chain(checkpoint: Checkpoint, ref: RecordRef) -> list[RecordRef]:
    """Return the records through which the codes of a record are decoded, newest first."""
    return checkpoint.follow_chain(ref, "parent", ("coded", "merged", "plain"))


class RankMerger:
    """A writer of one base file, and its refinement file, in a merged checkpoint.

    Records keep their numbers; super-steps to which other records are added follow them.

    Attributes:
        requires: names of the required files of ancestors.
        links: deltas in the longest chain of a chunk: summed differences, or records that codes are decoded through.
        depth: the same, including the records that the codes of the oldest difference are decoded through.
        size_changes: change of bytes by kind of tensor, in the base file.
        refinement_changes: the same in the refinement file.
        recodings: recoders of the groups whose codes are coded again.
        group_sizes: by group, whether any of its records needs an older one, and bytes of its codes.
    """

    def __init__(self, checkpoint: Checkpoint, name: str, goal: Path, keyframe: bool, workers: Workers) -> None:
        self._checkpoint, self._name, self._target, self._workers = checkpoint, name, goal, workers
        self._keyframe = keyframe
        self._reader = checkpoint.open_reader(name)
        refinement = get_refinement_name(name)
        is_refined = refinement in {file.name for file in checkpoint.manifest.files}
        self._refinement = checkpoint.open_reader(refinement) if is_refined else None
        self.requires: set[str] = set()
        self.links = self.depth = 0
        self.size_changes: dict[str, int] = defaultdict(int)
        self.refinement_changes: dict[str, int] = defaultdict(int)
        self.recodings: dict[str, GroupRecoder] = {}
        self.group_sizes: dict[str, tuple[bool, int]] = {}

    def write(self, save_id: str) -> list[ManifestFile]:
        """Write the files of this rank."""
        with self._checkpoint.translate_errors(self._name):
            return self._write(save_id)

    def _write(self, save_id: str) -> list[ManifestFile]:
        head = {"version": FORMAT_VERSION, "save": save_id, "rank": self._reader.contents["rank"]}
        self._base = f"{save_id}{self._name[16:]}"
        with ContainerWriter(self._target, self._base, True) as self._writer:
            contents = {**self._reader.contents, **head, **self._write_contents()}
            files = [ManifestFile.from_info(self._writer.finish(contents), "own")]
        if self._refinement is not None:
            with ContainerWriter(self._target, get_refinement_name(self._base), True) as writer:
                copied = _BlockCopier(self._refinement, writer)
                records = {
                    number: {
                        **{key: value for key, value in entry.items() if key != "older"},
                        "blocks": self._write_refinement(int(number), entry, writer, copied),
                        **({"protected": copied(entry["protected"])} if "protected" in entry else {}),
                    } for number, entry in self._refinement.contents["records"].items()
                }
                contents = {
                    **self._refinement.contents, **head, "base": self._base, "requires": [], "records": records,
                }
                files.append(ManifestFile.from_info(writer.finish(contents), "refinement"))
        return files

    def _write_refinement(
        self, number: int, entry: Tree, writer: ContainerWriter, copied: _BlockCopier
    ) -> list[Block]:
        """Write the refinement of a record so that it needs no older layer; return its blocks."""
        if "older" not in entry:
            return [copied(block) for block in entry["blocks"]]
        layers, scratch = read_refinement(self._checkpoint, RecordRef(self._name, number)), self._workers.scratch
        record = self._reader.contents["records"][number]
        blocks = [
            writer.add(without_differences(read_layers(layers, index, scratch), span.stop - span.start, scratch))
            for index, span in enumerate(split_blocks(math.prod(record["shape"]), layers[0].step))
        ]
        change = sum(block.size for block in blocks) - sum(int(block[1]) for block in entry["blocks"])
        self.refinement_changes[self._find_kind(record)] += change
        return blocks

    def _write_contents(self) -> Tree:
        copied, old = _BlockCopier(self._reader, self._writer), self._reader.contents
        self._added_records: list[Tree] = []
        self._count = len(old["records"])
        self.recodings = self._find_recodings(old["records"])
        records = [self._write_record(number, record, copied) for number, record in enumerate(old["records"])]
        used = {record["group"] for record in records if record["type"] == "coded"}
        for record in records:
            if record["type"] == "coded":
                uses_parent, size = self.group_sizes.get(record["group"], (False, 0))
                own_bytes = sum(int(block[1]) for block in record["blocks"] if block is not None)
                self.group_sizes[record["group"]] = uses_parent or "parent" in record, size + own_bytes
        groups = {
            name: {**group, **self._write_model(name, group, copied)}
            for name, group in old["groups"].items() if name in used
        }
        owners = {number: record for record in old["records"] for number in record.get("packs", ())}
        for record in old["records"]:
            if "scales" in record and not isinstance(old["scales"][0], list):
                owners[old["scales"][0]] = record
        packs = [
            self._write_pack(number, entry, owners.get(number), copied) for number, entry in enumerate(old["packs"])
        ]
        return {
            **({"scales": self._write_scales(old["scales"], packs)} if "scales" in old else {}),
            "requires": sorted(self.requires), "groups": groups, "packs": packs,
            "records": records + self._added_records,
        }

    def _write_scales(self, entry: list[Any], packs: list[tuple[Any, ...]]) -> list[int]:
        """Return pack and count of the scales; those up to format version 7, which are in no pack, get a new one."""
        number, count = entry
        if isinstance(number, list):
            items = shuffle_compress(pack_scales(self._checkpoint.read_scale_numbers(self._name)), 2)
            packs.append(CompressedPack(items, None).write(self._writer, 2, 2 * count))
            self.size_changes["exp_avg_sq"] += len(items) - int(number[1])
            number = len(packs) - 1
        return [number, count]

    def _write_pack(
        self, number: int, entry: Sequence[Any], owner: Tree | None, copied: _BlockCopier
    ) -> tuple[Any, ...]:
        """Write a pack and return its entry: copied, or coded without a parent or given the oldest pack of its chain.

        Args:
            number: number of the pack.
            entry: its entry in the source.
            owner: a record in the pack, or whose scales are in it.
            copied: copier of blocks.
        """
        ref = PackRef(self._name, number)
        index, itemsize, size = entry[:3]
        chain = self._checkpoint.pack_chain(ref)
        if len(chain) == 1:
            return copied(index), itemsize, size
        link = None if self._keyframe else self._checkpoint.make_link(chain[-1:], 1)
        data = self._checkpoint.read_pack(ref)
        packed = CompressedPack.compress(data, itemsize, StorageConfig().zstd_level, lambda: link)
        if packed.link is not None:
            self.requires |= packed.link.requires
            self.links, self.depth = max(self.links, 1), max(self.depth, 1)
        if owner is None:
            raise CorruptCheckpoint(f"pack {number} belongs to no record")
        lossy = owner["type"] == "coded" or "stored" in owner
        self.size_changes[self._find_kind(owner) if lossy else "exact"] += len(packed.data) - int(index[1])
        return packed.write(self._writer, itemsize, size)

    def _find_kind(self, record: Tree) -> str:
        """Return the kind of a lossy record in the manifest, which its name alone may not define."""
        kinds = self._checkpoint.manifest.kinds
        own_kind = record["group"].partition("/")[0] if "group" in record else kind_of(record["fqn"])
        return next(kind for kind in (own_kind, "weights", *kinds) if kind in kinds)

    def _find_recodings(self, records: Sequence[Tree]) -> dict[str, GroupRecoder]:
        """Return the recoders of groups with chains of codes to merge."""
        chains: dict[str, list[list[RecordRef]]] = defaultdict(list)
        with_residuals = set()
        for number, record in enumerate(records):
            if record["type"] == "coded" and "residual" in record:  # its codes and their model are copied
                with_residuals.add(record["group"])
            elif record["type"] == "coded":
                chain = self._checkpoint.follow_chain(RecordRef(self._name, number), "parent", ("coded",))
                self._check_older(chain)
                chains[record["group"]].append(chain)
        longest = 1 if self._keyframe else 2
        return {
            group: GroupRecoder(self._checkpoint, links, self._keyframe, self._workers)
            for group, links in chains.items() if group not in with_residuals and max(map(len, links)) > longest
        }

    def _check_older(self, chain: Sequence[RecordRef]) -> None:
        if len(chain) > 1 and chain[-1].file == self._name:
            raise CorruptCheckpoint(f"'{self._name}' record {chain[-1].record} is not of an earlier checkpoint")

    def _write_model(self, name: str, group: Tree, copied: _BlockCopier) -> Tree:
        """Write the model of a group; return its coder, if that changes, and the block of the model."""
        if (recoding := self.recodings.get(name)) is None:
            return {"model": copied(group["model"])}
        return {"coder": recoding.coder.name, "model": self._writer.add(recoding.coder.to_bytes())}

    def _recode_record(self, ref: RecordRef, record: Tree, copied: _BlockCopier) -> Tree:
        """Code the codes of a record again; return the new record."""
        recoding = self.recodings[record["group"]]
        chain = self._checkpoint.follow_chain(ref, "parent", ("coded",))
        blocks = recoding.encode_blocks(chain, int(self._reader.contents["block_elements"]))
        new = {**record, "blocks": [None if data is None else self._writer.add(data) for data in blocks]}
        new.pop("parent", None)
        if recoding.uses_parent and len(chain) > 1:
            new["parent"] = list(chain[-1])
            self.requires.add(chain[-1].file)  # not the files that its other records need
            self.links, self.depth = max(self.links, 1), max(self.depth, 1)
        if "protected" in record:
            new["protected"] = copied(record["protected"])
        self.size_changes[self._find_kind(record)] += _get_record_size(new) - _get_record_size(record)
        return new

    def _write_record(self, number: int, record: Tree, copied: _BlockCopier) -> Tree:
        """Return the record in the merged checkpoint: copied, recoded, or the super-step of its chain."""
        ref = RecordRef(self._name, number)
        if record["type"] not in ("coded", "merged"):
            return record
        if record.get("group") in self.recodings:
            return self._recode_record(ref, record, copied)
        *steps, oldest = chain = find_residual_chain(self._checkpoint, ref)
        self._check_older(chain)
        older_files = [link.file for link in find_parent_chain(self._checkpoint, oldest)[1:]]
        codes = len(older_files)
        self.requires |= self._checkpoint.required_files(oldest.file) if steps else set(older_files)
        refined = self._refinement is not None and str(number) in self._refinement.contents["records"]
        keeps_chain = refined or len(steps) < 2
        older: list[Any] = list(oldest)
        runs = list(self._merge_steps(steps[keeps_chain:][::-1]))
        links = len(runs) + bool(keeps_chain and steps)
        self.links, self.depth = max(self.links, links if steps else codes), max(self.depth, links + codes)
        size = -_get_record_size(record)
        for index, run in enumerate(runs):
            merged = self._write_superstep(record, run, older)
            size += _get_record_size(merged)
            if index == len(runs) - 1 and not keeps_chain:
                self.size_changes[self._find_kind(record)] += size
                return merged
            older = [self._base, self._count + len(self._added_records)]
            self._added_records.append(merged)
        new = {**record, "blocks": [None if block is None else copied(block) for block in record["blocks"]]}
        if "protected" in record:
            new["protected"] = copied(record["protected"])
        if steps:
            new["residual"] = older
        self.size_changes[self._find_kind(record)] += size + _get_record_size(new)
        return new

    def _merge_steps(self, steps: Sequence[RecordRef]) -> Iterator[SuperStep]:
        """Yield super-steps, oldest first: differences merged as far as possible."""
        current: SuperStep | None = None
        for link in steps:
            step = self._checkpoint.read_superstep(link, self._checkpoint.decode_codes(link, self._workers))
            both = None if current is None else current.join(step)
            if current is not None and both is None:
                yield current
            current = both or step
        if current is not None:
            yield current

    def _write_superstep(self, like: Tree, step: SuperStep, older: list[Any]) -> Tree:
        """Write a super-step and return its record."""
        coder = RansCoder.fit(np.bincount(step.codes, minlength=step.escape_code + 1)[None])
        size = int(self._reader.contents["block_elements"])
        parts = [step.codes[start : start + size] for start in range(0, len(step.codes), size)]
        record = {
            "type": "merged", **{key: like[key] for key in ("fqn", "offsets", "shape", "dtype")},
            "coder": coder.name, "model": self._writer.add(coder.to_bytes()), "steps": step.steps.tolist(),
            "blocks": [self._writer.add(data) for data in self._workers.map(lambda p: coder.encode(p, None), parts)],
            "residual": older,
        }
        if step.escaped.size:
            record["protected_count"] = step.escaped.shape[1]
            record["protected"] = self._writer.add(shuffle_compress(step.escaped.tobytes(), 4))
        return record


class _BlockCopier:
    """A copier of blocks from one file to another."""

    def __init__(self, source: ContainerReader, target: ContainerWriter) -> None:
        self._source, self._target = source, target

    def __call__(self, block: Sequence[Any]) -> Block:
        return self._target.add(self._source.read(Block(*block)))


def _get_record_size(record: Tree) -> int:
    """Return the bytes of a record's blocks."""
    places = [*record["blocks"], *([record["protected"]] if "protected" in record else [])]
    return sum(int(block[1]) for block in places if block is not None)
