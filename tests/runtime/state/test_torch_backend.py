"""The torch backend of layers with a state: whose state each request reads, and which rows are written."""

from __future__ import annotations

import pytest
import torch

from mllm_compile.runtime.state.reference import math_of
from mllm_compile.runtime.state.torch_backend import TorchStateBackend
from tests.runtime.state.state_cases import KINDS, layer_of, operands_of, pool_of, run_batch, tokens_of


def alone(name: str, operands, span: slice):
    layer = layer_of(name)
    return math_of(layer.kind).scan(layer.kind, tokens_of(name, operands, span), torch.zeros(1, *layer.state_shape))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_each_request_of_a_batch_is_what_it_is_alone(name, deterministic):
    layer, lengths, rows = layer_of(name), (5, 1, 9, 2), (3, 1, 6, 2)
    operands, pool = operands_of(name, sum(lengths)), pool_of(layer)
    out = run_batch(TorchStateBackend(pool, deterministic), layer, operands, rows, lengths, (0, 0, 0, 0))
    start = 0
    for row, length in zip(rows, lengths, strict=True):
        expected, state = alone(name, operands, slice(start, start + length))
        torch.testing.assert_close(out[start : start + length], expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(pool.get_state(0)[row], state[0], rtol=1e-6, atol=1e-6)
        start += length


@pytest.mark.parametrize("name", KINDS)
def test_chunks_and_decodes_go_on_from_the_request_s_own_row(name):
    """Two requests: chunks of 7 and 4, then a mixed step (a decode and a chunk), then decodes of both."""
    layer, rows = layer_of(name), (5, 2)
    first, second = operands_of(name, 9), operands_of(name, 9, seed=10)
    second |= {key: first[key] for key in layer.kind.constants if key in first}
    backend, done, outs = TorchStateBackend(pool_of(layer)), [0, 0], ([], [])
    for lengths, num_decodes in (((7, 4), 0), ((1, 4), 1), ((1, 1), 2)):
        spans = [slice(start, start + length) for start, length in zip(done, lengths, strict=True)]
        parts = [tokens_of(name, x, span) for x, span in zip((first, second), spans, strict=True)]
        packed = {
            key: value if key in layer.kind.constants else torch.cat((value, parts[1][key]))
            for key, value in parts[0].items()
        }
        out = run_batch(backend, layer, packed, rows, lengths, tuple(done), num_decodes)
        for request, part in enumerate(out.split(list(lengths))):
            outs[request].append(part)
            done[request] += lengths[request]
    for x, parts in zip((first, second), outs, strict=True):
        torch.testing.assert_close(torch.cat(parts), alone(name, x, slice(9))[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", KINDS)
def test_a_prompt_of_one_token_counts_as_a_decode_and_reads_no_state(name):
    layer = layer_of(name)
    operands = operands_of(name, 2)
    out = run_batch(TorchStateBackend(pool_of(layer)), layer, operands, (4, 1), (1, 1), (0, 0), num_decodes=2)
    for token in range(2):
        span = slice(token, token + 1)
        torch.testing.assert_close(out[span], alone(name, operands, span)[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", KINDS)
def test_padding_is_not_computed_and_touches_no_request_s_row(name):
    layer, pool = layer_of(name), pool_of(layer_of(name))
    out = run_batch(TorchStateBackend(pool), layer, operands_of(name, 9), (2,), (6,), (0,))
    assert not out[:6].isnan().any() and out[6:].isnan().all(), "rows of padding keep what they had"
    # Padded decodes: two rows of padding behind one request, as a captured step has them.
    out = run_batch(TorchStateBackend(pool), layer, operands_of(name, 3), (2, 0, 0), (1, 1, 1), (6, 1, 1), 3)
    assert not out.isnan().any(), "row 0 never has a state, whatever it holds"
    states = pool.get_state(0)
    assert not states[2].isnan().any()
    assert all(states[row].isnan().all() for row in (1, 3, 4, 5, 6, 7))
