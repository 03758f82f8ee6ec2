"""The ops of linears that stream weights of one form: schemas, fakes, and launches of the runtime's own binaries.

They are `<prefix>`, `<prefix>_residual` and `<prefix>_residual_norm`. A weight is one tensor, or values with what is
beside them. A norm between two linears works as in runtime/ops/few_tokens.py: the first linear leaves h · norm_weight
and sums of squares of h, the second one multiplies by the norm's factor. Registered as in
runtime/ops/attention/layer_op.py.

Shape legend: N outputs and K inputs of a linear, B sums of squares a token.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from mllm_compile.runtime.cuda import tensor_maps
from mllm_compile.runtime.cuda.driver import Argument, address_of
from mllm_compile.runtime.cuda.loaded import LoadedKernel
from mllm_compile.runtime.cuda.tensor_maps import aligned
from mllm_compile.runtime.ops.stream_linear.linear import MAX_STREAMED_TOKENS, LinearKind, LinearTiling, bucket_of

_LIBRARY = torch.library.Library("mllm", "FRAGMENT")
Weight = tuple[Any, ...]  # tensors, None in the place of one, and what else says how they are read


class LoadedLinear(LoadedKernel[LinearTiling]):
    """One kernel of a linear."""

    def __call__(
        self,
        x: torch.Tensor,
        weight: Weight,
        operands: Iterable[torch.Tensor | None],
        eps: float,
        num_tokens: int,
    ) -> None:
        values, *beside = weight
        assert values is not None, "a weight has values"
        arguments: tuple[Argument, ...] = (
            *self._read(x.view(num_tokens, -1), values),
            *self._tell_beside(x, beside),
            *map(address_of, operands),
            ctypes.c_float(eps),
            ctypes.c_int(num_tokens),
        )
        self._loaded.launch(self.kernel.num_blocks, self.kernel.num_threads, arguments)

    def _tell_beside(self, x: torch.Tensor, beside: Iterable[Any]) -> Iterable[Argument]:
        """Tells the kernel what a weight has beside its values."""
        return map(address_of, beside)

    def _read(self, x: torch.Tensor, values: torch.Tensor) -> tuple[Argument, Argument]:
        """Tells where the kernel finds values and x. To TMA an element of any values is two bytes."""
        tiling = self.kernel
        boxes = tiling.boxes(x.shape[0])
        if boxes is None:
            return address_of(values), address_of(x)
        of_values = tensor_maps.halves if tiling.kind.gated else tensor_maps.panels
        value_map = self._maps.get(values.view(torch.bfloat16), of_values, boxes.rows, boxes.panels)
        return value_map, self._maps.get(x, tensor_maps.rows, boxes.tokens) if boxes.tokens else address_of(x)


class StreamedOps:
    """Defines the ops of one form of weights, and holds their kernels.

    `<prefix>(x, *weight, squares, eps, gated, bias=None, squared_relu=False, gelu=False)` is x · weightᵀ + bias, of a
    norm and gated if so asked: x […, K] bfloat16 → […, N] bfloat16. With squares […, B] float32, x is h · norm_weight
    and these are the sums of squares of h; without, x is taken as it is. Of a gated linear the weight is [gate rows; up
    rows] and the result silu(gate) * up, […, N / 2]. A bias [N] bfloat16 is added before the sum is rounded; a gated
    one has none. With `squared_relu` the result is relu(y) ** 2 of the rounded sums y, with `gelu` gelu(y) by erf.

    `<prefix>_residual(x, *weight, residual, bias=None)` is residual + (x · weightᵀ + bias), whose second part is
    rounded first; residual […, N] bfloat16.

    `<prefix>_residual_norm(x, *weight, residual, norm_weight, plus_one=False)` gives h = residual + x · weightᵀ,
    h · norm_weight, both […, N] bfloat16, and sums of squares of h, […, B] float32: a streamed linear goes on from the
    latter two. With `plus_one` it is h · (1 + norm_weight), rounded once.

    Args:
        prefix: the ops' name.
        weight: the weight's tensors, as schemas have them.
        kind_of: the kind of a linear by its weight's tensors, with nothing around it.
        num_norm_blocks: B of what a weight [rows, columns] leaves.
        launch_tokens: tokens of a launch, at most; a larger step is several.
        loaded_as: what launches one kernel.
        weight_of: the weight of some of the tokens.
    """

    def __init__(
        self,
        prefix: str,
        weight: str,
        kind_of: Callable[..., LinearKind],
        num_norm_blocks: Callable[[int, int], int],
        launch_tokens: int = MAX_STREAMED_TOKENS,
        loaded_as: type[LoadedLinear] = LoadedLinear,
        weight_of: Callable[[Weight, slice], Weight] = lambda weight, tokens: weight,
    ) -> None:
        self.launch_tokens = launch_tokens
        self._kind_of = kind_of
        self._num_norm_blocks = num_norm_blocks
        self._loaded_as = loaded_as
        self._weight_of = weight_of
        self._num_operands = weight.count(",") + 1
        self._loaded: dict[tuple[int, LinearKind, int], LoadedLinear] = {}  # by device index, linear and bucket
        self._define(
            f"{prefix}(Tensor x, {weight}, Tensor? squares, float eps, bool gated, Tensor? bias=None,"
            " bool squared_relu=False, bool gelu=False) -> Tensor",
            self._plain,
            self._fake_plain,
        )
        self._define(
            f"{prefix}_residual(Tensor x, {weight}, Tensor residual, Tensor? bias=None) -> Tensor",
            self._residual,
            self._fake_residual,
        )
        self._define(
            f"{prefix}_residual_norm(Tensor x, {weight}, Tensor residual, Tensor norm_weight, bool plus_one=False)"
            " -> (Tensor, Tensor, Tensor)",
            self._residual_norm,
            self._fake_residual_norm,
        )

    def _define(self, schema: str, launch: Callable[..., Any], fake: Callable[..., Any]) -> None:
        name = schema.partition("(")[0]
        _LIBRARY.define(schema)
        _LIBRARY.impl(name, launch, "CUDA")
        torch.library.register_fake(f"mllm::{name}", fake, lib=_LIBRARY)

    def plain_kind(
        self,
        weight: Weight,
        squares: torch.Tensor | None,
        gated: bool,
        has_bias: bool,
        squared_relu: bool,
        gelu: bool = False,
    ) -> LinearKind:
        """The linear of a call of `<prefix>`."""
        norm_blocks = 0 if squares is None else int(squares.shape[-1])
        return _plain_of(self._kind_of(*weight), norm_blocks, gated, has_bias, squared_relu, gelu)

    def residual_kind(
        self, weight: Weight, norm_next: bool, plus_one: bool = False, has_bias: bool = False
    ) -> LinearKind:
        """The linear of a call of `<prefix>_residual` or `<prefix>_residual_norm`."""
        kind = self._kind_of(*weight)
        next_blocks = self._num_norm_blocks(kind.rows, kind.columns) if norm_next else 0
        return _residual_of(kind, next_blocks, plus_one, has_bias)

    def kind_of_call(self, node: Any, name: str) -> LinearKind:
        """The linear of a call in a graph of the op `<prefix><name>`, from `meta["val"]` of what it takes."""
        count = 1 + self._num_operands
        weight = tuple(getattr(one, "meta", {"val": one})["val"] for one in node.args[1:count])
        if name == "_residual_norm":
            return self.residual_kind(weight, True, plus_one=node.args[count + 2 :] == (True,))
        if name:
            has_bias = any(one is not None for one in node.args[count + 1 :])
            return self.residual_kind(weight, False, has_bias=has_bias)
        squares, _, gated, *last = node.args[count:]
        bias, *activations = _last_operands(*last)
        squares = None if squares is None else squares.meta["val"]
        return self.plain_kind(weight, squares, gated, bias is not None, *activations)

    def load_kernels(
        self, tilings: Iterable[LinearTiling], binaries: Mapping[str, bytes], device: torch.device
    ) -> None:
        """Makes these kernels those that the ops launch on `device`.

        Args:
            binaries: binaries by the tiling's name; checked by the caller: they are executed.

        Raises:
            ArtifactError: one is missing.
            DeviceError: one cannot be loaded.
        """
        for tiling in tilings:
            with torch.cuda.device(device):
                key = (torch.cuda.current_device(), tiling.kind, tiling.tokens)
                self._loaded_as.load_once(self._loaded, key, tiling, binaries)

    def _launch(
        self,
        x: torch.Tensor,
        weight: Weight,
        kind: LinearKind,
        operands: tuple[torch.Tensor | None, ...],
        eps: float = 0.0,
    ) -> None:
        num_tokens, most = math.prod(x.shape[:-1]), self.launch_tokens
        if num_tokens > most:
            squares, residual, of_outputs, *outputs = operands
            for first in range(0, num_tokens, most):
                rows = slice(first, min(first + most, num_tokens))
                before, after = _rows_of((squares, residual), rows), _rows_of(outputs, rows)
                operands = (*before, of_outputs, *after)
                self._launch(x.flatten(0, -2)[rows], self._weight_of(weight, rows), kind, operands, eps)
            return
        loaded = self._loaded.get((x.get_device(), kind, bucket_of(num_tokens)))
        if loaded is None:
            raise RuntimeError(f"no kernel is loaded for the linear {kind.name} on {x.device}: call load_kernels")
        loaded(x, weight, operands, eps, num_tokens)

    def _taken(self, operands: tuple[Any, ...]) -> tuple[Weight, tuple[Any, ...]]:
        """The weight's tensors, and what follows them in a call."""
        return operands[: self._num_operands], operands[self._num_operands :]

    def _plain(self, x: torch.Tensor, *operands: Any, **named: Any) -> torch.Tensor:
        weight, (squares, eps, gated, *last) = self._taken(operands)
        bias, *activations = _last_operands(*last, **named)
        x = aligned(x)
        out = _new_output(x, weight, gated)
        kind = self.plain_kind(weight, squares, gated, bias is not None, *activations)
        self._launch(x, weight, kind, (squares, None, bias, out, None, None), eps)
        return out

    def _fake_plain(self, x: torch.Tensor, *operands: Any, **named: Any) -> torch.Tensor:
        weight, (_, _, gated, *_) = self._taken(operands)
        return _new_output(x, weight, gated)

    def _residual(self, x: torch.Tensor, *operands: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
        weight, (residual, *last) = self._taken(operands)
        x, residual, bias = aligned(x), aligned(residual), last[0] if last else bias
        out = residual.new_empty(residual.shape)
        kind = self.residual_kind(weight, norm_next=False, has_bias=bias is not None)
        self._launch(x, weight, kind, (None, residual, bias, out, None, None))
        return out

    def _fake_residual(self, x: torch.Tensor, *operands: Any, **_: Any) -> torch.Tensor:
        _, (residual, *_) = self._taken(operands)
        return residual.new_empty(residual.shape)

    def _residual_norm(
        self, x: torch.Tensor, *operands: Any, plus_one: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        weight, (residual, norm_weight, *last) = self._taken(operands)
        x, residual = aligned(x), aligned(residual)
        kind = self.residual_kind(weight, norm_next=True, plus_one=last[0] if last else plus_one)
        out, scaled, squares = outputs = _norm_outputs(residual, kind.next_blocks)
        self._launch(x, weight, kind, (None, residual, norm_weight, out, scaled, squares))
        return outputs

    def _fake_residual_norm(
        self, x: torch.Tensor, *operands: Any, plus_one: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        weight, (residual, *_) = self._taken(operands)
        return _norm_outputs(residual, self.residual_kind(weight, norm_next=True).next_blocks)


# Each launch asks for its kind anew: what is around a linear is remembered.
@cache
def _plain_of(
    kind: LinearKind, norm_blocks: int, gated: bool, has_bias: bool, squared_relu: bool, gelu: bool
) -> LinearKind:
    return replace(kind, norm_blocks=norm_blocks, gated=gated, bias=has_bias, squared_relu=squared_relu, gelu=gelu)


@cache
def _residual_of(kind: LinearKind, next_blocks: int, plus_one: bool, has_bias: bool) -> LinearKind:
    return replace(kind, residual=True, next_blocks=next_blocks, plus_one=plus_one, bias=has_bias)


def _last_operands(bias: Any = None, squared_relu: bool = False, gelu: bool = False) -> tuple[Any, bool, bool]:
    """The operands of `<prefix>` that a call may leave out."""
    return bias, squared_relu, gelu


def _rows_of(tensors: Iterable[torch.Tensor | None], rows: slice) -> list[torch.Tensor | None]:
    """The parts of tensors […, n] that are of those tokens."""
    return [None if tensor is None else tensor.flatten(0, -2)[rows] for tensor in tensors]


def _new_output(x: torch.Tensor, weight: Weight, gated: bool) -> torch.Tensor:
    assert weight[0] is not None, "a weight has values"
    rows = weight[0].shape[0]
    return x.new_empty((*x.shape[:-1], rows // 2 if gated else rows))


def _norm_outputs(residual: torch.Tensor, num_blocks: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    squares = residual.new_empty((*residual.shape[:-1], num_blocks), dtype=torch.float32)
    return residual.new_empty(residual.shape), residual.new_empty(residual.shape), squares
