"""The fields of requests with sounds, by OpenAI's names; what is not served is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from mllm_compile.engine.speech.doubt import TEMPERATURES
from mllm_compile.engine.speech.transcripts import TranscriptForm
from mllm_compile.server.api.errors import bad_request
from mllm_compile.server.api.fields import CompletionFields, wrong_type
from mllm_compile.server.audio.form import KIND, Part, parts_of

Task = Literal["transcribe", "translate"]
_Sound = Annotated[Any, msgspec.Meta(extra_json_schema={"type": "string", "format": "binary"})]
_ONE_TEXT = "sounds become one text, by one model. Leave it out"
_REFUSED: Mapping[str, str] = {
    "include": "log-probabilities are told of segments: response_format verbose_json. Leave it out",
    "keywords": "use prompt, which has names as they are written",
    "languages": "use language, or none, which finds it",
    **dict.fromkeys(("known_speaker_names", "known_speaker_references"), "speakers are not told apart. Leave it out"),
    **dict.fromkeys(("n", "best_of", "beam_size", "num_beams"), _ONE_TEXT),
}


class AudioFields(msgspec.Struct, kw_only=True):
    """The fields of /v1/audio/transcriptions and /v1/audio/translations."""

    file: _Sound
    model: str | None = None
    language: str | None = None
    prompt: str | None = None
    response_format: TranscriptForm = "json"
    temperature: float | None = None  # none: several, of windows whose text is doubted
    stream: bool = False
    timestamp_granularities: list[Literal["segment", "word"]] = []
    chunking_strategy: Literal["auto"] | None = None  # long sounds are cut where they are quiet, unless `sequential`
    sequential: bool = False  # as Engine.transcribe's, and the next
    condition_on_previous_text: bool = False
    priority: int | None = None
    request_id: str | None = None
    user: str | None = None

    content_type: ClassVar[str] = KIND

    @property
    def shows_times(self) -> bool:
        """True if the answer shows when segments begin and end."""
        return self.response_format in ("srt", "vtt", "verbose_json")

    @property
    def has_times(self) -> bool:
        """True if the model is to mark them."""
        return self.shows_times or self.sequential

    @property
    def temperatures(self) -> tuple[float, ...]:
        """The temperatures that are tried one after another: the one that is given, or OpenAI's."""
        return TEMPERATURES if self.temperature is None else (self.temperature,)

    def of_prompts(self) -> SoundFields:
        """The fields that all requests have which generate."""
        return SoundFields(model=self.model, stream=self.stream, priority=self.priority, request_id=self.request_id)


class SoundFields(CompletionFields, kw_only=True):
    """The fields of a request whose prompts are windows of a sound."""

    subject: ClassVar[str] = "file"


def read_form(content_type: str | None, body: bytes) -> tuple[AudioFields, list[str]]:
    """The fields of a form, and the names in it that are unknown.

    Raises:
        ApiError: it is no form, lacks the file, or a field is refused.
    """
    given: dict[str, Any] = {}
    unknown = []
    for part in parts_of(content_type, body):
        name = part.name.removesuffix("[]")
        if name in _REFUSED:
            raise bad_request(f"{name}: {_REFUSED[name]}.", name, "unsupported_field")
        if name not in AudioFields.__struct_fields__:
            unknown.append(part.name)
        elif name == "timestamp_granularities":
            given.setdefault(name, []).append(part.text)
        elif name in given:
            raise bad_request(f"{name}: expected it once, got it twice", name)
        elif name == "file":
            given[name] = _file_of(part)
        elif text := part.text:  # an empty one says nothing
            given[name] = text
    try:
        fields = msgspec.convert(given, AudioFields, strict=False)
    except msgspec.ValidationError as error:
        raise wrong_type(error) from None
    _check(fields)
    return fields, unknown


def model_of(content_type: str | None, body: bytes) -> str | None:
    """The model that a form names.

    Raises:
        ApiError: it is no form.
    """
    return next((part.text or None for part in parts_of(content_type, body) if part.name == "model"), None)


def _file_of(part: Part) -> memoryview:
    if not part.is_file:
        raise bad_request("file: expected a part with a filename, got a text", "file")
    return part.data


def _check(fields: AudioFields) -> None:
    """
    Raises:
        ApiError: fields that do not go together.
    """
    if fields.temperature is not None and not 0 <= fields.temperature <= 1:
        raise bad_request(f"temperature: expected 0 to 1, got {fields.temperature:g}")
    if "word" in fields.timestamp_granularities:
        raise bad_request(
            "timestamp_granularities: expected segment, got word; times of words are not known",
            code="unsupported_field",
        )
    if fields.timestamp_granularities and fields.response_format != "verbose_json":
        raise bad_request(
            f"timestamp_granularities: expected it with response_format verbose_json, got {fields.response_format}"
        )
    if fields.condition_on_previous_text and not fields.sequential:
        raise bad_request("condition_on_previous_text: it is of windows one after another. Set sequential too")
    if fields.sequential and fields.stream:
        raise bad_request("stream: expected it without sequential, whose text comes whole. Leave one out")
    if fields.sequential and fields.chunking_strategy:
        raise bad_request("chunking_strategy: expected it without sequential, whose windows begin at times")
    if fields.stream and fields.shows_times:
        raise bad_request(f"stream: expected it with response_format json or text, got {fields.response_format}")
