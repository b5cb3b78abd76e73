"""Gradient logs of every stage: killed, and recovered bit for bit in a new job. argv = a directory, a part.

`record` trains engines of every kind under a log, writes down all of their state after every step, and is killed.
`recover` is a new job: it recovers the last step and an earlier one, compares all state bit for bit, and goes on.
`refuse` runs on another number of ranks.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import batch, begin, check, end, engine_of, error_of, everywhere, settings

import dsq_ckpt
import dsq_ckpt.deepspeed
from dsq_ckpt.deepspeed.flat_buffers import iter_masters
from dsq_ckpt.lowdiff import gradient_compressor, segments
from dsq_ckpt.lowdiff.buckets import HookedCompressor
from tests.helpers.checkpointing_processes import Nursery

STEPS, EARLIER = 7, 5
WARMUP = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 20}}}
SUM_IN_FP32 = {"data_types": {"grad_accum_dtype": "fp32"}}
OVERFLOWING = {"bf16": {"enabled": True, "check_grad_overflow": True}}
"""The fourth step is skipped."""
KINDS: dict[str, dict[str, Any]] = {
    "stage 0, fp32, top-k": settings(0, bf16=False) | WARMUP,
    "stage 0, bf16, top-k": settings(0, accumulate=2),
    "stage 0, bf16": settings(0),
    "stage 1": settings(1, accumulate=2) | WARMUP,
    "stage 1, summed in fp32": settings(1) | SUM_IN_FP32,
    "stage 2": settings(2, round_robin_gradients=True) | WARMUP | OVERFLOWING,
    "stage 2, fp32": settings(2, bf16=False) | {"gradient_clipping": 0.05},
    "stage 3": settings(3, accumulate=2, sub_group_size=9000, stage3_param_persistence_threshold=100) | WARMUP,
    "stage 3, fp32": settings(3, bf16=False),
}
TOPK = "topk:0.02"
MOST = {TOPK: 0.3, "bf16": 1.8, "fp32": 4.0}
"""Bytes per parameter and step, at most: top-k, 16 bits and a scalar, and whatever fp32 has."""


def compressor_of(name: str) -> str:
    return TOPK if "top-k" in name else "none"


def make(tree: dict[str, Any], seed: int) -> Any:
    """An engine whose buffer is another one on every rank and after every micro batch."""
    tight = tree | {"gradient_clipping": min(tree["gradient_clipping"], 0.3)}
    engine = engine_of(tight, None, seed=seed)

    def count(module: Any, _: Any) -> None:
        module.places.add_(1 + dist.get_rank())

    engine.module.register_forward_pre_hook(count)
    return engine


def train(engine: Any, first: int, last: int, log: Any = None, table: Any = None) -> list[float]:
    """Micro batches of steps `first` to `last`; the state after each step goes into the table."""
    count, losses = engine.gradient_accumulation_steps(), []
    for number in range(first * count, last * count):
        loss = engine(*batch(number))
        overflows = number == 3 and "check_grad_overflow" in engine._config._param_dict["bf16"]
        engine.backward(loss * float("inf") if overflows else loss)
        engine.step()
        losses.append(loss.item())
        if log is not None:
            log.step()
        if table is not None and (number + 1) % count == 0:
            table[engine.global_steps] = state_of(engine)
    return losses


def state_of(engine: Any) -> dict[str, Any]:
    """All that training goes on from."""
    basic, optimizer = engine.basic_optimizer, engine.optimizer
    scaler = getattr(optimizer, "loss_scaler", None) or getattr(optimizer, "loss_scale_config", None)
    entries: dict[str, Any] = {
        f"weight {name}": getattr(parameter, "ds_tensor", parameter).detach().clone()
        for name, parameter in engine.module.named_parameters()
    }
    for name, parameter in engine.module.named_parameters():  # those that ZeRO 3 keeps whole
        entries[f"whole {name}"] = parameter.detach().clone()
    entries |= {f"buffer {name}": buffer.clone() for name, buffer in engine.module.named_buffers()}
    for number, (tensor, *_) in enumerate(iter_masters(engine, engine.param_names)):
        entries[f"master {number}"] = tensor.detach().clone()
        for name, value in basic.state[tensor].items():
            entries[f"{name} {number}"] = value.clone() if torch.is_tensor(value) else value
    entries["hyper"] = [{k: v for k, v in group.items() if "param" not in k} for group in basic.param_groups]
    entries["scheduler"] = None if engine.lr_scheduler is None else dict(engine.lr_scheduler.state_dict())
    entries["scaler"] = None if scaler is None else {k: v for k, v in vars(scaler).items() if not callable(v)}
    names = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
    return entries | {name: getattr(engine, name) for name in names}


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Names of what is not the same, bit for bit."""

    def same(a: Any, b: Any) -> bool:
        if torch.is_tensor(a):
            return a.dtype == b.dtype and a.shape == b.shape and bits(a).equal(bits(b))
        return bool(a == b)

    both = one.keys() & other.keys()
    return sorted(one.keys() ^ other.keys()) + sorted(key for key in both if not same(one[key], other[key]))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def table_of(run: Path) -> Path:
    return run.with_name(f"{run.name}.{dist.get_rank()}.pt")


