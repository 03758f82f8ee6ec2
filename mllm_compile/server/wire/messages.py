"""The messages between the front and the engine's process, and their bytes.

Commands (front to engine) that come together are one frame, each event (engine to front) is one, both msgpack. A step
is the exception, as there are hundreds a second. It has rows of the running requests and their new tokens as raw int32,
and msgpack only for rare events (admissions to rows, ends, log-probabilities). Nothing is pickled.

A row identifies its request from the step of its admission until it moves to another row or ends.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from mllm_compile.errors import MllmError
from mllm_compile.kv_events.news import News
from mllm_compile.runtime.sampling.params import SamplingParams
from mllm_compile.runtime.sampling.structured_params import StructuredOutputsParams

StopReason = int | str | None
Alternatives = list[tuple[int, float]]  # (token id, log-probability), best first


class Media(msgspec.Struct, array_like=True):
    """The images of a prompt, as media.workers.SharedPrompt has them; the receiver removes the memory's name."""

    segment: str
    is_feature: bytes
    items: list[dict[str, Any]]


class Submit(msgspec.Struct, tag=1, array_like=True):
    """Starts a request. `key` is the front's number of it, `prompt` int32 token ids."""

    key: int
    request_id: str
    prompt: bytes
    params: dict[str, Any]
    priority: int
    cache_salt: str | None
    media: Media | None = None
    adapter: tuple[str, int] | None = None  # name and version
    session: tuple[str | None, str | None, bool] | None = None  # fields of a Session
    decoder_prompt: bytes | None = None  # int32 ids that a decoder begins with, whose encoder reads the prompt
    window: bytes | None = None  # float32 of a window of sound, which the encoder reads in the prompt's place


class Abort(msgspec.Struct, tag=2, array_like=True):
    """Ends a request."""

    key: int


class Close(msgspec.Struct, tag=3, array_like=True):
    """Ends the engine and its process."""


class LoadAdapter(msgspec.Struct, tag=4, array_like=True):
    """Loads an adapter; `AdaptersChanged` with the same key follows."""

    key: int
    name: str
    path: str
    replace: bool


class UnloadAdapter(msgspec.Struct, tag=5, array_like=True):
    """Takes an adapter's name back; likewise."""

    key: int
    name: str


class Control(msgspec.Struct, tag=7, array_like=True):
    """A call of rl/engine_calls.py; `Controlled` with the same key follows."""

    key: int
    name: str
    fields: dict[str, Any]


class AskSession(msgspec.Struct, tag=9, array_like=True):
    """Asks for a session's state, or ends it; `SessionTold` with the same key follows."""

    key: int
    name: str
    cache_salt: str | None
    ends: bool


class Pool(msgspec.Struct, tag=10, array_like=True):
    """Texts of a model that pools; `Pooled` with the same key follows.

    Attributes:
        lengths, ids, kinds, skipped: int32, of each text, of all tokens, likewise or empty, and of each text.
        params: PoolingParams.
    """

    key: int
    lengths: bytes
    ids: bytes
    kinds: bytes
    skipped: bytes
    params: dict[str, Any]
    priority: int


class AdapterCard(msgspec.Struct, array_like=True):
    """An adapter that requests can name."""

    name: str
    version: int
    folder: str
    digest: str = ""


class Begin(msgspec.Struct, tag=6, array_like=True):
    """The first command, ahead of the start."""

    adapters: list[AdapterCard] | None  # those of the engine before this one; None: those of the config
    shares_device: bool = False  # with engines of other models: it asks for memory by Needs, and waits for Grant


class Grant(msgspec.Struct, tag=8, array_like=True):
    """The engine may take the device's memory now, with this many tokens of KV cache."""

    kv_tokens: int


class Stage(msgspec.Struct, tag=1, array_like=True):
    """A stage of the start has begun."""

    name: str


