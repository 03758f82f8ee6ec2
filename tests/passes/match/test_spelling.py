"""match/spelling.py: one target for each operation and its arguments by place; the same bits."""

from __future__ import annotations

import operator
import re
from pathlib import Path

import pytest
import torch
from torch import fx
from torch.nn import functional

import mllm_compile.passes
from mllm_compile.passes.match.spelling import OPERATIONS, OTHER_SPELLINGS, is_spelled, spell
from tests.passes.support.graph_builder import HIDDEN, GraphBuilder, assert_values_hold, run


def node_of(target, *args, **kwargs) -> tuple[fx.GraphModule, fx.Node]:
    """A graph that calls `target` on x [T, HIDDEN] and the further arguments, and that node."""
    builder = GraphBuilder()
    x = builder.embed()
    node = builder.method(target, x, *args, **kwargs) if isinstance(target, str) else None
    node = node or builder.call(target, x, *args, **kwargs)
    first = builder.call(operator.getitem, node, 0) if isinstance(node.meta["val"], tuple | list) else node
    return builder.finish(builder.call(torch.sum, first, -1, True)), node


@pytest.mark.parametrize(
    ("target", "args", "kwargs", "expected"),
    [
        (torch.mul, (2.0,), {}, (operator.mul, (2.0,))),
        ("mul", (2.0,), {}, (operator.mul, (2.0,))),
        (torch.mul, (), {"other": 2.0}, (operator.mul, (2.0,))),
        ("mean", (), {"dim": -1, "keepdim": True}, (torch.mean, (-1, True))),
        (torch.mean, (-1,), {"keepdim": True}, (torch.mean, (-1, True))),
        ("mean", (-1, True), {}, (torch.mean, (-1, True))),
        ("split", ([4, 12], -1), {}, (torch.split, ([4, 12], -1))),
        ("split", (4,), {"dim": -1}, (torch.split, (4, -1))),
        ("reshape", (-1, 4), {}, (torch.reshape, ((-1, 4),))),
        ("reshape", ((-1, 4),), {}, (torch.reshape, ((-1, 4),))),
        (torch.reshape, ([-1, 4],), {}, (torch.reshape, ((-1, 4),))),
        ("transpose", (0, 1), {}, (torch.transpose, (0, 1))),
        ("unsqueeze", (), {"dim": 0}, (torch.unsqueeze, (0,))),
        ("float", (), {}, ("to", (torch.float32,))),
        ("to", (), {"dtype": torch.float64}, ("to", (torch.float64,))),
        (functional.relu, (), {"inplace": False}, (torch.relu, ())),
        (functional.silu, (False,), {}, (functional.silu, ())),
        (functional.dropout, (0.1,), {"training": False, "inplace": False}, (functional.dropout, (0.1, False))),
    ],
)
def test_a_call_gets_its_one_spelling(target, args, kwargs, expected):
    gm, node = node_of(target, *args, **kwargs)
    before = run(gm)
    changed = spell(gm)
    assert (node.target, node.args[1:], node.kwargs) == (*expected, {})
    assert node.op == ("call_method" if isinstance(node.target, str) else "call_function")
    gm.graph.lint()
    gm.recompile()
    assert torch.equal(run(gm), before)
    assert_values_hold(gm)
    assert changed == (target is not expected[0] or bool(kwargs) or args != expected[1])
    assert spell(gm) == 0 and all(map(is_spelled, gm.graph.nodes))


@pytest.mark.parametrize(
    ("target", "args", "kwargs"),
    [
        (torch.add, (1.0,), {"alpha": 3}),
        (torch.div, (2.0,), {"rounding_mode": "floor"}),
        ("mean", (-1,), {"dtype": torch.float64}),
        ("to", (), {"dtype": torch.float64, "copy": True}),
        ("view", (-1, 4), {}),
    ],
)
def test_what_is_another_operation_stays(target, args, kwargs):
    gm, node = node_of(target, *args, **kwargs)
    spell(gm)
    assert (node.target, node.args[1:], node.kwargs) == (target, args, kwargs)


def test_an_argument_behind_one_that_is_left_out_stays_named():
    gm, node = node_of("clamp", max=0.5)
    spell(gm)
    assert (node.target, node.args[1:], node.kwargs) == (torch.clamp, (), {"max": 0.5})


