"""Traces a model once, whole, into one FX graph whose sizes are T tokens and S logit rows.

torch.compile with a capturing backend and fullgraph; parameters are fake tensors, token ids and positions tiny real
ones. T and S are *unbacked* symbols: a branch on either raises instead of being baked, so a finished trace proves
that the graph holds for every size. The graph has the placeholders `input_ids` [T], `positions` [T],
`logits_indices` [S], and one per weight, `meta["weight_name"]` its fully-qualified name.
"""

from __future__ import annotations

import copy
import inspect
import operator
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from mllm_compile.errors import UnsupportedModelError
from mllm_compile.model.experts_hook import check_choices, experts_as_ops
from mllm_compile.model.hf_model import HFModel, fake_copy
from mllm_compile.model.hidden_states import give_hidden_states, marking_hidden_states
from mllm_compile.model.positions_hook import as_positions, reading_positions, restore_positions
from mllm_compile.model.refusals import first_line, refusing
from mllm_compile.model.replaced_methods import keeping_all_tokens, norms_by_formula
from mllm_compile.model.rope_hook import as_request_lengths, choosing_rope, restore_request_lengths
from mllm_compile.model.states.state_hook import states_as_ops
from mllm_compile.model.written_attention.chosen import attend_to_chosen_keys, scoring_keys
from mllm_compile.model.written_attention.find import find_attention
from mllm_compile.model.written_attention.indexed import choosing_every_key
from mllm_compile.model.written_attention.masks import tables_for_any_step, with_a_mask_if_needed

_SAMPLE_TOKENS = 48  # any size does: the symbols are unbacked
_SAMPLE_ROWS = 3
_MAX_CAUSE = 300  # Dynamo repeats whole graphs


@dataclass(frozen=True)
class Trace:
    """One traced model, or a part of one.

    Attributes:
        graph_module: the captured graph; every node has `meta["val"]`.
        max_tokens: the largest T, or other size of its inputs, that the graph was traced for.
        device: the device that it was traced for.
    """

    graph_module: fx.GraphModule
    max_tokens: int
    device: str


def promise_sizes(max_tokens: int, *tensors: torch.Tensor) -> None:
    """Tells a trace, within it, that these have 1 to max_tokens rows."""
    for one in tensors:
        torch._check(one.shape[0] >= 1)
        torch._check(one.shape[0] <= max_tokens)


class _FlatTokens(torch.nn.Module):
    """The model as a function of flat tokens: no cache, no mask, logits of chosen rows only."""

    def __init__(self, model: torch.nn.Module, max_tokens: int, position_offset: int) -> None:
        super().__init__()
        self.model = model
        self.max_tokens = max_tokens
        self.position_offset = position_offset
        arguments = inspect.signature(model.forward).parameters
        self.takes_rows = "logits_to_keep" in arguments
        self.takes_kinds = "token_type_ids" in arguments and _has_default_kinds(model)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, logits_indices: torch.Tensor) -> torch.Tensor:
        promise_sizes(self.max_tokens, input_ids, logits_indices)
        position_ids = positions[None] + self.position_offset if self.position_offset else positions[None]
        said: dict[str, Any] = {"input_ids": input_ids[None], "position_ids": position_ids, "use_cache": False}
        if self.takes_kinds:
            said["token_type_ids"] = torch.zeros_like(said["input_ids"])
        logits: torch.Tensor
        if self.takes_rows:
            logits = self.model(**said, logits_to_keep=logits_indices).logits[0]
        else:
            logits = self.model(**said).logits[0].index_select(0, logits_indices)
        return logits


class _FlatHead(torch.nn.Module):
    """A head that drafts, as a function of flat tokens and the hidden states of a model."""

    def __init__(self, model: torch.nn.Module, max_tokens: int) -> None:
        super().__init__()
        self.model, self.max_tokens = model, max_tokens

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        logits_indices: torch.Tensor,
        hidden_states: torch.Tensor,
    ) -> torch.Tensor:
        promise_sizes(self.max_tokens, input_ids, logits_indices)
        said: dict[str, Any] = {"position_ids": positions[None], "hidden_states": hidden_states[None]}
        logits: torch.Tensor = self.model(input_ids[None], **said, logits_to_keep=logits_indices).logits[0]
        return logits


