"""Chooses the FlashInfer kernel for each layer and batch, and tells which layers have none. All choices are made here.

Free of FlashInfer itself, so that a model is refused, and a choice tested, on a machine without a GPU.
Figures: H200, FlashInfer 0.6.18, bf16, head dim 128.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch

from mllm_compile.runtime.attention.flashinfer.prefill_cost import LEAST_US, PrefillLoad
from mllm_compile.runtime.attention.layer import KERNEL_HEAD_DIMS, AttentionLayer, LayerSpec, PerLayerParameters
from mllm_compile.runtime.errors import ConfigError, UnsupportedModelError

QUERY_DTYPES = (torch.float16, torch.bfloat16)
_FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
# µs of a layer: what a captured step may take longer in attention than by the best kernel. The host's time that a graph
# saves, 35 to 50 µs, is partly hidden behind the GPU.
_MOST_LOST_US = 20.0

# Bytes of the same pages that decodes read in a µs, mostly out of the GPU's L2 cache; likewise.
_SAME_BYTES_PER_US = 8.5e6
# µs that the three kernels of a captured cascade take longer in a layer than the one that they stand for: 13 to 20 on
# an H100 (benchmarks/steps/cascade_speed.py).
_CAPTURED_CASCADE_US = 20.0
# µs that a step with another cascade takes longer because it is not captured whole and plans attention, in all and for
# each layer.
_CASCADE_US = 1000.0
_CASCADE_LAYER_US = 60.0

# Split-KV writes float32 partial results. Both bounds follow PrefillPlan in FlashInfer's scheduler.cuh. One is two
# blocks an SM shared by the kv heads, each of at most 128 packed query rows. The other, of a captured decode, is the
# tiles that padded requests of one token, their query heads packed, can need.
_MIN_WORKSPACE_BYTES = 128 << 20
BLOCKS_PER_SM = 2
_QUERY_TILES = (16, 64, 128)


@dataclass(frozen=True)
class PlanGroup:
    """Layers that one plan serves: equal in all that a plan or its kernel depends on.

    Attributes:
        has_sinks: the layers' own decode kernels, if any, are of sinks; FlashInfer's are not.
        alibi_slopes, chunk, has_distance_bias: as LayerSpec has them. With any the layers' own kernels serve decodes
            and prompts.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    params: PerLayerParameters
    has_sinks: bool = False
    alibi_slopes: tuple[float, ...] = ()
    chunk: int = 0
    has_distance_bias: bool = False

    @classmethod
    def of(cls, layer: LayerSpec) -> PlanGroup:
        heads = layer.num_heads, layer.num_kv_heads, layer.head_dim
        places = layer.slopes_of(0), layer.chunk, layer.has_distance_bias
        return cls(*heads, layer.params, layer.sinks is not None, *places)

    @property
    def follows_places(self) -> bool:
        return bool(self.alibi_slopes) or self.chunk > 0 or self.has_distance_bias


@dataclass(frozen=True)
class PrefillKernel:
    """A kernel that prefills run on.

    Attributes:
        name: 'fa2' or 'fa3', as FlashInfer has it.
        splits: blocks may share the keys of a query; fa3's never do.
        copies: keys and values are copied out of their pages first, and read as they are in a row (copied.py).
        in_a_row: they are so, as one prompt's pages follow each other.
        parts: so many blocks share the keys before one prompt's chunk (prefix_parts.py); 1: none do.
    """

    name: str
    splits: bool
    copies: bool = False
    in_a_row: bool = False
    parts: int = 1


def plan_groups(layers: Iterable[AttentionLayer]) -> list[PlanGroup]:
    """Distinct groups in the order of their first layer."""
    return list(dict.fromkeys(map(PlanGroup.of, layers)))


def should_use_tensor_core(kv_cache_dtype: torch.dtype, num_attention_heads: int, num_kv_heads: int) -> bool:
    """True if decode runs on tensor cores: always for an fp8 cache, for fp16 and bf16 from 4 query heads a KV head.

    Measured on an H200 (`benchmarks/kernels/decode_attention_speed.py`): with 4 query heads a KV head CUDA cores take
    up to twice as long, with 2 as long. (The CUDA-core kernel exists for groups of 1, 2, 3, 4, 6 and 8; below 4 that
    leaves no hole.)
    """
    if kv_cache_dtype in _FP8_DTYPES:
        return True
    return kv_cache_dtype in QUERY_DTYPES and num_attention_heads // num_kv_heads >= 4


