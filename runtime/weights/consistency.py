"""Checks what a runtime's table of weights says of quantised ones against itself, before anything is read by it.

A format's numbers follow from its tensors' shapes, a scheme from both, and a weight's type from its scheme.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from mllm_compile.runtime.errors import CheckpointError
from mllm_compile.runtime.quantised.scheme import INT4_GROUP, MXFP4, NVFP4, SCALES, Kind, WeightScheme
from mllm_compile.runtime.short_repr import short_repr
from mllm_compile.runtime.weights.formats.base import FLOATS, VALUES, Format, Quantised
from mllm_compile.runtime.weights.formats.registry import FORMATS, kept_sources
from mllm_compile.runtime.weights.formats.settings import Settings
from mllm_compile.runtime.weights.spec import Factor, QuantisedPart, WeightPart, WeightSpec

_FLAGS = ("zero_offset", "in_order")
_BITS = (4, 8)
# Kind → the size of its groups, where there is but one, and the types of its scales.
_FORMS: dict[Kind, tuple[int | None, tuple[torch.dtype, ...]]] = {
    "fp8": (None, (torch.float32,)),
    "int4": (None, FLOATS),
    "int4_lanes": (INT4_GROUP, FLOATS),
    "int4_offsets": (None, FLOATS),
    "int8": (None, FLOATS),
    "int8_offsets": (None, FLOATS),
    "mxfp4": (MXFP4.group, (MXFP4.scale_dtype,)),
    "nvfp4": (NVFP4.group, (NVFP4.scale_dtype,)),
}


def check_quantised(specs: Iterable[WeightSpec]) -> None:
    """Raises ValueError, naming the weight, for parts that no compile would have written."""
    for spec in specs:
        if all(part.quantised is None and part.kept is None and part.factor is None for part in spec.parts):
            continue
        try:
            kept, checked = spec.parts[0].kept, dict[object, str]()
            for part in spec.parts:
                if part.kept is not kept and part.kept != kept:
                    raise ValueError("its parts are in memory in several ways")
                _check_part(part, spec.dtype, checked)
        except (ValueError, LookupError, ArithmeticError, CheckpointError) as error:
            raise ValueError(f"{short_repr(spec.name)}: {error}") from error


def _check_part(part: WeightPart, dtype: torch.dtype, checked: dict[object, str]) -> None:
    """Checks one part.

    Args:
        checked: what was found right of this weight but for names, and the role of the tensor that such a part is named
            after: experts, many thousand, are alike.
    """
    quantised = part.quantised
    if quantised is None:
        if part.kept is not None:
            _check_kept(part.kept, dtype)
    else:
        tensors = tuple([(role, one.shape, one.dtype) for role, one in quantised.tensors.items()])
        numbers = tuple(quantised.numbers.items())
        key = quantised.format, tensors, numbers, part.shape
        if key not in checked:
            checked[key] = _check_stored(part, quantised, dtype)
        _check_names(part, quantised, checked[key])
    if part.factor is not None:
        _check_factor(part.factor, part.kept)


def _check_stored(part: WeightPart, quantised: Quantised, dtype: torch.dtype) -> str:
    """Checks all but names; gives the role of the tensor that the part is named after."""
    fmt = FORMATS.get(quantised.format)
    if fmt is None:
        raise ValueError(f"no format is called {short_repr(quantised.format)}")
    roles = quantised.tensors.keys()
    if not fmt.roles.keys() - fmt.optional <= roles <= fmt.roles.keys():
        raise ValueError(f"{fmt.name} has {', '.join(fmt.roles)} of a weight, not {short_repr(list(roles))}")
    values = quantised.tensors[VALUES]
    if values.dtype not in fmt.values_dtypes:
        raise ValueError(f"{values} holds no values of {fmt.name}")
    if part.kept is not None:
        _check_kept(part.kept, dtype)
    elif not dtype.is_floating_point or dtype.itemsize < 2:
        raise ValueError(f"a dequantised weight is in {dtype}")
    scheme = _scheme(fmt, quantised, part.shape)
    if part.kept is None:
        return VALUES
    if part.kept.scheme not in _in_memory(scheme):
        raise ValueError(f"weights as {fmt.name} has this one are not in memory as {part.kept.scheme}")
    return kept_sources(quantised, part.kept.role)[0]


def _check_names(part: WeightPart, quantised: Quantised, named_after: str) -> None:
    """Checks that the tensors form one weight, and the part is named after one."""
    suffixes, tensors = FORMATS[quantised.format].roles, quantised.tensors
    values = tensors[VALUES].name
    base = values.removesuffix(suffixes[VALUES])
    for role, one in tensors.items():
        if one.name != base + suffixes[role]:
            raise ValueError(f"{short_repr(one.name)} is not the tensor of {role} that goes with {short_repr(values)}")
    source = tensors[named_after]
    if part.tensor != source.name or part.file != source.file:
        raise ValueError(f"{short_repr(part.tensor)} of {short_repr(part.file)} is not what it is made of")


def _scheme(fmt: Format, quantised: Quantised, shape: tuple[int, ...]) -> WeightScheme | None:
    """The scheme that the weight has in its format, whose numbers are checked."""
    numbers = quantised.numbers
    for name, value in numbers.items():
        is_right = value in (0, 1) if name in _FLAGS else name == "offset" or (type(value) is int and value > 0)
        if not is_right or (name == "bits" and value not in _BITS):
            raise ValueError(f"{short_repr(name)} is {short_repr(value)}")
    expected = fmt.layout(quantised.tensors, _settings(numbers), numbers)
    if expected != (shape, dict(numbers)):
        raise ValueError(
            f"{quantised.tensors[VALUES]} and what goes with it make {short_repr(expected)}, not "
            f"{short_repr((shape, numbers))}"
        )
    return fmt.scheme(quantised.tensors, shape, numbers)


def _settings(numbers: Mapping[str, int | float]) -> Settings:
    """Settings that follow uniquely from the tensors' numbers."""

    def sizes(*names: str) -> tuple[int, ...]:
        return tuple(int(numbers[name]) for name in names if name in numbers)

    block = sizes("block_rows", "block_columns")
    return Settings(
        bits=sizes("bits"),
        groups=sizes("group"),
        blocks=((block[0], block[1]),) if len(block) == 2 else (),
        zero_offset=int(numbers.get("zero_offset", 0)),
        in_order=bool(numbers.get("in_order", 0)),
    )


