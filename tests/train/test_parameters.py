"""Parameters and the served weights that hold them: views, and copies where a weight is laid out otherwise."""

from __future__ import annotations

import pytest
import torch

from mllm_compile.errors import UnsupportedModelError
from mllm_compile.runtime.ops.panels.layout import VALUES_UNIT, in_rows, put_in_panels
from mllm_compile.runtime.weights.spec import WeightPart, WeightSpec
from mllm_compile.train.parameters import ParameterPlaces


def spec(name: str, shape: tuple[int, ...], *parts: WeightPart) -> WeightSpec:
    return WeightSpec(name, shape, torch.float32, parts or (WeightPart(name, "f", 0, shape),))


def places(plain: list[WeightSpec], served: list[WeightSpec], panels: dict[str, int] | None = None) -> tuple:
    weights = {one.name: torch.randn(one.shape) for one in served}
    return ParameterPlaces(plain, served, weights, panels or {}), weights


def test_a_packed_weight_has_a_view_for_each_parameter() -> None:
    packed = spec("q+k", (6, 4), WeightPart("q", "f", 0, (4, 4)), WeightPart("k", "f", 4, (2, 4)))
    made, weights = places([spec("q", (4, 4)), spec("k", (2, 4))], [packed])
    made.parameters["k"].fill_(7)
    made.publish()
    assert torch.equal(weights["q+k"][4:], torch.full((2, 4), 7.0))
    assert torch.equal(made.parameters["q"], weights["q+k"][:4])


def test_stacked_experts_are_one_parameter() -> None:
    parts = [
        WeightPart(f"{i}.{name}", "f", i, (3, 4), (("unsqueeze", 0),), (3 * at, 0))
        for i in range(2)
        for at, name in enumerate(("gate", "up"))
    ]
    made, weights = places([spec("experts", (2, 6, 4), *parts)], [spec("experts", (2, 6, 4), *parts)])
    assert made.parameters["experts"].data_ptr() == weights["experts"].data_ptr()


def test_a_weight_in_panels_is_written_when_it_is_published() -> None:
    tied = spec("tied", (16, 4), WeightPart("embed", "f", 0, (16, 4)))
    served = [spec("embed", (16, 4)), tied]
    weights = {"embed": torch.randn(16, 4)}
    weights["tied"] = weights["embed"].clone()
    put_in_panels(weights["tied"], VALUES_UNIT)
    made = ParameterPlaces([spec("embed", (16, 4))], served, weights, {"tied": VALUES_UNIT})
    made.parameters["embed"][3] = 5.0
    made.publish()
    assert weights["embed"][3].eq(5.0).all()
    assert torch.equal(in_rows(weights["tied"], VALUES_UNIT), weights["embed"])


def test_parameters_of_panels_alone_are_read_from_them() -> None:
    rows = torch.randn(16, 4)
    weights = {"w": rows.clone()}
    put_in_panels(weights["w"], VALUES_UNIT)
    made = ParameterPlaces([spec("w", (16, 4))], [spec("w", (16, 4))], weights, {"w": VALUES_UNIT})
    assert torch.equal(made.parameters["w"], rows)
    made.parameters["w"].mul_(2)
    made.publish()
    assert torch.equal(in_rows(weights["w"], VALUES_UNIT), 2 * rows)


def test_a_transposed_copy_follows() -> None:
    turned = spec("turned", (4, 3), WeightPart("w", "f", 0, (3, 4), (("transpose", 0, 1),)))
    made, weights = places([spec("w", (3, 4))], [turned, spec("w", (3, 4))])
    made.publish()
    assert torch.equal(weights["turned"], weights["w"].T)


def test_a_tensor_in_an_order_of_its_own_is_refused() -> None:
    turned = spec("turned", (4, 4), WeightPart("w", "f", 0, (4, 4), (("halves", 1),)))
    with pytest.raises(UnsupportedModelError, match=r"holds the checkpoint's 'w' in another order.* save_pretrained"):
        places([spec("w", (4, 4))], [turned])
