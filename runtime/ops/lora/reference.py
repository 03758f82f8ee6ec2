"""The ops that add to an output what its tokens' adapters change: of a linear, and of an embedding; in plain torch.

A pass puts it behind linears (passes/add_lora.py); on a GPU kernels.py takes its place. Defined with torch.library's
define/impl because calling a `torch.library.custom_op` imports Dynamo and Inductor.

Shape legend: T tokens, K inputs and N outputs of a linear, P of its parts with adapters, r their rank, L slots, V ids
of an embedding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.nn import functional

_LIBRARY = torch.library.Library("mllm", "FRAGMENT")
_LIBRARY.define("add_lora(Tensor y, Tensor x, Tensor a, Tensor b, Tensor slots, int[] starts, int[] rows) -> Tensor")
_LIBRARY.define("add_lora_of_ids(Tensor y, Tensor ids, Tensor a, Tensor b, Tensor slots) -> Tensor")


def add_lora_reference(
    y: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    slots: torch.Tensor,
    starts: Sequence[int],
    rows: Sequence[int],
) -> torch.Tensor:
    """y + B A x of each token's adapter; independent of values, so that it can be captured.

    Args:
        y: [..., N] of T tokens in all; x: [..., K].
        a: [L, P * r, K]; b: [L, sum of rows, r]; both in the dtype of x.
        slots: [T] int32, each token's slot; -1: it has no adapter.
        starts, rows: [P] the outputs of each part, first and number.

    Returns:
        [..., N] in the dtype of y.
    """
    return _added(y, x, a, b, slots, starts, rows, range(a.shape[0]))


def add_lora_on_cpu(
    y: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    slots: torch.Tensor,
    starts: Sequence[int],
    rows: Sequence[int],
) -> torch.Tensor:
    """The same, of the adapters alone that some token has."""
    used = torch.unique(slots).tolist()
    return _added(y, x, a, b, slots, starts, rows, [slot for slot in used if slot >= 0])


def add_lora_of_ids(
    y: torch.Tensor, ids: torch.Tensor, a: torch.Tensor, b: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    """y + B of each token's adapter times the row of A that is its id's; independent of values, as above.

    Args:
        y: [..., N] of T tokens in all; ids: [..., ] their ids.
        a: [L, V, r]; b: [L, N, r]; both in the dtype of y.
        slots: [T] int32, each token's slot; -1: it has no adapter.

    Returns:
        [..., N] in the dtype of y.
    """
    shrunk = a[slots.clamp_min(0), ids.reshape(-1)]
    out = y.clone(memory_format=torch.contiguous_format)
    flat = out.view(-1, y.shape[-1])
    for slot in range(a.shape[0]):
        flat += torch.where((slots == slot)[:, None], functional.linear(shrunk, b[slot]), 0)
    return out


def _added(
    y: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    slots: torch.Tensor,
    starts: Sequence[int],
    rows: Sequence[int],
    used: Iterable[int],
) -> torch.Tensor:
    out = y.clone(memory_format=torch.contiguous_format)
    flat, inputs = out.view(-1, y.shape[-1]), x.reshape(-1, x.shape[-1])
    rank = b.shape[-1]
    for slot in used:
        has_it = (slots == slot)[:, None]
        shrunk, first = functional.linear(inputs, a[slot]), 0
        for part, (start, count) in enumerate(zip(starts, rows, strict=True)):
            of_part = functional.linear(shrunk[:, part * rank : (part + 1) * rank], b[slot, first : first + count])
            outputs = flat[:, start : start + count]
            outputs += torch.where(has_it, of_part, 0)
            first += count
    return out


def _fake(
    y: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    slots: torch.Tensor,
    starts: Sequence[int],
    rows: Sequence[int],
) -> torch.Tensor:
    return torch.empty_like(y, memory_format=torch.contiguous_format)


def _fake_of_ids(
    y: torch.Tensor, ids: torch.Tensor, a: torch.Tensor, b: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    return torch.empty_like(y, memory_format=torch.contiguous_format)


_LIBRARY.impl("add_lora", add_lora_reference, "CompositeExplicitAutograd")
_LIBRARY.impl("add_lora", add_lora_on_cpu, "CPU")
_LIBRARY.impl("add_lora_of_ids", add_lora_of_ids, "CompositeExplicitAutograd")
torch.library.register_fake("mllm::add_lora", _fake, lib=_LIBRARY)
torch.library.register_fake("mllm::add_lora_of_ids", _fake_of_ids, lib=_LIBRARY)
