"""Settings of files and threads, which the readers of checkpoints use without a configuration."""

from __future__ import annotations

import os
from typing import Annotated, Literal

from pydantic import Field, StrictBool

from dsq_ckpt.core.strict_model import StrictModel

# Number of ranks on this host, as set by torchrun, by the launcher of Open MPI, and by MPICH and its derivatives.
_LOCAL_RANKS = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")


class StorageConfig(StrictModel):
    """Files and threads."""

    threads: int = Field(0, ge=0, le=256, description="worker threads per rank; 0: cores / local ranks, at most 8")
    fsync: StrictBool = Field(True, description="flush every file and directory to the device before the commit")
    zstd_level: int = Field(3, ge=1, le=19, description="for tensors stored exactly")
    block_elements: int = Field(1 << 20, ge=1 << 10, le=1 << 26, description="elements coded per block")
    on_device: StrictBool = Field(
        True, description="quantize CUDA tensors on their GPU; false: copy them to the host first"
    )
    stage: Literal["auto", "copy", "quantize"] = Field(
        "auto", description="what training waits for in an asynchronous save; auto: the shorter one that memory allows"
    )
    replicate_keyframes: StrictBool | Annotated[int, Field(ge=1, le=8)] = Field(
        False, description="files that all deltas of a chain need exist in two copies (true), or in so many"
    )

    @property
    def keyframe_copies(self) -> int:
        """How many copies of a keyframe's files a chain of checkpoints has."""
        return 1 + self.replicate_keyframes if isinstance(self.replicate_keyframes, bool) else self.replicate_keyframes

    def thread_count(self) -> int:
        """Return the number of worker threads of this rank."""
        if self.threads:
            return self.threads
        values = (os.environ.get(name, "") for name in _LOCAL_RANKS)
        local_ranks = max(1, next((int(ranks) for ranks in values if ranks.isdecimal()), 1))
        return max(1, min(8, (os.cpu_count() or 1) // local_ranks))
