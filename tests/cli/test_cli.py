"""`dsq`: what the commands print, their JSON, their errors and exit statuses."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys

import numpy as np
import pytest
import torch

import dsq_ckpt
from dsq_ckpt.cli import bench_coding, output
from dsq_ckpt.cli import benchmark as bench
from dsq_ckpt.storage.manifest import Manifest
from tests.helpers import processes
from tests.helpers.commands import dsq_error, dsq_json, dsq_stdout, find_file, flip_bit, run_dsq
from tests.helpers.small_run import NAMES
from tests.helpers.states import find_differences, load_copy

ORPHAN = "0123456789abcdef-00000.dsq"


# inspect


def test_inspect(trained):
    run, _ = trained
    text = dsq_stdout("inspect", run / NAMES[2], "--tensors")
    manifest = Manifest.read(run / NAMES[2])
    assert manifest.save_id in text and f"({NAMES[1]}), 2 from the keyframe" in text
    for name in (*manifest.kinds, *manifest.groups, *(file.name[:16] for file in manifest.files)):
        assert name in text
    assert re.search(rf"ancestor +keyframe .*{NAMES[0]}\s*\n.*ancestor +delta 1 .*{NAMES[1]}\s*\n", text)
    assert re.search(rf"own +delta 2 .*{NAMES[2]}\s*\n", text)
    assert re.search(r"model\.1\.weight +float32 +96x64 +1 +weights/linear", text)
    assert re.search(r"model\.1\.bias +float32 +96 +1 +exact", text)
    assert re.search(r"optimizer\.param_groups\.0\.lr +object +- +1 +exact", text)
    assert "model.1.weight" not in dsq_stdout("inspect", run / NAMES[2])


def test_inspect_json(trained):
    run, _ = trained
    report = dsq_json("inspect", run / NAMES[1], "--tensors")
    assert report["save_id"] == Manifest.read(run / NAMES[1]).save_id
    assert report["refinement"] == "dropped" and report["depth"] == 1 and not report["keyframe"]
    assert report["bytes_written"] > report["bytes_kept"]
    assert {tensor["name"]: tensor["stored"] for tensor in report["tensors"]}["model.2.weight"] == "exact"
    assert "tensors" not in dsq_json("inspect", run / NAMES[1])


def test_inspect_errors(trained, tmp_path):
    run, _ = trained
    assert f"the newest checkpoint in it is '{NAMES[2]}'" in dsq_error("inspect", run)
    assert "does not exist" in dsq_error("inspect", tmp_path / "nowhere")
    assert "does not exist" in dsq_error("inspect", tmp_path / "nowhere", "--json")


# export


@pytest.mark.parametrize("name", ["state.pt", "flat.safetensors", "plain"])
def test_export_chooses_the_format_by_suffix(trained, tmp_path, name):
    run, state = trained
    text = dsq_stdout("export", run / NAMES[2], tmp_path / name)
    assert str(tmp_path / name) in text and "base and refinement" in text
    assert (tmp_path / name).is_dir() == (name == "plain")
    assert "exists; choose another target, or overwrite it (--overwrite)" in dsq_error(
        "export", run / NAMES[2], tmp_path / name)
    report = dsq_json("export", run / NAMES[2], tmp_path / name, "--overwrite", "--refinement", "base")
    assert not report["refined"] and bool(report["left_out"]) == (name == "flat.safetensors")
    if name == "state.pt":
        assert find_differences(torch.load(tmp_path / name), load_copy(run / NAMES[2], state, refinement=False)) == []


def test_export_errors(trained, tmp_path):
    run, _ = trained
    path = run / NAMES[0]
    assert "has no refinement layer" in dsq_error("export", path, tmp_path / "a.pt", "--refinement", "required")
    assert "--allow-pickle is for --format torch" in dsq_error("export", path, tmp_path / "a", "--allow-pickle")
    (tmp_path / "file").write_text("")
    assert "'" + str(tmp_path / "file") in dsq_error("export", run / NAMES[0], tmp_path / "file" / "a.pt")
    dsq_ckpt.save({"odd": pytest.approx(1)}, tmp_path / "pickled")
    message = dsq_error("export", tmp_path / "pickled", tmp_path / "b.pt")
    assert "object 'odd'" in message and "pass --allow-pickle;" in message and "=True" not in message
    assert run_dsq("export", run / NAMES[0], tmp_path / "a", "--format", "zip").exit_code == 2


# compress


def test_compress(tmp_path):
    state = {"layer.weight": torch.randn(96, 64), "layer.bias": torch.zeros(96)}
    torch.save(state, tmp_path / "in.pt")
    text = dsq_stdout("compress", tmp_path / "in.pt", tmp_path / "out", columns=240)
    assert str(tmp_path / "in.pt") in text and str(tmp_path / "out") in text
    assert re.search(r"uncompressed +24\.4 KiB *\n", text) and re.search(r"weights/linear .* keyframe ", text)
    assert find_differences(load_copy(tmp_path / "out", state), state) == ["layer.weight"]
    assert "overwrite it (--overwrite)" in dsq_error("compress", tmp_path / "in.pt", tmp_path / "out")
    (tmp_path / "c.yaml").write_text("quantize: {weights: {refinement_bits: 0}}")
    for given, bits in (("default", 4), (tmp_path / "c.yaml", 0)):
        report = dsq_json("compress", tmp_path / "in.pt", tmp_path / "out", "--overwrite", "--config", given)
        about = dsq_ckpt.describe(tmp_path / "out")
        assert report == {
            **about, "source": str(tmp_path / "in.pt"), "path": str(tmp_path / "out"), "quality": None,
            "ratio_kept": pytest.approx(about["bytes_logical"] / about["bytes_kept"], rel=1e-3),
        }
        assert Manifest.read(tmp_path / "out").config["quantize"]["weights"]["refinement_bits"] == bits
    dsq_stdout("compress", tmp_path / "in.pt", tmp_path / "out", "--overwrite", "--system", "uniform", "--config",
            tmp_path / "c.yaml")
    config = Manifest.read(tmp_path / "out").config
    assert config["system"] == "uniform" and config["quantize"]["weights"]["codebook"]["fit"] == "uniform"
    dsq_stdout("compress", tmp_path / "in.pt", tmp_path / "exact", "--config", "exact")
    assert find_differences(load_copy(tmp_path / "exact", state), state) == []


def test_compress_errors(tmp_path):
    torch.save({"weight": torch.randn(80, 80)}, tmp_path / "in.pt")
    torch.save({"weight": torch.randn(80, 80), "odd": pytest.approx(1)}, tmp_path / "odd.pt")
    out = tmp_path / "out"
    assert "does not exist; name a .safetensors" in dsq_error("compress", tmp_path / "nowhere", out)
    assert "more than plain data" in dsq_error("compress", tmp_path / "odd.pt", out)
    for option, value, says in (
        ("--config", "none", "no preset 'none'; choose from default"), ("--config", "none.yaml", "cannot be read"),
        ("--system", "none", "expected 'dsq'"),
    ):
        assert says in dsq_error("compress", tmp_path / "in.pt", out, option, value)
    (tmp_path / "c.yaml").write_text("quantise: {}")
    assert "c.yaml: 1 problem(s) quantise: unknown key; did you mean 'quantize'?" in dsq_error(
        "compress", tmp_path / "in.pt", out, "--config", tmp_path / "c.yaml"
    )
    assert not out.exists()
    out.write_text("a file")
    assert "error: " in dsq_error("compress", tmp_path / "in.pt", out)
    assert out.read_text() == "a file"


# gc


def test_gc(run, monkeypatch):
    orphans = [run / NAMES[0] / ORPHAN, run / "aborted" / ORPHAN]
    for orphan in orphans:
        orphan.parent.mkdir(exist_ok=True)
        orphan.write_bytes(b"x" * 2048)
    text = dsq_stdout("gc", run)
    assert "nothing to delete" in text and f"left alone: {run / 'aborted'}" in text
    assert all(orphan.exists() for orphan in orphans)
    text = dsq_stdout("gc", run, "--older-than", "0s", "--dry-run")
    assert "would delete 2 file(s), 4.00 KiB" in text
    assert f"{NAMES[0]}/{ORPHAN}" in text and "not in the manifest" in text and "save did not complete" in text
    assert all(orphan.exists() for orphan in orphans)
    report = dsq_json("gc", run, "--older-than", "0s")
    assert sorted(entry["path"] for entry in report["files"]) == sorted(map(str, orphans))
    assert report["bytes"] == 4096 and not report["dry_run"]
    assert sorted(os.listdir(run)) == sorted(NAMES)
    assert dsq_json("verify", run)["ok"]
    assert "nothing to delete" in dsq_stdout("gc", run)
    assert "is not a directory" in dsq_error("gc", run / "nowhere")


def test_gc_says_what_it_leaves_and_why(run):
    for name in ("young", "mixed"):
        (run / name).mkdir()
        (run / name / ORPHAN).write_bytes(b"x")
    (run / "mixed" / "notes.txt").write_text("mine")
    (run / NAMES[0] / "manifest.json").write_text("{}")
    text = dsq_stdout("gc", run, "--older-than", "2h")
    assert f"{run / 'young'}: its files are too young: a save may be under way (younger than 120 min" in text
    assert f"{run / 'mixed'}: without a manifest, but with files that are not ours, such as 'notes.txt'" in text
    assert f"left alone: {run / NAMES[0]}: its manifest cannot be read" in text
    report = dsq_json("gc", run, "--older-than", "0s")
    assert [entry["path"] for entry in report["left"]] == [str(run / "mixed"), str(run / NAMES[0])]
    assert not (run / "young").exists() and (run / "mixed" / ORPHAN).exists()
    for wrong in ("2x", "-1", "soon"):
        assert run_dsq("gc", run, "--older-than", wrong).exit_code == 2


# bench and the whole


def test_bench(tmp_path, monkeypatch):
    asked = []

    def run_bench(*arguments, **options):
        asked.append((*arguments, options))
        return {"x": 1}

    monkeypatch.setattr(bench, "run_bench", run_bench)
    monkeypatch.setattr(bench, "print_bench", lambda result, console: console.print(f"result {result['x']}"))
    arguments = ["--parameters", "2e6", "--threads", 3, "--dir", tmp_path, "--json", tmp_path / "bench.json"]
    assert dsq_stdout("bench", *arguments) == "result 1\n"
    assert dsq_stdout("bench", "--stall", *arguments) == "result 1\n"
    assert asked == [(2_000_000, 3, tmp_path, {"repeats": 5, "stall_only": stall}) for stall in (False, True)]
    assert json.loads((tmp_path / "bench.json").read_text()) == {"x": 1}


def test_bench_leaves_out_what_memory_is_too_small_for(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "_available_memory", lambda: 4.1 * 4 * 2e6)
    monkeypatch.setattr(bench, "_measure_stalls", lambda parameters, moments, *_: measured.append(moments))
    measured: list[bool] = []
    output = dsq_stdout("bench", "--stall", "--parameters", "2e6", "--dir", tmp_path, "--json", tmp_path / "bench.json")
    assert measured == [False] and "left out: weights + moments, which need 0.1 GiB" in output
    assert "moments" in json.loads((tmp_path / "bench.json").read_text())["left_out"]
    measured.clear()
    assert "left out" not in dsq_stdout("bench", "--stall", "--parameters", "5e5", "--dir", tmp_path)
    assert measured == [False, True]


def test_bench_codes_as_saves_do():
    """Deltas of which few codes change are lists, as in a save; their decoders give the codes."""
    work, bits = bench_coding.coding_benchmarks()
    names = {name: work[f"decode, {name}"].func.__self__.name for name in bench_coding.STREAMS}
    assert names == {"3.5 bit": "rans", "1.4 bit": "rans", "0.3 bit": "changes", "0.12 bit": "changes"}
    for name, change in bench_coding.STREAMS.items():
        assert abs(bits[name] - float(name.split()[0])) < 0.06
        decode = work[f"decode, {name}"]
        decode()
        assert np.array_equal(decode.args[2], bench_coding.stream(change)[0])


def test_units():
    assert [output.size(n) for n in (0, 999, 1000, 1023, 1 << 20, 1023 << 20, int(12.34 * 2**30), 10**15)] == [
        "0 B", "999 B", "0.98 KiB", "1.00 KiB", "1.00 MiB", "1.00 GiB", "12.3 GiB", "909 TiB",
    ]
    assert [output.number(n) for n in (0, 999, 1234, 7 * 10**9)] == ["0", "999", "1.23 k", "7.00 G"]
    assert [output.ratio(a, b) for a, b in ((568, 10), (100, 99), (12345, 10), (0, 5), (5, 0))] == [
        "56.8x", "1.01x", "1234x", "-", "-",
    ]
    assert [output.seconds(s) for s in (0.071, 9.99, 59.9, 125)] == ["0.07 s", "9.99 s", "59.9 s", "2 min 05 s"]


def test_a_bug_keeps_its_traceback(monkeypatch, tmp_path):
    def broken(*args):
        raise ZeroDivisionError

    monkeypatch.setattr("dsq_ckpt.cli.verify_command.verify", broken)
    assert isinstance(run_dsq("verify", tmp_path).exception, ZeroDivisionError)


def test_as_a_process(run, monkeypatch):
    """The entry point, the exit status and the streams as a shell sees them."""
    monkeypatch.delenv("COLUMNS", raising=False)

    def shell(*arguments):
        return processes.run_apart(["-m", "dsq_ckpt.cli", *map(str, arguments)])

    good = shell("verify", run, "--json")
    assert good.returncode == 0 and good.stderr == "" and json.loads(good.stdout)["ok"]
    flip_bit(find_file(run / NAMES[2]))
    bad = shell("verify", run)
    assert bad.returncode == 1
    assert find_file(run / NAMES[2]).name in bad.stdout
    assert bad.stderr == f"error: 1 of 3 checkpoint(s) damaged: {NAMES[2]}\n"
    assert "\x1b" not in bad.stdout
    entry = processes.run_apart(["-c", "from dsq_ckpt.cli import main; main()", "--version"])
    assert entry.stdout == f"dsq_ckpt {dsq_ckpt.__version__}\n"


def test_inspect_knows_the_chain_without_its_directories(trained, tmp_path):
    shutil.copytree(trained[0] / NAMES[2], tmp_path / "alone" / "moved")
    text = dsq_stdout("inspect", tmp_path / "alone" / "moved")
    rows = re.findall(r"ancestor +(keyframe|delta 1) +1 .*\(deleted\)", text)
    assert rows == ["keyframe", "delta 1"]
    find_file(tmp_path / "alone" / "moved", "ancestor").write_bytes(b"")  # it is looked into when things are broken
    assert "(deleted)" in dsq_stdout("inspect", tmp_path / "alone" / "moved")


FULL = """
import resource, signal, sys
from dsq_ckpt.cli import app
sys.dont_write_bytecode = True  # of what is imported later: Python would leave the first bytes of it
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
for command, target in (
    ("export", "state.pt"), ("export", "flat.safetensors"), ("export", "plain"), ("cp", "copied")
):
    try:
        app([command, sys.argv[1], target])
    except SystemExit as status:
        print(target, status.code)
"""

# By Python 3.13 and newer, which no longer hide errors of `close` when an object is freed: this one of a stream of DCP.
_LEFT_BY_TORCH = (
    r"Exception ignored in: <torch\.distributed\.checkpoint\.filesystem\.(?s:.*?)\nValueError: flush of .*\n"
)


def test_exports_and_copies_to_a_full_disk(trained, tmp_path):
    """Torch's writers hide the system's error behind one of their own."""
    run, _ = trained
    result = processes.run_apart(["-c", FULL, str(run / NAMES[2])], tmp_path)
    assert result.stdout.splitlines() == [
        "state.pt 1", "flat.safetensors 1", "plain 1", "copied 1"
    ], result.stderr
    errors = re.sub(_LEFT_BY_TORCH, "", result.stderr) if sys.version_info >= (3, 13) else result.stderr
    assert errors.splitlines() == [
        f"error: '{tmp_path / name}': File too large, not all of which was written"
        for name in ("state.pt", "flat.safetensors", "plain", "copied")
    ]
    assert os.listdir(tmp_path) == []
