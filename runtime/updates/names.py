"""The names under which an update may send tensors, as a runtime stores them; written while compiling.

A tensor has its name in the checkpoint, or that of the parameter of Transformers' model that it is, whole: its experts
stacked, its kernels the way round that the model has them. `places.py` turns both round to places of weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mllm_compile.runtime.files.json_data import from_json, parse_json
from mllm_compile.runtime.weights.consistency import check_quantised
from mllm_compile.runtime.weights.spec import WeightSpec
from mllm_compile.runtime.weights.table import weights_from_json, weights_to_json

Specs = tuple[WeightSpec, ...]


@dataclass(frozen=True)
class TensorNames:
    """
    Attributes:
        parameters: of each rank, its weights' parts by parameters' names.
        checkpoint: likewise by the checkpoint's names; None: as the runtime reads its weights.
        ties: the names of each parameter that has several, the one in `parameters` first.
        unread: tensors that the model has and its program does not read, with the shapes that they may have.
    """

    parameters: tuple[Specs, ...]
    checkpoint: tuple[Specs, ...] | None
    ties: tuple[tuple[str, ...], ...]
    unread: Mapping[str, Sequence[Sequence[int]]]

    def to_bytes(self) -> bytes:
        """JSON."""
        data = {
            "parameters": _tables(self.parameters),
            "checkpoint": None if self.checkpoint is None else _tables(self.checkpoint),
            "ties": self.ties,
            "unread": self.unread,
        }
        return json.dumps(data).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> TensorNames:
        """Raises ValueError for anything that to_bytes would not have written."""
        content = from_json(dict[str, Any], parse_json(data))
        if content.keys() != {"parameters", "checkpoint", "ties", "unread"}:
            raise ValueError(f"expected the tables of names, got {sorted(content)}")
        stored = content["checkpoint"]
        return cls(
            parameters=_specs(content["parameters"]),
            checkpoint=None if stored is None else _specs(stored),
            ties=from_json(tuple[tuple[str, ...], ...], content["ties"]),
            unread=from_json(dict[str, tuple[tuple[int, ...], ...]], content["unread"]),
        )


def _tables(ranks: Iterable[Sequence[WeightSpec]]) -> list[list[dict[str, Any]]]:
    return [weights_to_json(specs) for specs in ranks]


def _specs(data: Any) -> tuple[Specs, ...]:
    ranks = tuple(map(weights_from_json, from_json(tuple[Any, ...], data)))
    for specs in ranks:
        check_quantised(specs)
    return ranks
