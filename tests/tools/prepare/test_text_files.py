from __future__ import annotations

from pathlib import Path

import pytest

from megads.errors import ConfigError, DataError
from megads.tools.prepare.text_files import (
    FoundFiles,
    Kind,
    find_text_files,
    first_names,
    kind,
    size_text,
    text_bytes_estimate,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A typical user's folder: text, other and hidden files, nested folders, a symlink."""
    for name in (
        "b.txt", "a.MD", "deep/er/c.jsonl.zst", "deep/d.parquet", "deep/settings.json", "deep/e.json.gz", "picture.png",
        ".hidden.txt", ".git/f.txt", "g.parquet.gz", "report.pdf",
    ):  # fmt: skip
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n\x00\x00")
    (tmp_path / "link.txt").symlink_to(tmp_path / "b.txt")
    return tmp_path


def found(folder: Path, *patterns: str) -> FoundFiles:
    return find_text_files([str(folder / pattern) for pattern in patterns], "data.raw")


def names(folder: Path, *patterns: str) -> list[str]:
    return [str(path.relative_to(folder)) for path in found(folder, *patterns).files]


def test_a_folder_gives_its_text_files_in_order(folder: Path) -> None:
    """Catches hidden files and other kinds read as text, skipped subfolders, file-system order, and duplicates."""
    assert names(folder, ".") == ["a.MD", "b.txt", "deep/d.parquet", "deep/e.json.gz", "deep/er/c.jsonl.zst"]


def write_run(folder: Path) -> None:
    """Writes a run directory as a start leaves it."""
    (folder / "logs").mkdir(parents=True)
    for name in ("events.jsonl", "metrics.jsonl", "config.yaml", "notes.txt", "logs/rank.txt"):
        (folder / name).write_text("x")


@pytest.fixture
def project(folder: Path) -> Path:
    """A folder in which the user trains: runs, one of them elsewhere, caches, a virtual environment, code."""
    write_run(folder / "runs" / "first")
    write_run(folder / "out" / "second")
    for name in ("runs/notes.txt", "data-cache/a.txt", "cache/a.txt", "venv/lib/a.py", "node_modules/a.js", "out/a.py",
                 "out/b.csv", "out/c.PNG", "out/Makefile", "out/.DS_Store"):  # fmt: skip
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    (folder / "cache" / "CACHEDIR.TAG").touch()
    (folder / "venv" / "pyvenv.cfg").touch()
    return folder


def test_a_folder_never_gives_runs_caches_and_hidden_files(project: Path) -> None:
    """Catches a second start in the same folder that trains on the logs of the first one."""
    wanted = ["a.MD", "b.txt", "deep/d.parquet", "deep/e.json.gz", "deep/er/c.jsonl.zst", "out/a.py"]
    assert names(project, ".") == wanted
    assert sorted(names(project, "**/*")) == sorted([*wanted, "deep/settings.json"])
    assert names(project, "runs") == ["runs/notes.txt"], "what is named is read"
    assert names(project, "o*/*.py", "cache/*") == ["out/a.py", "cache/a.txt"]


def test_skipped_files_are_counted_and_reported(project: Path) -> None:
    """Catches a corpus that is smaller than the folder without a message about skipped files."""
    passed = found(project, ".", "out")
    assert passed.extensions == {
        ".png": 2, ".json": 1, ".gz": 1, ".pdf": 1, ".csv": 1, "without extension": 1, "hidden": 2,
    }  # fmt: skip
    assert passed.folders == {
        "runs": 1, "data-cache": 1, "node_modules": 1, ".git": 1, "run directories": 1, "caches": 1,
        "virtual environments": 1,
    }  # fmt: skip
    assert passed.passed_over.startswith("skipped: 2 .png, ") or "2 hidden" in passed.passed_over
    assert "folders " in passed.passed_over and passed.passed_over.endswith(" and 1 more")
    assert found(project, "b.txt").passed_over == ""
    assert found(project, "out/b.csv", "out").extensions == {".png": 1, "without extension": 1, "hidden": 1}


def test_a_named_file_of_any_extension_is_text(project: Path) -> None:
    """Catches refusing a file of unknown kind, such as a Makefile or a table, that the user names."""
    assert names(project, "out/Makefile", "out/b.csv", "out/*.PNG") == ["out/Makefile", "out/b.csv", "out/c.PNG"]
    given = find_text_files([str(project / "out")], "data.raw", ["CSV", ".png"])
    assert [path.name for path in given.files] == ["b.csv", "c.PNG"]


def test_globs_names_and_folders_may_be_mixed(folder: Path) -> None:
    """Catches a file read twice because two patterns match it, and a glob that fails because it matches folders."""
    assert names(folder, "b.txt", "*.[tM]*", "dee*") == [
        "b.txt", "a.MD", "deep/d.parquet", "deep/e.json.gz", "deep/er/c.jsonl.zst",
    ]  # fmt: skip
    assert names(folder, "deep/*.json") == ["deep/settings.json"]
    assert names(folder, "**/*.zst") == ["deep/er/c.jsonl.zst"]
    (folder / "z[1].txt").touch()
    assert names(folder, "z[1].txt", "z*.txt") == ["z[1].txt"]


def test_home_is_expanded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an unexpanded data.raw='~/text', which no shell expands inside quotes."""
    monkeypatch.setenv("HOME", str(folder))
    assert find_text_files(["~/b.txt"], "data.raw").files == [folder / "b.txt"]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("none*.txt", "none.*matches no file in .*; check the path and quote globs"),
        ("picture.png", r"picture.png: is not text \(byte 0x00 at position 8\): leave it out of data.raw"),
        ("*.png", r"picture.png: is not text"),
        ("report.pdf", "report.pdf: is a document of another program: save it as plain text"),
        ("g.parquet.gz", "g.parquet.gz: parquet is compressed in itself"),
        ("empty", r"empty has no text \(skipped: 1 .json\): .* its extension is in data.extensions"),
        ("runs/first", "first: is the directory of a run, which holds no text"),
        ("dead.txt", "dead.txt: matches no file"),
    ],
)
def test_a_pattern_without_readable_files_is_refused(folder: Path, pattern: str, message: str) -> None:
    """Catches a typo in one of several patterns that silently shrinks the corpus."""
    (folder / "empty").mkdir()
    (folder / "empty" / "settings.json").touch()
    (folder / "dead.txt").symlink_to(folder / "nowhere")
    write_run(folder / "runs" / "first")
    with pytest.raises(DataError, match=message):
        names(folder, "b.txt", pattern)


def test_an_empty_list_of_files_names_the_verbs_key() -> None:
    """Catches an error message that names another verb's key."""
    with pytest.raises(ConfigError, match=r"data\.raw is empty"):
        find_text_files([], "data.raw")


def test_files_are_counted_by_kind_and_uncompressed_size(tmp_path: Path) -> None:
    """Catches a compressed corpus whose tokenizer is sized for a third of its text."""
    kinds = {"a.b.JSONL.GZ": Kind.json_lines, "a.zst": Kind.text, "README": Kind.text, "a.TSV.zst": Kind.table}
    assert {name: kind(Path(name)) for name in kinds} == kinds
    files = [tmp_path / "a.txt", tmp_path / "b.txt.gz"]
    for path in files:
        path.write_bytes(b"x" * 100)
    assert text_bytes_estimate(files) == 400
    assert first_names([Path(name) for name in "abcde"]) == "a, b, c and 2 more"


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("https://example.org/a.txt", r"not read from URLs: download it \(curl -LO https://example.org/a.txt\)"),
        ("s3://bucket/a", "not read from URLs"),
        ("owner/stories", "matches no file in .*; a dataset of a hub is not downloaded: write its texts to a file"),
    ],
)
def test_urls_and_hub_names_are_refused_as_such(pattern: str, said: str) -> None:
    """Catches a URL, or a name of a hub, reported as a missing file only."""
    with pytest.raises(DataError, match=said):
        find_text_files([pattern], "data.raw")


def test_a_small_text_has_a_size() -> None:
    """Catches `0.0 MB`, which a first try with a page of text was told."""
    assert [size_text(size) for size in (12, 4_321, 99_999, 123_456, 5_000_000_000)] == [
        "12 bytes",
        "4.3 kB",
        "100.0 kB",
        "0.1 MB",
        "5,000.0 MB",
    ]
