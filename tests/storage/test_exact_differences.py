"""Tensors that are stored exactly, given those of the parent: bit for bit, whatever they hold and whatever happens."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import dsq_ckpt
from dsq_ckpt.storage.checkpoint import Checkpoint
from dsq_ckpt.storage.manifest import Manifest
from dsq_ckpt.storage.packs import PackRef, reference_place
from dsq_ckpt.storage.removal import remove_checkpoint
from tests.helpers import independent_reader as independent
from tests.helpers.commands import find_file
from tests.helpers.edited_checkpoints import edit_contents
from tests.helpers.states import flat_tensors, load_copy, mixed_state, to_bytes

EXACT = {"system": "exact"}
SIZE = 300


def state_at(number: int) -> dict[str, Any]:
    """Weights that move a little at each step, and every other kind of value."""
    generator = torch.Generator().manual_seed(1)
    first = torch.randn(SIZE, SIZE, generator=generator) * 0.02
    for _ in range(number):
        first = first + 1e-5 * torch.randn(SIZE, SIZE, generator=generator)
    odd = torch.tensor([float("nan"), -0.0, 0.0, float("inf"), float("-inf"), 1e-45])
    odd = torch.cat([odd, torch.tensor([0x7FC00001 + number, -0x3FFFFF], dtype=torch.int32).view(torch.float32)])
    return {
        "w": first.bfloat16(), "wide": first, "half": first[:200].half(), "double": first[:100].double(),
        "turned": first[:260].t(), "odd": odd, "mask": first > 0.01 * (number % 2),
        "count": torch.arange(SIZE * 40) + number, "empty": torch.empty(0, 3),
        "complex": torch.complex(first[:80], first[80:160]), "wide complex": first[:50].to(torch.complex128),
        "byte": (first * 1000).to(torch.uint8), "eighth": first[:50].to(torch.float8_e4m3fn),
        "scalar": torch.tensor(1.5 + number, dtype=torch.float64), "frozen": torch.full((SIZE, SIZE), 0.1).cumsum(0),
        "bias": first[0].bfloat16(), **{f"small {place}": first[place : place + 4].bfloat16() for place in range(40)},
        "flag": torch.tensor(number % 2 == 0), "step": number, "text": "x" * 300,
    }


def save(number: int, run: Path, **arguments: Any) -> Path:
    path = run / f"step-{number:03d}"
    dsq_ckpt.save(arguments.pop("state", None) or state_at(number), path, config=EXACT, **arguments)
    return path


def check(path: Path, state: dict[str, Any]) -> None:
    back = load_copy(path, state)
    for fqn, value in flat_tensors(state).items():
        assert to_bytes(flat_tensors(back)[fqn]) == to_bytes(value), fqn


def written(path: Path) -> int:
    return Manifest.read(path).sum_bytes("own")


def chains(path: Path) -> dict[str, int]:
    """Return how many packs each tensor is decoded from."""
    with Checkpoint(path) as checkpoint:
        return {
            key.fqn: len(checkpoint.pack_chain(PackRef(ref.file, number))) for key, ref in checkpoint.iter_chunks()
            for number in checkpoint.read_record(ref)["packs"]
        }


def test_every_kind_of_tensor_comes_back_bit_for_bit(tmp_path: Path) -> None:
    for number in range(6):
        path = save(number, tmp_path)
        check(path, state_at(number))
        reader = independent.Reader(path)  # as docs/format.md has it
        for fqn in ("small 7", "count", "complex", "odd", "mask") if number == 5 else ():
            assert reader.tensor(fqn, True) == to_bytes(flat_tensors(state_at(number))[fqn]), fqn
    assert chains(path)["w"] > 1 and chains(path)["bias"] > 1 and chains(path)["complex"] > 1
    assert written(path) < 0.5 * written(tmp_path / "step-000")


def test_mixed_state(tmp_path: Path) -> None:
    """Lossy tensors beside exact ones: both chains in one file."""
    for number in range(3):
        dsq_ckpt.save(mixed_state(number), tmp_path / str(number))
        back = flat_tensors(load_copy(tmp_path / str(number), mixed_state(number)))
        for fqn, value in flat_tensors(mixed_state(number)).items():
            if not fqn.startswith("lossy"):
                assert to_bytes(back[fqn]) == to_bytes(value), fqn


def test_places_of_a_chain() -> None:
    assert [reference_place(place) for place in range(1, 22)] == [
        0, 1, 2, 0, 4, 5, 6, 4, 8, 9, 10, 8, 12, 13, 14, 0, 16, 17, 18, 16, 20
    ]
    for last in range(1, 1000):
        place, path = last, []
        while place:
            place = reference_place(place)
            path.append(place)
        earlier, known = last - 1, [last - 1]
        while earlier:
            earlier = reference_place(earlier)
            known.append(earlier)
        assert set(path) <= set(known)  # whatever it needs, the checkpoint before it has
        assert len(path) <= 15


def test_longest_chain(tmp_path: Path) -> None:
    for number in range(34):
        state = {name: state_at(number)[name] for name in ("w", "step")}
        path = save(number, tmp_path, state=state)
        depth = Manifest.read(path).depth
        assert depth == number % 33 and chains(path)["w"] <= 8
        if number:  # the next needs none but the newest
            shutil.rmtree(tmp_path / f"step-{number - 1:03d}")
    check(path, state)


def test_old_checkpoints_may_be_deleted(tmp_path: Path) -> None:
    for number in range(8):
        save(number, tmp_path)
    for number in (0, 1, 3, 4, 6):
        remove_checkpoint(tmp_path / f"step-{number:03d}")
    for number in (2, 5, 7):
        check(tmp_path / f"step-{number:03d}", state_at(number))
    check(save(8, tmp_path), state_at(8))


def test_another_process_goes_on(tmp_path: Path) -> None:
    """Packs that others are coded given are read from the files, not kept."""
    save(0, tmp_path)
    path = save(1, tmp_path, parent=tmp_path / "step-000", history=dsq_ckpt.SaveHistory())
    assert chains(path)["w"] == 2
    check(path, state_at(1))


@pytest.mark.parametrize("changed", [
    lambda w: torch.zeros(SIZE, SIZE + 1, dtype=torch.bfloat16), lambda w: w.half(), lambda w: w.double(),
    lambda w: w.view(torch.int16), lambda w: w.reshape(SIZE * SIZE),
])
def test_another_shape_or_dtype_is_stored_anew(tmp_path: Path, changed: Any) -> None:
    save(0, tmp_path)
    state = state_at(1)
    state["w"] = changed(state["w"])
    path = save(1, tmp_path, state=state)
    check(path, state)
    assert chains(path)["w"] == 1 and chains(path)["wide"] == 2


def test_a_small_tensor_that_comes_or_goes(tmp_path: Path) -> None:
    """Small tensors share a pack, which is coded given one of the same tensors only."""
    save(0, tmp_path)
    state = state_at(1)
    del state["bias"]
    check(save(1, tmp_path, state=state), state)
    check(save(2, tmp_path), state_at(2))


def test_noise_is_never_larger_than_anew(tmp_path: Path) -> None:
    torch.manual_seed(0)
    for number in range(3):
        state = {"w": torch.randn(SIZE, SIZE), "b": torch.randint(-(2**62), 2**62, (100,))}
        path = save(number, tmp_path, state=state)
        dsq_ckpt.save(state, tmp_path / "alone", config=EXACT, parent=None, overwrite=True)
        assert written(path) <= written(tmp_path / "alone") + 64
        assert chains(path)["w"] == 1 and Manifest.read(path).depth == 0


def test_no_deltas_where_none_are_wanted(tmp_path: Path) -> None:
    off = {**EXACT, "delta": {"enabled": False}}
    for number, arguments in enumerate(({}, {"parent": None}, {"config": off})):
        dsq_ckpt.save(state_at(number), tmp_path / str(number), **{"config": EXACT, **arguments})
        assert Manifest.read(tmp_path / str(number)).depth == 0
        assert set(chains(tmp_path / str(number)).values()) == {1}


def block_of(path: Path, fqn: str) -> tuple[Path, int]:
    """Return a file of a checkpoint, and the place of the middle of a tensor's block."""
    with Checkpoint(path) as checkpoint:
        ref = checkpoint.find_record(fqn, (0, 0))
        packs = checkpoint.open_reader(ref.file).contents["packs"]
        (offset, size, _), *_ = packs[checkpoint.read_record(ref)["packs"][0]]
        return path / ref.file, offset + size // 2


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.unlink()  # not where it is linked to as well
    path.write_bytes(data)


