"""Trainer and Accelerate in one process: argv = a directory, which `rank_counts` of `ranks.py` goes on from."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
import warnings
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.trainer_utils import get_last_checkpoint
from typer.testing import CliRunner

from dsq_ckpt.cli import app
from dsq_ckpt.errors import CheckpointNotFound, ConfigError, CorruptCheckpoint, LoadFailed, SaveFailed
from dsq_ckpt.integrations import huggingface
from dsq_ckpt.storage.manifest import Manifest
from tests.integrations.huggingface.workers.background import (
    best_in_background,
    deltas_in_background,
    failed_in_background,
    in_background,
    killed_in_background,
    moved_in_background,
    only_model_in_background,
    refused_in_background,
    stopped_in_background,
)
from tests.integrations.huggingface.workers.callbacks import (
    callback_states,
    full_disk_in_last_write,
    killed_in_last_write,
    linked_checkpoint,
    writing_in_subclass,
)
from tests.integrations.huggingface.workers.common import (
    WORDS,
    everything,
    gpt2,
    names,
    run,
    same,
    sound,
    trainer,
    until,
)


def exact_resume(output: Path) -> None:
    """A resumed run ends bit-identical, by True and by a path; Trainer's files are there, its weights are not."""
    first = trainer(output, 6, gradient_accumulation_steps=2)
    first.train()
    assert names(output) == ["checkpoint-4", "checkpoint-6"]
    files = {name for name in names(output / "checkpoint-4") if not name.endswith((".dsq", ".index"))}
    assert files == {
        "config.json", "generation_config.json", "manifest.json", "rng_state.pth", "scheduler.pt", "trainer_state.json",
        "training_args.bin",
    }
    copy = until(output, output.with_name("copy"), 4)
    for resume in (True, str(copy / "checkpoint-4")):
        again = trainer(copy, 6, gradient_accumulation_steps=2)
        again.train(resume_from_checkpoint=resume)
        same(everything(first), everything(again))
    assert names(copy) == ["checkpoint-4", "checkpoint-6"], "the second run replaced checkpoint-6, and left nothing"


def deltas(output: Path) -> None:
    """Checkpoints are deltas, also after a restart, and stay whole when Trainer removes older ones."""
    hf_trainer, told = trainer(output, 4, config=None, save_steps=1), []
    huggingface.attach(hf_trainer, on_save=told.append).train()
    assert [result.path for result in told] == [output / f"checkpoint-{number}" for number in range(1, 5)]
    before = {name: sound(output / name) for name in names(output)}
    assert [manifest.depth for manifest in before.values()] == [2, 3]
    assert {"weights", "exp_avg", "exp_avg_sq"} <= before["checkpoint-4"].kinds.keys()
    assert any(group.startswith("exp_avg/") for group in before["checkpoint-4"].groups)
    trainer(output, 6, config=None, save_steps=1).train(resume_from_checkpoint=True)
    assert [sound(output / name).depth for name in names(output)] == [4, 5]
    assert [sound(output / name).lossy_resumes for name in names(output)] == [1, 1]


def rotation(output: Path) -> None:
    """Trainer keeps the newest checkpoints, though dropping a refinement changes an older directory."""
    for keep, left in ((1, ["checkpoint-3"]), (2, ["checkpoint-2", "checkpoint-3"])):
        run_directory, config = output / str(keep), {"refinement": {"keep_last": keep}}
        trainer(run_directory, 2, config=config, save_steps=1, save_total_limit=3).train()
        for number in (1, 2):
            os.utime(run_directory / f"checkpoint-{number}", (time.time() - 100 + number,) * 2)
        again = trainer(run_directory, 3, config=config, save_steps=1, save_total_limit=keep)
        again.train(resume_from_checkpoint=True)
        assert names(run_directory) == left
        assert sound(run_directory / "checkpoint-3").depth == 2


def best_model(output: Path) -> None:
    """The best checkpoint keeps its refinement however old it is, and is loaded at the end."""
    metrics = iter([1.0, 3.0, 2.0, 2.0])
    caught = {}
    hf_trainer = trainer(
        output, 4, config={"refinement": {"keep_last": 1}}, save_steps=1, eval_steps=1, eval_strategy="steps",
        metric_for_best_model="luck", greater_is_better=True, load_best_model_at_end=True,
        more={"compute_metrics": lambda _: {"luck": next(metrics)}},
    )
    evaluate = hf_trainer.evaluate

    def evaluating(*given, **named):
        caught[hf_trainer.state.global_step] = {
            name: value.clone() for name, value in hf_trainer.model.state_dict().items()
        }
        return evaluate(*given, **named)

    hf_trainer.evaluate = evaluating
    hf_trainer.train()
    assert names(output) == ["checkpoint-2", "checkpoint-4"]
    assert Path(hf_trainer.state.best_model_checkpoint).name == "checkpoint-2"
    manifest = sound(output / "checkpoint-2")
    assert (manifest.pinned, manifest.refinement) == (True, "kept")
    off = {}
    for name, value in hf_trainer.model.state_dict().items():
        assert not torch.equal(value, caught[4][name]) or value.numel() < 2, name
        off[name] = float((value - caught[2][name]).norm() / caught[2][name].norm().clamp(min=1e-9))
    assert max(off.values()) < 0.02, off