def _has_default_kinds(model: torch.nn.Module) -> bool:
    """True if the model reads kinds of tokens, 0, in a table where it is told none: a step may have more tokens."""
    tables = [buffer for name, buffer in model.named_buffers() if name.rpartition(".")[2] == "token_type_ids"]
    return any(table.dim() == 2 and table.shape[0] == 1 for table in tables)


def trace_model(hf_model: HFModel, device: str, max_tokens: int) -> Trace:
    """Traces `hf_model` for `device`; its parameters are fake tensors afterwards.

    Raises:
        UnsupportedModelError: the model cannot be traced as one graph, or branches on the number of tokens.
    """
    inputs, model = token_inputs(device), hf_model.model
    flat: torch.nn.Module = _FlatTokens(model, max_tokens, hf_model.position_offset)
    if "hidden_states" in inspect.signature(model.forward).parameters:
        size = (_SAMPLE_TOKENS, hf_model.sizes().hidden_size)
        inputs["hidden_states"] = sized("T", size, model.dtype, device)
        flat = _FlatHead(model, max_tokens)
    return trace_text(hf_model, flat, inputs, device, max_tokens)


def token_inputs(device: str) -> dict[str, torch.Tensor]:
    """The inputs of a trace that every text has."""
    return {
        "input_ids": sized("T", (_SAMPLE_TOKENS,), torch.int64, device),
        "positions": sized("T", (_SAMPLE_TOKENS,), torch.int64, device),
        "logits_indices": sized("S", (_SAMPLE_ROWS,), torch.int64, device),
    }


def sized(symbol: str, shape: tuple[int, ...], dtype: torch.dtype, device: str, dim: int = 0) -> torch.Tensor:
    """A sample input, zeros, whose dimension `dim` is of any size; dimensions of one symbol are equal."""
    from torch._dynamo.decorators import mark_unbacked

    sample = torch.zeros(shape, dtype=dtype, device=device)
    mark_unbacked(sample, dim, shape_id=symbol)
    return sample


def trace_text(
    hf_model: HFModel, flat: torch.nn.Module, inputs: Mapping[str, torch.Tensor], device: str, max_tokens: int
) -> Trace:
    """Traces `flat`, the model as a function of flat tokens and of what else is among `inputs` (by argument).

    Raises:
        UnsupportedModelError: as trace_model.
    """
    with refusing(f"{hf_model.model.config.model_type!r} models cannot be traced"):
        check_choices(hf_model.text_config)
        try:
            choosing = scoring_keys if hf_model.chooses_keys else choosing_every_key
            hooks = experts_as_ops(hf_model.model), reading_positions(hf_model.model, as_positions)
            rope, keys = choosing_rope(hf_model.model, as_request_lengths), choosing(hf_model.model)
            methods = norms_by_formula(hf_model.model), keeping_all_tokens(hf_model.model)
            of_layers = states_as_ops(hf_model.model), marking_hidden_states(hf_model)
            tables = tables_for_any_step(hf_model.model, hf_model.constants, max_tokens)
            with tables, hooks[0], hooks[1], rope, keys, of_layers[0], of_layers[1], methods[0], methods[1]:
                captured = with_a_mask_if_needed(lambda: capture(hf_model, flat, inputs, device))
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"{error}{_unserved_layers(hf_model.text_config)}") from error
        _drop_outputs_of_weights(captured)
        give_hidden_states(captured, hf_model)
        _fold_numbers(captured)
        if hf_model.chooses_keys and hf_model.choice is not None:
            attend_to_chosen_keys(captured, hf_model.choice)
        keep_host_values(captured, hf_model, device)
        restore_positions(captured)
        restore_request_lengths(captured)
        find_attention(captured, hf_model.constants, min(hf_model.context_len, max_tokens))
    return Trace(captured, max_tokens, device)


