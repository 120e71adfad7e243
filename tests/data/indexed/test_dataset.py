from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megads.data.indexed.dataset import IndexedDataset, token_dtype
from megads.data.indexed.writer import IndexedDatasetWriter
from megads.errors import DataError
from tests.data.conftest import MakeDataset

SIZES = [3, 0, 2]
TOKENS = [10, 11, 12, 65499, 21]


def idx_bytes(
    sizes: list[int] = SIZES,
    offsets: list[int] | None = None,
    documents: list[int] | None = None,
    magic: bytes = b"MMIDIDX\x00\x00",
    version: int = 1,
    code: int = 8,
    counts: tuple[int, int] | None = None,
) -> bytes:
    """Contents of an .idx file, written by hand, with any requested defect."""
    offsets = [0, 6, 6] if offsets is None else offsets
    documents = [0, 1, 2, 3] if documents is None else documents
    header = magic + struct.pack("<Q", version) + struct.pack("<B", code)
    header += struct.pack("<QQ", *(counts or (len(sizes), len(documents))))
    arrays = struct.pack(f"<{len(sizes)}i", *sizes) + struct.pack(f"<{len(offsets)}q", *offsets)
    return header + arrays + struct.pack(f"<{len(documents)}q", *documents)


def write_pair(tmp_path: Path, idx: bytes, tokens: bytes = struct.pack("<5H", *TOKENS)) -> Path:
    (tmp_path / "d.idx").write_bytes(idx)
    (tmp_path / "d.bin").write_bytes(tokens)
    return tmp_path / "d"


