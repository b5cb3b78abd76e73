"""`delta.max_chain: auto`: checkpoints share parents, and no load decodes more deltas than is promised."""

from __future__ import annotations

import itertools
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dsq_ckpt
from dsq_ckpt.config.schema import DeltaConfig, DSQConfig
from dsq_ckpt.engine.history import SaveHistory
from dsq_ckpt.engine.local_state import LocalShard, LocalState
from dsq_ckpt.quantization.chunk import ChunkKey
from dsq_ckpt.storage.checkpoint import Checkpoint
from dsq_ckpt.storage.manifest import Manifest
from tests.helpers.saving import save_parts
from tests.helpers.states import find_differences, load_copy, to_bytes
from tests.helpers.thread_ranks import make_thread_ranks

AUTO = {"delta": {"max_chain": "auto"}, "storage": {"fsync": False, "block_elements": 1024},
        "quantize": {"min_elements": 256}}
LINKS, SIBLINGS = DeltaConfig(max_chain="auto").most_links, DeltaConfig(max_chain="auto").siblings


def states(seed=0):
    """Weights that take a step between any two."""
    generator = torch.Generator().manual_seed(seed)
    state = {"a.weight": torch.randn(24, 40, generator=generator), "b.weight": torch.randn(30, 30, generator=generator)}
    while True:
        yield state
        state = {name: value + 0.01 * torch.randn(value.shape, generator=generator) for name, value in state.items()}


def lengths(path):
    """Deltas that a load of a checkpoint decodes, by chunk."""
    with Checkpoint(path) as checkpoint:
        return [
            len(checkpoint.follow_chain(ref, "parent", ("coded", "plain"))) - 1 for _, ref in checkpoint.iter_chunks()
        ]


def parents(paths):
    return [Manifest.read(path).parent_name for path in paths]


