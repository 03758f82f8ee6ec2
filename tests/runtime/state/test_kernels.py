"""The Triton kernels of layers with a state against the reference, through Triton's interpreter, on a CPU.

One test runs this file with the interpreter (tests/runtime/interpreted.py). tests/gpu/test_states.py runs the same
kernels as a GPU does.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from mllm_compile.runtime.memory_pool import GDNPool
from mllm_compile.runtime.state.base import StateBackend
from mllm_compile.runtime.state.layer import StateLayer
from mllm_compile.runtime.state.piece_backend import PieceStateBackend
from mllm_compile.runtime.state.reference import Operands
from mllm_compile.runtime.state.torch_backend import TorchStateBackend
from tests.runtime.interpreted import (
    IS_INTERPRETED,
    interpreted,
    run_interpreted,
    starts_the_interpreter,
    take_loop_bounds,
)
from tests.runtime.state.state_cases import (
    OF_GATES,
    WITH_KERNELS,
    kernel_modules,
    kernels_of,
    layer_of,
    operands_of,
    pool_of,
    run_batch,
    tokens_of,
)
from tests.runtime.state.test_held import SPANS, check_states_go_on_by_what_holds

NORMED = ("delta with its norm", "ssd with its norm")
# rows, lengths and earlier tokens of requests, how many of them decode
BATCHES = {
    "prompts": ((3, 1, 6, 2), (5, 1, 66, 33), (0, 0, 0, 0), 0),
    "chunks": ((3, 1, 6), (64, 2, 35), (4, 70, 0), 0),
    "short chunks": ((3, 1, 6, 2), (16, 17, 1, 15), (4, 0, 70, 2), 0),
    "decodes": ((3, 1, 6), (1, 1, 1), (9, 0, 2), 3),
    "padded decodes": ((3, 0, 0), (1, 1, 1), (9, 1, 1), 3),
    "mixed": ((5, 1, 6, 2), (1, 1, 34, 3), (9, 4, 0, 2), 2),
    "an empty request": ((5, 1, 6), (3, 0, 7), (0, 4, 2), 0),
    "padding": ((0, 2), (4, 6), (0, 0), 0),
}


@starts_the_interpreter
def test_kernels_compute_what_the_reference_does_through_the_interpreter():
    run_interpreted(__file__)


@pytest.fixture(autouse=True)
def plain_launches(monkeypatch):
    """Kernels are launched as they are: torch's wrapper takes compiled ones alone."""
    if not IS_INTERPRETED:
        return
    from mllm_compile.runtime.ops.states import gated_delta, ssd

    for module in kernel_modules():
        monkeypatch.setattr(module, "wrap_triton", lambda kernel: kernel)
    for module in (gated_delta, ssd):  # where nothing is rounded, logic alone can be wrong
        monkeypatch.setattr(module, "_CHUNKED_DTYPES", (torch.float32,))

    take_loop_bounds(monkeypatch)


Result = tuple[torch.Tensor, torch.Tensor]  # out, and all states


def run_on(backend_of: Callable[[GDNPool], StateBackend], layer: StateLayer, operands: Operands, *batch: Any) -> Result:
    """The batch on a pool whose rows hold other requests' states."""
    pool = pool_of(layer)
    pool.get_state(0).copy_(torch.randn(8, *layer.state_shape, generator=torch.Generator().manual_seed(5)))
    return run_batch(backend_of(pool), layer, operands, *batch), pool.get_state(0)


def both(layer: StateLayer, operands: Operands, *batch: Any) -> tuple[Result, Result]:
    """The batch by the kernels, and by the reference."""
    ours = run_on(partial(piece_backend, layer), layer, operands, *batch)
    return ours, run_on(TorchStateBackend, layer, operands, *batch)


def piece_backend(layer: StateLayer, pool: GDNPool) -> PieceStateBackend:
    return PieceStateBackend(pool, {layer.name: kernels_of(layer)}, TorchStateBackend(pool))


@interpreted
@pytest.mark.parametrize(
    ("name", "batch"),
    [
        *itertools.product(WITH_KERNELS, BATCHES),
        *itertools.product(OF_GATES, ["mixed"]),
        *itertools.product(NORMED, ["padded decodes", "an empty request"]),
    ],
)
def test_outputs_and_states_are_the_reference_s(name, batch):
    rows, lengths, earlier, num_decodes = BATCHES[batch]
    layer, operands = layer_of(name), operands_of(name, sum(lengths) + 2)
    kept = [index for index, length in enumerate(lengths) if length]
    ours = run_on(partial(piece_backend, layer), layer, operands, rows, lengths, earlier, num_decodes)
    without_empty = ([values[index] for index in kept] for values in (rows, lengths, earlier))
    theirs = run_on(TorchStateBackend, layer, operands, *without_empty, num_decodes)
    torch.testing.assert_close(ours[0], theirs[0], rtol=2e-5, atol=2e-5, equal_nan=True)
    torch.testing.assert_close(ours[1][1:], theirs[1][1:], rtol=2e-5, atol=2e-5)


