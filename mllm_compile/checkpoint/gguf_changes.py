"""Tensors of a GGUF model as Transformers has them: the changes of a converter are undone.

Rearrangements are views. Weights that are computed, or take scattered rows, are formats of runtime/weights/formats.
"""

from __future__ import annotations

from collections.abc import Mapping

from mllm_compile.checkpoint.planned_tensor import PlannedTensor, joined
from mllm_compile.errors import CheckpointError
from mllm_compile.gguf.architectures import Change
from mllm_compile.gguf.facts import ARCHITECTURE_KEY
from mllm_compile.gguf.metadata import Metadata
from mllm_compile.runtime.weights.formats.base import VALUES, Format, Quantised, StoredTensor
from mllm_compile.runtime.weights.formats.gguf import format_name
from mllm_compile.runtime.weights.formats.gguf_changes import (
    GATES,
    GROUPS,
    NEGATED_EXPONENTIALS,
    PLUS_ONE,
    UP,
    type_numbers,
)
from mllm_compile.runtime.weights.formats.settings import Settings
from mllm_compile.runtime.weights.gguf_header import BlockType, GgufHeader


class ModelTensors:
    """
    Args:
        metadata: of the first file.
        headers: by file.
    """

    def __init__(self, metadata: Metadata, headers: Mapping[str, GgufHeader]) -> None:
        self._metadata, self._headers = metadata, headers
        self._prefix = metadata.get(ARCHITECTURE_KEY, str)

    def number(self, key: str) -> int:
        """A key of the model's section; 0 where the file lacks it."""
        return int(self._metadata.number(f"{self._prefix}.{key}") or 0)

    def of(self, tensor: StoredTensor, change: Change | None = None) -> PlannedTensor:
        """The tensor without the change.

        Raises:
            CheckpointError: it has another number of rows than the heads that the file names.
        """
        match change:
            case Change.PLUS_ONE:
                return self._made(PLUS_ONE, {VALUES: tensor})
            case Change.NEGATED_EXPONENTIALS:
                return self._made(NEGATED_EXPONENTIALS, {VALUES: tensor})
            case Change.VALUE_EXPONENTIALS:
                return self._grouped(self._made(NEGATED_EXPONENTIALS, {VALUES: tensor}))
            case Change.APART:
                return self._in_groups(tensor)
            case None:
                return self._plain(tensor)
        return self._rearranged(self._plain(tensor), change)

    def _rearranged(self, planned: PlannedTensor, change: Change) -> PlannedTensor:
        match change:
            case Change.PAIRS_OF_QUERIES:
                return _in_halves(planned, self._heads())
            case Change.PAIRS_OF_KEYS:
                return _in_halves(planned, self._kv_heads())
            case Change.NO_ROWS:
                return planned.unsqueeze(0) if planned.ndim == 1 else planned
            case Change.NO_CHANNELS:
                return planned.unsqueeze(1)
            case Change.VALUE_HEADS:
                return self._grouped(planned)
            case Change.VALUE_HEADS_BEHIND_KEYS:
                return self._grouped_behind_keys(planned)
            case Change.VALUE_CHANNELS:
                return self._grouped_behind_keys(planned).unsqueeze(1)
            case Change.VALUE_INPUTS:
                return self._grouped(planned.transpose(0, 1)).transpose(0, 1)
        assert change is Change.TRANSPOSED, f"a change without a way back: {change}"
        return planned.transpose(-1, -2)

    def gate_behind_up(self, gate: StoredTensor, up: StoredTensor) -> PlannedTensor:
        """Rows of each expert's gate, then those of its up."""
        return joined((self._plain(gate), self._plain(up)), 1)

    def gate_and_up_by_turns(self, gate: StoredTensor, up: StoredTensor, suffix: str) -> PlannedTensor:
        """A row of each expert's gate, then one of its up; matrices the other way round than the file has them."""
        planned = self._made(GATES[suffix], {VALUES: gate, UP: up})
        return planned.transpose(1, 2) if planned.ndim == 3 else planned

    def _plain(self, tensor: StoredTensor) -> PlannedTensor:
        kind, shape = self._kind(tensor), self._headers[tensor.file].shape(tensor.name)
        quantised = Quantised(format_name(kind), {VALUES: tensor}, {}) if kind.dtype is None else None
        return PlannedTensor.of_file(tensor.name, tensor.file, shape, quantised)

    def _made(self, fmt: Format, tensors: Mapping[str, StoredTensor], **numbers: int) -> PlannedTensor:
        """The tensor that a format makes of others."""
        types = type_numbers({role: self._kind(one) for role, one in tensors.items()})
        shape, known = fmt.layout(tensors, Settings(), types | numbers)
        values = tensors[VALUES]
        return PlannedTensor.of_file(values.name, values.file, shape, Quantised(fmt.name, tensors, known))

    def _in_groups(self, tensor: StoredTensor) -> PlannedTensor:
        """Each group's queries, key and value behind each other."""
        heads, groups = self._heads(), self._kv_heads()
        if not groups or heads % groups:
            raise CheckpointError(f"{tensor.file}: {heads} heads for {groups} KV heads. Download it again.")
        return self._made(GROUPS, {VALUES: tensor}, groups=groups, queries=heads // groups)

    def _grouped(self, planned: PlannedTensor) -> PlannedTensor:
        """The rows of each key head's value heads behind each other; in the file the first of all come first."""
        groups, values = self.number("ssm.group_count"), self.number("ssm.time_step_rank")
        rows, *inner = planned.shape
        if groups < 1 or values < 1 or values % groups or rows % values:
            raise _misfit(planned, f"{values} value heads of {groups} key heads")
        turns = planned.reshape(values // groups, groups, rows // values, *inner)
        return turns.transpose(0, 1).reshape(rows, *inner)

    def _grouped_behind_keys(self, planned: PlannedTensor) -> PlannedTensor:
        keys = 2 * self.number("ssm.group_count") * self.number("ssm.state_size")
        rest = planned.shape[0] - keys
        if keys < 1 or rest < 1:
            raise _misfit(planned, f"queries and keys of {keys}")
        return joined((planned.narrow(0, 0, keys), self._grouped(planned.narrow(0, keys, rest))))

    def _heads(self) -> int:
        return self.number("attention.head_count")

    def _kv_heads(self) -> int:
        return self.number("attention.head_count_kv") or self._heads()

    def _kind(self, tensor: StoredTensor) -> BlockType:
        return self._headers[tensor.file].types[tensor.name]


def _in_halves(planned: PlannedTensor, heads: int) -> PlannedTensor:
    """The rows of each head in two halves that turn together; converters have put them into pairs."""
    if not heads or planned.shape[0] % (2 * heads):
        raise _misfit(planned, f"{heads} heads")
    return planned.in_halves(heads)


def _misfit(planned: PlannedTensor, heads: str) -> CheckpointError:
    block = planned.blocks[0]
    return CheckpointError(
        f"{block.file}: {block.tensor!r} has {planned.shape[0]} rows for {heads}. Download it again."
    )