def test_the_type_of_another_tensor_is_said():
    builder = GraphBuilder()
    node = builder.method("type_as", builder.embed(), builder.weight("w", HIDDEN, dtype=torch.bfloat16))
    gm = builder.finish(node)
    spell(gm)
    assert (node.target, node.args[1:]) == ("to", (torch.bfloat16,))


def test_a_number_that_is_scattered_has_the_type_of_the_tensor():
    builder = GraphBuilder()
    x = builder.embed()
    ids = builder.call(operator.getitem, builder.call(torch.topk, x, 1), 1)
    marked = builder.method("scatter", x, -1, ids, 1)
    whole = builder.method("scatter", ids, -1, builder.call(operator.mul, ids, 0), 1)
    gm = builder.finish(builder.call(operator.add, marked, whole))
    before = run(gm)
    assert spell(gm) == 1 and spell(gm) == 0
    assert isinstance(marked.args[3], float) and isinstance(whole.args[3], int)
    gm.recompile()
    assert torch.equal(run(gm), before)


@pytest.mark.parametrize("place", [0, 3, -1, -2])
def test_a_list_of_one_number_is_a_slice(place):
    builder = GraphBuilder()
    x = builder.embed()
    part = builder.call(operator.getitem, x, (slice(None), [place]))
    several = builder.call(operator.getitem, x, (slice(None), [0, 1]))
    gm = builder.finish(builder.call(operator.add, part, several))
    before = run(gm)
    assert spell(gm) == 1 and spell(gm) == 0
    assert not any(isinstance(one, list) for one in part.args[1]) and [0, 1] in several.args[1]
    gm.recompile()
    assert torch.equal(run(gm), before)


def test_sums_of_sizes_are_no_sums_of_tensors():
    builder = GraphBuilder()
    x = builder.embed()
    sizes = builder.method("size", x)
    product = builder.call(operator.mul, builder.size_inputs["T"], 4)
    longer = builder.call(operator.add, builder.call(torch.Size, [product]), (4,))
    gm = builder.finish(builder.head(x))
    spell(gm)
    assert (sizes.target, product.target, longer.target) == ("size", operator.mul, operator.add)


def test_sizes_that_are_one_value_stay_one_argument():
    builder = GraphBuilder()
    x = builder.embed()
    shape = builder.call(operator.add, builder.method("size", x), ())
    node = builder.method("reshape", x, shape)
    gm = builder.finish(node)
    spell(gm)
    assert (node.target, node.args) == (torch.reshape, (x, shape))


def test_a_spelling_is_of_one_operation():
    spellings = [spelling for one in OPERATIONS for spelling in (one.target, *one.others)]
    assert len(spellings) == len(set(spellings))
    assert not OTHER_SPELLINGS & {one.target for one in OPERATIONS}


def test_no_pass_asks_for_another_spelling():
    """It would never find one."""
    methods = {other for other in OTHER_SPELLINGS if isinstance(other, str)}
    functions = {f"torch.{one.__name__}" for one in OTHER_SPELLINGS - methods if hasattr(torch, one.__name__)}
    functions -= {"torch.tanh", "torch.sigmoid", "torch.relu"}  # functional has other spellings of them
    for path in Path(mllm_compile.passes.__file__).parent.rglob("*.py"):
        if path.name in ("spelling.py", "in_place.py"):
            continue
        for line in path.read_text().splitlines():
            asked = re.findall(r"is_call\((.*)\)", line)
            for targets in asked:
                assert not functions & set(re.findall(r"torch\.\w+", targets)), f"{path.name}: {line.strip()}"
                assert not methods & set(re.findall(r'"(\w+)"', targets)), f"{path.name}: {line.strip()}"


def test_a_reshape_to_the_sizes_of_another_tensor_keeps_them_as_one_value():
    builder = GraphBuilder()
    x = builder.embed()
    sizes = builder.method("size", x)
    node = builder.method("reshape", builder.method("flatten", x, 0), sizes)
    gm = builder.finish(builder.call(torch.sum, node, -1, True))
    before = run(gm)
    spell(gm)
    gm.recompile()
    assert any(one.target is torch.reshape and one.args[1].target == "size" for one in gm.graph.nodes)
    torch.testing.assert_close(run(gm), before, rtol=0, atol=0)
