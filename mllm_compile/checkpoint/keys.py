"""Maps a checkpoint's tensors to model keys, by Transformers' own renaming and conversion rules.

The only place that knows Transformers' loading internals (the same calls work from 5.17 to 5.23).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from mllm_compile.checkpoint.planned_tensor import PlannedTensor
from mllm_compile.errors import CheckpointError, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def to_model_keys(tensors: Mapping[str, PlannedTensor], model: PreTrainedModel) -> dict[str, PlannedTensor]:
    """Renames, joins and splits `tensors` as Transformers would while loading them into `model`.

    Returns:
        Model key → what fills it; keys that the model does not have are kept under their new name.

    Raises:
        CheckpointError: two tensors have one key, or parts do not fit together.
        UnsupportedModelError: a conversion computes values instead of rearranging them.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key

    # A drafter's own, where it is built around a part of another model.
    transforms: list[Any] = getattr(model, "weight_conversions", None) or get_model_conversion_mapping(model)
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    renamings = [transform for transform in transforms if not isinstance(transform, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    state = model.state_dict()
    renamed: dict[str, tuple[str, PlannedTensor]] = {}
    conversions: dict[str, Any] = {}
    numbered: dict[tuple[str, str], list[str]] = {}
    for name in sorted(tensors, key=dot_natural_key):  # Transformers' order: stacked experts follow it
        key, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if key not in state and name in state:
            key, pattern = rename_source_key(name, [], [], model.base_model_prefix, state)
        if pattern is not None and key not in state:
            key = name  # of a part that the model leaves out: nothing puts its experts together
        if pattern is not None and key in state:
            converter = conversions.setdefault(key, deepcopy(by_pattern[pattern]))
            converter.add_tensor(key, name, pattern, tensors[name])
            numbered.setdefault((key, pattern), []).append(name)
        elif key in renamed:
            raise CheckpointError(f"tensors {renamed[key][0]!r} and {name!r} both stand for {key!r}")
        else:
            renamed[key] = name, tensors[name]
    result = {key: tensor for key, (_, tensor) in renamed.items()}
    for (key, _), names in numbered.items():
        stacks = any(type(operation).__name__ == "MergeModulelist" for operation in conversions[key].operations)
        _check_numbers(key, names, state[key].shape[0] if stacks else 0)
    for key, converter in conversions.items():
        groups = [names for (of, _), names in numbered.items() if of == key]
        if key in renamed:
            other = min(name for names in groups for name in names)
            raise CheckpointError(f"tensors {renamed[key][0]!r} and {other!r} both stand for {key!r}")
        result |= _convert(key, converter, model, [{name: tensors[name] for name in names} for names in groups])
    return result


def _check_numbers(key: str, names: list[str], count: int) -> None:
    """Checks that tensors that are stacked are numbered from 0 on, each number there: place is all that tells experts
    apart once they are stacked.

    Args:
        key: what they are stacked to.
        names: of one kind, of one layer.
        count: how many the model has at least.

    Raises:
        CheckpointError: naming those that are not there, or one that is there twice.
    """
    parts = [re.split(r"(\d+)", name) for name in names]
    if len({len(one) for one in parts}) > 1:
        return
    places = [place for place in range(1, len(parts[0]), 2) if len({one[place] for one in parts}) > 1]
    if len(places) != 1:
        return
    place, template = places[0], parts[0]
    by_number: dict[int, str] = {}
    for name, one in zip(names, parts, strict=True):
        other = by_number.setdefault(int(one[place]), name)
        if other != name:  # with another prefix, or a zero ahead of the number
            raise CheckpointError(f"tensors {other!r} and {name!r} both stand for number {int(one[place])} of {key!r}")
    numbers = set(by_number)
    missing = sorted(set(range(max(count, len(names)))) - numbers)
    if missing:
        lacking = ["".join((*template[:place], str(number), *template[place + 1 :])) for number in missing]
        more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
        later = "; it has later ones" if max(numbers) > missing[0] else ""
        raise CheckpointError(f"the checkpoint lacks {', '.join(map(repr, lacking[:3]))}{more}{later}")


def _convert(
    key: str, converter: Any, model: PreTrainedModel, groups: list[dict[str, PlannedTensor]]
) -> dict[str, PlannedTensor]:
    """
    Args:
        groups: the tensors that it is made of, by kind; all of a kind have one shape.
    """
    sources = sorted(name for names in converter.layer_targets.values() for name in names)
    shown = ", ".join(repr(name) for name in sources[:2]) + (" …" if len(sources) > 2 else "")
    operations = ", ".join(type(operation).__name__ for operation in converter.operations)
    try:
        converted = converter.convert(key, model=model, config=model.config)
    except (ValueError, RuntimeError, KeyError) as error:
        shown = _of_another_shape(groups) or f"tensors {shown}"
        raise CheckpointError(f"{shown} cannot be put together to {key!r} ({operations}): {error}") from error
    except (TypeError, AttributeError) as error:
        raise UnsupportedModelError(
            f"checkpoint tensors {shown} are converted by Transformers while loading ({operations}), which is not "
            f"supported yet: {error}. Save the model once with Transformers' "
            "save_pretrained(FOLDER, save_original_format=False) and use that folder."
        ) from error
    return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in converted.items()}


def _of_another_shape(groups: list[dict[str, PlannedTensor]]) -> str:
    """Names a tensor that has another shape than most of its kind; "" if all are alike."""
    for group in groups:
        (usual, _), *others = Counter(tuple(tensor.shape) for tensor in group.values()).most_common()
        if others:
            name = next(name for name, tensor in group.items() if tuple(tensor.shape) != usual)
            return f"tensor {name!r} of shape {list(group[name].shape)}, and others like it of {list(usual)},"
    return ""
