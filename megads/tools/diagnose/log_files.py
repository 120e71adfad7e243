"""Finds and reads log files: plain, compressed, in other encodings, still growing, huge or no logs at all."""

from __future__ import annotations

import codecs
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import zstandard

from megads.diagnosis.evidence import Survey, survey_log
from megads.errors import DataError
from megads.runtime.files import open_regular

_BLOCK_BYTES = 8 << 20
_PACKED_BLOCK_BYTES = 1 << 20
_PROBE_BYTES = 4096
_GZIP_WINDOW = 31
_MOST_CONTROL_SHARE = 0.04
_CONTROL = bytes(set(range(32)) - set(b"\b\t\n\f\r\x1b"))
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_WIDE = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_LOG_NAME = re.compile(
    r"\.(?:log|out|err|txt|stdout|stderr|jsonl)(?:\.\d+)?(?:\.(?:gz|zst))?$|^(?:std(?:out|err)|dmesg|messages|syslog)",
    re.IGNORECASE,
)
_RANK_NAME = re.compile(r"rank[_.-]?0*(\d+)", re.IGNORECASE)


def find_logs(names: Sequence[str]) -> list[Path]:
    """Returns the files that are named, and the logs in folders that are.

    Raises:
        DataError: one is not there, or a folder holds no log.
    """
    found: list[Path] = []
    for name in names:
        path = Path(name).expanduser()
        if path.is_dir():
            inside = sorted(file for file in path.rglob("*") if file.is_file() and _LOG_NAME.search(file.name))
            if not inside:
                raise DataError(
                    f"logs: the folder {path} holds no log (*.log, *.out, *.err, *.txt, .gz, .zst): name the files"
                )
            found += inside
        elif path.exists():
            found.append(path)
        else:
            raise DataError(f"logs: there is no file {path}: name log files or folders that hold them")
    return list(dict.fromkeys(found))


def rank_of_name(path: Path) -> int | None:
    """Returns the rank in a log's name, as in rank_00003.log or torchrun's 0/3/stderr.log."""
    if found := _RANK_NAME.search(path.name):
        return int(found[1])
    return int(path.parent.name) if path.stem in ("stdout", "stderr") and path.parent.name.isdigit() else None


def survey_file(path: Path, name: str, offset: int = 0) -> Survey:
    """Reads a log as far as it is written now.

    Args:
        path: the file.
        name: as the evidence is to call it.
        offset: bytes to leave out; only of a file that is not compressed.

    Raises:
        DataError: it cannot be read.
    """
    rank = rank_of_name(path)
    notes: list[str] = []
    try:
        with open_regular(path) as file:
            head = file.read(_PROBE_BYTES)
            file.seek(offset)
            survey = survey_log(name, _blocks(file, head, notes), rank)
    except OSError as error:
        raise DataError(
            f"logs: {path} cannot be read ({error.strerror or error}): check its permissions and its disk"
        ) from error
    survey.notes = notes
    return survey


def _blocks(file: BinaryIO, head: bytes, notes: list[str]) -> Iterator[bytes]:
    """Yields a file's text as UTF-8, or what can be taken for it."""
    if not head:
        notes.append("is empty")
    elif head.startswith((_GZIP, _ZSTD)):
        yield from _decompressed(file, head.startswith(_GZIP), notes)
    elif wide := next((name for mark, name in _WIDE.items() if head.startswith(mark)), ""):
        yield from _recoded(file, wide)
    elif len(head) - len(head.translate(None, _CONTROL)) > _MOST_CONTROL_SHARE * len(head):
        notes.append("is no text: passed over")
    else:
        yield from _to_present_end(file)


def _to_present_end(file: BinaryIO, block_bytes: int = _BLOCK_BYTES) -> Iterator[bytes]:
    """Yields a file up to where it ends now: one that is written to faster than it is read would never end."""
    left = os.fstat(file.fileno()).st_size - file.tell()
    while left > 0 and (block := file.read(min(block_bytes, left))):
        left -= len(block)
        yield block


def _decompressed(file: BinaryIO, gzipped: bool, notes: list[str]) -> Iterator[bytes]:
    """Yields what a compressed file holds, members or frames one after another, as far as it goes."""

    def fresh() -> Any:
        return zlib.decompressobj(_GZIP_WINDOW) if gzipped else zstandard.ZstdDecompressor().decompressobj()

    decoder, ended = fresh(), False
    try:
        for block in _to_present_end(file, _PACKED_BLOCK_BYTES):
            rest = block
            while rest:
                decoder = fresh() if ended else decoder
                yield decoder.decompress(rest)
                ended = decoder.eof
                rest = decoder.unused_data if ended else b""
    except (zlib.error, zstandard.ZstdError) as error:
        notes.append(f"is damaged, and read up to there ({error})")
        return
    if not ended:
        notes.append("is cut off or still written to, and read up to there")


def _recoded(file: BinaryIO, encoding: str) -> Iterator[bytes]:
    decoder = codecs.getincrementaldecoder(encoding)(errors="replace")
    for block in _to_present_end(file):
        yield decoder.decode(block).encode()