def test_writer_is_megatrons_format_byte_for_byte(tmp_path: Path) -> None:
    """Catches any change of the format: padding in the header, a wrong dtype code, a document index without its end."""
    with IndexedDatasetWriter(tmp_path / "d", np.uint16) as writer:
        for document in ([10, 11, 12], [], np.array([65499, 21], np.int32)):
            writer.append(document)
    assert (tmp_path / "d.idx").read_bytes() == idx_bytes()
    assert (tmp_path / "d.bin").read_bytes() == struct.pack("<5H", *TOKENS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.bin", "d.idx"]


def test_reader_reads_the_format_written_by_hand(tmp_path: Path) -> None:
    """Catches a reader that only agrees with our writer: counts, slices and documents of an independent file."""
    dataset = IndexedDataset(write_pair(tmp_path, idx_bytes()))
    assert (dataset.num_sequences, dataset.num_documents, dataset.num_tokens) == (3, 3, 5)
    assert dataset.dtype == np.uint16
    assert [dataset.tokens(i).tolist() for i in range(3)] == [[10, 11, 12], [], [65499, 21]]
    assert dataset.tokens(0, 1).tolist() == [11, 12]
    assert dataset.tokens(0, 1, 1).tolist() == [11]
    assert dataset.document_sizes(range(1, 3)).tolist() == [0, 2]
    assert dataset.stream(range(1, 3)).tolist() == [65499, 21]
    assert [dataset.document_of(position) for position in range(5)] == [0, 0, 0, 2, 2]


@pytest.mark.parametrize("arguments", [(3,), (-1,), (0, 4), (0, 1, 3), (0, -1), (1, 0, 1)])
def test_reading_past_a_sequence_fails(tmp_path: Path, arguments: tuple[int, ...]) -> None:
    """Catches a slice that silently runs into the next document, because .bin is one array."""
    dataset = IndexedDataset(write_pair(tmp_path, idx_bytes()))
    with pytest.raises(IndexError):
        dataset.tokens(*arguments)


def test_documents_may_have_several_sequences(tmp_path: Path) -> None:
    """Catches code that takes sequences for documents: Megatron can split documents into sentences."""
    dataset = IndexedDataset(write_pair(tmp_path, idx_bytes(documents=[0, 2, 3])))
    assert dataset.num_documents == 2
    assert dataset.document_tokens(0).tolist() == [10, 11, 12]
    assert dataset.document_sizes(range(2)).tolist() == [3, 2]


@pytest.mark.parametrize("code,name", [(1, "B"), (2, "b"), (3, "h"), (4, "i"), (5, "q"), (8, "H")])
def test_every_dtype_code_is_megatrons(tmp_path: Path, code: int, name: str) -> None:
    """Catches a wrong entry in the table of dtype codes."""
    item = struct.calcsize(f"<{name}")
    idx = idx_bytes(sizes=[2], offsets=[0], documents=[0, 1], code=code)
    dataset = IndexedDataset(write_pair(tmp_path, idx, struct.pack(f"<2{name}", 1, 100)))
    assert dataset.tokens(0).tolist() == [1, 100]
    assert dataset.dtype.itemsize == item


DEFECTS: dict[str, tuple[Callable[[], bytes], str]] = {
    "magic": (lambda: idx_bytes(magic=b"WHATEVER\x00"), "byte 0: magic"),
    "legacy magic": (lambda: idx_bytes(magic=b"TNTIDX\x00\x00\x01"), "convert it"),
    "version": (lambda: idx_bytes(version=2), "byte 9: version 2"),
    "float dtype": (lambda: idx_bytes(code=6), "byte 17: dtype code 6.*swapped in GPT-NeoX"),
    "unknown dtype": (lambda: idx_bytes(code=9), "byte 17: dtype code 9 is unknown"),
    "too many sequences": (lambda: idx_bytes(counts=(4, 4)), "byte 18: 4 sequences.*truncated"),
    "absurd count": (lambda: idx_bytes(counts=(2**63, 4)), "byte 18: 9223372036854775808 sequences"),
    "too few documents": (lambda: idx_bytes(counts=(3, 3)), "byte 18:.*longer than that"),
    "truncated arrays": (lambda: idx_bytes()[:-1], "truncated"),
    "truncated header": (lambda: idx_bytes()[:20], "byte 20: the file ends inside its header"),
    "empty file": (lambda: b"", "byte 0: the file ends inside its header"),
    "gap": (lambda: idx_bytes(offsets=[0, 6, 8]), "byte 62: sequence 2 starts at byte 8 .* end at 6"),
    "first offset": (lambda: idx_bytes(offsets=[2, 8, 8]), "byte 46: sequence 0 starts at byte 2"),
    "outside": (lambda: idx_bytes(offsets=[0, 6, 6000]), "byte 62: sequence 2 starts at byte 6000.*has 10 bytes"),
    "negative size": (lambda: idx_bytes(sizes=[3, -1, 2]), "byte 38: sequence 1 has a length of -1"),
    "documents start": (lambda: idx_bytes(documents=[1, 1, 2, 3]), "byte 70: the document index starts at sequence 1"),
    "documents end": (lambda: idx_bytes(documents=[0, 1, 2, 2]), "byte 94: the document index ends at sequence 2"),
    "documents decrease": (lambda: idx_bytes(documents=[0, 2, 1, 3]), "byte 86:.*decreases from 2 to 1"),
    "sizes too large": (lambda: idx_bytes(sizes=[3, 0, 3]), "has 10 bytes.*describes 12"),
    "no sequences": (lambda: idx_bytes(sizes=[], offsets=[], documents=[0]), "the dataset is empty"),
    "no documents": (lambda: idx_bytes(documents=[]), "the dataset is empty"),
}


@pytest.mark.fault(14)
@pytest.mark.parametrize("defect", DEFECTS)
def test_a_damaged_index_is_refused(tmp_path: Path, defect: str) -> None:
    """Catches a damaged index that is read as tokens; the message must name file, byte and value."""
    make, message = DEFECTS[defect]
    with pytest.raises(DataError, match=message) as caught:
        IndexedDataset(write_pair(tmp_path, make()))
    assert str(tmp_path / "d") in str(caught.value)
    assert caught.value.exit_code == 3


def test_a_multimodal_dataset_is_refused_by_its_name(tmp_path: Path) -> None:
    """Catches a multimodal dataset that is reported as damaged: its modes, one byte per sequence, follow the index."""
    prefix = write_pair(tmp_path, idx_bytes() + bytes([0, 1, 0]))
    with pytest.raises(DataError, match=r"d.idx: byte 102: .* of the 3 sequences .*multimodal datasets.*text only"):
        IndexedDataset(prefix)


@pytest.mark.parametrize("missing", ["d.bin", "d.idx"])
def test_a_missing_file_is_refused_with_the_command_that_makes_it(tmp_path: Path, missing: str) -> None:
    """Catches a traceback of open() where the user only mistyped the path."""
    prefix = write_pair(tmp_path, idx_bytes())
    (tmp_path / missing).unlink()
    with pytest.raises(DataError, match=f"{missing}.*megads preprocess"):
        IndexedDataset(prefix)


@pytest.mark.parametrize("tokens", [b"\x00" * 9, b"\x00" * 12, b""])
def test_a_bin_of_another_size_is_refused(tmp_path: Path, tokens: bytes) -> None:
    """Catches a .bin that is truncated, too long, or of another dataset, and is accepted."""
    with pytest.raises(DataError, match=f"has {len(tokens)} bytes"):
        IndexedDataset(write_pair(tmp_path, idx_bytes(), tokens))


def test_a_dataset_of_empty_documents_is_refused(tmp_path: Path) -> None:
    """Catches an mmap of an empty file failing with a traceback."""
    with pytest.raises(DataError, match="holds no tokens"):
        IndexedDataset(write_pair(tmp_path, idx_bytes(sizes=[0], offsets=[0], documents=[0, 1]), b""))


def test_writer_removes_its_temporaries_and_keeps_the_old_dataset_on_failure(make_dataset: MakeDataset) -> None:
    """Catches a failed rewrite that destroys the existing dataset."""
    old = make_dataset([4, 5])
    folder = Path(old.prefix).parent
    with pytest.raises(KeyboardInterrupt), IndexedDatasetWriter(old.prefix, np.int32) as writer:
        writer.append([1, 2])
        raise KeyboardInterrupt
    assert sorted(path.name for path in folder.iterdir()) == ["corpus.bin", "corpus.idx"]
    assert IndexedDataset(old.prefix).fingerprint() == old.fingerprint()


def test_nothing_is_visible_before_the_commit(tmp_path: Path) -> None:
    """Catches writing under the final name, where a reader would find a partial dataset."""
    with IndexedDatasetWriter(tmp_path / "d", np.int32) as writer:
        writer.append([1])
        assert not (tmp_path / "d.bin").exists() and not (tmp_path / "d.idx").exists()
    assert IndexedDataset(tmp_path / "d").num_tokens == 1


@pytest.mark.parametrize("token", [-1, 65536])
def test_tokens_that_do_not_fit_the_dtype_are_refused(tmp_path: Path, token: int) -> None:
    """Catches wrap-around in the cast: 65536 would become token 0."""
    with pytest.raises(DataError, match="document 1 has tokens"), IndexedDatasetWriter(tmp_path / "d", "u2") as writer:
        writer.append([5])
        writer.append(np.array([token]))
    assert not list(tmp_path.iterdir())


def test_an_empty_dataset_is_not_written(tmp_path: Path) -> None:
    """Catches an empty dataset that is written although the reader refuses it."""
    with pytest.raises(DataError, match="empty"), IndexedDatasetWriter(tmp_path / "d", np.int32) as writer:
        writer.append([])
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_a_data_error_and_leaves_no_dataset(tmp_path: Path) -> None:
    """Catches a traceback, or a truncated dataset under its final name, when the disk is full."""
    program = """
import resource, sys
import numpy as np
from megads.data.indexed.writer import IndexedDatasetWriter
from megads.errors import DataError
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    with IndexedDatasetWriter(sys.argv[1], np.int32) as writer:
        for _ in range(1000):
            writer.append(np.zeros(1000, np.int64))
except DataError as error:
    print(error)
"""
    result = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "d")], capture_output=True, text=True, check=True
    )
    assert "writing failed after" in result.stdout and "free space" in result.stdout, result.stderr
    assert not list(tmp_path.iterdir())


def test_token_dtype_is_megatrons_rule() -> None:
    """Catches an off-by-one in the threshold, which would change the files' bytes."""
    assert token_dtype(65499) == np.uint16
    assert token_dtype(65500) == np.int32


@pytest.mark.fault(15)
def test_fingerprint_follows_the_content(make_dataset: MakeDataset) -> None:
    """Catches an index map cached for one dataset being used for another."""
    prints = {make_dataset(sizes, name=f"d{i}").fingerprint() for i, sizes in enumerate([[3, 4], [4, 3], [7], [3, 5]])}
    assert len(prints) == 4
    assert make_dataset([3, 4], name="again").fingerprint() in prints
