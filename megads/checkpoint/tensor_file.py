"""Writes tensor files incrementally in the safetensors format, with one checksum per tensor.

Format: 8 bytes of header length (little endian), a JSON header, the data. The safetensors library's writer copies every
tensor into memory first, rejects views of one buffer, which ZeRO shards are, and has no checksums.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch
import xxhash
from torch import Tensor

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
) -> list[str]:
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
        Checksums of the tensors, in order.

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
    return checksums


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
