"""Merging and splitting: data, indexes and sidecars."""

from __future__ import annotations

import json
import re
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megads.cli.main import run
from megads.data.indexed.dataset import IndexedDataset
from megads.data.indexed.sidecar import read_sidecar, write_sidecar
from megads.data.indexed.writer import IndexedDatasetWriter
from megads.errors import ConfigError, DataError
from megads.tools.dataset.actions import check, length_statistics, merge, split
from megads.tools.dataset.config import DatasetAction, DatasetActionConfig
from megads.tools.prepare.config import PreprocessConfig, TokenizerConfig
from megads.tools.prepare.preprocess import preprocess
from megads.tools.prepare.tokenizer import train_tokenizer


def write_sequences(prefix: Path, lengths: list[list[int]], start: int, dtype: str = "<u2") -> None:
    """Writes documents of several sequences, as Megatron's tools may; tokens count up from `start`."""
    sizes = np.array([size for document in lengths for size in document], np.int32)
    offsets = np.dtype(dtype).itemsize * (np.cumsum(sizes, dtype=np.int64) - sizes)
    index = np.cumsum([0, *map(len, lengths)], dtype=np.int64)
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, {"<u2": 8, "<i4": 4}[dtype], sizes.size, index.size)
    Path(f"{prefix}.idx").write_bytes(header + sizes.tobytes() + offsets.tobytes() + index.tobytes())
    Path(f"{prefix}.bin").write_bytes(np.arange(start, start + sizes.sum(), dtype=dtype).tobytes())


def bytes_of(prefix: Path) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


FIRST, SECOND = [[3, 2], [4], [], [0, 5]], [[1], [7, 7, 7]]


def test_a_merge_equals_one_dataset_of_all_documents(tmp_path: Path) -> None:
    """Catches offsets of the second shard that start at 0, and documents of several or no sequences that are lost."""
    write_sequences(tmp_path / "a", FIRST, 0)
    write_sequences(tmp_path / "b", SECOND, 14)
    write_sequences(tmp_path / "expected", FIRST + SECOND, 0)
    merge([str(tmp_path / "a"), str(tmp_path / "b")], str(tmp_path / "all"))
    assert bytes_of(tmp_path / "all") == bytes_of(tmp_path / "expected")
    # Split at the same document again.
    split(str(tmp_path / "all"), str(tmp_path / "part"), {"x": 4, "y": 2})
    assert bytes_of(tmp_path / "part-x") == bytes_of(tmp_path / "a")
    assert bytes_of(tmp_path / "part-y") == bytes_of(tmp_path / "b")


def test_a_merge_takes_the_wider_dtype(tmp_path: Path) -> None:
    """Catches data of two dtypes concatenated byte by byte."""
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


def test_merged_datasets_have_a_sidecar(preprocessed: list[str], tmp_path: Path) -> None:
    """Catches a merged dataset without a sidecar, and a merge that differs from preprocessing all files at once."""
    merge(preprocessed, str(tmp_path / "all"))
    together = preprocess(
        PreprocessConfig(
            input=[f"{prefix}.jsonl" for prefix in preprocessed],
            tokenizer=str(tmp_path / "tokenizer.json"),
            output=str(tmp_path / "together"),
        )
    )
    assert bytes_of(tmp_path / "all") == bytes_of(tmp_path / "together")
    # A merge records no input_identity: it need not equal preprocessing its inputs.
    assert read_sidecar(tmp_path / "all") == replace(together.sidecar, input_identity=None)
    assert Path(f"{tmp_path}/all.tokenizer.json").read_bytes() == (tmp_path / "tokenizer.json").read_bytes()
    parts = split(str(tmp_path / "all"), str(tmp_path / "all"), {"train": 0.7, "valid": 0.3})
    assert [part.num_documents for part in parts.values()] == [5, 2]
    for part in parts.values():
        found = check(part.prefix)
        assert found.checksums_held and found.documents == part.num_documents


