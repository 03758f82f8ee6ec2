"""The kernels that the compiler wrote for a layer, as the program stores them and as a backend is given them.

A record is stored with the ids of pieces (StoredKernels, program/spec.py); program/link.py makes it one of functions
(LinkedKernels). A new kind of kernel is one more field here: whatever stores, links, names or lists pieces reads the
fields. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from typing import Any, Generic, TypeVar

from mllm_compile.runtime.attention.hopper.kernel import DecodeKernel
from mllm_compile.runtime.attention.hopper.shapes import kernel_from_json
from mllm_compile.runtime.attention.split.splits import Splits
from mllm_compile.runtime.cpu.library import CpuLibrary
from mllm_compile.runtime.files.json_data import from_json

Piece = TypeVar("Piece")
Decode = TypeVar("Decode")

FEW_TOKENS = 64  # of a step with short chunks in layers with a state
WHAT = "what"  # a piece computes, for people
_VARIANTS = ("decode", "verify")  # the fields of variants, which are stored in a form of their own


@dataclass(frozen=True)
class DecodeVariant:
    """The way that decodes of batches of some size compute a layer's attention.

    Attributes:
        most_sequences: requests x KV heads that it serves; None: any number.
        piece: its id (ops/attention/split_decode.py, ordered_decode.py, rows_decode.py), or None: `kernels` decode.
        splits: the piece's splits; None: it has none.
        kernels: kernels of runtime/attention/hopper/: clusters', one for each split, or shares' one.
    """

    most_sequences: int | None = None
    piece: str | None = None
    splits: Splits | None = None
    kernels: tuple[DecodeKernel, ...] = ()

    @property
    def takes_rows_together(self) -> bool:
        """True if its piece attends neighbouring rows of a request together."""
        return self.piece is not None and self.splits is None

    @property
    def fuses_rope(self) -> bool:
        """True if its kernels write new keys and values too, and rotate where queries and keys are."""
        return bool(self.kernels)

    @property
    def together(self) -> int:
        """KV heads that it takes as one."""
        return max((kernel.together for kernel in self.kernels), default=1)

    @property
    def tokens(self) -> int:
        """Tokens of a request that it attends together, at most."""
        return max((kernel.tokens for kernel in self.kernels), default=1)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "kernels": [kernel.to_json() for kernel in self.kernels]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> DecodeVariant:
        """Raises KeyError, TypeError or ValueError for anything that to_json would not have written."""
        kernels = tuple(map(kernel_from_json, data["kernels"]))
        variant = replace(from_json(cls, {**data, "kernels": []}), kernels=kernels)
        if (variant.piece is None) is not bool(variant.kernels):
            raise ValueError("a variant of decode attention has a piece, or kernels")
        return variant


@dataclass(frozen=True)
class LatentKernels(Generic[Piece]):
    """Attention over a layer's latents; arguments as those ops have them (ops/attention/latent.py).

    Attributes:
        expanded: of prompts over keys and values made of latents; there where the layer has its up-projection.
    """

    decode: Piece = field(metadata={WHAT: "attention of decodes over latents"})
    prefill: Piece = field(metadata={WHAT: "attention of prompts over latents"})
    expanded: Piece | None = field(
        default=None, metadata={WHAT: "attention of prompts over keys and values made of latents"}
    )


@dataclass(frozen=True)
class StateKernels(Generic[Piece]):
    """A layer with a state; arguments as its op has them (ops/states/), those that the layer has.

    Attributes:
        decodes: (*operands, states, rows, has_state, out): request i has token i alone.
        prompts: (*operands, states, rows, has_state, sources, starts, ends, out).
        few: the same, of at most FEW_TOKENS tokens; None: prompts serves them too.
    """

    decodes: Piece = field(metadata={WHAT: "decodes"})
    prompts: Piece = field(metadata={WHAT: "prompts"})
    few: Piece | None = field(default=None, metadata={WHAT: "prompts of few tokens"})

    def prompts_of(self, num_tokens: int) -> Piece:
        """The kernels of prompts in a step of so many tokens."""
        return self.prompts if self.few is None or num_tokens > FEW_TOKENS else self.few


@dataclass(frozen=True)
class LayerKernels(Generic[Decode, Piece]):
    """The kernels of one layer; another library or torch computes the rest.

    Attributes:
        decode: its decodes, by ascending number of sequences; the last serves any number. May be empty.
        verify: captured verify steps that attend a request's tokens together; else each is a decode.
        cascade: decodes that begin with the same pages.
        prefill: prompts, of a layer that no other library's kernel serves.
        latent: all of its attention, over latents.
        paged: the library that does all of its attention on a CPU; where linked, attention/paged/attend.py's.
        state: a layer with a state, and none of the others.
    """

    decode: tuple[Decode, ...] = field(default=(), metadata={WHAT: "attention of decodes"})
    verify: tuple[Decode, ...] = ()
    cascade: Piece | None = field(default=None, metadata={WHAT: "attention of decodes of one prefix"})
    prefill: Piece | None = field(default=None, metadata={WHAT: "attention of prompts"})
    latent: LatentKernels[Piece] | None = None
    paged: Any = None  # CpuLibrary | None, and where linked PagedAttention | None
    state: StateKernels[Piece] | None = None

    def linked(
        self, decode: Callable[[Any], Any], piece: Callable[[Any], Any], paged: Callable[[CpuLibrary], Any]
    ) -> LinkedKernels:
        """The record with `decode` of each way of decoding, `paged` of the library, and `piece` of all else."""
        pieces = _mapped(self._of_pieces(), piece)
        decodes, verifies = (tuple(map(decode, variants)) for variants in (self.decode, self.verify))
        return replace(pieces, decode=decodes, verify=verifies, paged=None if self.paged is None else paged(self.paged))

    def _of_pieces(self) -> LayerKernels[Any, Any]:
        """The record without what is no piece."""
        return replace(self, decode=(), verify=(), paged=None)

    def pieces(self: StoredKernels) -> dict[str, str]:
        """The ids of its pieces, and what each computes."""
        named = dict(_named(self._of_pieces()))
        decodes = (variant.piece for variant in self.decode if variant.piece is not None)
        return dict.fromkeys(decodes, _what_of(self, "decode")) | named

    def to_json(self: StoredKernels) -> dict[str, Any]:
        variants = {name: [variant.to_json() for variant in getattr(self, name)] for name in _VARIANTS}
        return {**asdict(replace(self, decode=(), verify=())), **variants}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StoredKernels:
        """Raises KeyError, TypeError or ValueError for anything that to_json would not have written."""
        decode, verify = (tuple(map(DecodeVariant.from_json, data[name])) for name in _VARIANTS)
        paged = from_json(CpuLibrary | None, data["paged"])
        pieces = from_json(LayerKernels[DecodeVariant, str], {**data, "decode": [], "verify": [], "paged": None})
        return replace(pieces, decode=decode, verify=verify, paged=paged)


StoredKernels = LayerKernels[DecodeVariant, str]
LinkedKernels = LayerKernels[Any, Callable[..., Any]]  # decode: split_decode.LinkedDecode
NO_KERNELS: LayerKernels[Any, Any] = LayerKernels()


def of_kind(layers: Mapping[str, LayerKernels[Any, Any]], kind: str) -> dict[str, Any]:
    """The kernels of one field of LayerKernels, of the layers that have some."""
    found = {name: getattr(kernels, kind) for name, kernels in layers.items()}
    return {name: kernels for name, kernels in found.items() if kernels}


def _what_of(record: Any, name: str) -> str:
    what: str = next(one.metadata[WHAT] for one in fields(record) if one.name == name)
    return what


def _named(record: Any) -> Iterator[tuple[Any, str]]:
    """The pieces of a record and of those within, with what they compute."""
    for one in fields(record):
        value = getattr(record, one.name)
        if is_dataclass(value):
            yield from _named(value)
        elif value:
            yield value, one.metadata[WHAT]


def _mapped(record: Any, function: Callable[[Any], Any]) -> Any:
    """The record with `function` of each piece, also of records within."""

    def of(value: Any) -> Any:
        if is_dataclass(value):
            return _mapped(value, function)
        return function(value) if value else value

    return replace(record, **{one.name: of(getattr(record, one.name)) for one in fields(record)})
