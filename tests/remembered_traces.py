"""Traces that a process remembers: a model that equals one that was traced before gets a copy of its graph.

A trace is most of what it costs to compile a tiny model, and many tests compile the same one with other weights, passes
or options. Tests of the trace itself (tests/model) do without.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:  # conftest.py sets torch's threads before torch is imported
    import torch
    from torch import fx

_FOLDERS = {
    "bench", "check", "checkpoint", "cli", "compiler", "e2e", "engine", "hostile", "passes", "report", "server",
    "store", "structured", "train",
}  # fmt: skip


def remembers(folder: str) -> bool:
    """True if tests of this folder take traces of others."""
    return folder in _FOLDERS


@contextmanager
def remembered_traces(graphs: dict[str, fx.GraphModule]) -> Iterator[None]:
    """Within the context `graphs`, by what decides them, are taken and added to."""
    from torch import fx

    from mllm_compile.model import trace

    def remembering(
        hf_model: Any, module: torch.nn.Module, inputs: Mapping[str, torch.Tensor], device: str
    ) -> fx.GraphModule:
        if type(module) is not trace._FlatTokens:
            return capture(hf_model, module, inputs, device)
        key = _what_decides(hf_model, module, inputs, device)
        if key not in graphs:
            graphs[key] = capture(hf_model, module, inputs, device)
        else:
            trace.fake_copy(hf_model.model, _mode_of(graphs[key]), device)
        return fx.GraphModule(graphs[key], copy.deepcopy(graphs[key].graph))

    capture = trace.capture
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace, "capture", remembering)
        yield


def _what_decides(hf_model: Any, module: torch.nn.Module, inputs: Mapping[str, torch.Tensor], device: str) -> str:
    """The model's code and config, its tensors and which of them are one, and the inputs."""
    model = hf_model.model
    places: dict[int, int] = {}
    tensors = [
        (name, tuple(tensor.shape), str(tensor.dtype), places.setdefault(id(tensor), len(places)))
        for named in (model.named_parameters, model.named_buffers)
        for name, tensor in named(remove_duplicate=False)
    ]
    settings = {name: value for name, value in vars(module).items() if isinstance(value, int | str)}
    config = model.config.to_dict() | {"_name_or_path": "", "transformers_version": ""}
    sizes = {name: (tuple(tensor.shape), str(tensor.dtype)) for name, tensor in inputs.items()}
    implementation = model.config._attn_implementation
    said = (type(model).__qualname__, settings, tensors, sizes, device, implementation, hf_model.hidden_states)
    return repr(said) + json.dumps(config, sort_keys=True, default=str)


def _mode_of(graph: fx.GraphModule) -> Any:
    """The mode of its fake tensors, which the model's own then have as well."""
    return next(node.meta["val"].fake_mode for node in graph.graph.nodes if "weight_name" in node.meta)
