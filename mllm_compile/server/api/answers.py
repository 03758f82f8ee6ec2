"""The JSON of answers and streams of /v1/completions and /v1/chat/completions.

A stream's chunks are bytes around a text: what does not change is made once a completion.
"""

from __future__ import annotations

from collections.abc import Callable
from json.encoder import encode_basestring
from typing import Any

import msgspec

from mllm_compile.server.api.errors import ApiError, openai_refusal
from mllm_compile.server.api.logprobs import TokenTexts, chat_logprobs, completion_logprobs, prompt_logprobs
from mllm_compile.server.flow.choice import Choice, PromptRun
from mllm_compile.server.flow.job import Job
from mllm_compile.server.wire.messages import Scores

DONE = b"data: [DONE]\n\n"
encode = msgspec.json.encode
_FIRST_VERSION = "default"  # of weights that nobody has named, as vLLM and SGLang call them


def event(data: Any) -> bytes:
    """A chunk of a stream."""
    return b"data: " + encode(data) + b"\n\n"


def usage_of(job: Job) -> dict[str, Any]:
    """The tokens of a request so far."""
    usage: dict[str, Any] = {
        "prompt_tokens": job.num_prompt_tokens,
        "completion_tokens": job.num_output_tokens,
        "total_tokens": job.num_prompt_tokens + job.num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": job.num_cached_tokens},
    }
    if (by_tier := job.cached_by_tier) is not None:
        usage["prompt_tokens_details"]["cached_tokens_details"] = by_tier
    if job.num_drafted_tokens:
        usage["completion_tokens_details"] = {
            "accepted_prediction_tokens": job.num_accepted_tokens,
            "rejected_prediction_tokens": job.num_drafted_tokens - job.num_accepted_tokens,
        }
    return usage


def versions_of(choice: Choice) -> list[dict[str, Any]]:
    """vLLM's form of the weights that made a completion's tokens: a version for each span of them."""
    versions = choice.versions
    if not versions or versions[0][1]:  # it began before anybody had named them
        versions = [(_FIRST_VERSION, 0), *versions]
    ends = [start for _, start in versions[1:]] + [choice.num_tokens]
    spans = [
        {"version": version, "start": start, "end": end}
        for (version, start), end in zip(versions, ends, strict=True)
        if start < end
    ]
    return spans or [{"version": versions[-1][0], "start": 0, "end": 0}]


