"""What the weights of a model are multiplied by, seen while a metric is evaluated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dsq_ckpt.quantization.compensation import Compensation, MatrixView, Spread

_MOST_INPUTS = 1024  # of a block; errors are not spread beyond
_MOST_ROWS = 4096  # of the inputs of one call that are looked at, evenly spread

_ATEN = torch.ops.aten


class _Moments:
    """Sums of products of the inputs of a matrix, in blocks of consecutive inputs of about the same size."""

    def __init__(self, inputs: int) -> None:
        blocks = -(-inputs // _MOST_INPUTS)
        self._size = -(-inputs // blocks)
        self.sums: list[Tensor] = []

    def add(self, rows: Tensor) -> None:
        """Add inputs, [n, inputs]."""
        blocks = _spread(rows.detach(), _MOST_ROWS).float().split(self._size, dim=1)
        new = [block.T @ block for block in blocks]
        self.sums = [old + more for old, more in zip(self.sums, new, strict=True)] if self.sums else new


class InputRecorder(TorchDispatchMode):
    """Sees what tensors are multiplied by, in products of matrices and in convolutions of one group.

    It does not matter which module or function asks for these, and whether for whole weights or for slices. What runs
    outside of torch's dispatcher, as compiled code does, is not seen.

    Args:
        tensors: those that are looked for, by their memory.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self._memory = {_memory(tensor) for tensor in tensors} - {0}
        self._seen: dict[int, dict[MatrixView, _Moments]] = {}

    def compensation(self, tensor: Tensor) -> Compensation | None:
        """Return how errors of a tensor's elements are to be spread; None: it was not seen, or is not contiguous."""
        if not tensor.is_contiguous():  # offsets are those of elements in row-major order
            return None
        start, parts = int(tensor.storage_offset()), []
        for view, moments in self._seen.get(_memory(tensor), {}).items():
            if view.offset >= start and view.stop <= start + tensor.numel():
                blocks = [block for block in map(Spread.of, moments.sums) if block is not None]
                if len(blocks) == len(moments.sums):
                    parts.append((replace(view, offset=view.offset - start), blocks))
        return Compensation(parts) if parts else None

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Look at the arguments, and call the function."""
        kwargs = kwargs or {}
        with self:
            result = func.decompose(*args, **kwargs)  # in inference mode functions come as they were called
        if result is not NotImplemented:
            return result
        if (see := _SEEN.get(func.overloadpacket)) is not None:
            with suppress(RuntimeError):  # as where memory is short: the metric is what was asked for
                see(self, *args)
        return func(*args, **kwargs)

    def _product(self, left: Tensor, right: Tensor) -> None:
        self._multiplied(left, right)
        self._multiplied(right.mT, left.mT)

    def _multiplied(self, rows: Tensor, matrix: Tensor) -> None:
        """Note that `rows`, [n, inputs], are multiplied by `matrix`, [inputs, outputs]."""
        if _memory(matrix) in self._memory and matrix.shape[0] > 1:
            inputs, outputs = matrix.shape
            between_inputs, between_outputs = matrix.stride()
            view = MatrixView(int(matrix.storage_offset()), outputs, inputs, (between_outputs, between_inputs))
            self._note(matrix, view, rows)

    def _batched(self, left: Tensor, right: Tensor) -> None:
        if not self._memory.isdisjoint((_memory(left), _memory(right))):
            for one, other in zip(left, right, strict=True):
                self._product(one, other)

    def _convolved(
        self, images: Tensor, weight: Tensor, _: Tensor | None, stride: Sequence[int], padding: Sequence[int],
        dilation: Sequence[int], transposed: bool, *others: Any,
    ) -> None:
        usual = not transposed and others[-1] == 1 and weight.ndim in (3, 4) and weight.is_contiguous()
        if not usual or _memory(weight) not in self._memory or not images.numel():
            return
        kernel = weight.shape[2:]
        if weight.ndim == 3:  # in one dimension
            images, kernel = images.unsqueeze(-2), torch.Size([1, *kernel])
            stride, padding, dilation = [1, *stride], [0, *padding], [1, *dilation]
        few = _spread(images, max(1, _MOST_ROWS // images[0, 0].numel()))
        patches = nn.functional.unfold(few, tuple(kernel), tuple(dilation), tuple(padding), tuple(stride))
        inputs = weight[0].numel()
        view = MatrixView(int(weight.storage_offset()), len(weight), inputs, (inputs, 1))
        self._note(weight, view, patches.mT.reshape(-1, inputs))

    def _note(self, weight: Tensor, view: MatrixView, rows: Tensor) -> None:
        if not rows.is_floating_point() or rows.layout is not torch.strided:
            return
        seen = self._seen.setdefault(_memory(weight), {})
        if view not in seen:
            if min(view.strides) < 1 or any(view.offset < one.stop and one.offset < view.stop for one in seen):
                return
            seen[view] = _Moments(view.inputs)
        seen[view].add(rows)


_SEEN: dict[Any, Callable[..., None]] = {
    _ATEN.mm: InputRecorder._product,
    _ATEN.addmm: lambda self, _, left, right: self._product(left, right),
    _ATEN.bmm: InputRecorder._batched,
    _ATEN.baddbmm: lambda self, _, left, right: self._batched(left, right),
    _ATEN.convolution: InputRecorder._convolved,
}


@contextmanager
def recorded(tensors: Iterable[Tensor]) -> Iterator[InputRecorder]:
    """Record what tensors are multiplied by; fused operators that would hide it are off meanwhile."""
    fused, fast = torch.backends.mkldnn.enabled, torch.backends.mha.get_fastpath_enabled()
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with InputRecorder(tensors) as recorder:
            yield recorder
    finally:
        torch.backends.mkldnn.enabled = fused
        torch.backends.mha.set_fastpath_enabled(fast)


def _spread(rows: Tensor, most: int) -> Tensor:
    """Return at most so many rows, evenly spread."""
    return rows if len(rows) <= most else rows[torch.linspace(0, len(rows) - 1, most, device=rows.device).long()]


def _memory(tensor: Tensor) -> int:
    """Return the address of a tensor's memory; 0: it has none of its own."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    return int(tensor.untyped_storage().data_ptr()) if plain else 0
