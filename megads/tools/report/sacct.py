"""Reads the output of `sacct --parsable2` into arrays, for millions of jobs.

Fields (https://slurm.schedmd.com/sacct.html): JobID, User, Account, Partition, State, ExitCode, Submit, Start,
ElapsedRaw and AllocTRES are required, in any order; Eligible is optional. Job steps (1234.batch) are skipped: the time
of their job includes theirs.
"""

from __future__ import annotations

import gzip
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megads.api import ConfigError, DataError

FIELDS = (
    "JobID", "User", "Account", "Partition", "State", "ExitCode", "Submit", "Start", "ElapsedRaw", "AllocTRES",
)  # fmt: skip
_OPTIONAL = ("Eligible",)
_ALIASES = {"JobIDRaw": "JobID"}
COMMAND = f"sacct --allusers --parsable2 --allocations --format={','.join((*FIELDS, *_OPTIONAL))}"
"""Command that writes a dump with all fields."""


_CATEGORIES = {
    "user": "User", "account": "Account", "partition": "Partition", "state": "State", "exit_code": "ExitCode",
}  # fmt: skip
_TIMES = {"submit": "Submit", "eligible": "Eligible", "start": "Start"}

_CHUNK_LINES = 50_000
_NO_TIME = np.datetime64("NaT", "s")
_GPU = re.compile(r"(?:^|,)gres/gpu(:[^=,]+)?=(\d{1,9})(?=,|$)")
_SHOWN_LETTERS = 120


@dataclass
class BadLines:
    """Unreadable lines with the same defect.

    Attributes:
        count: number of lines.
        line: line number of the first one.
        text: beginning of the first one.
    """

    count: int
    line: int
    text: str


@dataclass(frozen=True)
class SiteJobs:
    """Jobs as columns of equal length; categories are dictionary-encoded as names and integer codes.

    Attributes:
        names: distinct names per category: user, account, partition, state, exit_code.
        codes: per category, the index into `names` for each job.
        submit: submission time.
        eligible: time at which dependencies and holds allowed a start; the submission time if not known.
        start: start time; NaT if the job has not started.
        elapsed_s: run time in seconds, until the dump for running jobs.
        gpus: number of allocated GPUs.
        steps: number of lines of job steps, which are not jobs.
        bad: unreadable lines by defect.
    """

    names: dict[str, list[str]]
    codes: dict[str, NDArray[np.int32]]
    submit: NDArray[np.datetime64]
    eligible: NDArray[np.datetime64]
    start: NDArray[np.datetime64]
    elapsed_s: NDArray[np.int64]
    gpus: NDArray[np.int32]
    steps: int
    bad: dict[str, BadLines]

    def __len__(self) -> int:
        return len(self.gpus)


def read_site(source: str) -> SiteJobs:
    """Reads a dump or the output of a sacct command.

    Args:
        source: path of a file, optionally .gz, or a command line that begins with sacct.

    Raises:
        ConfigError: The file or command does not exist, or the command fails.
        DataError: The dump is empty or lacks fields.
    """
    words = _command(source)
    with _run_sacct(words) if words else _open_dump(source) as lines:
        return read_jobs(lines, source)


def _command(source: str) -> list[str]:
    """The words of a sacct command; empty if `source` is a file."""
    if Path(source).exists():
        return []
    try:
        words = shlex.split(source)
    except ValueError as error:
        raise ConfigError(f"site = {source}: not a file, and not a valid command line ({error})") from error
    return words if words and Path(words[0]).name == "sacct" else []


@contextmanager
def _open_dump(source: str) -> Iterator[Iterable[str]]:
    path = Path(source)
    if not path.is_file():
        raise ConfigError(
            f"site = {source}: there is no such file, and it is not a sacct command. Write one with: {COMMAND} "
            "--starttime=2026-01-01 > dump.txt, or give the command: site='sacct --starttime=2026-01-01'"
        )
    try:
        with (
            gzip.open(path, "rt", encoding="utf-8", errors="replace")
            if path.suffix == ".gz"
            else path.open(encoding="utf-8", errors="replace")
        ) as file:
            yield file
    except (gzip.BadGzipFile, EOFError) as error:
        raise DataError(f"site = {source} cannot be unpacked: {error}") from error


