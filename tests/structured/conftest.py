"""The embedded model's vocabulary, and a backend of each kind over it."""

import pytest

from mllm_compile.structured.backend import make_backend
from mllm_compile.structured.vocabulary import Vocabulary
from mllm_compile.text.tokenizer import load_tokenizer
from tests.tiny_model import TINY

BACKENDS = ("llguidance", "xgrammar")


def make_vocabulary():
    tokenizer = load_tokenizer(TINY)
    # As many rows as no model has words of 32 for, so that masks have bits of no token.
    tokens = tokenizer.token_bytes(tokenizer.vocab_size + 5)
    return Vocabulary.of(tokens, {tokenizer.eos_token_id}, tokenizer.special_token_ids)


@pytest.fixture(scope="session")
def vocabulary():
    return make_vocabulary()


@pytest.fixture(scope="session", params=BACKENDS)
def backend(request, vocabulary):
    return make_backend(request.param, vocabulary, threads=1)
