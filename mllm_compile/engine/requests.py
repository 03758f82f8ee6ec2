"""Turns a caller's input into Submissions, or refuses it and says what is wrong; runs on the caller's thread.

A prompt is a text, token ids, vLLM's dict of either, or a MediaPrompt. This module splits a list of prompts, tokenizes
texts, has pictures prepared, and checks each prompt against the vocabulary. The scheduler refuses a prompt that could
never fit the KV cache, also before it is queued.
"""

from __future__ import annotations

import itertools
import logging
import numbers
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Protocol

from mllm_compile.engine.sequences import Submission
from mllm_compile.errors import MllmError, RequestError
from mllm_compile.media.inputs import MediaPrompt
from mllm_compile.media.messages import has_media, take_media
from mllm_compile.media.sources import SourceItem, read_items
from mllm_compile.runtime.media.request import RequestMedia
from mllm_compile.runtime.media.tower import Tower
from mllm_compile.runtime.sampling.grammar import Grammar
from mllm_compile.runtime.sampling.params import MAX_BAD_WORD_TOKENS, SamplingParams
from mllm_compile.runtime.sampling.structured_params import StructuredOutputsParams
from mllm_compile.runtime.shown import brief, shown
from mllm_compile.text.chat_template import as_conversations
from mllm_compile.text.detokenizer import Decoder
from mllm_compile.text.template_protocol import MAX_CHARACTERS

Prompt = str | Seq[int] | Mapping[str, Any] | MediaPrompt
Prompts = Prompt | Seq[Prompt]
Message = Mapping[str, Any]
Phrases = tuple[tuple[int, ...], ...]

logger = logging.getLogger("mllm_compile.engine")

# Prompts of a call that are handed over before the others are looked at. They are two steps, if they are short: the
# second one is planned while the first runs.
FIRST_PART = 128
_REASONS_SHOWN = 3
_PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt", "multi_modal_data")


