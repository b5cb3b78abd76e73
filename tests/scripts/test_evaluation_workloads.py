"""The evaluation's workloads and recordings: the same every time, and continued by a restored run."""

from __future__ import annotations

import copy
import gzip
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from evaluate import app
from evaluation import Workload, create, factorization, language, names, vision
from evaluation.models import MASK, Decoder
from evaluation.recording import GRADIENT_WEIGHT, GradientAverage, default_directory, load_recording, record
from evaluation.workloads import NO_TARGET, Plan, cache_directory
from typer.testing import CliRunner

from tests.helpers.commands import unwrap_text

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def recording(tmp_path_factory) -> Path:
    """A recording of gpt-tiny, not to be changed."""
    return record("gpt-tiny", 0, tmp_path_factory.mktemp("recording"))


@pytest.fixture(params=["resnet", "lenet", "alexnet", "mlr"])
def vision_workload(request) -> Workload:
    return _small_vision(request.param, 3)


def _small_vision(name: str, seed: int) -> Workload:
    """A workload that evaluates on few images, which is what takes the time here."""
    _need_data()
    workload = create(name, seed)
    assert isinstance(workload, vision.VisionWorkload)
    workload.test = vision.Images(*(array[:100] for array in workload.test))
    return workload


def _need_data() -> None:
    try:
        data = vision.find_data()
    except vision.DataMissingError as error:
        pytest.skip(str(error))
    if data is None:
        pytest.skip("Fashion-MNIST is neither named, installed nor in the cache, and tests fetch nothing")


