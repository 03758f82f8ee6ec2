"""Decodes behind one long prompt: steps say what they share where that pays, and tokens stay what they are."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from mllm_compile.runtime.attention.torch_backend import TorchAttnBackend
from mllm_compile.runtime.ranks.records import SamplingMode
from mllm_compile.runtime.step.common_prefix import CommonPrefix
from mllm_compile.runtime.step.paths.base import Step, StepParts
from mllm_compile.runtime.step.paths.decodes import DecodePath
from tests.runtime.runner_cases import Loop, TinyModel, make_runner

SHARED = [11, 22, 33, 44, 55, 6, 7, 8, 9, 10, 12, 13, 14]  # three pages of 4, and a token
PROMPTS = [[*SHARED, last] for last in range(6)]


class Steps:
    """Batches as attention sees them."""

    def __init__(self, runner, monkeypatch) -> None:
        self.shared: list[tuple[int, int]] = []  # requests, tokens that they share
        plan = runner.attn_backend.init_forward_metadata

        def noting(batch):
            self.shared.append((batch.batch_size, batch.common_prefix_len))
            plan(batch)

        monkeypatch.setattr(runner.attn_backend, "init_forward_metadata", noting)


def served(monkeypatch, prompts, least=8, **runtime):
    monkeypatch.setattr(TorchAttnBackend, "cascade_pays", lambda self, count, tokens, _: (count - 1) * tokens >= least)
    runner = make_runner(TinyModel(), **{"cascade_attention": True} | runtime)
    steps, loop = Steps(runner, monkeypatch), Loop(runner, enable_prefix_cache=True)
    loop.add(SHARED, max_tokens=1)
    loop.run()
    steps.shared.clear()
    requests = [loop.add(prompt, max_tokens=6) for prompt in prompts]
    loop.run()
    return [request.output_token_ids for request in requests], steps.shared


def test_tokens_are_the_same_with_and_without(monkeypatch):
    expected = [TinyModel().greedy(prompt, 6) for prompt in PROMPTS]
    tokens, shared = served(monkeypatch, PROMPTS)
    assert tokens == expected
    assert shared[0] == (6, 0), "prompts are no decodes"
    assert set(shared[1:]) == {(6, 12)}
    tokens, shared = served(monkeypatch, PROMPTS, cascade_attention=False)
    assert tokens == expected
    assert {count for _, count in shared} == {0}


@pytest.mark.parametrize(
    ("prompts", "least", "runtime"),
    [
        (PROMPTS[:1], 0, {}),
        (PROMPTS, 61, {}),
        ([*PROMPTS, [1, 2, 3, 4, 5]], 8, {}),
        (PROMPTS, 8, {"deterministic": True}),
    ],
    ids=["one request", "it does not pay", "one that begins otherwise", "deterministic"],
)
def test_nothing_is_shared_where(monkeypatch, prompts, least, runtime):
    tokens, shared = served(monkeypatch, prompts, least, **runtime)
    assert tokens == [TinyModel().greedy(prompt, 6) for prompt in prompts]
    assert {count for _, count in shared} == {0}


def test_decodes_beside_a_prompt_share_theirs(monkeypatch):
    monkeypatch.setattr(TorchAttnBackend, "cascade_pays", lambda self, count, tokens, _: count > 1 and tokens > 0)
    model = TinyModel()
    runner = make_runner(model, max_num_batched_tokens=16, cascade_attention=True)
    loop = Loop(runner, enable_prefix_cache=True)
    loop.add(SHARED, max_tokens=1)
    loop.run()
    steps = Steps(runner, monkeypatch)
    prompts = [*PROMPTS[:3], [(7 * i) % 60 for i in range(40)]]  # the last in chunks
    requests = [loop.add(prompt, max_tokens=12) for prompt in prompts]
    loop.run()
    assert [request.output_token_ids for request in requests] == [model.greedy(prompt, 12) for prompt in prompts]
    assert (4, 12) in steps.shared, "three decodes beside a prompt"
    assert (4, 0) in steps.shared, "four decodes, one of which begins otherwise"


@pytest.mark.parametrize(("most_sharing", "shared"), [(0, 0), (8, 12)], ids=["none is captured", "one is"])
def test_decodes_that_are_one_launch_share_a_prefix_where_a_cascade_is_captured(most_sharing, shared):
    runtime = SimpleNamespace(cascade_attention=True, deterministic=False)
    cascades = SimpleNamespace(cascade_pays=lambda count, num_tokens, is_captured: is_captured)
    backend = SimpleNamespace(cascades=cascades)
    row_state = SimpleNamespace(adapters=None)
    config = SimpleNamespace(runtime=runtime)
    runner = SimpleNamespace(config=config, dp_size=1, attn_backend=backend, row_state=row_state)
    pages = SimpleNamespace(page_size=4, common_pages=lambda rows, most: most)
    launched = []
    graphs = SimpleNamespace(most_sharing=most_sharing, launch=lambda *step: launched.append(step))
    nothing = SimpleNamespace()
    parts = StepParts(runner, *(nothing,) * 6, CommonPrefix(runner, pages))
    rows, num_new = np.arange(4), np.ones(4, dtype=np.int32)
    batch = SimpleNamespace(num_decodes=4, num_requests=4, prefix_lens=np.full(4, 13), rows=rows, num_new=num_new)
    plan = SimpleNamespace(fields=SimpleNamespace(req_pool_indices=rows, seq_lens=rows, out_cache_loc=rows), media=None)
    DecodePath(parts, graphs)._launch(Step(batch, plan, SamplingMode.SAMPLED))
    ((*_, common_prefix_len, greedy_across_ranks, _has_lora),) = launched
    assert (common_prefix_len, greedy_across_ranks) == (shared, False)
