"""Experts' kernels for few tokens, compiled as for a runtime, against float32; and in graphs."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch.nn.functional import linear, silu

from mllm_compile import SamplingParams
from mllm_compile.kernels.cuda import KernelCompiler, can_compile_kernels
from mllm_compile.process.progress import NullReporter
from mllm_compile.runtime.cuda.driver import address_of
from mllm_compile.runtime.ops import op
from mllm_compile.runtime.ops.experts.shapes import NO_SOFTMAX, SOFTMAX_OF_ALL, SOFTMAX_OF_CHOSEN
from mllm_compile.runtime.ops.stream_experts.ops import Router, down_kernel, load_expert_kernels, up_kernel
from mllm_compile.runtime.ops.stream_experts.shapes import ROWS
from tests.gpu.late_kernels import LATE_BLOCKS, late_kernel
from tests.gpu.test_experts import scores_of, served_on
from tests.gpu.test_served_models import random_ids, reference, reference_scores
from tests.model.tiny_configs import save_tiny_model, tiny_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not can_compile_kernels("cuda:0"), reason="needs a Hopper GPU and NVRTC"
    ),
]

MARGIN = 1.2
EPS = 1e-6
WEIGHTS_STEP = 2**-9  # of bfloat16: a weight that is between two of its numbers may become the other one
# Experts, chosen, inputs, outputs of gate_up.
SHAPES = [(128, 8, 2048, 768), (64, 4, 4096, 512), (60, 3, 256, 32), (512, 10, 1024, 1024), (4, 4, 512, 64)]
HOW = {
    "softmax": (SOFTMAX_OF_ALL, True, False),
    "wide": (SOFTMAX_OF_ALL, False, True),
    "after": (SOFTMAX_OF_CHOSEN, False, False),
    "plain": (NO_SOFTMAX, False, False),
}


class Case(NamedTuple):
    x: torch.Tensor
    norm: torch.Tensor
    residual: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    router: Router

    @property
    def scaled(self) -> tuple[torch.Tensor, torch.Tensor]:
        """x times the norm's weight, and sums of squares of x."""
        return self.x * self.norm, self.x.float().pow(2).unflatten(-1, (-1, 16)).sum(-1)


def case(shape: tuple[int, ...], how: Sequence[object], tokens: int, dtype: torch.dtype = torch.bfloat16) -> Case:
    experts, chosen, inputs, hidden = shape
    generator = torch.Generator("cuda").manual_seed(tokens)

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator, device="cuda")

    weights = [random(experts, 2 * hidden, inputs) * inputs**-0.5, random(experts, inputs, hidden) * hidden**-0.5]
    # Numbers of bfloat16 that follow each other: of equal ones topk may take any.
    orders = torch.stack([torch.randperm(experts, generator=generator, device="cuda") for _ in range(tokens)])
    scores = (orders + 0x3F00).to(torch.int16).view(torch.bfloat16).to(dtype)
    x, residual, norm = random(tokens, inputs), random(tokens, inputs), 1 + 0.1 * random(inputs)
    slots = torch.arange(1, tokens + 1, device="cuda")
    up, down, x, residual, norm = (one.bfloat16() for one in (*weights, x, residual, norm))
    return Case(x, norm, residual, up, down, Router(scores, None, slots, chosen, *how))  # type: ignore[arg-type]


def load(of: Case, folder: Path) -> None:
    squares = of.scaled[1]
    kernels = [up_kernel(of.up, one, of.router) for one in (None, squares)]
    both = [*kernels, *(down_kernel(of.down, norm_next, of.router) for norm_next in (False, True))]
    with KernelCompiler() as compiler:
        compiler.write(both, folder, NullReporter())
    load_expert_kernels(both, {path.stem: path.read_bytes() for path in folder.iterdir()}, torch.device("cuda:0"))


def ours(of: Case, normed: bool) -> tuple[torch.Tensor, ...]:
    x, squares = of.scaled if normed else (of.x, None)
    rows = op("stream_expert_up")(x, of.up, squares, EPS if normed else 0.0, *of.router)
    return rows, *op("stream_expert_down_norm")(rows, of.down, of.residual, of.norm, False, *of.router)


def chosen(router: Router) -> tuple[torch.Tensor, torch.Tensor]:
    scores = router.choice
    if router.softmax == SOFTMAX_OF_ALL:
        scores = scores.float().softmax(-1)
    weights, ids = scores.topk(router.num_chosen, -1)
    if router.softmax == SOFTMAX_OF_CHOSEN:
        weights = weights.softmax(-1)
    weights = weights / weights.sum(-1, keepdim=True) if router.renormalise else weights
    return weights if router.wide else weights.bfloat16(), ids


