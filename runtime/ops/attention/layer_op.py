"""The ops of a compiled program that read the forward context: schemas, fakes and implementations.

Registered with torch.library's define/impl: calling a `torch.library.custom_op` would import Dynamo and Inductor.
The op that stands for attention while a model is traced is in ops/trace.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from mllm_compile.runtime.attention.base import AttentionInputs
from mllm_compile.runtime.attention.capture import RopeInputs
from mllm_compile.runtime.forward_context import ForwardContext, get_forward_context
from mllm_compile.runtime.graph_mode import CUDAGraphMode

if TYPE_CHECKING:
    from mllm_compile.runtime.attention.layer import AttentionLayer
    from mllm_compile.runtime.attention.metadata import AttentionMetadata
    from mllm_compile.runtime.forward_batch import ForwardBatch

_LIBRARY = torch.library.Library("mllm", "FRAGMENT")


# mllm::attention_with_output ------------------------------------------------------------------------------------------
#
# Reads from the forward context: the layer (no_compile_layers), the batch and its backend (attn_metadata), where to
# write the new keys and values (slot_mapping).
_LIBRARY.define(
    "attention_with_output(Tensor q, Tensor k, Tensor v, Tensor(a!) out, str layer_name, bool save_kv_cache=True, "
    "Tensor[]? rope_inputs=None, float eps=0.0, Tensor? bias=None, Tensor[]? index=None) -> ()",
)


def attention_with_output(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    layer_name: str,
    save_kv_cache: bool = True,
    rope_inputs: Sequence[torch.Tensor] | None = None,
    eps: float = 0.0,
    bias: torch.Tensor | None = None,
    index: Sequence[torch.Tensor] | None = None,
) -> None:
    """Write k and v into the cache and attend: causal over each request's prefix and new tokens.

    Rows past the batch's tokens are padding: they are neither written to the cache nor computed, and `out` keeps what
    it had there.

    Args:
        q: [T, H, D]; k: [T, Hk, D]; v: [T, Hk, Dv]; T may be padded.
        out: [T, H, Dv], written.
        layer_name: key into the forward context.
        save_kv_cache: False where the piece before has written k and v.
        rope_inputs: the inputs of the piece's q and k: q [1, T, H, D], k [1, T, Hk, D]; where heads rotate cos and sin
            [1, T, D], and the weights [D] of the norms before the rotation where there are some. For steps whose
            attention does that itself, and writes k and v: the piece has left it out (cache_inputs).
        eps: these norms' eps.
        bias, index: as AttentionInputs have them; an index with padding.

    Raises:
        RuntimeError: no forward context is set, or it does not know the layer.
    """
    context = get_forward_context()
    metadata = _metadata_of(context, layer_name)
    batch = metadata.batch
    layer = context.no_compile_layers[layer_name]
    num_tokens = metadata.num_actual_tokens
    if rope_inputs is not None and _attention_fuses_rope(context, batch, layer):
        batch.attn_backend.rope.forward_with_rope(RopeInputs.of(rope_inputs, v, eps), layer, batch, out[:num_tokens])
        return
    if num_tokens != q.shape[0]:
        q, k, v, out = q[:num_tokens], k[:num_tokens], v[:num_tokens], out[:num_tokens]
    slots = context.slot_mapping[layer_name] if save_kv_cache else None
    if slots is not None and slots.shape[0] != num_tokens:
        slots = slots[:num_tokens]
    if slots is not None and not batch.attn_backend.writes_kv(layer):
        batch.token_to_kv_pool.set_kv_buffer(layer.layer_id, slots, k, v)
        slots = None
    of_index = None if index is None else tuple(one[:num_tokens] for one in index)
    batch.attn_backend.forward(AttentionInputs(q, k, v, out, layer, batch, slots, bias, of_index))


_LIBRARY.impl("attention_with_output", attention_with_output, "CompositeExplicitAutograd")
torch.library.register_fake("mllm::attention_with_output", lambda *args: None, lib=_LIBRARY)


# mllm::cross_attention_with_output ------------------------------------------------------------------------------------
#
# Reads from the forward context: the layer, and the batch of its sources and their backend (attn_metadata).
_LIBRARY.define("cross_attention_with_output(Tensor q, Tensor(a!) out, str layer_name) -> ()")


def cross_attention_with_output(q: torch.Tensor, out: torch.Tensor, layer_name: str) -> None:
    """Attend to the keys and values of each token's source, which are in pages.

    To a backend each token is a decode of one token behind its whole source. Rows past the batch's tokens are padding,
    as of attention_with_output.

    Args:
        q: [T, H, D]; out: [T, H, Dv], written.

    Raises:
        RuntimeError: no forward context is set, or it does not know the layer.
    """
    context = get_forward_context()
    metadata = _metadata_of(context, layer_name)
    batch, count = metadata.batch, metadata.num_actual_tokens
    layer = context.no_compile_layers[layer_name]
    q, out = q[:count], out[:count]
    batch.attn_backend.forward(AttentionInputs(q, q[:, :0], q[:, :0], out, layer, batch))


_LIBRARY.impl("cross_attention_with_output", cross_attention_with_output, "CompositeExplicitAutograd")
torch.library.register_fake("mllm::cross_attention_with_output", lambda *args: None, lib=_LIBRARY)


def cache_inputs(layer_name: str, may_be_left: bool) -> list[torch.Tensor]:
    """The inputs of a piece that writes a layer's KV itself: slots [T] int64, padded like the piece's tokens, or [0] if
    attention writes, and rotates where heads do; and the layer's keys [P, Hk, D] and values [P, Hk, Dv], by slot.

    Args:
        may_be_left: the layer's attention is told what q and k are made of.

    Raises:
        RuntimeError: no forward context is set, or it does not know the layer.
    """
    context = get_forward_context()
    batch = _metadata_of(context, layer_name).batch
    layer = context.no_compile_layers[layer_name]
    keys, values = batch.token_to_kv_pool.get_kv_buffer(layer.layer_id)
    slots = context.slot_mapping[layer_name]
    return [slots[:0] if may_be_left and _attention_fuses_rope(context, batch, layer) else slots, keys, values]


def _attention_fuses_rope(context: ForwardContext, batch: ForwardBatch, layer: AttentionLayer) -> bool:
    """True if attention rotates. It does not in PIECEWISE, where a piece's graph serves any batch of so many tokens,
    nor if other ranks have more tokens, as this rank's pieces then have padding."""
    is_padded = context.cudagraph_runtime_mode is CUDAGraphMode.PIECEWISE or context.dp_metadata is not None
    rope = batch.attn_backend.rope
    return not is_padded and rope is not None and rope.fuses_rope(layer)


def _metadata_of(context: ForwardContext, layer_name: str) -> AttentionMetadata:
    metadata: AttentionMetadata | None = context.attn_metadata.get(layer_name)
    if metadata is None:
        raise RuntimeError(
            f"the forward context has no metadata for attention layer {layer_name!r}, only for "
            f"{', '.join(context.attn_metadata) or 'none'}"
        )
    return metadata
