"""Attention over packed rows, where each sees all rows of its own segment: towers of images use it.

`segment_attention` stands for it in a trace, and names for the check of the trace what it cannot express; a program
runs `segment_attention_with_output`. It has no cache and no causality. Defined with torch.library's define/impl, as
ops/trace.py.
"""

from __future__ import annotations

import itertools

import torch

_LIBRARY = torch.library.Library("mllm", "FRAGMENT")
_LIBRARY.define(
    "segment_attention(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, float sm_scale, str refusals) -> Tensor"
)
_LIBRARY.define(
    "segment_attention_with_output(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, Tensor(a!) out, float sm_scale, "
    "str layer_name, int longest=0) -> ()"
)
# Types that the device's own kernel takes; others are computed segment by segment.
_KERNEL_DTYPES = (torch.bfloat16, torch.float16)


def segment_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, sm_scale: float, refusals: str = ""
) -> torch.Tensor:
    """Attends within segments; [N, H, Dv]. Arguments as segment_attention_with_output's; `refusals` is ignored here."""
    out = v.new_empty((q.shape[0], q.shape[1], v.shape[2]))
    segment_attention_with_output(q, k, v, cu_seqlens, out, sm_scale, "")
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
) -> None:
    """Attends within segments, in both directions.

    Args:
        q: [N, H, D]; k: [N, Hk, D]; v: [N, Hk, Dv], H a multiple of Hk.
        cu_seqlens: [segments + 1] int32: where segments begin, and N.
        out: [N, H, Dv], written.
        sm_scale: factor on q·k.
        layer_name: for people.
        longest: rows of the longest segment; 0: not known, and N is taken.
    """
    if q.is_cuda and q.dtype in _KERNEL_DTYPES and q.shape[-1] == v.shape[-1] and q.shape[-1] % 8 == 0:
        length = longest or q.shape[0]
        attended = torch.ops.aten._flash_attention_forward(
            q, k, v, cu_seqlens, cu_seqlens, length, length, 0.0, False, False, scale=sm_scale
        )
        out.copy_(attended[0])
        return
    group = q.shape[1] // k.shape[1]
    ends = cu_seqlens.tolist()
    for start, end in itertools.pairwise(ends):
        queries, keys, values = (x[start:end].transpose(0, 1) for x in (q, k, v))
        keys, values = (x.repeat_interleave(group, 0) if group > 1 else x for x in (keys, values))
        attended = torch.nn.functional.scaled_dot_product_attention(
            queries[None], keys[None], values[None], scale=sm_scale
        )
        out[start:end] = attended[0].transpose(0, 1)


def _fake(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, sm_scale: float, refusals: str
) -> torch.Tensor:
    return q.new_empty(q.shape[0], q.shape[1], v.shape[2])


_LIBRARY.impl("segment_attention", segment_attention, "CompositeExplicitAutograd")
torch.library.register_fake("mllm::segment_attention", _fake, lib=_LIBRARY)
_LIBRARY.impl("segment_attention_with_output", segment_attention_with_output, "CompositeExplicitAutograd")
torch.library.register_fake("mllm::segment_attention_with_output", lambda *args: None, lib=_LIBRARY)
