"""Windows that the server itself asks for, one after another: a sound's language, and the sequential form.

Each is a request of its own. A sound has one at a time, under the client's own name of the request.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mllm_compile.engine.speech.answers import ids_of_prompt, params_of_language, params_of_text, transcript_of
from mllm_compile.engine.speech.sequential import Walk, most_told
from mllm_compile.engine.speech.transcripts import Segment, Transcript
from mllm_compile.runtime.sampling.params import SamplingParams
from mllm_compile.server.api.errors import ApiError
from mllm_compile.server.audio.answers import Written
from mllm_compile.server.audio.requests import Sound, WindowRequest
from mllm_compile.server.engine_facts import EngineFacts
from mllm_compile.server.flow.memory import Share
from mllm_compile.server.flow.writer import Outlet
from mllm_compile.server.front import Front

if TYPE_CHECKING:
    from opentelemetry.context import Context

PREFIX = "transcript-"


@dataclass(frozen=True)
class Windows:
    """The windows of one sound.

    Attributes:
        share: of the memory.
        header_id: the client's name of the request in a header; parent: the span there.
    """

    front: Front
    sound: Sound
    share: Share
    client: str
    header_id: str | None
    parent: Context | None

    async def language(self) -> str:
        """The language that the model finds in the first one.

        Raises:
            ApiError: the engine refuses or fails it, or is lost.
        """
        tokens = self.sound.speech.tokens
        names = {one: name for name, one in tokens.languages.items()}
        window = await self.front.sounds.run(self.sound.first_window)
        over: asyncio.Future[Written | ApiError] = asyncio.get_running_loop().create_future()
        given = window, [tokens.start], lambda facts: params_of_language(tokens), _telling(over)
        _, written = await self._written(WindowRequest(self.sound, *given), over)
        return names[written.ids[0]]

    async def transcript(self, language: str | None) -> tuple[str, Transcript]:
        """The id of the request, and all that is written down: each window begins at the last time of the one before.

        Raises:
            ApiError: as `language`.
            RequestError: the prompt is refused.
        """
        with self.front.going_on():
            return await self._walked(language)

    async def _walked(self, language: str | None) -> tuple[str, Transcript]:
        sound, fields, speech = self.sound, self.sound.fields, self.sound.speech
        tokens, frames = speech.tokens, speech.log_mel.frames
        facts = await self.front.facts(fields.model)
        most = most_told(facts.hello.max_model_len) if fields.condition_on_previous_text else 0
        earlier = await self.front.sounds.run(ids_of_prompt, speech.tokenizer, fields.prompt)
        beginning = tokens.beginning(language, sound.task, True, earlier)
        if most:  # the prompt is the first of the text so far
            beginning = tokens.beginning(language, sound.task, True, [])
        walk = await self.front.sounds.run(Walk.of, sound.samples, speech.log_mel, earlier, most)
        segments: list[Segment] = []
        name = PREFIX

        def params(facts: EngineFacts) -> SamplingParams:
            return params_of_text(fields.temperature, facts.defaults, tokens, True)

        while not walk.is_at_end:
            over: asyncio.Future[Written | ApiError] = asyncio.get_running_loop().create_future()
            ids = walk.beginning(tokens, beginning)
            given = walk.window(frames).tobytes(), ids, params, _telling(over), fields.request_id
            name, written = await self._written(WindowRequest(sound, *given), over, goes_on=True)
            by = tokens, speech.tokenizer, frames, written.logprob, fields.temperature
            segments += walk.segments(written.ids, *by)
        return name, transcript_of(segments, language, sound.samples.size / speech.log_mel.rate, sound.task)

    async def _written(
        self, request: WindowRequest, over: asyncio.Future[Written | ApiError], goes_on: bool = False
    ) -> tuple[str, Written]:
        """The id of a request, and its answer, which comes to `over`.

        Args:
            goes_on: it is a window of the transcript, which has the client's names.
        """
        header_id, parent = (self.header_id, self.parent) if goes_on else (None, None)
        given = self.client, header_id, self.share, parent
        job = await self.front.start(request, PREFIX, Outlet(_nowhere), *given, goes_on=goes_on)
        try:
            found = await over
        finally:
            job.leave()
        if isinstance(found, ApiError):
            raise found
        return job.name, found


def _telling(over: asyncio.Future[Written | ApiError]) -> Any:
    def told(found: Written | ApiError) -> None:
        if not over.done():
            over.set_result(found)

    return told


async def _nowhere(message: dict[str, Any]) -> None:
    """Takes an answer that the server itself has asked for."""
