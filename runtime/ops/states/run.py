"""The op of a layer with a state in a compiled program: reads the forward context by the layer's name, as attention
does.

Registered with torch.library's define/impl: calling a `torch.library.custom_op` would import Dynamo and Inductor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mllm_compile.runtime.forward_context import get_forward_context
from mllm_compile.runtime.state.base import StateInputs

_LIBRARY = torch.library.Library("mllm", "FRAGMENT")


# mllm::state_with_output ----------------------------------------------------------------------------------------------
#
# Reads from the forward context: the layer (no_compile_layers), and the batch with its backend (attn_metadata). Writes
# the states of the batch's requests in the backend's pool.
_LIBRARY.define("state_with_output(Tensor[] operands, Tensor(a!) out, str layer_name) -> ()")


def state_with_output(operands: Sequence[torch.Tensor], out: torch.Tensor, layer_name: str) -> None:
    """Take each request of the batch on by its new tokens, from the state that it has.

    Rows past the batch's tokens are padding: they are not computed, and `out` keeps what it had there.

    Args:
        operands: those that the layer has (StateLayer.operands), in order; T may be padded.
        out: [T, *StateLayer.out_shape], written.
        layer_name: key into the forward context.

    Raises:
        RuntimeError: no forward context is set, or it does not know the layer.
    """
    context = get_forward_context()
    metadata: Any = context.attn_metadata.get(layer_name)
    if metadata is None:
        raise RuntimeError(
            f"the forward context has no metadata for layer {layer_name!r}, only for "
            f"{', '.join(context.attn_metadata) or 'none'}"
        )
    layer: Any = context.no_compile_layers[layer_name]
    by_name = dict(zip(layer.operands, operands, strict=True))
    metadata.batch.attn_backend.forward_state(StateInputs(by_name, out, layer, metadata))


_LIBRARY.impl("state_with_output", state_with_output, "CompositeExplicitAutograd")
torch.library.register_fake("mllm::state_with_output", lambda *args: None, lib=_LIBRARY)
