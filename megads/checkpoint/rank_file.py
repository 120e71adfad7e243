"""One rank's file of a checkpoint: parts of named global tensors, described in the file's header.

A safetensors file with tensors named <key>@<offset>, for example "weight/head.weight@128,0". Its metadata has an entry
of the same name for each: {"global_shape": [...], "xxh3_128": checksum of the tensor's bytes, hex}. The manifest holds
only the checksum of the header, and the header those of the tensors.

The parts are rectangles; `coverage_fault` checks that they cover a tensor exactly once. `write_tensor_file` writes a
file incrementally: 8 bytes of header length (little endian), a JSON header, the data. The safetensors library's writer
copies every tensor into memory first, rejects views of one buffer, which ZeRO shards are, and has no checksums.
"""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Annotated, Any, BinaryIO, ClassVar

import torch
import xxhash
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megads.engine.interface import Shard
from megads.errors import CheckpointError
from megads.runtime.files import open_regular

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
}
"""Names of dtypes in the safetensors format."""
NO_CHECKSUM = "0" * 32
"""Placeholder of the same length as a checksum."""
_MOST_HEADER_BYTES = 100_000_000
"""Limit of the safetensors format."""


@dataclass(frozen=True)
class TensorLayout:
    """A tensor of a file to be written.

    Attributes:
        name: name in the file.
        dtype: dtype of the tensor.
        shape: shape of the tensor.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's data."""
        return prod(self.shape) * self.dtype.itemsize


def write_tensor_file(
    path: Path,
    layouts: Sequence[TensorLayout],
    tensors: Iterable[Tensor | Iterator[Tensor]],
    metadata: Mapping[str, str] | Callable[[Sequence[str]], Mapping[str, str]] | None = None,
    wait: bool = True,
) -> bytes:
    """Writes tensors in the safetensors format.

    Args:
        path: a file that does not exist yet.
        layouts: layouts of the tensors in the file.
        tensors: the tensors in that order, on any device; each is requested after the previous one is written. An
            iterator yields a tensor in blocks of rows.
        metadata: metadata of the file, or a function that returns it from the tensors' checksums; its length must not
            depend on them.
        wait: wait until the file is on disk.

    Returns:
        The header of the file, see `encode_header`.

    Raises:
        CheckpointError: the file cannot be written; part of it may exist.
    """
    checksums = []
    try:
        with path.open("xb") as file:
            about = metadata if callable(metadata) else lambda _: metadata or {}
            header = encode_header(layouts, about([NO_CHECKSUM] * len(layouts)))
            file.write(header)
            for layout, tensor in zip(layouts, tensors, strict=True):
                checksums.append(_write(file, layout, iter((tensor,)) if isinstance(tensor, Tensor) else tensor))
            final = encode_header(layouts, about(checksums))
            assert len(final) == len(header), "metadata grows with the checksums"
            if final != header:
                file.seek(0)
                file.write(final)
            file.flush()
            if wait:
                os.fsync(file.fileno())
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror}") from error
    return final


def encode_header(layouts: Sequence[TensorLayout], metadata: Mapping[str, str], alignment: int = 8) -> bytes:
    """Header of a file: 8 bytes with the length of the JSON, and the JSON.

    Args:
        layouts: layouts of the tensors.
        metadata: metadata of the file.
        alignment: the data starts at a multiple of this many bytes; with a multiple of 8 it can be mapped as any dtype.
    """
    header: dict[str, dict[str, object]] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for layout in layouts:
        start, end = end, end + layout.nbytes
        dtype, shape = DTYPE_NAMES[layout.dtype], list(layout.shape)
        header[layout.name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-(8 + len(encoded)) % alignment)
    return len(encoded).to_bytes(8, "little") + encoded


def read_header(path: Path) -> bytes:
    """Reads the header of a file: 8 bytes with the length of the JSON, and the JSON.

    Raises:
        CheckpointError: the file ends within the header.
        OSError: an error of the file system; EINVAL if it is not a regular file.
    """
    with open_regular(path) as file:
        length = file.read(8)
        size = int.from_bytes(length, "little")
        header = length + (file.read(size) if size <= _MOST_HEADER_BYTES else b"")
    if len(length) < 8 or len(header) != 8 + size:
        raise CheckpointError(f"{path} has no header")
    return header


def _write(file: BinaryIO, layout: TensorLayout, blocks: Iterator[Tensor]) -> str:
    """Writes a tensor in blocks of rows; returns its checksum."""
    digest, written = xxhash.xxh3_128(), 0
    for block in blocks:
        assert (block.dtype, tuple(block.shape[1:])) == (layout.dtype, layout.shape[1:]), layout.name
        data = _row_major_bytes(block)
        digest.update(data)
        file.write(data)
        written += len(data)
    assert written == layout.nbytes, layout.name
    return str(digest.hexdigest())


def checksum(tensor: Tensor) -> str:
    """xxh3_128 of a tensor's bytes in row-major order, as hex."""
    return xxhash.xxh3_128_hexdigest(_row_major_bytes(tensor))


def _row_major_bytes(tensor: Tensor) -> memoryview:
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


_MODULUS = 2**128


