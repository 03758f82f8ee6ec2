"""Makes a graph functional: a write into a tensor becomes a new tensor, which all later readers get.

A pass that drops, moves or copies a node looks at its readers. With `y = x * 1.0; y.mul_(2)` that is not enough: x in
the place of y would be written to. So passes get graphs where no call of a trace changes its arguments.

The trace's fake tensors say which values share memory. A write into a view (`q[..., :8].copy_(k)`) makes a new base,
through the views between them; other views of the base are taken again when they are read.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from mllm_compile.passes.match.nodes import call, is_symbolic, recompute_value

_aten: Any = torch.ops.aten

_OPERATORS = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
    operator.ifloordiv: operator.floordiv,
    operator.ipow: operator.pow,
    operator.imod: operator.mod,
    operator.iand: operator.and_,
    operator.ior: operator.or_,
    operator.ixor: operator.xor,
    operator.ilshift: operator.lshift,
    operator.irshift: operator.rshift,
}
_OPERATOR_METHODS = {f"__{target.__name__}__": twin for target, twin in _OPERATORS.items()}

# Methods whose name without the underscore is another operation, or that change a tensor's form and not its values.
_WITHOUT_TWIN = frozenset(
    {"bernoulli_", "resize_", "resize_as_", "set_", "detach_", "requires_grad_", "as_strided_"}
    | {"t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_"}
)
_MODULES = (torch, torch.nn.functional, torch._C._nn)  # where a function `relu_` has its twin `relu`
_SAME_ORDER = ("view", "reshape", "unsqueeze", "squeeze", "flatten", "unflatten", "view_as", "reshape_as")
_SAME_TENSOR = ("contiguous", "to", "type_as", "float", "half", "bfloat16", "double", "detach", "alias", "dropout")
_TWO_DIMS = ("transpose", "swapaxes", "swapdims")
_PARTS = ("split", "chunk")


class InPlaceError(ValueError):
    """A graph writes into a tensor in a way that cannot be made functional here."""


def writes_in_place(node: fx.Node) -> bool:
    """True if a call of a trace changes a tensor that it is given: `x.mul_(2)`, `x += y`, `x[0] = y`, `out=`,
    `inplace=True`. Ops of ours that write declare it in their schema and are no calls of a trace."""
    target = node.target
    if node.op == "call_method":
        return _has_mark(str(target)) or target in _OPERATOR_METHODS or node.kwargs.get("out") is not None
    if node.op != "call_function":
        return False
    if target in _OPERATORS or target is operator.setitem:
        return isinstance(_val(node.args[0]), torch.Tensor)
    if isinstance(target, torch._ops.OpOverload):
        return target.namespace == "aten" and target._schema.is_mutable
    is_named_so = _has_mark(getattr(target, "__name__", "")) and getattr(target, "__module__", "") != "_operator"
    return is_named_so or node.kwargs.get("out") is not None or _is_told_in_place(node) or _scales_its_table(node)


def written_tensor(node: fx.Node) -> fx.Node:
    """The tensor that a call which `writes_in_place` changes.

    Raises:
        InPlaceError: it is not one tensor.
    """
    out = node.kwargs.get("out")
    if _scales_its_table(node):
        out = node.args[1] if len(node.args) > 1 else node.kwargs.get("weight")
    target = out if out is not None else node.args[0] if node.args else node.kwargs.get("input")
    if not isinstance(target, fx.Node) or not isinstance(_val(target), torch.Tensor):
        raise InPlaceError(f"{_shown(node)} writes into something that is not one tensor")
    return target


def make_functional(gm: fx.GraphModule) -> int:
    """Rewrites every write into a tensor; returns how many there were.

    Raises:
        InPlaceError: a write into an input, or in a way that is not known here; with the node.
    """
    if not any(map(writes_in_place, gm.graph.nodes)):
        return 0
    memory = _Memory(gm.graph)
    writes = []
    for node in list(gm.graph.nodes):
        is_write = writes_in_place(node)
        inputs = node.all_input_nodes
        with gm.graph.inserting_before(node):
            written = written_tensor(node) if is_write else None
            node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), memory.read)
            if written is None:
                memory.note(node, inputs)
            else:
                memory.write(node, written)
                writes.append(node)
    for node in reversed(writes):
        gm.graph.erase_node(node)
    return len(writes)


@dataclass
class _Tensor:
    """A tensor of the original graph, and its current value.

    Attributes:
        node: the call that gave it first; those that write into it give it again.
        root: the node that made the memory; its own for one that made some.
        parent: the node that it is a view of, which its call reads as `operand`; None for a root.
        value: the node's value after `version` writes to the root.
    """

    node: fx.Node
    root: fx.Node
    parent: fx.Node | None
    operand: fx.Node | None
    value: fx.Node
    version: int = 0


class _Memory:
    """Follows a graph in its order: which nodes share memory, and which node has a tensor's value by now."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._tensors: dict[fx.Node, _Tensor] = {}
        self._versions: dict[fx.Node, int] = {}  # by root: how often it has been written to
        self._root_of_storage: dict[int, fx.Node] = {}
        self._unclear: set[fx.Node] = set()  # roots whose memory others have that are no views of them

    def note(self, node: fx.Node, inputs: list[fx.Node]) -> None:
        """Learns of a node that writes nothing. `inputs` are what it read as the graph was."""
        storages = _storages(_val(node))
        if _is_dropout_of_nothing(node):  # torch gives its input, where fake tensors say a copy
            storages |= _storages(_val(inputs[0]))
        parents = [one for one in inputs if storages & _storages(_val(one))]
        if _is_tuple(node) and len(parents) > 1:  # views of several tensors: whose is which?
            self._unclear |= {self._tensors[one].root for one in parents}
        parent = parents[0] if parents else None
        if parent is not None and not (_is_tuple(parent) and self._tensors[parent].parent is None):
            root = self._tensors[parent].root
            known = _Tensor(node, root, parent, self.read(parent), node, self._versions.get(root, 0))
        else:  # new memory, or one of several tensors that are
            known = _Tensor(node, node, None, None, node)
            for storage in storages:
                other = self._root_of_storage.get(storage, parent)
                if other is not parent and other is not None:
                    self._unclear |= {node, other}
                    if self._versions.get(other):
                        raise InPlaceError(f"{node.name} has memory of {other.name}, which was written to")
                self._root_of_storage[storage] = node
        self._tensors[node] = known

    def read(self, node: fx.Node) -> fx.Node:
        """The current value of `node`; a view of a tensor that was written to is taken again, at this place."""
        known = self._tensors[node]
        version = self._versions.get(known.root, 0)
        if known.version != version and known.parent is not None:
            now = self.read(known.parent)
            known.value = self._graph.node_copy(known.node, lambda arg: now if arg is known.operand else arg)
            recompute_value(known.value)
            known.version = version
        return known.value

    def write(self, node: fx.Node, written: fx.Node) -> None:
        """Puts what `node` writes into `written` in the place of all that shares its memory."""
        root = self._tensors[written].root
        if root.op in ("placeholder", "get_attr") or root in self._unclear:
            raise InPlaceError(f"{_shown(node)} writes into {root.name}, which others have as well")
        new = _computed(self._graph, node, self.read(written))
        new.meta.update({key: value for key, value in node.meta.items() if key not in ("val", "example_value")})
        # Upwards: what a view is of is the old one with the new value in the view's place.
        view, made = self._tensors[written].node, [(written, new)]
        while (base := self._tensors[view].parent) is not None:
            if not _is_tuple(base) and _val(view).dtype != _val(base).dtype:
                raise InPlaceError(f"{_shown(node)} writes into {view.name}, the bits of {base.name} as another type")
            if _is_tuple(base):
                whole: Any = self._tensors[base].parent
                new = _part_replaced(self._graph, view, base, self.read(whole), new)
                base = whole
            else:
                new = _replaced(self._graph, view, self.read(base), new)
            made.append((base, new))
            view = self._tensors[base].node
        self._versions[root] = self._versions.get(root, 0) + 1
        for one, value in made:
            self._tensors[one].value, self._tensors[one].version = value, self._versions[root]
        self._tensors[node] = self._tensors[written]  # it gives what it was given