def _flat(state: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(state, dict):
        pairs = [_flat(value, f"{prefix}/{key}") for key, value in state.items()]
        return {key: value for pair in pairs for key, value in pair.items()}
    return {prefix: state}


def _assert_equal(one: Any, other: Any) -> None:
    one, other = _flat(one), _flat(other)
    assert one.keys() == other.keys()
    for key, value in one.items():
        same = torch.equal(value, other[key]) if isinstance(value, torch.Tensor) else value == other[key]
        assert same, key


def _assert_continues(workload: Workload, again: Workload, middle: int, last: int, restores: int = 1) -> None:
    """Training in one go equals training in two with a restore of another instance in between."""
    workload.train(0, middle)
    state = copy.deepcopy(workload.state())
    before = copy.deepcopy(state)
    workload.train(middle, last)
    for _ in range(restores):  # a state can be restored from more than once
        again.restore(state)
        again.train(middle, last)
        _assert_equal(again.state(), workload.state())
        _assert_equal(state, before)
    assert again.evaluate() == workload.evaluate()


def test_registry() -> None:
    assert {"gpt", "resnet", "lenet", "mlr", "gpt-tiny"} <= set(names())
    with pytest.raises(ValueError, match="no workload is called 'gtp'; there are gpt"):
        create("gtp")


def test_plan_warms_up_and_decays() -> None:
    plan = Plan(steps=1600, checkpoint_every=100, batch_size=4, rate=2e-3, warm_up=50, floor=0.1)
    rates = [plan.rate_at(step) for step in range(1600)]
    assert rates[0] == pytest.approx(2e-3 / 50)
    assert max(rates) == pytest.approx(2e-3, rel=0.01) and 40 <= rates.index(max(rates)) <= 50
    assert rates[-1] == pytest.approx(2e-4, rel=0.01)
    constant = Plan(steps=10, checkpoint_every=5, batch_size=1, rate=0.1, floor=1.0)
    assert {constant.rate_at(step) for step in range(10)} == {0.1}
    with pytest.raises(ValueError, match="10 is not a multiple of checkpoint_every 3"):
        Plan(steps=10, checkpoint_every=3, batch_size=1, rate=0.1)


def test_batches_are_a_function_of_seed_and_step() -> None:
    workload, again, other = create("gpt-tiny"), create("gpt-tiny"), create("gpt-tiny", seed=1)
    again.train(0, 2)
    for part in (0, 1):
        assert torch.equal(workload.batch(5)[part], again.batch(5)[part])
        assert not torch.equal(workload.batch(5)[part], workload.batch(6)[part])
        assert not torch.equal(workload.batch(5)[part], other.batch(5)[part])


def test_same_seed_same_weights_and_global_generator_untouched() -> None:
    torch.manual_seed(11)
    expected = torch.rand(1)
    torch.manual_seed(11)
    one, other = create("gpt-tiny"), create("gpt-tiny", seed=1)
    assert torch.equal(torch.rand(1), expected)
    _assert_equal(one.state(), create("gpt-tiny").state())
    assert not torch.equal(one.state()["model"]["head.weight"], other.state()["model"]["head.weight"])


def test_optimizer_starts_as_a_fresh_one() -> None:
    """The state made ahead is what the optimizer's own first step starts from."""
    workload, fresh = create("gpt-tiny"), create("gpt-tiny")
    fresh.optimizer.state.clear()
    workload.train(0, 3)
    fresh.train(0, 3)
    _assert_equal(workload.state(), fresh.state())
    steps = {float(state["step"]) for state in workload.optimizer.state.values()}
    assert steps == {3.0}


def test_evaluation_is_deterministic_and_leaves_the_mode() -> None:
    workload = create("gpt-tiny")
    assert workload.evaluate() == workload.evaluate() == pytest.approx(np.log(256), rel=0.05)
    assert 0 <= workload.accuracy() < 0.1
    for training in (True, False):
        workload.model.train(training)
        workload.evaluate()
        assert workload.model.training is training


def test_restore_continues_identically() -> None:
    _assert_continues(create("gpt-tiny"), create("gpt-tiny"), 5, 12, restores=2)


@pytest.mark.parametrize("name", ["llama", "llama-bf16", "moe", "lstm", "bert", "mf"])
def test_other_kinds_of_models_continue_identically(name: str) -> None:
    """Tied weights, computing in bfloat16, experts that a batch may leave without gradients, recurrence, factors."""
    _assert_continues(create(name, 2), create(name, 2), 2, 4)


@pytest.mark.parametrize("name", ["vit", "vgg"])
def test_vision_with_adam_continues_identically(name: str) -> None:
    _assert_continues(_small_vision(name, 2), _small_vision(name, 2), 1, 2)


def test_adapters_alone_are_trained(monkeypatch) -> None:
    weights = Decoder().state_dict()
    monkeypatch.setattr(language, "_llama_weights", lambda seed: weights)
    workload = create("lora", 1)
    _assert_continues(workload, create("lora", 1), 2, 4)
    frozen = {name: value for name, value in workload.model.named_parameters() if not value.requires_grad}
    trained = {name for name, value in workload.model.named_parameters() if value.requires_grad}
    assert len(trained) == 2 * 4 * 4 and all(name.endswith((".up", ".down")) for name in trained)
    for name, value in frozen.items():
        assert value.equal(weights[name.replace(".linear.", ".")]), name


def test_masked_bytes_alone_are_predicted() -> None:
    workload = create("bert", 3)
    original = super(language.MaskedWorkload, workload).batch(7)[0]
    tokens, targets = workload.batch(7)
    masked = tokens == MASK
    assert 0.1 < masked.float().mean() < 0.2
    assert tokens[~masked].equal(original[~masked]) and targets[masked].equal(original[masked])
    assert (targets[~masked] == NO_TARGET).all()
    with torch.no_grad():
        expected = sum(float(torch.nn.functional.cross_entropy(
            workload.model(one).flatten(0, 1), other.flatten(), reduction="sum"
        )) for one, other in workload.held_out())
    count = sum(int((other >= 0).sum()) for _, other in workload.held_out())
    assert workload.evaluate() == pytest.approx(expected / count) and workload.settings()["held_out"] == count


def test_factors_learn_entries_that_were_held_out() -> None:
    """The loss is the mean squared error, which a model that knows nothing has at the variance; they get better."""
    workload = create("mf", 1)
    before, known = workload.evaluate(), workload.accuracy()
    with torch.no_grad():
        errors = torch.cat([workload.model(places) - values for places, values in workload.held_out()])
    assert before == pytest.approx(float(errors.square().mean()), rel=1e-5)
    assert before == pytest.approx(float(factorization.load_entries()[0].values.var()), rel=0.1)
    workload.train(0, 60)
    assert workload.evaluate() < 0.85 * before and 0 < known < workload.accuracy() < 1


def test_callback_sees_clipped_gradients() -> None:
    workload = create("gpt-tiny")
    norms = []

    def look() -> None:
        gradients = [parameter.grad for parameter in workload.model.parameters() if parameter.grad is not None]
        norms.append(torch.nn.utils.get_total_norm(gradients).item())

    workload.train(0, 4, after_backward=look)
    assert len(norms) == 4 and max(norms) <= 1.0 + 1e-5
    assert all(parameter.grad is None for parameter in workload.model.parameters())


def test_gradient_average_is_its_formula() -> None:
    workload = create("gpt-tiny")
    average = GradientAverage(workload)
    expected = torch.zeros_like(workload.model.get_parameter("head.weight"))

    def watch() -> None:
        nonlocal expected
        average()
        gradient = workload.model.get_parameter("head.weight").grad
        assert gradient is not None
        expected = GRADIENT_WEIGHT * gradient + (1 - GRADIENT_WEIGHT) * expected

    workload.train(0, 3, after_backward=watch)
    torch.testing.assert_close(average.values["head.weight"], expected)


def test_recordings_are_bit_identical(recording: Path, tmp_path: Path) -> None:
    again = record("gpt-tiny", 0, tmp_path)
    files = sorted(path.name for path in recording.iterdir())
    assert files == ["record.json", *(f"step-{step:06d}.pt" for step in range(0, 61, 10))]
    for file in files[1:]:
        assert (recording / file).read_bytes() == (again / file).read_bytes(), file


def test_recording_holds_the_run(recording: Path) -> None:
    checkpoints, info = load_recording(recording)
    workload = create("gpt-tiny")
    for checkpoint, row in zip(checkpoints, info["checkpoints"], strict=True):
        step = checkpoint["step"]
        assert (checkpoint["loss"], checkpoint["accuracy"]) == (row["loss"], row["accuracy"])
        assert checkpoint["gradient"].keys() <= checkpoint["model"].keys()
        assert checkpoint["gradient"].keys() == dict(workload.model.named_parameters()).keys()
        assert any(bool(gradient.any()) for gradient in checkpoint["gradient"].values()) == (step > 0)
        if step == 0:
            _assert_equal(workload.state(), {key: checkpoint[key] for key in ("model", "optimizer")})
        workload.restore({"model": checkpoint["model"], "optimizer": checkpoint["optimizer"]})
        assert workload.evaluate() == checkpoint["loss"]
        assert workload.accuracy() == checkpoint["accuracy"]
    assert step == workload.steps
    assert info["settings"]["workload"] == "gpt-tiny" and info["torch"] == torch.__version__
    assert info["checkpoints"][-1]["loss"] < info["checkpoints"][0]["loss"] - 2
    assert info["seconds_per_step"] > 0


def test_recording_continues_the_recorded_run(recording: Path) -> None:
    """Training on from a recorded checkpoint gives the next one."""
    checkpoints = {checkpoint["step"]: checkpoint for checkpoint in load_recording(recording).checkpoints}
    workload = create("gpt-tiny")
    workload.restore({key: checkpoints[20][key] for key in ("model", "optimizer")})  # type: ignore[literal-required]
    workload.train(20, 30)
    _assert_equal(workload.state(), {"model": checkpoints[30]["model"], "optimizer": checkpoints[30]["optimizer"]})


def test_complete_recordings_are_reused_and_others_made_anew(recording: Path, tmp_path: Path) -> None:
    times = {path: path.stat().st_mtime_ns for path in recording.iterdir()}
    assert record("gpt-tiny", 0, recording) == recording
    assert {path: path.stat().st_mtime_ns for path in recording.iterdir()} == times
    stale = tmp_path / "step-000015.pt"
    stale.write_bytes(b"of another run")
    (tmp_path / "notes.txt").write_text("stays")
    (tmp_path / "record.json").write_text(json.dumps({"settings": {}, "checkpoints": []}))
    lines: list[str] = []
    record("gpt-tiny", 1, tmp_path, report=lines.append)
    assert len(lines) == 7 and "step 60" in lines[-1]
    assert not stale.exists() and (tmp_path / "notes.txt").exists()
    assert load_recording(tmp_path).info["settings"]["seed"] == 1
    (tmp_path / "record.json").unlink()
    with pytest.raises(FileNotFoundError, match="no complete recording"):
        load_recording(tmp_path)


def test_command_line(recording: Path) -> None:
    result = CliRunner().invoke(app, ["record", "gpt-tiny", "--directory", str(recording)])
    assert result.exit_code == 0, result.output
    assert result.output.splitlines() == [f"{recording} is complete", str(recording)]
    result = CliRunner().invoke(app, ["record", "gtp"])
    assert result.exit_code == 2 and "'gtp' is not one of gpt" in unwrap_text(result.output)


def test_default_directory_is_in_the_cache(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_directory("gpt", 2) == tmp_path / "dsq_ckpt" / "runs" / "gpt-seed2"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache" / "dsq_ckpt"


def _write_idx(path: Path, array: np.ndarray) -> None:
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    path.write_bytes(gzip.compress(header + array.tobytes()))


def test_data_is_looked_for_in_order(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(vision, "INSTALLED", tmp_path / "installed")
    monkeypatch.delenv("DSQ_FASHION_MNIST", raising=False)
    assert vision.find_data() is None
    for place in ("cache/dsq_ckpt/fashion-mnist", "installed", "named"):
        (tmp_path / place).mkdir(parents=True)
        if place == "named":
            monkeypatch.setenv("DSQ_FASHION_MNIST", str(tmp_path / place))
            with pytest.raises(vision.DataMissingError, match=r"DSQ_FASHION_MNIST is .*named"):
                vision.find_data()
        for file in vision.FILES:
            (tmp_path / place / file).touch()
        assert vision.find_data() == tmp_path / place


def test_fetching_fails_with_advice_and_leaves_nothing(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(vision.DataMissingError, match=r"apt-get is not here\. Install Debian's package"):
        vision.fetch_data()
    assert not list((tmp_path / "dsq_ckpt").iterdir())


def test_idx_files(tmp_path: Path) -> None:
    array = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    _write_idx(tmp_path / "good.gz", array)
    assert np.array_equal(vision.read_idx(tmp_path / "good.gz"), array)
    (tmp_path / "short.gz").write_bytes(gzip.compress(struct.pack(">HBBI", 0, 8, 1, 5) + b"1234"))
    with pytest.raises(vision.DataMissingError, match=r"short\.gz is not an idx file"):
        vision.read_idx(tmp_path / "short.gz")
    (tmp_path / "cut.gz").write_bytes((tmp_path / "good.gz").read_bytes()[:-12])
    with pytest.raises(vision.DataMissingError, match=r"cut\.gz is damaged"):
        vision.read_idx(tmp_path / "cut.gz")


def test_vision_models_have_the_size_they_claim() -> None:
    sizes = {
        model: sum(parameter.numel() for parameter in model().parameters())
        for model in (vision.ResNet, vision.AlexNet, vision.LeNet5, vision.LogisticRegression)
    }
    assert list(sizes.values()) == [701_178, 163_146, 61_706, 7_850]


def test_vision_batches_are_a_function_of_seed_and_step(vision_workload: Workload) -> None:
    again = _small_vision(vision_workload.name, 3)
    images, labels = vision_workload.batch(7)
    assert images.shape == (64, 1, 28, 28) and labels.shape == (64,)
    assert torch.equal(images, again.batch(7)[0]) and torch.equal(labels, again.batch(7)[1])
    assert not torch.equal(images, vision_workload.batch(8)[0])
    assert not torch.equal(images, create(vision_workload.name, seed=4).batch(7)[0])


def test_vision_restore_continues_identically(vision_workload: Workload) -> None:
    loss = vision_workload.evaluate()
    _assert_continues(vision_workload, _small_vision(vision_workload.name, 3), 2, 4)
    assert vision_workload.evaluate() != loss
    assert 0 <= vision_workload.accuracy() <= 1


def test_augmentation_moves_and_mirrors_whole_images() -> None:
    image = np.zeros((64, 28, 28), np.uint8)
    image[:, 10:14, 8:12] = np.arange(1, 17, dtype=np.uint8).reshape(4, 4)
    moved = vision._flip_and_shift(image, np.random.default_rng(0))
    corners = set()
    for picture in moved:
        rows, columns = np.nonzero(picture)
        patch = picture[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
        mirrored = patch[0, 0] == 4
        assert np.array_equal(patch[:, ::-1] if mirrored else patch, image[0, 10:14, 8:12])
        corners.add((bool(mirrored), int(rows.min()) - 10, int(columns.min()) - (16 if mirrored else 8)))
    assert {corner[0] for corner in corners} == {False, True}
    assert {corner[1] for corner in corners} == {corner[2] for corner in corners} == {-2, -1, 0, 1, 2}
