"""The facts about a ready engine that the front answers from: limits, tokenizer, the model's defaults."""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path

from mllm_compile.engine.decoder_prompts import DecoderPrompts
from mllm_compile.engine.requests import RequestBuilder
from mllm_compile.errors import MllmError
from mllm_compile.files.json_file import HeldFiles
from mllm_compile.kv_connectors.peers.rules import PeerRules
from mllm_compile.media.preprocessor import MediaPreprocessor
from mllm_compile.server.pooling.front import PoolingFront
from mllm_compile.server.wire.messages import Hello, params_of_wire
from mllm_compile.text.calls.derive import derive
from mllm_compile.text.calls.syntax import ChatSyntax
from mllm_compile.text.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger("mllm_compile.server")


class EngineFacts:
    """The facts.

    Attributes:
        hello: as the engine told them.
        tokenizer: None: prompts are token ids, answers too.
        syntax: how the model writes tool calls and reasoning.
        special_tokens: the tokenizer's, by their use to the syntax.
        marks: ids of those that the syntax has, None for what ends an answer.
        defaults: sampling parameters of a request that says none.
        builder: checks prompts as the engine does.
        media: prepares prompts with images.
        pooling: of a model that pools, what it takes; None: it generates.
        decoder: of an encoder-decoder, the decoder's side of prompts; None: it is another model.
    """

    def __init__(self, hello: Hello, tokenizer: Tokenizer | None, syntax: ChatSyntax, media: MediaPreprocessor) -> None:
        self.hello = hello
        self.media = media
        self.pooling = None if hello.pooling is None else PoolingFront.of(hello, tokenizer)
        self.tokenizer = tokenizer
        self.decoder = DecoderPrompts.of(hello.encoder, hello.vocab_size, tokenizer)
        self.syntax = syntax
        self.special_tokens = syntax.special_tokens(_special_texts(tokenizer))
        self.marks = _ids_of(self.special_tokens.kept, tokenizer, hello.eos_token_ids)
        self.defaults = params_of_wire(hello.default_params)
        self.builder = RequestBuilder(
            tokenizer=tokenizer,
            vocab_size=hello.vocab_size,
            keeps_routes=self.keeps_routes,
            eos_token_ids=frozenset(hello.eos_token_ids),
            default_params=self.defaults,
            media=media,
            decoder=self.decoder,
            peers=PeerRules.told(hello.config),
        )

    @property
    def keeps_routes(self) -> bool:
        """True if answers may have their tokens' experts."""
        return bool(self.hello.config.get("runtime", {}).get("routed_experts"))

    @property
    def cache_config(self) -> dict[str, str]:
        """The KV cache, as routers read it of vLLM."""
        runtime = self.hello.config.get("runtime", {})
        return {
            "block_size": str(self.hello.page_size),
            "num_gpu_blocks": str(self.hello.kv_tokens // self.hello.page_size),
            "cache_dtype": str(runtime.get("kv_cache_dtype", "")),
            "enable_prefix_caching": str(runtime.get("enable_prefix_cache", "")),
            "gpu_memory_utilization": str(runtime.get("mem_fraction_static", "")),
        }

    @classmethod
    def of(cls, hello: Hello, earlier: EngineFacts | None) -> EngineFacts:
        """The facts that an engine has told; makes the tokenizer, unless an earlier engine had the same.

        Raises:
            CheckpointError: the tokenizer cannot be read.
        """
        files, hello.tokenizer_files = hello.tokenizer_files, {}
        if earlier is not None and hello.fingerprint and earlier.hello.fingerprint == hello.fingerprint:
            return cls(hello, earlier.tokenizer, earlier.syntax, earlier.media)
        tokenizer = load_tokenizer(Path("tokenizer"), HeldFiles(files))
        name, domains = hello.model or "the model", hello.media_domains
        media = MediaPreprocessor(name, files, hello.max_model_len, hello.why_no_media, domains)
        return cls(hello, tokenizer, syntax_of(tokenizer), media)


def syntax_of(tokenizer: Tokenizer | None) -> ChatSyntax:
    """A model's syntax of calls and reasoning, by its chat template."""
    if tokenizer is None or not tokenizer.has_chat_template:
        return ChatSyntax(why_not="no chat template")
    try:
        return derive(tokenizer.apply_chat_template, tokenizer.source_for_tools)
    except MllmError as error:
        logger.warning("tool calls and reasoning stay in the text: %s", error)
        return ChatSyntax(why_not=str(error))


def _special_texts(tokenizer: Tokenizer | None) -> list[str]:
    if tokenizer is None:
        return []
    texts = map(tokenizer.id_to_token, tokenizer.special_token_ids)
    return [text for text in texts if text is not None]


def _ids_of(texts: Collection[str], tokenizer: Tokenizer | None, ends: Collection[int]) -> dict[str, int | None]:
    """Ids of special tokens by their texts; None for one that ends an answer."""
    if tokenizer is None:
        return {}
    ids = {text: tokenizer.token_to_id(text) for text in texts}
    return {text: None if token_id in ends else token_id for text, token_id in ids.items()}