def test_several_checkpoints_share_a_parent(tmp_path):
    paths = [tmp_path / f"{number:02d}" for number in range(2 * (SIBLINGS * LINKS + 1))]
    for path, state in zip(paths, states(), strict=False):
        dsq_ckpt.save(state, path, config=AUTO)
    period = SIBLINGS * LINKS + 1
    for number, (path, parent) in enumerate(zip(paths, parents(paths), strict=True)):
        place = number % period
        expected = number - (place - 1) % SIBLINGS - 1
        assert parent == (None if place == 0 else f"{expected:02d}")
        manifest = Manifest.read(path)
        assert manifest.depth == -(-place // SIBLINGS) == max(lengths(path))
        assert manifest.previous_name == (f"{number - 1:02d}" if number else None)


def test_codes_in_memory_and_codes_from_files_lead_to_the_same_run(tmp_path):
    """The parent's codes are kept while it is shared, and no others."""
    history, names = SaveHistory(), [f"{number:02d}" for number in range(SIBLINGS + 3)]
    for name, state in zip(names, states(), strict=False):
        dsq_ckpt.save(state, tmp_path / "a" / name, config=AUTO, history=history)
        held = [checkpoint.save_id for checkpoint in history.checkpoints() if checkpoint.cache]
        newest = Manifest.read(tmp_path / "a" / name)
        promoted = newest.siblings in (0, SIBLINGS)
        assert held == [newest.save_id if promoted else newest.parent]
    for name, parent, state in zip(names, parents(tmp_path / "a" / name for name in names), states(), strict=False):
        dsq_ckpt.save(state, tmp_path / "b" / name, config=AUTO, history=SaveHistory(),
                      parent=None if parent is None else tmp_path / "b" / parent)
    state = next(states())
    for name in names:
        a, b = (load_copy(tmp_path / run / name, state, refinement=False) for run in "ab")
        assert find_differences(a, b) == []


def test_a_background_process_keeps_the_codes_of_a_shared_parent(tmp_path):
    """The process that trains tells it of checkpoints, not of what they are coded against."""
    history, run = SaveHistory(), states()
    for name in "ab":
        dsq_ckpt.save(next(run), tmp_path / name, config=AUTO, history=history)
    a, b = (Manifest.read(tmp_path / name).save_id for name in "ab")
    told = [replace(checkpoint, shared_parent=None) for checkpoint in history.outline() if checkpoint.save_id == b]
    history.adopt(told)
    assert [checkpoint.save_id for checkpoint in history.checkpoints()] == [b, a] and history.find(a).cache
    dsq_ckpt.save(next(run), tmp_path / "c", config=AUTO, history=history)
    assert Manifest.read(tmp_path / "c").parent == a
    history.adopt([])
    assert history.checkpoints() == []


def test_a_parent_that_is_gone(tmp_path):
    """The next checkpoint is coded against the one before it, and no chain grows beyond what is promised."""
    run = states()
    for number in range(3 * LINKS):
        path = tmp_path / str(number)
        dsq_ckpt.save(next(run), path, config=AUTO)
        if number:
            shutil.rmtree(tmp_path / str(number - 1))  # as trainers do that keep the newest alone
        assert max(lengths(path)) <= LINKS
    assert Manifest.read(path).previous_name == str(number - 1)


def test_a_restart_is_coded_against_what_was_loaded(tmp_path):
    run = states()
    for name in "abc":
        dsq_ckpt.save(next(run), tmp_path / name, config=AUTO)
    assert Manifest.read(tmp_path / "c").parent_name == "a"
    history = SaveHistory()
    dsq_ckpt.load(next(run), tmp_path / "c", history=history)
    for name in "de":
        dsq_ckpt.save(next(run), tmp_path / name, config=AUTO, history=history)
    assert parents(tmp_path / name for name in "de") == ["c", "c"]


def test_moments_that_were_zero_are_not_written_twice(tmp_path):
    """A checkpoint before the first step has no codes that later moments could be coded given."""
    weight, generator = torch.randn(90, 90), torch.Generator().manual_seed(1)
    squares = torch.rand(90, 90, generator=generator).square() + 0.01
    for number in range(4):
        momentum = torch.zeros_like(squares) if number == 0 else 0.1 * torch.randn(90, 90, generator=generator)
        moments = {"exp_avg": momentum, "exp_avg_sq": squares * (number > 0)}
        state = {"model": {"w": weight + 0.01 * number}, "optimizer": {"state": {"w": moments}}}
        dsq_ckpt.save(state, tmp_path / str(number), config=AUTO)
    assert parents(tmp_path / str(number) for number in range(1, 4)) == ["0", "1", "1"]
    written = [Manifest.read(tmp_path / str(number)).kinds["exp_avg_sq"].base for number in (1, 2)]
    assert written[1] < written[0] / 4


@pytest.mark.parametrize("way", ["named", "overwritten"])
def test_a_parent_that_none_comes_to_share(tmp_path, way):
    """The codes of the newest checkpoint are kept, as the next one is coded against it."""
    run, history, path = states(), SaveHistory(), None
    for number in range(LINKS + 1):
        before, path = path or "auto", tmp_path / (str(number) if way == "named" else "same")
        dsq_ckpt.save(next(run), path, config=AUTO, history=history, overwrite=True,
                      parent=before if way == "named" else "auto")
        manifest = Manifest.read(path)
        assert manifest.depth == number
        assert [checkpoint.save_id for checkpoint in history.checkpoints() if checkpoint.cache] == [manifest.save_id]
    dsq_ckpt.save(next(run), tmp_path / "next", config=AUTO, history=history)
    assert Manifest.read(tmp_path / "next").depth == 0


def test_a_failed_save_changes_nothing(tmp_path, monkeypatch):
    run = states()
    for name in "ab":
        dsq_ckpt.save(next(run), tmp_path / name, config=AUTO)
    with monkeypatch.context() as patch:
        patch.setattr(Manifest, "write", lambda *args, **kwargs: (_ for _ in ()).throw(OSError("no space")))
        with pytest.raises(dsq_ckpt.DSQError, match="no space"):
            dsq_ckpt.save(next(run), tmp_path / "c", config=AUTO)
    dsq_ckpt.save(next(run), tmp_path / "d", config=AUTO)
    assert Manifest.read(tmp_path / "d").parent_name == "a"
    assert Manifest.read(tmp_path / "d").previous_name == "b"


def test_a_damaged_parent_is_noticed(tmp_path):
    """Each file of a shared parent is read again within a few saves."""
    run = states()
    for name in "ab":
        dsq_ckpt.save(next(run), tmp_path / name, config=AUTO)
    (file,) = (tmp_path / "a").glob("*.dsq")
    held = bytearray(file.read_bytes())
    held[60] ^= 1
    file.write_bytes(held)
    with pytest.warns(UserWarning, match="damaged"):
        for number in range(SIBLINGS * LINKS + 1):
            dsq_ckpt.save(next(run), tmp_path / f"c{number}", config=AUTO)
    assert load_copy(tmp_path / f"c{number}", next(states()))


@pytest.mark.parametrize("stage", ["copy", "quantize"])
def test_asynchronous_saves_share_parents(tmp_path, stage):
    config = {**AUTO, "storage": {**AUTO["storage"], "stage": stage}}
    run, saved_states = states(), []
    for number in range(SIBLINGS + 2):
        saved_states.append(next(run))
        dsq_ckpt.async_save(saved_states[-1], tmp_path / str(number), config=config).result()
    assert parents(tmp_path / str(n) for n in range(SIBLINGS + 2)) == [None, *["0"] * SIBLINGS, str(SIBLINGS)]
    for number, state in enumerate(saved_states):
        for name, value in load_copy(tmp_path / str(number), state, refinement=False).items():
            assert (value - state[name]).norm() < 0.2 * state[name].norm()


def test_keyframes_have_as_many_copies_as_configured(tmp_path):
    config = {**AUTO, "storage": {**AUTO["storage"], "replicate_keyframes": True}}
    run = states()
    for number in range(SIBLINGS + 1):
        dsq_ckpt.save(next(run), tmp_path / str(number), config=config)
    (name,) = (file.name for file in (tmp_path / "0").glob("*.dsq"))
    inodes = [(tmp_path / str(number) / name).stat().st_ino for number in range(SIBLINGS + 1)]
    assert len(set(inodes)) == 2 and all(a != b for a, b in itertools.pairwise(inodes))


def test_the_checkpoint_before_may_need_no_file_of_a_rank(tmp_path):
    """A copy of a keyframe is then made from another one."""
    config = {**AUTO, "storage": {**AUTO["storage"], "replicate_keyframes": True}}
    run, comms = states(), make_thread_ranks(2, timeout=60)
    first = next(run)

    def save(rank):
        name = sorted(first)[rank]
        part = LocalShard(ChunkKey(name, (0, 0), tuple(first[name].shape)), first[name].shape, torch.float32,
                          lambda: first[name])
        save_parts(tmp_path / "0", lambda: LocalState([part], nesting={name: (name,)}), DSQConfig(**config),
                   comms[rank], history=SaveHistory())

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(save, range(2)))
    dsq_ckpt.load({name: torch.empty_like(value) for name, value in first.items()}, tmp_path / "0")
    for number in range(1, 3):
        state = next(run)
        if number == 1:
            state = {**state, "b.weight": torch.full_like(state["b.weight"], torch.nan)}
        dsq_ckpt.save(state, tmp_path / str(number), config=config)
    files = [{file.name for file in Manifest.read(tmp_path / name).files if file.role == "ancestor"} for name in "12"]
    assert [len(names) for names in files] == [1, 2] and parents([tmp_path / "2"]) == ["0"]
    inodes = [{(tmp_path / name / file).stat().st_ino for name in "02"} for file in files[1] - files[0]]
    assert [len(numbers) for numbers in inodes] == [2]
    shutil.rmtree(tmp_path / "0")
    assert load_copy(tmp_path / "2", first)


