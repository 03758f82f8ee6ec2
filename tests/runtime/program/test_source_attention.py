"""Captured decodes find each request's source on the device: its row of pages, and how long it is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mllm_compile.runtime.forward_batch import ForwardBatch, ForwardMode
from mllm_compile.runtime.memory_pool import ReqToTokenPool
from mllm_compile.runtime.program import sources
from mllm_compile.runtime.program.sources import SourceAttention, most_states
from mllm_compile.runtime.sources.facts import SourceFacts

NUM_ROWS = 5  # of requests, the dummy row among them; those of sources follow
CPU = torch.device("cpu")


class Backend:
    """Notes what it is asked to plan; with a page table it needs no plan on the host."""

    def __init__(self, has_table: bool) -> None:
        self.page_table = torch.zeros(8, 4, dtype=torch.int32) if has_table else None
        self.replays: list[tuple[list[int], list[int], list[int]]] = []
        self.captured: list[int] = []
        self.planned: list[tuple[list[int], list[int]]] = []

    @property
    def decodes(self) -> Backend:
        return self

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 0 if self.page_table is not None else 1

    def init_cuda_graph_state(self, most: int, most_tokens: int) -> None:
        assert most == most_tokens

    def init_forward_metadata_capture_cuda_graph(self, size: int, *rest: Any) -> None:
        self.captured.append(size)

    def init_forward_metadata_replay_cuda_graph(
        self, size: int, rows: torch.Tensor, lens: torch.Tensor, mode: ForwardMode, lens_cpu: torch.Tensor
    ) -> None:
        assert mode is ForwardMode.DECODE
        self.replays.append((rows.tolist(), lens.tolist(), lens_cpu.tolist()))

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        assert batch.forward_mode is ForwardMode.DECODE
        assert batch.seq_lens.tolist() == batch.seq_lens_cpu.tolist()
        self.planned.append((batch.req_pool_indices.tolist(), batch.seq_lens_cpu.tolist()))


@pytest.fixture(params=[True, False], ids=["own kernels", "planned on the host"])
def made(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[SourceAttention, Backend]:
    backend, asked = Backend(request.param), []
    make = lambda *args, most_decodes: asked.append(most_decodes) or backend  # noqa: E731
    monkeypatch.setattr(sources, "make_attention_backend", make)
    config: Any = SimpleNamespace(max_attended=4, runtime=SimpleNamespace(max_num_batched_tokens=64))
    model: Any = SimpleNamespace(sources=SimpleNamespace(layers=()), layer_kernels={})
    attention = SourceAttention(config, model, ReqToTokenPool(2 * NUM_ROWS - 1, 16, CPU), CPU)
    assert asked == [64], "each token of a prompt is a row"
    attention.enter(np.array([1, 2, 4]), np.array([7, 1, 9], dtype=np.int32))
    return attention, backend


def batch_of(rows: list[int], mode: ForwardMode, new: list[int] | None = None, **rest: Any) -> ForwardBatch:
    count = sum(new or [1] * len(rows))
    tokens = torch.zeros(count, dtype=torch.int64)
    lens = torch.tensor([3] * len(rows), dtype=torch.int32)
    of_prompts = {} if new is None else {"extend_seq_lens_cpu": torch.tensor(new, dtype=torch.int32)}
    given: Any = {"req_to_token_pool": None, "token_to_kv_pool": None, "attn_backend": None, **of_prompts, **rest}
    return ForwardBatch(
        forward_mode=mode,
        batch_size=len(rows),
        input_ids=tokens,
        req_pool_indices=torch.tensor(rows),
        seq_lens=lens,
        seq_lens_cpu=lens,
        out_cache_loc=tokens,
        positions=tokens,
        **given,
    )


def test_each_token_of_a_prompt_is_a_decode_behind_its_whole_source(made: tuple[SourceAttention, Backend]) -> None:
    attention, backend = made
    lens = torch.tensor([7, 9], dtype=torch.int32)
    of_sources = attention.plan(batch_of([1, 4], ForwardMode.MIXED, new=[1, 3], source_lens_cpu=lens))
    assert of_sources.batch_size == 4
    attention.plan(batch_of([0, 0], ForwardMode.DECODE))  # dummy rows
    assert backend.planned == [([6, 9, 9, 9], [7, 9, 9, 9]), ([5, 5], [1, 1])]


def test_a_captured_decode_reads_rows_and_lengths_where_they_are_at_each_replay(
    made: tuple[SourceAttention, Backend],
) -> None:
    attention, backend = made
    attention.init_cuda_graph_state(4)
    requests = torch.zeros(3, dtype=torch.int64)
    captured = attention.plan_capture(batch_of([0, 0, 0], ForwardMode.DECODE))
    assert backend.captured == [3]
    places = captured.req_pool_indices.data_ptr(), captured.seq_lens.data_ptr()
    requests.copy_(torch.tensor([4, 2, 0]))
    attention.begin_captured(requests)  # what a capture holds, and each replay runs
    attention.plan_replay(requests, torch.tensor([9, 1], dtype=torch.int32))
    assert [one[:2] for one in backend.replays] == [([9, 7, 5], [9, 1, 0])]  # once, on the device or on the host
    if attention.plans_replays:
        assert backend.replays[0][2] == [9, 1, 1], "a row of padding has a key of the dummy page"
    assert captured.req_pool_indices.tolist() == [9, 7, 5]
    assert captured.seq_lens.tolist() == [9, 1, 0]
    assert places == (captured.req_pool_indices.data_ptr(), captured.seq_lens.data_ptr())
    attention.enter(np.array([2]), np.array([5], dtype=np.int32))  # another request got the row
    requests.copy_(torch.tensor([2, 0, 0]))
    attention.begin_captured(requests)
    attention.plan_replay(requests, None)
    assert captured.seq_lens.tolist() == [5, 0, 0]


def test_windows_of_sound_are_encoded_together_whatever_a_step_may_have() -> None:
    assert most_states(SourceFacts(max_length=1500, bins=80, frames=3000), 512) == 12000
    assert most_states(SourceFacts(max_length=1024, vocab_size=100), 512) == 512
