"""Reads the inputs of a diagnosis: log files, the events of a megads run, and PyTorch flight recorder dumps.

Logs may be plain, compressed, in other encodings, still growing, huge, or not logs at all. No code in a dump is
executed.
"""

from __future__ import annotations

import codecs
import mmap
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import zstandard

from megads.api import (
    EVENTS_FILE,
    DataError,
    find_run,
    is_run_dir,
    open_regular,
    parse_json,
    rank_log_path,
    read_json_lines,
    read_regular,
)
from megads.launch.evidence import evidence_folders
from megads.monitor.run_state import RunState, RunStatus, run_status
from megads.runtime.run_dir import srun_log_path
from megads.tools.diagnose.decision import START_HEADER, recorded_findings, silent_run_finding
from megads.tools.diagnose.evidence import Survey, survey_log
from megads.tools.diagnose.flight_recorder import FlightTrace, parse_trace

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
_FAILURE_EVENTS = ("failure", "killed")
_RESOLVED_BY = {"hang_suspected": "hang_over", "heartbeat_lost": "heartbeat_back", "node_silent": "node_heard"}
"""Events that report a hang or a silence, with the one that ends it."""
_UNHARMED = (RunState.finished, RunState.stopped, RunState.training)
_DUMP_RANK = re.compile(r"(\d+)(?:\.(?:json|pkl|pickle))?$")
_PICKLE = b"\x80"


def find_logs(names: Sequence[str]) -> list[Path]:
    """Returns the named files, and the logs in named folders.

    Raises:
        DataError: A path does not exist, or a folder has no log.
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
    """Returns the rank in the name of a log, as in rank_00003.log or torchrun's 0/3/stderr.log; None if none."""
    if found := _RANK_NAME.search(path.name):
        return int(found[1])
    return int(path.parent.name) if path.stem in ("stdout", "stderr") and path.parent.name.isdigit() else None


def survey_file(path: Path, name: str, offset: int = 0) -> Survey:
    """Scans a log up to its current end.

    Args:
        path: path of the log.
        name: name of the log in the evidence.
        offset: number of bytes to skip; only for uncompressed files.

    Raises:
        DataError: The log cannot be read.
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
    """Yields the text of a file, decompressed and converted from UTF-16 and UTF-32 to UTF-8."""
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
    """Yields a file up to its current end: a file that grows faster than it is read would never end."""
    left = os.fstat(file.fileno()).st_size - file.tell()
    while left > 0 and (block := file.read(min(block_bytes, left))):
        left -= len(block)
        yield block


def _decompressed(file: BinaryIO, gzipped: bool, notes: list[str]) -> Iterator[bytes]:
    """Yields the content of all members or frames of a compressed file, up to the first damage."""

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


@dataclass(frozen=True)
class RunEnd:
    """End of a run's last start, or its present state.

    Attributes:
        folder: run directory.
        surveys: survey of the recorded events, then those of the logs; empty if nothing failed.
        status: whether the run trains, how it ended, or that it is gone.
        nodes: nodes that the launcher blamed.
        evidence: folders of evidence that the launcher collected from the running ranks of that start, oldest first.
    """

    folder: Path
    surveys: tuple[Survey, ...]
    status: RunStatus
    nodes: tuple[str, ...] = ()
    evidence: tuple[Path, ...] = ()


def read_run(name: str) -> RunEnd:
    """Reads the events and logs of a run's last start.

    Raises:
        ConfigError: The run does not exist.
        DataError: The run has neither a recorded failure nor a log.
    """
    folder = find_run(name)
    if not is_run_dir(folder):
        raise DataError(f"run = {name}: {folder} is no run directory: it has neither {EVENTS_FILE} nor logs of ranks")
    events = list(enumerate(read_json_lines(folder / EVENTS_FILE), 1))
    last_launch = max((place for place, (_, event) in enumerate(events) if event.get("event") == "launch"), default=0)
    events = events[last_launch:]
    status = run_status(folder, [event for _, event in events])
    failures = [(line, event) for line, event in events if event.get("event") in _FAILURE_EVENTS]
    pending = _unresolved(events) if status.state in (RunState.training, RunState.vanished) else []
    if not failures and not pending and not status.silent and status.state in _UNHARMED:
        return RunEnd(folder, (), status)
    recorded = Survey(EVENTS_FILE)
    recorded.lines = len(events)
    for line, event in [*failures, *pending]:
        recorded.findings += recorded_findings(line, event)
    if status.silent:
        recorded.findings.append(silent_run_finding(status.sentence))
    to_blame = [*pending, *failures]
    blamed = to_blame[-1][1].get("rank") if to_blame else None
    logs = _logs(folder, blamed if isinstance(blamed, int) else None)
    surveys = [recorded, *(survey_file(path, str(path.relative_to(folder)), _last_start(path)) for path in logs)]
    if not recorded.findings and not failures and not any(survey.lines for survey in surveys[1:]):
        raise DataError(f"run = {name}: {folder} holds no failure and no log of a rank: was it started at all?")
    nodes = failures[-1][1].get("nodes") if failures else None
    starts = [event.get("start") for _, event in events if event.get("event") == "launch"]
    evidence = evidence_folders(folder, starts[-1]) if starts else []
    named = tuple(map(str, nodes)) if isinstance(nodes, list) else ()
    return RunEnd(folder, tuple(surveys), status, named, tuple(evidence))


def _unresolved(events: Sequence[tuple[int, dict[str, Any]]]) -> list[tuple[int, dict[str, Any]]]:
    """Returns the last report of a hang or of a silence that nothing has ended, with its line."""
    found = []
    for name, ending in _RESOLVED_BY.items():
        reports = [(line, event) for line, event in events if event.get("event") in (name, ending)]
        if reports and reports[-1][1].get("event") == name:
            found.append(reports[-1])
    return found[:1]


def _logs(folder: Path, blamed: int | None) -> list[Path]:
    """Returns the logs of a run in this order: blamed rank, other ranks, agents, srun."""
    ranks = sorted((folder / "logs").glob("rank_*.log"))
    first = rank_log_path(folder, blamed) if blamed is not None else None
    ordered = [path for path in ranks if path == first] + [path for path in ranks if path != first]
    others = [*sorted((folder / "logs").glob("agent_*.log")), srun_log_path(folder)]
    return [path for path in (*ordered, *others) if path.is_file() and path.stat().st_size]


def _last_start(path: Path) -> int:
    """Returns the offset in bytes at which a rank's log of its last start begins."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        at = content.rfind(b"\n" + START_HEADER)
        return at + 1 if at >= 0 else 0


