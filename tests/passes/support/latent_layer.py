"""A layer of latent attention (MLA) as traces have it: keys and values of every head are expanded from one latent."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from tests.passes.support.graph_builder import GraphBuilder

HEADS, NOPE, ROPE, VALUE, RANK = 4, 6, 2, 5, 8
PLAIN = {"sinks": None, "sm_scale": 0.3, "logits_soft_cap": 0.0, "window_left": -1, "refusals": ""}


def latent_layer(
    builder: GraphBuilder, x: fx.Node, index: int = 0, how: str = "scatter", bias: bool = False, **said: Any
) -> fx.Node:
    """x + latent attention, its keys put together by `how`."""
    name, tokens = f"layers.{index}.attn", builder.size_inputs["T"]
    q = builder.method("view", builder.linear(x, f"{name}.q", HEADS * (NOPE + ROPE)), tokens, HEADS, NOPE + ROPE)
    latent = builder.call(torch.tanh, builder.linear(x, f"{name}.a", RANK))
    rotated = builder.linear(x, f"{name}.r", ROPE)
    if how != "without rotation":
        rotated = builder.call(torch.sin, rotated)
    rotated = builder.method("view", rotated, tokens, 1, ROPE)
    expanded = builder.linear(latent, f"{name}.b", HEADS * (NOPE + VALUE), bias=bias)
    expanded = builder.method("view", expanded, tokens, HEADS, NOPE + VALUE)
    parts = builder.call(torch.split, expanded, [NOPE, VALUE], -1)
    k_nope, v = (builder.call(operator.getitem, parts, part) for part in range(2))
    of_heads = builder.method("expand", rotated, -1, HEADS, -1)
    if how == "scatter":
        k = builder.method("new_empty", expanded, tokens, HEADS, NOPE + ROPE)
        k = builder.call(torch.ops.aten.slice_scatter.default, k, k_nope, 2, 0, NOPE, 1)
        k = builder.call(torch.ops.aten.slice_scatter.default, k, of_heads, 2, NOPE, None, 1)
    else:
        pair = (of_heads, k_nope) if how == "rotated first" else (k_nope, of_heads)
        k = builder.call(torch.cat, pair, -1)
    out = builder.call(torch.ops.mllm.attention.default, q, k, v, *(PLAIN | said).values())
    out.meta["nn_module_stack"] = {"m": (f"L['self'].model.{name}", torch.nn.Module)}
    flat = builder.method("flatten", out, 1)
    return builder.call(torch.add, x, builder.linear(flat, f"{name}.o", x.meta["val"].shape[1]))
