"""What a run keeps and reads on account of its chain: refinement layers, copies of keyframes, checks of ancestors.

    python scripts/measure_chain.py --json chain.json
    python scripts/measure_chain.py --workload vit --saves 18 --json bytes.json
    python scripts/measure_chain.py --workload gpt --saves 44 --every 36 --json growth.json
    python scripts/measure_chain.py --workload vit --saves 33 --parents --json parents.json
    python scripts/measure_chain.py --depths --layers 20 --json depths.json

A random walk of weights and Adam's moments is saved 33 times in one chain, with `refinement.keep_last` 1 and 3, and
with `storage.replicate_keyframes`. Bytes are those on the device, each hard-linked file once.

With `--workload`, one of `scripts/evaluate.py` is trained instead, and saved by a `Compressor` with its defaults: what
the bytes that are kept were spent on, with moments of small tensors in bf16, as by default, and exact. With `--every`,
the sizes of the run after each checkpoint instead, beside those of plain ones; `scripts/evaluate.py report` draws them.
With `--parents`, the same checkpoints are saved, without a search, once for each rule by which a parent can be chosen:
what is written and kept, and how many records of codes a load decodes for each element. With `--depths`, the time of a
load by the length of the chain, against `dcp.load`, and of the same chain as format version 5 had it: coded by lanes
alone, also where few codes change.
"""

from __future__ import annotations

import argparse
import gc
import shlex
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed.checkpoint as dcp

import dsq_ckpt
from dsq_ckpt.cli import json_files
from dsq_ckpt.cli.benchmark import drift, synthetic_state
from dsq_ckpt.coding import RansCoder, fit_fastest
from dsq_ckpt.config.schema import RefinementConfig
from dsq_ckpt.core.workers import Workers
from dsq_ckpt.engine.history import ParentRef
from dsq_ckpt.engine.parent_integrity import CHECK_PERIOD, find_damaged, select_files
from dsq_ckpt.quantization.groups import kind_of
from dsq_ckpt.storage import shard
from dsq_ckpt.storage.checkpoint import Checkpoint
from dsq_ckpt.storage.container import ContainerReader
from dsq_ckpt.storage.description import list_linked_refinement
from dsq_ckpt.storage.manifest import Manifest

_SETTINGS: dict[str, dict[str, Any]] = {
    "keep_last 1": {"refinement": {"keep_last": 1}},
    "keep_last 3 (default)": {},
    "replicate_keyframes": {"storage": {"replicate_keyframes": True}},
}


def walk(layers: int, saves: int) -> Any:
    """Yield the states of a run: weights that move by a tenth of their size over 25 saves, and their moments."""
    generator = torch.Generator().manual_seed(0)
    weights = {f"layers.{n}.weight": torch.randn(1000, 1000, generator=generator) * 0.02 for n in range(layers)}
    for _ in range(saves):
        moved = {name: torch.randn(w.shape, generator=generator) * 4e-4 for name, w in weights.items()}
        for name, step in moved.items():
            weights[name] += step
        moments = {name: {"exp_avg": step, "exp_avg_sq": step.square()} for name, step in moved.items()}
        yield {"model": weights, "optimizer": {"state": moments}}


def on_device(run: Path) -> int:
    """Return the bytes of all files of a run, each inode once."""
    stats = [path.stat() for path in run.rglob("*") if path.is_file()]
    return sum({stat.st_ino: stat.st_size for stat in stats}.values())


def checks(run: Path) -> tuple[list[float], list[int]]:
    """Return seconds and bytes of the check that goes with the save after each checkpoint of a run, on one rank."""
    seconds, sizes = [], []
    for path in sorted(run.iterdir()):
        manifest = Manifest.read(path)
        files = select_files(ParentRef(manifest.save_id, str(path), manifest.depth))
        with Workers(2, 1 << 20) as workers:
            started = time.perf_counter()
            assert not find_damaged(path, files, workers)
            seconds.append(time.perf_counter() - started)
        sizes.append(sum(file.size for file in files))
    return seconds, sizes