def decodes_on_tensor_cores(group: PlanGroup, kv_cache_dtype: torch.dtype, deterministic: bool = False) -> bool:
    """True if a group's planned decodes run on tensor cores.

    Always with a soft cap and in deterministic mode: decode then runs the prefill's kernel. So a soft-capped model (few
    are) has one kernel to build, not two. And only that kernel can split a request's keys independently of the batch.
    """
    if group.params.logits_soft_cap > 0 or deterministic:
        return True
    return should_use_tensor_core(kv_cache_dtype, group.num_heads, group.num_kv_heads)


def check_never_split(groups: Iterable[PlanGroup], num_rows: int, num_sms: int) -> None:
    """Refuse a captured decode of `num_rows` whose keys may be split differently in different batches.

    Under graphs FlashInfer's own disable_split_kv leaves padding blocks without a mask, so none is asked for. Instead
    the rows must be more than the blocks that it aims at (PrefillSplitQOKVIndptr in scheduler.cuh): its search for a
    split then ends at the longest request's length, which splits no request.

    Raises:
        ConfigError: there are too few rows.
    """
    for group in groups:
        blocks = BLOCKS_PER_SM * num_sms // group.num_kv_heads
        if num_rows <= blocks:
            raise ConfigError(
                f"runtime.deterministic with captured decodes needs more than {blocks} rows a step for "
                f"{group.num_kv_heads} KV heads on this GPU, got {num_rows}. Set runtime.max_num_batched_tokens to "
                f"{blocks + 1} or more, or cudagraph.mode: piecewise."
            )


def prefill_kernels(group: PlanGroup, kv_cache_dtype: torch.dtype, is_hopper: bool) -> tuple[str, ...]:
    """The kernels that prefills of the group may get.

    Windows and soft caps stay with fa2: their fa3 variants are further kernels of five minutes' compilation each. An
    fp8 cache does too: fa3 reads one with fp8 queries only (is_fa3_backend_supported in FlashInfer's utils.py).
    """
    is_plain = group.params.window_left < 0 and group.params.logits_soft_cap == 0 and kv_cache_dtype not in _FP8_DTYPES
    return ("fa2", "fa3") if is_hopper and is_plain else ("fa2",)


def prefill_costs(
    group: PlanGroup,
    kv_cache_dtype: torch.dtype,
    query_lens: np.ndarray,
    prefix_lens: np.ndarray,
    num_sms: int,
    is_hopper: bool,
    most_copied: int = 0,
    may_divide: bool = False,
    in_a_row: bool = False,
) -> dict[PrefillKernel, float]:
    """µs that each kernel takes for the prefills of a batch, of those that it may get, as estimated (prefill_cost.py).

    Args:
        query_lens: [R] new tokens of each request; prefix_lens: [R] what it has in the cache.
        most_copied: tokens of a batch whose keys and values there is room to copy.
        may_divide: what is before a prompt's new tokens may be divided into parts.
        in_a_row: there is one prompt, whose pages follow each other.
    """
    load = _prefill_load(group, query_lens, prefix_lens, num_sms)
    costs = {
        PrefillKernel("fa2", splits=False): load.fa2_us(),
        PrefillKernel("fa2", splits=True): load.split_fa2_us(),
        PrefillKernel("fa3", splits=False): load.fa3_us(),
    }
    if in_a_row:
        costs[ROW_PREFILL] = load.fa3_us(in_a_row=True)
    elif prefix_lens.any() and query_lens.sum() + prefix_lens.sum() <= most_copied:
        costs[COPYING_PREFILL] = load.copied_fa3_us()
    if may_divide and prefix_lens.size == 1 and prefix_lens[0] >= LEAST_DIVIDED:
        divided = (replace(ROW_PREFILL if in_a_row else CAPTURED_PREFILL, parts=parts) for parts in PARTS)
        costs |= {kernel: load.divided_fa3_us(kernel.parts, in_a_row) for kernel in divided}
    possible = prefill_kernels(group, kv_cache_dtype, is_hopper)
    return {kernel: cost for kernel, cost in costs.items() if kernel.name in possible}