class PromptTokenizer(Decoder, Protocol):
    """The methods of a tokenizer that the engine calls; mllm_compile.text.tokenizer.Tokenizer has them."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def encode_batch(self, texts: Seq[str], add_special_tokens: bool = True) -> list[list[int]]: ...

    def apply_chat_template(self, messages: Seq[Message], **options: Any) -> str: ...


class GrammarSource(Protocol):
    """Compiles forms of answers; mllm_compile.structured.grammars.Grammars does."""

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """
        Raises:
            RequestError: it is refused.
            MllmError: a library for it is missing, or fails.
        """


class MediaSource(Protocol):
    """Prepares prompts with pictures; mllm_compile.media.door.MediaDoor does.

    Attributes:
        why_not: the reason why the runtime takes none; None: it does.
        domains: hosts that pictures are fetched from.
    """

    why_not: str | None

    @property
    def domains(self) -> AbstractSet[str]: ...

    def check(self) -> None:
        """
        Raises:
            RequestError: the engine takes no pictures.
        """

    def check_text(self, token_ids: Seq[int]) -> None:
        """
        Raises:
            RequestError: a text without images has places for some.
        """

    def prepare(self, prompt: str | Seq[int], items: Seq[SourceItem], adds_special_tokens: bool) -> MediaPrompt:
        """
        Args:
            prompt: a text, or token ids, with placeholders.

        Raises:
            RequestError: a picture or the prompt is refused.
            MllmError: the system gives no process, or no memory.
        """


@dataclass(slots=True)
class _Prepared:
    """A prompt on its way to a Submission: token ids, or the reason why it has none."""

    text: str | None = None
    token_ids: list[int] | None = None
    error: MllmError | None = None
    cache_salt: str | None = None
    media: RequestMedia | None = None


class RequestBuilder:
    """Makes Submissions for one engine; thread-safe. `grammars` is as it was given.

    Args:
        tokenizer: None when the model has none; prompts are token ids then and answers have no text.
        vocab_size: rows of the model's embedding.
        eos_token_ids: ids that end a completion.
        default_params: for callers that pass none.
        grammars: compiles structured_outputs; None: they are refused.
        media: prepares prompts with pictures; None: they are refused.
        tower: what prompts with images are checked with; a text: why they are refused.
    """

    def __init__(
        self,
        *,
        tokenizer: PromptTokenizer | None,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        default_params: SamplingParams,
        grammars: GrammarSource | None = None,
        media: MediaSource | None = None,
        tower: Tower | str = "the model takes text alone",
    ) -> None:
        self._tokenizer = tokenizer
        self.grammars = grammars
        self._media = media
        self._tower = tower
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._default_params = default_params
        self._last_phrases: tuple[tuple[str, ...], Phrases] = ((), ())  # the last bad_words that came
        # Ids that are made up; a caller's own id is unlike them.
        self._prefix, self._numbers = f"req-{secrets.token_hex(4)}", itertools.count()

    def build(
        self, prompts: Prompts, params: SamplingParams | Seq[SamplingParams] | None, priority: int = 0
    ) -> Iterator[list[Submission]]:
        """One Submission a prompt, in order. A prompt that is refused carries its reason in `failure`.

        They come in parts, the first of which can be computed while the others are made.

        Raises:
            RequestError: `prompts` or `params` as a whole are not what is expected; before the first part.
        """
        items = as_prompt_list(prompts)
        each = self._params_of_each(params, len(items))
        for part in (slice(0, FIRST_PART), slice(FIRST_PART, None)):
            if items[part] or part.start == 0:
                yield self._submissions(self._prepare(items[part]), each[part], priority)

    def build_chats(
        self,
        messages: Seq[Message] | Seq[Seq[Message]],
        params: SamplingParams | Seq[SamplingParams] | None,
        template_options: Mapping[str, Any],
        priority: int = 0,
    ) -> tuple[list[Submission], bool]:
        """Like build, for conversations through the chat template; also whether it is one, not a list.

        Raises:
            RequestError: `messages` or `params` as a whole are not what is expected, or there is no tokenizer.
        """
        conversations, is_single = as_conversations(messages)
        each = self._params_of_each(params, len(conversations))
        render = self._chat_renderer(template_options)
        return self._submissions([render(one) for one in conversations], each, priority), is_single

    def build_one(
        self, prompt: Prompt, params: SamplingParams | None, *, request_id: str | None = None, priority: int = 0
    ) -> Submission:
        """The Submission of a single prompt.

        Raises:
            RequestError: it is refused.
        """
        if not is_single_prompt(prompt):
            raise RequestError(f"prompt: expected one text, list of token ids or dict of such, got {brief(prompt)}")
        return self._one(self._prepare([prompt])[0], params, request_id, priority)

    def check(self, prompts: Seq[Prompt], params: SamplingParams) -> list[list[int] | MllmError]:
        """Token ids of each prompt, or the reason why `build` would refuse it; structured_outputs are not compiled.

        Raises:
            RequestError: `params` are not what is expected.
        """
        self._params_of_each(params, len(prompts))
        found: list[list[int] | MllmError] = []
        for prepared in self._prepare(prompts):
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
    ) -> Submission:
        """The Submission of a single conversation.

        Raises:
            RequestError: it is refused.
        """
        return self._one(self._chat_renderer(template_options)(messages), params, request_id, priority)

    def _one(
        self, prepared: _Prepared, params: SamplingParams | None, request_id: str | None, priority: int
    ) -> Submission:
        if request_id is not None and (not isinstance(request_id, str) or not request_id):
            raise RequestError(f"request_id: expected a text that is not empty, got {shown(request_id)}")
        each = self._params_of_each(params, 1)
        submission = self._submissions([prepared], each, priority, request_id)[0]
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
            raise RequestError(f"sampling_params: expected SamplingParams or a list of them, got {brief(params)}")
        if len(params) != count:
            raise RequestError(
                f"sampling_params: expected one, or one for each of the {count} prompts, got {len(params)}"
            )
        return list(params)

    def _submissions(
        self, prepared: list[_Prepared], params: list[SamplingParams], priority: int, request_id: str | None = None
    ) -> list[Submission]:
        if isinstance(priority, bool) or not isinstance(priority, numbers.Integral):
            raise RequestError(f"priority: expected an integer, lower is served first, got {shown(priority)}")
        return [self._submission(p, one, int(priority), request_id) for p, one in zip(prepared, params, strict=True)]

    def _submission(
        self, prepared: _Prepared, params: SamplingParams, priority: int, request_id: str | None
    ) -> Submission:
        def make(decoder: Decoder | None) -> Submission:
            return Submission(
                f"{self._prefix}-{next(self._numbers)}" if request_id is None else request_id,
                prepared.text,
                prepared.token_ids or [],
                params,
                eos_token_ids=self._eos_token_ids,
                priority=priority,
                decoder=decoder,
                bad_phrases=phrases,
                cache_salt=prepared.cache_salt,
                grammar=grammar,
                media=prepared.media,
            )

        phrases, error = self._refusal(prepared, params)
        grammar = None
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

    def _refusal(self, prepared: _Prepared, params: SamplingParams) -> tuple[Phrases, MllmError | None]:
        """The tokens of params.bad_words, and the reason why this prompt with these parameters is refused, if it is."""
        phrases, fault_of_words = self._bad_phrases(params)
        return phrases, prepared.error or fault_of_words or self._fault(prepared.token_ids or [], params)

    def _fault(self, token_ids: list[int], params: SamplingParams) -> RequestError | None:
        """The reason why these token ids with these parameters cannot be served, None when they can."""
        if not token_ids:
            return RequestError("the prompt is empty; a request needs at least one token to compute")
        if params.stop and self._tokenizer is None:
            return RequestError("stop: the model has no tokenizer, so there is no text to stop at. Use stop_token_ids.")
        try:
            params.check_vocab(self._vocab_size)
        except RequestError as error:
            return error
        stop_ids = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else self._eos_token_ids)}
        if params.min_tokens and params.allowed_token_ids and stop_ids.issuperset(params.allowed_token_ids):
            return RequestError(
                "allowed_token_ids: expected a token that does not end the answer beside min_tokens, got "
                f"{shown(params.allowed_token_ids)}. Allow others, or set min_tokens to 0."
            )
        return None

    def _grammar(self, params: StructuredOutputsParams) -> Grammar:
        if self.grammars is None:
            raise RequestError("structured_outputs: the model has no tokenizer, so its tokens have no text to check.")
        return self.grammars.compile(params)

    def _bad_phrases(self, params: SamplingParams) -> tuple[Phrases, RequestError | None]:
        """The tokens of params.bad_words, or why there are none; kept for the next prompt with the same."""
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

    def _prepare(self, items: Seq[Any]) -> list[_Prepared]:
        """Token ids of every prompt; texts are tokenized together, on several threads."""
        prepared = [self._prepare_one(item) for item in items]
        texts = [p for p in prepared if p.text is not None and p.token_ids is None and p.error is None]
        if texts and self._tokenizer is not None:
            self._encode(self._tokenizer, texts)
        return prepared

    def _encode(self, tokenizer: PromptTokenizer, texts: list[_Prepared]) -> None:
        try:
            encoded = tokenizer.encode_batch([p.text or "" for p in texts])
        except RequestError as error:
            if len(texts) == 1:
                texts[0].error = error
            else:  # which of them it is, is found one by one
                for p in texts:
                    self._encode(tokenizer, [p])
            return
        for p, token_ids in zip(texts, encoded, strict=True):
            p.token_ids = token_ids
            p.error = self._vocab_fault(token_ids) or self._place_fault(token_ids)

    def _prepare_one(self, item: Any) -> _Prepared:
        if isinstance(item, MediaPrompt):
            return self._prepare_media(item)
        if isinstance(item, Mapping):
            return self._prepare_dict(item)
        return self._prepare_text(item) if isinstance(item, str) else self._prepare_ids(item)

    def _prepare_dict(self, item: Mapping[str, Any]) -> _Prepared:
        """vLLM's TextPrompt or TokensPrompt; of one with both the model sees the token ids."""
        given = {key: value for key, value in item.items() if value is not None}
        text, token_ids, salt, media = (given.get(key) for key in _PROMPT_KEYS)
        unknown = next((key for key in given if key not in _PROMPT_KEYS), None)
        if unknown is not None:
            fault = f"a prompt's keys are {', '.join(_PROMPT_KEYS)}, got {shown(unknown)}."
        elif text is None and token_ids is None:
            fault = f"a prompt's dict has prompt or prompt_token_ids, got {brief(item)}"
        elif text is not None and not isinstance(text, str | MediaPrompt):
            fault = f"the prompt of a prompt's dict is a text, got {brief(text)}"
        elif salt is not None and (not isinstance(salt, str) or not salt):
            fault = f"a prompt's cache_salt is a text that is not empty, got {brief(salt)}"
        elif media is not None and isinstance(text, MediaPrompt):
            fault = "the prompt has its images already; got multi_modal_data beside it"
        else:
            prepared = self._prepare_given(text, token_ids, media)
            prepared.cache_salt = salt
            return prepared
        return _Prepared(error=RequestError(fault))

    def _prepare_given(self, text: str | MediaPrompt | None, token_ids: Any, media: Any) -> _Prepared:
        if isinstance(text, MediaPrompt):
            return self._prepare_media(text)
        prepared = self._prepare_text(text or "") if token_ids is None else self._prepare_ids(token_ids)
        prepared.text = text
        has_none = media is None or (isinstance(media, Mapping) and not media)
        if has_none or prepared.error is not None:
            return prepared
        try:
            self._check_media()
            items = read_items(media, local_paths=True)
        except RequestError as error:
            return _Prepared(text, error=error)
        return self._with_pictures(text, items, True, prepared.token_ids) if items else prepared

    def _with_pictures(
        self, text: str | None, items: Seq[SourceItem], adds_special_tokens: bool, token_ids: list[int] | None = None
    ) -> _Prepared:
        """The prompt of a text with placeholders, or of token ids where there are some."""
        fault = _text_fault(text or "")
        if fault is not None:
            return _Prepared(text, error=fault)
        prompt = (text or "") if token_ids is None else token_ids
        try:
            prepared = self._prepare_media(self._check_media().prepare(prompt, items, adds_special_tokens))
        except MllmError as error:
            return _Prepared(text, error=error)
        prepared.text = text
        return prepared

    def _check_media(self) -> MediaSource:
        """
        Raises:
            RequestError: no pictures are taken.
        """
        if self._media is None:
            raise RequestError("this engine takes text alone. Leave images out, or serve a vision-language model.")
        self._media.check()
        return self._media

    def _prepare_media(self, prompt: MediaPrompt) -> _Prepared:
        prepared = self._prepare_ids(prompt.prompt_token_ids)
        if prepared.error is not None:
            return prepared
        if isinstance(self._tower, str):
            fault = f"the prompt has {len(prompt.items)} images, and {self._tower}. Send text, or serve another model."
            return _Prepared(error=RequestError(fault))
        items = [(item.start, item.length, item.digest, item.tensors) for item in prompt.items]
        try:
            prepared.media = RequestMedia.of(self._tower, prepared.token_ids or [], prompt.is_feature, items)
        except RequestError as error:
            prepared.error = error
        return prepared

    def _prepare_text(self, text: str) -> _Prepared:
        if self._tokenizer is None:
            return _Prepared(text, error=RequestError("the model has no tokenizer; give the prompt as token ids"))
        if not text:
            return _Prepared(text, error=RequestError("the prompt is an empty text; expected at least one character"))
        return _Prepared(text, error=_text_fault(text))

    def _prepare_ids(self, item: Any) -> _Prepared:
        if not isinstance(item, Seq) or isinstance(item, (bytes, bytearray)):
            return _Prepared(error=RequestError(f"a prompt is a text or a list of token ids, got {brief(item)}"))
        kinds = set(map(type, item))  # far fewer than tokens: asking each token takes 20 ms of a 65,536-token batch
        wrong = {kind for kind in kinds if kind is bool or not issubclass(kind, numbers.Integral)}
        if wrong:
            first = next(t for t in item if type(t) in wrong)
            return _Prepared(error=RequestError(f"a prompt's token ids are integers, got {brief(first)} among them"))
        token_ids = list(item) if kinds == {int} else [int(t) for t in item]
        return _Prepared(None, token_ids, self._vocab_fault(token_ids))

    def _vocab_fault(self, token_ids: list[int]) -> RequestError | None:
        if not token_ids or (min(token_ids) >= 0 and max(token_ids) < self._vocab_size):
            return None
        position = next(i for i, t in enumerate(token_ids) if not 0 <= t < self._vocab_size)
        return RequestError(
            f"the prompt's token {position} is {shown(token_ids[position])}; expected ids from 0 to "
            f"{self._vocab_size - 1}, the model's vocabulary. Take ids from the model's own tokenizer."
        )

    def _place_fault(self, token_ids: list[int]) -> RequestError | None:
        """The reason why a text that comes without images is refused; prompts of token ids are taken as they are."""
        if self._media is not None:
            try:
                self._media.check_text(token_ids)
            except RequestError as error:
                return error
        return None

    def _chat_renderer(self, template_options: Mapping[str, Any]) -> Callable[[Seq[Message]], _Prepared]:
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise RequestError("the model has no tokenizer, so no chat template; give prompts as token ids")

        def render(messages: Seq[Message]) -> _Prepared:
            text = None
            try:
                if has_media(messages):
                    self._check_media()
                messages, items = take_media(messages, local_paths=True)
                text = tokenizer.apply_chat_template(messages, **template_options)
                if items:
                    return self._with_pictures(text, items, False)
                fault = _text_fault(text)
                if fault is not None:
                    return _Prepared(text, error=fault)
                # The template has written out all special tokens.
                token_ids = tokenizer.encode(text, add_special_tokens=False)
            except RequestError as error:
                return _Prepared(text, error=error)
            return _Prepared(text, token_ids, self._vocab_fault(token_ids) or self._place_fault(token_ids))

        return render


