"""Writes a safetensors file piece by piece, with a checksum a tensor.

safetensors' own writer copies every tensor into memory first, refuses views of one buffer, which is what ZeRO shards
are, and knows no checksums. The format is its: 8 bytes of header length (little endian), a JSON header, the data.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from megads.errors import CheckpointError

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
