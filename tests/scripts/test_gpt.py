"""The demo's model and data: shapes, causality, and batches that do not depend on the number of ranks."""

from __future__ import annotations

import math
import os
import sysconfig
from pathlib import Path

import pytest
import torch
from gpt import GPT, SKIPPED_DIRECTORIES, VOCAB, GPTConfig, StdlibText, evaluate, loss_sum, stdlib_files

SMALL = GPTConfig(context=32, layers=2, width=24, heads=3)


@pytest.fixture(scope="module")
def text() -> StdlibText:
    return StdlibText(megabytes=1.0, context=SMALL.context, seed=7)


@pytest.mark.parametrize("world", [2, 3, 5])
@pytest.mark.parametrize("step", [0, 1, 999])
def test_ranks_share_one_global_batch(text: StdlibText, world: int, step: int) -> None:
    whole = text.batch(step, 0, 1, batch_size=16)
    shares = [text.batch(step, rank, world, batch_size=16) for rank in range(world)]
    for part in (0, 1):
        assert torch.equal(torch.cat([share[part] for share in shares]), whole[part])


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_share_the_validation_batches(text: StdlibText, world: int) -> None:
    whole = list(text.validation_batches(3, 0, 1, batch_size=6))
    shares = [list(text.validation_batches(3, rank, world, batch_size=6)) for rank in range(world)]
    for index, (inputs, targets) in enumerate(whole):
        assert torch.equal(torch.cat([share[index][0] for share in shares]), inputs)
        assert torch.equal(torch.cat([share[index][1] for share in shares]), targets)


def test_batches_are_a_function_of_seed_and_step(text: StdlibText) -> None:
    again = StdlibText(megabytes=1.0, context=SMALL.context, seed=7)
    other = StdlibText(megabytes=1.0, context=SMALL.context, seed=8)
    inputs, targets = text.batch(5, 0, 1, batch_size=4)
    assert inputs.shape == targets.shape == (4, SMALL.context)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(inputs, again.batch(5, 0, 1, batch_size=4)[0])
    assert not torch.equal(inputs, text.batch(6, 0, 1, batch_size=4)[0])
    assert not torch.equal(inputs, other.batch(5, 0, 1, batch_size=4)[0])


def test_splits_hold_whole_files_within_the_size() -> None:
    text = StdlibText(megabytes=0.5)
    assert len(text.train) + len(text.validation) == 500_000
    files = stdlib_files()
    assert text.train[: files[0].stat().st_size].tobytes() == files[0].read_bytes()
    assert text.validation[: files[15].stat().st_size].tobytes() == files[15].read_bytes()
    assert not any({"test", "tests", "site-packages"} & set(file.parts[-3:-1]) for file in files)


def test_directories_that_are_skipped_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finding the files would take half a second where many packages are installed."""
    root, scandir, read = Path(sysconfig.get_paths()["stdlib"]), os.scandir, []
    relative = sorted(path.relative_to(root) for path in root.rglob("*.py"))
    monkeypatch.setattr(os, "scandir", lambda path: read.append(Path(path)) or scandir(path))
    assert stdlib_files() == [root / path for path in relative if SKIPPED_DIRECTORIES.isdisjoint(path.parts)]
    assert root in read
    assert not [path for path in read if SKIPPED_DIRECTORIES & {*path.relative_to(root).parts}]


def test_errors_name_the_numbers(text: StdlibText) -> None:
    with pytest.raises(ValueError, match="2 rows cannot be shared by 3 ranks"):
        text.batch(0, 0, 3, batch_size=2)
    with pytest.raises(ValueError, match="training text has 100 bytes"):
        StdlibText(megabytes=1e-4)
    with pytest.raises(ValueError, match="not a multiple of heads"):
        GPTConfig(width=10, heads=3)


def test_model_has_the_size_it_claims() -> None:
    parameters = sum(parameter.numel() for parameter in GPT().parameters())
    assert 2.7e6 < parameters < 3.0e6
    assert not [name for name, _ in GPT(SMALL).named_parameters() if name.endswith("bias")]


def test_model_is_causal() -> None:
    torch.manual_seed(0)
    model = GPT(SMALL)
    tokens = torch.randint(VOCAB, (2, SMALL.context))
    changed = tokens.clone()
    changed[:, 20] = (changed[:, 20] + 1) % VOCAB
    before, after = model(tokens), model(changed)
    assert before.shape == (2, SMALL.context, VOCAB)
    torch.testing.assert_close(before[:, :20], after[:, :20])
    assert not torch.allclose(before[:, 20:], after[:, 20:])


def test_training_lowers_the_loss_and_evaluate_is_its_mean(text: StdlibText) -> None:
    torch.manual_seed(0)
    model = GPT(SMALL)
    batches = list(text.validation_batches(2, 0, 1, batch_size=4))
    first = evaluate(model, batches)
    assert first == pytest.approx(math.log(VOCAB), rel=0.05)
    total = sum(loss_sum(model, *batch).item() for batch in batches)
    assert first == pytest.approx(total / (2 * 4 * SMALL.context))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(30):
        inputs, targets = text.batch(step, 0, 1, batch_size=8)
        optimizer.zero_grad()
        (loss_sum(model, inputs, targets) / targets.numel()).backward()
        optimizer.step()
    assert evaluate(model, batches) < first - 1.0
