from __future__ import annotations

import io
from pathlib import Path

import pytest
import zstandard

from megads.data.prepare.text_files import ZstdReader, find_text_files, first_names, is_text_file, text_bytes_estimate
from megads.errors import ConfigError, DataError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder as users have them: other files, hidden ones, folders in folders, a link."""
    for name in (
        "b.txt", "a.MD", "deep/er/c.jsonl.zst", "deep/d.parquet", "deep/settings.json", "deep/e.json.gz", "picture.png",
        ".hidden.txt", ".git/f.txt", "g.parquet.gz",
    ):  # fmt: skip
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    (tmp_path / "link.txt").symlink_to(tmp_path / "b.txt")
    return tmp_path


def names(folder: Path, *patterns: str) -> list[str]:
    files = find_text_files([str(folder / pattern) for pattern in patterns], "data.raw")
    return [str(path.relative_to(folder)) for path in files]


def test_a_folder_gives_its_text_files_in_order(folder: Path) -> None:
    """Catches hidden files and other kinds taken for text, depth ignored, an order of the file system, doubles."""
    assert names(folder, ".") == ["a.MD", "b.txt", "deep/d.parquet", "deep/e.json.gz", "deep/er/c.jsonl.zst"]


def test_globs_names_and_folders_mix(folder: Path) -> None:
    """Catches a file read twice because two patterns reach it, and a glob that matches folders and fails."""
    assert names(folder, "b.txt", "*.[tM]*", "dee*") == [
        "b.txt", "a.MD", "deep/d.parquet", "deep/e.json.gz", "deep/er/c.jsonl.zst",
    ]  # fmt: skip
    assert names(folder, "deep/*.json") == ["deep/settings.json"]
    assert names(folder, "**/*.zst") == ["deep/er/c.jsonl.zst"]


def test_home_is_expanded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches data.raw='~/text', which no shell expands inside quotes."""
    monkeypatch.setenv("HOME", str(folder))
    assert find_text_files(["~/b.txt"], "data.raw") == [folder / "b.txt"]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("none*.txt", "none.*matches no file in .*; check the path and quote globs"),
        ("picture.png", "picture.png: unknown kind of file; data.raw takes .txt, .md"),
        ("g.parquet.gz", "g.parquet.gz: unknown kind of file"),
        ("empty", r"empty has no file of a known kind; .*\(in a folder, plain .json files only by a glob\)"),
        ("dead.txt", "dead.txt: matches no file"),
    ],
)
def test_what_cannot_be_read_is_refused(folder: Path, pattern: str, message: str) -> None:
    """Catches a typo in one of several patterns that silently shrinks the corpus."""
    (folder / "empty").mkdir()
    (folder / "empty" / "settings.json").touch()
    (folder / "dead.txt").symlink_to(folder / "nowhere")
    with pytest.raises(DataError, match=message):
        names(folder, "b.txt", pattern)


def test_no_patterns() -> None:
    """Catches a message that names another verb's key."""
    with pytest.raises(ConfigError, match=r"data\.raw is empty"):
        find_text_files([], "data.raw")


def test_kinds_and_sizes(tmp_path: Path) -> None:
    """Catches a compressed corpus that gets the tokenizer of a third of its text."""
    assert is_text_file(Path("a.b.JSONL.GZ")) and not is_text_file(Path("a.zst"))
    files = [tmp_path / "a.txt", tmp_path / "b.txt.gz"]
    for path in files:
        path.write_bytes(b"x" * 100)
    assert text_bytes_estimate(files) == 400
    assert first_names([Path(name) for name in "abcde"]) == "a, b, c and 2 more"


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
