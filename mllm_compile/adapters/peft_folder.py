"""Reads the folder of an adapter: adapter_config.json and adapter_model.safetensors, as PEFT writes them.

Everything is checked against the base model before a tensor is read. Nothing is unpickled, and no other file is
opened. The result is ready for the device: in its type, the scale multiplied into B.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from mllm_compile.adapters.base_model import BaseModel, RowsOf, is_copy, module_of
from mllm_compile.adapters.base_names import check_base
from mllm_compile.adapters.dora import check_magnitudes, scaled
from mllm_compile.adapters.expert_factors import by_expert, with_parameters
from mllm_compile.adapters.module_names import ModuleNames
from mllm_compile.adapters.peft_config import CONFIG_FILE, config_of_folder
from mllm_compile.adapters.tensor_names import AdapterFile, Factors, tensors_of
from mllm_compile.adapters.whole_file import WholeFile, is_finite, whole_file
from mllm_compile.errors import CheckpointError, UnsupportedModelError
from mllm_compile.runtime.device.cpu_threads import one_thread
from mllm_compile.runtime.lora.turns import in_turns
from mllm_compile.runtime.weights.safetensors_header import read_safetensors
from mllm_compile.runtime.weights.tensor_entry import TensorEntry, WeightHeader

TENSOR_FILE = "adapter_model.safetensors"
_PICKLE_FILE = "adapter_model.bin"
_SHOWN = 3  # names in a message

Matrices = Mapping[str, tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class AdapterTensors:
    """An adapter in memory.

    Attributes:
        digest: 32 hex digits over both files.
        rank: its highest.
        num_bytes: of all matrices.
        matrices: weight → A [rank, inputs] and B [outputs, rank], of experts [E, …], and DoRA's scales [outputs], on
            the CPU, in BaseModel.dtype.
    """

    digest: str
    rank: int
    num_bytes: int
    matrices: Matrices


def read_adapter(folder: Path, base: BaseModel, *, is_known: bool = False) -> AdapterTensors:
    """Reads an adapter of `base`.

    Args:
        is_known: it was read before, if its digest says so. Weights of the base that it has copies of may have been
            updated since then, so these are not compared again.

    Raises:
        UnsupportedModelError: it asks for something that is not served.
        CheckpointError: a file is missing, damaged or changes meanwhile, or the adapter is another model's.
    """
    config_path, path = folder / CONFIG_FILE, folder / TENSOR_FILE
    text, config = config_of_folder(folder)
    if base.folder is None or os.path.realpath(folder) != os.path.realpath(base.folder):
        check_base(config.base, base.source, config_path)
    if not path.exists() and (folder / _PICKLE_FILE).exists():
        raise UnsupportedModelError(
            f"{folder} has {_PICKLE_FILE}, a pickle, which is not read. Save the adapter as {TENSOR_FILE}: "
            "save_pretrained(…, safe_serialization=True)"
        )
    header = read_safetensors(path, is_kept=False)  # a server reads many, and forgets them
    file = tensors_of(header.tensors, path)
    names = ModuleNames(config, config_path, [module_of(weight) for weight in (base.embedding, base.head)])
    factors = with_parameters(file.factors, names, base, path)
    places = _places(factors, names, base, path)
    check_magnitudes(file.magnitudes, config.is_dora, places, base, path)
    _check_layout(header, path)
    whole = whole_file(path, header, base.new_bytes)
    if not is_known:
        _check_copies(whole.data, file, base, path)
    with one_thread():  # 252 matrices of 8B took several 1.4 s, which wait for each other at each, and one 5 ms
        matrices: Matrices = _matrices(whole, factors, places, names, base, path)
    if config.is_dora:
        magnitudes = {module: _tensor(whole.data, entry) for module, entry in file.magnitudes.items()}
        matrices = scaled(matrices, magnitudes, places, base, path)
    return AdapterTensors(
        hashlib.sha256(text + b"\n" + whole.digest).hexdigest()[:32],
        max(down.shape[-2] for down, *_ in matrices.values()),
        sum(one.nbytes for pair in matrices.values() for one in pair),
        matrices,
    )


def _places(
    factors: Mapping[str, Factors], names: ModuleNames, base: BaseModel, path: Path
) -> dict[str, tuple[RowsOf, ...]]:
    """The rows of weights that each module is, after all that is known of it without its data is checked."""
    places: dict[str, tuple[RowsOf, ...]] = {}
    ranks: dict[str, int] = {}
    taken: dict[tuple[str, int], str] = {}
    for module, one in in_turns(factors.items()):
        places[module] = found = base.rows_of(module)
        if not found:
            raise _refusal(module, base, path)
        if not (names.are_parameters if module in base.experts else names.are_targets)(module):
            raise CheckpointError(f"{path} has tensors of {module}, which {CONFIG_FILE} does not target")
        if one.rank != names.rank(module):
            raise CheckpointError(
                f"{path}: {module}: expected rank {names.rank(module)}, as {CONFIG_FILE} says, got {one.rank}"
            )
        _check_shape(module, one, found, base, path)
        if one.is_embedding != (found[0].weight == base.embedding):
            kinds = "lora_embedding_A and B", "lora_A and B"
            expected, got = kinds if not one.is_embedding else kinds[::-1]
            raise CheckpointError(f"{path}: {module}: expected {expected}, got {got}. Download it again")
        for rows in found:
            other = taken.setdefault((rows.weight, rows.start), module)
            if other != module:
                raise CheckpointError(f"{path}: {other} and {module} are both {rows.weight}; expected one of them")
            ranks[rows.weight] = ranks.get(rows.weight, 0) + one.rank
    for weight, rank in ranks.items():
        if rank > base.max_rank:
            raise CheckpointError(
                f"{path}: {weight} has rank {rank}; there is room for {base.max_rank}. Set lora.max_rank: {rank}"
            )
    _check_complete(places, names, base, path)
    return places


def _refusal(module: str, base: BaseModel, path: Path) -> CheckpointError:
    served = ", ".join(base.target_names)
    if tower := next((one for one in base.unread if module.startswith(f"{one}.")), None):
        return CheckpointError(
            f"{path}: {module} is of {tower}, which no text goes through. Adapters change what texts compute: no "
            "tower, no layer that drafts, no indexer of texts that are too short for a choice of keys. Train it with "
            "exclude_modules, or merge the adapter into its model"
        )
    if module in base.modules or module in base.elsewhere:
        return CheckpointError(
            f"{path}: {module} cannot be changed by adapters here; served are {served}. Name it in lora.targets if it "
            "is one that can be, or merge the adapter into its model"
        )
    return CheckpointError(
        f"{path}: {base.source} has no module {module}, so the adapter is another model's; served are {served}"
    )


def _check_shape(module: str, one: Factors, found: tuple[RowsOf, ...], base: BaseModel, path: Path) -> None:
    outputs = sum(rows.rows for rows in found)  # fewer than it has where some are no target's
    (inputs,) = {base.targets[rows.weight][1] for rows in found}
    if (one.up.shape[0], one.down.shape[1]) != (outputs, inputs):
        raise CheckpointError(
            f"{path}: {module} is adapted from {one.down.shape[1]} inputs to {one.up.shape[0]} outputs; that of "
            f"{base.source} has {inputs} and {outputs}, so the adapter is another model's"
        )


def _check_complete(places: Mapping[str, tuple[RowsOf, ...]], names: ModuleNames, base: BaseModel, path: Path) -> None:
    """Compares the modules that are there with those that the config targets, by the model's own names of them."""
    given = {rows.weight for found in places.values() for rows in found}
    wanted = [
        weight
        for weight in base.targets
        if (names.are_parameters(weight) if weight in base.experts else names.are_targets(module_of(weight)))
    ]
    if missing := [weight for weight in wanted if weight not in given]:
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        raise CheckpointError(
            f"{path} lacks tensors of {', '.join(missing[:_SHOWN])}{more}, which {CONFIG_FILE} targets. Download it "
            "again, or name only what was trained in target_modules and target_parameters"
        )


