"""Products whose sums depend on the number of rows are found while a model is compiled."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from mllm_compile.check import rows
from mllm_compile.check.rows import check_rows
from mllm_compile.errors import UnlikeRowsError
from mllm_compile.runtime.ops import op


@pytest.fixture(autouse=True)
def no_library(monkeypatch) -> None:
    monkeypatch.setattr(rows, "sum_in_one_order", lambda: None)


def graph_of(target: Callable[..., Any] = torch._C._nn.linear, *more: None) -> fx.GraphModule:
    """One piece, with products [T, 8] x [8, 4]."""
    piece = fx.Graph()
    x, weight = piece.placeholder("x"), piece.placeholder("weight")
    product = piece.call_function(target, (x, weight, *more))
    piece.output((product,))
    x.meta["val"], product.meta["val"] = torch.empty(5, 8), torch.empty(5, 4)
    whole = fx.Graph()
    called = whole.call_module("piece", (whole.placeholder("x"), whole.placeholder("weight")))
    whole.output(called)
    return fx.GraphModule({"piece": fx.GraphModule({}, piece)}, whole)


@pytest.mark.parametrize("has_kernels_of_few_rows", [False, True])
def test_sums_that_go_by_the_number_of_rows_end_the_compile(monkeypatch, has_kernels_of_few_rows):
    graph = graph_of(op("linear_in_one_order"), None) if has_kernels_of_few_rows else graph_of()

    def exact(x, weight):
        return (x[:, None, :] * weight).sum(-1)

    def divided(x, weight):
        half = weight.shape[1] // 2
        if len(x) == 80:
            return exact(x[:, :half], weight[:, :half]) + exact(x[:, half:], weight[:, half:])
        return exact(x, weight)

    monkeypatch.setattr(torch.nn.functional, "linear", exact)
    check_rows(graph, "cpu")
    monkeypatch.setattr(torch.nn.functional, "linear", divided)
    with pytest.raises(UnlikeRowsError, match=r"80 rows with a weight of 4 x 8 in torch.float32 differs"):
        check_rows(graph, "cpu")


def test_a_product_that_is_no_linear_ends_it_too():
    with pytest.raises(UnlikeRowsError, match=r"matmul.*whose sums are not known"):
        check_rows(graph_of(operator.matmul), "cpu")


def test_a_weight_that_is_dequantised_ahead_of_its_product_is_tried_too(monkeypatch):
    tried = []
    monkeypatch.setattr(torch.nn.functional, "linear", lambda x, weight, bias: tried.append(weight.shape) or x[:, :4])
    piece = fx.Graph()
    x, values, scales, bias = (piece.placeholder(name) for name in ("x", "values", "scales", "bias"))
    product = piece.call_function(op("quantised_linear"), (x, values, scales, None, bias, "fp8", 8))
    piece.output((product,))
    x.meta["val"], product.meta["val"] = torch.empty(5, 8), torch.empty(5, 4)
    whole = fx.Graph()
    whole.output(whole.call_module("piece", tuple(whole.placeholder(name) for name in "xvsb")))
    check_rows(fx.GraphModule({"piece": fx.GraphModule({}, piece)}, whole), "cpu")
    assert set(tried) == {(4, 8)}
