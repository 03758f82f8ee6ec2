"""Mixtures of experts that loop over them past Transformers' interface, as ops of ours for a trace.

A module is known by its forward's arguments and its weights' names. Its computation is written here again; the
self-check compares it with the model's own forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

Method = Callable[..., Any]


class ExpertSizes(NamedTuple):
    """Experts of one layer.

    Attributes:
        params: of all experts.
        unread_params: of no expert, though among theirs.
        num_choices: experts, and choices of none.
    """

    params: int
    unread_params: int
    num_choices: int


class LoopedExperts(NamedTuple):
    """A module that loops over experts.

    Attributes:
        methods: functions that compute what its methods of these names do, and do not loop.
    """

    module: torch.nn.Module
    methods: dict[str, Method]
    sizes: ExpertSizes


def looped_experts(model: torch.nn.Module) -> Iterator[LoopedExperts]:
    """The modules of `model` that loop over experts."""
    return (found for found in map(_looped, model.modules()) if found is not None)


def _looped(module: Any) -> LoopedExperts | None:
    inputs = _inputs(module)
    if inputs == ("hidden_states", "top_k_index", "top_k_weights"):
        if all(hasattr(getattr(module, "mlp", None), name) for name in ("w1", "v1", "w2", "activation_fn")):
            sizes = ExpertSizes(_num_params(module), 0, module.num_experts)
            return LoopedExperts(module, {"forward": _experts_in_rows}, sizes)
        if hasattr(module, "zero_expert_num") and module.down_proj is not None:
            unread = module.gate_up_proj[len(module.down_proj) :].numel()
            sizes = ExpertSizes(_num_params(module) - unread, unread, len(module.gate_up_proj))
            return LoopedExperts(module, {"forward": _experts_and_none}, sizes)
    linears: list[Any] = [getattr(module, name, None) for name in ("input_linear", "output_linear")]
    if all(_inputs(linear) == ("inputs", "expert_size") for linear in linears):
        sizes = ExpertSizes(sum(map(_num_params, linears)), 0, linears[0].num_experts)
        around_attention: dict[str, Method] = {"map": _map_to_experts, "reduce": _reduce_experts}
        is_around = all(hasattr(module, name) for name in around_attention)
        return LoopedExperts(module, around_attention if is_around else {"forward": _experts_of_sorted_rows}, sizes)
    return None


def weighted_sum(outer: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
    """The sum of a token's rows [T·k, H] by its weights [T, k]."""
    num_tokens, num_chosen = top_k_weights.shape
    return (outer * top_k_weights.reshape(-1, 1)).view(num_tokens, num_chosen, -1).sum(dim=1)


def _inputs(module: torch.nn.Module | None) -> tuple[str, ...]:
    """The arguments of a module's forward; () where Transformers chooses the forward."""
    if module is None or hasattr(module, "is_concatenated"):  # its interface's decorator
        return ()
    return tuple(inspect.signature(type(module).forward).parameters)[1:]


def _num_params(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _experts_in_rows(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Each weight's rows are all experts' in turn; the last has their inputs in its rows."""
    op, mlp = torch.ops.mllm.expert_linear, module.mlp
    gate, up, down = (weight.view(module.num_experts, -1, module.hidden_size) for weight in (mlp.w1, mlp.v1, mlp.w2))
    rows = hidden_states.reshape(-1, module.hidden_size)
    inner = mlp.activation_fn(op(rows, top_k_index, gate, None, False, True))
    inner = inner * op(rows, top_k_index, up, None, False, True)
    outer = op(inner, top_k_index, down, None, True, False)
    return weighted_sum(outer, top_k_weights).to(hidden_states.dtype).view(hidden_states.shape)


def _experts_and_none(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Choices beyond the experts, of none, give the token itself."""
    op = torch.ops.mllm.expert_linear
    num_experts, num_chosen = len(module.down_proj), top_k_index.shape[1]
    # A choice of none computes a row that nobody reads, of an expert that the token has chosen besides: no further
    # weight is read for it.
    is_none = (top_k_index >= num_experts) & (top_k_index < len(module.gate_up_proj))
    expert = torch.where(is_none, top_k_index.amin(dim=-1, keepdim=True).clamp(max=num_experts - 1), top_k_index)
    gate, up = op(hidden_states, expert, module.gate_up_proj[:num_experts], None, False, True).chunk(2, dim=-1)
    outer = op(module.act_fn(gate) * up, expert, module.down_proj, None, False, False)
    itself = hidden_states.repeat_interleave(num_chosen, dim=0)
    outer = torch.where(is_none.reshape(-1, 1), itself, outer)
    return weighted_sum(outer, top_k_weights).to(hidden_states.dtype)


def _experts_of_sorted_rows(module: Any, layer_input: torch.Tensor) -> torch.Tensor:
    rows = layer_input.reshape(-1, layer_input.shape[-1])
    weights, experts, _ = _route(module.router, rows)
    gate, up = _linear(module.input_linear, rows, experts, True).chunk(2, dim=-1)
    outer = _linear(module.output_linear, module.activation(gate) * up, experts, False)
    out: torch.Tensor = weighted_sum(outer, weights).view(layer_input.shape) + module.bias
    return out


def _map_to_experts(module: Any, layer_input: torch.Tensor) -> tuple[Any, ...]:
    """The first of two methods around an attention: a token's queries, and what the second needs."""
    rows = layer_input.reshape(-1, layer_input.shape[-1])
    weights, experts, logits = _route(module.router, rows)
    queries = _linear(module.input_linear, rows, experts, True)
    return queries.view(*layer_input.shape[:-1], module.top_k, -1), logits, (weights, experts)


def _reduce_experts(module: Any, layer_input: torch.Tensor, topo_info: tuple[torch.Tensor, ...]) -> torch.Tensor:
    weights, experts = topo_info
    outer = _linear(module.output_linear, layer_input.reshape(-1, layer_input.shape[-1]), experts, False)
    out: torch.Tensor = weighted_sum(outer, weights).view(*layer_input.shape[:-2], -1) + module.bias
    return out


def _route(router: Any, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each token's weights and experts [T, k], and all logits."""
    logits = router.layer(rows).float()
    chosen, experts = logits.topk(router.top_k, dim=1)
    return torch.softmax(chosen, dim=1).type_as(rows), experts, logits


def _linear(module: Any, rows: torch.Tensor, experts: torch.Tensor, of_tokens: bool) -> torch.Tensor:
    out: torch.Tensor = torch.ops.mllm.expert_linear(rows, experts, module.weight, None, False, of_tokens)
    return out
