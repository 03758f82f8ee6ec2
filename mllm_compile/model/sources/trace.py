"""Traces an encoder-decoder as two functions, once for all sizes.

The source's: packed sources to the keys and values that each of the decoder's layers attends to. The decoder's: flat
tokens to logits, as of a causal model.

Shape legend: T tokens, E tokens of packed sources, S rows of logits or sources, W width of the encoder's states.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import fx

from mllm_compile.model.hf_model import HFModel
from mllm_compile.model.sources.cross import CrossAttention, decoder_inputs
from mllm_compile.model.sources.hook import attending_to_pages, begin_keeping, keeping_keys, kept
from mllm_compile.model.towers.segments_hook import say_bounds
from mllm_compile.model.trace import Trace, promise_sizes, sized, token_inputs, trace_text

_SAMPLE_TOKENS = 48  # any size does: the symbols are unbacked
_SAMPLE_BOUNDS = 4
_SAMPLE_WINDOWS = 3


def trace_decoder(hf_model: HFModel, cross: CrossAttention, device: str, max_tokens: int) -> Trace:
    """The logits of flat tokens; inputs as trace_model's.

    Raises:
        UnsupportedModelError: as trace_model.
    """
    inputs = token_inputs(device)
    inputs["states"] = sized("E", (_SAMPLE_TOKENS, cross.width), hf_model.model.dtype, device)
    with attending_to_pages(hf_model.model, cross):
        trace = trace_text(hf_model, _FlatDecoder(hf_model.model, max_tokens), inputs, device, max_tokens)
    drop_unused(trace, keep=("input_ids", "positions", "logits_indices"))
    return trace


def trace_source(hf_model: HFModel, cross: CrossAttention, device: str, max_tokens: int) -> Trace:
    """Keys [E, Hk, D] and values [E, Hk, Dv] of each attention to the source. Inputs are `input_ids` [E], `positions`
    [E] and `cu_seqlens` [S + 1]; of sounds `pixel_values` [windows, bins * frames] and `cu_seqlens`.

    Args:
        max_tokens: most E, or of sounds most windows.

    Raises:
        UnsupportedModelError: as trace_model.
    """
    module: torch.nn.Module
    bounds = sized("cu_seqlens", (_SAMPLE_BOUNDS,), torch.int32, device)
    if cross.sound_shape is None:
        names = ("input_ids", "positions")
        inputs = {name: sized("T", (_SAMPLE_TOKENS,), torch.int64, device) for name in names}
        module = _PackedSources(hf_model.model, max_tokens)
    else:
        bins, frames = cross.sound_shape
        inputs = {"pixel_values": sized("F", (_SAMPLE_WINDOWS, bins * frames), hf_model.model.dtype, device)}
        module = _PackedSounds(hf_model.model, max_tokens, (bins, frames))
    with keeping_keys(hf_model.model, cross):
        trace = trace_text(hf_model, module, {**inputs, "cu_seqlens": bounds}, device, max_tokens)
    drop_unused(trace, keep=(*inputs, "cu_seqlens"))
    return trace


def arguments_besides_ids(encoder: Any) -> dict[str, Any]:
    """The arguments that an encoder is always told."""
    return {"use_cache": False} if "use_cache" in inspect.signature(type(encoder).forward).parameters else {}


class _FlatDecoder(torch.nn.Module):
    def __init__(self, model: Any, max_tokens: int) -> None:
        super().__init__()
        self.model, self.max_tokens = model, max_tokens
        arguments = inspect.signature(model.forward).parameters
        self.takes_positions = "decoder_position_ids" in arguments
        self.takes_rows = "logits_to_keep" in arguments

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, logits_indices: torch.Tensor, states: torch.Tensor
    ) -> torch.Tensor:
        promise_sizes(self.max_tokens, input_ids, logits_indices)
        said = decoder_inputs(states[None])
        if self.takes_positions:
            said["decoder_position_ids"] = positions[None]
        logits: torch.Tensor = self.model(decoder_input_ids=input_ids[None], **said).logits[0]
        return logits.index_select(0, logits_indices)


class _PackedSources(torch.nn.Module):
    def __init__(self, model: Any, max_tokens: int) -> None:
        super().__init__()
        self.model, self.encoder, self.max_tokens = model, model.get_encoder(), max_tokens
        self.always = arguments_besides_ids(self.encoder)
        self.takes_positions = "position_ids" in inspect.signature(type(self.encoder).forward).parameters

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, cu_seqlens: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        torch._check(input_ids.shape[0] >= 1)
        torch._check(input_ids.shape[0] <= self.max_tokens)
        say_bounds(cu_seqlens)
        said: dict[str, Any] = dict(self.always)
        if self.takes_positions:
            said["position_ids"] = positions[None]
        states = self.encoder(input_ids=input_ids[None], **said)[0]
        return keys_of(self.model, states, torch.zeros_like(input_ids)[None])


class _PackedSounds(torch.nn.Module):
    def __init__(self, model: Any, max_windows: int, shape: tuple[int, int]) -> None:
        super().__init__()
        self.model, self.encoder, self.max_windows, self.shape = model, model.get_encoder(), max_windows, shape

    def forward(self, pixel_values: torch.Tensor, cu_seqlens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        torch._check(pixel_values.shape[0] >= 1)
        torch._check(pixel_values.shape[0] <= self.max_windows)
        say_bounds(cu_seqlens)
        states = self.encoder(pixel_values.view(-1, *self.shape))[0].flatten(0, 1)
        ids = torch.zeros(states.shape[0], dtype=torch.int64, device=states.device)
        return keys_of(self.model, states[None], ids[None])


def keys_of(model: Any, states: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The keys and values that the decoder makes of states [1, E, W]; ids [1, E] are any tokens."""
    begin_keeping()
    model(decoder_input_ids=ids, **decoder_inputs(states))
    return kept()


def drop_unused(trace: Trace, keep: tuple[str, ...]) -> None:
    """Drops what no output needs: inputs but those of `keep` too, and what was asserted of their sizes."""
    graph = trace.graph_module.graph
    graph.eliminate_dead_code()
    inputs = [node for node in graph.find_nodes(op="placeholder") if "weight_name" not in node.meta]
    known: set[Any] = set()
    for node in inputs:
        if node.meta.get("input_name") in keep:
            known |= {size.node.expr for size in node.meta["val"].shape if isinstance(size, torch.SymInt)}
    for node in inputs:
        if isinstance(node.meta["val"], torch.SymInt) and node.meta["val"].node.expr not in known:
            _erase_with_users(graph, node)
        elif not node.users and node.meta.get("input_name") not in keep:
            graph.erase_node(node)
    trace.graph_module.recompile()


def _erase_with_users(graph: fx.Graph, node: fx.Node) -> None:
    for user in list(node.users):
        _erase_with_users(graph, user)
    graph.erase_node(node)
