"""SkyRL's own paths, as 0.4 has them beside vLLM's: token ids in and out with experts and sampling masks, adapters."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from mllm_compile.runtime.sampling.params import SamplingParams
from mllm_compile.server import adapters
from mllm_compile.server.api import prompts
from mllm_compile.server.api.errors import bad_request, openai_refusal
from mllm_compile.server.api.fields import CompletionFields, read_fields
from mllm_compile.server.api.interfaces import AnswerPlan
from mllm_compile.server.api.logprobs import floored
from mllm_compile.server.endpoints import Endpoint
from mllm_compile.server.engine_facts import EngineFacts
from mllm_compile.server.flow.job import Job
from mllm_compile.server.generate import generate_endpoint
from mllm_compile.server.rl.endpoint import refused
from mllm_compile.server.rl.extras import packed_experts, packed_support
from mllm_compile.server.rl.generate import taken_start, tokens_params
from mllm_compile.server.rl.whole import WholeAnswers

_MOST_SUPPORT = 1 << 24  # ids of a request's rows: 64 MiB
_NO_DELTAS = "SkyRL's checkpoint deltas are not read: send weights by /update_weights, or folders to --rl-folder"
_NO_DRAFTS = "a draft model's weights are not updated: /start_weight_update begins an update of the model's own"


class SkyRLFields(msgspec.Struct, kw_only=True):
    """The fields of /skyrl/v1/generate; `sampling_params` has those of SamplingParams."""

    token_ids: list[int]
    sampling_params: dict[str, Any] = {}
    model: str | None = None
    cache_salt: str | None = None
    return_sample_support: bool = False

    path: ClassVar[str] = "/skyrl/v1/generate"


class SkyRLRequest:
    """A request of /skyrl/v1/generate, which asks for experts, for the tokens that filters kept, or both."""

    prefix = ""
    refusal = staticmethod(openai_refusal)
    num_prompts = 1
    is_quick = False
    has_media = False

    def __init__(self, body: bytes) -> None:
        self._given, self.ignored = read_fields(SkyRLFields, body, {})
        given = self._given
        self.fields = CompletionFields(prompt=given.token_ids, model=given.model, cache_salt=given.cache_salt)

    def plan(self, facts: EngineFacts) -> AnswerPlan:
        """
        Raises:
            ApiError, RequestError: a parameter is refused, or what is asked for is not kept.
        """
        wanted = dict(self._given.sampling_params)
        first = taken_start(wanted)
        width = wanted.get("top_k") if self._given.return_sample_support else 0
        if not isinstance(width, int) or (self._given.return_sample_support and width <= 1):
            raise bad_request(f"return_sample_support: expected top_k above 1 beside it, got {str(width)[:50]!r}")
        if width:
            wanted["return_sampling_mask"] = True
            wanted["logprobs"] = wanted.get("logprobs") or 0
            wanted.setdefault("logprobs_mode", "processed_logprobs")  # the draw's, as SkyRL's servers have them
        if not width or facts.keeps_routes:
            wanted["return_routed_experts"] = True
        params = tokens_params(wanted)
        _check_rows(width, params, facts.hello.max_model_len)
        found = prompts.completion_prompts(facts, self.fields, [self._given.token_ids], params)
        return AnswerPlan(found, params, lambda head: SkyRLAnswers(first, width), has_text=bool(params.stop))


def _check_rows(width: int, params: SamplingParams, max_model_len: int) -> None:
    """
    Raises:
        ApiError: rows of that width may take too much memory: they are filled up, whatever filters keep.
    """
    num_tokens = max_model_len if params.max_tokens is None else min(params.max_tokens, max_model_len)
    if params.n * width * num_tokens > _MOST_SUPPORT:
        raise bad_request(
            f"return_sample_support: expected up to {_MOST_SUPPORT:,} ids in all answers, got top_k {width:,} for "
            f"{params.n} of up to {num_tokens:,} tokens. Lower top_k, max_tokens or n."
        )


class SkyRLAnswers(WholeAnswers):
    """The answers of /skyrl/v1/generate.

    Args:
        first: of the tokens whose experts the client has not.
        width: of a row of kept tokens; 0: nobody asks for them.
    """

    def __init__(self, first: int, width: int) -> None:
        self._first, self._width = first, width

    def whole(self, job: Job) -> bytes:
        choices = [
            {
                "token_ids": choice.token_ids,
                "finish_reason": choice.finish_reason,
                "logprobs": {"content": [{"logprob": floored(one.logprob)} for one in choice.scores]},
                "routed_experts": packed_experts(choice, self._first),
                "rollout_sample_support": packed_support(choice, self._width) if self._width else None,
            }
            for choice in job.choices
        ]
        return msgspec.json.encode({"choices": choices})


BODIES: dict[str, type[msgspec.Struct]] = {
    SkyRLFields.path: SkyRLFields,
    "/skyrl/v1/load_lora_adapter": adapters.LoadFields,
}
PATHS: tuple[tuple[str, str, Endpoint], ...] = (
    ("POST", SkyRLFields.path, lambda front: generate_endpoint(front, SkyRLRequest)),
    ("POST", "/skyrl/v1/load_lora_adapter", adapters.replace),
    ("POST", "/fetch_weights", refused(_NO_DELTAS)),
    ("POST", "/start_draft_weight_update", refused(_NO_DRAFTS)),
)
