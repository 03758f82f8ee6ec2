"""The kinds of layers that are between pieces: each is planned per batch, most read what requests have left behind.

KINDS is their list. A trace holds a layer as one op, a compiled program as another, which writes into a buffer and
reads the forward context by the layer's name. Lowering, splitting and checking know layers by this alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from mllm_compile.passes.base import ATTENTION_LAYERS, CROSS_LAYERS, PACKED_LAYERS, STATE_LAYERS
from mllm_compile.passes.match.nodes import call, is_op, recompute_value
from mllm_compile.runtime.attention.layer import KeyChoice, LayerSpec
from mllm_compile.runtime.ops.states.trace import call_of
from mllm_compile.runtime.state.layer import KINDS as STATE_KINDS
from mllm_compile.runtime.state.layer import StateLayer


@dataclass(frozen=True)
class PackedLayer:
    """Attention within segments of packed rows; a program's step says all of it, so none is stored."""

    name: str
    num_heads: int
    v_head_dim: int


Spec = LayerSpec | StateLayer | PackedLayer


class LayerKind(ABC):
    """One kind.

    Attributes:
        traced: the ops that stand for it in a trace.
        refusals: the place of the argument that names, for the check of the trace, what the op cannot express.
        lowered: the op of the program.
        buffer: the place of the output's buffer among that op's arguments.
        layers: the key of gm.meta that lists its layers.
    """

    traced: ClassVar[tuple[str, ...]]
    refusals: ClassVar[int]
    lowered: ClassVar[str]
    buffer: ClassVar[int]
    layers: ClassVar[str]

    @abstractmethod
    def name_of(self, node: fx.Node, path: str, index: int) -> str:
        """The layer's name, given the module's path in the model, which may be empty."""

    @abstractmethod
    def spec(self, node: fx.Node, name: str, index: int) -> Any:
        """The layer that a traced op is a call of.

        Args:
            index: its place among the layers of this kind.
        """

    @abstractmethod
    def out_shape(self, spec: Any) -> tuple[int, ...]:
        """The shape of one token's output."""

    @abstractmethod
    def arguments(self, node: fx.Node, buffer: fx.Node, name: str) -> tuple[Any, ...]:
        """The lowered op's arguments for a traced one."""


class AttentionKind(LayerKind):
    """Attention over the pages of a KV cache."""

    traced = ("attention",)
    refusals = 7
    lowered = "attention_with_output"
    buffer = 3
    layers = ATTENTION_LAYERS

    def name_of(self, node: fx.Node, path: str, index: int) -> str:
        return path or f"attention.{index}"

    def spec(self, node: fx.Node, name: str, index: int) -> LayerSpec:
        q, k, v, sinks, sm_scale, logits_soft_cap, window_left = node.args[:7]
        slopes: Any = node.args[8] if len(node.args) > 8 else None
        chunk: Any = node.args[9] if len(node.args) > 9 else 0
        latent: Any = node.args[10] if len(node.args) > 10 else 0
        up: Any = node.args[11] if len(node.args) > 11 else None
        width, out_width = q.meta["val"].shape[2], node.meta["val"].shape[2]  # type: ignore[union-attr]
        indexer, choice = _index_of(node)
        index_dim = int(indexer[-1].meta["val"].shape[1]) if indexer else 0
        return LayerSpec(
            name=name,
            layer_id=index,
            num_heads=q.meta["val"].shape[1],  # type: ignore[union-attr]
            num_kv_heads=k.meta["val"].shape[1],  # type: ignore[union-attr]
            head_dim=k.meta["val"].shape[2] + index_dim,  # type: ignore[union-attr]
            v_head_dim=int(latent) or v.meta["val"].shape[2],  # type: ignore[union-attr]
            sm_scale=float(sm_scale),  # type: ignore[arg-type]
            logits_soft_cap=float(logits_soft_cap),  # type: ignore[arg-type]
            window_left=int(window_left),  # type: ignore[arg-type]
            sinks=None if sinks is None else sinks.meta["weight_name"],  # type: ignore[union-attr]
            alibi_slopes=tuple(slopes or ()),
            chunk=int(chunk),
            is_latent=bool(latent),
            up_projection=None if up is None else up.meta["weight_name"],
            up_key_dim=0 if up is None else int(width - (k.meta["val"].shape[2] - latent)),  # type: ignore[union-attr]
            up_value_dim=0 if up is None else int(out_width),
            top_k=choice.top_k,
            index_block=choice.block,
            index_local=choice.local,
            index_dim=index_dim,
            has_distance_bias=bias_of(node) is not None,
        )

    def out_shape(self, spec: LayerSpec) -> tuple[int, ...]:
        return spec.num_heads, spec.out_dim

    def arguments(self, node: fx.Node, buffer: fx.Node, name: str) -> tuple[Any, ...]:
        bias, (index, _) = bias_of(node), _index_of(node)
        if index:
            q, k, v = node.args[:3]
            return q, _with_index_keys(k, index[-1]), v, buffer, name, True, None, 0.0, bias, list(index[:-1])
        return (*node.args[:3], buffer, name, *(() if bias is None else (True, None, 0.0, bias)))


