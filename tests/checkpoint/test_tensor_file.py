"""Our writer against safetensors' own reader."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megads.checkpoint.rectangle import Rectangle, coverage_fault
from megads.checkpoint.tensor_file import TensorLayout, checksum, write_tensor_file
from megads.errors import CheckpointError
from tests.checkpoint.random_layouts import random_cuts


def random_rectangle(draw: random.Random, shape: tuple[int, ...]) -> Rectangle:
    offset = tuple(draw.randrange(extent) for extent in shape)
    return Rectangle(offset, tuple(draw.randint(1, n - start) for n, start in zip(shape, offset, strict=True)))


def mask(rectangle: Rectangle, shape: tuple[int, ...]) -> torch.Tensor:
    filled = torch.zeros(shape, dtype=torch.int64)
    filled[rectangle.within(Rectangle((0,) * len(shape), shape))] = 1
    return filled


@pytest.mark.parametrize("shape", [(9,), (5, 6), (3, 4, 5)])
def test_overlap(shape: tuple[int, ...]) -> None:
    """Catches an overlap that is one off at an edge, or empty in one dim only."""
    draw = random.Random(3)
    for _ in range(300):
        left, right = random_rectangle(draw, shape), random_rectangle(draw, shape)
        expected = mask(left, shape) * mask(right, shape)
        overlap = left.overlap(right)
        assert overlap == right.overlap(left)
        assert (overlap is None) == (not expected.any())
        if overlap is not None:
            assert torch.equal(mask(overlap, shape), expected)
            values = torch.arange(expected.numel()).view(shape)
            part = values[left.within(Rectangle((0,) * len(shape), shape))]
            assert torch.equal(part[overlap.within(left)].reshape(-1), values[expected.bool()])


@pytest.mark.parametrize("shape", [(9,), (5, 6), (3, 4, 5)])
def test_coverage_of_random_cuts(shape: tuple[int, ...]) -> None:
    """Catches a valid cut that is refused, and a doubled, missing or shifted part that passes."""
    draw = random.Random(4)
    whole = Rectangle((0,) * len(shape), shape)
    for _ in range(200):
        parts = random_cuts(draw, whole, 4)
        draw.shuffle(parts)
        assert coverage_fault(shape, parts) is None
        damaged = list(parts)
        change = draw.choice(["drop", "double", "replace"])
        if change == "drop":
            damaged.pop()
        elif change == "double":
            damaged.append(parts[0])
        else:
            damaged[0] = random_rectangle(draw, shape)
        exact = torch.equal(sum(mask(part, shape) for part in damaged) + torch.zeros(shape), torch.ones(shape))
        assert (coverage_fault(shape, damaged) is None) == exact, (change, damaged)


def test_coverage_faults_are_named() -> None:
    """Catches an overlap that hides a gap of the same size from a mere count of elements."""
    assert coverage_fault((4,), [Rectangle((0,), (2,)), Rectangle((1,), (2,))]) == "the parts at [0] and [1] overlap"
    assert coverage_fault((4,), [Rectangle((0,), (3,))]) == "1 of its 4 elements are in no part"
    assert "not inside" in str(coverage_fault((4,), [Rectangle((3,), (2,))]))
    assert "not inside" in str(coverage_fault((4, 2), [Rectangle((0,), (4,))]))


def test_safetensors_reads_it(tmp_path: Path) -> None:
    """Catches a header or an alignment that other tools cannot read, and views written with their neighbours."""
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
    # The first in blocks of its rows.
    checksums = write_tensor_file(tmp_path / "file", layouts, [iter(tensors[0].split(1)), *tensors[1:]])
    loaded = load_file(tmp_path / "file")
    assert [loaded[str(index)].dtype for index in range(6)] == [tensor.dtype for tensor in tensors]
    assert all(torch.equal(loaded[str(index)], tensor) for index, tensor in enumerate(tensors))
    assert checksums == [checksum(loaded[str(index)]) for index in range(6)]


def test_checksum_sees_every_bit() -> None:
    """Catches a checksum over values (-0.0 equals 0.0, NaN equals nothing) or over a part of the bytes."""
    zeros = torch.zeros(1000)
    for index in (0, 499, 999):
        changed = zeros.clone()
        changed[index] = -0.0
        assert checksum(changed) != checksum(zeros)
    assert checksum(torch.tensor([float("nan")])) == checksum(torch.tensor([float("nan")]))


def test_never_overwrites(tmp_path: Path) -> None:
    """Catches two writers in one folder that silently mix their tensors."""
    layout = TensorLayout("0", torch.float32, (1,))
    write_tensor_file(tmp_path / "file", [layout], [torch.zeros(1)])
    with pytest.raises(CheckpointError, match=r"file: File exists"):
        write_tensor_file(tmp_path / "file", [layout], [torch.zeros(1)])
