"""Recording of the inputs that a model's weights are multiplied by, during an evaluation of the metric."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

from dsq_ckpt.quantization.compensation import Compensation, ErrorSpread, MatrixView

logger = logging.getLogger(__name__)

_MAX_INPUTS = 1024  # of a block, within which errors are compensated
_MAX_ROWS = 4096  # of the inputs of one call that are used, evenly spaced
_MAX_MATRICES = 1024  # in one tensor
_FREE_BYTES, _MAX_BYTES_PER_WEIGHT = 1 << 26, 16  # of sums: a matrix may exceed one of the two limits, not both

_ATEN = torch.ops.aten
_SWITCH_LOCK = threading.RLock()


class _InputProducts:
    """Sums of products (X^T X) of the inputs of a matrix, in blocks of consecutive inputs of about equal size."""

    def __init__(self, inputs: int) -> None:
        blocks = -(-inputs // _MAX_INPUTS)
        self._size = -(-inputs // blocks)
        self.sums: list[Tensor] = []
        self.rows = 0

    def add(self, rows: Tensor) -> None:
        """Add inputs, [n, inputs]."""
        rows = _sample_rows(rows.detach(), _MAX_ROWS)
        new = [block.T @ block for block in rows.to(torch.float32).split(self._size, dim=1)]
        self.sums = [old + added for old, added in zip(self.sums, new, strict=True)] if self.sums else new
        self.rows += len(rows)


class _TensorLocation(NamedTuple):
    """Location of a tensor, or of the tensor that it is a copy of: memory of a recorded tensor, and an offset."""

    memory: tuple[int, int]
    offset: int


class InputRecorder(TorchDispatchMode):
    """Dispatch mode that records the inputs of tensors in matrix products and in convolutions of one group.

    It covers all modules and functions, with whole weights, slices, or copies in another dtype, as those of autocast.
    Operations of other threads are not recorded.

    Args:
        tensors: tensors to record, identified by their memory.
    """

    supports_higher_order_operators = True

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self._known = {(_get_memory(tensor), tensor.element_size()) for tensor in tensors if _get_memory(tensor)}
        self._seen: dict[tuple[int, int], dict[MatrixView, _InputProducts]] = {}
        self._copies: dict[tuple[int, int], tuple[_TensorLocation, Tensor]] = {}
        """Copies by their memory; kept alive until a tensor is copied again, so that the memory is not reused."""

    def get_compensation(self, tensor: Tensor) -> Compensation | None:
        """Return the compensation of a tensor's errors; None if it was not recorded, or is not contiguous."""
        if not tensor.is_contiguous():  # offsets are those of elements in row-major order
            return None
        start, parts = int(tensor.storage_offset()), []
        for view, products in self._seen.get((_get_memory(tensor), tensor.element_size()), {}).items():
            if view.offset >= start and view.stop <= start + tensor.numel():
                blocks = [
                    block for own in products.sums
                    if (block := ErrorSpread.from_products(own, products.rows)) is not None
                ]
                if len(blocks) == len(products.sums):
                    parts.append((replace(view, offset=view.offset - start), blocks))
        return Compensation(parts) if parts else None

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the function, and record its arguments."""
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return func(*args, **kwargs)
        if not types:  # inference mode passes composite functions undecomposed
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        kind = func.overloadpacket
        try:
            if kind is _ATEN._to_copy:
                self._record_copy(args[0], result)
            elif kind in _RECORDERS:
                _RECORDERS[kind](self, *args)
        except RuntimeError as error:  # such as out of memory: the evaluation continues
            logger.info("inputs of a layer are not recorded: %s", error)
        return result

    def _locate(self, tensor: Tensor) -> _TensorLocation | None:
        if not (memory := _get_memory(tensor)):
            return None
        key = memory, tensor.element_size()
        if key in self._known:
            return _TensorLocation(key, int(tensor.storage_offset()))
        if (copied := self._copies.get(key)) is None:
            return None
        origin, _ = copied
        return origin._replace(offset=origin.offset + int(tensor.storage_offset()))

    def _record_copy(self, tensor: Tensor, copy: Tensor) -> None:
        location = self._locate(tensor)
        if location is None or not tensor.is_contiguous() or not copy.is_contiguous() or not _get_memory(copy):
            return
        self._copies = {key: entry for key, entry in self._copies.items() if entry[0] != location}
        self._copies[_get_memory(copy), copy.element_size()] = location, copy

    def _record_product(self, left: Tensor, right: Tensor) -> None:
        if self._locate(left) is not None and self._locate(right) is not None:  # such as a penalty, not inputs
            return
        self._record_multiplication(left, right)
        self._record_multiplication(right.mT, left.mT)

    def _record_multiplication(self, rows: Tensor, matrix: Tensor) -> None:
        """Record that `rows`, [n, inputs], are multiplied by `matrix`, [inputs, outputs]."""
        if (place := self._locate(matrix)) is not None and matrix.shape[0] > 1:
            inputs, outputs = matrix.shape
            between_inputs, between_outputs = matrix.stride()
            self._add_rows(place, MatrixView(place.offset, outputs, inputs, (between_outputs, between_inputs)), rows)

    def _record_batched_product(self, left: Tensor, right: Tensor) -> None:
        if self._locate(left) is not None or self._locate(right) is not None:
            for left_matrix, right_matrix in zip(left, right):  # noqa: B905  # torch itself has compared them
                self._record_product(left_matrix, right_matrix)

    def _record_convolution(
        self, images: Tensor, weight: Tensor, _: Tensor | None, stride: Sequence[int], padding: Sequence[int],
        dilation: Sequence[int], transposed: bool, __: Sequence[int], groups: int, *others: Any,
    ) -> None:
        is_supported = not transposed and groups == 1 and weight.ndim in (3, 4) and weight.is_contiguous()
        if not is_supported or (location := self._locate(weight)) is None or not images.numel():
            return
        kernel = weight.shape[2:]
        if weight.ndim == 3:  # in one dimension
            images, kernel = images.unsqueeze(-1), torch.Size([*kernel, 1])
            stride, padding, dilation = [*stride, 1], [*padding, 0], [*dilation, 1]
        wide = (images.shape[-1] + 2 * padding[-1] - dilation[-1] * (kernel[-1] - 1) - 1) // stride[-1] + 1
        reach = dilation[0] * (kernel[0] - 1) + 1
        max_pixel_rows = (max(1, _MAX_ROWS // wide) - 1) * stride[0] + reach  # rows of pixels, of one image
        if images.shape[-2] > max_pixel_rows:
            images = images.narrow(-2, (images.shape[-2] - max_pixel_rows) // 2, max_pixel_rows)
        high = (images.shape[-2] + 2 * padding[0] - reach) // stride[0] + 1
        few = _sample_rows(images, max(1, _MAX_ROWS // max(1, wide * high)))
        patches = nn.functional.unfold(few, tuple(kernel), tuple(dilation), tuple(padding), tuple(stride))
        inputs = weight[0].numel()
        view = MatrixView(location.offset, len(weight), inputs, (inputs, 1))
        self._add_rows(location, view, patches.mT.reshape(-1, inputs))

    def _add_rows(self, location: _TensorLocation, view: MatrixView, rows: Tensor) -> None:
        if not rows.is_floating_point() or rows.layout is not torch.strided or not len(rows):
            return
        if rows.is_cuda and torch.cuda.is_current_stream_capturing():  # the graph is not executed yet
            return
        products = self._seen.setdefault(location.memory, {})
        if view not in products:
            elements = view.outputs * view.inputs
            if min(view.strides) < 1 or elements > view.stop - view.offset:  # overlapping elements
                return
            if len(products) == _MAX_MATRICES or any(
                view.offset < recorded.stop and recorded.offset < view.stop for recorded in products
            ):
                return
            if 4 * view.inputs * min(view.inputs, _MAX_INPUTS) > max(_FREE_BYTES, _MAX_BYTES_PER_WEIGHT * elements):
                return
            products[view] = _InputProducts(view.inputs)
        products[view].add(rows)


_RECORDERS: dict[Any, Callable[..., None]] = {
    _ATEN.mm: InputRecorder._record_product,
    _ATEN.addmm: lambda self, _, left, right: self._record_product(left, right),
    _ATEN.bmm: InputRecorder._record_batched_product,
    _ATEN.baddbmm: lambda self, _, left, right: self._record_batched_product(left, right),
    _ATEN.convolution: InputRecorder._record_convolution,
    _ATEN._convolution: InputRecorder._record_convolution,
}


@contextmanager
def record_inputs(tensors: Iterable[Tensor]) -> Iterator[InputRecorder]:
    """Record the inputs of tensors. Fused operators that would hide them are disabled in all threads."""
    with _SWITCH_LOCK:
        fused, fast = torch.backends.mkldnn.enabled, torch.backends.mha.get_fastpath_enabled()
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with _no_compile(), InputRecorder(tensors) as recorder:
                yield recorder
        finally:
            torch.backends.mkldnn.enabled = fused
            torch.backends.mha.set_fastpath_enabled(fast)


def _no_compile() -> AbstractContextManager[Any]:
    """Return a context without torch.compile, which would permanently skip code that it meets below a dispatch mode."""
    if "torch._dynamo" not in sys.modules:  # nothing was compiled, and the import takes a second
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


def _sample_rows(rows: Tensor, max_rows: int) -> Tensor:
    """Return at most `max_rows` rows, evenly spaced."""
    return rows if len(rows) <= max_rows else rows[torch.arange(max_rows, device=rows.device) * len(rows) // max_rows]


def _get_memory(tensor: Tensor) -> int:
    """Return the address of a tensor's storage; 0 for sparse tensors and subclasses."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    return int(tensor.untyped_storage().data_ptr()) if plain else 0
