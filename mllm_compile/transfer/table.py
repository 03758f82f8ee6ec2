"""Reads prime-rl's table of tensors, `{dtype: [(name, torch.Size, numel)]}`, from the opcodes of its pickle.

Nothing is unpickled: the opcodes and names below are all that is understood, and no object of theirs is made.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

from mllm_compile.errors import WeightUpdateError

MOST_BYTES = 64 << 20  # of a table
_MOST_OPCODES = 1 << 22
MOST_DIMS = 16
DTYPES = (
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "int32", "int16", "int8",
    "uint8", "bool",
)  # fmt: skip


class Announced(NamedTuple):
    """A tensor that follows."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class _Global(NamedTuple):
    name: str


def read_table(data: bytes) -> list[tuple[str, list[Announced]]]:
    """The tensors of a table by dtype, in its order.

    Raises:
        WeightUpdateError: it is malformed, or holds anything but names, sizes and dtypes.
    """
    if len(data) > MOST_BYTES:
        raise WeightUpdateError(f"the table has {len(data):,} bytes; expected at most {MOST_BYTES:,}")
    try:
        table = _Reader().read(data)
        return [(dtype.name, [_announced(dtype, *row) for row in rows]) for dtype, rows in table.items()]
    except WeightUpdateError:
        raise
    except Exception as error:  # of any malformed one: the opcodes are a stranger's
        raise WeightUpdateError(
            f"the table is no pickle of dtypes, names and sizes ({type(error).__name__}: {str(error)[:100]})"
        ) from None


def _announced(dtype: Any, name: Any, shape: Any, count: Any) -> Announced:
    is_shape = isinstance(shape, list) and len(shape) <= MOST_DIMS and all(type(one) is int for one in shape)
    if not isinstance(dtype, _Global) or dtype.name not in DTYPES or not isinstance(name, str) or not is_shape:
        raise WeightUpdateError("the table has a row that is no (name, Size, numel) of a dtype")
    if type(count) is not int or any(one < 0 for one in shape) or count != prod(shape):
        raise WeightUpdateError(
            f"the table has {name[:200]!r} with sizes {shape}; expected none below 0, and a number of values that is "
            "their product"
        )
    return Announced(name, dtype.name, tuple(shape))


class _Reader:
    """The stack machine of pickle, as far as such a table needs it."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._actions: dict[str, Callable[[Any], None]] = {
            **dict.fromkeys(("PROTO", "FRAME"), lambda _: None),
            "MEMOIZE": lambda _: self._memo.__setitem__(len(self._memo), self._stack[-1]),
            **dict.fromkeys(("BINPUT", "LONG_BINPUT"), lambda index: self._memo.__setitem__(index, self._stack[-1])),
            **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda index: self._stack.append(self._memo[index])),
            "EMPTY_DICT": lambda _: self._stack.append({}),
            "EMPTY_LIST": lambda _: self._stack.append([]),
            "EMPTY_TUPLE": lambda _: self._stack.append(()),
            "MARK": lambda _: self._marks.append(len(self._stack)),
            **dict.fromkeys(("SHORT_BINUNICODE", "BINUNICODE"), self._stack.append),
            **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1"), self._stack.append),
            "STACK_GLOBAL": lambda _: self._name(self._stack.pop(-2), self._stack.pop()),
            "GLOBAL": lambda names: self._name(*names.split(" ")),
            "TUPLE1": lambda _: self._tuple(1),
            "TUPLE2": lambda _: self._tuple(2),
            "TUPLE3": lambda _: self._tuple(3),
            "TUPLE": lambda _: self._tuple(len(self._stack) - self._marks.pop()),
            "REDUCE": lambda _: self._reduce(),
            "APPEND": lambda _: self._stack[-2].append(self._stack.pop()),
            "APPENDS": lambda _: self._appends(),
            "SETITEM": lambda _: self._items(len(self._stack) - 2),
            "SETITEMS": lambda _: self._items(self._marks.pop()),
        }

    def read(self, data: bytes) -> dict[Any, Any]:
        for count, (code, argument, _) in enumerate(pickletools.genops(data)):
            if code.name == "STOP":
                break
            if code.name not in self._actions or count > _MOST_OPCODES:
                raise WeightUpdateError(f"the table has the opcode {code.name}, which no table of tensors needs")
            self._actions[code.name](argument)
        (table,) = self._stack
        if not isinstance(table, dict):
            raise WeightUpdateError(f"the table is a {type(table).__name__}; expected a dict by dtype")
        return table

    def _name(self, module: Any, name: Any) -> None:
        if not (isinstance(module, str) and isinstance(name, str)):
            raise WeightUpdateError("the table has a name that is no text")
        if module != "torch" or not (name == "Size" or name in DTYPES):
            raise WeightUpdateError(
                f"the table names {module[:50]}.{name[:50]}; expected torch.Size and torch's dtypes"
            )
        self._stack.append(_Global(name))

    def _tuple(self, count: int) -> None:
        start = len(self._stack) - count
        self._stack[start:] = [tuple(self._stack[start:])]

    def _reduce(self) -> None:
        """Size((…)), as a list; nothing is called."""
        function, (shape,) = self._stack[-2:]
        if not isinstance(function, _Global) or function.name != "Size":
            raise WeightUpdateError("the table calls something; expected torch.Size alone")
        if not isinstance(shape, tuple) or len(shape) > MOST_DIMS:  # it is copied, as often as a table says
            raise WeightUpdateError(f"the table has a Size that is no tuple of up to {MOST_DIMS} numbers")
        self._stack[-2:] = [list(shape)]

    def _appends(self) -> None:
        start = self._marks.pop()
        self._stack[start - 1].extend(self._stack[start:])
        del self._stack[start:]

    def _items(self, start: int) -> None:
        keys = self._stack[start::2]
        if not all(isinstance(key, _Global) for key in keys):  # others could take for ever to hash
            raise WeightUpdateError("the table has a key that is no dtype")
        self._stack[start - 1].update(zip(keys, self._stack[start + 1 :: 2], strict=True))
        del self._stack[start:]
