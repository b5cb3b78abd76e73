"""Saves whose planner caches plans (`enable_plan_caching` of `DefaultSavePlanner`), and guards against stale plans.

From the second save on, a rank whose plan has not changed sends an empty plan. If no plan has changed, the coordinator
does not plan and sends empty plans back, and the planner of each rank takes the plan of an earlier save from its cache.
DCP compares names, offsets and shapes, but not dtypes and paths in the nested state dict. All planners of one class
name in a process share a cache, whatever they save, on which ranks, and with which writer, even after a failed save.

Therefore every rank sends a digest of its current plan and the id of the save that sent its cached plan. The
coordinator compares both with its own cache, and sends a full plan if they differ. A rank sends a full plan unless its
last save with the planner completed planning with the same digest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import xxhash
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

from dsq_ckpt.dcp.call_stack import DEFAULT_PLANNERS, SaveCall
from dsq_ckpt.dcp.replica_assignment import assign_to_lowest_rank
from dsq_ckpt.dcp.staging import LocalPlanData
from dsq_ckpt.dcp.tied_assignment import assign_tied_together
from dsq_ckpt.engine.context import SaveContext
from dsq_ckpt.errors import SaveFailed
from dsq_ckpt.quantization.layout import Layout


@dataclass
class _CacheState:
    """The last save with a cache of DCP and a number of ranks.

    Attributes:
        digest: digest of this rank's plan; None: unknown, or that save did not complete planning.
        swapped_plans: on the coordinator, the plans cached by DCP, while a save of other ranks uses its cache.
        deduplicated: on the coordinator, the last global plan of DCP, and the deduplicated plans made of it.
        sent_plans: on the coordinator, the last full plan sent to each rank.
        digests: digests of all ranks for which `layout` was made.
        layout: on the coordinator, the layout of all ranks.
        exponents: exponents of the last save, as this rank computed them; None: it computed none.
    """

    digest: str | None = None
    swapped_plans: Sequence[Any] = ()
    deduplicated: tuple[list[SavePlan] | None, list[SavePlan]] = (None, [])
    sent_plans: Sequence[_SentPlan] = ()
    digests: Sequence[str | None] = ()
    layout: Layout | None = None
    exponents: dict[str, float] | None = None


class _SentPlan(NamedTuple):
    """A full plan sent to a rank, with the id and the layout of that save."""

    save_id: str
    plan: SavePlan
    layout: Layout | None


class _ShortContext(NamedTuple):
    """A context without what the rank knows.

    Attributes:
        context: the context, without its layout, which equals that of the rank's cached plan.
        has_exponents: whether it has the exponents of the parent; else they equal those of the rank's last save.
    """

    context: SaveContext
    has_exponents: bool = True

    def complete(self, layout: Layout, exponents: dict[str, float] | None) -> SaveContext:
        """Return the whole context."""
        context = replace(self.context, layout=layout)
        if self.has_exponents:
            return context
        assert context.model is not None and exponents is not None
        return replace(context, model=replace(context.model, exponents=exponents))

    def without_exponents(self) -> _ShortContext:
        """Return the context for a rank that knows the exponents of the parent."""
        model = self.context.model
        if model is None:
            return self
        return _ShortContext(replace(self.context, model=replace(model, exponents={})), has_exponents=False)


_NO_LAYOUT = Layout({}, {})
_cache_states: dict[tuple[str, int], _CacheState] = {}  # by class name of the planner (DCP's key) and number of ranks
_COORDINATOR_CACHES = (SavePlanner._cached_all_plans, SavePlanner._cached_global_plan, SavePlanner._cached_metadata)


def _get_cache_state(key: str, ranks: int) -> _CacheState:
    return _cache_states.setdefault((key, ranks), _CacheState())


class CachedPlan:
    """The plan of this rank in a save whose planner caches plans.

    Attributes:
        items: all items of the current local plan; DCP sends them only if they differ from its cached ones.
    """

    def __init__(self, planner: DefaultSavePlanner, call: SaveCall) -> None:
        self._planner, self._call, self._digest = planner, call, ""
        self._key = planner._cached_plans_key
        self._cache_state = _get_cache_state(self._key, call.ranks)
        self.items: list[WriteItem] = planner.plan.items
        self._exponents: dict[str, float] | None = None

    @classmethod
    def from_stack(cls, plan: SavePlan) -> CachedPlan | None:
        """Return the plan of the save on this thread's stack; None: its planner does not cache plans.

        Raises:
            SaveFailed: the plan is cached in an unknown way.
        """
        call = SaveCall.from_stack()
        if call is not None and _caches_like_default(call.planner):
            assert isinstance(call.planner, DefaultSavePlanner)
            return cls(call.planner, call)
        if not getattr(plan, "usable", True):
            raise SaveFailed(PLAN_CACHING)
        return None

    def attach_data(self, plan: SavePlan, data: LocalPlanData) -> SavePlan:
        """Return the plan to send to the coordinator; it is empty if DCP and this package know it from the last save.

        Args:
            plan: local plan by the planner.
            data: settings and layout of this rank.
        """
        if self._call.is_coordinator:
            self._swap_caches()
        assert isinstance(data.content, Layout)
        self._digest = _compute_digest(self.items, self._planner.plan.planner_data, data.content, self._call.ranks)
        before, self._cache_state.digest = self._cache_state.digest, None
        final = SavePlanner._cached_final_save_plan.get(self._key)
        origin = None if final is None else final.storage_data
        cached_save_id = origin.save_id if isinstance(origin, SaveContext) else None  # else another writer sent it
        self._exponents = self._cache_state.exponents
        data = data._replace(
            digest=self._digest, cached_save_id=cached_save_id, exponents_digest=_compute_digest_of(self._exponents)
        )
        if plan.usable or before != self._digest:
            return replace(self._planner.plan, storage_data=data)
        return replace(plan, storage_data=data._replace(content=None))

    def receive_context(self, plan: SavePlan) -> SaveContext | None:
        """Return the context that was sent with this rank's plan. Call it once, when all ranks have received theirs.

        Args:
            plan: final plan by the planner; a cached one has the context of an earlier save.
        """
        self._cache_state.digest = self._digest
        call = SaveCall.from_stack()
        context = (plan if call is None or call.central_plan is None else call.central_plan).storage_data
        if isinstance(context, _ShortContext) and isinstance(plan.storage_data, SaveContext):
            return context.complete(plan.storage_data.layout, self._exponents)
        return context if isinstance(context, SaveContext) else None

    def keep_exponents(self, exponents: dict[str, float]) -> None:
        """Keep the exponents of this save, so that the coordinator need not send them for the next one."""
        self._cache_state.exponents = exponents

    def _swap_caches(self) -> None:
        """Swap DCP's cached plans for those of this number of ranks, which it would otherwise plan again."""
        cached = SavePlanner._cached_all_plans.get(self._key)
        if cached is None or len(cached) == self._call.ranks:
            return
        swapped_plans = [cache.pop(self._key, None) for cache in _COORDINATOR_CACHES]
        _get_cache_state(self._key, len(cached)).swapped_plans = swapped_plans
        for cache, entry in zip(_COORDINATOR_CACHES, self._cache_state.swapped_plans, strict=False):
            cache[self._key] = entry  # type: ignore[index]


