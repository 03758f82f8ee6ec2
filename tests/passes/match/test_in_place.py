"""match/in_place.py: a write into a tensor becomes a new tensor, for each later reader; the same bits."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from torch import fx
from torch.nn import functional

from mllm_compile.passes.match.in_place import InPlaceError, make_functional, writes_in_place
from tests.passes.support.graph_builder import HIDDEN, GraphBuilder, assert_values_hold, run, targets

Body = Callable[[GraphBuilder, fx.Node], fx.Node]


def model(body: Body) -> fx.GraphModule:
    """The head of what `body` makes of a fresh [T, HIDDEN]."""
    builder = GraphBuilder()
    return builder.finish(builder.head(body(builder, builder.method("clone", builder.embed()))))


def write(builder: GraphBuilder, target: Callable | str, *args: object, **kwargs: object) -> fx.Node:
    """A call that writes; its value is made before the graph is, without a change of the tensor's own."""
    make = builder.graph.call_method if isinstance(target, str) else builder.graph.call_function
    node = make(target, args, kwargs)
    node.meta["writes"] = True
    written = kwargs.get("out", args[0])
    node.meta["val"] = None if target is operator.setitem else written.meta["val"]
    return node


def whole(builder, x):
    write(builder, "mul_", x, 2.0)
    return x


def result_of_the_write(builder, x):
    return builder.call(operator.add, write(builder, "add_", x, 1.0), x)


def operators(builder, x):
    for target in (operator.iadd, operator.isub, operator.imul, operator.itruediv):
        x = write(builder, target, x, 1.5)
    return x


def a_view_read_later(builder, x):
    left = builder.call(operator.getitem, x, (Ellipsis, slice(None, 3)))
    write(builder, "mul_", x, 3.0)
    return builder.call(torch.cat, [left, builder.call(operator.getitem, x, (slice(None), slice(3, None)))], -1)


def a_view_read_before(builder, x):
    left = builder.call(operator.getitem, x, (Ellipsis, slice(None, 8)))
    before = builder.call(torch.relu, left)
    write(builder, "neg_", left)
    return builder.call(torch.cat, [before, left], -1)


def copied_into_a_view(builder, x):
    """As models with latent attention fill their queries."""
    part = builder.call(operator.getitem, x, (Ellipsis, slice(8, None)))
    write(builder, "copy_", part, builder.call(operator.getitem, x, (Ellipsis, slice(None, 8))))
    return x


def steps_of_a_number(builder, x):
    """As models mix frequencies of several kinds of positions."""
    stacked = builder.call(torch.stack, [x, builder.call(torch.neg, x)])
    first = builder.call(operator.getitem, stacked, 0)
    write(builder, operator.setitem, first, (Ellipsis, slice(1, 60, 3)), 7.0)
    return builder.call(torch.sum, stacked, 0)


def a_transposed_view(builder, x):
    turned = builder.method("permute", builder.method("view", x, -1, 4, 4), 1, 0, 2)
    write(builder, "add_", builder.call(torch.transpose, turned, 1, 2), 1.0)
    write(builder, "mul_", builder.call(operator.getitem, turned, 1), 2.0)
    return x


def parts(builder, x):
    left, right = (builder.call(operator.getitem, builder.method("chunk", x, 2, -1), index) for index in (0, 1))
    both = builder.call(torch.split, x, [4, 12], -1)
    write(builder, "mul_", builder.call(operator.getitem, both, 1), right_scale(builder))
    return builder.call(torch.cat, [right, left], -1)


def right_scale(builder):
    return builder.weight("scale", 12)


def one_of_several_new_tensors(builder, x):
    values, indices = (builder.call(operator.getitem, builder.call(torch.topk, x, HIDDEN), index) for index in (0, 1))
    write(builder, operator.itruediv, values, builder.call(torch.sum, values, -1, True))
    return builder.call(operator.add, values, indices)


def places_of_a_tensor(builder, x):
    """As experts undo their sorting."""
    order = builder.method("argsort", builder.method("sum", x, -1))
    undone = builder.call(torch.empty_like, order)
    write(builder, operator.setitem, undone, order, builder.positions)
    return builder.call(operator.add, x, builder.method("unsqueeze", undone, 1))


def a_mask(builder, x):
    write(builder, operator.setitem, x, builder.call(operator.lt, x, 0.0), 5.0)
    return x


