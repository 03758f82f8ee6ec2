"""The way of images and sounds into an engine: what a caller gives becomes a MediaPrompt, or is refused."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from importlib.util import find_spec

from mllm_compile.errors import RequestError
from mllm_compile.files.served_part import served_part
from mllm_compile.media.fetch import fetched
from mllm_compile.media.file_sources import SourceItem
from mllm_compile.media.files import CONFIG_FILE, PROCESSOR_FILES, placeholder_of
from mllm_compile.media.prompt import KINDS, NOUNS, MediaKind, MediaPrompt
from mllm_compile.media.workers import MediaWorkers, SharedPrompt
from mllm_compile.runtime.files.json_data import parse_json


class MediaPreprocessor:
    """The preprocessor of one model; from any thread. Nothing of it starts before the first image.

    Args:
        model: its name, for errors.
        files: name → bytes of the files of its tokenizer and processor, and its config.json.
        max_model_len: most tokens of a request.
        why_not: the reason why the runtime takes no images; None: it does.
        domains: hosts that images are fetched from.
    """

    def __init__(
        self,
        model: str,
        files: Mapping[str, bytes],
        max_model_len: int,
        why_not: str | None,
        domains: Collection[str] = (),
    ) -> None:
        self._model = model
        self._files = dict(files)
        self._max_model_len = max_model_len
        self.why_not = why_not
        self.domains = frozenset(domains)
        self._lock = threading.Lock()
        self._workers: MediaWorkers | None = None

    @property
    def has_processor(self) -> bool:
        """True if the model's folder has a processor of images or sounds."""
        return CONFIG_FILE in self._files and any(name in self._files for name in PROCESSOR_FILES)

    def prepare(
        self, prompt: str | Sequence[int], items: Sequence[SourceItem], adds_special_tokens: bool
    ) -> MediaPrompt:
        """The prompt of a text, or of token ids, with placeholders and its items.

        Args:
            prompt: token ids have one placeholder an item, or one a feature.
            adds_special_tokens: to a text.

        Raises:
            RequestError: the model takes none, Pillow is missing, one of them is refused, or the prompt is too long.
            MllmError: the system gives no process, or no shared memory.
        """
        return self.prepare_shared(prompt, items, adds_special_tokens).take()

    def prepare_shared(
        self, prompt: str | Sequence[int], items: Sequence[SourceItem], adds_special_tokens: bool
    ) -> SharedPrompt:
        """Like prepare; the tensors stay in shared memory, for another process."""
        workers = self._open({item.kind for item in items})
        shared = workers.prepare(prompt, fetched(items, self.domains), adds_special_tokens)
        num_tokens = len(shared.is_feature)
        if num_tokens >= self._max_model_len:
            shared.remove()
            own = sum(item["length"] for item in shared.items)
            raise RequestError(
                f"the prompt has {num_tokens:,} tokens, {own:,} of them for {len(shared.items)} images, videos or "
                f"sounds, but the model's context is {self._max_model_len:,} tokens, the answer included. Give smaller "
                "or fewer of them, shorten the text, or serve the model with a larger runtime.max_model_len."
            )
        return shared

    def check(self) -> None:
        """
        Raises:
            RequestError: the model or its runtime takes no images.
        """
        if not self.has_processor:
            raise takes_text_alone(self._model)
        if self.why_not is not None:
            raise RequestError(f"{self._model}: {self.why_not}. Leave them out.")

    def check_text(self, token_ids: Sequence[int]) -> None:
        """
        Args:
            token_ids: of a text that comes without images.

        Raises:
            RequestError: some of them are placeholders of images.
        """
        for kind, token_id in self._kinds_of_placeholders.items():
            if token_id in token_ids:
                raise RequestError(
                    f"the prompt's text has the token {token_id}, which stands for {NOUNS[kind]}s, and none was given. "
                    f"Give as many {NOUNS[kind]}s as it has places, or leave these out."
                )

    @property
    def placeholders(self) -> Collection[int]:
        """The ids of tokens that stand for features or images; none of a model that takes none."""
        return self._kinds_of_placeholders.values()

    @cached_property
    def _kinds_of_placeholders(self) -> dict[MediaKind, int]:
        """Kind → the id of the token of its features; empty of a model that takes none."""
        if not self.has_processor or self.why_not is not None:
            return {}
        config = served_part(parse_json(self._files[CONFIG_FILE]))
        found = {kind: placeholder_of(config, kind) for kind in KINDS}
        return {kind: token_id for kind, token_id in found.items() if token_id is not None}

    def _open(self, kinds: Collection[MediaKind]) -> MediaWorkers:
        self.check()
        for kind in kinds:
            if kind != "video" and kind not in self._kinds_of_placeholders:  # frames may have images' token
                raise RequestError(
                    f"{self._model} takes no {NOUNS[kind]}s: its config.json names no token for them. Leave them out."
                )
        if {"image", "video"} & set(kinds):
            check_pillow()
        with self._lock:
            if self._workers is None:
                self._workers = MediaWorkers(self._files)
            return self._workers


def takes_text_alone(model: str) -> RequestError:
    return RequestError(
        f"{model} takes text alone: its folder has no processor of images or sounds "
        f"({' or '.join(PROCESSOR_FILES[:2])}). Leave them out, or serve a model that takes some."
    )


def check_pillow() -> None:
    """
    Raises:
        RequestError: Pillow is not installed.
    """
    if find_spec("PIL") is None:
        raise RequestError("images need Pillow, which is not installed. Run: pip install 'mllm-compile[images]'.")
