"""Reads prompts: a text, token ids, vLLM's dict of either, a MediaPrompt or a conversation become token ids.

Texts are tokenized, images prepared, conversations rendered, and all ids checked against the vocabulary. A prompt
that is refused carries the reason. Its parameters are requests.py's matter. Runs on the caller's thread.
"""

from __future__ import annotations

import numbers
import struct
from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Seq
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from mllm_compile.engine.decoder_prompts import DecoderPrompts
from mllm_compile.errors import MllmError, RequestError
from mllm_compile.media.file_sources import SourceItem
from mllm_compile.media.messages import has_media, take_media
from mllm_compile.media.prompt import MediaPrompt
from mllm_compile.media.sources import read_items
from mllm_compile.runtime.media.request import RequestMedia
from mllm_compile.runtime.media.tiles import TileTower
from mllm_compile.runtime.media.tower import Tower
from mllm_compile.runtime.schedule.request import ids_of
from mllm_compile.runtime.short_repr import short_repr, typed_repr
from mllm_compile.runtime.sources.images import SeenImages
from mllm_compile.runtime.sources.request import RequestSource
from mllm_compile.text.detokenizer import Decoder
from mllm_compile.text.template_protocol import MAX_CHARACTERS


class TokenArray(Protocol):
    """A numpy array, or a tensor of torch's, of token ids."""

    @property
    def ndim(self) -> int: ...

    def tolist(self) -> Any: ...


Prompt = str | Seq[int] | TokenArray | Mapping[str, Any] | MediaPrompt
Prompts = Prompt | Seq[Prompt]
Message = Mapping[str, Any]

_PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt", "multi_modal_data")


class PromptTokenizer(Decoder, Protocol):
    """The methods of a tokenizer that the engine calls; mllm_compile.text.tokenizer.Tokenizer has them."""

    @property
    def splits_special_tokens(self) -> bool: ...

    @property
    def has_chat_template(self) -> bool: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def encode_batch(self, texts: Seq[str], add_special_tokens: bool = True) -> list[list[int]]: ...

    def apply_chat_template(self, messages: Seq[Message], /, **options: Any) -> str: ...

    def encode_chat(self, text: str, add_special_tokens: bool = False) -> list[int]: ...

    def shown_chat(self, text: str) -> str: ...


class MediaSource(Protocol):
    """Prepares prompts with images; mllm_compile.media.preprocessor.MediaPreprocessor does.

    Attributes:
        why_not: the reason why the runtime takes none; None: it does.
        domains: hosts that images are fetched from.
        placeholders: the tokens that stand for items of prompts; none where it takes none.
    """

    why_not: str | None

    @property
    def domains(self) -> AbstractSet[str]: ...

    @property
    def placeholders(self) -> Collection[int]: ...

    def check(self) -> None:
        """
        Raises:
            RequestError: the engine takes no images.
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
            RequestError: an image or the prompt is refused.
            MllmError: the system gives no process, or no memory.
        """


@dataclass(slots=True)
class Prepared:
    """A prompt on its way to a Submission: token ids, or the reason why it has none.

    Attributes:
        ids: token_ids as requests have them, once these are known to be the model's.
        decoder_ids: what the decoder begins with, of an encoder-decoder, whose encoder reads token_ids, or `source`.
        source: a sound that it reads, or images that layers of another model attend to.
    """

    text: str | None = None
    token_ids: list[int] | None = None
    ids: np.ndarray | None = None
    error: MllmError | None = None
    cache_salt: str | None = None
    media: RequestMedia | None = None
    decoder_ids: list[int] | None = None
    source: RequestSource | None = None


