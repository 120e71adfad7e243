from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megads.tools.prepare.blocks import Lines, Rows, block_bytes_of, blocks_of, first_texts, texts_of_places
from megads.tools.prepare.records import NoDocument
from megads.tools.prepare.rejections import RejectedLine
from megads.tools.prepare.text import Document, DocumentReader


def test_the_engines_sample_covers_the_whole_corpus(tmp_path: Path) -> None:
    """Catches an engine chosen for a corpus of code because its first documents are prose, and a reader whose byte
    count, which progress is computed from, moves before the work begins."""
    lines = [json.dumps({"text": f"{number:05d} " + "word " * 60}) + "\n" for number in range(20_000)]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress("".join(lines[:5000]).encode(), 0))
    pq.write_table(pa.table({"text": ["from parquet " + "x" * 300] * 9000}), tmp_path / "c.parquet", compression="none",
                   use_dictionary=False)  # fmt: skip
    (tmp_path / "d.txt").write_text("plain text " * 50_000)
    reader = DocumentReader([str(tmp_path)], ("text",))
    first = list(blocks_of(DocumentReader([str(tmp_path)], ("text",)), block_bytes_of(reader)))[:2]
    texts = [*first_texts(first, ("text",)), *texts_of_places(reader, ("text",))]
    assert 200 < len(texts) <= 300 and reader.bytes_read == 0
    numbers = [int(text[:5]) for text in texts if text[:5].isdigit()]
    assert numbers[:100] == list(range(100)), "the first block is asked too"
    assert max(numbers) > 19_000 and np.diff(sorted(numbers)).max() < 2000
    assert sum(text.startswith("from parquet") for text in texts) == 5
    assert sum(text.startswith("plain text") for text in texts) > 0
    assert first_texts(first, ("text",)) == [f"{number:05d} " + "word " * 60 for number in range(100)]


def test_positions_are_found_among_empty_and_tiny_files(tmp_path: Path) -> None:
    """Catches a position beyond the last file, if a file is empty or none has any text."""
    (tmp_path / "a.jsonl").write_text("")
    assert texts_of_places(DocumentReader([str(tmp_path)], ("text",)), ("text",)) == []
    (tmp_path / "b.txt").write_text("x")
    (tmp_path / "c.jsonl").write_text("")
    assert texts_of_places(DocumentReader([str(tmp_path)], ("text",)), ("text",)) == ["x"]


def test_a_blocks_digest_covers_all_of_its_text() -> None:
    """Catches a block taken from the cache although its text has changed but not its length, and one that is recomputed
    although nothing has changed."""
    first, why = Document("one", "a.txt", 1), NoDocument("no text", "")
    contents: list[list[Document | RejectedLine]] = [
        [], [first], [first, first], [first._replace(text="two")], [first._replace(source="b.txt")],
        [first._replace(line=2)], [first._replace(continues=True)],
        [Document("on", "a.txt", 1), Document("e", "a.txt", 1)],
        [RejectedLine("a.txt", 1, why)], [RejectedLine("a.txt", 1, NoDocument("no JSON", ""))],
    ]  # fmt: skip
    digests = [Rows(content, 10).digest() for content in contents]
    assert len(set(digests)) == len(digests)
    assert digests == [Rows(list(content), 99).digest() for content in contents], "the size on disk changes nothing"
    lines = [Lines("a", b"{}\n", first, 3).digest() for first in (True, False)]
    assert lines[0] != lines[1] != Lines("a", b"[]\n", False, 3).digest()
    assert lines[0] == Lines("b", b"{}\n", True, 9).digest()