def measure(layers: int, saves: int, directory: Path) -> dict[str, Any]:
    """Return sizes and times by setting."""
    rows: dict[str, Any] = {}
    for name, config in _SETTINGS.items():
        run = directory / name
        seconds: list[float] = []
        reports: list[dict[str, Any]] = []
        for number, state in enumerate(walk(layers, saves)):
            started = time.perf_counter()
            dsq_ckpt.save(state, run / f"{number:03d}", config=config)
            seconds.append(time.perf_counter() - started)
            reports.append(dsq_ckpt.describe(run / f"{number:03d}"))
        logical = sum(report["bytes_logical"] for report in reports)
        rows[name] = {
            "bytes_logical": logical, "bytes_on_device": on_device(run), "ratio_kept": logical / on_device(run),
            "bytes_written": statistics.mean(report["bytes_written"] for report in reports),
            "keyframe_bytes": reports[0]["bytes_written"], "save_seconds": statistics.median(seconds),
        }
        if config == {}:
            times, sizes = checks(run)
            rows[name] |= {"check_seconds": statistics.mean(times), "check_seconds_most": max(times),
                           "check_bytes": statistics.mean(sizes), "check_bytes_most": max(sizes)}
    return {"parameters": layers * 10**6, "saves": saves, "checked_every": CHECK_PERIOD, "settings": rows}


def spent(run: Path) -> dict[str, int]:
    """Return the bytes of all files of a run by what they were spent on."""
    sizes: Counter[str] = Counter()
    for path in sorted(run.iterdir()):
        manifest = Manifest.read(path)
        sizes["manifests"] += (path / "manifest.json").stat().st_size
        sizes["indices"] += manifest.sum_bytes("index")
        when = "deltas" if manifest.depth else "keyframes"
        for own in manifest.files:
            if own.role != "own":
                continue
            contents = _contents(path / own.name)
            parts = Counter({f"models of the coder, {when}": sum(g["model"][1] for g in contents["groups"].values())})
            if "scales" in contents:
                parts[f"exp_avg_sq, scales of {when}"] = contents["packs"][contents["scales"][0]][0][1]
            for record in contents["records"]:
                parts[_cause(record, when)] += _size(record, contents["packs"])
            parts["tables of base files"] = own.size - sum(parts.values())
            layer = path / own.name.replace(".dsq", ".refinement")
            if layer.exists():
                for number, entry in _contents(layer)["records"].items():
                    kind = contents["records"][int(number)]["group"].partition("/")[0]
                    parts[f"{kind}, refinement of the newest"] += _size(entry, [])
                parts["tables of refinement files"] += layer.stat().st_size - sum(
                    size for cause, size in parts.items() if cause.endswith("newest")
                )
            sizes.update(parts)
    linked = list_linked_refinement([Manifest.read(path) for path in run.iterdir()])
    if linked:
        sizes["refinement that newer ones are differences to"] = sum(file.size for file in linked)
    return dict(sorted(sizes.items()))


def _contents(path: Path) -> dict[str, Any]:
    reader = ContainerReader(path)
    reader.close()
    return reader.contents


def _cause(record: dict[str, Any], when: str) -> str:
    if record["type"] == "coded":
        return f"{record['group'].partition('/')[0]}, codes of {when}"
    if record["type"] == "bytes":
        return "objects"
    return "steps of the optimizer" if record["fqn"].endswith(".step") else f"{kind_of(record['fqn'])}, not quantized"


def _size(record: dict[str, Any], packs: list[Any]) -> int:
    """Return the bytes of a record's blocks; of a pack that it shares, its share."""
    places = [place for place in (*record.get("blocks", ()), record.get("protected")) if place is not None]
    shared = [packs[number] for number in record.get("packs", ())]
    own = sum(place[1] * record["size"] / raw for place, _, raw, *_ in shared)
    return sum(place[1] for place in places) + round(own)


def train(workload: str, saves: int, directory: Path) -> dict[str, Any]:
    """Return ratios and what bytes were spent on, by how moments of small tensors are stored."""
    from evaluation import create

    torch.set_num_threads(1)
    rows: dict[str, Any] = {}
    for how in ("bf16", "exact"):
        training, run = create(workload), directory / how
        config = {"quantize": {"small_moments": how}}
        with dsq_ckpt.Compressor(training.model, training.optimizer, config, training.evaluate) as compressor:
            for number in range(saves):
                training.train(number * training.checkpoint_every, (number + 1) * training.checkpoint_every)
                compressor.save(run / f"{number:03d}")
        reports = [dsq_ckpt.describe(path) for path in sorted(run.iterdir())]
        logical = sum(report["bytes_logical"] for report in reports)
        rows[how] = {
            "bytes_logical": logical, "ratio_kept": logical / on_device(run),
            "ratio_written": logical / sum(report["bytes_written"] for report in reports), "bytes": spent(run),
        }
    return {"workload": workload, "saves": saves, "small_moments": rows}