def read_flight_dumps(names: Sequence[str]) -> list[FlightTrace]:
    """Returns the traces of all named dumps and of the dumps in named folders, in rank order.

    Raises:
        DataError: A path does not exist or is not a dump, or two dumps are of the same rank.
    """
    files: list[Path] = []
    for name in names:
        path = Path(name).expanduser()
        if path.is_dir():
            files += sorted(
                file
                for file in path.iterdir()
                if file.is_file() and _DUMP_RANK.search(file.name) and _looks_like_dump(file)
            )
        elif path.exists():
            files.append(path)
        else:
            raise DataError(f"flight_recorder: there is no file {path}")
    if not files:
        raise DataError(f"flight_recorder: no dumps in {', '.join(names)}: want files whose names end in their rank")
    traces: dict[int, FlightTrace] = {}
    for path in files:
        found = _DUMP_RANK.search(path.name)
        if found is None:
            raise DataError(
                f"flight_recorder: {path}: the name of a dump must end in its rank, as in nccl_trace_rank_3"
            )
        rank = int(found[1])
        if rank in traces:
            raise DataError(
                f"flight_recorder: {path} is a second dump of rank {rank}: give the dumps of one failure only"
            )
        traces[rank] = _read_dump(path, rank)
    return [traces[rank] for rank in sorted(traces)]


def _looks_like_dump(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(1) in (_PICKLE, b"{")


def _read_dump(path: Path, rank: int) -> FlightTrace:
    # Imported here because it imports torch.
    from megads.tools.convert.pickles import read_inert

    try:
        content = read_regular(path)
        dump = read_inert(content) if content.startswith(_PICKLE) else parse_json(content)
        if not isinstance(dump, dict):
            raise ValueError("holds no entries of a flight recorder")
        return parse_trace(rank, dump)
    except (OSError, ValueError) as error:
        raise DataError(f"flight_recorder: {path} {error}") from error


def main_thread_stack(folder: Path, rank: int) -> list[str]:
    """Returns the stack frames of a rank's main thread, innermost first, as "file:line function"."""
    try:
        text = (folder / f"stacks_rank_{rank:05d}.txt").read_text(errors="replace").strip()
    except OSError:
        return []
    threads = [
        [_frame(line) for line in map(str.strip, block.splitlines()) if line.startswith('File "')]
        for block in text.split("\n\n")
    ]
    # faulthandler does not name the main thread, and calls the thread that holds the interpreter the current one.
    return next((frames for frames in threads if frames and not frames[-1].endswith(" _bootstrap")), [])


def _frame(line: str) -> str:
    """Converts `File "a.py", line 3 in f` to `a.py:3 f`."""
    file, _, rest = line.removeprefix('File "').partition('", line ')
    number, _, function = rest.partition(" in ")
    return f"{file}:{number} {function}"