@interpreted
@pytest.mark.parametrize("length", [30, 70])
@pytest.mark.parametrize("name", WITH_KERNELS)
def test_a_prompt_that_reads_a_prefix_s_state_leaves_its_own_beside_it(name, length):
    layer, operands = layer_of(name), operands_of(name, length)
    pool = pool_of(layer)
    pool.get_state(0).copy_(torch.randn(8, *layer.state_shape, generator=torch.Generator().manual_seed(5)))
    before, out = pool.get_state(0).clone(), torch.zeros(length, *layer.out_shape)
    bounds = torch.tensor([0], dtype=torch.int32), torch.tensor([length], dtype=torch.int32)
    given = [*operands.values(), pool.get_state(0), torch.tensor([3]), torch.tensor([True]), torch.tensor([6])]
    kernels_of(layer).prompts_of(length)([*given, *bounds, out])
    expected = run_on(TorchStateBackend, layer, operands, (6,), (length,), (9,))
    torch.testing.assert_close(out, expected[0], rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(pool.get_state(0)[3], expected[1][6], rtol=2e-5, atol=2e-5)
    before[3] = pool.get_state(0)[3]
    assert torch.equal(pool.get_state(0), before)


@interpreted
@pytest.mark.parametrize("name", WITH_KERNELS)
def test_states_go_on_by_the_accepted_tokens_of_a_verify_step(name):
    check_states_go_on_by_what_holds(piece_backend, name, 1, SPANS["all"])


@interpreted
@pytest.mark.parametrize("missing", [("bias",), ("D",), ("dt_bias",), ("z",), ("D", "z", "dt_bias")])
def test_operands_that_a_layer_has_not_are_not_read(missing):
    for name, kind in WITH_KERNELS.items():
        if not set(missing) <= set(kind.operands) or kind.name == "gated_delta":  # whose gates have both or none
            continue
        operands = {key: value for key, value in operands_of(name, 40).items() if key not in missing}
        layer = replace(layer_of(name), operands=tuple(operands))
        ours, theirs = both(layer, operands, (3, 1), (38, 2), (0, 4), 0)
        torch.testing.assert_close(ours[0], theirs[0], rtol=2e-5, atol=2e-5)


@interpreted
@pytest.mark.parametrize("name", WITH_KERNELS)
def test_operands_may_be_parts_of_larger_tensors(name):
    """As pieces give them: views of one projection's output, of rows that are apart."""
    layer, operands = layer_of(name), operands_of(name, 40)
    spread = {}
    for key, value in operands.items():
        holder = torch.full((*value.shape[:-1], value.shape[-1] + 3), torch.nan)
        holder[..., 1:-2] = value
        one_channel_apart = value.dim() == 1 and key == "bias"
        spread[key] = value if one_channel_apart else holder[..., 1:-2]
    ours, theirs = both(layer, spread, (3, 1, 2), (1, 37, 2), (2, 0, 4), 1)
    torch.testing.assert_close(ours[0], theirs[0], rtol=2e-5, atol=2e-5)


@interpreted
@pytest.mark.parametrize("name", WITH_KERNELS)
def test_a_prompt_in_pieces_leaves_what_one_leaves(name):
    layer, operands = layer_of(name), operands_of(name, 40)
    ends = {}
    for lengths in ((40,), (32, 8), (7, 1, 1, 31)):
        pool, done, outs = pool_of(layer), 0, []
        for length in lengths:
            part = tokens_of(name, operands, slice(done, done + length))
            num_decodes = int(length == 1 and done > 0)
            outs.append(run_batch(piece_backend(layer, pool), layer, part, (4,), (length,), (done,), num_decodes))
            done += length
        ends[lengths] = torch.cat(outs), pool.get_state(0)[4]
    whole = ends.pop((40,))
    for parts in ends.values():
        torch.testing.assert_close(parts[0], whole[0], rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(parts[1], whole[1], rtol=2e-5, atol=2e-5)


@interpreted
def test_equal_keys_that_follow_each_other_do_not_make_the_chunks_inverse_grow():
    """Its powers would: they hold binomials, up to 3e8 for 32 tokens, and all but a few cancel out."""
    layer, operands = layer_of("delta"), operands_of("delta", 64)
    operands |= {"k": operands["k"][:1].expand(64, -1, -1), "beta": torch.full((64, 4), 1.9), "g": torch.zeros(64, 4)}
    ours, theirs = both(layer, operands, (3,), (64,), (0,), 0)
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-4, atol=1e-4)


@interpreted
def test_a_state_that_is_forgotten_at_once_makes_no_infinite_factors():
    """Logarithms of decays may be as low as -1e4: exponentials of their differences are 0 or 1, never infinite."""
    for name in ("delta", "delta a channel"):
        layer, operands = layer_of(name), operands_of(name, 40)
        operands["g"][::3] = -1e4
        ours, theirs = both(layer, operands, (3,), (40,), (5,), 0)
        torch.testing.assert_close(ours[0], theirs[0], rtol=2e-4, atol=2e-4)


@interpreted
def test_a_convolution_wider_than_a_block_s_beginning_sees_its_whole_state():
    """Of 7 inputs, as LFM3 has."""
    layer = replace(layer_of("conv"), state_shape=(6, 6))
    operands = operands_of("conv", 45) | {"weight": torch.randn(6, 7, generator=torch.Generator().manual_seed(4))}
    for lengths, earlier, num_decodes in (((2, 40, 3), (9, 0, 9), 0), ((1, 1, 43), (9, 0, 3), 2)):
        ours, theirs = both(layer, operands, (3, 1, 2), lengths, earlier, num_decodes)
        torch.testing.assert_close(ours[0], theirs[0], rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(ours[1][1:], theirs[1][1:], rtol=2e-5, atol=2e-5)
