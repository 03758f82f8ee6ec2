"""Layers with a state of every kind, their inputs, and batches of them over a pool."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from mllm_compile.runtime.attention.metadata import CommonAttentionMetadata
from mllm_compile.runtime.memory_pool import GDNPool
from mllm_compile.runtime.ops import op, states
from mllm_compile.runtime.state.base import StateBackend, StateInputs
from mllm_compile.runtime.state.layer import (
    CausalConv,
    GatedDelta,
    MatrixMemory,
    SelectiveScan,
    Ssd,
    StateKind,
    StateLayer,
    Wkv,
)
from mllm_compile.runtime.state.metadata import Segment, StateMetadata
from mllm_compile.runtime.state.piece_backend import StatePieces
from mllm_compile.runtime.state.reference import Operands

KERNEL = 4
WITH_KERNELS: dict[str, StateKind] = {
    "conv": CausalConv("silu"),
    "delta": GatedDelta(qk_l2norm=True),
    "delta a channel": GatedDelta(qk_l2norm=True),
    "ssd": Ssd(dt_softplus=True, dt_min=0.001, dt_max=0.5),
    "scan": SelectiveScan(dt_softplus=True),
}
KINDS = WITH_KERNELS | {"weighted mean": Wkv(), "matrix memory": MatrixMemory(eps=1e-6)}
# Those that make their gates themselves, or norm what they give, which differ from the others in that alone.
OF_GATES: dict[str, StateKind] = {
    "delta of its gates": GatedDelta(qk_l2norm=True),
    "delta with its norm": GatedDelta(qk_l2norm=True, norm_eps=1e-5, norm_gate="silu"),
    "delta a channel with its norm": GatedDelta(qk_l2norm=True, norm_eps=1e-5, norm_gate="sigmoid"),
    "ssd with its norm": Ssd(dt_softplus=True, dt_min=0.001, dt_max=0.5, norm_eps=1e-5, norm_groups=2),
    "ssd of logarithms": Ssd(dt_softplus=True, dt_min=0.001, dt_max=0.5, log_rates=True),
    "scan of logarithms": SelectiveScan(dt_softplus=True, log_rates=True),
}


def operands_of(name: str, num_tokens: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Inputs of `num_tokens` tokens; constants depend on the seed alone."""
    constants, tokens = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed + 1)

    def constant(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=constants)

    def of_tokens(*shape: int) -> torch.Tensor:
        return torch.randn((num_tokens, *shape), generator=tokens)

    if name == "conv":
        return {"x": of_tokens(6), "weight": constant(6, KERNEL), "bias": constant(6)}
    if name.startswith("delta"):
        is_of_channels = name.startswith("delta a channel")
        gates, keys = of_tokens(4, 8) if is_of_channels else of_tokens(4), 4 if is_of_channels else 2
        tokens_of_all = {"q": of_tokens(keys, 8), "k": of_tokens(keys, 8), "v": of_tokens(4, 5)}
        if name == "delta of its gates":
            return tokens_of_all | {"g": gates, "beta": gates, "A_log": constant(4), "dt_bias": constant(4)}
        tokens_of_all |= {"g": -gates.exp(), "beta": of_tokens(4).sigmoid()}
        return tokens_of_all | ({"z": of_tokens(4, 5), "norm": constant(5)} if "norm" in name else {})
    if name.startswith("ssd"):
        states = {"B": of_tokens(2, 3), "C": of_tokens(2, 3), "D": constant(4), "dt_bias": constant(4)}
        if "norm" in name:
            states |= {"z": of_tokens(4, 5), "norm": constant(20)}
        return {"x": of_tokens(4, 5), "dt": of_tokens(4), "A": -constant(4).exp(), **states}
    if name == "weighted mean":
        # Exponents that float32 has no numbers for, in some tokens.
        k = of_tokens(6) * torch.tensor([1.0, 1.0, 3.0, 3.0, 90.0, 90.0])
        return {"k": k, "v": of_tokens(6), "decay": constant(6), "bonus": constant(6)}
    if name == "matrix memory":
        gates = {"i": 5 * of_tokens(4), "f": 5 * of_tokens(4)}
        return {"q": of_tokens(4, 8), "k": of_tokens(4, 8), "v": of_tokens(4, 5)} | gates
    states = {"B": of_tokens(3), "C": of_tokens(3), "D": constant(6), "z": of_tokens(6), "dt_bias": constant(6)}
    return {"x": of_tokens(6), "dt": of_tokens(6), "A": -constant(6, 3).exp(), **states}


