"""The offline part of the evaluation: figures agree with files, degradation with the search, tables with JSON."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evaluate import app
from evaluation import ablations, create, offline, report, timings
from evaluation.recording import INFO_FILE, load_recording, record
from evaluation.replay import MOMENTS, Bytes, Replay, replay, save_recorded
from typer.testing import CliRunner

import dsq_ckpt
from dsq_ckpt.api.compressor import fractions_of
from dsq_ckpt.cli import json_files
from dsq_ckpt.config.systems import SYSTEMS
from dsq_ckpt.errors import ConfigError
from dsq_ckpt.kernels.keys import ALPHA
from dsq_ckpt.quantization.plan import plan_as_configured
from dsq_ckpt.search.folds import compute_degradation
from dsq_ckpt.storage.manifest import KindSizes, Manifest
from tests.helpers.commands import unwrap_text

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def recording(tmp_path_factory) -> Path:
    """A recording of the first 40 steps of gpt-tiny, not to be changed."""
    directory = record("gpt-tiny", 0, tmp_path_factory.mktemp("recording"))
    info = json.loads((directory / INFO_FILE).read_text())
    json_files.write(directory / INFO_FILE, info | {"checkpoints": info["checkpoints"][:5]})
    return directory


@pytest.fixture(scope="module")
def replayed(recording) -> Iterator[Callable[[str], Replay]]:
    """Replays by system, each made once, also for commands."""
    replays: dict[str, Replay] = {}

    def once(directory: Path, config: dsq_ckpt.DSQConfig, report: Callable[[str], None] = print) -> Replay:
        assert directory == recording
        key = config.model_dump_json()
        if key not in replays:
            replays[key] = replay(directory, config, report=report)
        return replays[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offline, "replay", once)
        yield lambda system: once(recording, offline.system_config(system, 0.05))


def _run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("system", ["dsq", "inshrinkerator", "lc"])
def test_figures_agree_with_the_manifest(recording: Path, tmp_path: Path, system: str) -> None:
    """The same bytes in all, and the manifest's own by kind where it does not call other tensors exact."""
    run = create("gpt-tiny")
    config = offline.system_config(system, 0.05)
    for checkpoint in load_recording(recording).checkpoints:
        if checkpoint["step"] > 20:
            break
        path = tmp_path / f"{checkpoint['step']}"
        point = save_recorded(run, checkpoint, path, config, plan_as_configured, fractions_of(config))
        manifest = Manifest.read(path)
        kinds = manifest.kinds
        for name in ("logical", "base", "refinement"):
            assert _total(point.kinds, name) == _total(kinds, name), name
        state = run.state()["model"]
        large = [tensor for tensor in state.values() if tensor.ndim > 1 and tensor.numel() >= 4096]
        assert point.kinds["weights"].logical == 4 * sum(tensor.numel() for tensor in large)
        if "weights" in kinds:
            assert vars(point.kinds["weights"]) == kinds["weights"].model_dump()
            assert point.codes.elements == kinds["weights"].logical // 4
            assert point.codes.codes <= point.codes.stored == 8 * kinds["weights"].base
        else:
            assert system == "lc" and point.keyframe and not point.codes.elements
        if system == "dsq":
            assert {kind: vars(part) for kind, part in point.kinds.items()} == {
                kind: sizes.model_dump() for kind, sizes in kinds.items()
            }
        else:
            assert not set(MOMENTS) & set(kinds)
        on_disk = sum(file.stat().st_size for file in path.iterdir())
        assert point.files == on_disk - manifest.sum_bytes("refinement", "ancestor", "older_refinement")
        assert point.keyframe == (manifest.parent is None)


def _total(kinds: dict[str, Bytes] | dict[str, KindSizes], name: str) -> int:
    return sum(getattr(part, name) for part in kinds.values())


@pytest.mark.parametrize("system", ["dsq", "inshrinkerator", "lc", "kmeans"])
def test_measured_harm_is_what_the_search_measured(replayed: Callable[[str], Replay], system: str) -> None:
    result = replayed(system)
    degradations = result.degradations()
    assert [point.step for point in result.measured] == [10, 20, 30, 40]
    for point, degradation in zip(result.measured, degradations, strict=True):
        assert point.quality is not None
        assert point.quality["metric"] == point.loss
        assert point.quality["degradation"] == pytest.approx(degradation, abs=1e-9)
        assert degradation <= 0.05
    assert len({point.keyframe for point in result.measured}) == (2 if system in ("dsq", "inshrinkerator") else 1)


