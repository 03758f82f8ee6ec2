"""How far each attention of a model that pools sees, to both sides: Transformers' masks are asked (mask_probe.py).

A model that asks for no mask sees what its calls say.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from mllm_compile.errors import UnsupportedModelError
from mllm_compile.model.mask_probe import ObservedCall, observe_attention
from mllm_compile.model.pooling.disentangled import is_disentangled
from mllm_compile.model.pooling.own_attention import attends_itself
from mllm_compile.model.written_attention.find import KNOWS_ITS_MASK

_FAR = 1 << 21
_POWERS = [1 << exponent for exponent in range(3, 21)]
_DISTANCES = [*range(-6, 7), *(sign * (power + delta) for power in _POWERS for delta in (-1, 0, 1) for sign in (1, -1))]
_QUERIES = [*range(6), *(power + delta for power in _POWERS for delta in (-1, 0, 1))]


def fill_windows(attentions: list[fx.Node], model: Any, inputs: dict[str, Any], device: str) -> list[str]:
    """Gives each traced attention the windows of its mask; returns why that cannot be.

    Args:
        model: the traced model, with real weights.
        inputs: arguments of its forward besides `input_ids`.
    """
    if any(attends_itself(module) or is_disentangled(module) for module in model.modules()):
        return []  # it asks for no mask but padding's, and attends in both directions
    through_interface = [node for node in attentions if KNOWS_ITS_MASK not in node.meta]
    observed = observe_attention(model, device, inputs)
    if len(observed.calls) != len(through_interface):
        return [f"it attends {len(observed.calls)} times, but {len(through_interface)} calls are in the trace"]
    # Attention of a model's own does not say which of the masks it takes: all have to be alike.
    without_mask = [node for node in attentions if node.meta.get(KNOWS_ITS_MASK) is False]
    if without_mask and len({reach for mask in observed.masks if (reach := _reach_or_none(mask))}) > 1:
        return ["it makes several masks, and its attention does not say which of them it takes"]
    of_own = [(node, mask) for node in without_mask for mask in observed.masks]
    reasons = []
    for node, call in [*zip(through_interface, observed.calls, strict=True), *of_own]:
        if call.mask is None and not call.is_altered:
            continue
        try:
            left, right = reach_of(call)
        except UnsupportedModelError as error:
            reasons.append(str(error))
            continue
        node.args = (*node.args[:6], left, right, *node.args[8:])
    return reasons


def reach_of(call: ObservedCall) -> tuple[int, int]:
    """How many tokens a call sees before its own and behind it; -1: all.

    Raises:
        UnsupportedModelError: its mask is no window.
    """
    if call.is_altered:
        raise UnsupportedModelError("the model changes its attention mask")
    try:
        left, right = (_farthest(call, side) for side in (1, -1))
        is_window = _is_window(call, left, right)
    except Exception as error:  # it reads tensors of the sample's size
        raise UnsupportedModelError("its attention mask is no rule on positions alone") from error
    if not is_window:
        raise UnsupportedModelError("its attention mask is no window around each token")
    return left, right


def _reach_or_none(call: ObservedCall) -> tuple[int, int] | None:
    try:
        return reach_of(call)
    except UnsupportedModelError:
        return None


def _farthest(call: ObservedCall, side: int) -> int:
    """The farthest token that is seen before (1) or behind (-1); bisects as if all up to it were."""

    def sees(distance: int) -> bool:
        return bool(call.visible(torch.tensor(2 * _FAR), torch.tensor(2 * _FAR - side * distance)))

    if sees(_FAR):
        return -1
    seen, unseen = 0, _FAR
    while unseen - seen > 1:
        middle = (seen + unseen) // 2
        seen, unseen = (middle, unseen) if sees(middle) else (seen, middle)
    return seen


def _is_window(call: ObservedCall, left: int, right: int) -> bool:
    edges = [sign * (end + delta) for sign, end in ((1, left), (-1, right)) if end >= 0 for delta in (-1, 0, 1)]
    queries = torch.tensor([*_QUERIES, *(abs(edge) + 2 for edge in edges)])[:, None]
    distances = torch.tensor([*_DISTANCES, *edges])[None, :]
    keys = queries - distances
    expected = (distances <= left if left >= 0 else True) & (
        -distances <= right if right >= 0 else distances == distances
    )
    return bool((call.visible(queries, keys) == expected)[keys >= 0].all())