def _check_copies(data: torch.Tensor, file: AdapterFile, base: BaseModel, path: Path) -> None:
    """PEFT saves an embedding or a head whole beside its factors; it must be the base model's."""
    for module, entry in file.copies.items():
        weight = f"{module}.weight"
        if module not in file.factors or weight not in (base.embedding, base.head):
            raise UnsupportedModelError(
                f"{path}: {module} is a weight of the base model, which is not read of an adapter. Save the adapter "
                "without it, or merge it into its model"
            )
        copy, rows = _tensor(data, entry), base.targets[weight]
        is_same = is_copy(copy, weight, rows if weight == base.head else rows[::-1], base)
        if is_same is None:
            raise UnsupportedModelError(
                f"{path}: its copy of {weight} cannot be compared with that of {base.source}, which is not stored in "
                "rows, or was updated on several ranks. Save it with save_embedding_layers=False where they are the "
                "same"
            )
        if not is_same:
            raise UnsupportedModelError(
                f"{path}: its copy of {weight} is not that of {base.source}; trained or resized ones are not served. "
                "Merge it into its model instead"
            )


def _check_layout(header: WeightHeader, path: Path) -> None:
    """The format has no holes and no overlaps; so the file is as large as the tensors, which have been checked."""
    end = 8 + len(header.raw)
    for entry in sorted(header.tensors.values(), key=lambda one: one.begin):
        if entry.begin != end:
            raise CheckpointError(f"{path} is corrupt: a tensor begins at byte {entry.begin}, expected {end}")
        end = entry.end
    if end != header.file_bytes:
        raise CheckpointError(f"{path} is corrupt: its tensors end at byte {end} of {header.file_bytes}")


