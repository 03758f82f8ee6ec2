"""Answers drawn from a grammar at random, token by token, as a model without any sense would."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np

from mllm_compile.runtime.sampling.grammar import MaskWork


def allowed_ids(mask: np.ndarray) -> set[int]:
    """Token ids of the bits in a mask [W]."""
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def walk(backend, grammar, chance: random.Random, most_tokens: int = 60) -> Iterator[tuple[bytes, set[int]]]:
    """(text so far, tokens that may follow) of a random answer, up to its end-of-sequence."""
    vocabulary, matcher = backend.vocabulary, grammar.matcher()
    text, new = b"", []
    for _ in range(most_tokens):
        mask = np.zeros((1, vocabulary.mask_words), np.int32)
        faults = backend.fill([MaskWork(matcher, new, 0)], mask)
        assert not faults, (faults, text)
        allowed = allowed_ids(mask[0])
        yield text, allowed
        token_id = chance.choice(sorted(allowed))
        if token_id in vocabulary.eos_token_ids:
            return
        text, new = text + vocabulary.tokens[token_id], [token_id]
