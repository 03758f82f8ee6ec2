"""Decides, when a model is compiled, which checkpoint tensor fills which weight of the program.

Follows Transformers' own renaming and converting of checkpoint keys (checkpoint/keys.py), and accounts for every
tensor: one that is unexpected, missing or wrongly shaped is an error that names it. The plan is what
runtime/weights/spec.py describes; loader.py beside it reads by it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from mllm_compile.checkpoint.keys import to_model_keys
from mllm_compile.checkpoint.planned_tensor import Block, PlannedTensor
from mllm_compile.checkpoint.quantised import CheckpointTensors
from mllm_compile.errors import CheckpointError
from mllm_compile.passes.base import PackedPart, QuantisedTensor, WeightCut, part_of_rank
from mllm_compile.runtime.quantised.scheme import SCALES, WeightScheme
from mllm_compile.runtime.weights.formats.registry import FORMATS
from mllm_compile.runtime.weights.spec import Factor, QuantisedPart, WeightPart, WeightSpec
from mllm_compile.runtime.weights.views import ViewStep

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Buffers that old checkpoints hold and Transformers computes: rotary frequencies, positions, causal masks.
_OF_WHOLE_ROWS = ("unsqueeze", "halves")  # views that leave each row as it is: of an expert, of rotary weights
_LEFTOVERS = r"(^|\.)(rotary_emb\.inv_freq|position_ids|(attn|attention)\.(masked_)?bias)$"


@dataclass(frozen=True)
class RankPart:
    """A rank's part of a model's weights.

    Attributes:
        cuts: weight → how it is cut; weights that every rank has whole are absent.
        shapes: the model's own shapes of its weights.
        rank: the rank.
    """

    cuts: Mapping[str, tuple[WeightCut, ...]]
    shapes: Mapping[str, tuple[int, ...]]
    rank: int

    def of(
        self, name: str, table: Mapping[str, PlannedTensor] | None, is_transposed: bool = False
    ) -> tuple[Block, ...]:
        """The blocks that fill the rank's part of a weight that is cut; a transposed weight is seen as a linear's."""
        if table is None:
            shape = self.shapes[name]
            shape = (*shape[:-2], shape[-1], shape[-2]) if is_transposed else shape
            whole = PlannedTensor.of_file(name, "", shape)
        else:
            whole = as_linear(table[name], is_transposed)
        cuts = tuple(cut.as_linear(is_transposed) for cut in self.cuts[name])
        blocks: tuple[Block, ...] = part_of_rank(whole, cuts, self.rank).blocks
        return blocks


_WHOLE = RankPart({}, {}, 0)
_NONE_LENT: Mapping[str, PlannedTensor] = MappingProxyType({})


def plan_weights(
    program_weights: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    packed: Mapping[str, tuple[PackedPart, ...]],
    table: Mapping[str, PlannedTensor] | None,
    quantised: Mapping[str, QuantisedTensor] | None = None,
    part: RankPart = _WHOLE,
    factors: Mapping[str, Factor] | None = None,
) -> list[WeightSpec]:
    """One spec for each weight of the program.

    Args:
        program_weights: name → shape and dtype of each weight input of the program, constants left out.
        packed: the weights that pack_projections joined.
        table: model key → what fills it (read_checkpoint), or None for random weights.
        quantised: the weights that quantise_linears made, before they were joined.
        part: the part of the model's weights that the program's are.
        factors: of the model's weights that are multiplied by something (scale_keys_and_values).

    Raises:
        KeyError: the table, which read_checkpoint has checked, lacks a weight.
    """
    specs = []
    for name, (shape, dtype) in program_weights.items():
        members = packed.get(name, (PackedPart(name, 0, shape[0] if shape else 1),))
        parts = []
        for member in members:
            tensor = None if quantised is None else quantised.get(member.weight_name)
            if tensor is not None:
                found = _kept_parts(member, tensor, table, part)
            elif member.weight_name in part.cuts:
                found = [_part(member, block) for block in part.of(member.weight_name, table)]
            else:
                found = _parts(member, (member.rows, *shape[1:]) if shape else (), table)
            parts += _with_factor(found, member.weight_name if tensor is None else tensor.weight_name, factors or {})
        specs.append(WeightSpec(name, shape, dtype, tuple(parts)))
    return specs


def _with_factor(parts: list[WeightPart], weight: str, factors: Mapping[str, Factor]) -> list[WeightPart]:
    """The parts with the weight's factor: of one in few bits its scales have it."""
    if weight not in factors:
        return parts
    return [
        part if part.kept is not None and part.kept.role != SCALES else replace(part, factor=factors[weight])
        for part in parts
    ]


def _parts(member: PackedPart, shape: tuple[int, ...], table: Mapping[str, PlannedTensor] | None) -> list[WeightPart]:
    if table is None:
        return [WeightPart(member.weight_name, "", member.start, shape)]
    return [_part(member, block) for block in table[member.weight_name].blocks]


