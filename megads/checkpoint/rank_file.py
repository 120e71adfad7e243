"""One rank's file of a checkpoint: parts of named global tensors, described in the file's header.

A safetensors file with tensors named <key>@<offset>, for example "weight/head.weight@128,0". Its metadata has an entry
of the same name for each: {"global_shape": [...], "xxh3_128": checksum of the tensor's bytes, hex}. The manifest holds
only the checksum of the header, and the header those of the tensors.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Annotated, Any, ClassVar

import xxhash
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megads.checkpoint.rectangle import Rectangle, cover_sum
from megads.checkpoint.tensor_file import DTYPE_NAMES, TensorLayout, checksum, read_header, write_tensor_file
from megads.engine.interface import Shard
from megads.errors import CheckpointError

FILE_NAME = re.compile(r"rank_(\d{5,})\.safetensors")
STRICT = ConfigDict(strict=True, extra="forbid")
"""Strict validation: no type conversion and no extra fields."""
Count = Annotated[int, Field(ge=0, lt=2**63)]
Extents = tuple[Count, ...]
_TENSOR_NAME = re.compile(r"(.+)@((?:\d{1,18}(?:,\d{1,18})*)?)")
_ITEM_BYTES = {name: dtype.itemsize for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True)
class StoredTensor:
    """A rectangle of a global tensor in a file.

    Attributes:
        key: name of the global tensor, "<kind>/<parameter name>".
        global_shape: shape of the global tensor.
        offset: start of the rectangle in the global tensor.
        shape: shape of the rectangle.
        dtype: dtype in the notation of safetensors, for example "F32".
        file: name of the file in the checkpoint's folder.
        name: name of the tensor in that file.
        checksum: xxh3_128 of its bytes, hex.
    """

    __pydantic_config__: ClassVar = STRICT

    key: str
    global_shape: Extents
    offset: Extents
    shape: Extents
    dtype: str
    file: str
    name: str
    checksum: str

    def __str__(self) -> str:
        return f"{self.key} at {list(self.offset)}"

    @property
    def rectangle(self) -> Rectangle:
        return Rectangle(self.offset, self.shape)


@dataclass(frozen=True)
class FileRecord:
    """A manifest's record of a file.

    Attributes:
        bytes: size of the file.
        header: xxh3_128 of its header, see `tensor_file.read_header`, hex; empty in checkpoints of versions 1 and 2.
    """

    __pydantic_config__: ClassVar = STRICT

    bytes: Count
    header: str


@dataclass(frozen=True)
class WrittenFile:
    """What rank 0 needs to know about a rank's file to commit it.

    Attributes:
        record: record of the file for the manifest.
        shapes: global shapes of the tensors that it holds parts of, by key.
        cover_sums: cover sums of these parts by key, hex, see `rectangle.cover_sum`.
    """

    record: FileRecord
    shapes: dict[str, Extents]
    cover_sums: dict[str, str]


@dataclass(frozen=True)
class _Entry:
    """Entry of a tensor in the header."""

    __pydantic_config__: ClassVar = STRICT

    dtype: str
    shape: Extents
    data_offsets: tuple[Count, Count]


@dataclass(frozen=True)
class _Note:
    """Entry of a tensor in the header's metadata."""

    __pydantic_config__: ClassVar = STRICT

    global_shape: Extents
    xxh3_128: str


_ENTRY, _NOTE = TypeAdapter(_Entry), TypeAdapter(_Note)


def file_name(rank: int) -> str:
    """Name of a rank's file."""
    return f"rank_{rank:05d}.safetensors"


def rank_of(name: str) -> int:
    """Inverse of `file_name`."""
    match = FILE_NAME.fullmatch(name)
    assert match, name
    return int(match[1])


def write_rank_file(
    folder: Path, rank: int, shards: Sequence[Shard], read: Callable[[Shard], Iterator[Tensor]] | None = None
) -> WrittenFile | None:
    """Writes a rank's file and waits until it is on disk; writes no file if the rank owns nothing.

    Args:
        folder: folder of the checkpoint.
        rank: rank of the file.
        shards: shards that the rank owns.
        read: yields a shard's values in blocks of rows, on demand; None: the shards' tensors hold the values.

    Raises:
        CheckpointError: the file cannot be written; part of it may exist.
    """
    kept = [shard for shard in shards if shard.tensor.numel()]
    if not kept:
        return None
    layouts, notes = describe(kept)
    path = folder / file_name(rank)
    values = (shard.tensor if read is None else read(shard) for shard in kept)
    write_tensor_file(path, layouts, values, notes)
    return summarize(path, kept)


