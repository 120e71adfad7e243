"""Merging and splitting: bytes, indexes and sidecars."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megads.data.config import PreprocessConfig, TokenizerConfig
from megads.data.examined import check
from megads.data.indexed import IndexedDataset, IndexedDatasetWriter
from megads.data.joined import merge, split
from megads.data.preprocess import preprocess
from megads.data.sidecar import read_sidecar, write_sidecar
from megads.data.tokenizer import train_tokenizer
from megads.errors import ConfigError, DataError


def write_sequences(prefix: Path, lengths: list[list[int]], start: int, dtype: str = "<u2") -> None:
    """A dataset of documents of several sequences, as Megatron's tools may make; tokens count up from `start`."""
    sizes = np.array([size for document in lengths for size in document], np.int32)
    offsets = np.dtype(dtype).itemsize * (np.cumsum(sizes, dtype=np.int64) - sizes)
    index = np.cumsum([0, *map(len, lengths)], dtype=np.int64)
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, {"<u2": 8, "<i4": 4}[dtype], sizes.size, index.size)
    Path(f"{prefix}.idx").write_bytes(header + sizes.tobytes() + offsets.tobytes() + index.tobytes())
    Path(f"{prefix}.bin").write_bytes(np.arange(start, start + sizes.sum(), dtype=dtype).tobytes())


def bytes_of(prefix: Path) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


FIRST, SECOND = [[3, 2], [4], [], [0, 5]], [[1], [7, 7, 7]]


def test_a_merge_is_what_one_dataset_of_all_would_be(tmp_path: Path) -> None:
    """Catches offsets of the second shard that start at 0, documents of several or no sequences that are lost."""
    write_sequences(tmp_path / "a", FIRST, 0)
    write_sequences(tmp_path / "b", SECOND, 14)
    write_sequences(tmp_path / "expected", FIRST + SECOND, 0)
    merge([str(tmp_path / "a"), str(tmp_path / "b")], str(tmp_path / "all"))
    assert bytes_of(tmp_path / "all") == bytes_of(tmp_path / "expected")
    # And apart again, at the same place.
    split(str(tmp_path / "all"), str(tmp_path / "part"), {"x": 4, "y": 2})
    assert bytes_of(tmp_path / "part-x") == bytes_of(tmp_path / "a")
    assert bytes_of(tmp_path / "part-y") == bytes_of(tmp_path / "b")


def test_a_merge_takes_the_wider_dtype(tmp_path: Path) -> None:
    """Catches the bytes of two dtypes laid end to end."""
    write_sequences(tmp_path / "a", FIRST, 0)
    write_sequences(tmp_path / "b", SECOND, 70_000, "<i4")
    made = merge([str(tmp_path / "a"), str(tmp_path / "b")], str(tmp_path / "all"))
    assert made.dtype == "<i4"
    assert made.stream(range(6)).tolist() == [*range(14), *range(70_000, 70_022)]


@pytest.fixture
def preprocessed(tmp_path: Path) -> list[str]:
    """Two datasets of one tokenizer, with sidecars."""
    texts = ["some words here", "naïve 🚀", "x" * 50, "the end of it", "five"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts) + "broken\n")
    (tmp_path / "b.jsonl").write_text('{"text": "another"}\n{"text": "one more"}')
    tokenizer = str(tmp_path / "tokenizer.json")
    train_tokenizer(TokenizerConfig(input=[str(tmp_path / "a.jsonl")], output=tokenizer, vocab_size=270))
    for name in "ab":
        preprocess(
            PreprocessConfig(input=[str(tmp_path / f"{name}.jsonl")], tokenizer=tokenizer, output=str(tmp_path / name))
        )
    return [str(tmp_path / "a"), str(tmp_path / "b")]


def test_sidecars_go_along(preprocessed: list[str], tmp_path: Path) -> None:
    """Catches a merged dataset that trains unchecked, and a merge that differs from preprocessing all files at once."""
    merge(preprocessed, str(tmp_path / "all"))
    together = preprocess(
        PreprocessConfig(
            input=[f"{prefix}.jsonl" for prefix in preprocessed],
            tokenizer=str(tmp_path / "tokenizer.json"),
            output=str(tmp_path / "together"),
        )
    )
    assert bytes_of(tmp_path / "all") == bytes_of(tmp_path / "together")
    assert read_sidecar(tmp_path / "all") == together.sidecar
    assert Path(f"{tmp_path}/all.tokenizer.json").read_bytes() == (tmp_path / "tokenizer.json").read_bytes()
    parts = split(str(tmp_path / "all"), str(tmp_path / "all"), {"train": 0.7, "valid": 0.3})
    assert [part.num_documents for part in parts.values()] == [5, 2]
    for part in parts.values():
        found = check(part.prefix)
        assert found.checksums_held and found.documents == part.num_documents


def test_a_merge_with_parsed_special_tokens_says_so(preprocessed: list[str], tmp_path: Path) -> None:
    """Catches a prompt of a chat that is read as plain text because the first dataset of a merge was plain."""
    other = read_sidecar(preprocessed[1])
    assert other is not None
    write_sidecar(preprocessed[1], replace(other, text_special_tokens="parse"))
    merge(preprocessed, str(tmp_path / "all"))
    made = read_sidecar(tmp_path / "all")
    assert made is not None and made.text_special_tokens == "parse"


def test_what_must_not_be_joined_is_refused(preprocessed: list[str], tmp_path: Path) -> None:
    """Catches ids of two vocabularies in one dataset, an input that is overwritten, and a part without documents."""
    sidecar = Path(f"{preprocessed[1]}.json")
    before = bytes_of(tmp_path / "a")
    with pytest.raises(ConfigError, match="is an input and would be lost"):
        merge(preprocessed, preprocessed[0], overwrite=True)
    with pytest.raises(ConfigError, match="tiny gets 0 of 5 documents"):
        split(preprocessed[0], str(tmp_path / "p"), {"most": 1, "tiny": 0.001})
    sidecar.write_text(sidecar.read_text().replace('"tokenizer_sha256": "', '"tokenizer_sha256": "f'))
    with pytest.raises(DataError, match="preprocess both with one tokenizer"):
        merge(preprocessed, str(tmp_path / "all"))
    assert bytes_of(tmp_path / "a") == before and not (tmp_path / "all.bin").exists()


def test_one_sequence_a_document_is_the_usual_index(tmp_path: Path) -> None:
    """Catches an appended index that differs from the written one."""
    sizes = [5, 0, 9, 1]
    with IndexedDatasetWriter(tmp_path / "a", "<u2") as writer:
        for size in sizes:
            writer.append(range(size))
    merge([str(tmp_path / "a")], str(tmp_path / "copy"))
    assert bytes_of(tmp_path / "copy") == bytes_of(tmp_path / "a")
    assert IndexedDataset(tmp_path / "copy").num_documents == len(sizes)
