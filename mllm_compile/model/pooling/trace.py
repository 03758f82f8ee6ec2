"""Traces a model that pools as a function of packed texts, once for all sizes; and its head as one of rows.

Shape legend: T tokens, S texts, W width of a hidden state.
"""

from __future__ import annotations

import inspect
import operator
from typing import Any

import torch
from torch import fx

from mllm_compile.model.hf_model import HFModel
from mllm_compile.model.pooling.build import body_of, is_with_decoder, kinds_of_tokens
from mllm_compile.model.pooling.texts_hook import attending_to_texts
from mllm_compile.model.towers.segments_hook import say_bounds
from mllm_compile.model.trace import Trace, sized, trace_text
from mllm_compile.model.written_attention.find import KNOWS_ITS_MASK
from mllm_compile.passes.match.nodes import is_op, is_symbolic

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
    attend_within_texts(trace.graph_module.graph)
    trace.graph_module.graph.eliminate_dead_code(is_impure_node=_stays)
    trace.graph_module.recompile()
    return trace


def attend_within_texts(graph: fx.Graph) -> None:
    """Gives attention that was found written out in the trace the bounds of texts: it hides no key, or those behind.

    A bias by distance stays what it was, and is refused (supported.py), as is a model whose masks hide more: none is
    made in a trace, and the self-check compares with what its masks hide.
    """
    attention = [node for node in graph.nodes if is_op(node, "attention") and KNOWS_ITS_MASK in node.meta]
    for node in attention:
        q, k, v, _, scale, cap, left, refusals, slopes = node.args
        if slopes:
            continue
        right = 0 if node.meta[KNOWS_ITS_MASK] else -1
        node.target = torch.ops.mllm.segment_attention.default
        node.args = (q, k, v, _bounds_of(graph), scale, refusals, left, right, *(None,) * 5, cap)


def _stays(node: fx.Node) -> bool:
    """True for a call that stays without a user: one that writes into a tensor which is read, as latent attention
    writes its keys' parts. Asked from the end of the graph, where dead readers are gone."""
    if not _writes(node):
        return bool(node.is_impure())
    written: Any = node.args[0]
    while written.target is operator.getitem:
        written = written.args[0]
    return _is_read(written)


def _writes(node: fx.Node) -> bool:
    is_method = node.op == "call_method" and str(node.target).endswith("_") and not str(node.target).endswith("__")
    return is_method or node.target is operator.setitem


def _is_read(tensor: fx.Node) -> bool:
    readers = (user for user in tensor.users if not _writes(user))
    return any(user.target is not operator.getitem or _is_read(user) for user in readers)


def _bounds_of(graph: fx.Graph) -> fx.Node:
    """The input of bounds, which a trace lacks whose attention was asked for none."""
    inputs: dict[Any, fx.Node] = {node.meta.get("input_name"): node for node in graph.find_nodes(op="placeholder")}
    if "cu_seqlens" in inputs:
        return inputs["cu_seqlens"]
    like = inputs["input_ids"].meta["val"]
    sizes = [node.meta["val"] for node in graph.find_nodes(op="placeholder") if is_symbolic(node.meta["val"])]
    (size,) = [one for one in sizes if one.node.expr != like.shape[0].node.expr]  # which the trace has kept
    with graph.inserting_after(inputs["input_ids"]), like.fake_mode:
        bounds = graph.placeholder("cu_seqlens")
        bounds.meta |= {"input_name": "cu_seqlens", "val": like.new_empty((size,), dtype=torch.int32)}
    return bounds


def decoder_start_of(body: Any) -> int:
    """The token that a decoder begins with: that of the config, or the end, which its model puts ahead."""
    start = getattr(body.config, "decoder_start_token_id", None)
    return int(body.config.eos_token_id if start is None else start)


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
        self.decoder_start = decoder_start_of(body) if is_with_decoder(body) else None

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
        if self.decoder_start is not None:  # the text again, one token later
            before = input_ids[(torch.arange(input_ids.shape[0], device=input_ids.device) - 1).clamp(min=0)]
            said["decoder_input_ids"] = torch.where(positions == 0, self.decoder_start, before)[None]
        hidden: torch.Tensor = self.body(**said)[0]
        return hidden[0]
