"""Components that wrappers of modules add to the names of parameters and buffers."""

from __future__ import annotations

WRAPPERS = {
    "_orig_mod": "torch.compile", "module": "DistributedDataParallel",
    "_fsdp_wrapped_module": "FullyShardedDataParallel", "_checkpoint_wrapped_module": "activation checkpointing",
}
"""Wrapper that adds each component."""


def strip_wrappers(name: str) -> str:
    """Return a name without the prefixes of torch.compile, DDP, FSDP and activation checkpointing."""
    parts = name.split(".")
    return name if WRAPPERS.keys().isdisjoint(parts) else ".".join(part for part in parts if part not in WRAPPERS)
