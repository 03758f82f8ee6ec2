"""The hook into rotary embeddings that follow the length of a text (`dynamic`, `longrope`): each token gets the
frequencies of its own request.

Transformers computes frequencies for a whole batch, by its longest text. Within the hook each token is rotated by the
frequencies for a length of its own: what Transformers computes for the request alone (runtime/schedule/rope_lengths.py
says which). The embedding's own forward stays. It takes one set of frequencies for all tokens. So it gets one
frequency, 1, and a position for each angle; its answers are then arranged as it would arrange n frequencies.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

import mllm_compile.runtime.ops.trace  # noqa: F401  (defines torch.ops.mllm.request_lengths)
from mllm_compile.errors import UnsupportedModelError
from mllm_compile.model.positions_hook import add_input, as_rows
from mllm_compile.model.replaced_methods import with_forwards
from mllm_compile.passes.match.nodes import is_op
from mllm_compile.runtime.schedule.rope_lengths import RopeLengths

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Positions [1, T] → lengths [1, T] that each token's frequencies are at least for.
Lengths = Callable[[torch.Tensor], torch.Tensor]

INPUT = "rope_lens"
_ORIGINAL_LENGTH = "original_max_position_embeddings"
_SCALES = ("short_mscale", "long_mscale")


@dataclass(frozen=True)
class _Following:
    """The frequencies of one kind of layers of an embedding. Frequencies of short texts, and the inputs of the
    frequencies of long ones, are buffers of the module: no checkpoint has them, and Transformers knows nothing of them.

    Attributes:
        prefix: of the names of the embedding's buffers.
        lengths: as of the model.
        growth: (theta, factor) of `dynamic`; None for `longrope`.
        scales: factors of cosines and sines in short and in long texts, where these differ; then frequencies do not.
        arrangements: as _arrangements gives them.
    """

    prefix: str
    lengths: RopeLengths
    growth: tuple[float, float] | None
    scales: tuple[float, float] | None = None
    arrangements: tuple[str, ...] = ()

    @property
    def short(self) -> str:
        return f"{self.prefix}inv_freq_of_short_texts"

    @property
    def long(self) -> str:
        """Frequencies [n], or with `growth` the exponents of theta [n]."""
        return f"{self.prefix}inv_freq_of_long_texts"

    def frequencies(self, module: torch.nn.Module, lens: torch.Tensor) -> torch.Tensor:
        """[T, n] for lengths [T], by Transformers' formulas, one operation for one of theirs."""
        short, long = getattr(module, self.short), getattr(module, self.long)
        boundary = self.lengths.boundary
        if self.growth is not None:
            theta, factor = self.growth
            dim = 2 * long.shape[0]
            base = theta * ((factor * lens.clamp(min=boundary) / boundary) - (factor - 1)) ** (dim / (dim - 2))
            long = 1.0 / (base[:, None] ** long)
        return torch.where(lens[:, None] > boundary, long, short)

    def scale(self, lens: torch.Tensor) -> torch.Tensor | None:
        """Factors [T] of cosines and sines for lengths [T]; None: the embedding knows its own."""
        if self.scales is None:
            return None
        short, long = self.scales
        return torch.where(lens > self.lengths.boundary, long, short)


def follow_rope(model: PreTrainedModel) -> tuple[RopeLengths | None, dict[str, torch.Tensor]]:
    """Gives the embeddings of `model` that follow the length of a text the buffers that `choosing_rope` reads.

    Returns:
        How the model's RoPE follows that length (None: it does not), and the buffers' values on the CPU, by name.

    Raises:
        UnsupportedModelError: it cannot be chosen for each token.
    """
    constants: dict[str, torch.Tensor] = {}
    found: set[RopeLengths] = set()
    for name, module in model.named_modules():
        for kind, layer_type in _kinds_of(module):
            following, values = _follow(model, module, kind, layer_type)
            following = replace(following, arrangements=_arrangements(module, following, values, kind, layer_type))
            found.add(following.lengths)
            vars(module).setdefault(_NOTED, {})[layer_type] = following
            like = next(buffer for buffer in module.buffers())
            for buffer, value in values.items():
                module.register_buffer(buffer, value.to(like.device), persistent=False)
                constants[f"{name}.{buffer}" if name else buffer] = value
    if len(found) > 1:
        raise _refusal("dynamic or longrope", "its layers differ in the length of short texts")
    return next(iter(found), None), constants


_NOTED = "_mllm_following"  # an embedding's attribute: its _Following by kind of layers


@contextmanager
def choosing_rope(model: torch.nn.Module, lengths: Lengths) -> Iterator[None]:
    """Within the context tokens are rotated by the frequencies for `lengths` of their positions, or for the tokens up
    to themselves where these are more."""
    hooked: list[Any] = [module for module in model.modules() if _NOTED in vars(module)]
    with with_forwards({module: _forward_choosing(module, lengths) for module in hooked}):
        yield


