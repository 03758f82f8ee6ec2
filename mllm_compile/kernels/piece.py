"""A piece that no graph was traced for: the compiler writes its source, a call of one op.

The op's inputs are declared once, by name and in its order. The source, the inputs to compile for and a check's
arguments are made of them. Tests compare the order with the op's, and the shapes with the runtime's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch

from mllm_compile.config.resolved import ResolvedConfig
from mllm_compile.inductor.job import PieceInput
from mllm_compile.runtime.attention.layer import LayerSpec
from mllm_compile.runtime.program.spec import Program

Kind = TypeVar("Kind")
Made = TypeVar("Made")

_SOURCE = '''"""{name}"""

import torch


class Piece(torch.nn.Module):
    # {legend}
{comments}

    def forward(self, {inputs}):
        {call}
'''


@dataclass(frozen=True)
class WrittenPiece:
    """A piece's name, its source, and what it takes: inputs by name, in the order of its arguments."""

    name: str
    source: str
    signature: Mapping[str, PieceInput]

    @classmethod
    def calling(
        cls,
        op: str,
        signature: Mapping[str, PieceInput],
        *,
        name: str,
        legend: str,
        options: Mapping[str, object] | None = None,
        gives_tensor: bool = True,
    ) -> WrittenPiece:
        """Writes a piece that calls torch.ops.mllm.`op`.

        Args:
            signature: the op's tensors, by the names and in the order that the op has.
            legend: the names of dynamic sizes, for readers of the source.
            options: the op's other arguments.
            gives_tensor: the op returns one; else it writes into its arguments alone.
        """
        given = [f"{key}={key}" for key in signature] + [f"{key}={value!r}" for key, value in (options or {}).items()]
        call = f"torch.ops.mllm.{op}({', '.join(given)})"
        shapes = {key: f"[{', '.join(map(str, spec.shape))}] {spec.dtype}" for key, spec in signature.items()}
        source = _SOURCE.format(
            name=name,
            legend=legend,
            comments="\n".join(f"    # {key}: {shape}" for key, shape in shapes.items()),
            inputs=", ".join(signature),
            call=f"return ({call},)" if gives_tensor else f"{call}\n        return ()",
        )
        return cls(name, source, signature)

    @property
    def inputs(self) -> tuple[PieceInput, ...]:
        """The inputs as the piece compiler needs them."""
        return tuple(self.signature.values())

    def arguments(self, **tensors: torch.Tensor) -> list[torch.Tensor]:
        """Puts tensors into the order of the piece's arguments.

        Raises:
            TypeError: they are not what the piece takes, by name, shape or dtype.
        """
        if set(tensors) != set(self.signature):
            raise TypeError(f"{self.name} takes {', '.join(self.signature)}; got {', '.join(tensors)}")
        ordered = [tensors[key] for key in self.signature]
        if mismatch := self.mismatch(ordered):
            raise TypeError(mismatch)
        return ordered

    def mismatch(self, tensors: Sequence[torch.Tensor]) -> str | None:
        """The first argument that does not fit the signature, and why; None: all fit. Positions decide, not names."""
        if len(tensors) != len(self.signature):
            return f"{self.name} takes {len(self.signature)} tensors; got {len(tensors)}"
        sizes: dict[str, int] = {}
        for (key, spec), tensor in zip(self.signature.items(), tensors, strict=True):
            if not _fits(spec, tensor, sizes):
                return (
                    f"{self.name}'s {key} is [{', '.join(map(str, spec.shape))}] {spec.dtype}, contiguous; got "
                    f"{list(tensor.shape)} {tensor.dtype} with strides {tensor.stride()}"
                )
        return None


def with_kernels(program: Program, kind: str, of_layers: Mapping[str, Any]) -> Program:
    """The program whose layers have these kernels, in that field of LayerKernels."""
    found = {name: replace(program.kernels_of_layer(name), **{kind: one}) for name, one in of_layers.items()}
    return replace(program, layer_kernels={**program.layer_kernels, **found})


def with_piece_each(
    program: Program, kind: str, layers: Iterable[LayerSpec], make: Callable[[LayerSpec, str], WrittenPiece]
) -> tuple[Program, tuple[WrittenPiece, ...]]:
    """The program whose layers have a piece each, in that field of LayerKernels, and the pieces.

    Layers that are alike share one.

    Args:
        make: gets such a layer, and the piece's name.
    """
    of_layers, written = made_by_kind(
        layers,
        lambda layer: replace(layer, name="", layer_id=0),
        lambda layer, index: make(layer, f"{kind}_{index}"),
    )
    found = {name: piece.name for name, piece in of_layers.items()}
    return with_kernels(program, kind, found), tuple(written)


def attention_inputs(config: ResolvedConfig, layer: LayerSpec, rows: str = "T") -> dict[str, PieceInput]:
    """A batch's inputs of a kernel: new tokens' queries [T, heads, dim], the layer's KV cache, and the pages and the
    length of each of the `rows` requests."""
    of, heads, dim = PieceInput.contiguous, layer.num_kv_heads, layer.head_dim
    return {
        "q": of(("T", layer.num_heads, dim), config.model.dtype),
        "keys": of(("P", heads, dim), config.runtime.kv_cache_dtype),
        "values": of(("P", heads, dim), config.runtime.kv_cache_dtype),
        "page_table": of((rows, "W"), "int32"),
        "seq_lens": of((rows,), "int32"),
    }


def split_outputs(config: ResolvedConfig, layer: LayerSpec) -> dict[str, PieceInput]:
    """The tensors that decode kernels write: the output, and parts of it by N blocks a request, put together last."""
    of, heads, dim = PieceInput.contiguous, layer.num_heads, layer.head_dim
    return {
        "out": of(("T", heads, dim), config.model.dtype),
        "partial": of(("T", "N", heads, dim), "float32"),
        "tops": of(("T", "N", heads), "float32"),
        "totals": of(("T", "N", heads), "float32"),
        "done": of(("T", layer.num_kv_heads), "int32"),
    }


class Named(Protocol):
    """A layer, by the name that it has in its program."""

    @property
    def name(self) -> str: ...


Layer = TypeVar("Layer", bound=Named)


def made_by_kind(
    layers: Iterable[Layer], kind_of: Callable[[Layer], Kind], make: Callable[[Kind, int], Made]
) -> tuple[dict[str, Made], list[Made]]:
    """Makes something once for each kind of layer, for all layers that are alike to share.

    Args:
        kind_of: what decides whether two layers are alike.
        make: gets a kind, and how many others were made before it.

    Returns:
        Each layer's kernels by its name, and all kernels in order.
    """
    of_layers: dict[str, Made] = {}
    of_kinds: dict[Kind, Made] = {}
    for layer in layers:
        kind = kind_of(layer)
        if kind not in of_kinds:
            of_kinds[kind] = make(kind, len(of_kinds))
        of_layers[layer.name] = of_kinds[kind]
    return of_layers, list(of_kinds.values())


def _fits(spec: PieceInput, tensor: torch.Tensor, sizes: dict[str, int]) -> bool:
    """True if the tensor is what `spec` says; `sizes` are the dynamic ones seen so far; it adds its own."""
    if tensor.ndim != len(spec.shape) or str(tensor.dtype) != f"torch.{spec.dtype}" or not tensor.is_contiguous():
        return False
    named = zip(spec.shape, tensor.shape, strict=True)
    return all((sizes.setdefault(n, size) if isinstance(n, str) else n) == size for n, size in named)
