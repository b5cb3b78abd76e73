"""`dsq report`: one page that shows what the manifests tell, whatever is in them, and needs nothing else."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import uuid
from html.parser import HTMLParser

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dsq_ckpt
from dsq_ckpt.report import charts
from dsq_ckpt.report.history import History
from dsq_ckpt.report.page import render
from dsq_ckpt.storage.manifest import Manifest, ManifestFile
from tests.helpers.commands import dsq_error, dsq_json, dsq_stdout, find_file
from tests.helpers.small_run import NAMES

EVIL = '"><img src=x onerror=alert(1)><script>alert(1)'
VOID = {"meta", "br", "img", "input", "link", "hr"}


class Page(HTMLParser):
    """A parsed page, whose tags were all closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.attributes: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()
        assert self.open == []
        assert "".join(self.texts.get("title", [])) != ""

    def handle_starttag(self, tag, attrs):
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), (tag, attrs)
        self.attributes.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.attributes.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, (tag, self.open)
        self.open.pop()

    def handle_data(self, data):
        for tag in set(self.open):
            self.texts.setdefault(tag, []).append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.texts["body"]).split())

    @property
    def data(self) -> dict:
        return json.loads(self.texts["script"][0])

    def series(self, chart: str) -> dict[str, list]:
        return {line["name"]: line["values"] for line in self.data["charts"][chart]["series"]}


def parsed(run) -> Page:
    page = Page(render(History.read(run)))
    loads = {"src", "href", "action", "srcset", "poster", "data", "background", "formaction"}
    assert not [element for element in page.attributes if loads & element[1].keys()]
    assert not [name for _, attributes in page.attributes for name in attributes if name.startswith("on")]
    assert not re.search(r"url\(|@import|https?:", "".join(page.texts["style"] + page.texts["script"][1:]))
    tags = [tag for tag, _ in page.attributes]
    assert tags.count("script") == 2 and not {"img", "link", "iframe", "object", "base", "form"} & set(tags)
    return page


def changed(path, **update):
    Manifest.read(path).model_copy(update=update).write(path, exclusive=False, fsync=False)


def test_figures_are_those_of_the_log(trained, tmp_path):
    run, _ = trained
    target = tmp_path / "new" / "page.html"
    assert "3 checkpoint(s)" in dsq_stdout("report", run, "-o", target)
    page, report = Page(target.read_text()), dsq_json("log", run)
    everything = [entry["classes"]["everything"] for entry in report["checkpoints"]]
    assert page.data["names"] == list(NAMES)
    size = page.series("size")
    for name, key in (("plain", "logical"), ("written", "written"), ("kept", "kept")):
        assert size[name] == [part[f"bytes_{key}"] for part in everything]
    growth, total = page.series("growth"), report["total"]["everything"]
    assert [growth[name][-1] for name in ("plain", "written", "on disk")] == [
        total[f"bytes_{key}"] for key in ("logical", "written", "kept")
    ]
    parts = page.series("parts")
    assert [sum(values[place] for values in parts.values()) for place in range(3)] == size["written"]
    assert [parts["refinement, kept"][place] > 0 for place in range(3)] == [False, False, True]
    assert page.series("chain") == {"keyframe": [1, None, None], "delta": [None, 2, 3]}
    assert page.series("time")["saving"] == pytest.approx([e["seconds"] for e in report["checkpoints"]], rel=1e-4)
    manifests = [Manifest.read(run / name) for name in NAMES]
    for kind in ("weights", "exp_avg", "exp_avg_sq"):
        for key, field in (("bits", "bits_per_element"), ("error", "relative_error")):
            for layer, values in page.series(f"{key} {kind}").items():
                group = kind if layer == "all" else f"{kind}/{layer}"
                assert values == pytest.approx([max(getattr(m.groups[group], field), 0) for m in manifests], rel=1e-4)
    for ratio in (total["ratio_kept"], total["ratio_written"]):
        assert f"{ratio:.3g}"[:3] in page.text


def test_the_page_needs_nothing_else(trained):
    page = parsed(trained[0])
    metas = [attributes for tag, attributes in page.attributes if tag == "meta"]
    assert any(meta.get("name") == "viewport" and "width=device-width" in meta["content"] for meta in metas)
    policy = next(meta["content"] for meta in metas if meta.get("http-equiv") == "Content-Security-Policy")
    script = "".join(page.texts["script"][1:])
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert "default-src 'none'" in policy and f"script-src 'sha256-{digest}'" in policy


