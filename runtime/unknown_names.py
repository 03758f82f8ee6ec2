"""Arguments that a function does not have: refused with what to use, where Python raises a bare TypeError."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from inspect import signature
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def tells_unknown(refuse: Callable[[str, Sequence[str]], Exception]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a function refuse a keyword argument that it does not have by the error that `refuse` makes of its name.

    Args:
        refuse: takes the name and the names of the function's own arguments.
    """

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        known = tuple(name for name in signature(function).parameters if name != "self")

        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs:
                if name not in known:
                    raise refuse(name, known)
            return function(*args, **kwargs)

        return checked

    return decorated