class GlobalPlan(NamedTuple):
    """The plans of all ranks, on the coordinator.

    Attributes:
        plans: full plans.
        rank_data: data of all ranks, in rank order, with cached layouts filled in.
        sent: plans to be sent by the planner; empty for ranks that have them cached.
        cache_state: the last save of as many ranks; None: the planner does not cache plans.
    """

    plans: list[SavePlan]
    rank_data: list[LocalPlanData]
    sent: list[SavePlan]
    cache_state: _CacheState | None = None

    @classmethod
    def from_stack(cls, plans: list[SavePlan], tied: bool = True) -> GlobalPlan:
        """Return the plans of the save on this thread's stack.

        Args:
            plans: global plan by the planner; plans that did not change are empty.
            tied: whether tied weights that the planner assigned to several ranks are to be written by one.

        Raises:
            SaveFailed: a cached plan belongs to another save.
        """
        call = SaveCall.from_stack()
        messages = [] if call is None or call.local_plans is None else [plan.storage_data for plan in call.local_plans]
        is_dsq = all(isinstance(data, LocalPlanData) and data.digest is not None for data in messages)
        if call is None or not messages or not is_dsq or not _caches_like_default(call.planner):
            rank_data = [plan.storage_data for plan in plans if isinstance(plan.storage_data, LocalPlanData)]
            if len(rank_data) != len(plans):
                raise SaveFailed(PLAN_CACHING)
            if call is not None and call.local_plans and type(call.planner) in DEFAULT_PLANNERS:
                plans = assign_to_lowest_rank(plans, call.local_plans)
                if tied:
                    state_dict = call.planner.state_dict  # type: ignore[attr-defined]
                    plans = assign_tied_together(plans, call.local_plans, state_dict)
            return cls(plans, rank_data, plans)
        assert isinstance(call.planner, DefaultSavePlanner)
        key, global_plan = call.planner._cached_plans_key, call.planner.global_plan
        sources = SavePlanner._cached_all_plans[key]
        if not len(global_plan) == len(sources) == len(plans) == len(messages):
            problem = f"it is of {len(sources)} rank(s), not {len(messages)}"
            raise SaveFailed(_describe_stale_plan(problem, call.planner))
        rank_data = []
        for rank, (message, source) in enumerate(zip(messages, sources, strict=True)):
            data = source.storage_data if source.usable else None
            if not isinstance(data, LocalPlanData) or data.digest != message.digest:
                problem = f"that of rank {rank} is of another state or writer"
                raise SaveFailed(_describe_stale_plan(problem, call.planner))
            rank_data.append(message._replace(content=data.content))
        cache_state = _get_cache_state(key, len(plans))
        if cache_state.deduplicated[0] is not global_plan:
            cache_state.deduplicated = global_plan, assign_to_lowest_rank(global_plan, sources)
        return cls(cache_state.deduplicated[1], rank_data, plans, cache_state)

    def get_agreed_layout(self) -> Layout | None:
        """Return the layout of the last save if the plans have not changed, else None."""
        is_same = self.cache_state is not None and self.cache_state.digests == [data.digest for data in self.rank_data]
        return self.cache_state.layout if self.cache_state is not None and is_same else None

    def with_context(self, context: SaveContext) -> list[SavePlan]:
        """Return the plans to send, each with the context; full plans for ranks that do not have them cached."""
        cache_state = self.cache_state
        if cache_state is None:
            return [replace(plan, storage_data=context) for plan in self.sent]
        sent, sent_plans = [], []
        before = cache_state.sent_plans or [_SentPlan("", SavePlan([]), None)] * len(self.plans)
        short = _ShortContext(replace(context, layout=_NO_LAYOUT))
        shortest = short.without_exponents()
        exponents_digest = _compute_digest_of(None if context.model is None else context.model.exponents)
        for plan, full_plan, data, last in zip(self.sent, self.plans, self.rank_data, before, strict=True):
            # DCP's comparison ignores dtypes.
            if not plan.usable and data.cached_save_id == last.save_id and _is_same_plan(full_plan, last.plan):
                sent_plans.append(last._replace(plan=full_plan))
                message = shortest if data.exponents_digest == exponents_digest else short
                sent.append(replace(plan, storage_data=message if last.layout == context.layout else context))
            else:
                sent_plans.append(_SentPlan(context.save_id, full_plan, context.layout))
                sent.append(replace(full_plan, storage_data=context))
        cache_state.sent_plans, cache_state.layout = sent_plans, context.layout
        cache_state.digests = [data.digest for data in self.rank_data]
        return sent


