"""Traces a model that pools as a function of packed texts, once for all sizes; and its head as one of rows.

Shape legend: T tokens, S texts, W width of a hidden state.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from mllm_compile.model.hf_model import HFModel
from mllm_compile.model.pooling.build import body_of, kinds_of_tokens
from mllm_compile.model.pooling.texts_hook import attending_to_texts
from mllm_compile.model.towers.segments_hook import say_bounds
from mllm_compile.model.trace import Trace, sized, trace_text

_SAMPLE_TOKENS = 48  # any size does: the symbols are unbacked
_SAMPLE_BOUNDS = 4
_SAMPLE_ROWS = 3


def trace_body(hf_model: HFModel, device: str, max_tokens: int) -> Trace:
    """The hidden states [T, W] of texts; inputs `input_ids` [T], `positions` [T], `kinds` [T] and `cu_seqlens` [S + 1],
    as far as the model reads them.

    Raises:
        UnsupportedModelError: the model cannot be traced as one graph, or branches on the number of tokens.
    """
    inputs = {name: sized("T", (_SAMPLE_TOKENS,), torch.int64, device) for name in ("input_ids", "positions", "kinds")}
    inputs["cu_seqlens"] = sized("cu_seqlens", (_SAMPLE_BOUNDS,), torch.int32, device)
    body = body_of(hf_model.model)
    with attending_to_texts(body):
        trace = trace_text(
            hf_model, _PackedTexts(body, max_tokens, hf_model.position_offset), inputs, device, max_tokens
        )
    trace.graph_module.graph.eliminate_dead_code()
    trace.graph_module.recompile()
    return trace


def arguments_besides_ids(body: Any) -> dict[str, Any]:
    """The arguments that a body is always told."""
    return {"use_cache": False} if "use_cache" in inspect.signature(type(body).forward).parameters else {}


class _PackedTexts(torch.nn.Module):
    def __init__(self, body: Any, max_tokens: int, position_offset: int) -> None:
        super().__init__()
        self.body, self.max_tokens, self.position_offset = body, max_tokens, position_offset
        arguments = inspect.signature(type(body).forward).parameters
        self.takes_positions = "position_ids" in arguments
        self.takes_kinds = kinds_of_tokens(body) > 0
        self.always = arguments_besides_ids(body)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, kinds: torch.Tensor, cu_seqlens: torch.Tensor
    ) -> torch.Tensor:
        torch._check(input_ids.shape[0] >= 1)
        torch._check(input_ids.shape[0] <= self.max_tokens)
        say_bounds(cu_seqlens)
        said: dict[str, Any] = {"input_ids": input_ids[None], **self.always}
        if self.takes_positions:
            said["position_ids"] = positions[None] + self.position_offset if self.position_offset else positions[None]
        if self.takes_kinds:
            said["token_type_ids"] = kinds[None]
        hidden: torch.Tensor = self.body(**said)[0]
        return hidden[0]
