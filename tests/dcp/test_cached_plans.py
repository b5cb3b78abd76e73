"""`enable_plan_caching` of DCP's planner: what is saved is the present state, whatever was planned before."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import SavePlanner

import dsq_ckpt
from dsq_ckpt import DSQStorageWriter
from dsq_ckpt.dcp import cached_plans
from dsq_ckpt.storage.manifest import Manifest
from tests.helpers.processes import torchrun
from tests.helpers.states import find_differences, flat_tensors, load_copy, mixed_state, perturb

EXACT = dsq_ckpt.DSQConfig.preset("exact")


@pytest.fixture(autouse=True)
def _nothing_cached():
    for name in ("save_plan", "final_save_plan", "all_plans", "global_plan", "metadata"):
        getattr(SavePlanner, f"_cached_{name}").clear()


class Counted(dcp.DefaultSavePlanner):
    """Counts the global plans that are made, not taken from the cache."""

    made = 0

    def _create_global_plan(self, all_plans):
        Counted.made += 1
        return super()._create_global_plan(all_plans)


class Custom(dcp.DefaultSavePlanner):
    """Makes plans of its own, of which nothing is known."""

    def create_local_plan(self):
        return super().create_local_plan()


def save(state, path, planner=dcp.DefaultSavePlanner, config=EXACT, cached=True, **options):
    save_planner = planner(enable_plan_caching=cached)
    dcp.save(state, storage_writer=DSQStorageWriter(path, config, **options), planner=save_planner, no_dist=True)


def check(state, path):
    """The checkpoint holds this state and no more, as it is nested."""
    assert find_differences(state, load_copy(path, state)) == []
    back = {}
    dsq_ckpt.load(back, path)
    assert find_differences(state, back) == []


def states():
    """A state, and others that DCP's comparison of plans takes for it, or not."""
    weight, other = torch.randn(64, 80), torch.randn(16)
    one = {"model": {"a": weight, "b": other}, "step": 7}
    return {
        "one": one,
        "values": {"model": {"a": weight + 1, "b": other - 1}, "step": 8},
        "dtype": {"model": {"a": weight.double(), "b": other.half()}, "step": 7},
        "nesting": {"model.a": weight, "model": {"b": other}, "step": 7},
        "shape": {"model": {"a": weight[:, :40].clone(), "b": other}, "step": 7},
        "added": {"model": {"a": weight, "b": other, "c": other + 2}, "step": 7},
        "removed": {"model": {"a": weight}, "step": 7},
        "object": {"model": {"a": weight, "b": "text"}, "step": 7},
        "order": {"step": 7, "model": {"b": other, "a": weight}},
    }


def test_a_run_is_planned_once(tmp_path):
    """Chains, codes and values are those of saves without cached plans."""
    state, Counted.made = mixed_state(), 0
    for number in range(4):
        path, plain = tmp_path / "cached" / str(number), tmp_path / "plain" / str(number)
        save(state, path, Counted, None)
        assert Counted.made == 1
        save(state, plain, config=None, cached=False)
        assert Manifest.read(path).depth == Manifest.read(plain).depth == number
        assert find_differences(load_copy(path, state), load_copy(plain, state)) == []
        state = perturb(state, number)


def test_exponents_of_the_parent_are_sent_only_to_ranks_that_do_not_know_them(tmp_path, monkeypatch):
    """A rank knows those of its own last save; it may have lost them, or the parent may be another one."""
    sent, with_context = [], cached_plans.GlobalPlan.with_context

    def record(plan, context):
        messages = with_context(plan, context)
        sent.append((context.model.exponents if context.model else {}, pickle.loads(pickle.dumps(messages))[0]))
        return messages

    monkeypatch.setattr(cached_plans.GlobalPlan, "with_context", record)
    first = {"a.weight": torch.randn(64, 96), "b.weight": torch.randn(64, 96), "c.weight": torch.randn(64, 96) / 100}
    states = [{name: value + value.std() * torch.randn(64, 96) / 100 for name, value in first.items()}
              for _ in range(6)]
    for number, state in enumerate(states):
        state["b.weight"] *= 1e-4 if number < 2 else 1e3
    for number, state in enumerate(states):
        parent = tmp_path / "cached" / "1" if number == 5 else "auto"
        if number == 4:
            for cache_state in cached_plans._cache_states.values():
                cache_state.exponents = None
        save(state, tmp_path / "cached" / str(number), config=None, parent=parent)
        save(state, tmp_path / "plain" / str(number), config=None, cached=False,
             parent=tmp_path / "plain" / "1" if number == 5 else "auto")
        one, other = (load_copy(tmp_path / run / str(number), state) for run in ("cached", "plain"))
        assert find_differences(one, other) == []
    sent = sent[::2]  # every other save caches no plans
    known = [exponents for exponents, _ in sent]
    assert all(known[1:]) and known[3] != known[2] == known[5]
    messages = [message.storage_data for _, message in sent]
    assert [isinstance(message, cached_plans._ShortContext) for message in messages] == [False] + [True] * 5
    contexts = [message.context for message in messages[1:]]
    assert [context.model.exponents for context in contexts] == [{}, {}, {}, known[4], known[5]]