@contextmanager
def _run_sacct(words: Sequence[str]) -> Iterator[Iterable[str]]:
    """Runs sacct without a shell, with the options that the report needs added."""
    if shutil.which(words[0]) is None:
        raise ConfigError(
            f"site = {shlex.join(words)}: there is no {words[0]} on this machine: give a dump, from {COMMAND}"
        )
    command = sacct_command(words)
    # stderr goes to a file: a command that fills an unread pipe would block.
    with (
        tempfile.TemporaryFile() as stderr,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stderr, text=True, encoding="utf-8", errors="replace"
        ) as process,
    ):
        assert process.stdout is not None
        try:
            first = process.stdout.readline()
            if first:
                yield chain([first], process.stdout)
        except BaseException:
            process.kill()
            raise
        if process.wait() or not first:
            stderr.seek(0)
            said = stderr.read().decode(errors="replace").strip() or "it printed nothing"
            raise ConfigError(
                f"{shlex.join(command)} failed ({said}): sacct needs SLURM's accounting "
                "(AccountingStorageType=accounting_storage/slurmdbd); give a dump of a site that has it"
            )


def sacct_command(words: Sequence[str]) -> list[str]:
    """Adds the options that the report needs to a sacct command, except those that it already has."""
    short = {"--allusers": "-a", "--parsable2": "-P", "--allocations": "-X", "--format": "-o"}
    given = {
        name for name, letter in short.items() for word in words if word.split("=")[0] == name or word[:2] == letter
    }
    return [words[0], *(option for option in COMMAND.split()[1:] if option.split("=")[0] not in given), *words[1:]]


@dataclass
class _Dump:
    """What is read so far: chunks of columns, and the code of each name of a category."""

    chunks: list[dict[str, NDArray[Any]]] = field(default_factory=list)
    codes: dict[str, dict[str, int]] = field(default_factory=lambda: {name: {} for name in _CATEGORIES})
    steps: int = 0
    bad: dict[str, BadLines] = field(default_factory=dict)

    def refuse(self, defect: str, number: int, text: str) -> None:
        """Counts an unreadable line."""
        found = self.bad.setdefault(defect, BadLines(0, number, text.strip()[:_SHOWN_LETTERS]))
        found.count += 1


def read_jobs(lines: Iterable[str], source: str) -> SiteJobs:
    """Reads the lines of a dump, its header first.

    Raises:
        DataError: The dump is empty, lacks fields, or has no job.
    """
    stream = iter(lines)
    header = next(stream, "").strip("\r\n")
    if not header:
        raise DataError(
            f"site = {source} is empty: sacct prints nothing if there was no job in the requested time. {_HOW}"
        )
    fields = [_ALIASES.get(name, name) for name in header.split("|")]
    missing = [name for name in FIELDS if name not in fields]
    if missing:
        raise DataError(
            f"site = {source}: its first line, {header[:_SHOWN_LETTERS]!r}, lacks the fields {', '.join(missing)}. "
            f"{_HOW}"
        )
    dump, number = _Dump(), 2
    while chunk := list(islice(stream, _CHUNK_LINES)):
        _read_chunk(chunk, number, fields, dump)
        number += len(chunk)
    columns = {name: np.concatenate([part[name] for part in dump.chunks]) for name in (dump.chunks or [{}])[0]}
    if not columns or not len(columns["gpus"]):
        seen = "; ".join(f"{item.count:,} lines: {defect}" for defect, item in dump.bad.items())
        raise DataError(f"site = {source} has no job{f' ({seen})' if seen else ''}. {_HOW}")
    return SiteJobs(
        names={name: list(known) for name, known in dump.codes.items()},
        codes={name: columns[name] for name in _CATEGORIES},
        submit=columns["submit"],
        eligible=np.where(np.isnat(columns["eligible"]), columns["submit"], columns["eligible"]),
        start=columns["start"],
        elapsed_s=columns["elapsed_s"],
        gpus=columns["gpus"],
        steps=dump.steps,
        bad=dump.bad,
    )


