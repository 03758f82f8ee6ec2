"""SGLang's /generate: texts or token ids in, a text with token ids and their scores out."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from mllm_compile.runtime.sampling.params import SamplingParams
from mllm_compile.runtime.sampling.structured_params import StructuredOutputsParams
from mllm_compile.server.api import prompts
from mllm_compile.server.api.answers import versions_of
from mllm_compile.server.api.errors import bad_request, openai_refusal
from mllm_compile.server.api.fields import CompletionFields, read_fields
from mllm_compile.server.api.interfaces import AnswerPlan
from mllm_compile.server.api.logprobs import floored
from mllm_compile.server.engine_facts import EngineFacts
from mllm_compile.server.flow.choice import Choice
from mllm_compile.server.flow.job import Job
from mllm_compile.server.rl.extras import int32_of, kept_tokens
from mllm_compile.server.rl.generate import check_logprobs, check_start
from mllm_compile.server.rl.whole import WholeAnswers

_MAX_TOKENS = 128  # SGLang's, without max_new_tokens
_MODE = "tempered_logprobs"  # SGLang's log-probabilities
# SGLang's name of a parameter → ours; the others are the same.
_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "no_stop_trim": "include_stop_str_in_output",
}
_FORMS = {"json_schema": "json", "regex": "regex", "ebnf": "grammar"}
_NOTHING: Mapping[str, Sequence[Any]] = {
    "spaces_between_special_tokens": (True,),
    "stop_regex": ([],),
    "custom_params": ({},),
    "stream_interval": (1,),
}
_encode = msgspec.json.encode
Item = str | list[int]


class SGLangFields(msgspec.Struct, kw_only=True):
    """The fields of /generate."""

    text: str | list[str] | None = None
    input_ids: list[Any] | None = None  # of one prompt, or a list of each
    sampling_params: dict[str, Any] = {}
    rid: str | None = None
    model: str | None = None
    stream: bool | None = None
    priority: Any = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    return_text_in_logprobs: bool | None = None
    return_sampling_mask: bool | None = None
    return_routed_experts: bool | None = None
    routed_experts_start_len: int = 0
    logprobs_mode: str | None = None
    extra_key: str | None = None

    path: ClassVar[str] = "/generate"


class SGLangRequest:
    """A request of /generate."""

    prefix = ""
    refusal = staticmethod(openai_refusal)
    is_quick = False
    has_media = False

    def __init__(self, body: bytes) -> None:
        given, self.ignored = read_fields(SGLangFields, body, {})
        if given.stream:
            raise bad_request("stream: expected false: an answer comes whole. Use /v1/completions with stream")
        if (given.text is None) == (given.input_ids is None):
            raise bad_request("input_ids: expected either text or input_ids")
        self._given = given
        prompt = given.input_ids if given.text is None else given.text
        self._is_list = isinstance(prompt, list) and not (prompt and isinstance(prompt[0], int))
        self._items: list[Item] = prompts.prompt_items(prompt)
        self.num_prompts = len(self._items)
        self.fields = CompletionFields(
            prompt=prompt, model=given.model, request_id=given.rid, cache_salt=given.extra_key, priority=given.priority
        )

    def plan(self, facts: EngineFacts) -> AnswerPlan:
        params = _params_of(self._given)
        found = prompts.completion_prompts(facts, self.fields, self._items, params)
        is_list = self._is_list or params.n > 1
        return AnswerPlan(found, params, lambda head: SGLangAnswers(self._given, params, facts, is_list=is_list))


def _params_of(given: SGLangFields) -> SamplingParams:
    """
    Raises:
        ApiError, RequestError: a parameter is unknown, or has another value than is expected.
    """
    wanted: dict[str, Any] = {"max_tokens": _MAX_TOKENS}
    forms: dict[str, Any] = {}
    for name, value in given.sampling_params.items():
        if value is None or value in _NOTHING.get(name, ()):
            continue
        if name in _FORMS:
            forms[_FORMS[name]] = value
        else:
            wanted[_NAMES.get(name, name)] = value
    if forms:
        wanted["structured_outputs"] = StructuredOutputsParams(**forms)
    if given.return_routed_experts:
        wanted["return_routed_experts"] = True
        check_start("routed_experts_start_len", given.routed_experts_start_len)
    if given.return_sampling_mask:
        wanted["return_sampling_mask"] = True
    if given.return_logprob or given.return_sampling_mask:
        wanted["logprobs"] = given.top_logprobs_num or 0
        wanted["logprobs_mode"] = given.logprobs_mode or _MODE
    if given.return_logprob and given.logprob_start_len is not None and given.logprob_start_len >= 0:
        wanted["prompt_logprobs"] = given.top_logprobs_num or 0
    params = SamplingParams(**wanted)
    check_logprobs(params)
    return params


class SGLangAnswers(WholeAnswers):
    """The answers of /generate: an object, or a list of one for each completion."""

    def __init__(self, given: SGLangFields, params: SamplingParams, facts: EngineFacts, *, is_list: bool) -> None:
        self._given, self._params, self._is_list = given, params, is_list
        self._decode = None if facts.tokenizer is None else facts.tokenizer.decode
        self._shows_texts = bool(given.return_text_in_logprobs)

    def whole(self, job: Job) -> bytes:
        answers = [self._answer(job, choice) for choice in job.choices]
        return _encode(answers if self._is_list else answers[0])

    def _answer(self, job: Job, choice: Choice) -> dict[str, Any]:
        versions = versions_of(choice)
        info: dict[str, Any] = {
            "id": job.name,
            "finish_reason": self._finish(choice),
            "prompt_tokens": len(choice.prompt.token_ids),
            "completion_tokens": choice.num_tokens,
            "cached_tokens": choice.prompt.num_cached_tokens,
            "weight_version": versions[-1]["version"],
            "weight_versions": versions,
            "e2e_latency": time.monotonic() - job.arrived_s,
        }
        if self._given.return_logprob:
            info |= self._logprobs(choice)
        if self._params.has_sampling_mask:
            info["output_token_sampling_mask"] = kept_tokens(choice.scores)
        if self._params.return_routed_experts:
            info["routed_experts"] = int32_of(choice, self._given.routed_experts_start_len)
        return {"text": choice.text, "output_ids": choice.token_ids, "meta_info": info}

    def _finish(self, choice: Choice) -> dict[str, Any]:
        reason = choice.finish_reason
        if reason == "length":
            return {"type": "length", "length": choice.num_tokens}
        if reason != "stop":
            return {"type": reason, "message": None}
        matched = choice.stop_reason
        if matched is None and choice.token_ids:
            matched = choice.token_ids[-1]
        return {"type": "stop", "matched": matched}

    def _logprobs(self, choice: Choice) -> dict[str, Any]:
        found: dict[str, Any] = {"output_token_logprobs": [self._triple(s.logprob, s.token_id) for s in choice.scores]}
        scored = choice.prompt.scores
        first = self._given.logprob_start_len
        ids = choice.prompt.token_ids
        found["input_token_logprobs"] = []
        if first is not None and first >= 0 and first < len(ids):
            entries = [self._triple(None, ids[0]), *(self._triple(s.logprob, s.token_id) for s in scored)]
            found["input_token_logprobs"] = entries[first:]
        if self._params.logprobs:
            found["output_top_logprobs"] = [[self._triple(score, i) for i, score in s.top] for s in choice.scores]
        return found

    def _triple(self, logprob: float | None, token_id: int) -> list[Any]:
        text = self._decode([token_id], False) if self._shows_texts and self._decode is not None else None
        return [None if logprob is None else floored(logprob), token_id, text]