class OpenAIAnswers:
    """The part that both interfaces share.

    Args:
        head: id, created, model, system_fingerprint.
        usage: a stream ends with a chunk of it.
        usage_in_each: and each chunk has it.
        texts: of tokens, where their log-probabilities are wanted.
        prompt_texts: likewise of the prompt's.
        gives_ids: the answer has token ids too.
        gives_versions: and versions of weights.
    """

    chunk_object: str
    answer_object: str

    def __init__(
        self,
        head: dict[str, Any],
        *,
        usage: bool = False,
        usage_in_each: bool = False,
        texts: TokenTexts | None = None,
        prompt_texts: TokenTexts | None = None,
        gives_ids: bool = False,
        gives_versions: bool = False,
    ) -> None:
        self._gives_versions = gives_versions
        self._answer_head = {"object": self.answer_object, **head}
        self._chunk_head = {"object": self.chunk_object, **head}
        self._usage = usage
        self._usage_in_each = usage_in_each
        self._texts = texts
        self._prompt_texts = prompt_texts
        self._gives_ids = gives_ids
        # A chunk of text and token ids alone, which nearly all are, is bytes around them.
        self._is_plain = texts is None and not usage_in_each
        self._tells_tokens = gives_ids or not self._is_plain  # also those that have no text yet
        self._prefix = f'data: {encode(self._chunk_head).decode()[:-1]},"choices":[{{"index":'

    def begin(self, job: Job) -> bytes:
        return b""

    def chunk(self, job: Job, choice: Choice) -> bytes:
        if not (choice.text or choice.finish_reason or (choice.token_ids and self._tells_tokens)):
            return b""
        if self._is_plain and choice.finish_reason is None and not self._has_more(choice):
            ids = f',"token_ids":{choice.token_ids}' if self._gives_ids else ""
            data = self._prefix + str(choice.index) + self._plain(choice.text, ids)
            choice.sent()
            return data.encode()
        entry = {"index": choice.index, **self._news(choice)}
        entry |= {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
        if self._gives_ids:
            entry |= self._ids(choice)
        if self._gives_versions and choice.finish_reason is not None:
            entry["weight_versions"] = versions_of(choice)
        extra = {"usage": usage_of(job)} if self._usage_in_each else {}
        choice.sent()
        return event(self._chunk_head | {"choices": [entry]} | extra)

    def _ids(self, choice: Choice) -> dict[str, Any]:
        """The token ids of a chunk; the first has the prompt's too."""
        prompt = {} if choice.has_begun else {"prompt_token_ids": choice.prompt.token_ids}
        return {"token_ids": list(choice.token_ids)} | prompt

    def _has_more(self, choice: Choice) -> bool:
        """True if a chunk has more than text and token ids: the first one with ids has the prompt's too."""
        return self._gives_ids and not choice.has_begun

    def _plain(self, text: str, ids: str) -> str:
        """A chunk behind its choice's index."""
        raise NotImplementedError

    def _news(self, choice: Choice) -> dict[str, Any]:
        """A chunk's entry: text and log-probabilities."""
        raise NotImplementedError

    def tail(self, job: Job) -> bytes:
        if not self._usage:
            return DONE
        return event(self._chunk_head | {"choices": [], "usage": usage_of(job), "timing": job.timing()}) + DONE

    def failure(self, error: ApiError) -> bytes:
        return b"data: " + error.body + b"\n\n" + DONE

    def refusal(self, error: ApiError) -> bytes:
        return openai_refusal(error)

    def whole(self, job: Job) -> bytes:
        choices = []
        for choice in job.choices:
            entry = {"index": choice.index, **self._answer(choice)}
            entry |= {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
            if self._gives_ids:
                entry |= {"token_ids": choice.token_ids, "prompt_token_ids": choice.prompt.token_ids}
            if self._gives_versions:
                entry["weight_versions"] = versions_of(choice)
            if self._prompt_texts is not None:
                entry["prompt_logprobs"] = prompt_logprobs(self._prompt_texts, choice.prompt.scores)
            choices.append(entry)
        told = [prompt.kv_transfer_params for prompt in job.prompts if prompt.kv_transfer_params is not None]
        transfer = {"kv_transfer_params": told[0]} if told else {}
        return encode(self._answer_head | {"choices": choices, "usage": usage_of(job)} | transfer)

    def _answer(self, choice: Choice) -> dict[str, Any]:
        """An answer's entry: text and log-probabilities."""
        raise NotImplementedError


class ChatAnswers(OpenAIAnswers):
    """The answers of /v1/chat/completions.

    Args:
        echo: of the prompt; each answer begins with it.
    """

    chunk_object = "chat.completion.chunk"
    answer_object = "chat.completion"

    def __init__(self, head: dict[str, Any], *, echo: str = "", **options: Any) -> None:
        super().__init__(head, **options)
        self._echo = echo

    def begin(self, job: Job) -> bytes:
        entry = {"delta": {"role": "assistant", "content": self._echo}, "logprobs": None, "finish_reason": None}
        extra = {"usage": usage_of(job)} if self._usage_in_each else {}
        return b"".join(
            event(self._chunk_head | {"choices": [{"index": choice.index, **entry}]} | extra) for choice in job.choices
        )

    def _plain(self, text: str, ids: str) -> str:
        return f',"delta":{{"content":{encode_basestring(text)}}},"logprobs":null,"finish_reason":null{ids}}}]}}\n\n'

    def _news(self, choice: Choice) -> dict[str, Any]:
        return {"delta": {"content": choice.text} if choice.text else {}, "logprobs": self._logprobs(choice)}

    def _answer(self, choice: Choice) -> dict[str, Any]:
        message = {"role": "assistant", "content": self._echo + choice.text, "refusal": None}
        return {"message": message, "logprobs": self._logprobs(choice)}

    def _logprobs(self, choice: Choice) -> dict[str, Any] | None:
        return None if self._texts is None else chat_logprobs(self._texts, choice.scores)


class CompletionAnswers(OpenAIAnswers):
    """The answers of /v1/completions.

    Args:
        echo_of: gives the text of a prompt to repeat; None: no prompt is repeated.
    """

    chunk_object = "text_completion"
    answer_object = "text_completion"

    def __init__(self, head: dict[str, Any], echo_of: Callable[[PromptRun], str] | None, **options: Any) -> None:
        super().__init__(head, **options)
        self._echo_of = echo_of

    def _has_more(self, choice: Choice) -> bool:
        return self._is_echo(choice) or super()._has_more(choice)

    def _is_echo(self, choice: Choice) -> bool:
        """True if a chunk begins with the prompt."""
        return self._echo_of is not None and not choice.has_begun

    def _plain(self, text: str, ids: str) -> str:
        return f',"text":{encode_basestring(text)},"logprobs":null,"finish_reason":null{ids}}}]}}\n\n'

    def _news(self, choice: Choice) -> dict[str, Any]:
        text, logprobs = choice.text, None
        is_echo = self._is_echo(choice)
        echo = self._echo(choice) if is_echo else ""
        if is_echo:
            choice.begin = len(echo)
        if self._texts is not None:
            logprobs = self._logprobs(self._texts, choice, echo if is_echo else None)
        return {"text": echo + text, "logprobs": logprobs}

    _answer = _news

    def _echo(self, choice: Choice) -> str:
        return "" if self._echo_of is None else self._echo_of(choice.prompt)

    def _logprobs(self, texts: TokenTexts, choice: Choice, echo: str | None) -> dict[str, Any]:
        """Log-probabilities of the answer's tokens, behind the prompt's if it is repeated."""
        token_ids: list[int] = list(choice.token_ids)
        scores: list[Scores | None] = list(choice.scores)
        offsets = [choice.begin + offset for offset in choice.offsets]
        if echo is not None:
            token_ids = [*choice.prompt.token_ids, *token_ids]
            scores = [None, *choice.prompt.scores, *scores]
            offsets = [*texts.offsets_in(echo, choice.prompt.token_ids), *offsets]
        return completion_logprobs(texts, token_ids, scores, offsets)
