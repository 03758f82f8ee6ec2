"""Adapters on a GPU: their kernels in a package as pieces are compiled, and steps in graphs, against float32."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from mllm_compile import open_model
from mllm_compile.bench.trace.device_events import device_events
from mllm_compile.config.schema import EngineConfig
from mllm_compile.engine.adapter_parts import PoolWriter
from mllm_compile.inductor.compile_piece import compile_piece
from mllm_compile.inductor.job import PieceInput
from mllm_compile.runtime.lora.pool import LoraPool
from mllm_compile.runtime.lora.target import LoraBuffers, LoraLayout, LoraTarget, a_name, b_name
from mllm_compile.runtime.ops.lora.reference import add_lora_reference
from mllm_compile.runtime.program.pieces import load_piece
from tests.lora_factors import greedy_of, logprobs_of, random_factors
from tests.model.tiny_configs import save_tiny_model
from tests.model.tiny_configs import tiny_config as config_of
from tests.runtime.runner_cases import Loop

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

MARGIN = 1.2  # ours may be this much further from float32 than torch in bfloat16 is
SLOTS = 8
SOURCE = """
import torch

class Piece(torch.nn.Module):
    def forward(self, y, x, a, b, slots):
        shrunk = torch.ops.mllm.lora_shrink.default(x, a, slots, {is_few}, False)
        return (torch.ops.mllm.lora_expand.default(y, shrunk, b, slots, {starts}, {rows}, {is_few}, False),)
"""
SHAPES = [  # inputs, outputs, first outputs and numbers of parts, rank
    (4096, 6144, [0, 4096, 5120], [4096, 1024, 1024], 16),
    (4096, 6144, [0, 5120], [4096, 1024], 64),
    (1100, 96, [32], [64], 8),
    (12288, 4096, [0], [4096], 16),
]


@pytest.mark.parametrize("is_few", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernels_are_as_near_to_float32_as_torch_is(shape: Any, is_few: bool, tmp_path: Path) -> None:
    inputs, outputs, starts, rows, rank = shape
    source = tmp_path / "piece.py"
    source.write_text(SOURCE.format(is_few=is_few, starts=starts, rows=rows))
    factors = (SLOTS, rank * len(rows), inputs), (SLOTS, sum(rows), rank)
    shapes = ("T", outputs), ("T", inputs), *factors
    given = [PieceInput.contiguous(one, "bfloat16") for one in shapes] + [PieceInput.contiguous(("T",), "int32")]
    compile_piece(source, given, "cuda:0", {"T": 8192}, tmp_path / "piece.pt2", tmp_path)
    piece = load_piece("piece.pt2", (tmp_path / "piece.pt2").read_bytes())
    generator = torch.Generator("cuda").manual_seed(0)
    a, b = (torch.randn(one, generator=generator, device="cuda") for one in factors)
    a, b = (a / inputs**0.5).bfloat16(), b.bfloat16()
    for tokens in (1, 2, 8, 17, 64, 65, 300, 2048):
        for most in (1, SLOTS):  # one adapter, and several
            y, x = (torch.randn(tokens, size, generator=generator, device="cuda") for size in (outputs, inputs))
            y, x = y.bfloat16(), x.bfloat16()
            slots = torch.randint(-1, most, (tokens,), generator=generator, device="cuda", dtype=torch.int32)
            slots[0] = most - 1
            exact = add_lora_reference(y.float(), x.float(), a.float(), b.float(), slots, starts, rows)
            torchs = add_lora_reference(y, x, a, b, slots, starts, rows)
            ours = piece([y, x, a, b, slots])[0]
            assert torch.equal(ours, piece([y, x, a, b, slots])[0])
            assert torch.equal(ours[slots < 0], y[slots < 0])
            off, theirs = ((one.float() - exact).norm() / exact.norm() for one in (ours, torchs))
            assert off <= MARGIN * theirs + 1e-6, (tokens, most, float(off), float(theirs))
            alone = piece([y[:1], x[:1], a, b, slots[:1]])[0]
            assert torch.equal(alone, ours[:1]), "a token's numbers do not depend on the others"


GATED = """
import torch

