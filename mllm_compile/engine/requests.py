"""Turns a caller's prompts and parameters into Submissions, or refuses them and says what is wrong.

prompts.py reads the prompts; this module puts each together with its parameters, and checks one against the other. The
scheduler refuses a prompt that could never fit the KV cache, also before it is queued. Runs on the caller's thread.
"""

from __future__ import annotations

import itertools
import logging
import numbers
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any, Protocol

from mllm_compile.engine.decoder_prompts import DecoderPrompts
from mllm_compile.engine.prompts import (
    MediaSource,
    Message,
    Prepared,
    Prompt,
    PromptReader,
    Prompts,
    PromptTokenizer,
    as_prompt_list,
    is_single_prompt,
)
from mllm_compile.engine.sequences import Submission
from mllm_compile.engine.sessions import Session, SessionArg, SessionArgs, session_of_each
from mllm_compile.errors import MllmError, RequestError
from mllm_compile.kv_connectors.peers.rules import PeerRules
from mllm_compile.runtime.media.tower import Tower
from mllm_compile.runtime.sampling.grammar import Grammar
from mllm_compile.runtime.sampling.params import MAX_BAD_WORD_TOKENS, SamplingParams
from mllm_compile.runtime.sampling.structured_params import StructuredOutputsParams
from mllm_compile.runtime.schedule.request import ids_of
from mllm_compile.runtime.short_repr import short_repr, typed_repr
from mllm_compile.runtime.sources.request import RequestSource
from mllm_compile.text.chat_template import as_conversations
from mllm_compile.text.detokenizer import Decoder

if TYPE_CHECKING:
    from mllm_compile.adapters.registry import Adapter, AdapterRegistry

Phrases = tuple[tuple[int, ...], ...]
AdapterNames = str | Seq[str | None] | None  # of all prompts of a call, or of each

logger = logging.getLogger("mllm_compile.engine")

_REASONS_SHOWN = 3


class GrammarSource(Protocol):
    """Compiles forms of answers; mllm_compile.structured.grammars.Grammars does."""

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """
        Raises:
            RequestError: it is refused.
            MllmError: a library for it is missing, or fails.
        """


