"""The op that stands for attention while a model is traced; a pass lowers it to runtime/ops/attention/layer_op.py's
attention_with_output.

Tokens are flat and requests packed. The op carries all that Transformers' interface says about one call, and `refusals`
names, for the check of the trace, what it cannot express. Defined with torch.library's define/impl because calling a
`torch.library.custom_op` imports Dynamo and Inductor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mllm_compile.runtime.attention.distances import of_distances
from mllm_compile.runtime.attention.index import chosen_keys
from mllm_compile.runtime.attention.layer import KeyChoice
from mllm_compile.runtime.collectives.base import current

_LIBRARY = torch.library.Library("mllm", "FRAGMENT")
_LIBRARY.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? sinks, float sm_scale, float logits_soft_cap, int window_left,"
    " str refusals, float[]? alibi_slopes=None, int chunk=0, int latent=0, Tensor? up=None, Tensor? bias=None,"
    " Tensor[]? index=None, int top_k=0, int index_block=0, int index_local=0) -> Tensor"
)


def _attention_fake(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    sm_scale: float,
    logits_soft_cap: float,
    window_left: int,
    refusals: str,
    alibi_slopes: Sequence[float] | None = None,
    chunk: int = 0,
    latent: int = 0,
    up: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    index: Sequence[torch.Tensor] | None = None,
    top_k: int = 0,
    index_block: int = 0,
    index_local: int = 0,
) -> torch.Tensor:
    width = latent or v.shape[2]
    if up is not None:
        width = up.shape[0] // q.shape[1] - (q.shape[2] - (k.shape[2] - latent))
    return q.new_empty(q.shape[0], q.shape[1], width)


def attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    sm_scale: float,
    logits_soft_cap: float,
    window_left: int,
    refusals: str = "",
    alibi_slopes: Sequence[float] | None = None,
    chunk: int = 0,
    latent: int = 0,
    up: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    index: Sequence[torch.Tensor] | None = None,
    top_k: int = 0,
    index_block: int = 0,
    index_local: int = 0,
    blocks: Sequence[tuple[int, int]] = (),
) -> torch.Tensor:
    """Causal attention over the T tokens of ONE sequence, in plain torch: the meaning of the op, used by tests.

    Args:
        q: [T, H, D]; k: [T, Hk, D]; v: [T, Hk, Dv], H a multiple of Hk.
        sinks: [H] or None: one more logit a head, which takes weight and gives no value.
        sm_scale: factor on q·k.
        logits_soft_cap: 0.0 for none, else cap * tanh(logits / cap).
        window_left: -1 for none, else how many earlier tokens are seen besides the token itself.
        refusals: ignored here.
        alibi_slopes: [H] or None: slope · (key's position − query's) is added to a head's logits. With H heads on each
            rank: of all ranks' heads.
        chunk: 0 for none, else tokens see their own chunk of so many positions; the first has position 0.
        latent: 0 for none, else v is k, and the first so many columns of it are the values.
        up: None, or for latents the weight [H / Hk * (n + Dv), latent] that makes of each the first n columns of its
            heads' keys, before the columns behind the latent, and the values; q is n + D - latent wide.
        bias: None, or [H, 2R + 1]: added to a head's logits by the key's position less the query's, from -R to R.
        index: None, or an indexer's queries [T, Hi, Di], weights [T, Hi] and keys [T, Di]: each token sees the `top_k`
            keys that it chooses (attention/index.py); of one that chooses blocks without weights.
        index_block: keys of a block, 0 where single ones are chosen; index_local: blocks that always are.
        blocks: first and end of tokens that see each other ahead too, as images' do; no argument of the op.

    Returns:
        [T, H, Dv].
    """
    num_tokens, num_heads, _ = q.shape
    group = num_heads // k.shape[1]
    if up is not None:
        k, v = _expanded(k, latent, up, group, q.shape[2])
        group = 1
    elif latent:
        v = v[..., :latent]
    keys = k.repeat_interleave(group, dim=1)
    values = v.repeat_interleave(group, dim=1)
    logits = torch.einsum("qhd,khd->hqk", q, keys) * sm_scale
    if logits_soft_cap > 0:
        logits = logits_soft_cap * torch.tanh(logits / logits_soft_cap)
    position = torch.arange(num_tokens, device=q.device)
    distance = position[:, None] - position[None, :]
    if alibi_slopes and len(alibi_slopes) > num_heads:
        first = current().rank * num_heads
        alibi_slopes = alibi_slopes[first : first + num_heads]
    if alibi_slopes:
        logits = logits - q.new_tensor(alibi_slopes, dtype=logits.dtype)[:, None, None] * distance
    if bias is not None:
        logits = logits + of_distances(bias, -distance)
    visible = distance >= 0
    for first, end in blocks:
        visible[first:end, first:end] = True
    if window_left >= 0:
        visible &= distance <= window_left
    if chunk:
        visible &= position[:, None] // chunk == position // chunk
    if index is not None:
        chosen = chosen_keys(tuple(index[:-1]), index[-1], visible, KeyChoice(top_k, index_block, index_local))
        visible = chosen.transpose(0, 1).repeat_interleave(num_heads // chosen.shape[1], 0)
    logits = logits.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        sink_logits = sinks.to(logits.dtype)[:, None, None].expand(-1, num_tokens, 1)
        logits = torch.cat((logits, sink_logits), dim=-1)
    weights = torch.softmax(logits.float(), dim=-1).to(q.dtype)[..., :num_tokens]
    return torch.einsum("hqk,khd->qhd", weights, values).contiguous()


def _expanded(
    k: torch.Tensor, latent: int, up: torch.Tensor, num_heads: int, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [T, Hk * H, D] and values [T, Hk * H, Dv] of the `num_heads` heads H of each latent in k [T, Hk, ..]."""
    of_heads = up.unflatten(0, (num_heads, -1))
    expanded = torch.einsum("tkl,hdl->tkhd", k[..., :latent], of_heads)
    own = width - (k.shape[2] - latent)
    rest = k[:, :, None, latent:].expand(-1, -1, num_heads, -1)
    keys = torch.cat((expanded[..., :own], rest), dim=-1)
    return keys.flatten(1, 2), expanded[..., own:].flatten(1, 2)


