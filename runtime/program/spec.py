"""The compiled program: a list of steps over named values, as it is stored; free of torch. executor.py runs it.

steps.py has the kinds of steps. Values are the batch's inputs, weights by name, and outputs of steps. Stored as JSON;
pieces.py makes pieces callable.

Shape legend: T tokens, S rows of logits, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from mllm_compile.runtime.attention.layer import LayerSpec
from mllm_compile.runtime.attention.layer_kernels import NO_KERNELS, LayerKernels, StoredKernels
from mllm_compile.runtime.cpu.library import CpuLibrary
from mllm_compile.runtime.cuda.kernel import CudaKernel
from mllm_compile.runtime.errors import ArtifactError
from mllm_compile.runtime.files.json_data import from_json
from mllm_compile.runtime.lora.target import LoraLayout
from mllm_compile.runtime.media.registry import tower_from_json, tower_to_json
from mllm_compile.runtime.media.tiles import TileTower
from mllm_compile.runtime.media.tower import Tower
from mllm_compile.runtime.ops import family
from mllm_compile.runtime.ops.panels.library import PANEL_LINEARS
from mllm_compile.runtime.pooling.facts import PoolingFacts
from mllm_compile.runtime.program.steps import PackedAttentionStep, PieceStep, Step, step_from_json, step_to_json
from mllm_compile.runtime.schedule.rope_lengths import RopeLengths
from mllm_compile.runtime.sources.facts import SourceFacts
from mllm_compile.runtime.speculation.block import DraftBlock
from mllm_compile.runtime.state.layer import StateLayer

TOKEN_INPUTS = ("input_ids", "positions", "slots")
ROW_INPUT = "logits_indices"
BATCH_INPUTS = (*TOKEN_INPUTS, ROW_INPUT)


@dataclass(frozen=True)
class PieceVariant:
    """A further variant of a piece, for at most `max_size` tokens, or rows where the piece gathers them or comes
    behind.

    `piece` is its id; how many there are is the size of dimension `dim` of input `input`.
    """

    piece: str
    input: int
    dim: int
    max_size: int


@dataclass(frozen=True)
class StoredSamplingPieces:
    """The pieces that choose tokens: the most probable, and draws, from the program's logits of type `dtype`; and draws
    from float32 scores. Then those that score given tokens, from such logits and from float32 scores.
    """

    dtype: str
    greedy: str
    from_logits: str
    from_scores: str
    score: str
    score_floats: str

    def piece_ids(self) -> tuple[str, str, str, str, str]:
        return self.greedy, self.from_logits, self.from_scores, self.score, self.score_floats


@dataclass(frozen=True)
class StoredDecodeLoopPieces:
    """The pieces that make the inputs of a captured decode ready, and choose and hand on its tokens."""

    begin: str
    end: str

    def piece_ids(self) -> tuple[str, str]:
        return self.begin, self.end


@dataclass(frozen=True)
class StoredVerifyPieces:
    """The pieces that make the inputs of a captured verify step, and accept what it drafted."""

    begin: str
    end: str

    def piece_ids(self) -> tuple[str, str]:
        return self.begin, self.end


@dataclass(frozen=True)
class ExpertWeight:
    """The products of a weight that holds a matrix for each expert.

    Attributes:
        num_experts: experts that it is of.
        num_chosen: experts that a token chooses of them.
        inputs: numbers of a row that an expert is given.
        outputs: numbers of a row that it makes.
        of_tokens: a token's experts are given one row; else each its own.
    """

    num_experts: int
    num_chosen: int
    inputs: int
    outputs: int
    of_tokens: bool


@dataclass(frozen=True)
class QuantisedWeight:
    """The matrix that a weight's values, scales and zero points stand for.

    Attributes:
        scales, zeros: names of the weights that go with the values; zeros stands for zero points or offsets, or None.
        outputs, inputs: its rows and columns.
    """

    scales: str
    zeros: str | None
    outputs: int
    inputs: int


@dataclass(frozen=True)
class HandedValue:
    """A value that a stage of a pipeline hands on to the next.

    Attributes:
        shape: with -1 in place of the number of tokens.
        dtype: torch's name.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class StageStart:
    """Where a stage begins that is not the first.

    Attributes:
        step: the index of its first step.
        takes: the values of earlier stages that it or a later one reads.
    """

    step: int
    takes: tuple[HandedValue, ...]


