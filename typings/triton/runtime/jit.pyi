from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R", covariant=True)

class JITFunction(Generic[_P, _R]):
    # A kernel calls it, with numbers where it takes tensors as well; the host launches it, with torch's tensors.
    def __call__(self, *args: Any, **kwargs: Any) -> _R: ...
    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]: ...
