"""The endpoints of speech: from a form with a sound to a running request. The language is asked for first."""

from __future__ import annotations

import asyncio
from typing import Any

from mllm_compile.errors import MllmError
from mllm_compile.server.api.errors import ApiError, of_error, timed_out
from mllm_compile.server.audio.fields import AudioFields, Task, read_form
from mllm_compile.server.audio.requests import LanguageRequest, Sound, Speech, TextRequest
from mllm_compile.server.endpoints import Answer, Endpoint
from mllm_compile.server.flow.job import Job
from mllm_compile.server.flow.memory import Share
from mllm_compile.server.flow.writer import CHUNKS, Outlet, Send
from mllm_compile.server.front import Front
from mllm_compile.server.generate import until_over
from mllm_compile.server.http import (
    ClientGoneError,
    Receive,
    Scope,
    client_of,
    header,
    respond_error,
    unless_gone,
)

_PREFIX = "transcript-"
# Of a form's bytes: itself, and samples of one byte each as float32, whole and as one channel.
_TIMES_BODY = 9


def _endpoint(task: Task) -> Endpoint:
    def of(front: Front) -> Answer:
        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            outlet = Outlet(send, scope.get("extensions", {}).get(CHUNKS, {}).get("write"))
            with front.memory.share() as share:
                try:
                    job = await _begun(front, task, scope, receive, outlet, share)
                except ClientGoneError:
                    return
                except (ApiError, MllmError) as error:
                    refused = error if isinstance(error, ApiError) else of_error(error, None)
                    front.refused(refused, scope["path"], client_of(scope))
                    await respond_error(send, refused)
                    return
                await until_over(job, receive)

        return answer

    return of


async def _begun(front: Front, task: Task, scope: Scope, receive: Receive, outlet: Outlet, share: Share) -> Job:
    """The request of a sound, once its body has come."""
    body = await front.forms.read(receive, share)
    fields, ignored = read_form(header(scope, b"content-type"), body)
    del body
    client, limit_s = client_of(scope), front.options.request_timeout_s

    async def begin() -> Job:
        try:
            async with asyncio.timeout(limit_s):
                request = await _read(front, task, fields, ignored, share, client)
        except TimeoutError:
            assert limit_s is not None, "else there is no limit"
            raise timed_out(limit_s) from None
        name, parent = header(scope, b"x-request-id"), front.parent_of(scope["headers"])
        return await front.start(request, _PREFIX, outlet, client, name, share, parent)

    return await unless_gone(begin(), receive)


async def _read(
    front: Front, task: Task, fields: AudioFields, ignored: list[str], share: Share, client: str
) -> TextRequest:
    """A sound's windows, which threads make."""
    front.check_open()
    front.check_ignored(ignored)
    with front.admission.place():
        speech = Speech.of(await front.facts(fields.model))
        share.hold(_TIMES_BODY * share.num_bytes)
        sound = await front.sounds.run(Sound.read, fields, task, speech)
        share.hold(sound.num_bytes)
        window = await front.sounds.run(sound.first_window) if sound.needs_language else None
    language = fields.language
    if window is not None:
        language = await _language(front, sound, window, share, client)
    with front.admission.place():
        return await front.sounds.run(TextRequest.of, sound, ignored, language)


async def _language(front: Front, sound: Sound, window: bytes, share: Share, client: str) -> str:
    """The language that the model finds in a sound's first window.

    Raises:
        ApiError: the engine refuses or fails it, or is lost.
    """
    over: asyncio.Future[str | ApiError] = asyncio.get_running_loop().create_future()

    def told(found: str | ApiError) -> None:
        if not over.done():
            over.set_result(found)

    job = await front.start(LanguageRequest(sound, window, told), _PREFIX, Outlet(_nowhere), client, None, share)
    try:
        found = await over
    finally:
        job.leave()
    if isinstance(found, ApiError):
        raise found
    return found


async def _nowhere(message: dict[str, Any]) -> None:
    """Takes an answer that the server itself has asked for."""


ENDPOINTS: tuple[tuple[str, str, Endpoint], ...] = (
    ("POST", "/v1/audio/transcriptions", _endpoint("transcribe")),
    ("POST", "/v1/audio/translations", _endpoint("translate")),
)
BODIES = {path: AudioFields for _, path, _ in ENDPOINTS}
