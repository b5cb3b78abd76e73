"""One rank runs out of memory anywhere in a save or a load, also between collectives.

argv = an empty directory, each | one.

All ranks get an error that names the rank and its cause, nothing is left, and the next one works; in each way to save
and to load. `each` tries the first and the last rank at every place. `one` tries either of them in turn, and the places
that the ways `ALIKE` share once among them. In its ways other than `save`, what follows a failure is the failure at the
next place, and a save or load that succeeds follows the last one alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from faults import broken, state_at
from harness import done, fails_everywhere, normal, world

import dsq_ckpt
from dsq_ckpt import DSQConfig, DSQStorageReader, DSQStorageWriter
from dsq_ckpt.api import compressor, loading, module_placeholders, oneshot, state_matching
from dsq_ckpt.dcp import quantized_staging, reader, writer
from dsq_ckpt.distributed.comm import TorchCommunicator
from dsq_ckpt.engine import chunks, inheritance, pipeline, quantizing
from dsq_ckpt.engine.local_state import LocalShard, LocalState
from dsq_ckpt.quantization import global_sketch
from dsq_ckpt.quantization.analysis import GlobalSketch
from dsq_ckpt.quantization.chunk import ChunkKey, QuantizingChunk
from dsq_ckpt.search.candidates import SaveSearch
from dsq_ckpt.search.trial import TrialModel
from dsq_ckpt.storage.manifest import Manifest
from dsq_ckpt.storage.shard import ShardWriter
from tests.helpers.saving import save_parts

QUANTIZING: list[tuple[Any, str]] = [
    (quantizing, "build_global_sketch"), (global_sketch, "choose_scales"), (global_sketch, "sketch_chunks"),
    (GlobalSketch, "fit"), (GlobalSketch, "find_worst_tensors"), (quantizing, "refine_restored_groups"),
    (quantizing, "emit_save_warnings"), (quantizing, "record_exact_samples"), (chunks, "_quantize_chunk"),
    (QuantizingChunk, "block"),
]
WRITING: list[tuple[Any, str]] = [
    (pipeline, "write_rank"), (ShardWriter, "_add_record"), (ShardWriter, "finish"), (inheritance, "link_files"),
]
SEARCHING: list[tuple[Any, str]] = [
    (SaveSearch, "get_candidate"), (SaveSearch, "fit_refinement"), (TrialModel, "_decode_chunk"),
]
OF_WAY: dict[str, list[tuple[Any, str]]] = {
    "dcp": [(writer, "make_write_results")], "save": [(writer, "make_write_results")],
    "compressor": [(writer, "make_write_results")], "copy": [(writer, "make_write_results")],
    "quantize": [(writer, "make_write_results"), (quantized_staging, "assign_to_lowest_rank")],
}
LOADING: dict[str, list[tuple[Any, str]]] = {
    "dcp": [(reader, "_sort_by_dependency"), (reader, "_get_element_range")],
    "load": [
        (loading, "DSQStorageReader"), (loading.Manifest, "read"), (reader, "_sort_by_dependency"),
        (reader, "_get_element_range"),
    ],
    "compressor": [
        (compressor, "match_saved_state"), (state_matching, "_intersect_ranks"),
        (state_matching, "_match_optimizer_state"), (loading, "DSQStorageReader"),
        (reader, "_sort_by_dependency"), (module_placeholders, "unexpected_on_all_ranks"),
        (compressor, "restore_groups"),
    ],
}
ALIKE = ("dcp", "collectively", "compressor")
"""Ways beside `save` that quantize and write in the thread of the call."""
Save = Callable[[Path], Any]


def in_turn(places: list[tuple[Any, str]], culprits: Sequence[int]) -> Iterator[tuple[Any, str, int]]:
    """Yield what is broken, and on which rank."""
    for number, (target, name) in enumerate(places):
        for culprit in culprits if sys.argv[2] == "each" else [culprits[number % len(culprits)]]:
            yield target, name, culprit


def exhausted(*args: Any, **kwargs: Any) -> Any:
    raise MemoryError("no room")


def check(way: str, save: Save, root: Path, places: list[tuple[Any, str]], rank: int, culprits: Sequence[int]) -> None:
    save(root / way / "first")
    last = places[-1][1]
    for target, name, culprit in in_turn(places, culprits):
        path = root / way / f"{name}-{culprit}"
        with broken(rank == culprit, target, name, exhausted):
            fails_everywhere(lambda: save(path), "MemoryError: no room", culprit)  # noqa: B023
        dist.barrier()
        assert not path.exists(), "nothing is left"
        if name == last or way == "save" or sys.argv[2] == "each":
            save(path)
            assert Manifest.read(path).files
    done(way)


def check_loads(root: Path, rank: int, size: int) -> None:
    model, optimizer = trained()
    both = dsq_ckpt.Compressor(model, optimizer)
    both.save(root / "both")
    dsq_ckpt.save(state_at(2, rank, size), root / "state")
    loads: dict[str, Callable[[], Any]] = {
        "dcp": lambda: dcp.load(state_at(1, rank, size), storage_reader=DSQStorageReader(root / "state")),
        "load": lambda: dsq_ckpt.load(state_at(1, rank, size), root / "state"),
        "compressor": lambda: both.load(root / "both"),
    }
    for way, load in loads.items():
        for target, name, culprit in in_turn(LOADING[way], (0, size - 1)):
            with broken(rank == culprit, target, name, exhausted):
                fails_everywhere(load, "MemoryError: no room", culprit)
            if name == LOADING[way][-1][1] or sys.argv[2] == "each":
                load()
    done("loads")


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(80, 80)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(80)).sum().backward()
    optimizer.step()
    return model, optimizer


def ways(rank: int, size: int) -> dict[str, Save]:
    model, optimizer = trained()
    both = dsq_ckpt.Compressor(model, optimizer)

    def collectively(path: Path) -> None:
        value = normal(90, 64, seed=rank)
        key = ChunkKey(f"own{rank}.weight", (0, 0), (90, 64))
        part = LocalShard(key, key.shape, value.dtype, lambda: value)
        state = LocalState([part], nesting={key.fqn: (key.fqn,)})
        save_parts(path, lambda: state, DSQConfig(), TorchCommunicator())

    def in_background(stage: str) -> Save:
        config = {"storage": {"stage": stage}}
        return lambda path: dsq_ckpt.async_save(state_at(2, rank, size), path, config=config).result(timeout=240)

    return {
        "dcp": lambda path: dcp.save(state_at(2, rank, size), storage_writer=DSQStorageWriter(path)),
        "save": lambda path: dsq_ckpt.save(state_at(2, rank, size), path),
        "collectively": collectively, "copy": in_background("copy"), "quantize": in_background("quantize"),
        "compressor": both.save,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    with world() as (me, ranks):
        for kind, how in ways(me, ranks).items():
            shared = [*QUANTIZING, *WRITING]
            if sys.argv[2] == "one" and kind in ALIKE:
                shared = shared[ALIKE.index(kind) :: len(ALIKE)]
            places = [*shared, *OF_WAY.get(kind, [])]
            alone = kind == "compressor"  # rank 0 writes all of a small state that ranks have copies of
            check(kind, how, Path(sys.argv[1]), places, me, (0,) if alone else (0, ranks - 1))
        net, _ = trained()
        searching = dsq_ckpt.Compressor(net, evaluate=lambda: float((net(torch.ones(80)) - 1).square().mean()))
        check("search", searching.save, Path(sys.argv[1]), SEARCHING, me, (0, ranks - 1))
        whole = dict(net.state_dict())
        check(
            "compress", lambda path: dsq_ckpt.compress(whole, path, communicator=TorchCommunicator()),
            Path(sys.argv[1]), [(oneshot, "xxh3_128_hexdigest"), (oneshot, "SaveOptions")], me, (0, ranks - 1),
        )
        check_loads(Path(sys.argv[1]), me, ranks)