class Hello(msgspec.Struct, tag=2, array_like=True, kw_only=True):
    """The engine is ready."""

    model: str  # as it was asked for in the config
    dtype: str
    device: str
    max_model_len: int
    max_running_requests: int
    kv_tokens: int
    page_size: int
    config: dict[str, Any]  # as it was resolved, without places; {} without one
    vocab_size: int
    eos_token_ids: list[int]
    default_params: dict[str, Any]
    tokenizer_files: dict[str, bytes]  # and the processor's; none: prompts are token ids
    why_no_media: str | None  # why images are refused
    media_domains: list[str]  # hosts that they are fetched from
    fingerprint: str  # of the runtime: the same texts come from the same one
    seconds: float  # of its start
    stages: list[tuple[str, float]]
    stats: dict[str, Any]  # as in Pulse
    adapters: list[AdapterCard] = []
    held_bytes: tuple[int, int] = (0, 0)  # of a shared device: for good, and given back while the engine sleeps
    pooling: dict[str, Any] | None = None  # of a model that pools: PoolingFacts, and whether it has dense layers
    encoder: dict[str, Any] | None = None  # of an encoder-decoder: DecoderPrompts.told


class Needs(msgspec.Struct, tag=8, array_like=True):
    """An engine that shares its device waits for Grant; fields as engine/device_share.py documents them."""

    device: str
    free_bytes: int
    usable_bytes: int
    kv_bytes: int
    process_bytes: int
    fixed_bytes: int
    token_bytes: int
    least_tokens: int
    most_tokens: int


class Failed(msgspec.Struct, tag=3, array_like=True):
    """The engine could not start, or is dead; its process ends."""

    message: str
    is_mistake: bool  # the user's: there is no use in another try


class Pulse(msgspec.Struct, tag=4, array_like=True):
    """The engine's thread has answered: its figures (EngineStats as a dict)."""

    stats: dict[str, Any]


class AdaptersChanged(msgspec.Struct, tag=5, array_like=True):
    """A load or an unload is over."""

    key: int
    adapters: list[AdapterCard]  # all, as they are now
    error: str | None = None
    error_kind: str = ""  # name of the MllmError


class Controlled(msgspec.Struct, tag=6, array_like=True):
    """A call is over."""

    key: int
    answer: Any
    error: str | None = None
    error_kind: str = ""  # name of the MllmError


class SessionTold(msgspec.Struct, tag=9, array_like=True):
    """The state of a session, before its end where it was to end; None: it is unknown."""

    key: int
    state: dict[str, Any] | None


class PagesChanged(msgspec.Struct, tag=7, array_like=True):
    """A rank's prefix cache has changed, for KV events."""

    rank: int
    news: list[News]


class Pooled(msgspec.Struct, tag=10, array_like=True):
    """The answers to texts: float32 of each shape, one after another."""

    key: int
    shapes: list[list[int]]
    data: bytes
    error: str | None = None
    error_kind: str = ""  # name of the MllmError


class Admitted(msgspec.Struct, array_like=True):
    """A completion got a row; again after a preemption. `scheduled` is time.monotonic(), which all processes share."""

    key: int
    index: int
    row: int
    num_cached_tokens: int
    scheduled: float
    host_tokens: int = 0  # of the cached ones those from the host's memory
    disk_tokens: int = 0  # likewise


class Scores(msgspec.Struct, array_like=True):
    """Log-probabilities of one position."""

    token_id: int
    logprob: float
    rank: int
    top: Alternatives
    kept: bytes | None = None  # int32 ids that filters kept


class End(msgspec.Struct, array_like=True):
    """All completions of a request have ended."""

    key: int
    reasons: list[tuple[str, StopReason]]  # by completion: finish_reason, stop_reason
    error: str | None
    error_kind: str  # name of the MllmError


