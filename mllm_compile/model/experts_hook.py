"""The hook into Transformers' mixtures of experts: an implementation called "mllm" that emits one op a linear.

Registered through Transformers' own ExpertsInterface and chosen for a trace alone: the self-check compares with the
model's own experts. Only the products of rows with their experts' weights are ops of ours. The router, the activation
with whatever gate the model has, biases and the weighted sum are traced as the model has them, so no model is told
apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

import mllm_compile.runtime.ops.experts.linear  # noqa: F401  (defines torch.ops.mllm.expert_linear)
from mllm_compile.errors import UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

EXPERTS_IMPLEMENTATION = "mllm"
# What configs call experts a token, and all experts.
_CHOSEN = ("num_experts_per_tok", "top_k_experts")
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


def mllm_experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The experts of one layer, as Transformers calls them.

    Args:
        module: the experts; `use_experts_implementation` of Transformers says which attributes it has.
        hidden_states: [T, H].
        top_k_index: [T, k], the experts of each token.
        top_k_weights: [T, k], the weights of their outputs.

    Returns:
        [T, H].
    """
    op = torch.ops.mllm.expert_linear
    up = module.gate_up_proj if module.has_gate else module.up_proj
    up_bias, down_bias = None, None
    if module.has_bias:
        up_bias = module.gate_up_proj_bias if module.has_gate else module.up_proj_bias
        down_bias = module.down_proj_bias
    inner = op(hidden_states, top_k_index, up, up_bias, module.is_transposed, True)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    outer = op(inner, top_k_index, module.down_proj, down_bias, module.is_transposed, False)
    if getattr(module, "has_post_expert_norm", False):  # not in Transformers 5.17
        outer = module.post_expert_norm(outer)
    weighted = outer * top_k_weights.reshape(-1, 1)
    num_tokens, num_chosen = top_k_index.shape
    return weighted.view(num_tokens, num_chosen, -1).sum(dim=1).to(hidden_states.dtype)


def check_choices(config: Any) -> None:
    """Checks that a token does not choose more experts than there are.

    Raises:
        UnsupportedModelError: naming the two keys of config.json.
    """
    named, chosen = experts_per_token(config)
    for key in _COUNTS:
        count = getattr(config, key, None)
        if isinstance(count, int) and 0 < count < chosen:
            raise UnsupportedModelError(
                f"config.json says {named} {chosen} and {key} {count}: a token cannot choose more experts than there "
                "are. Correct it"
            )


def experts_per_token(config: Any) -> tuple[str, int]:
    """How the config calls the number of experts that a token chooses, and the number; 0 where it says none."""
    said = ((key, getattr(config, key, None)) for key in _CHOSEN)
    return next(((key, number) for key, number in said if isinstance(number, int)), (_CHOSEN[0], 0))


def expert_parameters(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The parameters [E, …] of all experts that follow Transformers' interface."""
    layers = [module for module in model.modules() if hasattr(module, "is_concatenated")]  # the interface's decorator
    return [parameter for layer in layers for parameter in layer.parameters(recurse=False)]


@contextmanager
def experts_as_ops(model: PreTrainedModel) -> Iterator[None]:
    """Within the context, layers of experts that follow Transformers' interface emit ops of ours."""
    if not expert_parameters(model):
        yield
        return
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(EXPERTS_IMPLEMENTATION, mllm_experts)
    before = model.config._experts_implementation
    model.set_experts_implementation(EXPERTS_IMPLEMENTATION)
    try:
        yield
    finally:
        model.set_experts_implementation(before)
