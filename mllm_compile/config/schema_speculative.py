"""The config's section `speculative`: how tokens are drafted."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from mllm_compile.config.schema_base import Auto, PathText, Section, anchored_model_path
from mllm_compile.files.user_path import user_path
from mllm_compile.runtime.config_sections import SpeculativeMethod

MAX_DRAFTED = 32  # tokens of a draft


class SpeculativeConfig(Section):
    """Drafts of the next tokens, which one step checks together: answers are the same (docs/speculation.md)."""

    method: Literal[Auto, SpeculativeMethod] = "none"
    """Where drafts come from. ngram: what followed the newest tokens before, in prompt and answer. suffix: likewise,
    and in past answers, by majority. draft_model: a smaller model of the same vocabulary. eagle3, dflash: a head that
    reads the model's hidden states. mtp: the checkpoint's own layer for multi-token prediction. auto: mtp where
    the checkpoint has such a layer, else suffix. none: nowhere."""

    num_speculative_tokens: Auto | Annotated[int, Field(ge=1, le=MAX_DRAFTED)] = "auto"
    """Most tokens of a draft. auto: as many as pay, by the times of steps and what is accepted; 0 in a large batch."""

    model: PathText | None = None
    """draft_model, eagle3, dflash: a hub id or a folder, as model.path. It computes in the model's dtype."""

    token_map: PathText | None = None
    """eagle3, dflash, mtp: a file with a JSON array of token ids. The head is cut to these tokens: a pass reads less of
    it, and drafts no other token."""

    prompt_lookup_min: Annotated[int, Field(ge=1, le=64)] = 2
    """ngram: fewest of the newest tokens that are looked up."""

    prompt_lookup_max: Annotated[int, Field(ge=1, le=64)] = 4
    """ngram: most of them; the longest that is found counts."""

    suffix_decoding_max_tree_depth: Annotated[int, Field(ge=3, le=256)] = 24
    """suffix: most of the newest tokens that are compared."""

    suffix_decoding_max_cached_requests: Annotated[int, Field(ge=0, le=100_000)] = 10_000
    """suffix: past answers that are kept, of each cache_salt; 0: none. A bound on their tokens holds besides."""

    suffix_decoding_max_spec_factor: Annotated[float, Field(gt=0.0, le=16.0)] | None = None
    """suffix: a draft has at most so many tokens for each one that agrees. null: 4 where verify steps are captured,
    which take as long for fewer, else 1."""

    suffix_decoding_min_token_prob: float = Field(default=0.1, ge=0.0, le=1.0)
    """suffix: a draft ends before a token that a smaller share of the places goes on with."""

    synthetic_acceptance_length: Annotated[float, Field(ge=1.0)] | None = None
    """For benchmarks: accept drafts up to this mean of tokens a step, whatever the model says. Answers are wrong."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(f"prompt_lookup_min of at most prompt_lookup_max, which is {self.prompt_lookup_max}")
        length, most = self.synthetic_acceptance_length, self.num_speculative_tokens
        if length is not None and most == "auto":
            raise ValueError("num_speculative_tokens: a number, where synthetic_acceptance_length is set")
        if length is not None and most != "auto" and length > most + 1:
            raise ValueError(f"synthetic_acceptance_length of at most num_speculative_tokens + 1, which is {most + 1}")
        if self.method in _METHODS_OF_KEYS["model"] and self.model is None:
            raise ValueError(f"method: {self.method} with speculative.model, a hub id or a folder of what drafts")
        for name in type(self).model_fields:
            wanted = _METHODS_OF_KEYS.get(name.partition("_")[0])
            is_used = name == "method" or (self.method != "none" if wanted is None else self.method in wanted)
            if not is_used and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"method: {' or '.join(wanted) if wanted else 'another than none'}, which alone reads {name}"
                )
        return self

    def anchored(self, folder: Path) -> Self:
        """The section of a file in this folder, with whole paths."""
        paths = {}
        if self.model is not None:
            paths["model"] = anchored_model_path(self.model, folder)
        if self.token_map is not None:
            paths["token_map"] = os.path.normpath(folder / user_path(self.token_map))
        return self.model_copy(update=paths) if paths else self


# The first words of SpeculativeConfig's keys that some methods alone read.
_METHODS_OF_KEYS = {
    "prompt": ("ngram",),
    "suffix": ("suffix",),
    "model": ("draft_model", "eagle3", "dflash"),
    "token": ("eagle3", "dflash", "mtp"),
}
