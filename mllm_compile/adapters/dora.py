"""DoRA: outputs of W + B A have magnitudes of their own (peft 0.21, tuners/lora/dora.py).

PEFT computes m / |W + B A| · (W x + B A x), with the norm of each row. The factor is computed here once, of the weight
as the checkpoint has it, dequantised: W's outputs are multiplied with it, and it is in B.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from mllm_compile.adapters.base_model import BaseModel, RowsOf
from mllm_compile.errors import CheckpointError, UnsupportedModelError
from mllm_compile.runtime.weights.tensor_entry import TensorEntry

_ROWS = 4096  # of a weight, read at once


def check_magnitudes(
    magnitudes: Mapping[str, TensorEntry],
    is_dora: bool,
    places: Mapping[str, tuple[RowsOf, ...]],
    base: BaseModel,
    path: Path,
) -> None:
    """Checks that an adapter has one magnitude of each output, where it is DoRA's, else none.

    Raises:
        UnsupportedModelError: it is DoRA's, and there is no room for it, or it is not of linears.
        CheckpointError: magnitudes are missing, of another shape, or of no module.
    """
    if not is_dora:
        if magnitudes:
            raise CheckpointError(f"{path} has magnitudes of {next(iter(magnitudes))}, and its config no use_dora")
        return
    if not base.takes_dora:
        raise UnsupportedModelError(f"{path} is DoRA's, and the model was compiled for others. Set lora.dora: true")
    for module, found in places.items():
        if found[0].weight == base.embedding or module in base.experts:
            raise UnsupportedModelError(
                f"{path}: DoRA of {module} is not served; that of linears is. Merge it into its model instead"
            )
    if odd := sorted(places.keys() ^ magnitudes.keys()):
        raise CheckpointError(f"{path}: {odd[0]}: expected factors and magnitudes of it, got one of both")
    for module, entry in magnitudes.items():
        outputs = sum(rows.rows for rows in places[module])
        if entry.shape != (outputs,):
            raise CheckpointError(f"{path}: {module} has {entry.shape[0]} magnitudes; expected {outputs}")


def scaled(
    matrices: Mapping[str, tuple[torch.Tensor, ...]],
    magnitudes: Mapping[str, torch.Tensor],
    places: Mapping[str, tuple[RowsOf, ...]],
    base: BaseModel,
    path: Path,
) -> dict[str, tuple[torch.Tensor, ...]]:
    """The matrices with a third of each weight: what its outputs [N] are multiplied with, which is in B too.

    Raises:
        UnsupportedModelError: a weight cannot be read as the checkpoint has it.
        CheckpointError: a scale is no number.
    """
    given = {weight: torch.ones(base.targets[weight][0]) for weight in matrices}
    is_given = {weight: torch.zeros(base.targets[weight][0], dtype=torch.bool) for weight in matrices}
    for module, found in places.items():
        for rows in found:
            own = magnitudes[module].float().narrow(0, rows.source_start, rows.rows)
            given[rows.weight][rows.start : rows.start + rows.rows] = own
            is_given[rows.weight][rows.start : rows.start + rows.rows] = True
    made: dict[str, tuple[torch.Tensor, ...]] = {}
    for weight, (down, up, *_) in matrices.items():
        norms = _norms(weight, down, up, base, path)
        scales = torch.where(is_given[weight], given[weight] / norms, 1.0)  # rows of no module of the adapter stay
        if not scales.isfinite().all():
            raise CheckpointError(f"{path}: {weight}: a magnitude over a norm is no number. Download it again")
        made[weight] = down, (up.float() * scales[:, None]).to(base.dtype), scales.to(base.dtype)
    return made


def _norms(weight: str, down: torch.Tensor, up: torch.Tensor, base: BaseModel, path: Path) -> torch.Tensor:
    """|W + B A| of each row, in float32."""
    norms = []
    for start in range(0, len(up), _ROWS):
        some = up[start : start + _ROWS].float()
        stored = base.read(weight, start, len(some))
        if stored is None:
            raise UnsupportedModelError(
                f"{path}: {weight} is not stored in rows of numbers, whose norms DoRA needs. Merge the adapter into "
                "its model"
            )
        norms.append(torch.linalg.vector_norm(stored.float().addmm(some, down.float()), dim=1))
    return torch.cat(norms)
