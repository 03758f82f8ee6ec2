"""The facts about a ready engine that the front answers from: limits, tokenizer, the model's defaults."""

from __future__ import annotations

from pathlib import Path

from mllm_compile.engine.requests import RequestBuilder
from mllm_compile.runtime.sampling.params import SamplingParams
from mllm_compile.server.wire.messages import Hello
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
        self.defaults = SamplingParams(**hello.default_params)
        self.builder = RequestBuilder(
            tokenizer=tokenizer,
            vocab_size=hello.vocab_size,
            eos_token_ids=frozenset(hello.eos_token_ids),
            default_params=self.defaults,
        )

    @classmethod
    def of(cls, hello: Hello, earlier: EngineFacts | None) -> EngineFacts:
        """The facts that an engine has told; reads the tokenizer unless an earlier engine had the same.

        Raises:
            CheckpointError: the tokenizer cannot be read.
        """
        folder = hello.tokenizer_folder
        if earlier is not None and earlier.hello.tokenizer_folder == folder:
            return cls(hello, earlier.tokenizer)
        return cls(hello, None if folder is None else load_tokenizer(Path(folder)))
