"""Settings of deltas and of chains of them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StrictBool

from dsq_ckpt.core.strict_model import StrictModel

_LINKS, _SIBLINGS = 4, 2
"""Of `delta.max_chain: auto`, by measurement: benchmarks/results/parents-*.json and docs/design/files.md."""
_DIFFERENCES = 32
"""Of `delta.max_chain: auto` with `delta.against: values`, each of which is added to the one before."""


class DeltaConfig(StrictModel):
    """Coding against the parent checkpoint."""

    enabled: StrictBool = True
    against: Literal["codes", "values"] = Field(
        "codes", description="codes: given the parent's codes; values: the difference to the values the parent "
        "decodes to (base layer), and bit for bit where there is no parent"
    )
    coder: Literal["rans", "huffman"] = Field(
        "rans", description="rans: all codes, or a list of those that change, where few do; huffman: as in the papers"
    )
    rearrange: StrictBool = Field(True, description="huffman: deltas split by previous code")
    run_length: StrictBool = Field(True, description="huffman: lengths of runs are coded")
    max_chain: Annotated[int, Field(ge=1, le=1000)] | Literal["auto"] = Field(
        32, description="a keyframe at the latest after this many deltas, each against the one before; auto: "
        "checkpoints share a parent, so that a load decodes few of them"
    )
    failure_interval: Annotated[float, Field(gt=0)] | Literal["observed"] | None = Field(
        None, description="seconds from one failure of the run to the next; then a keyframe is written before "
        "`max_chain` where it costs less time than the restores that are expected; observed: by the restores of the run"
    )

    @property
    def most_links(self) -> int:
        """How many deltas a load may have to decode."""
        if isinstance(self.max_chain, int):
            return self.max_chain
        return _DIFFERENCES if self.against == "values" else _LINKS

    @property
    def siblings(self) -> int:
        """How many checkpoints in a row are coded against the same one."""
        return 1 if isinstance(self.max_chain, int) or self.against == "values" else _SIBLINGS