class RequestBuilder:
    """Makes Submissions for one engine; thread-safe. `grammars` is as it was given.

    Args:
        tokenizer: None when the model has none; prompts are token ids then and answers have no text.
        vocab_size: rows of the model's embedding.
        keeps_routes: experts that tokens chose are kept.
        eos_token_ids: ids that end a completion.
        default_params: for callers that pass none.
        grammars: compiles structured_outputs; None: they are refused.
        media: prepares prompts with images; None: they are refused.
        tower: what prompts with images are checked with; a text: why they are refused.
        adapters: the adapters that requests may name; None: they are refused.
        adapter_of_sounds: of requests with sounds that name none; "": they have none.
        decoder: as PromptReader has it.
        peers: what may be asked of this engine's pages and others'.
    """

    def __init__(
        self,
        *,
        tokenizer: PromptTokenizer | None,
        vocab_size: int,
        keeps_routes: bool = False,
        eos_token_ids: frozenset[int],
        default_params: SamplingParams,
        grammars: GrammarSource | None = None,
        media: MediaSource | None = None,
        tower: Tower | str = "the model takes text alone",
        adapters: AdapterRegistry | None = None,
        adapter_of_sounds: str = "",
        decoder: DecoderPrompts | None = None,
        peers: PeerRules | None = None,
    ) -> None:
        self._tokenizer, self._peers = tokenizer, peers or PeerRules()
        self._adapters, self._of_sounds = adapters, adapter_of_sounds
        self.grammars = grammars
        self._prompts = PromptReader(tokenizer, vocab_size, media, tower, decoder)
        self._vocab_size, self._keeps_routes = vocab_size, keeps_routes
        self._eos_token_ids = eos_token_ids
        self._default_params = default_params
        self._last_phrases: tuple[tuple[str, ...], Phrases] = ((), ())  # the last bad_words that came
        # Ids that are made up; a caller's own id is unlike them.
        self._prefix, self._numbers = f"req-{secrets.token_hex(4)}", itertools.count()

    def build(
        self,
        prompts: Prompts,
        params: SamplingParams | Seq[SamplingParams] | None,
        priority: int = 0,
        adapter: AdapterNames = None,
        session: SessionArgs = None,
    ) -> list[Submission]:
        """One Submission a prompt, in order. A prompt that is refused carries its reason in `failure`.

        Raises:
            RequestError: `prompts`, `params`, `adapter` or `session` as a whole are not what is expected.
        """
        items = as_prompt_list(prompts)
        each = self._params_of_each(params, len(items))
        return self._submissions(self._prompts.read(items), each, priority, adapter, session)

    def build_chats(
        self,
        messages: Seq[Message] | Seq[Seq[Message]],
        params: SamplingParams | Seq[SamplingParams] | None,
        template_options: Mapping[str, Any],
        priority: int = 0,
        adapter: AdapterNames = None,
        session: SessionArgs = None,
    ) -> tuple[list[Submission], bool]:
        """Like build, for conversations through the chat template; also whether it is one, not a list.

        Raises:
            RequestError: `messages` or `params` as a whole are not what is expected, or there is no tokenizer.
        """
        conversations, is_single = as_conversations(messages)
        each = self._params_of_each(params, len(conversations))
        render = self._prompts.renderer(template_options)
        built = self._submissions([render(one) for one in conversations], each, priority, adapter, session)
        return built, is_single

    def build_one(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        adapter: str | None = None,
        session: SessionArg = None,
    ) -> Submission:
        """The Submission of a single prompt.

        Raises:
            RequestError: it is refused.
        """
        if not is_single_prompt(prompt):
            raise RequestError(
                f"prompt: expected one text, list of token ids or dict of such, got {typed_repr(prompt)}"
            )
        return self._one(self._prompts.read([prompt])[0], params, request_id, priority, adapter, session)

    def check(self, prompts: Seq[Prompt], params: SamplingParams) -> list[list[int] | MllmError]:
        """Token ids of each prompt, or the reason why `build` would refuse it; structured_outputs are not compiled.

        Raises:
            RequestError: `params` are not what is expected.
        """
        self._params_of_each(params, len(prompts))
        found: list[list[int] | MllmError] = []
        for prepared in self._prompts.read(prompts):
            _, error = self._refusal(prepared, params)
            found.append(error or prepared.token_ids or [])
        return found

    def build_chat(
        self,
        messages: Seq[Message],
        params: SamplingParams | None,
        template_options: Mapping[str, Any],
        *,
        request_id: str | None = None,
        priority: int = 0,
        adapter: str | None = None,
        session: SessionArg = None,
    ) -> Submission:
        """The Submission of a single conversation.

        Raises:
            RequestError: it is refused.
        """
        prepared = self._prompts.renderer(template_options)(messages)
        return self._one(prepared, params, request_id, priority, adapter, session)

    def _one(
        self,
        prepared: Prepared,
        params: SamplingParams | None,
        request_id: str | None,
        priority: int,
        adapter: str | None,
        session: SessionArg,
    ) -> Submission:
        if request_id is not None and (not isinstance(request_id, str) or not request_id):
            raise RequestError(f"request_id: expected a text that is not empty, got {short_repr(request_id)}")
        each = self._params_of_each(params, 1)
        submission = self._submissions([prepared], each, priority, adapter, session, request_id)[0]
        if submission.failure is not None:
            raise submission.failure.with_traceback(None)
        return submission

    def _params_of_each(self, params: SamplingParams | Seq[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if params is None:
            params = self._default_params
        if isinstance(params, SamplingParams):
            params.check_vocab(self._vocab_size)  # it is every prompt's, so it is the call that is wrong
            return [params] * count
        if not isinstance(params, Seq) or not all(isinstance(one, SamplingParams) for one in params):
            raise RequestError(f"sampling_params: expected SamplingParams or a list of them, got {typed_repr(params)}")
        if len(params) != count:
            raise RequestError(
                f"sampling_params: expected one, or one for each of the {count} prompts, got {len(params)}"
            )
        return list(params)

    def _submissions(
        self,
        prepared: list[Prepared],
        params: list[SamplingParams],
        priority: int,
        adapter: AdapterNames,
        session: SessionArgs,
        request_id: str | None = None,
    ) -> list[Submission]:
        priority = as_priority(priority)
        names = _adapter_of_each(adapter, len(prepared))
        sessions = session_of_each(session, len(prepared))
        return [
            self._submission(p, one, priority, name, whose, request_id)
            for p, one, name, whose in zip(prepared, params, names, sessions, strict=True)
        ]

    def _submission(
        self,
        prepared: Prepared,
        params: SamplingParams,
        priority: int,
        adapter_name: str | None,
        session: Session | None,
        request_id: str | None,
    ) -> Submission:
        def make(decoder: Decoder | None) -> Submission:
            ids = prepared.token_ids or [] if prepared.decoder_ids is None else prepared.decoder_ids
            return Submission(
                f"{self._prefix}-{next(self._numbers)}" if request_id is None else request_id,
                prepared.text,
                ids,
                params,
                eos_token_ids=self._eos_token_ids,
                priority=priority,
                decoder=decoder,
                bad_phrases=phrases,
                cache_salt=prepared.cache_salt,
                grammar=grammar,
                media=prepared.media,
                prompt_ids=prepared.ids if prepared.decoder_ids is None else ids_of(ids),
                source=source,
                source_token_ids=None if prepared.decoder_ids is None else prepared.token_ids or [],
                adapter=adapter,
                session_tag=None if session is None else session.tag(prepared.cache_salt),
            )

        phrases, error = self._refusal(prepared, params)
        adapter = grammar = None
        source = prepared.source
        if error is None and prepared.decoder_ids is not None and prepared.ids is not None:
            source = source or RequestSource.of_text(prepared.ids)
        if adapter_name is None and self._of_sounds and prepared.media is not None and prepared.media.has_sounds:
            adapter_name = self._of_sounds
        if adapter_name is not None and error is None:
            try:
                adapter = self._adapter(adapter_name)
            except MllmError as fault:
                error = fault
        if error is None and params.structured_outputs is not None:
            try:
                grammar = self._grammar(params.structured_outputs)
            except MllmError as fault:
                error = fault
        try:
            submission = make(self._tokenizer if error is None else None)
        except MllmError as fault:  # of the tokenizer, at the prompt's last tokens
            submission, error = make(None), fault
        if error is not None:
            submission.refuse(error)
        return submission

    def _refusal(self, prepared: Prepared, params: SamplingParams) -> tuple[Phrases, MllmError | None]:
        """The tokens of params.bad_words, and the reason why this prompt with these parameters is refused, if it is."""
        phrases, fault_of_words = self._bad_phrases(params)
        ids = prepared.ids if prepared.decoder_ids is None else None
        if params.prompt_logprobs is not None and ids is not None and ids.size and ids.max() >= self._vocab_size:
            fault_of_words = fault_of_words or RequestError(
                f"prompt_logprobs: expected none with the token {ids.max()}, which stands for an image and is beyond "
                "the vocabulary: it has no log-probability. Leave it out."
            )
        return phrases, prepared.error or fault_of_words or self._fault(prepared.token_ids or [], params)

    def _fault(self, token_ids: list[int], params: SamplingParams) -> RequestError | None:
        """The reason why these token ids with these parameters cannot be served, None when they can."""
        if not token_ids:
            return RequestError("the prompt is empty; a request needs at least one token to compute")
        if params.stop and self._tokenizer is None:
            return RequestError("stop: the model has no tokenizer, so there is no text to stop at. Use stop_token_ids.")
        if params.return_routed_experts and not self._keeps_routes:
            return RequestError(
                "return_routed_experts: expected false: experts are not kept. Set runtime.routed_experts in the config."
            )
        try:
            self._peers.check(params)
            params.check_vocab(self._vocab_size)
        except RequestError as error:
            return error
        stop_ids = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else self._eos_token_ids)}
        if params.min_tokens and params.allowed_token_ids and stop_ids.issuperset(params.allowed_token_ids):
            return RequestError(
                "allowed_token_ids: expected a token that does not end the answer beside min_tokens, got "
                f"{short_repr(params.allowed_token_ids)}. Allow others, or set min_tokens to 0."
            )
        return None

    def _adapter(self, name: str) -> Adapter:
        if self._adapters is None:
            raise RequestError(
                "adapter: none are served. Set lora.max_adapters in the config to how many there may be."
            )
        return self._adapters.find(name)

    def _grammar(self, params: StructuredOutputsParams) -> Grammar:
        if self.grammars is None:
            raise RequestError("structured_outputs: the model has no tokenizer, so its tokens have no text to check.")
        return self.grammars.compile(params)

    def _bad_phrases(self, params: SamplingParams) -> tuple[Phrases, RequestError | None]:
        """The tokens of params.bad_words, or the reason against them; kept for the next prompt with the same."""
        words = tuple(params.bad_words or ())
        if not words:
            return (), None
        if self._tokenizer is None:
            return (), RequestError("bad_words: the model has no tokenizer. Use logit_bias or allowed_token_ids.")
        last_words, phrases = self._last_phrases
        if words != last_words:
            try:
                phrases = bad_phrases(self._tokenizer, words, self._vocab_size)
            except RequestError as error:
                return (), error
            self._last_phrases = (words, phrases)
        return phrases, None