def _in_memory(scheme: WeightScheme | None) -> tuple[WeightScheme | None, ...]:
    """The forms in which weights of a scheme are in memory: of linears (a rank may have a part of the inputs), and of
    experts."""
    return (scheme,) if scheme is None else (scheme, scheme.of_linear(INT4_GROUP))


def _check_kept(kept: QuantisedPart, dtype: torch.dtype) -> None:
    scheme, (group, scale_dtypes) = kept.scheme, _FORMS[kept.scheme.kind]
    is_group = scheme.group > 0 if group is None else scheme.group == group
    is_zeros = scheme.name == "int4" or not scheme.has_zeros
    if not is_group or scheme.scale_dtype not in scale_dtypes or not is_zeros:
        raise ValueError(f"no weight lies in memory as {scheme}")
    if kept.role not in scheme.roles:
        raise ValueError(f"{scheme} has no {short_repr(kept.role)}")
    if dtype != scheme.dtype(kept.role):
        raise ValueError(f"{scheme} has {kept.role} in {scheme.dtype(kept.role)}, not {dtype}")


def _check_factor(factor: Factor, kept: QuantisedPart | None) -> None:
    one = factor.tensor
    if one.shape not in ((), (1,)) or one.dtype not in FLOATS:
        raise ValueError(f"{one} is no factor of one number")
    if kept is not None and kept.role != SCALES:
        raise ValueError(f"its {kept.role} are multiplied by {one}")
