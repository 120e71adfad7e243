"""The files of raw text: finds them by names, folders and globs, tells their kinds, and counts what it passes over."""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from megads.data.config import DEFAULT_EXTENSIONS
from megads.data.prepare.decoding import COMPRESSED_ENDINGS, binary_fault
from megads.errors import ConfigError, DataError
from megads.runtime.run_dir import is_run_dir

# Delimiters of tables by the ending of their name.
TABLE_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_JSON_LINES_ENDINGS = (".jsonl", ".ndjson", ".json")
_PARQUET_ENDING = ".parquet"
_DOCUMENT_ENDINGS = (".pdf", ".doc", ".docx", ".odt", ".rtf", ".epub", ".ppt", ".pptx", ".xls", ".xlsx")
# Bytes of text in a byte of file, roughly.
_EXPANSION = {".gz": 3, ".zst": 3, ".parquet": 2}
# The standard mark of a cache: https://bford.info/cachedir/
CACHE_TAG = "CACHEDIR.TAG"
DATA_CACHE = "data-cache"
_NEVER_ENTERED = ("runs", DATA_CACHE, "__pycache__", "node_modules")
_HIDDEN, _RUN, _CACHE, _VIRTUAL = "hidden", "run directories", "caches", "virtual environments"
_SHOWN_EXTENSIONS, _SHOWN_FOLDERS = 8, 6


class Kind(Enum):
    """How a file is read."""

    text = "text"
    json_lines = "json_lines"
    parquet = "parquet"
    table = "table"


def kind(path: Path) -> Kind:
    """Returns how a file is read, by its ending; one that is not known is plain text."""
    ending = uncompressed_ending(path)
    if ending in _JSON_LINES_ENDINGS:
        return Kind.json_lines
    if ending == _PARQUET_ENDING:
        return Kind.parquet
    return Kind.table if ending in TABLE_DELIMITERS else Kind.text