class PromptReader:
    """Reads prompts for one engine; thread-safe.

    Args:
        tokenizer: None when the model has none; prompts are token ids then.
        vocab_size: rows of the model's embedding.
        media: prepares prompts with images; None: they are refused.
        tower: what prompts with images are checked with; a text: why they are refused.
        decoder: of an encoder-decoder, the decoder's side of prompts; None: it is another model.
    """

    def __init__(
        self,
        tokenizer: PromptTokenizer | None,
        vocab_size: int,
        media: MediaSource | None,
        tower: Tower | str,
        decoder: DecoderPrompts | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size if decoder is None else decoder.source.vocab_size
        # Of images that layers attend to a placeholder may be behind all that the head gives. A front has no tower.
        known: Collection[int] = tower.placeholders if isinstance(tower, TileTower) else ()
        if isinstance(tower, str) and media is not None:
            known = media.placeholders
        self._vocab_size = max([self._vocab_size, *(token_id + 1 for token_id in known)])
        self._decoder = decoder
        self._media = media
        self._tower = tower

    def read(self, items: Seq[Any]) -> list[Prepared]:
        """The token ids of every prompt; texts are tokenized together, on several threads."""
        prepare = self._prepare_one if self._decoder is None else partial(self._prepare_both, self._decoder)
        prepared = [prepare(item) for item in items]
        texts = [p for p in prepared if p.text is not None and p.token_ids is None and p.error is None]
        if texts and self._tokenizer is not None:
            self._encode(self._tokenizer, texts)
        return prepared

    def renderer(self, template_options: Mapping[str, Any]) -> Callable[[Seq[Message]], Prepared]:
        """A function that makes a prompt of a conversation, by the chat template with these options.

        Raises:
            RequestError: there is no tokenizer.
        """
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise RequestError("the model has no tokenizer, so no chat template; give prompts as token ids")

        def render(messages: Seq[Message]) -> Prepared:
            text = None
            try:
                if has_media(messages):
                    self._check_media()
                messages, items = take_media(messages, local_paths=True)
                text = tokenizer.apply_chat_template(messages, **template_options)
                if items:
                    return self._with_images(text, items, False)
                fault = _text_fault(text)
                if fault is not None:
                    return Prepared(text, error=fault)
                # The template has written out all special tokens.
                token_ids = tokenizer.encode_chat(text)
            except RequestError as error:
                return Prepared(text, error=error)
            prepared = Prepared(tokenizer.shown_chat(text))
            self._take_ids(prepared, token_ids)
            prepared.error = prepared.error or self._place_fault(token_ids)
            return prepared

        return render

    def _encode(self, tokenizer: PromptTokenizer, texts: list[Prepared]) -> None:
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
            self._take_ids(p, token_ids)
            p.error = p.error or self._place_fault(token_ids)

    def _prepare_both(self, decoder: DecoderPrompts, item: Any) -> Prepared:
        """The prompt of an encoder, and what its decoder begins with."""
        try:
            if decoder.source.is_sound:
                source, ids = decoder.split_sound(item)
                salt = item.get("cache_salt")
                if (fault := _salt_fault(salt)) is not None:
                    return Prepared(error=RequestError(fault))
                return Prepared(None, ids, ids_of(ids), cache_salt=salt, decoder_ids=ids, source=source)
            item, decoder_ids = decoder.split(item)
        except RequestError as error:
            return Prepared(error=error)
        prepared = self._prepare_one(item)
        prepared.decoder_ids = decoder_ids
        most = decoder.source.max_length
        if prepared.error is None and len(prepared.token_ids or ()) > most:
            prepared.error = RequestError(
                f"the prompt has {len(prepared.token_ids or ())} tokens; the encoder reads at most {most}. Shorten it."
            )
        return prepared

    def _prepare_one(self, item: Any) -> Prepared:
        if isinstance(item, MediaPrompt):
            return self._prepare_media(item)
        if isinstance(item, Mapping):
            return self._prepare_dict(item)
        return self._prepare_text(item) if isinstance(item, str) else self._prepare_ids(item)

    def _prepare_dict(self, item: Mapping[str, Any]) -> Prepared:
        """vLLM's TextPrompt or TokensPrompt; of one with both the model sees the token ids."""
        given = {key: value for key, value in item.items() if value is not None}
        text, token_ids, salt, media = (given.get(key) for key in _PROMPT_KEYS)
        unknown = next((key for key in given if key not in _PROMPT_KEYS), None)
        if unknown is not None:
            fault = f"a prompt's keys are {', '.join(_PROMPT_KEYS)}, got {short_repr(unknown)}."
        elif text is None and token_ids is None:
            fault = f"a prompt's dict has prompt or prompt_token_ids, got {typed_repr(item)}"
        elif text is not None and not isinstance(text, str | MediaPrompt):
            fault = f"the prompt of a prompt's dict is a text, got {typed_repr(text)}"
        elif (salt_fault := _salt_fault(salt)) is not None:
            fault = salt_fault
        elif media is not None and isinstance(text, MediaPrompt):
            fault = "the prompt has its images already; got multi_modal_data beside it"
        else:
            prepared = self._prepare_given(text, token_ids, media)
            prepared.cache_salt = salt
            return prepared
        return Prepared(error=RequestError(fault))

    def _prepare_given(self, text: str | MediaPrompt | None, token_ids: Any, media: Any) -> Prepared:
        if isinstance(text, MediaPrompt):
            return self._prepare_media(text)
        prepared = self._prepare_text(text or "") if token_ids is None else self._prepare_ids(token_ids)
        prepared.text = text
        has_none = media is None or (isinstance(media, Mapping) and not media)
        if has_none or prepared.error is not None:
            return prepared
        if token_ids is None and self._tokenizer is not None and self._tokenizer.splits_special_tokens:
            fault = (
                "a text with images has no places for them where model.split_special_tokens is on. Give messages "
                "(Engine.chat), or token ids."
            )
            return Prepared(text, error=RequestError(fault))
        try:
            self._check_media()
            items = read_items(media, local_paths=True)
        except RequestError as error:
            return Prepared(text, error=error)
        return self._with_images(text, items, True, prepared.token_ids) if items else prepared

    def _with_images(
        self, text: str | None, items: Seq[SourceItem], adds_special_tokens: bool, token_ids: list[int] | None = None
    ) -> Prepared:
        """The prompt of a text with placeholders, or of token ids where there are some."""
        fault = _text_fault(text or "")
        if fault is not None:
            return Prepared(text, error=fault)
        prompt = (text or "") if token_ids is None else token_ids
        try:
            prepared = self._prepare_media(self._check_media().prepare(prompt, items, adds_special_tokens))
        except MllmError as error:
            return Prepared(text, error=error)
        prepared.text = text if self._tokenizer is None or text is None else self._tokenizer.shown_chat(text)
        return prepared

    def _check_media(self) -> MediaSource:
        """
        Raises:
            RequestError: no images are taken.
        """
        if self._media is None:
            raise RequestError("this engine takes text alone. Leave images out, or serve a vision-language model.")
        self._media.check()
        return self._media

    def _prepare_media(self, prompt: MediaPrompt) -> Prepared:
        if isinstance(self._tower, str):
            fault = f"the prompt has {len(prompt.items)} images, and {self._tower}. Send text, or serve another model."
            return Prepared(error=RequestError(fault))
        prepared = self._prepare_ids(prompt.prompt_token_ids)
        if prepared.error is not None:
            return prepared
        items = [(item.start, item.length, item.digest, item.tensors) for item in prompt.items]
        try:
            media = RequestMedia.of(self._tower, prepared.token_ids or [], prompt.is_feature, items)
            if isinstance(self._tower, TileTower):
                prepared.source = RequestSource.of_images(SeenImages.of_request(self._tower, media))
            else:
                prepared.media = media
        except RequestError as error:
            prepared.error = error
        return prepared

    def _prepare_text(self, text: str) -> Prepared:
        if self._tokenizer is None:
            return Prepared(text, error=RequestError("the model has no tokenizer; give the prompt as token ids"))
        if not text:
            return Prepared(text, error=RequestError("the prompt is an empty text; expected at least one character"))
        return Prepared(text, error=_text_fault(text))

    def _prepare_ids(self, item: Any) -> Prepared:
        item = _plain(item)
        if not isinstance(item, Seq) or isinstance(item, (bytes, bytearray)):
            return Prepared(error=RequestError(f"a prompt is a text or a list of token ids, got {typed_repr(item)}"))
        kinds = set(map(type, item))  # far fewer than tokens: asking each token takes 20 ms of a 65,536-token batch
        wrong = {kind for kind in kinds if kind is bool or not issubclass(kind, numbers.Integral)}
        if wrong:
            first = next(t for t in item if type(t) in wrong)
            return Prepared(
                error=RequestError(f"a prompt's token ids are integers, got {typed_repr(first)} among them")
            )
        prepared = Prepared()
        self._take_ids(prepared, list(item) if kinds == {int} else [int(t) for t in item])
        return prepared

    def _take_ids(self, prepared: Prepared, token_ids: list[int]) -> None:
        """Give a prompt its token ids, and the reason why it is refused if some are not the model's.

        As an array they are made here, and searched as one: a first token waits for both, and the engine's thread has
        all requests to serve.
        """
        prepared.token_ids = token_ids
        try:
            ids = ids_of(token_ids)
        except struct.error:  # one has more than 64 bits
            prepared.error = self._vocab_fault(token_ids)
            return
        if ids.size and ids.view(np.uint64).max() >= self._vocab_size:  # negative ones are the largest so
            prepared.error = self._vocab_fault(token_ids)
        else:
            prepared.ids = ids

    def _vocab_fault(self, token_ids: list[int]) -> RequestError:
        position = next(i for i, t in enumerate(token_ids) if not 0 <= t < self._vocab_size)
        return RequestError(
            f"the prompt's token {position} is {short_repr(token_ids[position])}; expected ids from 0 to "
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


def _salt_fault(salt: Any) -> str | None:
    if salt is None or (isinstance(salt, str) and salt):
        return None
    return f"a prompt's cache_salt is a text that is not empty, got {typed_repr(salt)}"


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


def _plain(value: Any) -> Any:
    """The list that an array or a tensor holds; all else as it is."""
    is_array = hasattr(value, "tolist") and isinstance(getattr(value, "ndim", None), int)
    return value.tolist() if is_array and not isinstance(value, Seq) else value


def is_single_prompt(prompts: object) -> bool:
    """One text, one list or array of token ids, one dict of either, or one MediaPrompt."""
    prompts = _plain(prompts)
    if isinstance(prompts, (str, Mapping, MediaPrompt)):
        return True
    return isinstance(prompts, Seq) and bool(prompts) and isinstance(prompts[0], numbers.Integral)


def as_prompt_list(prompts: Any) -> list[Any]:
    """The prompts one by one: a text, a list of token ids, a dict of either or a MediaPrompt is one prompt.

    Raises:
        RequestError: neither a prompt nor a list.
    """
    prompts = _plain(prompts)  # an array of two dimensions is a list of prompts
    if is_single_prompt(prompts):
        return [prompts]
    if isinstance(prompts, Seq) and not isinstance(prompts, (bytes, bytearray)):
        return list(prompts)
    raise RequestError(
        "prompts: expected a text, a list of token ids, a dict of either, or a list of such, got "
        f"{typed_repr(prompts)}."
    )
