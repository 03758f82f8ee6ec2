"""Masks in the trace of a model that writes its attention out: those that it takes for granted, and tables of its own.

Where attention bypasses Transformers' interface, a model may not run without a mask, and a trace builds no mask. It
then gets a number, zero, which hides nothing; the check of the trace asks Transformers what its masks hide
(model/mask_probe.py). Another one reads its mask in a table for its longest text, where a step may have more tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from mllm_compile.errors import UnsupportedModelError
from mllm_compile.model.attention_hook import ATTENTION_IMPLEMENTATION

# Errors of a trace without a mask, in torch 2.11 to 2.13.
_LACKS_MASK = ("NoneType", "AttributeError('to')", "AttributeError([ConstantVariable(str: 'to')])")


def with_a_mask_if_needed(trace: Callable[[], fx.GraphModule]) -> fx.GraphModule:
    """Calls `trace`, and once more with masks of zero if it fails for the lack of one.

    Raises:
        UnsupportedModelError: what the first call says, if the second fails as well.
    """
    try:
        return trace()
    except UnsupportedModelError as error:
        if not any(sign in str(error) for sign in _LACKS_MASK):
            raise
        try:
            with _masks_of_zero():
                return trace()
        except UnsupportedModelError:
            raise error from None


@contextmanager
def tables_for_any_step(
    model: torch.nn.Module, constants: Mapping[str, torch.Tensor], most_tokens: int
) -> Iterator[None]:
    """Within the context tables of places by places, [.., N, N], have a size for steps of `most_tokens`, on meta:
    find_attention takes them out of the trace, with values from `constants`. The check of the trace refuses a model
    that keeps one (changed_tables). A tower that is traced later has its own as they are."""
    before: list[tuple[dict[str, Any], str, tuple[int, ...]]] = []
    for name in constants:
        module_name, _, leaf_name = name.rpartition(".")
        buffers = model.get_submodule(module_name)._buffers
        table = buffers[leaf_name]
        if _is_table(table) and table.shape[-1] < most_tokens:  # type: ignore[union-attr]
            before.append((buffers, leaf_name, tuple(table.shape)))  # type: ignore[union-attr]
            buffers[leaf_name] = table.new_empty(*table.shape[:-2], most_tokens, most_tokens)  # type: ignore[union-attr]
    try:
        yield
    finally:
        for tables, leaf_name, shape in before:
            tables[leaf_name] = tables[leaf_name].new_empty(shape)  # a fake one, as the trace made of all others


def changed_tables(gm: fx.GraphModule, constants: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """The tables that are read at another size than they have."""
    for node in gm.graph.find_nodes(op="placeholder"):
        value = constants.get(node.meta.get("weight_name", ""))
        if value is not None and node.users and tuple(value.shape) != tuple(node.meta["val"].shape):
            yield node.meta["weight_name"]


def _is_table(buffer: torch.Tensor | None) -> bool:
    return buffer is not None and buffer.dim() >= 2 and buffer.shape[-1] == buffer.shape[-2] > 1


@contextmanager
def _masks_of_zero() -> Iterator[None]:
    from transformers import AttentionMaskInterface

    AttentionMaskInterface.register(ATTENTION_IMPLEMENTATION, _zero)
    try:
        yield
    finally:
        del AttentionMaskInterface._global_mapping[ATTENTION_IMPLEMENTATION]


def _zero(*args: Any, dtype: torch.dtype = torch.float32, device: Any = None, **kwargs: Any) -> torch.Tensor:
    return torch.zeros((), dtype=dtype, device=device)
