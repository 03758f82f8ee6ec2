"""A tensor of a checkpoint as a description: the parts of files that it is put together from.

Transformers' own conversion operations (stack experts, join gate and up, split a fused qkv, transpose) run on these.
The result says where each byte of a weight will come from, and the weight loader does it at load time. Any operation
that is not a mere rearrangement raises TypeError.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mllm_compile.runtime.weights.formats.base import Quantised
from mllm_compile.runtime.weights.views import ViewStep, view_shape


@dataclass(frozen=True)
class Block:
    """A box of a planned tensor, filled from one tensor of a file.

    Attributes:
        tensor, file: the tensor's name and its file.
        source_shape: its shape in the file; of a quantised weight its own.
        steps: views to take of it, in order.
        starts: where the box begins, in each dimension of the planned tensor.
        quantised: how a quantised weight is stored.
    """

    tensor: str
    file: str
    source_shape: tuple[int, ...]
    steps: tuple[ViewStep, ...]
    starts: tuple[int, ...]
    quantised: Quantised | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return view_shape(self.source_shape, self.steps)

    def then(self, op: str, *args: int) -> Block:
        """The block after a further view; two transpositions of the same dimensions cancel out."""
        if op == "transpose" and self.steps and self.steps[-1] in ((op, *args), (op, *reversed(args))):
            return replace(self, steps=self.steps[:-1])
        return replace(self, steps=(*self.steps, (op, *args)))


class PlannedTensor:
    """Supports the tensor operations that rearrange values, and no others."""

    def __init__(self, shape: Sequence[int], blocks: tuple[Block, ...]) -> None:
        self.shape = torch.Size(shape)
        self.blocks = blocks

    @classmethod
    def of_file(
        cls, tensor: str, file: str, shape: tuple[int, ...], quantised: Quantised | None = None
    ) -> PlannedTensor:
        """A tensor as it is in a file, or a weight that is computed from it and others."""
        return cls(shape, (Block(tensor, file, shape, (), (0,) * len(shape), quantised),))

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        method = _FUNCTIONS.get(func)
        if method is None:
            raise TypeError(f"{func.__name__} computes, which cannot be planned")
        return method(*args, **(kwargs or {}))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def size(self, dim: int) -> int:
        return self.shape[dim]

    def contiguous(self) -> PlannedTensor:
        return self

    def transpose(self, dim0: int, dim1: int) -> PlannedTensor:
        dim0, dim1 = dim0 % self.ndim, dim1 % self.ndim
        order = list(range(self.ndim))
        order[dim0], order[dim1] = dim1, dim0
        blocks = (
            replace(block.then("transpose", dim0, dim1), starts=tuple(block.starts[dim] for dim in order))
            for block in self.blocks
        )
        return PlannedTensor([self.shape[dim] for dim in order], tuple(blocks))

    def reshape(self, *shape: Any) -> PlannedTensor:
        """Reshapes a tensor of one block: the parts of several would not be boxes any more."""
        sizes = list(shape[0]) if len(shape) == 1 and isinstance(shape[0], Sequence) else list(shape)
        if -1 in sizes:
            known = math.prod(size for size in sizes if size != -1)
            sizes[sizes.index(-1)] = math.prod(self.shape) // known
        if sizes == list(self.shape):
            return self
        if len(self.blocks) != 1:
            raise TypeError("a reshape of a joined tensor cannot be planned")
        block = replace(self.blocks[0].then("reshape", *sizes), starts=(0,) * len(sizes))
        return PlannedTensor(sizes, (block,))

    view = reshape

    def squeeze(self, dim: int) -> PlannedTensor:
        dim %= self.ndim
        if self.shape[dim] != 1:
            return self
        return self._without(dim)

    def unsqueeze(self, dim: int) -> PlannedTensor:
        dim %= self.ndim + 1
        blocks = (
            replace(block.then("unsqueeze", dim), starts=(*block.starts[:dim], 0, *block.starts[dim:]))
            for block in self.blocks
        )
        return PlannedTensor((*self.shape[:dim], 1, *self.shape[dim:]), tuple(blocks))

    def in_halves(self, heads: int) -> PlannedTensor:
        """The rows of each head, which lie in pairs, in two halves: of a tensor of one block."""
        if len(self.blocks) != 1:
            raise TypeError("rows of a joined tensor cannot be planned in another order")
        return PlannedTensor(self.shape, (self.blocks[0].then("halves", heads),))

    def rows(self, numbers: Sequence[int]) -> PlannedTensor:
        """These rows of a tensor of one block."""
        if len(self.blocks) != 1:
            raise TypeError("rows of a joined tensor cannot be chosen")
        return PlannedTensor((len(numbers), *self.shape[1:]), (self.blocks[0].then("rows", *numbers),))

    def narrow(self, dim: int, start: int, length: int) -> PlannedTensor:
        blocks = []
        for block in self.blocks:
            first = max(start, block.starts[dim])
            last = min(start + length, block.starts[dim] + block.shape[dim])
            if first < last:
                cut = block.then("narrow", dim, first - block.starts[dim], last - first)
                blocks.append(_moved(cut, dim, first - start - block.starts[dim]))
        return PlannedTensor((*self.shape[:dim], length, *self.shape[dim + 1 :]), tuple(blocks))

    def split(self, sizes: int | Sequence[int], dim: int = 0) -> tuple[PlannedTensor, ...]:
        dim %= self.ndim
        total = self.shape[dim]
        if isinstance(sizes, int):
            sizes = [min(sizes, total - start) for start in range(0, total, sizes)]
        if sum(sizes) != total:
            raise ValueError(f"sizes {list(sizes)} do not add up to {total}")
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        return tuple(self.narrow(dim, start, size) for start, size in zip(starts, sizes, strict=True))

    def chunk(self, chunks: int, dim: int = 0) -> tuple[PlannedTensor, ...]:
        return self.split(-(-self.shape[dim] // chunks), dim)

    def _without(self, dim: int) -> PlannedTensor:
        blocks = (
            replace(block.then("squeeze", dim), starts=(*block.starts[:dim], *block.starts[dim + 1 :]))
            for block in self.blocks
        )
        return PlannedTensor((*self.shape[:dim], *self.shape[dim + 1 :]), tuple(blocks))


def joined(tensors: Sequence[PlannedTensor], dim: int = 0) -> PlannedTensor:
    """Joins tensors along a dimension, as torch.cat does."""
    dim %= tensors[0].ndim
    shapes = {(*tensor.shape[:dim], *tensor.shape[dim + 1 :]) for tensor in tensors}
    if len(shapes) != 1:
        raise ValueError(f"tensors of shapes {[list(tensor.shape) for tensor in tensors]} cannot be joined")
    blocks: list[Block] = []
    total = 0
    for tensor in tensors:
        blocks += (_moved(block, dim, total) for block in tensor.blocks)
        total += tensor.shape[dim]
    shape = tensors[0].shape
    return PlannedTensor((*shape[:dim], total, *shape[dim + 1 :]), tuple(blocks))


def _stack(tensors: Sequence[PlannedTensor], dim: int = 0) -> PlannedTensor:
    return joined([tensor.unsqueeze(dim) for tensor in tensors], dim)


def _moved(block: Block, dim: int, distance: int) -> Block:
    starts = list(block.starts)
    starts[dim] += distance
    return replace(block, starts=tuple(starts))


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.cat: joined,
    torch.stack: _stack,
    torch.split: PlannedTensor.split,
    torch.chunk: PlannedTensor.chunk,
    torch.transpose: PlannedTensor.transpose,
}