def grow(workload: str, saves: int, every: int, directory: Path) -> dict[str, Any]:
    """Return the sizes of a run after each of its checkpoints: plain, written and kept, in bytes, all summed up."""
    from evaluation import create
    from evaluation.report import document

    torch.set_num_threads(1)
    training = create(workload)
    settings = {"workload": workload, "seed": training.seed, "saves": saves, "every": every, "run": training.settings()}
    rows: list[dict[str, Any]] = []
    plain = written = 0
    with dsq_ckpt.Compressor(training.model, training.optimizer, evaluate=training.evaluate) as compressor:
        for step in range(every, saves * every + 1, every):
            training.train(step - every, step)
            compressor.save(directory / f"{step:06d}")
            description = dsq_ckpt.describe(directory / f"{step:06d}")
            plain, written = plain + description["bytes_logical"], written + description["bytes_written"]
            rows.append({"step": step, "plain": plain, "written": written, "kept": on_device(directory)})
            print(rows[-1], flush=True)
    return document("growth", settings, rows)


def _chain(longest: int) -> Callable[[int], int | None]:
    return lambda number: number - 1 if number % (longest + 1) else None


def _hubs(width: int, depth: int) -> Callable[[int], int | None]:
    """Code so many checkpoints against one, the last of which is the next such one."""
    def parent(number: int) -> int | None:
        place = number % (width * depth + 1)
        return number - (place - 1) % width - 1 if place else None

    return parent


def _ruler(period: int) -> Callable[[int], int | None]:
    def parent(number: int) -> int | None:
        place = number % period
        return number - (place & -place) if place else None

    return parent


RULES: dict[str, Callable[[int], int | None]] = {
    "each a keyframe": lambda number: None,
    **{f"chain of {n}": _chain(n) for n in (1, 2, 4, 8, 16, 32)},
    **{f"{n} against one, chain of {m}": _hubs(n, m) for n, m in ((2, 4), (4, 2), (4, 4), (8, 1), (8, 2), (8, 4))},
    "binary tree of 32": _ruler(32),
}
"""Number of a checkpoint to that of its parent; None for a keyframe."""


def layers(path: Path) -> float:
    """Return how many records of codes a load of a checkpoint decodes for each element that is quantized."""
    with Checkpoint(path) as checkpoint:
        coded = [
            (key.elements, ref) for key, ref in checkpoint.iter_chunks()
            if checkpoint.read_record(ref)["type"] == "coded"
        ]
        decoded = sum(n * len(checkpoint.follow_chain(ref, "parent", ("coded",))) for n, ref in coded)
        return decoded / sum(n for n, _ in coded)


def compare_rules(workload: str, saves: int, directory: Path) -> dict[str, Any]:
    """Return bytes and records decoded by the rule that chooses parents."""
    from evaluation import create

    torch.set_num_threads(1)
    training = create(workload)
    every = training.steps // saves
    histories = {name: dsq_ckpt.SaveHistory() for name in RULES}
    # The sums below are of refinement that is stored in full.
    config = {"delta": {"max_chain": 1000}, "refinement": {"max_differences": 0}, "storage": {"fsync": False}}
    for number in range(saves):
        training.train(number * every, (number + 1) * every)
        state = training.state()
        for name, rule in RULES.items():
            before = rule(number)
            dsq_ckpt.save(
                state, directory / name / f"{number:03d}", config=config, history=histories[name],
                parent=None if before is None else directory / name / f"{before:03d}",
            )
    return {"workload": workload, "saves": saves, "every": every, "run": training.settings(), "rules": {
        name: _of_rule(directory / name) for name in RULES
    }}


def _of_rule(run: Path) -> dict[str, Any]:
    paths = sorted(run.iterdir())
    reports, decoded = [dsq_ckpt.describe(path) for path in paths], [layers(path) for path in paths]
    logical = sum(report["bytes_logical"] for report in reports)
    written = sum(report["bytes_written"] for report in reports)
    kinds: Counter[str] = Counter()
    refined = []
    for path in paths:
        known = Manifest.read(path).kinds
        kinds.update({kind: sizes.base for kind, sizes in known.items()})
        refined.append(sum(sizes.refinement for sizes in known.values()))
    # As a run keeps it: here, checkpoints that share a named parent do not drop the refinement of each other.
    bytes_kept = written - sum(refined[: -RefinementConfig().keep_last])
    return {
        "ratio_kept": logical / bytes_kept, "bytes_kept": bytes_kept, "ratio_written": logical / written,
        "layers": statistics.mean(decoded), "layers_most": max(decoded), "bytes_base": dict(sorted(kinds.items())),
    }