def test_no_name_becomes_markup(run):
    (run / NAMES[1]).rename(run / EVIL)
    (run / "odd\u202ename").mkdir()
    (run / "odd\u202ename" / "0123456789abcdef-00000.dsq").write_bytes(b"")
    manifest = Manifest.read(run / NAMES[2])
    name, group = next(iter(manifest.groups.items()))
    groups = {**manifest.groups, name: group.model_copy(update={"worst_tensor": EVIL, "worst_error": 0.5}), EVIL: group}
    changed(run / NAMES[2], nonfinite=[EVIL], groups=groups, lossy_resumes=1)
    page = parsed(run)
    assert page.data["names"] == [NAMES[0], EVIL, NAMES[2]]
    assert page.text.count(EVIL) >= 6 and "\u202e" not in page.text and "odd\\u202ename" in page.text
    assert EVIL in page.data["notes"]["2"]


def test_a_single_checkpoint(run):
    for name in NAMES[:2]:
        shutil.rmtree(run / name)
    page = parsed(run)
    assert page.data["names"] == [NAMES[2]] and "1 checkpoint " not in page.text
    assert f"not there {NAMES[1]} removed or moved; {NAMES[2]} was saved after it" in page.text


def test_damage_is_named(run):
    (run / NAMES[0] / "manifest.json").write_text("{}")
    find_file(run / NAMES[2], "refinement").unlink()
    base = find_file(run / NAMES[1])
    base.write_bytes(base.read_bytes()[:-1])
    (run / "aborted").mkdir()
    (run / "aborted" / "0123456789abcdef-00000.dsq").write_bytes(b"x")
    page = parsed(run)
    assert f"damaged {NAMES[0]} " in page.text and f"damaged {NAMES[1]} {base.name} has " in page.text
    assert re.search(rf"damaged {NAMES[2]} .*lacks \w+-00000\.refinement", page.text)
    assert "incomplete aborted no manifest" in page.text and "not there" not in page.text
    log = dsq_json("log", run)
    assert [entry["name"] for entry in log["checkpoints"] if entry["problems"]] == list(NAMES[1:])
    assert f"damaged: {NAMES[1]}: {base.name} has " in dsq_stdout("log", run)


def test_restores_and_searches(run):
    record = {"metric": 2.0, "degradation": 0.03, "restore_loses": 0.001, "restore_may_lose": 0.01, "seconds": 1e9,
              "satisfied": True, "evaluations": 4}
    for place, name in enumerate(NAMES):
        changed(run / name, quality={**record, "degradation": 0.01 * place}, lossy_resumes=max(place - 1, 0))
    changed(run / NAMES[1], quality={"chosen": None, "satisfied": False, "reason": "`evaluate` <raised>"})
    page = parsed(run)
    assert page.data["notes"] == {"2": f"restored from {NAMES[1]}"}
    assert page.series("base") == {"by evaluate": [0, None, 0.02], "bound": [0.05] * 3}
    assert page.series("restore") == {"restore": [0.1, None, 0.1], "bound": [1, None, 1]}
    assert page.series("metric") == {"by evaluate": [2, None, 2]}
    assert f"bound missed {NAMES[1]} `evaluate` <raised>" in page.text
    assert max(page.series("time")["saving"]) < 1e6


def test_figures_of_any_size(run):
    """Figures as good as infinite are left out of charts, and tiny ones are zero; impossible seconds are damage."""
    record = {"restore_loses": 1e299, "restore_may_lose": 5e-324, "degradation": 5e-324, "seconds": 1e299}
    for name, most in zip(NAMES, (10**400, -(10**400), 0.5), strict=True):
        manifest = Manifest.read(run / name)
        config = {**manifest.config, "search": {**manifest.config["search"], "epsilon": most}}
        changed(run / name, quality=record, config=config, seconds=1e11)
    page = parsed(run)
    assert page.series("base") == {"by evaluate": [0, 0, 0], "bound": [None, None, 0.5]}
    for name in NAMES[:2]:
        changed(run / name, seconds=1e300)
    page = parsed(run)
    assert page.data["names"] == [NAMES[2]] and f"damaged {NAMES[0]} " in page.text