def describe(shards: Sequence[Shard]) -> tuple[list[TensorLayout], Callable[[Sequence[str]], dict[str, str]]]:
    """Layouts of the tensors in a file of shards, and a function that returns its metadata from their checksums."""
    names = [f"{shard.key}@{','.join(map(str, shard.offset))}" for shard in shards]
    layouts = [
        TensorLayout(name, shard.tensor.dtype, tuple(shard.tensor.shape))
        for name, shard in zip(names, shards, strict=True)
    ]

    def notes(checksums: Sequence[str]) -> dict[str, str]:
        return {
            name: json.dumps({"global_shape": list(shard.global_shape), "xxh3_128": digest}, separators=(",", ":"))
            for name, shard, digest in zip(names, shards, checksums, strict=True)
        }

    return layouts, notes


def summarize(path: Path, shards: Sequence[Shard]) -> WrittenFile:
    """What rank 0 needs to know about a file of shards.

    Raises:
        CheckpointError: the file cannot be read.
    """
    parts: dict[str, list[Rectangle]] = defaultdict(list)
    for shard in shards:
        parts[shard.key].append(Rectangle(tuple(shard.offset), tuple(shard.tensor.shape)))
    try:
        record = FileRecord(path.stat().st_size, _digest(read_header(path)))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    shapes = {shard.key: tuple(shard.global_shape) for shard in shards}
    return WrittenFile(record, shapes, {key: f"{cover_sum(key, found):032x}" for key, found in parts.items()})


def read_rank_file(path: Path, record: FileRecord) -> list[StoredTensor]:
    """The tensors in a file, from its header only.

    Raises:
        CheckpointError: the file is missing, does not match the manifest, or is not a checkpoint file; names the file.
    """
    try:
        size, header = path.stat().st_size, read_header(path)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    if size != record.bytes:
        raise CheckpointError(f"{path} has {size} bytes instead of {record.bytes}")
    if _digest(header) != record.header:
        raise CheckpointError(f"{path}: its header fails its checksum")
    try:
        entries = json.loads(header[8:])
        notes = entries.pop("__metadata__")
        if entries.keys() != notes.keys():
            raise ValueError("tensors and metadata do not have the same names")
        return [_stored(name, entries[name], notes[name], path.name) for name in entries]
    except ValidationError as error:
        first = error.errors()[0]
        raise CheckpointError(f"{path}: its header cannot be used ({first['loc']}: {first['msg']})") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: its header cannot be used ({error})") from error


def _stored(name: str, entry: Any, note: Any, file: str) -> StoredTensor:
    """Combines header entry and metadata of a tensor; raises ValueError if they are inconsistent.

    safetensors itself checks the byte ranges.
    """
    match = _TENSOR_NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r} does not end in an offset")
    found, about = _ENTRY.validate_json(json.dumps(entry)), _NOTE.validate_json(note)
    offset = tuple(map(int, match[2].split(","))) if match[2] else ()
    if not len(offset) == len(found.shape) == len(about.global_shape):
        raise ValueError(f"offset and shape of {name} differ in length")
    start, end = found.data_offsets
    if found.dtype not in _ITEM_BYTES or end - start != prod(found.shape) * _ITEM_BYTES[found.dtype]:
        raise ValueError(f"{name} is not {found.dtype} of shape {list(found.shape)}")
    return StoredTensor(match[1], about.global_shape, offset, found.shape, found.dtype, file, name, about.xxh3_128)


def verify_tensors(path: Path, tensors: Iterable[StoredTensor]) -> None:
    """Reads and verifies tensors of a file.

    Raises:
        CheckpointError: a tensor is missing, has another dtype or shape than recorded, or fails its checksum.
    """
    with opened(path) as file:
        names = set(file.keys())
        for stored in tensors:
            if stored.name not in names:
                raise CheckpointError(f"{path}: {stored} is missing")
            tensor = file.get_tensor(stored.name)
            if DTYPE_NAMES.get(tensor.dtype) != stored.dtype or tuple(tensor.shape) != stored.shape:
                raise CheckpointError(f"{path}: {stored} has another dtype or shape")
            if checksum(tensor) != stored.checksum:
                raise CheckpointError(f"{path}: {stored} fails its checksum")


def opened(path: Path) -> Any:
    """Context manager of the memory-mapped file.

    Raises:
        CheckpointError: the file cannot be read.
    """
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _digest(header: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(header)
