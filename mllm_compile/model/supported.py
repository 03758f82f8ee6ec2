"""Decides whether a traced model will be served right; a model that will not is refused with the reason.

Tracing proves nothing by itself. A model may bypass the attention interface, hide windows in a mask that was never
built, carry state past the hooks (state_hook.py), or branch on sizes. check_trace reads the graph before any pass, and
asks Transformers which keys each attention call may see. check/program.py then runs the compiled program on small
inputs.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from mllm_compile.errors import UnsupportedModelError
from mllm_compile.model.hf_model import HFModel
from mllm_compile.model.random_weights import materialise
from mllm_compile.model.refusals import refusing
from mllm_compile.model.trace import Trace
from mllm_compile.model.written_attention.find import KNOWS_ITS_MASK
from mllm_compile.model.written_attention.masks import changed_tables
from mllm_compile.passes.match.in_place import InPlaceError, writes_in_place, written_tensor
from mllm_compile.passes.match.layer_kinds import is_traced_layer, refusals_of, traced_name
from mllm_compile.passes.match.nodes import is_attention, is_symbolic

if TYPE_CHECKING:
    from mllm_compile.model.mask_probe import ObservedCall

_OP_NAMESPACES = ("aten", "prims", "mllm")  # torch's own, and ours
_ATTENTION_FUNCTIONS = ("scaled_dot_product", "flex_attention", "flash_attention", "multi_head_attention")


def check_trace(trace: Trace, hf_model: HFModel, observe: Callable[[], list[ObservedCall]] | None = None) -> None:
    """Checks the captured graph, and completes its attention ops with the windows that only masks know of.

    Args:
        observe: gives the calls of its attention, once it has real weights; None: a text is run.

    Raises:
        UnsupportedModelError: the traced model would not be served right, with the reasons.
    """
    model_type = hf_model.model.config.model_type
    with refusing(f"{model_type!r} models cannot be checked"):
        reasons = one_of_a_kind(_reasons(trace, hf_model, observe))
    if reasons:
        shown = "; ".join(reasons[:3]) + (f"; and {len(reasons) - 3} more" if len(reasons) > 3 else "")
        raise UnsupportedModelError(
            f"{model_type!r} models would not be served right: {shown}. docs/models.md lists what is."
        )


def check_tower(trace: Trace, hf_model: HFModel, noun: str = "image", attends_by_itself: bool = False) -> None:
    """Checks the captured graph of a model's tower, which attends within its images alone.

    Args:
        noun: what it takes: image or sound.
        attends_by_itself: within the rows of a batch, by operations of its own.

    Raises:
        UnsupportedModelError: the tower would not be served right, with the reasons.
    """
    layers = [node for node in trace.graph_module.graph.nodes if is_traced_layer(node)]
    reasons = [] if layers or attends_by_itself else ["no attention goes through Transformers' attention interface"]
    reasons += reasons_in_graph(trace, hf_model, "pixel_values", attends_by_itself)
    if reasons:
        raise UnsupportedModelError(
            f"{noun}s of {hf_model.model.config.model_type!r} models would not be served right: "
            f"{'; '.join(one_of_a_kind(iter(reasons))[:3])}. docs/{noun}s.md lists what is."
        )


def reasons_in_graph(trace: Trace, hf_model: HFModel, sized: str, attends_by_itself: bool = False) -> list[str]:
    """Why the graph of a model without pages would not be served right.

    Args:
        sized: the input whose rows its others have too.
        attends_by_itself: it may call torch's attention, within the rows of a batch.
    """
    gm = trace.graph_module
    return [
        *_constant_reasons(gm, hf_model),
        *(() if attends_by_itself else _direct_attention(gm)),
        *_foreign_ops(gm),
        *(reason for node in gm.graph.nodes if is_traced_layer(node) for reason in _layer_reasons(node)),
        *_state_reasons(gm),
        *_size_reasons(trace, _input_size(gm, sized)),
    ]


def one_of_a_kind(reasons: Iterator[str]) -> list[str]:
    """The first of all reasons that differ in numbers alone: layers mostly fail alike."""
    kinds: dict[str, str] = {}
    for reason in reasons:
        kinds.setdefault(re.sub(r"\.?_?\d+", "", reason), reason)
    return list(kinds.values())


def _reasons(trace: Trace, hf_model: HFModel, observe: Callable[[], list[ObservedCall]] | None) -> Iterator[str]:
    gm = trace.graph_module
    layers = [node for node in gm.graph.nodes if is_traced_layer(node)]
    attentions = [node for node in layers if is_attention(node)]
    found_in_graph = [
        *_direct_attention(gm),
        *_foreign_ops(gm),
        *(reason for node in layers for reason in _layer_reasons(node)),
        *_state_reasons(gm),
        *_size_reasons(trace, _input_size(gm, "input_ids")),
    ]
    yield from _output_reasons(gm, 1 + len(hf_model.hidden_states))
    if not layers:
        yield "no attention goes through Transformers' attention interface"
    yield from _constant_reasons(gm, hf_model)
    for table in changed_tables(gm, hf_model.constants):
        yield f"table {table!r} is read past attention"
    yield from found_in_graph
    if attentions and not found_in_graph:
        yield from _fill_windows(attentions, trace, hf_model, observe)


def _direct_attention(gm: fx.GraphModule) -> Iterator[str]:
    for node in gm.graph.nodes:
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        if any(stem in name for stem in _ATTENTION_FUNCTIONS):
            yield f"{node.name} calls {name} directly, past the attention interface ({_where(node)})"


def _foreign_ops(gm: fx.GraphModule) -> Iterator[str]:
    """Refuses ops of other libraries: what compiles pieces does not define them, nor does a process that serves."""
    for node in gm.graph.nodes:
        packet = getattr(node.target, "overloadpacket", node.target)
        namespace, _, name = getattr(packet, "_qualified_op_name", "").partition("::")
        if name and namespace not in _OP_NAMESPACES:
            yield f"{node.name} calls {namespace}::{name}, an op of another library's ({_where(node)})"


def _output_reasons(gm: fx.GraphModule, count: int) -> Iterator[str]:
    """Refuses outputs beyond the `count` that were asked for, logits of some rows first: each is state that the model
    keeps."""
    outputs: Any = next(node for node in gm.graph.nodes if node.op == "output").args[0]
    if len(outputs) != count:
        yield f"it keeps {len(outputs) - count} values from one forward to the next"
        return
    rows = [node for node in gm.graph.nodes if node.meta.get("input_name") == "logits_indices"]
    logits = outputs[0].meta["val"].shape
    if not rows or len(logits) != 2 or logits[0].node.expr != rows[0].meta["val"].shape[0].node.expr:
        yield "it takes no tensor of rows as logits_to_keep"


def _layer_reasons(node: fx.Node) -> Iterator[str]:
    if refusals := refusals_of(node):
        yield f"its {traced_name(node)} passes {refusals} ({_where(node)})"
    sinks = node.args[3] if is_attention(node) else None
    if isinstance(sinks, fx.Node) and "weight_name" not in sinks.meta:
        yield f"its attention sinks are computed, not a weight ({_where(node)})"


def _fill_windows(
    attentions: list[fx.Node],
    trace: Trace,
    hf_model: HFModel,
    observe: Callable[[], list[ObservedCall]] | None,
) -> Iterator[str]:
    """Gives each attention the window of its mask: none was built for the trace, and calls need not repeat it."""
    from mllm_compile.model.mask_probe import Observation, observe_attention

    materialise(hf_model, trace.device)
    observed = observe_attention(hf_model.model, trace.device) if observe is None else Observation(observe(), [])
    through_interface = [node for node in attentions if KNOWS_ITS_MASK not in node.meta]
    if len(observed.calls) != len(through_interface):
        yield f"it attends {len(observed.calls)} times, but {len(through_interface)} calls are in the trace"
        return
    without_mask = [node for node in attentions if node.meta.get(KNOWS_ITS_MASK) is False]
    if without_mask and not observed.masks:
        yield f"its attention is not causal ({_where(without_mask[0])})"
        return
    # Attention of a model's own does not say which of the masks it takes: all have to be alike.
    of_own = [(node, mask) for node in without_mask for mask in observed.masks]
    for node, call in [*zip(through_interface, observed.calls, strict=True), *of_own]:
        said = int(node.args[6])  # type: ignore[arg-type]
        try:
            window_left, chunk = call.reach()
        except UnsupportedModelError as error:
            yield f"{error} ({_where(node)})"
            continue
        if said not in (-1, window_left):
            yield f"its attention call sees {said} tokens back, its mask {window_left} ({_where(node)})"
        node.update_arg(6, window_left)
        if chunk:
            node.args = (*node.args, *(None,) * (9 - len(node.args)), chunk)


def _constant_reasons(gm: fx.GraphModule, hf_model: HFModel) -> Iterator[str]:
    for node in gm.graph.nodes:
        name = node.meta.get("weight_name")
        if node.op == "placeholder" and node.users and name in hf_model.unknown_constants:
            yield f"buffer {name!r} is in no checkpoint, and the model's _init_weights does not fill it"


def _state_reasons(gm: fx.GraphModule) -> Iterator[str]:
    """Refuses writes into an input or a view of one: they would change weights or constants from step to step."""
    inputs = {
        node.meta["val"].untyped_storage()._cdata: node
        for node in gm.graph.nodes
        if node.op == "placeholder" and isinstance(node.meta["val"], torch.Tensor)
    }
    for node in gm.graph.nodes:
        if not writes_in_place(node):
            continue
        try:
            val = written_tensor(node).meta["val"]
        except InPlaceError as error:
            yield f"{error} ({_where(node)})"
            continue
        written = inputs.get(val.untyped_storage()._cdata)
        if written is not None:
            yield f"{node.name} writes into {written.meta.get('weight_name', written.target)} ({_where(node)})"


def _size_reasons(trace: Trace, tokens: Any) -> Iterator[str]:
    """Refuses T×T tensors, sizes that depend on data, and branches on the number of tokens."""
    gm = trace.graph_module
    inputs = [node.meta["val"] for node in gm.graph.nodes if node.meta.get("input_name")]
    known = {dim.node.expr for val in inputs for dim in val.shape if is_symbolic(dim)}
    for node in gm.graph.nodes:
        for dims in _shapes(node.meta.get("val")):
            symbols = {symbol for dim in dims if is_symbolic(dim) for symbol in dim.node.expr.free_symbols}
            if symbols - known:
                yield f"{node.name} has a size that depends on data ({_where(node)})"
            if sum(is_symbolic(dim) and tokens in dim.node.expr.free_symbols for dim in dims) > 1:
                yield f"{node.name} is a tokens × tokens tensor: attention or a mask of its own ({_where(node)})"
        if node.op == "call_function" and node.target is torch.ops.aten._assert_scalar.default:
            yield from _guard_reasons(node, known, trace.max_tokens)


def _guard_reasons(node: fx.Node, known: set[Any], max_tokens: int) -> Iterator[str]:
    """Refuses branches, except on the range of the trace and on equal sizes of equal inputs."""
    condition = node.args[0]
    if not isinstance(condition, fx.Node) or not is_symbolic(condition.meta.get("val")):
        return
    if not condition.meta["val"].node.expr.free_symbols <= known:
        return  # of a size that depends on data, which is a reason of its own
    operands = [arg for arg in condition.args if not isinstance(arg, fx.Node)]
    in_range = (condition.target is operator.ge and operands in ([0], [1])) or (
        condition.target is operator.le and operands == [max_tokens]
    )
    if not in_range and condition.target is not operator.eq:
        yield f"it branches on the number of tokens: {condition.meta['val']}"


def _input_size(gm: fx.GraphModule, name: str) -> Any:
    return next(n.meta["val"].shape[0].node.expr for n in gm.graph.nodes if n.meta.get("input_name") == name)


def _shapes(val: Any) -> Iterator[tuple[Any, ...]]:
    for tensor in val if isinstance(val, tuple | list) else (val,):
        if isinstance(tensor, torch.Tensor):
            yield tuple(tensor.shape)


def _where(node: fx.Node) -> str:
    stack = list(node.meta.get("nn_module_stack", {}).values())
    return stack[-1][0].partition("].model.")[2] or "the model itself" if stack else "the model itself"
