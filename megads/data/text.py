"""Documents out of raw text files: JSON lines, plain text and parquet, the first two also compressed.

A line that is no document is counted and reported; only what spoils a whole file is fatal.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from zstandard import ZstdError

from megads.data.parquet import NotText, parquet_rows
from megads.data.plain_text import text_pieces, utf8_fault
from megads.data.text_files import (
    PARQUET_ENDINGS,
    TEXT_ENDINGS,
    decompressed,
    find_text_files,
    first_names,
    kind,
)
from megads.errors import DataError

UTF8_MARK = b"\xef\xbb\xbf"
KEPT_EXAMPLES = 100


class Document(NamedTuple):
    """One document, or a piece of a long one, and where it came from."""

    text: str
    source: str
    line: int
    continues: bool = False
    """More of the same document follows."""


@dataclass
class Rejections:
    """Lines that gave no document.

    Attributes:
        reasons: number of lines by reason.
        examples: "<file>:<line>: <reason>" of the first hundred.
    """

    reasons: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Lines rejected in all."""
        return self.reasons.total()

    def add(self, source: str, line: int, reason: str, detail: str = "") -> None:
        """Counts one line."""
        self.reasons[reason] += 1
        if len(self.examples) < KEPT_EXAMPLES:
            self.examples.append(f"{source}:{line}: {reason}" + (f" ({detail})" if detail else ""))

    def __str__(self) -> str:
        if not self.count:
            return "no lines rejected"
        reasons = ", ".join(f"{count} x {reason}" for reason, count in self.reasons.most_common())
        return f"{self.count} lines rejected: {reasons}; first: {self.examples[0]}"


class DocumentReader:
    """Iterates over the documents of files, once.

    Args:
        patterns: files, folders or globs: .jsonl or .json (one JSON object a line), .txt or .md (one document a
            file), each also .gz or .zst; .parquet.
        text_field: JSON field, or column, that holds the document.
        key: the config key that the patterns come from, for messages.

    Attributes:
        files: the files that match, each once: patterns in the order given, the matches of one in order of name.
        total_bytes: size of the files as they are on disk.
        bytes_read: how much of that has been read.
        rejected: lines that gave no document.

    Raises:
        ConfigError: no patterns.
        DataError: a pattern matches nothing, or a file of an unknown kind.
    """

    def __init__(self, patterns: Sequence[str], text_field: str, key: str = "input") -> None:
        self.files = find_text_files(patterns, key)
        self.total_bytes = sum(path.stat().st_size for path in self.files)
        self.bytes_read = 0
        self.rejected = Rejections()
        self.text_field = text_field
        self.key = key

    def __iter__(self) -> Iterator[Document]:
        """Yields documents in order.

        Raises:
            DataError: a file cannot be read, or all files together have no document.
        """
        found = False
        finished_bytes = 0
        for path in self.files:
            try:
                for document in self._read(path, finished_bytes):
                    found = True
                    yield document
            except (OSError, EOFError, zlib.error, ZstdError) as error:
                raise DataError(
                    f"{path}: reading failed after {self.bytes_read - finished_bytes} bytes: {error}; "
                    f"the file is truncated, damaged or not readable: make it again or leave it out of {self.key}"
                ) from error
            finished_bytes += path.stat().st_size
            self.bytes_read = finished_bytes
        if not found:
            raise DataError(
                f"{first_names(self.files)}: no documents, {self.rejected}; want text, or JSON lines or parquet with "
                f"the field {self.text_field!r} (another is named with text_field)"
            )

    def _read(self, path: Path, finished_bytes: int) -> Iterator[Document]:
        if kind(path) in PARQUET_ENDINGS:
            yield from self._parquet(path, finished_bytes)
            return
        if kind(path) in TEXT_ENDINGS:
            yield from self._plain_text(path, finished_bytes)
            return
        with path.open("rb") as raw, decompressed(raw, path) as file:
            for number, line in enumerate(file, start=1):
                # The position in the raw file is known for compressed files too, whose whole size is not.
                self.bytes_read = finished_bytes + raw.tell()
                yield from self._json_line(line, str(path), number)

    def _parquet(self, path: Path, finished_bytes: int) -> Iterator[Document]:
        size = path.stat().st_size
        for number, (share, text) in enumerate(parquet_rows(path, self.text_field), start=1):
            self.bytes_read = finished_bytes + int(share * size)
            if isinstance(text, NotText):
                self.rejected.add(str(path), number, str(text))
            else:
                yield Document(text, str(path), number)

    def _plain_text(self, path: Path, finished_bytes: int) -> Iterator[Document]:
        # Read twice: a file with a bad byte at its end gives no document, and none is taken back.
        with path.open("rb") as raw, decompressed(raw, path) as file:
            fault = utf8_fault(file)
        if fault is not None:
            self.rejected.add(str(path), fault[0], "not UTF-8", f"byte {fault[1]:#04x}")
            return
        piece = ""
        with path.open("rb") as raw, decompressed(raw, path) as file:
            for following in text_pieces(file):
                if piece:
                    yield Document(piece, str(path), 1, continues=True)
                piece = following
                self.bytes_read = finished_bytes + raw.tell()
        if piece:
            yield Document(piece, str(path), 1)
        else:
            self.rejected.add(str(path), 1, "empty text")

    def _json_line(self, line: bytes, source: str, number: int) -> Iterator[Document]:
        if number == 1:
            line = line.removeprefix(UTF8_MARK)
        if not line.strip():
            return
        reason, detail = "", ""
        try:
            record = json.loads(line.decode())
            text = record.get(self.text_field) if isinstance(record, dict) else None
            if not isinstance(record, dict):
                reason, detail = "not a JSON object", type(record).__name__
            elif text is None:
                reason = f"no field {self.text_field!r}"
            elif not isinstance(text, str):
                reason, detail = f"field {self.text_field!r} is not text", type(text).__name__
            elif not text:
                reason = "empty text"
            else:
                # JSON can spell half a surrogate pair, which is no character and which no tokenizer takes.
                text.encode()
                yield Document(text, source, number)
        except UnicodeDecodeError as error:
            reason, detail = "not UTF-8", f"byte {line[error.start]:#04x}"
        except UnicodeEncodeError:
            reason = "not Unicode: half a surrogate pair"
        except (ValueError, RecursionError) as error:
            reason, detail = "not JSON", str(error)[:100]
        if reason:
            self.rejected.add(source, number, reason, detail)