@pytest.mark.parametrize("kind", [torch.optim.Adamax, torch.optim.Rprop, torch.optim.Muon])
def test_optimizers_beside_which_tensors_are_stored_otherwise(kind, tmp_path):
    """Moments that are rounded, weights that are exact and momentum that is finer are so in each save.

    Of the layout that the first save had agreed on, later ones lost what it said of these, and failed with KeyError.
    """
    model = torch.nn.Linear(70, 80, bias=False)
    optimizer = kind(model.parameters())
    for number in range(3):
        model(torch.randn(9, 70)).square().sum().backward()
        optimizer.step()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        for run, cached in (("cached", True), ("plain", False)):
            save(state, tmp_path / run / str(number), config=None, cached=cached)
        one, other = (load_copy(tmp_path / run / str(number), state) for run in ("cached", "plain"))
        assert find_differences(one, other) == []


@pytest.mark.parametrize("kind", list(states()))
def test_changed_states(kind, tmp_path):
    every = states()
    for number, name in enumerate(["one", "one", kind, kind, "one", kind]):
        save(every[name], tmp_path / str(number))
        check(every[name], tmp_path / str(number))


def test_a_changed_configuration(tmp_path):
    state = mixed_state()
    for number, config in enumerate([None, EXACT, None, {"quantize": {"min_elements": 5500}}]):
        save(state, tmp_path / "cached" / str(number), config=config)
        save(state, tmp_path / "plain" / str(number), config=config, cached=False)
        cached, plain = (load_copy(tmp_path / run / str(number), state) for run in ("cached", "plain"))
        assert find_differences(cached, plain) == []
    assert find_differences(state, cached)


@pytest.mark.parametrize("kind", ["one", "values", "dtype", "nesting", "removed"])
def test_a_save_after_one_that_failed(kind, tmp_path):
    """DCP has cached the plan of the failed save by then, on the coordinator alone."""
    every = states()
    save(every["one"], tmp_path / "there", cached=False)
    for turn in range(2):
        with pytest.raises(BaseException, match="there"):
            save(every[kind], tmp_path / "there")
        for number, name in enumerate((kind, "one", kind, "one")):
            path = tmp_path / f"{turn}-{number}"
            save(every[name], path)
            check(every[name], path)


def test_two_runs_in_turn(tmp_path):
    """Also with a writer of DCP, which leaves plans that are not ours."""
    every = states()
    plain = dcp.DefaultSavePlanner(enable_plan_caching=True)
    dcp.save(every["one"], checkpoint_id=tmp_path / "plain", planner=plain, no_dist=True)
    for number in range(3):
        for run, name in (("x", "one"), ("y", "one"), ("z", "added"), ("u", "dtype")):
            state = perturb(every[name], number)
            save(state, tmp_path / run / str(number), parent="auto", config=None)
            save(state, tmp_path / "plain" / run / str(number), config=None, cached=False)
            one, other = (load_copy(path / run / str(number), state) for path in (tmp_path, tmp_path / "plain"))
            assert find_differences(one, other) == []
            assert Manifest.read(tmp_path / run / str(number)).depth == number


def test_in_the_background(tmp_path):
    state = mixed_state()
    for number in range(4):
        if number == 3:
            state["small"]["bias"] = state["small"]["bias"].double()
        planner = Counted(enable_plan_caching=True)
        writer = DSQStorageWriter(tmp_path / str(number), EXACT)
        dcp.async_save(state, storage_writer=writer, planner=planner, no_dist=True).result()
        check(state, tmp_path / str(number))
        state = perturb(state, number)


def test_one_writer_for_all(tmp_path):
    writer, every = DSQStorageWriter(config=EXACT), states()
    for number, name in enumerate(["one", "one", "dtype", "values"]):
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        path = tmp_path / str(number)
        dcp.save(every[name], checkpoint_id=path, storage_writer=writer, planner=planner, no_dist=True)
        check(every[name], path)


def test_planners_of_their_own_are_refused(tmp_path):
    state = mixed_state()
    save(state, tmp_path / "0", Custom)
    with pytest.raises(BaseException, match="enable_plan_caching=False"):
        save(state, tmp_path / "1", Custom)
    assert not (tmp_path / "1" / "manifest.json").exists()
    assert sorted(flat_tensors(state)) == sorted(flat_tensors(load_copy(tmp_path / "0", copy.deepcopy(state))))


@pytest.mark.parametrize("ours", [True, False])
def test_a_cache_that_others_changed(ours, tmp_path):
    """As by a save in another thread, between the plans of this one."""
    state, caches = mixed_state(), SavePlanner._cached_all_plans
    save(state, tmp_path / "0")
    plan, = caches["DefaultSavePlanner"]
    offer = plan.storage_data._replace(digest="that of another state") if ours else None
    caches["DefaultSavePlanner"] = [replace(plan, storage_data=offer)]
    with pytest.raises(BaseException, match=r"rank 0 is of another state or writer.*save again"):
        save(state, tmp_path / "1")
    for number in (2, 3):
        save(state, tmp_path / str(number))
        check(state, tmp_path / str(number))


@pytest.mark.slow
def test_ranks(tmp_path):
    output = torchrun("cached_plans", 2, tmp_path)
    assert sum(line.startswith("ok ") for line in output.splitlines()) == 6, output