def bad_phrases(tokenizer: PromptTokenizer, words: Seq[str], vocab_size: int) -> Phrases:
    """The token sequences that bad_words forbid, as vLLM has them: of each text, and of it behind a space.

    The latter where it begins with another token and is as long, as for tokenizers that put the space into the word.
    One with an id that the model does not have cannot occur, and is left out.

    Raises:
        RequestError: a text has more tokens than a step compares, or none.
    """
    phrases: dict[tuple[int, ...], None] = {}
    for word in words:
        plain, spaced = (
            tuple(tokenizer.encode(space + word.lstrip(), add_special_tokens=False)) for space in ("", " ")
        )
        if not 1 <= len(plain) <= MAX_BAD_WORD_TOKENS:
            expected = f"bad_words: expected texts of 1 to {MAX_BAD_WORD_TOKENS} tokens"
            raise RequestError(f"{expected}, got {len(plain)} of {short_repr(word)}.")
        phrases[plain] = None
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            phrases[spaced] = None
    return tuple(phrase for phrase in phrases if max(phrase) < vocab_size)


def _adapter_of_each(adapter: AdapterNames, count: int) -> list[str | None]:
    """The name of each prompt's adapter.

    Raises:
        RequestError: neither a name, nor one for each prompt.
    """
    if adapter is None or isinstance(adapter, str):
        return [adapter] * count
    if not isinstance(adapter, Seq) or not all(one is None or isinstance(one, str) for one in adapter):
        raise RequestError(f"adapter: expected a name or a list of names, got {typed_repr(adapter)}")
    if len(adapter) != count:
        raise RequestError(f"adapter: expected one, or one for each of the {count} prompts, got {len(adapter)}")
    return list(adapter)


