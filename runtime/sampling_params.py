"""SamplingParams: what a user asks of one request, under vLLM's names and defaults, checked when it is made.

Pure Python: no torch. The per-token fields are carried out by runtime/sampler.py, the stopping ones by the scheduler
and the engine's detokenizer. Every field works or is refused here; none is accepted and ignored.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mllm_compile.runtime.errors import RequestError
from mllm_compile.runtime.shown import shown

MAX_LOGPROBS = 20  # alternatives a token; bounds what one request can make every step copy to the host
MAX_TOKEN_LIST = 1024  # entries of logit_bias or stop_token_ids; bounds the per-slot tables on the device
MAX_N = 16384
# Of a vocabulary or a context: a larger number asks for no more than this, and would not fit the device's tables.
_MOST_TOKENS = 2**31 - 1
GREEDY_TEMPERATURE = 1e-5  # below it float32 logits / temperature is an argmax in all but name


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen, when it ends, and what is returned of it. Immutable; safe to share.

    Order of the logits' way: logit_bias, penalties, min_tokens, then the greedy choice, or temperature, top_k, top_p,
    min_p (Transformers' order) and the draw.

    Attributes:
        n: Number of answers to the prompt; more than one needs temperature > 0, or all would be equal.
        temperature: 0 (or anything under 1e-5) chooses the most probable token; up to 100.
        top_p: Draw from the fewest most probable tokens whose probabilities reach this sum; in (0, 1]. Tokens as
            probable as the last one kept are kept too.
        top_k: Draw from this many most probable tokens (and those tied with the last); 0 or -1, kept as 0: from all.
        min_p: Leave out tokens less probable than min_p times the most probable; in [0, 1].
        presence_penalty: Subtracted once from the logit of each token in the output so far; in [-2, 2].
        frequency_penalty: Subtracted from a token's logit for each time it is in the output so far; in [-2, 2].
        repetition_penalty: Divides positive logits, and multiplies negative ones, of tokens in the prompt or the
            output; in [0.01, 100], above 1 discourages.
        logit_bias: Added to the logits of these token ids; each in [-100, 100], at most 1024 entries.
        seed: From 0 to 2**63 - 1: the same seed gives the same tokens whatever else is in the batch. None (or vLLM's
            -1, kept as None): the engine gives the request a seed of its own.
        stop: A text, or texts, that end the output. Kept as a tuple, empty when there are none.
        stop_token_ids: Token ids that end the output. Kept as a tuple, empty when there are none.
        include_stop_str_in_output: Whether the stop text is part of the returned text.
        min_tokens: End-of-sequence (unless ignore_eos) and stop_token_ids cannot be drawn before this many output
            tokens; stop texts do not end the output before then either.
        max_tokens: Most output tokens; None: as many as the model's context leaves.
        ignore_eos: Go on after the end-of-sequence token.
        logprobs: Return the log-probability of each output token and of this many most probable alternatives (0: of
            the output token alone; at most 20). Of the model's own distribution: before bias, penalties, temperature
            and filters. None: return none.
        prompt_logprobs: The same for the tokens of the prompt but the first, which nothing predicts.
        skip_special_tokens: Leave special tokens out of the text.
        detokenize: Whether to make text at all; stop texts need it.

    Raises:
        RequestError: A value of the wrong type or out of range; names the field, what was expected and what came.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True

    def __post_init__(self) -> None:
        self._check_distribution()
        self._check_length_and_stops()
        self._check_outputs()

    def _set(self, field: str, value: object) -> None:
        object.__setattr__(self, field, value)  # the dataclass is frozen for everyone else

    def _number(self, field: str, low: float, high: float, *, above_low: bool = False, hint: str = "") -> None:
        self._set(field, _number(field, getattr(self, field), low, high, above_low=above_low, hint=hint))

    def _integer(
        self, field: str, low: int, high: int | None = None, *, optional: bool = False, hint: str = ""
    ) -> None:
        value = getattr(self, field)
        if not (optional and value is None):
            self._set(field, _integer(field, value, low, high, optional=optional, hint=hint))

    def _check_distribution(self) -> None:
        self._number("temperature", 0, 100, hint="Use 0 for greedy decoding.")
        self._number("top_p", 0, 1, above_low=True, hint="Use 1 to turn it off.")
        self._integer("top_k", -1, hint="Use 0 or -1 to turn it off.")
        self._set("top_k", min(max(self.top_k, 0), _MOST_TOKENS))
        self._number("min_p", 0, 1, hint="Use 0 to turn it off.")
        self._number("presence_penalty", -2, 2, hint="Use 0 to turn it off.")
        self._number("frequency_penalty", -2, 2, hint="Use 0 to turn it off.")
        self._number("repetition_penalty", 0.01, 100, hint="Use 1 to turn it off.")
        self._set("logit_bias", _logit_bias(self.logit_bias))
        self._integer("seed", -1, 2**63 - 1, optional=True, hint="Use None to be given one.")
        if self.seed == -1:
            self._set("seed", None)
        self._integer("n", 1, MAX_N)
        if self.n > 1 and self.is_greedy:
            raise _refused("n", "1 when temperature is 0", self.n, "Greedy answers would be equal; raise temperature.")

    def _check_length_and_stops(self) -> None:
        self._integer("max_tokens", 1, optional=True, hint="Use None for as many as the context leaves.")
        limit = "" if self.max_tokens is None else "It cannot exceed max_tokens."
        self._integer("min_tokens", 0, self.max_tokens, hint=limit)
        self._set("min_tokens", min(self.min_tokens, _MOST_TOKENS))
        self._set("stop", _stop_texts(self.stop))
        self._set("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))

    def _check_outputs(self) -> None:
        self._integer("logprobs", 0, MAX_LOGPROBS, optional=True, hint="Use None for none.")
        self._integer("prompt_logprobs", 0, MAX_LOGPROBS, optional=True, hint="Use None for none.")
        for field in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize"):
            if not isinstance(getattr(self, field), bool):
                raise _refused(field, "True or False", getattr(self, field))
        if self.stop and not self.detokenize:
            raise _refused("stop", "no stop texts when detokenize is False", self.stop, "Use stop_token_ids instead.")

    @property
    def is_greedy(self) -> bool:
        """Whether each token is the most probable one, with no draw."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        """Whether the choice of a token depends on the tokens before it beyond the model."""
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0

    def check_vocab(self, vocab_size: int) -> None:
        """Refuse token ids that the model does not have; called at the door, where the model is known.

        Raises:
            RequestError: An id of logit_bias or stop_token_ids is `vocab_size` or more.
        """
        for field in ("logit_bias", "stop_token_ids"):
            unknown = [token_id for token_id in getattr(self, field) or () if token_id >= vocab_size]
            if unknown:
                expected = f"token ids under {vocab_size}, the model's vocabulary size"
                raise _refused(field, expected, unknown[0], "Take ids from the model's own tokenizer.")


def _refused(field: str, expected: str, got: object, hint: str = "") -> RequestError:
    return RequestError(f"{field}: expected {expected}, got {shown(got)}. {hint}".rstrip())


def _number(field: str, value: object, low: float, high: float, *, above_low: bool = False, hint: str = "") -> float:
    """`value` as a float if it is a number in [low, high], or (low, high] with `above_low`."""
    expected = f"a number {'above' if above_low else 'from'} {low:g} {'up to' if above_low else 'to'} {high:g}"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise _refused(field, expected, value, hint)
    try:
        number = float(value)
    except OverflowError:  # an integer beyond all floats
        raise _refused(field, expected, value, hint) from None
    if math.isnan(number) or not low <= number <= high or (above_low and number == low):
        raise _refused(field, expected, value, hint)
    return number


def _integer(
    field: str, value: object, low: int, high: int | None = None, *, optional: bool = False, hint: str = ""
) -> int:
    """`value` as an int if it is an integer (numpy's too, not bool) in [low, high]."""
    expected = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
    if optional:
        expected += " or None"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise _refused(field, expected, value, hint)
    number = int(value)
    if number < low or (high is not None and number > high):
        raise _refused(field, expected, value, hint)
    return number


def _token_ids(field: str, value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Sequence):
        raise _refused(field, "a list of token ids or None", value)
    if len(value) > MAX_TOKEN_LIST:
        raise _refused(field, f"at most {MAX_TOKEN_LIST} token ids", len(value))
    return tuple(_integer(f"{field}[{i}]", token_id, 0) for i, token_id in enumerate(value))


def _logit_bias(value: object) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise _refused("logit_bias", "a dict of token id to bias or None", value)
    if len(value) > MAX_TOKEN_LIST:
        raise _refused("logit_bias", f"at most {MAX_TOKEN_LIST} entries", len(value))
    biases = {
        _integer("logit_bias key", token_id, 0): _number(f"logit_bias[{shown(token_id)}]", bias, -100, 100)
        for token_id, bias in value.items()
    }
    return biases or None


def _stop_texts(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    texts = (value,) if isinstance(value, str) else value
    if isinstance(texts, (bytes, Mapping)) or not isinstance(texts, Sequence):
        raise _refused("stop", "a text, a list of texts or None", value)
    for text in texts:
        if not isinstance(text, str) or not text:
            raise _refused("stop", "texts that are not empty", text, "Use None for no stop texts.")
    return tuple(texts)
