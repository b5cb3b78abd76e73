"""Registry of codebooks by their `fit`, and the type of the field `codebook` of a configuration."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Annotated, Any, TypeVar, Union, get_args

from pydantic import Field, SerializeAsAny, TypeAdapter, WrapValidator

from dsq_ckpt.codebooks.base import CodebookConfig
from dsq_ckpt.core.registry import Registry
from dsq_ckpt.errors import ConfigError

CODEBOOKS: Registry[type[CodebookConfig]] = Registry("codebook", "dsq_ckpt.codebooks")

_C = TypeVar("_C", bound=type[CodebookConfig])


def register_codebook(cls: _C) -> _C:
    """Register a codebook under the name or names of its field `fit`; a decorator.

    An installed package can instead declare the class as an entry point of `dsq_ckpt.codebooks`, named by its `fit`.
    It is then found without an import, also in processes of this package.

    Raises:
        ConfigError: `fit` is not a `Literal` of its name, `propose` is missing, or the name is taken.
    """
    kind: type[CodebookConfig] = cls
    names = get_args(kind.model_fields["fit"].annotation)
    if not names or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{cls.__name__}.fit must be annotated with its name, as Literal['{cls.__name__.lower()}']")
    if inspect.isabstract(cls):
        raise ConfigError(f"{cls.__name__} does not define {', '.join(sorted(cls.__abstractmethods__))}")
    for name in names:
        CODEBOOKS.register(name, cls)
    return cls


@cache
def _codebook_adapter(kinds: tuple[type[CodebookConfig], ...]) -> TypeAdapter[Any]:
    any_of_them: Any = Union[kinds]  # noqa: UP007
    return TypeAdapter(Annotated[any_of_them, Field(discriminator="fit")])


def _validate_codebook(value: Any, handler: Any) -> Any:
    fit = value.get("fit") if isinstance(value, dict) else None
    if isinstance(fit, str) and CODEBOOKS.get(fit) is None:
        CODEBOOKS.load()
    kinds = tuple(dict.fromkeys(CODEBOOKS[fit] for fit in sorted(CODEBOOKS)))
    return _codebook_adapter(kinds).validate_python(value)


AnyCodebook = Annotated[SerializeAsAny[CodebookConfig], WrapValidator(_validate_codebook)]
"""Any registered codebook, selected by `fit`."""
