"""SamplingParams: what a user asks of one request, under vLLM's names and defaults, checked when it is made.

Pure Python: no torch. runtime/sampling/sampler.py carries out the per-token fields, the scheduler and the engine's
detokenizer the stopping ones. Every field works or is refused here; none is accepted and ignored. Nothing
below this looks at a value's range again, so each is checked as the float32 or int64 that it becomes on the device.
"""

from __future__ import annotations

import copy
import math
import numbers
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mllm_compile.runtime.config_sections import LOGPROBS_MODES, LogprobsMode
from mllm_compile.runtime.sampling.param_checks import by_name_alone, refused
from mllm_compile.runtime.sampling.structured_params import StructuredOutputsParams
from mllm_compile.runtime.sampling.transfer_params import KVTransferParams
from mllm_compile.runtime.short_repr import short_repr

ALL_LOGPROBS = -1  # in the place of a number of alternatives: the whole vocabulary
MAX_LOGPROBS = 20  # alternatives a token; bounds what one request can make every step copy to the host
MAX_TOKEN_LIST = 1024  # entries of logit_bias or stop_token_ids; bounds the per-row tables on the device
# Looked for in every answer; bound what a request costs its caller, and what the engine keeps of it.
MAX_STOP_TEXTS = 64
MAX_STOP_CHARACTERS = 4096  # of all of them together
_MOST_LOGPROBS_BYTES = 2**28  # of one request that wants the whole vocabulary's: they are kept until it is answered
MAX_BAD_WORDS = 512  # texts; each is up to two phrases, which every step compares with the output
MAX_BAD_WORD_TOKENS = 32
_BAD_WORD_CHARACTERS = 1024
_MOST_ALLOWED = 2**20  # more than any vocabulary has
MAX_N = 1024
MAX_BIAS = 100.0  # OpenAI's range
# Bound of a vocabulary or a context: a larger number asks for no more, and would not fit the device's tables.
_MOST_TOKENS = 2**31 - 1
_ID_DIGITS = 10  # of the largest of them
NO_TOKEN = -1  # in a token's place: not sampled, or its logits were no numbers
NONE_ALLOWED = -2  # likewise: its logits were numbers, and the request's parameters or its grammar forbid all tokens
GREEDY_TEMPERATURE = 1e-5  # below it float32 logits / temperature is an argmax in all but name
# The smallest that float32 holds to full precision; less would be 0 where kernels flush to zero, and keep no token. The
# most probable token is above it in any vocabulary, so all smaller top_p keep that one alone, as it does.
_LEAST_TOP_P = 2.0**-126

_STRUCTURED = "Use structured_outputs=StructuredOutputsParams(json=…), or regex, choice, grammar, json_object."
# Names of vLLM, Transformers and OpenAI that likeness does not lead to ours, and what to do instead.
_ELSEWHERE = {
    "best_of": "Use n for several answers, with logprobs to choose the best by cumulative_logprob.",
    "use_beam_search": "Beam search is not built; use n for several answers.",
    "num_beams": "Beam search is not built; use n for several answers.",
    "beam_width": "Beam search is not built; use n for several answers.",
    "length_penalty": "Beam search is not built; use n for several answers.",
    "early_stopping": "Beam search is not built; use n for several answers.",
    "guided_decoding": _STRUCTURED,
    "guided_json": _STRUCTURED,
    "guided_json_object": _STRUCTURED,
    "guided_regex": _STRUCTURED,
    "guided_choice": _STRUCTURED,
    "guided_grammar": _STRUCTURED,
    "response_format": _STRUCTURED,
    "logits_processors": "Use logit_bias, bad_words or allowed_token_ids.",
    "bad_words_ids": "Use bad_words, which takes texts.",
    "truncate_prompt_tokens": "Cut the prompt's token ids before the call.",
    "output_kind": "Use Engine.stream for pieces of the answer, Engine.generate for all of it.",
    "do_sample": "Use temperature=0 for greedy decoding.",
    "max_new_tokens": "Did you mean max_tokens?",
    "max_completion_tokens": "Did you mean max_tokens?",
    "max_length": "Did you mean max_tokens, which counts the output alone?",
    "min_new_tokens": "Did you mean min_tokens?",
    "top_logprobs": "Did you mean logprobs?",
}


class FrozenBias(Mapping[int, float]):
    """An immutable logit_bias; equal to a dict of the same entries, hashable, and safe to pickle."""

    __slots__ = ("_biases",)

    def __init__(self, biases: Mapping[int, float]) -> None:
        self._biases = dict(biases)

    def __getitem__(self, token_id: int) -> float:
        return self._biases[token_id]

    def __iter__(self) -> Iterator[int]:
        return iter(self._biases)

    def __len__(self) -> int:
        return len(self._biases)

    def __hash__(self) -> int:
        return hash(frozenset(self._biases.items()))

    def __repr__(self) -> str:
        return repr(self._biases)


