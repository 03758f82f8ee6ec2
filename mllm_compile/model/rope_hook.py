"""The hook into rotary embeddings that follow the length of a text (`dynamic`, `longrope`): each token gets the
frequencies of its own request.

Transformers computes frequencies for a whole batch, by its longest text. Within the hook each token is rotated by the
frequencies for a length of its own: what Transformers computes for the request alone (runtime/schedule/rope_lengths.py
says which). The embedding's own forward stays: it is given frequencies [T, n] in place of [n].
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

import mllm_compile.runtime.ops.trace  # noqa: F401  (defines torch.ops.mllm.request_lengths)
from mllm_compile.errors import UnsupportedModelError
from mllm_compile.model.positions_hook import add_input, as_rows
from mllm_compile.passes.match.nodes import is_op
from mllm_compile.runtime.schedule.rope_lengths import RopeLengths

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Positions [1, T] → lengths [1, T] that each token's frequencies are at least for.
Lengths = Callable[[torch.Tensor], torch.Tensor]

INPUT = "rope_lens"
_ORIGINAL_LENGTH = "original_max_position_embeddings"


@dataclass(frozen=True)
class _Following:
    """The frequencies of one kind of layers of an embedding. Those of short texts, and what it takes to make those of
    long ones, are buffers of the module: no checkpoint has them, and Transformers knows nothing of them.

    Attributes:
        prefix: of the names of the embedding's buffers.
        lengths: as of the model.
        growth: (theta, factor) of `dynamic`; None for `longrope`.
    """

    prefix: str
    lengths: RopeLengths
    growth: tuple[float, float] | None

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
            _check_forward(module, following, values, kind, layer_type)
            found.add(following.lengths)
            vars(module).setdefault(_NOTED, {})[layer_type] = following
            like = next(buffer for buffer in module.buffers())
            for buffer, value in values.items():
                module.register_buffer(buffer, value.to(like.device), persistent=False)
                constants[f"{name}.{buffer}" if name else buffer] = value
    if len(found) > 1:
        raise _refusal("dynamic or longrope", "its layers differ in the length up to which texts are short")
    return next(iter(found), None), constants


_NOTED = "_mllm_following"  # an embedding's attribute: its _Following by kind of layers


@contextmanager
def choosing_rope(model: torch.nn.Module, lengths: Lengths) -> Iterator[None]:
    """Within the context tokens are rotated by the frequencies for `lengths` of their positions, or for the tokens up
    to themselves where these are more."""
    hooked: list[Any] = [module for module in model.modules() if _NOTED in vars(module)]
    for module in hooked:
        module.forward = _forward_choosing(module, lengths)
    try:
        yield
    finally:
        for module in hooked:
            del module.forward


def as_request_lengths(positions: torch.Tensor) -> torch.Tensor:
    """Stands for the input `rope_lens` in a trace: an op that settle_rope takes out again."""
    return torch.ops.mllm.request_lengths(positions)


def settle_rope(gm: fx.GraphModule) -> None:
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
                raise _refusal(kind, f"for {length} tokens its frequencies are not those of the known formula")
    return following, values


def _recomputes(model: PreTrainedModel) -> bool:
    """True if the model's generate computes a text anew that grows beyond the boundary."""
    of_class: Any = type(model)
    prepare = inspect.unwrap(of_class.prepare_inputs_for_generation)
    return _ORIGINAL_LENGTH in prepare.__code__.co_names


def _check_forward(
    module: Any, following: _Following, values: dict[str, torch.Tensor], kind: str, layer_type: str | None
) -> None:
    """Checks that the embedding's forward does for frequencies of each token what it does for those of one text."""
    own_names = inspect.unwrap(type(module).forward).__code__.co_names
    if read := sorted({"config", "rope_type", "rope_init_fn"} & set(own_names)):
        raise _refusal(kind, f"{type(module).__name__}.forward reads {', '.join(read)}")
    boundary = following.lengths.boundary
    positions, lens = torch.tensor([[3, 5, 11]]), torch.tensor([boundary, boundary + 9, 2 * boundary])
    holder: Any = SimpleNamespace(**values)
    rows, x = following.frequencies(holder, lens), torch.zeros(1, 3, 1)
    try:
        with torch.device("cpu"):
            ours = _rotation(module, following, rows, x, positions, layer_type)
            alone = [_rotation(module, following, row, x, positions, layer_type) for row in rows]
        for index, own in enumerate(ours):
            theirs = [one[index][:, token] for token, one in enumerate(alone)]
            if not torch.allclose(own, torch.stack(theirs, 1), atol=1e-6):
                raise ValueError("it mixes tokens")
    except Exception as error:
        raise _refusal(
            kind, f"{type(module).__name__}.forward takes no frequencies of its own for each token ({error})"
        ) from error


class _StandsForEmbedding:
    """Has the attributes of an embedding that its forward reads."""

    def __init__(self, attributes: dict[str, Any]) -> None:
        for name, value in attributes.items():
            setattr(self, name, value)


def _rotation(
    module: Any,
    following: _Following,
    frequencies: torch.Tensor,
    x: torch.Tensor,
    positions: torch.Tensor,
    layer_type: str | None,
) -> tuple[torch.Tensor, ...]:
    """The embedding's own forward with other frequencies, [n] or [T, n]: as a tuple, cosines and sines mostly."""
    plain = {name: value for name, value in vars(module).items() if isinstance(value, int | float | str)}
    stands_for: Any = _StandsForEmbedding(plain | {f"{following.prefix}inv_freq": frequencies})
    own = inspect.unwrap(type(module).forward)
    rotation = own(stands_for, x, positions) if layer_type is None else own(stands_for, x, positions, layer_type)
    return rotation if isinstance(rotation, tuple) else (rotation,)


def _forward_choosing(module: Any, lengths: Lengths) -> Callable[..., Any]:
    own, noted = inspect.unwrap(type(module).forward), getattr(module, _NOTED)

    def forward(x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None) -> Any:
        following = noted.get(layer_type)
        if following is None:
            return own(module, x, position_ids, layer_type)
        lens = torch.maximum(lengths(position_ids), position_ids + 1)
        rotation = _rotation(module, following, following.frequencies(module, lens[0]), x, position_ids, layer_type)
        return rotation if len(rotation) > 1 else rotation[0]

    return forward


def _refusal(rope_type: str, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"rope_type {rope_type!r} follows the length of a text, and here its frequencies cannot be chosen for each "
        f"request: {why}. Set a static rope_type in the model's config.json."
    )