class Piece(torch.nn.Module):
    def forward(self, y, x, a, b, slots):
        shrunk = torch.ops.mllm.lora_shrink.default(x, a, slots, {is_few}, False)
        parts = [0, 12288], [12288, 12288]
        out = torch.ops.mllm.lora_expand.default(y, shrunk, b, slots, *parts, {is_few}, False)
        gated = torch.ops.mllm.lora_expand_gated.default(y, shrunk, b, slots, *parts, {is_few}, False)
        return (torch.ops.mllm.silu_mul.default(out), gated)
"""


@pytest.mark.parametrize("is_few", [True, False])
def test_the_kernel_that_ends_with_the_activation_has_the_bits_of_both(is_few: bool, tmp_path: Path) -> None:
    source, generator = tmp_path / "piece.py", torch.Generator("cuda").manual_seed(0)
    source.write_text(GATED.format(is_few=is_few))
    shapes = ("T", 24576), ("T", 4096), (SLOTS, 32, 4096), (SLOTS, 24576, 16)
    given = [PieceInput.contiguous(one, "bfloat16") for one in shapes] + [PieceInput.contiguous(("T",), "int32")]
    compile_piece(source, given, "cuda:0", {"T": 8192}, tmp_path / "piece.pt2", tmp_path)
    piece = load_piece("piece.pt2", (tmp_path / "piece.pt2").read_bytes())
    for tokens in (1, 8, 17, 64, 300, 2048):
        sizes = [(tokens if size == "T" else size, *rest) for size, *rest in shapes]
        y, x, a, b = (torch.randn(size, generator=generator, device="cuda").bfloat16() for size in sizes)
        slots = torch.randint(-1, SLOTS, (tokens,), generator=generator, device="cuda", dtype=torch.int32)
        apart, ours = piece([y, x, a / 64, b, slots])
        assert torch.equal(apart, ours), tokens


CHAINED = """
import torch

class Piece(torch.nn.Module):
    def forward(self, x, o, residual, weight, gate_up, a_o, b_o, a_gate_up, b_gate_up, a_down, slots):
        op = torch.ops.mllm
        shrunk = op.lora_shrink.default(x, a_o, slots, True, True)
        h = residual + op.lora_expand.default(o, shrunk, b_o, slots, [0], [4096], True, True)
        out, scaled, squares, products = op.lora_expand_norm.default(
            o, shrunk, b_o, slots, residual, weight, False, a_gate_up)
        parts = [0, 12288], [12288, 12288]
        norm = squares, 1e-6, 4096
        gated = op.lora_expand_gated.default(gate_up, products, b_gate_up, slots, *parts, True, True, *norm)
        again, last = op.lora_expand_gated_chained.default(
            gate_up, products, b_gate_up, slots, *parts, *norm, a_down)
        of_gated = op.lora_shrink.default(gated, a_down, slots, True, True)
        of_scaled = op.lora_shrink.default(scaled, a_gate_up, slots, True, True)
        return h, out, scaled, squares, gated, again, products, of_scaled, last, of_gated
