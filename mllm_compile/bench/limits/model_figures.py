"""Counts a model's parameters and KV bytes from its config, without its weights. Imports Transformers (seconds)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mllm_compile.bench.limits.limits import ModelFigures, TowerFigures
from mllm_compile.errors import UnsupportedModelError
from mllm_compile.model.experts_hook import experts_of_layers, experts_per_token
from mllm_compile.model.hf_model import HFModel, build_on_meta, head_key
from mllm_compile.model.states.count_layers import count_layers
from mllm_compile.model.towers.visual_grids import grid_tower, tower_of

if TYPE_CHECKING:
    from mllm_compile.passes.base import WeightSchemes


def model_figures(
    folder: Path,
    dtype: str,
    trust_remote_code: bool = False,
    weight_schemes: WeightSchemes | None = None,
    state_dtype: str = "float32",
    kv_itemsize: int | None = None,
) -> ModelFigures:
    """The figures of a model folder, served in `dtype`, with `weight_schemes` of its weights in few bits.

    Every matrix counts as one that each token is multiplied with, except matrices of experts that the traced model has
    as ops, and every layer as one with full attention, unless some carry a state: for other models the limit is a
    bound, not a target.

    Args:
        state_dtype: the type of sums of layers with a state.
        kv_itemsize: bytes of a number of the KV cache; None: as the model's.
    """
    torch_dtype = getattr(torch, dtype)
    hf_model = build_on_meta(folder, torch_dtype, trust_remote_code)
    model: Any = hf_model.model
    sizes = hf_model.sizes()
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    parameters = {id(parameter): parameter.numel() for parameter in model.parameters()}
    experts = experts_of_layers(model)
    tower = tower_of(model)
    of_tower = {id(parameter) for parameter in tower.parameters()} if tower is not None else set()
    left_out = of_tower | {id(embedding), id(head)}
    layers = sum(count for key, count in parameters.items() if key not in left_out)
    kv_values, attention_widths, state_bytes = _layers(hf_model, torch_dtype, getattr(torch, state_dtype))
    quantised_params, quantised_bytes, fp8_params = _quantised(model, weight_schemes, {id(embedding), id(head)}, 2)
    if weight_schemes is not None and (weight_schemes.takes_head or not weight_schemes.are_chosen):
        of_head = weight_schemes.schemes.get(head_key(model))
        if of_head is not None:
            quantised_params += head.numel()
            quantised_bytes += of_head.num_bytes(*head.shape)
    quantised_expert_params, quantised_expert_bytes, _ = _quantised(model, weight_schemes, set(), 3)
    num_experts = max((layer.num_choices for layer in experts), default=1)
    expert_params = sum(layer.params for layer in experts)
    plain_expert_bytes = (expert_params - quantised_expert_params) * torch_dtype.itemsize
    return ModelFigures(
        layer_params=layers - expert_params - sum(layer.unread_params for layer in experts),
        expert_params=expert_params // num_experts,
        num_experts=num_experts,
        num_chosen=experts_per_token(hf_model.text_config) if experts else 1,
        head_params=head.numel(),
        weight_itemsize=torch_dtype.itemsize,
        kv_bytes_per_token=kv_values * (kv_itemsize or torch_dtype.itemsize),
        attention_flops_per_pair=2 * attention_widths,
        state_bytes=state_bytes,
        vocab_size=sizes.vocab_size,
        context_len=sizes.context_len,
        quantised_params=quantised_params,
        quantised_bytes=quantised_bytes,
        fp8_params=fp8_params,
        expert_itemsize=(plain_expert_bytes + quantised_expert_bytes) / expert_params
        if quantised_expert_params
        else None,
        tower=_tower(hf_model),
    )


def _tower(hf_model: HFModel) -> TowerFigures | None:
    """The figures of the tower of images, where it is one that is served with grids."""
    try:
        facts = grid_tower(hf_model)
    except UnsupportedModelError:
        return None
    if facts is None:
        return None
    tower = tower_of(hf_model.model)
    tables = {f"{name}.weight" for name, module in tower.named_modules() if isinstance(module, torch.nn.Embedding)}
    counts = {name: parameter.numel() for name, parameter in tower.named_parameters() if name not in tables}
    of_features = sum(count for name, count in counts.items() if "merger" in name)
    num_layers, width = len(tower.blocks), tower.blocks[0].attn.proj.in_features
    num_full = len(getattr(tower, "fullatt_block_indexes", range(num_layers)))
    return TowerFigures(
        patch_params=sum(counts.values()) - of_features,
        feature_params=of_features,
        patches_per_feature=facts.merge**2,
        full_widths=num_full * width,
        window_widths=(num_layers - num_full) * width,
        window_patches=(facts.window * facts.merge) ** 2,
    )


def _layers(hf_model: HFModel, dtype: torch.dtype, sums: torch.dtype) -> tuple[int, int, int]:
    """(numbers of a token's keys and values, widths of all query heads with their values', bytes of a request's
    states)"""
    counted = count_layers(hf_model.model)
    if counted is None:
        heads = hf_model.heads_of_layers()
        keys, queries = (
            sum(getattr(layer, name) * layer.head_dim for layer in heads) for name in ("num_kv_heads", "num_heads")
        )
        return 2 * keys, 2 * queries, 0
    state_bytes = counted.held_values * dtype.itemsize + counted.summed_values * sums.itemsize
    return counted.kv_values, counted.attention_widths, state_bytes


def _quantised(model: Any, weight_schemes: WeightSchemes | None, left_out: set[int], dims: int) -> tuple[int, int, int]:
    """Quantised parameters of layers, of so many dimensions; their bytes; and the parameters in fp8 among them.

    Routers, which do not, are few.
    """
    params = num_bytes = fp8_params = 0
    schemes = {} if weight_schemes is None else {**weight_schemes.transposed, **weight_schemes.schemes}
    for name, parameter in model.named_parameters():
        scheme = None if id(parameter) in left_out or parameter.dim() != dims else schemes.get(name)
        if scheme is not None:
            params += parameter.numel()
            num_bytes += scheme.num_bytes(*parameter.shape)
            fp8_params += parameter.numel() if scheme.kind == "fp8" else 0
    return params, num_bytes, fp8_params
