"""The training-loop API: bounds are kept or said to be broken, trials leave no trace, bad input is named."""

import math
import warnings
from dataclasses import replace

import pytest
import torch

import dsq_ckpt
from dsq_ckpt.api.saving import async_save_with_writer
from dsq_ckpt.dcp.staging import collect_staged_payloads
from dsq_ckpt.engine.options import CompressorInputs
from dsq_ckpt.errors import SaveFailed
from dsq_ckpt.quantization.plan import plan_as_configured
from dsq_ckpt.search.trial import TrialModel
from dsq_ckpt.storage.manifest import Manifest
from tests.helpers.training import Net, compute_loss, make_batch, train, train_model

SYSTEMS = ["dsq", "uniform", "adaptive", "kmeans", "exact"]


def bits_of(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def same_bits(model, before):
    return all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def base_loss(path):
    """Loss of the base layer, read by a model that knows nothing of the search."""
    other = Net(seed=5)
    state = {"model": other.state_dict()}
    dsq_ckpt.load(state, path, refinement=False)
    other.load_state_dict(state["model"])
    return compute_loss(other)


@pytest.mark.parametrize("system", [*SYSTEMS, pytest.param("inshrinkerator", marks=pytest.mark.slow)])
def test_a_save_keeps_to_its_bound(tmp_path, system):
    model, optimizer = train_model()
    compressor = dsq_ckpt.Compressor(model, optimizer, {"system": system}, lambda: compute_loss(model))
    for number, steps in enumerate((0, 10)):
        train(model, optimizer, 40 + 10 * number, 40 + 10 * number + steps)
        before, exact = bits_of(model), compute_loss(model)
        compressor.save(tmp_path / str(number))
        assert same_bits(model, before)
        manifest = Manifest.read(tmp_path / str(number))
        lost = base_loss(tmp_path / str(number)) / exact - 1
        if system == "exact":
            assert lost == 0
            continue
        quality = manifest.quality
        assert quality == compressor.quality and quality["satisfied"]
        assert lost == pytest.approx(quality["degradation"], abs=1e-6) and lost <= 0.05
        assert quality["metric"] == pytest.approx(exact, rel=1e-6)
        assert manifest.kinds["weights"].base < manifest.kinds["weights"].logical / 2
        assert manifest.config["system"] == system
        assert quality["search"] == "exhaustive" or number


def test_few_evaluations_in_the_steady_state(tmp_path):
    model, optimizer = train_model(100)
    compressor = dsq_ckpt.Compressor(model, optimizer, evaluate=lambda: compute_loss(model))
    evaluations = []
    for number in range(8):
        train(model, optimizer, 100 + 10 * number, 110 + 10 * number)
        compressor.save(tmp_path / str(number))
        evaluations.append(compressor.quality["evaluations"])
    steady = evaluations[1:]  # single ones vary with the last bit of a loss
    assert sum(steady) <= 4 * len(steady) and sorted(steady)[len(steady) // 2] <= 4 and max(steady) <= 6, evaluations


def test_predicted_sizes_are_those_of_the_codes(tmp_path):
    model, optimizer = train_model()
    compressor = dsq_ckpt.Compressor(model, optimizer, evaluate=lambda: compute_loss(model))
    compressor.save(tmp_path / "a")
    groups = Manifest.read(tmp_path / "a").groups
    coded = sum(g.bits_per_element * g.elements / 8 for name, g in groups.items() if name.startswith("weights/"))
    assert compressor.quality["predicted_bytes"] >= coded  # and two bytes for each protected element
    assert compressor.quality["predicted_bytes"] == pytest.approx(coded, rel=0.05)


def test_it_finds_the_optimum_of_its_space(tmp_path):
    """Against brute force: every step of the space saved and measured."""
    model, optimizer = train_model()
    compressor = dsq_ckpt.Compressor(model, optimizer, evaluate=lambda: compute_loss(model))
    compressor.save(tmp_path / "found", overwrite=True)
    exact, sizes = compute_loss(model), {}
    for step in (8.0, 5.6, 4.0, 2.8, 2.0, 1.4, 1.0, 0.7, 0.5, 0.35, 0.25, 0.18, 0.125):
        config = dsq_ckpt.DSQConfig().with_values(**{"quantize.weights.codebook.step": step})
        path = tmp_path / f"run{step}" / "a"
        dsq_ckpt.save(compressor.state(), path, config=config, model=model)
        if base_loss(path) / exact - 1 <= 0.05:
            sizes[step] = Manifest.read(path).kinds["weights"].base
    assert compressor.quality["chosen"]["step"] == min(sizes, key=sizes.get)


def test_resuming_continues_the_search(tmp_path):
    model, optimizer = train_model()
    compressor = dsq_ckpt.Compressor(model, optimizer, evaluate=lambda: compute_loss(model))
    compressor.save(tmp_path / "a", extra={"step": 40})
    model, optimizer = train_model(0)
    resumed = dsq_ckpt.Compressor(
        model, optimizer, evaluate=lambda: compute_loss(model), history=dsq_ckpt.SaveHistory()
    )
    assert resumed.load(tmp_path / "a", extra={"step": 0}) == {"step": 40}
    assert compute_loss(model) == pytest.approx(compressor.quality["metric"], rel=0.01)
    train(model, optimizer, 40, 41)
    resumed.save(tmp_path / "b")
    manifest = Manifest.read(tmp_path / "b")
    assert manifest.parent == Manifest.read(tmp_path / "a").save_id and manifest.lossy_resumes == 1
    assert resumed.quality["search"] == "neighbourhood"


def test_changes_of_a_caller_in_a_result_are_in_no_checkpoint(tmp_path):
    """The second save writes the manifest of the first one again, which is kept parsed."""
    model, optimizer = train_model()
    compressor = dsq_ckpt.Compressor(model, optimizer, {"refinement": {"keep_last": 1}}, lambda: compute_loss(model))
    quality = dict((result := compressor.save(tmp_path / "a")).quality)
    result.quality["model"] = model
    compressor.save(tmp_path / "b")
    manifest = Manifest.read(tmp_path / "a")
    assert manifest.refinement == "dropped" and manifest.quality == quality


def test_a_load_of_the_base_layer_is_said_or_asked_for(tmp_path):
    model, optimizer = train_model()
    compressor = dsq_ckpt.Compressor(model, optimizer, config={"refinement": {"keep_last": 1}})
    for name in "ab":
        compressor.save(tmp_path / name)
    with pytest.warns(UserWarning, match="from its base layer alone") as caught:
        compressor.load(tmp_path / "a")
    assert [warning.filename for warning in caught if "base layer" in str(warning.message)] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        compressor.load(tmp_path / "a", refinement=False)
        compressor.load(tmp_path / "b", refinement=True)
    with pytest.raises(dsq_ckpt.DSQError, match="dropped its refinement"):
        compressor.load(tmp_path / "a", refinement=True)


def test_a_failure_around_evaluate_is_not_its_fault(tmp_path, monkeypatch):
    model, optimizer = train_model()
    compressor = dsq_ckpt.Compressor(model, optimizer, evaluate=lambda: compute_loss(model))
    before = bits_of(model)

    def exhausted(*arguments):
        raise MemoryError("no room to decode a trial")

    monkeypatch.setattr(TrialModel, "_decode_chunk", exhausted)
    with pytest.raises(SaveFailed, match="MemoryError: no room to decode a trial") as failure:
        compressor.save(tmp_path / "a")
    assert "evaluate" not in str(failure.value) and same_bits(model, before) and not (tmp_path / "a").exists()


def test_trials_leave_no_trace_when_evaluate_raises(tmp_path):
    model, optimizer = train_model()
    calls = []

    def evaluate():
        calls.append(1)
        torch.rand(3)
        model.train()  # moves the running statistics
        model(make_batch(3)[0])
        if len(calls) == 4:
            raise RuntimeError("no more data")
        return compute_loss(model)

    compressor = dsq_ckpt.Compressor(model, optimizer, evaluate=evaluate)
    model.train()
    before, random = bits_of(model), torch.get_rng_state()
    says = r"`evaluate` raised RuntimeError: no more data \(test_compressor.py, line \d+\).*most conservative"
    with pytest.warns(UserWarning, match=says):
        compressor.save(tmp_path / "a")
    assert same_bits(model, before) and torch.equal(torch.get_rng_state(), random) and model.training
    manifest = Manifest.read(tmp_path / "a")
    assert not manifest.quality["satisfied"] and "no more data" in manifest.quality["reason"]
    assert base_loss(tmp_path / "a") == pytest.approx(compute_loss(model), rel=0.01)


@pytest.mark.parametrize("fallback", ["conservative", "exact"])
@pytest.mark.parametrize("bad", ["nan", "never good enough"])
def test_a_bound_that_cannot_be_kept_is_reported(tmp_path, fallback, bad):
    model, optimizer = train_model()
    exact = bits_of(model)

    def evaluate():
        if bad == "nan":
            return math.nan
        return 1.0 if same_bits(model, exact) else 2.0

    compressor = dsq_ckpt.Compressor(model, optimizer, {"search": {"fallback": fallback}}, evaluate)
    exactly = fallback == "exact" or bad == "never good enough"  # a restore is as bad as all the others
    with pytest.warns(UserWarning, match="stored exactly" if exactly else "most conservative config"):
        compressor.save(tmp_path / "a")
    quality = Manifest.read(tmp_path / "a").quality
    assert quality["chosen"] is None and not quality["satisfied"] and quality["reason"]
    if exactly:
        assert base_loss(tmp_path / "a") == compute_loss(model)
    compressor.save(tmp_path / "b")  # and the next one goes the same way, instead of failing
    assert Manifest.read(tmp_path / "b").quality["chosen"] is None


def test_noise_larger_than_the_bound_is_reported(tmp_path):
    model, optimizer = train_model()
    numbers = iter(range(1000))
    compressor = dsq_ckpt.Compressor(model, optimizer, evaluate=lambda: compute_loss(model) + 0.5 * (next(numbers) % 2))
    with pytest.warns(UserWarning, match="not deterministic"):
        compressor.save(tmp_path / "a")
    assert compressor.quality["noise"] > 0.05


def test_higher_is_better(tmp_path):
    model, optimizer = train_model(120)

    def accuracy():
        model.eval()
        tokens, targets = make_batch(10_000)
        return float((model(tokens).argmax(-1) == targets).float().mean())

    exact = accuracy()
    assert exact > 0.5
    compressor = dsq_ckpt.Compressor(
        model, optimizer, {"search": {"higher_is_better": True, "bound": "relative"}}, accuracy
    )
    compressor.save(tmp_path / "a")
    state = {"model": model.state_dict()}
    dsq_ckpt.load(state, tmp_path / "a", refinement=False)
    model.load_state_dict(state["model"])
    assert accuracy() >= exact * 0.95 - 1e-9


@pytest.mark.parametrize("bits, floor", [(1, 1e-5), (4, 0.1)])
def test_zeros_stay_zeros_whatever_bits_the_search_chose(tmp_path, bits, floor):
    model, optimizer = train_model()
    with torch.no_grad():
        model.hidden.weight[::3] = 0
    config = {"quantize": {"weights": {"refinement_bits": bits}}, "search": {"floor": floor}}
    compressor = dsq_ckpt.Compressor(model, optimizer, config, lambda: compute_loss(model))
    for name in "abc":
        compressor.save(tmp_path / name)
        state = {"model": {k: torch.ones_like(v) for k, v in model.state_dict().items()}}
        dsq_ckpt.load(state, tmp_path / name)
        assert not state["model"]["hidden.weight"][::3].any()
        assert compressor.quality["refinement_bits"] >= bits  # never fewer than configured
    assert (compressor.quality["refinement_bits"] > bits) == (floor < 0.1)


def test_a_metric_read_the_wrong_way_round_does_not_ruin_the_history(tmp_path):
    """An accuracy of which nobody said that higher is better: weights that are nearly gone look best."""
    model, optimizer = train_model()
    exact = model.hidden.weight.detach().clone()

    def accuracy() -> float:
        return max(0.1, 1.0 - float((model.hidden.weight - exact).norm() / exact.norm()))

    compressor = dsq_ckpt.Compressor(model, optimizer, evaluate=accuracy)
    with pytest.warns(UserWarning, match=r"counts as better.* set search.higher_is_better: true"):
        compressor.save(tmp_path / "a")
    state = {"model": model.state_dict()}
    dsq_ckpt.load(state, tmp_path / "a", refinement=False)
    assert (state["model"]["hidden.weight"] - exact).norm() <= 0.21 * exact.norm()


def test_a_restore_that_improves_the_metric_is_no_better_than_one_that_harms_it(tmp_path):
    """Weights that come back rounded may score better, and have lost what the last steps did all the same."""
    model, optimizer = train_model()
    exact = model.hidden.weight.detach().clone()

    def better_when_coarser() -> float:
        return 10.0 - float((model.hidden.weight - exact).norm() / exact.norm())

    config = {"quantize": {"weights": {"refinement_bits": 1}}, "search": {"floor": 2e-3}}
    compressor = dsq_ckpt.Compressor(model, optimizer, config, better_when_coarser)
    compressor.save(tmp_path / "a")
    assert compressor.quality["restore_loses"] <= compressor.quality["restore_may_lose"]
    state = {"model": model.state_dict()}
    dsq_ckpt.load(state, tmp_path / "a")
    assert (state["model"]["hidden.weight"] - exact).norm() <= 0.021 * exact.norm()


def test_quality_is_there_while_the_background_writes(tmp_path, monkeypatch):
    inputs = CompressorInputs(lambda *args: replace(plan_as_configured(*args), quality={"metric": 1.0}))
    writer = dsq_ckpt.DSQStorageWriter(tmp_path / "a", inputs=inputs)
    seen = []

    def looking(*args):
        seen.append(writer.quality)
        return collect_staged_payloads(*args)

    monkeypatch.setattr("dsq_ckpt.dcp.writer.collect_staged_payloads", looking)
    async_save_with_writer(lambda: (writer, {"w": torch.randn(80, 64)})).result()
    assert [*seen, writer.quality] == [{"metric": 1.0}] * 2


@pytest.mark.parametrize("hooks", ["step", "manual"])
def test_gradients_are_averaged_only_where_something_reads_them(tmp_path, hooks):
    model, optimizer = train_model(5)
    assert dsq_ckpt.Compressor(model, optimizer)._average is None, "AdamW's second moments tell as much"
    weighed = {"quantize": {"weights": {"codebook": {"fit": "kmeans", "prune": 0.1, "metric": "sensitivity"}}}}
    compressor = dsq_ckpt.Compressor(model, optimizer, weighed, hooks=hooks)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, 5, 15, after=compressor.after_backward)
    assert compressor._average.steps == 10
    compressor.save(tmp_path / "a")
    assert compressor._average.steps == 0
    compressor.close()
    train(model, optimizer, 15, 17)
    assert compressor._average.steps == 0
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    assert dsq_ckpt.Compressor(model, plain)._average is not None, "SGD without momentum tells nothing"


def test_parameters_without_gradients_and_changed_ones(tmp_path):
    model = Net()
    model.embed.weight.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    weighed = {"quantize": {"weights": {"codebook": {"fit": "kmeans", "prune": 0.1, "metric": "sensitivity"}}}}
    compressor = dsq_ckpt.Compressor(model, optimizer, weighed)
    train(model, optimizer, 0, 5)
    compressor.save(tmp_path / "a")
    train(model, optimizer, 5, 8)
    with torch.no_grad():  # the model is changed behind the compressor's back, between backward and save
        model.hidden.weight.data, model.head.weight.data = torch.randn(80, 64), torch.randn(128, 80)
        for name in ("bias", "weight"):
            getattr(model.norm, name).data = getattr(model.norm, name).data[:80]
        model.hidden.bias.data = torch.zeros(80)
        model.norm.running_mean, model.norm.running_var = torch.zeros(80), torch.ones(80)
    with pytest.warns(UserWarning, match="hidden.weight"):
        compressor.save(tmp_path / "b")
    state = {"model": {k: torch.zeros_like(v) for k, v in model.state_dict().items()}}
    dsq_ckpt.load(state, tmp_path / "b")
    assert torch.allclose(state["model"]["hidden.weight"], model.hidden.weight, atol=2.0)


def test_background_save(tmp_path):
    model, optimizer = train_model()
    compressor = dsq_ckpt.Compressor(model, optimizer, evaluate=lambda: compute_loss(model))
    before = bits_of(model)
    future = compressor.save(tmp_path / "a", background=True)
    train(model, optimizer, 40, 60)
    future.result()
    state = {"model": {k: torch.zeros_like(v) for k, v in before.items()}}
    dsq_ckpt.load(state, tmp_path / "a")
    assert torch.allclose(state["model"]["head.weight"], before["head.weight"], atol=0.05)
    assert Manifest.read(tmp_path / "a").quality["satisfied"]


def test_a_metric_that_cannot_see_the_weights_is_no_metric(tmp_path):
    model, optimizer = train_model()
    compressor = dsq_ckpt.Compressor(model, optimizer, evaluate=lambda: 1.0)
    with pytest.warns(UserWarning, match="must evaluate the model.*most conservative"):
        compressor.save(tmp_path / "a")
    assert not compressor.quality["satisfied"]


def test_the_wrong_direction_is_suspected(tmp_path):
    model, optimizer = train_model(120)

    def accuracy():
        tokens, targets = make_batch(10_000)
        model.eval()
        return float((model(tokens).argmax(-1) == targets).float().mean())

    with pytest.warns(UserWarning, match="higher_is_better"):
        dsq_ckpt.Compressor(model, optimizer, {"search": {"bound": "relative"}}, accuracy).save(tmp_path / "a")