def best_strategy(output: Path) -> None:
    """With save_strategy="best" there are checkpoints of improvements only."""
    metrics = iter([1.0, 3.0, 2.0, 4.0])
    hf_trainer = trainer(
        output, 4, save_strategy="best", eval_steps=1, eval_strategy="steps", metric_for_best_model="luck",
        greater_is_better=True, more={"compute_metrics": lambda _: {"luck": next(metrics)}}, save_total_limit=5,
    )
    hf_trainer.train()
    assert names(output) == ["checkpoint-1", "checkpoint-2", "checkpoint-4"]
    assert Path(hf_trainer.state.best_model_checkpoint).name == "checkpoint-4"


def only_model(output: Path) -> None:
    """A checkpoint of the model alone is not resumed from with a fresh optimizer."""
    trainer(output, 2, save_only_model=True).train()
    assert not {"scheduler.pt", "rng_state.pth"} & set(names(output / "checkpoint-2"))
    assert "exp_avg" not in sound(output / "checkpoint-2").kinds
    with pytest.raises(LoadFailed, match=r"has no 'optimizer'.*save_only_model"):
        trainer(output, 4).train(resume_from_checkpoint=True)


def switched(output: Path) -> None:
    """A plain run goes on compressed, bit-identical; a compressed one does not go on plain without a word."""
    first = trainer(output, 4, attached=False)
    first.train()
    copy = until(output, output.with_name("compressed"), 2)
    again = trainer(copy, 4)
    again.train(resume_from_checkpoint=True)
    same(everything(first), everything(again))
    assert (copy / "checkpoint-2" / "optimizer.pt").exists() and sound(copy / "checkpoint-4").depth == 0
    with pytest.raises(ValueError, match="Can't find a valid checkpoint"):
        trainer(copy, 6, attached=False).train(resume_from_checkpoint=True)
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        AutoModelForCausalLM.from_pretrained(copy / "checkpoint-4")


class Settings:
    """A processing class whose files cannot be written, or whose process is killed then."""

    def __init__(self, killed: bool) -> None:
        self.killed = killed

    def save_pretrained(self, directory: str) -> None:
        if not Path(directory).parent.name.startswith(".checkpoint-4."):
            return
        if self.killed:
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError("no space left")


def killed(output: Path) -> None:
    """A save that is killed leaves nothing that a restart would take for a checkpoint."""
    if (child := os.fork()) == 0:
        trainer(output, 4, more={"processing_class": Settings(True)}).train()
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert get_last_checkpoint(output) == str(output / "checkpoint-2")
    left = [name for name in names(output) if name.startswith(".checkpoint-4.")]
    (checkpoint,) = [name for name in left if (output / name / "manifest.json").exists()]  # beside Trainer's own files
    assert len(left) == 2 and Manifest.read(output / checkpoint)
    trainer(output, 4).train(resume_from_checkpoint=True)
    assert names(output) == ["checkpoint-2", "checkpoint-4"]


def failed(output: Path) -> None:
    """A save that fails names the cause, leaves nothing, and does not keep later ones from being made."""
    hf_trainer = trainer(output, 4, more={"processing_class": Settings(False)})
    with pytest.raises(SaveFailed, match="no space left"):
        hf_trainer.train()
    assert names(output) == ["checkpoint-2"]
    hf_trainer.processing_class = None
    again = trainer(output, 4, new=False)
    again.train(resume_from_checkpoint=True)
    assert names(output) == ["checkpoint-2", "checkpoint-4"]


