"""The coders on codes of a real training run: rANS near the conditional entropy, Huffman the same codes back."""

import numpy as np
import torch
from gpt import GPT, GPTConfig, StdlibText, loss_sum
from torch.distributed.checkpoint.state_dict import get_state_dict

import dsq_ckpt
from dsq_ckpt.coding import coder_class
from dsq_ckpt.core.workers import Workers
from dsq_ckpt.quantization.codebook.table import entropy_bits
from dsq_ckpt.storage.checkpoint import Checkpoint

# By default nearly all codes of first moments are zero.
FINE = {"quantize": {"exp_avg": {"codebook": {"fit": "update", "step": 1}}}}


def recorded(root):
    """(previous codes, codes) of every lossy tensor, by group, of two checkpoints of a small GPT in training."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(context=64, layers=2, width=128, heads=4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    text = StdlibText(megabytes=0.5, context=64)
    for step in range(60):
        inputs, targets = text.batch(step, 0, 1, 8)
        (loss_sum(model, inputs, targets) / targets.numel()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in (54, 59):  # near enough for codes of first moments to be worth those before, whatever the text
            weights, moments = get_state_dict(model, optimizer)
            dsq_ckpt.save({"model": weights, "optimizer": moments}, root / str(step), model=model, config=FINE)
    pairs = {}
    with Checkpoint(root / "54") as before, Checkpoint(root / "59") as after, Workers(1, 1 << 20) as workers:
        for key, ref in after.iter_chunks():
            record = after.read_record(ref)
            if record["type"] == "coded" and record.get("parent"):
                previous = before.decode_codes(before.find_record(key.fqn, key.offsets), workers)
                pairs.setdefault(record["group"], []).append((previous, after.decode_codes(ref, workers)))
    return {group: tuple(np.concatenate(part) for part in zip(*parts, strict=True)) for group, parts in pairs.items()}


def test_rans_is_within_two_per_cent_of_the_conditional_entropy(tmp_path):
    groups = recorded(tmp_path)
    assert {"weights/linear", "weights/embedding", "exp_avg/linear/update", "exp_avg_sq/linear/octaves"} <= set(groups)
    for group, (previous, codes) in groups.items():
        counts = np.zeros((int(previous.max()) + 2, int(codes.max()) + 1), np.int64)
        np.add.at(counts, (previous, codes), 1)
        sizes = {}
        for name in ("rans", "huffman"):
            coder = coder_class(name).fit(counts)
            data = coder.encode(codes, previous)
            back = np.empty_like(codes)
            coder.decode(data, previous, back)
            assert (back == codes).all(), (name, group)
            sizes[name] = len(data)
        lanes = 100  # bytes that 32 states take
        assert sizes["rans"] <= 1.02 * entropy_bits(counts) / 8 + lanes, (group, sizes, entropy_bits(counts) / 8)
        # Rows of bytes that the text never has, and first moments, make runs of zeros, which only Huffman sees.
        if not group.endswith("embedding") and not group.startswith("exp_avg/"):
            assert sizes["rans"] < sizes["huffman"], group
