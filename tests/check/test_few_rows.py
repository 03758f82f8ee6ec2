"""Kernels of few rows that add up in another order than products of many are found while a model is compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import silu

from mllm_compile.check import few_rows
from mllm_compile.check.few_rows import compared, unlike_few_rows
from mllm_compile.compiler.build import _with_alike_rows
from mllm_compile.compiler.lowered import Lowered
from mllm_compile.process.progress import NullReporter
from mllm_compile.process.timeline import timeline_of
from mllm_compile.runtime.config_sections import LEAST_ROWS
from mllm_compile.runtime.cuda.kernel import CudaKernel
from mllm_compile.runtime.ops.gated_linear.kernel import gated_kernels
from mllm_compile.runtime.ops.stream_linear import one_order_ops  # noqa: F401  (defines the ops)
from mllm_compile.runtime.ops.stream_linear.linear import LinearKind
from mllm_compile.runtime.ops.stream_linear.undivided import BUCKETS, choose_undivided
from mllm_compile.runtime.program.spec import Program

KINDS = LinearKind(128, 64), LinearKind(64, 128, bias=True), LinearKind(128, 64, gated=True)


def kernels_of(*kinds: LinearKind) -> dict[str, tuple[CudaKernel, ...]]:
    tilings = tuple(choose_undivided(kind, tokens, 1024 * (kind is KINDS[0])) for kind in kinds for tokens in BUCKETS)
    return {"one_order": tilings, "gated_linear": gated_kernels(128, 64), "ranks": ()}


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    product = (x[:, None, :].float() * weight.float()).sum(-1)
    return (product if bias is None else product + bias.float()).to(x.dtype)


def divided(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Few rows are the sum of two halves, each rounded."""
    if len(x) > LEAST_ROWS:
        return exact(x, weight, bias)
    half = weight.shape[1] // 2
    return exact(x[:, :half], weight[:, :half]) + exact(x[:, half:], weight[:, half:], bias)


def gated(linear: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def of_halves(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        gate, up = linear(x, weight).chunk(2, -1)
        return silu(gate) * up

    return of_halves


@contextmanager
def ops_on_cpu(plain: Callable[..., torch.Tensor], of_halves: Callable[..., torch.Tensor]) -> Iterator[None]:
    if torch.cuda.is_available():
        pytest.skip("the real ops are defined where there is a GPU")
    library = torch.library.Library("mllm", "IMPL")
    library.impl("linear_in_one_order", lambda x, weight, bias, ahead=None: plain(x, weight, bias), "CPU")
    library.impl("gated_linear_in_one_order", of_halves, "CPU")
    yield
    del library


@pytest.fixture
def loaded(monkeypatch) -> list[str]:
    """The families whose kernels were loaded."""
    names: list[str] = []
    monkeypatch.setattr(few_rows, "sum_in_one_order", lambda: None)
    monkeypatch.setattr(few_rows, "load_kernels", lambda kernels, binaries, device: names.extend(kernels))
    return names


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_kernel_of_few_rows_whose_bits_differ_is_named(loaded, kind):
    kernels = compared(kernels_of(kind))
    with ops_on_cpu(exact, gated(exact)):
        assert unlike_few_rows(kernels, {}, "cpu") is None
    with ops_on_cpu(divided, gated(divided)):
        weight = f"{kind.rows} x {kind.columns}"
        assert unlike_few_rows(kernels, {}, "cpu") == f"a product of 1 rows with a weight of {weight}"
    assert loaded == 2 * ["one_order", "gated_linear"]


def test_a_program_without_kernels_of_few_rows_has_nothing_to_compare():
    assert compared({"gated_linear": gated_kernels(128, 64)}) == {}


@pytest.mark.parametrize("linear", [exact, divided])
def test_a_program_keeps_these_kernels_only_if_all_are_alike(loaded, linear):
    program = Program((), (), (), "logits", kernels=kernels_of(*KINDS))
    lowered = Lowered(None, None, program, (), {}, {}, ())
    told: list[str] = []
    timeline = timeline_of(NullReporter())
    timeline.announce = told.append
    asked: list[CudaKernel] = []
    compiler = SimpleNamespace(binaries=lambda kernels: asked.extend(kernels) or {})
    config = SimpleNamespace(runtime=SimpleNamespace(device="cpu"))
    with ops_on_cpu(linear, gated(linear)):
        found = _with_alike_rows(config, lowered, compiler, timeline)
    assert len(asked) == len(program.kernels["one_order"]) + len(program.kernels["gated_linear"])
    if linear is exact:
        assert found is lowered and not told
    else:
        assert set(found.program.kernels) == {"gated_linear", "ranks"}
        assert "deterministic steps have at least 64 rows: a product of 1 rows" in told[0]
