"""The tensors of GGUF files under Transformers' names: what a converter has changed is changed back by views."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from mllm_compile.checkpoint.planned_tensor import PlannedTensor, joined
from mllm_compile.checkpoint.quantised import CheckpointTensors
from mllm_compile.errors import CheckpointError
from mllm_compile.gguf.architectures import Architecture
from mllm_compile.gguf.config import ARCHITECTURE_KEY, ROPE_TENSORS, architecture_of
from mllm_compile.gguf.metadata import Metadata
from mllm_compile.runtime.weights.formats.base import VALUES, Quantised, StoredTensor
from mllm_compile.runtime.weights.formats.gguf import NormPlusOne, format_name
from mllm_compile.runtime.weights.gguf_header import GgufHeader, read_gguf
from mllm_compile.runtime.weights.header import read_bytes

_IN_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_EXPERTS = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)_exps\.weight")


def read_gguf_tensors(folder: Path, files: Iterable[str]) -> CheckpointTensors:
    """Reads the headers of all `files`; the first has the metadata.

    Raises:
        CheckpointError: a file is corrupt, or a tensor is in two of them.
        UnsupportedModelError: the architecture is not read.
    """
    headers = {file: read_gguf(folder / file) for file in files}
    first = next(iter(headers))
    metadata = Metadata(folder / first, headers[first].metadata)
    stored: dict[str, StoredTensor] = {}
    file_of: dict[str, str] = {}
    for file, header in headers.items():
        for name, entry in header.tensors.items():
            if name in stored:
                raise CheckpointError(f"tensor {name!r} is in {file_of[name]} and in {file}. Download them again.")
            stored[name] = StoredTensor(name, file, entry.shape, entry.dtype)
            file_of[name] = file

    def read(one: StoredTensor) -> bytes:
        return read_bytes(folder / one.file, headers[one.file].tensors[one.name])

    mapping = _Mapping(architecture_of(metadata), metadata)
    planned: dict[str, PlannedTensor] = {}
    experts: dict[str, dict[str, PlannedTensor]] = {}
    for name, tensor in stored.items():
        if name in ROPE_TENSORS:
            continue
        one = mapping.planned(tensor, headers[tensor.file])
        if mapping.architecture.has_experts and (part := _EXPERTS.fullmatch(name)) is not None:
            experts.setdefault(part[1], {})[part[2]] = one
        else:
            planned[mapping.name(name)] = one
    for layer, parts in experts.items():
        planned |= _stacked(layer, parts, folder / first)
    return CheckpointTensors(stored, planned, read)


class _Mapping:
    def __init__(self, architecture: Architecture, metadata: Metadata) -> None:
        self.architecture = architecture
        prefix = metadata.get(ARCHITECTURE_KEY, str)
        heads = metadata.number(f"{prefix}.attention.head_count") or 0
        kv_heads = metadata.number(f"{prefix}.attention.head_count_kv") or heads
        self._heads = {"attn_q": int(heads), "attn_k": int(kv_heads)}

    def name(self, name: str) -> str:
        """Transformers' name; one that is not known stays, and is refused as one that has no place."""
        base, dot, suffix = name.rpartition(".")
        layer = _IN_LAYER.fullmatch(base)
        theirs = self.architecture.names.get(base if layer is None else f"blk.{{}}.{layer[2]}")
        if theirs is None:
            return name
        return f"{theirs.format(layer[1]) if layer else theirs}{dot}{suffix}"

    def planned(self, tensor: StoredTensor, header: GgufHeader) -> PlannedTensor:
        """The tensor as the model has it."""
        kind, shape = header.types[tensor.name], header.shape(tensor.name)
        quantised = Quantised(format_name(kind), {VALUES: tensor}, {}) if kind.dtype is None else None
        if self.architecture.adds_one and tensor.name.endswith("norm.weight"):
            quantised = Quantised(NormPlusOne.name, {VALUES: tensor}, {})
        planned = PlannedTensor.of_file(tensor.name, tensor.file, shape, quantised)
        part = tensor.name.split(".")[-2]
        if self.architecture.permutes and (heads := self._heads.get(part)):
            return _in_halves(planned, heads, tensor)
        if self.architecture.transposes and len(shape) == 2 and _IN_LAYER.match(tensor.name):
            return planned.transpose(0, 1)
        return planned.unsqueeze(0) if part == "ffn_gate_inp_shexp" and len(shape) == 1 else planned


def _in_halves(planned: PlannedTensor, heads: int, tensor: StoredTensor) -> PlannedTensor:
    """The rows of each head in two halves that turn together; converters have put them into pairs."""
    rows = planned.shape[0]
    if rows % (2 * heads):
        raise CheckpointError(f"{tensor.file}: {tensor} has {rows} rows for {heads} heads. Download it again.")
    inner = tuple(planned.shape[1:])
    pairs = planned.reshape(heads, rows // heads // 2, 2, *inner)
    return pairs.transpose(1, 2).reshape(rows, *inner)


def _stacked(layer: str, parts: dict[str, PlannedTensor], path: Path) -> dict[str, PlannedTensor]:
    """A layer's experts, gate and up in one tensor."""
    if parts.keys() != {"gate", "up", "down"}:
        raise CheckpointError(f"{path}: layer {layer} has the experts' {', '.join(parts)} alone. Download it again.")
    prefix = f"model.layers.{layer}.mlp.experts"
    gate_up = joined((parts["gate"], parts["up"]), 1)
    return {f"{prefix}.gate_up_proj": gate_up, f"{prefix}.down_proj": parts["down"]}
