"""Tensors that were zero, shrink, grow or appear along a chain: the parent's codebook must not be forced on them."""

import warnings

import pytest
import torch

import dsq_ckpt
from dsq_ckpt.storage.manifest import Manifest
from tests.helpers.states import FINE, KEEP_ONE


def noise(seed, scale=0.02):
    return torch.randn(100, 100, generator=torch.Generator().manual_seed(seed)) * scale


def errors(root, states):
    """Relative error of each tensor of each checkpoint of a chain, refinement included."""
    history, rows = dsq_ckpt.SaveHistory(), []
    for number, state in enumerate(states):
        dsq_ckpt.save(state, root / str(number), config=FINE, history=history)
        back = {fqn: torch.full_like(value, 7.0) for fqn, value in state.items()}
        dsq_ckpt.load(back, root / str(number), history=history)
        rows.append({fqn: float((back[fqn] - v).norm() / v.norm()) if v.any() else float(back[fqn].abs().max())
                      for fqn, v in state.items()})
    return rows


M = "optimizer.state.layer.weight.exp_avg"
CHAINS = {
    "a group of zeros comes alive": [{"w": noise(0) * 0}, {"w": noise(1)}, {"w": noise(2)}],
    "moments saved before the first step": [{M: noise(0) * 0}, {M: noise(1, 1e-4)}, {M: noise(2, 1e-4)}],
    "LoRA: zeros beside weights, then small": [
        {"w": noise(0), "lora_b": noise(1) * 0}, {"w": noise(0), "lora_b": noise(1, 1e-4)},
        {"w": noise(0), "lora_b": noise(2, 1e-4)}],
    "a small tensor appears": [{"w": noise(0)}, {"w": noise(0), "new": noise(1, 1e-5)}],
    "moments shrink 300 times": [{M: noise(0, 1e-3)}, {M: noise(1, 3e-6)}, {M: noise(2, 3e-6)}],
    "weights shrink 300 times": [{"w": noise(0)}, {"w": noise(0, 6e-5)}],
    "weights grow 3000 times": [{"w": noise(0)}, {"w": noise(0, 60.0)}, {"w": noise(1, 60.0)}],
    "one tensor of two shrinks": [{"a": noise(0), "b": noise(1)}, {"a": noise(0), "b": noise(1, 2e-5)}],
}


@pytest.mark.parametrize("name", CHAINS)
def test_the_codebook_follows(tmp_path, name):
    for number, tensor_errors in enumerate(errors(tmp_path, CHAINS[name])):
        assert max(tensor_errors.values()) < 0.1, (name, number, tensor_errors)


