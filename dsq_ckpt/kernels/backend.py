"""Interface of kernels on torch tensors, for any device."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor


class Refinement(NamedTuple):
    """Arguments of `refine` for `quantize`, which then refines in the same pass."""

    low: Tensor
    """float64, lower edge of each cell."""
    inv_width: Tensor
    """float64, one over the width of each cell."""
    bits: int
    log_domain: bool
    out: Tensor
    """uint8[n], filled with symbols."""


class Backend(Protocol):
    """Kernels on flat contiguous tensors of one device, tables included.

    Names, arguments and results, bit for bit, are those of `dsq_ckpt.kernels.cpu`, with these differences:

    * `x`, `weight` and `new` may be float32, bfloat16 or float16, which are converted to fp32; decoded values are
      rounded to the nearest number of the output's dtype.
    * Wrong shapes, dtypes and numbers raise `ValueError` at once. Codes, symbols and positions past the end of a
      table never cause an access outside it, but a GPU reports them only when `check` is called.
    * Selected elements are returned with their number m, int64[] on the device. With a `capacity` the caller does
      not wait for m: the results have `capacity` entries, of which the first m are filled, or all if m is larger.
    """

    name: str

    def check(self) -> None:
        """Wait for the device; raise `ValueError` if since the last call something was past the end of a table."""

    def sketch(self, x: Tensor, lo: int, hi: int, inv_scale: float, counts: Tensor) -> None:
        """Add the elements of `x` to `counts`, int64[size]."""

    def joint_sketch(
        self, x: Tensor, parent: Tensor | None, context: int, lo: int, hi: int, inv_scale: float, counts: Tensor
    ) -> None:
        """Add the pairs (parent code, bin) to `counts`, int64[rows, size]."""

    def quantize(
        self, x: Tensor, parent: Tensor | None, context: int, lo: int, hi: int, inv_scale: float, table: Tensor,
        codes: Tensor, refinement: Refinement | None = None, protected_code: int = -1,
    ) -> Tensor | None:
        """Set `codes[i] = table[parent code, bin]`, and with `refinement` its symbols in the same pass.

        With `protected_code` the result may be its counts, for `gather_protected`.
        """

    def gather_protected(
        self, x: Tensor, codes: Tensor, protected_code: int, tally: Tensor | None = None, bf16: bool = False,
        capacity: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the fp32 bits, uint32[m], of the elements with `protected_code`, in order, and m.

        With `bf16` uint16[m]: the nearest bf16, never infinity. `tally` is the result of `quantize`
        for the same codes.
        """

    def refine(
        self, x: Tensor, codes: Tensor, inv_scale: float, low: Tensor, inv_width: Tensor, bits: int, log_domain: bool,
        out: Tensor,
    ) -> None:
        """Quantize the position of each element inside its cell, uint8[n]."""

    def dequantize(
        self, codes: Tensor, levels: Tensor, scale: float, protected_code: int, protected: Tensor, out: Tensor
    ) -> Tensor:
        """Set `out = levels[code] * scale`; return the number of protected codes, int64[] on the device."""

    def dequantize_refined(
        self, codes: Tensor, refinement: Tensor, bits: int, low: Tensor, width: Tensor, sign: Tensor, levels: Tensor,
        scale: float, protected_code: int, protected: Tensor, log_domain: bool, out: Tensor,
    ) -> Tensor:
        """Decode as `dequantize`, to the middle of the part of the cell that the symbol selects."""

    def pack(self, symbols: Tensor, bits: int) -> Tensor:
        """Return symbols below `2**bits` as a stream of bits, uint8[ceil(n * bits / 8)]."""

    def unpack(self, packed: Tensor, bits: int, out: Tensor) -> None:
        """Invert `pack`."""

    def find_changes(
        self, codes: Tensor, parent: Tensor, capacity: int | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return positions, int32[m], and codes, uint8[m], of the elements whose codes differ, and m.

        Positions are int64 for more than 2**31 codes.
        """

    def apply_changes(self, parent: Tensor, positions: Tensor, changed: Tensor, out: Tensor) -> None:
        """Invert `find_changes`."""

    def blend(self, average: Tensor, new: Tensor, weight: float) -> None:
        """Set `average = weight * new + (1 - weight) * average`, rounded as `gradients.offload.blend` does."""

    def sketch_sensitivity(
        self, parameter: Tensor, average: Tensor, counts: Tensor, new: Tensor | None = None, weight: float = 0.0
    ) -> None:
        """Add `|parameter * average|` to `counts`, int64[FULL.size]; `new` is blended into `average` first."""

    def compute_importance(self, weight: Tensor, average: Tensor) -> Tensor:
        """Return `|weight * average|`, float32[n]."""

    def classify(self, importance: Tensor, prune_below: float, protect_from: float) -> Tensor:
        """Return the class of each element, uint8[n]."""