def _kept_parts(
    member: PackedPart, tensor: QuantisedTensor, table: Mapping[str, PlannedTensor] | None, of_rank: RankPart
) -> list[WeightPart]:
    kept, name = QuantisedPart(tensor.role, tensor.scheme), tensor.weight_name
    blocks: tuple[Block, ...]
    if name in of_rank.cuts:
        blocks = of_rank.of(name, table, tensor.is_transposed)
    elif table is None:
        return [WeightPart(name, "", member.start, (member.rows, *tensor.shape[1:]), kept=kept)]
    else:
        blocks = as_linear(table[name], tensor.is_transposed).blocks
    parts = []
    for block in blocks:
        *between, column = block.starts[1:]
        inner = (*between, tensor.scheme.stretch(tensor.role, column, 0)[0])
        part = replace(
            _part(member, block),
            steps=_inputs_last(block),
            inner_starts=inner if any(inner) or block.steps else (),
            kept=kept,
        )
        if source := next(iter(part.sources), None):
            part = replace(part, tensor=source.name, file=source.file)
        parts.append(part)
    return parts


def _inputs_last(block: Block) -> tuple[ViewStep, ...]:
    """The block's views; parts of its inputs are views of dimension -1 (QuantisedPart). Of a tensor that holds one
    expert parts come first, so that no more of it is read (loader._part_of_file)."""
    steps, num_dims = [], len(block.source_shape)
    for name, *args in block.steps:
        steps.append((name, -1, *args[1:]) if name == "narrow" and args[0] == num_dims - 1 else (name, *args))
        num_dims += {"unsqueeze": 1, "squeeze": -1}.get(str(name), 0)
    first, *parts = steps or [()]
    if block.quantised is not None and first == ("unsqueeze", 0) and all(_is_within_expert(one) for one in parts):
        return (*((name, max(int(dim) - 1, -1), *args) for name, dim, *args in parts), first)
    return tuple(steps)


def _is_within_expert(step: ViewStep) -> bool:
    """True for a part of an expert's rows or inputs, of [1, N, K]."""
    return step[:1] == ("narrow",) and step[1] != 0


def as_linear(planned: PlannedTensor, is_transposed: bool) -> PlannedTensor:
    """A weight as a linear's, rows of outputs."""
    return planned.transpose(-1, -2) if is_transposed else planned


def scheme_of(planned: PlannedTensor) -> WeightScheme | None:
    """The scheme in which a weight can stay as the checkpoint has it: all its blocks share it, each of whole rows.
    None: it has to be dequantised, or is not quantised."""
    schemes = {_scheme_of_block(block, planned) for block in planned.blocks}
    return schemes.pop() if len(schemes) == 1 else None


def _scheme_of_block(block: Block, planned: PlannedTensor) -> WeightScheme | None:
    stored = block.quantised
    is_as_stored = all(step[0] in _OF_WHOLE_ROWS for step in block.steps)
    if stored is None or not is_as_stored or not _has_whole_rows(block, planned):
        return None
    return FORMATS[stored.format].scheme(stored.tensors, block.source_shape, stored.numbers)


def can_be_quantised(planned: PlannedTensor) -> bool:
    """True of a plain matrix, or experts', whose rows are not put together from several tensors."""
    if not all(block.quantised is None and _has_whole_rows(block, planned) for block in planned.blocks):
        return False
    # Of experts' parts of a tensor none is read as one of a rank's (loader.QuantisedPart).
    return len(planned.shape) == 2 or not any(step[0] == "narrow" for block in planned.blocks for step in block.steps)


def _has_whole_rows(block: Block, planned: PlannedTensor) -> bool:
    return len(planned.shape) > 1 and block.shape[-1] == planned.shape[-1]


def _part(member: PackedPart, block: Block) -> WeightPart:
    first_row = block.starts[0] if block.starts else 0
    inner = block.starts[1:] if any(block.starts[1:]) or block.steps else ()
    start = member.start + first_row
    return WeightPart(block.tensor, block.file, start, block.source_shape, block.steps, inner, block.quantised)


def read_checkpoint(
    tensors: CheckpointTensors, model: PreTrainedModel, lent: Mapping[str, PlannedTensor] = _NONE_LENT
) -> dict[str, PlannedTensor]:
    """Says for each key of the model what fills it.

    Args:
        lent: what fills keys that another model's checkpoint has.

    Raises:
        CheckpointError: a tensor is unexpected, quantised without its scales, or missing.
        UnsupportedModelError: Transformers would compute a tensor from others while loading.
    """
    table = to_model_keys(tensors.planned, model) | dict(lent)
    _check_dtypes(table, tensors, model)  # ahead of what would be said of scales that have no place
    _account(table, tensors, model)
    return table


def read_part(
    tensors: CheckpointTensors, names: Collection[str], of_whole: Mapping[str, PlannedTensor], model: PreTrainedModel
) -> dict[str, PlannedTensor]:
    """Like read_checkpoint, of a model that a part of a checkpoint is of.

    Args:
        names: the tensors that are its alone.
        of_whole: what fills its other keys, which it shares with the whole model.

    Raises:
        CheckpointError, UnsupportedModelError: as read_checkpoint.
    """
    own = {name: planned for name, planned in tensors.planned.items() if name in names}
    table = to_model_keys(own, model) | dict(of_whole)
    _check_dtypes(table, tensors, model)
    _account(table, tensors, model)
    return table