def scattered(builder, x):
    zeros = builder.call(torch.zeros_like, x)
    write(builder, "scatter_", zeros, 1, builder.method("argsort", x, -1), 1.0)
    return builder.call(operator.mul, zeros, x)


def filled(builder, x):
    y = builder.method("clone", x)
    write(builder, "zero_", x)
    write(builder, "fill_", builder.call(operator.getitem, x, (slice(None), 2)), 3.0)
    write(builder, operator.setitem, x, (slice(None), slice(4, 6)), builder.call(operator.getitem, y, (Ellipsis, [1])))
    return x


def of_another_type(builder, x):
    half = builder.method("bfloat16", x)
    write(builder, operator.imul, half, x)  # computed in float32, rounded when it is written
    return builder.call(operator.add, half, x)


def functions(builder, x):
    write(builder, functional.relu_, x)
    write(builder, functional.silu, x, inplace=True)
    write(builder, functional.dropout, x, 0.5, False, True)
    write(builder, torch.neg_, x)
    write(builder, torch.add, builder.method("clone", x), x, out=x)
    return x


def results_of_writes_into_views(builder, x):
    """A view that was written to goes by the name of the write, and is written to, and taken again, by it."""
    left, right = (builder.call(operator.getitem, builder.method("chunk", x, 2, -1), index) for index in (0, 1))
    left, right = write(builder, operator.imul, left, 2.0), write(builder, operator.iadd, right, left)
    left = write(builder, operator.isub, left, right)
    first = write(builder, "add_", builder.call(operator.getitem, x, (slice(None), 0)), 1.0)
    write(builder, operator.imul, x, 3.0)
    total = builder.call(operator.add, builder.call(torch.cat, [right, left], -1), x)
    return builder.call(operator.add, total, builder.method("unsqueeze", first, 1))


def bits(builder, x):
    whole = builder.method("to", builder.call(operator.mul, x, 100.0), torch.int64)
    flat = builder.method("view", whole, -1, HIDDEN)
    for target in (operator.ilshift, operator.ior, operator.iand, operator.irshift):
        write(builder, target, whole, 3)
    return builder.method("float", flat)


def by_the_names_of_operators(builder, x):
    product = builder.call(operator.mul, x, 1.0)
    write(builder, "__iadd__", product, x)
    return builder.call(operator.mul, product, x)


def dropouts_that_drop_nothing(builder, x):
    """Fake tensors take them for copies; torch gives the input."""
    dropped = builder.call(functional.dropout, x, 0.5, training=False)
    write(builder, "mul_", x, 2.0)
    write(builder, "add_", builder.method("view", dropped, -1, 4, 4), 1.0)
    return builder.call(operator.mul, x, dropped)


def viewed_as_before(builder, x):
    """The written values have other strides than their target."""
    square = builder.call(torch.matmul, builder.method("transpose", x, 0, 1), x)
    room = builder.call(torch.empty_like, square)
    write(builder, "copy_", room, builder.method("transpose", square, 0, 1))
    write(builder, "mul_", room, 2.0)
    flat = builder.method("view", room, -1)
    return builder.call(operator.add, x, builder.call(operator.getitem, flat, slice(None, HIDDEN)))


def with_a_dimension_ahead(builder, x):
    ones = builder.method("view", builder.weight("ones", HIDDEN), 1, 1, HIDDEN)
    write(builder, operator.setitem, x, 0, ones)
    return x


CASES = [
    results_of_writes_into_views,
    bits,
    by_the_names_of_operators,
    dropouts_that_drop_nothing,
    viewed_as_before,
    with_a_dimension_ahead,
    whole,
    result_of_the_write,
    operators,
    a_view_read_later,
    a_view_read_before,
    copied_into_a_view,
    steps_of_a_number,
    a_transposed_view,
    parts,
    one_of_several_new_tensors,
    places_of_a_tensor,
    a_mask,
    scattered,
    filled,
    of_another_type,
    functions,
]


@pytest.mark.parametrize("body", CASES)
def test_the_values_are_the_same_bits_and_nothing_writes(body):
    gm = model(body)
    before = run(gm)
    writes = [node for node in gm.graph.nodes if "writes" in node.meta]
    assert list(filter(writes_in_place, gm.graph.nodes)) == writes
    assert make_functional(gm) == len(writes) > 0
    assert not any(map(writes_in_place, gm.graph.nodes))
    gm.graph.lint()
    gm.recompile()
    assert torch.equal(run(gm), before)
    assert_values_hold(gm)
    once = gm.code
    assert make_functional(gm) == 0
    gm.recompile()
    assert gm.code == once


