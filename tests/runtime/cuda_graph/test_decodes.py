"""Captured decodes, as far as they can be seen without a GPU (tests/gpu/test_decode_loop.py has the rest)."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mllm_compile.runtime.collectives.base import using
from mllm_compile.runtime.config_sections import CudaGraphSection
from mllm_compile.runtime.cuda_graph.decodes import DECODE_KINDS, DecodeGraphs
from mllm_compile.runtime.cuda_graph.dispatcher import GraphDispatcher
from mllm_compile.runtime.cuda_graph.padding import PaddedInputs
from mllm_compile.runtime.graph_mode import GraphKind
from mllm_compile.runtime.runner_config import RunnerConfig
from tests.runtime.runner_cases import DEFAULTS


@pytest.mark.parametrize(
    ("asked", "pieces", "said"),
    [
        (False, "pieces", ""),
        (True, None, "no kernels that choose tokens"),
        (True, "pieces", "no kernels that attend in every layer"),
    ],
)
def test_decodes_choose_no_tokens_where_they_are_not_to_or_kernels_lack(asked, pieces, said, caplog):
    graphs = object.__new__(DecodeGraphs)
    graphs._runner = SimpleNamespace(
        config=RunnerConfig(
            dtype=torch.float32,
            runtime=DEFAULTS,
            cudagraph=CudaGraphSection(mode="full", sample_in_graph=asked),
        ),
        model=SimpleNamespace(decode_loop=pieces),
    )
    graphs._attention = SimpleNamespace(page_table=None)
    with caplog.at_level(logging.INFO, logger="mllm_compile"):
        assert graphs._make_loop() is None
    assert said in caplog.text
    assert bool(said) == bool(caplog.text)


class Launches:
    """Captured decodes whose replays do nothing; `ran` has the graphs, `written` the last slot's rows."""

    def __init__(self, sizes, num_ranks=1) -> None:
        graphs = self.graphs = object.__new__(DecodeGraphs)
        self.ran: list[tuple[GraphKind, int]] = []
        self.shared: list[int] = []
        self.written: dict = {}
        most = num_ranks * 4
        places = torch.zeros(most, dtype=torch.int64)
        padded = graphs._padded = object.__new__(PaddedInputs)
        padded.num_ranks = num_ranks
        padded.inputs = SimpleNamespace(
            out_cache_loc=places, req_pool_indices=places, seq_lens=places, padding_len=1, clear_rope_lens=lambda: None
        )
        graphs._runner = SimpleNamespace(forward_pass_id=0, forward_times=None)
        graphs._cascades = SimpleNamespace(share_prefix=self.shared.append)
        graphs._sizes = GraphDispatcher(sizes).sizes
        graphs.loop = SimpleNamespace(next_slot=lambda: SimpleNamespace(write=self._write), replayed=lambda: None)
        graphs._graphs = {(kind, has_lora): {} for kind in DECODE_KINDS for has_lora in (False, True)}
        for kind in sizes:
            graphs._graphs[kind, False] = {size: self._graph(kind, size, most) for size in graphs._sizes[kind]}

    def _graph(self, kind, size, most):
        replay = SimpleNamespace(replay=lambda: self.ran.append((kind, size)))
        return SimpleNamespace(graph=replay, logits=torch.zeros(most, 5), tokens=torch.zeros(most, dtype=torch.int64))

    def _write(self, rows, seq_lens, slots, size, padding_len, deltas):
        self.written = {"rows": rows.tolist(), "size": size}
        self.graphs._padded.inputs.out_cache_loc[: slots.size] = torch.from_numpy(slots)  # as its first kernel does


def launch(launches: Launches, count: int, *how) -> None:
    launches.graphs.launch(*np.ones((3, count), dtype=np.int64), None, *how)


def test_a_decode_runs_in_the_smallest_graph_of_its_kind():
    every = Launches(dict.fromkeys(DECODE_KINDS, (1, 2, 4)))
    launch(every, 3)
    launch(every, 2, 64)
    launch(every, 1, 0, True)
    launch(every, 4, 64, True)
    assert every.ran == [
        (GraphKind.DECODE, 4),
        (GraphKind.CASCADE, 2),
        (GraphKind.DECODE_GREEDY_ACROSS_RANKS, 1),
        (GraphKind.CASCADE_GREEDY_ACROSS_RANKS, 4),
    ]
    assert every.shared == [64, 64]
    assert every.graphs._runner.forward_pass_id == 4


def test_likeliest_tokens_are_taken_of_all_logits_where_ranks_have_no_kernel_for_their_parts():
    plain = Launches({GraphKind.DECODE: (4,)})
    launch(plain, 3, 0, True)
    assert plain.ran == [(GraphKind.DECODE, 4)]


def test_more_decodes_than_any_graph_holds_are_refused():
    plain = Launches({GraphKind.DECODE: (1, 4), GraphKind.CASCADE: (1,)})
    with pytest.raises(RuntimeError, match="no DECODE of 5 requests was captured: the largest has 4"):
        launch(plain, 5)
    with pytest.raises(RuntimeError, match="no CASCADE of 2 requests"):
        launch(plain, 2, 64)
    plain.graphs.loop = None
    with pytest.raises(RuntimeError, match="prepares its own inputs"):
        launch(plain, 1)
    assert not plain.ran


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_captured_decode_has_a_ranks_own_requests_first_and_tells_padding_as_tokens_are_gathered(rank):
    """Of three ranks with two, no and one requests, captured for two each."""
    rows, slots = np.array([1, 2, 0, 0, 7, 0]), np.array([40, 41, 0, 0, 50, 0])
    launches = Launches({GraphKind.DECODE: (1, 2)}, num_ranks=3)
    with using(SimpleNamespace(rank=rank)):
        assert launches.graphs.padded_requests(2) == 2 and launches.graphs.padding_len == 1
        launches.graphs.launch(rows, np.ones(6, dtype=np.int64), slots)
        of_all = launches.graphs._padded.decode_slots(2)
    own = slice(2 * rank, 2 * rank + 2)
    assert (launches.written["rows"][:2], launches.written["size"]) == (rows[own].tolist(), 6)
    assert of_all.tolist() == slots.tolist()
