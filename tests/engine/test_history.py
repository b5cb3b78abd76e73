"""`SaveHistory`: what saves of one owner come after, apart from those of all others."""

import multiprocessing
import pickle

import pytest
import torch

import dsq_ckpt
from dsq_ckpt.distributed.comm import SingleProcess
from dsq_ckpt.engine.history import default_history
from dsq_ckpt.engine.local_state import LocalShard, LocalState
from dsq_ckpt.quantization.chunk import ChunkKey
from dsq_ckpt.storage.checkpoint import Checkpoint
from dsq_ckpt.storage.manifest import Manifest
from tests.helpers import processes
from tests.helpers.saving import save_parts
from tests.helpers.states import KEEP_ONE, mixed_state, perturb

CONFIG = {"storage": {"fsync": False}}


def state(step):
    return {"w": torch.randn(80, 80, generator=torch.Generator().manual_seed(0)) * (1 + step / 1000)}


def test_saves_of_two_owners_in_one_directory_know_nothing_of_each_other(tmp_path):
    first, second = dsq_ckpt.SaveHistory(), dsq_ckpt.SaveHistory()
    for step, history in enumerate((first, second, first, second)):
        dsq_ckpt.save(state(step), tmp_path / f"{step}", config=CONFIG, history=history)
    manifests = [Manifest.read(tmp_path / f"{step}") for step in range(4)]
    assert [manifest.parent_name for manifest in manifests] == [None, None, "0", "1"]
    assert [manifest.previous_name for manifest in manifests] == [None, None, "0", "1"]
    assert not default_history().checkpoints()


def test_a_load_of_an_owner_is_the_parent_of_its_save(tmp_path):
    history = dsq_ckpt.SaveHistory()
    dsq_ckpt.save(state(0), tmp_path / "0", config=CONFIG)
    dsq_ckpt.load(state(0), tmp_path / "0", history=history)
    dsq_ckpt.save(state(1), tmp_path / "1", config=CONFIG, history=history)
    manifest = Manifest.read(tmp_path / "1")
    assert manifest.parent_name == "0" and manifest.lossy_resumes == 1


@pytest.mark.parametrize("save", [
    lambda path, history: dsq_ckpt.async_save(state(1), path, config=CONFIG, history=history).result(),
    lambda path, history: dsq_ckpt.Compressor(torch.nn.Linear(80, 80), config=CONFIG, history=history).save(path),
])
def test_every_way_to_save_takes_a_history(tmp_path, save):
    history = dsq_ckpt.SaveHistory()
    save(tmp_path / "a", history)
    assert [checkpoint.path.name for checkpoint in history.checkpoints()] == ["a"]
    assert not default_history().checkpoints()


def test_a_run_that_is_moved_with_a_link_in_its_place_goes_on(tmp_path):
    """As to a larger disk, while training goes on."""
    history = dsq_ckpt.SaveHistory()
    for number in range(4):
        if number == 2:
            (tmp_path / "run").rename(tmp_path / "moved")
            (tmp_path / "run").symlink_to("moved")
        dsq_ckpt.save(state(number), tmp_path / "run" / f"{number}", config=CONFIG, history=history)
        manifest = Manifest.read(tmp_path / "run" / f"{number}")
        assert (manifest.depth, manifest.previous_name) == (number, f"{number - 1}" if number else None)


def known_there(history, names, answers):
    for name in names:
        history.adopt([*history.outline(), *pickle.loads(name)])
    answers.put((len(pickle.loads(pickle.dumps(history)).checkpoints()), repr(history)))


def share(directory):
    history = dsq_ckpt.SaveHistory()
    dsq_ckpt.save(state(0), f"{directory}/0", config=CONFIG, history=history)
    assert pickle.loads(pickle.dumps(history)) is history
    assert pickle.loads(pickle.dumps(default_history())) is default_history()
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    other = context.Process(target=known_there, args=(history, [pickle.dumps(history.outline())], answers))
    other.start()
    assert answers.get(timeout=200) == (1, "SaveHistory(1 checkpoints)")
    other.join()