@by_name_alone("temperature=0", _ELSEWHERE)
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """The parameters of one request: how its tokens are chosen, when it ends, and what is returned. Immutable.

    The order is Transformers': logit_bias, penalties, forbidden tokens, then the greedy choice, or temperature, top_k,
    top_p, min_p and the draw.

    Attributes:
        n: Answers to the prompt, 1 to 1024; more than one needs temperature > 0.
        temperature: Divides the logits, in [0, 100]; below 1e-5 the most probable token is chosen.
        top_p: Draw from the fewest most probable tokens that reach this sum, and ties with the last; in (0, 1].
        top_k: Draw from this many most probable tokens, and ties with the last; 0 or -1: from all.
        min_p: Leave out tokens less probable than min_p times the most probable; in [0, 1].
        presence_penalty: Subtracted once from the logit of each token in the output; in [-2, 2].
        frequency_penalty: Subtracted for each time that a token is in the output; in [-2, 2].
        repetition_penalty: Divides positive and multiplies negative logits of tokens in prompt or output; in [0.01,
            100].
        logit_bias: Added to the logits of these ids, clamped to [-100, 100]; at most 1024 entries.
        allowed_token_ids: The only ids that the output may have; end-of-sequence must be listed too.
        bad_words: Texts that the output may not hold as tokens, with or without a space before; at most 512 of 32
            tokens.
        seed: An integer of 64 bits: the same seed gives the same tokens in any batch. Answer i of n has seed + i.
            None or -1: the engine makes one.
        stop: Texts that end the output; at most 64, of 4096 characters together.
        stop_token_ids: Ids that end the output; at most 1024.
        include_stop_str_in_output: Leave the stop text in the text.
        min_tokens: Before so many tokens nothing ends the output but max_tokens.
        max_tokens: Most output tokens; None: as many as the context leaves.
        ignore_eos: Go on after the end-of-sequence token.
        logprobs: Return the log-probability of each output token and of this many alternatives, 0 to 20; -1: of the
            whole vocabulary, up to 256 MiB.
        logprobs_mode: Their distribution. "raw_logprobs" is the model's own, before all of the above.
            "tempered_logprobs" is after all but the filters, "processed_logprobs" after all of it. None is as
            runtime.logprobs_mode says.
        return_sampling_mask: Return the tokens that the filters kept, 16 million in an answer at most, with each
            token's log-probability.
        return_routed_experts: Return the experts that each token but the last chose. Refused beside stop, unless
            runtime.routed_experts is set, and for an answer that is aborted there are none.
        prompt_logprobs: Raw log-probabilities of the prompt's tokens but the first, and alternatives; 0 to 20.
        skip_special_tokens: Leave special tokens out of the text.
        detokenize: Make text; stop needs it.
        structured_outputs: The form of the output. Refused beside ignore_eos, allowed_token_ids and bad_words.
        kv_transfer_params: Another engine computes the prompt, or goes on with it (docs/apart.md); a dict is taken.

    Raises:
        RequestError: A value of the wrong type or out of range; names the field, the expected and the actual value.
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
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    ignore_eos: bool = False
    logprobs: int | None = None
    logprobs_mode: LogprobsMode | None = None
    return_sampling_mask: bool = False
    return_routed_experts: bool = False
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True
    structured_outputs: StructuredOutputsParams | None = None
    kv_transfer_params: KVTransferParams | None = None

    def __post_init__(self) -> None:
        self._check_distribution()
        self._check_length_and_stops()
        self._check_outputs()
        self._check_structure()
        if self.kv_transfer_params is not None:
            self._set("kv_transfer_params", KVTransferParams.of(self.kv_transfer_params))

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
        self._set("top_p", max(self.top_p, _LEAST_TOP_P))
        self._integer("top_k", -1, hint="Use 0 or -1 to turn it off.")
        self._set("top_k", min(max(self.top_k, 0), _MOST_TOKENS))
        self._number("min_p", 0, 1, hint="Use 0 to turn it off.")
        self._number("presence_penalty", -2, 2, hint="Use 0 to turn it off.")
        self._number("frequency_penalty", -2, 2, hint="Use 0 to turn it off.")
        self._number("repetition_penalty", 0.01, 100, hint="Use 1 to turn it off.")
        self._set("logit_bias", _logit_bias(self.logit_bias))
        self._set("allowed_token_ids", _allowed(self.allowed_token_ids))
        self._set("bad_words", _bad_words(self.bad_words))
        self._integer("seed", -(2**63), 2**64 - 1, optional=True, hint="Use None to be given one.")
        if self.seed is not None:
            self._set("seed", None if self.seed == -1 else self.seed % 2**63)
        self._integer("n", 1, MAX_N)
        if self.n > 1 and self.is_greedy:
            raise refused("n", "1 when temperature is 0", self.n, "Greedy answers would be equal; raise temperature.")

    def _check_length_and_stops(self) -> None:
        self._integer("max_tokens", 1, optional=True)
        self._integer("min_tokens", 0)
        self._set("min_tokens", min(self.min_tokens, _MOST_TOKENS))
        if self.max_tokens is not None:
            self._set("max_tokens", min(self.max_tokens, _MOST_TOKENS))
            self._integer("min_tokens", 0, self.max_tokens, hint="It cannot exceed max_tokens.")
        self._set("stop", _stop_texts(self.stop))
        self._set("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))

    def _check_outputs(self) -> None:
        hint = "Use -1 for the whole vocabulary, None for none."
        self._integer("logprobs", ALL_LOGPROBS, MAX_LOGPROBS, optional=True, hint=hint)
        self._integer("prompt_logprobs", 0, MAX_LOGPROBS, optional=True, hint="Use None for none.")
        if self.logprobs_mode is not None and self.logprobs_mode not in LOGPROBS_MODES:
            raise refused("logprobs_mode", f"{', '.join(LOGPROBS_MODES)} or None", self.logprobs_mode)
        if self.return_sampling_mask and self.logprobs is None:
            raise refused("return_sampling_mask", "logprobs beside it", self.logprobs, "Ask for logprobs=0.")
        flags = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize")
        for field in (*flags, "return_sampling_mask", "return_routed_experts"):
            if not isinstance(getattr(self, field), bool):
                raise refused(field, "True or False", getattr(self, field))
        if self.stop and self.return_routed_experts:
            raise refused("stop", "none beside return_routed_experts", self.stop, "Use stop_token_ids instead.")
        if self.stop and not self.detokenize:
            raise refused("stop", "no stop texts when detokenize is False", self.stop, "Use stop_token_ids instead.")

    def _check_structure(self) -> None:
        if self.structured_outputs is None:
            return
        if not isinstance(self.structured_outputs, StructuredOutputsParams):
            hint = "Write structured_outputs=StructuredOutputsParams(json=…)."
            raise refused("structured_outputs", "StructuredOutputsParams or None", self.structured_outputs, hint)
        for field in ("ignore_eos", "allowed_token_ids", "bad_words"):
            if getattr(self, field):
                hint = "Put what is allowed into the schema or grammar."
                raise refused(field, "none beside structured_outputs", getattr(self, field), hint)

    @property
    def is_greedy(self) -> bool:
        """True if each token is the most probable one, with no draw."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def has_sampling_mask(self) -> bool:
        """True if the kept tokens are returned, and are not the whole vocabulary."""
        is_filtered = self.top_k > 0 or self.top_p < 1 or self.min_p > 0
        return self.return_sampling_mask and is_filtered and not self.is_greedy

    @property
    def has_penalties(self) -> bool:
        """True if the choice of a token depends on the tokens before it beyond the model."""
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0

    def of_answer(self, index: int) -> SamplingParams:
        """Parameters of one of the n answers: its own seed; the prompt's log-probabilities come with the first alone.

        They were checked when `self` was made, and are not checked again.
        """
        if self.n == 1:
            return self
        one = copy.copy(self)
        one._set("n", 1)
        if self.seed is not None:
            one._set("seed", (self.seed + index) % 2**63)
        if index:
            one._set("prompt_logprobs", None)
        return one

    def check_vocab(self, vocab_size: int) -> None:
        """Refuse token ids that the model does not have; called on arrival, where the model is known.

        Raises:
            RequestError: An id of logit_bias, stop_token_ids or allowed_token_ids is `vocab_size` or more, or logprobs
                or prompt_logprobs is above it, or logprobs of the whole vocabulary are too many.
        """
        most_tokens = _MOST_LOGPROBS_BYTES // (4 * vocab_size)
        if self.logprobs == ALL_LOGPROBS and (self.max_tokens is None or self.n * self.max_tokens > most_tokens):
            expected = f"n * max_tokens of at most {most_tokens} with -1, for the whole vocabulary of {vocab_size}"
            raise refused("logprobs", expected, (self.n, self.max_tokens), "Lower max_tokens, or ask for at most 20.")
        for field in ("logprobs", "prompt_logprobs"):
            num_top = getattr(self, field) or 0
            if num_top > vocab_size:
                raise refused(field, f"at most {vocab_size}, the model's vocabulary size", num_top, "Ask for fewer.")
        for field in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
            largest = max(getattr(self, field) or (), default=0)
            if largest >= vocab_size:
                expected = f"token ids under {vocab_size}, the model's vocabulary size"
                raise refused(field, expected, largest, "Take ids from the model's own tokenizer.")


