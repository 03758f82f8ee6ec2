"""The kernel from projections to attention, in a package as pieces are compiled: its numbers, and what it writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mllm_compile.inductor.compile_piece import compile_piece
from mllm_compile.inductor.job import PieceInput
from mllm_compile.runtime.ops import op
from mllm_compile.runtime.program.pieces import load_piece

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

# Eight query heads a block beside four KV heads.
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, SLOTS, EPS = 8, 4, 128, 512, 1000, 1e-6
SOURCE = """
import torch

class Piece(torch.nn.Module):
    def forward(self, x, weight, cos, sin, q_weight, k_weight, slots, keys, values):
        parts = torch.functional.split(torch._C._nn.linear(x, weight, None), [1024, 512, 512], dim=-1)
        tokens = torch.ops.aten.sym_size.int(x, 1)
        q, k, v = (part.view((1, tokens, -1, 128)) for part in parts)
        v = v.reshape(tokens, 4, 128)
        q, k = torch.ops.mllm.rope_and_cache.default(
            q, k, v, cos, sin, q_weight, k_weight, 1e-6, slots, keys, values
        )
        return (q, k, v)
"""


def inputs() -> list[PieceInput]:
    def of(*shape: int | str, dtype: str = "bfloat16") -> PieceInput:
        strides: list[int | str] = []
        for dim in range(len(shape)):
            behind = [size for size in shape[dim + 1 :] if size != 1]
            number = 1
            for size in behind:
                number *= size if isinstance(size, int) else 1
            names = [size for size in behind if isinstance(size, str)]
            strides.append("*".join([str(number), *names]) if names else number)
        return PieceInput(shape, tuple(strides), dtype)

    angles, cache = of(1, "T", HEAD_DIM), of("P", KV_HEADS, HEAD_DIM)
    width = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    norm = of(HEAD_DIM)
    slots = of("L", dtype="int64")
    return [of(1, "T", HIDDEN), of(width, HIDDEN), angles, angles, norm, norm, slots, cache, cache]


@pytest.fixture(scope="module")
def piece(tmp_path_factory):
    folder: Path = tmp_path_factory.mktemp("piece")
    (folder / "piece.py").write_text(SOURCE)
    sizes = {"T": 8192, "S": 8192, "L": 8192, "P": 2**31 - 1}
    compile_piece(folder / "piece.py", inputs(), "cuda:0", sizes, folder / "piece.pt2", folder)
    return load_piece("piece.pt2", (folder / "piece.pt2").read_bytes())


def normed_and_rotated(x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    x = x.unflatten(-1, (-1, HEAD_DIM))
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight.float()
    first, second = x.chunk(2, -1)
    return x * cos.float()[:, None] + torch.cat((-second, first), -1) * sin.float()[:, None]


def random_inputs(num_tokens: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    known = {"T": num_tokens, "L": num_tokens, "P": SLOTS}
    return [
        torch.randn([known.get(size, size) for size in spec.shape], device="cuda").to(getattr(torch, spec.dtype))
        for spec in inputs()
    ]


@pytest.mark.parametrize("num_tokens", [1, 5, 300])
def test_numbers_match_float32_and_only_the_slots_change(piece, num_tokens):
    values = random_inputs(num_tokens)
    x, weight, cos, sin, q_weight, k_weight, _, keys, cached_values = values
    values[6] = slots = torch.randperm(SLOTS, device="cuda")[:num_tokens]
    before = keys.clone(), cached_values.clone()
    q, k, v = piece(list(values))
    parts = torch.nn.functional.linear(x[0], weight).float().split([1024, 512, 512], dim=-1)
    wanted_k = normed_and_rotated(parts[1], k_weight, cos[0], sin[0])
    for got, want in (
        (q, normed_and_rotated(parts[0], q_weight, cos[0], sin[0])),
        (k, wanted_k),
        (keys[slots], wanted_k),
        (cached_values[slots], v.float()),
    ):
        assert (got.float() - want).norm() < 4e-3 * want.norm()
    untouched = torch.ones(SLOTS, dtype=torch.bool, device="cuda").index_fill_(0, slots, False)
    assert torch.equal(keys[untouched], before[0][untouched])
    assert torch.equal(cached_values[untouched], before[1][untouched])


@pytest.mark.parametrize("num_tokens", [1, 300])
def test_without_slots_the_kernel_is_not_launched(piece, num_tokens):
    values = random_inputs(num_tokens)
    values[6] = torch.empty(0, dtype=torch.int64, device="cuda")
    before = values[7].clone(), values[8].clone()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        q, k, v = piece(list(values))
        torch.cuda.synchronize()
    assert [tuple(x.shape[:2]) for x in (q, k, v)] == [(num_tokens, heads) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    assert torch.equal(values[7], before[0])
    assert torch.equal(values[8], before[1])
    assert not [event.name for event in profile.events() if "rope" in event.name]


def test_heads_that_nothing_rotates_are_written_as_they_are():
    torch.manual_seed(0)
    count, dim = 5, 128
    q, k = (torch.randn(1, count, heads, 2 * dim, device="cuda").bfloat16()[..., :dim] for heads in (32, 8))
    v, keys, cached_values = (torch.randn(size, 8, dim, device="cuda").bfloat16() for size in (count, SLOTS, SLOTS))
    slots = torch.randperm(SLOTS, device="cuda")[:count]
    before = keys.clone()
    made = op("rope_and_cache")(q, k, v, None, None, None, None, 0.0, slots, keys, cached_values)
    assert torch.equal(made[0], q[0]) and torch.equal(made[1], k[0])
    assert torch.equal(keys[slots], k[0]) and torch.equal(cached_values[slots], v)
    assert (keys != before).any(-1).any(-1).sum() == count


@pytest.mark.parametrize("width", [64, 192, 256])
@pytest.mark.parametrize("plus_one", [False, True])
def test_a_part_of_wide_heads_is_rotated_and_norms_may_add_one(width, plus_one):
    torch.manual_seed(0)
    count, dim = 5, 256
    q, k = (torch.randn(1, count, heads, 2 * dim, device="cuda").bfloat16()[..., :dim] for heads in (16, 4))
    v, keys, cached_values = (torch.randn(size, 4, dim, device="cuda").bfloat16() for size in (count, SLOTS, SLOTS))
    cos, sin = (torch.randn(1, count, width, device="cuda").bfloat16() for _ in range(2))
    norms = [torch.randn(dim, device="cuda").bfloat16() for _ in range(2)]
    slots = torch.randperm(SLOTS, device="cuda")[:count]
    made = op("rope_and_cache")(q, k, v, cos, sin, *norms, EPS, slots, keys, cached_values, plus_one)
    for x, norm, got in zip((q, k), norms, made, strict=True):
        x = x[0].float() * torch.rsqrt(x[0].float().pow(2).mean(-1, keepdim=True) + EPS) * (norm.float() + plus_one)
        part, rest = x.tensor_split([width], -1)
        first, second = part.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
        want = torch.cat((part * cos[0, :, None].float() + turned * sin[0, :, None].float(), rest), -1)
        assert (got.float() - want).norm() < 4e-3 * want.norm()
    assert torch.equal(keys[slots], made[1])
    assert torch.equal(cached_values[slots], v)