def test_a_merge_records_that_special_tokens_were_parsed(preprocessed: list[str], tmp_path: Path) -> None:
    """Catches chat prompts tokenized as plain text because the first dataset of a merge was plain."""
    other = read_sidecar(preprocessed[1])
    assert other is not None
    write_sidecar(preprocessed[1], replace(other, text_special_tokens="parse"))
    merge(preprocessed, str(tmp_path / "all"))
    made = read_sidecar(tmp_path / "all")
    assert made is not None and made.text_special_tokens == "parse"


def test_datasets_that_do_not_belong_together_are_not_merged(preprocessed: list[str], tmp_path: Path) -> None:
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


def test_a_merge_writes_the_index_that_the_writer_would(tmp_path: Path) -> None:
    """Catches a merged index that differs from the writer's."""
    sizes = [5, 0, 9, 1]
    with IndexedDatasetWriter(tmp_path / "a", "<u2") as writer:
        for size in sizes:
            writer.append(range(size))
    merge([str(tmp_path / "a")], str(tmp_path / "copy"))
    assert bytes_of(tmp_path / "copy") == bytes_of(tmp_path / "a")
    assert IndexedDataset(tmp_path / "copy").num_documents == len(sizes)


TEXTS = ["first", "naïve 🚀 text", "x" * 300, "last"]


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    tokenizer = str(tmp_path / "tokenizer.json")
    train_tokenizer(TokenizerConfig(input=[str(tmp_path / "a.jsonl")], output=tokenizer, vocab_size=257))
    preprocess(
        PreprocessConfig(input=[str(tmp_path / "a.jsonl")], tokenizer=tokenizer, output=str(tmp_path / "corpus"))
    )
    return tmp_path / "corpus"


def test_every_flipped_byte_is_found(prefix: Path) -> None:
    """Catches corruption that a check of only lengths and ids misses."""
    assert check(str(prefix)).checksums_held
    for ending in (".bin", ".idx"):
        path = Path(f"{prefix}{ending}")
        sound = path.read_bytes()
        for position in range(0, len(sound), 7):
            damaged = bytearray(sound)
            damaged[position] ^= 1
            path.write_bytes(damaged)
            with pytest.raises(DataError, match=rf"{prefix}\.(bin|idx): "):
                check(str(prefix))
        path.write_bytes(sound)
    assert check(str(prefix)).documents == len(TEXTS)


def test_a_foreign_id_is_named_with_its_place(prefix: Path) -> None:
    """Catches a message that does not locate the document."""
    tokens = np.fromfile(f"{prefix}.bin", "<u2")
    tokens[8] = 300
    tokens.tofile(f"{prefix}.bin")
    with pytest.raises(DataError, match=r"byte 16: token 300 of document 1, at 2, is none of the tokenizer's 257"):
        check(str(prefix))


def test_document_lengths_are_counted_in_buckets_and_percentiles(tmp_path: Path) -> None:
    """Catches buckets that are off by one at powers of two, and percentiles from the wrong end."""
    lengths = [0, 1, 2, 3, 4, 7, 8, 1023, 1024]
    with IndexedDatasetWriter(tmp_path / "a", "<u2") as writer:
        for length in lengths:
            writer.append([1] * length)
    counted = length_statistics(str(tmp_path / "a"))
    assert counted.histogram[:13].tolist() == [1, 1, 2, 2, 1, 0, 0, 0, 0, 0, 1, 1, 0]
    assert (counted.shortest, counted.longest, counted.percentiles[50]) == (0, 1024, 4)
    assert (counted.documents, counted.tokens) == (len(lengths), sum(lengths))
    with IndexedDatasetWriter(tmp_path / "b", "<u2") as writer:
        for length in (5, 3):
            writer.append([1] * length)
    counted = length_statistics(str(tmp_path / "b"))
    assert (counted.shortest, counted.longest) == (3, 5)