DEPTHS = (0, 1, 2, 3, 4, 6, 8, 16, 32)


def load_times(layers: int, repeats: int, directory: Path) -> dict[str, Any]:
    """Return the time of a load, from the page cache, by the length of the chain, against `dcp.load`.

    Seconds are wall time, of which another user of the machine takes a part; the seconds of the processor beside them
    are this process's own.
    """
    times: dict[str, Any] = {}
    processor: dict[str, Any] = {}
    sizes: dict[str, Any] = {}
    config = {"storage": {"fsync": False}, "refinement": {"keep_last": 100}, "delta": {"max_chain": max(DEPTHS)}}
    for moments in (False, True):
        state = synthetic_state(layers * 10**6, moments)
        into = {name: torch.empty_like(tensor) for name, tensor in state.items()}
        what, plain = "weights and moments" if moments else "weights", directory / f"plain-{moments}"
        dcp.save(state, storage_writer=dcp.FileSystemWriter(plain), no_dist=True)
        names = (what, f"{what}, lanes alone")
        runs = {name: (directory / f"run of {name}", dsq_ckpt.SaveHistory()) for name in names}
        for number in range(max(DEPTHS) + 1):
            for name, (run, history) in runs.items():
                with patch.object(shard, "fit_fastest", fit_fastest if name == what else RansCoder.fit):
                    dsq_ckpt.save(state, run / f"{number:02d}", config=config, history=history)
            state = drift(state, number)
        loads: dict[tuple[str, int], list[tuple[float, float]]] = {(n, depth): [] for depth in DEPTHS for n in runs}
        peer = []
        for _ in range(repeats + 1):  # the first round warms caches and loads kernels
            peer.append(_seconds(dcp.load, into, storage_reader=dcp.FileSystemReader(plain), no_dist=True))
            for (name, depth), measured in loads.items():
                path = runs[name][0] / f"{depth:02d}"
                measured.append(_seconds(dsq_ckpt.load, into, path, history=dsq_ckpt.SaveHistory()))
        for name, (run, _) in runs.items():
            sizes[name] = on_device(run)
            for number, rows in enumerate((times, processor)):
                own = [seconds[number] for seconds in peer[1:]]
                rows[name] = {"dcp.load, s": statistics.median(own), **{
                    f"depth {depth}": statistics.median(
                        seconds[number] / other for seconds, other in zip(loads[name, depth][1:], own, strict=True)
                    )
                    for depth in DEPTHS
                }}
    return {"parameters": layers * 10**6, "repeats": repeats, "bytes of the chain": sizes, "load / dcp.load": times,
            "processor time of load / dcp.load": processor}


def _seconds(work: Callable[..., object], *arguments: Any, **options: Any) -> tuple[float, float]:
    """Return the wall time and the processor time of a call, without the garbage collector, as `timeit` does.

    A full collection walks all objects of the process, which takes longer than most of these loads.
    """
    gc.collect()
    gc.disable()
    started, own = time.perf_counter(), time.process_time()
    work(*arguments, **options)
    seconds = time.perf_counter() - started, time.process_time() - own
    gc.enable()
    return seconds


def main() -> None:
    """Measure, print and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=10, help="of a million weights each")
    parser.add_argument("--saves", type=int, default=33)
    parser.add_argument("--workload", help="of scripts/evaluate.py, to be trained and saved by a Compressor")
    parser.add_argument("--every", type=int, help="steps between checkpoints: measure the sizes after each")
    parser.add_argument("--parents", action="store_true", help="of a workload: compare rules that choose parents")
    parser.add_argument("--depths", action="store_true", help="measure the time of a load by the length of the chain")
    parser.add_argument("--repeats", type=int, default=5, help="of loads that are timed")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        if arguments.depths:
            result = load_times(arguments.layers, arguments.repeats, Path(directory))
        elif arguments.parents:
            result = compare_rules(arguments.workload, arguments.saves, Path(directory))
        elif arguments.workload is None:
            result = measure(arguments.layers, arguments.saves, Path(directory))
        elif arguments.every is not None:
            result = grow(arguments.workload, arguments.saves, arguments.every, Path(directory))
        else:
            result = train(arguments.workload, arguments.saves, Path(directory))
    result = {"command": shlex.join(["python", *sys.argv]), **result}
    print(json_files.dumps(result), end="")
    if arguments.json is not None:
        json_files.write(arguments.json, result)


if __name__ == "__main__":
    main()