def test_a_history_is_pickled_as_a_reference(tmp_path):
    text = "import sys; from tests.engine import test_history; test_history.share(sys.argv[1])"
    status, output = processes.run(["-c", text, str(tmp_path)], forked=True)
    assert status == 0, output


def test_a_save_that_fails_is_not_kept(tmp_path, monkeypatch):
    """Its codes would stay in memory beside those of the parent, and many failures would displace that."""
    history = dsq_ckpt.SaveHistory()
    shard = LocalShard(ChunkKey("w", (0, 0), (80, 80)), (80, 80), torch.float32, lambda: torch.ones(80, 80))

    def fails(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dsq_ckpt.engine.pipeline.commit", fails)
    with pytest.raises(dsq_ckpt.SaveFailed, match="No space left"):
        save_parts(tmp_path / "a", lambda: LocalState([shard]), dsq_ckpt.DSQConfig(), SingleProcess(), history=history)
    assert not history.checkpoints()


@pytest.mark.parametrize("call", [dsq_ckpt.DSQStorageWriter, dsq_ckpt.DSQStorageReader])
def test_a_history_of_another_type_is_refused(tmp_path, call):
    with pytest.raises(dsq_ckpt.ConfigError, match=r"history is .*, expected a SaveHistory"):
        call(tmp_path, history={})


def test_a_process_knows_of_its_checkpoints_what_their_indexes_tell(tmp_path):
    history, state = dsq_ckpt.SaveHistory(), {"w": torch.randn(256, 64), "tiny": 1e-12 * torch.randn(256, 64)}
    for number in range(2):
        result = dsq_ckpt.save(state, tmp_path / "run" / str(number), history=history)
        with Checkpoint(tmp_path / "run" / str(number)) as checkpoint:
            known, read = history.find(result.save_id).model, checkpoint.to_parent_model()
        assert known.exponents == read.exponents and known.depth == read.depth == number
        assert known.books.keys() == read.books.keys() and known.books
        assert all(known.books[name].to_json() == read.books[name].to_json() for name in read.books)
        state["w"] = state["w"] + 1e-3 * torch.randn(256, 64)


def test_codebooks_are_kept_of_few_checkpoints(tmp_path):
    """One for each tensor is a megabyte in a large model, and each run directory may hold one checkpoint alone."""
    history, state = dsq_ckpt.SaveHistory(), {"w": torch.randn(256, 64)}
    for number in range(6):
        dsq_ckpt.save(state, tmp_path / str(number) / "checkpoint", history=history)
    assert [checkpoint.model is not None for checkpoint in history.checkpoints()] == [True] * 4 + [False] * 2
    assert dsq_ckpt.save(state, tmp_path / "0" / "next", history=history).depth == 1


def test_a_run_that_is_reached_through_links_is_one_run(tmp_path):
    """As where the home of a cluster has several paths."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    real, link = tmp_path / "disk" / "run", tmp_path / "link" / "run"
    state = mixed_state()
    paths = [real / "0", link / "1", link / ".." / "run" / "2", real / "3"]
    for number, path in enumerate(paths):
        dsq_ckpt.save(perturb(state, number), path, config=KEEP_ONE)
    manifests = [Manifest.read(path) for path in paths]
    assert [manifest.depth for manifest in manifests] == [0, 1, 2, 3]
    assert [manifest.previous_name for manifest in manifests] == [None, "0", "1", "2"]
    assert [manifest.refinement for manifest in manifests] == ["dropped"] * 3 + ["kept"]
    dsq_ckpt.save(state, link / "3", overwrite=True, config=KEEP_ONE)
    assert Manifest.read(real / "3").previous == manifests[2].save_id
    dsq_ckpt.load(state, link / "1", refinement=False)
    dsq_ckpt.save(state, real / "4")
    assert Manifest.read(real / "4").previous_name == "1"
    default_history().clear(real / "4")
    dsq_ckpt.save(state, link / "5")
    assert Manifest.read(real / "5").depth == 0
