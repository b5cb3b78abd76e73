"""The entropy coder against that of another checkout, and against htscodecs, on the same codes in one run.

    git worktree add ../former REVISION
    python scripts/bench_coder.py --former ../former --json coder.json

The codes are those of `dsq bench` and those of checkpoints of a recorded run, which `--workload` names: the largest
group of weights and of each moment, in a keyframe and in a late delta. Two blocks of them are also decoded in turns
("two"), as by a load. Where few of them change, they are also coded as lists of changes ("lists"), as by a save; those
are decoded in place. Each checkout fits its own models, in a process
of its own; the processes take turns, so that other work on the machine slows all of them. htscodecs (a library of
Debian, `libhtscodecs2`) codes the same codes given the code before in the same block, in 32 lanes with AVX2;
`--htscodecs` names its file where the system does not find it.
"""

from __future__ import annotations

import argparse
import ctypes
import ctypes.util
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

_ROUNDS = 9
_BLOCK = 1 << 20
"""Codes of a stream, at most."""
_CHILD = "--child"


def measure(codes: np.ndarray, parent: np.ndarray | None, repeats: int = 5) -> dict[str, dict[str, float]]:
    """Return ns per code of the coders that this process imports, least of several, and bits per code, by way."""
    from dsq_ckpt import coding

    symbols = int(codes.max()) + 1
    contexts = 0 if parent is None else int(parent.max()) + 1
    rows = np.full(codes.size, contexts) if parent is None else parent.astype(np.int64)
    counts = np.bincount(rows * symbols + codes, minlength=(contexts + 1) * symbols).reshape(-1, symbols)
    coder = coding.RansCoder.fit(counts.astype(np.int64))
    data, out = coder.encode(codes, parent), np.empty_like(codes)
    encode = _least(lambda: coder.encode(codes, parent), repeats)
    decode = _least(lambda: coder.decode(data, parent, out), repeats)
    assert np.array_equal(out, codes)
    figures = {
        "lanes": {"encode": encode / codes.size, "decode": decode / codes.size, "bits": 8 * len(data) / codes.size},
    }
    if importlib.util.find_spec("dsq_ckpt.coding.decoding_tasks"):  # former versions have none
        from dsq_ckpt.coding import decoding_tasks

        wanted = [decoding_tasks.BlockRequest(coder, data, parent, np.empty_like(codes)) for _ in range(2)]
        decode = _least(lambda: decoding_tasks.decode_blocks(wanted), repeats)
        assert all(np.array_equal(request.out, codes) for request in wanted)
        figures["two"] = {**figures["lanes"], "decode": decode / codes.size / 2}
    if parent is None or not hasattr(coding, "fit_fastest"):
        return figures
    lists = coding.fit_fastest(counts.astype(np.int64))
    if lists.name == "changes":
        own, seconds = lists.encode(codes, parent), []
        encode = _least(lambda: lists.encode(codes, parent), repeats)
        for _ in range(repeats):
            np.copyto(out, parent)
            started = time.perf_counter()
            lists.update(own, out)
            seconds.append(time.perf_counter() - started)
        assert np.array_equal(out, codes)
        figures["lists"] = {
            "encode": encode / codes.size, "decode": 1e9 * min(seconds) / codes.size, "bits": 8 * len(own) / codes.size,
        }
    return figures


def measure_htscodecs(codes: np.ndarray, library: Any, repeats: int = 5) -> dict[str, float]:
    """Return the same of htscodecs: order 1, 32 lanes (0x04), AVX2 for both ways (`rans_set_cpu`)."""
    library.rans_set_cpu(0x202)
    order, size = 1 | 0x04, ctypes.c_uint(0)
    bound = library.rans_compress_bound_4x16(codes.size, order)
    block, out = np.empty(bound, np.uint8), np.empty_like(codes)

    def encode() -> None:
        size.value = bound
        assert library.rans_compress_to_4x16(codes.ctypes, codes.size, block.ctypes, ctypes.byref(size), order)

    def decode() -> None:
        length = ctypes.c_uint(out.size)
        assert library.rans_uncompress_to_4x16(block.ctypes, size, out.ctypes, ctypes.byref(length))

    encode()
    result = {"encode": _least(encode, repeats) / codes.size, "bits": 8 * size.value / codes.size}
    result["decode"] = _least(decode, repeats) / codes.size
    assert np.array_equal(out, codes)
    return result


