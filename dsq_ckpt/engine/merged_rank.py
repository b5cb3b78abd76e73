"""The files of one rank as they are merged: records keep their numbers, chains become as short as they can be."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dsq_ckpt.coding import RansCoder, shuffle_compress
from dsq_ckpt.coding.scales import items_of_scales
from dsq_ckpt.config.schema import StorageConfig
from dsq_ckpt.core.workers import Workers
from dsq_ckpt.engine.recoding import Recoding
from dsq_ckpt.errors import CorruptCheckpoint
from dsq_ckpt.quantization.groups import kind_of
from dsq_ckpt.quantization.superstep import SuperStep
from dsq_ckpt.storage.checkpoint import Checkpoint
from dsq_ckpt.storage.container import FORMAT_VERSION, Block, ContainerReader, ContainerWriter
from dsq_ckpt.storage.manifest import ManifestFile
from dsq_ckpt.storage.packs import CompressedPack, PackRef
from dsq_ckpt.storage.shard import RecordRef

Tree = dict[str, Any]


def sum_of(checkpoint: Checkpoint, ref: RecordRef) -> list[RecordRef]:
    """Return a record and the records that it is added to, newest first."""
    return checkpoint.follow_chain(ref, "residual", ("coded", "merged", "plain"))


def codes_of(checkpoint: Checkpoint, ref: RecordRef) -> list[RecordRef]:
    """Return a record and the records that its codes are coded given, newest first."""
    return checkpoint.follow_chain(ref, "parent", ("coded", "merged", "plain"))


class MergedRank:
    """One base file, and its refinement file, on their way into a merged checkpoint.

    Records keep their numbers; super-steps that others are added to come after them.

    Attributes:
        requires: ancestors it needs.
        links: deltas in the longest chain of a chunk: differences it adds up, or records its codes are coded given.
        depth: the same, where the oldest of these differences counts with those that its codes are coded given.
        grown: bytes by kind of tensor.
        recodings: groups whose codes are written anew.
        coded: by group, whether any of its records needs an older one, and bytes of its codes.
    """

    def __init__(self, checkpoint: Checkpoint, name: str, goal: Path, keyframe: bool, workers: Workers) -> None:
        self._checkpoint, self._name, self._goal, self._workers = checkpoint, name, goal, workers
        self._keyframe = keyframe
        self._reader = checkpoint.open_reader(name)
        self._stem = Path(name).stem
        refinement = f"{self._stem}.refinement"
        kept = refinement in {file.name for file in checkpoint.manifest.files}
        self._refinement = checkpoint.open_reader(refinement) if kept else None
        self.requires: set[str] = set()
        self.links = self.depth = 0
        self.grown: dict[str, int] = defaultdict(int)
        self.recodings: dict[str, Recoding] = {}
        self.coded: dict[str, tuple[bool, int]] = {}

    def write(self, save_id: str) -> list[ManifestFile]:
        """Write the files of this rank."""
        with self._checkpoint.translate_errors(self._name):
            return self._write(save_id)

    def _write(self, save_id: str) -> list[ManifestFile]:
        head = {"version": FORMAT_VERSION, "save": save_id, "rank": self._reader.contents["rank"]}
        self._base = f"{save_id}{self._name[16:]}"
        with ContainerWriter(self._goal, self._base, True) as self._writer:
            contents = {**self._reader.contents, **head, **self._contents()}
            files = [ManifestFile.from_info(self._writer.finish(contents), "own")]
        if self._refinement is not None:
            with ContainerWriter(self._goal, f"{Path(self._base).stem}.refinement", True) as writer:
                copied = _Copies(self._refinement, writer)
                records = {
                    number: {
                        **entry, "blocks": [copied(place) for place in entry["blocks"]],
                        **({"protected": copied(entry["protected"])} if "protected" in entry else {}),
                    } for number, entry in self._refinement.contents["records"].items()
                }
                contents = {**self._refinement.contents, **head, "base": self._base, "records": records}
                files.append(ManifestFile.from_info(writer.finish(contents), "refinement"))
        return files

    def _contents(self) -> Tree:
        copied, old = _Copies(self._reader, self._writer), self._reader.contents
        self._more: list[Tree] = []
        self._count = len(old["records"])
        self.recodings = self._find_recodings(old["records"])
        records = [self._record(number, record, copied) for number, record in enumerate(old["records"])]
        used = {record["group"] for record in records if record["type"] == "coded"}
        for record in records:
            if record["type"] == "coded":
                given, size = self.coded.get(record["group"], (False, 0))
                own = sum(int(block[1]) for block in record["blocks"] if block is not None)
                self.coded[record["group"]] = given or "parent" in record, size + own
        groups = {
            name: {**group, **self._model(name, group, copied)} for name, group in old["groups"].items() if name in used
        }
        owners = {number: record for record in old["records"] for number in record.get("packs", ())}
        for record in old["records"]:
            if "scales" in record and not isinstance(old["scales"][0], list):
                owners[old["scales"][0]] = record
        packs = [self._pack(number, entry, owners.get(number), copied) for number, entry in enumerate(old["packs"])]
        return {
            **({"scales": self._scales(old["scales"], packs)} if "scales" in old else {}),
            "requires": sorted(self.requires), "groups": groups, "packs": packs, "records": records + self._more,
        }

    def _scales(self, entry: list[Any], packs: list[tuple[Any, ...]]) -> list[int]:
        """Return where scales are now: in their pack, or in one more, as up to format version 7 they were in none."""
        place, count = entry
        if isinstance(place, list):
            items = shuffle_compress(items_of_scales(self._checkpoint.read_scale_numbers(self._name)), 2)
            packs.append(CompressedPack(items, None).write(self._writer, 2, 2 * count))
            self.grown["exp_avg_sq"] += len(items) - int(place[1])
            place = len(packs) - 1
        return [place, count]

    def _pack(self, number: int, entry: Sequence[Any], owner: Tree | None, copied: _Copies) -> tuple[Any, ...]:
        """Return a pack: itself, or coded anew, by itself or given the oldest one of its chain.

        `owner` is a record that lies in it, or whose scales do.
        """
        ref = PackRef(self._name, number)
        place, itemsize, size = entry[:3]
        chain = self._checkpoint.pack_chain(ref)
        if len(chain) == 1:
            return copied(place), itemsize, size
        link = None if self._keyframe else self._checkpoint.make_link(chain[-1:], 1)
        data = self._checkpoint.read_pack(ref)
        packed = CompressedPack.compress(data, itemsize, StorageConfig().zstd_level, lambda: link)
        if packed.link is not None:
            self.requires |= packed.link.requires
            self.links, self.depth = max(self.links, 1), max(self.depth, 1)
        if owner is None:
            raise CorruptCheckpoint(f"pack {number} belongs to no record")
        lossy = owner["type"] == "coded" or "stored" in owner
        self.grown[self._kind(owner) if lossy else "exact"] += len(packed.data) - int(place[1])
        return packed.write(self._writer, itemsize, size)

    def _kind(self, record: Tree) -> str:
        """Return the kind that a lossy record was counted as, of which its name may tell another without the model."""
        kinds = self._checkpoint.manifest.kinds
        found = record["group"].partition("/")[0] if "group" in record else kind_of(record["fqn"])
        return next(kind for kind in (found, "weights", *kinds) if kind in kinds)

    def _find_recodings(self, records: Sequence[Tree]) -> dict[str, Recoding]:
        """Return the groups with chains of codes to be merged."""
        chains: dict[str, list[list[RecordRef]]] = defaultdict(list)
        apart = set()
        for number, record in enumerate(records):
            if record["type"] == "coded" and "residual" in record:  # its codes stay, and so does their model
                apart.add(record["group"])
            elif record["type"] == "coded":
                chain = self._checkpoint.follow_chain(RecordRef(self._name, number), "parent", ("coded",))
                self._check_older(chain)
                chains[record["group"]].append(chain)
        longest = 1 if self._keyframe else 2
        return {
            group: Recoding(self._checkpoint, found, self._keyframe, self._workers)
            for group, found in chains.items() if group not in apart and max(map(len, found)) > longest
        }

    def _check_older(self, chain: Sequence[RecordRef]) -> None:
        if len(chain) > 1 and chain[-1].file == self._name:
            raise CorruptCheckpoint(f"'{self._name}' record {chain[-1].record} is not of an earlier checkpoint")

    def _model(self, name: str, group: Tree, copied: _Copies) -> Tree:
        """Return the coder of a group and the place of its model."""
        if (recoding := self.recodings.get(name)) is None:
            return {"model": copied(group["model"])}
        return {"coder": recoding.coder.name, "model": self._writer.add(recoding.coder.to_bytes())}

    def _recoded(self, ref: RecordRef, record: Tree, copied: _Copies) -> Tree:
        """Return a record whose codes are coded anew."""
        recoding = self.recodings[record["group"]]
        chain = self._checkpoint.follow_chain(ref, "parent", ("coded",))
        found = recoding.blocks(chain, int(self._reader.contents["block_elements"]))
        new = {**record, "blocks": [None if data is None else self._writer.add(data) for data in found]}
        new.pop("parent", None)
        if recoding.given and len(chain) > 1:
            new["parent"] = list(chain[-1])
            self.requires.add(chain[-1].file)  # and none that other records of that file need
            self.links, self.depth = max(self.links, 1), max(self.depth, 1)
        if "protected" in record:
            new["protected"] = copied(record["protected"])
        self.grown[self._kind(record)] += _size(new) - _size(record)
        return new

    def _record(self, number: int, record: Tree, copied: _Copies) -> Tree:
        """Return the record in the merged checkpoint: itself, coded anew, or the super-step of its chain."""
        ref = RecordRef(self._name, number)
        if record["type"] not in ("coded", "merged"):
            return record
        if record.get("group") in self.recodings:
            return self._recoded(ref, record, copied)
        *steps, oldest = chain = sum_of(self._checkpoint, ref)
        self._check_older(chain)
        given = [link.file for link in codes_of(self._checkpoint, oldest)[1:]]
        codes = len(given)
        self.requires |= self._checkpoint.required_files(oldest.file) if steps else set(given)
        refined = self._refinement is not None and str(number) in self._refinement.contents["records"]
        kept = refined or len(steps) < 2
        older: list[Any] = list(oldest)
        runs = list(self._runs(steps[kept:][::-1]))
        links = len(runs) + bool(kept and steps)
        self.links, self.depth = max(self.links, links if steps else codes), max(self.depth, links + codes)
        size = -_size(record)
        for place, run in enumerate(runs):
            merged = self._merged(record, run, older)
            size += _size(merged)
            if place == len(runs) - 1 and not kept:
                self.grown[self._kind(record)] += size
                return merged
            older = [self._base, self._count + len(self._more)]
            self._more.append(merged)
        new = {**record, "blocks": [None if block is None else copied(block) for block in record["blocks"]]}
        if "protected" in record:
            new["protected"] = copied(record["protected"])
        if steps:
            new["residual"] = older
        self.grown[self._kind(record)] += size + _size(new)
        return new

    def _runs(self, steps: Sequence[RecordRef]) -> Iterator[SuperStep]:
        """Yield differences, oldest first, merged as far as possible."""
        current: SuperStep | None = None
        for link in steps:
            step = self._checkpoint.read_superstep(link, self._checkpoint.decode_codes(link, self._workers))
            both = None if current is None else current.then(step)
            if current is not None and both is None:
                yield current
            current = both or step
        if current is not None:
            yield current

    def _merged(self, like: Tree, step: SuperStep, older: list[Any]) -> Tree:
        """Write a super-step and return its record."""
        coder = RansCoder.fit(np.bincount(step.codes, minlength=step.last + 1)[None])
        size = int(self._reader.contents["block_elements"])
        parts = [step.codes[start : start + size] for start in range(0, len(step.codes), size)]
        record = {
            "type": "merged", **{key: like[key] for key in ("fqn", "offsets", "shape", "dtype")},
            "coder": coder.name, "model": self._writer.add(coder.to_bytes()), "steps": step.steps.tolist(),
            "blocks": [self._writer.add(data) for data in self._workers.map(lambda p: coder.encode(p, None), parts)],
            "residual": older,
        }
        if step.own.size:
            record["protected_count"] = step.own.shape[1]
            record["protected"] = self._writer.add(shuffle_compress(step.own.tobytes(), 4))
        return record


class _Copies:
    """A copier of blocks from one file to another."""

    def __init__(self, source: ContainerReader, target: ContainerWriter) -> None:
        self._source, self._target = source, target

    def __call__(self, place: Sequence[Any]) -> Block:
        return self._target.add(self._source.read(Block(*place)))


def _size(record: Tree) -> int:
    """Return the bytes of a record's blocks."""
    places = [*record["blocks"], *([record["protected"]] if "protected" in record else [])]
    return sum(int(place[1]) for place in places if place is not None)