@dataclass(frozen=True)
class HiddenProjection:
    """The weights by which a drafter makes what it reads of a model's hidden states (projection.py), by their names.

    Attributes:
        weight: of the product; `norms`: of norms before it; `norm_behind`: of one behind it.
        mask: hidden states that stand for those of a mask; None: masks have none.
    """

    weight: str
    norms: tuple[str, ...] = ()
    eps: float = 0.0
    norm_behind: str | None = None
    mask: str | None = None

    @property
    def weights(self) -> tuple[str, ...]:
        return (self.weight, *self.norms, *(name for name in (self.norm_behind, self.mask) if name is not None))


@dataclass(frozen=True)
class Program:
    """Steps in order, the layers that attend and those with a state, the weights' names, and the value that is the
    logits [S, V]."""

    steps: tuple[Step, ...]
    layers: tuple[LayerSpec, ...]
    weights: tuple[str, ...]
    output: str
    variants: Mapping[str, tuple[PieceVariant, ...]] = field(
        default_factory=dict
    )  # piece → its variants, smallest first
    layer_kernels: Mapping[str, StoredKernels] = field(default_factory=dict)  # layer → its own kernels, if any
    sampling: StoredSamplingPieces | None = None
    decode_loop: StoredDecodeLoopPieces | None = None
    verify: StoredVerifyPieces | None = None
    kernels: Mapping[str, tuple[CudaKernel, ...]] = field(default_factory=dict)  # family → those that it calls
    expert_weights: Mapping[str, ExpertWeight] = field(default_factory=dict)
    counted_experts: tuple[str, ...] = ()  # a weight of each layer whose choices are counted, in order
    quantised_weights: Mapping[str, QuantisedWeight] = field(default_factory=dict)  # by the name of the values
    panels: Mapping[str, int] = field(default_factory=dict)  # weight in panels → bytes of a unit (ops/panels/layout.py)
    state_layers: tuple[StateLayer, ...] = ()
    inputs: tuple[str, ...] = ()  # beside BATCH_INPUTS
    rope: RopeLengths | None = None  # how its RoPE follows the input `rope_lens`, if it does
    further_outputs: tuple[str, ...] = ()  # beside `output`: hidden states that a drafter reads; or of a tower
    projection: HiddenProjection | None = None  # of the input `hidden_states`, if it is made of several layers' ones
    block: DraftBlock | None = None  # of a head that drafts several tokens in one pass
    media: MediaPrograms | None = None
    lora: LoraProgram | None = None
    pooling: PoolingPrograms | None = None  # of a model that pools, whose output is hidden states [T, W]
    stages: tuple[StageStart, ...] = ()  # of a pipeline, the first left out (stages.py)
    cross_layers: tuple[LayerSpec, ...] = ()  # that attend to a source; layer_id: of the layer whose pages they share
    source: SourcePrograms | None = None  # of an encoder-decoder
    images: ImagePrograms | None = None  # of a model whose layers attend to images

    @property
    def every(self) -> tuple[Program, ...]:
        """This program and those for images, adapters and sources, and of its head where it pools, where there are
        some."""
        of_media = () if self.media is None else self.media.programs
        head = () if self.pooling is None or self.pooling.head is None else (self.pooling.head,)
        source = () if self.source is None else (self.source.program,)
        images = () if self.images is None else self.images.programs
        return (self, *of_media, *(() if self.lora is None else self.lora.programs), *head, *source, *images)

    def every_piece_id(self) -> list[str]:
        """All that is compiled, of all programs."""
        return list(dict.fromkeys(piece for program in self.every for piece in program.piece_ids()))

    def every_weight(self) -> list[str]:
        """The names of the weights of all programs, adapters' buffers left out."""
        buffers = {} if self.lora is None else self.lora.layout.shapes()
        names = (name for program in self.every for name in program.weights)
        return list(dict.fromkeys(name for name in names if name not in buffers))

    def every_library(self) -> tuple[CpuLibrary, ...]:
        """The libraries of C++ that the runtime holds compiled, of all programs."""
        return tuple(dict.fromkeys(library for program in self.every for library in program.libraries()))

    def every_panels(self) -> dict[str, int]:
        """The weights of all programs that lie in panels, and the bytes of a unit."""
        return {name: unit for program in self.every for name, unit in program.panels.items()}

    def every_cuda_kernel(self) -> tuple[CudaKernel, ...]:
        """The kernels that the runtime holds compiled by NVRTC, of all programs."""
        return tuple(dict.fromkeys(kernel for program in self.every for kernel in program.cuda_kernels()))

    def piece_ids(self) -> list[str]:
        """All compiled parts of this program.

        These are the steps' pieces, their variants for few tokens, layers' own kernels, and kernels of sampling, of the
        decode loop and of verify steps.
        """
        layers = dict.fromkeys(piece for kernels in self.layer_kernels.values() for piece in kernels.pieces())
        sampling = () if self.sampling is None else self.sampling.piece_ids()
        loop = () if self.decode_loop is None else self.decode_loop.piece_ids()
        verify = () if self.verify is None else self.verify.piece_ids()
        small = (variant.piece for variant in self.all_variants())
        packed = (step.of_texts for step in self.steps if isinstance(step, PackedAttentionStep))
        of_texts = dict.fromkeys(one.piece for one in packed if one is not None)
        return [*self.step_pieces(), *small, *layers, *of_texts, *sampling, *loop, *verify]

    def cuda_kernels(self) -> tuple[CudaKernel, ...]:
        """The kernels that this program calls and NVRTC compiles."""
        variants = (
            variant for kernels in self.layer_kernels.values() for variant in (*kernels.decode, *kernels.verify)
        )
        decodes = dict.fromkeys(kernel for variant in variants for kernel in variant.kernels)
        return (*(kernel for members in self.kernels.values() for kernel in members), *decodes)

    def libraries(self) -> tuple[CpuLibrary, ...]:
        """The libraries of C++ that this program calls."""
        attention = (one.paged for one in self.layer_kernels.values() if one.paged is not None)
        return tuple(dict.fromkeys([*attention, *([PANEL_LINEARS] if self.panels else [])]))

    def kernels_of_layer(self, name: str) -> StoredKernels:
        """The layer's own kernels; none of a layer that has none."""
        return self.layer_kernels.get(name, NO_KERNELS)

    def all_variants(self) -> list[PieceVariant]:
        """The small variants of all pieces."""
        return [variant for variants in self.variants.values() for variant in variants]

    def step_pieces(self) -> list[str]:
        """Distinct pieces that steps call, in order of first use."""
        return list(dict.fromkeys(step.piece for step in self.steps if isinstance(step, PieceStep)))

    def to_json(self) -> dict[str, Any]:
        return {
            "steps": [step_to_json(step) for step in self.steps],
            "layers": [asdict(layer) for layer in self.layers],
            "weights": list(self.weights),
            "output": self.output,
            "variants": {piece: [asdict(variant) for variant in variants] for piece, variants in self.variants.items()},
            "layer_kernels": {layer: kernels.to_json() for layer, kernels in self.layer_kernels.items()},
            "sampling": None if self.sampling is None else asdict(self.sampling),
            "decode_loop": None if self.decode_loop is None else asdict(self.decode_loop),
            "verify": None if self.verify is None else asdict(self.verify),
            "kernels": {name: [kernel.to_json() for kernel in members] for name, members in self.kernels.items()},
            "expert_weights": {name: asdict(weight) for name, weight in self.expert_weights.items()},
            "counted_experts": list(self.counted_experts),
            "quantised_weights": {name: asdict(weight) for name, weight in self.quantised_weights.items()},
            "panels": dict(self.panels),
            "state_layers": [layer.to_json() for layer in self.state_layers],
            "inputs": list(self.inputs),
            "rope": None if self.rope is None else asdict(self.rope),
            "further_outputs": list(self.further_outputs),
            "projection": None if self.projection is None else asdict(self.projection),
            "block": None if self.block is None else asdict(self.block),
            "media": None if self.media is None else self.media.to_json(),
            **({} if self.lora is None else {"lora": self.lora.to_json()}),
            **({} if self.pooling is None else {"pooling": self.pooling.to_json()}),
            **({"stages": [asdict(stage) for stage in self.stages]} if self.stages else {}),
            **({} if not self.cross_layers else {"cross_layers": [asdict(layer) for layer in self.cross_layers]}),
            **({} if self.source is None else {"source": self.source.to_json()}),
            **({} if self.images is None else {"images": self.images.to_json()}),
        }

    @classmethod
    def from_json(cls, data: Any) -> Program:
        """Raises ArtifactError for anything that to_json would not have written."""
        try:
            return cls(
                steps=tuple(step_from_json(step) for step in data["steps"]),
                layers=from_json(tuple[LayerSpec, ...], data["layers"]),
                weights=from_json(tuple[str, ...], data["weights"]),
                output=from_json(str, data["output"]),
                variants=from_json(dict[str, tuple[PieceVariant, ...]], data["variants"]),
                layer_kernels={
                    layer: LayerKernels.from_json(kernels) for layer, kernels in data["layer_kernels"].items()
                },
                sampling=from_json(StoredSamplingPieces | None, data["sampling"]),
                decode_loop=from_json(StoredDecodeLoopPieces | None, data["decode_loop"]),
                verify=from_json(StoredVerifyPieces | None, data["verify"]),
                kernels={
                    name: tuple(family(name).from_json(kernel) for kernel in members)
                    for name, members in data["kernels"].items()
                },
                expert_weights=from_json(dict[str, ExpertWeight], data["expert_weights"]),
                counted_experts=from_json(tuple[str, ...], data["counted_experts"]),
                quantised_weights=from_json(dict[str, QuantisedWeight], data["quantised_weights"]),
                panels=from_json(dict[str, int], data["panels"]),
                state_layers=tuple(map(StateLayer.from_json, data["state_layers"])),
                inputs=from_json(tuple[str, ...], data["inputs"]),
                rope=from_json(RopeLengths | None, data["rope"]),
                further_outputs=from_json(tuple[str, ...], data["further_outputs"]),
                projection=from_json(HiddenProjection | None, data["projection"]),
                block=from_json(DraftBlock | None, data["block"]),
                media=None if data["media"] is None else MediaPrograms.from_json(data["media"]),
                lora=LoraProgram.from_json(data["lora"]) if "lora" in data else None,
                pooling=PoolingPrograms.from_json(data["pooling"]) if "pooling" in data else None,
                stages=from_json(tuple[StageStart, ...], data.get("stages", [])),
                cross_layers=from_json(tuple[LayerSpec, ...], data.get("cross_layers", [])),
                source=SourcePrograms.from_json(data["source"]) if "source" in data else None,
                images=ImagePrograms.from_json(data["images"]) if "images" in data else None,
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ArtifactError(
                f"the program is not one that this version writes ({error}); compile the model again"
            ) from error


@dataclass(frozen=True)
class MediaPrograms:
    """The programs of a model that takes images, beside its program for text.

    Attributes:
        with_features: the text's program, which takes `features` in place of the embeddings of some tokens.
        tower: images → features, or sounds → features of a model that takes these alone.
        facts: what the tower is like.
        sound_tower: sounds → features, of a model that takes both.
    """

    with_features: Program
    tower: Program
    facts: Tower
    sound_tower: Program | None = None

    @property
    def programs(self) -> tuple[Program, ...]:
        """All, in this order."""
        return (self.with_features, self.tower, *(() if self.sound_tower is None else (self.sound_tower,)))

    def to_json(self) -> dict[str, Any]:
        return {
            "programs": [one.to_json() for one in self.programs],
            "facts": tower_to_json(self.facts),
        }

    @classmethod
    def from_json(cls, data: Any) -> MediaPrograms:
        """Raises KeyError, TypeError, ValueError or ArtifactError for anything that to_json would not have written."""
        with_features, tower, *sound_tower = map(Program.from_json, data["programs"])
        return cls(with_features, tower, tower_from_json(data["facts"]), *sound_tower)


@dataclass(frozen=True)
class LoraProgram:
    """The program that serves batches in which some request has an adapter, beside the one for those without.

    Attributes:
        program: takes each token's slot as the input `adapter_slots`, and adapters' buffers among its weights.
        layout: of these buffers.
        with_features: likewise, and as MediaPrograms' one; None of a model that takes no images.
    """

    program: Program
    layout: LoraLayout
    with_features: Program | None = None

    @property
    def programs(self) -> tuple[Program, ...]:
        """Both, as far as there are both."""
        return (self.program, *(() if self.with_features is None else (self.with_features,)))

    def to_json(self) -> dict[str, Any]:
        return {"programs": [one.to_json() for one in self.programs], "layout": asdict(self.layout)}

    @classmethod
    def from_json(cls, data: Any) -> LoraProgram:
        """Raises KeyError, TypeError, ValueError or ArtifactError for anything that to_json would not have written."""
        program, *others = map(Program.from_json, data["programs"])
        return cls(program, from_json(LoraLayout, data["layout"]), *others)


@dataclass(frozen=True)
class PoolingPrograms:
    """The head and the facts of a model that pools, beside its program.

    Attributes:
        facts: what it makes of hidden states.
        head: rows [S, W] → scores of labels, or embeddings; None: it has none.
    """

    facts: PoolingFacts
    head: Program | None = None

    def to_json(self) -> dict[str, Any]:
        return {"facts": asdict(self.facts), "head": None if self.head is None else self.head.to_json()}

    @classmethod
    def from_json(cls, data: Any) -> PoolingPrograms:
        """Raises KeyError, TypeError, ValueError or ArtifactError for anything that to_json would not have written."""
        head = None if data["head"] is None else Program.from_json(data["head"])
        return cls(from_json(PoolingFacts, data["facts"]), head)


@dataclass(frozen=True)
class SourcePrograms:
    """The program of an encoder-decoder's sources, beside its decoder's.

    Attributes:
        facts: what sources are.
        program: packed sources → keys [E, Hk, D] and values [E, Hk, Dv] of each of cross_layers, in order.
    """

    facts: SourceFacts
    program: Program

    def to_json(self) -> dict[str, Any]:
        return {"facts": asdict(self.facts), "program": self.program.to_json()}

    @classmethod
    def from_json(cls, data: Any) -> SourcePrograms:
        """Raises KeyError, TypeError, ValueError or ArtifactError for anything that to_json would not have written."""
        return cls(from_json(SourceFacts, data["facts"]), Program.from_json(data["program"]))


@dataclass(frozen=True)
class ImagePrograms:
    """The programs of a model some of whose layers attend to images, beside its program for text, which has none.

    Attributes:
        text: with these layers, its cross_layers; it takes `source_kinds` [T] int64 (sources/images.py).
        tower: images → keys [E, Hk, D] and values [E, Hk, Dv] of each of these, in order.
        facts: what the tower is like.
    """

    text: Program
    tower: Program
    facts: TileTower

    @property
    def programs(self) -> tuple[Program, ...]:
        """Both, in this order."""
        return self.text, self.tower

    def to_json(self) -> dict[str, Any]:
        return {"programs": [one.to_json() for one in self.programs], "facts": tower_to_json(self.facts)}

    @classmethod
    def from_json(cls, data: Any) -> ImagePrograms:
        """Raises KeyError, TypeError, ValueError or ArtifactError for anything that to_json would not have written."""
        text, tower = map(Program.from_json, data["programs"])
        facts = tower_from_json(data["facts"])
        if not isinstance(facts, TileTower):
            raise ValueError(f"layers attend to images of a {type(facts).__name__}")
        return cls(text, tower, facts)


@dataclass(frozen=True)
class ModelSizes:
    """The figures that the runtime wants to know of a model; layers' own shapes are in the traced graph."""

    num_hidden_layers: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    context_len: int
    is_table_of_positions: bool = False  # context_len is all that it has rows for, and config.json does not say so
    is_sparse_beyond: bool = False  # of longer texts attention reads chosen keys alone, and is not served
