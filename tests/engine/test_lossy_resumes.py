"""How often a run was restored from lossy state, as its checkpoints count it, and what follows from too often."""

from __future__ import annotations

import shutil
import warnings

import pytest
import torch

import dsq_ckpt
from dsq_ckpt import DSQConfig
from dsq_ckpt.storage.manifest import Manifest
from tests.helpers.processes import torchrun
from tests.helpers.states import find_differences, flatten, is_equal, load_copy, mixed_state, perturb
from tests.helpers.training import Net, compute_loss, train

pytestmark = pytest.mark.usefixtures("one_thread")

EXACT = DSQConfig.preset("exact")
VALUES = {"delta": {"against": "values"}, "quantize": {"exp_avg_sq": {"method": "exact"}}}


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        warnings.filterwarnings("ignore", message=".*has only its base layer")
        yield


@pytest.fixture
def state():
    """Weights, moments, and what is exact anyway."""
    g = torch.Generator().manual_seed(0)
    moment = torch.randn(96, 64, generator=g) * 1e-3
    weight = torch.randn(96, 64, generator=g) * 0.02
    return {
        "model": {"w.weight": weight, "w.bias": torch.ones(96)},
        "optimizer": {"state": {"w.weight": {"exp_avg": moment, "exp_avg_sq": moment.square()}}},
        "step": 3,
    }


def resumes(path) -> int:
    return Manifest.read(path).lossy_resumes


def test_a_restore_counts_once(tmp_path, state):
    dsq_ckpt.save(state, tmp_path / "0")
    dsq_ckpt.save(state, tmp_path / "1")
    assert (resumes(tmp_path / "0"), resumes(tmp_path / "1")) == (0, 0)
    dsq_ckpt.load(state, tmp_path / "1")
    dsq_ckpt.load(state, tmp_path / "1")  # a restart that is restarted: nothing was saved in between
    dsq_ckpt.save(state, tmp_path / "2")
    dsq_ckpt.save(state, tmp_path / "3")
    assert (resumes(tmp_path / "2"), resumes(tmp_path / "3")) == (1, 1)
    history = dsq_ckpt.SaveHistory()  # a new process
    dsq_ckpt.load(state, tmp_path / "3", history=history)
    dsq_ckpt.save(state, tmp_path / "4", history=history)
    assert resumes(tmp_path / "4") == 2
    dsq_ckpt.load(state, tmp_path / "2", refinement=False, history=history)  # back to what had been restored once
    dsq_ckpt.save(state, tmp_path / "5", history=history)
    assert resumes(tmp_path / "5") == 2
    dsq_ckpt.load(state, tmp_path / "0", history=history)  # back to the beginning
    dsq_ckpt.save(state, tmp_path / "6", history=history)
    assert resumes(tmp_path / "6") == 1
    dsq_ckpt.save(state, tmp_path / "7", history=dsq_ckpt.SaveHistory())  # training anew in the same directory
    assert resumes(tmp_path / "7") == 0


@pytest.mark.parametrize("options", [{}, {"refinement": False}])
def test_lossy_and_exact_checkpoints(tmp_path, state, options):
    dsq_ckpt.save(state, tmp_path / "0")
    dsq_ckpt.load(state, tmp_path / "0", **options)
    dsq_ckpt.save(state, tmp_path / "1", config=EXACT)
    assert resumes(tmp_path / "1") == 1
    dsq_ckpt.load(state, tmp_path / "1", **options)
    dsq_ckpt.save(state, tmp_path / "2")
    assert resumes(tmp_path / "2") == 1
    bf16 = {"quantize": {kind: {"method": "bf16"} for kind in ("weights", "exp_avg", "exp_avg_sq")}}
    dsq_ckpt.save(state, tmp_path / "3", config=bf16)
    dsq_ckpt.load(state, tmp_path / "3", **options)
    dsq_ckpt.save(state, tmp_path / "4")
    assert resumes(tmp_path / "4") == 2


