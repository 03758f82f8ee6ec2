"""Parts of answers for trainers, beside log-probabilities."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from mllm_compile.server.flow.choice import Choice
from mllm_compile.server.wire.messages import Scores


def kept_tokens(scores: Sequence[Scores]) -> list[list[int]]:
    """The tokens that filters kept, a list of each token, as vLLM's and SGLang's clients read them (verifiers 0.4)."""
    return [np.frombuffer(one.kept or b"", np.int32).tolist() for one in scores]


def npy_of(choice: Choice, first: int) -> str | None:
    """vLLM's form of a completion's experts: base64 of an .npy file, [tokens - 1 - first, layers, k] int16."""
    found = _experts(choice)
    if found is None:
        return None
    file = io.BytesIO()
    np.save(file, found[first:], allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()


def int32_of(choice: Choice, first: int) -> str | None:
    """SGLang's form: base64 of int32 in that order, without a shape."""
    found = _experts(choice)
    return None if found is None else base64.b64encode(found[first:].astype(np.int32).tobytes()).decode()


def packed_experts(choice: Choice, first: int) -> dict[str, Any] | None:
    """SkyRL's form: an envelope of [tokens - 1 - first, layers, k] in the smallest of uint8 and int16."""
    found = _experts(choice)
    if found is None:
        return None
    found = found[first:]
    return _packed(found.astype(np.uint8) if found.max(initial=0) < 256 else found)


def packed_support(choice: Choice, width: int) -> dict[str, Any]:
    """SkyRL's form of the tokens that filters kept: an envelope of [tokens, ≥ width] int32, with -1 behind a row's.

    A row of a token that nothing filtered is -1 alone.
    """
    kept = [np.frombuffer(one.kept or b"", np.int32) for one in choice.scores]
    rows = np.full((len(kept), max([width, *map(len, kept)])), -1, np.int32)
    for row, ids in zip(rows, kept, strict=True):
        row[: len(ids)] = ids
    return _packed(rows)


def _packed(array: np.ndarray) -> dict[str, Any]:
    """SkyRL's envelope; its reader looks for `data` first."""
    data = base64.b64encode(array.tobytes()).decode()
    return {"data": data, "shape": list(array.shape), "dtype": array.dtype.name}


def _experts(choice: Choice) -> np.ndarray | None:
    if choice.experts is None:
        return None
    data, shape = choice.experts
    return np.frombuffer(data, np.int16).reshape(shape)
