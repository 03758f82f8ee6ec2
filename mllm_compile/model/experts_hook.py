"""The hook into Transformers' mixtures of experts: an implementation called "mllm" that emits one op a linear.

Registered through Transformers' own ExpertsInterface and chosen for a trace alone: the self-check compares with the
model's own experts. Only the products of rows with their experts' weights are ops of ours. The router, the activation
with whatever gate the model has, biases and the weighted sum are traced as the model has them, so no model is told
apart.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

import mllm_compile.runtime.ops.experts.linear  # noqa: F401  (defines torch.ops.mllm.expert_linear)
from mllm_compile.errors import UnsupportedModelError
from mllm_compile.model.hf_model import layer_configs
from mllm_compile.model.looped_experts import ExpertSizes, looped_experts, weighted_sum

if TYPE_CHECKING:
    from transformers import PreTrainedModel

EXPERTS_IMPLEMENTATION = "mllm"
# Configs' names of experts a token, all experts, and further choices that cost nothing.
_CHOSEN = ("num_experts_per_tok", "moe_topk", "moe_top_k", "top_k_experts")
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_NO_EXPERTS = "zero_expert_num"


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
    return weighted_sum(outer, top_k_weights).to(hidden_states.dtype)


def check_choices(config: Any) -> None:
    """Checks that a token does not choose more experts than there are.

    Raises:
        UnsupportedModelError: naming the two keys of config.json.
    """
    for part in _parts_of(config):
        others = next(iter(_numbers(part, _NO_EXPERTS)), 0)
        for named, key in itertools.product(_CHOSEN, _COUNTS):
            for chosen, count in _of_same_layers(_numbers(part, named), _numbers(part, key)):
                if 0 < count + others < chosen:
                    raise UnsupportedModelError(
                        f"config.json says {named} {chosen} and {key} {count}: a token cannot choose more experts than "
                        "there are. Correct it"
                    )


def experts_per_token(config: Any) -> int:
    """The number of experts that a token chooses, the largest of all layers; 1 where the config says none."""
    numbers = (number for part in _parts_of(config) for key in _CHOSEN for number in _numbers(part, key))
    return max(numbers, default=1)


def _parts_of(config: Any) -> Iterator[Any]:
    """The configs of a model's layers, with those inside of them: some say of their experts in a config of its own."""
    for of_layer in layer_configs(config):
        yield of_layer
        yield from (getattr(of_layer, name) for name in of_layer.sub_configs)


def _numbers(config: Any, key: str) -> list[int]:
    """The numbers that a config has under this key: one, or one for each layer."""
    said = getattr(config, key, None)
    return [number for number in (said if isinstance(said, list) else [said]) if isinstance(number, int)]


def _of_same_layers(chosen: list[int], counts: list[int]) -> Iterable[tuple[int, int]]:
    return zip(chosen, counts, strict=True) if len(chosen) == len(counts) else itertools.product(chosen, counts)


def experts_of_layers(model: torch.nn.Module) -> list[ExpertSizes]:
    """The sizes of all experts."""
    sizes = [found.sizes for found in looped_experts(model)]
    for module in _modules_of_interface(model):
        parameters = list(module.parameters(recurse=False))
        sizes.append(ExpertSizes(sum(one.numel() for one in parameters), 0, len(parameters[0])))
    return sizes


def _modules_of_interface(model: torch.nn.Module) -> list[Any]:
    """The layers of experts that follow Transformers' interface."""
    return [module for module in model.modules() if is_of_interface(module)]


def is_of_interface(module: torch.nn.Module) -> bool:
    """True for a layer of experts whose weights are stacked as Transformers' interface has them."""
    return hasattr(module, "is_concatenated")  # its decorator


@contextmanager
def experts_as_ops(model: PreTrainedModel) -> Iterator[None]:
    """Within the context, layers of experts emit ops of ours."""
    looped = [(found.module, *method) for found in looped_experts(model) for method in found.methods.items()]
    for module, name, method in looped:
        setattr(module, name, types.MethodType(method, module))
    try:
        with _interface_as_ops(model):
            yield
    finally:
        for module, name, _ in looped:
            delattr(module, name)


@contextmanager
def _interface_as_ops(model: PreTrainedModel) -> Iterator[None]:
    if not _modules_of_interface(model):
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
