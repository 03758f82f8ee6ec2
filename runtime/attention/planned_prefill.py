"""FlashInfer's prefill wrappers, run for one layer after another with less of the host's time.

A wrapper's `run` checks its arguments and gathers some forty for the kernel, of which all but the layer's own tensors
are the plan's. So the first layer of a step runs it, what it comes to is noted, and the other layers make that call
with their tensors in the place of the first one's.

Shape legend: T tokens, H query heads, Hk kv heads, D head dim, P pages, S page size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class PlannedPrefill:
    """A wrapper after its plan, for the layers of one step.

    Attributes:
        wrapper: FlashInfer's.
    """

    def __init__(self, wrapper: Any) -> None:
        self.wrapper = wrapper
        self._call: _Call | None = None
        self._may_record = True

    def run(self, q: torch.Tensor, *kv: Any, out: torch.Tensor) -> None:
        """As the wrapper's.

        Args:
            q, out: [T, H, D].
            kv: k, v [T, Hk, D] of a ragged wrapper; one pair of pages [P, S, Hk, D] of a paged one.
        """
        if self._call is not None:
            self._call.repeat(_tensors(q, kv, out))
        elif self._may_record:
            self._may_record = False
            self._call = self._record(q, kv, out)
        else:
            self.wrapper.run(q, *kv, out=out)

    def _record(self, q: torch.Tensor, kv: tuple[Any, ...], out: torch.Tensor) -> _Call | None:
        """Runs it; None where it comes to no single call with these very tensors, as it may in another version."""
        module = self.wrapper._cached_module
        recorder = _Recorder(module)
        self.wrapper._cached_module = recorder
        try:
            self.wrapper.run(q, *kv, out=out)
        finally:
            self.wrapper._cached_module = module
        if len(recorder.calls) != 1:
            return None
        call = recorder.calls[0]
        return call if call.find(_tensors(q, kv, out)) else None


def _tensors(q: torch.Tensor, kv: tuple[Any, ...], out: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (q, *(kv[0] if len(kv) == 1 else kv), out)


class _Call:
    """A call of a function of FlashInfer's module."""

    def __init__(self, function: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        self._function = function
        self._arguments = list(arguments)
        self._places: list[int] = []

    def find(self, tensors: tuple[torch.Tensor, ...]) -> bool:
        """Notes where among the arguments these are, and lets go of them; False: one is not, or more than once."""
        places = [[at for at, argument in enumerate(self._arguments) if argument is tensor] for tensor in tensors]
        self._places = [at[0] for at in places if len(at) == 1]
        for at in self._places:
            self._arguments[at] = None
        return len(self._places) == len(tensors)

    def repeat(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """With these in the places of those that were found."""
        arguments = self._arguments.copy()  # which would keep the tensors until the next plan
        for at, tensor in zip(self._places, tensors, strict=True):
            arguments[at] = tensor
        self._function(*arguments)


class _Recorder:
    """Stands for a module of FlashInfer's and notes the calls of its functions."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.calls: list[_Call] = []

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._module, name)

        def record(*arguments: Any) -> object:
            self.calls.append(_Call(function, arguments))
            return function(*arguments)

        return record