def test_a_damaged_parent_gives_one_error_and_no_values(tmp_path: Path) -> None:
    for number in range(3):
        save(number, tmp_path)
    newest = tmp_path / "step-002"
    for parent in (tmp_path / "step-000", tmp_path / "step-001"):
        file, at = block_of(parent, "w")
        data = (newest / file.name).read_bytes()
        flip(newest / file.name, at)
        like = {**state_at(2), "w": torch.full((SIZE, SIZE), 7.0, dtype=torch.bfloat16)}
        with pytest.raises(dsq_ckpt.CorruptCheckpoint, match=file.name):
            dsq_ckpt.load(like, newest)
        (newest / file.name).write_bytes(data)
        check(newest, state_at(2))


def test_a_damaged_parent_is_not_coded_against(tmp_path: Path) -> None:
    for number in range(2):
        save(number, tmp_path)
    file, at = block_of(tmp_path / "step-001", "w")
    flip(file, at)
    with pytest.warns(UserWarning, match=r"cannot be read; storing it anew|writing a keyframe"):
        path = save(2, tmp_path)
    check(path, state_at(2))
    assert chains(path)["w"] == 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the file that other tensors may still need is damaged
        check(save(3, tmp_path), state_at(3))


def test_a_truncated_parent(tmp_path: Path) -> None:
    save(0, tmp_path)
    file, at = block_of(tmp_path / "step-000", "w")
    file.write_bytes(file.read_bytes()[:at])
    with pytest.warns(UserWarning, match="keyframe"):
        check(save(1, tmp_path), state_at(1))