class CrossAttentionKind(LayerKind):
    """Attention to an encoder's states, whose keys and values are in pages of their own. A layer's pages have the
    shape of those of the decoder's attention with its index, and lie among them."""

    traced = ("cross_attention",)
    refusals = 6
    lowered = "cross_attention_with_output"
    buffer = 1
    layers = CROSS_LAYERS

    def name_of(self, node: fx.Node, path: str, index: int) -> str:
        return path or f"cross_attention.{index}"

    def spec(self, node: fx.Node, name: str, index: int) -> LayerSpec:
        q, num_kv_heads, head_dim, v_head_dim, sm_scale, logits_soft_cap = node.args[:6]
        return LayerSpec(
            name=name,
            layer_id=index,
            num_heads=q.meta["val"].shape[1],  # type: ignore[union-attr]
            num_kv_heads=int(num_kv_heads),  # type: ignore[arg-type]
            head_dim=int(head_dim),  # type: ignore[arg-type]
            v_head_dim=int(v_head_dim),  # type: ignore[arg-type]
            sm_scale=float(sm_scale),  # type: ignore[arg-type]
            logits_soft_cap=float(logits_soft_cap),  # type: ignore[arg-type]
            window_left=-1,
            sinks=None,
        )

    def out_shape(self, spec: LayerSpec) -> tuple[int, ...]:
        return spec.num_heads, spec.v_head_dim

    def arguments(self, node: fx.Node, buffer: fx.Node, name: str) -> tuple[Any, ...]:
        return node.args[0], buffer, name


class StateLayerKind(LayerKind):
    """A recurrence or a convolution over a state of a fixed size."""

    traced = tuple(STATE_KINDS)
    refusals = -1
    lowered = "state_with_output"
    buffer = 1
    layers = STATE_LAYERS

    def name_of(self, node: fx.Node, path: str, index: int) -> str:
        return f"{path}.{traced_name(node)}" if path else f"{traced_name(node)}.{index}"

    def spec(self, node: fx.Node, name: str, index: int) -> StateLayer:
        kind, operands = call_of(traced_name(node), node.args)
        shapes = {key: value.meta["val"].shape for key, value in operands.items()}
        first: Any = node.args[0]
        return StateLayer(
            name=name,
            state_id=index,
            kind=kind,
            operands=tuple(operands),
            state_shape=tuple(map(int, kind.state_shape(shapes))),
            out_shape=tuple(map(int, kind.out_shape(shapes))),
            out_dtype=_dtype_name(node.meta["val"]),
            dtype=_dtype_name(first.meta["val"]),
        )

    def out_shape(self, spec: StateLayer) -> tuple[int, ...]:
        return spec.out_shape

    def arguments(self, node: fx.Node, buffer: fx.Node, name: str) -> tuple[Any, ...]:
        _, operands = call_of(traced_name(node), node.args)
        return list(operands.values()), buffer, name


