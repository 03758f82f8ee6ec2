"""Engine's calls for embeddings, labels and scores (docs/encoders.md); calls.py does their work."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mllm_compile.engine.pooling.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from mllm_compile.engine.pooling.texts import TextPrompts
from mllm_compile.engine.unknown_arguments import unknown_of_a_call
from mllm_compile.runtime.unknown_names import tells_unknown

if TYPE_CHECKING:
    from mllm_compile.engine.pooling.calls import PoolingCalls


class PoolingMethods:
    """The part of Engine that serves a model that pools; for one that generates each call refuses."""

    _pooling: PoolingCalls | None  # None: the model generates

    @tells_unknown(unknown_of_a_call)
    def embed(
        self,
        prompts: TextPrompts,
        *,
        pooling: str | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
        priority: int = 0,
    ) -> list[EmbeddingRequestOutput]:
        """The embedding of each text (docs/encoders.md).

        Args:
            prompts: a text, token ids, vLLM's dict (`prompt` or `prompt_token_ids`), or a list of such.
            pooling: cls, last, mean or max; None: as the model's files say.
            normalize: to a length of 1; None: likewise.
            dimensions: the first numbers alone, of a model that was trained so.
            prompt_name: of the prompts in the model's files, the one that goes ahead of each text.
            truncate_prompt_tokens: cut longer texts to so many tokens; -1: to as many as the model takes. None: they
                are refused.
            priority: lower is served first.

        Raises:
            RequestError: a text or an argument is refused, or the model does not embed.
            EngineDeadError: the engine is closed, or dead after an error on the device.
        """
        return self.pooling.embed(
            prompts, pooling, normalize, dimensions, prompt_name, truncate_prompt_tokens, priority
        )

    @tells_unknown(unknown_of_a_call)
    def classify(
        self,
        prompts: TextPrompts,
        *,
        use_activation: bool = True,
        truncate_prompt_tokens: int | None = None,
        priority: int = 0,
    ) -> list[ClassificationRequestOutput]:
        """The probabilities of each label; arguments and errors as `embed`.

        Args:
            use_activation: False: raw scores.
        """
        return self.pooling.classify(prompts, use_activation, truncate_prompt_tokens, priority)

    @tells_unknown(unknown_of_a_call)
    def score(
        self,
        data_1: TextPrompts,
        data_2: TextPrompts,
        *,
        use_activation: bool = True,
        truncate_prompt_tokens: int | None = None,
        priority: int = 0,
    ) -> list[ScoringRequestOutput]:
        """How well texts go together: by a cross-encoder's head, or by their embeddings; arguments and errors as
        `embed`.

        Args:
            data_1: one text for all of data_2, or as many.
            data_2: a text or several.
        """
        return self.pooling.score(data_1, data_2, use_activation, truncate_prompt_tokens, priority)

    @tells_unknown(unknown_of_a_call)
    def reward(
        self, prompts: TextPrompts, *, truncate_prompt_tokens: int | None = None, priority: int = 0
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """The raw score of each text, of a classifier with one label; arguments and errors as `embed`."""
        calls = self.pooling
        return calls.pooled(prompts, calls.rules.reward(), truncate_prompt_tokens, priority)

    @tells_unknown(unknown_of_a_call)
    def encode(
        self,
        prompts: TextPrompts,
        *,
        pooling_task: str | None = None,
        normalize: bool | None = None,
        use_activation: bool = True,
        truncate_prompt_tokens: int | None = None,
        priority: int = 0,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """The model's result for a task; arguments and errors as `embed`.

        Args:
            pooling_task: embed, token_embed, classify or token_classify, as far as the model has it; None: of an
                embedder token_embed, else the model's own.
        """
        calls = self.pooling
        asked = calls.rules.encode(pooling_task, normalize, use_activation)
        return calls.pooled(prompts, asked, truncate_prompt_tokens, priority)

    @property
    def pooling(self) -> PoolingCalls:
        """The calls of a model that pools.

        Raises:
            RequestError: it generates.
        """
        if self._pooling is None:
            from mllm_compile.engine.pooling.refusal import not_pooling

            raise not_pooling()
        return self._pooling

    @property
    def pools(self) -> bool:
        """True if the model embeds or classifies texts, and generates none."""
        return self._pooling is not None