def _is_same_plan(one: SavePlan, other: SavePlan) -> bool:
    return one.items is other.items or one.items == other.items


def _caches_like_default(planner: SavePlanner) -> bool:
    """Return whether a planner caches plans as `DefaultSavePlanner` does."""
    if not isinstance(planner, DefaultSavePlanner) or not getattr(planner, "_enable_plan_caching", False):
        return False
    names = ("create_local_plan", "create_global_plan", "finish_plan")
    return not any(
        name in vars(planner) or getattr(type(planner), name) is not getattr(DefaultSavePlanner, name) for name in names
    )


def _compute_digest(items: Sequence[WriteItem], planner_data: object, layout: Layout, ranks: int) -> str:
    rows = []
    for item in items:
        data = item.tensor_data
        box = None if data is None else (data.chunk.offsets, data.chunk.sizes, data.size, str(data.properties.dtype))
        rows.append((item.index.fqn, item.type.value, box))
    settings = sorted(layout.settings)  # sets have no order
    text = repr((ranks, rows, planner_data, replace(layout, settings=frozenset()), settings))
    return xxhash.xxh3_128_hexdigest(text.encode("utf-8", "surrogatepass"))


def _compute_digest_of(exponents: dict[str, float] | None) -> str | None:
    return None if exponents is None else xxhash.xxh3_128_hexdigest(repr(exponents).encode("utf-8", "surrogatepass"))


def _describe_stale_plan(problem: str, planner: SavePlanner) -> str:
    name = type(planner).__name__
    return (
        f"the plan that {name}(enable_plan_caching=True) has cached is not that of this save: {problem}. DCP keeps one "
        f"plan for all planners of a class name: save again, and give saves of other ranks, or by another writer, a "
        f"subclass of {name} of their own"
    )


PLAN_CACHING = (
    "DCP reused the plan of an earlier save in a way that dsq_ckpt does not know: pass DefaultSavePlanner, or a "
    "subclass that leaves create_local_plan, create_global_plan and finish_plan as they are, or set "
    "enable_plan_caching=False"
)
