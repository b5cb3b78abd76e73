"""What a save of many ranks moves between them, and how long its coordinator takes, simulated in one process.

    python scripts/simulate_ranks.py --json scale.json
    python scripts/simulate_ranks.py --ranks 8 64 --tensors 100

Rank 0 is real: it runs `dcp.save` with its shard of every tensor, which it sketches, quantizes and writes. The messages
of the other ranks are made from its own, with their offsets and files, so that the coordinator plans, checks and
commits what it would get from them. Beside DSQStorageWriter stands DCP's own FileSystemWriter on the same plans, both
with `enable_plan_caching`: the first save is planned, the second one reuses its plans. Bytes are those of the pickled
messages, seconds are of the processor, without garbage collection; the network is not simulated.
"""

from __future__ import annotations

import argparse
import gc
import pickle
import resource
import shlex
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.distributed.checkpoint.utils import _DistWrapper

import dsq_ckpt
from dsq_ckpt.cli import json_files
from dsq_ckpt.dcp import write_step
from dsq_ckpt.dcp import writer as writer_module
from dsq_ckpt.dcp.staging import LocalPlanData
from dsq_ckpt.distributed.comm import SingleProcess
from dsq_ckpt.engine.history import SaveHistory
from dsq_ckpt.engine.writing import RankResult
from dsq_ckpt.quantization.chunk import ChunkKey
from dsq_ckpt.storage.checkpoint import Checkpoint
from dsq_ckpt.storage.container import FileInfo
from dsq_ckpt.storage.shard import WrittenRecord

_ROWS, _COLUMNS = 8, 64
"""Shape of the shard of a tensor on one rank."""
_MEASURED = 8
"""Messages that are pickled; those of the other ranks are taken to be like them."""


