"""Reads files of torch.save without running what is in them.

Trainers put their arguments beside the tensors: an argparse.Namespace with enums of the trainer's own. Objects of
classes that trainers are known to save become a `Record`, which has their attributes and nothing else. Any other name
in a file is refused before the file is read.
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
"""Packages whose objects are beside tensors in checkpoints. Their code is not run."""
_MEMBER = "builtins.getattr"
"""Early releases of Python 3.11 pickle a member of an enum so, with its class and name. It becomes a `Record`, too."""

_BLOCK = 1 << 20


class Record:
    """Stands for an object of another program.

    Attributes:
        arguments: that it was made of, such as the value of an enum, or its class and its name.
        values: its attributes.
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
        # numpy's arrays have a tuple, objects with slots a pair.
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
            state = (state[0] or {}) | state[1] if isinstance(state[0] or {}, dict) else state[1]
        if isinstance(state, dict):
            self.values.update(state)


def load_inert(source: Path | BinaryIO, where: str = "") -> Any:
    """What a file of torch.save holds; tensors of a path are mapped, objects of known classes are of type `Record`.

    Args:
        source: the file.
        where: it is, for messages; the path where it is one.

    Raises:
        CheckpointError: it cannot be read, fails its checksums, or names code that would have to run.
    """
    where = where or str(source)
    try:
        # Files of before torch 1.6 cannot be mapped, and hold tensors alone.
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
            f"{where}: holds more than tensors and settings, which would be run to be read; nothing was run "
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
    """Raises BadZipFile where a record's bytes are not those that were written: torch reads them all the same."""
    with zipfile.ZipFile(source) as archive:
        # The pickle first: where even its checksum is wrong, the writer has left checksums out.
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
    """The dict that a file of torch.save holds; see `load_inert`.

    Raises:
        CheckpointError: it holds something else.
    """
    found = load_inert(path)
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise CheckpointError(f"{path}: holds no dict with names")
    return found


def load_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors that a file of torch.save holds.

    Raises:
        CheckpointError: it holds something else.
    """
    found = load_mapping(path)
    if not all(isinstance(value, Tensor) for value in found.values()):
        raise CheckpointError(f"{path}: is no dict of tensors")
    return found


def attributes(value: Any) -> dict[str, Any]:
    """The attributes of a `Record`, or a dict as it is; nothing where it is neither."""
    if isinstance(value, Namespace):
        # Where a program has told torch that it is safe, as Megatron's packages do when they are imported.
        return dict(vars(value))
    return value.values if isinstance(value, Record) else dict(value) if isinstance(value, dict) else {}
