"""A long sound window by window: the next begins where the model has marked the end of its last whole segment.

Rules and units are Transformers' (`_retrieve_segment` of Whisper's generate): a time is a step of 20 ms, two frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from mllm_compile.engine.speech.answers import SpeechTokenizer
from mllm_compile.engine.speech.doubt import Written
from mllm_compile.engine.speech.tokens import SECONDS_OF_A_TOKEN, SpeechTokens
from mllm_compile.engine.speech.transcripts import Segment
from mllm_compile.media.log_mel import LogMel

_FRAMES_OF_A_TIME = 2
_FRAME_S, _TIME_S = 0.01, 0.02
_SURE = 0.5  # of temperatures below, text is told to the next window


class Part(NamedTuple):
    """A segment of a window: its tokens, times among them, and when it begins and ends, in times of the window."""

    token_ids: list[int]
    start: int
    end: int


@dataclass
class Walk:
    """How far one sound is written down.

    Attributes:
        mel: [bins, frames] float32 of all of it.
        most_earlier: tokens of earlier segments that a window is told; 0: none.
        earlier: tokens of the segments so far.
        frame: where the next window begins.
    """

    mel: np.ndarray
    most_earlier: int = 0
    earlier: list[list[int]] = field(default_factory=list)
    frame: int = 0
    is_sure: bool = True

    @classmethod
    def of(cls, samples: np.ndarray, log_mel: LogMel, earlier: list[int], most_earlier: int) -> Walk:
        """The beginning of a sound; of one that is no longer than a window frames of a window.

        Args:
            samples: [N] float32.
            earlier: tokens ahead of the text so far, if windows are told it.
        """
        is_short = samples.size <= log_mel.samples
        mel = log_mel.window(samples) if is_short else log_mel.whole(samples)
        return cls(mel, most_earlier, [earlier[-most_earlier:]] if most_earlier and earlier else [])

    @property
    def is_at_end(self) -> bool:
        return bool(self.frame >= self.mel.shape[1])

    @property
    def seconds(self) -> float:
        """Where the next window begins."""
        return self.frame * _TIME_S / _FRAMES_OF_A_TIME

    def window(self, frames: int) -> np.ndarray:
        """The next window [bins, frames], filled up with zeros."""
        found = np.zeros((self.mel.shape[0], frames), dtype=np.float32)
        part = self.mel[:, self.frame : self.frame + frames]
        found[:, : part.shape[1]] = part
        return found

    def told(self, first_time: int) -> list[int]:
        """The tokens of earlier segments that the next window is told; of two times at an end the first alone."""
        if not self.most_earlier or not self.is_sure:
            return []
        ids = [one for tokens in self.earlier for one in _without_second_time(tokens, first_time)]
        return ids[-self.most_earlier :]

    def take(self, ids: Sequence[int], first_time: int, frames: int, temperature: float) -> list[Part]:
        """The segments of the window's answer, and on to the next.

        Args:
            frames: of a window.
            temperature: at which it was written down.
        """
        frames = min(frames, self.mel.shape[1] - self.frame)
        parts, ahead = parts_of(ids, first_time, frames)
        self.earlier += [part.token_ids for part in parts]
        self.frame, self.is_sure = self.frame + ahead, temperature < _SURE
        return parts

    def beginning(self, tokens: SpeechTokens, of_sound: list[int]) -> list[int]:
        """The ids that the next window's answer follows: `of_sound`, behind what it is told."""
        told = self.told(tokens.no_timestamps + 1)
        return [*([tokens.previous, *told] if told else []), *of_sound]

    def segments(
        self,
        written: Written | None,
        tokens: SpeechTokens,
        tokenizer: SpeechTokenizer,
        frames: int,
    ) -> list[Segment]:
        """The segments of text in the window's answer, and on to the next.

        Args:
            written: None of a window in which nobody speaks.
            frames: of a window.
        """
        if written is None:
            self.frame += frames
            return []
        ids, logprob, temperature = written
        at, first_time, found = self.seconds, tokens.no_timestamps + 1, []
        for part in self.take(ids, first_time, frames, temperature):
            text_ids = [one for one in part.token_ids if one < first_time]
            if text := tokenizer.decode(text_ids, skip_special_tokens=True):
                start, end = (at + time * SECONDS_OF_A_TOKEN for time in (part.start, part.end))
                found.append(Segment(start, end, text, text_ids, logprob, temperature))
        return found


def parts_of(ids: Sequence[int], first_time: int, frames: int) -> tuple[list[Part], int]:
    """The segments of an answer, and the frames up to the next window: up to the last time of a pair of times, behind
    which a segment is cut off; otherwise all `frames`."""
    ids = list(ids)
    is_time = [one >= first_time for one in ids]
    ends = [place + 1 for place in range(len(ids) - 1) if is_time[place] and is_time[place + 1]]
    is_closed = is_time[-2:] == [False, True]  # nobody speaks behind it
    if not ends:
        times = [one - first_time for one in ids if one >= first_time]
        end = times[-1] if times and times[-1] else int(frames * _FRAME_S / _TIME_S)
        return ([Part(ids, 0, end)] if ids else []), frames
    if is_closed:
        ends.append(len(ids))
    else:
        ends[-1] += 1  # with the second time of its pair
    parts, begin = [], 0
    for place, end in enumerate(ends):
        own = ids[begin:end]
        last = own[-1] if is_closed or place < len(ends) - 1 else own[-2]
        parts.append(Part(own, own[0] - first_time, last - first_time))
        begin = end
    ahead = frames if is_closed else (ids[begin - 2] - first_time) * _FRAMES_OF_A_TIME
    return parts, ahead or frames  # a window that ends where it begins is behind us all the same


def most_told(max_model_len: int) -> int:
    """Tokens of the text so far that a window is told at most."""
    return max_model_len // 2 - 1


def _without_second_time(ids: list[int], first_time: int) -> list[int]:
    return ids[:-1] if len(ids) > 2 and ids[-2] >= first_time else ids
