"""Parts of answers for trainers, beside log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mllm_compile.server.wire.messages import Scores


def kept_tokens(scores: Sequence[Scores]) -> dict[str, list[int]]:
    """vLLM's form of the tokens that filters kept: those of token i are token_ids[offsets[i] : offsets[i + 1]]."""
    kept = [np.frombuffer(one.kept or b"", np.int32) for one in scores]
    offsets = np.cumsum([0, *(len(one) for one in kept)])
    return {"token_ids": np.concatenate(kept).tolist() if kept else [], "offsets": offsets.tolist()}
