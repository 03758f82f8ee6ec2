"""Graphs that passes get wrong, each with another thing that a model may have."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from mllm_compile.passes.base import (
    NUM_STAGES,
    WEIGHT_SCHEMES,
    WeightSchemes,
)
from mllm_compile.passes.match.nodes import LINEAR
from mllm_compile.runtime.quantised.scheme import MXFP4, WeightScheme
from tests.passes.support.graph_builder import (
    HIDDEN,
    VOCAB,
    GraphBuilder,
    model_of_layers,
)
from tests.passes.support.latent_layer import latent_layer


def layers() -> fx.GraphModule:
    builder, logits = model_of_layers(3)
    return builder.finish(logits)


def layers_in_stages() -> fx.GraphModule:
    gm = layers()
    gm.meta[NUM_STAGES] = 2
    return gm


def no_layers() -> fx.GraphModule:
    builder = GraphBuilder()
    return builder.finish(builder.head(builder.embed()))


def writes(builder: GraphBuilder, target: Any, *args: Any) -> None:
    make = builder.graph.call_method if isinstance(target, str) else builder.graph.call_function
    make(target, args).meta["val"] = None if target is operator.setitem else args[0].meta["val"]


def in_place_neighbours() -> fx.GraphModule:
    """Tensors that are read before and after a write, and products that change nothing by themselves."""
    builder = GraphBuilder()
    x = builder.layer(builder.embed(), 0)
    kept = builder.call(operator.mul, x, 1.0)
    writes(builder, "mul_", kept, 2.0)
    halves = [builder.call(operator.getitem, builder.call(torch.chunk, kept, 2, -1), index) for index in range(2)]
    writes(builder, operator.iadd, halves[0], 1.0)
    writes(builder, operator.setitem, x, (slice(None), 0), 3.0)
    linears = [builder.linear(x, name, HIDDEN) for name in "ab"]
    writes(builder, "relu_", linears[0])
    total = builder.call(operator.add, builder.call(operator.add, *linears), builder.call(torch.cat, halves, -1))
    return builder.finish(builder.head(builder.layer(builder.call(operator.add, total, kept), 1)))


def several_readers() -> fx.GraphModule:
    """Every value of a layer is read by the head as well."""
    builder = GraphBuilder()
    x = builder.layer(builder.embed(), 0)
    wide = [node for node in builder.graph.nodes if node.op.startswith("call") and _is_wide(node)]
    for node in wide:
        x = builder.call(operator.add, x, builder.call(torch.tanh, node))
    return builder.finish(builder.head(builder.layer(x, 1)))


def _is_wide(node: fx.Node) -> bool:
    val = node.meta["val"]
    return isinstance(val, torch.Tensor) and val.dim() == 2 and val.shape[1] == HIDDEN


def tied_weights() -> fx.GraphModule:
    """The embedding is the head, and two linears of one input have one weight."""
    builder = GraphBuilder()
    table = builder.weight("embed.weight", VOCAB, HIDDEN)
    shared = builder.weight("shared.weight", HIDDEN, HIDDEN)
    x = builder.layer(builder.call(functional.embedding, builder.token_ids, table), 0)
    twice = builder.call(operator.mul, *(builder.call(LINEAR, x, shared, None) for _ in range(2)))
    rows = builder.call(torch.index_select, builder.layer(twice, 1), 0, builder.rows)
    return builder.finish(builder.call(LINEAR, rows, table, None))


def one_module_twice() -> fx.GraphModule:
    builder = GraphBuilder()
    x = builder.embed()
    q, k, v = (builder.linear(x, name, width, bias=True) for name, width in (("q", 16), ("k", 8), ("v", 8)))
    first = builder.attention(q, k, v, window_left=2)
    second = builder.attention(builder.call(operator.add, q, first), k, v, logits_soft_cap=3.0)
    return builder.finish(builder.head(builder.call(operator.add, second, x)))


def spelled_in_all_ways() -> fx.GraphModule:
    builder = GraphBuilder()
    x = builder.layer(builder.embed(), 0)
    x = builder.method("mul", builder.call(torch.add, x, other=1.0), builder.call(torch.mul, x, 0.5))
    x = builder.call(torch.sub, x, builder.call(torch.mean, x, dim=-1, keepdim=True))
    parts = builder.method("split", x, [4, 12], dim=-1)
    x = builder.call(torch.cat, [builder.call(operator.getitem, parts, index) for index in (1, 0)], dim=-1)
    x = builder.call(functional.dropout, builder.call(functional.relu, x, inplace=False), p=0.1, training=False)
    return builder.finish(builder.head(builder.method("float", builder.layer(x, 1))))


def views_and_outer_products() -> fx.GraphModule:
    builder = GraphBuilder()
    tokens = builder.size_inputs["T"]
    frequencies = builder.method("view", builder.weight("inv_freq", HIDDEN), 1, HIDDEN, 1)
    positions = builder.method("float", builder.method("view", builder.positions, 1, 1, tokens))
    angles = builder.method("transpose", builder.call(torch.matmul, frequencies, positions), 1, 2)
    x = builder.method("unsqueeze", builder.layer(builder.embed(), 0), 0)
    x = builder.call(operator.add, x, builder.method("cos", angles))
    x = builder.method("reshape", builder.method("view", x, 1, tokens, 4, 4), 1, tokens, HIDDEN)
    return builder.finish(_head_of_rows(builder, builder.call(operator.mul, x, 2.0)))


def patches() -> fx.GraphModule:
    builder = GraphBuilder()
    x = builder.embed()
    kernel = builder.weight("patches.weight", HIDDEN, 2, 2, 2, 2)
    found = builder.call(torch.conv3d, builder.method("view", x, -1, 2, 2, 2, 2), kernel, None, (2, 2, 2))
    x = builder.call(operator.add, x, builder.method("view", found, -1, HIDDEN))
    return builder.finish(builder.head(builder.layer(x, 0)))


def tower() -> fx.GraphModule:
    """Attention of packed patches, and a feed-forward whose features fill no row of 16 bytes."""
    builder = GraphBuilder()
    x = builder.embed()
    x = builder.call(operator.add, x, builder.packed_attention(x))
    wide = builder.call(torch.relu, builder.linear(x, "up", 1021))
    return builder.finish(builder.head(builder.linear(wide, "down", HIDDEN, bias=True)))


def tower_in_bfloat16() -> fx.GraphModule:
    """With heads that kernels for tensor cores take."""
    builder = GraphBuilder()
    x = builder.embed()
    heads = builder.method("to", builder.linear(x, "qkv", 144), torch.bfloat16)
    attended = builder.method("to", builder.packed_attention(heads, head_dim=72), torch.float32)
    x = builder.call(operator.add, x, builder.linear(attended, "out", HIDDEN))
    weight, bias = builder.weight("up.weight", 24, HIDDEN, dtype=torch.bfloat16), builder.weight("up.bias", 24)
    up = builder.call(
        LINEAR, builder.method("to", x, torch.bfloat16), weight, builder.method("to", bias, torch.bfloat16)
    )
    wide = builder.method("to", builder.call(torch.nn.functional.gelu, up, approximate="tanh"), torch.float32)
    return builder.finish(builder.head(builder.call(operator.add, x, builder.linear(wide, "down", HIDDEN))))


def not_by_token() -> fx.GraphModule:
    """The last layer looks at other tokens, so it is computed of all."""
    builder = GraphBuilder()
    x = builder.method("unsqueeze", builder.layer(builder.embed(), 0), 0)
    x = builder.call(operator.add, x, builder.method("flip", builder.call(torch.relu, x), 1))
    return builder.finish(_head_of_rows(builder, x))


def _head_of_rows(builder: GraphBuilder, x: fx.Node) -> fx.Node:
    """As Transformers gathers with `logits_to_keep`; x [1, T, …]."""
    rows = builder.call(operator.getitem, x, (slice(None), builder.rows, slice(None)))
    weight = builder.weight("head.weight", 32, x.meta["val"].shape[-1], dtype=x.meta["val"].dtype)
    return builder.call(operator.getitem, builder.call(LINEAR, rows, weight, None), 0)


class Decoder(GraphBuilder):
    """Layers as Transformers writes Llama's and Qwen's, of sizes that our kernels take."""

    hidden, heads, head_dim, ffn = 256, 8, 128, 512

    def __init__(
        self,
        norms_heads: bool = False,
        reads_all: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        feed_forward: Callable[[Decoder, fx.Node, str], fx.Node] | None = None,
        reads_texts: bool = False,
    ) -> None:
        super().__init__()
        self.dtype = dtype
        self._bounds = self.bounds() if reads_texts else None
        self._norms_heads, self._reads_all = norms_heads, reads_all
        self._feed_forward = feed_forward or Decoder.dense

    def projection(self, x: fx.Node, name: str, rows: int) -> fx.Node:
        weight = self.weight(f"{name}.weight", rows, x.meta["val"].shape[-1], dtype=self.dtype)
        return self.call(LINEAR, x, weight, None)

    def norm(self, x: fx.Node, name: str) -> fx.Node:
        wide = self.method("to", x, torch.float32)
        variance = self.method("mean", self.method("pow", wide, 2), -1, keepdim=True)
        scaled = self.call(operator.mul, wide, self.call(torch.rsqrt, self.call(operator.add, variance, 1e-6)))
        weight = self.weight(f"{name}.weight", x.meta["val"].shape[-1], dtype=self.dtype)
        return self.call(operator.mul, weight, self.method("to", scaled, self.dtype))

    def angles(self) -> tuple[fx.Node, fx.Node]:
        """cos and sin [1, T, D]."""
        frequencies = self.weight("inv_freq", 1, 1, self.head_dim // 2)
        positions = self.method("float", self.method("view", self.positions, 1, self.size_inputs["T"], 1))
        half = self.call(operator.mul, positions, frequencies)
        angles = self.call(torch.cat, (half, half), dim=-1)
        return tuple(self.method("to", self.method(name, angles), self.dtype) for name in ("cos", "sin"))  # type: ignore[return-value]

    def rotated(self, x: fx.Node, cos: fx.Node, sin: fx.Node) -> fx.Node:
        first, second = (
            self.call(operator.getitem, x, (Ellipsis, part))
            for part in (slice(None, self.head_dim // 2, None), slice(self.head_dim // 2, None, None))
        )
        turned = self.call(torch.cat, (self.call(operator.neg, second), first), dim=-1)
        cos, sin = (self.method("unsqueeze", angle, 1) for angle in (cos, sin))
        return self.call(operator.add, self.call(operator.mul, x, cos), self.call(operator.mul, turned, sin))

    def decoder_layer(self, x: fx.Node, cos: fx.Node, sin: fx.Node, index: int) -> fx.Node:
        tokens, name = self.size_inputs["T"], f"layers.{index}"
        hidden = self.norm(x, f"{name}.input_norm")
        q, k, v = (self.projection(hidden, f"{name}.{part}", self.heads * self.head_dim) for part in "qkv")
        q, k, v = (self.method("view", part, 1, tokens, -1, self.head_dim) for part in (q, k, v))
        if self._norms_heads:
            q, k = (self.norm(part, f"{name}.{which}_norm") for part, which in ((q, "q"), (k, "k")))
        flat = []
        for part in (q, k):
            turned = self.method("transpose", self.rotated(self.method("transpose", part, 1, 2), cos, sin), 1, 2)
            flat.append(self.method("reshape", turned, tokens, self.heads, self.head_dim))
        flat.append(self.method("view", v, tokens, self.heads, self.head_dim))
        scale, ops = self.head_dim**-0.5, torch.ops.mllm
        if self._bounds is None:
            out = self.call(ops.attention.default, *flat, None, scale, 0.0, -1, "")
        else:
            out = self.call(ops.segment_attention.default, *flat, self._bounds, scale, "", -1, 0)
        out.meta["nn_module_stack"] = {"m": (f"L['self'].model.{name}.attn", torch.nn.Module)}
        attended = self.method("reshape", out, 1, tokens, self.heads * self.head_dim)
        product = self.projection(attended, f"{name}.o", self.hidden)
        x = self.call(operator.add, x, product)
        if self._reads_all:  # what kernels would take along has another reader
            x = self.call(operator.sub, x, self.call(operator.mul, product, 0.5))
        hidden = self.norm(x, f"{name}.norm")
        x = self.call(operator.add, x, self._feed_forward(self, hidden, name))
        return self.call(operator.add, x, self.call(operator.mul, hidden, 0.25)) if self._reads_all else x

    def dense(self, hidden: fx.Node, name: str) -> fx.Node:
        gate, up = (self.projection(hidden, f"{name}.{part}", self.ffn) for part in ("gate", "up"))
        product = self.call(operator.mul, self.call(functional.silu, gate), up)
        return self.projection(product, f"{name}.down", self.hidden)

    def model(self) -> fx.GraphModule:
        table = self.weight("embed.weight", VOCAB, self.hidden, dtype=self.dtype)
        x = self.method("unsqueeze", self.call(functional.embedding, self.token_ids, table), 0)
        cos, sin = self.angles()
        for index in range(2):
            x = self.decoder_layer(x, cos, sin, index)
        return self.finish(self.method("float", _head_of_rows(self, self.norm(x, "last"))))


def decoder() -> fx.GraphModule:
    return Decoder().model()


def decoder_with_normed_heads() -> fx.GraphModule:
    return Decoder(norms_heads=True).model()


def decoder_of_texts() -> fx.GraphModule:
    return Decoder(norms_heads=True, reads_texts=True).model()


def decoder_whose_values_have_other_readers() -> fx.GraphModule:
    return Decoder(reads_all=True).model()


def decoder_in_float16() -> fx.GraphModule:
    """Experts that the kernels for Hopper alone do not take, so that others do."""
    return Decoder(dtype=torch.float16).model()


class LayerNormDecoder(Decoder):
    """Layers as Transformers writes Whisper's decoder: layer norms, biases but of k, and queries that are scaled."""

    heads, head_dim = 4, 64

    def biased(self, x: fx.Node, name: str, rows: int) -> fx.Node:
        weight = self.weight(f"{name}.weight", rows, x.meta["val"].shape[-1], dtype=self.dtype)
        return self.call(LINEAR, x, weight, self.weight(f"{name}.bias", rows, dtype=self.dtype))

    def norm(self, x: fx.Node, name: str) -> fx.Node:
        weight, bias = (self.weight(f"{name}.{part}", self.hidden, dtype=self.dtype) for part in ("weight", "bias"))
        return self.call(functional.layer_norm, x, (self.hidden,), weight, bias, 1e-5)

    def decoder_layer(self, x: fx.Node, cos: fx.Node, sin: fx.Node, index: int) -> fx.Node:
        tokens, name = self.size_inputs["T"], f"layers.{index}"
        hidden, flat = self.norm(x, f"{name}.input_norm"), []
        for part in "qkv":
            make = self.projection if part == "k" else self.biased
            one = make(hidden, f"{name}.{part}", self.heads * self.head_dim)
            one = self.call(operator.mul, one, 0.125) if part == "q" else one
            heads = self.method("transpose", self.method("view", one, 1, tokens, -1, self.head_dim), 1, 2)
            turned = self.method("transpose", self.method("contiguous", heads), 1, 2)
            flat.append(self.method("reshape", turned, tokens, self.heads, self.head_dim))
        out = self.call(torch.ops.mllm.attention.default, *flat, None, 1.0, 0.0, -1, "")
        out.meta["nn_module_stack"] = {"m": (f"L['self'].model.{name}.attn", torch.nn.Module)}
        attended = self.method("reshape", out, 1, tokens, self.heads * self.head_dim)
        x = self.call(operator.add, x, self.biased(attended, f"{name}.o", self.hidden))
        up = self.call(functional.gelu, self.biased(self.norm(x, f"{name}.norm"), f"{name}.up", self.ffn))
        return self.call(operator.add, x, self.biased(up, f"{name}.down", self.hidden))


