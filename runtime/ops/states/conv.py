"""Causal convolution over the last inputs of each request, which its state keeps.

Triton by hand, as `torch.library.triton_op`, so that AOTInductor puts the compiled kernel into a package
(mllm_compile/kernels/states.py). Only the piece compiler imports this module.

Shape legend: T tokens, B requests, C channels, K kernel width, R rows of the pool.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

from mllm_compile.runtime.ops.dependent_launch import start_dependents, starts_early, wait_for_prerequisites
from mllm_compile.runtime.ops.states.requests import SEARCHED, num_blocks, silu

_WARPS = 4
_DECODE_CHANNELS = 256  # of a block
_PROMPT_CHANNELS = 128
_PROMPT_TOKENS = 32
_FEW_CHANNELS, _FEW_TOKENS, _FEW_WARPS = 32, 16, 2  # where all is latency
_MOST_AHEAD = 8  # requests of a step whose recurrence is let in at once


@triton.jit
def _decode_conv_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    states_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    has_state_ptr: tl.tensor,
    out_ptr: tl.tensor,
    x_token_stride: tl.tensor,
    x_channel_stride: tl.tensor,
    weight_channel_stride: tl.tensor,
    weight_column_stride: tl.tensor,
    C: tl.constexpr,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK: tl.constexpr,
    MOST_AHEAD: tl.constexpr,
    WAITS_FIRST: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Program (request, block of channels). All but the token's own product is there before the token is."""
    if WAITS_FIRST:
        wait_for_prerequisites()
    # Few requests' states arrive while this waits; more states would delay x.
    if EARLY and MOST_AHEAD:  # noqa: SIM102 # the one is known when the kernel is compiled
        if tl.num_programs(0) <= MOST_AHEAD:
            start_dependents()
    request = tl.program_id(0)
    token = request.to(tl.int64)
    row = tl.load(rows_ptr + request).to(tl.int64)
    has_state = (tl.load(has_state_ptr + request) != 0) & (row > 0)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_channel = channels < C
    states = states_ptr + row * (K - 1) * C + channels
    weights = weight_ptr + channels * weight_channel_stride
    out = tl.zeros((BLOCK,), tl.float32)
    if HAS_BIAS:
        out += tl.load(bias_ptr + channels, mask=is_channel, other=0.0).to(tl.float32)
    for column in tl.static_range(K - 1):
        seen = tl.load(states + column * C, mask=is_channel & has_state, other=0.0).to(tl.float32)
        out += seen * tl.load(weights + column * weight_column_stride, mask=is_channel, other=0.0).to(tl.float32)
    weight = tl.load(weights + (K - 1) * weight_column_stride, mask=is_channel, other=0.0).to(tl.float32)
    if EARLY:  # states and weights are on their way: none of the kernels that run now writes them
        wait_for_prerequisites()
    x = tl.load(x_ptr + token * x_token_stride + channels * x_channel_stride, mask=is_channel, other=0.0)
    if EARLY:  # not before, with many: what the next kernel reads ahead would be in the way
        start_dependents()
    x = x.to(states_ptr.dtype.element_ty)
    out += x.to(tl.float32) * weight
    if SILU:
        out = silu(out)
    tl.store(out_ptr + token * C + channels, out.to(out_ptr.dtype.element_ty), mask=is_channel)
    # A thread has the same channels in every column: it has read what it replaces.
    for column in tl.static_range(K - 2):
        seen = tl.load(states + (column + 1) * C, mask=is_channel & has_state, other=0.0)
        tl.store(states + column * C, seen, mask=is_channel & (row > 0))
    tl.store(states + (K - 2) * C, x, mask=is_channel & (row > 0))


