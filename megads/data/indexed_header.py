"""The header of `.idx`: what its fields are, and which files are refused by it."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np

from megads.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
LEGACY_MAGIC = b"TNTIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {code: np.dtype(name) for code, name in ((1, "u1"), (2, "i1"), (3, "<i2"), (4, "<i4"), (5, "<i8"), (8, "<u2"))}
REMEDY = "copy the pair of files again, or make it anew with `megads preprocess`"


def refusal(path: Path, byte: int, found: str, remedy: str = REMEDY) -> DataError:
    """Returns the error of a damaged file, with the byte at which the damage shows."""
    return DataError(f"{path}: byte {byte}: {found}; {remedy}")


def unpack_header(path: Path) -> tuple[bytes, int, int, int, int]:
    """Returns magic, version, dtype code, number of sequences and length of the document index."""
    with path.open("rb") as file:
        magic, version, code, num_sequences, num_entries = HEADER.unpack(file.read(HEADER.size))
    return magic, version, code, num_sequences, num_entries


def read_header(path: Path) -> tuple[np.dtype[Any], int, int]:
    """Returns token dtype, number of sequences and length of the document index; refuses all that does not fit."""
    with path.open("rb") as file:
        start = file.read(len(MAGIC))
    file_bytes = path.stat().st_size
    if start.startswith(LEGACY_MAGIC):
        raise refusal(
            path,
            0,
            f"magic {start!r} is Megatron's legacy format (`lazy` and `cached` datasets)",
            "convert it: read it with the legacy reader of an old Megatron-LM and add its documents to an `mmap` "
            "builder, or make it anew from the raw text with `megads preprocess`",
        )
    if len(start) == len(MAGIC) and start != MAGIC:
        raise refusal(path, 0, f"magic {start!r}, want {MAGIC!r}: not an indexed dataset", "check data.train path")
    if file_bytes < HEADER.size:
        raise refusal(path, file_bytes, f"the file ends inside its header of {HEADER.size} bytes")
    _, version, code, num_sequences, num_entries = unpack_header(path)
    if version != VERSION:
        raise refusal(path, 9, f"version {version}, only {VERSION} is known")
    if code in (6, 7):
        raise refusal(
            path,
            17,
            f"dtype code {code}: codes 6 and 7 are float64 and float32 in Megatron-LM and swapped in GPT-NeoX, "
            "and tokens are never floats",
            "make the dataset anew with `megads preprocess`",
        )
    if code not in DTYPES:
        raise refusal(path, 17, f"dtype code {code} is unknown, want one of {sorted(DTYPES)}")
    expected = HEADER.size + 12 * num_sequences + 8 * num_entries
    if num_sequences and expected + num_sequences == file_bytes:
        raise refusal(
            path,
            expected,
            f"a byte for each of the {num_sequences} sequences follows the document index: these are the modes of "
            "Megatron's multimodal datasets, and megads trains on text only",
            "write its sequences of text to a dataset without modes: read them with Megatron's IndexedDataset("
            "multimodal=True), and write them with its IndexedDatasetBuilder(multimodal=False)",
        )
    if expected != file_bytes:
        state = "truncated" if file_bytes < expected else "longer than that"
        found = (
            f"{num_sequences} sequences and {num_entries} document index entries take {expected} bytes, "
            f"the file has {file_bytes}: it is {state} or the counts are wrong"
        )
        raise refusal(path, 18, found)
    if num_sequences == 0 or num_entries < 2:
        found = f"{num_sequences} sequences in {max(num_entries - 1, 0)} documents: the dataset is empty"
        raise refusal(path, 18, found, "give `megads preprocess` documents with text")
    return DTYPES[code], num_sequences, num_entries
