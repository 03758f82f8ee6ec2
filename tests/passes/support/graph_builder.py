"""Tiny FX graphs, made by hand in the form that a trace or the pass before leaves, and a way to run them at any stage.

Shape legend: T tokens, S rows of logits, H query heads, Hk kv heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import mllm_compile.runtime.ops.segments.reference  # noqa: F401  (defines torch.ops.mllm.segment_attention)
from mllm_compile.passes.base import (
    ATTENTION_LAYERS,
    EXPERT_RANKS,
    PACKED_WEIGHTS,
    PANELS,
    QUANTISED_TENSORS,
    WEIGHT_CUTS,
    WEIGHT_SCHEMES,
    part_of_rank,
)
from mllm_compile.passes.canonicalise import Canonicalise
from mllm_compile.passes.lower_attention import LowerAttention
from mllm_compile.passes.match.nodes import LINEAR, call
from mllm_compile.passes.pipeline import pass_names
from mllm_compile.runtime.attention.base import AttentionInputs
from mllm_compile.runtime.attention.layer import AttentionLayer
from mllm_compile.runtime.collectives.base import current
from mllm_compile.runtime.forward_context import set_forward_context
from mllm_compile.runtime.ops.panels.layout import put_in_panels
from mllm_compile.runtime.ops.trace import attention_reference
from mllm_compile.runtime.quantised.numbers import dequantised, quantised
from mllm_compile.runtime.quantised.scheme import WeightScheme

HEADS, KV_HEADS, HEAD_DIM, VOCAB = 4, 2, 4, 11
HIDDEN = HEADS * HEAD_DIM


class GraphBuilder:
    """One graph under construction, as Dynamo names things: sizes, batch inputs and weights are placeholders.

    Attributes:
        size_inputs: {"T": node, "S": node}, inputs that canonicalise takes away.
        token_ids, positions, rows: the batch inputs.
    """

    def __init__(self) -> None:
        self._mode = FakeTensorMode(shape_env=ShapeEnv())
        self.graph = fx.Graph()
        self.sizes = {name: self._mode.shape_env.create_unbacked_symint() for name in ("T", "S")}
        for size in self.sizes.values():
            torch._check(size >= 1)
        self.size_inputs = {name: self._placeholder(f"size_{name}", size) for name, size in self.sizes.items()}
        self.token_ids = self._batch_input("input_ids", "T")
        self.positions = self._batch_input("positions", "T")
        self.rows = self._batch_input("logits_indices", "S")

    def weight(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> fx.Node:
        with self._mode:
            value = torch.empty(shape, dtype=dtype)
        node = self._placeholder("l_self_modules_" + name.replace(".", "_modules_") + "_", value)
        node.meta["weight_name"] = name
        return node

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        return call(self.graph, target, *args, **kwargs)

    def method(self, name: str, *args: Any, **kwargs: Any) -> fx.Node:
        values = fx.map_arg(args, lambda node: node.meta["val"])
        node = self.graph.call_method(name, args, kwargs)
        node.meta["val"] = getattr(values[0], name)(*values[1:], **kwargs)
        return node

    def linear(self, source: fx.Node, name: str, rows: int, bias: bool = False) -> fx.Node:
        weight = self.weight(f"{name}.weight", rows, source.meta["val"].shape[-1])
        return self.call(LINEAR, source, weight, self.weight(f"{name}.bias", rows) if bias else None)

    def embed(self) -> fx.Node:
        """[T, HIDDEN]."""
        return self.call(torch.nn.functional.embedding, self.token_ids, self.weight("embed.weight", VOCAB, HIDDEN))

    def attention(self, q: fx.Node, k: fx.Node, v: fx.Node, module: str | None = "attn", **changes: Any) -> fx.Node:
        """The trace-time op over q [T, H*D], k and v [T, Hk*D]; gives [T, H*D]."""
        heads = [
            self.method("view", x, self.size_inputs["T"], x.meta["val"].shape[1] // HEAD_DIM, HEAD_DIM)
            for x in (q, k, v)
        ]
        said = {"sinks": None, "sm_scale": 0.5, "logits_soft_cap": 0.0, "window_left": -1, "refusals": ""} | changes
        node = self.call(torch.ops.mllm.attention.default, *heads, *said.values())
        if module is not None:
            node.meta["nn_module_stack"] = {"m": (f"L['self'].model.{module}", torch.nn.Module)}
        return self.method("flatten", node, 1)

    def packed_attention(self, x: fx.Node, head_dim: int = HEAD_DIM) -> fx.Node:
        """A tower's attention over x [T, H*D], one segment; [T, H*D]."""
        heads = self.method("view", x, self.size_inputs["T"], x.meta["val"].shape[1] // head_dim, head_dim)
        bounds = self.bounds()
        node = self.call(torch.ops.mllm.segment_attention.default, heads, heads, heads, bounds, 0.5, "")
        node.meta["nn_module_stack"] = {"m": ("L['self'].model.tower", torch.nn.Module)}
        return self.method("flatten", node, 1)

    def bounds(self) -> fx.Node:
        """Of one segment, [2] int32."""
        with self._mode:
            value = torch.empty(2, dtype=torch.int32)
        bounds = self._placeholder("l_cu_seqlens_", value)
        bounds.meta["input_name"] = "cu_seqlens"
        return bounds

    def layer(self, x: fx.Node, index: int, scale: float = 1.0, **changes: Any) -> fx.Node:
        """x + attention(x), as the layer `index` of a model."""
        name = f"layers.{index}.attn"
        q = self.linear(x, f"{name}.q", HIDDEN)
        k, v = (self.linear(x, f"{name}.{part}", KV_HEADS * HEAD_DIM) for part in "kv")
        out = self.linear(self.attention(q, k, v, name, **changes), f"{name}.o", HIDDEN)
        return self.call(torch.add, x, out, alpha=scale)

    def head(self, x: fx.Node) -> fx.Node:
        """Logits [S, VOCAB] of the chosen rows."""
        return self.linear(self.call(torch.index_select, x, 0, self.rows), "head", VOCAB)

    def finish(self, output: fx.Node) -> fx.GraphModule:
        """The graph as a trace leaves it."""
        self.graph.output((output,))
        return fx.GraphModule(torch.nn.Module(), self.graph)

    def canonical(self, output: fx.Node) -> fx.GraphModule:
        """The graph as canonicalise leaves it."""
        return apply(Canonicalise(), self.finish(output))

    def lowered(self, output: fx.Node) -> fx.GraphModule:
        """The graph as lower_attention leaves it."""
        return apply(LowerAttention(), self.canonical(output))

    def _batch_input(self, name: str, size: str) -> fx.Node:
        with self._mode:
            value = torch.empty(self.sizes[size], dtype=torch.int64)
        node = self._placeholder(f"l_{name}_", value)
        node.meta["input_name"] = name
        return node

    def _placeholder(self, name: str, value: Any) -> fx.Node:
        before = next((node for node in self.graph.nodes if node.op != "placeholder"), None)
        with self.graph.inserting_before(before) if before is not None else nullcontext():
            node = self.graph.placeholder(name)
        node.meta["val"] = value
        return node


def model_of_layers(num_layers: int = 3) -> tuple[GraphBuilder, fx.Node]:
    """Embedding, equal layers, head."""
    builder = GraphBuilder()
    x = builder.embed()
    for index in range(num_layers):
        x = builder.layer(x, index)
    return builder, builder.head(x)


def apply(graph_pass: Any, gm: fx.GraphModule) -> fx.GraphModule:
    """The pass's graph, ready to run."""
    result = graph_pass(gm)
    result.gm.graph.lint()
    result.gm.recompile()
    return result.gm


def done(name: str) -> list[str]:
    """The passes up to this one, for verify_graph."""
    names = pass_names()
    return names[: names.index(name) + 1]


def text(gm: fx.GraphModule) -> str:
    """The graph and its pieces, to compare."""
    return "\n".join([gm.code, *(f"{name}\n{piece.code}" for name, piece in sorted(gm.named_children()))])


def targets(gm: fx.GraphModule) -> list[str]:
    """Called functions, methods and modules by name, in order."""
    nodes = [node for node in gm.graph.nodes if node.op.startswith("call_")]
    return [node.target if isinstance(node.target, str) else node.target.__name__ for node in nodes]


def placeholders(gm: fx.GraphModule) -> list[str]:
    return [node.name for node in gm.graph.nodes if node.op == "placeholder"]


def run(gm: fx.GraphModule, num_tokens: int = 7, seed: int = 0) -> torch.Tensor:
    """Logits of the graph at any stage, for seeded inputs; a weight's values depend on its name alone.

    Attention after its lowering sees one request of `num_tokens` tokens.
    """
    return _run(gm, gm, num_tokens, seed)


def assert_values_hold(gm: fx.GraphModule, num_tokens: int = 7) -> None:
    """Runs the graph and its pieces node by node: each gives tensors of the shape, strides and type of its `val`."""
    _run(gm, _Checking(gm, {}).run, num_tokens, 0)


class _Checking(fx.Interpreter):
    """Compares what nodes give with their `val`; `sizes` has what the symbols stand for, from the inputs on."""

    def __init__(self, gm: fx.GraphModule, sizes: dict[str, int]) -> None:
        super().__init__(gm)
        self._sizes = sizes

    def run_node(self, node: fx.Node) -> Any:
        result = super().run_node(node)
        if node.op != "output":
            self._compare(node, node.meta["val"], result)
        return result

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        piece: Any = self.module.get_submodule(target)
        return _Checking(piece, self._sizes).run(*args)

    def _compare(self, node: fx.Node, said: Any, got: Any) -> None:
        if isinstance(said, tuple | list) and not isinstance(said, torch.Size):
            assert len(said) == len(got), node.name
            for one, other in zip(said, got, strict=True):
                self._compare(node, one, other)
        elif isinstance(said, torch.Tensor):
            assert got.dtype == said.dtype, f"{node.name} gives {got.dtype}, said to be {said.dtype}"
            assert got.dim() == said.dim(), f"{node.name} gives {list(got.shape)}, said to be {list(said.shape)}"
            for size, number in zip(said.shape, got.shape, strict=True):
                symbol = str(size)
                if node.op == "placeholder" and symbol.isidentifier():
                    self._sizes.setdefault(symbol, number)
                wanted = size if isinstance(size, int) else self._evaluated(size.node.expr)
                assert number == wanted, f"{node.name} gives {list(got.shape)}, said to be {list(said.shape)}"
            for size, stride, number in zip(got.shape, said.stride(), got.stride(), strict=True):
                wanted = stride if isinstance(stride, int) else self._evaluated(stride.node.expr)
                assert size < 2 or number == wanted, f"{node.name} has strides {got.stride()}, said: {said.stride()}"

    def _evaluated(self, expression: Any) -> int:
        return int(expression.subs({symbol: self._sizes[str(symbol)] for symbol in expression.free_symbols}))


def _run(gm: fx.GraphModule, call_graph: Callable[..., Any], num_tokens: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    inputs = {
        "input_ids": torch.randint(0, VOCAB, (num_tokens,), generator=generator),
        "positions": torch.arange(num_tokens),
        "slots": torch.arange(1, num_tokens + 1),
        "cu_seqlens": torch.tensor([0, num_tokens], dtype=torch.int32),
        "logits_indices": torch.tensor([0, num_tokens - 1]),
        "adapter_slots": (torch.arange(num_tokens, dtype=torch.int32) + 1) % 3 - 1,
    }
    inputs["all_slots"] = inputs["slots"].repeat(gm.meta.get(EXPERT_RANKS, 1))
    placeholders = gm.graph.find_nodes(op="placeholder")
    values = [_value(node, gm, inputs) for node in placeholders]
    weights = {node.meta.get("weight_name"): value for node, value in zip(placeholders, values, strict=True)}
    layers = {
        spec.name: AttentionLayer.of(
            spec,
            weights | {spec.sinks: weight_values(str(spec.sinks), (spec.num_heads,))},
            current().rank if gm.meta.get(WEIGHT_CUTS) else 0,
        )
        for spec in gm.meta.get(ATTENTION_LAYERS, ())
    }
    with (
        torch.no_grad(),
        set_forward_context(
            {name: _one_request(num_tokens) for name in layers},
            no_compile_layers=layers,
            slot_mapping=dict.fromkeys(layers, torch.zeros(num_tokens, dtype=torch.int64)),
            num_tokens=num_tokens,
        ),
    ):
        return call_graph(*values)[0]


def _value(node: fx.Node, gm: fx.GraphModule, inputs: dict[str, torch.Tensor]) -> Any:
    if node.meta.get("input_name") in ("keys", "values"):
        return torch.zeros(len(inputs["slots"]) + 1, *node.meta["val"].shape[1:], dtype=node.meta["val"].dtype)
    if "input_name" in node.meta:
        return inputs[node.meta["input_name"]]
    if "weight_name" not in node.meta:
        return inputs["input_ids" if node.target == "size_T" else "logits_indices"].shape[0]
    name, value = node.meta["weight_name"], node.meta["val"]
    parts = gm.meta.get(PACKED_WEIGHTS, {}).get(name)
    if parts is None:
        weight = _weight(gm, name, value.shape, value.dtype)
    else:
        found = [_weight(gm, part.weight_name, (part.rows, *value.shape[1:]), value.dtype) for part in parts]
        weight = found[0].new_zeros((value.shape[0], *found[0].shape[1:]))  # not all linears need have a bias
        for part, one in zip(parts, found, strict=True):
            weight[part.start : part.start + part.rows] = one
    if (unit := gm.meta.get(PANELS, {}).get(name)) is not None:
        weight = weight.clone(memory_format=torch.contiguous_format)  # quantised values are remembered
        put_in_panels(weight, unit)
    return weight


def _weight(gm: fx.GraphModule, name: str, shape: Any, dtype: torch.dtype) -> torch.Tensor:
    """The weight's values; one that may be quantised has what its tensors stand for, also where it is plain."""
    schemes_of, tensor = gm.meta.get(WEIGHT_SCHEMES), gm.meta.get(QUANTISED_TENSORS, {}).get(name)
    cuts = gm.meta.get(WEIGHT_CUTS, {}).get(name if tensor is None else tensor.weight_name, ())
    sizes = list(shape) if tensor is None else [int(shape[0]), *tensor.shape[1:]]
    for cut in cuts:
        sizes[cut.dim] = max(start + length for ranges in cut.ranges for start, length in ranges)
    if tensor is not None:
        values = _quantised_values(tensor.weight_name, tuple(sizes), tensor.scheme)[tensor.role]
        return part_of_rank(values, tuple(map(tensor.cut, cuts)), current().rank).contiguous() if cuts else values
    if cuts:  # inside run_lockstep: each rank its part
        return part_of_rank(weight_values(name, sizes, dtype), cuts, current().rank).contiguous()
    schemes, transposed = ({}, {}) if schemes_of is None else (schemes_of.schemes, schemes_of.transposed)
    if name in transposed:
        *others, columns, rows = map(int, shape)
        return _stands_for(name, (*others, rows, columns), transposed[name], dtype).transpose(-1, -2).contiguous()
    if name in schemes:
        return _stands_for(name, tuple(map(int, shape)), schemes[name], dtype)
    return weight_values(name, shape, dtype)


def _stands_for(name: str, shape: tuple[int, ...], scheme: WeightScheme, dtype: torch.dtype) -> torch.Tensor:
    tensors = _quantised_values(name, shape, scheme)
    return dequantised(tensors, scheme.kind, scheme.group, shape[-1], dtype)


@cache
def _quantised_values(name: str, shape: tuple[int, ...], scheme: WeightScheme) -> dict[str, torch.Tensor]:
    return quantised(weight_values(name, shape), scheme)


def weight_values(name: str, shape: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The value that `run` gives the weight of this name."""
    return _random(name, tuple(shape)).to(dtype, copy=True)


@lru_cache(maxsize=256)  # a graph of whole layers has fifty, and runs a hundred times
def _random(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(name.encode()))
    return torch.randn(shape, generator=generator) * HIDDEN**-0.5


def _one_request(num_tokens: int) -> Any:
    """Metadata whose backend attends without any cache."""

    def forward(inputs: AttentionInputs) -> None:
        layer, params = inputs.layer, inputs.layer.params
        inputs.out[:] = attention_reference(
            *(inputs.q, inputs.k, inputs.v),
            layer.sink_logits,
            params.sm_scale,
            params.logits_soft_cap,
            params.window_left,
            alibi_slopes=layer.alibi_slopes,
            chunk=layer.chunk,
            latent=layer.v_head_dim if layer.is_latent else 0,
            up=layer.up_weight,
        )

    batch = SimpleNamespace(
        token_to_kv_pool=SimpleNamespace(set_kv_buffer=lambda *_: None),
        attn_backend=SimpleNamespace(forward=forward, rope=None, writes_kv=lambda layer: False),
    )
    return SimpleNamespace(batch=batch, num_actual_tokens=num_tokens)
