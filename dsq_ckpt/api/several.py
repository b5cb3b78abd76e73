"""Several models as one, by the names that they have in a state dict."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

Models = Sequence[tuple[str, nn.Module]]
"""Modules with the names before those of their tensors, which are empty where there is nothing before."""


def as_one(models: Models) -> nn.Module:
    """Return a module that has all of these, the same one again as long as they live; of one model, that one."""
    if len(models) == 1:
        return models[0][1]
    known = _known.setdefault(models[0][1], [])
    known[:] = [one for one in known if one.lives()]
    found = next((one for one in known if one.consists_of(models)), None)
    if found is None:
        known.append(found := _Several(models))
    return found


class _Several(nn.Module):
    """A module of several, which it does not keep alive: for its `named_modules` and what calls these.

    So it has parameters and buffers, but no children and no state dict.

    What was seen of a model at earlier saves is kept as long as the model lives (see `quantization.frozen`), so this is
    kept as long as its models, and must not keep them itself.
    """

    def __init__(self, models: Models) -> None:
        super().__init__()
        self._models = [(name, weakref.ref(model)) for name, model in models]

    def lives(self) -> bool:
        """Return whether all models are still there."""
        return all(model() is not None for _, model in self._models)

    def consists_of(self, models: Models) -> bool:
        """Return whether it is of these models, by these names."""
        return len(models) == len(self._models) and all(
            name == own_name and model is own() for (name, model), (own_name, own) in
            zip(models, self._models, strict=True)
        )

    def named_modules(  # which all other iterators of a module call
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Any]]:
        memo = set() if memo is None else memo
        yield prefix, self
        for name, own in self._models:
            if (model := own()) is not None:
                yield from model.named_modules(memo, ".".join(filter(None, (prefix, name))), remove_duplicate)


_known: weakref.WeakKeyDictionary[nn.Module, list[_Several]] = weakref.WeakKeyDictionary()
