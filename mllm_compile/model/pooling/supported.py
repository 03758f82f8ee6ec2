"""Decides whether a traced model that pools will be served right; check/pooling.py then runs what was compiled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from mllm_compile.errors import UnsupportedModelError
from mllm_compile.model.hf_model import HFModel
from mllm_compile.model.pooling.build import body_of
from mllm_compile.model.pooling.trace import arguments_besides_ids
from mllm_compile.model.pooling.windows import fill_windows
from mllm_compile.model.random_weights import materialise
from mllm_compile.model.refusals import refusing
from mllm_compile.model.supported import one_of_a_kind, reasons_in_graph
from mllm_compile.model.trace import Trace
from mllm_compile.passes.match.layer_kinds import is_traced_layer
from mllm_compile.passes.match.nodes import is_op

_RIGHT = 7  # the argument of the op: how far behind a token it sees


def check_texts(trace: Trace, hf_model: HFModel) -> bool:
    """Checks the captured graph, and gives its attention the windows of the model's masks; the model has real weights
    afterwards. True: tokens see those before them alone, in every layer.

    Raises:
        UnsupportedModelError: the traced model would not be served right, with the reasons.
    """
    model_type = hf_model.model.config.model_type
    gm = trace.graph_module
    layers = [node for node in gm.graph.nodes if is_traced_layer(node)]
    with refusing(f"{model_type!r} models cannot be checked"):
        reasons = [] if layers else ["no attention goes through Transformers' attention interface"]
        of_pages = [node for node in layers if not is_op(node, "segment_attention")]
        reasons += [f"{node.name} keeps a state or a cache" for node in of_pages]
        reasons += reasons_in_graph(trace, hf_model, "input_ids")
        reasons += _convolutions(gm)
        if not reasons:
            body = body_of(hf_model.model)
            materialise(hf_model, trace.device)
            reasons = fill_windows(layers, body, arguments_besides_ids(body), trace.device)
    if reasons:
        shown = "; ".join(one_of_a_kind(iter(reasons))[:3])
        raise UnsupportedModelError(
            f"{model_type!r} models would not be served right: {shown}. docs/encoders.md lists what is."
        )
    rights: list[Any] = [node.args[_RIGHT] for node in layers]
    return all(right == 0 for right in rights)


def _convolutions(gm: fx.GraphModule) -> Iterator[str]:
    """Refuses those over neighbouring tokens: a packed text's neighbours are other texts too."""
    for node in gm.graph.nodes:
        weight = node.args[1] if node.target in (torch.conv1d, torch.conv2d) else None
        if weight is not None and set(weight.meta["val"].shape[2:]) != {1}:
            yield f"a convolution mixes neighbouring tokens ({weight.meta.get('weight_name', weight.name)})"