class PackedAttentionKind(LayerKind):
    """Attention within segments, without a cache (runtime/ops/segments)."""

    traced: ClassVar[tuple[str, ...]] = ("segment_attention",)
    refusals = 5
    lowered = "segment_attention_with_output"
    buffer = 4
    layers = PACKED_LAYERS

    def name_of(self, node: fx.Node, path: str, index: int) -> str:
        return path or f"packed_attention.{index}"

    def spec(self, node: fx.Node, name: str, index: int) -> PackedLayer:
        return PackedLayer(name, *map(int, node.meta["val"].shape[1:]))

    def out_shape(self, spec: PackedLayer) -> tuple[int, ...]:
        return spec.num_heads, spec.v_head_dim

    def arguments(self, node: fx.Node, buffer: fx.Node, name: str) -> tuple[Any, ...]:
        of_texts = node.args[6:]  # windows and bias, which towers lack
        return (*node.args[:4], buffer, node.args[4], name, *((0, *of_texts) if of_texts else ()))


class SegmentAttentionKind(PackedAttentionKind):
    """The same by a kernel of the program (passes/attend_segments.py): no trace has it."""

    traced = ()
    lowered = "segment_attention_by_kernel"


KINDS: tuple[LayerKind, ...] = (
    AttentionKind(),
    CrossAttentionKind(),
    StateLayerKind(),
    PackedAttentionKind(),
    SegmentAttentionKind(),
)
_TRACED = {name: kind for kind in KINDS for name in kind.traced}
_LOWERED = {kind.lowered: kind for kind in KINDS}


def traced_name(node: fx.Node) -> str:
    """The name of the op that a traced layer calls."""
    packet: Any = getattr(node.target, "overloadpacket", node.target)
    return str(packet._qualified_op_name).partition("::")[2]


def traced_kind(node: object) -> LayerKind | None:
    """The kind of layer that a node of a trace is; None for any other node."""
    return _TRACED[traced_name(node)] if is_op(node, *_TRACED) else None


def lowered_kind(node: object) -> LayerKind | None:
    """The kind of layer that a node of a program is; None for any other node."""
    return _LOWERED[traced_name(node)] if is_op(node, *_LOWERED) else None


def is_traced_layer(node: object) -> bool:
    return traced_kind(node) is not None


def is_layer(node: object) -> bool:
    """True for a layer as a program has it."""
    return lowered_kind(node) is not None


def buffer_of(layer: fx.Node) -> fx.Node:
    """The buffer that a lowered layer writes its output to."""
    kind = lowered_kind(layer)
    if kind is None:
        raise ValueError(f"{layer.name} is no layer")
    return layer.args[kind.buffer]  # type: ignore[return-value]


def bias_of(node: fx.Node) -> fx.Node | None:
    """The table of distances [H, 2R + 1] of a traced attention; None: it has none."""
    return node.args[12] if len(node.args) > 12 else None  # type: ignore[return-value]


def _index_of(node: fx.Node) -> tuple[tuple[fx.Node, ...], KeyChoice]:
    """The queries, weights and keys of a traced attention's indexer, and what it chooses; (), of 0: it has none."""
    if len(node.args) < 15:
        return (), KeyChoice(0)
    index: Any
    choice: Any
    index, *choice = node.args[13:]
    return tuple(index), KeyChoice(*choice)


def _with_index_keys(k: Any, keys: fx.Node) -> fx.Node:
    """k [T, Hk, D] with an indexer's keys [T, Di] behind those of each head, as a cache holds both."""
    graph = k.graph
    of_heads = call(graph, torch.unsqueeze, keys, 1)
    if (num_heads := k.meta["val"].shape[1]) > 1:
        of_heads = graph.call_method("expand", (of_heads, -1, num_heads, -1))
        recompute_value(of_heads)
    return call(graph, torch.cat, (k, of_heads), -1)


def refusals_of(node: fx.Node) -> str:
    """Names of what a traced layer was asked for and cannot do; "" for nothing."""
    return str(node.args[_TRACED[traced_name(node)].refusals])


def _dtype_name(val: torch.Tensor) -> str:
    return str(val.dtype).removeprefix("torch.")
