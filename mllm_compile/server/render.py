"""The endpoints that tell what a request's prompts are, and generate nothing: routers ask them for token ids.

Prompts and parameters come of the code that answers such a request. The answer has the fields of vLLM's GenerateRequest
(vllm/entrypoints/serve/disagg/protocol.py), one for a chat and a list for completions.
"""

from __future__ import annotations

import secrets
from typing import Any

import msgspec

from mllm_compile.engine.requests import as_priority
from mllm_compile.server.api.errors import bad_request
from mllm_compile.server.api.fields import check_request_id
from mllm_compile.server.api.interfaces import ApiRequest, ChatRequest, CompletionRequest
from mllm_compile.server.endpoints import Answer, Endpoint, ToldBytes, from_body
from mllm_compile.server.flow.job import JSON
from mllm_compile.server.flow.memory import Share
from mllm_compile.server.front import Front
from mllm_compile.server.wire.messages import params_to_wire

SUFFIX = "/render"  # behind the path of the requests


def render(kind: type[ChatRequest | CompletionRequest]) -> Endpoint:
    """The endpoint for an interface's requests."""

    def endpoint(front: Front) -> Answer:
        async def told(body: bytes, client: str, share: Share) -> ToldBytes:
            request = kind(body)
            if request.has_media:
                raise bad_request("messages: expected texts, as what images become is not told", "messages")
            rendered, unread = await _rendered(front, request, kind.prefix, len(body))
            is_list = kind is CompletionRequest
            answer = msgspec.json.encode(rendered if is_list else rendered[0])
            share.hold(len(body) + len(answer))  # until it is sent
            return answer, [*request.ignored, *unread]

        return from_body(front, told, JSON)

    return endpoint


async def _rendered(
    front: Front, request: ApiRequest, prefix: str, num_bytes: int
) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Each prompt's GenerateRequest; and the fields that the model's template does not read."""
    fields = request.fields
    facts = await front.facts_of_texts(fields.model)
    if facts.pooling is not None:
        raise facts.pooling.not_generating()
    plan = await front.in_thread(num_bytes, request.plan, facts)
    told = {
        "model": fields.model or front.names.first,
        "features": None,  # of images
        "sampling_params": params_to_wire(plan.params),
        "stream": bool(fields.stream),
        "cache_salt": fields.cache_salt,
        "priority": 0 if fields.priority is None else as_priority(fields.priority),
    }
    name = prefix + (check_request_id(fields.request_id) or secrets.token_hex(12))
    names = [name] if len(plan.prompts) == 1 else [f"{name}-{index}" for index in range(len(plan.prompts))]
    return [
        {"request_id": name, "token_ids": prompt.token_ids, **told}
        for name, prompt in zip(names, plan.prompts, strict=True)
    ], plan.unread
