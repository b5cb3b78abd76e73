"""What runs the kernels in a test, and data for them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from dsq_ckpt import native
from dsq_ckpt.kernels import host
from dsq_ckpt.kernels.backend import Backend
from dsq_ckpt.kernels.keys import KeyWindow
from tests.helpers import reference_kernels

NAMES = ["reference", *native.PATHS, "triton", "triton-tiny"]
"""NumPy, the CPU's own by Numba and by each path in C, and Triton."""
LARGE = "triton-large"
"""For tensors of many millions of elements, which the interpreter works on in large tiles."""
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WINDOW = KeyWindow(7300, 8200)
ROWS = 20
TILE = 64
"""Of triton-tiny, which also cuts tensors into pieces of a few tiles."""


@dataclass(frozen=True)
class Subject:
    """A backend, where its tensors are, and the sizes that are awkward for it."""

    name: str
    backend: Backend
    device: str
    sizes: tuple[int, ...]

    def __call__(self, array: np.ndarray | torch.Tensor, offset: int = 0) -> torch.Tensor:
        """The array as a tensor of the backend, `offset` elements away from where memory is aligned."""
        tensor = torch.from_numpy(array.copy()) if isinstance(array, np.ndarray) else array
        space = torch.empty(offset + tensor.numel(), dtype=tensor.dtype, device=self.device)
        place = space[offset:].view(tensor.shape)
        place.copy_(tensor)
        return place

    def empty(self, n: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """A tensor to be filled, full of what does not belong there."""
        return torch.full((n,), 77, dtype=dtype, device=self.device)


def subject_of(name: str, monkeypatch: pytest.MonkeyPatch) -> Subject:
    """The subject of this name; Triton's is interpreted where there is no GPU."""
    if not name.startswith("triton"):
        if name != "reference":
            if name not in native.available():
                pytest.skip(f"no compiled library, or a processor without {name}")
            monkeypatch.setattr(native, "_path", name)
        backend = host.HostBackend(name, reference_kernels) if name == "reference" else host.cpu_backend()
        return Subject(name, backend, "cpu", (0, 1, 300, 4097, 5 * 123 * 123))
    pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
    from dsq_ckpt.triton_kernels import backend, counting, launch
    from tests.helpers.interpreted import remember_functions

    remember_functions()
    device = "cpu" if launch.INTERPRETED else "cuda"
    if launch.INTERPRETED and name == LARGE:
        monkeypatch.setattr(launch, "TILE", 1 << 18)
    sizes = (0, 1, 16, launch.TILE + 1, 5 * 123 * 123)
    if name == "triton-tiny":
        monkeypatch.setattr(launch, "TILE", TILE)
        monkeypatch.setattr(launch, "PIECE", 3 * TILE)
        monkeypatch.setattr(counting, "MAX_BINS", 1 << 10)  # so that a window takes two histograms, and rows atomics
        sizes = (0, 1, 16, TILE + 1, 300)
    return Subject(name, backend.TritonBackend(torch.device(device)), device, sizes)


def floats(seed: int, n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Half weights, half random bit patterns: subnormals, infinities, NaN of both signs; and zeros of both signs."""
    generator = torch.Generator().manual_seed(seed)
    x = (0.02 * torch.randn(n, generator=generator)).to(dtype)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    reach = torch.iinfo(bits)
    wild = torch.randint(reach.min, reach.max + 1, (n,), generator=generator, dtype=torch.int64).to(bits).view(dtype)
    chance = torch.rand(n, generator=generator)
    x = torch.where(chance < 0.5, x, wild)
    x[chance > 0.95] = -0.0
    x[chance < 0.1] = 0.0
    return x


def codes(seed: int, n: int, below: int = ROWS) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, below, n).astype(np.uint8)


def as_fp32(x: torch.Tensor) -> np.ndarray:
    """What the reference gets; torch would lose the sign of some NaN of float16."""
    return x.numpy().astype(np.float32) if x.dtype == torch.float16 else x.float().numpy()


def assert_same(result: torch.Tensor, expected: np.ndarray | torch.Tensor) -> None:
    """The same bits, but that any NaN is as good as another."""
    result = result.cpu()
    if isinstance(expected, np.ndarray):
        expected = torch.from_numpy(expected)
    assert result.dtype == expected.dtype and result.shape == expected.shape
    if result.dtype.is_floating_point:
        nan = expected.isnan()
        assert torch.equal(result.isnan(), nan)
        kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[result.element_size()]
        result, expected = result[~nan].view(kind), expected[~nan].view(kind)
    np.testing.assert_array_equal(result.numpy(), expected.numpy())