def _least(work: Callable[[], object], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return 1e9 * min(seconds)


def recorded(workload: str, saves: int, directory: Path) -> Iterator[tuple[str, np.ndarray, np.ndarray | None]]:
    """Train a run, save it with the defaults of a `Compressor`, and yield codes of its first and last checkpoint."""
    import torch
    from evaluation import create

    import dsq_ckpt

    torch.set_num_threads(1)
    training = create(workload)
    with dsq_ckpt.Compressor(training.model, training.optimizer, evaluate=training.evaluate) as compressor:
        for number in range(saves):
            training.train(number * training.checkpoint_every, (number + 1) * training.checkpoint_every)
            compressor.save(directory / f"{number:03d}")
    for number, when in ((0, "keyframe"), (saves - 1, "delta")):
        for kind, (codes, parent) in _groups(directory / f"{number:03d}").items():
            yield f"{workload}, {kind}, {when} {number}", codes, parent


def _groups(path: Path) -> dict[str, tuple[np.ndarray, np.ndarray | None]]:
    """Return the codes of the largest group of each kind, and the previous ones, up to `_BLOCK` of them."""
    from dsq_ckpt.core.workers import Workers
    from dsq_ckpt.storage.checkpoint import Checkpoint

    groups: dict[str, list[tuple[np.ndarray, np.ndarray | None]]] = {}
    with Checkpoint(path) as checkpoint, Workers(1, 1 << 20) as workers:
        for _, ref in checkpoint.iter_chunks():
            record = checkpoint.read_record(ref)
            if record["type"] != "coded":
                continue
            links = checkpoint.follow_chain(ref, "parent", ("coded",))
            parent = checkpoint.decode_codes(links[1], workers) if len(links) > 1 else None
            groups.setdefault(record["group"], []).append((checkpoint.decode_codes(ref, workers), parent))
    largest: dict[str, tuple[np.ndarray, np.ndarray | None]] = {}
    for group, parts in sorted(groups.items(), key=lambda item: sum(len(codes) for codes, _ in item[1])):
        codes = np.concatenate([codes for codes, _ in parts])[:_BLOCK]
        before = [parent for _, parent in parts if parent is not None]
        largest[group.partition("/")[0]] = codes, np.concatenate(before)[:_BLOCK] if len(before) == len(parts) else None
    return largest


def _child(file: str) -> None:
    """Measure the streams of a file with the coder of the checkout that is first on the path; print JSON."""
    import dsq_ckpt

    streams = np.load(file)
    names = [name.removesuffix(".codes") for name in streams.files if name.endswith(".codes")]
    rows = {}
    for name in names:
        parent = f"{name}.parent"
        rows[name] = measure(streams[f"{name}.codes"], streams[parent] if parent in streams.files else None)
    print(json.dumps({"package": str(Path(dsq_ckpt.__file__).parent), "rows": rows}))


def _run(checkout: Path, file: Path, variables: dict[str, str]) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", **variables}
    ran = subprocess.run(
        [sys.executable, __file__, _CHILD, str(file)], capture_output=True, text=True, env=environment, check=False
    )
    if ran.returncode:
        raise SystemExit(f"{checkout}: {ran.stderr}")
    result = json.loads(ran.stdout)
    if Path(result["package"]).parent.resolve() != checkout.resolve():
        raise SystemExit(f"{checkout}: {result['package']} was imported in place of its own package")
    return dict(result["rows"])


def main() -> None:
    """Measure, print and write JSON."""
    if sys.argv[1:2] == [_CHILD]:
        return _child(sys.argv[2])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--former", type=Path, help="a checkout of another version of this repository")
    parser.add_argument("--workload", default="gpt", help="of scripts/evaluate.py, for the codes of a recorded run")
    parser.add_argument("--saves", type=int, default=9)
    parser.add_argument("--paths", nargs="+", help="paths of this checkout's coder; by default all but Numba's")
    parser.add_argument("--htscodecs", help="file of the library", default=ctypes.util.find_library("htscodecs"))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    from evaluation.report import document

    from dsq_ckpt import native
    from dsq_ckpt.cli import json_files
    from dsq_ckpt.cli.bench_coding import STREAMS, stream

    own = Path(__file__).resolve().parent.parent
    paths = arguments.paths or [name for name in native.available() if name != "numba"] or ["numba"]
    streams = [(f"synthetic, {name}", *stream(moved)) for name, moved in STREAMS.items()]
    with tempfile.TemporaryDirectory() as scratch:
        streams += recorded(arguments.workload, arguments.saves, Path(scratch) / "run")
        file, arrays = Path(scratch) / "streams.npz", {}
        for name, codes, parent in streams:
            arrays[f"{name}.codes"] = codes
            if parent is not None:
                arrays[f"{name}.parent"] = parent
        np.savez(file, allow_pickle=False, **arrays)
        timings: dict[tuple[str, str], list[dict[str, float]]] = {}
        library = ctypes.CDLL(arguments.htscodecs) if arguments.htscodecs else None
        for _ in range(_ROUNDS):
            measurements = {path: _run(own, file, {native.VARIABLE: path}) for path in paths}
            if arguments.former:
                measurements["former"] = _run(arguments.former, file, {})
            if library is not None:
                measurements["htscodecs"] = {name: measure_htscodecs(codes, library) for name, codes, _ in streams}
            for who, measured in measurements.items():
                for name, row in measured.items():
                    for kind, figures in row.items() if who != "htscodecs" else (("lanes", row),):
                        timings.setdefault((name, who if kind == "lanes" else f"{who}, {kind}"), []).append(figures)
    rows = [
        {"stream": name, "codes": codes.size, "coder": who,
         "encode_ns": round(statistics.median(row["encode"] for row in timings[name, who]), 4),
         "decode_ns": round(statistics.median(row["decode"] for row in timings[name, who]), 4),
         "bits": round(timings[name, who][0]["bits"], 5)}
        for name, codes, _ in streams
        for who in (
            *(name for path in paths for name in (path, f"{path}, two", f"{path}, lists")), "former", "htscodecs"
        )
        if (name, who) in timings
    ]
    for row in rows:
        print(row)
    if arguments.json:
        settings = {"workload": arguments.workload, "saves": arguments.saves, "rounds": _ROUNDS}
        json_files.write(arguments.json, document("coder", settings, rows))


if __name__ == "__main__":
    main()
