"""deduplicate_pieces: what counts as equal, and that equal pieces are one module."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from mllm_compile.passes.deduplicate_pieces import DeduplicatePieces, piece_hash
from mllm_compile.passes.split_at_attention import SplitAtAttention
from tests.passes.support.graph_builder import HIDDEN, GraphBuilder, apply, model_of_layers, run


def pieces(gm: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in gm.graph.nodes if node.op == "call_module"]


def split_model(num_layers: int = 4) -> fx.GraphModule:
    builder, logits = model_of_layers(num_layers)
    return apply(SplitAtAttention(), builder.lowered(logits))


def test_equal_layers_share_one_module():
    gm = split_model(4)
    result = DeduplicatePieces()(gm)
    assert result.matches == 2, "three pieces between attentions, of which one stays"
    first, *middle, last, head = pieces(gm)
    assert len(set(middle)) == 1
    assert len({first, middle[0], last, head}) == 4
    assert sorted(name for name, _ in gm.named_children()) == sorted({first, middle[0], last, head})


def hash_of(**changes) -> str:
    """The hash of a small piece with something changed in it."""
    said = {"rows": 8, "value": 1.5, "dtype": torch.float32, "name": "w", "twice": False, "op": torch.add} | changes
    builder = GraphBuilder()
    x = builder.embed()
    weight = builder.weight(said["name"], said["rows"], HIDDEN, dtype=said["dtype"])
    y = builder.call(torch.matmul, builder.call(torch.mul, x, said["value"]), builder.method("t", weight))
    y = builder.call(said["op"], y, y if said["twice"] else 1)
    gm = builder.canonical(builder.head(y))
    return piece_hash(apply(SplitAtAttention(), gm).get_submodule("piece_0"))


def test_the_hash_knows_no_names():
    assert hash_of(name="layers.0.w") == hash_of(name="layers.1.w") == hash_of()


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": 9},
        {"value": 1.5000000000000002},
        {"value": 1},
        {"twice": True},
        {"op": torch.sub},
    ],
)
def test_the_hash_knows_shapes_constants_ops_and_wiring(changes):
    assert hash_of(**changes) != hash_of()


def test_the_hash_knows_dtypes_and_strides():
    def of(dtype: torch.dtype = torch.float32, transposed: bool = False) -> str:
        builder = GraphBuilder()
        weight = builder.weight("w", HIDDEN, dtype=dtype)
        q = builder.linear(builder.embed(), "q", HIDDEN)
        stretched = builder.method("t", builder.method("contiguous", builder.method("t", q))) if transposed else q
        out = builder.attention(q, q, q)
        y = builder.call(torch.add, builder.call(torch.add, out, stretched), weight)
        gm = builder.lowered(builder.linear(y, "o", HIDDEN))
        return piece_hash(apply(SplitAtAttention(), gm).get_submodule("piece_1"))

    assert len({of(), of(torch.float64), of(transposed=True)}) == 3


def test_a_value_that_is_read_further_down_too_does_not_keep_pieces_apart():
    builder = GraphBuilder()
    kept = builder.layer(builder.embed(), 0)
    y = builder.layer(builder.layer(kept, 1), 2)
    gm = apply(SplitAtAttention(), builder.lowered(builder.head(builder.call(torch.add, y, kept))))
    before = run(gm)
    assert DeduplicatePieces()(gm).matches == 1
    gm.recompile()
    torch.testing.assert_close(run(gm), before, rtol=0, atol=0)
