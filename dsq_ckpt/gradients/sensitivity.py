"""Sensitivity of the loss to weights, from a moving average of the gradients that training computes anyway.

Sensitivity is `|weight * gradient|`, the first-order change of the loss when a weight is set to zero (Inshrinkerator,
section 4.1). As in its section 4.5, gradients are taken from training in the batches before a checkpoint, copied to
pinned memory on a separate stream, and averaged on the CPU with most weight on the newest.

A batch goes through three states. *Captured*: `.grad` is being copied to the host. A new capture replaces the
previous one, so with micro-batches, whose sum accumulates in `.grad`, the last capture of a step counts. *Counted*:
the optimizer has stepped (`settle`). *Averaged*: the copy is complete and included in the average.

Each rank averages its local shards, without communication.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from dsq_ckpt.core.notices import warn
from dsq_ckpt.core.wrappers import strip_wrappers
from dsq_ckpt.gradients import offload
from dsq_ckpt.gradients.schedule import Schedule

__all__ = ["GradientAverage", "Schedule", "get_named_parameters"]


def get_named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return parameters by name, without the prefixes of DDP, FSDP, torch.compile and activation checkpointing.

    Call it after wrapping and sharding, which replace parameters. A tied parameter appears under each of its names.
    If two parameters would get the same name, the later one keeps its name in the module tree.
    """
    parameters: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        short = strip_wrappers(name)
        is_ambiguous = short in parameters and parameters[short] is not parameter
        parameters[name if is_ambiguous else short] = parameter
    return parameters


@dataclass(eq=False)
class _TrackedParameter:
    """A parameter and its average, with a weak reference so that an average does not keep a model alive."""

    name: str
    parameter: weakref.ref[nn.Parameter]
    state: Literal["empty", "captured", "counted"] = "empty"
    staged: torch.Tensor | None = None
    """Last captured gradient on the host, of the gradient's dtype, pinned if it comes from CUDA."""
    copy_events: offload.CopyEvents = offload.NO_EVENTS
    found_inf: torch.Tensor | None = None
    """Host flag, valid after `copy_events`: non-zero if the optimizer found infinities and did not step."""
    average: torch.Tensor | None = None
    """Contiguous float32 average of the local shape."""
    steps: int = 0
    """Number of batches in the average."""
    settled: int = 0
    """Number of steps since construction, within the window or not."""