"""


def test_a_kernel_between_linears_has_the_numbers_of_those_that_it_stands_for(tmp_path: Path) -> None:
    source, generator = tmp_path / "piece.py", torch.Generator("cuda").manual_seed(0)
    source.write_text(CHAINED)
    of_adapters = (SLOTS, 16, 4096), (SLOTS, 4096, 16), (SLOTS, 32, 4096), (SLOTS, 24576, 16), (SLOTS, 16, 12288)
    shapes = (*[("T", 4096)] * 3, (4096,), ("T", 24576), *of_adapters)
    given = [PieceInput.contiguous(one, "bfloat16") for one in shapes] + [PieceInput.contiguous(("T",), "int32")]
    compile_piece(source, given, "cuda:0", {"T": 256}, tmp_path / "piece.pt2", tmp_path)
    piece = load_piece("piece.pt2", (tmp_path / "piece.pt2").read_bytes())
    for tokens in (1, 8, 17, 64, 65, 256):
        sizes = [tuple(tokens if size == "T" else size for size in shape) for shape in shapes]
        tensors = [torch.randn(size, generator=generator, device="cuda") for size in sizes]
        tensors = [(one / 64 if len(one.shape) == 3 else one).bfloat16() for one in tensors]
        slots = torch.randint(-1, SLOTS, (tokens,), generator=generator, device="cuda", dtype=torch.int32)
        torch.cuda.synchronize()  # slots are read early
        h, out, scaled, squares, gated, again, *products = piece([*tensors, slots])
        assert torch.equal(h, out)
        assert torch.equal(gated, again)
        assert torch.equal(scaled, (h.float() * tensors[3].float()).bfloat16())
        assert torch.allclose(squares.sum(-1), h.float().pow(2).sum(-1), rtol=1e-4)
        for ours, theirs in (products[:2], products[2:]):
            found, expected = (one.sum(0)[slots >= 0] for one in (ours, theirs))
            assert (found - expected).norm() <= 1e-3 * expected.norm()


def test_a_load_is_written_beside_steps_behind_those_that_read_the_slot_and_from_the_memory_that_it_was_read_into():
    target = LoraTarget("q.weight", 2048, 1024, "q", 0, 0, 2048)
    layout = LoraLayout(2, 16, "bfloat16", (target,), (LoraBuffers("q", 16, 1024, 2048),))
    pool = LoraPool(layout, torch.device("cuda:0"))
    writer = PoolWriter(pool, torch.device("cuda:0"))
    size = 16 * 1024
    numbers = writer.new_bytes(2 * (size + 16 * 2048)).view(torch.bfloat16).normal_()
    a, b = numbers[:size].view(16, 1024), numbers[size:].view(2048, 16)
    matrices = {"q.weight": (a, b)}
    assert writer.prepared(matrices) is matrices
    elsewhere = writer.prepared({"q.weight": (a.float(), b.clone())})["q.weight"]
    assert all(one.is_pinned() and one.equal(other) for one, other in zip(elsewhere, (a, b), strict=True))
    busy = torch.randn(8192, 8192, device="cuda")
    for _ in range(20):
        busy = busy @ busy / 90  # a step that reads slot 1
    read = pool.buffers[a_name("q")][1].sum()
    behind = writer.moment()
    writer.write(1, matrices, behind)
    assert behind.query(), "it has waited for the step"
    assert read.item() == 0
    assert pool.buffers[a_name("q")][1].cpu().equal(a)
    assert pool.buffers[b_name("q")][1].cpu().equal(b)


PROMPTS = ([41, 30, 77, 102, 5, 90, 12], [7, 7, 81], [3, 4, 5, 6, 7, 8, 9, 10], [17, 33], [9, 8, 7, 6] * 20)
SLOT_OF = (1, -1, 0, 1, 0)
# Heads of 128: FlashInfer would compile kernels of prompts for smaller ones for minutes.
SMALL = {"hidden_size": 1024, "intermediate_size": 512, "head_dim": 128}
# Of weights so large that linears of up to 8 tokens take their adapters with them.
LARGE = {"hidden_size": 3072, "intermediate_size": 3072, "head_dim": 128}
LARGE |= {"num_attention_heads": 24, "num_key_value_heads": 8}


class Served:
    """A model with adapters in two slots, in graphs, and the same by Transformers."""

    def __init__(self, folder: Path, cache: Path, dtype: str, backend: str, mode: str, sizes: dict[str, int]) -> None:
        config = config_of("qwen3")
        for name, value in sizes.items():
            setattr(config, name, value)
        self.model = save_tiny_model(config, folder)
        sections = {
            "model": {"path": str(folder), "dtype": dtype},
            "compile": {"backend": backend},
            "runtime": {"device": "cuda:0", "max_model_len": 256, "max_running_requests": 64},
            "cudagraph": {"mode": mode},
            "lora": {"max_adapters": 2, "max_rank": 16},
            "cache": {"dir": str(cache)},
        }
        self.runner = open_model(EngineConfig.from_dict(sections)).runner
        self.runner.initialize()
        lora = self.runner.model.lora
        assert lora is not None
        self.factors = [random_factors(lora.pool, seed, rank) for seed, rank in ((1, 16), (2, 3))]
        for slot, factors in enumerate(self.factors):
            lora.pool.write(slot, factors)

    def answers(self, copies: int) -> list[list[int]]:
        loop = Loop(self.runner)
        requests = [loop.add(prompt, max_tokens=12) for prompt in PROMPTS * copies]
        for request, slot in zip(requests, SLOT_OF * copies, strict=True):
            request.adapter_slot = slot
        with self.runner.on_device(), torch.inference_mode():
            loop.run()
        return [request.output_token_ids for request in requests]


@pytest.fixture(
    params=[
        ("eager", "full_and_piecewise", SMALL),
        ("inductor", "full_and_piecewise", SMALL),
        ("inductor", "none", SMALL),
        ("inductor", "full_and_piecewise", LARGE),
    ],
    ids=str,
)
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Served]:
    served = Served(tmp_path / "model", tmp_path / "cache", "bfloat16", *request.param)
    yield served
    served.runner.shutdown()


def test_steps_in_graphs_choose_tokens_that_merged_weights_find_likely(served: Served) -> None:
    for copies in (1, 12):
        for index, answer in enumerate(served.answers(copies)):
            prompt, slot = list(PROMPTS[index % len(PROMPTS)]), SLOT_OF[index % len(PROMPTS)]
            factors = None if slot < 0 else served.factors[slot]
            logprobs = logprobs_of(served.model, prompt + answer[:-1], factors)[len(prompt) - 1 :]
            chosen = logprobs.gather(1, torch.tensor(answer)[:, None])[:, 0]
            assert (logprobs.amax(1) - chosen).max() < 0.35, (copies, index)
    one = served.answers(1)
    differ = [answer != greedy_of(served.model, prompt, 12) for answer, prompt in zip(one, PROMPTS, strict=True)]
    assert any(differ), "adapters change answers"


def kernels_of_answers(folder: Path, cache: Path, lora: dict[str, int]) -> list[str]:
    """The kernels and copies of some requests without adapters, in their order."""
    sections = {
        "model": {"path": str(folder), "dtype": "bfloat16"},
        "runtime": {"device": "cuda:0", "max_model_len": 256, "max_running_requests": 8},
        "lora": lora,
        "cache": {"dir": str(cache)},
    }
    runner = open_model(EngineConfig.from_dict(sections)).runner
    runner.initialize()
    found: list[str] = []
    for _ in range(2):  # what is done once is not counted
        loop = Loop(runner)
        for prompt in PROMPTS[:3]:
            loop.add(prompt, max_tokens=8)
        with runner.on_device(), torch.inference_mode(), profile(activities=[ProfilerActivity.CUDA]) as trace:
            loop.run()
            torch.cuda.synchronize()
        found = [event.name for event in device_events(trace)]
    runner.shutdown()
    return found


def test_requests_without_adapters_launch_what_those_of_a_model_that_takes_none_do(tmp_path: Path) -> None:
    config = config_of("qwen3")
    for name, value in SMALL.items():
        setattr(config, name, value)
    save_tiny_model(config, tmp_path / "model")
    plain, beside = (
        kernels_of_answers(tmp_path / "model", tmp_path / "cache", lora)
        for lora in ({}, {"max_adapters": 2, "max_rank": 16})
    )
    assert len(plain) > 50
    assert Counter(beside) == Counter(plain)