class StepRest(msgspec.Struct, array_like=True, omit_defaults=True):
    """The rare part of a step."""

    admitted: list[Admitted] = []
    finished: list[tuple[int, int, str, StopReason]] = []  # key, index, finish_reason, stop_reason
    ended: list[End] = []
    scores: list[tuple[int, Scores]] = []  # row, of its new token
    prompt_scores: list[tuple[int, list[Scores]]] = []  # key, of all prompt tokens but the first
    drafts: list[tuple[int, int, int]] = []  # row, drafted tokens, accepted ones
    experts: list[tuple[int, int, bytes, list[int]]] = []  # key, index, int16 of one that has ended, and their shape
    transfers: list[tuple[int, dict[str, Any]]] = []  # key, kv_transfer_params of one that has ended
    version: str | None = None  # of the weights, where this step is the first that has them

    def is_empty(self) -> bool:
        told = self.admitted or self.finished or self.ended or self.scores or self.prompt_scores or self.drafts
        return not (told or self.experts or self.transfers) and self.version is None


Command = Submit | Abort | Close | LoadAdapter | UnloadAdapter | Begin | Control | Grant | AskSession | Pool
EngineEvent = (
    Stage | Hello | Failed | Pulse | AdaptersChanged | Controlled | PagesChanged | Needs | SessionTold | Pooled
)

_STEP = b"S"
_EVENT = b"T"
_COUNT = struct.Struct("<xxxi")  # behind the kind: the arrays are aligned

_encoder = msgspec.msgpack.Encoder()
_commands = msgspec.msgpack.Decoder(list[Command])
_events = msgspec.msgpack.Decoder(EngineEvent)
_rests = msgspec.msgpack.Decoder(StepRest)


def encode_commands(commands: Sequence[Command]) -> bytes:
    return _encoder.encode(commands)


def decode_commands(frame: bytes) -> list[Command]:
    return _commands.decode(frame)


def encode_event(event: EngineEvent) -> bytes:
    return _EVENT + _encoder.encode(event)


def encode_step(rows: bytes, tokens: bytes, rest: StepRest) -> bytes:
    """The frame of a step.

    Args:
        rows, tokens: int32 arrays of the same length.
    """
    tail = b"" if rest.is_empty() else _encoder.encode(rest)
    return b"".join((_STEP, _COUNT.pack(len(rows) // 4), rows, tokens, tail))


def decode_event(frame: bytes) -> EngineEvent | None:
    """None: the frame is a step's."""
    return None if frame[:1] == _STEP else _events.decode(memoryview(frame)[1:])


def decode_step(frame: bytes) -> tuple[list[int], list[int], StepRest | None]:
    """Rows, their tokens, and what is rare."""
    view = memoryview(frame)
    (count,) = _COUNT.unpack_from(view, 1)
    first = 1 + _COUNT.size
    numbers = view[first : first + 8 * count].cast("i")
    rest = view[first + 8 * count :]
    return numbers[:count].tolist(), numbers[count:].tolist(), _rests.decode(rest) if rest else None


def params_to_wire(params: SamplingParams) -> dict[str, Any]:
    """The fields that are not their defaults, as plain data."""
    changed = _changed(params)
    if params.structured_outputs is not None:
        changed["structured_outputs"] = _changed(params.structured_outputs)
    if params.kv_transfer_params is not None:
        changed["kv_transfer_params"] = params.kv_transfer_params.to_wire()
    return changed


def _changed(params: SamplingParams | StructuredOutputsParams) -> dict[str, Any]:
    changed = {}
    for field in dataclasses.fields(params):
        value = getattr(params, field.name)
        if value != field.default:
            changed[field.name] = dict(value) if isinstance(value, Mapping) else value
    return changed


def params_of_wire(fields: Mapping[str, Any]) -> SamplingParams:
    """The parameters of what `params_to_wire` has made.

    Raises:
        RequestError: they are malformed.
    """
    form = fields.get("structured_outputs")
    if form is None:
        return SamplingParams(**fields)
    return SamplingParams(**{**fields, "structured_outputs": StructuredOutputsParams(**form)})


def end_of(key: int, reasons: Sequence[tuple[str, StopReason]], error: MllmError | None) -> End:
    """The end of a request, by its completions' reasons or by an error."""
    return End(key, list(reasons), None if error is None else str(error), "" if error is None else type(error).__name__)
