"""Chains whose records are coded in several ways are decoded to the same codes, in place or from array to array."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

import dsq_ckpt
from dsq_ckpt.coding import ChangesCoder, HuffmanCoder, RansCoder, decoding_tasks
from dsq_ckpt.core.workers import Workers
from dsq_ckpt.errors import CorruptCheckpoint
from dsq_ckpt.storage import shard
from dsq_ckpt.storage.checkpoint import Checkpoint
from tests.helpers import independent_reader as independent
from tests.helpers.states import flat_tensors, load_copy, to_bytes

CODERS = {"lists": ChangesCoder.fit, "lanes": RansCoder.fit, "huffman": HuffmanCoder.fit}
CHAINS = [
    ["lists"] * 6, ["lanes", "lists", "lists", "lanes", "lists"], ["lanes"] * 4 + ["lists"],
    ["lists", "huffman", "lists"], ["lanes", "lanes", "lists"],
]


def walk(saves):
    """Weights of which few change their codes from one checkpoint to the next, and some that do not change at all."""
    generator = torch.Generator().manual_seed(0)
    weight, frozen = torch.randn(90, 100, generator=generator), torch.randn(50, 60, generator=generator)
    for number in range(saves):
        half = torch.where(torch.arange(9000).view(90, 100) < 4096, number * 0.0, 0.02)  # two frozen blocks
        yield {"weight": weight, "frozen": frozen}
        weight = weight + half * torch.randn(90, 100, generator=generator)


@pytest.mark.parametrize("chain", CHAINS, ids=" ".join)
@pytest.mark.parametrize("block", [1 << 20, 2048])
def test_every_mix_of_coders(tmp_path, chain, block):
    config = {
        "quantize": {"min_elements": 1000, "weights": {"codebook": {"fit": "lattice", "step": 0.5, "bins": 20}}},
        "storage": {"fsync": False, "block_elements": block}, "refinement": {"keep_last": 100},
    }
    history, coders = dsq_ckpt.SaveHistory(), []
    for number, (how, state) in enumerate(zip(["lanes", *chain], walk(len(chain) + 1), strict=True)):
        with patch.object(shard, "fit_fastest", CODERS[how]):
            dsq_ckpt.save(state, tmp_path / str(number), config=config, history=history)
        path = tmp_path / str(number)
        with Checkpoint(path) as checkpoint:
            own = checkpoint.open_reader(f"{checkpoint.manifest.save_id}-00000.dsq").contents
            coders.append({group["coder"] for group in own["groups"].values()})
            assert checkpoint.manifest.depth == number
        reader = independent.Reader(path)
        for refinement in ("auto", False) if number == len(chain) else (False,):
            for fqn, value in flat_tensors(load_copy(path, state, refinement=refinement)).items():
                assert reader.tensor(fqn, refinement == "auto") == to_bytes(value), (number, fqn)
    assert coders == [{"rans"}, *({{"lists": "changes", "lanes": "rans"}.get(how, how)} for how in chain)]


def test_a_damaged_list_names_its_block(tmp_path):
    config = {"quantize": {"min_elements": 1000}, "storage": {"fsync": False}}
    history = dsq_ckpt.SaveHistory()
    for number, state in enumerate(walk(3)):
        with patch.object(shard, "fit_fastest", ChangesCoder.fit):
            dsq_ckpt.save(state, tmp_path / str(number), config=config, history=history)
    with Checkpoint(tmp_path / "2") as checkpoint, Workers(1, 1 << 20) as workers:
        ref = checkpoint.find_record("weight", (0, 0))
        layer = checkpoint._read_chain_record(ref, 9000)
        codes = checkpoint.decode_codes(checkpoint.follow_chain(ref, "parent", ("coded",))[1], workers)
        damaged = patch.object(type(layer.reader), "borrow", return_value=b"\xff" * 9)
        with damaged, pytest.raises(CorruptCheckpoint, match=r"block 0: damaged"):
            decoding_tasks.run_task(layer.update(slice(0, 9000), codes, workers.scratch))
