"""Pruning and protection by sensitivity, element by element, and the exact counts that a search relies on."""

import numpy as np
import pytest
import torch

import dsq_ckpt
from dsq_ckpt.api.saving import save_with_writer
from dsq_ckpt.core.workers import Workers
from dsq_ckpt.dcp.writer import DSQStorageWriter
from dsq_ckpt.engine.options import CompressorInputs
from dsq_ckpt.quantization.layout import Fractions
from dsq_ckpt.quantization.plan import plan_as_configured
from dsq_ckpt.storage.checkpoint import Checkpoint

PRUNE, PROTECT = 0.3, 0.02


def state_at(step):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(200, 150, generator=generator) * 0.02
    gradient = torch.randn(200, 150, generator=generator).abs() ** 3  # heavy tails: sensitivity is not magnitude
    drift = torch.randn(200, 150, generator=torch.Generator().manual_seed(step)) * 0.001 * step
    return {"layer.weight": weight + drift}, {"layer.weight": gradient}


def save_step(path, step, metric, seen=None):
    state, gradients = state_at(step)
    config = {"quantize": {"weights": {"refinement_bits": 2, "codebook": {
        "fit": "kmeans", "bins": 8, "prune": PRUNE, "protect": PROTECT, "metric": metric, "rate_distortion": 0.0,
    }}}}

    def chooser(sketches, *rest):
        choice = plan_as_configured(sketches, *rest)
        if seen is not None:
            seen.append((sketches, choice.analysis))
        return choice

    fractions = Fractions((0.0, 0.1, PRUNE, 0.5), (0.00025, PROTECT / 2))
    writer = DSQStorageWriter(path, config, inputs=CompressorInputs(chooser, gradients, fractions))
    save_with_writer(lambda: (writer, state))
    with Checkpoint(path) as checkpoint, Workers(1, 1 << 20) as workers:
        (_, ref), = checkpoint.iter_chunks()
        codes = checkpoint.decode_codes(ref, workers)
        protected = checkpoint.read_codebook(ref).protected
    return state["layer.weight"].numpy().ravel(), gradients["layer.weight"].numpy().ravel(), codes, protected


@pytest.mark.parametrize("metric", ["magnitude", "sensitivity"])
@pytest.mark.parametrize("step", [0, 1])
def test_against_quantiles_of_the_data(tmp_path, metric, step):
    if step:
        save_step(tmp_path / "0", 0, metric)
    seen = []
    weight, gradient, codes, protected = save_step(tmp_path / "1", step, metric, seen)
    sensitivity, magnitude = np.abs(weight * gradient), np.abs(weight)
    n = weight.size
    each = PROTECT / 2
    top = sensitivity >= np.quantile(sensitivity, 1 - 0.98 * each)
    top |= magnitude >= np.quantile(magnitude, 1 - 0.9 * each)
    assert (codes[top] == protected).all(), "the top by either is protected"
    assert 0.7 * PROTECT <= np.mean(codes == protected) <= PROTECT, "and no more than was asked for"
    by = sensitivity if metric == "sensitivity" else magnitude
    low = (by < np.quantile(by, 0.95 * PRUNE)) & (codes != protected)
    assert np.mean(codes[low] == 0) > 0.98, "the smallest by the chosen metric are zero"
    assert PRUNE * 0.9 <= np.mean(codes == 0) <= PRUNE * 1.2 + (0.1 if metric == "sensitivity" else 0)
    (_, analysis), = seen
    counts = np.bincount(codes, minlength=protected + 1)
    assert (analysis.fitted["weights/linear"].counts.sum(0) == counts).all(), "sizes are predicted exactly"
    assert counts.sum() == n and analysis.fitted["weights/linear"].uses_parent == bool(step)


def test_every_fraction_of_a_search_has_its_own_counts(tmp_path):
    """One sketch serves all fractions: counts of a fit equal those of a save with that configuration alone."""
    seen = []
    save_step(tmp_path / "a", 0, "sensitivity", seen)
    (sketches, _), = seen
    usual = sketches.layout.groups["weights/linear"]
    for prune, protect in ((0.1, 0.0005), (0.5, PROTECT), (0.0, PROTECT)):
        book = usual.codebook.model_copy(update={"prune": prune, "protect": protect})
        fitted = sketches.fit({"weights/linear": usual.model_copy(update={"codebook": book})}).fitted["weights/linear"]
        assert int(fitted.counts.sum()) == 30_000
        assert fitted.counts[:, fitted.codebook.protected].sum() <= protect * 30_000
        assert fitted.counts[:, 0].sum() >= 0.9 * prune * 30_000 and fitted.limits[0] >= 0


def test_values_come_back(tmp_path):
    weight, _, codes, protected = save_step(tmp_path / "a", 0, "sensitivity")
    got = {"layer.weight": torch.zeros(200, 150)}
    dsq_ckpt.load(got, tmp_path / "a")
    back = got["layer.weight"].numpy().ravel()
    assert np.array_equal(back[codes == protected], weight[codes == protected]), "protected values, refined, are exact"
    dsq_ckpt.load(got, tmp_path / "a", refinement=False)
    assert (got["layer.weight"].numpy().ravel()[codes == 0] == 0).all()
