"""`dsq verify` of a run in which training goes on: what is removed or replaced meanwhile is not damaged."""

from __future__ import annotations

import os
import shutil
import threading

import pytest

import dsq_ckpt
from dsq_ckpt.cli import verify_command
from dsq_ckpt.lowdiff import segments
from dsq_ckpt.storage import concurrent_changes
from dsq_ckpt.storage.backend import get_storage
from dsq_ckpt.storage.manifest import MANIFEST, Manifest
from tests.helpers.commands import dsq_error, dsq_json, dsq_stdout, find_file, flip_bit, run_dsq
from tests.helpers.remote_runs import chain, state_of
from tests.helpers.small_run import NAMES


@pytest.fixture
def before(monkeypatch):
    """Let something happen once, before a step of a verification."""
    def arrange(step, happens, when=lambda *arguments: True):
        real, done = getattr(verify_command, step), []

        def changed(*arguments):
            if not done and when(*arguments):
                done.append(True)
                happens()
            return real(*arguments)

        monkeypatch.setattr(verify_command, step, changed)
        return done

    return arrange


def _results(report):
    return {
        os.path.basename(entry["path"]): (entry["ok"], entry["meanwhile"], len(entry["problems"]))
        for entry in report["checkpoints"]
    }


@pytest.mark.parametrize("step", ["_read_manifest", "_check_file", "_decode"])
def test_a_checkpoint_that_is_removed_meanwhile_is_no_damage(run, before, step):
    done = before(step, lambda: shutil.rmtree(run / NAMES[0]))
    report = dsq_json("verify", run)
    assert done and report["ok"]
    expected = (True, None, 0)
    # Decoding of a later one covers it where its files were read before it went.
    first = expected if step == "_decode" else (True, "removed", 0)
    assert _results(report) == {NAMES[0]: first, NAMES[1]: expected, NAMES[2]: expected}
    if first[1]:
        assert report["checkpoints"][0]["tensors_decoded"] is report["checkpoints"][0]["decoded_by"] is None


def test_a_removal_is_reported(run, before):
    before("_check_file", lambda: shutil.rmtree(run / NAMES[0]))
    text = dsq_stdout("verify", run)
    assert "removed meanwhile" in next(line for line in text.splitlines() if NAMES[0] in line)
    assert text.count(" ok ") == 2


def test_a_checkpoint_that_is_replaced_meanwhile_is_no_damage(run, before):
    def replace():
        dsq_ckpt.save(state_of(1), run / NAMES[0], overwrite=True, parent=None)

    before("_check_file", replace)
    report = dsq_json("verify", run)
    assert _results(report) == {NAMES[0]: (True, "replaced", 0), NAMES[1]: (True, None, 0), NAMES[2]: (True, None, 0)}


def test_checkpoints_beside_a_removed_one_are_decoded(run, before):
    def changed():
        flip_bit(find_file(run / NAMES[1]))  # after its checksum was read, so that only decoding it tells
        shutil.rmtree(run / NAMES[2])

    before("_decode", changed)
    report = dsq_json("verify", run, code=1)
    results = _results(report)
    assert results[NAMES[2]] == (True, "removed", 0)
    assert not results[NAMES[1]][0] and report["checkpoints"][1]["tensors_decoded"] is not None
    assert report["checkpoints"][0]["decoded_by"] == NAMES[1]


def test_a_removal_that_is_half_done_at_the_end(run, before, monkeypatch):
    """Files of a directory go in any order, the manifest last if it comes to that."""
    monkeypatch.setattr(concurrent_changes, "REMOVAL_TIMEOUT", 600)
    monkeypatch.setattr(verify_command, "REMOVAL_TIMEOUT", 600)
    path, looked = run / NAMES[0], threading.Event()
    real = concurrent_changes.find_missing_files

    def seen(*arguments, **options):
        looked.set()
        return real(*arguments, **options)

    monkeypatch.setattr(concurrent_changes, "find_missing_files", seen)

    def half():
        for file in path.iterdir():
            if file.name != MANIFEST:
                file.unlink()

    def rest():
        looked.wait()
        shutil.rmtree(path)

    thread = threading.Thread(target=rest)
    thread.start()
    before("_check_file", half)
    try:
        assert _results(dsq_json("verify", run))[NAMES[0]] == (True, "removed", 0)
    finally:
        looked.set()
        thread.join()


def test_a_refinement_that_is_dropped_while_it_is_decoded(run, before):
    path = run / NAMES[2]

    def drop():
        manifest = Manifest.read(path)
        file = find_file(path, "refinement")
        files = [file for file in manifest.files if file.role != "refinement"]
        changed = manifest.model_copy(update={"refinement": "dropped", "files": files})
        changed.write(path, exclusive=False, fsync=False)
        file.unlink()

    done = before("_decode_checkpoint", drop, lambda report, *_: report.name == NAMES[2])
    report = dsq_json("verify", run)
    assert done and report["checkpoints"][2]["tensors_decoded"] > 30


def test_damage_of_what_is_still_there_is_damage(run, before):
    flip_bit(find_file(run / NAMES[1]))
    find_file(run / NAMES[2], "refinement").unlink()
    before("_check_file", lambda: shutil.rmtree(run / NAMES[0]))
    results = _results(dsq_json("verify", run, code=1))
    assert results[NAMES[0]] == (True, "removed", 0)
    assert not results[NAMES[1]][0] and not results[NAMES[2]][0]


def test_a_manifest_that_is_a_link_to_nowhere_is_damage(run):
    (run / NAMES[0] / MANIFEST).unlink()
    (run / NAMES[0] / MANIFEST).symlink_to("nowhere")
    assert "1 of 3 checkpoint(s) damaged" in run_dsq("verify", run).stderr


@pytest.mark.parametrize("option", ["--deep", "--no-deep"])
def test_files_that_another_one_needs_of_it_are_missed(store, before, option):
    paths = chain(f"{store}/run", 3)
    storage = get_storage(paths[0])

    def remove():
        for entry in storage.list_entries(paths[0]):
            storage.remove(paths[0] / entry.name)

    # Where nothing is decoded, all files were read before they went.
    before("_check_files" if option == "--deep" else "_recheck_checkpoints", remove)
    report = dsq_json("verify", f"{store}/run", option, code=1)
    results = [(entry["ok"], entry["meanwhile"]) for entry in report["checkpoints"]]
    assert results[1:] == [(False, None)] * 2
    assert results[0] == ((True, "removed") if option == "--deep" else (True, None))


def test_a_run_without_checkpoints_left_is_reported(run, before):
    before("_check_file", lambda: shutil.rmtree(run))
    assert "all that was there was removed while it was being read" in dsq_error("verify", run)


def test_one_checkpoint_is_removed(run, before):
    before("_check_file", lambda: shutil.rmtree(run / NAMES[2]))
    message = dsq_error("verify", run / NAMES[2])
    assert "was removed while it was being read" in message and "damaged" not in message


def test_a_segment_of_a_gradient_log_is_removed_meanwhile(run, monkeypatch):
    paths = [run / segments.LOG / f"{'0' * 16}-00000000{step}-00000000{step}-00000.grads" for step in (1, 2)]
    paths[0].parent.mkdir()
    for path in paths:
        path.write_bytes(b"no segment")
    assert len(segments.list_segments(run)) == 2
    real = segments.LogSegment

    def opened(path):
        paths[0].unlink(missing_ok=True)
        return real(path)

    monkeypatch.setattr(segments, "LogSegment", opened)
    assert [entry["name"] for entry in dsq_json("verify", run, code=1)["gradient_log"]] == [f"log/{paths[1].name}"]