@dataclass(frozen=True)
class Rectangle:
    """A part of a global tensor.

    Attributes:
        offset: first index in each dim.
        shape: size in each dim.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def end(self) -> tuple[int, ...]:
        """One past the last index in each dim."""
        return tuple(start + extent for start, extent in zip(self.offset, self.shape, strict=True))

    def overlap(self, other: Rectangle) -> Rectangle | None:
        """The intersection of both rectangles, None if it is empty."""
        offset = tuple(map(max, self.offset, other.offset))
        shape = tuple(high - low for low, high in zip(offset, map(min, self.end, other.end), strict=True))
        return Rectangle(offset, shape) if all(extent > 0 for extent in shape) else None

    def within(self, outer: Rectangle) -> tuple[slice, ...]:
        """Slices of this rectangle in a tensor that holds `outer`, a rectangle that contains it."""
        starts = [mine - theirs for mine, theirs in zip(self.offset, outer.offset, strict=True)]
        return tuple(slice(start, start + extent) for start, extent in zip(starts, self.shape, strict=True))


def whole(global_shape: Sequence[int]) -> Rectangle:
    """The rectangle of a whole tensor."""
    return Rectangle((0,) * len(global_shape), tuple(global_shape))


def cover_sum(key: str, rectangles: Iterable[Rectangle]) -> int:
    """Additive checksum of rectangles: parts cover a tensor exactly once if their sum equals that of the whole tensor.

    The corners of a rectangle, with the sign of their parity, are the mixed difference of its indicator function, and
    a function of bounded support is zero if its mixed difference is zero. So parts cover the whole exactly once if and
    only if their signed corners cancel to those of the whole. Each corner is represented by its 128-bit hash, so ranks
    send one number instead of their rectangles. Parts that do not cover the whole have the same sum with a probability
    of about 2^-128.

    Args:
        key: name of the tensor; sums of several tensors can be added, too.
        rectangles: parts of the tensor.

    Returns:
        A number in [0, 2^128); add them modulo 2^128, see `add_cover_sums`.
    """
    total = 0
    for rectangle in rectangles:
        for ends in product((0, 1), repeat=len(rectangle.shape)):
            corner = [o + e * n for o, n, e in zip(rectangle.offset, rectangle.shape, ends, strict=True)]
            total += (-1) ** sum(ends) * xxhash.xxh3_128_intdigest(f"{key}@{corner}".encode())
    return total % _MODULUS


def add_cover_sums(sums: Iterable[int]) -> int:
    """Cover sum of the union of several sets of rectangles, from the cover sum of each set."""
    return sum(sums) % _MODULUS


def coverage_fault(global_shape: Sequence[int], rectangles: Iterable[Rectangle]) -> str | None:
    """Describes why rectangles do not cover a tensor exactly once; None if they do."""
    all_of_it = whole(global_shape)
    # Sweep along the first dim: only rectangles that are still open can overlap the next one.
    open_rectangles: list[Rectangle] = []
    covered = 0
    for rectangle in sorted(rectangles, key=lambda part: part.offset):
        if len(rectangle.shape) != len(all_of_it.shape) or rectangle.overlap(all_of_it) != rectangle:
            return f"the part at {list(rectangle.offset)} of shape {list(rectangle.shape)} is not inside it"
        open_rectangles = [part for part in open_rectangles if not part.shape or part.end[0] > rectangle.offset[0]]
        for part in open_rectangles:
            if part.overlap(rectangle) is not None:
                return f"the parts at {list(part.offset)} and {list(rectangle.offset)} overlap"
        open_rectangles.append(rectangle)
        covered += rectangle.elements
    if covered != all_of_it.elements:
        return f"{all_of_it.elements - covered} of its {all_of_it.elements} elements are in no part"
    return None


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
        header: xxh3_128 of its header, see `read_header`, hex; empty in checkpoints of versions 1 and 2.
    """

    __pydantic_config__: ClassVar = STRICT

    bytes: Count
    header: str


@dataclass(frozen=True)
class WrittenPart:
    """What rank 0 needs to know about a rank's part of a checkpoint to commit it.

    Attributes:
        record: record of the rank's file for the manifest; None if the rank owns nothing, and has no file.
        shapes: global shapes of the tensors that the file holds parts of, by key.
        cover_sums: cover sums of these parts by key, hex, see `cover_sum`.
        held: keys of all shards that the rank holds, including copies that another rank owns.
    """

    record: FileRecord | None
    shapes: dict[str, Extents]
    cover_sums: dict[str, str]
    held: list[str]


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
    folder: Path,
    rank: int,
    shards: Sequence[Shard],
    held: Sequence[str] = (),
    read: Callable[[Shard], Iterator[Tensor]] | None = None,
) -> WrittenPart:
    """Writes a rank's file and waits until it is on disk; writes no file if the rank owns nothing.

    Args:
        folder: folder of the checkpoint.
        rank: rank of the file.
        shards: shards that the rank owns.
        held: see `WrittenPart`.
        read: yields a shard's values in blocks of rows, on demand; None: the shards' tensors hold the values.

    Raises:
        CheckpointError: the file cannot be written; part of it may exist.
    """
    kept = [shard for shard in shards if shard.tensor.numel()]
    if not kept:
        return WrittenPart(None, {}, {}, list(held))
    layouts, notes = describe(kept)
    values = (shard.tensor if read is None else read(shard) for shard in kept)
    header = write_tensor_file(folder / file_name(rank), layouts, values, notes)
    record = FileRecord(len(header) + sum(layout.nbytes for layout in layouts), _digest(header))
    shapes = {shard.key: tuple(shard.global_shape) for shard in kept}
    parts: dict[str, list[Rectangle]] = defaultdict(list)
    for shard in kept:
        parts[shard.key].append(Rectangle(tuple(shard.offset), tuple(shard.tensor.shape)))
    return WrittenPart(record, shapes, {key: f"{cover_sum(key, own):032x}" for key, own in parts.items()}, list(held))


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