def damaged(output: Path) -> None:
    """A file that is altered or missing is an error that names it; so are other tensors than the model's."""
    trainer(output, 2).train()

    def resumed(error: type[Exception], text: str, **changed) -> None:
        with pytest.raises(error, match=text):
            trainer(output, 4, **changed).train(resume_from_checkpoint=True)
        shutil.rmtree(output)
        shutil.copytree(output.with_name("whole"), output)

    shutil.copytree(output, output.with_name("whole"))
    directory = output / "checkpoint-2"
    resumed(LoadFailed, r"of shape .*`dsq export .* --part model`", model=gpt2(vocab_size=101))
    resumed(LoadFailed, r"has no 'model\.transformer\.h\.1", model=gpt2(n_layer=2))
    resumed(LoadFailed, "in parameter group 0 of the optimizer when this was saved", weight_decay=0.1,
            model=frozen(gpt2()))
    data = next(directory.glob("*.dsq"))
    altered = bytearray(data.read_bytes())
    altered[len(altered) // 2] ^= 1
    data.write_bytes(altered)
    resumed(CorruptCheckpoint, data.name)
    (directory / "scheduler.pt").unlink()
    resumed(LoadFailed, r"scheduler\.pt' is missing")
    (directory / "manifest.json").unlink()
    resumed(CheckpointNotFound, r"no manifest\.json")
    (directory / "rng_state.pth").unlink()
    with pytest.warns(UserWarning, match=r"has no rng_state\.pth"):
        trainer(output, 4).train(resume_from_checkpoint=True)


def frozen(model: nn.Module) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("wte" not in name and "wpe" not in name)
    return model


def other_dtype(output: Path) -> None:
    """A run goes on in another dtype, as without `attach`, with one warning."""
    trainer(output, 2).train()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        again = trainer(output, 4, model=gpt2().bfloat16())
        again.train(resume_from_checkpoint=True)
    assert len([warning for warning in caught if "of another dtype" in str(warning.message)]) == 1
    assert {value.dtype for value in again.model.parameters()} == {torch.bfloat16}
    assert sound(output / "checkpoint-4").save_id != sound(output / "checkpoint-2").save_id


class Plain(nn.Module):
    """A model that is none of transformers, with a layer that is never used and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.layer, self.unused = nn.Embedding(WORDS, 48), nn.Linear(48, WORDS), nn.Linear(64, 64)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.seen += 1
        logits = self.layer(self.embedding(input_ids))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def models(output: Path) -> None:
    """Models of 16 bits, with frozen parameters, without ties, of other classes; optimizers of other kinds."""
    cases = {
        "bf16": (lambda: gpt2().bfloat16(), {}),
        "frozen": (lambda: frozen(gpt2()), {}),
        "untied": (lambda: gpt2(tie_word_embeddings=False), {"optim": "adafactor"}),
        "plain": (Plain, {"optim": "sgd"}),
        "fused": (gpt2, {"optim": "adamw_torch_fused", "weight_decay": 0.1}),
    }
    for name, (model, arguments) in cases.items():
        first = trainer(output / name, 2, model=model(), save_steps=1, **arguments)
        first.train()
        again = trainer(output / name, 2, model=model(), save_steps=1, **arguments)
        again.train(resume_from_checkpoint=str(output / name / "checkpoint-1"))
        same(everything(first), everything(again))


def exported(output: Path) -> None:
    """`dsq export --part model` and Trainer's `save_model` give directories that `from_pretrained` loads."""
    hf_trainer = trainer(output, 2)
    hf_trainer.train()
    hf_trainer.save_model(str(output / "final"))
    assert (output / "final" / "model.safetensors").exists()
    plain = output / "plain"
    plain.mkdir()
    arguments = ["export", str(output / "checkpoint-2"), str(plain / "model.safetensors"), "--part", "model"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    shutil.copy(output / "checkpoint-2" / "config.json", plain)
    for directory in ("final", "plain"):
        loaded = AutoModelForCausalLM.from_pretrained(output / directory).state_dict()
        same(dict(hf_trainer.model.state_dict()), dict(loaded))


def refused(output: Path) -> None:
    """Wrong arguments, and what cannot be saved."""
    with pytest.raises(ConfigError, match=r"transformers\.Trainer"):
        huggingface.attach(gpt2())
    with pytest.raises(ConfigError, match="quantise"):
        trainer(output, 2, config={"quantise": {}})
    with pytest.raises(ConfigError, match="save_on_each_node"):
        trainer(output, 2, save_on_each_node=True)
    again = trainer(output, 2)
    assert huggingface.attach(again, "smallest") is again
    assert again.dsq_config.refinement.keep_last != 0


if __name__ == "__main__":
    warnings.simplefilter("default", UserWarning)
    root = Path(sys.argv[1])
    with suppress(SystemExit):
        run(
            [
                exact_resume, deltas, rotation, best_model, best_strategy, only_model, switched, killed, failed,
                damaged, other_dtype, models, exported, refused, in_background, deltas_in_background,
                best_in_background, only_model_in_background, failed_in_background, killed_in_background,
                refused_in_background, moved_in_background, stopped_in_background, callback_states,
                killed_in_last_write, full_disk_in_last_write, linked_checkpoint, writing_in_subclass,
            ], root,
        )
