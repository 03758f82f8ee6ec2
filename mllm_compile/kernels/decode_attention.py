"""Decode attention as pieces of the program: the kernel of runtime/ops/attention/split_decode.py, for the model's
layers.

Layers alike in heads, scale, soft cap and window share two pieces: one for few requests, where all is latency, and one
for many, where it is bandwidth. On Hopper kernels of runtime/attention/hopper/ replace both in layers that they serve.
FlashInfer's kernels serve what these do not, and every prefill. Deterministic steps have pieces of ordered_decode.py
and rows_decode.py.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from mllm_compile.config.resolved import ResolvedConfig
from mllm_compile.inductor.job import PieceInput
from mllm_compile.kernels.cuda import can_compile_kernels
from mllm_compile.kernels.piece import WrittenPiece, attention_inputs, made_by_kind, split_outputs, with_kernels
from mllm_compile.runtime.attention.hopper.clusters import choose_split, cluster_kernels, most_rows
from mllm_compile.runtime.attention.hopper.shapes import (
    are_served,
    has_clusters,
    heads_together,
    most_in_clusters,
    pays_together,
)
from mllm_compile.runtime.attention.hopper.shares import MOST_REQUESTS, ShareKernel
from mllm_compile.runtime.attention.layer import KERNEL_HEAD_DIMS, LayerSpec
from mllm_compile.runtime.attention.layer_kernels import DecodeVariant
from mllm_compile.runtime.attention.split.splits import (
    BLOCKS_IN_ORDER,
    IN_ORDER,
    MOST_FEW_SEQUENCES,
    OF_FEW,
    OF_MANY,
    OF_ONE,
    Splits,
)
from mllm_compile.runtime.config_sections import RuntimeSection
from mllm_compile.runtime.program.spec import Program
from mllm_compile.runtime.runner_config import MOST_VERIFIED

_MOST_ROWS_ALONE = 256  # that are as a rule of different requests
MAX_GROUP = 16  # query heads a KV head; all of them are rows of one product, more would not stay in registers


def add_decode_attention(config: ResolvedConfig, program: Program) -> tuple[Program, tuple[WrittenPiece, ...]]:
    """Adds decode attention of ours to the program, for the layers that it serves; returns the pieces too."""
    served = [
        layer
        for layer in (*program.layers, *program.cross_layers)
        if _is_served(layer) and (config.compile.split_decode or is_beyond_flashinfer(config, layer))
    ]
    # Each token of a prompt is a row of attention to its source (runtime/program/sources.py).
    has_many = bool(program.cross_layers) or config.runtime.max_running_requests > MOST_REQUESTS
    of_source = {layer.name for layer in program.cross_layers}
    of_layers, made = made_by_kind(
        served,
        lambda layer: (replace(layer, name="", layer_id=0, sinks=layer.sinks and "sinks"), layer.name in of_source),
        partial(_variants, config, has_many),
    )
    variants = {name: variants for name, (variants, _) in of_layers.items()}
    verifies = {layer.name: _verify_variants(config, layer) for layer in served}
    program = with_kernels(with_kernels(program, "decode", variants), "verify", verifies)
    return program, tuple(piece for _, pieces in made for piece in pieces)


def is_beyond_flashinfer(config: ResolvedConfig, layer: LayerSpec) -> bool:
    """True if no kernel of FlashInfer attends as the layer does, and the program's are to."""
    return layer.follows_places and config.runtime.attention_backend == "flashinfer"


def _is_served(layer: LayerSpec) -> bool:
    return (
        layer.head_dim == layer.v_head_dim
        and layer.head_dim in KERNEL_HEAD_DIMS
        and layer.num_heads // layer.num_kv_heads <= MAX_GROUP
        and not (layer.chunk and layer.window_left >= 0)
    )


