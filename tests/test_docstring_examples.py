"""Examples in docstrings of public functions and classes give the results that they show.

That of `dsq_ckpt.deepspeed.initialize` is run in `deepspeed/test_engine.py`, and that of Lightning's `DSQCheckpointIO`
in `integrations/lightning/test_checkpoint_io.py`.
"""

import doctest

import pytest
import torch

import dsq_ckpt

EXAMPLES = {
    "save": dsq_ckpt.save, "async_save": dsq_ckpt.async_save, "load": dsq_ckpt.load, "latest": dsq_ckpt.latest,
    "compress": dsq_ckpt.compress, "merge": dsq_ckpt.merge, "describe": dsq_ckpt.describe,
    "DSQConfig": dsq_ckpt.DSQConfig, "SaveHistory": dsq_ckpt.SaveHistory, "Compressor": dsq_ckpt.Compressor,
    "DSQStorageWriter": dsq_ckpt.DSQStorageWriter, "DSQStorageReader": dsq_ckpt.DSQStorageReader,
    "report.scalars.tensorboard": dsq_ckpt.report.scalars.tensorboard,
    "lowdiff.GradientLog": dsq_ckpt.lowdiff.GradientLog, "lowdiff.recover": dsq_ckpt.lowdiff.recover,
}


@pytest.mark.usefixtures("forked_logs")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", EXAMPLES)
def test_it_gives_what_it_shows(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    (test,) = doctest.DocTestFinder(recurse=False).find(
        EXAMPLES[name], name, module=False, globs={"torch": torch, "dsq_ckpt": dsq_ckpt}
    )
    assert test.examples, "the docstring has no example"
    report: list[str] = []
    doctest.DocTestRunner(verbose=False).run(test, out=report.append)
    assert "".join(report) == ""
