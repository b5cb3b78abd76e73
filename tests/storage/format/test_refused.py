"""What `docs/format.md` says a reader refuses, is refused by the independent reader and by the package."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dsq_ckpt
from dsq_ckpt.storage.checkpoint import Checkpoint
from tests.helpers import independent_reader as independent
from tests.helpers.edited_checkpoints import Tree, edit_contents, edit_index, rewrite, zstd


def test_newer_version_is_unsupported(tmp_path: Path) -> None:
    dsq_ckpt.save({"x": torch.ones(3)}, tmp_path / "run" / "one", no_dist=True)
    path = tmp_path / "run" / "one" / "manifest.json"
    path.write_text(path.read_text().replace('"version": 9', '"version": 10'))
    with pytest.raises(independent.Unsupported):
        independent.Reader(path.parent)
    with pytest.raises(dsq_ckpt.UnsupportedFormat):
        Checkpoint(path.parent)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A checkpoint with a coded tensor and two exact ones."""
    path = tmp_path / "run" / "one"
    dsq_ckpt.save(like(), path, config={"quantize": {"min_elements": 100}}, no_dist=True)
    return path


def like() -> Tree:
    generator = torch.Generator().manual_seed(4)
    return {"w": torch.randn(20, 30, generator=generator), "a": torch.ones(3), "b": torch.zeros(3)}


def read_by_both(path: Path) -> list[Exception | None]:
    """What the independent reader and the package raise when they read everything."""
    def independently() -> None:
        reader = independent.Reader(path)
        for name in reader.index["tensors"]:
            reader.tensor(name)

    errors: list[Exception | None] = []
    for read in (independently, lambda: dsq_ckpt.load(like(), path, no_dist=True)):
        try:
            read()
            errors.append(None)
        except (independent.Refused, dsq_ckpt.CorruptCheckpoint) as error:
            errors.append(error)
    return errors


def refused(path: Path) -> bool:
    return None not in read_by_both(path)


def test_rewritten_files_are_read(small: Path) -> None:
    """What the next tests do to files is not itself what is refused; nor are keys that nobody knows."""
    manifest = json.loads((small / "manifest.json").read_bytes())
    manifest["unknown"] = manifest["files"][0]["unknown"] = {"ä": 1}
    rewrite(small, manifest)
    edit_contents(small, lambda contents: contents.update(unknown=1))
    edit_index(small, lambda index: index.update(unknown=1))
    assert read_by_both(small) == [None, None]


@pytest.mark.parametrize("change", [
    pytest.param(lambda m: m.update(version=0), id="version 0"),
    pytest.param(lambda m: m.update(version=True), id="version true"),
    pytest.param(lambda m: m.update(version=1.0), id="version 1.0"),
    pytest.param(lambda m: m.update(version="1"), id="version string"),
    pytest.param(lambda m: m["files"].append(m["files"][0]), id="name twice"),
    pytest.param(lambda m: m["files"].append({**m["files"][0], "name": "b", "role": "index"}), id="two indices"),
    pytest.param(lambda m: m.update(files=[f for f in m["files"] if f["role"] != "index"]), id="no index"),
    pytest.param(lambda m: m["files"][0].update(name="../x"), id="name outside"),
    pytest.param(lambda m: m.update(seconds=float("nan")), id="NaN"),
])
def test_refused_manifests(small: Path, change: Callable[[Tree], Any]) -> None:
    manifest = json.loads((small / "manifest.json").read_bytes())
    change(manifest)
    rewrite(small, manifest)
    assert refused(small)


@pytest.mark.parametrize(("old", "new"), [
    pytest.param(b'"depth": 0', b'"depth": 1', id="value"),
    pytest.param(b'"depth": 0', b'"depth":  0', id="space"),
    pytest.param(b"\n", b"\r\n", id="line ends"),
    pytest.param(b'"checksum"', b'"checksun"', id="no checksum"),
])
def test_every_byte_of_the_manifest_counts(small: Path, old: bytes, new: bytes) -> None:
    path = small / "manifest.json"
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new, 1))
    assert refused(small)


def group(contents: Tree) -> Tree:
    return next(iter(contents["groups"].values()))


def cells(contents: Tree) -> list[list[float]]:
    return group(contents)["codebook"]["cells"]


def record(contents: Tree, fqn: str) -> Tree:
    return next(entry for entry in contents["records"] if entry["fqn"] == fqn)


def upper(contents: Tree) -> None:
    place = group(contents)["model"]
    place[2] = place[2].upper()
    assert not place[2].isdecimal()