_HOW = f"Write a dump with: {COMMAND} --starttime=2026-01-01 > dump.txt"


def _read_chunk(chunk: Sequence[str], number: int, fields: Sequence[str], dump: _Dump) -> None:
    """Adds the jobs of some lines, the first of which has a number."""
    rows, numbers, width = [], [], len(fields)
    job_id = fields.index("JobID")
    for offset, line in enumerate(chunk):
        row = line.rstrip("\r\n").split("|")
        if len(row) != width:
            if line.strip():
                dump.refuse(f"not {width} fields", number + offset, line)
        elif "." in row[job_id]:
            dump.steps += 1
        else:
            rows.append(row)
            numbers.append(number + offset)
    if not rows:
        return
    table = dict(zip(fields, zip(*rows, strict=True), strict=True))
    good = np.ones(len(rows), dtype=bool)

    def refuse(defect: str, wrong: Iterable[int]) -> None:
        for index in wrong:
            if good[index]:
                dump.refuse(defect, numbers[index], chunk[numbers[index] - number])
                good[index] = False

    elapsed, wrong = _converted(table["ElapsedRaw"], lambda values: np.array(values).astype(np.int64), np.int64(0))
    refuse("ElapsedRaw is not a number of seconds", [*wrong, *np.flatnonzero(elapsed < 0).tolist()])
    columns = {"elapsed_s": elapsed, "gpus": np.array([_gpus(text) for text in table["AllocTRES"]], dtype=np.int32)}
    for name, title in _TIMES.items():
        columns[name], wrong = _converted(table.get(title, table["Submit"]), _times, _NO_TIME)
        refuse(f"{title} is not a time", wrong)
    refuse("Submit is not known", np.flatnonzero(np.isnat(columns["submit"])).tolist())
    for name, title in _CATEGORIES.items():
        known = dump.codes[name]
        # "CANCELLED by 1000" is CANCELLED.
        values = (text.partition(" ")[0] for text in table[title]) if name == "state" else table[title]
        columns[name] = np.array([known.setdefault(value, len(known)) for value in values], dtype=np.int32)
    dump.chunks.append({name: column[good] for name, column in columns.items()})


def _converted(
    values: Sequence[str], convert: Callable[[Sequence[str]], NDArray[Any]], otherwise: Any
) -> tuple[NDArray[Any], list[int]]:
    """Converts all values at once or, if that fails, one by one; also returns the indices of unreadable values."""
    try:
        return convert(values), []
    except (ValueError, OverflowError):
        pass
    wrong: list[int] = []
    found = np.full(len(values), otherwise)
    for index, value in enumerate(values):
        try:
            found[index] = convert([value])[0]
        except (ValueError, OverflowError):
            wrong.append(index)
    return found, wrong


def _times(values: Sequence[str]) -> NDArray[np.datetime64]:
    """Parses ISO times; sacct prints Unknown or None for times not known yet."""
    return np.array(["NaT" if value in ("Unknown", "None", "") else value for value in values], dtype="datetime64[s]")


@lru_cache(1 << 20)
def _gpus(tres: str) -> int:
    """GPUs of AllocTRES, for example billing=8,cpu=64,gres/gpu:h100=8,gres/gpu=8; without a total, types are summed."""
    counts = _GPU.findall(tres)
    whole = [int(count) for kind, count in counts if not kind]
    return whole[0] if whole else sum(int(count) for _, count in counts)
