"""Hidden states as further outputs of a model's program, for drafters that read them.

HFModel.hidden_states names them by place. Number i is the input of layer i (0: the embeddings), and the number of
layers is the last layer's output. LAST is the head's input, behind the final norm. Transformers' `output_hidden_states`
has these values under the same numbers, but for the last layer's output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

import mllm_compile.runtime.ops.trace  # noqa: F401  (defines torch.ops.mllm.hidden_state)
from mllm_compile.config.resolved import LAST_HIDDEN_STATE
from mllm_compile.errors import UnsupportedModelError
from mllm_compile.model.hf_model import HFModel
from mllm_compile.passes.match.nodes import call, is_op

LAST = LAST_HIDDEN_STATE


@contextmanager
def marking_hidden_states(hf_model: HFModel) -> Iterator[None]:
    """Within the context the hidden states that are wanted pass through an op, by which `give_hidden_states` finds
    them.

    Raises:
        UnsupportedModelError: the model's decoder layers are not found, or it has fewer.
    """
    marks_itself = getattr(hf_model.model, "marks_hidden_states", False)
    hooks = [] if marks_itself else [_mark(hf_model, place) for place in hf_model.hidden_states]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def give_hidden_states(gm: fx.GraphModule, hf_model: HFModel) -> None:
    """Makes what was marked further outputs, [1, T, hidden] each, in the order in which they are wanted.

    Raises:
        UnsupportedModelError: a hidden state is not computed, or has another shape.
    """
    if not hf_model.hidden_states:
        return
    size = hf_model.sizes().hidden_size
    found: dict[int, fx.Node] = {}
    for node in [node for node in gm.graph.nodes if is_op(node, "hidden_state")]:
        value: Any
        place: Any
        value, place = node.args
        found[place] = value
        shape = value.meta["val"].shape
        if len(shape) != 3 or shape[0] != 1 or shape[2] != size:
            raise UnsupportedModelError(
                f"hidden states at place {place} are {list(shape)}: expected [1, tokens, {size}], which drafters read"
            )
        node.replace_all_uses_with(value)
        gm.graph.erase_node(node)
        if value.meta["val"].dtype != hf_model.model.dtype:
            with gm.graph.inserting_after(value):
                found[place] = call(gm.graph, torch.Tensor.to, value, hf_model.model.dtype)
    missing = [place for place in hf_model.hidden_states if place not in found]
    if missing:
        raise UnsupportedModelError(f"the trace has no hidden states at place {missing[0]}, which its drafter reads")
    output = gm.graph.output_node()
    values: Any = output.args[0]
    output.args = ((*values, *(found[place] for place in hf_model.hidden_states)),)
    gm.recompile()


def _mark(hf_model: HFModel, place: int) -> Any:
    """Marks the values at a place; returns a handle that ends it."""
    decoder: Any = hf_model.model.get_decoder()
    if place == LAST:
        return decoder.register_forward_hook(_marking_output(place))
    layers = _layers(decoder, hf_model)
    if not 0 <= place <= len(layers):
        raise UnsupportedModelError(
            f"hidden states are wanted at place {place}: expected 0 to {len(layers)}, as the model has {len(layers)} "
            "layers"
        )
    if place == 0:
        return layers[0].register_forward_pre_hook(_mark_input, with_kwargs=True)
    return layers[place - 1].register_forward_hook(_marking_output(place))


def _layers(decoder: torch.nn.Module, hf_model: HFModel) -> torch.nn.ModuleList:
    count = hf_model.sizes().num_hidden_layers
    lists = (one for one in decoder.modules() if isinstance(one, torch.nn.ModuleList) and len(one) == count)
    found = next(lists, None)
    if found is None:
        raise UnsupportedModelError(
            f"no list of {count} layers is found in this {hf_model.model.config.model_type!r} model, so drafters have "
            "no hidden states to read"
        )
    return found


def _mark_input(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
    if args:
        return (torch.ops.mllm.hidden_state(args[0], 0), *args[1:]), kwargs
    return args, kwargs | {"hidden_states": torch.ops.mllm.hidden_state(kwargs["hidden_states"], 0)}


def _marking_output(place: int) -> Callable[[torch.nn.Module, Any, Any], Any]:
    def mark(module: torch.nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, torch.Tensor):
            return torch.ops.mllm.hidden_state(output, place)
        if isinstance(output, tuple):
            return (torch.ops.mllm.hidden_state(output[0], place), *output[1:])
        output.last_hidden_state = torch.ops.mllm.hidden_state(output.last_hidden_state, place)
        return output

    return mark