@pytest.mark.parametrize("change", [
    pytest.param(lambda c: group(c).update(coder="lzma"), id="coder"),
    pytest.param(lambda c: group(c)["codebook"].update(domain="cubic"), id="domain"),
    pytest.param(lambda c: group(c)["codebook"].update(cells=cells(c)[::-1]), id="low above high"),
    pytest.param(lambda c: cells(c)[1].__setitem__(0, float("inf")), id="Infinity"),
    pytest.param(lambda c: c.update(unknown=float("nan")), id="NaN"),
    pytest.param(lambda c: record(c, "a").update(fqn="b"), id="fqn"),
    pytest.param(lambda c: record(c, "a").update(offsets=[1]), id="offsets"),
    pytest.param(lambda c: record(c, "w").update(type="coded2"), id="type"),
    pytest.param(upper, id="digits of a checksum"),
])
def test_refused_contents(small: Path, change: Callable[[Tree], Any]) -> None:
    edit_contents(small, change)
    assert refused(small)


def swap(index: Tree) -> None:
    a, b = (index["tensors"][name]["chunks"][0] for name in "ab")
    a[2:], b[2:] = b[2:], a[2:]


def test_refused_index_and_trailing_bytes(small: Path) -> None:
    edit_index(small, swap)
    assert refused(small)
    edit_index(small, swap)
    assert read_by_both(small) == [None, None]
    edit_index(small, lambda index: None, after=b"\0")
    assert refused(small)


def test_refused_bytes_after_contents(small: Path) -> None:
    edit_contents(small, lambda contents: None, after=zstd({}))
    assert refused(small)


def other_save(path: Path) -> Path:
    """A checkpoint of the same tensors, of another save."""
    dsq_ckpt.save(like(), path, config={"quantize": {"min_elements": 100}}, no_dist=True)
    return path


@pytest.mark.parametrize("suffix", ["dsq", "refinement"])
def test_a_file_of_another_save_is_refused(small: Path, tmp_path: Path, suffix: str) -> None:
    """Whole, with right checksums inside, and of the size that the manifest says."""
    (own,), (other,) = small.glob(f"*.{suffix}"), other_save(tmp_path / "other" / "one").glob(f"*.{suffix}")
    shutil.copyfile(other, own)
    manifest = json.loads((small / "manifest.json").read_bytes())
    (entry,) = (entry for entry in manifest["files"] if entry["name"] == own.name)
    entry["size"] = other.stat().st_size
    entry["contents"] = None  # as older writers left it
    rewrite(small, manifest)
    errors = read_by_both(small)
    assert None not in errors and own.name in str(errors[1])


@pytest.mark.parametrize("suffix", ["dsq", "refinement"])
def test_other_contents_under_the_right_name_are_refused(small: Path, suffix: str) -> None:
    manifest = (small / "manifest.json").read_bytes()
    edit_contents(small, lambda contents: contents.update(unknown=1), suffix=suffix)
    (file,) = small.glob(f"*.{suffix}")
    tree = json.loads((small / "manifest.json").read_bytes())
    (entry,) = (entry for entry in tree["files"] if entry["name"] == file.name)
    assert read_by_both(small) == [None, None]
    entry["contents"] = next(item["contents"] for item in json.loads(manifest)["files"] if item["name"] == file.name)
    rewrite(small, tree)
    errors = read_by_both(small)
    assert None not in errors and file.name in str(errors[1])


def test_older_manifests_tell_no_contents(small: Path) -> None:
    manifest = json.loads((small / "manifest.json").read_bytes())
    for entry in manifest["files"]:
        del entry["contents"]
    rewrite(small, manifest)
    assert read_by_both(small) == [None, None]


def chunks(*boxes: tuple[list[int], list[int]]) -> Callable[[Tree], Any]:
    """Let the index say that `w`, of shape [20, 30], is in these chunks."""
    def change(index: Tree) -> None:
        place = index["tensors"]["w"]["chunks"][0][2:]
        index["tensors"]["w"]["chunks"] = [[*box, *place] for box in boxes]
    return change


