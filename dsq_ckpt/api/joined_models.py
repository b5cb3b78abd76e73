"""Several models joined into one module, with the names that they have in a state dict."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

Models = Sequence[tuple[str, nn.Module]]
"""Modules with the prefix of the names of their tensors; an empty prefix for none."""


def join_models(models: Models) -> nn.Module:
    """Return a module with the submodules of all models; the same one for the same models, while these are alive.

    For a single model, return it.
    """
    if len(models) == 1:
        return models[0][1]
    joins = _joined_models.setdefault(models[0][1], [])
    joins[:] = [join for join in joins if join.is_alive()]
    joined = next((join for join in joins if join.consists_of(models)), None)
    if joined is None:
        joins.append(joined := _JoinedModels(models))
    return joined


class _JoinedModels(nn.Module):
    """Module with the submodules of several models, to which it has weak references.

    It has `named_modules` and everything based on it, so it has parameters and buffers, but no children and no state
    dict. Records of a model at earlier saves live as long as the model (see `quantization.frozen_tensors`), so this
    module lives as long as its models, and must not keep them alive.
    """

    def __init__(self, models: Models) -> None:
        super().__init__()
        self._models = [(name, weakref.ref(model)) for name, model in models]

    def is_alive(self) -> bool:
        """Return whether all models are still alive."""
        return all(model() is not None for _, model in self._models)

    def consists_of(self, models: Models) -> bool:
        """Return whether these are its models, with these names."""
        return len(models) == len(self._models) and all(
            name == own_name and model is own() for (name, model), (own_name, own) in
            zip(models, self._models, strict=True)
        )

    def named_modules(  # all other iterators of a module call it
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Any]]:
        memo = set() if memo is None else memo
        yield prefix, self
        for name, own in self._models:
            if (model := own()) is not None:
                yield from model.named_modules(memo, ".".join(filter(None, (prefix, name))), remove_duplicate)


_joined_models: weakref.WeakKeyDictionary[nn.Module, list[_JoinedModels]] = weakref.WeakKeyDictionary()
