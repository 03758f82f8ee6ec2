"""Runs the compiled program on small inputs before it is published: against Transformers' own forward, request by request.

Two requests are packed into one flat batch, at far-apart positions. A model that carries state from token to token, that
reads its neighbours by place instead of by attention, or that a pass or Inductor broke, gives other logits than
Transformers gives each request alone. Weights are random and shared by shape, so an 8B model needs one layer's memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mllm_compile.artifact_source import attention_layer
from mllm_compile.errors import UnsupportedModelError
from mllm_compile.hf_model import HFModel
from mllm_compile.passes.base import PackedPart
from mllm_compile.runtime.attention.base import AttentionLayer
from mllm_compile.runtime.forward_context import set_forward_context
from mllm_compile.runtime.pieces import load_piece
from mllm_compile.runtime.program import Program, ProgramExecutor
from mllm_compile.runtime.trace_ops import attention_reference

REQUEST_LENGTHS = (5, 3)
SECOND_REQUEST_POSITION = 100
# ‖ours − theirs‖ / ‖theirs‖. A request that sees another's tokens is off by more than 0.3 (measured on rwkv-like and
# convolutional models); rounding through the depth of a model stays below these.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}


def self_check(
    hf_model: HFModel,
    program: Program,
    pieces_folder: Path,
    piece_suffix: str,
    packed: Mapping[str, tuple[PackedPart, ...]],
    device: str,
) -> None:
    """
    Args:
        hf_model: the traced model; its (fake) parameters are replaced by small real ones here.
        program: what was compiled from it.
        pieces_folder: where its pieces lie.
        piece_suffix: which of a piece's files to run.
        packed: what pack_projections joined.
        device: where to run.

    Raises:
        UnsupportedModelError: the program's logits are not Transformers'.
    """
    weights = _SharedWeights(device)
    bound = _program_weights(hf_model, program, packed, weights)
    files = {piece: pieces_folder / (piece + piece_suffix) for piece in program.piece_ids()}
    pieces = {piece: load_piece(path.name, path.read_bytes()) for piece, path in files.items()}
    executor = ProgramExecutor(program, pieces, bound)
    vocab = hf_model.sizes().vocab_size
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, vocab, (length,), generator=generator).to(device) for length in REQUEST_LENGTHS]
    offset = min(SECOND_REQUEST_POSITION, hf_model.sizes().context_len - REQUEST_LENGTHS[1])
    positions = [
        torch.arange(REQUEST_LENGTHS[0], device=device),
        torch.arange(REQUEST_LENGTHS[1], device=device) + offset,
    ]
    ours = _run_program(executor, program, ids, positions, device)
    with torch.no_grad(), _transformers_attention(hf_model.model):
        theirs = torch.cat(
            [
                hf_model.model(input_ids=i[None], position_ids=p[None], use_cache=False).logits[0]
                for i, p in zip(ids, positions, strict=True)
            ]
        )
    error = ((ours.float() - theirs.float()).norm() / theirs.float().norm()).item()
    limit = TOLERANCE[ours.dtype]
    if not error <= limit:
        raise UnsupportedModelError(
            f"{hf_model.model.config.model_type!r} would not be served right: with two requests in one batch its logits "
            f"are off by {error:.2g} from Transformers' (limit {limit:g}). Usual causes: layers that carry state from "
            "token to token, or that read positions other than position_ids."
        )


class _SharedWeights:
    """One random tensor for each shape and dtype."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._by_kind: dict[Any, torch.Tensor] = {}

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        kind = (tuple(tensor.shape), tensor.dtype)
        if kind not in self._by_kind:
            generator = torch.Generator(self._device).manual_seed(len(self._by_kind))
            value = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
            if tensor.is_floating_point():
                value.normal_(1.0 if tensor.dim() < 2 else 0.0, 0.02 if tensor.dim() > 1 else 0.1, generator=generator)
            else:
                value.zero_()
            self._by_kind[kind] = value
        return self._by_kind[kind]


def _program_weights(
    hf_model: HFModel, program: Program, packed: Mapping[str, tuple[PackedPart, ...]], shared: _SharedWeights
) -> dict[str, torch.Tensor]:
    """Gives the model real weights, and the program the same ones, packed parts concatenated."""
    model = hf_model.model
    by_name: dict[str, torch.Tensor] = {}
    for module_name, module in model.named_modules():
        prefix = f"{module_name}." if module_name else ""
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                by_name[prefix + name] = value = shared.like(parameter)
                module._parameters[name] = torch.nn.Parameter(value, requires_grad=False)
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                constant = hf_model.constants.get(prefix + name)
                value = shared.like(buffer) if constant is None else constant.to(shared._device)
                by_name[prefix + name] = module._buffers[name] = value
    bound = {}
    for name in program.weights:
        members = packed.get(name)
        bound[name] = by_name[name] if members is None else torch.cat([by_name[part.weight_name] for part in members])
    return bound


@contextmanager
def _transformers_attention(model: Any) -> Any:
    """Transformers' own attention and masks, whichever the model has."""
    ours = model.config._attn_implementation
    try:
        model.set_attn_implementation("sdpa")
    except ValueError:
        model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(ours)


@dataclass(frozen=True)
class _PackedRequests:
    """Stands for batch, cache and backend: attends within each request, with no cache at all."""

    lengths: tuple[int, ...]

    @property
    def batch(self) -> _PackedRequests:
        return self

    @property
    def token_to_kv_pool(self) -> _PackedRequests:
        return self

    @property
    def attn_backend(self) -> _PackedRequests:
        return self

    @property
    def num_actual_tokens(self) -> int:
        return sum(self.lengths)

    def set_kv_buffer(self, *args: object) -> None:
        """There is no cache to write to."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        *args: object,
        out: torch.Tensor,
        **kw: object,
    ) -> None:
        start = 0
        for length in self.lengths:
            rows = slice(start, start + length)
            params = layer.params
            out[rows] = attention_reference(
                q[rows], k[rows], v[rows], layer.sinks, params.sm_scale, params.logits_soft_cap, params.window_left
            )
            start += length


def _run_program(
    executor: ProgramExecutor, program: Program, ids: list[torch.Tensor], positions: list[torch.Tensor], device: str
) -> torch.Tensor:
    tokens = sum(REQUEST_LENGTHS)
    metadata: Any = _PackedRequests(REQUEST_LENGTHS)
    slots = torch.zeros(tokens, dtype=torch.int64, device=device)
    layers = {layer.name: attention_layer(layer, executor.weights) for layer in program.layers}
    with (
        torch.no_grad(),
        set_forward_context(
            dict.fromkeys(layers, metadata),
            no_compile_layers=layers,
            slot_mapping=dict.fromkeys(layers, slots),
            num_tokens=tokens,
        ),
    ):
        return executor(
            {
                "input_ids": torch.cat(ids),
                "positions": torch.cat(positions),
                "logits_indices": torch.arange(tokens, device=device),
            }
        )
