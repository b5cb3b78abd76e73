"""What no honest writer makes: files that block, claim what they do not hold, or use up what a process has."""

from __future__ import annotations

import json
import os
import resource
import shutil

import pytest
import torch
import xxhash
import zstandard

import dsq_ckpt
from dsq_ckpt.convert.export import export_torch
from dsq_ckpt.core import regular_files
from dsq_ckpt.core.workers import Workers
from dsq_ckpt.storage.checkpoint import Checkpoint
from dsq_ckpt.storage.container import ContainerReader, ContainerWriter
from dsq_ckpt.storage.manifest import Manifest
from tests.helpers.commands import dsq_error, dsq_stdout
from tests.helpers.edited_checkpoints import edit_contents, edit_index
from tests.helpers.open_files import count_descriptors, identity
from tests.helpers.states import find_differences, is_equal, load_copy

CONFIG = {"quantize": {"min_elements": 100}, "storage": {"fsync": False, "block_elements": 1 << 10}}


def state(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {"w": torch.randn(40, 60, generator=generator), "list": [torch.ones(3)], "n": 5}


@pytest.fixture
def directory(tmp_path):
    dsq_ckpt.save(state(), tmp_path / "run" / "a", config=CONFIG)
    return tmp_path / "run" / "a"


@pytest.mark.parametrize("kind", ["fifo", "device", "directory", "socket"])
def test_anything_but_a_file_is_refused_at_once(directory, kind):
    """Opening a FIFO would wait for somebody to write into it."""
    for file in sorted(directory.iterdir()):
        held = file.read_bytes()
        file.unlink()
        if kind == "fifo":
            os.mkfifo(file)
        elif kind == "device":
            file.symlink_to("/dev/zero")
        elif kind == "socket":
            os.mknod(file, 0o140600)
        else:
            file.mkdir()
        with pytest.raises(dsq_ckpt.DSQError, match=file.name):
            load_copy(directory, state())
        assert dsq_ckpt.latest(directory.parent) is None or file.name != "manifest.json"
        if kind == "directory":
            file.rmdir()
        else:
            file.unlink()
        file.write_bytes(held)
    assert find_differences(load_copy(directory, state()), load_copy(directory, state())) == []


def test_links_to_files_are_followed(directory, tmp_path):
    """As stores of files make them; every byte is compared with its checksum all the same."""
    values = load_copy(directory, state())
    for file in sorted(directory.iterdir()):
        file.rename(tmp_path / file.name)
        file.symlink_to(tmp_path / file.name)
    assert find_differences(load_copy(directory, state()), values) == []


def test_manifests_are_nested_and_long_as_far_as_is_sensible(directory):
    path = directory / "manifest.json"
    head = path.read_text().partition('"save_id"')[0]
    for text in ("[" * 100_000 + "]" * 100_000, head + '"x": ' + "[" * 100_000):
        path.write_text(text)
        with pytest.raises(dsq_ckpt.CorruptCheckpoint, match=r"manifest\.json"):
            Manifest.read(directory)
    with open(path, "w") as file:
        file.truncate(1 << 40)  # a hole of 1 TiB
    with pytest.raises(dsq_ckpt.CorruptCheckpoint, match="more than"):
        Manifest.read(directory)


def test_places_of_lists(directory):
    edit_index(directory, lambda index: index["planner"].update({"list.0": ["list", 150_000_000]}))
    for target in ({}, state()):
        with pytest.raises(dsq_ckpt.CorruptCheckpoint, match=r"place 150000000 of a list.*"):
            dsq_ckpt.load(target, directory)


def test_two_names_with_one_path(directory):
    edit_index(directory, lambda index: index["planner"].update({"list.0": index["planner"]["w"]}))
    for target in ({}, state()):
        with pytest.raises(dsq_ckpt.CorruptCheckpoint, match=r"'list\.0' has the path of 'w'"):
            dsq_ckpt.load(target, directory)


def test_a_value_above_other_values(directory):
    """Ranks may have a list without tensors, which is one object, where others have tensors in it."""
    edit_index(directory, lambda index: index["planner"].update(n=["list"]))
    for read in (lambda: dsq_ckpt.load({}, directory), lambda: export_torch(directory, directory.parent / "out.pt")):
        with pytest.raises(dsq_ckpt.LoadFailed, match=r"'n' and 'list\.0' cannot both be in one state dict"):
            read()
    dsq_ckpt.load(target := {"w": torch.zeros(40, 60)}, directory)
    assert is_equal(target["w"], load_copy(directory, {"w": torch.zeros(40, 60)})["w"])


def test_a_name_without_a_value_is_reported(directory):
    edit_index(directory, lambda index: index["tensors"].pop("list.0"))
    assert export_torch(directory, directory.parent / "out.pt").left_out == ["list.0"]
    with pytest.raises(dsq_ckpt.DSQError, match="no 'list"):
        dsq_ckpt.load({}, directory)


@pytest.mark.parametrize("change", [
    lambda book, record: book["levels"].__setitem__(1, "0000"), lambda book, record: record.update(exponent="2"),
    lambda book, record: record.update(exponent=True),
], ids=["level", "exponent", "boolean"])
def test_numbers_are_numbers(directory, change):
    """Python and NumPy would make numbers of strings."""
    def edit(contents):
        (record,) = (record for record in contents["records"] if record["fqn"] == "w")
        change(contents["groups"][record["group"]]["codebook"], record)

    edit_contents(directory, edit)
    with pytest.raises(dsq_ckpt.CorruptCheckpoint, match=r"\.dsq|'w'"):
        dsq_ckpt.load(state(), directory)


def _with(directory, **changes):
    """Write a manifest with other values and a right checksum."""
    Manifest.read(directory).model_copy(update=changes).write(directory, exclusive=False, fsync=False)


SEARCH = {"metric": 2.0, "degradation": 0.01, "evaluations": 3, "seconds": 1.0, "chosen": {"step": 2.0}}


@pytest.mark.parametrize("config", [
    {}, {"quantize": [], "search": 3, "delta": "x", "system": []}, {"quantize": {"weights": [], "groups": 7}},
    {"quantize": {"weights": {"codebook": "x", "refinement_bits": {}}, "groups": {"other": {"codebook": 1}}}},
], ids=["empty", "no objects", "no kinds", "no codebooks"])
def test_commands_and_loads_do_without_the_configuration(directory, config):
    for quality in (
        None, SEARCH, {**SEARCH, "chosen": None}, {**SEARCH, "chosen": {"variant": 5}},
        {"degradation": None, "seconds": None},
    ):
        _with(directory, config=config, quality=quality)
        for command in (
            ["inspect", directory], ["inspect", directory, "--tensors"], ["log", directory.parent],
            ["verify", directory],
        ):
            dsq_stdout(*command)
        target = state(1)
        dsq_ckpt.load(target, directory)
        assert target["n"] == 5


@pytest.mark.parametrize(
    "quality", [{"degradation": "x"}, {"seconds": []}, {"metric": {}}, {"metric": 10**400}, {"chosen": "step"}],
    ids=lambda quality: str(quality)[:30],
)
def test_measurements_of_a_search_are_numbers(directory, quality):
    _with(directory, quality={**SEARCH, **quality})
    (name,) = quality
    assert f"'{name}' is " in dsq_error("inspect", directory)
    with pytest.raises(dsq_ckpt.CorruptCheckpoint, match=f"manifest.json.*'{name}' is "):
        dsq_ckpt.load(state(), directory)


@pytest.mark.parametrize("record", ["w", "list.0", "n"])
def test_sizes_that_no_file_can_hold(directory, record):
    """Nothing is allocated for them."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def claim(contents):
        for pack in contents["packs"]:
            pack[2] = 1 << 40
        for entry in contents["records"]:
            if entry["fqn"] == record and "size" in entry:
                entry["size"] = 1 << 40
            elif entry["fqn"] == record:
                entry.update(protected_count=1 << 40, protected=entry["blocks"][0])

    edit_contents(directory, claim)
    with pytest.raises(dsq_ckpt.CorruptCheckpoint, match=r"\.dsq"):
        load_copy(directory, state())
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + (200 << 10)


def test_a_table_that_repeats_itself_is_still_read(tmp_path):
    """A writer adds noise where its frame would hold more than readers believe of so few bytes."""
    contents = {"rows": ["the same"] * 2_000_000}
    with ContainerWriter(tmp_path, "x", False) as writer:
        info = writer.finish(contents)
    assert info.size < 400_000
    reader = ContainerReader(tmp_path / "x")
    assert reader.contents["rows"] == contents["rows"]
    reader.close()


def test_few_files_are_open_at_a_time(tmp_path):
    """A chain that is longer than the process may have files open; running out of them is not damage."""
    config = {**CONFIG, "delta": {"max_chain": 100}, "storage": {**CONFIG["storage"], "block_elements": 1 << 10}}
    current = state()
    for number in range(60):
        current["w"] += 0.001
        dsq_ckpt.save(current, tmp_path / f"{number:03d}", config=config)
    last = tmp_path / "059"
    assert Manifest.read(last).depth == 59
    regular_files._close_idle_files(0)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    first_free = os.dup(0)
    os.close(first_free)
    values = load_copy(last, state())
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (first_free + 40, limits[1]))
        assert find_differences(load_copy(last, state()), values) == []
        regular_files._close_idle_files(0)
        taken = []
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                taken.append(os.dup(0))
        with pytest.raises(dsq_ckpt.LoadFailed, match="ulimit"):
            Manifest.read(last)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in taken:
            os.close(descriptor)


def test_descriptors_are_given_back(directory):
    files = {identity(file) for file in (directory, *directory.iterdir())}
    for _ in range(3):
        load_copy(directory, state())
    with Checkpoint(directory) as checkpoint, Workers(2, 1 << 10) as workers:
        for _, ref in checkpoint.iter_chunks():
            checkpoint.decode_tensor(ref, True, workers)
        assert count_descriptors(files) > 0
    assert count_descriptors(files) == 0


def test_a_checkpoint_that_is_overwritten_meanwhile(directory, monkeypatch):
    """A load that finds the files of another save is told to load again, not that anything is damaged."""
    original, calls = Checkpoint.prepare_load, []

    def overwriting(self, ref, *args, **kwargs):
        if not calls:
            calls.append(ref)
            dsq_ckpt.save(state(1), directory, config=CONFIG, overwrite=True)
            for name in list(self._readers):
                self._readers.pop(name).close()
        return original(self, ref, *args, **kwargs)

    monkeypatch.setattr(Checkpoint, "prepare_load", overwriting)
    with pytest.raises(dsq_ckpt.LoadFailed, match="load again"):
        load_copy(directory, state())
    assert is_equal(load_copy(directory, state())["list"][0], torch.ones(3))


def test_a_load_that_fails_before_it_begins_is_a_failed_load(directory, monkeypatch):
    def fail(directory):
        raise ValueError("something")

    monkeypatch.setattr(dsq_ckpt.api.loading, "require_checkpoint_path", fail)
    with pytest.raises(dsq_ckpt.LoadFailed, match="ValueError: something") as caught:
        dsq_ckpt.load(state(), directory)
    assert not isinstance(caught.value, dsq_ckpt.SaveFailed)


def test_every_name_has_a_path_or_none_has(tmp_path):
    """A state dict whose planner told no paths is not loaded into an empty dict as if it were empty."""
    import torch.distributed.checkpoint as dcp

    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save({"w": torch.ones(3)}, storage_writer=dsq_ckpt.DSQStorageWriter(tmp_path / "a"), planner=planner)
    with Checkpoint(tmp_path / "a") as checkpoint:
        assert checkpoint.index["planner"] is None
    with pytest.raises(dsq_ckpt.LoadFailed, match="does not tell how"):
        dsq_ckpt.load({}, tmp_path / "a")
    dsq_ckpt.load(target := {"w": torch.zeros(3)}, tmp_path / "a")
    assert is_equal(target["w"], torch.ones(3))


def test_copies_and_fixtures_stay_readable(directory, tmp_path):
    values = load_copy(directory, state())
    shutil.copytree(directory, tmp_path / "copy")
    assert find_differences(load_copy(tmp_path / "copy", state()), values) == []
    assert all(entry["contents"] for entry in json.loads((directory / "manifest.json").read_text())["files"]
               if entry["role"] in ("own", "refinement"))


def test_a_parent_that_cannot_be_coded_against_is_named(directory):
    def change(index):
        next(iter(index["codebooks"].values()))["levels"].pop()

    edit_index(directory, change)
    with pytest.raises(dsq_ckpt.CorruptCheckpoint, match=f"{directory}.*index.*codebook"):
        dsq_ckpt.save(
            state(), directory.parent / "b", config=CONFIG, parent=directory, history=dsq_ckpt.SaveHistory()
        )


@pytest.mark.parametrize("data", [b"", b"PK\3\4x", b"\x80\x04.", b"."])
def test_an_object_that_does_not_unpickle_is_named(directory, data):
    """Unpicklers raise IndexError, RuntimeError, EOFError and others."""
    def change(contents):
        (record,) = (record for record in contents["records"] if record["fqn"] == "n")
        record.pop("at", None)
        record.update(size=len(data), packs=[len(contents["packs"])])
        contents["packs"].append([contents.pop("place"), 1, len(data)])

    with_object(directory, data, change)
    with pytest.raises(dsq_ckpt.DSQError, match="'n'"):
        export_torch(directory, directory.parent / "out.pt")
    with pytest.raises(dsq_ckpt.DSQError, match="'n'"):
        dsq_ckpt.load({}, directory)


def with_object(path, data, change):
    """Append a block with one zstd frame to the base file, whose place `change` finds in its contents."""
    (file,) = path.glob("*.dsq")
    frame = zstandard.ZstdCompressor().compress(data)
    raw = file.read_bytes()
    start = int.from_bytes(raw[-32:-24], "little")
    place = [start, len(frame), xxhash.xxh3_64_hexdigest(frame)]
    grown = raw[:start] + frame + raw[start:-32] + (start + len(frame)).to_bytes(8, "little") + raw[-24:]
    file.write_bytes(grown)
    edit_contents(path, lambda contents: (contents.update(place=place), change(contents)))
