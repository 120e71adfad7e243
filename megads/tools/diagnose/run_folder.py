"""What a run of megads recorded of its end: the failure's record and exit code, and the logs of its last start."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path

from megads.diagnosis.evidence import Survey
from megads.diagnosis.run_record import START_HEADER, recorded_findings
from megads.errors import EXIT_OK, DataError
from megads.launch.evidence import evidence_folders
from megads.runtime.metrics import read_json_lines
from megads.runtime.run_dir import EVENTS_FILE, find_run, is_run_dir, rank_log_path, srun_log_path
from megads.tools.diagnose.log_files import survey_file

_FAILURE_EVENTS = ("failure", "killed")


@dataclass(frozen=True)
class RunEnd:
    """How a run's last start ended.

    Attributes:
        folder: the run directory.
        surveys: of its records and logs; the first is of what it recorded.
        finished: it ended well, so there is nothing to diagnose.
        nodes: to blame, as the launcher found.
        evidence: folders of what was collected of the ranks of that start while they ran, in the order of time.
    """

    folder: Path
    surveys: tuple[Survey, ...]
    finished: bool
    nodes: tuple[str, ...] = ()
    evidence: tuple[Path, ...] = ()


def read_run(name: str) -> RunEnd:
    """Reads how a run ended.

    Raises:
        ConfigError: there is no such run.
        DataError: it recorded nothing, and has no log.
    """
    folder = find_run(name)
    if not is_run_dir(folder):
        raise DataError(f"run = {name}: {folder} is no run directory: it has neither {EVENTS_FILE} nor logs of ranks")
    events = list(enumerate(read_json_lines(folder / EVENTS_FILE), 1))
    last_launch = max((place for place, (_, event) in enumerate(events) if event.get("event") == "launch"), default=0)
    events = events[last_launch:]
    failures = [(line, event) for line, event in events if event.get("event") in _FAILURE_EVENTS]
    ends = [event for _, event in events if event.get("event") == "exit"]
    if not failures and ends and ends[-1].get("exit_code") == EXIT_OK:
        return RunEnd(folder, (), True)
    recorded = Survey(EVENTS_FILE)
    recorded.lines = len(events)
    for line, event in failures:
        recorded.findings += recorded_findings(line, event)
    blamed = failures[-1][1].get("rank") if failures else None
    logs = _logs(folder, blamed if isinstance(blamed, int) else None)
    surveys = [recorded, *(survey_file(path, str(path.relative_to(folder)), _last_start(path)) for path in logs)]
    if not failures and not any(survey.lines for survey in surveys[1:]):
        raise DataError(f"run = {name}: {folder} holds no failure and no log of a rank: was it started at all?")
    nodes = failures[-1][1].get("nodes") if failures else None
    starts = [event.get("start") for _, event in events if event.get("event") == "launch"]
    evidence = evidence_folders(folder, starts[-1]) if starts else []
    named = tuple(map(str, nodes)) if isinstance(nodes, list) else ()
    return RunEnd(folder, tuple(surveys), False, named, tuple(evidence))


def _logs(folder: Path, blamed: int | None) -> list[Path]:
    """Returns the logs of a run: that of the rank to blame, the other ranks', the agents' and srun's."""
    ranks = sorted((folder / "logs").glob("rank_*.log"))
    first = rank_log_path(folder, blamed) if blamed is not None else None
    ordered = [path for path in ranks if path == first] + [path for path in ranks if path != first]
    others = [*sorted((folder / "logs").glob("agent_*.log")), srun_log_path(folder)]
    return [path for path in (*ordered, *others) if path.is_file() and path.stat().st_size]


def _last_start(path: Path) -> int:
    """Returns where a rank's log of its last start begins."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        at = content.rfind(b"\n" + START_HEADER)
        return at + 1 if at >= 0 else 0