def line_on_unlisted(tensors: CheckpointTensors, table: Mapping[str, PlannedTensor]) -> str | None:
    """The line on tensors that are left out as the index does not name them, or None."""
    blocks = [block for planned in table.values() for block in planned.blocks]
    parts = {one.name for block in blocks if block.quantised for one in block.quantised.tensors.values()}
    left_out = sorted(tensors.unlisted - parts - {block.tensor for block in blocks} - set(tensors.unused))
    if not left_out:
        return None
    return (
        f"{len(left_out)} tensors of the checkpoint's files, such as {left_out[0]!r}, are left out: the index does not "
        "name them, and the model has no place for them"
    )


def untie_stored_apart(tensors: CheckpointTensors, model: PreTrainedModel) -> None:
    """Gives each tensor of a tie that the checkpoint holds under a name of its own a parameter of its own.

    Transformers ties them where their values are the same, and does not where they differ. Their values are not looked
    at here: a program that reads each serves both, and any checkpoint with the same headers. A checkpoint that holds
    the same head twice costs its size in memory once more.

    Raises:
        CheckpointError, UnsupportedModelError: as read_checkpoint.
    """
    ties = [names for names in names_of_each(model) if len(names) > 1]
    if not ties:
        return
    given = to_model_keys(tensors.planned, model).keys()
    for names in ties:
        for name in [name for name in names if name in given][1:]:
            owner, _, leaf_name = name.rpartition(".")
            own = torch.nn.Parameter(torch.empty_like(model.get_parameter(name)), requires_grad=False)
            setattr(model.get_submodule(owner), leaf_name, own)


def _check_dtypes(table: dict[str, PlannedTensor], tensors: CheckpointTensors, model: PreTrainedModel) -> None:
    """Refuses a weight in 8 bits or integers that nothing says the scales of."""
    state = model.state_dict(keep_vars=True)
    for key, planned in table.items():
        for block in planned.blocks:
            dtype = tensors.stored[block.tensor].dtype
            is_small = not dtype.is_floating_point or dtype.itemsize < 2
            if block.quantised is None and key in state and state[key].is_floating_point() and is_small:
                raise CheckpointError(
                    f"{block.file}: {block.tensor!r} is {str(dtype).removeprefix('torch.')}, as quantised weights are; "
                    "expected float32, float16 or bfloat16, or a config.json whose quantization_config says how such "
                    "weights are stored. Take the model's checkpoint that is not quantised."
                )


def _account(table: dict[str, PlannedTensor], tensors: CheckpointTensors, model: PreTrainedModel) -> None:
    """Checks that every tensor has a place, and every place a tensor of its shape under any of its names."""
    state = model.state_dict(keep_vars=True)
    _drop_leftovers(table, tensors, state, model)
    for key, planned in table.items():
        if planned.shape != state[key].shape:
            names = " and ".join(repr(block.tensor) for block in planned.blocks[:2])
            raise CheckpointError(
                f"{planned.blocks[0].file}: {names} {'has' if len(planned.blocks) == 1 else 'and others make'} shape "
                f"{list(planned.shape)}, the model's config.json says {list(state[key].shape)} for {key!r}"
            )
    missing = []
    for tied in names_of_each(model):
        given = next((name for name in tied if name in table), None)
        if given is None:
            missing.append(tied[0])
        else:
            table.update({name: table[given] for name in tied if name not in table})
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise CheckpointError(f"the checkpoint lacks {', '.join(repr(name) for name in missing[:3])}{more}")


def names_of_each(model: PreTrainedModel) -> list[list[str]]:
    """The names of each tensor of the model: more than one where it is tied."""
    names_of: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names_of.setdefault(id(tensor), []).append(name)
    return list(names_of.values())


def _prediction_layers(model: PreTrainedModel) -> list[str]:
    """Patterns of the layers for multi-token prediction, which are numbered behind the model's own."""
    config = model.config.get_text_config(decoder=True)
    first, count = config.num_hidden_layers, getattr(config, "num_mtp_layers", None) or 0
    return [rf"(^|\.)layers\.{number}\." for number in range(first, first + count)]


def _drop_leftovers(
    table: dict[str, PlannedTensor], tensors: CheckpointTensors, state: Mapping[str, object], model: PreTrainedModel
) -> None:
    """Drops what Transformers drops in silence too, biases that add nothing, and what the index does not name; anything
    else without a place is an error."""
    ignored = [_LEFTOVERS, *(model._keys_to_ignore_on_load_unexpected or ()), *_prediction_layers(model)]
    for key in sorted(set(table) - set(state)):
        block = table[key].blocks[0]
        is_known = block.tensor in tensors.unlisted or any(re.search(pattern, key) for pattern in ignored)
        if not is_known and not tensors.is_empty_bias(block.tensor):
            raise CheckpointError(
                f"{block.file}: tensor {block.tensor!r} has no place in {type(model).__name__}. "
                "Is this the checkpoint that belongs to the config.json?"
            )
        del table[key]