# mllm::counted_positions stands for the tokens' positions in a model that counts them by itself. It takes the counted
# positions, and is removed from the graph before any pass (mllm_compile/model/positions_hook.py).
_LIBRARY.define("counted_positions(Tensor counted) -> Tensor")
_LIBRARY.impl("counted_positions", torch.clone, "CompositeExplicitAutograd")
torch.library.register_fake("mllm::counted_positions", torch.empty_like, lib=_LIBRARY)
# mllm::request_lengths stands for the lengths that tokens' RoPE follows (mllm_compile/model/rope_hook.py), as long.
_LIBRARY.define("request_lengths(Tensor positions) -> Tensor")
_LIBRARY.impl("request_lengths", torch.clone, "CompositeExplicitAutograd")
torch.library.register_fake("mllm::request_lengths", torch.empty_like, lib=_LIBRARY)
# mllm::hidden_state marks a hidden state that a drafter reads (mllm_compile/model/hidden_states.py), likewise.
_LIBRARY.define("hidden_state(Tensor x, int place) -> Tensor")
_LIBRARY.impl("hidden_state", lambda x, place: x.clone(), "CompositeExplicitAutograd")
torch.library.register_fake("mllm::hidden_state", lambda x, place: torch.empty_like(x), lib=_LIBRARY)
# mllm::cross_attention is attention to an encoder's states, whose keys and values are in pages ahead of the step
# (mllm_compile/model/sources/hook.py): q [T, H, D] to [T, H, Dv].
_LIBRARY.define(
    "cross_attention(Tensor q, int num_kv_heads, int head_dim, int v_head_dim, float sm_scale, float logits_soft_cap, "
    "str refusals) -> Tensor"
)


def _cross_fake(q: torch.Tensor, num_kv_heads: int, head_dim: int, v_head_dim: int, *rest: object) -> torch.Tensor:
    return q.new_empty(q.shape[0], q.shape[1], v_head_dim)


torch.library.register_fake("mllm::cross_attention", _cross_fake, lib=_LIBRARY)
_LIBRARY.impl("attention", attention_reference, "CompositeExplicitAutograd")
torch.library.register_fake("mllm::attention", _attention_fake, lib=_LIBRARY)
