"""The gated delta rule by chunks: what head_gates.py and channel_gates.py have solved, and the products with a state.

Within a chunk the rule is a triangular system of equations ("WY form": Yang et al. 2024, arXiv 2406.06484; with gates
arXiv 2412.06464). With G the sum of a chunk's logarithms of decays up to a token, and S the state before it,

    u_i = beta_i (v_i - exp(G_i) S k_i - sum over j < i of exp(G_i - G_j) (k_i·k_j) u_j)
    out_i = exp(G_i) S q_i + sum over j <= i of exp(G_i - G_j) (q_i·k_j) u_j
    S <- exp(G_last) S + sum over j of exp(G_last - G_j) u_j k_jᵀ

All that does not depend on S is solved for the chunks of all requests beside each other.

Shape legend as in gated_delta.py; C chunks that there are at most, L tokens of a chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch.library import wrap_triton

from mllm_compile.runtime.ops.dependent_launch import start_dependents, starts_early, wait_for_prerequisites
from mllm_compile.runtime.ops.shared_memory import most_shared_bytes
from mllm_compile.runtime.ops.states.requests import SEARCHED

CHUNK = 64  # tokens
SHORT_CHUNK = 16  # of a step of few tokens
LEAST_SIDE = 16  # of tl.dot
_VALUES = 64  # of a block
_WARPS = 8
_TWO_STAGES_BYTES = 160 << 10  # of shared memory, so that a chunk can arrive while one is computed


class Solved(NamedTuple):
    """All that is known of chunks before their states are.

    Attributes:
        q, k: what states are multiplied by: with a gate a head [T, Hk, D], as they came; else with their decays,
            [C, Hv, L, padded D].
        inverses, scores: [C, Hv, L, L], of u and out.
        left: with a gate a channel, keys with the decays to the end of the chunk [C, Hv, L, padded D]; else k.
        factors: float32; with a gate a head [C, Hv, 4, L], of S k, of S q, of u and of S; else of S [C, Hv, padded D].
    """

    q: torch.Tensor
    k: torch.Tensor
    inverses: torch.Tensor
    scores: torch.Tensor
    left: torch.Tensor
    factors: torch.Tensor


@triton.jit
def _chunks_ahead(
    starts_ptr: tl.tensor, ends_ptr: tl.tensor, request: tl.tensor, CHUNK: tl.constexpr, SEARCHED: tl.constexpr
) -> tl.tensor | int:
    """Chunks of the requests ahead of this one."""
    ahead = 0
    for first in range(0, request, SEARCHED):
        requests = first + tl.arange(0, SEARCHED)
        starts = tl.load(starts_ptr + requests, mask=requests < request, other=0)
        ends = tl.load(ends_ptr + requests, mask=requests < request, other=0)
        ahead += tl.sum((ends - starts + CHUNK - 1) // CHUNK, 0)
    return ahead


@triton.jit
def _chunk_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    states_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    has_state_ptr: tl.tensor,
    sources_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    inverses_ptr: tl.tensor,
    scores_ptr: tl.tensor,
    left_ptr: tl.tensor,
    factors_ptr: tl.tensor,
    out_ptr: tl.tensor,
    q_token_stride: tl.tensor,
    q_head_stride: tl.tensor,
    q_dim_stride: tl.tensor,
    k_token_stride: tl.tensor,
    k_head_stride: tl.tensor,
    k_dim_stride: tl.tensor,
    v_token_stride: tl.tensor,
    v_head_stride: tl.tensor,
    v_dim_stride: tl.tensor,
    GROUP: tl.constexpr,
    HV: tl.constexpr,
    DV: tl.constexpr,
    D: tl.constexpr,
    PADDED_D: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    SEARCHED: tl.constexpr,
    STAGES: tl.constexpr,
    GATE_A_CHANNEL: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Program (block of a value head's rows, value head, request): its chunks, one after another."""
    if EARLY:
        wait_for_prerequisites()
        start_dependents()
    values = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[None, :]
    head = tl.program_id(1)
    request = tl.program_id(2)
    row = tl.load(rows_ptr + request).to(tl.int64)
    has_state = (tl.load(has_state_ptr + request) != 0) & (row > 0)
    start = tl.load(starts_ptr + request).to(tl.int64)
    end = tl.load(ends_ptr + request).to(tl.int64)
    earlier = _chunks_ahead(starts_ptr, ends_ptr, request, CHUNK, SEARCHED)
    dims = tl.arange(0, PADDED_D)
    places = tl.arange(0, CHUNK)
    is_dim = (dims < D)[None, :]
    is_value = values < DV
    is_number = (dims < D)[:, None] & is_value
    # [D, Dv]: as products take it.
    of_state = ((row * HV + head) * DV + values) * D + dims[:, None]
    source = tl.load(sources_ptr + request).to(tl.int64)
    of_source = states_ptr + ((source * HV + head) * DV + values) * D + dims[:, None]
    state = tl.load(of_source, mask=is_number & has_state, other=0.0).to(tl.float32)
    of_q = q_ptr + (head // GROUP) * q_head_stride + dims[None, :] * q_dim_stride
    of_k = k_ptr + (head // GROUP) * k_head_stride + dims[None, :] * k_dim_stride
    of_v = v_ptr + head * v_head_stride + values * v_dim_stride
    square = places[:, None] * CHUNK + places[None, :]
    num_chunks = ((end - start + CHUNK - 1) // CHUNK).to(tl.int32)
    for index in tl.range(0, num_chunks, num_stages=STAGES):
        tokens = (start + index * CHUNK + places)[:, None]
        is_token = tokens < end
        chunk = (earlier + index).to(tl.int64) * HV + head
        if GATE_A_CHANNEL:
            solved = chunk * CHUNK * PADDED_D + places[:, None] * PADDED_D + dims[None, :]
            k = tl.load(k_ptr + solved)
        else:
            k = tl.load(of_k + tokens * k_token_stride, is_token & is_dim, 0.0)
        v = tl.load(of_v + tokens * v_token_stride, is_token & is_value, 0.0)
        if GATE_A_CHANNEL:
            q = tl.load(q_ptr + solved)  # type: ignore[possibly-undefined]  # GATE_A_CHANNEL gave it
        else:
            q = tl.load(of_q + tokens * q_token_stride, is_token & is_dim, 0.0)
        inverse = tl.load(inverses_ptr + chunk * CHUNK * CHUNK + square)
        scores = tl.load(scores_ptr + chunk * CHUNK * CHUNK + square)
        factors = factors_ptr + chunk * 4 * CHUNK + places
        rounded = state.to(k.dtype)
        known = tl.dot(k, rounded)
        if not GATE_A_CHANNEL:
            known *= tl.load(factors)[:, None]
        added = tl.dot(inverse, (v.to(tl.float32) - known).to(k.dtype))
        out = tl.dot(q, rounded)
        if not GATE_A_CHANNEL:
            out *= tl.load(factors + CHUNK)[:, None]
        out += tl.dot(scores, added.to(k.dtype))
        tl.store(out_ptr + (tokens * HV + head) * DV + values, out.to(out_ptr.dtype.element_ty), is_token & is_value)
        if GATE_A_CHANNEL:
            kept = tl.load(factors_ptr + chunk * PADDED_D + dims)[:, None]
            left = tl.load(left_ptr + solved)  # type: ignore[possibly-undefined]  # GATE_A_CHANNEL gave it
            state = state * kept + tl.dot(tl.trans(left), added.to(k.dtype))
        else:
            of_added = (added * tl.load(factors + 2 * CHUNK)[:, None]).to(k.dtype)
            state = state * tl.load(factors_ptr + chunk * 4 * CHUNK + 3 * CHUNK) + tl.dot(tl.trans(k), of_added)
    tl.store(states_ptr + of_state, state.to(states_ptr.dtype.element_ty), is_number & (row > 0) & (end > start))


def _num_stages() -> int:
    """Chunks that a block has in shared memory at once."""
    return 2 if torch.cuda.is_available() and most_shared_bytes() >= _TWO_STAGES_BYTES else 1


def multiply_chunks(
    solved: Solved,
    v: torch.Tensor,
    states: torch.Tensor,
    rows: torch.Tensor,
    has_state: torch.Tensor,
    sources: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    out: torch.Tensor,
    sizes: dict[str, int],
    gate_a_channel: bool,
    chunk: int,
) -> None:
    """Takes states and outputs of prompts through their chunks.

    Args:
        v, states, rows, has_state, sources, starts, ends, out: as gated_delta_states has them.
        sizes: GROUP, HV and D.
        chunk: tokens of one, as it was solved.
    """
    heads, width = v.shape[1:]
    block = max(LEAST_SIDE, min(_VALUES, triton.next_power_of_2(width)))
    wrap_triton(_chunk_kernel)[(triton.cdiv(width, block), heads, rows.shape[0])](
        *(solved.q, solved.k, v, states, rows, has_state, sources, starts, ends),
        *(solved.inverses, solved.scores, solved.left, solved.factors, out),
        *solved.q.stride()[:3],  # which are not read with a gate a channel
        *solved.k.stride()[:3],
        *v.stride(),
        DV=width,
        PADDED_D=max(LEAST_SIDE, triton.next_power_of_2(sizes["D"])),
        BLOCK=block,
        CHUNK=chunk,
        SEARCHED=SEARCHED,
        STAGES=_num_stages(),
        GATE_A_CHANNEL=gate_a_channel,
        EARLY=starts_early(),
        num_warps=_WARPS,
        **sizes,
    )
