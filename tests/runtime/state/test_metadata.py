"""A batch as layers with a state see it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from mllm_compile.runtime.state.hybrid_backend import HybridAttnBackend
from mllm_compile.runtime.state.metadata import StateMetadata
from mllm_compile.runtime.state.mixed import MixedStateSteps
from tests.runtime.state.state_cases import mixed_batch


def test_of_rows_that_follow_each_other_the_first_has_all_tokens_of_its_request():
    """As the deterministic mode has them on a GPU: a prompt's chunk, a decode, another chunk, and padding."""
    rows = [3, 3, 3, 5, 7, 7, 0, 0]
    batch = SimpleNamespace(seq_lens=torch.tensor([1, 2, 3, 9, 40, 41, 1, 1]), extend_prefix_lens=None)
    metadata = StateMetadata(
        batch=batch,  # type: ignore[arg-type]
        rows=torch.tensor(rows),
        num_decodes=0,
        segments=(),
        num_actual_tokens=len(rows),
        are_runs=True,
    )
    assert metadata.of_decodes is None and metadata.of_prompts is not None
    _, has_state, _, starts, ends = metadata.of_prompts
    found = {
        rows[index]: (start, end, bool(has_state[index]))
        for index, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True))
        if end > start
    }
    assert found == {3: (0, 3, False), 5: (3, 4, True), 7: (4, 6, True)}
    assert starts.dtype == ends.dtype == torch.int32


def test_a_captured_step_reads_each_batch_s_decodes_and_prompts_in_the_same_tensors():
    steps = MixedStateSteps(6, torch.device("cpu"))
    step = steps.capture(16)
    assert not any(held.any() for held in (*step.of_decodes, *step.of_prompts)), "nothing but padding"
    for rows, new, earlier, num_decodes in (
        ([4, 2, 5, 3], [1, 1, 7, 3], [9, 3, 0, 64], 2),
        ([1], [12], [0], 0),
        ([3, 1], [1, 1], [5, 2], 2),
    ):
        again = steps.fill(16, mixed_batch(rows, new, earlier))
        assert [held.data_ptr() for held in again.of_prompts] == [held.data_ptr() for held in step.of_prompts]
        behind = [0] * (6 - len(rows))
        decode_rows, has_state = step.of_decodes
        assert decode_rows.tolist() == [*rows[:num_decodes], *[0] * (6 - num_decodes)]
        assert has_state.tolist() == [count > 0 for count in earlier] + [False] * len(behind)
        of_rows, _, sources, starts, ends = step.of_prompts
        assert sources is of_rows or torch.equal(sources, of_rows)
        assert of_rows.tolist() == [*rows, *behind]
        begins = [sum(new[:index]) for index in range(len(new))]
        spans = [(begins[index], begins[index] + new[index]) for index in range(num_decodes, len(new))]
        found = list(zip(starts.tolist(), ends.tolist(), strict=True))
        assert [(start, end) for start, end in found if start < end] == spans
        assert found[num_decodes : len(rows)] == spans, "of their own requests"


def test_more_decodes_than_a_graph_of_theirs_holds_run_in_a_captured_step():
    """A batch of decodes has no new and earlier tokens of each; a soak of 2,000 with states found it refused."""
    steps = MixedStateSteps(6, torch.device("cpu"))
    steps.fill(16, mixed_batch([4, 2], [7, 3], [0, 0]))
    common = mixed_batch([5, 3, 1], [1, 1, 1], [4, 9, 2])
    alone: Any = SimpleNamespace(
        req_pool_indices=common.batch.req_pool_indices, extend_seq_lens=None, extend_prefix_lens=None
    )
    step = steps.fill(16, replace(common, batch=alone))
    decode_rows, has_state = step.of_decodes
    assert decode_rows.tolist() == [5, 3, 1, 0, 0, 0]
    assert has_state.tolist() == [True, True, True, False, False, False]
    *_, starts, ends = step.of_prompts
    assert torch.equal(starts, ends), "no prompt has a token"


def test_steps_with_prompts_are_not_captured_where_a_layer_has_no_kernel():
    assert "no kernel serves" in (HybridAttnBackend(None, None, None).mixed_obstacle or "")  # type: ignore[arg-type]
    steps = MixedStateSteps(1, torch.device("cpu"))
    assert HybridAttnBackend(None, None, None, steps).mixed_obstacle is None  # type: ignore[arg-type]