@pytest.mark.parametrize("options", [
    {"parent": None}, {"config": {"delta": {"max_chain": 1}}}, {"config": {"delta": {"enabled": False}}},
    {"config": VALUES},
], ids=str)
def test_keyframes_keep_counting(tmp_path, state, options):
    for number in range(4):
        dsq_ckpt.save(state, tmp_path / str(number), **options)
        dsq_ckpt.load(state, tmp_path / str(number))
    # The first one against values is exact.
    values = "against" in str(options)
    assert [resumes(tmp_path / str(n)) for n in range(4)] == ([0, 0, 1, 2] if values else [0, 1, 2, 3])


def test_named_parents(tmp_path, state):
    dsq_ckpt.save(state, tmp_path / "0")
    dsq_ckpt.save(state, tmp_path / "1", parent=tmp_path / "0")
    history = dsq_ckpt.SaveHistory()
    dsq_ckpt.load(state, tmp_path / "1", history=history)
    dsq_ckpt.save(state, tmp_path / "other" / "0", parent=tmp_path / "1", history=history)  # a branch
    assert resumes(tmp_path / "other" / "0") == 1
    dsq_ckpt.save(state, tmp_path / "2", parent=tmp_path / "1", history=history)
    dsq_ckpt.save(state, tmp_path / "3", parent=tmp_path / "1", history=history)
    # the state is still the one that was restored
    dsq_ckpt.save(state, tmp_path / "4", parent=tmp_path / "0", history=history)
    assert [resumes(tmp_path / str(n)) for n in range(5)] == [0, 0, 1, 1, 1]
    # nothing was loaded here
    dsq_ckpt.save(state, tmp_path / "5", parent=tmp_path / "3", history=dsq_ckpt.SaveHistory())
    assert resumes(tmp_path / "5") == 1


def test_asynchronous_saves(tmp_path, state):
    dsq_ckpt.async_save(state, tmp_path / "0").result()
    dsq_ckpt.load(state, tmp_path / "0")
    futures = [dsq_ckpt.async_save(state, tmp_path / name) for name in "12"]
    for future in futures:
        future.result()
    dsq_ckpt.load(state, tmp_path / "2")
    dsq_ckpt.save(state, tmp_path / "3")
    assert [resumes(tmp_path / name) for name in "0123"] == [0, 1, 1, 2]


def test_a_failed_save_changes_nothing(tmp_path, state, monkeypatch):
    dsq_ckpt.save(state, tmp_path / "0")
    dsq_ckpt.load(state, tmp_path / "0")
    with monkeypatch.context() as patch:
        patch.setattr("dsq_ckpt.engine.pipeline.commit", lambda *args, **options: 1 / 0)
        with pytest.raises(dsq_ckpt.SaveFailed):
            dsq_ckpt.save(state, tmp_path / "1")
    dsq_ckpt.save(state, tmp_path / "2")
    dsq_ckpt.save(state, tmp_path / "2", overwrite=True)
    assert resumes(tmp_path / "2") == 1


# The limit

SAVES = {
    "save": dsq_ckpt.save, "async": lambda state, path, **options: dsq_ckpt.async_save(state, path, **options).result(),
}


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("changes", [
    {}, VALUES, {"quantize": {"weights": {"method": "bf16"}, "exp_avg": {"method": "bf16"}}},
], ids=["codes", "values", "bf16"])
def test_too_many_resumes_make_exact_checkpoints(tmp_path, state, save, changes):
    config = {"search": {"max_lossy_resumes": 2}, **changes}
    paths = [tmp_path / str(number) for number in range(6)]
    for path in paths:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            SAVES[save](state, path, config=config)
        messages = [str(warning.message) for warning in caught if "max_lossy_resumes" in str(warning.message)]
        manifest = Manifest.read(path)
        exact = manifest.lossy_resumes >= 2
        assert len(messages) == exact
        back = load_copy(path, state)  # counts, where it is lossy
        if exact:
            assert "2 time(s)" in messages[0] and "stored exactly" in messages[0]
            assert not manifest.lossy and manifest.refinement == "none" and manifest.depth == 0
            assert set(manifest.kinds) == {"exact"} and manifest.groups == {}
            assert find_differences(back, state) == []
        state = back
    counts = [resumes(path) for path in paths]
    assert counts == ([0, 0, 1, 2, 2, 2] if "delta" in changes else [0, 1, 2, 2, 2, 2])
    for path in paths[:-1]:
        shutil.rmtree(path)
    assert find_differences(load_copy(paths[-1], state), state) == []
    dsq_ckpt.save(perturb(state, 1), tmp_path / "6")  # without the limit, the run goes on lossy
    assert Manifest.read(tmp_path / "6").lossy and resumes(tmp_path / "6") == 2


