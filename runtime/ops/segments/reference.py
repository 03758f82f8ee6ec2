"""Attention over packed rows, where each sees rows of its own segment: towers of images and packed texts use it.

`segment_attention` stands for it in a trace, and names for the check of the trace what it cannot express; a program
runs `segment_attention_with_output`. It has no cache. Defined with torch.library's define/impl, as ops/trace.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from mllm_compile.runtime.attention.distances import of_distances as bias_of_distances
from mllm_compile.runtime.ops.segments.distance_scores import DistanceScores

_LIBRARY = torch.library.Library("mllm", "FRAGMENT")
_OF_DISTANCES = "Tensor? distance_keys=None, Tensor? distance_queries=None, Tensor? distance_columns=None"
_OF_SCORES = "Tensor? sinks=None, float soft_cap=0.0"
_OF_TEXTS = f"int window_left=-1, int window_right=-1, Tensor? bias=None, {_OF_DISTANCES}, {_OF_SCORES}"
_LIBRARY.define(
    "segment_attention(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, float sm_scale, str refusals, "
    f"{_OF_TEXTS}) -> Tensor"
)
_LIBRARY.define(
    "segment_attention_with_output(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, Tensor(a!) out, float sm_scale, "
    f"str layer_name, int longest=0, {_OF_TEXTS}) -> ()"
)
# Types that the device's own kernel takes; others are computed segment by segment.
_KERNEL_DTYPES = (torch.bfloat16, torch.float16)
_MOST_SCORES = 1 << 24  # of segments that are computed together, where each has scores of its own to add


def segment_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    sm_scale: float,
    refusals: str = "",
    window_left: int = -1,
    window_right: int = -1,
    *others: torch.Tensor | float | None,
) -> torch.Tensor:
    """Attends within segments; [N, H, Dv]. Arguments as segment_attention_with_output's; `refusals` is ignored here."""
    out = v.new_empty((q.shape[0], q.shape[1], v.shape[2]))
    windows_and_others: Any = window_left, window_right, *others
    segment_attention_with_output(q, k, v, cu_seqlens, out, sm_scale, "", 0, *windows_and_others)
    return out


def segment_attention_with_output(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    out: torch.Tensor,
    sm_scale: float,
    layer_name: str,
    longest: int = 0,
    window_left: int = -1,
    window_right: int = -1,
    bias: torch.Tensor | None = None,
    distance_keys: torch.Tensor | None = None,
    distance_queries: torch.Tensor | None = None,
    distance_columns: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    soft_cap: float = 0.0,
) -> None:
    """Attends within segments: row i to rows i - window_left to i + window_right of its own.

    Args:
        q: [N, H, D]; k: [N, Hk, D]; v: [N, Hk, Dv], H a multiple of Hk.
        cu_seqlens: [segments + 1] int32: where segments begin, and N.
        out: [N, H, Dv], written.
        sm_scale: factor on q·k.
        layer_name: for people.
        longest: rows of the longest segment; 0: not known, and N is taken.
        window_left, window_right: -1: no bound. A window_right of 0 is causal.
        bias: [H, 2R + 1], added to the scores by distance j - i; those beyond R are as R.
        distance_keys, distance_queries: [W, H, D], where H is Hk: what a distance's column says to queries and to keys.
            Added to q_i · k_j are q_i · distance_keys[c] and distance_queries[c] · k_j; either may be left out.
        distance_columns: [2R + 1] int64, c of each distance j - i; those beyond R are as R.
        sinks: [H], a score of each head's that takes part in the softmax and carries no value.
        soft_cap: c of c · tanh(score / c), ahead of what is added to scores; 0: none.
    """
    of_distances = None
    if distance_columns is not None:
        of_distances = DistanceScores(distance_keys, distance_queries, distance_columns)
    is_written_out = sinks is not None or soft_cap > 0
    is_taken = q.is_cuda and q.dtype in _KERNEL_DTYPES and q.shape[-1] == v.shape[-1] and q.shape[-1] % 8 == 0
    if is_taken and bias is None and of_distances is None and not is_written_out:
        length = longest or q.shape[0]
        is_causal, window = window_left < 0 and window_right == 0, {}
        if not is_causal and max(window_left, window_right) >= 0:
            window = {"window_size_left": window_left, "window_size_right": window_right}
        attended = torch.ops.aten._flash_attention_forward(
            q, k, v, cu_seqlens, cu_seqlens, length, length, 0.0, is_causal, False, scale=sm_scale, **window
        )
        out.copy_(attended[0])
        return
    group = q.shape[1] // k.shape[1]
    for start, count, length in _runs(
        cu_seqlens.tolist(), q.shape[1] if of_distances is not None or is_written_out else 0
    ):
        end = start + count * length
        queries, keys, values = (x[start:end].unflatten(0, (count, length)).transpose(1, 2) for x in (q, k, v))
        keys, values = (x.repeat_interleave(group, 1) if group > 1 else x for x in (keys, values))
        added = _added_to_scores(length, window_left, window_right, bias, q)
        if of_distances is not None:
            scores = of_distances.of(queries, keys).mul_(sm_scale)
            added = scores if added is None else scores.add_(added)
        if is_written_out:
            attended = _written_out(queries, keys, values, added, sm_scale, soft_cap, sinks)
        else:
            attended = torch.nn.functional.scaled_dot_product_attention(
                queries, keys, values, attn_mask=added, scale=sm_scale
            )
        out[start:end] = attended.transpose(1, 2).flatten(0, 1)


