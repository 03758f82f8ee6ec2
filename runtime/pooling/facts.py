"""The runtime's facts of a model that pools, as a program stores them; free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

# What a model is served for.
ModelTask = Literal["generate", "embed", "classify"]
# What a text gives: an embedding, a row of scores for each label, or either for each of its tokens.
PoolingTask = Literal["embed", "classify", "token_embed", "token_classify"]
PoolingRule = Literal["cls", "last", "mean", "max", "mean_sqrt_len", "token"]
Activation = Literal["none", "sigmoid", "softmax"]


@dataclass(frozen=True, kw_only=True)
class PoolingFacts:
    """
    Attributes:
        task: what the checkpoint was made for: embed, classify or token_classify.
        rules: the hidden states of a text that its head is given; several are one after another. `token`: each.
        width: numbers of a hidden state.
        outputs: numbers of an embedding, or labels.
        kinds: kinds of tokens (token_type_ids) that the model tells apart; 0: it takes none.
        normalize: embeddings have a length of 1.
        activation: what turns scores of labels into probabilities.
        labels: their names, in order.
        similarity: of two embeddings: cosine, dot, euclidean, manhattan.
        prompts: texts that go ahead of a user's, by name.
        default_prompt: the name of the one that is taken unless a request names another.
        pools_prompt: means are over the prompt's tokens too.
        lower_case: texts are read in lower case.
        max_length: most tokens of a text; 0: as many as the model takes.
        score_template: the text that a pair is read as, with {query} and {document}; None: the tokenizer's own pair.
        end_id: the token that every text has to end with, as the head reads its hidden state; None: any.
        dimensions: lengths that embeddings may be cut to; (0,): any; (): none.
    """

    task: PoolingTask
    rules: tuple[PoolingRule, ...]
    width: int
    outputs: int
    kinds: int = 0
    normalize: bool = False
    activation: Activation = "none"
    labels: tuple[str, ...] = ()
    similarity: str = "cosine"
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    pools_prompt: bool = True
    lower_case: bool = False
    max_length: int = 0
    dimensions: tuple[int, ...] = ()
    score_template: str | None = None
    end_id: int | None = None

    @property
    def tasks(self) -> tuple[PoolingTask, ...]:
        """All that a text can be asked for."""
        if self.task == "embed":
            return ("embed", "token_embed")
        return (self.task,)