def layer_of(name: str, dtype: torch.dtype = torch.float32) -> StateLayer:
    kind, operands = (KINDS | OF_GATES)[name], operands_of(name, 1)
    shapes = {key: value.shape for key, value in operands.items()}
    shown = str(dtype).removeprefix("torch.")
    sizes = tuple(kind.state_shape(shapes)), tuple(kind.out_shape(shapes))
    return StateLayer(f"layers.0.{name}", 0, kind, tuple(operands), *sizes, shown, shown)


def tokens_of(name: str, operands: Operands, span: slice) -> dict[str, torch.Tensor]:
    constants = (KINDS | OF_GATES)[name].constants
    return {key: value if key in constants else value[span] for key, value in operands.items()}


def pool_of(layer: StateLayer, num_rows: int = 8, fill: float = torch.nan) -> GDNPool:
    """A pool whose rows hold what nobody may read."""
    pool = GDNPool(num_rows, [(layer.state_shape, torch.float32)], "cpu")
    pool.get_state(0).fill_(fill)
    return pool


def run_batch(
    backend: StateBackend,
    layer: StateLayer,
    operands: Operands,
    rows: Sequence[int],
    lengths: Sequence[int],
    earlier: Sequence[int],
    num_decodes: int = 0,
) -> torch.Tensor:
    """The layer's output for a batch: `lengths` new tokens of each request after `earlier` ones."""
    ends = torch.tensor(lengths).cumsum(0).tolist()
    segments = [
        Segment(index, ends[index] - lengths[index], ends[index], earlier[index] > 0)
        for index in range(num_decodes, len(rows))
    ]
    device = next(iter(operands.values())).device
    prefix, new = (torch.tensor(counts, dtype=torch.int32, device=device) for counts in (earlier, lengths))
    batch = SimpleNamespace(seq_lens=prefix + new, extend_prefix_lens=prefix, extend_seq_lens=new)
    metadata = StateMetadata(
        batch=batch,  # type: ignore[arg-type]
        rows=torch.tensor(rows, device=device),
        num_decodes=num_decodes,
        segments=segments,
        num_actual_tokens=ends[-1],
    )
    num_tokens = next(v.shape[0] for k, v in operands.items() if k not in layer.kind.constants)
    dtype = getattr(torch, layer.out_dtype)
    out = torch.full((num_tokens, *layer.out_shape), torch.nan, dtype=dtype, device=device)
    backend.forward(StateInputs(operands, out, layer, metadata))
    return out


def mixed_batch(
    rows: Sequence[int], new: Sequence[int], earlier: Sequence[int], device: str = "cpu"
) -> CommonAttentionMetadata:
    """A batch as captured steps with prompts take it: so many new tokens of each request after so many earlier ones."""
    lengths, prefixes = (torch.tensor(counts, dtype=torch.int32, device=device) for counts in (new, earlier))
    batch: Any = SimpleNamespace(
        req_pool_indices=torch.tensor(rows, device=device), extend_seq_lens=lengths, extend_prefix_lens=prefixes
    )
    nowhere = torch.zeros(0, dtype=torch.int64)
    return CommonAttentionMetadata(
        batch=batch,
        query_start_loc_cpu=torch.tensor([0, *itertools.accumulate(new)], dtype=torch.int32),
        seq_lens=lengths + prefixes,
        seq_lens_cpu=(lengths + prefixes).cpu(),
        num_computed_tokens_cpu=prefixes.cpu(),
        num_reqs=len(rows),
        num_actual_tokens=sum(new),
        max_query_len=max(new),
        block_table=nowhere,
    )


def kernel_modules() -> list[ModuleType]:
    """The modules of runtime/ops/states/ that launch kernels."""
    modules = (import_module(f"{states.__name__}.{found.name}") for found in iter_modules(states.__path__))
    return [module for module in modules if hasattr(module, "wrap_triton")]


def kernels_of(layer: StateLayer) -> StatePieces:
    """The kernels of a layer by its op, as the pieces of a program call it."""
    call, kind = op(f"{layer.kind.name}_states"), layer.kind
    absent = dict.fromkeys(set(kind.operands) - set(layer.operands))

    def with_names(tensors: list[torch.Tensor], *names: str) -> dict[str, torch.Tensor]:
        return dict(zip((*layer.operands, "states", "rows", "has_state", *names, "out"), tensors, strict=True))

    def decodes(tensors: list[torch.Tensor]) -> None:
        call(**with_names(tensors), sources=None, starts=None, ends=None, **absent, **asdict(kind))

    def prompts(tensors: list[torch.Tensor]) -> None:
        call(**with_names(tensors, "sources", "starts", "ends"), **absent, **asdict(kind))

    def few(tensors: list[torch.Tensor]) -> None:
        call(**with_names(tensors, "sources", "starts", "ends"), **absent, **asdict(kind), few_tokens=True)

    return StatePieces(decodes, prompts, few if isinstance(kind, CausalConv | GatedDelta | Ssd) else None)
