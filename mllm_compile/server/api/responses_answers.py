"""The answers of /v1/responses: items of reasoning, a message's text, and calls of functions."""

from __future__ import annotations

from typing import Any

import msgspec

from mllm_compile.server.api.answers import encode
from mllm_compile.server.api.blocks import Block, Blocks, Change, Kind
from mllm_compile.server.api.errors import ApiError, openai_refusal
from mllm_compile.server.flow.choice import Choice
from mllm_compile.server.flow.job import Job

_PREFIXES = {Kind.TEXT: "msg", Kind.REASONING: "rs", Kind.CALL: "fc"}
_TEXTS = {Kind.TEXT: "output_text", Kind.REASONING: "reasoning_text"}


class ResponsesAnswers:
    """The answers of /v1/responses; they have one completion.

    Args:
        is_read: a parser reads it.
        said: what the request has said of itself, which the answer repeats, as JSON.
    """

    def __init__(self, head: dict[str, Any], is_read: bool, said: dict[str, msgspec.Raw]) -> None:
        self._id = head["id"].partition("_")[2]
        self._response = {
            "id": head["id"],
            "object": "response",
            "created_at": head["created"],
            "model": head["model"],
            "error": None,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            **said,
        }
        self._blocks = Blocks(is_read, shows_reasoning=True)
        self._number = 0

    def begin(self, job: Job) -> bytes:
        response = self._response | {"status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def chunk(self, job: Job, choice: Choice) -> bytes:
        events = b"".join(self._told(*change) for change in self._blocks.news(choice))
        choice.sent()
        return events

    def tail(self, job: Job) -> bytes:
        events = b"".join(self._told(*change) for change in self._blocks.end(job.choices[0]))
        response = self._ended(job, self._blocks.all)
        return events + self._event(f"response.{response['status']}", response=response)

    def whole(self, job: Job) -> bytes:
        return encode(self._ended(job, self._blocks.whole(job.choices[0])))

    def failure(self, error: ApiError) -> bytes:
        return self._event("error", code=error.code, message=error.message, param=error.param)

    def refusal(self, error: ApiError) -> bytes:
        return openai_refusal(error)

    def _told(self, change: Change, block: Block, text: str) -> bytes:
        """The events of what happens to a block."""
        at = {"item_id": self._item_id(block), "output_index": block.index}
        kind = "function_call_arguments" if block.kind is Kind.CALL else _TEXTS[block.kind]
        place = at if block.kind is Kind.CALL else at | {"content_index": 0}
        scores: dict[str, Any] = {"logprobs": []} if block.kind is Kind.TEXT else {}
        if change is Change.GROWS:
            return self._event(f"response.{kind}.delta", **place, delta=text, **scores)
        has_part = block.kind is not Kind.CALL
        if change is Change.BEGINS:
            item = self._item(block, "in_progress")
            added = self._event("response.output_item.added", output_index=block.index, item=item)
            return added + (self._event("response.content_part.added", **place, part=_part(block)) if has_part else b"")
        whole = {"text" if has_part else "arguments": block.text}
        return b"".join(
            (
                self._event(f"response.{kind}.done", **place, **whole, **scores),
                self._event("response.content_part.done", **place, part=_part(block)) if has_part else b"",
                self._event("response.output_item.done", output_index=block.index, item=self._item(block)),
            )
        )

    def _ended(self, job: Job, blocks: list[Block]) -> dict[str, Any]:
        is_cut = job.choices[0].finish_reason == "length"
        return self._response | {
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [self._item(block) for block in blocks],
            "usage": {
                "input_tokens": job.num_prompt_tokens,
                "input_tokens_details": {"cached_tokens": job.num_cached_tokens, "cache_write_tokens": 0},
                "output_tokens": job.num_output_tokens,
                "output_tokens_details": {"reasoning_tokens": job.num_reasoning_tokens},
                "total_tokens": job.num_prompt_tokens + job.num_output_tokens,
            },
        }

    def _item_id(self, block: Block) -> str:
        return f"{_PREFIXES[block.kind]}_{self._id}_{block.index}"

    def _item(self, block: Block, status: str | None = None) -> dict[str, Any]:
        """An item; without a status it has ended, and has its content."""
        content = [] if status == "in_progress" else [_part(block)]
        common = {
            "id": self._item_id(block),
            "status": status or ("completed" if block.is_whole else "incomplete"),
        }
        if block.kind is Kind.TEXT:
            return common | {"type": "message", "role": "assistant", "content": content}
        if block.kind is Kind.REASONING:
            return common | {"type": "reasoning", "summary": [], "content": content}
        assert block.call is not None, "of a call"
        call = {"call_id": block.call.id, "name": block.call.name, "arguments": block.text}
        return common | {"type": "function_call", **call}

    def _event(self, kind: str, **data: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return f"event: {kind}\ndata: ".encode() + encode({"type": kind, **data, "sequence_number": number}) + b"\n\n"


def _part(block: Block) -> dict[str, Any]:
    """The part that an item's text is in."""
    if block.kind is Kind.REASONING:
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}
