"""Windows that the server itself asks for: a sound's language, all of its text, or one window after another.

Windows that are asked beside each other are one request. A sound has one at a time, under the client's own name of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mllm_compile.engine.speech.answers import (
    ids_of_prompt,
    params_of_language,
    params_of_silence,
    params_of_text,
    segments_of,
    transcript_of,
)
from mllm_compile.engine.speech.doubt import Round, Written, next_of, rounds_of
from mllm_compile.engine.speech.sequential import Walk, most_told
from mllm_compile.engine.speech.transcripts import Segment, Transcript
from mllm_compile.runtime.sampling.params import SamplingParams
from mllm_compile.server.api.errors import ApiError
from mllm_compile.server.audio.requests import Sound, WindowsRequest
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
        _, (written,) = await self._written([window], [tokens.start], lambda facts: params_of_language(tokens))
        return names[written.ids[0]]

    async def transcript(self, language: str | None) -> tuple[str, Transcript]:
        """The id of the request, and all that is written down. Windows run beside each other, or each begins at the
        last time of the one before.

        Raises:
            ApiError: as `language`.
            RequestError: the prompt is refused.
        """
        sound = self.sound
        with self.front.going_on():
            name, segments = await (self._walked(language) if sound.fields.sequential else self._cut(language))
        return name, transcript_of(segments, language, sound.duration, sound.task)

    async def _cut(self, language: str | None) -> tuple[str, list[Segment]]:
        speech = self.sound.speech
        with self.front.admission.place():
            cut = await self.front.sounds.run(self.sound.cut, language)
        name, believed = await self._believed(cut.windows, cut.beginning, has_begun=False)

        def segments() -> list[Segment]:
            return [
                segment
                for written, place in zip(believed, cut.places, strict=True)
                if written is not None
                for segment in segments_of(speech.tokens, speech.tokenizer, written, *place)
            ]

        return name, await self.front.sounds.run(segments)

    async def _walked(self, language: str | None) -> tuple[str, list[Segment]]:
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
        while not walk.is_at_end:
            ids = walk.beginning(tokens, beginning)
            window = await self.front.sounds.run(lambda: walk.window(frames).tobytes())
            name, (written,) = await self._believed([window], ids)
            segments += await self.front.sounds.run(walk.segments, written, tokens, speech.tokenizer, frames)
        return name, segments

    async def _believed(
        self, windows: list[bytes], ids: list[int], has_begun: bool = True
    ) -> tuple[str, list[Written | None]]:
        """The id of the request, and the answer that is believed of each window, as rounds_of decides.

        Args:
            ids: that each answer follows.
            has_begun: a window of this sound was written down before.
        """
        fields, tokens, tokenizer = self.sound.fields, self.sound.speech.tokens, self.sound.speech.tokenizer

        no_speech = tokens.no_speech

        def text(ids: list[int]) -> str:
            found: str = tokenizer.decode(ids, skip_special_tokens=True)
            return found

        def params(facts: EngineFacts) -> SamplingParams:
            if temperature is not None:
                return params_of_text(temperature, facts.defaults, tokens, fields.has_times)
            assert no_speech is not None, "else rounds do not ask for it"
            return params_of_silence(no_speech)

        rounds = rounds_of(len(windows), fields.temperatures, text, no_speech is not None)
        written: list[Written] | None = None
        name = PREFIX
        while True:
            step = await self.front.sounds.run(next_of, rounds, written)  # texts are decoded, and pressed
            if not isinstance(step, Round):
                return name, step
            places, temperature = step
            asked, beginning = [windows[place] for place in places], ids
            if temperature is None:
                beginning = tokens.up_to_start(ids)
            name, written = await self._written(asked, beginning, params, is_part=True, goes_on=has_begun)
            has_begun = True

    async def _written(
        self,
        windows: list[bytes],
        ids: list[int],
        params: Callable[[EngineFacts], SamplingParams],
        is_part: bool = False,
        goes_on: bool = False,
    ) -> tuple[str, list[Written]]:
        """The id of a request for windows, and its answers.

        Args:
            is_part: they are of the transcript, which has the client's names.
            goes_on: others of it were asked for before.
        """
        over: asyncio.Future[list[Written] | ApiError] = asyncio.get_running_loop().create_future()
        own_id = self.sound.fields.request_id if is_part else None
        header_id, parent = (self.header_id, self.parent) if is_part else (None, None)
        request = WindowsRequest(self.sound, ids, windows, params, _telling(over), own_id)
        given = self.client, header_id, self.share, parent
        job = await self.front.start(request, PREFIX, Outlet(_nowhere), *given, goes_on=goes_on)
        try:
            found = await over
        finally:
            job.leave()
        if isinstance(found, ApiError):
            raise found
        return job.name, found


def _telling(over: asyncio.Future[list[Written] | ApiError]) -> Any:
    def told(found: list[Written] | ApiError) -> None:
        if not over.done():
            over.set_result(found)

    return told


async def _nowhere(message: dict[str, Any]) -> None:
    """Takes an answer that the server itself has asked for."""