def _prefill_load(group: PlanGroup, query_lens: np.ndarray, prefix_lens: np.ndarray, num_sms: int) -> PrefillLoad:
    window = group.params.window_left
    seen = prefix_lens if window < 0 else np.minimum(prefix_lens, window)
    heads = group.num_heads, group.num_kv_heads, group.head_dim
    if query_lens.size == 1:
        return PrefillLoad(*heads, int(query_lens[0]), int(seen[0]), num_sms)
    return PrefillLoad(*heads, query_lens, seen, num_sms)


def choose_prefill_kernel(
    group: PlanGroup,
    kv_cache_dtype: torch.dtype,
    query_lens: np.ndarray,
    prefix_lens: np.ndarray,
    num_sms: int,
    is_hopper: bool,
    most_copied: int = 0,
    may_divide: bool = False,
    in_a_row: bool = False,
) -> PrefillKernel:
    """The kernel of prefill_costs that takes the least time."""
    lengths, allowed = (query_lens, prefix_lens), (most_copied, may_divide)
    costs = prefill_costs(group, kv_cache_dtype, *lengths, num_sms, is_hopper, *allowed, in_a_row=in_a_row)
    return min(costs, key=costs.__getitem__)


CAPTURED_PREFILL = PrefillKernel("fa3", splits=False)
COPYING_PREFILL = PrefillKernel("fa3", splits=False, copies=True)
ROW_PREFILL = PrefillKernel("fa3", splits=False, in_a_row=True)
PARTS = (2, 3, 4)  # into which what is before a chunk may be divided
LEAST_DIVIDED = 2048  # tokens


def prefill_capture_obstacle(group: PlanGroup, kv_cache_dtype: torch.dtype, is_hopper: bool) -> str | None:
    """Why no capture serves any prefills; None: one does, of fa3, which launches the same blocks for every batch."""
    if CAPTURED_PREFILL.name not in prefill_kernels(group, kv_cache_dtype, is_hopper):
        return (
            f"prompts are captured with FlashInfer's {CAPTURED_PREFILL.name} alone, which needs a Hopper GPU and "
            "serves no layers with a window or soft cap and no fp8 cache"
        )
    return None


def runs_well_captured(
    group: PlanGroup,
    kv_cache_dtype: torch.dtype,
    query_lens: np.ndarray,
    prefix_lens: np.ndarray,
    num_sms: int,
    most_copied: int = 0,
    may_divide: bool = False,
    in_a_row: bool = False,
) -> bool:
    """True if the captured kernel is estimated to serve such prefills about as fast as the fastest one, on Hopper.

    Args:
        query_lens, prefix_lens, most_copied, may_divide, in_a_row: as prefill_costs'; there may be no prefills.
    """
    if not query_lens.size:
        return True
    # The host is waited for here: nearly all prompts are so short that the estimates can be spared.
    if _prefill_load(group, query_lens, prefix_lens, num_sms).most_fa3_us() <= LEAST_US + _MOST_LOST_US:
        return True
    lengths, allowed = (query_lens, prefix_lens), (most_copied, may_divide)
    costs = prefill_costs(group, kv_cache_dtype, *lengths, num_sms, True, *allowed, in_a_row=in_a_row)
    return costs[CAPTURED_PREFILL] - min(costs.values()) <= _MOST_LOST_US


def prefills_new_tokens_alone(kv_cache_dtype: torch.dtype, has_prefix: bool) -> bool:
    """True if prefills read the new k and v as they come (ragged) and not the pages.

    Never with an fp8 cache: a prompt would be computed from exact keys the first time, and from rounded ones after a
    prefix hit or in chunks. It would give other tokens.
    """
    return not has_prefix and kv_cache_dtype not in _FP8_DTYPES


def takes_cascade(group: PlanGroup) -> bool:
    """True if decodes of the group may read what they begin with in common once for all of them."""
    is_plain = group.params.window_left < 0 and group.params.logits_soft_cap == 0 and not group.has_sinks
    return is_plain and not group.follows_places