def as_request_lengths(positions: torch.Tensor) -> torch.Tensor:
    """Stands for the input `rope_lens` in a trace: an op that restore_request_lengths replaces."""
    lengths: torch.Tensor = torch.ops.mllm.request_lengths(positions)
    return lengths


def restore_request_lengths(gm: fx.GraphModule) -> None:
    """Makes what as_request_lengths has left behind the input `rope_lens` [T]."""
    nodes = [node for node in gm.graph.nodes if is_op(node, "request_lengths")]
    if not nodes:
        return
    given = add_input(gm, INPUT, nodes[0])
    for node in nodes:
        with gm.graph.inserting_before(node):
            node.replace_all_uses_with(as_rows(gm.graph, given, node.meta["val"]))
        gm.graph.erase_node(node)
    gm.recompile()


def _kinds_of(module: Any) -> list[tuple[str, str | None]]:
    """The kinds of RoPE of an embedding that follow lengths, and the kind of layers of each; None: all layers."""
    said = getattr(module, "rope_type", None)
    of_layers = said if isinstance(said, dict) else {None: said}
    return [
        (kind, layer) for layer, kind in of_layers.items() if kind == "longrope" or (kind and "dynamic" in str(kind))
    ]


def _follow(
    model: PreTrainedModel, module: Any, kind: str, layer_type: str | None
) -> tuple[_Following, dict[str, torch.Tensor]]:
    """Finds how the embedding's frequencies follow lengths, and the values of its buffers."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config, of_layer = module.config, {} if layer_type is None else {"layer_type": layer_type}
    init: Any = ROPE_INIT_FUNCTIONS[kind]
    with torch.device("cpu"):
        short, _ = init(config, "cpu", **of_layer)
        parameters = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
        prefix = "" if layer_type is None else f"{layer_type}_"
        if kind == "longrope" and all(name in parameters for name in _SCALES):
            # Of Phi-3.5-MoE, whose forward takes the frequencies of short texts for all.
            lengths = RopeLengths(parameters[_ORIGINAL_LENGTH], False, _recomputes(model))
            scales = tuple(float(parameters[name]) for name in _SCALES)
            following = _Following(prefix, lengths, None, scales)  # type: ignore[arg-type]
            return following, {following.short: short, following.long: short.clone()}
        if kind == "longrope":
            boundary = parameters[_ORIGINAL_LENGTH]
            lengths = RopeLengths(boundary, False, _recomputes(model))
            following = _Following(prefix, lengths, None)
            long, _ = init(config, "cpu", seq_len=boundary + 1, **of_layer)
        else:
            lengths = RopeLengths(config.max_position_embeddings, True, False)
            following = _Following(prefix, lengths, (float(parameters["rope_theta"]), float(parameters["factor"])))
            dim = 2 * short.shape[0]
            long = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
        values = {following.short: short, following.long: long}
        boundary = lengths.boundary
        for length in (boundary, boundary + 1, 3 * boundary + 7):
            theirs, _ = init(config, "cpu", seq_len=torch.tensor(length) if following.growth else length, **of_layer)
            ours = following.frequencies(SimpleNamespace(**values), torch.tensor([length]))[0]  # type: ignore[arg-type]
            if not torch.allclose(ours, theirs.float(), rtol=1e-5, atol=0.0):
                raise _refusal(kind, f"for {length} tokens its frequencies differ from the known formula")
    return following, values


def _recomputes(model: PreTrainedModel) -> bool:
    """True if the model's generate computes a text anew that grows beyond the boundary."""
    of_class: Any = type(model)
    prepare = inspect.unwrap(of_class.prepare_inputs_for_generation)
    return _ORIGINAL_LENGTH in prepare.__code__.co_names


def _arrangements(
    module: Any, following: _Following, values: dict[str, torch.Tensor], kind: str, layer_type: str | None
) -> tuple[str, ...]:
    """How each of the forward's answers, cosines and sines mostly, arranges n angles (_ARRANGED)."""
    own_names = inspect.unwrap(type(module).forward).__code__.co_names
    read = sorted({"config", "rope_type", "rope_init_fn"} & set(own_names))
    if read and following.scales is None:
        raise _refusal(kind, f"{type(module).__name__}.forward reads {', '.join(read)}")
    positions, frequencies = torch.tensor([[3, 5, 11]]), values[following.short]
    x = torch.zeros(1, 3, 1)
    found = []
    try:
        with torch.device("cpu"):
            embedding = _Embedding.of(module)
            if following.scales is not None:
                _check_scales(module, embedding, following, frequencies)
            theirs = _run(embedding, following.prefix, frequencies, x, positions, layer_type)
            of_angles = _of_angles(embedding, following.prefix, positions[..., None] * frequencies, x, layer_type)
        for own, one in zip(theirs, of_angles, strict=True):
            names = [name for name, arrange in _ARRANGED.items() if _is_close(arrange(one), own)]
            found.append(names[0])
    except Exception as error:
        raise _refusal(kind, f"{type(module).__name__}.forward gives no cosine and sine of each angle") from error
    return tuple(found)