# Values computed in place of a write ----------------------------------------------------------------------------------


def _computed(graph: fx.Graph, node: fx.Node, old: fx.Node) -> fx.Node:
    """The written tensor's new value; the arguments of `node` are up to date."""
    target = node.target
    if target is operator.setitem:
        return _with_item(graph, node, old, node.args[1], node.args[2])
    kwargs = {name: value for name, value in node.kwargs.items() if name not in ("out", "inplace")}
    args = node.args
    if target in ("copy_", "fill_") and len(args) == 2 and not kwargs:
        return _filled(graph, old, args[1])
    if target == "zero_":
        return call(graph, torch.zeros_like, old)
    twins: Any = _OPERATORS | _OPERATOR_METHODS
    if target in twins:
        target = twins[target]
    elif isinstance(target, str):
        if _has_mark(target):
            if target in _WITHOUT_TWIN or not hasattr(torch.Tensor, target[:-1]):
                raise InPlaceError(f"{_shown(node)} has no operation that computes the same anew")
            target = target[:-1]
    elif isinstance(target, torch._ops.OpOverload):
        raise InPlaceError(f"{_shown(node)} has no operation that computes the same anew")
    elif _has_mark(target.__name__):
        functions = [getattr(module, target.__name__[:-1], None) for module in _MODULES if _is_of(module, target)]
        if not functions or functions[0] is None:
            raise InPlaceError(f"{_shown(node)} has no operation that computes the same anew")
        target = functions[0]
    elif _is_told_in_place(node):
        place = _inplace_place(target)
        args = args if place is None else args[:place] + args[place + 1 :]
    if isinstance(target, str):
        new = graph.call_method(target, args, kwargs)
        recompute_value(new)
    else:
        new = call(graph, target, *args, **kwargs)
    if not _has_shape_of(new, old):
        raise InPlaceError(f"{_shown(node)} changes the shape of what it writes into")
    if _val(new).dtype != _val(old).dtype:
        new = _method(graph, "to", new, _val(old).dtype)
    return _with_strides_of(graph, new, old)