def test_data_that_training_overwrites(tmp_path: Path) -> None:
    """A save in the background stores what there was at the call."""
    state = {"w": torch.randn(SIZE, SIZE).bfloat16(), "b": torch.randn(SIZE)}
    for number in range(4):
        original = {name: value.clone() for name, value in state.items()}
        future = dsq_ckpt.async_save(state, tmp_path / str(number), config=EXACT)
        for value in state.values():
            value += 0.001
        future.result()
        check(tmp_path / str(number), original)
    assert chains(tmp_path / "3")["w"] > 1


def test_a_parent_on_an_object_store(tmp_path: Path) -> None:
    """A checkpoint on a disk is coded given none of its files, which it could not link."""
    url = f"memory://{tmp_path.name}/run/step-000"
    dsq_ckpt.save(state_at(0), url, config=EXACT)
    path = save(1, tmp_path, parent=url)
    check(path, state_at(1))
    assert set(chains(path).values()) == {1}


@pytest.mark.parametrize("keyframe", [False, True])
def test_merged(tmp_path: Path, keyframe: bool) -> None:
    for number in range(7):
        path = save(number, tmp_path)
    assert chains(path)["w"] == 4  # 6, 5, 4, 0
    merged = dsq_ckpt.merge(path, tmp_path / "merged", keyframe=keyframe)
    assert merged.links_before == 3 and merged.links == (0 if keyframe else 1)
    assert max(chains(merged.path).values()) == (1 if keyframe else 2)
    check(merged.path, state_at(6))
    own, old = Manifest.read(merged.path), Manifest.read(path)
    assert own.kinds["exact"].logical == old.kinds["exact"].logical
    grown = written(merged.path) - written(path)
    assert own.kinds["exact"].base - old.kinds["exact"].base == pytest.approx(grown, abs=600)
    needed = {file.name for file in own.files if file.role == "ancestor"}
    assert len(needed) == (0 if keyframe else 1)
    for number in range(7):
        shutil.rmtree(tmp_path / f"step-{number:03d}")
    goes_on = save(7, tmp_path, parent=merged.path, history=dsq_ckpt.SaveHistory())
    assert chains(goes_on)["w"] == (2 if keyframe else 3)
    check(goes_on, state_at(7))