def uncompressed_ending(path: Path) -> str:
    """Returns the ending without the one that says how the file is compressed; empty where there is none."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix in COMPRESSED_ENDINGS else suffix


@dataclass(frozen=True)
class FoundFiles:
    """What patterns have led to.

    Attributes:
        files: those to read, each once: patterns in the order given, the files of one in order of name.
        extensions: files in folders and behind globs that were passed over, by extension.
        folders: folders there that were not entered, by name.
    """

    files: list[Path]
    extensions: Counter[str] = field(default_factory=Counter)
    folders: Counter[str] = field(default_factory=Counter)

    @property
    def passed_over(self) -> str:
        """What is no text, counted, for people; empty where everything is."""
        shown = self.extensions.most_common(_SHOWN_EXTENSIONS)
        parts = [f"{count:,} {extension}" for extension, count in shown]
        rest = self.extensions.total() - sum(count for _, count in shown)
        parts += [f"{rest:,} others"] if rest else []
        names = [f"{name} ({count:,})" if count > 1 else name for name, count in self.folders.most_common()]
        if names:
            more = f" and {len(names) - _SHOWN_FOLDERS} more" if len(names) > _SHOWN_FOLDERS else ""
            parts.append(f"folders {', '.join(names[:_SHOWN_FOLDERS])}{more}")
        return f"passed over: {', '.join(parts)}" if parts else ""


def find_text_files(
    patterns: Sequence[str], key: str, extensions: Sequence[str] = DEFAULT_EXTENSIONS, *, any_kind: bool = False
) -> FoundFiles:
    """Lists the files that hold the text.

    Folders are read to their depth. In them, and behind a glob that does not spell an extension, files with an
    extension of the list are taken. Hidden names, run directories, caches, virtual environments and folders named runs
    are never entered. A file that is named, or whose extension a glob spells, is text unless its content is not.

    Args:
        patterns: files, folders and globs.
        key: the config key that they come from, for messages.
        extensions: of files to take out of folders, compressed or not.
        any_kind: take every file that is not hidden, of folders too: a plugin reads them.

    Raises:
        ConfigError: no patterns.
        DataError: a pattern matches no file, or names one that holds no text, or a run directory.
    """
    if not patterns:
        raise ConfigError(f"{key} is empty: give files, folders or globs, for example {key}='[corpus/*.jsonl]'")
    search = _Search(key, tuple(f".{extension.lower().lstrip('.')}" for extension in extensions), any_kind)
    for pattern in patterns:
        search.add(pattern)
    return search.found()


class _Search:
    """Collects the files of one pattern after the other."""

    def __init__(self, key: str, extensions: tuple[str, ...], any_kind: bool) -> None:
        self._key, self._any_kind = key, any_kind
        self._listed = tuple(ending + packed for ending in extensions for packed in ("", *COMPRESSED_ENDINGS))
        # By their real paths: a file that two patterns reach, or a link and its target, would be read twice.
        self._files: dict[str, Path] = {}
        self._passed: dict[str, str] = {}
        self._closed: dict[str, str] = {}
        self._labels: dict[Path, str] = {}

    def found(self) -> FoundFiles:
        """Returns what all patterns have led to."""
        extensions = Counter(name for path, name in self._passed.items() if path not in self._files)
        return FoundFiles(list(self._files.values()), extensions, Counter(self._closed.values()))

    def add(self, pattern: str) -> None:
        """Follows one pattern; raises DataError where it leads to nothing."""
        name = str(Path(pattern).expanduser())
        # A name that exists is meant literally, even with brackets in it.
        literal = Path(name).exists()
        names = [name] if literal else sorted(glob.glob(name, recursive=True))  # noqa: PTH207
        taken, folders = 0, []
        for path in map(Path, names):
            if path.is_dir():
                folders.append(path)
                # `**` also matches the folders whose files it matches.
                taken += 0 if not literal and "**" in name else self._add_folder(path, literal)
            elif path.is_file() and (literal or self._is_reached(name, path)):
                taken += self._add_file(path, named=literal or _spells(name, path))
        if not taken:
            raise DataError(f"{self._key} {pattern}: {self._why_nothing(folders)}")

    def _why_nothing(self, folders: list[Path]) -> str:
        passed = self.found().passed_over
        if not folders and not passed:
            return f"matches no file in {Path.cwd()}; check the path and quote globs"
        where = str(folders[0]) if folders else "what it matches"
        section = self._key.rpartition(".")[0]
        extensions = f"{section}.extensions" if section else "extensions"
        return (
            f"{where} has no text{f' ({passed})' if passed else ''}: a file is taken where it is named, by itself or "
            f"by a glob such as '*.log', or where its extension is in {extensions}"
        )

    def _add_folder(self, folder: Path, named: bool) -> int:
        if named and _why_closed(folder) == _RUN:
            raise DataError(f"{self._key} {folder}: is the directory of a run, which holds no text to train on")
        if not named and self._is_closed(folder):
            return 0
        found = []
        for parent, folders, names in os.walk(folder):
            folders[:] = list(self._open(parent, folders))
            found += [Path(parent, name) for name in names]
        return sum(self._add_file(path, named=False) for path in sorted(found) if path.is_file())

    def _open(self, parent: str, names: list[str]) -> Iterator[str]:
        for name in names:
            if not self._is_closed(Path(parent, name)):
                yield name

    def _is_closed(self, folder: Path) -> bool:
        if folder not in self._labels:
            self._labels[folder] = _why_closed(folder)
            if self._labels[folder]:
                self._closed[os.path.realpath(folder)] = self._labels[folder]
        return bool(self._labels[folder])

    def _is_reached(self, pattern: str, path: Path) -> bool:
        """Whether no folder on the way from what the glob spells out to a file is closed."""
        spelled = next(number for number, part in enumerate(Path(pattern).parts) if glob.has_magic(part))
        return not any(self._is_closed(Path(*path.parts[:depth])) for depth in range(spelled + 1, len(path.parts)))

    def _add_file(self, path: Path, named: bool) -> int:
        real = os.path.realpath(path)
        if not named and path.name.startswith("."):
            self._passed[real] = _HIDDEN
            return 0
        packed_parquet = kind(path) is Kind.parquet and path.suffix.lower() != _PARQUET_ENDING
        if self._any_kind or (path.name.lower().endswith(self._listed) and not packed_parquet):
            self._files.setdefault(real, path)
            return 1
        if not named:
            self._passed[real] = path.suffix.lower() or "without extension"
            return 0
        if packed_parquet:
            raise DataError(f"{path}: parquet is compressed in itself: decompress the file, or leave it out")
        self._require_text(path)
        self._files.setdefault(real, path)
        return 1

    def _require_text(self, path: Path) -> None:
        """Refuses a file that the user has named where it is plain text by its name only."""
        if kind(path) is not Kind.text:
            return
        if uncompressed_ending(path) in _DOCUMENT_ENDINGS:
            raise DataError(f"{path}: is a document of another program: save it as plain text first")
        fault = binary_fault(path)
        if fault:
            raise DataError(f"{path}: is not text ({fault}): leave it out of {self._key}")


def _spells(pattern: str, path: Path) -> bool:
    """Whether a glob spells the extension of a file, or its whole name; plain .json is taken by every glob."""
    last, suffix = Path(pattern).name.lower(), path.suffix.lower()
    return not glob.has_magic(last) or suffix == ".json" or (bool(suffix) and last.endswith(suffix))


def _why_closed(folder: Path) -> str:
    """Returns as what a folder found on the way is passed over; empty for one to be entered."""
    name = folder.name
    if name in ("", "..") or not (name.startswith(".") or name in _NEVER_ENTERED):
        if is_run_dir(folder):
            return _RUN
        if (folder / CACHE_TAG).is_file():
            return _CACHE
        return _VIRTUAL if (folder / "pyvenv.cfg").is_file() else ""
    return name


def text_bytes_estimate(files: Sequence[Path]) -> int:
    """Returns about how much text the files hold, from their sizes and kinds alone."""
    return sum(path.stat().st_size * _EXPANSION.get(path.suffix.lower(), 1) for path in files)


def first_names(files: Sequence[Path], count: int = 3) -> str:
    """Returns the first few names, for messages."""
    return ", ".join(map(str, files[:count])) + (f" and {len(files) - count} more" if len(files) > count else "")
