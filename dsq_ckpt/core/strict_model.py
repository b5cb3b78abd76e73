"""Base class of the models of a configuration, with strict keys and types."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError


class StrictModel(BaseModel):
    """An immutable model that refuses unknown keys, and booleans in place of numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_bool_for_number(cls, tree: Any) -> Any:
        """Raise an error for a boolean that pydantic would convert to 1 or 0."""
        for name, value in tree.items() if isinstance(tree, dict) else ():
            if isinstance(value, bool) and name in cls.model_fields:
                kinds = list(_iter_types(cls.model_fields[name].annotation))
                if bool not in kinds and (int in kinds or float in kinds):
                    text = f"{name} is {str(value).lower()}, expected a number"
                    raise PydanticCustomError("number_expected", "{text}", {"text": text})
        return tree


def _iter_types(annotation: Any) -> Iterator[Any]:
    """Yield an annotation and all types in it."""
    yield annotation
    for argument in get_args(annotation):
        yield from _iter_types(argument)
