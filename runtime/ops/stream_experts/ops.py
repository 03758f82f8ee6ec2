"""The ops that pieces for few tokens call on Hopper: schemas, fakes, and launches of the runtime's own binaries.

Registered as in runtime/ops/attention/layer_op.py. A norm around them works as in runtime/ops/stream_linear/ops.py: x
is h · norm_weight, with sums of squares of h.

Shape legend: T tokens (up to 8), E experts, k experts a token, K inputs and I outputs of gate_up, N outputs of down, B
sums of squares a token.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from mllm_compile.runtime.cuda.driver import Argument, address_of
from mllm_compile.runtime.cuda.loaded import LoadedKernel
from mllm_compile.runtime.cuda.tensor_maps import aligned
from mllm_compile.runtime.ops.stream_experts.kernel import DownKernel, ExpertsKernel, GateUpKernel, Routing
from mllm_compile.runtime.ops.stream_experts.shapes import ROWS

_LIBRARY = torch.library.Library("mllm", "FRAGMENT")
# The experts: `choice` is scores [T, E] of bfloat16 or float32, for choose_experts with `softmax` and `renormalise`;
# or, with weights [T, k], ids [T, k] int64. `wide` tells that weights stay float32, as they are given, and are not
# rounded to bfloat16. `slots` [T] int64 are 0 for padding, which has no experts.
_ROUTER = "Tensor choice, Tensor? weights, Tensor slots, int num_chosen, int softmax, bool renormalise, bool wide"


class Router(NamedTuple):
    """The operands of both ops that say which experts."""

    choice: torch.Tensor
    weights: torch.Tensor | None
    slots: torch.Tensor
    num_chosen: int
    softmax: int
    renormalise: bool
    wide: bool

    def routing(self, num_experts: int) -> Routing:
        """Returns what kernels are compiled for."""
        if self.weights is not None:
            return Routing(num_experts, self.num_chosen, 0, 0, False, self.wide)
        score_bytes = self.choice.dtype.itemsize
        return Routing(num_experts, self.num_chosen, score_bytes, self.softmax, self.renormalise, self.wide)

    @property
    def argument(self) -> _RouterArgument:
        """choice.cuh's Router. The tensors must outlive the launch's call."""
        scores, ids = (self.choice, None) if self.weights is None else (None, self.choice)
        operands = (scores, ids, self.weights, self.slots)
        return _RouterArgument(*(None if one is None else one.data_ptr() for one in operands))

    def contiguous(self) -> Router:
        weights = None if self.weights is None else self.weights.contiguous()
        return self._replace(choice=self.choice.contiguous(), weights=weights, slots=self.slots.contiguous())


class _RouterArgument(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in ("scores", "ids", "weights", "slots"))


class _Loaded(LoadedKernel[ExpertsKernel]):
    """One kernel."""

    def __call__(self, *arguments: Argument) -> None:
        self._loaded.launch(self.kernel.num_blocks, self.kernel.num_threads, arguments)


_LOADED: dict[tuple[int, ExpertsKernel], _Loaded] = {}  # by device index


def load_expert_kernels(kernels: Iterable[ExpertsKernel], binaries: Mapping[str, bytes], device: torch.device) -> None:
    """Makes these kernels those that the ops launch on `device`.

    Args:
        binaries: binaries by the kernel's name; checked by the caller: they are executed.

    Raises:
        ArtifactError: one is missing.
        DeviceError: one cannot be loaded.
    """
    for kernel in kernels:
        with torch.cuda.device(device):
            _Loaded.load_once(_LOADED, (torch.cuda.current_device(), kernel), kernel, binaries)


def _loaded(x: torch.Tensor, kernel: ExpertsKernel) -> _Loaded:
    try:
        return _LOADED[x.get_device(), kernel]
    except KeyError:
        raise RuntimeError(f"no kernel {kernel.name} is loaded on {x.device}: call load_expert_kernels") from None


# mllm::stream_expert_up ----------------------------------------------------------------------------------------------

_LIBRARY.define("stream_expert_up(Tensor x, Tensor weight, Tensor? squares, float eps, " + _ROUTER + ") -> Tensor")


def up_kernel(weight: torch.Tensor, squares: torch.Tensor | None, router: Router) -> GateUpKernel:
    """The kernel of a call of stream_expert_up."""
    num_experts, rows, columns = map(int, weight.shape)
    norm_blocks = 0 if squares is None else int(squares.shape[-1])
    return GateUpKernel(router.routing(num_experts), rows, columns, norm_blocks)


def stream_expert_up(
    x: torch.Tensor,
    weight: torch.Tensor,
    squares: torch.Tensor | None,
    eps: float,
    *router: object,
) -> torch.Tensor:
    """silu(x · gateᵀ) * (x · upᵀ) by each expert of each token, rounded where the three operations round.

    Args:
        x: […, K] bfloat16, up to 8 tokens.
        weight: [E, 2I, K], gate rows first.
        squares: […, B] float32: x is h · norm_weight and these are the sums of squares of h; None: x is taken as it is.
        eps: the norm's.
        router: see _ROUTER.

    Returns:
        [T·k, I] bfloat16; rows of padding hold anything.
    """
    of = Router(*router).contiguous()  # type: ignore[arg-type]
    x, kernel = aligned(x), up_kernel(weight, squares, of)
    out = _rows_of_experts(x, weight, of.num_chosen)
    _loaded(x, kernel)(
        *map(address_of, (weight, x, squares)),
        of.argument,
        address_of(out),
        ctypes.c_float(eps),
        ctypes.c_int(math.prod(x.shape[:-1])),
    )
    return out


def _rows_of_experts(x: torch.Tensor, weight: torch.Tensor, num_chosen: int) -> torch.Tensor:
    return x.new_empty((math.prod(x.shape[:-1]) * num_chosen, weight.shape[1] // 2))


_LIBRARY.impl("stream_expert_up", stream_expert_up, "CUDA")
torch.library.register_fake(
    "mllm::stream_expert_up",
    lambda x, weight, squares, eps, *router: _rows_of_experts(x, weight, Router(*router).num_chosen),
    lib=_LIBRARY,
)

# mllm::stream_expert_down --------------------------------------------------------------------------------------------

_LIBRARY.define("stream_expert_down(Tensor x, Tensor weight, Tensor residual, " + _ROUTER + ") -> Tensor")
_LIBRARY.define(
    "stream_expert_down_norm(Tensor x, Tensor weight, Tensor residual, Tensor norm_weight, bool plus_one, "
    + _ROUTER
    + ") -> (Tensor, Tensor, Tensor)"
)


def down_kernel(weight: torch.Tensor, norm_next: bool, router: Router, plus_one: bool = False) -> DownKernel:
    """The kernel of a call of stream_expert_down or stream_expert_down_norm."""
    num_experts, rows, columns = map(int, weight.shape)
    return DownKernel(router.routing(num_experts), rows, columns, rows // ROWS if norm_next else 0, plus_one)


def stream_expert_down(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, *router: object) -> torch.Tensor:
    """residual + each token's sum of x · weightᵀ of its experts, times their weights; in the order of the choice.

    Args:
        x: [T·k, I] bfloat16, what stream_expert_up gave for the same choice.
        weight: [E, N, I].
        residual: […, N] bfloat16.
        router: see _ROUTER.

    Returns:
        […, N] bfloat16, rounded where the linear, products by weights in bfloat16, the sum and the last one round.
    """
    out = residual.new_empty(residual.shape)
    _launch_down(x, weight, residual, None, False, Router(*router), (out, None, None))  # type: ignore[arg-type]
    return out


def stream_expert_down_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    plus_one: bool,
    *router: object,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns h as stream_expert_down does; h · norm_weight, or with `plus_one` h · (1 + norm_weight); and sums of
    squares of h […, N / 16] float32."""
    outs = _norm_outputs(residual)
    _launch_down(x, weight, residual, norm_weight, plus_one, Router(*router), outs)  # type: ignore[arg-type]
    return outs