def _number(field: str, value: object, low: float, high: float, *, above_low: bool = False, hint: str = "") -> float:
    """`value` as a float if it is a number in [low, high], or (low, high] with `above_low`."""
    # Classes that are named here need no look at their bases, which takes longer than all else.
    if type(value) in (float, int) or (isinstance(value, numbers.Real) and not isinstance(value, bool)):
        try:
            number = float(value)  # type: ignore[arg-type]
        except OverflowError:  # an integer beyond all floats
            number = math.nan
        if low <= number <= high and not (above_low and number == low):
            return number
    expected = "a number"
    if math.isfinite(low):
        expected += f" {'above' if above_low else 'from'} {low:g} {'up to' if above_low else 'to'} {high:g}"
    raise refused(field, expected, value, hint)


def _integer(
    field: str, value: object, low: int, high: int | None = None, *, optional: bool = False, hint: str = ""
) -> int:
    """`value` as an int if it is an integer (numpy's too, not bool) in [low, high]."""
    if type(value) is int or (isinstance(value, numbers.Integral) and not isinstance(value, bool)):
        number = int(value)
        if low <= number and (high is None or number <= high):
            return number
    expected = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
    if optional:
        expected += " or None"
    raise refused(field, expected, value, hint)


def _allowed(value: object) -> tuple[int, ...] | None:
    if value is None:
        return None
    token_ids = _token_ids("allowed_token_ids", value, _MOST_ALLOWED)
    if not token_ids:
        raise refused("allowed_token_ids", "at least one token id", value, "Use None to allow all.")
    return tuple(sorted(set(token_ids)))


