"""The endpoints of speech: from a form with a sound to a running request. The language is asked for first."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from mllm_compile.engine.speech.transcripts import Transcript
from mllm_compile.errors import MllmError
from mllm_compile.server.api.errors import ApiError, of_error, timed_out
from mllm_compile.server.audio.answers import headers_of, whole_transcript
from mllm_compile.server.audio.fields import AudioFields, Task, read_form
from mllm_compile.server.audio.requests import Sound, Speech, StreamRequest
from mllm_compile.server.audio.windows import PREFIX, Windows
from mllm_compile.server.endpoints import Answer, Endpoint
from mllm_compile.server.flow.job import Job
from mllm_compile.server.flow.memory import Share
from mllm_compile.server.flow.writer import CHUNKS, Headers, Outlet, Send
from mllm_compile.server.front import Front, ignored_headers
from mllm_compile.server.generate import until_over
from mllm_compile.server.http import (
    ClientGoneError,
    Receive,
    Scope,
    client_of,
    header,
    respond,
    respond_error,
    unless_gone,
)

# Of a form's bytes: itself, and samples of one byte each as float32, whole and as one channel. Denser files are bounded
# by two hours, of two sounds at a time.
_TIMES_BODY = 9


def _endpoint(task: Task) -> Endpoint:
    def of(front: Front) -> Answer:
        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            outlet = Outlet(send, scope.get("extensions", {}).get(CHUNKS, {}).get("write"))
            with front.memory.share() as share:
                try:
                    begun = await _begun(front, task, scope, receive, outlet, share)
                except ClientGoneError:
                    return
                except (ApiError, MllmError) as error:
                    refused = error if isinstance(error, ApiError) else of_error(error, None)
                    front.refused(refused, scope["path"], client_of(scope))
                    await respond_error(send, refused)
                    return
                if isinstance(begun, Job):
                    await until_over(begun, receive)
                else:
                    await respond(send, begun.body, headers=begun.headers)

        return answer

    return of


class _Whole(NamedTuple):
    """An answer that has come."""

    body: bytes
    headers: Headers


async def _begun(
    front: Front, task: Task, scope: Scope, receive: Receive, outlet: Outlet, share: Share
) -> Job | _Whole:
    """All of the answer to a sound, or the request of its stream, once its body has come."""
    body = await front.forms.read(receive, share)
    fields, ignored = read_form(header(scope, b"content-type"), body)
    del body
    client, limit_s = client_of(scope), front.options.request_timeout_s
    name, parent = header(scope, b"x-request-id"), front.parent_of(scope["headers"])

    async def begin() -> Job | _Whole:
        try:
            async with asyncio.timeout(limit_s):
                sound = await _read(front, task, fields, ignored, share)
                windows, language = Windows(front, sound, share, client, name, parent), fields.language
                if sound.needs_language:
                    language = await windows.language()
                if not fields.stream:
                    return _whole(*await windows.transcript(language), fields, ignored)
                with front.admission.place():
                    cut = await front.sounds.run(sound.cut, language)
                request = StreamRequest(sound, cut, ignored)
        except TimeoutError:
            assert limit_s is not None, "else there is no limit"
            raise timed_out(limit_s) from None
        return await front.start(request, PREFIX, outlet, client, name, share, parent)

    return await unless_gone(begin(), receive)


async def _read(front: Front, task: Task, fields: AudioFields, ignored: list[str], share: Share) -> Sound:
    """The sound of a form, which a thread reads."""
    front.check_open()
    front.check_ignored(ignored)
    with front.admission.place():
        speech = Speech.of(await front.facts(fields.model))
        share.hold(_TIMES_BODY * share.num_bytes)
        sound = await front.sounds.run(Sound.read, fields, task, speech)
        share.hold(sound.num_bytes)
        return sound


def _whole(name: str, transcript: Transcript, fields: AudioFields, ignored: list[str]) -> _Whole:
    form = fields.response_format
    headers = [*headers_of(form), (b"x-request-id", name.encode()), *ignored_headers(ignored)]
    return _Whole(whole_transcript(transcript, form), headers)


ENDPOINTS: tuple[tuple[str, str, Endpoint], ...] = (
    ("POST", "/v1/audio/transcriptions", _endpoint("transcribe")),
    ("POST", "/v1/audio/translations", _endpoint("translate")),
)
BODIES = {path: AudioFields for _, path, _ in ENDPOINTS}