def test_packs_without_differences_are_not_merged(tmp_path: Path) -> None:
    for number in range(2):
        path = save(number, tmp_path)
    with pytest.raises(dsq_ckpt.SaveFailed, match="nothing to merge"):
        dsq_ckpt.merge(path, tmp_path / "merged")


def loop(contents: dict[str, Any], name: str) -> None:
    contents["packs"][0][3:] = [[name, 0], 1]


def no_such_pack(contents: dict[str, Any], name: str) -> None:
    contents["packs"][0][3:] = [[name, 99], 1]


def no_such_file(contents: dict[str, Any], name: str) -> None:
    contents["packs"][0][3:] = [["0123456789abcdef-00000.dsq", 0], 1]


def other_size(contents: dict[str, Any], name: str) -> None:
    other = next(number for number, pack in enumerate(contents["packs"]) if pack[2] != contents["packs"][0][2])
    contents["packs"][0][3:] = [[name, other], 1]


def strange_place(contents: dict[str, Any], name: str) -> None:
    contents["packs"][0][4] = -1


def one_item_too_few(contents: dict[str, Any], name: str) -> None:
    del contents["packs"][0][4]


def no_file_name(contents: dict[str, Any], name: str) -> None:
    contents["packs"][0][3:] = [[["a"], 0], 1]


def no_packs(contents: dict[str, Any], name: str) -> None:
    contents["packs"] = None


def no_owner(contents: dict[str, Any], name: str) -> None:
    for record in contents["records"]:
        record["packs"] = []


def second_of(run: Path, forged: Any) -> Path:
    """The second checkpoint of a run, whose contents were forged."""
    for number in range(2):
        path = save(number, run)
    own, ancestor = find_file(path, "own"), find_file(path, "ancestor")
    ancestor.rename(run / "aside")
    edit_contents(path, lambda contents: forged(contents, own.name))
    (run / "aside").rename(ancestor)
    return path


@pytest.mark.parametrize("forged", [no_file_name, no_packs, no_owner], ids=lambda f: f.__name__)
def test_merges_and_saves_of_packs_that_do_not_fit(tmp_path: Path, forged: Any) -> None:
    """A merge refuses them with an error that names the checkpoint, and a save codes nothing given them."""
    path = second_of(tmp_path, forged)
    with pytest.raises(dsq_ckpt.CorruptCheckpoint, match=path.name):
        dsq_ckpt.merge(path, tmp_path / "merged", keyframe=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what cannot be read is stored anew
        goes_on = save(2, tmp_path, parent=path, history=dsq_ckpt.SaveHistory())
    check(goes_on, state_at(2))
    assert chains(goes_on)["w"] == 1


@pytest.mark.parametrize(
    "forged", [loop, no_such_pack, no_such_file, other_size, strange_place, one_item_too_few], ids=lambda f: f.__name__
)
def test_packs_that_do_not_fit_are_refused(tmp_path: Path, forged: Any) -> None:
    path = second_of(tmp_path, forged)
    with pytest.raises(dsq_ckpt.CorruptCheckpoint, match=path.name):
        load_copy(path, state_at(1))
    if forged is not strange_place:  # which readers do not need
        with pytest.raises((independent.Refused, IndexError, ValueError)):
            independent.Reader(path).tensor("w")
