"""A load into tensors that are one: silent where the checkpoint has one value for them, told of where it has two."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

import dsq_ckpt
from dsq_ckpt.dcp import tied_targets
from dsq_ckpt.dcp.tied_targets import TiedTargets
from dsq_ckpt.storage.shard import RecordRef

pytestmark = [
    pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]
SIZES = [(80, 80), (5, 5)]


def state(shape, *seeds):
    return {
        name: torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        for name, seed in zip("abc", seeds, strict=False)
    }


@pytest.mark.parametrize("shape", SIZES, ids=["lossy", "exact"])
@pytest.mark.parametrize("by_dcp", [False, True])
def test_two_values_for_one_tensor_are_reported(tmp_path, shape, by_dcp):
    dsq_ckpt.save(state(shape, 1, 2, 3), tmp_path / "a")
    tensor = torch.zeros(shape)
    target = {"a": tensor, "b": tensor, "c": torch.zeros(shape)}
    with pytest.warns(UserWarning, match=r"one tensor .*tied weights \('a' and 'b'\): .* leave one name out"):
        if by_dcp:
            dcp.load(target, storage_reader=dsq_ckpt.DSQStorageReader(tmp_path / "a"))
        else:
            dsq_ckpt.load(target, tmp_path / "a")
    apart = {name: torch.zeros(shape) for name in "abc"}
    dsq_ckpt.load(apart, tmp_path / "a")
    assert torch.equal(tensor, apart["b"])


@pytest.mark.parametrize("shape", SIZES, ids=["lossy", "exact"])
@pytest.mark.parametrize("values", [(1, 1), (1, 2)], ids=["equal", "different, but apart"])
def test_tied_targets_with_equal_values_load_silently(tmp_path, shape, values):
    """Equal values, with NaN too, of tensors that were not tied; and neighbours in one memory."""
    original = state(shape, *values)
    for value in original.values():
        value[0, 0] = float("nan")
    dsq_ckpt.save(original, tmp_path / "a", config={"quantize": {"nonfinite": "exact"}})
    both = torch.zeros(2, *shape)
    target = {"a": both[0], "b": both[0] if values == (1, 1) else both[1]}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dsq_ckpt.load(target, tmp_path / "a")


def overlapping_views(size, kind):
    """Two targets in one memory, of tensors of `size` by `size`; the second is a part of the first where it is half."""
    memory = torch.zeros(2 * size * size)
    first = memory[: size * size].view(size, size)
    return first, {
        "another shape": memory[: size * size].view(1, -1),
        "transposed": first.t(),
        "half": memory[size * size // 2 : size * size * 3 // 2].view(size, size),
        "another type": memory.view(torch.float16)[: size * size].view(size, size),
        "rows": first[size // 2 :],
    }[kind]


@pytest.mark.parametrize("size", [80, 6], ids=["lossy", "exact"])
@pytest.mark.parametrize("kind", ["another shape", "transposed", "half", "another type", "rows"])
def test_two_values_for_memory_that_overlaps_are_reported(tmp_path, size, kind):
    first, second = overlapping_views(size, kind)
    original = {"a": torch.randn(first.shape), "b": torch.randn(second.shape).to(second.dtype), "c": torch.randn(9)}
    dsq_ckpt.save(original, tmp_path / "a")
    with pytest.warns(UserWarning, match=r"one tensor .*tied weights \('a' and 'b'\): .* leave one name out"):
        dsq_ckpt.load({"a": first, "b": second, "c": torch.zeros(9)}, tmp_path / "a")


@pytest.mark.parametrize("size", [80, 6], ids=["lossy", "exact"])
@pytest.mark.parametrize("kind", ["another shape", "transposed", "half", "rows"])
def test_equal_values_for_memory_that_overlaps_load_silently(tmp_path, size, kind):
    first, second = overlapping_views(size, kind)
    second.copy_(torch.randn(second.shape))
    first.copy_(torch.randn(first.shape))
    dsq_ckpt.save({"a": first.clone(), "b": second.clone()}, tmp_path / "a")
    first.zero_(), second.zero_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dsq_ckpt.load({"a": first, "b": second}, tmp_path / "a")


@pytest.mark.parametrize("first", [slice(0, 40), slice(0, 80, 2)], ids=["columns", "every second one"])
def test_targets_between_one_another_load_silently(tmp_path, first):
    whole = torch.zeros(80, 80)
    other = slice(40, 80) if first.step is None else slice(1, 80, 2)
    dsq_ckpt.save({"a": torch.randn(80, 40), "b": torch.randn(80, 40)}, tmp_path / "a")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dsq_ckpt.load({"a": whole[:, first], "b": whole[:, other]}, tmp_path / "a")


def test_a_tied_model_is_loaded_as_it_was_saved(tmp_path):
    model = nn.Sequential(nn.Embedding(80, 80), nn.Linear(80, 80, bias=False))
    model[1].weight = model[0].weight
    dsq_ckpt.save({"model": model.state_dict()}, tmp_path / "a")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dsq_ckpt.load({"model": model.state_dict()}, tmp_path / "a")


def test_one_tensor_that_two_ranks_stored_by_two_names_is_one(tmp_path):
    """As tied weights under DDP: each name has a codebook of its own layer type, and so errors of its own."""
    weight = torch.randn(512, 128) * 0.02
    model = nn.ModuleDict({
        "embed": nn.Embedding(512, 128), "head": nn.Linear(128, 512, bias=False), "positions": nn.Embedding(512, 128),
    })
    for name in ("embed", "head"):
        model[name].weight.data.copy_(weight)
    dsq_ckpt.save(dict(model.state_dict()), tmp_path / "a", model=model)
    apart = {name: torch.zeros(512, 128) for name in ("embed.weight", "head.weight")}
    dsq_ckpt.load(apart, tmp_path / "a")
    assert not torch.equal(apart["embed.weight"], apart["head.weight"])
    tensor = torch.zeros(512, 128)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for refinement in (True, False):
            dsq_ckpt.load({"embed.weight": tensor, "head.weight": tensor}, tmp_path / "a", refinement=refinement)


class WithMemoryOfItsOwn(DefaultLoadPlanner):
    def resolve_tensor(self, read_item):
        return torch.empty_like(super().resolve_tensor(read_item))

    def commit_tensor(self, read_item, tensor):
        super().resolve_tensor(read_item).copy_(tensor)


def test_memory_that_a_planner_takes_again_is_not_one_tensor(tmp_path):
    original = {f"t{number}": torch.randn(5) for number in range(40)}
    dsq_ckpt.save(original, tmp_path / "a")
    target = {name: torch.zeros(5) for name in original}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(target, storage_reader=dsq_ckpt.DSQStorageReader(tmp_path / "a"), planner=WithMemoryOfItsOwn())
    assert all(torch.equal(target[name], value) for name, value in original.items())


def test_three_names_are_told_in_pairs(tmp_path):
    first, other = torch.randn(300), torch.randn(300)
    dsq_ckpt.save({"a": first, "b": other, "c": first.clone()}, tmp_path / "a")
    tensor = torch.zeros(300)
    with pytest.warns(UserWarning, match=r"\('a' and 'b', 'b' and 'c'\)"):
        dsq_ckpt.load({"a": tensor, "b": tensor, "c": tensor}, tmp_path / "a")


def test_many_views_of_one_buffer_are_not_compared_with_each_other():
    """A buffer and its 2,000 parts: parts with equal values are compared once, others with all that was written."""
    flat, targets = torch.arange(20_000.0), TiedTargets()
    targets.add("flat", RecordRef("file", 0), False, flat, flat.clone())
    for number, part in enumerate(flat.split(10)):
        targets.add(f"part {number}", RecordRef("file", number + 1), False, part, part.clone())
    assert not targets._searches and not targets._overwritten
    for number, part in enumerate(flat.split(20)):
        targets.add(f"other {number}", RecordRef("other", number), False, part, part + 1)
    assert targets._searches == len(targets._overwritten) == tied_targets._MAX_SEARCHES


@pytest.mark.parametrize("shape", SIZES, ids=["lossy", "exact"])
@pytest.mark.parametrize("others", [0, 1, None])
def test_elements_that_share_memory_need_equal_values(tmp_path, shape, others):
    """Windows of a table are loaded into windows, and other values are refused; views without overlaps are not.

    The first rows, or all of them, have other values than windows have.
    """
    windows = torch.zeros(sum(shape)).unfold(0, shape[1], 1)[: shape[0]]
    table = torch.randn(sum(shape), generator=torch.Generator().manual_seed(2))
    saved = table.unfold(0, shape[1], 1)[: shape[0]].clone()
    saved[:others] = state(shape, 1)["a"][:others]
    dsq_ckpt.save({"a": saved}, tmp_path / "a")
    apart = torch.zeros(2 * shape[0], 2 * shape[1])[::2, ::2]
    dsq_ckpt.load({"a": apart}, tmp_path / "a")
    if others == 0:
        dsq_ckpt.load({"a": windows}, tmp_path / "a")
        assert windows.equal(apart)
    else:
        with pytest.raises(dsq_ckpt.LoadFailed, match=r"'a' has elements that share memory .* load into its clone"):
            dsq_ckpt.load({"a": windows}, tmp_path / "a")
