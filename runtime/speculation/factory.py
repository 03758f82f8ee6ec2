"""Makes the drafter that a config names."""

from __future__ import annotations

from collections.abc import Mapping

from mllm_compile.runtime.config_sections import SpeculativeSection
from mllm_compile.runtime.speculation.drafter import Drafter, Speculation
from mllm_compile.runtime.speculation.ngram import NgramGuesser
from mllm_compile.runtime.speculation.suffix import SuffixGuesser
from mllm_compile.runtime.speculation.texts import TextDrafter, TextGuesser

_FACTOR, _FACTOR_PADDED = 1.0, 4.0  # drafted tokens for each that agrees


def make_speculation(
    section: SpeculativeSection,
    vocab_size: int,
    model: Drafter | None = None,
    captured: Mapping[int, int] | None = None,
    keys_ahead: int = 0,
    dp_size: int = 1,
) -> Speculation | None:
    """How the scheduler speculates; None: it does not.

    Args:
        model: drafts by the draft model, where the runner has one.
        captured: as Speculation has them; None: no step is captured.
        keys_ahead: as Speculation has it; 0: graphs do not hold the draft model.
        dp_size: ranks with requests of their own; of several the host drafts.
    """
    if section.method == "none":
        return None
    return Speculation(
        drafter=TextDrafter(_guesser(section, padded=bool(captured))) if model is None else model,
        num_tokens=section.most_drafted,
        vocab_size=vocab_size,
        by_cost=section.by_cost,
        captured=captured or {},
        is_on_device=bool(captured) and dp_size == 1 and (section.method == "ngram" or keys_ahead > 0),
        keys_ahead=keys_ahead,
        fills=section.synthetic_acceptance_length is not None,
    )


def _guesser(section: SpeculativeSection, *, padded: bool) -> TextGuesser:
    """Guesses by text.

    Args:
        padded: steps take as long for shorter drafts.
    """
    if section.method == "ngram":
        return NgramGuesser(section.prompt_lookup_min, section.prompt_lookup_max)
    factor = section.suffix_decoding_max_spec_factor
    return SuffixGuesser(
        section.suffix_decoding_max_tree_depth,
        section.suffix_decoding_max_cached_requests,
        (_FACTOR_PADDED if padded else _FACTOR) if factor is None else factor,
        section.suffix_decoding_min_token_prob,
    )
