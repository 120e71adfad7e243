"""Tests the tensor file writer against safetensors' own reader."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megads.checkpoint.rank_file import TensorLayout, checksum, write_tensor_file
from megads.errors import CheckpointError


def test_safetensors_reads_it(tmp_path: Path) -> None:
    """Catches a header or alignment that other tools cannot read, and views written with neighbouring elements."""
    flat = torch.randn(100)
    tensors = [
        flat[3:17].view(2, 7),
        flat[17:50],
        torch.randn(6, 5).t(),
        torch.randn(3).bfloat16(),
        torch.tensor(5),
        torch.randn(4, 4, dtype=torch.float64)[:, 1:3],
    ]
    layouts = [TensorLayout(str(i), tensor.dtype, tuple(tensor.shape)) for i, tensor in enumerate(tensors)]
    # The first one in blocks of rows.
    values, found = [iter(tensors[0].split(1)), *tensors[1:]], list[str]()

    def notes(checksums: Sequence[str]) -> dict[str, str]:
        found[:] = checksums
        return dict(zip("012345", checksums, strict=True))

    header = write_tensor_file(tmp_path / "file", layouts, values, notes)
    assert (tmp_path / "file").read_bytes().startswith(header)
    loaded = load_file(tmp_path / "file")
    assert [loaded[str(index)].dtype for index in range(6)] == [tensor.dtype for tensor in tensors]
    assert all(torch.equal(loaded[str(index)], tensor) for index, tensor in enumerate(tensors))
    assert found == [checksum(loaded[str(index)]) for index in range(6)]


def test_checksum_sees_every_bit() -> None:
    """Catches a checksum over values (-0.0 equals 0.0, NaN equals nothing) or over a part of the bytes."""
    zeros = torch.zeros(1000)
    for index in (0, 499, 999):
        changed = zeros.clone()
        changed[index] = -0.0
        assert checksum(changed) != checksum(zeros)
    assert checksum(torch.tensor([float("nan")])) == checksum(torch.tensor([float("nan")]))


def test_never_overwrites(tmp_path: Path) -> None:
    """Catches two writers to one folder that silently mix their tensors."""
    layout = TensorLayout("0", torch.float32, (1,))
    write_tensor_file(tmp_path / "file", [layout], [torch.zeros(1)])
    with pytest.raises(CheckpointError, match=r"file: File exists"):
        write_tensor_file(tmp_path / "file", [layout], [torch.zeros(1)])