def record(directory: Path) -> None:
    logs = []
    for number, (name, tree) in enumerate(KINDS.items()):
        run, engine = directory / str(number), make(tree, 0)
        count, table = engine.gradient_accumulation_steps(), {}
        train(engine, 0, 1)  # before it is logged
        log = dsq_ckpt.deepspeed.gradient_log(
            engine, run, compressor=compressor_of(name), batch=1, snapshot_every=1000, queue=2,
        )
        check(log.steps_done == 1 and log.bound == 4, f"{name}: a log begins where the engine is")
        losses = train(engine, 1, STEPS, log, table)
        skipped = int("check_grad_overflow" in tree["bf16"])
        check(
            log.logging and (log.steps_done, engine.skipped_steps) == (STEPS, skipped),
            f"{name}: {STEPS} steps of {count} micro batches, {skipped} of them skipped",
        )
        going_on = train(engine, STEPS, STEPS + 1)
        torch.save({"table": table, "losses": [*losses, *going_on]}, table_of(run))
        if number == 3:
            said = error_of(lambda engine=engine: train(engine, STEPS + 1, STEPS + 2))
            check("call log.step() after each" in str(said), f"a step that was not told: {said}")
            engine.global_steps = 9
            said = error_of(log.step)
            check("the engine has done 9 steps, and its log 7" in str(said), f"steps that were not told: {said}")
        if number % 2:
            log.close()
        logs.append(log)
    dist.barrier()
    print("now everything is killed", flush=True)
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGKILL)


def recover(directory: Path) -> None:
    for number, (name, tree) in enumerate(KINDS.items()):
        run, engine = directory / str(number), make(tree, 5)
        saved_record = torch.load(table_of(run), weights_only=False)
        count = engine.gradient_accumulation_steps()
        for last in (STEPS, EARLIER):
            if last == EARLIER:
                lose(run, EARLIER)
            recovered = dsq_ckpt.deepspeed.recover(engine, run)
            assert recovered is not None
            names = differing(state_of(engine), saved_record["table"][last])
            check(
                (recovered.step, recovered.ended, recovered.exact, names) == (last, None, True, []),
                f"{name}: recovered after step {recovered.step}, all state to the last bit {recovered.ended} {names}",
            )
        check(recovered.replayed == EARLIER - 1 and recovered.closed == bool(number % 2), f"{name}: by replay")
        if dist.get_rank() == 0:
            check_size(run, name, tree, engine)
        dist.barrier()
        if "top-k" in name:
            continue  # what error feedback held back is that of the snapshot
        going_on = train(engine, EARLIER, STEPS + 1)
        check(going_on == saved_record["losses"][count * (EARLIER - 1) :], f"{name}: and training goes on as it did")
        if number == 5:
            again(run, engine, make(tree, 7), name)
    averages()
    refused(directory)
    end()


def averages() -> None:
    """Compressors in DeepSpeed's place: all ranks have the same, and it is near the mean."""
    engine = make(KINDS["stage 0, bf16"], 3)
    world = dist.group.WORLD
    for spec, near in {"fp16": 1e-2, "bf16": 2e-2, "kmeans:64": 0.2, "topk:1": 1e-2}.items():
        chosen = gradient_compressor(spec)
        assert isinstance(chosen, HookedCompressor)
        chosen.attach_without_hooks(engine.module)
        torch.manual_seed(dist.get_rank())
        means = {}
        for parameter in engine.module.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.randn_like(parameter)
                means[parameter] = parameter.grad.float()
                dist.all_reduce(means[parameter])
                means[parameter] /= dist.get_world_size()
        left_out = engine.module.head.bias
        left_out.grad = None
        means[left_out] = torch.zeros(left_out.shape)
        chosen.synchronize(world)
        gradients = torch.cat([p.grad.flatten() for p in means if p is not left_out])
        all_gradients = [torch.empty_like(gradients) for _ in range(dist.get_world_size())]
        dist.all_gather(all_gradients, gradients)
        right = torch.cat([mean.flatten() for p, mean in means.items() if p is not left_out])
        off = float((gradients.float() - right).norm() / right.norm())
        same = all(torch.equal(gradients, one) for one in all_gradients) and not left_out.grad.any()
        check(same and off < near and len(chosen.take()) >= len(means) - 1, f"{spec}: averages, {off:.4f} off")


