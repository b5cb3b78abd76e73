"""The comparison with other projects' coders: what each gives back, and the command."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from evaluate import app
from evaluation.peers import environment, excp
from evaluation.peers import walk as walking
from evaluation.peers.bitsnap import BitSnap
from evaluation.peers.comparison import JOBS, TOLERANCE, versus
from evaluation.peers.environment import PeerMissingError, Worker
from evaluation.peers.excp import ExCP, Knob, dequantize, kmeans, prune, quantize
from evaluation.peers.packaged import Exact, Lossless, NNCodec, ZipNN, Zstd
from evaluation.peers.states import MOMENTS, State, read, restore
from evaluation.peers.walk import first_that, walk
from evaluation.recording import INFO_FILE, record
from evaluation.workloads import create
from torch import Tensor
from typer.testing import CliRunner

from dsq_ckpt.cli import json_files
from tests.helpers.commands import unwrap_text

pytestmark = pytest.mark.usefixtures("one_thread")
RUN = subprocess.run
SHAPES = {"matrix": (33, 21), "vector": (7,), "scalar": ()}


@pytest.fixture(scope="module")
def recording(tmp_path_factory) -> Path:
    """A recording of the first third of gpt-tiny, not to be changed: each peer is walked along all of it."""
    directory = record("gpt-tiny", 0, tmp_path_factory.mktemp("recording"))
    info = json.loads((directory / INFO_FILE).read_text())
    json_files.write(directory / INFO_FILE, info | {"checkpoints": info["checkpoints"][:3]})
    return directory


@pytest.fixture(autouse=True)
def _small_dictionary(monkeypatch) -> None:
    """LZMA has room for the data here, which gives the same bytes, instead of clearing 64 MiB and more each time."""
    monkeypatch.setattr(excp, "FILTERS", [excp.FILTERS[0] | {"dict_size": 1 << 22}])


@pytest.fixture(scope="module")
def worker():
    if environment.find() is None:
        pytest.skip("the packages of peers are not installed, and tests install nothing")
    started = Worker(environment.install())
    yield started
    started.close()


def _state(seed: int, dtype: torch.dtype = torch.float32) -> State:
    generator = torch.Generator().manual_seed(seed)

    def values() -> dict[str, Tensor]:
        return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}

    moments = {"exp_avg": values(), "exp_avg_sq": {name: value**2 for name, value in values().items()}}
    adam = {name: {kind: moments[kind][name] for kind in MOMENTS} for name in SHAPES}
    weights = {name: value.to(dtype) for name, value in values().items()}
    given = moments if dtype == torch.float32 else {}
    return State(10 * seed, 1.0, weights, given, {"optimizer": {"state": adam}})


def _assert_same(one: State, other: State) -> None:
    assert one.tensors().keys() == other.tensors().keys()
    for name, value in one.tensors().items():
        torch.testing.assert_close(other.tensors()[name], value, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_excp_gives_back_centers_of_what_it_keeps(bits: int) -> None:
    before, state = _state(0), _state(1)
    knob = Knob(alpha=0.5, bits=bits, beta=1.0)
    coder = ExCP()
    back = coder.decode(coder.encode(state, before, knob), before)
    for name, value in state.weights.items():
        residual, first, second = value - before.weights[name], *(state.moments[kind][name] for kind in MOMENTS)
        kept, kept_moments = prune(residual, first, second, knob)
        assert torch.equal(back.weights[name] != before.weights[name], kept)
        assert torch.equal(back.moments["exp_avg_sq"][name] != 0, kept_moments)
        assert not (kept_moments & ~kept).any()
        assert (back.weights[name] - before.weights[name]).round(decimals=4).unique().numel() <= 2**bits
    fine = coder.decode(coder.encode(state, before, Knob(0.0, 8, 0.0)), before)
    assert (fine.weights["matrix"] - state.weights["matrix"]).abs().mean() < 0.02


def test_excp_prunes_by_its_thresholds() -> None:
    residual = torch.tensor([0.0, 1.0, -2.0, 3.0, -4.0])  # median 2
    first, second = torch.tensor([9.0, 9.0, 9.0, 1.0, 9.0]), torch.tensor([1.0, 0.0, 0.25, 0.25, 0.25])
    kept, kept_moments = prune(residual, first, second, Knob(alpha=0.5, bits=4, beta=1.0))  # a moment of 0: no limit
    assert kept.tolist() == [False, False, False, True, True]
    assert kept_moments.tolist() == [False, False, False, False, True]
    second = torch.full((5,), 0.25)
    kept, kept_moments = prune(residual, first, second, Knob(alpha=0.25, bits=4, beta=1.0, each=False))
    assert kept.tolist() == [False, False, True, True, True]
    assert kept_moments.tolist() == [False, False, True, False, True]
    kept, _ = prune(residual, first, second, Knob(alpha=1e9, bits=4, each=False))  # at most 2.5 medians
    assert not kept.any()
    kept, _ = prune(torch.tensor([0.0, 2.0, 2.0, 4.9, 5.1]), first, second, Knob(alpha=1e9, bits=4, each=False))
    assert kept.tolist() == [False, False, False, False, True]


def test_kmeans_finds_separate_clusters() -> None:
    values = np.concatenate([np.full(9, -1.0), np.full(3, 0.5), np.full(1, 2.0)]).astype(np.float32)
    assert kmeans(values, 3).tolist() == [-1.0, 0.5, 2.0] == kmeans(values, 7).tolist()
    assert kmeans(np.empty(0, np.float32), 3).size == 0
    zeros = torch.zeros(4, 5)
    assert torch.equal(dequantize(quantize(zeros, 2), 2, zeros), zeros)


def test_bitsnap_gives_back_every_bit() -> None:
    before = _state(0, torch.bfloat16)
    weights = {name: value.clone() for name, value in before.weights.items()}
    weights["matrix"][3, :5] = torch.tensor([float("nan"), -0.0, 0.0, float("inf"), 1.0])
    state = replace(before, weights=weights)
    coder = BitSnap()
    data = coder.encode(state, before, None)
    _assert_same(state, coder.decode(data, before))
    assert len(data) < state.nbytes / 8
    other = _state(1, torch.bfloat16)
    data = coder.encode(other, before, None)  # nearly all differ: kept as they are
    _assert_same(other, coder.decode(data, before))
    assert len(data) <= other.nbytes + 5 * len(SHAPES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("difference", [False, True])
def test_lossless_coders_give_back_every_bit(dtype: torch.dtype, difference: bool) -> None:
    before, state = _state(0, dtype), _state(1, dtype)
    coder = Lossless("zstd", Zstd(), difference)
    _assert_same(state, coder.decode(coder.encode(state, before, None), before))
    exact = Exact(deltas=difference)
    for _ in range(2):
        _assert_same(state, exact.decode(exact.encode(state, before, None), before))


def test_packages_in_their_own_environment(worker: Worker) -> None:
    before, state = _state(0), _state(1)
    zipnn = Lossless("zipnn", ZipNN(worker))
    _assert_same(state, zipnn.decode(zipnn.encode(state, before, None), before))
    assert zipnn.seconds > 0
    matrices = {"one": torch.randn(40, 50), "two": torch.randn(30)}
    zero = State(0, 1.0, {name: torch.zeros_like(value) for name, value in matrices.items()}, {}, {})
    coder = NNCodec(worker)
    for _ in range(2):  # another chain begins as the first did
        coder.start()
        sizes = []
        for qp, error in ((-20, 0.2), (-36, 0.02)):
            data = coder.encode(replace(zero, weights=matrices), zero, qp)
            back = coder.decode(data, zero)
            coder.accept()
            sizes.append(len(data))
            for name, value in matrices.items():
                assert (back.weights[name] - value).abs().max() < error
        assert sizes[0] < sizes[1]
    with pytest.raises(PeerMissingError, match="nncodec, decode: FileNotFoundError"):
        worker(codec="nncodec", do="decode", source="/nowhere", target="/nowhere")


def _with_our_pip(command: list[str], **options: Any) -> subprocess.CompletedProcess:
    """Run a command; an environment that it makes gets our pip, where ensurepip would compile another for 3 s."""
    if command[1:3] != ["-m", "venv"]:
        return RUN(command, **options)
    done = RUN([*command, "--without-pip"], **options)
    [packages] = Path(command[-1]).glob("lib/python*/site-packages")
    (packages / "pip").symlink_to(str(distribution("pip").locate_file("pip")))
    return done


def test_a_missing_package_is_reported(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv(environment.VARIABLE, str(tmp_path / "python"))
    with pytest.raises(PeerMissingError, match="which is no file: name the python of an environment"):
        environment.install()
    monkeypatch.delenv(environment.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(environment, "PACKAGES", (str(tmp_path / "missing.whl"),))
    monkeypatch.setattr("subprocess.run", _with_our_pip)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(PeerMissingError, match=r"Install .*missing\.whl into an environment .* leave out nncodec"):
        environment.install()
    assert environment.find() is None


def test_states_are_what_was_recorded(recording: Path) -> None:
    run = create("gpt-tiny")
    states = list(read(recording, moments=True))
    assert [state.step for state in states] == [0, 10, 20]
    assert states[0].nbytes == 3 * 4 * sum(parameter.numel() for parameter in run.model.parameters())
    for state in states[::2]:
        restore(run, state)
        assert run.evaluate() == pytest.approx(state.loss, abs=1e-6)


def test_a_bound_is_kept(recording: Path) -> None:
    rows = [walk(recording, ExCP(), bound, moments=False) for bound in (0.05, 0.005)]
    for row, bound in zip(rows, (0.05, 0.005), strict=True):
        assert row["missed"] == sum(point["degradation"] > bound for point in row["checkpoints"]) == 0
        assert row["ratio"] == row["raw_bytes"] / sum(point["bytes"] for point in row["checkpoints"])
    assert rows[0]["ratio"] > rows[1]["ratio"]


@pytest.mark.parametrize("count", [1, 2, 3, 17])
def test_the_first_knob_that_keeps_a_bound(count: int) -> None:
    for answer in range(count + 1):
        for guess in range(count):
            tried: list[int] = []

            def keeps(place: int, answer: int = answer, tried: list[int] = tried) -> bool:
                tried.append(place)
                return place >= answer

            assert first_that(keeps, count, guess) == min(answer, count - 1)
            assert min(answer, count - 1) in tried and len(tried) == len(set(tried)) <= 10


def test_a_codec_that_changes_bits_is_not_lossless(recording: Path) -> None:
    with pytest.raises(ValueError, match=r"step 10: weights/.* came back with other bits"):
        walk(recording, ExCP(), None, moments=False, lossless=True)


def test_versus_is_at_no_more_harm() -> None:
    def row(peer: str, epsilon: float, ratio: float, degradation: float, sensitivity: float | None = None) -> dict:
        return {
            "run": "r", "part": "weights", "peer": peer, "name": peer, "epsilon": epsilon, "sensitivity": sensitivity,
            "ratio": ratio,
            "degradation_mean": degradation, "degradation_final": degradation, "degradation_max": degradation,
            "compress": 4 * ratio, "decompress": 1.0, "ratio_later": 2 * ratio, "lossless": peer == "zstd",
        }

    own_rows = [row("dsq", 0.05, 100, 0.04), row("dsq", 0.01, 50, 0.005), row("dsq", 0.001, 20, TOLERANCE / 2)]
    table = versus([row("excp", 0.05, 25, 0.03), row("nncodec", 0.01, 40, -0.01), row("zstd", 0.01, 1, 0.0), *own_rows])
    assert [(entry["name"], entry["ours"], entry["times"]) for entry in table] == [
        ("excp", 50, 2.0), ("nncodec", 20, 0.5)
    ]
    both = versus([row("excp", 0.05, 25, 0.03), *own_rows, row("dsq", 0.05, 200, 0.02, 0.125)])
    assert [(entry["sensitivity"], entry["ours"]) for entry in both] == [(None, 50), (0.125, 200)]
    [lonely] = versus([row("excp", 0.05, 25, -1.0), own_rows[0]])
    assert "ours" not in lonely


@pytest.mark.slow
def test_peers_command(recording: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(walking, "CONTINUED_STEPS", 2)  # any number shows whether rows have it
    monkeypatch.setitem(JOBS, "excp", [*JOBS["excp"][:4], JOBS["excp"][-1]])  # two of those with fixed knobs
    target = tmp_path / "peers.json"
    arguments = ["peers", "gpt-tiny", "--directory", str(recording), "--json", str(target)]
    result = CliRunner().invoke(app, [
        *arguments, "--peers", "excp,bitsnap,zstd,exact,dsq", "--epsilon", "0.05", "--dsq-sensitivity", "0.125",
        "--dsq-epsilon", "0.05",
    ])
    assert result.exit_code == 0, result.output
    document = json.loads(target.read_text())
    rows = document["rows"]
    assert document["measured"] == "peers" and document["settings"]["epsilon"] == [0.05]
    assert {row["peer"] for row in rows} == {"excp", "bitsnap", "zstd", "exact", "dsq"} < set(JOBS)
    assert {row["name"]: row["sensitivity"] for row in rows if row["peer"] == "dsq"} == {
        "dsq": None, "dsq, refined": None, "dsq, sensitivity 0.125": 0.125, "dsq, sensitivity 0.125, refined": 0.125,
    }
    by_strength = {row["sensitivity"]: row["bytes"] for row in rows if row["name"] in ("dsq", "dsq, sensitivity 0.125")
                   and row["part"] == "weights"}
    assert by_strength[None] != by_strength[0.125]
    assert {row["name"] for row in rows if row["peer"] == "exact"} == {"dsq, exact", "dsq, exact, deltas"}
    for row in rows:
        assert row["compress"] > 0 < row["decompress"] and len(row["checkpoints"]) == 2
        assert row["bytes"] > 0 and row["raw_bytes"] == rows[0]["raw_bytes"] * {
            "weights": 1 / 3, "weights + moments": 1, "weights in bf16": 1 / 6,
        }[row["part"]]
        points = row["checkpoints"]
        later = row["raw_bytes"] / len(points) / sum(point["bytes"] for point in points[1:]) * (len(points) - 1)
        assert row["ratio_later"] == pytest.approx(later)
        continued = row["part"] == "weights + moments" and row["degradation_max"] != 0
        assert (row["continued"] is not None) == continued
    assert [entry["name"] for entry in document["versus"]] == 2 * [row["name"] for row in rows if row["peer"] == "excp"]
    assert {"excp", "excp, mean", "excp, published", "excp, 0.001, 2 bits"} < {
        entry["name"] for entry in document["versus"]
    }
    assert "dsq at no greater mean and final degradation" in result.output
    refused = CliRunner().invoke(app, [*arguments, "--peers", "gzip"])
    assert refused.exit_code == 2 and "'gzip' is not one of excp" in unwrap_text(refused.output)