def _filled(graph: fx.Graph, old: fx.Node, value: Any) -> fx.Node:
    """`value` in the form of `old`."""
    if not isinstance(value, fx.Node):
        return call(graph, torch.full_like, old, value)
    if not isinstance(_val(value), torch.Tensor):
        raise InPlaceError(f"{old.name} is filled with {value.name}, which is a size")
    for _ in range(_val(value).dim() - _val(old).dim()):  # x[0] = y takes a y with dimensions of one ahead
        value = call(graph, torch.squeeze, value, 0)
    if _has_shape_of(value, old) and _val(value).dtype == _val(old).dtype:
        return _with_strides_of(graph, value, old)
    return call(graph, _aten.copy.default, old, value)


def _with_strides_of(graph: fx.Graph, new: fx.Node, old: fx.Node) -> fx.Node:
    """`new`, contiguous if `old` is and it is not: readers of the one may view it as the other could be viewed."""
    made: Any = torch.empty_like(_val(old), memory_format=torch.contiguous_format)
    contiguous, ours, theirs = ([str(step) for step in val.stride()] for val in (made, _val(new), _val(old)))
    return _method(graph, "contiguous", new) if theirs == contiguous != ours else new


def _with_item(graph: fx.Graph, node: fx.Node, old: fx.Node, index: Any, value: Any) -> fx.Node:
    """`old` after `old[index] = value`."""
    indices = index if isinstance(index, tuple) else (index,)
    if not any(isinstance(_val(one), torch.Tensor) for one in indices):
        steps = _steps(indices, _val(old).dim(), node)
        values = _taken(graph, old, steps)
        return _put_back(graph, steps, values, _filled(graph, values[-1], value))
    if not all(isinstance(_val(one), torch.Tensor) or one == slice(None) for one in indices):
        raise InPlaceError(f"{_shown(node)} writes to places of a kind that is not known here")
    if not isinstance(_val(value), torch.Tensor):
        value = call(graph, _aten.new_full.default, old, [], value)
    elif _val(value).dtype != _val(old).dtype:
        value = _method(graph, "to", value, _val(old).dtype)
    places = [one if isinstance(one, fx.Node) else None for one in indices]
    return call(graph, _aten.index_put.default, old, places, value)


# Views ----------------------------------------------------------------------------------------------------------------


def _replaced(graph: fx.Graph, view: fx.Node, base: fx.Node, new: fx.Node) -> fx.Node:
    """`base` with `new` where `view` is of it."""
    name = view.target if isinstance(view.target, str) else getattr(view.target, "__name__", "")
    if name == "getitem":
        index: Any = view.args[1]
        steps = _steps(index if isinstance(index, tuple) else (index,), _val(base).dim(), view)
        return _put_back(graph, steps, _taken(graph, base, steps), new)
    if name in _SAME_TENSOR:
        return new
    if name in _SAME_ORDER:
        return _method(graph, "reshape_as", new, base)
    if name in _TWO_DIMS and not view.kwargs:
        return call(graph, torch.transpose, new, *view.args[1:])
    if name == "permute" and not view.kwargs:
        dims = view.args[1] if isinstance(view.args[1], tuple | list) else view.args[1:]
        places = [int(dim) % len(dims) for dim in dims]  # type: ignore[arg-type]
        return call(graph, torch.permute, new, [places.index(place) for place in range(len(places))])
    raise InPlaceError(f"a write into {view.name}, a view by {name!r}, is not known here")


