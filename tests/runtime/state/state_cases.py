"""Layers with a state of every kind, their inputs, and batches of them over a pool."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import torch

from mllm_compile.runtime.memory_pool import GDNPool
from mllm_compile.runtime.state.layer import CausalConv, GatedDelta, SelectiveScan, Ssd, StateKind, StateLayer
from mllm_compile.runtime.state.metadata import Segment, StateMetadata
from mllm_compile.runtime.state.reference import Operands
from mllm_compile.runtime.state.torch_backend import StateInputs, TorchStateBackend

KERNEL = 4
KINDS: dict[str, StateKind] = {
    "conv": CausalConv("silu"),
    "delta": GatedDelta(qk_l2norm=True),
    "delta a channel": GatedDelta(qk_l2norm=True),
    "ssd": Ssd(dt_softplus=True, dt_min=0.001, dt_max=0.5),
    "scan": SelectiveScan(dt_softplus=True),
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
        gates = of_tokens(4, 8) if name == "delta a channel" else of_tokens(4)
        keys = 4 if name == "delta a channel" else 2
        return {
            "q": of_tokens(keys, 8),
            "k": of_tokens(keys, 8),
            "v": of_tokens(4, 5),
            "g": -gates.exp(),
            "beta": of_tokens(4).sigmoid(),
        }
    if name == "ssd":
        states = {"B": of_tokens(2, 3), "C": of_tokens(2, 3), "D": constant(4), "dt_bias": constant(4)}
        return {"x": of_tokens(4, 5), "dt": of_tokens(4), "A": -constant(4).exp(), **states}
    states = {"B": of_tokens(3), "C": of_tokens(3), "D": constant(6), "z": of_tokens(6), "dt_bias": constant(6)}
    return {"x": of_tokens(6), "dt": of_tokens(6), "A": -constant(6, 3).exp(), **states}


def layer_of(name: str, dtype: torch.dtype = torch.float32) -> StateLayer:
    kind, operands = KINDS[name], operands_of(name, 1)
    shapes = {key: value.shape for key, value in operands.items()}
    shown = str(dtype).removeprefix("torch.")
    sizes = tuple(kind.state_shape(shapes)), tuple(kind.out_shape(shapes))
    return StateLayer(f"layers.0.{name}", 0, kind, tuple(operands), *sizes, shown, shown)


def tokens_of(name: str, operands: Operands, span: slice) -> dict[str, torch.Tensor]:
    constants = KINDS[name].constants
    return {key: value if key in constants else value[span] for key, value in operands.items()}


def pool_of(layer: StateLayer, num_rows: int = 8, fill: float = torch.nan) -> GDNPool:
    """A pool whose rows hold what nobody may read."""
    pool = GDNPool(num_rows, [(layer.state_shape, torch.float32)], "cpu")
    pool.get_state(0).fill_(fill)
    return pool


def run_batch(
    backend: TorchStateBackend,
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
    prefix = torch.tensor(earlier, dtype=torch.int32)
    batch = SimpleNamespace(
        seq_lens=prefix + torch.tensor(lengths, dtype=torch.int32),
        extend_prefix_lens=prefix,
        extend_seq_lens=torch.tensor(lengths, dtype=torch.int32),
    )
    metadata = StateMetadata(
        batch=batch,  # type: ignore[arg-type]
        rows=torch.tensor(rows),
        num_decodes=num_decodes,
        segments=segments,
        num_actual_tokens=ends[-1],
    )
    num_tokens = next(v.shape[0] for k, v in operands.items() if k not in layer.kind.constants)
    out = torch.full((num_tokens, *layer.out_shape), torch.nan)
    backend.forward(StateInputs(operands, out, layer, metadata))
    return out