def _variants(
    config: ResolvedConfig, has_many: bool, kind: tuple[LayerSpec, bool], index: int
) -> tuple[tuple[DecodeVariant, ...], tuple[WrittenPiece, ...]]:
    """Variants and their pieces of a layer, which may attend to a source; `has_many`: batches may have more than
    MOST_REQUESTS rows.

    In deterministic mode there is one for any batch, and where steps may have any number of rows several with the same
    numbers. A step may hold many tokens of one request, so split_decode fetches no key before the previous kernel has
    ended. And a request's numbers must not depend on the number of others.
    """
    layer, of_source = kind
    if config.runtime.any_rows and layer.window_left < 0 and not layer.chunk and not layer.has_distance_bias:
        return _variants_in_order(config, layer, index)
    splits = OF_ONE if config.runtime.any_rows else OF_MANY
    many = _piece(config, layer, f"decode_{index}_many", splits, fetch_first=False)
    of_many = DecodeVariant(None, many.name, splits)
    if config.runtime.deterministic:
        return (of_many,), (many,)
    few = _piece(config, layer, f"decode_{index}_few", OF_FEW, fetch_first=True)
    variants: tuple[DecodeVariant, ...] = DecodeVariant(MOST_FEW_SEQUENCES, few.name, OF_FEW), of_many
    if _has_kernels(config, layer):
        variants = _hopper_variants(config.runtime, has_many, layer, of_source, *variants)
    called = {variant.piece for variant in variants}
    return variants, tuple(piece for piece in (few, many) if piece.name in called)


def _variants_in_order(
    config: ResolvedConfig, layer: LayerSpec, index: int
) -> tuple[tuple[DecodeVariant, ...], tuple[WrittenPiece, ...]]:
    """Variants with the same numbers: several blocks of a sequence, one, and rows of one request together."""
    kv_heads = layer.num_kv_heads
    by_blocks = {max(most, kv_heads): blocks for most, blocks in BLOCKS_IN_ORDER.items()}
    by_blocks[_MOST_ROWS_ALONE * kv_heads] = 1
    alone = [_ordered_piece(config, layer, f"decode_{index}_by_{blocks}", blocks) for blocks in by_blocks.values()]
    rows = _rows_piece(config, layer, f"decode_{index}_rows")
    variants = [DecodeVariant(most, piece.name, IN_ORDER) for most, piece in zip(by_blocks, alone, strict=True)]
    return (*variants, DecodeVariant(None, rows.name)), (*alone, rows)


