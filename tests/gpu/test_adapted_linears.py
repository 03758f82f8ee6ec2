"""The linears that take their adapters with them, compiled as for a runtime, against float32."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear, silu

from mllm_compile.kernels.cuda import KernelCompiler, can_compile_kernels
from mllm_compile.process.progress import NullReporter
from mllm_compile.runtime.ops.stream_linear.adapted import AdaptedKind, choose
from mllm_compile.runtime.ops.stream_linear.adapted_ops import STREAMED
from mllm_compile.runtime.ops.stream_linear.ops import STREAMED as PLAIN
from mllm_compile.runtime.ops.stream_linear.shapes import choose_tiling
from tests.gpu.test_few_tokens import EPS, MARGIN, off_by

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not can_compile_kernels("cuda:0"), reason="needs a Hopper GPU and NVRTC"
    ),
]

SLOTS, BUCKETS = 8, (8, 16, 64)
KINDS = [
    AdaptedKind(6144, 4096, 256, rank=16, parts=((0, 4096), (4096, 1024), (5120, 1024))),
    AdaptedKind(6144, 4096, rank=16, parts=((0, 4096), (5120, 1024))),
    AdaptedKind(4096, 4096, residual=True, next_blocks=256, rank=16, parts=((0, 4096),)),
    AdaptedKind(24576, 4096, 256, gated=True, rank=32, parts=((0, 12288), (12288, 12288))),
    AdaptedKind(24576, 4096, gated=True, rank=16, parts=((12288, 12288),)),
    AdaptedKind(4096, 12288, residual=True, rank=16, parts=((0, 4096),)),
]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    cases = [(kind, tokens) for kind in KINDS for tokens in BUCKETS]
    adapted, plain = [choose(*one) for one in cases], [choose_tiling(kind.plain, tokens) for kind, tokens in cases]
    folder = tmp_path_factory.mktemp("linears")
    with KernelCompiler() as compiler:
        compiler.write([*adapted, *plain], folder, NullReporter())
    binaries = {path.stem: path.read_bytes() for path in folder.iterdir()}
    STREAMED.load_kernels(adapted, binaries, torch.device("cuda:0"))
    PLAIN.load_kernels(plain, binaries, torch.device("cuda:0"))


class Case:
    def __init__(self, kind: AdaptedKind, slots: list[int]) -> None:
        def random(*sizes: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(*sizes, device="cuda") * scale).bfloat16()

        torch.manual_seed(len(slots))
        self.kind, tokens = kind, len(slots)
        self.slots = torch.tensor(slots, dtype=torch.int32, device="cuda")
        self.x, self.weight = random(tokens, kind.columns), random(kind.rows, kind.columns, scale=0.02)
        self.a = random(SLOTS, kind.a_rows, kind.columns, scale=0.02)
        self.b = random(SLOTS, sum(count for _, count in kind.parts), kind.rank, scale=0.2)
        self.residual, self.norm = random(tokens, kind.rows), random(kind.rows) + 1
        self.squares = self.x.float().pow(2).unflatten(-1, (-1, 16)).sum(-1) if kind.norm_blocks else None

    def ours(self, is_adapted: bool = True) -> torch.Tensor:
        kind, ops = self.kind, torch.ops.mllm
        adapters = (self.a, self.b, self.slots, *map(list, zip(*kind.parts, strict=True)), True) if is_adapted else ()
        name = f"stream_linear{'_lora' if is_adapted else ''}"
        if kind.next_blocks:
            return getattr(ops, f"{name}_residual_norm")(self.x, self.weight, *adapters, self.residual, self.norm)[0]
        if kind.residual:
            return getattr(ops, f"{name}_residual")(self.x, self.weight, *adapters, self.residual)
        return getattr(ops, name)(self.x, self.weight, *adapters, self.squares, EPS, kind.gated)

    def torchs(self, dtype: torch.dtype) -> torch.Tensor:
        x, weight, a, b = (tensor.to(dtype) for tensor in (self.x, self.weight, self.a, self.b))
        if self.squares is not None:
            x = (x.float() * torch.rsqrt(self.squares.sum(-1, keepdim=True) / x.shape[-1] + EPS)).to(dtype)
        out = linear(x, weight)
        for token, slot in enumerate(self.slots.tolist()):
            first = 0
            for part, (start, count) in enumerate(self.kind.parts if slot >= 0 else ()):
                shrunk = a[slot, part * self.kind.rank :][: self.kind.rank] @ x[token]
                out[token, start : start + count] += b[slot, first : first + count] @ shrunk
                first += count
        if self.kind.gated:
            gate, up = out.chunk(2, -1)
            out = silu(gate) * up
        return self.residual.to(dtype) + out if self.kind.residual else out


SLOTS_OF_STEPS = [[5], [-1], [2] * 8, [0, 1, 2, 3, 4, 5, 6, 7], [-1, 3, 3, -1, 0]]
SLOTS_OF_STEPS += [[3] * 16, [-1, 7, 0] * 5, [2] * 64, [6] * 20 + [1] * 21, [0, 1, 2, 3, 4, 5, 6, 7, -1] * 7]


@pytest.mark.parametrize("slots", SLOTS_OF_STEPS, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_linears_with_adapters_are_as_near_to_float32_as_torchs(loaded, kind, slots):
    case = Case(kind, slots)
    ours, exact, plain = case.ours(), case.torchs(torch.float32), case.ours(is_adapted=False)
    for token, slot in enumerate(slots):
        assert off_by(ours[token], exact[token]) <= MARGIN * off_by(case.torchs(torch.bfloat16)[token], exact[token])
        assert torch.equal(ours[token], plain[token]) == (slot < 0), "what has no adapter is as without"
    assert torch.equal(case.ours(), ours), "the same numbers every time"


@pytest.mark.parametrize("count", [5, 40])  # of 8 tokens one alone has the same kernel too
def test_a_tokens_numbers_do_not_depend_on_its_neighbours(loaded, count):
    case = Case(KINDS[0], ([4, -1, 2, 4, 7] * 8)[:count])
    together = case.ours()
    of_one, others = Case(KINDS[0], [-1] * count), case.slots.tolist()
    for name in ("weight", "a", "b", "x", "squares"):
        setattr(of_one, name, getattr(case, name))
    for token in (0, 2, count - 1):
        of_one.slots.fill_(-1)
        of_one.slots[token] = others[token]
        assert torch.equal(of_one.ours()[token], together[token])
    if count > 8:
        return
    for token in range(count):
        alone = Case(KINDS[0], [case.slots.tolist()[token]])
        for name in ("weight", "a", "b"):
            setattr(alone, name, getattr(case, name))
        alone.x, alone.squares = case.x[token : token + 1].clone(), case.squares[token : token + 1].clone()
        assert torch.equal(alone.ours()[0], together[token])


def test_a_graph_replays_on_other_inputs_and_slots(loaded):
    case = Case(KINDS[3], [1, 1, 1])
    case.ours()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            out = case.ours()
    for slots in ([0, 1, 2], [-1, -1, -1], [6, -1, 6]):
        case.slots.copy_(torch.tensor(slots))
        case.x.mul_(0.5)
        graph.replay()
        assert torch.equal(out, case.ours())


def test_more_than_64_tokens_are_several_launches(loaded):
    case = Case(KINDS[2], [3, -1, 2, 0, 1, 7, 7, 5, 4, 3] * 7)
    first = Case(KINDS[2], [0] * 64)
    for name in ("weight", "a", "b", "norm"):
        setattr(first, name, getattr(case, name))
    first.x, first.residual, first.slots = case.x[:64].clone(), case.residual[:64].clone(), case.slots[:64].clone()
    assert torch.equal(case.ours()[:64], first.ours())