def test_a_graph_without_writes_is_not_touched():
    gm = model(
        lambda builder, x: builder.call(operator.or_, builder.call(operator.gt, x, 0), builder.call(torch.gt, x, 1))
    )
    before = gm.code
    assert not any(map(writes_in_place, gm.graph.nodes)), "or_ is no write"
    assert make_functional(gm) == 0
    gm.recompile()
    assert gm.code == before


def into_an_input(builder, x):
    weight = builder.weight("w", HIDDEN)
    write(builder, "mul_", weight, 2.0)
    return builder.call(operator.add, x, weight)


def into_a_view_of_an_unknown_kind(builder, x):
    write(builder, "mul_", builder.method("diagonal", builder.method("view", x, -1, 4, 4), 0, 1, 2), 2.0)
    return x


def of_a_kind_without_a_twin(builder, x):
    return write(builder, "normal_", x)


def of_another_form(builder, x):
    write(builder, "unsqueeze_", x, 0)
    return x


def of_another_shape(builder, x):
    """`out=` may give its tensor another shape."""
    return write(builder, torch.cat, [x, x], -1, out=builder.method("clone", x))


def into_bits_of_another_type(builder, x):
    write(builder, "add_", builder.method("view", x, torch.int32), 1)
    return x


def into_one_of_several_that_a_call_gives_views_of(builder, x):
    column = builder.method("clone", builder.call(operator.getitem, x, (slice(None), slice(None, 1))))
    both = builder.call(torch.broadcast_tensors, x, column)
    write(builder, "mul_", column, 2.0)
    return builder.call(operator.add, *(builder.call(operator.getitem, both, index) for index in (0, 1)))


def of_the_order_alone(builder, x):
    square = builder.call(torch.matmul, builder.method("transpose", x, 0, 1), x)
    seen = builder.method("clone", square)
    write(builder, "t_", builder.method("view_as", seen, square))
    return builder.call(torch.matmul, x, seen)


def into_a_part_of_the_tokens(builder, x):
    parts = builder.method("split", x, [builder.size_inputs["T"], 0], 0)
    write(builder, "mul_", builder.call(operator.getitem, parts, 0), 2.0)
    return x


def into_listed_places(builder, x):
    write(builder, operator.setitem, x, (slice(None), [0, 3]), 2.0)
    return x


def into_the_table_of_an_embedding(builder, x):
    table = builder.weight("w", 11, HIDDEN)
    rows = builder.graph.call_function(functional.embedding, (builder.token_ids, table), {"max_norm": 1.0})
    rows.meta["val"] = x.meta["val"]
    return rows


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (into_the_table_of_an_embedding, r"embedding.*writes into l_self_modules_w_"),
        (into_bits_of_another_type, r"add_ .*the bits of clone as another type"),
        (into_one_of_several_that_a_call_gives_views_of, r"mul_ .*which others have as well"),
        (of_the_order_alone, r"t_ .*has no operation that computes the same anew"),
        (into_a_part_of_the_tokens, "a part of a size that depends on the tokens"),
        (into_listed_places, "an index of a kind that is not known"),
        (into_an_input, r"mul_? .*writes into l_self_modules_w_"),
        (into_a_view_of_an_unknown_kind, "view by 'diagonal'"),
        (of_a_kind_without_a_twin, "normal_"),
        (of_another_form, "unsqueeze_"),
        (of_another_shape, "changes the shape"),
    ],
)
def test_unknown_ops_are_refused_by_name(body, said):
    with pytest.raises(InPlaceError, match=said):
        make_functional(model(body))


def test_a_product_that_a_write_follows_may_go():
    """The mistake that this is for: a pass that takes x for x * 1.0 must not let a later write reach x."""
    builder = GraphBuilder()
    x = builder.method("clone", builder.embed())
    y = builder.call(operator.mul, x, 1.0)
    write(builder, "mul_", y, 2.0)
    gm = builder.finish(builder.head(builder.call(operator.add, x, y)))
    before = run(gm)
    make_functional(gm)
    (product,) = (node for node in gm.graph.nodes if node.target is operator.mul and node.args[1] == 1.0)
    product.replace_all_uses_with(product.args[0])
    gm.graph.erase_node(product)
    gm.recompile()
    assert torch.equal(run(gm), before)
    assert targets(gm).count("mul") == 1
