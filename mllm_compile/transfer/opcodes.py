"""Reads the plain data of a pickle from its opcodes: nothing is unpickled, imported or called.

A name of a module stays a `Name`, a call or an object a `Made` that says what would have been made of what. The opcodes
below are all that is understood.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from typing import Any, NamedTuple

from mllm_compile.errors import WeightUpdateError

MOST_BYTES = 64 << 20  # of a pickle
_MOST_OPCODES = 1 << 22


class Name(NamedTuple):
    """A name that would have been imported."""

    module: str
    name: str


class Made:
    """An object that would have been made by `what(*arguments)`, with `state` put in; compared by identity."""

    def __init__(self, what: Name, arguments: tuple[Any, ...]) -> None:
        self.what, self.arguments = what, arguments
        self.state: Any = None


def read_pickle(data: bytes, what: str, is_known: Callable[[Name], bool]) -> Any:
    """The content of a pickle: dicts by names and text, lists, tuples, text, bytes, numbers, Name and Made.

    Args:
        what: it is, for errors: the table.
        is_known: tells the names that it may hold.

    Raises:
        WeightUpdateError: it is malformed, too long, or holds anything else.
    """
    if len(data) > MOST_BYTES:
        raise WeightUpdateError(f"{what} has {len(data):,} bytes; expected at most {MOST_BYTES:,}")
    try:
        return _Reader(what, is_known).read(data)
    except WeightUpdateError:
        raise
    except Exception as error:  # of any malformed one: the opcodes are a stranger's
        raise WeightUpdateError(
            f"{what} is no pickle of plain data ({type(error).__name__}: {str(error)[:100]})"
        ) from None


class _Reader:
    """The stack machine of pickle, as far as plain data and references to objects need it."""

    def __init__(self, what: str, is_known: Callable[[Name], bool]) -> None:
        self._what, self._is_known = what, is_known
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        push = self._stack.append
        self._actions: dict[str, Callable[[Any], None]] = {
            **dict.fromkeys(("PROTO", "FRAME"), lambda _: None),
            "MEMOIZE": lambda _: self._memo.__setitem__(len(self._memo), self._stack[-1]),
            **dict.fromkeys(("BINPUT", "LONG_BINPUT"), lambda index: self._memo.__setitem__(index, self._stack[-1])),
            **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda index: push(self._memo[index])),
            "EMPTY_DICT": lambda _: push({}),
            "EMPTY_LIST": lambda _: push([]),
            "EMPTY_TUPLE": lambda _: push(()),
            "NONE": lambda _: push(None),
            "NEWTRUE": lambda _: push(True),
            "NEWFALSE": lambda _: push(False),
            "MARK": lambda _: self._marks.append(len(self._stack)),
            **dict.fromkeys(("SHORT_BINUNICODE", "BINUNICODE", "SHORT_BINBYTES", "BINBYTES"), push),
            **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1"), push),
            "STACK_GLOBAL": lambda _: self._name(self._stack.pop(-2), self._stack.pop()),
            "GLOBAL": lambda names: self._name(*names.split(" ")),
            "TUPLE1": lambda _: self._tuple(1),
            "TUPLE2": lambda _: self._tuple(2),
            "TUPLE3": lambda _: self._tuple(3),
            "TUPLE": lambda _: self._tuple(len(self._stack) - self._marks.pop()),
            **dict.fromkeys(("REDUCE", "NEWOBJ"), lambda _: self._make()),
            "BUILD": lambda _: self._build(self._stack.pop()),
            "APPEND": lambda _: self._stack[-2].append(self._stack.pop()),
            "APPENDS": lambda _: self._appends(),
            "SETITEM": lambda _: self._items(len(self._stack) - 2),
            "SETITEMS": lambda _: self._items(self._marks.pop()),
        }

    def read(self, data: bytes) -> Any:
        for count, (code, argument, _) in enumerate(pickletools.genops(data)):
            if code.name == "STOP":
                break
            if code.name not in self._actions or count > _MOST_OPCODES:
                raise WeightUpdateError(f"{self._what} has the opcode {code.name}, which plain data does not need")
            self._actions[code.name](argument)
        (found,) = self._stack
        return found

    def _name(self, module: Any, name: Any) -> None:
        if not (isinstance(module, str) and isinstance(name, str)):
            raise WeightUpdateError(f"{self._what} has a name that is no text")
        found = Name(module, name)
        if not self._is_known(found):
            raise WeightUpdateError(f"{self._what} names {module[:50]}.{name[:50]}, which it does not need")
        self._stack.append(found)

    def _tuple(self, count: int) -> None:
        start = len(self._stack) - count
        self._stack[start:] = [tuple(self._stack[start:])]

    def _make(self) -> None:
        """The call of a name; nothing is called."""
        what, arguments = self._stack[-2:]
        if not isinstance(what, Name) or not isinstance(arguments, tuple):
            raise WeightUpdateError(f"{self._what} calls something that is no name")
        self._stack[-2:] = [Made(what, arguments)]

    def _build(self, state: Any) -> None:
        made = self._stack[-1]
        if not isinstance(made, Made):
            raise WeightUpdateError(f"{self._what} changes something that is no object")
        made.state = state

    def _appends(self) -> None:
        start = self._marks.pop()
        self._stack[start - 1].extend(self._stack[start:])
        del self._stack[start:]

    def _items(self, start: int) -> None:
        keys = self._stack[start::2]
        if not all(type(key) in (Name, str) for key in keys):  # others could take for ever to hash
            raise WeightUpdateError(f"{self._what} has a key that is neither a name nor text")
        self._stack[start - 1].update(zip(keys, self._stack[start + 1 :: 2], strict=True))
        del self._stack[start:]
