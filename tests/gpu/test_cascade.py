"""Cascade attention on the GPU: a batch behind one prompt against float32, and engines with and without it."""

from __future__ import annotations

import math

import pytest
import torch

from mllm_compile import Engine, EngineConfig, SamplingParams
from mllm_compile.runtime.attention import flashinfer_backend
from mllm_compile.runtime.attention.flashinfer.cascade import FlashInferCascade
from mllm_compile.runtime.attention.flashinfer.kernels import PlanGroup
from mllm_compile.runtime.attention.flashinfer.wrappers import GroupWrappers
from mllm_compile.runtime.attention.flashinfer_backend import FlashInferAttnBackend
from mllm_compile.runtime.attention.layer import PerLayerParameters
from mllm_compile.runtime.attention.split.cascade import SharedPrefix
from mllm_compile.runtime.attention.split.splits import OF_MANY
from mllm_compile.runtime.attention.torch_backend import TorchAttnBackend
from tests.gpu.test_prompts import in_float32
from tests.gpu.test_served_models import SHAPES, random_ids
from tests.gpu.test_split_decode import Cache
from tests.runtime.attention.attention_cases import attend, make_case, make_layer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

PAGE = 64


@pytest.mark.parametrize("shared", [64, 512])
@pytest.mark.parametrize("new_lens", [[1] * 9, [1] * 8 + [30]], ids=["decodes", "mixed"])
def test_a_batch_behind_one_prompt_is_as_float32_has_it(shared, new_lens):
    layer = make_layer(16, 8, 128)
    case = make_case(layer, [shared + 70 * i for i in range(9)], new_lens, PAGE, torch.bfloat16, "cuda")
    batch = case.batch
    table = batch.req_to_token_pool.req_to_token
    table[2:, :shared] = table[1, :shared]
    wrappers = GroupWrappers(
        [layer],
        kv_cache_dtype=torch.bfloat16,
        q_dtype=torch.bfloat16,
        max_context_len=table.shape[1],
        req_to_token=table,
        device="cuda",
        max_requests=9,
        page_size=PAGE,
    )
    backend = FlashInferAttnBackend(wrappers)
    outputs = []
    for one in (TorchAttnBackend(), backend):
        batch.common_prefix_len = 0 if one is not backend else shared
        one.init_forward_metadata(batch)
        outputs.append(attend(one, layer, batch, case.q, case.k, case.v).float())
    assert isinstance(backend.decode_metadata.decode_wrappers[0], FlashInferCascade)
    want, got = outputs
    assert ((got - want).norm(dim=(1, 2)) / want.norm(dim=(1, 2))).max() < 1e-2


@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(16, 8, 128), (32, 4, 128), (9, 3, 64), (8, 8, 256)])
@pytest.mark.parametrize("count", [9, 64])
def test_own_kernels_give_what_float32_gives_for_any_number_of_shared_keys(count, heads, kv_heads, width):
    import mllm_compile.runtime.ops.attention.cascade  # noqa: F401  (needs Triton)

    lengths = [700 + 37 * row for row in range(count)]
    cache = Cache(lengths, kv_heads, width, PAGE, torch.bfloat16)
    q = 2 * torch.randn(count, heads, width, device="cuda").bfloat16()
    group = PlanGroup(heads, kv_heads, width, PerLayerParameters(-1, 0.0, width**-0.5))
    prefix = SharedPrefix([group], count, torch.device("cuda"))
    options = PAGE, OF_MANY.most, width**-0.5

    def piece(inputs: list[torch.Tensor]) -> None:
        torch.ops.mllm.cascade_decode(*inputs, *options)

    pages = tuple(x.view(-1, PAGE, kv_heads, width) for x in (cache.keys, cache.values))
    for shared in (640, 0, 64):
        cache.page_table[1:, : shared // PAGE] = cache.page_table[0, : shared // PAGE]
        want = torch.cat([in_float32(cache, q[row, None], row, None, 0) for row in range(count)])
        prefix.share(shared)
        got = prefix.prepare(piece, group, cache.page_table, cache.lengths).run(q, pages, torch.full_like(q, math.nan))
        assert ((got.float() - want).norm(dim=(1, 2)) / want.norm(dim=(1, 2))).max() < 8e-3


@pytest.mark.parametrize("is_captured", [True, False])
def test_an_engine_gives_the_same_scores_with_and_without(tmp_path, monkeypatch, is_captured):
    used = []
    run, share = FlashInferCascade.run, SharedPrefix.share
    if is_captured:
        monkeypatch.setattr(SharedPrefix, "share", lambda self, count: used.append(count) or share(self, count))
    else:
        monkeypatch.setattr(FlashInferCascade, "run", lambda self, *args: used.append(1) or run(self, *args))
    for name in ("cascade_pays", "captured_cascade_pays"):
        monkeypatch.setattr(flashinfer_backend, name, lambda spared, layers: spared > 0)
    prefix = random_ids(700, 1000, 3)
    prompts = [[*prefix, *random_ids(1 + 5 * i, 1000, i)] for i in range(12)]
    asked = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0)
    scores = {}
    for is_on in (True, False):
        sections = {
            "model": {"path": str(SHAPES / "qwen3-0.6b"), "load_format": "dummy", "dtype": "bfloat16"},
            "cache": {"dir": str(tmp_path)},
            "runtime": {
                "device": "cuda",
                "max_model_len": 4096,  # behind fewer tokens no 16 requests would pay
                "max_running_requests": 16,
                "mem_fraction_static": 0.3,
                "cascade_attention": is_on,
            },
            "cudagraph": {} if is_captured else {"mode": "piecewise"},
        }
        with Engine(EngineConfig.from_dict(sections)) as engine:
            engine.generate([prefix], SamplingParams(temperature=0.0, max_tokens=1))
            used.clear()
            outputs = engine.generate(prompts, asked)
        assert bool(used) == is_on
        scores[is_on] = [
            (token, step[token].logprob)
            for output in outputs
            for token, step in zip(output.token_ids, output.logprobs, strict=True)
        ]
    # Where rounding has chosen another token, what follows is another text: those before are compared.
    pairs = list(zip(scores[True], scores[False], strict=True))
    same = [(a, b) for (one, a), (other, b) in pairs if one == other]
    assert len(same) > 0.5 * len(pairs)
    assert math.sqrt(sum((a - b) ** 2 for a, b in same) / len(same)) < 5e-2
