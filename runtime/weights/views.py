"""Views that a checkpoint's tensor is taken by before it fills its part of a weight."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

import torch

from mllm_compile.runtime.errors import CheckpointError
from mllm_compile.runtime.short_repr import short_repr, typed_repr

DAMAGED = "in the runtime's program.json is damaged; compile the model again"

# A view to take of a tensor: ("narrow", dim, start, length), ("transpose", dim, dim), ("reshape", *sizes),
# ("squeeze", dim), ("unsqueeze", dim), ("halves", heads): the rows of each head, which lie in pairs, in two halves;
# ("rows", *numbers): these rows, which are copied.
ViewStep = tuple[str | int, ...]


def viewed(tensor: torch.Tensor, steps: Iterable[ViewStep]) -> torch.Tensor:
    """`tensor` after the views of `steps`; no data is copied unless a reshape or rows need it."""
    for name, *args in steps:
        tensor = _VIEWS[str(name)](tensor, *args)
    return tensor


def _rows(tensor: torch.Tensor, *numbers: int) -> torch.Tensor:
    """Raises ValueError for a row that the tensor has not."""
    if min(numbers) < 0 or max(numbers) >= tensor.shape[0]:
        raise ValueError(f"rows of {tensor.shape[0]} are wanted up to {max(numbers)}")
    return tensor.index_select(0, torch.tensor(numbers, device=tensor.device))


_VIEWS: dict[str, Callable[..., torch.Tensor]] = {
    "narrow": torch.narrow,
    "transpose": torch.transpose,
    "reshape": lambda tensor, *sizes: tensor.reshape(sizes),
    "squeeze": torch.squeeze,
    "unsqueeze": torch.unsqueeze,
    "halves": lambda tensor, heads: tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2),
    "rows": _rows,
}
_INVERSE = {"transpose": "transpose", "unsqueeze": "squeeze"}


@lru_cache(maxsize=4096)  # experts, many thousand, have few shapes and no two the same places
def view_shape(shape: tuple[int, ...], steps: tuple[ViewStep, ...]) -> tuple[int, ...]:
    """The shape of a tensor of `shape` after the views of `steps`.

    Raises:
        CheckpointError: it has no such views.
    """
    try:
        if any(step[0] == "narrow" and int(step[2]) < 0 for step in steps):
            raise ValueError("a part begins ahead of it")  # torch would count from its end
        return tuple(viewed(torch.empty(shape, device="meta"), steps).shape)
    except (RuntimeError, ValueError, LookupError, TypeError, OverflowError) as error:
        raise CheckpointError(
            f"a tensor of shape {list(shape)} cannot be viewed by {short_repr(steps)} ({typed_repr(str(error))}): the "
            f"table of weights {DAMAGED}"
        ) from error


def rows_first(steps: tuple[ViewStep, ...]) -> tuple[tuple[ViewStep, ...], tuple[ViewStep, ...]]:
    """The views of a weight that leave its rows whole, and those behind them, which take a rank's part of each row."""
    count = next((place for place, step in enumerate(steps) if step[:2] == ("narrow", -1)), len(steps))
    return steps[:count], steps[count:]


def unviewed(place: torch.Tensor, steps: Sequence[ViewStep]) -> torch.Tensor | None:
    """The place as a tensor is before the views of `steps`, to be filled straight; None where there is no such view."""
    for name, *args in reversed(steps):
        if name not in _INVERSE:
            return None
        place = _VIEWS[_INVERSE[name]](place, *args)
    return place