def _launch_down(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor | None,
    plus_one: bool,
    router: Router,
    outs: tuple[torch.Tensor | None, ...],
) -> None:
    x, residual, of = aligned(x), aligned(residual), router.contiguous()
    _loaded(x, down_kernel(weight, norm_weight is not None, of, plus_one))(
        *map(address_of, (weight, x)),
        of.argument,
        *map(address_of, (residual, norm_weight, *outs)),
        ctypes.c_int(len(x) // of.num_chosen),
    )


def _norm_outputs(residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    out, scaled = (torch.empty(residual.shape, dtype=residual.dtype, device=residual.device) for _ in range(2))
    squares = residual.new_empty((*residual.shape[:-1], residual.shape[-1] // ROWS), dtype=torch.float32)
    return out, scaled, squares


_LIBRARY.impl("stream_expert_down", stream_expert_down, "CUDA")
_LIBRARY.impl("stream_expert_down_norm", stream_expert_down_norm, "CUDA")
torch.library.register_fake(
    "mllm::stream_expert_down", lambda x, weight, residual, *router: residual.new_empty(residual.shape), lib=_LIBRARY
)
torch.library.register_fake(
    "mllm::stream_expert_down_norm",
    lambda x, weight, residual, norm_weight, plus_one, *router: _norm_outputs(residual),
    lib=_LIBRARY,
)
