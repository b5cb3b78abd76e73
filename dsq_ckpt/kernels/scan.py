"""Passes over all gradients on the training thread, limited by memory bandwidth.

On a CPU they are Numba loops over the bits of elements. The loops read each element once, allocate nothing and take all
parameters in one call. Operations of torch would allocate masks and products, and take some microseconds per parameter
and call. On other devices, the passes are operations of torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numba import carray, types
from numba.extending import intrinsic

from dsq_ckpt.core.arrays import Array
from dsq_ckpt.kernels.jit import jit

_RUN = 64
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_integers(values: torch.Tensor) -> torch.Tensor:
    """View the bits of values as integers of the same size: NaN equals itself, and only +0 is 0."""
    return values.view(_INTEGERS.get(values.dtype.itemsize, values.dtype))


def bitwise_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of one dtype are equal bit for bit."""
    one, other = (values.resolve_conj().resolve_neg() for values in (one, other))
    return torch.equal(as_integers(one), as_integers(other))


def gather_elements(
    gradients: Sequence[torch.Tensor], places: torch.Tensor, counts: Sequence[int], values: torch.Tensor,
    nonzero: torch.Tensor,
) -> None:
    """Gather elements of each gradient at the given indices, and count all its elements that are not +0.

    Args:
        gradients: tensors of one dtype and device.
        places: int64[sum of counts], row-major indices into each, one after the other.
        counts: number of indices for each gradient.
        values: output, the gathered elements, as many as `places`; of the gradients' dtype.
        nonzero: output, int64, one per gradient; on the device of `places` and `values`.

    Raises:
        IndexError: an index is out of range.
    """
    flats = [gradient.reshape(-1).contiguous() for gradient in gradients]  # referenced as long as addresses are used
    if not _are_on_cpu(*flats, values):
        for flat, part_places, part_values, count in zip(
            flats, places.split(list(counts)), values.split(list(counts)), nonzero.split(1), strict=True
        ):
            part_values.copy_(flat.index_select(0, part_places.to(flat.device)))
            count.copy_(as_integers(flat).count_nonzero().view(1))
        return
    failed = _gather_elements(
        *_addresses(flats), places.numpy(), np.array(counts, np.int64), as_integers(values).numpy(), nonzero.numpy()
    )
    if failed >= 0:
        raise IndexError(f"gradient {failed} of {[tuple(gradient.shape) for gradient in gradients]} has fewer elements")


def find_scale(
    before: Sequence[torch.Tensor], scales: Iterable[float], after: Sequence[torch.Tensor]
) -> float | None:
    """Return the scale that tensors were multiplied by, bit for bit as fp32 rounds products; None if there is none.

    Args:
        before: contiguous tensors on the CPU.
        scales: candidates, exact in fp32; 1 is tried for any dtype, others for fp32.
        after: as many tensors, on any device; tensors of another shape or dtype do not match.
    """
    for one, other in zip(before, after, strict=True):
        if one.shape != other.shape or one.dtype != other.dtype:
            return None
    are_fp32 = all(one.dtype == torch.float32 for one in before)
    scales = [scale for scale in scales if are_fp32 or scale == 1.0]
    if not scales:
        return None
    host_tensors = [other.detach().cpu().contiguous() for other in after]  # referenced as long as addresses are used
    (before_addresses, sizes), (after_addresses, _) = _addresses(before), _addresses(host_tensors)
    lengths = np.array([one.nbytes for one in before], np.int64)
    for scale in scales:
        if _are_equal(before_addresses, after_addresses, lengths) if scale == 1.0 else (
            _are_products(before_addresses, np.float32(scale), after_addresses, sizes)
        ):
            return scale
    return None


class Samples:
    """Samples of the bytes of tensors, in runs that are evenly spread over all of them, at least one in each.

    A run is one cache line: reading one byte of it takes as long as reading all.

    Args:
        tensors: tensors to sample; tensors on other devices or with gaps in memory are skipped.
        runs: approximate number of runs; fewer if there are fewer bytes.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], runs: int) -> None:
        cpu_tensors = [tensor for tensor in tensors if tensor.device.type == "cpu" and _is_dense(tensor)]
        self._addresses, _ = _addresses(cpu_tensors)
        self._sizes = np.array([tensor.nbytes for tensor in cpu_tensors], np.int64)
        self._every = max(int(self._sizes.sum()) // runs, _RUN)
        self._starts = self._sizes // 2 % self._every
        self._counts = -(-(self._sizes - self._starts) // self._every)

    def take(self) -> Array:
        """Return the sampled bytes, uint8. The tensors must still have the same addresses and sizes."""
        sampled = np.zeros(int(self._counts.sum()) * _RUN, np.uint8)
        _sample(self._addresses, self._sizes, self._starts, self._counts, self._every, sampled)
        return sampled


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements of a tensor lie in memory without gaps, in any order."""
    if tensor.layout is not torch.strided:
        return False
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.numel() == last + 1


def _are_on_cpu(*tensors: torch.Tensor) -> bool:
    return all(tensor.device.type == "cpu" and tensor.dtype.itemsize in _INTEGERS for tensor in tensors)


def _addresses(tensors: Sequence[torch.Tensor]) -> tuple[Array, Array]:
    """Return the addresses and numbers of elements of contiguous tensors, which must outlive their use."""
    return (
        np.array([tensor.data_ptr() for tensor in tensors], np.int64),
        np.array([tensor.numel() for tensor in tensors], np.int64),
    )


@intrinsic
def _pointer(_context, address):  # type: ignore[no-untyped-def]
    """Convert an address to a pointer, from which Numba's `carray` makes an array."""
    signature = types.voidptr(address)

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return signature, generate


@jit
def _gather_elements(addresses, sizes, places, counts, values, nonzero):  # type: ignore[no-untyped-def]
    start = 0
    for number in range(addresses.size):
        bits = carray(_pointer(addresses[number]), sizes[number], values.dtype)
        n_nonzero = 0
        for i in range(bits.size):
            n_nonzero += bits[i] != 0
        nonzero[number] = n_nonzero
        stop = start + counts[number]
        for i in range(start, stop):
            place = places[i]
            if place < 0 or place >= bits.size:
                return number
            values[i] = bits[place]
        start = stop
    return -1


@jit
def _sample(addresses, sizes, starts, counts, every, sampled):  # type: ignore[no-untyped-def]
    place = 0
    for number in range(addresses.size):
        data = carray(_pointer(addresses[number]), sizes[number], np.uint8)
        for run in range(counts[number]):
            start = starts[number] + run * every
            for i in range(start, min(start + _RUN, data.size)):
                sampled[place + i - start] = data[i]
            place += _RUN


@jit
def _are_equal(before_addresses, after_addresses, sizes):  # type: ignore[no-untyped-def]
    for number in range(before_addresses.size):
        before = carray(_pointer(before_addresses[number]), sizes[number], np.uint8)
        after = carray(_pointer(after_addresses[number]), sizes[number], np.uint8)
        different = 0
        for i in range(before.size):
            different += before[i] != after[i]
        if different:
            return False
    return True


@jit
def _are_products(before_addresses, scale, after_addresses, sizes):  # type: ignore[no-untyped-def]
    for number in range(before_addresses.size):
        before = carray(_pointer(before_addresses[number]), sizes[number], np.float32)
        after = carray(_pointer(after_addresses[number]), sizes[number], np.int32)
        different = 0
        for i in range(before.size):
            different += np.float32(before[i] * scale).view(np.int32) != after[i]
        if different:
            return False
    return True
