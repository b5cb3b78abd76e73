"""Price of a chain: a keyframe takes longer to write than a delta, and makes the restores to come shorter.

Used where `delta.failure_interval` tells how often a run is restored. Speeds are measured in the process that saves.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from itertools import islice, pairwise
from pathlib import Path
from statistics import median, median_low
from typing import NamedTuple

import numpy as np

from dsq_ckpt.coding import decoding_tasks
from dsq_ckpt.config.schema import DSQConfig
from dsq_ckpt.core.urls import is_remote
from dsq_ckpt.core.workers import Scratch
from dsq_ckpt.engine.history import ParentRef
from dsq_ckpt.errors import DSQError
from dsq_ckpt.storage.chain_decoding import ChainRecord, decode_chain
from dsq_ckpt.storage.checkpoint import Checkpoint
from dsq_ckpt.storage.manifest import Manifest
from dsq_ckpt.storage.predecessors import iter_predecessors
from dsq_ckpt.storage.shard import RecordRef
from dsq_ckpt.storage.write_speed import write_speed

logger = logging.getLogger(__name__)

_WINDOW = 12
"""Checkpoints whose times and restores are looked at; their manifests are in the cache."""
_MOST_RESTORES = 1e9
"""Restores of a checkpoint beyond which a chain has one delta, with an interval however small."""
_MEASURED_DEPTH, _KEPT_TIMES = 4, 64
"""Deltas of a chain by which the time of one is measured, since all files of a chain are opened for that; and
checkpoints whose times are kept."""
_PASSES = 2
"""Decodings of which the fastest counts: the first one of a process may load code and fill caches."""
_delta_times: dict[str, float] = {}
"""Seconds that a thread takes for an element of a delta, by the save id of the checkpoint that it was measured at."""


class ChainPrice(NamedTuple):
    """Costs of a chain, in seconds of a rank.

    Attributes:
        keyframe: time to write the bytes that a keyframe has beyond a delta.
        delta: time that a restore takes to decode a delta.
        restores: restores that each checkpoint is expected to serve.
    """

    keyframe: float
    delta: float
    restores: float

    def allows_delta(self, depth: int, siblings: int) -> bool:
        """Return whether a delta against the end of a chain costs no more than the chain does per checkpoint so far.

        Later deltas cost more than earlier ones, so the mean is least where the next one costs more than that.

        Args:
            depth: deltas in the chain.
            siblings: checkpoints that are coded against the same one.
        """
        each = self.restores * self.delta
        mean = (self.keyframe + each * siblings * depth * (depth + 1) / 2) / (1 + siblings * depth)
        return each * (depth + 1) <= mean


def is_keyframe_cheaper(path: Path, manifest: Manifest, candidate: ParentRef, config: DSQConfig) -> bool:
    """Return whether a keyframe is expected to cost less time than one more delta; False where that is unknown.

    It is unknown before this process has written a file, on object stores, and for differences of values.

    Args:
        path: the checkpoint that the next one would be coded against.
        manifest: its manifest.
        candidate: the same, with its place in the run.
        config: the time between failures, and threads.
    """
    interval = config.delta.failure_interval
    if interval is None or manifest.depth == 0 or is_remote(path) or config.delta.against == "values":
        return False
    price, unknown = None, "files of the chain cannot be read"
    with suppress(DSQError, OSError):
        restores = expect_restores(path, manifest, candidate, interval)
        price = None if restores == 0 else _measure_price(path, manifest, config, restores)
        unknown = "no speed was measured" if restores else f"delta.failure_interval ({interval}): no restores expected"
    if price is None:
        logger.debug("after '%s' there is no price of a chain: %s", path, unknown)
        return False
    delta, keyframe = f"delta {manifest.depth + 1}", "a keyframe"
    allowed = price.allows_delta(manifest.depth, config.delta.siblings)
    logger.debug(
        "after '%s' %s instead of %s: a keyframe takes %.2g s more to write, a restore %.2g s for each delta, and %.2g "
        "restores of each checkpoint are expected", path, *((delta, keyframe) if allowed else (keyframe, delta)), *price
    )
    return not allowed


def expect_restores(path: Path, manifest: Manifest, candidate: ParentRef, interval: float | str) -> float:
    """Return how many restores a checkpoint is expected to serve: the time until the next one, over that of a failure.

    Args:
        path: the newest checkpoint of the chain.
        manifest: its manifest.
        candidate: the same, with the number of restores up to now.
        interval: seconds between failures; "observed": those of the last checkpoints, by the restores since.
    """
    now, older = time.time(), [entry for _, entry in islice(iter_predecessors(path), _WINDOW - 1)]
    times = [manifest.created, *(entry.created for entry in older)]
    gaps = [newer - before for newer, before in pairwise(times)] or [now - manifest.created]
    if interval == "observed":
        restores = max(candidate.lossy_resumes - (older[-1] if older else manifest).lossy_resumes, 0)
        # A clock that was set back is behind them all.
        found = median(gaps) * restores / max(max(now, *times) - min(times), 1e-3)
    else:
        found = median(gaps) / float(interval)
    return min(max(found, 0.0), _MOST_RESTORES)


def _measure_price(path: Path, manifest: Manifest, config: DSQConfig, restores: float) -> ChainPrice | None:
    bytes_of = Counter[str]()
    for file in manifest.files:
        if file.role in ("own", "ancestor"):
            bytes_of[file.name[:16]] += file.size
    speed = write_speed.get()
    seconds = None if speed is None else _recall_delta_time(path, manifest, bytes_of.keys())
    if speed is None or seconds is None:
        return None
    elements = sum(report.elements for report in manifest.groups.values() if report.delta)
    added = max(bytes_of.values()) - bytes_of[manifest.save_id]
    ranks, threads = max(manifest.ranks, 1), config.storage.thread_count()
    return ChainPrice(added / ranks / speed, seconds * elements / ranks / threads, restores)


def _recall_delta_time(path: Path, manifest: Manifest, chain: Collection[str]) -> float | None:
    """Return the lower median of `_time_delta` at checkpoints of the chain; a long one is not measured again.

    Args:
        path: the checkpoint.
        manifest: its manifest.
        chain: save ids of its chain.
    """
    known = [seconds for save_id, seconds in list(_delta_times.items()) if save_id in chain]
    if known and manifest.depth > _MEASURED_DEPTH:
        return median_low(known)
    seconds = _time_delta(path, manifest)
    if seconds is not None:
        _delta_times[manifest.save_id] = seconds
        for save_id in list(_delta_times)[:-_KEPT_TIMES]:
            _delta_times.pop(save_id, None)
        seconds = median_low([*known, seconds])
    return seconds


def _time_delta(path: Path, manifest: Manifest) -> float | None:
    """Return the seconds that a thread takes for an element of a delta, by the first block of the largest chunk."""
    own = sorted(file.name for file in manifest.files if file.role == "own")
    with Checkpoint(path, lazy=True) as checkpoint:
        for name in own:
            with checkpoint.translate_errors(name):
                sizes = {
                    math.prod(record["shape"]): number
                    for number, record in enumerate(checkpoint.open_reader(name).contents["records"])
                    if record["type"] == "coded" and "parent" in record
                }
                if not sizes:
                    continue
                chain = checkpoint.read_chain(RecordRef(name, sizes[max(sizes)]))
                count = min(max(sizes), min(link.step for link in chain))
                if len({link.step for link in chain}) == 1 and count:
                    seconds = min(_time_deltas(chain, count) for _ in range(_PASSES))
                    return seconds / (len(chain) - 1) / count
    return None


def _time_deltas(chain: Sequence[ChainRecord], count: int) -> float:
    """Return the seconds that a thread takes to decode the first `count` codes of all deltas of a chain."""
    codes, other = np.empty(count, np.uint8), np.empty(count, np.uint8)
    span, scratch, seconds = slice(0, count), Scratch(), 0.0
    decoding_tasks.run_task(decode_chain(chain[:1], span, codes, scratch))
    for record in chain[1:]:
        started = time.perf_counter()
        if record.in_place:
            decoding_tasks.run_task(record.update(span, codes, scratch))
        else:
            decoding_tasks.run_task(record.decode(span, codes, other, scratch))
            codes, other = other, codes
        seconds += time.perf_counter() - started
    return seconds