def spared_bytes(layers: Iterable[LayerSpec], num_requests: int, num_tokens: int, itemsize: int) -> int:
    """Bytes of keys and values that these layers' decodes do not read where so many tokens are read once for all."""
    per_token = sum(layer.num_kv_heads * (layer.head_dim + layer.v_head_dim) for layer in layers)
    return (num_requests - 1) * num_tokens * per_token * itemsize


def cascade_pays(num_spared_bytes: int, num_layers: int) -> bool:
    """True if a step that reads so many bytes less is faster for it.

    Args:
        num_layers: those that read less; a captured step spares the host their launches, and the plans.
    """
    return num_spared_bytes > _SAME_BYTES_PER_US * (_CASCADE_US + num_layers * _CASCADE_LAYER_US)


def captured_cascade_pays(num_spared_bytes: int, num_layers: int) -> bool:
    """True if a captured decode that reads so many bytes of the same pages less is faster for it."""
    return num_spared_bytes > _SAME_BYTES_PER_US * num_layers * _CAPTURED_CASCADE_US


def workspace_bytes(groups: Iterable[PlanGroup], max_requests: int, num_sms: int) -> int:
    """Bytes of the float workspace that holds the partial results of any batch."""
    needed = _MIN_WORKSPACE_BYTES
    for group in groups:
        blocks = BLOCKS_PER_SM * num_sms // group.num_kv_heads
        packed = group.num_heads // group.num_kv_heads
        decode_tile = next((tile for tile in _QUERY_TILES if packed <= tile), _QUERY_TILES[-1])
        decode_tiles = -(-max_requests * packed // decode_tile) + max_requests - 1
        rows = max(blocks * _QUERY_TILES[-1], decode_tiles * decode_tile)
        needed = max(needed, group.num_heads * rows * (group.head_dim + 1) * 4 + 1024)
    return needed


def check_supported(
    layers: Iterable[AttentionLayer],
    q_dtype: torch.dtype,
    kv_cache_dtype: torch.dtype | None = None,
    piece_prefills: Collection[str] = (),
) -> None:
    """Refuse what the kernels cannot do, before anything is allocated.

    Args:
        kv_cache_dtype: the cache's, where it may be another; the program's own kernels read the model's.
        piece_prefills: names of layers for whose prompts the program has a kernel.

    Raises:
        ConfigError: the model's dtype is not one of the kernels'.
        UnsupportedModelError: a layer's shape or feature has no kernel; the message names it.
    """
    if q_dtype not in QUERY_DTYPES:
        raise ConfigError(
            f"attention_backend flashinfer computes in float16 or bfloat16, but model.dtype is {q_dtype}. "
            "Set model.dtype: bfloat16, or runtime.attention_backend: torch."
        )
    for layer in layers:
        problem = _problem(layer, layer.name in piece_prefills)
        if not problem and layer.follows_places and kv_cache_dtype not in (None, q_dtype):
            problem = f"it attends with a bias by distance or in chunks, and the KV cache is {kv_cache_dtype}"
        if problem:
            raise UnsupportedModelError(
                f"attention layer {layer.name}: {problem}, which the flashinfer backend cannot do. "
                "Set runtime.attention_backend: torch."
            )


def _problem(layer: AttentionLayer, has_prefill: bool) -> str | None:
    if layer.is_latent:
        return "it attends over latents beside layers that do not"
    if layer.head_dim != layer.v_head_dim:
        return f"its value head dim {layer.v_head_dim} differs from its head dim {layer.head_dim}"
    if layer.head_dim not in KERNEL_HEAD_DIMS:
        return f"its head dim is {layer.head_dim}, not one of {', '.join(map(str, KERNEL_HEAD_DIMS))}"
    if (layer.alibi_slopes or layer.has_distance_bias) and not has_prefill:
        return "it adds a bias by distance to its scores (as ALiBi), and the program has no kernels for such heads"
    if layer.chunk and not has_prefill:
        return f"it attends in chunks of {layer.chunk} tokens, and the program has no kernels for such heads"
    if layer.num_heads % layer.num_kv_heads:
        return f"its {layer.num_heads} query heads do not divide among {layer.num_kv_heads} KV heads"
    return None