def _part_replaced(graph: fx.Graph, part: fx.Node, parts: fx.Node, whole: fx.Node, new: fx.Node) -> fx.Node:
    """`whole` with `new` in the place of one of the `parts` that it was split into."""
    name = parts.target if isinstance(parts.target, str) else getattr(parts.target, "__name__", "")
    if name not in _PARTS:
        raise InPlaceError(f"a write into {part.name}, a view by {name!r}, is not known here")
    dim: Any = parts.args[2] if len(parts.args) > 2 else parts.kwargs.get("dim", 0)
    number: Any = part.args[1]
    sizes = [one.shape[dim] for one in (*_val(parts)[:number], _val(new))]
    if any(map(is_symbolic, sizes)):
        raise InPlaceError(f"a write into {part.name}, a part of a size that depends on the tokens, is not known here")
    return call(graph, _aten.slice_scatter.default, whole, new, dim, sum(sizes[:-1]), sum(sizes))


@dataclass(frozen=True)
class _Step:
    """One dimension of an index: an op that takes its part, and the one that puts a new part back."""

    take: Callable[..., Any]
    put: Callable[..., Any]
    arguments: tuple[Any, ...]


def _steps(index: tuple[Any, ...], num_dims: int, node: fx.Node) -> list[_Step]:
    """A basic index (numbers, slices, an ellipsis) as steps of one dimension each."""
    if any(one is None or isinstance(one, bool | list) or isinstance(_val(one), torch.Tensor) for one in index):
        raise InPlaceError(f"{_shown(node)} has an index of a kind that is not known here")
    steps, dim = [], 0
    for one in index:
        if one is Ellipsis:
            dim += num_dims - (len(index) - 1)
        elif isinstance(one, slice):
            if one != slice(None):
                step = 1 if one.step is None else one.step
                bounds = (dim, 0 if one.start is None else one.start, one.stop, step)
                steps.append(_Step(_aten.slice.Tensor, _aten.slice_scatter.default, bounds))
            dim += 1
        else:
            steps.append(_Step(_aten.select.int, _aten.select_scatter.default, (dim, one)))
    return steps


def _taken(graph: fx.Graph, base: fx.Node, steps: list[_Step]) -> list[fx.Node]:
    """The base, then the result of each step's `take`, each applied to the one before."""
    values = [base]
    for step in steps:
        values.append(call(graph, step.take, values[-1], *step.arguments))
    return values


def _put_back(graph: fx.Graph, steps: list[_Step], values: list[fx.Node], new: fx.Node) -> fx.Node:
    for step, value in zip(reversed(steps), reversed(values[:-1]), strict=True):
        new = call(graph, step.put, value, new, *step.arguments)
    return new


# Small questions ------------------------------------------------------------------------------------------------------


def _val(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, fx.Node) else None


def _storages(val: Any) -> set[int]:
    tensors = val if isinstance(val, tuple | list) else (val,)
    return {one.untyped_storage()._cdata for one in tensors if isinstance(one, torch.Tensor)}


def _is_tuple(node: fx.Node) -> bool:
    return isinstance(_val(node), tuple | list)


def _has_shape_of(one: fx.Node, other: fx.Node) -> bool:
    """Compares sizes by name: a step's sizes must not be asked whether they are equal."""
    return [str(size) for size in _val(one).shape] == [str(size) for size in _val(other).shape]


def _has_mark(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


def _is_dropout_of_nothing(node: fx.Node) -> bool:
    """True for a dropout that drops nothing, as all do outside of training."""
    if node.op != "call_function" or "dropout" not in getattr(node.target, "__name__", ""):
        return False
    training = node.args[2] if len(node.args) > 2 else node.kwargs.get("training", node.kwargs.get("train", True))
    probability = node.args[1] if len(node.args) > 1 else node.kwargs.get("p", 0.5)
    return not training or bool(probability == 0)


def _is_of(module: Any, function: Callable[..., Any]) -> bool:
    return getattr(module, function.__name__, None) is function


def _scales_its_table(node: fx.Node) -> bool:
    """True for an embedding that shortens the rows that it looks up, in its table: `max_norm`."""
    if node.target not in (functional.embedding, functional.embedding_bag):
        return False
    return (node.args[3] if len(node.args) > 3 else node.kwargs.get("max_norm")) is not None


def _is_told_in_place(node: fx.Node) -> bool:
    if node.kwargs.get("inplace"):
        return True
    place = _inplace_place(node.target) if callable(node.target) else None
    return place is not None and len(node.args) > place and bool(node.args[place])


@cache
def _inplace_place(function: Callable[..., Any]) -> int | None:
    """The place of the argument `inplace` of a function of torch.nn.functional; None where it has none."""
    if getattr(function, "__module__", "") != "torch.nn.functional":
        return None
    names = list(inspect.signature(function).parameters)
    return names.index("inplace") if "inplace" in names else None


def _method(graph: fx.Graph, name: str, *args: Any) -> fx.Node:
    node = graph.call_method(name, args)
    recompute_value(node)
    return node


def _shown(node: fx.Node) -> str:
    return f"{node.name} ({node.target if isinstance(node.target, str) else getattr(node.target, '__name__', '')})"
