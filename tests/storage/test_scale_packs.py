"""Scales of second moments given those of the parent: the same values in fewer bytes, whatever happens to that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import dsq_ckpt
from dsq_ckpt.storage.checkpoint import Checkpoint
from dsq_ckpt.storage.manifest import Manifest
from dsq_ckpt.storage.packs import PackRef
from tests.helpers import independent_reader as independent
from tests.helpers.commands import find_file
from tests.helpers.states import flat_tensors, load_copy, to_bytes

SHAPES = {"up.weight": (300, 80), "down.weight": (80, 300)}


def state_at(number: int, more: dict[str, tuple[int, ...]] | None = None) -> dict[str, Any]:
    """Weights and Adam's moments; the second ones have scales, which move a little at each step."""
    generator = torch.Generator().manual_seed(3)
    state: dict[str, Any] = {"model": {}, "optimizer": {"state": {}}}
    for name, shape in {**SHAPES, **(more or {})}.items():
        weight = torch.randn(shape, generator=generator) * 0.02
        by_row, by_column = (torch.randn(length, 1, generator=generator) for length in shape)
        for _ in range(number):
            by_row = by_row + 0.05 * torch.randn(by_row.shape, generator=generator)
            by_column = by_column + 0.05 * torch.randn(by_column.shape, generator=generator)
        spread = torch.randn(shape, generator=generator)
        second = (1e-6 * (2 * by_row + by_column.T + 0.3 * spread).exp()).abs()
        state["model"][name] = weight
        state["optimizer"]["state"][name] = {
            "exp_avg": second.sqrt() * torch.randn(shape, generator=generator), "exp_avg_sq": second,
        }
    return state


def save(number: int, run: Path, state: dict[str, Any] | None = None, **arguments: Any) -> Path:
    path = run / f"step-{number:03d}"
    dsq_ckpt.save(state or state_at(number), path, **arguments)
    return path


def scales(path: Path) -> tuple[int, list[int], int]:
    """Return the packs of the chain that the scales are decoded from, the numbers, and the bytes of their pack."""
    with Checkpoint(path) as checkpoint:
        name = find_file(path).name
        contents = checkpoint.open_reader(name).contents
        pack = contents["scales"][0]
        numbers = checkpoint.read_scale_numbers(name).tolist()
        return len(checkpoint.pack_chain(PackRef(name, pack))), numbers, contents["packs"][pack][0][1]


def codes_of(path: Path) -> int:
    """Return the bytes of all codes in a checkpoint's own file."""
    with Checkpoint(path) as checkpoint:
        records = checkpoint.open_reader(find_file(path).name).contents["records"]
    return sum(block[1] for record in records for block in record.get("blocks", ()) if block is not None)


def check(path: Path, state: dict[str, Any]) -> None:
    """Compare what is loaded with the reader that was written from the page."""
    reader = independent.Reader(path)
    for fqn, value in flat_tensors(load_copy(path, state)).items():
        assert reader.tensor(fqn) == to_bytes(value), fqn


def test_scales_are_coded_given_the_parents(tmp_path: Path) -> None:
    paths = [save(number, tmp_path) for number in range(6)]
    chains, numbers, sizes = zip(*map(scales, paths), strict=True)
    assert chains == (1, 2, 3, 4, 2, 3)  # the fourth is coded given the first again
    assert all(size < 0.7 * sizes[0] for size in sizes[1:])
    assert len({len(own) for own in numbers}) == 1 and len(set(map(tuple, numbers))) == len(paths)
    check(paths[0], state_at(0))
    check(paths[5], state_at(5))
    with Checkpoint(paths[5]) as checkpoint:
        assert [problem for _, _, problem in checkpoint.verify() if problem] == []


def test_keyframes_need_no_other(tmp_path: Path) -> None:
    for number in range(3):
        path = save(number, tmp_path, config={"delta": {"max_chain": 1}})
        assert scales(path)[0] == (2 if number == 1 else 1)
    assert not Manifest.read(path).depth


def test_other_tensors_begin_anew(tmp_path: Path) -> None:
    """Numbers of a parent that has a tensor more, or lies otherwise, do not belong to the same rows."""
    save(0, tmp_path)
    more = {"head.weight": (100, 100)}
    path = save(1, tmp_path, state_at(1, more))
    assert scales(path)[0] == 1 and Manifest.read(path).depth == 1
    check(path, state_at(1, more))
    assert scales(save(2, tmp_path, state_at(2, more)))[0] == 2


def test_damage_of_an_earlier_checkpoint(tmp_path: Path) -> None:
    """No values are made of it, verify names the file, and what is saved next is not coded given it."""
    first, second = (save(number, tmp_path) for number in range(2))
    file = find_file(first)
    with Checkpoint(first) as checkpoint:
        contents = checkpoint.open_reader(file.name).contents
    (place, size, _), *_ = contents["packs"][contents["scales"][0]]
    data = bytearray(file.read_bytes())
    data[place + size // 2] ^= 1
    file.write_bytes(data)  # in place: the second checkpoint sees it
    with pytest.warns(UserWarning, match=r"cannot be read; storing it anew|writing a keyframe"):
        third = save(2, tmp_path)
    assert scales(third)[0] == 1
    with pytest.raises(dsq_ckpt.CorruptCheckpoint, match=file.name):
        dsq_ckpt.load(state_at(1), second)
    with Checkpoint(second) as checkpoint:
        assert {name for name, _, problem in checkpoint.verify() if problem} == {file.name}


@pytest.mark.parametrize("keyframe", [False, True])
def test_merged_chains(tmp_path: Path, keyframe: bool) -> None:
    for number in range(4):
        path = save(number, tmp_path / "run")
    dsq_ckpt.merge(path, tmp_path / "merged", keyframe=keyframe)
    assert scales(path)[0] == 4 and scales(tmp_path / "merged")[0] == (1 if keyframe else 2)
    assert scales(tmp_path / "merged")[1] == scales(path)[1]
    kinds = [Manifest.read(own).kinds for own in (path, tmp_path / "merged")]
    assert kinds[0].keys() == kinds[1].keys()
    base = [sum(kind.base for kind in own.values()) for own in kinds]
    told = [scales(own)[2] + codes_of(own) for own in (path, tmp_path / "merged")]
    assert base[1] - base[0] == told[1] - told[0]  # what is said of the kinds is what was written
    for fqn, value in flat_tensors(load_copy(path, state_at(3))).items():
        assert to_bytes(flat_tensors(load_copy(tmp_path / "merged", state_at(3)))[fqn]) == to_bytes(value), fqn
