"""Attention to sources by the backend of a GPU: FlashInfer's wrappers and the program's own pieces, in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mllm_compile.runtime.attention.layer_kernels import LayerKernels
from mllm_compile.runtime.attention.metadata import AttentionMetadata
from mllm_compile.runtime.attention.split.split_decode import LinkedDecode
from mllm_compile.runtime.attention.split.splits import MOST_FEW_SEQUENCES, OF_FEW, OF_MANY
from mllm_compile.runtime.forward_batch import ForwardBatch, ForwardMode
from mllm_compile.runtime.forward_context import set_forward_context
from mllm_compile.runtime.memory_pool import KVPool, ReqToTokenPool
from mllm_compile.runtime.ops.attention.layer_op import cross_attention_with_output
from mllm_compile.runtime.program.sources import SourceAttention
from mllm_compile.runtime.runner_config import RunnerConfig
from tests.runtime.attention.attention_cases import make_layer
from tests.runtime.attention.torch_flashinfer import Library, attended, library
from tests.runtime.program.test_source_attention import batch_of
from tests.runtime.runner_cases import DEFAULTS

__all__ = ["library"]
CPU, DTYPE, PAGE = torch.device("cpu"), torch.bfloat16, 4
NUM_ROWS, WIDTH = 5, 16  # of requests, the dummy row among them; positions of a row
LENS = {1: 7, 2: 1, 4: 16}  # states of each row's source: a part of a page, one key, and full pages
LAYER = replace(make_layer(4, 4, 64, sm_scale=0.2), name="cross")
WRAPPERS: dict[str, Callable[[], LayerKernels[Any, Any]]] = {
    "FlashInfer's": LayerKernels,
    "the program's own": lambda: LayerKernels(
        decode=(LinkedDecode(own_piece, MOST_FEW_SEQUENCES, OF_FEW), LinkedDecode(own_piece, None, OF_MANY))
    ),
}


def own_piece(inputs: list[torch.Tensor]) -> None:
    """split_decode's op: rows of a table of pages, each with its own number of keys; rows without keys are left."""
    q, keys, values, table, lens, out, partial, *_ = inputs
    assert q.is_contiguous() and table.shape == (len(q), WIDTH // PAGE) and lens.shape == (len(q),)
    assert partial.shape[:1] == q.shape[:1] and table.dtype == lens.dtype == torch.int32
    for row, count in enumerate(lens.tolist()):
        places = torch.arange(count)
        slots = table[row].long()[places // PAGE] * PAGE + places % PAGE
        if count:
            out[row] = attended(q[row], keys[slots], values[slots], LAYER.sm_scale)


class Sources:
    """The pages of sources, and the attention to them."""

    def __init__(self, kernels: LayerKernels[Any, Any]) -> None:
        runtime = replace(DEFAULTS, attention_backend="flashinfer", kv_cache_dtype="bfloat16", max_running_requests=4)
        config = RunnerConfig(dtype=DTYPE, runtime=runtime)
        self.table = ReqToTokenPool(2 * NUM_ROWS - 1, WIDTH, CPU)
        self.pool = KVPool(1 + NUM_ROWS * WIDTH // PAGE, PAGE, [LAYER.cache_shape], DTYPE, CPU)
        generator = torch.Generator().manual_seed(0)
        for one in self.pool.tensors:
            one.copy_(torch.randn(one.shape, generator=generator))
        pages = 1 + torch.randperm(NUM_ROWS * WIDTH // PAGE, generator=generator).view(NUM_ROWS, -1)
        for row, count in LENS.items():
            slots = (pages[row, :, None] * PAGE + torch.arange(PAGE)).flatten()
            self.table.req_to_token[NUM_ROWS + row, :count] = slots[:count].int()
        model: Any = SimpleNamespace(sources=SimpleNamespace(layers=(LAYER,)), layer_kernels={"cross": kernels})
        self.attention = SourceAttention(config, model, self.table, CPU)
        self.attention.enter(np.array(list(LENS)), np.array(list(LENS.values()), dtype=np.int32))
        self.q = torch.randn(64, LAYER.num_heads, LAYER.head_dim, generator=generator).to(DTYPE)

    def batch(self, rows: list[int], mode: ForwardMode, new: list[int] | None = None) -> ForwardBatch:
        lens = torch.tensor([LENS.get(row, 1) for row in rows], dtype=torch.int32)
        given = {"req_to_token_pool": self.table, "token_to_kv_pool": self.pool}
        return batch_of(rows, mode, new, source_lens_cpu=lens, **given)

    def attend(self, of_sources: ForwardBatch) -> torch.Tensor:
        """[T, H, D]: the op, with the tokens' queries."""
        count = of_sources.batch_size
        q, out = self.q[:count], torch.full_like(self.q[:count], 9.0)
        metadata = {"cross": AttentionMetadata(batch=of_sources, num_actual_tokens=count)}
        with set_forward_context(metadata, no_compile_layers={"cross": LAYER}, slot_mapping={}, num_tokens=count):
            cross_attention_with_output(q, out, "cross")
        return out

    def check(self, out: torch.Tensor, rows: list[int]) -> None:
        """`rows` [T]: whose source each token's is."""
        keys, values = self.pool.get_kv_buffer(0)
        for token, row in enumerate(rows):
            slots = self.table.req_to_token[NUM_ROWS + row, : LENS[row]].long()
            want = attended(self.q[token], keys[slots], values[slots], LAYER.sm_scale)
            torch.testing.assert_close(out[token], want)


@pytest.fixture(params=WRAPPERS)
def sources(request: pytest.FixtureRequest, library: Library) -> Sources:
    return Sources(WRAPPERS[request.param]())


def test_tokens_of_prompts_and_decodes_attend_to_all_of_their_own_sources(sources: Sources) -> None:
    mixed = sources.batch([4, 1, 2], ForwardMode.MIXED, new=[1, 3, 2])
    sources.check(sources.attend(sources.attention.plan(mixed)), [4, 1, 1, 1, 2, 2])
    sources.check(sources.attend(sources.attention.plan(sources.batch([2, 4], ForwardMode.DECODE))), [2, 4])


def test_a_step_may_have_a_row_for_each_token_of_the_budget(sources: Sources) -> None:
    long = sources.batch([1, 4], ForwardMode.EXTEND, new=[40, 24])
    sources.check(sources.attend(sources.attention.plan(long)), [1] * 40 + [4] * 24)


def test_replays_of_a_capture_attend_to_the_sources_of_their_own_requests(sources: Sources) -> None:
    attention, requests = sources.attention, torch.zeros(4, dtype=torch.int64)
    attention.init_cuda_graph_state(4)
    for size in (4, 2):
        captured = attention.plan_capture(sources.batch([0] * size, ForwardMode.DECODE))
        for rows in ([4, 1], [2], [1, 2, 4][:size]):
            requests.zero_()[: len(rows)] = torch.tensor(rows)
            attention.begin_captured(requests[:size])
            attention.plan_replay(requests[:size], torch.tensor([LENS[row] for row in rows], dtype=torch.int32))
            sources.check(sources.attend(captured), rows)
