"""What the kernels use of Triton, typed: Triton is on GPU machines alone, and has no types of its own."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from triton.runtime.jit import JITFunction

_P = ParamSpec("_P")
_R = TypeVar("_R")

def jit(fn: Callable[_P, _R]) -> JITFunction[_P, _R]: ...
def cdiv(x: int, y: int) -> int: ...
def next_power_of_2(n: int) -> int: ...
