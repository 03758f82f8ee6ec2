"""The special tokens by which Whisper's decoder is told what to write, found by their names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mllm_compile.errors import RequestError
from mllm_compile.runtime.short_repr import short_repr

SECONDS_OF_A_TOKEN = 0.02
_MULTILINGUAL = 51865  # ids from which on a vocabulary has languages, as OpenAI's code has it
_MOST_EARLIER = 223  # tokens of what was said before, as OpenAI's code takes
_TASKS = ("transcribe", "translate")


@dataclass(frozen=True)
class SpeechTokens:
    """
    Attributes:
        start, previous, no_timestamps: ids of <|startoftranscript|>, <|startofprev|> and <|notimestamps|>.
        tasks: id by task.
        languages: id by language; empty: the model knows one alone, and is told none.
        no_speech: id of <|nospeech|>, or <|nocaptions|>; None: there is neither.
    """

    start: int
    previous: int
    no_timestamps: int
    tasks: dict[str, int]
    languages: dict[str, int]
    no_speech: int | None = None

    @classmethod
    def of(cls, tokenizer: Any, vocab_size: int) -> SpeechTokens:
        """The tokens of a tokenizer.

        Raises:
            RequestError: it lacks one.
        """

        def find(name: str) -> int:
            found: int | None = None if tokenizer is None else tokenizer.token_to_id(f"<|{name}|>")
            if found is None:
                raise RequestError(f"the model's tokenizer has no token <|{name}|>: only Whisper's models transcribe.")
            return found

        start, tasks = find("startoftranscript"), {task: find(task) for task in _TASKS}
        languages = {}
        if vocab_size >= _MULTILINGUAL:  # the languages are between the two
            names = {one: tokenizer.id_to_token(one) for one in range(start + 1, min(tasks.values()))}
            languages = {name[2:-2]: one for one, name in names.items() if name and name.startswith("<|")}
        silences = (tokenizer.token_to_id(f"<|{name}|>") for name in ("nospeech", "nocaptions"))
        no_speech = next((one for one in silences if one is not None), None)
        return cls(start, find("startofprev"), find("notimestamps"), tasks, languages, no_speech)

    def beginning(self, language: str | None, task: str, timestamps: bool, earlier: list[int]) -> list[int]:
        """The ids that the decoder begins with.

        Raises:
            RequestError: there is no such language or task, or `earlier` has tokens that tell the model one.
        """
        if own := self._told.intersection(earlier):
            raise RequestError(
                f"prompt: expected text alone, got the model's own token {min(own)}. Leave its name out."
            )
        if not isinstance(task, str) or task not in self.tasks:
            raise RequestError(f"task: expected {' or '.join(self.tasks)}, got {short_repr(task)}")
        ids = [self.previous, *earlier[-_MOST_EARLIER:]] if earlier else []
        ids.append(self.start)
        if self.languages:
            ids += [self.languages[self.known(language)], self.tasks[task]]
        elif task == "translate" or language not in (None, "en"):
            raise RequestError("the model knows English alone: expected task transcribe, and language en or none")
        return ids if timestamps else [*ids, self.no_timestamps]

    def up_to_start(self, beginning: list[int]) -> list[int]:
        """The ids of a beginning as far as the start token, behind which the model says whether anybody speaks."""
        return beginning[: beginning.index(self.start) + 1]

    @property
    def _told(self) -> set[int]:
        """The tokens by which the decoder is told anything."""
        return {self.start, self.previous, self.no_timestamps, *self.tasks.values(), *self.languages.values()}

    def known(self, language: str | None) -> str:
        """The language.

        Raises:
            RequestError: the model does not know it.
        """
        if not isinstance(language, str) or language not in self.languages:
            raise RequestError(
                f"language: expected a code that the model knows, such as en or de, got {short_repr(language)}"
            )
        return language

    def seconds(self, token: int) -> float | None:
        """The time that a token stands for; None: it is another token."""
        return (token - self.no_timestamps - 1) * SECONDS_OF_A_TOKEN if token > self.no_timestamps else None