def _matrices(
    whole: WholeFile,
    factors: Mapping[str, Factors],
    places: Mapping[str, tuple[RowsOf, ...]],
    names: ModuleNames,
    base: BaseModel,
    path: Path,
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """A and B of each weight; of one that several modules are, A has the rows of all, and B blocks of theirs."""
    parts: dict[str, list[tuple[RowsOf, torch.Tensor, torch.Tensor]]] = {}
    scales = [names.scale(one) for one in factors]
    largest = math.inf if whole.largest is None else whole.largest * max(1.0, *map(abs, scales))
    are_finite = largest < torch.finfo(base.dtype).max / 2
    ups = _scaled([_tensor(whole.data, one.up) for one in factors.values()], scales, base.dtype)
    for (module, one), up in in_turns(zip(factors.items(), ups, strict=True)):
        down = _tensor(whole.data, one.down).to(base.dtype)
        if not (are_finite or (is_finite(down) and is_finite(up))):
            dtype = str(base.dtype).removeprefix("torch.")
            raise CheckpointError(f"{path}: {module} holds NaN or numbers beyond {dtype}. Download it again")
        if module in base.experts:
            down, up = by_expert(down, up, one.num_experts)
        for rows in places[module]:
            parts.setdefault(rows.weight, []).append((rows, down, up.narrow(-2, rows.source_start, rows.rows)))
    return {weight: _joined(found, base.targets[weight][0]) for weight, found in parts.items()}


def _scaled(matrices: list[torch.Tensor], scales: list[float], dtype: torch.dtype) -> Iterable[torch.Tensor]:
    """Each times a number, computed in float32 and rounded once; where it is, if it has its own type.

    By one operation where it can be: Python's lock goes to another thread at each.
    """
    if all(matrix.dtype == dtype for matrix in matrices):
        torch._foreach_mul_(matrices, scales)
        return matrices
    return ((one.float() * scale).to(dtype) for one, scale in zip(matrices, scales, strict=True))


def _joined(parts: list[tuple[RowsOf, torch.Tensor, torch.Tensor]], outputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows, down, up = parts[0]
    if len(parts) == 1 and rows.rows == outputs:
        return down, up
    joined = torch.cat([down for _, down, _ in parts])
    blocks = torch.zeros(outputs, joined.shape[0], dtype=up.dtype)
    column = 0
    for rows, _, up in parts:
        blocks[rows.start : rows.start + rows.rows, column : column + up.shape[1]] = up
        column += up.shape[1]
    return joined, blocks


def _tensor(data: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
    numbers = data[entry.begin : entry.end]
    if entry.begin % entry.dtype.itemsize:
        numbers = numbers.clone()
    return numbers.view(entry.dtype).view(entry.shape)
