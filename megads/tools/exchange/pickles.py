"""Reads files of torch.save without executing code in them.

Trainers save their arguments with the tensors, as an argparse.Namespace with enums of the trainer. Objects of packages
that trainers are known to save become a `Record`, which has only their attributes. A file with any other name is
rejected before it is read.
"""

from __future__ import annotations

import zipfile
from argparse import Namespace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from megads.errors import CheckpointError

_KNOWN = ("argparse", "megatron", "deepspeed", "nanotron", "numpy", "_codecs", "types", "pathlib", "collections")
"""Packages whose objects occur in checkpoints. Their code is not executed."""
_MEMBER = "builtins.getattr"
"""Early releases of Python 3.11 pickle an enum member as getattr of its class and name. It also becomes a `Record`."""

_BLOCK = 1 << 20


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
        raise CheckpointError(f"{where} cannot be read: {error.strerror}") from error
    except (RuntimeError, EOFError, ValueError, TypeError, LookupError, AttributeError, AssertionError) as error:
        told = str(error).splitlines() or [type(error).__name__]
        raise CheckpointError(f"{where} cannot be read: {told[0][:200]}") from error


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
