"""The manifest survives a round trip and nothing else."""

from __future__ import annotations

import json

import pytest

from megads.checkpoint.manifest import Manifest, StoredTensor
from megads.errors import CheckpointError
from tests.checkpoint.random_layouts import run_record


def manifest(offset: int = 2) -> Manifest:
    tensors = (
        StoredTensor("weight/a", (4, 3), (0, 0), (2, 3), "F32", "rank_00000.safetensors", "0", "ab"),
        StoredTensor("weight/a", (4, 3), (offset, 0), (2, 3), "F32", "rank_00001.safetensors", "0", "cd"),
    )
    return Manifest(
        run_record(7), {"torch": "2"}, 3, {"rank_00000.safetensors": 99, "rank_00001.safetensors": 99}, tensors
    )


def test_round_trip() -> None:
    """Catches a field that is written and not read, or read as another type."""
    assert Manifest.decode(manifest().encode()) == manifest()
    assert Manifest.decode(manifest().encode()).digest() == manifest().digest()


def test_every_flipped_bit_is_noticed() -> None:
    """Catches damage in the manifest itself: a changed step, offset or checksum that still parses."""
    text = manifest().encode()
    for position in range(len(text)):
        damaged = bytearray(text)
        damaged[position] ^= 1 << (position % 7)
        try:
            assert Manifest.decode(bytes(damaged)) == manifest(), position
        except CheckpointError:
            continue


def test_newer_format_is_refused() -> None:
    """Catches a newer checkpoint reported as damaged, which sends its owner looking for a broken disk."""
    body = json.loads(manifest().encode())
    body["format_version"] = 99
    with pytest.raises(CheckpointError, match="format version 99 is newer"):
        Manifest.decode(json.dumps(body).encode())


def test_coverage() -> None:
    """Catches parts that overlap and leave a gap of the same size."""
    manifest().check_coverage()
    with pytest.raises(CheckpointError, match=r"weight/a of shape \[4, 3\] is not stored exactly once: .* overlap"):
        manifest(offset=1).check_coverage()
