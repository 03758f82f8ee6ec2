"""The facts about a ready engine that the front answers from: limits, tokenizer, the model's defaults."""

from __future__ import annotations

from pathlib import Path

from mllm_compile.engine.requests import RequestBuilder
from mllm_compile.server.wire.messages import Hello, params_of_wire
from mllm_compile.text.tokenizer import Tokenizer, load_tokenizer


class EngineFacts:
    """The facts.

    Attributes:
        hello: as the engine told them.
        tokenizer: None: prompts are token ids, answers too.
        defaults: sampling parameters of a request that says none.
        builder: checks prompts as the engine does.
    """

    def __init__(self, hello: Hello, tokenizer: Tokenizer | None) -> None:
        self.hello = hello
        self.tokenizer = tokenizer
        self.defaults = params_of_wire(hello.default_params)
        self.builder = RequestBuilder(
            tokenizer=tokenizer,
            vocab_size=hello.vocab_size,
            eos_token_ids=frozenset(hello.eos_token_ids),
            default_params=self.defaults,
        )

    @classmethod
    def of(cls, hello: Hello, earlier: EngineFacts | None) -> EngineFacts:
        """The facts that an engine has told; makes the tokenizer, unless an earlier engine had the same.

        Raises:
            CheckpointError: the tokenizer cannot be read.
        """
        files, hello.tokenizer_files = hello.tokenizer_files, {}
        if earlier is not None and hello.fingerprint and earlier.hello.fingerprint == hello.fingerprint:
            return cls(hello, earlier.tokenizer)
        return cls(hello, load_tokenizer(Path("tokenizer"), files.get))