def _written_out(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    added: torch.Tensor | None,
    sm_scale: float,
    soft_cap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention [S, H, n, Dv] of segments whose scores are capped or have sinks, in float32."""
    scores = (q.float() @ k.float().mT).mul_(sm_scale)
    if soft_cap:
        scores.div_(soft_cap).tanh_().mul_(soft_cap)
    if added is not None:
        scores += added
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        sink = sinks.float().view(-1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
    return (weights @ v.float()).to(v.dtype)


def _runs(bounds: list[int], scored_heads: int = 0) -> Iterator[tuple[int, int, int]]:
    """Segments of equal lengths that follow each other: where they begin, how many they are, and their rows. A call for
    each segment would take longer than short ones' products. Of `scored_heads`, above 0, each has scores in memory."""
    place = 0
    lengths = [end - start for start, end in itertools.pairwise(bounds)]
    for length, members in itertools.groupby(lengths):
        count = sum(1 for _ in members)
        most = max(1, _MOST_SCORES // (scored_heads * 2 * length * length)) if length and scored_heads else count
        for first in range(0, count if length else 0, most):
            yield bounds[place] + first * length, min(most, count - first), length
        place += count


def _added_to_scores(
    length: int, window_left: int, window_right: int, bias: torch.Tensor | None, like: torch.Tensor
) -> torch.Tensor | None:
    """The mask and bias that are added to the scores [(H,) length, length] of a segment; None: neither."""
    hides = 0 <= window_left < length - 1 or 0 <= window_right < length - 1
    if bias is None and not hides:
        return None
    places = torch.arange(length, device=like.device)
    far = places[None, :] - places[:, None]
    if bias is None:
        added = like.new_zeros(length, length)
    else:
        added = bias_of_distances(bias, far).to(like.dtype)
    if window_left >= 0:
        added = added.masked_fill(far < -window_left, float("-inf"))
    if window_right >= 0:
        added = added.masked_fill(far > window_right, float("-inf"))
    return added


def _fake(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, sm_scale: float, *args: object
) -> torch.Tensor:
    return q.new_empty(q.shape[0], q.shape[1], v.shape[2])


_LIBRARY.impl("segment_attention", segment_attention, "CompositeExplicitAutograd")
torch.library.register_fake("mllm::segment_attention", _fake, lib=_LIBRARY)
_LIBRARY.impl("segment_attention_with_output", segment_attention_with_output, "CompositeExplicitAutograd")
torch.library.register_fake("mllm::segment_attention_with_output", lambda *args: None, lib=_LIBRARY)
