"""Saves whose planner caches plans (`enable_plan_caching` of `DefaultSavePlanner`), and guards against stale ones.

From the second save on, a rank whose plan is as before sends an empty one; the coordinator then plans nothing and sends
empty plans back, and the planner of each rank takes the plan of an earlier save from its cache. DCP compares names,
offsets and shapes, not dtypes and paths in the nested state dict. All planners of one class name in a process share a
cache, whatever they save, on which ranks, and with which writer; so does a save that failed halfway.

So every rank sends a digest of its present plan with the id of the save that its cached plan is from. The coordinator
compares them with what it has cached itself, and sends a full plan where they differ; a rank sends a full plan unless
its last save with the planner got past planning with the same digest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import xxhash
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

from dsq_ckpt.dcp.calls import DEFAULT_PLANNERS, SaveCall
from dsq_ckpt.dcp.small_plans import by_lowest_rank
from dsq_ckpt.dcp.staging import Offer
from dsq_ckpt.dcp.tied_plans import together
from dsq_ckpt.engine.context import SaveContext
from dsq_ckpt.errors import SaveFailed
from dsq_ckpt.quantization.layout import Layout


@dataclass
class _Known:
    """The last save of so many ranks with one cache of DCP.

    Attributes:
        state: digest of this rank's plan; None: unknown, or that save did not get past planning.
        planned: on the coordinator, what DCP had cached, while a save of other ranks uses its cache.
        dealt: on the coordinator, the last global plan of DCP, and what was made of it.
        given: on the coordinator, each rank's last full plan, with the save and the layout that it was sent with.
        states: digests that `layout` is of.
        layout: on the coordinator, the layout that the ranks agreed on.
    """

    state: str | None = None
    planned: Sequence[Any] = ()
    dealt: tuple[list[SavePlan] | None, list[SavePlan]] = (None, [])
    given: Sequence[_Given] = ()
    states: Sequence[str | None] = ()
    layout: Layout | None = None


class _Given(NamedTuple):
    """A full plan that a rank was sent; `save_id` is the save that sent it, and `layout` the layout of that save."""

    save_id: str
    plan: SavePlan
    layout: Layout | None


class _Shortened(NamedTuple):
    """A context without its layout, which is that of the plan that the rank has cached."""

    context: SaveContext


_NO_LAYOUT = Layout({}, {})
_known: dict[tuple[str, int], _Known] = {}  # by key of DCP's caches, the class name of the planner, and number of ranks
_COORDINATORS = (SavePlanner._cached_all_plans, SavePlanner._cached_global_plan, SavePlanner._cached_metadata)


def _known_of(key: str, ranks: int) -> _Known:
    return _known.setdefault((key, ranks), _Known())


class CachedPlan:
    """The plan of this rank in a save whose planner caches plans.

    Attributes:
        items: all items of the present local plan, which DCP sends only if they differ from its cached ones.
    """

    def __init__(self, planner: DefaultSavePlanner, call: SaveCall) -> None:
        self._planner, self._call, self._state = planner, call, ""
        self._key, self._known = planner._cached_plans_key, _known_of(planner._cached_plans_key, call.ranks)
        self.items: list[WriteItem] = planner.plan.items

    @classmethod
    def of_stack(cls, plan: SavePlan) -> CachedPlan | None:
        """Return the plan of the save on this thread's stack; None: its planner does not cache plans.

        Raises:
            SaveFailed: the plan is cached, in a way that is not known here.
        """
        call = SaveCall.of_stack()
        if call is not None and _caches_as_usual(call.planner):
            assert isinstance(call.planner, DefaultSavePlanner)
            return cls(call.planner, call)
        if not getattr(plan, "usable", True):
            raise SaveFailed(PLAN_CACHING)
        return None

    def offered(self, plan: SavePlan, offer: Offer) -> SavePlan:
        """Return what this rank sends to the coordinator, full unless DCP and this package know it from the last save.

        Args:
            plan: local plan by the planner.
            offer: settings and layout of this rank.
        """
        if self._call.is_coordinator:
            self._exchange()
        assert isinstance(offer.content, Layout)
        self._state = _digest(self.items, self._planner.plan.planner_data, offer.content, self._call.ranks)
        before, self._known.state = self._known.state, None
        final = SavePlanner._cached_final_save_plan.get(self._key)
        origin = None if final is None else final.storage_data
        held = origin.save_id if isinstance(origin, SaveContext) else None  # else it is of another writer
        offer = offer._replace(state=self._state, held=held)
        if plan.usable or before != self._state:
            return replace(self._planner.plan, storage_data=offer)
        return replace(plan, storage_data=offer._replace(content=None))

    def arrived(self, plan: SavePlan) -> SaveContext | None:
        """Return the context that came with this rank's plan; called once, when all ranks have theirs.

        Args:
            plan: final plan by the planner, which came with the context of an earlier save if it was cached.
        """
        self._known.state = self._state
        call = SaveCall.of_stack()
        found = (plan if call is None or call.scattered is None else call.scattered).storage_data
        if isinstance(found, _Shortened) and isinstance(plan.storage_data, SaveContext):
            return replace(found.context, layout=plan.storage_data.layout)
        return found if isinstance(found, SaveContext) else None

    def _exchange(self) -> None:
        """Put what DCP has cached for another number of ranks aside, for which it would plan again."""
        cached = SavePlanner._cached_all_plans.get(self._key)
        if cached is None or len(cached) == self._call.ranks:
            return
        _known_of(self._key, len(cached)).planned = [cache.pop(self._key, None) for cache in _COORDINATORS]
        for cache, planned in zip(_COORDINATORS, self._known.planned, strict=False):
            cache[self._key] = planned  # type: ignore[index]


class GlobalPlan(NamedTuple):
    """The plans of all ranks, on the coordinator.

    Attributes:
        plans: full plans.
        offers: messages of the ranks; layouts that are cached are filled in.
        scattered: plans to be sent by the planner, which are empty where it takes them for cached.
        known: the last save of as many ranks; None: the planner does not cache plans.
    """

    plans: list[SavePlan]
    offers: list[Offer]
    scattered: list[SavePlan]
    known: _Known | None = None

    @classmethod
    def of_stack(cls, plans: list[SavePlan], tied: bool = True) -> GlobalPlan:
        """Return the plans of the save on this thread's stack.

        Args:
            plans: global plan by the planner, in which plans that did not change are empty.
            tied: whether tied weights that the planner dealt to several ranks are to be written by one.

        Raises:
            SaveFailed: a cached plan is not that of this save.
        """
        call = SaveCall.of_stack()
        messages = [] if call is None or call.gathered is None else [plan.storage_data for plan in call.gathered]
        ours = all(isinstance(offer, Offer) and offer.state is not None for offer in messages)
        if call is None or not messages or not ours or not _caches_as_usual(call.planner):
            offers = [plan.storage_data for plan in plans if isinstance(plan.storage_data, Offer)]
            if len(offers) != len(plans):
                raise SaveFailed(PLAN_CACHING)
            if call is not None and call.gathered and type(call.planner) in DEFAULT_PLANNERS:
                plans = by_lowest_rank(plans, call.gathered)
                if tied:
                    plans = together(plans, call.gathered, call.planner.state_dict)  # type: ignore[attr-defined]
            return cls(plans, offers, plans)
        assert isinstance(call.planner, DefaultSavePlanner)
        key, whole = call.planner._cached_plans_key, call.planner.global_plan
        sources = SavePlanner._cached_all_plans[key]
        if not len(whole) == len(sources) == len(plans) == len(messages):
            raise SaveFailed(_stale(f"it is of {len(sources)} rank(s), not {len(messages)}", call.planner))
        offers = []
        for rank, (own, source) in enumerate(zip(messages, sources, strict=True)):
            planned = source.storage_data if source.usable else None
            if not isinstance(planned, Offer) or planned.state != own.state:
                raise SaveFailed(_stale(f"that of rank {rank} is of another state or writer", call.planner))
            offers.append(own._replace(content=planned.content))
        known = _known_of(key, len(plans))
        if known.dealt[0] is not whole:
            known.dealt = whole, by_lowest_rank(whole, sources)
        return cls(known.dealt[1], offers, plans, known)

    def agreed(self) -> Layout | None:
        """Return the layout that the ranks agreed on for the same plans; None: they are others."""
        same = self.known is not None and self.known.states == [offer.state for offer in self.offers]
        return self.known.layout if self.known is not None and same else None

    def with_context(self, context: SaveContext) -> list[SavePlan]:
        """Return the plans to be sent, each with the context; full ones where a rank has no such plan cached."""
        known = self.known
        if known is None:
            return [replace(plan, storage_data=context) for plan in self.scattered]
        sent, given = [], []
        before = known.given or [_Given("", SavePlan([]), None)] * len(self.plans)
        shortened = _Shortened(replace(context, layout=_NO_LAYOUT))
        for plan, whole, offer, last in zip(self.scattered, self.plans, self.offers, before, strict=True):
            # By DCP's comparison a plan of other dtypes is as before.
            if not plan.usable and offer.held == last.save_id and _same(whole, last.plan):
                given.append(last._replace(plan=whole))
                sent.append(replace(plan, storage_data=shortened if last.layout == context.layout else context))
            else:
                given.append(_Given(context.save_id, whole, context.layout))
                sent.append(replace(whole, storage_data=context))
        known.given, known.states, known.layout = given, [offer.state for offer in self.offers], context.layout
        return sent


def _same(one: SavePlan, other: SavePlan) -> bool:
    return one.items is other.items or one.items == other.items


def _caches_as_usual(planner: SavePlanner) -> bool:
    """Return whether a planner caches plans as `DefaultSavePlanner` does."""
    if not isinstance(planner, DefaultSavePlanner) or not getattr(planner, "_enable_plan_caching", False):
        return False
    names = ("create_local_plan", "create_global_plan", "finish_plan")
    return not any(
        name in vars(planner) or getattr(type(planner), name) is not getattr(DefaultSavePlanner, name) for name in names
    )


def _digest(items: Sequence[WriteItem], planner_data: object, layout: Layout, ranks: int) -> str:
    rows = []
    for item in items:
        data = item.tensor_data
        box = None if data is None else (data.chunk.offsets, data.chunk.sizes, data.size, str(data.properties.dtype))
        rows.append((item.index.fqn, item.type.value, box))
    settings = sorted(layout.settings)  # sets have no order
    text = repr((ranks, rows, planner_data, replace(layout, settings=frozenset()), settings))
    return xxhash.xxh3_128_hexdigest(text.encode("utf-8", "surrogatepass"))


def _stale(problem: str, planner: SavePlanner) -> str:
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
