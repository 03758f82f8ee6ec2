"""Decides whether a traced encoder-decoder will be served right; check/sources.py then runs what was compiled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from mllm_compile.errors import UnsupportedModelError
from mllm_compile.model.hf_model import HFModel
from mllm_compile.model.mask_probe import ObservedCall, observe_attention
from mllm_compile.model.pooling.windows import fill_windows, reach_of
from mllm_compile.model.random_weights import materialise
from mllm_compile.model.refusals import refusing
from mllm_compile.model.sources.cross import CrossAttention, decoder_inputs
from mllm_compile.model.sources.trace import arguments_besides_ids
from mllm_compile.model.supported import check_trace, one_of_a_kind, reasons_in_graph
from mllm_compile.model.trace import Trace
from mllm_compile.passes.match.layer_kinds import is_traced_layer
from mllm_compile.passes.match.nodes import is_op

_SAMPLE_STATES = 3  # more than the probe's tokens, so that calls are told apart


def check_decoder(trace: Trace, hf_model: HFModel, cross: CrossAttention) -> None:
    """Checks a decoder's trace, as check_trace does; its model has real weights afterwards.

    Raises:
        UnsupportedModelError: the traced model would not be served right, with the reasons.
    """
    calls: list[ObservedCall] = []

    def observe() -> list[ObservedCall]:
        states = torch.randn(1, _SAMPLE_STATES, cross.width).to(trace.device, hf_model.model.dtype)
        ids = torch.zeros(1, 2, dtype=torch.int64, device=trace.device)
        inputs: dict[str, Any] = {**decoder_inputs(states), "decoder_input_ids": ids}
        calls.extend(observe_attention(hf_model.model, trace.device, inputs, asks_ids=False).calls)
        return [call for call in calls if not call.is_cross]

    check_trace(trace, hf_model, observe)
    with refusing(f"{hf_model.model.config.model_type!r} models cannot be checked"):
        _refuse(hf_model, list(_hidden_states_of(calls)))


def check_source(trace: Trace, hf_model: HFModel, cross: CrossAttention) -> None:
    """Checks the graph of sources, and gives the encoder's attention the windows of its masks.

    Raises:
        UnsupportedModelError: the encoder would not be served right, with the reasons.
    """
    layers = [node for node in trace.graph_module.graph.nodes if is_traced_layer(node)]
    with refusing(f"{hf_model.model.config.model_type!r} models cannot be checked"):
        _refuse(hf_model, list(_reasons(trace, hf_model, cross, layers)))


def _reasons(trace: Trace, hf_model: HFModel, cross: CrossAttention, layers: list[fx.Node]) -> Iterator[str]:
    if not layers:
        yield "no attention of its encoder goes through Transformers' attention interface"
    yield from (f"{one.name} keeps a state or a cache" for one in layers if not is_op(one, "segment_attention"))
    sized = "input_ids" if cross.sound_shape is None else "pixel_values"
    found = reasons_in_graph(trace, hf_model, sized)
    yield from found
    if found or cross.sound_shape is not None:
        return
    materialise(hf_model, trace.device)
    encoder: Any = hf_model.model.get_encoder()
    yield from fill_windows(layers, encoder, arguments_besides_ids(encoder), trace.device)


def _hidden_states_of(calls: list[ObservedCall]) -> Iterator[str]:
    """Why attention to the encoder's states would not be right: it hides some."""
    for call in calls:
        if call.is_cross and (call.mask is not None or call.is_altered) and reach_of(call) != (-1, -1):
            yield "a token does not attend to all of its encoder's states"


def _refuse(hf_model: HFModel, reasons: list[str]) -> None:
    if reasons:
        shown = "; ".join(one_of_a_kind(iter(reasons))[:3])
        raise UnsupportedModelError(
            f"{hf_model.model.config.model_type!r} models would not be served right: {shown}. docs/models.md lists "
            "what is."
        )