@triton.jit
def _prompt_conv_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    states_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    has_state_ptr: tl.tensor,
    sources_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    out_ptr: tl.tensor,
    x_token_stride: tl.tensor,
    x_channel_stride: tl.tensor,
    weight_channel_stride: tl.tensor,
    weight_column_stride: tl.tensor,
    num_requests: tl.tensor,
    C: tl.constexpr,
    K: tl.constexpr,
    PADDED_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    SEARCHED: tl.constexpr,
    WAITS_FIRST: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Program (block of tokens of one request, block of channels). A request's first block is the one that reads its
    state, and so the one that replaces it. A state and weights are there before the tokens are."""
    if WAITS_FIRST:
        wait_for_prerequisites()
    # As find_block does; what it gave would be part of where this kernel stores.
    block = tl.program_id(0)
    request = num_requests
    index = 0
    passed = 0
    for first in range(0, num_requests, SEARCHED):
        requests = first + tl.arange(0, SEARCHED)
        is_request = requests < num_requests
        starts = tl.load(starts_ptr + requests, mask=is_request, other=0)
        ends = tl.load(ends_ptr + requests, mask=is_request, other=0)
        blocks = (ends - starts + TOKENS - 1) // TOKENS
        behind = passed + tl.cumsum(blocks, 0)
        is_it = (behind > block) & (behind - blocks <= block)
        request += tl.sum(tl.where(is_it, requests - num_requests, 0), 0)
        index += tl.sum(tl.where(is_it, block - (behind - blocks), 0), 0)
        passed += tl.sum(blocks, 0)
    is_used = request < num_requests
    row = tl.load(rows_ptr + request, mask=is_used, other=0).to(tl.int64)
    has_state = (tl.load(has_state_ptr + request, mask=is_used, other=0) != 0) & (row > 0)
    start = tl.load(starts_ptr + request, mask=is_used, other=0).to(tl.int64)
    length = tl.load(ends_ptr + request, mask=is_used, other=0).to(tl.int64) - start
    channels = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    is_channel = channels < C
    tokens = (index * TOKENS + tl.arange(0, TOKENS))[:, None]
    source = tl.load(sources_ptr + request, mask=is_used, other=0).to(tl.int64)
    of_source = states_ptr + source * (K - 1) * C + channels
    states = states_ptr + row * (K - 1) * C + channels
    of_weights = weight_ptr + channels * weight_channel_stride
    # Earlier inputs have the first columns: sums are in the order of columns.
    out = tl.zeros((TOKENS, BLOCK), tl.float32)
    if index == 0:
        for column in tl.static_range(K - 1):
            place = tokens + column
            is_old = (place < K - 1) & is_channel & has_state
            seen = tl.load(of_source + place * C, mask=is_old, other=0.0).to(tl.float32)
            weights = tl.load(of_weights + column * weight_column_stride, mask=is_channel, other=0.0)
            out += seen * weights.to(tl.float32)
    if EARLY:  # no kernel that runs now writes data that has been read
        wait_for_prerequisites()
        start_dependents()
    if is_used:
        inputs = x_ptr + start * x_token_stride + channels * x_channel_stride
        for column in tl.static_range(K):
            place = tokens + (column - (K - 1))
            is_new = (place >= 0) & (place < length) & is_channel
            seen = tl.load(inputs + place * x_token_stride, mask=is_new, other=0.0).to(tl.float32)
            weights = tl.load(of_weights + column * weight_column_stride, mask=is_channel, other=0.0)
            out += seen * weights.to(tl.float32)
        if HAS_BIAS:
            out += tl.load(bias_ptr + channels, mask=is_channel, other=0.0).to(tl.float32)
        if SILU:
            out = silu(out)
        places = out_ptr + (start + tokens) * C + channels
        tl.store(places, out.to(out_ptr.dtype.element_ty), mask=(tokens < length) & is_channel)
        if index == 0:
            columns = tl.arange(0, PADDED_K)[:, None]
            last = length - (K - 1) + columns
            is_column = (columns < K - 1) & is_channel
            new = tl.load(inputs + last * x_token_stride, mask=(last >= 0) & is_column, other=0.0)
            old = tl.load(of_source + (last + (K - 1)) * C, mask=(last < 0) & is_column & has_state, other=0.0)
            kept = tl.where(last >= 0, new.to(old.dtype), old)
            tl.debug_barrier()  # all have read what this replaces
            tl.store(states + columns * C, kept, mask=is_column & (row > 0))


@triton.jit
def _few_conv_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    states_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    has_state_ptr: tl.tensor,
    sources_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    out_ptr: tl.tensor,
    x_token_stride: tl.tensor,
    x_channel_stride: tl.tensor,
    weight_channel_stride: tl.tensor,
    weight_column_stride: tl.tensor,
    C: tl.constexpr,
    K: tl.constexpr,
    PADDED_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    MOST_AHEAD: tl.constexpr,
    WAITS_FIRST: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Program (request, block of channels): all of its tokens. It has to look for nothing, so that its state's part of
    the sums is there before the tokens are."""
    if WAITS_FIRST:
        wait_for_prerequisites()
    # As in _decode_conv_kernel.
    if EARLY and MOST_AHEAD:  # noqa: SIM102 # the one is known when the kernel is compiled
        if tl.num_programs(0) <= MOST_AHEAD:
            start_dependents()
    request = tl.program_id(0)
    row = tl.load(rows_ptr + request).to(tl.int64)
    has_state = (tl.load(has_state_ptr + request) != 0) & (row > 0)
    source = tl.load(sources_ptr + request).to(tl.int64)
    start = tl.load(starts_ptr + request).to(tl.int64)
    length = tl.load(ends_ptr + request).to(tl.int64) - start
    channels = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    is_channel = channels < C
    of_source = states_ptr + source * (K - 1) * C + channels
    states = states_ptr + row * (K - 1) * C + channels
    of_weights = weight_ptr + channels * weight_channel_stride
    places = tl.arange(0, TOKENS)[:, None]
    if length > 0:
        # Earlier inputs have the first columns: sums are in the order of columns.
        of_state = tl.zeros((TOKENS, BLOCK), tl.float32)
        for column in tl.static_range(K - 1):
            is_old = (places + column < K - 1) & is_channel & has_state
            seen = tl.load(of_source + (places + column) * C, mask=is_old, other=0.0).to(tl.float32)
            weights = tl.load(of_weights + column * weight_column_stride, mask=is_channel, other=0.0)
            of_state += seen * weights.to(tl.float32)
        if EARLY:  # no kernel that runs now writes data that has been read
            wait_for_prerequisites()
            start_dependents()
        inputs = x_ptr + start * x_token_stride + channels * x_channel_stride
        for first in range(0, length, TOKENS):
            tokens = first + places
            out = tl.where(first == 0, of_state, 0.0)
            for column in tl.static_range(K):
                place = tokens + (column - (K - 1))
                is_new = (place >= 0) & (place < length) & is_channel
                seen = tl.load(inputs + place * x_token_stride, mask=is_new, other=0.0).to(tl.float32)
                weights = tl.load(of_weights + column * weight_column_stride, mask=is_channel, other=0.0)
                out += seen * weights.to(tl.float32)
            if HAS_BIAS:
                out += tl.load(bias_ptr + channels, mask=is_channel, other=0.0).to(tl.float32)
            if SILU:
                out = silu(out)
            stored = out_ptr + (start + tokens) * C + channels
            tl.store(stored, out.to(out_ptr.dtype.element_ty), mask=(tokens < length) & is_channel)
        columns = tl.arange(0, PADDED_K)[:, None]
        last = length - (K - 1) + columns
        is_column = (columns < K - 1) & is_channel
        new = tl.load(inputs + last * x_token_stride, mask=(last >= 0) & is_column, other=0.0)
        old = tl.load(of_source + (last + (K - 1)) * C, mask=(last < 0) & is_column & has_state, other=0.0)
        kept = tl.where(last >= 0, new.to(old.dtype), old)
        tl.debug_barrier()  # all have read what this replaces
        tl.store(states + columns * C, kept, mask=is_column & (row > 0))
    elif EARLY:  # noqa: SIM102 # as above
        if (request == 0) & (tl.program_id(1) == 0):  # one is enough for the launch to end behind the one ahead
            wait_for_prerequisites()