def decoder_with_layer_norms() -> fx.GraphModule:
    return LayerNormDecoder().model()


EXPERTS, CHOSEN, EXPERT_FFN = 6, 2, 64


def experts(decoder: Decoder, hidden: fx.Node, name: str) -> fx.Node:
    """As Qwen's: softmax, choice, renormalisation; gate and up are halves of one weight."""
    return _experts(decoder, hidden, name, softmax_first=True)


def experts_with_biases(decoder: Decoder, hidden: fx.Node, name: str) -> fx.Node:
    """As gpt-oss': choice, softmax; transposed weights with biases, gate and up interleaved and clamped."""
    return _experts(decoder, hidden, name, softmax_first=False)


def _experts(decoder: Decoder, hidden: fx.Node, name: str, softmax_first: bool) -> fx.Node:
    call, method, weight = decoder.call, decoder.method, decoder.weight
    flat = method("view", hidden, -1, decoder.hidden)
    scores = method("float", decoder.projection(flat, f"{name}.router", EXPERTS))
    if softmax_first:
        scores = call(functional.softmax, scores, dim=-1, dtype=torch.float32)
    chosen = call(torch.topk, scores, CHOSEN, dim=-1)
    weights, ids = (call(operator.getitem, chosen, index) for index in (0, 1))
    if softmax_first:
        weights = call(operator.truediv, weights, method("sum", weights, dim=-1, keepdim=True))
    else:
        weights = call(functional.softmax, weights, dim=-1, dtype=torch.float32)
    inner, outer = (2 * EXPERT_FFN, decoder.hidden), (decoder.hidden, EXPERT_FFN)
    biases: list[fx.Node | None] = [None, None]
    if not softmax_first:
        biases = [
            weight(f"{name}.{part}.bias", EXPERTS, rows, dtype=decoder.dtype)
            for part, rows in (("up", 2 * EXPERT_FFN), ("down", decoder.hidden))
        ]
        inner, outer = inner[::-1], outer[::-1]
    first, second = (
        weight(f"{name}.experts.{part}", EXPERTS, *shape, dtype=decoder.dtype)
        for part, shape in (("up", inner), ("down", outer))
    )
    linear = torch.ops.mllm.expert_linear
    products = call(linear, flat, ids, first, biases[0], not softmax_first, True)
    if softmax_first:
        parts = call(torch.chunk, products, 2, -1)
        gate, up = (call(operator.getitem, parts, index) for index in (0, 1))
    else:
        gate, up = (call(operator.getitem, products, (Ellipsis, slice(start, None, 2))) for start in (None, 1))
    active = call(operator.mul, call(functional.silu, gate), up) if softmax_first else clamped_swiglu(decoder, gate, up)
    outputs = call(linear, active, ids, second, biases[1], not softmax_first, False)
    weighted = call(operator.mul, outputs, method("reshape", weights, -1, 1))
    tokens = decoder.size_inputs["T"]
    total = method("sum", method("view", weighted, tokens, CHOSEN, -1), dim=1)
    return method("view", method("to", total, decoder.dtype), 1, tokens, decoder.hidden)


