"""Attention over latents on the GPU: the kernels against float32, and models that are served by them."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from mllm_compile import Engine, EngineConfig, SamplingParams
from mllm_compile.runtime.attention.latent.expanded import ExpandedPrompts
from mllm_compile.runtime.attention.latent.expansion import key_ranges
from mllm_compile.runtime.attention.latent.tiles import PREFILL_TILE, num_prefill_tiles
from mllm_compile.runtime.attention.layer_kernels import of_kind
from mllm_compile.store.artifact import open_artifact
from tests.gpu.test_architectures import compare
from tests.gpu.test_experts import scores_of
from tests.gpu.test_gpt_oss import scores_of_answer
from tests.gpu.test_served_models import random_ids, reference, reference_scores
from tests.gpu.test_split_decode import Cache
from tests.model.tiny_configs import FIRST_SPECIAL_TOKEN, save_tiny_model, tiny_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

LENGTHS = [1, 2, 63, 64, 65, 300, 577, 4096]
# Query heads, width of keys, width of values, page size, type.
WIDTHS = [
    (16, 576, 512, 64, torch.bfloat16),
    (128, 576, 512, 16, torch.bfloat16),
    (20, 288, 256, 64, torch.float16),
    (4, 24, 16, 5, torch.bfloat16),
]


def in_float32(cache: Cache, q: torch.Tensor, row: int, value_width: int) -> torch.Tensor:
    """q: [T, H, D], the last tokens of the request; gives [T, H, C]."""
    latents = cache.of_request(row)[0][:, 0]
    logits = torch.einsum("thd,ld->thl", q.float(), latents) * q.shape[2] ** -0.5
    places = torch.arange(len(latents), device=q.device)
    visible = places <= places[len(latents) - len(q) :, None]
    return logits.masked_fill(~visible[:, None], -math.inf).softmax(-1) @ latents[:, :value_width]


def decode(cache: Cache, q: torch.Tensor, num_splits: int, value_width: int) -> torch.Tensor:
    import mllm_compile.runtime.ops.attention.latent  # noqa: F401  (needs Triton)

    num_requests, num_heads, width = q.shape
    out = torch.full((num_requests, num_heads, value_width), math.nan, device="cuda", dtype=q.dtype)
    partial = torch.full((num_requests * num_splits * num_heads * value_width,), math.nan, device="cuda")
    tops, totals = (torch.full((num_requests, num_splits, num_heads), math.nan, device="cuda") for _ in range(2))
    batch = (cache.page_table, cache.lengths, out, partial, tops, totals)
    torch.ops.mllm.latent_decode(q, cache.keys, *batch, cache.page_size, width**-0.5)
    return out


def prefill(cache: Cache, q: torch.Tensor, new: list[int], value_width: int) -> torch.Tensor:
    import mllm_compile.runtime.ops.attention.latent  # noqa: F401  (needs Triton)

    tiles, start = [], 0
    for row, count in enumerate(new):
        tiles += [(row, start, count, i * PREFILL_TILE.rows) for i in range(num_prefill_tiles(count, q.shape[1]))]
        start += count
    out = torch.full((*q.shape[:2], value_width), math.nan, device="cuda", dtype=q.dtype)
    of_tiles = torch.tensor(tiles, dtype=torch.int32, device="cuda")
    batch = (cache.page_table, cache.lengths, of_tiles, out)
    torch.ops.mllm.latent_prefill(q, cache.keys, *batch, cache.page_size, q.shape[2] ** -0.5)
    return out


def worst(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.float() - want).norm(dim=(1, 2)) / want.norm(dim=(1, 2))).max().item()


@pytest.mark.parametrize(("heads", "width", "value_width", "page_size", "dtype"), WIDTHS)
def test_decodes_match_float32_however_keys_are_split(heads, width, value_width, page_size, dtype):
    cache = Cache(LENGTHS, 1, width, page_size, dtype)
    q = 2 * torch.randn(len(LENGTHS), heads, width, device="cuda").to(dtype)
    want = torch.cat([in_float32(cache, q[row, None], row, value_width) for row in range(len(LENGTHS))])
    for num_splits in (1, 3, 64):
        assert worst(decode(cache, q, num_splits, value_width), want) < 8e-3, f"{num_splits} splits"


@pytest.mark.parametrize(("heads", "width", "value_width", "page_size", "dtype"), WIDTHS)
def test_prompts_match_float32_with_and_without_a_prefix(heads, width, value_width, page_size, dtype):
    lengths, new = [1, 70, 300, 577, 1100], [1, 70, 3, 200, 64]
    cache = Cache(lengths, 1, width, page_size, dtype)
    q = 2 * torch.randn(sum(new), heads, width, device="cuda").to(dtype)
    want = torch.cat([in_float32(cache, part, row, value_width) for row, part in enumerate(q.split(new))])
    assert worst(prefill(cache, q, new, value_width), want) < 8e-3


# Query heads, a head's own columns of a key, rotated ones, a value's, rank of a latent, type.
EXPANDED = [
    (16, 128, 64, 128, 512, torch.bfloat16),
    (20, 192, 64, 256, 512, torch.bfloat16),
    (40, 64, 32, 64, 256, torch.float16),
    (3, 16, 8, 20, 16, torch.bfloat16),
]


@pytest.mark.parametrize(("heads", "own", "rotated", "value", "rank", "dtype"), EXPANDED)
def test_prompts_over_keys_and_values_match_float32_in_one_part_and_in_several(heads, own, rotated, value, rank, dtype):
    import mllm_compile.runtime.ops.attention.expanded  # noqa: F401  (needs Triton)

    new, before = np.array([1, 70, 300, 129, 1]), np.array([0, 0, 1200, 1, 63])
    first = np.cumsum(new) - new
    lengths, total = (new + before).tolist(), int((new + before).sum())
    options = {"device": "cuda", "dtype": dtype}
    q = 2 * torch.randn(int(new.sum()), heads, own + rotated, **options)
    expanded, gathered = (
        torch.randn(total, heads, own + value, **options),
        torch.randn(total, rank + rotated, **options),
    )
    scale, want = (own + rotated) ** -0.5, []
    of_requests = zip(q.split(new.tolist()), expanded.split(lengths), gathered.split(lengths), strict=True)
    for queries, up, latents in of_requests:
        keys, values = up.float().split([own, value], -1)
        keys = torch.cat((keys, latents[:, None, rank:].float().expand(-1, heads, -1)), -1)
        logits = torch.einsum("thd,khd->htk", queries.float(), keys) * scale
        places = torch.arange(len(keys), device="cuda")
        visible = places <= places[len(keys) - len(queries) :, None]
        weights = logits.masked_fill(~visible, -math.inf).softmax(-1)
        want.append(torch.einsum("htk,khd->thd", weights, values))
    cases = ((total, 8e-3), (500, 8e-3), (130, 16e-3))  # each part rounds the result once more
    for (most_tokens, tolerance), splits in itertools.product(cases, (1, 3)):
        out = torch.full((len(q), heads, splits, value), math.nan, **options)
        log_sums = torch.full((len(q), heads, splits), math.nan, device="cuda")
        for part in key_ranges(first, new, before, most_tokens):
            keys = expanded[part.start : part.stop].clone(), gathered[part.start : part.stop].clone()
            torch.ops.mllm.expanded_prefill(q, *keys, torch.from_numpy(part.tiles).cuda(), out, log_sums, scale)
        got = (out.float() * log_sums.softmax(-1).unsqueeze(-1)).sum(2)
        assert worst(got, torch.cat(want)) < tolerance, f"parts of {most_tokens} keys, {splits} shares"


def test_rows_without_keys_are_passed_over_and_others_are_the_same_bitwise_among_any():
    lengths = [577, 0, 64, 0, 4096]
    cache = Cache([max(1, length) for length in lengths], 1, 576, 64, torch.bfloat16)
    cache.lengths.copy_(torch.tensor(lengths))
    q = torch.randn(len(lengths), 16, 576, device="cuda").bfloat16()
    got = decode(cache, q, 8, 512)
    assert got[1::2].isnan().all()  # as `decode` has left them
    order = [4, 2, 0]
    cache.page_table, cache.lengths = cache.page_table[order].contiguous(), cache.lengths[order].contiguous()
    assert torch.equal(decode(cache, q[order].contiguous(), 8, 512), got[order])


# A model's own widths; its other sizes are tiny.
OF_512 = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "head_dim": 64}
OF_256 = {"kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "head_dim": 32}
HEADS = {"num_attention_heads": 16, "num_key_value_heads": 16, "num_hidden_layers": 2}
LONGEST, NEW = 2048, 16
PROMPTS = (1, 2, 7, 33, 64, 130, 500, 1500)


# A step of so many tokens that several chunks of the longest prompt are behind others.
@pytest.mark.parametrize(("name", "changes", "step"), [("deepseek_v3", OF_512, 600), ("minicpm3", OF_256, 4096)])
def test_a_model_is_as_near_to_float32_as_transformers_is(tmp_path, monkeypatch, name, changes, step):
    behind = []  # tokens before each prompt that is computed over keys and values, as its plan has them
    plan = ExpandedPrompts.plan.__func__

    def noted(cls, common, num_decodes, *others):
        planned = plan(cls, common, num_decodes, *others)
        expanded = {*range(num_decodes, common.num_reqs)} - {*planned.others.tolist()}
        behind.extend(int(common.num_computed_tokens_cpu[index]) for index in expanded)
        return planned

    monkeypatch.setattr(ExpandedPrompts, "plan", classmethod(noted))
    folder = tmp_path / "model"
    save_tiny_model(tiny_config(name, **HEADS | changes, max_position_embeddings=LONGEST), folder)
    exact, rounded = reference(folder, torch.float32), reference(folder, torch.bfloat16)
    prompts = [random_ids(length, FIRST_SPECIAL_TOKEN, length) for length in PROMPTS]
    asked = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True, logprobs=0)
    with served(folder, tmp_path / "cache", step) as engine:
        (program,) = (open_artifact(path.parent).program for path in tmp_path.rglob("program.json"))
        assert all(layer.is_latent for layer in program.layers)
        assert set(of_kind(program.layer_kernels, "latent")) == {layer.name for layer in program.layers}
        assert program.decode_loop is not None  # a captured decode is one launch
        assert all(layer.up_projection for layer in program.layers)
        behind.clear()
        read = engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0))
        written = engine.generate(prompts, asked)
        again = engine.generate(prompts, asked)  # by a prefix hit
    assert [len(output.token_ids) for output in again] == [NEW] * len(prompts)
    assert (0 in behind) if step > sum(PROMPTS) else (max(behind) >= 500), behind
    ours = torch.cat([scores_of(output, ids) for output, ids in zip(read, prompts, strict=True)][1:])
    compare(f"{name}, prompts", ours, [reference_scores(exact, ids) for ids in prompts[1:]], rounded, prompts[1:])
    for what, outputs in (("answers", written), ("answers after a prefix hit", again)):
        texts = [ids + list(output.token_ids) for output, ids in zip(outputs, prompts, strict=True)]
        ours = torch.cat([scores_of_answer(output) for output in outputs])
        compare(f"{name}, {what}", ours, [reference_scores(exact, ids)[-NEW:] for ids in texts], rounded, texts, NEW)


def served(folder: Path, cache: Path, step: int) -> Engine:
    sections = {
        "model": {"path": str(folder), "dtype": "bfloat16"},
        "cache": {"dir": str(cache)},
        "runtime": {"device": "cuda", "max_model_len": LONGEST, "mem_fraction_static": 0.1, "max_running_requests": 16},
    }
    sections["runtime"] |= {"max_num_batched_tokens": step}
    return Engine(EngineConfig.from_dict(sections))