@triton_op("mllm::causal_conv_states", mutates_args={"states", "out"})
def causal_conv_states(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    rows: torch.Tensor,
    has_state: torch.Tensor,
    sources: torch.Tensor | None,
    starts: torch.Tensor | None,
    ends: torch.Tensor | None,
    out: torch.Tensor,
    activation: str,
    lets_in_at_once: bool = False,
    few_tokens: bool = False,
    waits_first: bool = False,
) -> None:
    """runtime/state/layer.py's CausalConv, summed in float32 and rounded once.

    Args:
        x: [T, C]; weight: [C, K]; bias: [C], contiguous.
        states: [R, K - 1, C], contiguous, written at `rows`.
        rows: [B] int64; has_state: [B] bool.
        sources: [B] int64, the rows where states are read; none: `rows`. Requests with `starts` alone may have others.
        starts, ends: [B] int32, each request's tokens; none: request i has token i alone.
        out: [T, C], contiguous, written for requests' tokens.
        activation: silu, or "".
        lets_in_at_once: with few requests the next kernel starts as soon as this one does. Before its own wait it may
            read nothing but weights, states, rows, bounds and flags then, none that a kernel of the same layer makes.
        few_tokens: a block for each request, which suits few tokens of few requests; outputs are the same.
        waits_first: a kernel ahead makes what no token has a part in, weights in another type say: nothing is read
            before it has ended.
    """
    channels, width = weight.shape
    strides = (x.stride(0), x.stride(1), weight.stride(0), weight.stride(1))
    constants = {
        "C": channels,
        "K": width,
        "HAS_BIAS": bias is not None,
        "SILU": activation == "silu",
        "WAITS_FIRST": waits_first and starts_early(),
        "EARLY": starts_early(),
        "num_warps": _WARPS,
    }
    given_bias = x if bias is None else bias  # which is not read without
    most_ahead = _MOST_AHEAD if lets_in_at_once else 0
    if starts is None or ends is None:
        block = min(_DECODE_CHANNELS, triton.next_power_of_2(channels))
        grid: tuple[int, ...] = (rows.shape[0], triton.cdiv(channels, block))
        wrap_triton(_decode_conv_kernel)[grid](
            *(x, weight, given_bias, states, rows, has_state, out, *strides),
            BLOCK=block,
            MOST_AHEAD=most_ahead,
            **constants,
        )
        return
    given = (x, weight, given_bias, states, rows, has_state, rows if sources is None else sources, starts, ends, out)
    padded = triton.next_power_of_2(width)
    # The first tokens of a block are all that see the state.
    if few_tokens:
        block = min(_FEW_CHANNELS, triton.next_power_of_2(channels))
        wrap_triton(_few_conv_kernel)[(rows.shape[0], triton.cdiv(channels, block))](
            *given,
            *strides,
            TOKENS=max(_FEW_TOKENS, padded),
            PADDED_K=padded,
            BLOCK=block,
            MOST_AHEAD=most_ahead,
            **(constants | {"num_warps": _FEW_WARPS}),
        )
        return
    block, tokens = min(_PROMPT_CHANNELS, triton.next_power_of_2(channels)), max(_PROMPT_TOKENS, padded)
    grid = (num_blocks(x, rows, tokens), triton.cdiv(channels, block))
    wrap_triton(_prompt_conv_kernel)[grid](
        *given,
        *strides,
        rows.shape[0],
        TOKENS=tokens,
        PADDED_K=padded,
        BLOCK=block,
        SEARCHED=SEARCHED,
        **constants,
    )