@pytest.mark.parametrize("change", [
    pytest.param(chunks(), id="no chunks"),
    pytest.param(chunks(([0, 0], [19, 30])), id="a gap"),
    pytest.param(chunks(([0, 0], [20, 30]), ([0, 0], [20, 30])), id="twice"),
    pytest.param(chunks(([0, 0], [10, 30]), ([0, 0], [10, 30])), id="as many elements, but not all"),
    pytest.param(chunks(([1, 0], [20, 30])), id="beyond the tensor"),
    pytest.param(chunks(([0, 0], [30, 20])), id="other shape"),
    pytest.param(chunks(([0, 0], [20, 30, 1])), id="other dimensions"),
    pytest.param(chunks(([0, -1], [20, 30])), id="negative"),
    pytest.param(lambda i: i["tensors"]["w"].update(dtype="float16"), id="dtype"),
    pytest.param(lambda i: i["tensors"]["w"].update(shape=[30, 20]), id="shape"),
    pytest.param(lambda i: i["planner"].pop("a"), id="no path"),
    pytest.param(lambda i: i["planner"].update(a=[]), id="empty path"),
    pytest.param(lambda i: i["files"].append("x"), id="file of no save"),
])
def test_refused_indices(small: Path, change: Callable[[Tree], Any]) -> None:
    edit_index(small, change)
    assert refused(small)
    with pytest.raises(dsq_ckpt.CorruptCheckpoint, match=r"\.index|\.dsq"):
        dsq_ckpt.load({}, small, no_dist=True)


def test_unknown_keys_survive(small: Path) -> None:
    """Dropping the refinement rewrites the manifest; what a later version put there stays."""
    manifest = json.loads((small / "manifest.json").read_bytes())
    manifest["unknown"] = {"a": [1, 2.5, None, "\u00e4"]}
    for entry in manifest["files"]:
        entry["unknown"] = entry["name"]
    rewrite(small, manifest)
    dsq_ckpt.load(like(), small, no_dist=True)  # what comes next continues it, and drops its refinement
    config = {"quantize": {"min_elements": 100}, "refinement": {"keep_last": 1}}
    dsq_ckpt.save(like(), small.parent / "two", config=config, no_dist=True)
    after = independent.Reader(small).manifest
    assert (manifest["refinement"], after["refinement"]) == ("kept", "dropped")
    files = [entry for entry in manifest["files"] if entry["role"] != "refinement"]
    changed = {"refinement": "dropped", "files": files, "checksum": after["checksum"]}
    assert after == {**manifest, **changed} and len(files) < len(manifest["files"])


@pytest.fixture
def moments(tmp_path: Path) -> Path:
    """A checkpoint with second moments over scales."""
    path = tmp_path / "run" / "one"
    second = torch.rand(40, 50, generator=torch.Generator().manual_seed(4)) + 0.1
    state = {"w": {"exp_avg": second * 0, "exp_avg_sq": second}}
    dsq_ckpt.save({"state": state}, path, config={"quantize": {"min_elements": 100}}, no_dist=True)
    return path


@pytest.mark.parametrize("change", [
    pytest.param(lambda c: None, id="nothing"),
    pytest.param(lambda c: c.update(scales=[c["scales"][0], 89]), id="fewer than the pack has"),
    pytest.param(lambda c: c.update(scales=[c["scales"][0], -1]), id="count"),
    pytest.param(lambda c: c.update(scales=[c["scales"][0], True]), id="true"),
    pytest.param(lambda c: c.update(scales=[len(c["packs"]), 90]), id="no such pack"),
    pytest.param(lambda c: c.update(scales=[-1, 90]), id="from the end"),
    pytest.param(lambda c: c.update(scales=[None, 90]), id="null"),
    pytest.param(lambda c: c["packs"][c["scales"][0]].__setitem__(1, 1), id="item size"),
    pytest.param(lambda c: c["packs"].append([c["packs"][0][0], 2, 178]) or c.update(scales=[len(c["packs"]) - 1, 89]),
                 id="another size than the frame has"),
])
def test_scales(moments: Path, change: Callable[[Tree], Any], request: pytest.FixtureRequest) -> None:
    def changed(contents: Tree) -> None:
        assert contents["scales"][1] == 90
        change(contents)

    edit_contents(moments, changed)
    reader = independent.Reader(moments)
    target = {"state": {"w": {"exp_avg": torch.zeros(40, 50), "exp_avg_sq": torch.zeros(40, 50)}}}
    if request.node.callspec.id == "nothing":
        dsq_ckpt.load(target, moments, no_dist=True)
        reader.tensor("state.w.exp_avg_sq")
        return
    with pytest.raises(dsq_ckpt.CorruptCheckpoint):
        dsq_ckpt.load(target, moments, no_dist=True)
    with pytest.raises((independent.Refused, IndexError, TypeError)):  # Python refuses what is no number, or not there
        reader.tensor("state.w.exp_avg_sq")
