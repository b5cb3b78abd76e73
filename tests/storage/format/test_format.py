"""`docs/format.md` is right: a reader that knows nothing else reads what the package writes, bit for bit."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import xxhash

import dsq_ckpt
from dsq_ckpt.core.workers import Workers
from dsq_ckpt.engine.retention import _drop_refinement
from dsq_ckpt.storage.checkpoint import Checkpoint
from dsq_ckpt.storage.manifest import Manifest
from tests.helpers import independent_reader as independent
from tests.helpers.processes import torchrun

DOC = Path(__file__).parents[3] / "docs" / "format.md"
TEXT = DOC.read_text()
Tree = dict[str, Any]


BY_SIZE = {
    "exp_avg": {"codebook": {"fit": "lloyd", "bins": 4}, "refinement_bits": 4},
    "exp_avg_sq": {"codebook": {"fit": "kmeans", "domain": "log", "bins": 6}, "refinement_bits": 2},
}
BY_UPDATE = {
    "exp_avg": {"codebook": {"fit": "update"}, "refinement_bits": 2}, "exp_avg_sq": {"codebook": {"fit": "octaves"}},
}


def config(coder: str, block: int, keep_last: int, bins: int = 12) -> Tree:
    return {
        "quantize": {
            "min_elements": 1000,
            "groups": {
                "linear": {
                    "codebook": {"fit": "kmeans", "bins": bins, "prune": 0.1, "protect": 0.01}, "refinement_bits": 3,
                },
                "embedding": {"codebook": {"fit": "lattice", "rate_distortion": 0.0}, "refinement_bits": 8},
                "flatless": {"refinement_bits": 0},
                **{name: {"codebook": {"fit": "lattice", "step": step, "rate_distortion": 0.0}, "refinement_bits": 2}
                   for name, step in (("huge", 2.0), ("half", 2.0), ("vast", 4.0))},
            },
            **(BY_SIZE if coder == "rans" else BY_UPDATE),
            "momentum": {"method": "bf16"},
            "rules": [{"pattern": "*.exact", "group": "exact"}, {"pattern": "base.*", "group": "flatless"},
                      *({"pattern": f"{name}.*", "group": name} for name in ("huge", "half", "vast"))],
            "outlier_octaves": 3,
        },
        "delta": {"coder": coder},
        "refinement": {"keep_last": keep_last},
        "storage": {"block_elements": block, "threads": 2},
    }


def state(large: bool) -> Tree:
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
        return (scale * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype)

    conv = normal(8, 16, 3, 3)
    conv.view(-1)[::200] *= 60.0
    moment = normal(40, 64)
    wide = normal(30, 64, dtype=torch.float64)
    wide[0, :2] = torch.tensor([1e300, -3.4e38], dtype=torch.float64)

    def even(low: float, high: float, dtype: torch.dtype) -> torch.Tensor:
        """Up to a fraction of the largest number of this dtype."""
        limit = torch.finfo(dtype).max
        return (torch.linspace(low, high, 1280, dtype=torch.float64) * limit).to(dtype).view(20, 64)

    return {
        "embed": {"weight": normal(33500, 2) if large else normal(50, 64)},
        "lin1": {"weight": normal(48, 64)},
        "lin2": {"weight": normal(60, 90)},
        "lin3": {"weight": normal(60, 64, dtype=torch.bfloat16)},
        "lin4": {"weight": normal(20, 64, dtype=torch.float16)},
        "lin5": {"weight": normal(20, 64, dtype=torch.float64)},
        "wild": {"weight": normal(20, 64, scale=3e4)},
        "tiny": {"weight": normal(20, 64, scale=1e-28)},
        "conv": {"weight": conv},
        "base": {"weight": normal(20, 64)},
        "nan": {"weight": torch.full((30, 40), torch.nan)},
        "optimizer": {"lin1.weight": {
            "exp_avg": moment, "exp_avg_sq": moment.square() * 1e-8, "momentum_buffer": normal(30, 64),
        }, "lin2.weight": {"exp_avg_sq": torch.linspace(1e-9, 2e-9, 5400).view(60, 90)}},
        "wide": {"momentum_buffer": wide},
        "huge": {"weight": even(-1, 1, torch.float32), "brain": even(-1, 1, torch.bfloat16)},
        "half": {"weight": even(-1, 1, torch.float16)}, "vast": {"weight": even(-1, 0.9, torch.float32)},
        "bias": normal(64),
        "ids": {"exact": torch.arange(20000)},
        "pieces": {"exact": torch.arange(2_200_000, dtype=torch.int32)},
        "zero": torch.tensor(7), "empty": torch.zeros(0, 3), "flags": normal(5000) > 0,
        "waves": torch.complex(normal(700), normal(700)), "bytes": torch.arange(256).to(torch.uint8),
        "lr": 0.1, "history": [1, 2.5, "ä"],
    }


def flat(tree: Tree, prefix: str = "") -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for key, value in tree.items():
        entries |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return entries


def stepped(tree: Tree) -> Tree:
    """A training step later: large tensors have moved by a few per cent."""
    torch.manual_seed(2)
    after: Tree = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            after[key] = stepped(value)
        elif isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() > 1000:
            after[key] = value * (1 + 0.03 * torch.randn(value.shape, dtype=torch.float64)).to(value.dtype)
            limit = torch.finfo(value.dtype).max
            after[key].clamp_(-limit, limit)
        else:
            after[key] = value
    return after


@pytest.fixture(scope="module", params=["rans", "huffman"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Path]]:
    """A keyframe and two deltas with different block sizes; the middle one has dropped its refinement."""
    root, tree = tmp_path_factory.mktemp(request.param), state(request.param == "rans")
    paths = []
    for step, (block, keep) in enumerate([(1 << 20, 9), (1024, 9), (5000, 1)]):
        paths.append(root / f"step-{step}")
        with pytest.warns(UserWarning, match="NaN"):
            dsq_ckpt.save(tree, paths[-1], config=config(request.param, block, keep), pinned=step == 0, no_dist=True)
        tree = stepped(tree)
    # A checkpoint with NaN leaves the ones before it alone.
    _drop_refinement(paths[1], Manifest.read(paths[1]), fsync=True)
    return paths


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Path]]:
    """A chain of differences: after an exact keyframe, with protected values, refinement, and blocks of all sizes.

    The last two are the two before them, merged: without refinement and with it.
    """
    root, tree = tmp_path_factory.mktemp("sums"), state(False)
    paths = []
    for step, (block, coder) in enumerate([(1 << 20, "rans"), (1024, "huffman"), (5000, "rans"), (2048, "rans")]):
        chosen = config(coder, block, 4)
        chosen["delta"]["against"] = "values"
        chosen["quantize"]["exp_avg_sq"] = {"method": "exact"}
        paths.append(root / f"step-{step}")
        with pytest.warns(UserWarning, match="NaN"):
            dsq_ckpt.save(tree, paths[-1], config=chosen, no_dist=True)
        tree = stepped(tree)
    _drop_refinement(paths[2], Manifest.read(paths[2]), fsync=True)
    paths += [dsq_ckpt.merge(paths[step], root / f"merged-{step}").path for step in (2, 3)]
    return paths


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def check_agreement(path: Path, kept: bool) -> None:
    reader = independent.Reader(path)
    assert kept == (reader.manifest["refinement"] == "kept")
    choices: tuple[Literal[False, "auto"], ...] = (False, "auto")
    for refinement in choices:
        nested = state("rans" in path.parent.name)
        tensors = {name: value for name, value in flat(nested).items() if isinstance(value, torch.Tensor)}
        for value in tensors.values():
            value.zero_()
        dsq_ckpt.load(nested, path, refinement=refinement, no_dist=True)
        assert set(tensors) == set(reader.index["tensors"])
        for name, value in tensors.items():
            assert reader.tensor(name, refined=refinement == "auto") == raw(value), (path.name, name, refinement)
            assert value.isfinite().all() or name == "nan.weight", (path.name, name, refinement)
    with Checkpoint(path) as checkpoint:
        for name in reader.index["objects"]:
            assert reader.object(name) == checkpoint.read_object(checkpoint.find_record(name, None))
    assert nested["history"] == [1, 2.5, "ä"]


@pytest.mark.filterwarnings("ignore:torch.distributed")
def test_independent_reader_agrees(run: list[Path]) -> None:
    for path in run:
        check_agreement(path, kept=path.name != "step-1")


@pytest.mark.filterwarnings("ignore:torch.distributed")
def test_independent_reader_agrees_on_differences(sums: list[Path]) -> None:
    for step, path in enumerate(sums):
        check_agreement(path, kept=step in (1, 3, 5))


def test_everything_occurs(run: list[Path]) -> None:
    """The checkpoints compared above contain all that the format can express."""
    last = independent.Reader(run[-1])
    base = last.container(last.index["files"][0])
    records = {record["fqn"]: record for record in base.contents["records"]}
    assert {record["type"] for record in records.values()} == {"coded", "plain", "bytes"}
    assert records["wild.weight"]["exponent"] > 10 and records["tiny.weight"]["exponent"] < -80
    assert records["lin1.weight"]["protected_count"] > 0
    assert {records[f"lin{i}.weight"]["dtype"] for i in (1, 3, 4, 5)} == {"float32", "bfloat16", "float16", "float64"}
    assert records["optimizer.lin1.weight.momentum_buffer"]["stored"] == "bfloat16"
    assert records["nan.weight"]["type"] == "plain" and "nan.weight" in last.manifest["nonfinite"]
    assert len(records["pieces.exact"]["packs"]) > 1 and "at" not in records["pieces.exact"]
    domains = {group["codebook"]["domain"] for group in base.contents["groups"].values()}
    units = {record["unit"] for record in records.values() if "unit" in record}
    assert "linear" in domains and ("log" in domains) != bool(units)
    assert any(len(record["blocks"]) > 1 for record in records.values() if record["type"] == "coded")
    assert last.manifest["depth"] == 2 and len(base.contents["requires"]) == 2
    refinement = last.container(base_name(last).replace(".dsq", ".refinement")).contents["records"]
    coded = [number for number, record in enumerate(base.contents["records"]) if record["type"] == "coded"]
    assert 0 < len(refinement) < len(coded)
    assert {entry["bits"] for entry in refinement.values()} >= {2, 3, 4, 8}
    first = independent.Reader(run[0])
    for name, dtype, refined in (("huge", "<f4", False), ("half", "<f2", False), ("vast", "<f4", True)):
        values = np.frombuffer(first.tensor(f"{name}.weight", refined), dtype)
        assert values.min() == np.finfo(dtype).min, f"levels or cells of {name} reach beyond its dtype"
    assert 0x7F7F in np.frombuffer(first.tensor("huge.brain", False), "<u2"), "and these beyond bf16"


def test_every_residual_occurs(sums: list[Path]) -> None:
    last = independent.Reader(sums[3])
    base = last.container(base_name(last))
    records = {record["fqn"]: record for record in base.contents["records"] if "residual" in record}
    assert {record["dtype"] for record in records.values()} == {"float32", "bfloat16", "float16", "float64"}
    assert records["lin1.weight"]["protected_count"] > 0 and "exponent" in records["wild.weight"]
    oldest = last._record(*records["lin1.weight"]["residual"])
    for _ in range(2):
        oldest = last._record(*oldest["residual"])
    assert oldest["type"] == "plain" and len(base.contents["requires"]) == 3
    assert not last.index["codebooks"] and not last.index["exponents"]
    merged = independent.Reader(sums[4])
    assert all(merged.tensor(name) == independent.Reader(sums[2]).tensor(name) for name in merged.index["tensors"])
    records = {record["fqn"]: record for record in merged.container(base_name(merged)).contents["records"]}
    assert records["lin1.weight"]["type"] == "merged" and records["lin1.weight"]["protected_count"] > 0
    assert len(records["lin1.weight"]["steps"]) == 2


def base_name(reader: independent.Reader) -> str:
    return str(reader.index["files"][0])


def test_checksums(run: list[Path]) -> None:
    for path in run:
        reader = independent.Reader(path)
        assert {file.name for file in path.iterdir()} == {"manifest.json", *reader.files}
        for name, entry in reader.files.items():
            data = (path / name).read_bytes()
            assert (len(data), xxhash.xxh3_64_hexdigest(data)) == (entry["size"], entry["checksum"])
        data = (path / "manifest.json").read_bytes()
        head = re.match(rb'\{\s*"format":\s*"dsq_ckpt",\s*"version":\s*9,\s*"checksum":\s*"([0-9a-f]{16})"', data)
        assert head is not None
        start, stop = head.span(1)
        assert xxhash.xxh3_64_hexdigest(data[:start] + b"0" * 16 + data[stop:]).encode() == head[1]


def columns(section: str) -> list[set[str]]:
    """The keys in the first column of every table of a section."""
    body = re.split(r"^## ", TEXT, flags=re.M)[1:]
    text = next(part for part in body if part.startswith(section))
    tables = re.findall(r"(?:^\|.*\n)+", text, flags=re.M)
    return [set(re.findall(r"`([^`]+)`", " ".join(row.split("|")[1] for row in table.splitlines()[2:])))
            for table in tables]


@pytest.fixture
def moving(tmp_path: Path) -> list[Path]:
    """Two checkpoints of a weight that moves by parts of its cells."""
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(2))
    paths = [tmp_path / "moving" / str(number) for number in range(2)]
    for number, path in enumerate(paths):
        dsq_ckpt.save({"w": weight + 0.004 * number}, path)
    return paths


def test_every_key_is_documented(run: list[Path], sums: list[Path], moving: list[Path]) -> None:
    manifest_keys, file_keys = columns("2. ")
    index_keys, base_keys, codebook_keys = columns("3. ")[0], columns("5. "), columns("7. ")[0]
    refinement_keys = columns("6. ")
    seen: dict[str, set[str]] = {"base": set(), "record": set(), "refined": set()}
    for path in [*run, *sums, *moving]:
        reader = independent.Reader(path)
        assert set(reader.manifest) == manifest_keys
        for entry in reader.manifest["files"]:
            assert set(entry) == file_keys - {"held_by"}  # on object stores
        kinds, groups = reader.manifest["kinds"], reader.manifest["groups"]
        for part in (kinds, *kinds.values(), *groups.values(), reader.manifest["writer"]):
            assert all(f"`{key}`" in TEXT for key in part)
        assert set(reader.index) == index_keys
        for tensor in reader.index["tensors"].values():
            assert set(tensor) == {"dtype", "shape", "chunks"}
        for book in reader.index["codebooks"].values():
            assert set(book) == codebook_keys
        for name, entry in reader.files.items():
            if entry["role"] == "refinement":
                contents = reader.container(name).contents
                assert set(contents) == refinement_keys[0]
                seen["refined"] = seen["refined"].union(*contents["records"].values())
            elif entry["role"] in ("own", "ancestor"):
                contents = reader.container(name).contents
                assert base_keys[0] - {"scales"} <= set(contents)
                seen["base"] = seen["base"].union(contents)
                for group in contents["groups"].values():
                    assert set(group) == {"codebook", "coder", "model", "elements"}
                    assert set(group["codebook"]) == codebook_keys
                seen["record"] = seen["record"].union(*contents["records"])
    by_update = "update" in str(Manifest.read(run[0]).config["quantize"]["exp_avg"])
    former = {"unit"} if by_update else {"unit", "root", "scales", "shift"}  # by size, as moments once were
    assert seen["base"] == base_keys[0] - former and seen["record"] == base_keys[1] - former
    assert seen["refined"] == refinement_keys[1]


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """The file whose bytes the document shows."""
    dump = re.findall(r"^[0-9a-f]{3}  ([0-9a-f ]+)$", TEXT, flags=re.M)
    path = tmp_path / "example.dsq"
    path.write_bytes(bytes.fromhex("".join(dump)))
    return path


def test_example(example: Path) -> None:
    file = independent.Container(example)
    shown = re.search(r"```json\n(.*?)```", TEXT, flags=re.S)
    assert shown is not None
    assert file.contents == json.loads(shown[1])
    group, record = file.contents["groups"]["weights/linear"], file.contents["records"][0]
    coder = independent.Rans(file.block(group["model"]))
    codes = coder.decode(file.block(record["blocks"][0]), 8, None)
    assert f"`{' '.join(map(str, codes))}`" in TEXT
    assert independent.unshuffle(file.block(record["protected"]), 2, 2) == b"\xa0\x40"
    book, one = group["codebook"], 1.0
    assert independent.value(book, 2, one, None, 0) == np.float32(1.0077519379844961)
    assert independent.value(book, 2, one, 0, 2) == 1.001953125


def test_every_damaged_byte_is_refused(example: Path) -> None:
    """Every byte is under a checksum or a rule."""
    intact = example.read_bytes()

    def read_all() -> None:
        file = independent.Container(example)
        record = file.contents["records"][0]
        for place in (file.contents["groups"]["weights/linear"]["model"], *record["blocks"], record["protected"]):
            file.block(place)

    read_all()
    for at in range(len(intact)):
        example.write_bytes(intact[:at] + bytes([intact[at] ^ 0x21]) + intact[at + 1 :])
        with pytest.raises((independent.Refused, independent.Unsupported)):
            read_all()


@pytest.mark.slow
def test_two_ranks(tmp_path: Path) -> None:
    torchrun("two_ranks", 2, tmp_path, workers=Path(__file__).parent)
    for step in range(2):
        path = tmp_path / "run" / str(step)
        reader = independent.Reader(path)
        assert len(reader.index["tensors"]["layer.weight"]["chunks"]) == 2 == reader.manifest["ranks"]
        for refinement in (True, False):
            with Checkpoint(path) as checkpoint, Workers(1, 1 << 20) as workers:
                parts = [checkpoint.decode_tensor(ref, refinement, workers) for _, ref in checkpoint.iter_chunks()]
            assert reader.tensor("layer.weight", refinement) == raw(torch.cat(parts))


def test_packs_of_small_tensors_do_not_stay_in_memory(tmp_path, monkeypatch):
    """A few are kept for the records that follow, whatever the number of tensors."""
    monkeypatch.setattr("dsq_ckpt.storage.packs._PIECE", 1 << 12)
    monkeypatch.setattr("dsq_ckpt.storage.pack_reader._MAX_CACHED_BYTES", 1 << 14)
    state = {f"{number}.bias": torch.randn(50) for number in range(300)}
    dsq_ckpt.save(state, tmp_path / "a")
    with Checkpoint(tmp_path / "a") as checkpoint:
        for name in sorted(state, key=lambda name: name[::-1]):
            ref = checkpoint.find_record(name, (0,))
            with Workers(1, 1 << 20) as workers:
                assert torch.equal(checkpoint.decode_tensor(ref, False, workers), state[name])
            assert sum(map(len, checkpoint._kept.values())) <= 1 << 14
