"""The error of what is lossy, against the cells that the codebook itself states."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

import dsq_ckpt
from dsq_ckpt.core.workers import Workers
from dsq_ckpt.quantization.dequantizer import scale_of
from dsq_ckpt.storage.checkpoint import Checkpoint
from dsq_ckpt.storage.manifest import Manifest
from tests.helpers.states import load_copy

DISTRIBUTIONS = {
    "normal": lambda rng, n: rng.normal(size=n) * 0.02,
    "laplace": lambda rng, n: rng.laplace(size=n),
    "student": lambda rng, n: rng.standard_t(2, size=n) * 1e-3,
    "lognormal": lambda rng, n: np.exp(rng.normal(size=n) * 6 - 20),
    "uniform": lambda rng, n: rng.uniform(-3, 1, size=n),
    "sparse": lambda rng, n: rng.normal(size=n) * (rng.random(n) < 0.05),
    "few values": lambda rng, n: rng.choice([-1.0, 0.0, 0.5, 2.0], size=n),
    "one sign": lambda rng, n: -np.abs(rng.normal(size=n)),
    "wide": lambda rng, n: rng.normal(size=n) * 10.0 ** rng.uniform(-30, 30, size=n),
    "wild": lambda rng, n: np.where(rng.random(n) < 0.001, 5000.0, 0.02) * rng.normal(size=n),
}


def lattices():
    return st.fixed_dictionaries({
        "fit": st.just("lattice"), "step": st.floats(0.05, 4), "bins": st.integers(1, 31).map(lambda half: 2 * half),
        "rate_distortion": st.sampled_from([0.0, 0.15, 2.0]),
    })


def kmeans():
    return st.fixed_dictionaries({
        "fit": st.sampled_from(["kmeans", "lloyd"]), "bins": st.integers(2, 254), "prune": st.sampled_from([0.0, 0.2]),
        "protect": st.sampled_from([0.0, 0.005, 0.1]), "sigma": st.sampled_from([1.0, 0.2]),
        "rate_distortion": st.sampled_from([0.0, 0.15, 2.0]),
    })


def log_kmeans():
    return st.fixed_dictionaries({
        "fit": st.sampled_from(["kmeans", "lloyd"]), "bins": st.integers(2, 254), "domain": st.just("log"),
        "protect": st.sampled_from([0.0, 0.005]), "rate_distortion": st.sampled_from([0.0, 0.15]),
    })


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
@given(
    names=st.tuples(st.sampled_from(sorted(DISTRIBUTIONS)), st.sampled_from(sorted(DISTRIBUTIONS))),
    books=st.tuples(st.one_of(lattices(), kmeans(), log_kmeans()), st.one_of(lattices(), kmeans(), log_kmeans())),
    bits=st.integers(0, 8), coder=st.sampled_from(["rans", "huffman"]), seed=st.integers(0, 2**32 - 1),
    same_book=st.booleans(), step=st.sampled_from([0.0, 0.01, 1.0]), octaves=st.sampled_from([0, 3]),
)
def test_every_value_lies_in_its_cell(names, books, bits, coder, seed, same_book, step, octaves):
    """A keyframe and a delta, with two tensors in a group: base and refined values are where the codebook says."""
    note(f"seed {seed}")
    rng = np.random.default_rng(seed)
    state = {
        f"{place}.weight": torch.from_numpy(DISTRIBUTIONS[name](rng, 4800).astype(np.float32).reshape(60, 80))
        for place, name in enumerate(names)
    }
    directory, history = Path(tempfile.mkdtemp()), dsq_ckpt.SaveHistory()
    try:
        for number, book in enumerate((books[0], books[0] if same_book else books[1])):
            path = directory / str(number)
            config = {
                "quantize": {
                    "weights": {"codebook": book, "refinement_bits": bits}, "outlier_octaves": octaves,
                    "rules": [{"pattern": "*", "group": "all"}],  # whatever they hold
                },
                "delta": {"coder": coder}, "storage": {"fsync": False, "block_elements": 1 << 10},
            }
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                dsq_ckpt.save(state, path, config=config, history=history)
                refined = load_copy(path, state, history=history)
                base = load_copy(path, state, refinement=False, history=history)
            with Checkpoint(path) as checkpoint:
                nonfinite = checkpoint.manifest.nonfinite
                for fqn, value in state.items():
                    if fqn in nonfinite:  # too large to be scaled back
                        assert torch.equal(refined[fqn], value)
                    else:
                        check_cells(checkpoint, fqn, value, refined[fqn], base[fqn], bits)
            for value in state.values():
                value += step * value * torch.from_numpy(rng.normal(size=value.shape).astype(np.float32))
    finally:
        shutil.rmtree(directory)


def check_cells(checkpoint, fqn, value, refined, base, bits):
    """Within the cell, the refined value is off by at most one of its 2**bits parts."""
    ref = checkpoint.find_record(fqn, (0, 0))
    book, record = checkpoint.read_codebook(ref), checkpoint.read_record(ref)
    with Workers(1, 1 << 10) as workers:
        codes = checkpoint.decode_codes(ref, workers)
    scale = scale_of(record.get("exponent", 0))
    x, y, z = (part.double().numpy().ravel() for part in (value, refined, base))
    exact = codes == book.protected
    if bits:
        assert (x[exact] == y[exact]).all(), "protected values are whole in the refinement layer"
    assert np.allclose(z[exact], x[exact], rtol=2**-8, atol=1e-39), "protected values are bf16 in the base layer"
    coded = ~exact
    x, y, z, codes = x[coded], y[coded], z[coded], codes[coded]
    levels = np.float32(book.levels).astype(np.float64) * scale
    assert np.allclose(z, levels[codes], rtol=1e-6, atol=1e-44), "the base layer is the level"
    if not bits:
        assert (y == z).all()
        return
    width = book.cell_high - book.cell_low
    part, zero = width[codes] / 2**bits, codes == 0
    if book.domain == "log":
        # bits(|x|) / 2**23 is piecewise linear in |x|: compare there. Code 0 holds what is below every normal number.
        u, v = (np.abs(np.float32(t / scale)).view(np.uint32) / 2.0**23 for t in (x, y))
        assert (y[zero] == 0).all() and (np.abs(x[zero]) < 2.0**-125 * scale).all()
        assert (x[~zero] > 0).all() or not len(x[~zero])
        gap = np.abs(u - v)[~zero]
        assert (gap <= part[~zero] * 0.5 + 2.0**-22).all(), (gap / part[~zero]).max()
    else:
        gap = np.abs(x - y) / scale
        slack = 1e-6 * (np.abs(x) + np.abs(y)) / scale + 1e-6 * part + 1e-37
        assert (gap <= part * 0.5 + slack).all(), (gap / np.maximum(part, 1e-300)).max()
        stated = (book.cell_high - book.cell_low)[codes]
        assert (gap <= 2 * stated / 2**bits + slack).all()


@pytest.mark.parametrize("fit, bins, coder", [  # a lattice has at most 62 levels; codes come back from either coder
    pytest.param(fit, bins, coder, marks=[] if coder == "rans" or bins == 62 else [pytest.mark.campaign])
    for fit in ("lattice", "kmeans", "lloyd") for bins in (2, 62, 254) if (fit, bins) != ("lattice", 254)
    for coder in ("rans", "huffman")
])
def test_relative_error_shrinks_with_bits(tmp_path, fit, coder, bins):
    state, errors = {"w": torch.randn(100, 100) * 0.02}, []
    for bits in (0, 1, 2, 4, 8):
        config = {
            "quantize": {"weights": {"codebook": {"fit": fit, "bins": bins}, "refinement_bits": bits}},
            "delta": {"coder": coder},
        }
        dsq_ckpt.save(state, tmp_path / f"{bits}", config=config, parent=None)
        errors.append(float((load_copy(tmp_path / f"{bits}", state)["w"] - state["w"]).norm() / state["w"].norm()))
    assert errors[-1] < 0.01 and errors[-1] < errors[0] / 20, errors
    assert all(later < 1.05 * sooner for sooner, later in pairwise(errors)), errors


@pytest.mark.parametrize("bits", [1, 2, 4, 5, 8])
def test_zeros_stay_zeros_at_every_quarter_of_an_octave(tmp_path, bits):
    """The steps of a lattice follow the gradients, so that tensors are scaled by powers of two with fractions."""
    generator = torch.Generator().manual_seed(bits)

    def normal():
        return torch.randn(64, 80, generator=generator)

    weights = {f"layer{n}.weight": normal() * 0.02 for n in range(9)}
    state = {**weights, **{f"optimizer.state.{name}.exp_avg_sq": normal().square() * 2.0**n
                           for n, name in enumerate(weights)}}
    for number in range(2):
        for value in weights.values():
            value.add_(normal() * 1e-3)[::3] = 0
        path = tmp_path / str(number)
        dsq_ckpt.save(state, path, config={"quantize": {"weights": {"refinement_bits": bits}}})
        back = load_copy(path, state)
        with Checkpoint(path) as checkpoint:
            records = [checkpoint.read_record(ref) for key, ref in checkpoint.iter_chunks() if key.fqn in weights]
        assert {record.get("exponent", 0) % 1 for record in records} == {0, 0.25, 0.5, 0.75}
        assert not any(back[name][::3].any() for name in weights)


@pytest.mark.parametrize("codebook", [{"fit": "lattice"}, {"fit": "kmeans"}, {"fit": "kmeans", "domain": "log"}])
def test_the_errors_that_a_manifest_tells_are_those_of_what_is_loaded(tmp_path, codebook):
    """Of the base layer and with refinement: what `dsq inspect` shows is measured by nobody else."""
    value = torch.randn(256, 128, generator=torch.Generator().manual_seed(5))
    if codebook.get("domain") == "log":
        value = value.exp()
    rule = {"pattern": "w", "group": "positive"}
    config = {"quantize": {"weights": {"codebook": codebook, "refinement_bits": 4}, "rules": [rule]}}
    dsq_ckpt.save({"w": value}, tmp_path / "run" / "0", config=config)
    [group] = Manifest.read(tmp_path / "run" / "0").groups.values()
    for refinement, told in ((False, group.relative_error), ("auto", group.refined_error)):
        got = {"w": torch.zeros_like(value)}
        dsq_ckpt.load(got, tmp_path / "run" / "0", refinement=refinement)
        assert told == pytest.approx(float((got["w"] - value).norm() / value.norm()), rel=0.3)


@pytest.mark.parametrize("adam", [False, True])
@pytest.mark.parametrize("huge", [1e3, 1e5, 3e38])
def test_one_huge_value_does_not_cost_the_others(tmp_path, huge, adam):
    """Beside normal tensors in one group, whose scale would be far from that of the tensor with it."""
    generator = torch.Generator().manual_seed(5)
    state = {f"l{n}.weight": torch.randn(128, 64, generator=generator) * 0.02 for n in range(3)}
    state["l0.weight"][5, 5] = 0.02 * huge if huge < 1e38 else huge
    for name in list(state) if adam else ():
        gradient = torch.randn(128, 64, generator=generator) * 1e-3
        state |= {f"state.{name}.exp_avg": gradient, f"state.{name}.exp_avg_sq": gradient.square() + 1e-9}
    dsq_ckpt.save(state, tmp_path / "a")
    for refinement, limit in ((True, 0.015), (False, 0.2)):
        back = {name: torch.zeros_like(value) for name, value in state.items()}
        dsq_ckpt.load(back, tmp_path / "a", refinement=refinement)
        errors = [float((back[n] - state[n])[:5].norm() / state[n][:5].norm()) for n in back if n[0] == "l"]
        assert max(errors) < limit, errors


@pytest.mark.parametrize("codebook", [{"fit": "lattice"}, {"fit": "kmeans"}, {"fit": "adaptive"}, {"fit": "exponent"}])
def test_a_manifest_names_the_tensor_that_loses_most(tmp_path, codebook):
    """One codebook serves a group, so a tensor a seventh of the others' size loses more of itself than they do."""
    generator = torch.Generator().manual_seed(5)
    state = {f"l{n}.weight": torch.randn(128, 64, generator=generator) * size for n, size in enumerate((1, 0.15, 1))}
    config = {"quantize": {"weights": {"codebook": codebook}}}
    for number in range(2):
        for value in state.values():
            value.add_(0.02 * value.std() * torch.randn(value.shape, generator=generator))
        dsq_ckpt.save(state, tmp_path / "run" / str(number), config=config)
    [group] = Manifest.read(tmp_path / "run" / "1").groups.values()
    back = load_copy(tmp_path / "run" / "1", state)
    errors = {name: float((back[name] - value).norm() / value.norm()) for name, value in state.items()}
    assert group.worst_tensor == "l1.weight" == max(errors, key=lambda name: errors[name])
    assert group.worst_error == pytest.approx(errors["l1.weight"], rel=0.25)
    assert group.worst_error > 2 * (group.refined_error or group.relative_error)
