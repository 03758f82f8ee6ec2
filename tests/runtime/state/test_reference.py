"""The reference of layers with a state: against Transformers' own functions, and in any pieces the same."""

from __future__ import annotations

import pytest
import torch

from mllm_compile.runtime.state.reference import math_of
from tests.runtime.state.state_cases import KERNEL, KINDS, layer_of, operands_of, tokens_of

CHUNK = 16  # of Transformers' chunked functions below
LENGTHS = (1, KERNEL - 2, KERNEL - 1, KERNEL, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 5)


def scanned(name: str, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and the last state of a request from its beginning."""
    layer = layer_of(name)
    state = torch.zeros(1, *layer.state_shape)
    return math_of(layer.kind).scan(layer.kind, operands_of(name, num_tokens), state)


def of_transformers(name: str, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The same by Transformers: outputs, and the last state in our layout where the function gives one."""
    from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
    from transformers.models.mamba.modeling_mamba import mamba_selective_scan
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan
    from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_fn, torch_chunk_gated_delta_rule
    from transformers.models.rwkv.modeling_rwkv import rwkv_linear_attention_cpu
    from transformers.models.xlstm.modeling_xlstm import mlstm_recurrent_sequence_native

    x = operands_of(name, num_tokens)
    if name == "conv":
        out = causal_conv1d_fn(x["x"].T[None], x["weight"], x["bias"], activation="silu")
        return out[0].T, None
    if name.startswith("delta"):
        function = chunk_kimi_delta_attention if name == "delta a channel" else torch_chunk_gated_delta_rule
        repeats = x["v"].shape[1] // x["q"].shape[1]
        q, k = (x[part].repeat_interleave(repeats, 1)[None] for part in "qk")
        out, state = function(
            *(q, k, x["v"][None]),
            g=x["g"][None],
            beta=x["beta"][None],
            chunk_size=CHUNK,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        return out[0], state.transpose(-1, -2)
    if name == "ssd":
        out, state = mamba2_chunk_scan(
            *(x["x"][None], x["dt"][None], x["A"], x["B"][None], x["C"][None]),
            chunk_size=CHUNK,
            D=x["D"],
            dt_bias=x["dt_bias"],
            dt_softplus=True,
            dt_limit=(0.001, 0.5),
            return_final_states=True,
        )
        return out[0], state
    if name == "weighted mean":
        out, state = rwkv_linear_attention_cpu(x["decay"], x["bonus"], x["k"][None], x["v"][None], return_state=True)
        return out[0], torch.cat(state)[None]
    if name == "matrix memory":
        q, k, v, i, f = (x[part].transpose(0, 1)[None] for part in ("q", "k", "v", "i", "f"))
        out, (sums, norms, top) = mlstm_recurrent_sequence_native(q, k, v, i, f, return_last_states=True)
        tops = torch.nn.functional.pad(top[..., None], (0, q.shape[-1] - 1))
        return out[0].transpose(0, 1), torch.cat((sums.mT, norms[:, :, None], tops), dim=2)
    tokens = {part: x[part].T[None] for part in ("x", "dt", "B", "C", "z")}
    out, state = mamba_selective_scan(
        *(tokens["x"], tokens["dt"], x["A"], tokens["B"], tokens["C"]),
        D=x["D"],
        z=tokens["z"],
        delta_bias=x["dt_bias"],
        delta_softplus=True,
        return_last_state=True,
    )
    return out[0].T, state


@pytest.mark.parametrize("num_tokens", LENGTHS)
@pytest.mark.parametrize("name", KINDS)
def test_it_computes_what_transformers_computes(name, num_tokens):
    out, state = scanned(name, num_tokens)
    theirs, their_state = of_transformers(name, num_tokens)
    torch.testing.assert_close(out, theirs, rtol=1e-4, atol=2e-5)
    if their_state is not None:
        torch.testing.assert_close(state, their_state.float(), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("num_tokens", LENGTHS)
@pytest.mark.parametrize("name", KINDS)
def test_a_prompt_and_decodes_leave_the_state_that_one_prompt_leaves(name, num_tokens):
    layer, operands = layer_of(name), operands_of(name, num_tokens)
    expected, expected_state = scanned(name, num_tokens)
    for cut in {0, 1, num_tokens // 2, num_tokens - 1}:
        state, outs = torch.zeros(1, *layer.state_shape), []
        if cut:
            out, state = math_of(layer.kind).scan(layer.kind, tokens_of(name, operands, slice(cut)), state)
            outs.append(out)
        for token in range(cut, num_tokens):
            one = tokens_of(name, operands, slice(token, token + 1))
            out, state = math_of(layer.kind).step(layer.kind, one, state)
            outs.append(out)
        torch.testing.assert_close(torch.cat(outs), expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(state, expected_state, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", KINDS)
def test_requests_of_one_step_do_not_see_each_other(name):
    layer, operands = layer_of(name), operands_of(name, 5)
    states = torch.randn(5, *layer.state_shape, generator=torch.Generator().manual_seed(3))
    outs, after = math_of(layer.kind).step(layer.kind, operands, states)
    for request in range(5):
        span = slice(request, request + 1)
        out, state = math_of(layer.kind).step(layer.kind, tokens_of(name, operands, span), states[span])
        torch.testing.assert_close(outs[span], out, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(after[span], state, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["delta", "delta a channel", "ssd", "scan"])
def test_a_state_in_bfloat16_stays_near_over_4000_tokens(name):
    """Errors of a state that is rounded at every step add up, and decay with what they are errors of."""
    layer, operands = layer_of(name), operands_of(name, 4000)
    exact, _ = scanned(name, 4000)
    state, outs = torch.zeros(1, *layer.state_shape, dtype=torch.bfloat16), []
    for token in range(4000):
        one = tokens_of(name, operands, slice(token, token + 1))
        out, state = math_of(layer.kind).step(layer.kind, one, state)
        state = state.bfloat16()
        outs.append(out)
    rounded = torch.cat(outs)
    first, last = (
        (rounded[part] - exact[part]).norm() / exact[part].norm() for part in (slice(1000), slice(-1000, None))
    )
    assert last < 0.02
    assert last < 2 * first + 1e-3, "it grows"