def test_a_thousand_checkpoints(trained, tmp_path):
    manifests = [Manifest.read(trained[0] / name) for name in NAMES]
    previous = None
    for number in range(1000):
        save_id, path = f"{number:016x}", tmp_path / f"step-{number:06d}"
        path.mkdir()
        (path / f"{save_id}.index.dsq").touch()
        index = ManifestFile(name=f"{save_id}.index.dsq", size=0, checksum="0" * 16, role="index")
        manifests[number % 3].model_copy(update={
            "save_id": save_id, "files": [index], "previous": previous, "created": 1e9 + number,
        }).write(path, exclusive=False, fsync=False)
        previous = save_id
    text = render(History.read(tmp_path))
    page = Page(text)
    assert len(page.data["names"]) == 1000 and page.data["names"] == sorted(page.data["names"])
    assert len(text) < 1.2e6 and "damaged" not in page.text


def test_a_page_of_an_object_store(tmp_path):
    url = f"memory://{uuid.uuid4().hex}"
    for number in range(2):
        dsq_ckpt.save({"weight": torch.randn(80, 80)}, f"{url}/step-{number}")
    dsq_stdout("report", url, "--output", tmp_path / "page.html")
    page, total = Page((tmp_path / "page.html").read_text()), dsq_json("log", url)["total"]["everything"]
    assert page.series("growth")["on disk"][-1] == total["bytes_kept"] > 0
    assert "damaged" not in page.text


def test_a_directory_that_it_makes_is_reported(trained, tmp_path):
    run, _ = trained
    target = tmp_path / "new" / "page.html"
    assert "in a new directory" in dsq_stdout("report", run, "-o", target)
    assert "directory" not in dsq_stdout("report", run, "-o", target).replace(str(target), "")


def test_files_that_are_there_are_not_replaced(trained, tmp_path):
    run, _ = trained
    target = tmp_path / "page.html"
    for _ in range(2):
        assert dsq_json("report", run, "-o", target)["bytes"] == target.stat().st_size
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"]
    (tmp_path / "notes.html").write_text("<!doctype html>\nmine")
    assert "is no page of dsq report" in dsq_error("report", run, "-o", tmp_path / "notes.html")
    assert (tmp_path / "notes.html").read_text().endswith("mine")
    assert "is a directory" in dsq_error("report", run, "-o", tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert "is no ordinary file" in dsq_error("report", run, "-o", tmp_path / "pipe")
    assert "is a URL" in dsq_error("report", run, "-o", "s3://bucket/page.html")
    assert "holds no complete checkpoint" in dsq_error("report", tmp_path, "-o", tmp_path / "other.html")
    assert not (tmp_path / "other.html").exists()


def test_a_browser_runs_it(run, tmp_path):
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no chromium")
    (run / NAMES[1]).rename(run / EVIL)
    target = tmp_path / "page.html"
    dsq_stdout("report", run, "-o", target)
    done = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
         "--dump-dom", target.as_uri()], capture_output=True, text=True, timeout=600,
    )
    assert 'data-ready="3"' in done.stdout, done.stderr[-2000:]


@given(st.lists(st.floats(0, 1e15), min_size=1, max_size=80))
def test_sizes_on_an_axis_have_one_unit(values):
    chart = charts.Chart("key", "title", "note", "bytes", [charts.Series("one", values, "a", "line")], False)
    assert len({tick.label.split()[-1] for tick in chart.ticks}) == 1


@given(st.lists(st.none() | st.floats(-1e280, 1e280), min_size=1, max_size=80), st.booleans(),
       st.sampled_from(["bytes", "seconds", "share", "bits", "count", "metric"]),
       st.sampled_from(["line", "dashed", "dots", "bar"]))
def test_charts_stay_in_their_box(values, log, unit, style):
    log = log and style != "bar"
    chart = charts.Chart("key", "title", "note", unit, [charts.Series("one", values, "a", style)], log)
    assert all(-0.001 <= tick.at <= 1.001 for tick in chart.ticks) and len(chart.ticks) <= 12
    assert "nan" not in "".join(mark.path for mark in chart.marks)
    for mark in chart.marks:
        for x, y in re.findall(r"[ML](\S+) (-?[\d.]+)", mark.path):
            assert 0 <= float(x) <= charts.WIDTH and -7 <= float(y) <= charts.HEIGHT + 7
    assert len(chart.legend) == 1