class GradientAverage:
    """A moving average of the gradients of named parameters, on the host, with their sharding.

    `average = beta * gradient + (1 - beta) * average`, per parameter, over the batches in which it had a gradient;
    the first gradient is the first average. Gradients with NaN or Inf are left out and counted in `skipped`.

    Attach it to an optimizer (`attach`) or to the backward pass (`attach_to_parameters`), or call `capture`
    before and `settle` after each optimizer step. Outside the window of `schedule`, `capture` does nothing.

    Parameters without gradient are skipped. A parameter whose gradient is partial or has another DTensor layout is
    skipped with one warning. Sparse gradients are converted to dense ones on the host, which on CUDA waits for the
    GPU. Use from one thread at a time, not inside CUDA graphs.

    Memory on the host: 4 bytes per element of this rank's shards, and one copy of the gradients in their own dtype
    (2 or 4 bytes; pinned on CUDA, whose allocator rounds sizes up to powers of two). On the GPU: none.

    Args:
        parameters: parameters by name (`get_named_parameters`). A tied parameter is one entry under its first name;
            `aliases` has the others.
        beta: weight of the newest gradient, in (0, 1].
        window: batches before a checkpoint in which gradients are captured.
        every: steps between checkpoints; None to learn them (`Schedule`).
        overlap: work that may run on CUDA while gradients are copied. "none": no work. "step": the optimizer step,
            which must not write to `.grad` (torch.optim does not). "batch": also the next batch; `.grad` must be a
            new tensor in each batch, so neither `zero_grad(set_to_none=False)` nor gradient buckets are allowed.

    Raises:
        ValueError: `beta`, `window` or `every` is out of range.
    """

    aliases: dict[str, str]
    """First name by other name of each tied parameter."""
    skipped: Counter[str]
    """Number of batches skipped because of NaN or Inf since the last `reset`, by first name."""
    schedule: Schedule

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        beta: float = 0.9,
        window: int = 50,
        *,
        every: int | None = None,
        overlap: Literal["none", "step", "batch"] = "step",
    ) -> None:
        if not 0.0 < beta <= 1.0:
            raise ValueError(f"beta is {beta}, expected a number in (0, 1]")
        self.beta = beta
        self.overlap = overlap
        self.schedule = Schedule(every, window)
        self.aliases = {}
        self.skipped = Counter()
        self._entries: dict[str, _TrackedParameter] = {}
        self._by_id: dict[int, _TrackedParameter] = {}
        for name, parameter in parameters.items():
            first = self._by_id.get(id(parameter))
            if first is not None:
                self.aliases[name] = first.name
            else:
                self._entries[name] = self._by_id[id(parameter)] = _TrackedParameter(name, weakref.ref(parameter))
        self._streams: offload.Streams = {}
        self._modes: weakref.WeakKeyDictionary[torch.optim.Optimizer, str] = weakref.WeakKeyDictionary()
        self._handles: list[Any] = []
        self._settle_at_once = False
        self._settled = 0
        self._captured_any = False
        self._warned: set[str] = set()

    def __getstate__(self) -> Any:
        """Raise a TypeError: hooks, streams and buffers belong to this process and this model."""
        raise TypeError("a GradientAverage cannot be copied or pickled; make a new one for the other model")

    def __contains__(self, name: str) -> bool:
        return name in self._entries or name in self.aliases

    @property
    def steps(self) -> int:
        """Largest number of counted batches of any parameter since the last `reset`. Waits for copies."""
        for entry in self._entries.values():
            self._add_to_average(entry)
        return max((entry.steps for entry in self._entries.values()), default=0)

    @property
    def memory(self) -> int:
        """Bytes of host memory."""
        tensors = [tensor for entry in self._entries.values() for tensor in (entry.average, entry.staged)]
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def capture(self) -> None:
        """Copy `.grad` of every parameter. Call it after backward, unscaling and clipping, before the step."""
        self._capture(self._entries.values())

    def settle(self) -> None:
        """Count the captured gradients, and advance the schedule. Call it after every step, in the window or not."""
        self._settle(list(self._entries.values()))

    def average(self, name: str) -> torch.Tensor | None:
        """Return the average gradient; waits for copies under way.

        Args:
            name: any name of a parameter.

        Returns:
            float32, CPU, contiguous, the local shard's shape; None if no gradient counted. Not a copy: it changes
            with the next batches, and is not to be written to.

        Raises:
            KeyError: no such parameter; ask with `in`.
        """
        entry = self._entries[self.aliases.get(name, name)]
        self._add_to_average(entry)
        parameter = entry.parameter()
        if parameter is not None and not is_lazy(parameter):
            self._drop_other_shape(entry, offload.get_local(parameter).shape)
        if self._captured_any and not self._settled:
            self._warn_once("gradients were captured, but none counts: call settle() after each step, or attach()")
        return entry.average

    def mean_squares(self) -> dict[str, tuple[float, int]]:
        """Return the sum of squares and the number of elements of each local average by first name, or (0.0, 0).

        Sums over ranks give the mean square of the whole parameter, sharded or replicated.
        """
        means = {}
        for name in self._entries:
            average = self.average(name)
            means[name] = (0.0, 0) if average is None else (offload.sum_of_squares(average), average.numel())
        return means

    def reset(self) -> None:
        """Free averages and buffers after a checkpoint, and record it in `schedule`."""
        for entry in self._entries.values():
            entry.state, entry.copy_events, entry.found_inf = "empty", offload.NO_EVENTS, None
            entry.average = entry.staged = None
            entry.steps = 0
        self.skipped.clear()
        self.schedule.record_save()

    def attach(
        self, optimizer: torch.optim.Optimizer, capture: Literal["step", "manual"] = "step", *, later: bool = False
    ) -> None:
        """Settle parameters after each step of `optimizer`; with "step", also capture them before it.

        Several optimizers may be attached, each for its own parameters. With `step(closure)`, and with a fused
        optimizer that unscales gradients itself under `GradScaler`, gradients are captured after the step; a step
        that such an optimizer skips does not count. With "manual", call `capture` after `GradScaler.unscale_`.
        With `later`, the optimizer may receive its parameters between steps, as ZeRO does with sub-groups.

        Raises:
            ValueError: the optimizer is attached already, or has none of the parameters: it was created before
                sharding, or updates copies of its own; call `capture` and `settle` instead.
        """
        if optimizer in self._modes:
            raise ValueError("this optimizer is attached already")
        if not later and not self._entries_of(optimizer):
            raise ValueError("this optimizer has none of the parameters; make both after sharding the model")
        self._modes[optimizer] = capture
        if capture == "step":
            self._handles.append(optimizer.register_step_pre_hook(_make_weak_hook(self._before_step)))
        self._handles.append(optimizer.register_step_post_hook(_make_weak_hook(self._after_step)))

    def attach_to_parameters(self, settle: bool = True) -> None:
        """Capture each gradient after its accumulation in the backward pass, before hooks that step and free it.

        For optimizers that run inside backward. Such gradients are neither clipped nor unscaled. FSDP2 has averaged
        them over ranks, DDP has not; FSDP1 produces no gradients that hooks see.

        Args:
            settle: count every gradient at once. Use False if a step takes several backward passes, and call
                `settle` or attach an optimizer.
        """
        self._settle_at_once = settle
        for entry in self._entries.values():
            parameter = entry.parameter()
            if parameter is None or not parameter.requires_grad:
                continue
            handle = parameter.register_post_accumulate_grad_hook(_make_weak_hook(self._after_backward))
            hooks = parameter._post_accumulate_grad_hooks
            if hooks is not None:  # they run in the order of this dict
                others = {key: hook for key, hook in hooks.items() if key != handle.id}
                for key in others:
                    del hooks[key]
                hooks.update(others)
            self._handles.append(handle)

    def detach(self) -> None:
        """Remove all hooks. Averages stay."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._modes.clear()

    def _entries_of(self, optimizer: torch.optim.Optimizer) -> list[_TrackedParameter]:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        entries = [(self._by_id.get(id(parameter)), parameter) for parameter in parameters]
        return [entry for entry, parameter in entries if entry is not None and entry.parameter() is parameter]

    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not (_has_closure(args, kwargs) or _is_scaled(optimizer)):
            self._capture(self._entries_of(optimizer))

    def _after_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        entries = self._entries_of(optimizer)
        if self._modes.get(optimizer) == "step":
            if _has_closure(args, kwargs) or _is_scaled(optimizer):
                self._capture(entries)
        elif _is_scaled(optimizer):
            self._capture([entry for entry in entries if entry.state == "captured"])
        self._settle(entries, getattr(optimizer, "found_inf", None))

    def _after_backward(self, parameter: nn.Parameter) -> None:
        entry = self._by_id.get(id(parameter))
        if entry is not None and entry.parameter() is parameter:
            self._capture([entry])
            if self._settle_at_once:
                self._settle([entry])

    def _get_gradient(self, entry: _TrackedParameter) -> torch.Tensor | None:
        """Return the local dense gradient, or None if there is none or it cannot be averaged."""
        parameter = entry.parameter()
        gradient = None if parameter is None or not parameter.requires_grad else parameter.grad
        if parameter is None or gradient is None or not gradient.is_floating_point():
            return None
        if not offload.has_same_layout(parameter, gradient):
            self._warn_once(f"the gradient of '{entry.name}' is partial or laid out unlike it, and is not averaged")
            return None
        shard = offload.to_dense(offload.get_local(gradient))
        return shard if shard.shape == offload.get_local(parameter).shape else None  # else from before a reshape

    @torch.no_grad()
    def _capture(self, entries: Iterable[_TrackedParameter]) -> None:
        if not self.schedule.is_due():
            return
        pairs, captured = [], []
        for entry in entries:
            self._add_to_average(entry)  # the staging buffer is needed again
            entry.state = "empty"
            gradient = self._get_gradient(entry)
            if gradient is None:
                continue
            if entry.staged is None or (entry.staged.shape, entry.staged.dtype) != (gradient.shape, gradient.dtype):
                entry.staged = offload.allocate_host_like(gradient)
            pairs.append((gradient, entry.staged))
            captured.append(entry)
        events = offload.copy(pairs, self._streams)
        if self.overlap == "none":
            offload.wait_on_device(events)
        for entry in captured:
            entry.state, entry.copy_events, entry.found_inf = "captured", events, None
        self._captured_any = self._captured_any or bool(captured)

    @torch.no_grad()
    def _settle(self, entries: Iterable[_TrackedParameter], found_inf: torch.Tensor | None = None) -> None:
        pending = []
        for entry in entries:
            entry.settled += 1
            if entry.settled > self._settled:  # several optimizers, or hooks, of one batch are one step
                self._settled = entry.settled
                self.schedule.count_step()
            if entry.state == "captured":
                pending.append(entry)
        if self.overlap == "step":
            events = {id(event): (device, event) for entry in pending for device, event in entry.copy_events}
            offload.wait_on_device(events.values())
        flag, verdict = None, offload.NO_EVENTS
        if pending and found_inf is not None:
            flag = offload.allocate_host_like(found_inf)
            verdict = offload.copy([(found_inf, flag)], self._streams)
        for entry in pending:
            entry.state, entry.copy_events, entry.found_inf = "counted", entry.copy_events + verdict, flag
            if all(event.query() for _, event in entry.copy_events):
                self._add_to_average(entry)

    @torch.no_grad()
    def _add_to_average(self, entry: _TrackedParameter) -> None:
        """Add a counted gradient to the average after its copy has completed."""
        if entry.state != "counted" or entry.staged is None:
            return
        for _, event in entry.copy_events:
            event.synchronize()
        entry.state, entry.copy_events = "empty", offload.NO_EVENTS
        if entry.found_inf is not None and bool(entry.found_inf):
            return
        self._drop_other_shape(entry, entry.staged.shape)
        if not offload.is_finite(entry.staged):
            self.skipped[entry.name] += 1
            return
        if entry.average is None:
            entry.average = torch.empty(entry.staged.shape, dtype=torch.float32, device="cpu").copy_(entry.staged)
        else:
            offload.update_average(entry.average, entry.staged, self.beta)
        entry.steps += 1

    def _drop_other_shape(self, entry: _TrackedParameter, shape: torch.Size) -> None:
        """Drop an average of another shape."""
        if entry.average is not None and entry.average.shape != shape:
            change = f"{tuple(entry.average.shape)} to {tuple(shape)}"
            entry.average, entry.steps = None, 0
            warn(f"'{entry.name}' has changed from {change}: its average gradient was dropped")

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            warn(text)


def _make_weak_hook(method: Callable[..., None]) -> Callable[..., None]:
    """Return a hook that holds the method's object weakly, does nothing after its deletion, and is not compiled."""
    reference = weakref.WeakMethod(method)

    @torch.compiler.disable
    def hook(*args: Any) -> None:
        alive = reference()
        if alive is not None:
            alive(*args)

    return hook


def _has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether `step` has a closure that computes gradients; `args` begins with the optimizer."""
    return kwargs.get("closure") is not None or any(callable(argument) for argument in args[1:])


def _is_scaled(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `.grad` is multiplied by the loss scale until `step`, as GradScaler does for fused optimizers."""
    return getattr(optimizer, "grad_scale", None) is not None