def clamped_swiglu(decoder: Decoder, gate: fx.Node, up: fx.Node, alpha: float = 1.702, limit: float = 0.5) -> fx.Node:
    """As gpt-oss'; the limit is one that some of these numbers reach."""
    call = decoder.call
    gate, up = call(torch.clamp, gate, None, limit), call(torch.clamp, up, -limit, limit)
    glu = call(operator.mul, gate, call(torch.sigmoid, call(operator.mul, gate, alpha)))
    return call(operator.mul, call(operator.add, up, 1), glu)


def decoder_of_experts() -> fx.GraphModule:
    return Decoder(norms_heads=True, dtype=torch.float32, feed_forward=experts).model()


def decoder_of_experts_in_bfloat16() -> fx.GraphModule:
    return Decoder(dtype=torch.bfloat16, feed_forward=experts).model()


def decoder_of_experts_with_biases() -> fx.GraphModule:
    return Decoder(dtype=torch.float32, feed_forward=experts_with_biases).model()


def latents() -> fx.GraphModule:
    builder = GraphBuilder()
    x = latent_layer(builder, builder.embed(), 0, "cat")
    return builder.finish(builder.head(latent_layer(builder, x, 1, "scatter")))


def quantised_decoder() -> fx.GraphModule:
    """In fp8, but for what only one of a packed pair has; and some in four bits with zero points."""
    gm = Decoder(norms_heads=True).model()
    fp8, int4 = WeightScheme("fp8", 64), WeightScheme("int4", 48, torch.bfloat16, has_zeros=True)
    schemes = {f"layers.{layer}.{part}.weight": fp8 for layer in (0, 1) for part in (*"qkvo", "gate", "up")}
    schemes |= {f"layers.{layer}.down.weight": int4 for layer in (0, 1)}
    del schemes["layers.1.up.weight"]
    gm.meta[WEIGHT_SCHEMES] = WeightSchemes(schemes)
    return gm


