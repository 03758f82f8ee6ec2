"""Finds a checkpoint's scales for a quantised KV cache, and the weights that they belong to.

Each tool names them differently: after the attention, its projections or the cache. runtime/weights/loader.py applies
them.
"""

from __future__ import annotations

from collections.abc import Mapping

from mllm_compile.checkpoint.planned_tensor import PlannedTensor
from mllm_compile.checkpoint.quantised import CheckpointTensors
from mllm_compile.passes.base import CacheScales, WeightFactor
from mllm_compile.runtime.weights.formats.base import FLOATS
from mllm_compile.runtime.weights.spec import Factor

# How names go on behind the attention's own, and whose scale it is; the longer ones first.
_KEYS = (".k_proj.k_scale", ".k_proj.output_scale", ".qkv_proj.k_scale", ".attn.k_scale", ".k_scale")
_VALUES = (".v_proj.v_scale", ".v_proj.output_scale", ".qkv_proj.v_scale", ".attn.v_scale", ".v_scale")
_BOTH = (".attn.kv_scale", ".kv_scale")


def cache_scales(tensors: CheckpointTensors, table: Mapping[str, PlannedTensor]) -> dict[str, CacheScales]:
    """The scales of one number, by the names of the weights that are beside them."""
    keys, values = _owners(tensors, _KEYS + _BOTH), _owners(tensors, _VALUES + _BOTH)
    found = {}
    for name, planned in table.items():
        owner = planned.blocks[0].tensor.rsplit(".", 2)[0]  # of `….k_proj.weight`
        if owner in keys or owner in values:
            found[name] = CacheScales(keys.get(owner), values.get(owner))
    return found


def _owners(tensors: CheckpointTensors, suffixes: tuple[str, ...]) -> dict[str, str]:
    """Attention → its scale, of tensors that end so; of several the one that is named first."""
    found: dict[str, str] = {}
    for suffix in suffixes:
        for name in tensors.unused:
            stored = tensors.stored[name]
            if name.endswith(suffix) and stored.shape in ((), (1,)) and stored.dtype in FLOATS:
                found.setdefault(name.removesuffix(suffix), name)
    return found


def planned_factors(factors: Mapping[str, WeightFactor], tensors: CheckpointTensors) -> dict[str, Factor]:
    """The factors of weights as the loader reads them."""
    return {name: Factor(tensors.stored[one.scale], one.is_divided) for name, one in factors.items()}
