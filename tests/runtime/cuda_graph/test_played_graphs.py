"""Captured decodes and pieces on a CPU: a capture is played by a function that a replay runs again."""

from __future__ import annotations

import pytest
import torch

from mllm_compile.runtime.graph_mode import GraphKind
from tests.runtime.cuda_graph.played_cases import Model, played_runner
from tests.runtime.runner_cases import Loop


@pytest.mark.parametrize("sample_in_graph", [True, False])
def test_decodes_and_pieces_that_are_replayed_give_the_models_tokens(played, sample_in_graph):
    runner = played_runner(decode_requests=(1, 2, 4), sample_in_graph=sample_in_graph)
    captured = [(figure.kind, figure.num_tokens) for figure in runner.graph_runner.figures]
    assert captured == [(GraphKind.PIECEWISE, 16), (GraphKind.PIECEWISE, 8)] + [
        (GraphKind.DECODE, size) for size in (4, 2, 1)
    ]
    prompts = [[3, 9, 27], [1, 2], [7] * 11]
    loop = Loop(runner)
    requests = [loop.add(prompt, max_tokens=5 + index) for index, prompt in enumerate(prompts)]
    with torch.inference_mode():
        loop.run()
    expected = [Model().greedy(prompt, 5 + index) for index, prompt in enumerate(prompts)]
    assert [request.output_token_ids for request in requests] == expected
    assert runner.forward_pass_id == len(loop.batches)
    assert (runner.attn_backend.prepared == 0) is sample_in_graph, "a decode loop needs no plan"
