"""The state of an optimizer that a load asks a checkpoint for: that of parameters which had one when it was saved.

An optimizer has none of a parameter that had no gradient yet. A new one, whose state torch initializes for a load, has
that of all parameters, and one that has stepped that of others, perhaps.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from dsq_ckpt.api import background
from dsq_ckpt.core.nesting import Nesting
from dsq_ckpt.core.subclasses import refuse_meta
from dsq_ckpt.distributed.comm import Communicator, run_on_all_ranks
from dsq_ckpt.errors import LoadFailed
from dsq_ckpt.storage.files import CheckpointFiles
from dsq_ckpt.storage.paths import existing_path


def ask_for_saved(
    path: str | os.PathLike[str], state: dict[str, Any], parameters: Mapping[str, nn.Parameter], comm: Communicator
) -> Path:
    """Change the state dict of an optimizer so that a load fills all of what was saved, and asks for nothing else.

    Collective over `comm`.

    Args:
        path: the checkpoint.
        state: as of `Compressor.state`: with an optimizer's state by names of parameters, if there is one.
        parameters: parameters of the model, by name.
        comm: communicator of the ranks that load.

    Returns:
        The directory of the checkpoint.

    Raises:
        CheckpointNotFound: nothing is at `path`, or it is None.
        LoadFailed: the state of a sharded parameter was saved, and the optimizer has none that tells how to shard it;
            or the model is on the meta device.
        DSQError: what else failed, on every rank.
    """
    background.wait()

    def ask() -> Path:
        directory = existing_path(path)
        refuse_meta(state["model"])
        if "optimizer" in state:
            with CheckpointFiles(directory) as files, files.naming():
                _ask(state["optimizer"]["state"], parameters, directory, Nesting.from_json(files.index))
        return directory

    return run_on_all_ranks(comm, ask, LoadFailed)


def _ask(
    state: dict[str, Any], parameters: Mapping[str, nn.Parameter], directory: Path, nesting: Nesting | None
) -> None:
    if nesting is None:
        return
    saved = [path for path in (*nesting.values(), *(nesting.empty or ())) if path[0] == "optimizer"]
    if not saved:  # as of a model alone, which the load tells
        return
    names = {str(path[2]) for path in saved if path[1:2] == ("state",) and len(path) > 2}
    if names - state.keys() - parameters.keys():  # of another model, or numbers, as the optimizer itself has them
        return
    for name in state.keys() - names:
        del state[name]
    for name in sorted(names - state.keys()):
        parameter = parameters.get(name)
        if parameter is None or not parameter.requires_grad:  # whose state torch leaves out
            continue
        if isinstance(parameter, DTensor):
            raise LoadFailed(
                f"'{directory}' has the optimizer's state of '{name}', of which the optimizer has none, though it has "
                "that of other parameters: load into an optimizer that was not used yet"
            )
        state[name] = {}
