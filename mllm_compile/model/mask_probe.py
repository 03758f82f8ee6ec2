"""Asks Transformers which tokens each attention call of a model may see.

With our attention implementation no mask is built (attention_hook.py), so a model whose windows or chunks live in its
mask alone would lose them silently. Here the model runs once, on two tokens, with an implementation that keeps the mask
*functions* that Transformers makes: f(batch, head, query, key) → bool. They can be asked about any position, also far
past what a small numeric check reaches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import CellType, FunctionType, MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from mllm_compile.errors import UnsupportedModelError
from mllm_compile.model.attention_hook import attention_implementation
from mllm_compile.model.replaced_methods import keeping_all_tokens
from mllm_compile.model.written_attention.indexed import keeping_masks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROBE_IMPLEMENTATION = "mllm_probe"
MaskFunction = Callable[[Any, Any, Any, Any], torch.Tensor]

_SAMPLE_TOKENS = 2
_OF_TEXT: Mapping[str, Any] = MappingProxyType({"use_cache": False})
_POWERS = [1 << exponent for exponent in range(3, 21)]
_QUERIES = [*range(6), *(power + delta for power in _POWERS for delta in (-1, 0, 1))]
_FAR = 1 << 21  # no model's window is longer
_DISTANCES = [*range(-3, 6), *(power + delta for power in _POWERS for delta in (-1, 0, 1))]


class Reach(NamedTuple):
    """The tokens up to its own that a call sees.

    Attributes:
        window_left: as many of them besides the token itself; -1: all.
        chunk: tokens see keys of their own chunk of so many positions; 0: no chunks.
    """

    window_left: int = -1
    chunk: int = 0


@dataclass(frozen=True)
class ObservedCall:
    """One call of the attention interface.

    Attributes:
        mask: the function of the mask that the call was given; None for a call without a mask.
        is_altered: the call got a mask that Transformers' mask functions did not make as it is, or keys that an
            indexer chose, and that are not all.
        device: the model's: a mask may read tensors that are there.
        is_cross: its keys are not of its own tokens.
    """

    mask: MaskFunction | None
    is_altered: bool = False
    device: str = "cpu"
    is_cross: bool = False

    def reach(self) -> Reach:
        """How far back the call sees.

        Raises:
            UnsupportedModelError: what it sees is not that, at any position.
        """
        if self.is_altered:
            raise UnsupportedModelError("the model changes its attention mask")
        if self.mask is None:
            return Reach()
        try:
            chunk = self._chunk()
            reach = Reach(-1 if chunk or self._sees(_FAR) else self._farthest_seen(), chunk)
            is_followed = self._follows(reach)
        except Exception as error:  # it reads tensors of the sample's size
            raise UnsupportedModelError("its attention mask is no rule on positions alone") from error
        if not is_followed:
            raise UnsupportedModelError("its attention mask is neither causal nor a causal window, nor chunks")
        return reach

    def _sees(self, distance: int) -> bool:
        return bool(self.visible(torch.tensor(_FAR), torch.tensor(_FAR - distance)))

    def _farthest_seen(self) -> int:
        """Bisects as if it saw all up to a distance; the caller then checks that it does."""
        seen, unseen = 0, _FAR
        while unseen - seen > 1:
            middle = (seen + unseen) // 2
            seen, unseen = (middle, unseen) if self._sees(middle) else (seen, middle)
        return seen

    def _chunk(self) -> int:
        """The first token that does not see the one before it, 0 if all do; a window of the token alone is no chunk."""
        tokens = torch.arange(1, _FAR)
        hidden = tokens[~self.visible(tokens, tokens - 1)]
        return int(hidden[0]) if len(hidden) and int(hidden[0]) > 1 else 0

    def _follows(self, reach: Reach) -> bool:
        window_left, chunk = reach
        ends = [window_left] if window_left >= 0 else []
        ends += [chunk, 2 * chunk, 5 * chunk] if chunk else []
        edges = [end + delta for end in ends for delta in (-1, 0, 1)]
        queries = torch.tensor([*_QUERIES, *edges, *(edge + 2 for edge in edges)])[:, None]
        distances = torch.tensor([*_DISTANCES, *edges])[None, :]
        keys = queries - distances
        expected = (distances >= 0) & ((distances <= window_left) if window_left >= 0 else True)
        if chunk:
            expected = expected & (queries // chunk == keys // chunk)
        return bool((self.visible(queries, keys) == expected)[keys >= 0].all())

    def visible(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """True where tokens at `queries` see those at `keys`, by the mask; positions of shapes that broadcast."""
        zero = torch.tensor(0, device=self.device)
        visible = self.mask(zero, zero, queries.to(self.device), keys.to(self.device))  # type: ignore[misc]
        return visible.cpu()


class Observation(NamedTuple):
    """Calls and masks of one forward of a model.

    Attributes:
        calls: of the attention interface, in order.
        masks: what a call with each of the masks sees that Transformers made.
    """

    calls: list[ObservedCall]
    masks: list[ObservedCall]


def observe_attention(
    model: PreTrainedModel, device: str, inputs: Mapping[str, Any] = _OF_TEXT, asks_ids: bool = True
) -> Observation:
    """Runs `model`, whose weights are real (any will do), and returns its attention calls and masks.

    Args:
        inputs: of its forward, besides `input_ids`.
        asks_ids: it is told these.

    Raises:
        UnsupportedModelError: the model cannot run with another attention implementation.
    """
    observer = _Observer(device)
    AttentionInterface.register(PROBE_IMPLEMENTATION, observer.attend)
    AttentionMaskInterface.register(PROBE_IMPLEMENTATION, observer.make_mask)
    input_ids = torch.zeros(1, _SAMPLE_TOKENS, dtype=torch.int64, device=device)
    whole, probed = keeping_all_tokens(model), attention_implementation(model, PROBE_IMPLEMENTATION)
    with probed, whole, keeping_masks(model), torch.no_grad():
        model(**({"input_ids": input_ids} if asks_ids else {}), **inputs)
    return Observation(observer.calls, [ObservedCall(mask, device=device) for mask in observer.masks])


class _Observer:
    def __init__(self, device: str) -> None:
        self.device = device
        self.calls: list[ObservedCall] = []
        self.masks: list[MaskFunction] = []
        self._functions: dict[int, MaskFunction] = {}
        self._masks: list[torch.Tensor] = []  # kept alive: ids of collected tensors are reused

    def make_mask(self, q_length: int, kv_length: int, mask_function: MaskFunction, **kwargs: Any) -> torch.Tensor:
        mask = torch.ones(1, 1, q_length, kv_length, dtype=torch.bool, device=kwargs.get("device"))
        function = _of_any_length(mask_function, kv_length)
        self._masks.append(mask)
        self._functions[id(mask)] = function
        self.masks.append(function)
        return mask

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        function = None if attention_mask is None else self._functions.get(id(attention_mask))
        of_blocks = kwargs.get("block_indices")
        chooses_all = _chooses_all(kwargs.get("indices"), key) and (of_blocks is None or _takes_all(of_blocks, module))
        is_altered = (attention_mask is not None and function is None) or not chooses_all
        self.calls.append(ObservedCall(function, is_altered, self.device, key.shape[2] != query.shape[2]))
        batch, num_heads, num_tokens, _ = query.shape
        return value.new_zeros(batch, num_tokens, num_heads, value.shape[3]), None


def _chooses_all(indices: torch.Tensor | None, key: torch.Tensor) -> bool:
    """True if an indexer's choice [1, T, K] is every key [1, Hk, T, D] for each token, or there is no indexer."""
    if indices is None:
        return True
    every = torch.arange(key.shape[2], device=key.device)
    return indices.shape[-1] == len(every) and bool((indices.sort(-1).values == every).all())


def _takes_all(blocks: torch.Tensor, module: Any) -> bool:
    """True if an indexer's choice of blocks [1, H, T, K], -1 of none, is every one of each token's past."""
    num_past = torch.arange(blocks.shape[2], device=blocks.device) // module.indexer.block_size + 1
    return bool(((blocks >= 0).sum(-1) == num_past).all())


def _of_any_length(function: Any, num_tokens: int) -> Any:
    """The mask function for texts of any length.

    It may read tensors with one number for all `num_tokens` of the sample, such as a text's ids of blocks of images.
    Further tokens then read that number too.
    """
    cells = function.__closure__ if isinstance(function, FunctionType) else None
    if not cells:
        return function
    contents = tuple(CellType(_of_any_content(cell.cell_contents, num_tokens)) for cell in cells)
    return FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, contents)


def _of_any_content(content: Any, num_tokens: int) -> Any:
    if isinstance(content, tuple):
        return tuple(_of_any_content(one, num_tokens) for one in content)
    if isinstance(content, torch.Tensor) and content.shape == (1, num_tokens) and content.unique().numel() == 1:
        return content[:, :1].expand(1, 2 * _FAR)  # which takes no memory
    return _of_any_length(content, num_tokens)
