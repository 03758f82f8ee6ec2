"""A batch as layers with a state see it."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from mllm_compile.runtime.state.metadata import StateMetadata


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
    _, has_state, starts, ends = metadata.of_prompts
    found = {
        rows[index]: (start, end, bool(has_state[index]))
        for index, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True))
        if end > start
    }
    assert found == {3: (0, 3, False), 5: (3, 4, True), 7: (4, 6, True)}
    assert starts.dtype == ends.dtype == torch.int32