def experts_with_biases_of_which_some_are_quantised() -> fx.GraphModule:
    """Weights of the second layer, which are transposed."""
    gm = decoder_of_experts_with_biases()
    gm.meta[WEIGHT_SCHEMES] = WeightSchemes({}, {f"layers.1.experts.{part}": MXFP4 for part in ("up", "down")})
    return gm


def decoder_of_experts_in_mxfp4() -> fx.GraphModule:
    """As gpt-oss is published."""
    gm = Decoder(dtype=torch.bfloat16, feed_forward=experts_with_biases).model()
    names = [f"layers.{layer}.experts.{part}" for layer in (0, 1) for part in ("up", "down")]
    gm.meta[WEIGHT_SCHEMES] = WeightSchemes({}, dict.fromkeys(names, MXFP4))
    return gm


def decoder_in_fp8() -> fx.GraphModule:
    """With a scale a row: inputs may be fp8 too, which is not within bfloat16's rounding."""
    gm = Decoder().model()
    weights = [node for node in gm.graph.nodes if node.meta.get("weight_name", "").startswith("layers.")]
    weights = [node for node in weights if node.meta["val"].dim() == 2]
    gm.meta[WEIGHT_SCHEMES] = WeightSchemes(
        {node.meta["weight_name"]: WeightScheme("fp8", int(node.meta["val"].shape[1])) for node in weights}
    )
    return gm


GRAPHS = (
    layers,
    layers_in_stages,
    no_layers,
    in_place_neighbours,
    several_readers,
    tied_weights,
    one_module_twice,
    spelled_in_all_ways,
    views_and_outer_products,
    patches,
    tower,
    tower_in_bfloat16,
    not_by_token,
    decoder,
    decoder_with_normed_heads,
    decoder_of_texts,
    decoder_whose_values_have_other_readers,
    decoder_in_float16,
    decoder_with_layer_norms,
    decoder_of_experts,
    decoder_of_experts_in_bfloat16,
    experts_with_biases_of_which_some_are_quantised,
    quantised_decoder,
    decoder_of_experts_in_mxfp4,
    decoder_in_fp8,
    latents,
)
