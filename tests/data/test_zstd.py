from __future__ import annotations

import io

import pytest
import zstandard

from megads.data.zstd import ZstdReader

CONTENT = b"".join(b"line %d\n" % number for number in range(200_000))


def read(compressed: bytes) -> bytes:
    return io.BufferedReader(ZstdReader(io.BytesIO(compressed))).read()


def test_one_frame_several_frames_and_none() -> None:
    """Catches a reader that stops after the first frame, as `cat a.zst b.zst` makes two."""
    frame = zstandard.compress(CONTENT)
    assert read(frame) == CONTENT
    assert read(frame + zstandard.compress(b"") + frame) == CONTENT * 2
    assert read(b"") == b""


def test_long_windows() -> None:
    """Catches the library's limit of 8 MB: published corpora are compressed with --long=31."""
    parameters = zstandard.ZstdCompressionParameters(window_log=28, enable_ldm=True)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    assert read(compressor.compress(CONTENT) + compressor.flush()) == CONTENT


@pytest.mark.parametrize("kept", [0.3, 0.999])
def test_a_truncated_frame_is_an_error(kept: float) -> None:
    """Catches half a download taken for the whole: the library's own reader says nothing."""
    frame = zstandard.compress(CONTENT)
    with pytest.raises(EOFError, match="ends before the end"):
        read(frame + frame[: int(kept * len(frame))])


def test_garbage_is_an_error() -> None:
    """Catches another file with this ending."""
    with pytest.raises(zstandard.ZstdError):
        read(b"not zstandard at all")
