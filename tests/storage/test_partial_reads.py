"""A load of a part of a chunk decodes the blocks that overlap it, and no others; values are those of the whole."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import _create_read_item_for_tensor

import dsq_ckpt
from dsq_ckpt.core.workers import Workers
from dsq_ckpt.storage.chain_decoding import ChainRecord
from dsq_ckpt.storage.checkpoint import Checkpoint
from dsq_ckpt.storage.chunk_load import CodeReuse, decode_all
from tests.helpers.commands import find_file
from tests.helpers.states import flat_tensors, load_copy, to_bytes

BLOCK, STEPS = 1024, 4
CONFIG = {"storage": {"block_elements": BLOCK, "fsync": False}}
KMEANS = {**CONFIG, "quantize": {"weights": {"codebook": {"fit": "kmeans", "protect": 0.01}}}}


def states(dtype):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(120, 100, generator=generator)
    for _ in range(STEPS):
        step = 0.02 * torch.randn(weight.shape, generator=generator)
        weight = weight + step
        moments = {"exp_avg": step.to(dtype), "exp_avg_sq": step.square().to(dtype)}
        yield {"model": {"w": weight.to(dtype)}, "optimizer": {"state": {"w": moments}}}


@pytest.fixture(scope="module", params=["float32", "bfloat16", "protected"])
def run(request, tmp_path_factory):
    """The path of the end of a chain, and its tensors, by name."""
    root = tmp_path_factory.mktemp(request.param)
    for number, state in enumerate(states(torch.bfloat16 if request.param == "bfloat16" else torch.float32)):
        dsq_ckpt.save(state, root / str(number), config=KMEANS if request.param == "protected" else CONFIG)
    return request.param, root / str(STEPS - 1), flat_tensors(load_copy(root / str(STEPS - 1), state))


def read(path, fqn, offsets, lengths, like):
    """Read a box of a tensor by the storage reader."""
    target = torch.zeros(lengths, dtype=like.dtype)
    index = MetadataIndex(fqn, torch.Size([0] * like.dim()))
    item = _create_read_item_for_tensor(index, (0,) * len(lengths), index, offsets, lengths)
    planner = SimpleNamespace(resolve_tensor=lambda item: target, commit_tensor=lambda item, tensor: None)
    reader = dsq_ckpt.DSQStorageReader(path, history=dsq_ckpt.SaveHistory())
    reader.read_data(LoadPlan([item]), planner).wait()
    return target


def test_values_are_those_of_the_whole(run):
    _, path, expected = run

    @settings(deadline=None, max_examples=25)
    @given(st.data())
    def check(data):
        fqn = data.draw(st.sampled_from(sorted(expected)))
        whole = expected[fqn]
        first = [data.draw(st.integers(0, size - 1)) for size in whole.shape]
        lengths = [data.draw(st.integers(0, size - at)) for size, at in zip(whole.shape, first, strict=True)]
        box = whole[tuple(slice(at, at + size) for at, size in zip(first, lengths, strict=True))]
        assert to_bytes(read(path, fqn, first, lengths, whole)) == to_bytes(box)

    check()


@pytest.mark.parametrize("fqn", ["model.w", "optimizer.state.w.exp_avg", "optimizer.state.w.exp_avg_sq"])
def test_no_other_blocks_are_decoded(run, monkeypatch, fqn):
    kind, path, expected = run
    decoded = []
    decode = ChainRecord.decode
    monkeypatch.setattr(
        ChainRecord, "decode", lambda self, where, *rest: decoded.append(where) or decode(self, where, *rest)
    )
    read(path, fqn, [50, 0], [20, 100], expected[fqn])  # elements 5000 to 7000
    blocks = {where.start // BLOCK for where in decoded}
    whole = kind == "protected" and fqn == "model.w"  # whose protected values are numbered from the first element on
    assert blocks == (set(range(math.ceil(120 * 100 / BLOCK))) if whole else {4, 5, 6})


def test_blocks_that_are_not_needed_may_be_damaged(run, tmp_path):
    kind, path, expected = run
    if kind == "protected":
        return
    with Checkpoint(path) as checkpoint, Workers(1, BLOCK) as workers:
        ref = checkpoint.find_record("model.w", (0, 0))
        offset, size, _ = checkpoint.read_record(ref)["blocks"][0]
        assert len(checkpoint.prepare_load(ref, True, workers, span=(0, 12_000)).blocks) == math.ceil(12_000 / BLOCK)
        load = checkpoint.prepare_load(ref, True, workers, span=(5000, 7000), reuse=CodeReuse(keep=True))
        assert load.blocks == [slice(at * BLOCK, (at + 1) * BLOCK) for at in (4, 5, 6)]
        [load] = decode_all([load], workers)
        part = slice(4 * BLOCK, 7 * BLOCK)
        assert (load.codes[part] == checkpoint.decode_codes(ref, workers)[part]).all()
        assert to_bytes(load.tensor.view(-1)[part]) == to_bytes(expected["model.w"].view(-1)[part])
    file = find_file(path)
    held = file.read_bytes()
    file.write_bytes(held[:offset] + bytes(byte ^ 255 for byte in held[offset : offset + size]) + held[offset + size :])
    try:
        whole = expected["model.w"]
        assert to_bytes(read(path, "model.w", [50, 0], [20, 100], whole)) == to_bytes(whole[50:70])
        with pytest.raises(dsq_ckpt.CorruptCheckpoint, match=file.name):
            read(path, "model.w", [0, 0], [20, 100], whole)
    finally:
        file.write_bytes(held)


def test_second_moments_of_a_part_are_decoded_once(run, monkeypatch):
    """Both moments of a part need them; a part of first moments that reaches beyond is decoded with its own."""
    _, path, expected = run
    names = ["optimizer.state.w.exp_avg", "optimizer.state.w.exp_avg_sq"]
    decoded = []
    decode = ChainRecord.decode
    monkeypatch.setattr(
        ChainRecord, "decode",
        lambda self, where, *rest: decoded.append((str(self.reader.path), str(self.blocks), where.start))
        or decode(self, where, *rest),
    )
    for first, length in ([50, 20], [45, 30]):
        # Weights come in between, as in a state: what is prepared beside the last block knows no codes of it.
        boxes = {"model.w": [50, 20], names[0]: [first, length], names[1]: [50, 20]}
        targets = {fqn: torch.zeros([box[1], 100], dtype=expected[fqn].dtype) for fqn, box in boxes.items()}
        items = []
        for fqn, box in boxes.items():
            index = MetadataIndex(fqn, torch.Size([0, 0]))
            items.append(_create_read_item_for_tensor(index, (0, 0), index, [box[0], 0], [box[1], 100]))
        planner = SimpleNamespace(
            resolve_tensor=lambda item, targets=targets: targets[item.dest_index.fqn],
            commit_tensor=lambda item, tensor: None,
        )
        decoded.clear()
        reader = dsq_ckpt.DSQStorageReader(path, threads=1, history=dsq_ckpt.SaveHistory())
        reader.read_data(LoadPlan(items), planner).wait()
        assert (max(map(decoded.count, decoded)) == 1) is (length == 20)
        for fqn, (at, rows) in boxes.items():
            assert to_bytes(targets[fqn]) == to_bytes(expected[fqn][at : at + rows])