def as_priority(value: Any) -> int:
    """A priority, which messages between processes can hold.

    Raises:
        RequestError: it is another value.
    """
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_integer or not -(2**63) <= value < 2**63:
        raise RequestError(f"priority: expected an integer of 64 bits, lower is served first, got {short_repr(value)}")
    return int(value)


def as_request_ids(request_id: Any) -> list[str]:
    """One id, or several.

    Raises:
        RequestError: anything else.
    """
    ids = [request_id] if isinstance(request_id, str) or not isinstance(request_id, Iterable) else list(request_id)
    for one in ids:
        if not isinstance(one, str):
            raise RequestError(f"request_id: expected a text or a list of texts, got {typed_repr(one)}")
    return ids


def warn_of_refused(submissions: Seq[Submission]) -> None:
    """Say once how many prompts of a call were refused, and why: their answers look like empty texts."""
    reasons = Counter(str(s.failure) for s in submissions if isinstance(s.failure, RequestError))
    if reasons:
        shown_reasons = "; ".join(f"{count} × {reason}" for reason, count in reasons.most_common(_REASONS_SHOWN))
        others = f"; and {len(reasons) - _REASONS_SHOWN} other reasons" if len(reasons) > _REASONS_SHOWN else ""
        logger.warning(
            "%d of %d prompts were refused (finish_reason 'error', see error): %s%s",
            reasons.total(),
            len(submissions),
            shown_reasons,
            others,
        )
