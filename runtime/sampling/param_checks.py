"""Refusals of a request's parameters: a value that is not what is expected, a name that is no field."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import wraps
from typing import Any, TypeVar

from mllm_compile.runtime.errors import RequestError
from mllm_compile.runtime.short_repr import short_repr
from mllm_compile.runtime.unknown_names import tells_unknown

T = TypeVar("T")


def refused(field: str, expected: str, got: object, hint: str = "") -> RequestError:
    """The error for a field's value."""
    return RequestError(f"{field}: expected {expected}, got {short_repr(got)}. {hint}".rstrip())


def by_name_alone(example: str, elsewhere: Mapping[str, str]) -> Callable[[type[T]], type[T]]:
    """Makes the constructor of a dataclass refuse arguments without a name, and unknown ones with what to use.

    Args:
        example: an argument by name.
        elsewhere: for names that likeness does not lead to a field, what to do instead.
    """

    def decorate(cls: type[T]) -> type[T]:
        def unknown(name: str, known: Sequence[str]) -> RequestError:
            return RequestError(f"{name} is no field of {cls.__name__}. {_instead(name, known, elsewhere)}")

        create: Callable[..., None] = tells_unknown(unknown)(cls.__init__)

        @wraps(create)
        def init(self: T, *args: object, **values: Any) -> None:
            if args:
                raise RequestError(
                    f"{cls.__name__}: expected arguments by name, such as {example}, got {short_repr(args)}."
                )
            create(self, **values)

        cls.__init__ = init  # type: ignore[assignment]
        return cls

    return decorate


def _instead(name: str, known: Sequence[str], elsewhere: Mapping[str, str]) -> str:
    if name in elsewhere:
        return elsewhere[name]
    closest = get_close_matches(name, known, n=1)
    return f"Did you mean {closest[0]}?" if closest else f"Known: {', '.join(known)}."