def theirs(of: Case, normed: bool, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    weights, ids = chosen(of.router)
    x, up, down, residual = (one.to(dtype) for one in (of.x, of.up, of.down, of.residual))
    if normed:
        wide = x.float()
        x = of.norm.to(dtype) * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(dtype)
    rows = []
    for token, its in zip(x, ids.tolist(), strict=True):
        for expert in its:
            gate, right = linear(token, up[expert]).chunk(2, -1)
            rows.append(silu(gate) * right)
    outputs = torch.stack([linear(row, down[e]) for row, e in zip(rows, ids.flatten().tolist(), strict=True)])
    products = outputs.unflatten(0, ids.shape) * weights[..., None].to(dtype if not of.router.wide else torch.float32)
    return torch.stack(rows), residual + products.sum(1).to(dtype)


def off_by(one: torch.Tensor, exact: torch.Tensor) -> float:
    return ((one.float() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize(
    ("shape", "how"),
    [*((SHAPES[0], how) for how in HOW.values()), *((shape, HOW["softmax"]) for shape in SHAPES[1:])],
    ids=str,
)
def test_it_is_as_near_to_float32_as_torch(tmp_path, shape, how):
    mine, torchs = [], []  # errors of rows and output; of one token alone, a few hundred numbers, they are chance
    for tokens in (1, 2, 5, 8):
        of = case(shape, how, tokens)
        if tokens == 1:
            load(of, tmp_path)
        for normed in (False, True):
            rows, out, scaled, squares = ours(of, normed)
            exact, rounded = theirs(of, normed, torch.float32), theirs(of, normed, torch.bfloat16)
            mine.append([off_by(one, true) for one, true in zip((rows, out), exact, strict=True)])
            torchs.append([off_by(one, true) for one, true in zip(rounded, exact, strict=True)])
            assert torch.equal(scaled, out * of.norm)
            torch.testing.assert_close(squares, out.float().pow(2).unflatten(-1, (-1, ROWS)).sum(-1))
    limits = MARGIN * torch.tensor(torchs).mean(0) + torch.tensor([0.0, WEIGHTS_STEP])
    assert (torch.tensor(mine).mean(0) <= limits).all(), (mine, torchs)
    assert (torch.tensor(mine) <= 2 * torch.tensor(torchs) + WEIGHTS_STEP).all(), (mine, torchs)


@pytest.mark.parametrize("wide", [False, True])
def test_a_choice_that_is_given_is_taken_as_it_is(tmp_path, wide):
    of = case(SHAPES[0], (SOFTMAX_OF_ALL, True, wide), 6)
    weights, ids = chosen(of.router)
    given = of._replace(router=of.router._replace(choice=ids, weights=weights, softmax=NO_SOFTMAX, renormalise=False))
    (tmp_path / "chosen").mkdir()
    (tmp_path / "given").mkdir()
    load(of, tmp_path / "chosen")
    load(given, tmp_path / "given")
    for one, other in zip(ours(of, True), ours(given, True), strict=True):
        assert off_by(one, other.float()) < 1e-3, "weights are those of another softmax"


def test_float32_scores_are_read_as_such(tmp_path):
    of = case(SHAPES[2], (SOFTMAX_OF_ALL, True, True), 8, torch.float32)
    load(of, tmp_path)
    rows, out, *_ = ours(of, False)
    exact, rounded = theirs(of, False, torch.float32), theirs(of, False, torch.bfloat16)
    assert off_by(rows, exact[0]) <= MARGIN * off_by(rounded[0], exact[0])
    assert off_by(out, exact[1]) <= MARGIN * off_by(rounded[1], exact[1])


def test_of_equal_scores_the_first_experts_are_chosen_and_nan_stays_its_tokens_own(tmp_path):
    of = case(SHAPES[0], HOW["softmax"], 3)
    of.router.choice[0] = 1.0
    of.router.choice[1, 70] = torch.nan
    load(of, tmp_path)
    _, out, *_ = ours(of, True)
    assert out[1].isnan().all() and not out[::2].isnan().any()
    ids = torch.arange(8, device="cuda")
    first = of.router.choice.clone()
    first[0, ids] = 2.0
    assert torch.equal(ours(of._replace(router=of.router._replace(choice=first)), True)[1][::2], out[::2])


def test_a_token_is_the_same_in_any_company_and_every_time(tmp_path):
    of = case(SHAPES[0], HOW["softmax"], 8)
    load(of, tmp_path)
    together = ours(of, True)
    for _ in range(10):
        assert all(torch.equal(one, other) for one, other in zip(ours(of, True), together, strict=True))
    for rows in (slice(3, 4), slice(2, 6)):
        router = of.router._replace(choice=of.router.choice[rows], slots=of.router.slots[rows])
        alone = ours(of._replace(x=of.x[rows], residual=of.residual[rows], router=router), True)
        for one, other in zip(alone[1:], together[1:], strict=True):
            assert torch.equal(one, other[rows])


def test_padding_has_no_experts(tmp_path):
    of = case(SHAPES[0], HOW["softmax"], 8)
    load(of, tmp_path)
    before = ours(of, True)[1]
    of.router.slots[5:] = 0
    after = ours(of, True)[1]
    assert torch.equal(after[:5], before[:5])
    assert torch.equal(after[5:], of.residual[5:])
    of.router.slots.zero_()
    assert torch.equal(ours(of, True)[1], of.residual)


def test_a_graph_replays_it_on_other_inputs(tmp_path):
    of = case(SHAPES[0], HOW["softmax"], 8)
    load(of, tmp_path)
    ours(of, True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ours(of, True)
    of.x.copy_(of.x.flip(0) * 0.5)
    of.router.choice.copy_(of.router.choice.flip(1))
    graph.replay()
    for one, other in zip(captured, ours(of, True), strict=True):
        assert torch.equal(one, other)


def test_it_waits_for_scores_that_are_written_late(tmp_path):
    """By a kernel that has let the next one begin before: gate_up's choice and, two kernels on, down's."""
    of = case(SHAPES[0], HOW["softmax"], 8)
    load(of, tmp_path)
    wanted = ours(of, True)
    scores, written = of.router.choice, of.router.choice.clone()
    late = late_kernel(
        "uint4* to, const uint4* from, int count",
        "for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) to[i] = from[i];",
    )
    arguments = [address_of(scores), address_of(written), ctypes.c_int(scores.nbytes // 16)]
    x, squares = of.scaled
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scores.copy_(written.flip(1))
        late.launch(LATE_BLOCKS, 32, arguments)
        rows = op("stream_expert_up")(x, of.up, squares, EPS, *of.router)
        out = op("stream_expert_down_norm")(rows, of.down, of.residual, of.norm, False, *of.router)
    for _ in range(5):
        graph.replay()
        for one, other in zip((rows, *out), wanted, strict=True):
            assert torch.equal(one, other)


# Of weights that are rounded, wide, and the model's own; 64 experts (under all names that configs have for them), which
# a linear of ours scores.
MODELS = {
    "qwen3_moe": {"num_experts_per_tok": 4, "norm_topk_prob": True},
    "mixtral": {"num_experts_per_tok": 3},
    "glm4_moe": {"num_experts_per_tok": 4},
}
EXPERTS = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 64)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_as_near_to_float32_as_transformers_is_in_steps_of_few_tokens(tmp_path, name):
    """One short prompt at a time, so that all are computed by the variant for few tokens."""
    config = tiny_config(name, head_dim=128, hidden_size=512, **EXPERTS, **MODELS[name])
    save_tiny_model(config, tmp_path / "model")
    prompts = [random_ids(8, 100, number) for number in range(40)]
    exact, rounded = (reference(tmp_path / "model", dtype) for dtype in (torch.float32, torch.bfloat16))
    wanted = torch.cat([reference_scores(exact, ids) for ids in prompts])
    limit = (torch.cat([reference_scores(rounded, ids) for ids in prompts]) - wanted).abs().mean()
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    with served_on(tmp_path / "model", tmp_path / "cache", "inductor", "auto") as served:
        graph = "".join(path.read_text() for path in (tmp_path / "cache").rglob("*.py"))
        assert "stream_expert_down" in graph, "pieces call the kernels"
        scored = [served.generate([ids], params)[0] for ids in prompts]
    got = torch.cat([scores_of(output, ids) for output, ids in zip(scored, prompts, strict=True)])
    error = (got - wanted).abs().mean()
    print(f"{name}: off by {error:.5f}, Transformers in bfloat16 by {limit:.5f}")
    assert error <= MARGIN * limit + 1e-4
