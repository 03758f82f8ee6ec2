"""The op of a mixture of experts: each row times the weight of the expert that it was sent to.

A trace holds two of them a layer, with the model's own activation between (mllm_compile/model/experts_hook.py). On a
CPU the reference below runs, which compiled pieces call by name. On a GPU passes put kernels in the op's place, and
pieces that run as they were traced get the same kernels by the op. Defined with torch.library's define/impl because
calling a `torch.library.custom_op` imports Dynamo and Inductor.

Shape legend: T tokens, k experts a token, E experts, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from mllm_compile.runtime.forward_context import get_forward_context, is_forward_context_available
from mllm_compile.runtime.ops.experts.shapes import ELSEWHERE

_LIBRARY = torch.library.Library("mllm", "FRAGMENT")
_LIBRARY.define(
    "expert_linear(Tensor x, Tensor ids, Tensor weight, Tensor? bias, bool is_transposed, bool of_tokens) -> Tensor"
)


def expert_linear_reference(
    x: torch.Tensor,
    ids: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    is_transposed: bool,
    of_tokens: bool,
) -> torch.Tensor:
    """Multiplies row t·k + j by the weight of expert ids[t, j], in plain torch.

    Args:
        x: [T, K] if `of_tokens`, every expert of a token reads its one row; else [T·k, K].
        ids: [T, k] integers, an expert each, or ELSEWHERE: that row is zeros.
        weight: [E, N, K], or [E, K, N] if `is_transposed`.
        bias: [E, N] or None.

    Returns:
        [T·k, N] in the dtype of x.

    Raises:
        IndexError: an id is no expert's.
    """
    outputs = weight.shape[2 if is_transposed else 1]

    def weight_of(expert: int) -> torch.Tensor:
        return weight[expert] if is_transposed else weight[expert].T

    rows = x.to(weight.dtype)
    return products_of_experts(rows, ids, weight.shape[0], outputs, weight_of, bias, of_tokens).to(x.dtype)


def products_of_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    num_experts: int,
    outputs: int,
    weight_of: Callable[[int], torch.Tensor],
    bias: torch.Tensor | None,
    of_tokens: bool,
) -> torch.Tensor:
    """[T·k, N] in the dtype of x of each row and the weight [K, N] of its expert; of one that no row has none is asked
    for. Rows whose expert is ELSEWHERE are zeros. In the deterministic mode rows are multiplied one by one: the last
    bits of a product of several depend on how many there are.

    Raises:
        IndexError: an id is no expert's.
    """
    flat = ids.reshape(-1)
    order = flat.argsort(stable=True)
    start = int((flat == ELSEWHERE).sum())  # these come first
    chosen = flat[order[start:]]
    if chosen.numel() and not 0 <= int(chosen[0]) <= int(chosen[-1]) < num_experts:
        raise IndexError(f"a router chose an expert beyond the {num_experts} there are: {sorted(set(flat.tolist()))}")
    rows = x[order // ids.shape[1] if of_tokens else order]
    out = x.new_zeros(flat.shape[0], outputs)
    one_by_one = is_forward_context_available() and get_forward_context().deterministic
    for expert, count in enumerate(torch.bincount(chosen, minlength=num_experts).tolist()):
        if count:
            own, weight = rows[start : start + count], weight_of(expert)
            product = torch.stack([row @ weight for row in own]) if one_by_one else own @ weight
            if bias is not None:
                product = product + bias[expert]
            out[order[start : start + count]] = product.to(out.dtype)
            start += count
    return out


def _by_kernels(
    x: torch.Tensor,
    ids: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    is_transposed: bool,
    of_tokens: bool,
) -> torch.Tensor:
    """The same without a wait for the ids, so that it can be captured; a row whose id is no expert's is NaN."""
    from mllm_compile.runtime.ops import op

    order, blocks, block = order_of_step(ids, weight.shape[0])
    how = (ids.shape[1], is_transposed, of_tokens, False, block)
    out: torch.Tensor = op("grouped_linear")(x, order, blocks, weight, bias, *how)
    return out


def order_of_step(ids: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor | None, int]:
    """The order of a step's rows, their blocks, and the size of these, by kernels."""
    from mllm_compile.runtime.ops import op
    from mllm_compile.runtime.ops.experts.shapes import ONE_ROW, rows_at_once, rows_of_block

    num_tokens, num_chosen = ids.shape
    block = rows_of_block(num_tokens, num_chosen, num_experts)
    if block == ONE_ROW:
        return ids, None, block
    slots = torch.ones(num_tokens, dtype=torch.int64, device=ids.device)  # padding cannot be told here
    order, blocks = op("order_experts")(ids, slots, num_experts, block, rows_at_once(num_tokens, num_chosen))
    return order, blocks, block


def _fake(
    x: torch.Tensor,
    ids: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    is_transposed: bool,
    of_tokens: bool,
) -> torch.Tensor:
    return x.new_empty(ids.shape[0] * ids.shape[1], weight.shape[2 if is_transposed else 1])


_LIBRARY.impl("expert_linear", expert_linear_reference, "CompositeExplicitAutograd")
_LIBRARY.impl("expert_linear", _by_kernels, "CUDA")
torch.library.register_fake("mllm::expert_linear", _fake, lib=_LIBRARY)
