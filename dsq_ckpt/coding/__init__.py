"""Entropy coding of codes given the codes of the parent checkpoint, and exact storage of floats.

A `Coder` is a model fitted on the joint counts of (previous code, code). All chunks of a group are encoded with one
model. `rans` reaches the conditional entropy. `changes` does too if few codes change, and is then faster. `huffman` is
the coder of the papers, with the same interface.
"""

from __future__ import annotations

from dsq_ckpt.coding.base import Coder
from dsq_ckpt.coding.changes import ChangesCoder, fit_fastest
from dsq_ckpt.coding.huffman import HuffmanCoder, huffman_bits
from dsq_ckpt.coding.lossless import shuffle_compress, shuffle_decompress
from dsq_ckpt.coding.rans import RansCoder
from dsq_ckpt.errors import CodingError
from dsq_ckpt.native import path as coder_path

__all__ = [
    "ChangesCoder",
    "Coder",
    "CodingError",
    "HuffmanCoder",
    "RansCoder",
    "coder_class",
    "coder_path",
    "fit_fastest",
    "huffman_bits",
    "shuffle_compress",
    "shuffle_decompress",
]

_CODERS: dict[str, type[Coder]] = {cls.name: cls for cls in (RansCoder, HuffmanCoder, ChangesCoder)}


def coder_class(name: str) -> type[Coder]:
    """Return the coder registered under `name`.

    Raises:
        CodingError: there is no such coder.
    """
    try:
        return _CODERS[name]
    except KeyError:
        raise CodingError(f"unknown coder {name!r}, expected one of {sorted(_CODERS)}") from None