def again(run: Path, engine: Any, other: Any, name: str) -> None:
    """A log goes on after a recovery, and after one of its processes died."""
    recovered = dsq_ckpt.deepspeed.recover(engine, run)
    said = error_of(lambda: dsq_ckpt.deepspeed.gradient_log(engine, run))
    check(isinstance(said, dsq_ckpt.CheckpointExists), f"{name}: a run that has a log is not begun anew")
    with dsq_ckpt.deepspeed.gradient_log(engine, run, resume=recovered, batch=2, snapshot_every=4) as log:
        train(engine, EARLIER, EARLIER + 7, log)
        if dist.get_rank() == 1:
            os.kill(log._require_client().pid, signal.SIGKILL)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for logging in (False, True):
                while set(everywhere(log.logging)) != {logging}:
                    train(engine, log.steps_done, log.steps_done + 1, log)
        train(engine, log.steps_done, log.steps_done + 3, log)
    recovered = dsq_ckpt.deepspeed.recover(other, run)
    assert recovered is not None
    names = differing(state_of(engine), state_of(other))
    check(
        recovered.step == engine.global_steps and recovered.snapshot > EARLIER and not names,
        f"{name}: a process that dies is started again; step {recovered.step} of {engine.global_steps} {names}",
    )


def lose(run: Path, last: int) -> None:
    """Steps after this one are lost."""
    dist.barrier()
    if dist.get_rank() == 0:
        for name, path in segments.list_segments(run):
            if name.last > last:
                path.unlink()
        for note in (run / segments.LOG).glob("*.closed"):
            note.write_text("")  # does not tell the last step, as older versions left it
    dist.barrier()


def check_size(run: Path, name: str, tree: dict[str, Any], engine: Any) -> None:
    parameters = [parameter for parameter in engine.module.parameters() if parameter.requires_grad]
    trained = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in parameters)
    segment_files = segments.list_segments(run)
    steps_of = [step for _, path in segment_files for step in segments.LogSegment(path).steps.values()]
    steps = sum(bool(step["grads"]) for step in steps_of) / dist.get_world_size()
    size = sum(path.stat().st_size for _, path in segment_files) / steps / trained
    halves = tree["bf16"]["enabled"]  # DeepSpeed averages in 16 bits even what it sums in fp32
    most = MOST[TOPK if "top-k" in name else "bf16" if halves else "fp32"]
    assert size <= most, (name, size, most)
    kinds = {part["as"] for step in steps_of for part in step["grads"]}
    assert kinds == {"sparse" if "top-k" in name else "half" if halves else "raw"}, (name, kinds)
    print(f"[ok] {name}: {size:.2f} bytes per parameter and step, {kinds.pop()}", flush=True)


def refused(directory: Path) -> None:
    """What cannot be logged or recovered, and says so."""
    names = list(KINDS)

    def message(call: Any, kind: type[Exception]) -> str:
        said = error_of(call)
        assert isinstance(said, kind), said
        return str(said)

    engine = make(KINDS["stage 3"], 5)
    before = state_of(engine)
    run = directory / str(names.index("stage 2"))
    said = message(lambda: dsq_ckpt.deepspeed.recover(engine, run), dsq_ckpt.LoadFailed)
    check("ZeRO stage 2" in said and "ZeRO stage 3" in said, f"another stage: {said}")
    said = message(lambda: dsq_ckpt.deepspeed.gradient_log(engine, run, compressor="fp16"), dsq_ckpt.ConfigError)
    check("ZeRO stage 3" in said, f"a compressor: {said}")
    check(dsq_ckpt.deepspeed.recover(engine, directory / "nothing") is None, "nothing to recover")
    check(differing(state_of(engine), before) == [], "nothing was changed")
    run = directory / str(names.index("stage 1"))
    said = message(lambda: dsq_ckpt.deepspeed.recover(make(settings(1), 5), run), dsq_ckpt.LoadFailed)
    check("scheduler" in said, f"another scheduler: {said}")
    # As with an offloaded optimizer, whose extension is not built for this.
    engine.basic_optimizer.__class__ = type("DeepSpeedCPUAdam", (torch.optim.AdamW,), {})
    said = message(lambda: dsq_ckpt.deepspeed.gradient_log(engine, directory / "new"), dsq_ckpt.ConfigError)
    check("DeepSpeedCPUAdam" in said, f"an optimizer: {said}")


def refuse(directory: Path) -> None:
    for name in ("stage 0, bf16", "stage 2", "stage 3"):
        engine, run = make(KINDS[name], 5), directory / str(list(KINDS).index(name))
        said = error_of(lambda engine=engine, run=run: dsq_ckpt.deepspeed.recover(engine, run))
        check(isinstance(said, dsq_ckpt.LoadFailed) and "on 2 rank(s)" in str(said), f"{name}: {said}")
    end()


if __name__ == "__main__":
    Nursery()
    warnings.simplefilter("error", UserWarning)
    warnings.filterwarnings("ignore", message=".*[Ss]etuptools.*")  # what DeepSpeed imports before it
    {"record": record, "recover": recover, "refuse": refuse}[sys.argv[2]](begin())
