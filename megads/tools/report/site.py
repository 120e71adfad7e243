"""Usage of a site: GPU time by state and owner, queue delays, failures by cause, job sizes.

Follows section 3 of Characterization of Large Language Model Development in the Datacenter (Hu et al., NSDI 2024). The
time of a job is that of its last start: sacct lists earlier starts of a requeued job only with --duplicates.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megads.tools.report.sacct import BadLines, SiteJobs, read_site

FloatArray = NDArray[np.float64]

SIZES = ("CPU only", "1 GPU", "2-4", "5-8", "9-16", "17-64", "65-256", "257-1,024", "above 1,024")
_SIZE_EDGES = np.array([0, 1, 4, 8, 16, 64, 256, 1024])
_PERCENTILES = {"p50": 50, "p75": 75, "p90": 90, "p95": 95, "p99": 99, "max": 100}
_BINS = 400
MOST_GROUPS = 20
"""Maximum number of groups of a kind that are shown."""
_NOT_FAILED = (
    "COMPLETED", "RUNNING", "PENDING", "SUSPENDED", "CONFIGURING", "COMPLETING", "REQUEUED", "RESIZING", "CANCELLED",
)  # fmt: skip
_STATES = {
    "NODE_FAIL": "a node was lost (NODE_FAIL)",
    "BOOT_FAIL": "nodes did not boot (BOOT_FAIL)",
    "OUT_OF_MEMORY": "out of memory (OUT_OF_MEMORY)",
    "TIMEOUT": "time limit (TIMEOUT)",
    "DEADLINE": "deadline (DEADLINE)",
    "PREEMPTED": "preempted (PREEMPTED)",
}


@dataclass(frozen=True)
class JobGroup:
    """Statistics of a group of jobs.

    Attributes:
        name: value that the jobs have in common, such as a state or a user.
        jobs: number of jobs.
        gpu_hours: GPU hours of all jobs.
        failed: number of failed jobs.
        failed_gpu_hours: GPU hours of failed jobs.
        queue_s: percentiles of the queue delay in seconds, p50 to p99 and max; empty if no job has started.
        run_s: percentiles of the run time in seconds, likewise.
    """

    name: str
    jobs: int
    gpu_hours: float
    failed: int
    failed_gpu_hours: float
    queue_s: Mapping[str, float]
    run_s: Mapping[str, float]


@dataclass(frozen=True)
class SiteUse:
    """Usage statistics of a site, as shown in a report.

    Attributes:
        whole: statistics of all jobs.
        begin: time of the first submission.
        end: last time at which a job ran or was submitted.
        by: groups by state, user, account, partition, size and cause; the largest first, sizes in ascending order.
        queue_by_size: queue delays in seconds and cumulative share of jobs, for each job size.
        busy: mean number of GPUs in use in equal intervals of time.
        bad_lines: unreadable lines by defect.
        steps: number of lines of job steps.
    """

    whole: JobGroup
    begin: np.datetime64
    end: np.datetime64
    by: Mapping[str, Sequence[JobGroup]]
    queue_by_size: Mapping[str, tuple[FloatArray, FloatArray]]
    busy: FloatArray
    bad_lines: Mapping[str, BadLines]
    steps: int

    @property
    def hours(self) -> float:
        """Time span of the dump in hours."""
        return float((self.end - self.begin) / np.timedelta64(1, "s")) / 3600

    def utilization(self, site_gpus: int) -> float:
        """Used GPU hours over available GPU hours."""
        return self.whole.gpu_hours / (site_gpus * self.hours) if self.hours else 0.0


def read_use(source: str) -> SiteUse:
    """Reads a dump, or the output of a sacct command, and computes its usage statistics.

    Raises:
        ConfigError: The dump cannot be read.
        DataError: The dump is empty or lacks fields.
    """
    return site_use(read_site(source))


def site_use(jobs: SiteJobs) -> SiteUse:
    """Computes the usage statistics of a dump."""
    ran = ~np.isnat(jobs.start) & (jobs.elapsed_s >= 0)
    states, exits = jobs.names["state"], jobs.names["exit_code"]
    # Per job; the queue delay and the run time are NaN if it has not started.
    columns = np.rec.fromarrays(
        [
            np.where(ran, jobs.elapsed_s * jobs.gpus.astype(np.float64) / 3600, 0.0),
            np.maximum(np.where(ran, (jobs.start - jobs.eligible) / np.timedelta64(1, "s"), np.nan), 0.0),
            np.where(ran, jobs.elapsed_s, np.nan),
            np.array([name not in _NOT_FAILED for name in states], dtype=bool)[jobs.codes["state"]],
        ],
        formats="f8,f8,f8,?",
        names="gpu_hours,queue_s,run_s,failed",
    )
    ends = np.where(ran, jobs.start + jobs.elapsed_s.astype("timedelta64[s]"), jobs.submit)
    begin, end = jobs.submit.min(), max(ends.max(), jobs.submit.max())
    sizes = np.searchsorted(_SIZE_EDGES, jobs.gpus).astype(np.int32)
    by = {
        kind: _groups(columns, jobs.names[kind], jobs.codes[kind]) for kind in ("state", "user", "account", "partition")
    }
    by["size"] = sorted(_groups(columns, SIZES, sizes), key=lambda group: SIZES.index(group.name))
    # The states and exit codes of failed jobs are few, so that each pair is named once.
    pairs = (jobs.codes["state"].astype(np.int64) * len(exits) + jobs.codes["exit_code"])[columns.failed]
    kinds, kind_of = np.unique(pairs, return_inverse=True)
    causes = [cause_of(states[pair // len(exits)], exits[pair % len(exits)]) for pair in kinds.tolist()]
    names, codes = np.unique(np.array(causes, dtype=object), return_inverse=True)
    by["cause"] = _groups(columns[columns.failed], names.tolist(), codes[kind_of]) if causes else []
    return SiteUse(
        whole=_group("all", columns),
        begin=begin,
        end=end,
        by=by,
        queue_by_size=_queue_curves(columns.queue_s, sizes),
        busy=_busy(jobs, ran, begin, end),
        bad_lines=jobs.bad,
        steps=jobs.steps,
    )


def _group(name: str, columns: Any) -> JobGroup:
    hours, failed = columns.gpu_hours, columns.failed
    percentiles = []
    for values in (columns.queue_s, columns.run_s):
        known = values[~np.isnan(values)]
        found = np.percentile(known, list(_PERCENTILES.values())).tolist() if len(known) else []
        percentiles.append(dict(zip(_PERCENTILES, found, strict=False)))
    return JobGroup(name, len(hours), float(hours.sum()), int(failed.sum()), float(hours[failed].sum()), *percentiles)


def _groups(columns: Any, names: Sequence[str], codes: NDArray[np.integer]) -> list[JobGroup]:
    """Groups of a category, in descending order of GPU hours, then of jobs."""
    order = np.argsort(codes, kind="stable")
    present, starts = np.unique(codes[order], return_index=True)
    members = np.split(order, starts[1:])
    found = [_group(names[code] or "(none)", columns[rows]) for code, rows in zip(present, members, strict=True)]
    return sorted(found, key=lambda group: (-group.gpu_hours, -group.jobs, group.name))


def cause_of(state: str, exit_code: str) -> str:
    """Cause of a failed job, from its state or its exit code.

    Args:
        state: first word of sacct's State.
        exit_code: sacct's ExitCode, `code:signal`.
    """
    if state in _STATES:
        return _STATES[state]
    code, _, number = exit_code.partition(":")
    killed_by = int(number) if number.isdecimal() else 0
    if not killed_by and code.isdecimal() and 128 < int(code) < 193:
        killed_by = int(code) - 128
    if killed_by:
        try:
            return f"{state}, {signal.Signals(killed_by).name}"
        except ValueError:
            return f"{state}, signal {killed_by}"
    return f"{state}, exit {code or 'not known'}"


def _queue_curves(queue_s: FloatArray, sizes: NDArray[np.int32]) -> dict[str, tuple[FloatArray, FloatArray]]:
    """Cumulative distribution of the queue delay of started jobs by job size, in at most _BINS points."""
    found = {}
    for size, name in enumerate(SIZES):
        known = np.sort(queue_s[(sizes == size) & ~np.isnan(queue_s)])
        if len(known):
            places = np.unique(np.linspace(0, len(known) - 1, min(len(known), _BINS)).astype(np.int64))
            found[name] = (known[places], (places + 1) / len(known))
    return found


def _busy(jobs: SiteJobs, ran: NDArray[np.bool_], begin: np.datetime64, end: np.datetime64) -> FloatArray:
    """Mean number of GPUs in use in equal intervals of time.

    GPU time until t is the sum of gpus * (t - start) over jobs started before t, minus the sum of gpus * (t - end) over
    jobs ended before t; both come from prefix sums over sorted times.
    """
    whole = float((end - begin) / np.timedelta64(1, "s"))
    if whole <= 0:
        return np.zeros(0)
    edges = np.linspace(0.0, whole, _BINS + 1)
    used = ran & (jobs.gpus > 0)
    start = ((jobs.start[used] - begin) / np.timedelta64(1, "s")).astype(np.float64)
    gpus = jobs.gpus[used].astype(np.float64)
    until = _gpu_time(edges, start, gpus) - _gpu_time(edges, start + jobs.elapsed_s[used], gpus)
    return np.diff(until) / np.diff(edges)


def _gpu_time(edges: FloatArray, moments: FloatArray, gpus: FloatArray) -> FloatArray:
    """Sum of gpus * (edge - moment) over the moments before each edge."""
    order = np.argsort(moments)
    count = np.concatenate([[0.0], np.cumsum(gpus[order])])
    weight = np.concatenate([[0.0], np.cumsum(gpus[order] * moments[order])])
    place = np.searchsorted(moments[order], edges)
    return edges * count[place] - weight[place]


def site_json(use: SiteUse, site_gpus: int | None) -> dict[str, Any]:
    """The usage as JSON-serializable values; durations in seconds."""
    whole = asdict(use.whole)
    del whole["name"]
    return {
        "begin": str(use.begin),
        "end": str(use.end),
        "hours": use.hours,
        **whole,
        "site_gpus": site_gpus,
        "utilization": None if site_gpus is None else use.utilization(site_gpus),
        "mean_gpus_in_use": use.whole.gpu_hours / use.hours if use.hours else None,
        "by": {kind: [asdict(group) for group in groups[:MOST_GROUPS]] for kind, groups in use.by.items()},
        "groups": {kind: len(groups) for kind, groups in use.by.items()},
        "bad_lines": [
            {"defect": defect, "count": found.count, "first_line": found.line, "text": found.text}
            for defect, found in use.bad_lines.items()
        ],
        "steps_passed_over": use.steps,
    }
