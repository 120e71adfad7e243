"""Writes a safetensors file piece by piece, with a checksum a tensor.

safetensors' own writer copies every tensor into memory first, refuses views of one buffer, which is what ZeRO shards
are, and knows no checksums. The format is its: 8 bytes of header length (little endian), a JSON header, the data.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from megads.errors import CheckpointError


@dataclass(frozen=True)
class Rectangle:
    """A part of a global tensor.

    Attributes:
        offset: first index in each dim.
        shape: extent in each dim.
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
        """The elements that both hold, None where there are none."""
        offset = tuple(map(max, self.offset, other.offset))
        shape = tuple(high - low for low, high in zip(offset, map(min, self.end, other.end), strict=True))
        return Rectangle(offset, shape) if all(extent > 0 for extent in shape) else None

    def within(self, outer: Rectangle) -> tuple[slice, ...]:
        """Where this rectangle lies in a tensor that holds `outer`, which contains it."""
        starts = [mine - theirs for mine, theirs in zip(self.offset, outer.offset, strict=True)]
        return tuple(slice(start, start + extent) for start, extent in zip(starts, self.shape, strict=True))


def coverage_fault(global_shape: Sequence[int], rectangles: Iterable[Rectangle]) -> str | None:
    """Says why rectangles do not cover every element of a tensor exactly once, None when they do."""
    whole = Rectangle((0,) * len(global_shape), tuple(global_shape))
    # A sweep along the first dim: only rectangles that are still open there can overlap the next one.
    open_rectangles: list[Rectangle] = []
    covered = 0
    for rectangle in sorted(rectangles, key=lambda part: part.offset):
        if len(rectangle.shape) != len(whole.shape) or rectangle.overlap(whole) != rectangle:
            return f"the part at {list(rectangle.offset)} of shape {list(rectangle.shape)} is not inside it"
        open_rectangles = [part for part in open_rectangles if not part.shape or part.end[0] > rectangle.offset[0]]
        for part in open_rectangles:
            if part.overlap(rectangle) is not None:
                return f"the parts at {list(part.offset)} and {list(rectangle.offset)} overlap"
        open_rectangles.append(rectangle)
        covered += rectangle.elements
    if covered != whole.elements:
        return f"{whole.elements - covered} of its {whole.elements} elements are in no part"
    return None


DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
}
"""Names of dtypes in the safetensors format."""


def checksum(tensor: Tensor) -> str:
    """xxh3_128 of a tensor's bytes in row-major order, as hex."""
    return xxhash.xxh3_128_hexdigest(_row_major_bytes(tensor))


def write_tensor_file(path: Path, tensors: Sequence[Tensor]) -> list[str]:
    """Writes tensors under the names "0", "1", ... and waits until they are on disk.

    Args:
        path: a file that does not exist yet.
        tensors: on any device; copied to the CPU one at a time.

    Returns:
        Each tensor's checksum.

    Raises:
        CheckpointError: the file cannot be written; part of it may exist.
    """
    header: dict[str, dict[str, object]] = {}
    end = 0
    for index, tensor in enumerate(tensors):
        start, end = end, end + tensor.nbytes
        shape = list(tensor.shape)
        header[str(index)] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": shape, "data_offsets": [start, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    # Data that starts at a multiple of 8 can be mapped as any dtype.
    encoded += b" " * (-len(encoded) % 8)
    checksums = []
    try:
        with path.open("xb") as file:
            file.write(len(encoded).to_bytes(8, "little") + encoded)
            for tensor in tensors:
                data = _row_major_bytes(tensor)
                checksums.append(xxhash.xxh3_128_hexdigest(data))
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror}") from error
    return checksums


def _row_major_bytes(tensor: Tensor) -> memoryview:
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
