"""With a stand-in for FlashInfer's wrappers; tests/gpu/test_flashinfer_backend.py has the real ones."""

from types import SimpleNamespace

import pytest
import torch

from mllm_compile.runtime.attention.planned_prefill import PlannedPrefill


class Wrapper:
    """As FlashInfer's: `run` makes one call of its module's, or what `comes_to` says."""

    def __init__(self, comes_to=None) -> None:
        self.runs = 0
        self.calls: list[tuple] = []
        self._comes_to = comes_to or (lambda call, q, k, v, out: call("workspace", q, k, v, "plan", out, None, 0.5))
        self._cached_module = self._module = SimpleNamespace(ragged_run=lambda *call: self.calls.append(call))

    def run(self, q, *kv, out) -> None:
        self.runs += 1
        k, v = kv[0] if len(kv) == 1 else kv
        self._comes_to(self._cached_module.ragged_run, q, k, v, out)


def layers(count: int) -> list[list[torch.Tensor]]:
    return [list(torch.zeros(4, 2, 3)) for _ in range(count)]


def same(call: tuple, expected: tuple) -> bool:
    return all(a is b for a, b in zip(call, expected, strict=True))


@pytest.mark.parametrize("is_paged", [False, True])
def test_later_layers_make_the_first_ones_call_with_their_own_tensors(is_paged):
    wrapper = Wrapper()
    planned = PlannedPrefill(wrapper)
    steps = layers(3)
    for q, k, v, out in steps:
        planned.run(q, *(((k, v),) if is_paged else (k, v)), out=out)
    assert wrapper.runs == 1
    assert wrapper._cached_module is wrapper._module
    for call, (q, k, v, out) in zip(wrapper.calls, steps, strict=True):
        assert same(call, ("workspace", q, k, v, "plan", out, None, 0.5))


@pytest.mark.parametrize(
    "comes_to",
    [
        lambda call, q, k, v, out: call(q.clone(), k, v, out),
        lambda call, q, k, v, out: call(q, k, v, out, q),
        lambda call, q, k, v, out: (call(q, k, v, out), call(q, k, v, out)),
        lambda call, q, k, v, out: None,
    ],
    ids=["another tensor", "one tensor twice", "two calls", "no call"],
)
def test_what_cannot_be_repeated_is_run_whole_for_every_layer(comes_to):
    wrapper = Wrapper(comes_to)
    planned = PlannedPrefill(wrapper)
    for q, k, v, out in layers(3):
        planned.run(q, k, v, out=out)
    assert wrapper.runs == 3


def test_an_error_of_the_first_layer_leaves_the_wrapper_as_it_was():
    def fail(*args):
        raise ValueError("q has 3 rows")

    wrapper = Wrapper(fail)
    planned = PlannedPrefill(wrapper)
    ((q, k, v, out),) = layers(1)
    with pytest.raises(ValueError, match="3 rows"):
        planned.run(q, k, v, out=out)
    assert wrapper._cached_module is wrapper._module