def test_the_verb_runs_every_action(
    prefix: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches an action that the command line does not reach, or that prints nothing."""
    monkeypatch.chdir(prefix.parent)
    assert run(["dataset", "inspect", "input=corpus", "first=1", "count=2", "max_characters=40"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "=== document 1: 17 tokens", "naïve 🚀 text<|endoftext|>", "=== document 2: 301 tokens", "x" * 40 + " ...",
    ]  # fmt: skip
    assert run(["dataset", "stats", "input=[corpus]", "output=lengths.png"]) == 0
    said = capsys.readouterr().out
    assert "4 documents, 329 tokens" in said and re.search(r"256 to 511 +1 +█", said)
    assert Path("lengths.png").read_bytes().startswith(b"\x89PNG")
    assert run(["dataset", "split", "input=corpus", "output=corpus", "parts={first: 3, second: 1}"]) == 0
    assert run(["dataset", "merge", "input=[corpus-second, corpus-first]", "output=turned"]) == 0
    assert run(["dataset", "check", "input=[corpus, turned, corpus-first]"]) == 0
    assert "turned: sound: 4 documents, 329 tokens" in capsys.readouterr().out
    assert run(["dataset", "split", "input=corpus", "output=corpus", "parts={first: 3, second: 1}"]) == 2
    assert "corpus-first.bin exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"action": DatasetAction.stats, "input": "a"}, None),
        ({"action": DatasetAction.stats, "input": "a", "output": "a.png"}, None),
        ({"action": DatasetAction.stats, "input": "a", "output": "a.pdf"}, r"a .png file"),
        ({"action": DatasetAction.merge, "input": ["a", "b"], "output": "c.pdf"}, None),
        ({"action": DatasetAction.merge, "input": ["a", "b"]}, "merge needs output"),
        ({"action": DatasetAction.split, "input": "a"}, "split needs output"),
        ({"action": DatasetAction.split, "input": ["a", "b"], "output": "c"}, "split takes one dataset, input names 2"),
        ({"action": DatasetAction.inspect, "input": ["a", "b"]}, "inspect takes one dataset"),
        ({"action": DatasetAction.inspect, "input": ["a"], "first": 0, "count": 1, "max_characters": 1}, None),
        ({"action": DatasetAction.inspect, "input": "a", "first": -1}, "first = -1"),
        ({"action": DatasetAction.inspect, "input": "a", "count": 0}, "count = 0"),
        ({"action": DatasetAction.inspect, "input": "a", "max_characters": 0}, "max_characters = 0"),
        ({"action": DatasetAction.check, "input": ""}, "want the prefix of a dataset"),
        ({"action": DatasetAction.check, "input": []}, "want the prefix of a dataset"),
        ({"action": DatasetAction.check, "input": ["a", 3]}, "want the prefix of a dataset"),
        ({"action": DatasetAction.check, "input": 3}, "want the prefix of a dataset"),
        ({"action": DatasetAction.split, "input": "a", "output": "c", "parts": {"x": 9, "y": 0.1}}, None),
        ({"action": DatasetAction.split, "input": "a", "output": "c", "parts": {}}, "want names with shares"),
        ({"action": DatasetAction.split, "input": "a", "output": "c", "parts": {"x": 0}}, "want names with shares"),
        ({"action": DatasetAction.split, "input": "a", "output": "c", "parts": ["x"]}, "want names with shares"),
    ],
)
def test_actions_on_datasets(settings: dict[str, Any], said: str | None) -> None:
    """Catches an action that starts without a setting it needs, and a check that refuses a value at its limit."""
    config = DatasetActionConfig(**settings)
    if said is None:
        config.check()
        return
    with pytest.raises(ConfigError, match=said):
        config.check()


def test_parts_of_a_split() -> None:
    """Catches default shares other than the documented ones."""
    assert DatasetActionConfig(input="a").shares == {"train": 0.98, "valid": 0.02}
    assert DatasetActionConfig(input=["a", "b"]).prefixes == ["a", "b"]