def test_measured_loss_of_a_restore_is_what_the_search_measured(recording: Path) -> None:
    config = dsq_ckpt.DSQConfig.create({"storage": {"threads": 1}})
    result = replay(recording, config, steps=(30, 40))
    for point in result.measured:
        assert point.quality is not None
        assert abs(point.refined_loss - point.loss) == pytest.approx(point.quality["restore_loses"], abs=1e-9)
        assert point.refined_loss != point.base_loss
    assert max(map(abs, result.refined_degradations())) < max(map(abs, result.degradations()))


def test_differences_of_values_start_from_step_0(replayed: Callable[[str], Replay]) -> None:
    result = replayed("lc")
    first, *others = result.checkpoints
    assert first.step == 0 and first.keyframe and first.quality is None and first.base_loss == first.loss
    assert not any(point.keyframe for point in others)
    assert result.ratio(deltas_only=True) > result.ratio()
    assert len(result.degradations()) == len(others)


def test_ratios_are_sums_over_the_run(replayed: Callable[[str], Replay]) -> None:
    result = replayed("dsq")
    parts = [point.kinds["weights"] for point in result.checkpoints]
    assert result.ratio() == sum(p.logical for p in parts) / sum(p.base for p in parts)
    assert result.checkpoints[0].ratio() < result.ratio() < result.ratio(deltas_only=True)
    everything = sum(_total(point.kinds, "logical") for point in result.checkpoints)
    assert result.ratio_files == everything / sum(point.files for point in result.checkpoints)
    assert result.elements > 3 * sum(p.numel() for p in create("gpt-tiny").model.parameters())
    row = offline.summary(result)
    assert row["degradation_final"] == compute_degradation(
        result.checkpoints[-1].base_loss, result.checkpoints[-1].loss, result.config.search
    )


def test_choices_are_taken_as_they_are(recording: Path, replayed: Callable[[str], Replay]) -> None:
    """The codes of a search again, without the search: what the comparison of coders stands on."""
    searched = replayed("inshrinkerator")
    choices = {point.step: dsq_ckpt.DSQConfig.create(point.config) for point in searched.checkpoints}
    result = replay(recording, searched.config, choices=choices)
    assert result.degradations() == searched.degradations()
    assert [point.kinds["weights"].base for point in result.checkpoints] == [
        point.kinds["weights"].base for point in searched.checkpoints
    ]
    assert all(point.quality is None for point in result.checkpoints)