def _check_scales(module: Any, embedding: _Embedding, following: _Following, frequencies: torch.Tensor) -> None:
    """Raises ValueError if the module's own forward does not give scaled cosines and sines of these frequencies."""
    x, boundary = torch.zeros(1, 2, 1), following.lengths.boundary
    for last in (boundary - 1, boundary, 2 * boundary):
        positions = torch.tensor([[1, last]])
        theirs = embedding.forward(module, x, positions)
        scale = following.scale(torch.tensor([last + 1, last + 1]))
        ours = _run(embedding, following.prefix, frequencies, x, positions, None, scale)
        if not all(_is_close(one, other) for one, other in zip(ours, theirs, strict=True)):
            raise ValueError(f"for {last + 1} tokens cosines and sines are not scaled as the config says")


# An embedding's arrangement of an answer for each angle [.., n].
_ARRANGED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "halves": lambda one: torch.cat((one, one), -1),
    "pairs": lambda one: one.repeat_interleave(2, -1),
    "once": lambda one: one,
}


def _is_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, atol=1e-6)


class _StandsForEmbedding:
    """Has the attributes of an embedding that its forward reads; one that asks for frequencies gets them with a factor
    of cosines and sines."""

    def __init__(
        self, attributes: dict[str, Any], frequencies_name: str, frequencies: torch.Tensor, scale: torch.Tensor | None
    ) -> None:
        for name, value in attributes.items():
            setattr(self, name, value)
        setattr(self, frequencies_name, frequencies)
        self.config = _OfDefaultRope()
        self.rope_init_fn = lambda config, *args: (frequencies, 1.0 if scale is None else scale[None, :, None])


class _OfDefaultRope:
    """Stands for a config whose RoPE follows nothing."""

    def __init__(self) -> None:
        self.rope_parameters = {"rope_type": "default"}


@dataclass(frozen=True)
class _Embedding:
    """An embedding's own forward, and the numbers and texts that it may read of it: found ahead of a trace."""

    forward: Callable[..., Any]
    attributes: dict[str, Any]

    @classmethod
    def of(cls, module: torch.nn.Module) -> _Embedding:
        plain = {name: value for name, value in vars(module).items() if isinstance(value, int | float | str)}
        return cls(inspect.unwrap(type(module).forward), plain)


def _run(
    embedding: _Embedding,
    prefix: str,
    frequencies: torch.Tensor,
    x: torch.Tensor,
    positions: torch.Tensor,
    layer_type: str | None,
    scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """The answers of the embedding's own forward with other frequencies [n], and factors [T], for positions [1, T]."""
    stands_for: Any = _StandsForEmbedding(embedding.attributes, f"{prefix}inv_freq", frequencies, scale)
    own = embedding.forward
    answer = own(stands_for, x, positions) if layer_type is None else own(stands_for, x, positions, layer_type)
    return answer if isinstance(answer, tuple) else (answer,)


def _of_angles(
    embedding: _Embedding,
    prefix: str,
    angles: torch.Tensor,
    x: torch.Tensor,
    layer_type: str | None,
    scale: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """The forward's answers [1, T, n] for angles [1, T, n], with factors [T]."""
    one = torch.ones(1, device=angles.device)
    of_each = None if scale is None else scale[:, None].expand(angles.shape[1:]).flatten()
    answers = _run(embedding, prefix, one, x, angles.flatten(1), layer_type, of_each)
    return [answer[..., 0].view(angles.shape) for answer in answers]


def _forward_choosing(module: Any, lengths: Lengths) -> Callable[..., Any]:
    embedding, noted = _Embedding.of(module), getattr(module, _NOTED)

    def forward(x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None) -> Any:
        following = noted.get(layer_type)
        if following is None:
            return embedding.forward(module, x, position_ids, layer_type)
        lens = torch.maximum(lengths(position_ids), position_ids + 1)
        angles = position_ids[..., None].float() * following.frequencies(module, lens[0])
        answers = _of_angles(embedding, following.prefix, angles, x, layer_type, following.scale(lens[0]))
        arranged = [_ARRANGED[name](one) for name, one in zip(following.arrangements, answers, strict=True)]
        return tuple(arranged) if len(arranged) > 1 else arranged[0]

    return forward


def _refusal(rope_type: str, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"rope_type {rope_type!r} follows the length of a text, and here its frequencies cannot be chosen for each "
        f"request: {why}. Set a static rope_type in the model's config.json."
    )
