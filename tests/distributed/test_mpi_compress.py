"""`compress` with MPI: what one process stores, bit for bit, and one failure for all ranks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import MetadataIndex

import dsq_ckpt
from dsq_ckpt import DSQConfig
from dsq_ckpt.quantization.groups import kind_of
from dsq_ckpt.storage.checkpoint import Checkpoint
from dsq_ckpt.storage.manifest import Manifest
from tests.helpers import forks
from tests.helpers.commands import dsq_error, dsq_json, find_file, flip_bit
from tests.helpers.processes import WORKERS, mpirun
from tests.helpers.source_files import (
    plain_state,
    write_dcp,
    write_dcp_in_parts,
    write_dsq_in_parts,
    write_safetensors,
    write_sharded,
    write_torch,
)
from tests.helpers.states import find_differences, flatten, load_copy, mixed_state, relative_error

pytestmark = [
    pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:.*hold NaN or Inf"),
]


def flat_state() -> dict[str, torch.Tensor]:
    """With an outlier among its tensors, one that is not finite, large values, and one that is most of it."""
    g = torch.Generator().manual_seed(3)
    state = plain_state()
    state["layers.2.weight"] = torch.randn(64, 80, generator=g) * 50
    state["layers.3.weight"] = torch.randn(96, 64, generator=g) * 0.02
    state["layers.3.weight"][90, 3] = torch.nan
    state["layers.4.weight"] = torch.randn(1000, 64, generator=g) * 0.02
    state["layers.4.weight"][::100, 0] = 3.0
    state["conv.weight"] = torch.randn(16, 16, 5, 5, generator=g) * 0.1
    return state


def nested_state(plain: bool = False) -> dict[str, object]:
    """With moments, and, unless it is to be what DCP itself keeps, with tied tensors and an empty dict."""
    model = flat_state()
    moments = {
        number: {"exp_avg": model[name].float() * 0.01, "exp_avg_sq": model[name].float().square() * 1e-4, "step": 3}
        for number, name in enumerate(("layers.0.weight", "layers.4.weight"))
    }
    state = {"model": model, "optimizer": {"state": moments, "param_groups": [{"lr": 0.1}]}, "more": mixed_state()}
    if plain:
        return state
    model["head.weight"] = model["embed.weight"]
    return {**state, "empty": {}}


class Made(NamedTuple):
    """Directories of what 4 ranks and what one process made of the same sources, these by name, and what was said.

    And the interpreter of the ranks.
    """

    together: Path
    alone: Path
    sources: dict[str, Path]
    output: str
    python: Path


@pytest.fixture(scope="module")
def outputs(tmp_path_factory) -> Made:
    """By the one launch of several ranks that there is, as each of them takes seconds to begin; see the worker."""
    here = tmp_path_factory.mktemp("mpi")
    given, together, alone = (here / name for name in ("given", "together", "alone"))
    given.mkdir()
    nested, plain = nested_state(), nested_state(plain=True)
    sources = {
        "safetensors": write_safetensors(flat_state(), given / "one"),
        "index": write_sharded(flat_state(), given / "several"),
        "torch": write_torch(nested, given / "new"),
        "old_torch": write_torch(nested, given / "old", _use_new_zipfile_serialization=False),
        "dcp": write_dcp(plain, given / "dcp"),
        "dcp_in_parts": write_dcp_in_parts(plain, given / "dcp_in_parts"),
        "dsq_in_parts": write_dsq_in_parts(plain, given / "dsq_in_parts"),
    }
    broken = write_dsq_in_parts(plain_state(), given / "broken")
    flip_bit(find_file(broken))
    torn = write_dcp_in_parts(plain_state(), given / "torn")
    data = bytearray((torn / "__0_0.distcp").read_bytes())
    (torn / "__0_0.distcp").write_bytes(data[: len(data) // 2])
    (given / "sources.json").write_text(json.dumps({name: str(path) for name, path in sources.items()}))
    (given / "damaged.json").write_text(json.dumps({str(broken): "CorruptCheckpoint", str(torn): "plain DCP"}))
    lost = write_dcp({"large": torch.randn(99, 80), "small": torch.randn(80, 80)}, given / "lost")
    where = FileSystemReader(lost).read_metadata().storage_data[MetadataIndex("small", (0, 0))]
    with open(lost / where.relative_path, "r+b") as file:
        file.seek(where.offset)
        file.write(bytes(where.length))
    assert write_safetensors(plain_state(), given / "plain").name == "plain.safetensors"
    python = forks.interpreter(here / "python")
    output = mpirun(4, WORKERS / "compressing.py", given, together, fails=True, python=python)
    assert "ok 4" in output, output
    for name, path in sources.items():
        dsq_ckpt.compress(path, alone / name)
    return Made(together, alone, sources, output, python)


FORMS = ["safetensors", "index", "torch", "old_torch", "dcp", "dcp_in_parts", "dsq_in_parts"]


@pytest.mark.slow(4)
@pytest.mark.parametrize("form", FORMS)
def test_four_ranks_store_what_one_process_stores(outputs, form):
    together, alone = outputs.together / form, outputs.alone / form
    state = flat_state() if form in ("safetensors", "index") else nested_state(plain="torch" not in form)
    for layers in ({}, {"refinement": False}):
        several, one = flatten(load_copy(together, state, **layers)), flatten(load_copy(alone, state, **layers))
        differing = find_differences(several, one)
        assert all(kind_of(name).startswith("exp_avg") for name in differing) and (differing == [] or "torch" in form)
        for name in differing:  # second moments are over scales of the rows and columns of each part
            usual = relative_error(flatten(state)[name], one[name])
            # The largest may own the energy; half a level of two per octave is a factor of 2**0.25, its root 2**0.125.
            least = 2 ** (0.25 if "exp_avg_sq" in name else 0.125) - 1
            assert relative_error(flatten(state)[name], several[name]) < max(1.1 * usual, least)
    joint, single = Manifest.read(together), Manifest.read(alone)
    assert joint.groups.keys() == single.groups.keys()
    assert all(joint.groups[name] == single.groups[name] for name in joint.groups if not name.startswith("exp_avg"))
    assert (joint.nonfinite, joint.config) == (single.nonfinite, single.config)
    assert joint.nonfinite and joint.groups and (joint.ranks, single.ranks) == (4, 1)
    assert sum(sizes.logical for sizes in joint.kinds.values()) == sum(sizes.logical for sizes in single.kinds.values())
    with Checkpoint(together) as a, Checkpoint(alone) as b:
        books = [{name: book for name, book in checkpoint.index["codebooks"].items() if not name.startswith("exp_avg")}
                 for checkpoint in (a, b)]
        assert books[0] == books[1] != {}
        for key in ("exponents", "tied", "planner", "typed_keys", "tuple_keys", "empty_dicts"):
            assert a.index[key] == b.index[key] != [] or key in ("typed_keys", "tuple_keys", "empty_dicts", "tied"), key
        assert set(a.index["tensors"]) == set(b.index["tensors"]) and a.index["exponents"]
        assert sorted(a.index["objects"]) == sorted(b.index["objects"])
        assert bool(a.index["tied"]) == ("torch" in form)
        assert all(len(tensor["chunks"]) == 1 for tensor in b.index["tensors"].values()) or "parts" in form
        parts = {name: len(tensor["chunks"]) for name, tensor in a.index["tensors"].items()}
    cut = next(count for name, count in parts.items() if name.endswith("layers.4.weight"))
    assert cut > 1 or form == "dcp"
    sizes = [file.size for file in joint.files if file.role == "own"]
    assert len(sizes) == 4 and min(sizes) > 1000


def test_compress_a_state_in_memory(outputs, tmp_path):
    """The communicator keeps its contract, and what it serves to store is what one process stores."""
    state = plain_state()
    dsq_ckpt.compress(state, tmp_path / "alone")
    alone, several = load_copy(tmp_path / "alone", state), load_copy(outputs.together / "memory", state)
    assert find_differences(several, alone) == [] != find_differences(several, state)


@pytest.mark.slow
def test_on_the_command_line(outputs, tmp_path):
    """Of several ranks one prints; of a single one nobody notices."""
    source = outputs.together.parent / "given" / "plain.safetensors"
    expected = dsq_json("compress", source, tmp_path / "alone")
    several = json.loads(outputs.output[outputs.output.index("{") :].partition("\n}\n")[0] + "}")
    command = ("-m", "dsq_ckpt.cli", "compress", source, tmp_path / "one", "--json")
    single = json.loads(mpirun(1, *command, python=outputs.python))
    for report in (several, single):
        assert {name for name in expected if report[name] == expected[name]} >= {
            "source", "bytes_logical", "refinement"
        }
    outs = {"several": outputs.together / "command", "one": tmp_path / "one", "alone": tmp_path / "alone"}
    files = {name: sorted(file.role for file in Manifest.read(out).files) for name, out in outs.items()}
    assert files["several"].count("own") == 4 and files["one"] == files["alone"]
    state = plain_state()
    for name in ("several", "one"):
        assert find_differences(load_copy(outs[name], state), load_copy(outs["alone"], state)) == []


def test_a_failing_rank_on_the_command_line(outputs):
    """It is not the one that prints; what it says is printed once, and the job fails."""
    said = outputs.output.partition("ok 4")[2]
    assert said.count("failed: CorruptCheckpoint: ") == said.count("rror: rank") == 1, said
    assert "error: rank 0" not in said and "Traceback" not in outputs.output
    assert not (outputs.together / "failed_command" / "manifest.json").exists()


def test_launched_processes_without_mpi_are_refused(tmp_path, no_launcher):
    """Processes of a launcher never go on each for itself, unless they are told to."""
    source, out = write_safetensors(plain_state(), tmp_path / "in"), tmp_path / "out"
    no_launcher.setitem(sys.modules, "mpi4py", None)
    assert "pip install mpi4py" in dsq_error("compress", source, out, "--mpi")
    no_launcher.setenv("SLURM_STEP_NUM_TASKS", "4")
    no_launcher.setenv("SLURM_PROCID", "0")
    dsq_json("compress", source, out)
    for launcher in ("PMI", "OMPI_COMM_WORLD"):
        no_launcher.setenv(f"{launcher}_RANK", "1")
        no_launcher.setenv(f"{launcher}_SIZE", "4")
        assert "pip install mpi4py" in dsq_error("compress", source, tmp_path / "other")
        dsq_json("compress", source, out, "--no-mpi", "--overwrite")
        no_launcher.setenv(f"{launcher}_SIZE", "1")
        dsq_json("compress", source, out, "--overwrite")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("form", ["torch", "parts"])
def test_exact_in_one_process(tmp_path, form):
    """The way through parts of tensors loses nothing."""
    state = nested_state(plain=form == "parts")
    source = (write_torch if form == "torch" else write_dcp_in_parts)(state, tmp_path / "in")
    dsq_ckpt.compress(source, tmp_path / "out", config=DSQConfig.preset("exact"))
    assert find_differences(load_copy(tmp_path / "out", state), state) == []
