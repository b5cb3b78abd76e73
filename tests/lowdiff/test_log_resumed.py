"""Logs that go on with another compressor: the residuals of error feedback."""

from types import SimpleNamespace

import pytest
import torch

from dsq_ckpt.lowdiff import GradientLog, Recovered
from tests.lowdiff.loops import TOPK, Loop

pytestmark = pytest.mark.usefixtures("in_thread", "one_thread")


def recovered_after(tmp_path, compressor) -> tuple[Loop, Recovered]:
    """A loop that was recovered from a snapshot with residuals."""
    loop = Loop(TOPK)
    with loop.log(tmp_path, compressor=compressor, snapshot_every=2) as log:
        for number in range(2):
            loop.step(number)
            log.step()
        log._require_client().wait("saved", 240)
    again = Loop(TOPK, seed=1)
    recovered = again.recover(tmp_path)
    assert recovered.snapshot == 2
    assert all(residual.any() for residual in recovered.residuals().values())
    return again, recovered


def residuals_of(log: GradientLog) -> dict[str, torch.Tensor]:
    return {name: residual.clone() for name, residual in log._compressor.state().items()}


@pytest.mark.parametrize(("before", "after"), [
    ("topk:0.05", "topk:0.050"), ("topk:0.05", "topk:0.2"), ("kmeans:4", "kmeans:8"), ("topk:0.05", "kmeans:4"),
])
def test_residuals_go_on(tmp_path, before, after):
    """They were dropped without a word."""
    loop, recovered = recovered_after(tmp_path, before)
    with loop.log(tmp_path, resume=recovered, compressor=after) as log:
        held = residuals_of(log)
        assert held.keys() == recovered.residuals().keys()
        assert all(torch.equal(held[name], residual) for name, residual in recovered.residuals().items())


@pytest.mark.parametrize("after", ["none", "fp16", "topk:0.05,feedback=off"])
def test_residuals_that_are_dropped(tmp_path, after):
    loop, recovered = recovered_after(tmp_path, "topk:0.05")
    says = f"error feedback of compressor 'topk:0.05' do not fit compressor '{after}' .'0.bias', .*dropped"
    with pytest.warns(UserWarning, match=says), loop.log(tmp_path, resume=recovered, compressor=after):
        pass


def test_residuals_of_another_meaning_are_dropped(tmp_path):
    """On several ranks those of top-k are of local gradients, and those of k-means of their mean."""
    loop = Loop(TOPK)
    log = loop.log(tmp_path, compressor="topk:0.05")
    held = residuals_of(log)
    comm, log._comm = log._comm, SimpleNamespace(size=2, rank=1)
    ones = {name: torch.ones_like(residual) for name, residual in held.items()}
    with pytest.warns(UserWarning, match=r"rank 1: the residuals .*'kmeans:4' do not fit compressor 'topk:0.05'"):
        log._continue_residuals(ones, "kmeans:4")
    assert not any(residual.any() for residual in residuals_of(log).values())
    log._continue_residuals(ones, "topk:0.01")
    assert all(torch.equal(residual, ones[name]) for name, residual in residuals_of(log).items())
    log._comm = comm
    log.close()


def test_parameters_of_another_shape(tmp_path):
    """Residuals that fit go on without the others."""
    log = Loop(TOPK).log(tmp_path, compressor="topk:0.05")
    changed = {name: torch.ones_like(residual) for name, residual in residuals_of(log).items()}
    changed["0.weight"] = torch.ones(2, 2)
    with pytest.warns(UserWarning, match=r"do not fit compressor 'topk:0.05' .'0.weight'.: "):
        log._continue_residuals(changed, "topk:0.05")
    held = residuals_of(log)
    assert not held.pop("0.weight").any() and all(residual.all() for residual in held.values())
    log.close()
