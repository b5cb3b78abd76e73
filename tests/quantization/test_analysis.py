"""Merging over ranks: the same codebooks whatever the number of ranks, outliers apart, failures on all ranks."""

import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from dsq_ckpt import DSQConfig, SaveFailed
from dsq_ckpt.core.workers import Workers
from dsq_ckpt.distributed.comm import SingleProcess
from dsq_ckpt.quantization.chunk import Chunk, ChunkKey, CodedChunk, QuantizingChunk
from dsq_ckpt.quantization.dequantizer import Dequantizer
from dsq_ckpt.quantization.global_sketch import LocalChunks, build_global_sketch
from dsq_ckpt.quantization.layout import Layout, ParentModel
from tests.helpers.thread_ranks import make_thread_ranks


def layout_of(tensors):
    config = DSQConfig().quantize
    groups = {"weights/linear": config.weights, "exp_avg_sq/linear": config.exp_avg_sq}
    used = {fqn: "exp_avg_sq/linear" if fqn.endswith("exp_avg_sq") else "weights/linear" for fqn in tensors}
    return Layout(used, {name: groups[name] for name in sorted(set(used.values()))})


def chunks_of(tensors, layout, rank, ranks, parents=None):
    chunks = []
    for fqn, tensor in tensors.items():
        share = tensor.tensor_split(ranks)[rank]
        start = sum(len(part) for part in tensor.tensor_split(ranks)[:rank])
        key = ChunkKey(fqn, (start, 0), tuple(share.shape))
        parent = None if parents is None else parents[fqn][start * tensor.shape[1] :][: share.numel()]
        chunks.append(Chunk(key, share, layout.tensors[fqn], 4, parent=parent))
    return chunks


def run(tensors, ranks, parent=None, parents=None, outlier_octaves=3, fail_on=None):
    layout = layout_of(tensors)
    comms = [SingleProcess()] if ranks == 1 else make_thread_ranks(ranks)

    def run_rank(rank):
        def load():
            if rank == fail_on:
                raise OSError("the dog ate it")
            return LocalChunks(chunks_of(tensors, layout, rank, ranks, parents))

        comm = comms[rank]
        with Workers(2, 1 << 12) as workers:
            sketch = build_global_sketch(load, layout, parent, outlier_octaves, comm, workers)
            return sketch.chunks, sketch.fit()

    with ThreadPoolExecutor(ranks) as pool:
        futures = [pool.submit(run_rank, rank) for rank in range(ranks)]
        errors = [future.exception() for future in futures]
        return [future.result() for future in futures] if not any(errors) else errors


def tensors(seed=0):
    generator = torch.Generator().manual_seed(seed)
    state = {f"layer{i}.weight": torch.randn(90, 80, generator=generator) * 0.02 * (i + 1) for i in range(3)}
    state["optimizer.state.layer0.weight.exp_avg_sq"] = torch.randn(90, 80, generator=generator).exp_() * 1e-9
    return state


@pytest.mark.parametrize("ranks", [2, 3])
def test_codebooks_do_not_depend_on_the_number_of_ranks(ranks):
    state = tensors()
    ((_, alone),) = run(state, 1)
    for _, shared in run(state, ranks):
        assert shared.exponents == alone.exponents
        for group, fitted in alone.fitted.items():
            assert shared.fitted[group].codebook.to_json() == fitted.codebook.to_json()
            assert (shared.fitted[group].counts == fitted.counts).all()
    parent = ParentModel({group: fitted.codebook for group, fitted in alone.fitted.items()}, alone.exponents)
    (chunks, _), = run(state, 1)
    with Workers(1, 1 << 12) as workers:
        codes = {
            c.key.fqn: CodedChunk.from_source(QuantizingChunk(c, alone.fitted[c.group]), workers).codes for c in chunks
        }
    later = {fqn: tensor * 1.01 for fqn, tensor in state.items()}
    ((_, alone),) = run(later, 1, parent, codes)
    for _, shared in run(later, ranks, parent, codes):
        for group, fitted in alone.fitted.items():
            assert (shared.fitted[group].counts == fitted.counts).all()
            assert (shared.fitted[group].table == fitted.table).all()


def test_staged_codes_reach_another_process():
    state = tensors()
    ((chunks, analysis),) = run(state, 1)
    with Workers(1, 1 << 12) as workers:
        for chunk in chunks:
            staged = CodedChunk.from_source(QuantizingChunk(chunk, analysis.fitted[chunk.group]), workers)
            sent = pickle.loads(pickle.dumps(staged))
            assert (sent.codes == staged.codes).all() and list(sent.data) == list(staged.data) and len(sent.data) == 2
            for block, before in zip(sent.data.values(), staged.data.values(), strict=True):
                assert (block.protected == before.protected).all() and block.refinement == before.refinement
                assert len(block.refinement) >= (90 * 80 - 4096) // 2


@pytest.mark.parametrize("outlier_octaves", [0, 3])
def test_an_outlier_tensor_does_not_spoil_its_group(outlier_octaves):
    state = {fqn: tensor for fqn, tensor in tensors().items() if not fqn.startswith("optimizer")}
    state["wild.weight"] = torch.randn(90, 80, generator=torch.Generator().manual_seed(7)) * 1500
    ((chunks, analysis),) = run(state, 1, outlier_octaves=outlier_octaves)
    errors = {}
    with Workers(1, 1 << 20) as workers:
        for chunk in chunks:
            coded = CodedChunk.from_source(QuantizingChunk(chunk, analysis.fitted[chunk.group]), workers)
            values = np.empty(len(coded.codes), np.float32)
            Dequantizer(analysis.fitted[chunk.group].codebook, chunk.exponent, 0).block(
                coded.codes, coded.data[0].protected, None, values
            )
            errors[chunk.key.fqn] = float((torch.from_numpy(values) - chunk.flat()).norm() / chunk.flat().norm())
    if outlier_octaves:
        assert set(analysis.exponents) == {"wild.weight"} and 14 <= analysis.exponents["wild.weight"] <= 17
        assert max(errors.values()) < 0.4, errors
    else:
        assert not analysis.exponents and errors["layer0.weight"] > 0.9, "without it the small tensors are all zeros"


def test_tensors_with_nan_are_left_out_on_every_rank():
    state = tensors()
    clean = run({fqn: t for fqn, t in state.items() if fqn != "layer1.weight"}, 1)[0][1]
    state["layer1.weight"][80, 3] = float("nan")
    state["layer1.weight"][0, 0] = 1e38
    for chunks, analysis in run(state, 2):
        assert analysis.nonfinite == {"layer1.weight"}
        assert "layer1.weight" not in {chunk.key.fqn for chunk in chunks}
        assert analysis.fitted["weights/linear"].codebook.step == clean.fitted["weights/linear"].codebook.step


@pytest.mark.parametrize("delta", [False, True])
def test_a_failing_rank_fails_all(delta):
    state = tensors()
    parent = None
    if delta:
        ((_, alone),) = run(state, 1)
        parent = ParentModel({group: fitted.codebook for group, fitted in alone.fitted.items()}, {})
    errors = run(state, 3, parent, fail_on=1)
    assert all(isinstance(error, SaveFailed) for error in errors)
    assert "the dog ate it" in str(errors[1]) and "rank 1" in str(errors[0]) and "rank 1" in str(errors[2])