def test_none_at_all_are_allowed(tmp_path, state):
    with pytest.warns(UserWarning, match=r"restored from lossy state 0 time\(s\), and search.max_lossy_resumes is 0"):
        dsq_ckpt.save(state, tmp_path / "0", config={"search": {"max_lossy_resumes": 0}})
    assert find_differences(load_copy(tmp_path / "0", state), state) == []


def test_tensors_with_nan_are_named_all_the_same(tmp_path):
    bad = mixed_state()
    bad["lossy"]["linear.weight"][3, 4] = float("nan")
    config = {"search": {"max_lossy_resumes": 0}}
    with pytest.warns(UserWarning, match=r"NaN or Inf: lossy\.linear\.weight"):
        dsq_ckpt.save(bad, tmp_path / "0", config=config)
    assert Manifest.read(tmp_path / "0").nonfinite == ["lossy.linear.weight"]
    back = flatten(load_copy(tmp_path / "0", bad))
    assert all(is_equal(back[name], value) for name, value in flatten(bad).items() if isinstance(value, torch.Tensor))
    with pytest.raises(dsq_ckpt.NonFiniteTensor):
        dsq_ckpt.save(bad, tmp_path / "1", config=config | {"quantize": {"nonfinite": "error"}})


def test_a_compressor_stops_searching(tmp_path):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, 0, 5)
    evaluations = []
    compressor = dsq_ckpt.Compressor(
        model, optimizer, {"search": {"max_lossy_resumes": 1}}, lambda: evaluations.append(1) or compute_loss(model)
    )
    compressor.save(tmp_path / "0")
    compressor.load(tmp_path / "0")
    searched = len(evaluations)
    train(model, optimizer, 5, 7)
    before = compressor.state()
    for name, background in (("1", False), ("2", True)):
        with pytest.warns(UserWarning, match="restored from lossy state 1 time"):
            future = compressor.save(tmp_path / name, background=background)
        assert isinstance(future.result() if background else future, dsq_ckpt.SaveResult)
        assert len(evaluations) == searched and compressor.quality is None
        assert find_differences(load_copy(tmp_path / name, before), before) == []
        assert Manifest.read(tmp_path / name).quality is None
    compressor.load(tmp_path / "2")
    assert resumes(tmp_path / "2") == 1


@pytest.mark.slow
def test_ranks_agree(tmp_path):
    output = torchrun("resumes", 2, tmp_path)
    assert output.count("ok ") == 3


@pytest.mark.parametrize("limit", [{"max_lossy_resumes": 5}, {}])
def test_restores_of_another_directory_do_not_count_and_a_warning_says_so(tmp_path, state, limit):
    """Once, if a save follows the load; not where nothing was restored from lossy state."""
    config, first, second = {"search": limit}, tmp_path / "first", tmp_path / "second"
    history = dsq_ckpt.SaveHistory()

    def save(path, config=config):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            dsq_ckpt.save(state, path, config=config, history=history)
        return [str(warning.message) for warning in caught if "count the restores" in str(warning.message)]

    assert save(first / "0") == save(tmp_path / "elsewhere" / "0") == []
    dsq_ckpt.load(state, first / "0", history=history)
    told = save(second / "1")
    assert len(told) == bool(limit) and all(f"1 up to that of '{first / '0'}' do not" in line for line in told)
    assert save(second / "2") == [] and (resumes(second / "1"), resumes(second / "2")) == (0, 0)
    dsq_ckpt.save(state, tmp_path / "exact" / "0", config="exact", history=history)
    dsq_ckpt.load(state, tmp_path / "exact" / "0", history=history)
    assert save(tmp_path / "third" / "1") == []
