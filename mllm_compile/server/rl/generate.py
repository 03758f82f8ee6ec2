"""vLLM's /inference/v1/generate: token ids in, token ids out, with what a trainer needs of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from mllm_compile.runtime.sampling.params import MAX_LOGPROBS, SamplingParams
from mllm_compile.server.api import prompts
from mllm_compile.server.api.answers import versions_of
from mllm_compile.server.api.errors import bad_request, openai_refusal
from mllm_compile.server.api.fields import CompletionFields, read_fields
from mllm_compile.server.api.interfaces import AnswerPlan
from mllm_compile.server.api.logprobs import TokenTexts, floored, prompt_logprobs
from mllm_compile.server.engine_facts import EngineFacts
from mllm_compile.server.flow.choice import Choice
from mllm_compile.server.flow.job import Job
from mllm_compile.server.rl.extras import kept_tokens, npy_of
from mllm_compile.server.rl.whole import WholeAnswers
from mllm_compile.server.wire.messages import Scores

# Fields of vLLM's SamplingParams that ask for nothing with these values, which clients send along.
_NOTHING: Mapping[str, Sequence[Any]] = {
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (-1,),
    "output_kind": (0, 1, 2),
}
_START = "routed_experts_prompt_start"
_encode = msgspec.json.encode


class TokensFields(msgspec.Struct, kw_only=True):
    """The fields of /inference/v1/generate; `sampling_params` has those of SamplingParams."""

    token_ids: list[int]
    sampling_params: dict[str, Any] = {}
    model: str | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    priority: Any = None
    stream: bool | None = None
    return_token_ids: bool | None = None  # they always are
    routed_experts_prompt_start: int = 0  # tokens whose experts the client has; also among sampling_params

    path: ClassVar[str] = "/inference/v1/generate"


class TokensRequest:
    """A request of /inference/v1/generate."""

    prefix = ""
    refusal = staticmethod(openai_refusal)
    num_prompts = 1
    is_quick = False
    has_media = False

    def __init__(self, body: bytes) -> None:
        given, self.ignored = read_fields(TokensFields, body, {})
        if given.stream:
            raise bad_request("stream: expected false. /v1/completions streams, with return_token_ids")
        self._given = given
        self.fields = CompletionFields(
            prompt=given.token_ids,
            model=given.model,
            request_id=given.request_id,
            cache_salt=given.cache_salt,
            priority=given.priority,
        )

    def plan(self, facts: EngineFacts) -> AnswerPlan:
        wanted = dict(self._given.sampling_params)
        first = taken_start(wanted, self._given.routed_experts_prompt_start)
        params = tokens_params(wanted)
        found = prompts.completion_prompts(facts, self.fields, [self._given.token_ids], params)
        return AnswerPlan(found, params, lambda head: TokensAnswers(head, params, first), has_text=bool(params.stop))


def tokens_params(given: Mapping[str, Any]) -> SamplingParams:
    """The parameters of a body of vLLM's form; without max_tokens as many as the context leaves.

    Raises:
        ApiError, RequestError: a parameter is unknown, or has another value than is expected.
    """
    wanted: dict[str, Any] = {"max_tokens": None}
    for name, value in given.items():
        if value is not None and value not in _NOTHING.get(name, ()):
            wanted[name] = value
    params = SamplingParams(**wanted)
    check_logprobs(params)
    return params


def check_logprobs(params: SamplingParams) -> None:
    """
    Raises:
        ApiError: log-probabilities of the whole vocabulary, which no client could read as JSON.
    """
    if params.logprobs is not None and params.logprobs < 0:
        raise bad_request(f"logprobs: expected an integer from 0 to {MAX_LOGPROBS}, got {params.logprobs}")


def taken_start(wanted: dict[str, Any], otherwise: int = 0) -> int:
    """The first token whose experts a client has not, which vLLM has among the parameters; it is taken from there.

    Raises:
        ApiError: it is no place in a text.
    """
    first = wanted.pop(_START, None)
    if not isinstance(first, int | None):
        raise bad_request(f"{_START}: expected an integer, got {str(first)[:50]!r}", _START)
    return check_start(_START, otherwise if first is None else first)


def check_start(name: str, first: int) -> int:
    """
    Raises:
        ApiError: it is no place in a text.
    """
    if first < 0:
        raise bad_request(f"{name}: expected at least 0, got {first}", name)
    return first


class TokensAnswers(WholeAnswers):
    """The answers of /inference/v1/generate."""

    def __init__(self, head: Mapping[str, Any], params: SamplingParams, first: int) -> None:
        self._head, self._params, self._first = head, params, first
        self._texts = TokenTexts(None)

    def whole(self, job: Job) -> bytes:
        prompt = job.prompts[0]
        scores = None if self._params.prompt_logprobs is None else prompt_logprobs(self._texts, prompt.scores)
        choices = [self._choice(choice) for choice in job.choices]
        usage = {
            "prompt_tokens": job.num_prompt_tokens,
            "completion_tokens": job.num_output_tokens,
            "cached_tokens": job.num_cached_tokens,
        }
        answer = {"request_id": job.name, "model": self._head["model"], "choices": choices, "prompt_logprobs": scores}
        return _encode(answer | {"usage": usage})

    def _choice(self, choice: Choice) -> dict[str, Any]:
        has_scores = self._params.logprobs is not None
        return {
            "index": choice.index,
            "token_ids": choice.token_ids,
            "logprobs": {"content": [_content(one) for one in choice.scores]} if has_scores else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "sampling_mask": kept_tokens(choice.scores) if self._params.has_sampling_mask else None,
            "routed_experts": npy_of(choice, self._first),
            "weight_versions": versions_of(choice),
        }


def _content(scores: Scores) -> dict[str, Any]:
    """A token's entry in chat's shape, with its id and rank."""
    top = [
        {"token": f"token_id:{token_id}", "token_id": token_id, "logprob": floored(logprob)}
        for token_id, logprob in scores.top
    ]
    return {
        "token": f"token_id:{scores.token_id}",
        "token_id": scores.token_id,
        "logprob": floored(scores.logprob),
        "rank": scores.rank,
        "top_logprobs": top,
    }