def test_a_steady_group_keeps_its_chain(tmp_path):
    states = [{"w": noise(0) + noise(number, 5e-4), "b": noise(5) * 6} for number in range(4)]
    errors(tmp_path, states)
    assert [Manifest.read(tmp_path / str(number)).depth for number in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize("block", [{"refinement_bits": 8}, {"codebook": {"step": 16.0}}, {"method": "quantize"}])
def test_a_part_of_a_block_keeps_the_rest(block):
    config = dsq_ckpt.DSQConfig.create({"quantize": {"momentum": block}})
    assert config == dsq_ckpt.DSQConfig()
    assert dsq_ckpt.DSQConfig(quantize={"momentum": block}) == dsq_ckpt.DSQConfig()


def test_groups_start_from_the_weights():
    tree = {"weights": {"refinement_bits": 2}, "groups": {"embedding": {"codebook": {"step": 0.25}}}}
    config = dsq_ckpt.DSQConfig.create({"quantize": tree}).quantize
    assert config.groups["embedding"].refinement_bits == 2 and config.groups["embedding"].codebook.step == 0.25
    with pytest.raises(dsq_ckpt.ConfigError, match="embeding"):
        dsq_ckpt.DSQConfig.create({"quantize": {"groups": {"embeding": {}}}})


def test_another_job_in_the_directory_is_left_alone(tmp_path):
    dsq_ckpt.save({"w": noise(0)}, tmp_path / "a-1", history=dsq_ckpt.SaveHistory())
    dsq_ckpt.save({"w": noise(1)}, tmp_path / "b-1")
    assert Manifest.read(tmp_path / "a-1").refinement == "kept"
    dsq_ckpt.save({"w": noise(1) + 0.1 * noise(2)}, tmp_path / "b-2", config=KEEP_ONE)
    assert [Manifest.read(tmp_path / name).refinement for name in ("a-1", "b-1", "b-2")] == ["kept", "dropped", "kept"]


def test_the_last_good_checkpoint_outlives_a_diverged_one(tmp_path):
    good = {"w": noise(0), "v": noise(1)}
    dsq_ckpt.save(good, tmp_path / "good")
    with pytest.warns(UserWarning, match="NaN"):
        dsq_ckpt.save({**good, "v": noise(1) * float("nan")}, tmp_path / "diverged")
    assert Manifest.read(tmp_path / "good").refinement == "kept"
    dsq_ckpt.load(good, tmp_path / "good")
    dsq_ckpt.save(good, tmp_path / "next", config=KEEP_ONE)
    assert Manifest.read(tmp_path / "good").refinement == "dropped"


def test_a_dropped_refinement_is_reported(tmp_path):
    state = {"w": noise(0)}
    for name in "123":
        dsq_ckpt.save(state, tmp_path / name, config={"refinement": {"keep_last": 2}})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dsq_ckpt.load(state, tmp_path / "1")
    [message] = caught
    text = str(message.message)
    assert message.filename == __file__ and "from its base layer alone" in text
    [error] = (100 * report.relative_error for report in Manifest.read(tmp_path / "1").groups.values())
    assert f"weights by up to {error:.2g} %" in text and "'3', '2'" in text
    for way_out in ("refinement.keep_last", "pinned=True", "refinement=False", "Compressor.load", "DSQStorageReader"):
        assert way_out in text
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dsq_ckpt.load(state, tmp_path / "1", refinement=False)
        dsq_ckpt.load(state, tmp_path / "2")


def test_a_truncated_ancestor_starts_a_keyframe(tmp_path):
    for number in range(3):
        dsq_ckpt.save({"w": noise(0) + noise(number, 1e-3)}, tmp_path / str(number))
    first = next(f for f in Manifest.read(tmp_path / "2").files if f.role == "ancestor")
    (tmp_path / "2" / first.name).write_bytes(b"short")
    with pytest.warns(UserWarning, match="keyframe"):
        dsq_ckpt.save({"w": noise(0)}, tmp_path / "3")
    assert Manifest.read(tmp_path / "3").depth == 0


def test_a_damaged_manifest_can_be_overwritten(tmp_path):
    dsq_ckpt.save({"w": noise(0)}, tmp_path / "1")
    (tmp_path / "1" / "manifest.json").write_text("{")
    dsq_ckpt.save({"w": noise(1)}, tmp_path / "1", overwrite=True, history=dsq_ckpt.SaveHistory())
    assert Manifest.read(tmp_path / "1").depth == 0


def test_one_writer_does_not_serve_two_asynchronous_saves(tmp_path):
    writer = dsq_ckpt.DSQStorageWriter(tmp_path / "1")
    writer.stage({"w": noise(0)})
    with pytest.raises(dsq_ckpt.SaveFailed, match="new DSQStorageWriter"):
        writer.stage({"w": noise(1)})


def test_a_failed_background_save_raises_a_plain_error(tmp_path):
    state = {"w": noise(0)}
    dsq_ckpt.save(state, tmp_path / "1")
    with pytest.raises(dsq_ckpt.CheckpointExists, match="overwrite=True"):
        dsq_ckpt.async_save(state, tmp_path / "1").result()


def test_an_empty_path_is_none():
    with pytest.raises(dsq_ckpt.ConfigError, match="local file system"):
        dsq_ckpt.save({"w": noise(0)}, "")
