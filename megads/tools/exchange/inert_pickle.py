"""Reads a pickle without executing it: calls of classes and functions become records of their arguments.

torch's weights-only unpickler supports only the old protocol of torch.save; `.metadata` of a distributed checkpoint has
a newer one. No name is ever imported.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from typing import Any

from megads.tools.exchange.pickles import Record

_MARK = object()
_CONSTANTS = {
    "NONE": None, "NEWTRUE": True, "NEWFALSE": False,
}  # fmt: skip
_LITERALS = {
    "BININT", "BININT1", "BININT2", "INT", "LONG", "LONG1", "LONG4", "BINFLOAT", "FLOAT", "BINUNICODE", "UNICODE",
    "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BINSTRING", "SHORT_BINSTRING",
}  # fmt: skip


class Named(Record):
    """Stands for the result of a call of a class or function in a pickle.

    Attributes:
        name: the class or function, "module.name".
    """

    name: str = ""


class _Name:
    def __init__(self, name: str) -> None:
        self.name = name

    def made_of(self, arguments: Any) -> Named:
        found = Named(*(arguments if isinstance(arguments, tuple) else ()))
        found.name = self.name
        return found


class _Machine:
    """Stack machine that interprets pickle opcodes."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self._actions: dict[str, Callable[[Any], None]] = {
            "MARK": lambda _: self.stack.append(_MARK),
            "EMPTY_TUPLE": lambda _: self.stack.append(()),
            "EMPTY_LIST": lambda _: self.stack.append([]),
            "EMPTY_DICT": lambda _: self.stack.append({}),
            "EMPTY_SET": lambda _: self.stack.append(set()),
            "TUPLE": lambda _: self.stack.append(tuple(self._to_mark())),
            "TUPLE1": lambda _: self._tuple(1),
            "TUPLE2": lambda _: self._tuple(2),
            "TUPLE3": lambda _: self._tuple(3),
            "APPEND": lambda _: self._append([self.stack.pop()]),
            "APPENDS": lambda _: self._append(self._to_mark()),
            "SETITEM": lambda _: self._set([self.stack.pop(-2), self.stack.pop()]),
            "SETITEMS": lambda _: self._set(self._to_mark()),
            "ADDITEMS": lambda _: self.stack[-1].update(self._to_mark()),
            "FROZENSET": lambda _: self.stack.append(frozenset(self._to_mark())),
            "POP": lambda _: self.stack.pop(),
            "GLOBAL": lambda name: self.stack.append(_Name(name.replace(" ", "."))),
            "STACK_GLOBAL": lambda _: self.stack.append(_Name(f"{self.stack.pop(-2)}.{self.stack.pop()}")),
            "REDUCE": lambda _: self._make(),
            "NEWOBJ": lambda _: self._make(),
            "BUILD": lambda _: self._build(),
            "MEMOIZE": lambda _: self.memo.__setitem__(len(self.memo), self.stack[-1]),
            "BINPUT": lambda place: self.memo.__setitem__(place, self.stack[-1]),
            "LONG_BINPUT": lambda place: self.memo.__setitem__(place, self.stack[-1]),
            "BINGET": lambda place: self.stack.append(self.memo[place]),
            "LONG_BINGET": lambda place: self.stack.append(self.memo[place]),
            "PROTO": lambda _: None,
            "FRAME": lambda _: None,
            "STOP": lambda _: None,
        }

    def run(self, data: bytes) -> Any:
        for operation, argument, _ in pickletools.genops(data):
            if operation.name in _LITERALS:
                self.stack.append(argument)
            elif operation.name in _CONSTANTS:
                self.stack.append(_CONSTANTS[operation.name])
            elif operation.name in self._actions:
                self._actions[operation.name](argument)
            else:
                raise ValueError(f"operation {operation.name}")
        return self.stack.pop()

    def _to_mark(self) -> list[Any]:
        start = len(self.stack) - 1 - self.stack[::-1].index(_MARK)
        found = self.stack[start + 1 :]
        del self.stack[start:]
        return found

    def _tuple(self, length: int) -> None:
        items = tuple(self.stack[-length:])
        del self.stack[-length:]
        self.stack.append(items)

    def _append(self, items: list[Any]) -> None:
        if isinstance(self.stack[-1], list):
            self.stack[-1].extend(items)

    def _set(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, dict):
            target.update(zip(items[0::2], items[1::2], strict=True))

    def _make(self) -> None:
        arguments, name = self.stack.pop(), self.stack.pop()
        if not isinstance(name, _Name):
            raise ValueError("a call of an object without a name")
        self.stack.append(name.made_of(arguments))

    def _build(self) -> None:
        state = self.stack.pop()
        if isinstance(self.stack[-1], Record):
            self.stack[-1].__setstate__(state)


def read_inert(data: bytes) -> Any:
    """Returns the content of a pickle; objects have type `Named`, classes and functions themselves are opaque.

    Raises:
        ValueError: the pickle is damaged, or has opcodes that no known checkpoint uses.
    """
    try:
        return _Machine().run(data)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, MemoryError) as error:
        raise ValueError(f"is damaged ({str(error)[:100]})") from error
