"""The ops that add to an output what its tokens' adapters change, of linears, embeddings and experts; in plain torch.

A pass puts it behind linears (passes/add_lora.py); on a GPU kernels.py takes its place. Defined with torch.library's
define/impl because calling a `torch.library.custom_op` imports Dynamo and Inductor.

Shape legend: T tokens, K inputs and N outputs of a linear, P of its parts with adapters, r their rank, L slots, V ids
of an embedding, E experts and k of them a token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.nn import functional

_LIBRARY = torch.library.Library("mllm", "FRAGMENT")
_LIBRARY.define("add_lora(Tensor y, Tensor x, Tensor a, Tensor b, Tensor slots, int[] starts, int[] rows) -> Tensor")
_LIBRARY.define(
    "add_lora_of_experts(Tensor y, Tensor x, Tensor a, Tensor b, Tensor slots, Tensor ids, bool of_tokens) -> Tensor"
)
_LIBRARY.define("scale_of_adapters(Tensor y, Tensor scales, Tensor? bias, Tensor slots) -> Tensor")
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


def _pairs_of(slots: torch.Tensor, ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """[T * k] int32, slot * E + expert of each row; -1 where its token has no adapter, or the expert is elsewhere."""
    has_both = (slots[:, None] >= 0) & (ids >= 0)
    return torch.where(has_both, slots[:, None] * num_experts + ids, -1).reshape(-1).to(torch.int32)


def add_lora_of_experts_reference(
    y: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    slots: torch.Tensor,
    ids: torch.Tensor,
    of_tokens: bool,
) -> torch.Tensor:
    """y + B A x of each row's adapter and expert; independent of values, as above.

    Args:
        y: [T * k, N]; x: [T, K] if `of_tokens`, every expert of a token reads its one row; else [T * k, K].
        a: [L, E, r, K]; b: [L, E, N, r]; both in the dtype of x.
        slots: [T] int32, each token's slot; -1: it has no adapter.
        ids: [T, k] integers, an expert each, or ELSEWHERE.

    Returns:
        [T * k, N] in the dtype of y.
    """
    pairs, rows = _pairs_of(slots, ids, a.shape[1]), _rows(x, ids, of_tokens)
    some = pairs.clamp_min(0)
    shrunk = torch.bmm(a.flatten(0, 1)[some], rows[:, :, None])
    added = torch.bmm(b.flatten(0, 1)[some], shrunk)[:, :, 0]
    return y + torch.where((pairs >= 0)[:, None], added, 0)


def add_lora_of_experts_on_cpu(
    y: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    slots: torch.Tensor,
    ids: torch.Tensor,
    of_tokens: bool,
) -> torch.Tensor:
    """The same, of the rows alone that have an adapter; rows of one pair are multiplied together."""
    out = y.clone(memory_format=torch.contiguous_format)
    pairs, rows = _pairs_of(slots, ids, a.shape[1]), _rows(x, ids, of_tokens)
    of_pairs = a.flatten(0, 1), b.flatten(0, 1)
    for pair in torch.unique(pairs).tolist():
        if pair >= 0:
            (places,) = torch.nonzero(pairs == pair, as_tuple=True)
            shrunk = functional.linear(rows[places], of_pairs[0][pair])
            out.index_add_(0, places, functional.linear(shrunk, of_pairs[1][pair]))
    return out


def _rows(x: torch.Tensor, ids: torch.Tensor, of_tokens: bool) -> torch.Tensor:
    """[T * k, K]."""
    return x[:, None].expand(-1, ids.shape[1], -1).reshape(-1, x.shape[1]) if of_tokens else x


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


def scale_of_adapters(
    y: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, slots: torch.Tensor
) -> torch.Tensor:
    """A linear's outputs, but for its bias, times the scales of each token's adapter (DoRA); as they are without one.

    Args:
        y: [..., N] of T tokens in all; scales: [L, N]; bias: [N] that y has, or None.
        slots: [T] int32, each token's slot; -1: it has no adapter.

    Returns:
        [..., N] in the dtype of y.
    """
    of_tokens = torch.where((slots >= 0)[:, None], scales[slots.clamp_min(0)], 1).view(y.shape)
    return y * of_tokens if bias is None else y * of_tokens + bias * (1 - of_tokens)  # exactly y where it is 1


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


def _fake_of_experts(
    y: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    slots: torch.Tensor,
    ids: torch.Tensor,
    of_tokens: bool,
) -> torch.Tensor:
    return torch.empty_like(y, memory_format=torch.contiguous_format)


def _fake_of_scales(
    y: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, slots: torch.Tensor
) -> torch.Tensor:
    return torch.empty_like(y, memory_format=torch.contiguous_format)


def _fake_of_ids(
    y: torch.Tensor, ids: torch.Tensor, a: torch.Tensor, b: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    return torch.empty_like(y, memory_format=torch.contiguous_format)


_LIBRARY.impl("add_lora", add_lora_reference, "CompositeExplicitAutograd")
_LIBRARY.impl("add_lora", add_lora_on_cpu, "CPU")
_LIBRARY.impl("scale_of_adapters", scale_of_adapters, "CompositeExplicitAutograd")
torch.library.register_fake("mllm::scale_of_adapters", _fake_of_scales, lib=_LIBRARY)
_LIBRARY.impl("add_lora_of_ids", add_lora_of_ids, "CompositeExplicitAutograd")
_LIBRARY.impl("add_lora_of_experts", add_lora_of_experts_reference, "CompositeExplicitAutograd")
_LIBRARY.impl("add_lora_of_experts", add_lora_of_experts_on_cpu, "CPU")
torch.library.register_fake("mllm::add_lora", _fake, lib=_LIBRARY)
torch.library.register_fake("mllm::add_lora_of_experts", _fake_of_experts, lib=_LIBRARY)
torch.library.register_fake("mllm::add_lora_of_ids", _fake_of_ids, lib=_LIBRARY)
