#!/usr/bin/env python3
"""Collects a corpus for the demo from this machine: Python sources and docs of the running interpreter.

Writes one JSON line {"text", "source", "bytes"} per file of the standard library and the installed packages. Needs no
network and no third-party package. The same installation gives the same corpus.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ENDINGS = (".py", ".pyi", ".txt", ".rst", ".md")
SMALLEST_BYTES = 200
LARGEST_BYTES = 200_000
PACKAGE_FOLDERS = ("site-packages", "dist-packages")


@dataclass(frozen=True)
class Candidate:
    """A file that may become a document.

    Attributes:
        path: path of the file.
        source: path relative to the folder of the standard library or the packages, after the name of that root.
    """

    path: str
    source: str


def roots() -> list[tuple[str, Path]]:
    """Returns (name, folder) of the standard library and of the installed packages, without duplicates."""
    paths = sysconfig.get_paths()
    named = [("stdlib", paths["stdlib"]), ("site-packages", paths["purelib"]), ("site-packages", paths["platlib"])]
    found: dict[Path, str] = {}
    for name, folder in named:
        found.setdefault(Path(folder).resolve(), name)
    return [(name, folder) for folder, name in found.items() if folder.is_dir()]


def candidates(name: str, root: Path) -> Iterator[Candidate]:
    """Yields the text files of suitable size below `root`."""
    folders = [(str(root), name)]
    while folders:
        folder, source = folders.pop()
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    # Packages may be installed inside the standard library; they are a separate root.
                    if entry.name not in (*PACKAGE_FOLDERS, "__pycache__"):
                        folders.append((entry.path, f"{source}/{entry.name}"))
                elif _fits(entry):
                    yield Candidate(entry.path, f"{source}/{entry.name}")


def _fits(entry: os.DirEntry[str]) -> bool:
    is_text = entry.name.endswith(ENDINGS) and entry.is_file(follow_symlinks=False)
    return is_text and SMALLEST_BYTES <= entry.stat().st_size <= LARGEST_BYTES


def collect(max_bytes: int) -> tuple[list[tuple[str, str, bytes]], Counter[str]]:
    """Reads documents up to a total size.

    Args:
        max_bytes: total size at which to stop.

    Returns:
        (hash of the text, source, UTF-8 text) sorted by hash, and the number of skipped files by reason.
    """
    found = [candidate for name, root in roots() for candidate in candidates(name, root)]
    # Sorting by hash is reproducible and mixes the packages, so any prefix represents the whole.
    found.sort(key=lambda candidate: hashlib.sha256(candidate.source.encode(errors="replace")).digest())
    documents: dict[str, tuple[str, bytes]] = {}
    left_out: Counter[str] = Counter()
    total = 0
    for candidate in found:
        if total >= max_bytes:
            left_out["beyond --max-megabytes"] += 1
            continue
        try:
            content = Path(candidate.path).read_bytes()
            content.decode()
            candidate.source.encode()
        except OSError:
            left_out["not readable"] += 1
            continue
        except UnicodeError:
            left_out["not UTF-8"] += 1
            continue
        digest = hashlib.sha256(content).hexdigest()
        if digest in documents:
            left_out["duplicate"] += 1
        elif total + len(content) > max_bytes:
            left_out["beyond --max-megabytes"] += 1
        else:
            documents[digest] = (candidate.source, content)
            total += len(content)
    return [(digest, *documents[digest]) for digest in sorted(documents)], left_out


def write(documents: list[tuple[str, str, bytes]], output: Path) -> None:
    """Writes the documents as JSON lines; the file is replaced atomically."""
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.with_name(f".{output.name}.{os.getpid()}.partial")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            for _, source, content in documents:
                record = {"text": content.decode(), "source": source, "bytes": len(content)}
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
        temporary.replace(output)
    finally:
        temporary.unlink(missing_ok=True)


def report(documents: list[tuple[str, str, bytes]], left_out: Counter[str]) -> str:
    """Returns a summary of the corpus: bytes by file type and by package, and skipped files by reason."""
    kinds: Counter[str] = Counter()
    packages: Counter[str] = Counter()
    for _, source, content in documents:
        kinds[Path(source).suffix] += len(content)
        packages[source.split("/")[0] if source.startswith("stdlib/") else source.split("/")[1]] += len(content)

    def megabytes(counter: Counter[str], most: int) -> str:
        return ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in counter.most_common(most))

    return "\n".join(
        (
            f"by kind: {megabytes(kinds, len(ENDINGS))}",
            f"by package: {megabytes(packages, 8)}; {len(packages)} in all",
            "left out: " + (", ".join(f"{count} {reason}" for reason, count in left_out.most_common()) or "nothing"),
        )
    )


def main() -> int:
    """Runs the command and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the .jsonl file to write")
    parser.add_argument("--min-megabytes", type=float, default=20, help="fail below this (default: %(default)s)")
    parser.add_argument("--max-megabytes", type=float, default=30, help="stop here (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.max_megabytes < arguments.min_megabytes:
        parser.error(
            f"--max-megabytes {arguments.max_megabytes:g} is below --min-megabytes {arguments.min_megabytes:g}"
        )
    documents, left_out = collect(int(arguments.max_megabytes * 1e6))
    megabytes = sum(len(content) for _, _, content in documents) / 1e6
    if megabytes < arguments.min_megabytes:
        print(
            f"found only {megabytes:.1f} MB of text in {len(documents)} files, want at least "
            f"{arguments.min_megabytes:g} MB; run this with a Python that has more packages installed, "
            "or lower --min-megabytes",
            file=sys.stderr,
        )
        return 1
    try:
        write(documents, arguments.output)
    except OSError as error:
        print(f"{arguments.output}: cannot be written: {error.strerror}; choose another --output", file=sys.stderr)
        return 1
    print(f"{arguments.output}: {len(documents)} documents, {megabytes:.1f} MB of text")
    print(report(documents, left_out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