def _text_fault(text: str) -> RequestError | None:
    """The reason why a text is not tokenized; None where it is."""
    if len(text) > MAX_CHARACTERS:
        return RequestError(
            f"the prompt has {len(text):,} characters; expected at most {MAX_CHARACTERS:,}. "
            "Give token ids, or a shorter text."
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return RequestError(f"the prompt is no valid Unicode text ({error}). Give text that was read as UTF-8.")
    return None


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
            raise RequestError(f"{expected}, got {len(plain)} of {shown(word)}.")
        phrases[plain] = None
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            phrases[spaced] = None
    return tuple(phrase for phrase in phrases if max(phrase) < vocab_size)


def as_request_ids(request_id: Any) -> list[str]:
    """One id, or several.

    Raises:
        RequestError: anything else.
    """
    ids = [request_id] if isinstance(request_id, str) or not isinstance(request_id, Iterable) else list(request_id)
    for one in ids:
        if not isinstance(one, str):
            raise RequestError(f"request_id: expected a text or a list of texts, got {brief(one)}")
    return ids


def is_single_prompt(prompts: object) -> bool:
    """One text, one list of token ids, one dict of either, or one MediaPrompt."""
    if isinstance(prompts, (str, Mapping, MediaPrompt)):
        return True
    return isinstance(prompts, Seq) and bool(prompts) and isinstance(prompts[0], numbers.Integral)


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


def as_prompt_list(prompts: Any) -> list[Any]:
    """The prompts one by one: a text, a list of token ids, a dict of either or a MediaPrompt is one prompt.

    Raises:
        RequestError: neither a prompt nor a list.
    """
    if is_single_prompt(prompts):
        return [prompts]
    if isinstance(prompts, Seq) and not isinstance(prompts, (bytes, bytearray)):
        return list(prompts)
    hint = " Call its tolist()." if hasattr(prompts, "tolist") else ""
    raise RequestError(
        f"prompts: expected a text, a list of token ids, a dict of either, or a list of such, "
        f"got {brief(prompts)}.{hint}"
    )