def _bad_words(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Sequence):
        raise refused("bad_words", "a list of texts or None", value)
    if len(value) > MAX_BAD_WORDS:
        raise refused("bad_words", f"at most {MAX_BAD_WORDS} texts", len(value))
    for word in value:
        if not isinstance(word, str) or not word.strip():
            raise refused("bad_words", "texts that are not blank", word)
        if len(word) > _BAD_WORD_CHARACTERS:
            raise refused("bad_words", f"texts of at most {_BAD_WORD_CHARACTERS} characters", word)
    return tuple(value)


def _token_ids(field: str, value: object, most: int = MAX_TOKEN_LIST) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Sequence):
        raise refused(field, "a list of token ids or None", value)
    if len(value) > most:
        raise refused(field, f"at most {most} token ids", len(value))
    return tuple(_integer(f"{field}[{i}]", token_id, 0) for i, token_id in enumerate(value))


def _logit_bias(value: object) -> FrozenBias | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise refused("logit_bias", "a dict of token id to bias or None", value)
    if len(value) > MAX_TOKEN_LIST:
        raise refused("logit_bias", f"at most {MAX_TOKEN_LIST} entries", len(value))
    biases = {_bias_token(token_id): _bias(token_id, bias) for token_id, bias in value.items()}
    if len(biases) < len(value):
        raise refused("logit_bias", "each token id once", value, "5 and '5' are the same id.")
    return FrozenBias(biases) if biases else None


def _bias_token(token_id: object) -> int:
    if isinstance(token_id, str) and token_id.isascii() and token_id.isdecimal() and len(token_id) <= _ID_DIGITS:
        return int(token_id)
    return _integer("logit_bias key", token_id, 0)


def _bias(token_id: object, bias: object) -> float:
    number = _number(f"logit_bias[{short_repr(token_id)}]", bias, -math.inf, math.inf)
    return min(max(number, -MAX_BIAS), MAX_BIAS)


def _stop_texts(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    texts = (value,) if isinstance(value, str) else value
    if isinstance(texts, (bytes, Mapping)) or not isinstance(texts, Sequence):
        raise refused("stop", "a text, a list of texts or None", value)
    if len(texts) > MAX_STOP_TEXTS:
        raise refused("stop", f"at most {MAX_STOP_TEXTS} texts", len(texts), "Look for the others in the answer.")
    for text in texts:
        if not isinstance(text, str) or not text:
            raise refused("stop", "texts that are not empty", text, "Use None for no stop texts.")
    num_characters = sum(map(len, texts))
    if num_characters > MAX_STOP_CHARACTERS:
        expected = f"texts of at most {MAX_STOP_CHARACTERS} characters together"
        raise refused("stop", expected, num_characters, "Shorter beginnings of them end an answer as well.")
    return tuple(texts)