class Shard(torch.Tensor):
    """Rank 0's rows of a tensor that all ranks share, which tells DCP's planner of it as a DTensor does."""

    local: torch.Tensor

    @staticmethod
    def __new__(cls, local: torch.Tensor, ranks: int) -> Shard:
        whole = (_ROWS * ranks, _COLUMNS)
        shard = torch.Tensor._make_wrapper_subclass(cls, whole, dtype=local.dtype, device=local.device)
        shard.local = local
        return shard

    def __create_write_items__(self, fqn: str, obj: Any) -> list[WriteItem]:
        chunk = ChunkStorageMetadata(torch.Size((0, 0)), self.local.size())
        data = TensorWriteData(chunk, TensorProperties.create_from_tensor(self.local), self.size())
        return [WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size((0, 0)), self.local.size())]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.local

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Shard({tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise TypeError(f"{func} is not simulated")


def states(ranks: int, tensors: int) -> Iterator[dict[str, Any]]:
    """Yield the states of rank 0: a third each of weights, and of the first and second moments of AdamW."""
    generator = torch.Generator().manual_seed(0)

    def normal(scale: float) -> torch.Tensor:
        return torch.randn(_ROWS, _COLUMNS, generator=generator) * scale

    names = [f"model.layers.{number}.attention.weight" for number in range(tensors // 3)]
    weights = {name: normal(0.02) for name in names}
    while True:
        moved = {name: normal(4e-4) for name in names}
        for name in names:
            weights[name] = weights[name] + moved[name]
        yield {
            "model": {name: Shard(weights[name], ranks) for name in names},
            "optimizer": {"state": {
                name: {"exp_avg": Shard(moved[name], ranks), "exp_avg_sq": Shard(moved[name].square(), ranks)}
                for name in names
            }},
            "step": 100,
        }


class Ledger:
    """Bytes and seconds of one save, by step."""

    def __init__(self) -> None:
        self.bytes: Counter[str] = Counter()
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def timed(self, step: str, times: float = 1) -> Iterator[None]:
        """Add the seconds of a block, `times` over."""
        started = time.thread_time()
        try:
            yield
        finally:
            self.seconds[step] += times * (time.thread_time() - started)


class SimulatedRanks(_DistWrapper):
    """DCP's collectives of rank 0, the coordinator, among ranks whose messages are made from its own."""

    ranks = 1
    ledger = Ledger()
    directory = Path()

    def __init__(self, *_: Any) -> None:
        self.group, self.use_dist, self.coordinator_rank, self.global_coordinator_rank = None, True, 0, 0
        self.rank, self.is_coordinator = 0, True

    def get_world_size(self) -> int:
        return self.ranks

    def reduce_scatter(self, step: str, map_fun: Any, reduce_fun: Any) -> Any:
        timed = self.ledger.timed
        return super().reduce_scatter(step, timed("local plan")(map_fun), timed("global plan")(reduce_fun))

    def all_reduce(self, step: str, map_fun: Any, reduce_fun: Any) -> Any:
        return super().all_reduce(step, map_fun, self.ledger.timed("commit")(reduce_fun))

    def gather_object(self, object: Any) -> list[Any]:
        """Return the messages of all ranks; counts what arrives, and the seconds to unpickle it."""
        self._check(object)
        step = "plans" if isinstance(object, SavePlan) else "results"
        gathered = [
            plan_of(rank, object) if step == "plans" else results_of(rank, object, self.directory)
            for rank in range(self.ranks)
        ]
        some = [pickle.dumps(plan) for plan in gathered[1 : 1 + _MEASURED]]  # all others are alike
        with self.ledger.timed(f"{step} unpickled", (self.ranks - 1) / len(some)):
            for data in some:
                pickle.loads(data)
        self.ledger.bytes[f"{step} gathered"] += (self.ranks - 1) * sum(map(len, some)) // len(some)
        return gathered

    def scatter_object(self, object_list: list[Any] | None) -> Any:
        assert object_list is not None and len(object_list) == self.ranks
        self._check(object_list[0])
        some = object_list[1 : 1 + _MEASURED]
        with self.ledger.timed("plans pickled", (self.ranks - 1) / len(some)):
            size = sum(len(pickle.dumps(value)) for value in some)
        self.ledger.bytes["plans scattered"] += (self.ranks - 1) * size // len(some)
        return object_list[0]

    def broadcast_object(self, object: Any) -> Any:
        self._check(object)
        with self.ledger.timed("metadata pickled"):
            size = len(pickle.dumps(object))
        self.ledger.bytes["metadata broadcast, each rank"] += size
        return object

    @staticmethod
    def _check(value: Any) -> None:
        if isinstance(value, BaseException):
            raise value
        if isinstance(value, tuple) and value and isinstance(value[0], BaseException):  # as DCP wraps errors
            raise value[0]


class SimulatedCommunicator(SingleProcess):
    """The collectives within a save; what each rank receives is counted."""

    def __init__(self, ranks: int, ledger: Ledger) -> None:
        self.size, self._ledger = ranks, ledger

    def sum(self, counts: Any) -> None:
        self._ledger.bytes["sketches summed, each rank"] += counts.nbytes

    def gather(self, value: Any) -> list[Any]:
        self._ledger.bytes["small gathers, each rank"] += self.size * max(4096, 8 + len(pickle.dumps(value)))
        return [value] * self.size

    def broadcast(self, value: Any) -> Any:
        self._ledger.bytes["broadcasts, each rank"] += len(pickle.dumps(value))
        return value


def plan_of(rank: int, plan: SavePlan) -> SavePlan:
    """Return what another rank sends to the coordinator when rank 0 sends `plan`."""
    data = plan.storage_data
    if isinstance(data, LocalPlanData) and data.digest is not None:
        data = data._replace(digest=xxhash.xxh3_128_hexdigest(f"{rank} {data.digest}".encode()))
    if not rank:
        return replace(plan, storage_data=plan.storage_data)
    return replace(plan, storage_data=data, items=[moved(rank, item) for item in plan.items if item.tensor_data])


def moved(rank: int, item: WriteItem) -> WriteItem:
    """Return the item of another rank for the same tensor."""
    assert item.tensor_data is not None  # objects are rank 0's
    offsets = torch.Size((rank * _ROWS, 0))
    chunk = ChunkStorageMetadata(offsets, item.tensor_data.chunk.sizes)
    data = TensorWriteData(chunk, item.tensor_data.properties, item.tensor_data.size)
    return WriteItem(MetadataIndex(item.index.fqn, offsets), item.type, tensor_data=data)


def results_of(rank: int, results: list[WriteResult], directory: Path) -> list[WriteResult]:
    """Return what another rank wrote; its files are made, though not with what they would hold."""
    if not rank:
        return results
    offsets, write_results = torch.Size((rank * _ROWS, 0)), []
    for result in results:
        if result.index.offset is None:  # objects are written by rank 0
            continue
        data = result.storage_data
        if isinstance(data, dict) and "rank" in data:
            data = {"rank": rank_result(rank, data["rank"], directory)}
        elif hasattr(data, "relative_path"):
            data = replace(data, relative_path=f"__{rank}_0.distcp")
        write_results.append(replace(result, index=MetadataIndex(result.index.fqn, offsets), storage_data=data))
    return write_results


def rank_result(rank: int, own: RankResult, directory: Path) -> RankResult:
    """Return the files and records of another rank, and make such files."""
    def name(of: str) -> str:
        save, _, kind = of.partition("-")
        return f"{save}-{rank:05d}.{kind.partition('.')[2]}"

    def file(info: FileInfo) -> FileInfo:
        (directory / name(info.name)).write_bytes(b"")
        return FileInfo(name(info.name), 0, xxhash.xxh3_64_hexdigest(b""), info.contents)

    def key(of: ChunkKey) -> ChunkKey:
        return of._replace(offsets=(rank * _ROWS, 0))

    files = [file(info) for info in own.files]
    written: dict[ChunkKey | str, WrittenRecord] = {
        key(of): replace(record, ref=record.ref._replace(file=files[0].name))
        for of, record in own.written.items() if isinstance(of, ChunkKey)
    }
    requires = [name(of) for of in own.requires]
    for of in requires:
        (directory / of).write_bytes(b"")
    return RankResult(
        rank, own.host, files, own.refinement and file(own.refinement), requires, [], written, own.kinds, own.tied,
        [key(of) for of in own.units],
    )


@contextmanager
def simulated(ranks: int, ledger: Ledger, directory: Path) -> Iterator[None]:
    """Replace the collectives of DCP and of the writer by those of a simulation."""
    original = dcp.DefaultSavePlanner.create_global_plan

    def create_global_plan(self: Any, all_plans: list[SavePlan]) -> Any:
        with ledger.timed("global plan by the planner"):
            return original(self, all_plans)

    SimulatedRanks.ranks, SimulatedRanks.ledger, SimulatedRanks.directory = ranks, ledger, directory
    with (
        patch.object(state_dict_saver, "_DistWrapper", SimulatedRanks),
        patch.object(writer_module, "communicator", lambda *_: SimulatedCommunicator(ranks, ledger)),
        patch.object(write_step, "communicator", lambda *_: SimulatedCommunicator(ranks, ledger)),
        patch.object(dcp.DefaultSavePlanner, "create_global_plan", create_global_plan),
    ):
        yield


def forget_plans() -> None:
    """Empty DCP's caches of plans, which other saves filled."""
    for name in ("save_plan", "final_save_plan", "all_plans", "global_plan", "metadata"):
        getattr(SavePlanner, f"_cached_{name}").clear()


def measure(ranks: int, tensors: int, ours: bool, saves: int, directory: Path) -> list[dict[str, Any]]:
    """Return a row for each save of a run; the first one is planned, and the plans of the others are cached."""
    rows, history = [], SaveHistory()
    forget_plans()
    for number, state in zip(range(saves), states(ranks, tensors), strict=False):
        path, ledger = directory / f"{number:03d}", Ledger()
        writer: StorageWriter
        if ours:
            writer = dsq_ckpt.DSQStorageWriter(path, {"storage": {"fsync": False}}, history=history)
        else:
            writer = dcp.FileSystemWriter(path, sync_files=False)
        gc.collect()
        with simulated(ranks, ledger, path):
            state_dict_saver._save_state_dict(
                state_dict=state, storage_writer=writer, planner=dcp.DefaultSavePlanner(enable_plan_caching=True)
            )
        row: dict[str, Any] = {
            "ranks": ranks, "tensors": tensors, "writer": "dsq_ckpt" if ours else "FileSystemWriter",
            "save": "planned" if number == 0 else "cached", **summary(ledger),
        }
        if ours:
            row |= reading(path)
        rows.append(row)
        print(row, flush=True)
    return rows


def summary(ledger: Ledger) -> dict[str, Any]:
    """Return the sums that a table shows, and all that was counted."""
    coordinator = sum(
        seconds for step, seconds in ledger.seconds.items() if step not in ("local plan", "global plan by the planner")
    )
    sent = ("plans gathered", "plans scattered", "results gathered")
    return {
        "coordinator_seconds": coordinator, "planner_seconds": ledger.seconds["global plan by the planner"],
        "coordinator_bytes": sum(ledger.bytes[step] for step in sent), "seconds": dict(ledger.seconds),
        "bytes": dict(ledger.bytes), "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
    }


def reading(path: Path) -> dict[str, Any]:
    """Return what each rank of the next save reads of a checkpoint to code against it."""
    started = time.thread_time()
    with Checkpoint(path) as checkpoint:
        seconds = time.thread_time() - started
        size = checkpoint.manifest.index.size + (path / "manifest.json").stat().st_size
    return {"parent_bytes": size, "parent_seconds": seconds}


def main() -> None:
    """Run the simulation."""
    gc.disable()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512, 4096])
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--saves", type=int, default=2, help="in each run; from the second on plans are cached")
    parser.add_argument("--json", type=Path, help="file to write")
    arguments = parser.parse_args()
    rows = []
    for ranks in arguments.ranks:
        for ours in (False, True):
            with tempfile.TemporaryDirectory() as directory:
                rows += measure(ranks, arguments.tensors, ours, arguments.saves, Path(directory))
    if arguments.json is not None:
        json_files.write(arguments.json, {
            "command": f"python {shlex.join(sys.argv)}", "torch": torch.__version__, "rows": rows,
        })


if __name__ == "__main__":
    main()