def _hopper_variants(
    runtime: RuntimeSection,
    has_many: bool,
    layer: LayerSpec,
    of_source: bool,
    few: DecodeVariant,
    many: DecodeVariant,
) -> tuple[DecodeVariant, ...]:
    """Clusters for few requests, or a piece without clusters of such heads; shares for many, and a piece for more
    than these count."""
    together = heads_together(layer.num_kv_heads, layer.head_dim)
    kv_heads, head_dim = layer.num_kv_heads // together, layer.head_dim * together
    variants = []
    features = _features(runtime, layer)
    group = layer.num_heads // kv_heads
    shares = ShareKernel(kv_heads, group, runtime.page_size, head_dim=head_dim, together=together, **features)
    if has_clusters(head_dim):
        most = most_in_clusters(shares, runtime.max_model_len)
        splits = {choose_split(count * kv_heads) for count in range(1, most // kv_heads + 1)}
        features["of_source"] = of_source
        clusters = cluster_kernels(layer.num_heads, kv_heads, runtime.page_size, together=together, **features)
        if splits:
            served = tuple(kernel for kernel in clusters if kernel.split in splits)
            variants.append(DecodeVariant(most * together, kernels=served))
    else:
        variants.append(few)
    variants.append(DecodeVariant(MOST_REQUESTS * layer.num_kv_heads if has_many else None, kernels=(shares,)))
    if has_many:
        variants.append(many)
    return tuple(variants)


def _features(runtime: RuntimeSection, layer: LayerSpec) -> dict[str, bool]:
    """The arguments of a layer's kernels beside its shape."""
    return {"sinks": layer.sinks is not None, "fp8": runtime.kv_cache_dtype == "float8_e4m3fn"}


def _verify_variants(config: ResolvedConfig, layer: LayerSpec) -> tuple[DecodeVariant, ...]:
    """Clusters for captured verify steps, for each number of tokens that requests have."""
    runtime, kv_heads = config.runtime, layer.num_kv_heads
    if runtime.deterministic or not (has_clusters(layer.head_dim) and _has_kernels(config, layer)):
        return ()
    variants, features = [], _features(runtime, layer)
    for tokens in (1 + depth for depth in config.speculative.captured_depths):
        if tokens * layer.num_heads // kv_heads > most_rows(features["fp8"]):
            continue
        most = min(runtime.max_running_requests, MOST_VERIFIED // tokens) * kv_heads
        counts = range(kv_heads, most + 1, kv_heads)
        splits = {choose_split(count) for count in counts if pays_together(count, tokens)}
        kernels = cluster_kernels(layer.num_heads, kv_heads, runtime.page_size, tokens=tokens, **features)
        if splits:
            served = tuple(kernel for kernel in kernels if kernel.split in splits)
            variants.append(DecodeVariant(most, kernels=served))
    return tuple(variants)


def _has_kernels(config: ResolvedConfig, layer: LayerSpec) -> bool:
    """True if kernels of runtime/attention/hopper/ serve the layer."""
    return (
        config.compile.hopper_decode
        and layer.window_left < 0
        and layer.logits_soft_cap == 0
        and not layer.follows_places
        and are_served(layer.num_heads, layer.num_kv_heads, layer.head_dim, config.runtime.page_size)
        and can_compile_kernels(config.runtime.device)
    )


def _ordered_piece(config: ResolvedConfig, layer: LayerSpec, name: str, blocks: int) -> WrittenPiece:
    """Args: blocks: of a sequence."""
    return WrittenPiece.calling(
        "ordered_decode",
        {**attention_inputs(config, layer), **split_outputs(config, layer), **_of_heads(config, layer)},
        name=name,
        legend="T rows, N parts of a row's keys, W pages of the page table, P slots",
        options={**_options_in_order(config, layer), "blocks": blocks},
        gives_tensor=False,
    )


def _rows_piece(config: ResolvedConfig, layer: LayerSpec, name: str) -> WrittenPiece:
    out = PieceInput.contiguous(("T", layer.num_heads, layer.head_dim), config.model.dtype)
    return WrittenPiece.calling(
        "rows_decode",
        {**attention_inputs(config, layer), "out": out, **_of_heads(config, layer)},
        name=name,
        legend="T rows, W pages of the page table, P slots",
        options=_options_in_order(config, layer),
        gives_tensor=False,
    )


def _options_in_order(config: ResolvedConfig, layer: LayerSpec) -> dict[str, Any]:
    return {
        **({"sinks": None} if layer.sinks is None else {}),
        **({} if layer.alibi_slopes else {"slopes": None}),
        "page_size": config.runtime.page_size,
        "sm_scale": layer.sm_scale,
        "soft_cap": layer.logits_soft_cap,
    }


def _of_heads(config: ResolvedConfig, layer: LayerSpec) -> dict[str, PieceInput]:
    """The inputs that have numbers for each query head, in layers that have them."""
    of, heads = PieceInput.contiguous, (layer.num_heads,)
    return {
        **({} if layer.sinks is None else {"sinks": of(heads, config.model.dtype)}),
        **inputs_by_distance(config, layer),
    }


def inputs_by_distance(config: ResolvedConfig, layer: LayerSpec) -> dict[str, PieceInput]:
    """The inputs by which a layer's logits follow distances, in layers that have them."""
    of, heads = PieceInput.contiguous, layer.num_heads
    return {
        **({"slopes": of((heads,), "float32")} if layer.alibi_slopes else {}),
        **({"bias": of((heads, "B"), config.model.dtype)} if layer.has_distance_bias else {}),
    }


def options_by_distance(layer: LayerSpec) -> dict[str, None]:
    """The same inputs, in layers that lack them."""
    given = {"slopes": bool(layer.alibi_slopes), "bias": layer.has_distance_bias}
    return {name: None for name, is_given in given.items() if not is_given}


def _piece(config: ResolvedConfig, layer: LayerSpec, name: str, splits: Splits, fetch_first: bool) -> WrittenPiece:
    return WrittenPiece.calling(
        "split_decode",
        {**attention_inputs(config, layer), **split_outputs(config, layer), **_of_heads(config, layer)},
        name=name,
        legend="T requests, N splits, W pages of the page table, P slots, B distances",
        options={
            **({"sinks": None} if layer.sinks is None else {}),
            **options_by_distance(layer),
            "page_size": config.runtime.page_size,
            "max_splits": splits.most,
            "sm_scale": layer.sm_scale,
            "soft_cap": layer.logits_soft_cap,
            "window_left": layer.window_left,
            "fetch_first": fetch_first,
            "chunk": layer.chunk,
        },
        gives_tensor=False,
    )
