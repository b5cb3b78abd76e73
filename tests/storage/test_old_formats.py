"""Checkpoints that were written once and for all are read for ever, to the same bits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import dsq_ckpt
from dsq_ckpt.storage.checkpoint import Checkpoint
from dsq_ckpt.storage.container import Block
from dsq_ckpt.storage.manifest import Manifest
from tests.fixtures import make_format_v1 as v1
from tests.fixtures import make_format_v2 as v2
from tests.fixtures import make_format_v3 as v3
from tests.fixtures import make_format_v4 as v4
from tests.fixtures import make_format_v5 as v5
from tests.fixtures import make_format_v6 as v6
from tests.fixtures import make_format_v7 as v7
from tests.fixtures import make_format_v8 as v8
from tests.helpers import independent_reader as independent
from tests.helpers.states import flat_tensors, flatten, load_copy, relative_error, to_bytes

EXPECTED = json.loads((v1.HERE / "expected.json").read_text())
EXPECTED_2 = json.loads((v2.HERE / "expected.json").read_text())
EXPECTED_3 = json.loads((v3.HERE / "expected.json").read_text())
EXPECTED_4 = json.loads((v4.HERE / "expected.json").read_text())
EXPECTED_5 = json.loads((v5.HERE / "expected.json").read_text())
EXPECTED_6 = json.loads((v6.HERE / "expected.json").read_text())
EXPECTED_7 = json.loads((v7.HERE / "expected.json").read_text())
EXPECTED_8 = json.loads((v8.HERE / "expected.json").read_text())
LOSSY = ("up.weight", "down.weight", "wild.weight", "embed.weight", "half.weight", "brain.weight", "double.weight")


def own_file(checkpoint):
    """The file of the first rank."""
    return checkpoint.open_reader(f"{checkpoint.manifest.save_id}-00000.dsq")


def check(path, like, expected, version):
    """Verify a checkpoint of a former version, and compare what is loaded from it with what that version loaded."""
    with Checkpoint(path) as checkpoint:
        assert [problem for _, _, problem in checkpoint.verify() if problem] == []
        assert checkpoint.manifest.version == version
    assert Manifest.read(path).depth == expected["depth"] and Manifest.read(path).refinement == expected["refinement"]
    assert v1.digests(load_copy(path, like)) == expected["full"]
    assert v1.digests(load_copy(path, like, refinement=False)) == expected["base"]


@pytest.mark.parametrize("number", sorted(EXPECTED))
def test_version_1(number):
    path, expected = v1.HERE / number, EXPECTED[number]
    like = v1.state_at(int(number))
    check(path, like, expected, 1)
    for fqn in LOSSY:  # and what was promised to be there is close to what was saved
        limit = 0.06 if Manifest.read(path).refinement == "kept" and fqn != "embed.weight" else 0.3
        assert relative_error(like["model"][fqn], load_copy(path, like)["model"][fqn]) < limit, fqn


@pytest.mark.parametrize("name", sorted(EXPECTED_2))
def test_version_2(name):
    path, expected = v2.HERE / name, EXPECTED_2[name]
    like = v2.state_at(name.partition("-")[0], v2.KEPT[name])
    check(path, like, expected, 2)
    for fqn, value in like["model"].items():
        limit = 0.08 if name == "lc-merged" else 0.02 if "sums" in name else 0.2
        assert relative_error(value, load_copy(path, like)["model"][fqn]) < limit, fqn


@pytest.mark.parametrize("name", sorted(EXPECTED_3))
def test_version_3(name):
    """Blocks of 1 and 8 lanes, and refinement by rANS, of the coder before that of version 4."""
    path, expected = v3.HERE / name, EXPECTED_3[name]
    like = v3.state_at(int(name))
    check(path, like, expected, 3)
    with Checkpoint(path) as checkpoint:
        contents = own_file(checkpoint).contents
        assert any("unit" in record for record in contents["records"])


@pytest.mark.parametrize("name", sorted(EXPECTED_4))
def test_version_4(name):
    """Second moments by the octaves of their values, and first moments in units of these."""
    path, expected = v4.HERE / name, EXPECTED_4[name]
    check(path, v4.state_at(int(name)), expected, 4)
    with Checkpoint(path) as checkpoint:
        contents = own_file(checkpoint).contents
        assert any("unit" in record for record in contents["records"])
        models = [own_file(checkpoint).read(Block(*group["model"]))
                  for group in contents["groups"].values() if group["coder"] == "rans"]
        assert {model[0] for model in models} == {2}


@pytest.mark.parametrize("name", sorted(EXPECTED_5))
def test_version_5(name):
    """Second moments over scales of rows and columns; lanes where few codes change."""
    path, expected = v5.HERE / name, EXPECTED_5[name]
    check(path, v5.state_at(int(name)), expected, 5)
    with Checkpoint(path) as checkpoint:
        contents = own_file(checkpoint).contents
        assert any("root" in record for record in contents["records"])
        assert {group["coder"] for group in contents["groups"].values()} == {"rans"}


@pytest.mark.parametrize("name", sorted(EXPECTED_6))
def test_version_6(name):
    """Lists of changes; exact data by themselves, complex numbers as items of eight bytes."""
    path, expected = v6.HERE / name, EXPECTED_6[name]
    check(path, v6.state_at(int(name)), expected, 6)
    with Checkpoint(path) as checkpoint:
        contents = own_file(checkpoint).contents
        assert ("changes" in {group["coder"] for group in contents["groups"].values()}) == (name == "1")
        assert all(len(pack) == 3 for pack in contents["packs"])
    back = flatten(load_copy(path, v6.state_at(int(name))))
    for fqn, value in flatten({"exact": v6.state_at(int(name))["exact"]}).items():
        assert to_bytes(back[fqn]) == to_bytes(value), fqn


@pytest.mark.parametrize("name", sorted(EXPECTED_7))
def test_version_7(name):
    """Exact data given those of the parent; scales as a block of their own."""
    path, expected = v7.HERE / name, EXPECTED_7[name]
    check(path, v6.state_at(int(name)), expected, 7)
    with Checkpoint(path) as checkpoint:
        contents = own_file(checkpoint).contents
        assert len(contents["packs"][0]) == (5 if name == "1" else 3)
        assert isinstance(contents["scales"][0], list) and any("scales" in record for record in contents["records"])


@pytest.mark.parametrize("name", sorted(EXPECTED_8))
def test_version_8(name):
    """Scales as a pack; refinement in full."""
    path, expected = v8.HERE / name, EXPECTED_8[name]
    check(path, v6.state_at(int(name)), expected, 8)
    with Checkpoint(path) as checkpoint:
        assert isinstance(own_file(checkpoint).contents["scales"][0], int)
        refinement = checkpoint.open_reader(f"{checkpoint.manifest.save_id}-00000.refinement").contents
        assert "requires" not in refinement and not any("parent" in entry for entry in refinement["records"].values())


@pytest.mark.parametrize("path", [*(v1.HERE / number for number in EXPECTED), *(v2.HERE / name for name in EXPECTED_2),
                                  *(v3.HERE / name for name in EXPECTED_3), *(v4.HERE / name for name in EXPECTED_4),
                                  *(v5.HERE / name for name in EXPECTED_5), *(v6.HERE / name for name in EXPECTED_6),
                                  *(v7.HERE / name for name in EXPECTED_7), *(v8.HERE / name for name in EXPECTED_8)],
                         ids=lambda path: f"{path.parent.name}-{path.name}")
def test_the_page_describes_them(path):
    """The reader that was written from docs/format.md gives the same."""
    reader = independent.Reader(path)
    if path.parent == v2.HERE:
        like = v2.state_at(path.name.partition("-")[0], v2.KEPT[path.name])
    else:
        like = {v1.HERE: v1, v6.HERE: v6, v7.HERE: v6, v8.HERE: v6}.get(path.parent, v3).state_at(int(path.name))
    for refinement in ("auto", False):
        for fqn, value in flat_tensors(load_copy(path, like, refinement=refinement)).items():
            if fqn in reader.index["tensors"]:
                assert reader.tensor(fqn, refinement == "auto") == to_bytes(value), fqn


def kinds_of_records(paths):
    """Types and keys of records, coders and domains, in the own files of checkpoints."""
    kinds, coders, fits = set(), set(), set()
    for path in paths:
        with Checkpoint(path) as checkpoint:
            for file in checkpoint.manifest.files:
                if file.role not in ("own", "ancestor"):
                    continue
                contents = checkpoint.open_reader(file.name).contents
                for record in contents["records"]:
                    kinds.add(record["type"])
                    kinds.update(key for key in KEYS if key in record)
                    kinds.add("large" if record["type"] == "plain" and "at" not in record else "small")
                    kinds |= {"fraction"} if record.get("exponent", 0) % 1 else set()
                    kinds |= {"merged and protected"} if record["type"] == "merged" and "protected" in record else set()
                coders |= {group["coder"] for group in contents["groups"].values()}
                fits |= {group["codebook"]["domain"] for group in contents["groups"].values()}
    return kinds, coders, fits


KEYS = ("parent", "exponent", "protected", "stored", "at", "residual")
IN_VERSION_1 = {"coded", "plain", "bytes", "parent", "exponent", "protected", "stored", "at", "large", "small"}


def test_they_hold_every_kind_of_record():
    kinds, coders, fits = kinds_of_records(v1.HERE / number for number in EXPECTED)
    assert kinds == IN_VERSION_1 and coders == {"rans", "huffman"} and fits == {"linear", "log"}
    kinds, coders, fits = kinds_of_records(v2.HERE / name for name in EXPECTED_2)
    assert kinds == IN_VERSION_1 - {"large"} | {"residual", "fraction", "merged", "merged and protected"}
    assert coders == {"rans", "huffman"} and fits == {"linear", "log"}


def test_version_1_is_a_parent(tmp_path):
    """A chain that an older version began goes on."""
    like = v1.state_at(3)
    dsq_ckpt.save(like, tmp_path / "3", parent=v1.HERE / "2", config=v1.config(2))
    assert Manifest.read(tmp_path / "3").depth == EXPECTED["2"]["depth"] + 1
    back = flatten(load_copy(tmp_path / "3", like))
    assert relative_error(like["model"]["up.weight"], back["model.up.weight"]) < 0.06


@pytest.mark.parametrize("version", [v3, v4, v5])
def test_versions_3_to_5_are_parents(tmp_path, version):
    """Codes of the new coder after those of the former one; second moments over scales begin a chain of their own."""
    like = version.state_at(2)
    config = version.config()
    config["quantize"]["weights"]["codebook"]["step"] = 0.64  # of larger units than the parent's, so cells are as wide
    dsq_ckpt.save(like, tmp_path / "2", parent=version.HERE / "1", config=config)
    assert Manifest.read(tmp_path / "2").depth == 2
    back = flatten(load_copy(tmp_path / "2", like))
    assert relative_error(like["model"]["up.weight"], back["model.up.weight"]) < 0.5  # one bit of refinement


def test_version_2_is_a_parent(tmp_path):
    like = v2.state_at("sums", 4)
    for name, number in (("sums-2", 2), ("sums-merged", 3)):
        dsq_ckpt.save(like, tmp_path / name, parent=v2.HERE / name, config=v2.config("sums", number))
        assert Manifest.read(tmp_path / name).depth == EXPECTED_2[name]["depth"] + 1
        back = flatten(load_copy(tmp_path / name, like))
        assert relative_error(like["model"]["up.weight"], back["model.up.weight"]) < 0.01


@pytest.mark.parametrize("version", [v1, v2, v3, v4, v5])
def test_the_generator_of_the_fixtures_still_works(tmp_path, version):
    """The generator itself; its bytes may differ from version to version, what they hold may not differ much."""
    version.make(tmp_path)
    digests, expected = (json.loads((path / "expected.json").read_text()) for path in (tmp_path, version.HERE))
    assert digests.keys() == expected.keys()
    for number in digests:
        assert digests[number]["full"].keys() == expected[number]["full"].keys()


@pytest.mark.parametrize("version", [v1, v2, v3, v4, v5])
def test_size_of_the_fixtures(version):
    assert sum(file.stat().st_size for file in Path(version.HERE).rglob("*") if file.is_file()) < 100 * 1024


def test_version_6_is_a_parent_of_exact_data(tmp_path):
    like = v6.state_at(2)
    dsq_ckpt.save(like, tmp_path / "2", parent=v6.HERE / "1", config=v6.config())
    with Checkpoint(tmp_path / "2") as checkpoint:
        contents = own_file(checkpoint).contents
        [((file, _), place)] = [pack[3:] for pack in contents["packs"] if len(pack) > 3]
        assert file.startswith(Manifest.read(v6.HERE / "1").save_id) and place == 1
    back = flatten(load_copy(tmp_path / "2", like))
    for fqn, value in flatten({"exact": like["exact"]}).items():
        assert to_bytes(back[fqn]) == to_bytes(value), fqn


def test_version_7_is_a_parent_and_can_be_merged(tmp_path):
    """Its scales are no pack: those of the next checkpoint are stored by themselves, and a merge makes them a pack."""
    like = v6.state_at(2)
    dsq_ckpt.save(like, tmp_path / "2", parent=v7.HERE / "1", config=v6.config())
    shutil.copytree(v7.HERE, tmp_path / "old")
    dsq_ckpt.merge(tmp_path / "old" / "1", tmp_path / "merged", keyframe=True)
    for name in ("2", "merged"):
        with Checkpoint(tmp_path / name) as checkpoint:
            contents = own_file(checkpoint).contents
            assert len(contents["packs"][contents["scales"][0]]) == 3
        independent.Reader(tmp_path / name)
    assert v1.digests(load_copy(tmp_path / "merged", like)) == EXPECTED_7["1"]["full"]
    paths = (v7.HERE / "1", tmp_path / "merged")
    told = [sum(kind.base for kind in Manifest.read(path).kinds.values()) for path in paths]
    stored = [payload(path) for path in paths]
    assert told[1] - told[0] == stored[1] - stored[0]  # what is said of the kinds is what was written


def payload(path):
    """The bytes of codes, packs and scales in the own file of a checkpoint."""
    with Checkpoint(path) as checkpoint:
        contents = own_file(checkpoint).contents
    blocks = [block for record in contents["records"] for block in record.get("blocks", ()) if block is not None]
    scales = [contents["scales"][0]] if isinstance(contents["scales"][0], list) else []
    return sum(block[1] for block in [*blocks, *scales, *(pack[0] for pack in contents["packs"])])


def test_a_manifest_of_version_8_does_not_say_that_it_left_out_frozen_weights():
    """Version 8 wrote an empty object also where `frozen=False` was not given."""
    assert '"excluded": {}' in (v8.HERE / "1" / "manifest.json").read_text()
    assert Manifest.read(v8.HERE / "1").excluded is None
