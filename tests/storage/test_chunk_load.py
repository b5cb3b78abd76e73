"""Chunks are decoded side by side: the same values by any number of threads, few at a time, no write after an error."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext

import pytest
import torch

import dsq_ckpt
from dsq_ckpt.core.workers import Workers
from dsq_ckpt.quantization.codebook import Codebook
from dsq_ckpt.storage import chunk_load
from dsq_ckpt.storage.chain_decoding import ChainRecord
from dsq_ckpt.storage.checkpoint import Checkpoint
from dsq_ckpt.storage.chunk_load import ChunkLoad, decode_all
from dsq_ckpt.storage.manifest import Manifest
from tests.helpers.commands import find_file
from tests.helpers.states import flat_tensors, to_bytes

BLOCK, STEPS = 1024, 3
LATTICE = {"storage": {"block_elements": BLOCK, "fsync": False}, "quantize": {"min_elements": 100}}
PROTECTED = {**LATTICE, "quantize": {"min_elements": 100, "weights": {"codebook": {"fit": "kmeans", "protect": 0.01}}}}
SHAPES = [(50, 100), (14, 64), (6000,), (1, 1025), (40, 80)]


def states(dtype):
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=generator) for shape in SHAPES]
    for _ in range(STEPS):
        steps = [0.05 * torch.randn(shape, generator=generator) for shape in SHAPES]
        weights = [weight + step for weight, step in zip(weights, steps, strict=True)]
        moments = {f"w{n}": {"exp_avg": s.to(dtype), "exp_avg_sq": s.square().to(dtype)} for n, s in enumerate(steps)}
        model = {f"w{number}": weight.to(dtype) for number, weight in enumerate(weights)}
        yield {"model": model, "optimizer": {"state": moments}}


@pytest.fixture(params=["float32", "bfloat16", "protected"])
def run(request, tmp_path):
    """The path of the end of a chain, and a state that can be loaded from it."""
    history, dtype = dsq_ckpt.SaveHistory(), torch.bfloat16 if request.param == "bfloat16" else torch.float32
    for number, state in enumerate(states(dtype)):
        config = PROTECTED if request.param == "protected" else LATTICE
        dsq_ckpt.save(state, tmp_path / str(number), config=config, history=history)
    return tmp_path / str(STEPS - 1), state


def load(path, state, threads):
    reader = dsq_ckpt.DSQStorageReader(path, threads=threads, history=dsq_ckpt.SaveHistory())
    torch.distributed.checkpoint.load(state, storage_reader=reader, no_dist=True)
    return state


def flat(state):
    """The tensors of a state by name, and zeros in their place."""
    return {name: torch.zeros_like(tensor) for name, tensor in flat_tensors(state).items()}


def test_any_number_of_threads_decodes_the_same(run):
    path, state = run
    expected = {name: to_bytes(tensor) for name, tensor in load(path, flat(state), 1).items()}
    for threads in (2, 5):
        assert {name: to_bytes(tensor) for name, tensor in load(path, flat(state), threads).items()} == expected
    with Checkpoint(path) as checkpoint, Workers(3, BLOCK) as workers:  # each chunk by itself, with nothing known
        for key, ref in checkpoint.iter_chunks():
            assert to_bytes(checkpoint.decode_tensor(ref, True, workers)) == expected[key.fqn], key


def test_a_damaged_chunk_stops_the_others(run, monkeypatch):
    """One damaged block among many: it is named, no thread is left, and nothing is written after the error."""
    path, state = run
    with Checkpoint(path) as checkpoint:
        ref = checkpoint.find_record("model.w0", (0, 0))
        offset, size, _ = checkpoint.read_record(ref)["blocks"][2]
    file = find_file(path)
    held = file.read_bytes()
    file.write_bytes(held[:offset] + bytes(byte ^ 255 for byte in held[offset : offset + size]) + held[offset + size :])
    decode, writes = chunk_load.decode_coded, []

    def slow(*arguments):
        time.sleep(0.01)
        yield from decode(*arguments)
        writes.append(time.monotonic())

    monkeypatch.setattr("dsq_ckpt.storage.checkpoint.decode_coded", slow)
    targets = flat(state)
    with pytest.raises(torch.distributed.checkpoint.CheckpointException) as raised:
        load(path, targets, 4)
    ended, contents = time.monotonic(), {name: to_bytes(tensor) for name, tensor in targets.items()}
    [error] = raised.value.failures.values()
    assert isinstance(error[0], dsq_ckpt.CorruptCheckpoint) and file.name in str(error[0])
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("dsq_")]
    assert writes and max(writes) <= ended
    assert contents == {name: to_bytes(tensor) for name, tensor in targets.items()}


@pytest.mark.timeout(60)
def test_blocks_that_wait_for_a_damaged_one_fail(tmp_path, monkeypatch):
    """A block waits for those before it where values stand beside the codes, and not for one that failed."""
    [state, *_] = states(torch.float32)
    dsq_ckpt.save(state, tmp_path / "a", config=PROTECTED, history=dsq_ckpt.SaveHistory())
    decode = ChainRecord.decode

    def damaged(self, where, *rest):
        if where.start == 0:
            time.sleep(0.05)  # later blocks come to wait
            raise dsq_ckpt.CorruptCheckpoint("the first block")
        return decode(self, where, *rest)

    monkeypatch.setattr(ChainRecord, "decode", damaged)
    with Checkpoint(tmp_path / "a") as checkpoint, Workers(4, BLOCK) as workers:
        ref = checkpoint.find_record("model.w0", (0, 0))
        assert checkpoint.read_record(ref)["protected_count"]
        with pytest.raises(dsq_ckpt.CorruptCheckpoint, match="the first block"):
            checkpoint.decode_tensor(ref, True, workers)


@pytest.mark.timeout(60)
def test_blocks_that_wait_for_second_moments_of_a_damaged_one_fail(tmp_path):
    """A block of first moments that fails leaves those of its second moments undecoded, which later blocks wait for."""
    history, squares = dsq_ckpt.SaveHistory(), torch.rand(64, 256) * 1e-6 + 1e-7
    for number in range(2):
        moments = {"exp_avg": torch.randn(64, 256) * 1e-3, "exp_avg_sq": squares}
        state = {"model": {"w": torch.randn(64, 256)}, "optimizer": {"state": {"w": moments}}}
        dsq_ckpt.save(state, tmp_path / str(number), config=LATTICE, history=history)
        squares.view(-1)[::997] *= 1e12  # past the window of the parent: they stand beside the codes
    with Checkpoint(tmp_path / "1") as checkpoint:
        assert checkpoint.read_record(checkpoint.find_record("optimizer.state.w.exp_avg_sq", (0, 0)))["protected_count"]
        first = checkpoint.read_record(checkpoint.find_record("optimizer.state.w.exp_avg", (0, 0)))
        assert first["root"] == "optimizer.state.w.exp_avg_sq" and not first.get("protected_count")
        offset = first["blocks"][3][0]
    file = find_file(tmp_path / "1")
    held = bytearray(file.read_bytes())
    held[offset] ^= 255
    file.write_bytes(held)
    with pytest.raises(torch.distributed.checkpoint.CheckpointException, match="CorruptCheckpoint"):
        load(tmp_path / "1", flat(state), 4)


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_few_chunks_are_begun_ahead(threads):
    begun, most = [], 0

    def fill(where, out, scratch):
        out.fill_(1)

    def loads():
        for _ in range(50):
            begun.append(1)
            yield ChunkLoad(torch.zeros(4), [slice(0, 4)], fill, nullcontext)

    with Workers(threads, BLOCK) as workers:
        for done, chunk in enumerate(decode_all(loads(), workers)):
            assert bool((chunk.tensor == 1).all())
            most = max(most, len(begun) - done)
    assert len(begun) == 50 and most <= 4 * threads + 1


def test_codebooks_of_older_layers_are_not_read(run, monkeypatch):
    path, state = run
    read, read_one = [], Codebook.from_json
    monkeypatch.setattr(Codebook, "from_json", lambda tree: read.append(tree) or read_one(tree))
    dsq_ckpt.load(state, path, history=dsq_ckpt.SaveHistory())
    assert 0 < len(read) <= len(Manifest.read(path).groups)


def test_names_with_the_same_memory_are_written_one_after_the_other(run):
    path, state = run
    single = load(path, flat(state), 1)
    names = "optimizer.state.w0.exp_avg", "optimizer.state.w0.exp_avg_sq"
    for _ in range(5):
        targets = flat(state)
        targets[names[1]] = targets[names[0]]
        load(path, targets, 4)
        assert to_bytes(targets[names[0]]) in {to_bytes(single[name]) for name in names}


def test_views_with_gaps_and_other_dtypes_are_filled(run):
    path, state = run
    expected = load(path, flat(state), 1)
    wide = {name: torch.zeros(*tensor.shape, 2, dtype=tensor.dtype) for name, tensor in expected.items()}
    load(path, {name: tensor[..., 0] for name, tensor in wide.items()}, 3)
    for name, tensor in wide.items():
        assert to_bytes(tensor[..., 0]) == to_bytes(expected[name]) and not tensor[..., 1].any()
    reader = dsq_ckpt.DSQStorageReader(path, threads=3, allow_cast=True, history=dsq_ckpt.SaveHistory())
    double = {name: tensor.double() * 0 for name, tensor in expected.items()}
    torch.distributed.checkpoint.load(double, storage_reader=reader, no_dist=True)
    assert all(torch.equal(double[name], expected[name].double()) for name in expected)


def test_an_error_beside_the_blocks_is_that_of_each(monkeypatch):
    """A block that another thread has taken would else be waited for without end."""
    def fails(works):
        raise MemoryError("no room for tables")

    monkeypatch.setattr(chunk_load.decoding_tasks, "run_tasks", fails)
    load = ChunkLoad(torch.zeros(4), [slice(0, 2), slice(2, 4)], lambda *_: None, nullcontext)
    blocks = [chunk_load._BlockTask(load, where, False) for where in load.blocks]
    with Workers(2, BLOCK) as workers:
        chunk_load._decode_blocks(blocks, workers)
    assert [str(block.done.exception(timeout=0)) for block in blocks] == ["no room for tables"] * 2
