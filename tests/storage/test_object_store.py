"""Requests to an object store: as few as a save and a load need, since each takes as long as a megabyte."""

from __future__ import annotations

import torch
from s3fs import S3FileSystem

import dsq_ckpt


def state_of(step: int) -> dict:
    generator = torch.Generator().manual_seed(0)
    return {"w": (1 + 0.01 * step) * torch.randn(256, 256, generator=generator), "bias": torch.ones(10), "step": step}


def test_no_request_asks_for_a_size_that_is_known(bucket, monkeypatch):
    """A load reads manifest and data files by one request each, and asks for no size; a save asks for one."""
    requests = []
    call = S3FileSystem._call_s3

    async def recorded(self, method, *args, **kwargs):
        requests.append((method if isinstance(method, str) else method.__name__, kwargs.get("Key", "")))
        return await call(self, method, *args, **kwargs)

    monkeypatch.setattr(S3FileSystem, "_call_s3", recorded)
    for step in (1, 2, 3):
        dsq_ckpt.save(state_of(step), f"{bucket}/run/step-{step}")
    requests.clear()
    dsq_ckpt.save(state_of(4), f"{bucket}/run/step-4")
    assert [key.rpartition("/")[2] for method, key in requests if method == "head_object"] == ["manifest.json"]
    parent_manifest = next(key for _, key in requests if key.endswith("run/step-3/manifest.json"))
    assert [key for _, key in requests].count(parent_manifest) <= 5  # before, during and after the commit
    requests.clear()
    loaded: dict = {}
    dsq_ckpt.load(loaded, f"{bucket}/run/step-3")
    assert loaded["step"] == 3
    assert {method for method, _ in requests} == {"get_object"}
    assert sum(key.endswith("manifest.json") for _, key in requests) == 1
    data = [key for _, key in requests if key.endswith((".dsq", ".refinement"))]
    assert len(data) == len(set(data)) == 4  # of three checkpoints, and the refinement of the newest
