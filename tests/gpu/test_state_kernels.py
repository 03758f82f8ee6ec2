"""The kernels of layers with a state on a GPU, against the reference: sizes of models, odd ones, and graphs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from mllm_compile.runtime.memory_pool import GDNPool
from mllm_compile.runtime.ops import op
from mllm_compile.runtime.state.base import StateInputs
from mllm_compile.runtime.state.layer import CausalConv, GatedDelta, SelectiveScan, Ssd, StateKind, StateLayer
from mllm_compile.runtime.state.metadata import StateMetadata
from mllm_compile.runtime.state.mixed import MixedStateSteps
from mllm_compile.runtime.state.piece_backend import PieceStateBackend
from mllm_compile.runtime.state.torch_backend import TorchStateBackend
from tests.runtime.state.state_cases import kernels_of, mixed_batch, run_batch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

SSD = Ssd(dt_softplus=True, dt_min=0.0, dt_max=None)
NORMED_SSD = Ssd(dt_softplus=True, dt_min=0.0, dt_max=None, norm_eps=1e-5, norm_groups=8)
SCAN = SelectiveScan(dt_softplus=True)
# kind, sizes of operands
SHAPES: dict[str, tuple[StateKind, dict[str, tuple[int, ...]]]] = {
    "conv": (CausalConv("silu"), {"x": (8192,), "weight": (8192, 4)}),
    "conv of 7": (CausalConv(""), {"x": (100,), "weight": (100, 7), "bias": (100,)}),
    "delta": (GatedDelta(True), {"q": (16, 128), "k": (16, 128), "v": (32, 128), "g": (32,), "beta": (32,)}),
    "delta of its gates": (
        GatedDelta(True),
        {"q": (16, 128), "k": (16, 128), "v": (32, 128), "g": (32,), "beta": (32,), "A_log": (32,), "dt_bias": (32,)},
    ),
    "delta, odd": (GatedDelta(False), {"q": (2, 24), "k": (2, 24), "v": (4, 40), "g": (4,), "beta": (4,)}),
    "delta, wide": (GatedDelta(True), {"q": (2, 192), "k": (2, 192), "v": (2, 384), "g": (2,), "beta": (2,)}),
    "delta, a channel": (GatedDelta(True), {"q": (4, 128), "k": (4, 128), "v": (4, 128), "g": (4, 128), "beta": (4,)}),
    "delta with its norm": (
        GatedDelta(True, 1e-6, "silu"),
        {"q": (16, 128), "k": (16, 128), "v": (32, 128), "g": (32,), "beta": (32,), "z": (32, 128), "norm": (128,)},
    ),
    "delta, a channel with its norm": (
        GatedDelta(True, 1e-5, "sigmoid"),
        {"q": (4, 96), "k": (4, 96), "v": (4, 80), "g": (4, 96), "beta": (4,), "z": (4, 80), "norm": (80,)},
    ),
    "ssd": (
        SSD,
        {"x": (128, 64), "dt": (128,), "A": (128,), "B": (8, 128), "C": (8, 128), "D": (128,), "dt_bias": (128,)},
    ),
    "ssd with its norm": (
        NORMED_SSD,
        {
            "x": (128, 64),
            "dt": (128,),
            "A": (128,),
            "B": (8, 128),
            "C": (8, 128),
            "D": (128,),
            "dt_bias": (128,),
            "z": (128, 64),
            "norm": (8192,),
        },
    ),
    "ssd with its norm, odd": (
        Ssd(dt_softplus=True, dt_min=0.0, dt_max=None, norm_eps=1e-5),
        {"x": (6, 20), "dt": (6,), "A": (6,), "B": (2, 24), "C": (2, 24), "z": (6, 20), "norm": (120,)},
    ),
    "ssd, odd": (SSD, {"x": (6, 20), "dt": (6,), "A": (6,), "B": (2, 24), "C": (2, 24)}),
    "ssd, large states": (SSD, {"x": (4, 64), "dt": (4,), "A": (4,), "B": (1, 256), "C": (1, 256), "D": (4,)}),
    "scan": (
        SCAN,
        {"x": (4096,), "dt": (4096,), "A": (4096, 16), "B": (16,), "C": (16,), "D": (4096,), "z": (4096,)},
    ),
    "scan, odd": (SCAN, {"x": (70,), "dt": (70,), "A": (70, 9), "B": (9,), "C": (9,), "dt_bias": (70,)}),
}
CAPTURED = ("conv", "delta", "delta, a channel", "ssd", "ssd with its norm", "scan")
# rows, lengths and earlier tokens of requests, how many of them decode
BATCHES = {
    "prompts": ((3, 1, 6, 2), (5, 1, 130, 33), (0, 0, 0, 0), 0),
    "mixed": ((5, 1, 6, 2, 4), (1, 1, 64, 3, 65), (9, 0, 7, 2, 0), 2),
    "padded decodes": ((3, 7, 0, 0), (1, 1, 1, 1), (9, 0, 1, 1), 4),
}
# ‖ours − the reference's‖ / ‖the reference's‖, both from the same numbers; chunks round a state to bfloat16, too.
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 1.2e-2}


def layer_of(kind: StateKind, operands: dict[str, torch.Tensor], dtype: torch.dtype) -> StateLayer:
    shapes = {key: value.shape for key, value in operands.items()}
    shown = str(dtype).removeprefix("torch.")
    sizes = tuple(kind.state_shape(shapes)), tuple(kind.out_shape(shapes))
    return StateLayer("layer", 0, kind, tuple(operands), *sizes, "float32" if kind == SSD else shown, shown)


def operands_of(name: str, num_tokens: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """As models make them: gates in float32, some operands parts of larger rows."""
    kind, sizes = SHAPES[name]
    generator, operands = torch.Generator("cuda").manual_seed(0), {}
    for key, size in sizes.items():
        shape = size if key in kind.constants else (num_tokens, *size)
        value = torch.randn(shape, generator=generator, device="cuda")
        if key in ("q", "k"):  # keys that are longer than 1 make states grow
            value = value / value.norm(dim=-1, keepdim=True)
        if key in ("g", "A"):
            operands[key] = -value.exp() * 0.3
        elif key == "beta":
            operands[key] = value.sigmoid().to(dtype)
        elif key in kind.constants or not kind.holds_inputs:
            spread = torch.full((*shape[:-1], shape[-1] + 8), torch.nan, device="cuda", dtype=dtype)
            spread[..., :-8] = value.to(dtype)
            operands[key] = spread[..., :-8] if key not in kind.constants else value.to(dtype)
        else:
            operands[key] = value.to(dtype)
    return operands


def pool_of(layer: StateLayer) -> GDNPool:
    dtype = getattr(torch, layer.state_dtype("float32"))
    pool = GDNPool(9, [(layer.state_shape, dtype)], "cuda")
    pool.get_state(0).normal_(generator=torch.Generator("cuda").manual_seed(1))
    return pool


def kernels(layer: StateLayer, pool: GDNPool) -> PieceStateBackend:
    return PieceStateBackend(pool, {layer.name: kernels_of(layer)}, TorchStateBackend(pool))


def error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item()


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_kernels_compute_what_the_reference_does(name, dtype):
    kind, _ = SHAPES[name]
    for rows, lengths, earlier, num_decodes in BATCHES.values():
        total, found = sum(lengths), []
        operands = operands_of(name, total + 3, dtype)
        layer = layer_of(kind, operands, dtype)
        for make in (kernels, lambda layer, pool: TorchStateBackend(pool)):
            pool = pool_of(layer)
            out = run_batch(make(layer, pool), layer, operands, rows, lengths, earlier, num_decodes)
            found.append((out[:total], pool.get_state(0)[1:]))
            assert out[total:].isnan().all(), "rows of padding keep what they had"
        for ours, theirs in zip(*found, strict=True):
            assert error(ours, theirs) <= TOLERANCES[dtype]
        untouched = sorted(set(range(1, 9)) - set(rows))
        assert torch.equal(found[0][1][[row - 1 for row in untouched]], pool_of(layer).get_state(0)[untouched])


@pytest.mark.parametrize("name", CAPTURED)
def test_a_captured_decode_reads_rows_and_flags_when_it_is_replayed_and_gives_the_same_bits(name):
    kind, _ = SHAPES[name]
    operands = operands_of(name, 4, torch.bfloat16)
    layer = layer_of(kind, operands, torch.bfloat16)
    decodes = kernels_of(layer).decodes
    rows, has_state = torch.zeros(4, dtype=torch.int64, device="cuda"), torch.zeros(4, dtype=torch.bool, device="cuda")
    pool, other = pool_of(layer), pool_of(layer)
    out = torch.zeros(4, *layer.out_shape, dtype=getattr(torch, layer.out_dtype), device="cuda")
    given = [*operands.values(), pool.get_state(0), rows, has_state, out]
    decodes(given)
    assert torch.equal(pool.get_state(0)[1:], other.get_state(0)[1:]), "padding leaves no state"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decodes(given)
    for some in ([5, 2, 8, 0], [1, 0, 0, 0]):
        rows.copy_(torch.tensor(some))
        has_state.copy_(torch.tensor([True, False, True, False]))
        graph.replay()
        expected = torch.zeros_like(out)
        decodes([*operands.values(), other.get_state(0), rows, has_state, expected])
        assert torch.equal(out, expected)
        assert torch.equal(pool.get_state(0)[1:], other.get_state(0)[1:])


@pytest.mark.parametrize("num_requests", [1, 8, 9])
def test_a_delta_rule_that_is_let_in_at_once_reads_what_the_convolution_leaves(num_requests, monkeypatch):
    """As packages launch them: before the kernel ahead has ended. Nine requests are too many for it."""
    from mllm_compile.runtime.ops.dependent_launch import starts_early
    from mllm_compile.runtime.ops.states import conv, gated_delta

    if not starts_early():
        pytest.skip("kernels start early from Hopper on")
    convolved, delta = op("causal_conv_states"), op("gated_delta_states")
    num_layers, rows = 6, torch.arange(1, num_requests + 1, device="cuda")
    has_state = torch.ones(num_requests, dtype=torch.bool, device="cuda")
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda").bfloat16()

    weight, gates, inputs = random(2048, 4), random(num_requests, 16), random(num_layers, num_requests, 2048)
    of_conv = random(num_layers, num_requests + 1, 3, 2048)
    of_delta = torch.randn(num_layers, num_requests + 1, 16, 64, 64, generator=generator, device="cuda")

    def run(of_conv: torch.Tensor, of_delta: torch.Tensor, lets_in: bool) -> torch.Tensor:
        outs = torch.empty(num_layers, num_requests, 16, 64, dtype=torch.bfloat16, device="cuda")
        x = inputs[0]
        for layer in range(num_layers):
            kept, left = torch.empty_like(x), (rows, has_state, None, None, None)
            convolved(x, weight, None, of_conv[layer], *left, kept, "silu", lets_in)
            q, k, v = kept.split((512, 512, 1024), -1)
            heads = (q.unflatten(-1, (8, 64)), k.unflatten(-1, (8, 64)), v.unflatten(-1, (16, 64)))
            absent = (None, None, None, None)
            delta(*heads, -gates.abs(), gates.sigmoid(), *absent, of_delta[layer], *left, outs[layer], True)
            x = inputs[layer] + outs[layer].flatten(1).repeat(1, 2)
        return outs

    plain, early = (of_conv.clone(), of_delta.clone()), (of_conv.clone(), of_delta.clone())
    for module in (conv, gated_delta):
        monkeypatch.setattr(module, "wrap_triton", lambda kernel: kernel)
    run(of_conv.clone(), of_delta.clone(), lets_in=False)  # compiles
    expected = [run(*plain, lets_in=False) for _ in range(3)]

    class Early:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            return partial(self.kernel[grid], launch_pdl=True)

    for module in (conv, gated_delta):
        monkeypatch.setattr(module, "wrap_triton", Early)
    run(of_conv.clone(), of_delta.clone(), lets_in=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = run(*early, lets_in=True)
    for wanted in expected:
        graph.replay()
        assert torch.equal(outs, wanted)
    assert all(torch.equal(one, other) for one, other in zip(early, plain, strict=True))


@pytest.mark.parametrize("name", CAPTURED)
def test_a_captured_step_with_prompts_gives_each_batch_what_its_own_launches_give(name):
    kind, _ = SHAPES[name]
    operands = operands_of(name, 72, torch.bfloat16)
    layer = layer_of(kind, operands, torch.bfloat16)
    pool, other = pool_of(layer), pool_of(layer)
    steps = MixedStateSteps(6, torch.device("cuda"))
    out = torch.zeros(72, *layer.out_shape, dtype=getattr(torch, layer.out_dtype), device="cuda")
    padding = StateMetadata(
        batch=None,  # type: ignore[arg-type]
        rows=torch.zeros(6, dtype=torch.int64, device="cuda"),
        num_decodes=0,
        segments=(),
        num_actual_tokens=0,
        mixed=steps.capture(72),
    )
    inputs, backend = StateInputs(operands, out, layer, padding), kernels(layer, pool)
    backend.forward(inputs)
    assert torch.equal(pool.get_state(0)[1:], other.get_state(0)[1:]), "padding leaves no state"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.forward(inputs)
    for rows, lengths, earlier, num_decodes in (
        ((5, 1, 6, 2), (1, 1, 64, 3), (9, 4, 0, 2), 2),
        ((3,), (70,), (0,), 0),
        ((4, 3), (1, 67), (1, 70), 1),
    ):
        steps.fill(72, mixed_batch(rows, lengths, earlier, "cuda"))
        graph.replay()
        expected = run_batch(kernels(layer, other), layer, operands, rows, lengths, earlier, num_decodes)
        assert torch.equal(out[: sum(lengths)], expected[: sum(lengths)])
        assert torch.equal(pool.get_state(0)[1:], other.get_state(0)[1:])


@pytest.mark.parametrize(("name", "limit"), [("delta", 2e-3), ("ssd", 4e-3), ("scan", 4e-3)])
def test_sums_in_bfloat16_are_rounded_once_a_step(name, limit):
    """The reference adds up the scans' step sizes in bfloat16, as Transformers does, kernels in float32."""
    kind, _ = SHAPES[name]
    operands = operands_of(name, 3, torch.bfloat16)
    layer = replace(layer_of(kind, operands, torch.bfloat16))
    found = []
    for make in (kernels, lambda layer, pool: TorchStateBackend(pool)):
        pool = GDNPool(9, [(layer.state_shape, torch.bfloat16)], "cuda")
        pool.get_state(0).normal_(generator=torch.Generator("cuda").manual_seed(1))
        run_batch(make(layer, pool), layer, operands, (3, 1, 4), (1, 1, 1), (4, 0, 5), 3)
        found.append(pool.get_state(0)[[1, 3, 4]])
    assert error(*found) <= limit
