"""Which backend serves a device, with and without Triton; how tensors are cut into launches."""

import subprocess
import sys

import pytest
import torch

from dsq_ckpt.kernels.dispatch import backend_for

WITHOUT_TRITON = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError("No module named 'triton'", name="triton")

sys.meta_path.insert(0, Blocker())
import torch
import dsq_ckpt
from dsq_ckpt.kernels.dispatch import backend_for

assert "dsq_ckpt.triton_kernels" not in sys.modules
assert backend_for("cpu").name == "cpu"
dsq_ckpt.save({"w": torch.ones(300, 300)}, sys.argv[1])
try:
    backend_for("cuda:0")
except ModuleNotFoundError as error:
    assert "pip install triton" in str(error) and "cuda:0" in str(error), error
else:
    raise AssertionError("no error")
assert not any(name.partition(".")[0] == "triton" for name in sys.modules)
"""


def test_the_package_works_without_triton(tmp_path):
    subprocess.run([sys.executable, "-c", WITHOUT_TRITON, str(tmp_path / "run" / "step-1")], check=True, timeout=900)


def test_devices():
    assert backend_for("cpu").name == "cpu"
    assert backend_for(torch.device("cpu")).name == "cpu"
    with pytest.raises(ValueError, match="meta"):
        backend_for("meta")


@pytest.fixture
def launch():
    pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
    from dsq_ckpt.triton_kernels import launch

    return launch


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, so that kernels are compiled")
def test_tensors_that_kernels_cannot_reach(launch):
    from dsq_ckpt import triton_kernels

    x, out = torch.ones(4, device="meta"), torch.empty(1, dtype=torch.int64, device="meta")
    with pytest.raises(ValueError, match="meta"):
        triton_kernels.sketch(x, 64, 65, 1.0, out)


@pytest.mark.parametrize("n", [0, 1, 15, 16, 17, 191, 192, 193, 1000])
def test_parts_cover_everything_once(launch, monkeypatch, n):
    monkeypatch.setattr(launch, "TILE", 64)
    monkeypatch.setattr(launch, "PIECE", 192)
    parts = launch.parts(n)
    assert [i for part in parts for i in range(part.elements.start, part.elements.stop)] == list(range(n))
    assert all(part.n <= 192 and part.elements.start % 16 == 0 for part in parts)
    assert all(part.n % 16 == 0 for part in parts[:-1])
    assert [part.first_tile for part in parts] == [sum(p.tiles for p in parts[:i]) for i in range(len(parts))]
    assert launch.tile_count(n) == sum(-(-part.n // 64) for part in parts)


def test_offsets_fit_32_bits(launch):
    """Whatever the length: of bits too, where a launch packs."""
    from dsq_ckpt.triton_kernels.pack import _parts

    n = 2**33 + 5
    assert sum(part.n for part in launch.parts(n)) == n
    assert max(part.n for part in launch.parts(n)) + launch.TILE < 2**31
    assert max(part.n for part in _parts(n)) * 8 + 8 * launch.TILE < 2**31
    assert all(part.elements.start % 8 == 0 for part in _parts(n))