def test_numbers_are_chains_as_before(tmp_path):
    """Also where a run goes over from one to the other."""
    run = states()
    longest = [8, 8, 8, 8, 8, 8, "auto", "auto", "auto", 8, 8]
    for number, value in enumerate(longest):
        dsq_ckpt.save(next(run), tmp_path / str(number), config={**AUTO, "delta": {"max_chain": value}})
    depths = [Manifest.read(tmp_path / str(number)).depth for number in range(len(longest))]
    assert depths == [0, 1, 2, 3, 4, 5, 0, 1, 1, 2, 3]
    values = {**AUTO["delta"], "against": "values"}
    assert DeltaConfig(**values).siblings == 1 and DeltaConfig(**values).most_links == 32


@settings(deadline=None, max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=st.lists(st.sampled_from("ssssssldrkn"), min_size=25, max_size=40), seed=st.integers(0, 2**16))
def test_no_load_decodes_more_than_promised(tmp_path_factory, events, seed):
    """Whatever happens to a run: saves, loads, deletions, keyframes, restarts, tensors that come and go."""
    root, run, history, there = tmp_path_factory.mktemp("run"), states(seed), SaveHistory(), []
    copies, extra = {}, {}
    for number, event in enumerate(events):
        if event in "sk":
            path, state = root / f"{number:03d}", {**next(run), **extra}
            dsq_ckpt.save(state, path, config=AUTO, history=history, parent=None if event == "k" else "auto")
            there.append(path)
            copies[path] = load_copy(path, state, refinement=False, history=SaveHistory())
            assert max(lengths(path)) <= Manifest.read(path).depth <= LINKS
        elif event == "n":
            extra = {} if extra else {"late.weight": torch.randn(20, 40)}
        elif event == "r":
            history = SaveHistory()
        elif there and event == "l":
            back = there[(seed + number) % len(there)]
            into = {name: torch.empty_like(value) for name, value in copies[back].items()}
            dsq_ckpt.load(into, back, refinement=False, history=history)
        elif there and event == "d":
            gone = there.pop((seed + number) % len(there))
            shutil.rmtree(gone)
            del copies[gone]
    for path, state in copies.items():  # whatever else was deleted
        back = load_copy(path, state, refinement=False, history=SaveHistory())
        assert all(to_bytes(back[name]) == to_bytes(value) for name, value in state.items())