def capture(
    hf_model: HFModel, module: torch.nn.Module, inputs: Mapping[str, torch.Tensor], device: str
) -> fx.GraphModule:
    """The graph of `module`, which runs the model or a part of it, of `inputs` (by argument); the model's parameters
    are fake tensors afterwards.

    Raises:
        UnsupportedModelError: it cannot be traced as one graph.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    weight_names = fake_copy(hf_model.model, mode, device)
    captured = _capture(module, inputs)
    _name_placeholders(captured, weight_names, inputs)
    return captured


def _drop_outputs_of_weights(gm: fx.GraphModule) -> None:
    """Drops outputs that are made of weights alone, except the first: a buffer that a model has moved is no state."""
    output = next(node for node in gm.graph.nodes if node.op == "output")
    of_inputs: set[fx.Node] = set()
    for node in gm.graph.nodes:
        is_input = node.op == "placeholder" and "weight_name" not in node.meta
        if is_input or not of_inputs.isdisjoint(node.all_input_nodes):
            of_inputs.add(node)
    values: Any = output.args[0]
    kept = (values[0], *(value for value in values[1:] if value in of_inputs))
    if len(kept) < len(values):
        output.args = (kept,)
        gm.recompile()


def _fold_numbers(gm: fx.GraphModule) -> None:
    """Puts numbers in the place of NumPy's functions of numbers, which Dynamo writes down as tensors' operations."""
    from torch._dynamo.utils import numpy_to_tensor_wrapper

    for node in list(gm.graph.nodes):
        if isinstance(node.target, numpy_to_tensor_wrapper) and not node.all_input_nodes:
            value = node.target(*node.args, **node.kwargs)
            if isinstance(value, torch.Tensor) and value.dim() == 0:
                node.replace_all_uses_with(value.item())
                gm.graph.erase_node(node)
    gm.recompile()


def keep_host_values(gm: fx.GraphModule, hf_model: HFModel, device: str) -> None:
    """Makes constants of what a model computes on the host from no input, and then takes to the device: a step that
    copies from the host is not captured. PhiMoE makes its frequencies so in every forward.

    Args:
        gm: a trace for `device`.
        hf_model: gets the values as buffers that no checkpoint holds, computed on the host as the model does.
    """
    if torch.device(device).type == "cpu":
        return
    values: dict[fx.Node, torch.Tensor] = {}
    for node in gm.graph.nodes:
        val = node.meta.get("val")
        is_of_host = isinstance(val, torch.Tensor) and val.device.type == "cpu" and node.op != "placeholder"
        if is_of_host and all(one in values for one in node.all_input_nodes):
            values[node] = _compute(node, values)
    # A number is an argument of kernels, as it is.
    kept = [node for node, value in values.items() if value.dim() and any(user not in values for user in node.users)]
    for number, node in enumerate(kept):
        name = f"host_value_{number}"
        hf_model.constants[name] = values[node]
        hf_model.model.register_buffer(name, _on_device(node.meta["val"], device), persistent=False)
        last_placeholder = [one for one in gm.graph.nodes if one.op == "placeholder"][-1]
        with gm.graph.inserting_after(last_placeholder):
            constant = gm.graph.placeholder(name)
        constant.meta |= {"weight_name": name, "val": hf_model.model.get_buffer(name)}
        node.replace_all_uses_with(constant, lambda user: user not in values)
    for node in reversed(values):
        if not node.users:
            gm.graph.erase_node(node)
    gm.recompile()


def _compute(node: fx.Node, values: Mapping[fx.Node, torch.Tensor]) -> torch.Tensor:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda one: values[one])
    target: Any = node.target
    out: torch.Tensor
    if node.op == "call_method":
        out = getattr(args[0], str(target))(*args[1:], **kwargs)
    else:
        out = target(*args, **kwargs)
    return out


def _on_device(val: torch.Tensor, device: str) -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensor

    if not isinstance(val, FakeTensor):
        return torch.empty_like(val, device=device)
    with val.fake_mode:
        return torch.empty_like(val, device=device)


class _Captured(Exception):
    """Ends the capture: the graph is whole, and nothing else is wanted of Dynamo."""


def _capture(module: torch.nn.Module, inputs: Mapping[str, torch.Tensor]) -> fx.GraphModule:
    import torch._dynamo

    captured: list[tuple[fx.GraphModule, list[Any]]] = []

    def capturing_backend(graph_module: fx.GraphModule, example_inputs: list[Any]) -> Any:
        # A copy of its nodes: torch 2.15 clears a trace that ended in an exception.
        kept = fx.GraphModule(graph_module, copy.deepcopy(graph_module.graph))
        captured.append((kept, list(example_inputs)))
        raise _Captured  # or Dynamo would write guards, and run the graph on fake weights: an eighth of its time

    torch._dynamo.reset_code_caches()  # not reset, which imports half of Inductor to forget CUDA graphs
    try:
        with torch.no_grad(), torch._dynamo.config.patch(capture_scalar_outputs=True):
            torch.compile(module, backend=capturing_backend, fullgraph=True)(**inputs)
    except Exception as error:
        if not captured:
            raise UnsupportedModelError(f"the model cannot be traced as one graph: {_reason(error)}") from error
    finally:
        torch._dynamo.reset_code_caches()
    graph_module, example_inputs = captured[0]
    placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    for node, example in zip(placeholders, example_inputs, strict=True):
        node.meta["example_input"] = example
    return graph_module


def _name_placeholders(
    graph_module: fx.GraphModule, weight_names: dict[int, str], input_names: Collection[str]
) -> None:
    """Gives placeholders their public names and every node `meta["val"]` (Dynamo calls it example_value)."""
    for node in graph_module.graph.nodes:
        if "example_value" in node.meta:
            node.meta["val"] = node.meta.pop("example_value")
        elif node.op == "call_function" and node.target is operator.setitem:
            node.meta["val"] = None  # it writes, and gives nothing
        if node.op != "placeholder":
            continue
        example = node.meta.pop("example_input")
        if isinstance(example, torch.SymInt):
            continue
        weight_name = weight_names.get(id(example))
        if weight_name is not None:
            node.meta["weight_name"] = weight_name
            continue
        stem = node.name.removeprefix("l_").rstrip("_")
        if stem not in input_names:
            raise UnsupportedModelError(
                f"the trace has an input of unknown origin, {node.name!r}: not a weight by identity"
            )
        node.meta["input_name"] = stem


def _unserved_layers(config: Any) -> str:
    """Names recurrent and sparse layers as a hint: those that are not served fail in many ways."""
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    return (
        f". Its config names layers of kind {', '.join(sorted(kinds))}, some of which are not served: "
        "docs/lab/models.md says what they would take"
        if kinds
        else ""
    )


def _reason(error: BaseException) -> str:
    """The cause that a Dynamo error names, and its place in the model's code."""
    text = str(error)
    cause = _cause(text)[:_MAX_CAUSE] or first_line(error)[:_MAX_CAUSE]
    frames = [(Path(path).name, line) for path, line in re.findall(r'File "([^"]+)", line (\d+), in \w+', text)]
    in_model = [frame for frame in frames if frame[0].startswith("modeling")] or frames
    return f"{cause} ({in_model[-1][0]}:{in_model[-1][1]})" if in_model else cause


def _cause(text: str) -> str:
    undecidable = r"Could not (?:guard on|extract specialized integer from) data-dependent expression (.+?) \(unhinted"
    if branch := re.search(undecidable, text):
        of_tokens = re.search(r"\bu0\b", branch[1])
        return f"it branches on {'the number of tokens' if of_tokens else 'data'}: {branch[1]}"
    for raised in (r"got (\w+Error\(.+\))", r"raised exception (\w+\(.+\))"):
        if found := re.search(raised, text):
            return found[1]
    explanation = re.search(r"^ *Explanation: (\S.+)$", text, re.MULTILINE)
    return explanation[1] if explanation else ""
