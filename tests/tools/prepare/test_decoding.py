from __future__ import annotations

import gzip
import io
import re
from pathlib import Path
from typing import Any

import pytest
import zstandard

from megads.data.config import DataConfig
from megads.errors import ConfigError
from megads.tools.prepare.text_files import ZstdReader, encoding_of, marked_encoding, opened, text_fault

RUSSIAN = "Все счастливые семьи похожи друг на друга.\r\n" * 9  # noqa: RUF001
GERMAN = "Übermut tut selten gut — sagte er.\n" * 9


@pytest.mark.parametrize(
    ("content", "encoding"),
    [
        (b"", None),
        (b"a", None),
        (GERMAN.encode(), None),
        (GERMAN.encode("utf-8-sig"), None),
        (GERMAN.encode("cp1252"), None),
        (GERMAN.encode("utf-16"), "utf-16-le"),
        (GERMAN.encode("utf-16-le"), "utf-16-le"),
        (GERMAN.encode("utf-16-be"), "utf-16-be"),
        (RUSSIAN.encode("utf-16-le"), "utf-16-le"),
        (RUSSIAN.encode("utf-16-be")[:-1], "utf-16-be"),
        (b"\xfe\xff" + RUSSIAN.encode("utf-16-be"), "utf-16-be"),
        (GERMAN.encode("utf-32"), "utf-32-le"),
        # Text with single zero bytes, and 16-bit numbers, which are not text.
        (b"a record\x00of a database\x00and more" * 9, None),
        (bytes(range(1, 200)) + b"\x00" * 20, None),
        (b"".join(number.to_bytes(2, "little") for number in range(2, 300)), None),
    ],
)
def test_first_bytes_show_utf_16_and_nothing_else(content: bytes, encoding: str | None) -> None:
    """Catches UTF-16 read as text with a zero byte per letter, and other files that are taken for UTF-16."""
    assert marked_encoding(content) == encoding


@pytest.mark.parametrize("packed", ["", ".gz", ".zst"])
@pytest.mark.parametrize(
    ("encoding", "wanted", "expected"),
    [
        ("utf-8", "cp1252", "utf-8"),
        ("cp1252", "cp1252", "cp1252"),
        ("utf-16", "cp1252", "utf-16-le"),
        ("cp1252", "auto", "utf-8"),
        ("utf-16", "utf-8", "utf-8"),
    ],
)
def test_data_encoding_applies_to_files_that_are_not_utf_8(
    tmp_path: Path, packed: str, encoding: str, wanted: str, expected: str
) -> None:
    """Catches UTF-8 read as Latin-1 because a few files of a thousand are, and a compressed file that is not
    examined."""
    path = tmp_path / f"a.txt{packed}"
    compress = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}[packed]
    path.write_bytes(compress((GERMAN * 9999).encode(encoding)))
    assert encoding_of(path, wanted) == expected
    if wanted == "cp1252":
        with opened(path, expected) as (_, file):
            assert file.read().decode("utf-8-sig") == GERMAN * 9999


def test_a_decoding_error_is_reported_with_its_line() -> None:
    """Catches half a character at the end of a file that is ignored, and line numbers that count bytes."""
    assert text_fault(io.BytesIO(RUSSIAN.encode("utf-16-le")), "utf-16-le") is None
    assert text_fault(io.BytesIO(RUSSIAN.encode("utf-16-le")[:-1]), "utf-16-le") == (9, 0x0A)
    broken = RUSSIAN.encode("utf-16-le") * 5000 + b"\x00\xd8"
    assert text_fault(io.BytesIO(broken), "utf-16-le") == (45001, 0x00)


CONTENT = b"".join(b"line %d\n" % number for number in range(200_000))


def read(compressed: bytes) -> bytes:
    return io.BufferedReader(ZstdReader(io.BytesIO(compressed))).read()


def test_zstd_files_of_several_frames_and_of_none_are_read() -> None:
    """Catches a reader that stops after the first frame: `cat a.zst b.zst` makes two."""
    frame = zstandard.compress(CONTENT)
    assert read(frame) == CONTENT
    assert read(frame + zstandard.compress(b"") + frame) == CONTENT * 2
    assert read(b"") == b""


def test_zstd_files_with_long_windows_are_read() -> None:
    """Catches the library's window limit of 8 MB: published corpora are compressed with --long=31."""
    parameters = zstandard.ZstdCompressionParameters(window_log=28, enable_ldm=True)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    assert read(compressor.compress(CONTENT) + compressor.flush()) == CONTENT


@pytest.mark.parametrize("kept", [0.3, 0.999])
def test_a_truncated_frame_is_an_error(kept: float) -> None:
    """Catches a truncated download that is read as complete: the library's own reader raises no error."""
    frame = zstandard.compress(CONTENT)
    with pytest.raises(EOFError, match="ends before the end"):
        read(frame + frame[: int(kept * len(frame))])


def test_a_file_of_another_format_is_an_error() -> None:
    """Catches a file of another format with this extension that is read."""
    with pytest.raises(zstandard.ZstdError):
        read(b"not zstandard at all")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"encoding": "latin"}, ""),
        ({"encoding": "utf-99"}, "data.encoding = utf-99: unknown encoding: utf-99; want auto, or a name that Python"),
        ({"encoding": "zlib"}, "data.encoding = zlib: 'zlib' is not a text encoding"),
        ({"extensions": [".txt", "."]}, "data.extensions: '.' is not a file extension"),
        ({"extensions": ["a/b"]}, "data.extensions: 'a/b' is not a file extension"),
        ({"cut_documents": 1}, "data.cut_documents = 1: must be at least 2"),
    ],
)
def test_an_unknown_encoding_is_refused_before_reading(settings: dict[str, Any], message: str) -> None:
    """Catches a misspelt encoding that shows only after an hour of reading, as a traceback."""
    config = DataConfig(raw="a.txt", **settings)
    if not message:
        config.check()
        return
    with pytest.raises(ConfigError, match=re.escape(message)):
        config.check()
