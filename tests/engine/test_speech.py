"""Long sounds are cut where they are quiet, times become segments, and transcripts have OpenAI's forms."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from mllm_compile.engine.speech.cuts import cut
from mllm_compile.engine.speech.methods import SpeechMethods
from mllm_compile.engine.speech.tokens import SpeechTokens
from mllm_compile.engine.speech.transcripts import Segment, Transcript, segments_between
from mllm_compile.errors import RequestError
from mllm_compile.media.log_mel import LogMel
from mllm_compile.runtime.sampling.params import SamplingParams
from mllm_compile.runtime.sources.facts import SourceFacts

RATE = 1000
NAMES = ("<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>", "<|startofprev|>")
NAMES = (*NAMES, "<|notimestamps|>")


class Words:
    def token_to_id(self, token: str) -> int | None:
        return NAMES.index(token) if token in NAMES else None

    def id_to_token(self, token_id: int) -> str:
        return NAMES[token_id]


def test_windows_are_the_whole_sound_and_end_where_it_is_quiet() -> None:
    samples = np.ones(25 * RATE, dtype=np.float32)
    samples[8600:8700] = 0
    windows = cut(samples, 10 * RATE, RATE)
    assert [at for at, _ in windows][:2] == [0, 8610]
    assert all(0 < part.size <= 10 * RATE for _, part in windows)
    assert np.array_equal(np.concatenate([part for _, part in windows]), samples)
    assert [at for at, _ in windows] == np.cumsum([0, *(part.size for _, part in windows)])[:-1].tolist()


def test_a_short_sound_is_one_window() -> None:
    ((at, part),) = cut(np.zeros(5, dtype=np.float32), 10, RATE)
    assert (at, part.size) == (0, 5)


def test_segments_are_between_times_and_mended_where_these_run_backwards() -> None:
    none = None
    assert segments_between([none, none], 10, 12) == [(0, 2, 10, 12)]
    assert segments_between([0.0, none, 1.0, 1.2, none, none, 2.0], 10, 40) == [(1, 2, 10.0, 11.0), (4, 6, 11.2, 12.0)]
    assert segments_between([1.0, none, 0.5, none], 10, 14) == [(1, 2, 11.0, 11.0), (3, 4, 11.0, 14)]
    assert segments_between([none, 99.0], 10, 14) == [(0, 1, 10, 14)]
    assert segments_between([0.0, 0.0], 10, 14) == []


def test_the_decoder_is_told_language_task_and_times() -> None:
    many, english = SpeechTokens.of(Words(), 51865), SpeechTokens.of(Words(), 51864)
    assert many.languages == {"en": 1, "de": 2}
    assert many.beginning("de", "translate", timestamps=False, earlier=[]) == [0, 2, 3, 6]
    assert many.beginning("en", "transcribe", timestamps=True, earlier=[9] * 300) == [5, *[9] * 223, 0, 1, 4]
    assert english.beginning(None, "transcribe", timestamps=False, earlier=[]) == [0, 6]
    assert (many.seconds(6), many.seconds(7), many.seconds(57)) == (None, 0.0, 1.0)


@pytest.mark.parametrize(
    ("vocab_size", "language", "task", "said"),
    [
        (51865, "xx", "transcribe", "got 'xx'"),
        (51865, ["en"], "transcribe", "language: expected"),
        (51865, "en", ["transcribe"], "task: expected"),
        (51865, "en", "sing", "task: expected transcribe or translate"),
        (51864, "de", "transcribe", "English alone"),
        (51864, None, "translate", "English alone"),
    ],
)
def test_what_the_model_cannot_be_told_is_refused(vocab_size: int, language: Any, task: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        SpeechTokens.of(Words(), vocab_size).beginning(language, task, timestamps=False, earlier=[])


def test_an_earlier_text_tells_the_model_nothing_else() -> None:
    for token in range(7):
        with pytest.raises(RequestError, match=f"prompt: expected text alone, got the model's own token {token}"):
            SpeechTokens.of(Words(), 51865).beginning("en", "transcribe", timestamps=False, earlier=[9, token, 9])


def test_a_tokenizer_without_the_tokens_is_refused() -> None:
    with pytest.raises(RequestError, match=r"no token <\|startoftranscript\|>"):
        SpeechTokens.of(None, 51865)


def test_forms_are_openais() -> None:
    segments = [Segment(0.0, 1.5, "Hello.", [5, 6], -0.25), Segment(3661.25, 3662.0, "Bye.", [7], None)]
    transcript = Transcript("Hello. Bye.", "en", 3662.0, "transcribe", segments)
    assert transcript.as_form("json") == {"text": "Hello. Bye."}
    assert transcript.as_form("text") == "Hello. Bye.\n"
    assert transcript.as_form("srt") == (
        "1\n00:00:00,000 --> 00:00:01,500\nHello.\n\n2\n01:01:01,250 --> 01:01:02,000\nBye.\n"
    )
    assert transcript.as_form("vtt") == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nHello.\n\n01:01:01.250 --> 01:01:02.000\nBye.\n"
    )
    told = transcript.as_form("verbose_json")
    assert isinstance(told, dict)
    assert (told["language"], told["duration"], told["task"]) == ("en", 3662.0, "transcribe")
    assert told["segments"][1] | {"compression_ratio": 0} == {
        "id": 1,
        "seek": 366125,
        "start": 3661.25,
        "end": 3662.0,
        "text": "Bye.",
        "tokens": [7],
        "avg_logprob": None,
        "compression_ratio": 0,
        "temperature": 0.0,
    }


class Doubted(SpeechMethods):
    """Answers each window as its first sample says, by temperature: (text, mean log-probability), and how likely
    nobody speaks."""

    default_params = SamplingParams()
    eos_token_ids = frozenset({-1000})
    ANSWERS: ClassVar[dict[int, tuple[dict[float, tuple[str, float]], float]]] = {
        1: ({0.0: ("fine", -0.5)}, 0.9),
        2: ({0.0: ("bad", -2.0), 0.4: ("bad too", -1.5), 0.8: ("last", -3.0)}, 0.1),
        3: ({0.0: ("la" * 60, -0.1), 0.4: ("sung", -0.2)}, 0.0),
        4: ({0.0: ("hum", -1.5)}, 0.7),
    }

    def __init__(self) -> None:
        names = (*NAMES, "<|nospeech|>")
        tokenizer = SimpleNamespace(
            token_to_id=lambda name: names.index(name) if name in names else None,
            decode=lambda ids, skip_special_tokens: self.texts[ids[0]],
        )
        facts = SourceFacts(max_length=5, bins=4, frames=10)
        self.decoder: Any = SimpleNamespace(
            source=facts, log_mel=LogMel(4, rate=8 * RATE, samples=RATE), tokenizer=tokenizer, vocab_size=200
        )
        self.texts: dict[int, str] = {}
        self.asked: list[tuple[float, list[int]]] = []

    def generate(self, prompts: Any, sampling_params: Any = None, *, priority: int = 0) -> list[Any]:
        assert sampling_params.logprobs_mode == "raw_logprobs", "one allowed token is certain of all others"
        found = [round(float(one["encoder_prompt"]["multi_modal_data"]["audio"][0][0])) for one in prompts]
        if list(sampling_params.allowed_token_ids or ()) == [7]:
            assert all(one["decoder_prompt"] == [0] for one in prompts)
            self.asked.append((-1.0, found))
            return [self._output("", math.log(self.ANSWERS[one][1])) for one in found]
        self.asked.append((sampling_params.temperature, found))
        return [self._output(*self.ANSWERS[one][0][sampling_params.temperature]) for one in found]

    def _output(self, text: str, logprob: float) -> Any:
        token = -1 - len(self.texts)  # ids of times are above all others
        self.texts[token] = text
        first = SimpleNamespace(cumulative_logprob=logprob)
        return SimpleNamespace(token_ids=[token], first=first, error=None)


def test_doubted_windows_are_tried_at_the_next_temperature_and_silent_ones_have_no_text() -> None:
    engine = Doubted()
    sounds = [(np.full(RATE, number, dtype=np.float32), 8 * RATE) for number in engine.ANSWERS]
    transcripts = engine.transcribe(sounds, temperature=(0.0, 0.4, 0.8))
    assert [one.text for one in transcripts] == ["fine", "last", "sung", ""]
    assert [[one.temperature for one in each.segments] for each in transcripts] == [[0.0], [0.8], [0.4], []]
    assert engine.asked == [(0.0, [1, 2, 3, 4]), (-1.0, [2, 4]), (0.4, [2, 3]), (0.8, [2])]
    alone = Doubted().transcribe(sounds, temperature=0.0)
    assert [one.text for one in alone] == ["fine", "bad", "la" * 60, "hum"]


@pytest.mark.parametrize("given", [(), "0", (0.0, "x"), True, (0.0,) * 17])
def test_temperatures_that_cannot_be_are_refused(given: Any) -> None:
    with pytest.raises(RequestError, match="temperature: expected a number, or 1 to 16"):
        Doubted().transcribe((np.ones(9, dtype=np.float32), 8 * RATE), temperature=given)
