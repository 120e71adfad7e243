"""Reads pickles without executing code in them.

Files of torch.save: trainers save their arguments with the tensors, as an argparse.Namespace with enums of the trainer.
Objects of packages that trainers are known to save become a `Record`, which has only their attributes. A file with any
other name is rejected before it is read.

Other pickles: torch's weights-only unpickler supports only the old protocol of torch.save; `.metadata` of a distributed
checkpoint has a newer one. Calls of classes and functions become records of their arguments. No name is ever imported.
"""

from __future__ import annotations

import os
import pickletools
import zipfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from megads.api import CheckpointError, reason_of

_KNOWN = ("argparse", "megatron", "deepspeed", "nanotron", "numpy", "_codecs", "types", "pathlib", "collections")
"""Packages whose objects occur in checkpoints. Their code is not executed."""
_MEMBER = "builtins.getattr"
"""Early releases of Python 3.11 pickle an enum member as getattr of its class and name. It also becomes a `Record`."""

_BLOCK = 1 << 20
_MOST_RATIO = 4
"""Largest size of an archive's content relative to the archive."""


class Record:
    """Stands for an object of another program.

    Attributes:
        arguments: arguments of its construction, such as the value of an enum, or its class and its name.
        values: attributes of the object.
    """

    arguments: tuple[Any, ...]
    values: dict[str, Any]

    def __new__(cls, *arguments: Any) -> Record:
        made = super().__new__(cls)
        made.arguments, made.values = arguments, {}
        return made

    def __init__(self, *arguments: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        # The state of numpy arrays is a tuple, that of objects with slots a pair.
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
            state = (state[0] or {}) | state[1] if isinstance(state[0] or {}, dict) else state[1]
        if isinstance(state, dict):
            self.values.update(state)


def load_inert(source: Path | BinaryIO, where: str = "") -> Any:
    """Returns the content of a file of torch.save. Tensors of a path are memory-mapped, other objects are `Record`s.

    Args:
        source: path or open file.
        where: description for messages; empty uses the path.

    Raises:
        CheckpointError: the file cannot be read, fails its checksums, or needs code to be executed.
    """
    where = where or str(source)
    try:
        # Files in the format before torch 1.6 cannot be mapped; they may contain only tensors.
        if not zipfile.is_zipfile(source):
            return torch.load(_rewound(source), map_location="cpu", weights_only=True)
        _require_bounded(source)
        _require_checksums(source)
        names = get_unsafe_globals_in_checkpoint(cast(Any, _rewound(source)))
        unknown = sorted(name for name in names if name != _MEMBER and name.partition(".")[0] not in _KNOWN)
        if unknown:
            raise UnpicklingError(unknown[0])
        with safe_globals([(cast(Any, type("Record", (Record,), {})), name) for name in names]):
            mmap = isinstance(source, Path)
            return torch.load(_rewound(source), map_location="cpu", weights_only=True, mmap=mmap)
    except UnpicklingError as error:
        raise CheckpointError(
            f"{where}: holds more than tensors and settings, and reading it would execute code; nothing was run "
            f"({str(error).splitlines()[0][:200]})"
        ) from error
    except zipfile.BadZipFile as error:
        raise CheckpointError(f"{where}: is damaged: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{where} cannot be read: {reason_of(error)}") from error
    except (RuntimeError, EOFError, ValueError, TypeError, LookupError, AttributeError, AssertionError) as error:
        told = str(error).splitlines() or [type(error).__name__]
        raise CheckpointError(f"{where} cannot be read: {told[0][:200]}") from error


def _require_bounded(source: Path | BinaryIO) -> None:
    """Raises BadZipFile if an archive would unpack to far more than its own size: torch.save does not compress."""
    with zipfile.ZipFile(source) as archive:
        unpacked = sum(record.file_size for record in archive.infolist())
    size = source.stat().st_size if isinstance(source, Path) else source.seek(0, os.SEEK_END)
    if unpacked > _MOST_RATIO * size + _BLOCK:
        raise zipfile.BadZipFile(
            f"its {size / 1e6:,.1f} MB would unpack to {unpacked / 1e6:,.1f} MB, which torch.save never writes; if the "
            "file is from someone you trust, repack it without compression (unzip, then zip -0 -r)"
        )


def _require_checksums(source: Path | BinaryIO) -> None:
    """Raises BadZipFile if a checksum does not match; torch does not check them."""
    with zipfile.ZipFile(source) as archive:
        # The pickle first: if even its checksum is wrong, the writer omitted checksums.
        names = sorted(archive.namelist(), key=lambda name: not name.endswith("/data.pkl"))
        for number, name in enumerate(names):
            try:
                with archive.open(name) as record:
                    while record.read(_BLOCK):
                        pass
            except zipfile.BadZipFile:
                if number == 0:
                    return
                raise


def _rewound(source: Path | BinaryIO) -> Path | BinaryIO:
    if not isinstance(source, Path):
        source.seek(0)
    return source


def load_mapping(path: Path) -> dict[str, Any]:
    """Returns the dict that a file of torch.save contains; see `load_inert`.

    Raises:
        CheckpointError: the content is not a dict with string keys.
    """
    found = load_inert(path)
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise CheckpointError(f"{path}: holds no dict with names")
    return found


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Returns the tensors that a file of torch.save contains, by name.

    Raises:
        CheckpointError: the content is not a dict of tensors.
    """
    found = load_mapping(path)
    if not all(isinstance(value, Tensor) for value in found.values()):
        raise CheckpointError(f"{path}: is not a dict of tensors")
    return found


def attributes(value: Any) -> dict[str, Any]:
    """Returns the attributes of a `Record`, or a copy of a dict; empty for any other value."""
    if isinstance(value, Namespace):
        # Possible if a package has registered Namespace as safe in torch, as Megatron does when it is imported.
        return dict(vars(value))
    return value.values if isinstance(value, Record) else dict(value) if isinstance(value, dict) else {}


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