@pytest.mark.usefixtures("replayed")
def test_offline_command(recording: Path, tmp_path: Path, monkeypatch) -> None:
    usual = offline.system_config

    def fails(system: str, epsilon: float) -> dsq_ckpt.DSQConfig:
        if system == "scar":
            raise ConfigError("cannot be made")
        return usual(system, epsilon)

    monkeypatch.setattr(offline, "system_config", fails)
    results = tmp_path / "offline.json"
    printed = _run(
        "offline", "gpt-tiny", "--directory", str(recording), "--systems", "dsq,lc,scar",
        "--dsq-epsilon", "0.01", "--json", str(results),
    )
    assert "cannot be made" in printed and "ahead of every other system" in printed
    content = json.loads(results.read_text())
    assert {"measured", "command", "settings", "rows", "versus", "machine", "torch", "dsq_ckpt", "date"} <= set(content)
    assert content["measured"] == "offline" and content["settings"]["epsilon"] == 0.05
    assert [row["name"] for row in content["rows"]] == ["dsq", "dsq 0.01", "lc", "scar"]
    assert [row["skipped"] for row in content["rows"]] == [None, None, None, "cannot be made"]
    keys = {column.key for column in (*offline.SIZES, *offline.COSTS)}
    for row in content["rows"][:3]:
        assert keys | {"checkpoints", "warnings", "run", "epsilon"} <= set(row)
        assert all(row[key] is not None for key in keys - {"skipped"})
        assert row["bits_entropy"] <= row["bits_codes"] <= row["bits_stored"]
        assert row["checkpoints"][-1]["step"] == 40
    [against] = content["versus"]
    assert against["name"] == "lc" and against["target"] == 1.0
    picture = tmp_path / "plots" / "offline.png"
    assert _run("report", str(results), "--directory", str(picture.parent)).strip() == str(picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


def _row(system: str, epsilon: float, ratio: float, mean: float, final: float) -> report.Row:
    return {
        "run": "gpt, seed 0", "workload": "gpt", "system": system, "epsilon": epsilon, "name": f"{system} {epsilon}",
        "ratio_weights": ratio, "ratio_files": ratio / 10, "degradation_mean": mean, "degradation_final": final,
        "skipped": None,
    }


def test_comparison_is_at_no_greater_mean_and_final_harm() -> None:
    own = [_row("dsq", 0.05, 90, 0.03, 0.05), _row("dsq", 0.02, 60, 0.01, 0.02), _row("dsq", 0.01, 50, 0.005, 0.01)]
    others = [
        _row("inshrinkerator", 0.05, 25, 0.02, 0.04), _row("uniform", 0.05, 55, 0.01, 0.015),
        _row("adaptive", 0.05, 5, -0.01, 0.0), _row("exact", 0.05, 1, 0.0, 0.0),
    ]
    by_system = {row["system"]: row for row in offline.versus([*others, *own])}
    assert set(by_system) == {"inshrinkerator", "uniform", "adaptive"}
    assert (by_system["inshrinkerator"]["epsilon"], by_system["inshrinkerator"]["reached"]) == (0.02, True)
    assert (
        by_system["inshrinkerator"]["times_weights"] == pytest.approx(2.4)
        and by_system["inshrinkerator"]["target"] == 2.2
    )
    assert (by_system["uniform"]["epsilon"], by_system["uniform"]["reached"]) == (0.01, False)
    assert by_system["adaptive"]["epsilon"] is None and by_system["adaptive"]["reached"] is None


def test_refusals(recording: Path, tmp_path: Path) -> None:
    for arguments, message in (
        (["offline", "gpt-tiny", "--systems", "dqs"], "'dqs' is not one of dsq"),
        (["offline", "gpt", "--directory", str(recording)], "is a recording of gpt-tiny"),
        (["offline", "gpt-tiny", "--directory", str(tmp_path)], "no complete recording"),
        (["ablations", "gpt-tiny", "--part", "bin"], "'bin' is not one of coders"),
    ):
        result = CliRunner().invoke(app, [*arguments, "--json", str(tmp_path / "none.json")])
        assert result.exit_code == 2 and message in unwrap_text(result.output), result.output
    (tmp_path / "other.json").write_text(json.dumps({"measured": "weather", "rows": []}))
    result = CliRunner().invoke(app, ["report", str(tmp_path / "other.json")])
    assert result.exit_code == 2 and "nothing that can be drawn" in unwrap_text(result.output)


def test_json_has_no_infinities(tmp_path: Path) -> None:
    document = report.document("test", {"a": 1}, [{"x": float("inf"), "y": [float("nan"), 1.5], "z": {"k": (1, 2)}}])
    json_files.write(tmp_path / "new" / "test.json", document)
    [row] = json.loads((tmp_path / "new" / "test.json").read_text())["rows"]
    assert row == {"x": None, "y": [None, 1.5], "z": {"k": [1, 2]}}


def test_spaces_are_changed_for_a_while() -> None:
    usual = SYSTEMS["inshrinkerator"]
    variant = next(v for v in ablations.VARIANTS if v.name == "inshrinkerator without pruning")
    with pytest.raises(KeyError), ablations.searching(variant.system, variant.space):
        space = SYSTEMS["inshrinkerator"].space
        assert space is not None
        assert [axis.name for axis in space.axes] == ["bins", "protect", "embedding bins"]
        assert [variant.name for variant in space.variants] == ["magnitude"]
        raise KeyError
    assert SYSTEMS["inshrinkerator"] is usual


def test_every_variant_can_be_configured() -> None:
    for variant in ablations.VARIANTS:
        with ablations.searching(variant.system, variant.space):
            config = offline.system_config(variant.system, 0.05).with_values(**variant.values)
            space = SYSTEMS[variant.system].space
            assert space is not None
            for point in (tuple(0 for _ in space.shape), space.most_conservative):
                config.with_values(**space.values(point, space.variants[-1]))


def test_coders_code_the_same_codes(recording: Path, tmp_path: Path) -> None:
    """Along the first 30 steps."""
    short, results = tmp_path / "recording", tmp_path / "ablations.json"
    shutil.copytree(recording, short)
    info = json.loads((short / INFO_FILE).read_text())
    json_files.write(short / INFO_FILE, info | {"checkpoints": info["checkpoints"][:4]})
    printed = _run(
        "ablations", "gpt-tiny", "--directory", str(short), "--part", "coders", "--part", "timings",
        "--elements", "20000", "--repeats", "1", "--json", str(results),
    )
    document = json.loads(results.read_text())
    rows = {row["name"]: row for row in document["rows"] if row["part"] == "coders"}
    assert list(rows) == list(ablations.CODERS) and all(name in printed for name in rows)
    plain, runs, rearranged, rans = rows.values()
    assert plain["evaluations"] > 0 == runs["evaluations"] == rans["evaluations"]
    assert rans["bits_entropy"] == plain["bits_entropy"] <= rans["bits_codes"] < rearranged["bits_codes"]
    assert rearranged["ratio_weights"] > plain["ratio_weights"]
    assert sum(row["part"] == "timings" for row in document["rows"]) == 6
    _run("report", str(results))
    assert (tmp_path / "ablations.png").read_bytes().startswith(b"\x89PNG")


def test_bisection_finds_the_fewest_levels(recording: Path, monkeypatch) -> None:
    monkeypatch.setattr(ablations, "BOUNDS", (0.05, 0.005))
    choices = ablations._choices()
    monkeypatch.setattr(ablations, "_choices", lambda: {name: choices[name] for name in ("adaptive", "dsq")})
    rows = {(row["name"], row["bound"]): row for row in ablations.bins(recording, lambda line: None, count=2)}
    for system in ("adaptive", "dsq"):
        loose, tight = rows[system, 0.05], rows[system, 0.005]
        assert loose["found"] == loose["checkpoints_tried"] == 2
        assert 1 < loose["levels"] <= tight["levels"] and loose["bits"] <= tight["bits"]
    assert 4 <= rows["adaptive", 0.05]["bins"] <= ablations.MOST_BINS and rows["dsq", 0.05]["bins"] is None


def test_bisection_says_when_nothing_is_enough(recording: Path, tmp_path: Path) -> None:
    run = create("gpt-tiny")
    degradations = iter([1.0, 2.0])
    checkpoint = next(c for c in load_recording(recording).checkpoints if c["step"] == 10)
    probe = ablations.Bisection(run.model, lambda: next(degradations), [{"quantize.weights.codebook.step": 8.0}])
    config = offline.system_config("dsq", 0.05)
    save_recorded(run, checkpoint, tmp_path / "probe", config, probe, fractions_of(config))
    assert probe.found == dict.fromkeys(ablations.BOUNDS) and probe.evaluations == 1


def test_timings_compare_the_same_outcomes() -> None:
    rows: dict[str, dict[str, Any]] = {row["name"]: row for row in timings.timings(lambda line: None, 20_000, 1)}
    sketch, numpy_way, torch_way, exact, lloyd, naive = rows.values()
    assert 0 < sketch["off_by"] <= ALPHA and numpy_way["off_by"] == torch_way["off_by"] == 0
    assert exact["error"] <= 1.02 * min(lloyd["error"], naive["error"])
    assert sketch["speedup"] == min(numpy_way["seconds"], torch_way["seconds"]) / sketch["seconds"]
    assert all(row["seconds"] > 0 and row["repeats"] == 1 for row in rows.values())


def test_naive_lloyd_is_lloyd() -> None:
    """On distinct values, each seen once, the one on the sketch and the one on values do the same."""
    from dsq_ckpt.codebooks.algorithms.lloyd import lloyd_kmeans

    x = np.sort(np.random.default_rng(1).standard_normal(3000).astype(np.float32))
    expected = lloyd_kmeans(x.astype(np.float64), np.ones(len(x)), timings.LEVELS)
    np.testing.assert_allclose(timings.naive_lloyd(x), expected, rtol=1e-12)
