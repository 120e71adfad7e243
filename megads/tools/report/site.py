"""Report of a site on one HTML page: GPU time by state and owner, queue delays, failures by cause, job sizes.

Follows section 3 of Characterization of Large Language Model Development in the Datacenter (Hu et al., NSDI 2024). The
time of a job is that of its last start: sacct lists earlier starts of a requeued job only with --duplicates.
"""

from __future__ import annotations

import html
import json
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from megads.runtime.progress import render_duration
from megads.tools.report.config import ReportConfig
from megads.tools.report.html_page import (
    KeyNumber,
    WrittenReport,
    document,
    fact_list,
    footer,
    number_cards,
    table,
    write_pages,
)
from megads.tools.report.sacct import SiteJobs, read_site
from megads.tools.report.style import BLUE, CYCLE, ORANGE, Chart, close_panel, open_panel
from megads.tools.report.summary import short

FloatArray = NDArray[np.float64]

SIZES = ("CPU only", "1 GPU", "2-4", "5-8", "9-16", "17-64", "65-256", "257-1,024", "above 1,024")
_SIZE_EDGES = np.array([0, 1, 4, 8, 16, 64, 256, 1024])
_PERCENTILES = (50, 75, 90, 95, 99)
_BINS = 400
_MOST_ROWS = 20
_NOT_FAILED = (
    "COMPLETED",
    "RUNNING",
    "PENDING",
    "SUSPENDED",
    "CONFIGURING",
    "COMPLETING",
    "REQUEUED",
    "RESIZING",
    "CANCELLED",
)
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
        queue_s: percentiles of the queue delay in seconds, by percent; empty if no job has started.
        run_s: percentiles of the run time in seconds, likewise.
    """

    name: str
    jobs: int
    gpu_hours: float
    failed: int
    failed_gpu_hours: float
    queue_s: Mapping[int, float]
    run_s: Mapping[int, float]


@dataclass(frozen=True)
class SiteUse:
    """Usage statistics of a site, as shown in a report.

    Attributes:
        whole: statistics of all jobs.
        begin: time of the first submission.
        end: last time at which a job ran or was submitted.
        by: groups by state, user, account, partition, size and cause; the largest first, sizes in ascending order.
        shown_of: total number of groups of each kind; `by` holds only the first of them.
        queue_by_size: queue delays in seconds and cumulative share of jobs, for each job size.
        busy: mean number of GPUs in use in equal intervals of time.
        bad_lines: unreadable lines: defect, count, line number and beginning of the first one.
        steps: number of lines of job steps.
    """

    whole: JobGroup
    begin: np.datetime64
    end: np.datetime64
    by: Mapping[str, Sequence[JobGroup]]
    shown_of: Mapping[str, int]
    queue_by_size: Mapping[str, tuple[FloatArray, FloatArray]]
    busy: FloatArray
    bad_lines: Sequence[tuple[str, int, int, str]]
    steps: int

    @property
    def hours(self) -> float:
        """Time span of the dump in hours."""
        return float((self.end - self.begin) / np.timedelta64(1, "s")) / 3600

    def utilization(self, site_gpus: int) -> float:
        """Used GPU hours over available GPU hours."""
        return self.whole.gpu_hours / (site_gpus * self.hours) if self.hours else 0.0


def site_use(jobs: SiteJobs) -> SiteUse:
    """Computes the usage statistics of a dump."""
    ran = ~np.isnat(jobs.start) & (jobs.elapsed_s >= 0)
    gpu_hours = np.where(ran, jobs.elapsed_s * jobs.gpus.astype(np.float64) / 3600, 0.0)
    delay = np.where(ran, (jobs.start - jobs.eligible) / np.timedelta64(1, "s"), np.nan)
    columns = _JobColumns(gpu_hours, np.maximum(delay, 0.0), np.where(ran, jobs.elapsed_s, np.nan), _failed(jobs))
    ends = np.where(ran, jobs.start + jobs.elapsed_s.astype("timedelta64[s]"), jobs.submit)
    begin, end = jobs.submit.min(), max(ends.max(), jobs.submit.max())
    sizes = np.searchsorted(_SIZE_EDGES, jobs.gpus).astype(np.int32)
    by = {
        kind: _groups(columns, jobs.names[kind], jobs.codes[kind]) for kind in ("state", "user", "account", "partition")
    }
    by["size"] = sorted(_groups(columns, SIZES, sizes), key=lambda group: SIZES.index(group.name))
    by["cause"] = _by_cause(jobs, columns)
    return SiteUse(
        whole=_group("all", columns, np.arange(len(jobs))),
        begin=begin,
        end=end,
        by={kind: groups[:_MOST_ROWS] for kind, groups in by.items()},
        shown_of={kind: len(groups) for kind, groups in by.items()},
        queue_by_size=_queue_curves(columns.queue_s, sizes),
        busy=_busy(jobs, ran, begin, end),
        bad_lines=[(defect, item.count, item.line, item.text) for defect, item in jobs.bad.items()],
        steps=jobs.steps,
    )


@dataclass(frozen=True)
class _JobColumns:
    """Per job: GPU hours, queue delay and run time (NaN if it has not started), and whether it failed."""

    gpu_hours: FloatArray
    queue_s: FloatArray
    run_s: FloatArray
    failed: NDArray[np.bool_]


def _failed(jobs: SiteJobs) -> NDArray[np.bool_]:
    failed = np.array([name not in _NOT_FAILED for name in jobs.names["state"]], dtype=bool)
    return failed[jobs.codes["state"]]


def _group(name: str, columns: _JobColumns, members: NDArray[np.int64]) -> JobGroup:
    failed = columns.failed[members]
    hours = columns.gpu_hours[members]
    return JobGroup(
        name, len(members), float(hours.sum()), int(failed.sum()), float(hours[failed].sum()),
        _percentiles(columns.queue_s[members]), _percentiles(columns.run_s[members]),
    )  # fmt: skip


def _percentiles(values: FloatArray) -> dict[int, float]:
    known = values[~np.isnan(values)]
    if not len(known):
        return {}
    return dict(zip((*_PERCENTILES, 100), np.percentile(known, (*_PERCENTILES, 100)).tolist(), strict=True))


def _groups(columns: _JobColumns, names: Sequence[str], codes: NDArray[np.int32]) -> list[JobGroup]:
    """Groups of a category, in descending order of GPU hours, then of jobs."""
    order = np.argsort(codes, kind="stable")
    present, starts = np.unique(codes[order], return_index=True)
    members = np.split(order, starts[1:])
    found = [
        _group(names[code] or "(none)", columns, rows) for code, rows in zip(present.tolist(), members, strict=True)
    ]
    return sorted(found, key=lambda group: (-group.gpu_hours, -group.jobs, group.name))


def _by_cause(jobs: SiteJobs, columns: _JobColumns) -> list[JobGroup]:
    """Groups of failed jobs by cause."""
    states, exits = jobs.names["state"], jobs.names["exit_code"]
    pairs = jobs.codes["state"].astype(np.int64) * max(len(exits), 1) + jobs.codes["exit_code"]
    failed = np.flatnonzero(columns.failed)
    names: dict[str, int] = {}
    kinds, kind_of = np.unique(pairs[failed], return_inverse=True)
    numbers = [
        names.setdefault(cause_of(states[pair // len(exits)], exits[pair % len(exits)]), len(names))
        for pair in kinds.tolist()
    ]
    codes = np.array(numbers, dtype=np.int32)[kind_of] if len(failed) else np.array([], dtype=np.int32)
    part = _JobColumns(*(column[failed] for column in vars(columns).values()))
    return _groups(part, list(names), codes) if len(failed) else []


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


def print_site(source: str, site_gpus: int | None) -> None:
    """Prints the usage of a site as JSON.

    Raises:
        ConfigError: The dump cannot be read.
        DataError: The dump is empty or lacks fields.
    """
    print(json.dumps(site_json(site_use(read_site(source)), site_gpus), indent=2))


def site_json(use: SiteUse, site_gpus: int | None) -> dict[str, Any]:
    """The usage as JSON-serializable values; durations in seconds."""
    return {
        "begin": str(use.begin),
        "end": str(use.end),
        "hours": use.hours,
        **_group_json(use.whole),
        "site_gpus": site_gpus,
        "utilization": None if site_gpus is None else use.utilization(site_gpus),
        "mean_gpus_in_use": use.whole.gpu_hours / use.hours if use.hours else None,
        "by": {
            kind: [{"name": group.name, **_group_json(group)} for group in groups] for kind, groups in use.by.items()
        },
        "groups": dict(use.shown_of),
        "bad_lines": [
            {"defect": defect, "count": count, "first_line": line, "text": text}
            for defect, count, line, text in use.bad_lines
        ],
        "steps_passed_over": use.steps,
    }


def _group_json(group: JobGroup) -> dict[str, Any]:
    def named(values: Mapping[int, float]) -> dict[str, float]:
        return {f"p{percent}" if percent < 100 else "max": value for percent, value in values.items()}

    return {
        "jobs": group.jobs,
        "gpu_hours": group.gpu_hours,
        "failed": group.failed,
        "failed_gpu_hours": group.failed_gpu_hours,
        "queue_s": named(group.queue_s),
        "run_s": named(group.run_s),
    }


DEFAULT_FOLDER = "site-report"
_BARS = 10
_LETTERS = 34


def report_site(config: ReportConfig) -> WrittenReport:
    """Reads a dump and writes its page and charts.

    Raises:
        ConfigError: The dump cannot be read, or the files cannot be written.
        DataError: The dump is empty or lacks fields.
    """
    assert config.site is not None
    use = site_use(read_site(config.site))
    return write_pages(
        Path(config.output or DEFAULT_FOLDER), _charts(use), partial(_page, use, config.site_gpus, config.site)
    )


def _charts(use: SiteUse) -> list[Chart]:
    """The charts in the order of the page."""
    return [
        Chart("busy", "GPUs in use over the time of the dump", partial(_draw_busy, use), wide=True),
        Chart("sizes", "Share of jobs and of GPU time by GPUs per job", partial(_draw_sizes, use)),
        Chart("queue", "Cumulative share of jobs by queue delay, one curve per job size", partial(_draw_queue, use)),
        Chart("states", "GPU hours by final state", partial(_draw_bars, use, "state", "GPU time by state")),
        Chart(
            "causes", "GPU hours of failed jobs by cause", partial(_draw_bars, use, "cause", "GPU time of failed jobs")
        ),
        Chart("users", "GPU hours of the largest users", partial(_draw_bars, use, "user", "GPU time by user")),
        Chart("accounts", "GPU hours by account", partial(_draw_bars, use, "account", "GPU time by account")),
    ]


def _draw_busy(use: SiteUse, wide: bool) -> Figure | None:
    if not len(use.busy):
        return None
    figure, axes = open_panel("GPUs in use", wide)
    days = np.linspace(0, use.hours / 24, len(use.busy) + 1)
    axes.stairs(use.busy, days, color=BLUE, fill=True, alpha=0.75)
    axes.set_ylim(bottom=0)
    close_panel(axes, f"days since {str(use.begin).replace('T', ' ')}", "mean number of GPUs")
    return figure


def _draw_sizes(use: SiteUse, wide: bool) -> Figure:
    figure, axes = open_panel("Job sizes", wide)
    groups = use.by["size"]
    places = np.arange(len(groups))
    for shift, label, color, values, whole in (
        (-0.2, "jobs", BLUE, [group.jobs for group in groups], use.whole.jobs),
        (0.2, "GPU time", ORANGE, [group.gpu_hours for group in groups], use.whole.gpu_hours),
    ):
        axes.bar(places + shift, 100 * np.array(values) / (whole or 1), 0.38, color=color, label=label)
    axes.set_xticks(places, [group.name for group in groups])
    close_panel(axes, "GPUs per job", "% of all")
    return figure


def _draw_queue(use: SiteUse, wide: bool) -> Figure | None:
    if not use.queue_by_size:
        return None
    figure, axes = open_panel("Queue delay", wide)
    for (name, (delay_s, share)), color in zip(use.queue_by_size.items(), (*CYCLE, CYCLE[0]), strict=False):
        # On the logarithmic axis, zero delay is drawn at one second.
        axes.step(np.maximum(delay_s, 1.0), 100 * share, where="post", color=color, label=name)
    axes.set_xscale("log")
    axes.set_ylim(0, 101)
    ticks = [1, 60, 3600, 86_400]
    axes.set_xticks(ticks, ["1 s", "1 min", "1 h", "1 day"])
    axes.minorticks_off()
    close_panel(axes, "queue delay at most", "% of jobs")
    return figure


def _draw_bars(use: SiteUse, kind: str, title: str, wide: bool) -> Figure | None:
    """Horizontal bars of GPU hours of the largest groups; None if no GPU was used."""
    groups = [group for group in use.by[kind][:_BARS] if group.gpu_hours > 0]
    if not groups:
        return None
    figure, axes = open_panel(title, wide)
    places = np.arange(len(groups))
    axes.barh(places, [group.gpu_hours for group in groups], color=BLUE, height=0.7)
    axes.set_yticks(places, [_shortened(group.name) for group in groups])
    axes.set_ylim(len(groups) - 0.4, -0.6)
    axes.grid(visible=False)
    axes.grid(visible=True, axis="x")
    axes.xaxis.set_major_formatter(lambda value, _position: short(value))
    close_panel(axes, "GPU hours", "")
    return figure


def _shortened(name: str) -> str:
    # matplotlib does not shorten labels; a very long name would leave no room for the bars.
    return name if len(name) <= _LETTERS else f"{name[: _LETTERS - 1]}…"


_TITLES = {
    "state": "By state",
    "cause": "Failures by cause",
    "size": "By GPUs per job",
    "partition": "By partition",
    "account": "By account",
    "user": "By user",
}


def _page(use: SiteUse, site_gpus: int | None, source: str, pictures: Sequence[str]) -> str:
    whole = use.whole
    numbers = [
        KeyNumber("GPU hours", f"{whole.gpu_hours:,.0f}", f"{whole.gpu_hours / use.hours:,.1f} GPUs on average")
        if use.hours
        else KeyNumber("GPU hours", f"{whole.gpu_hours:,.0f}"),
        KeyNumber("jobs", f"{whole.jobs:,}", f"{whole.jobs - _cpu_jobs(use):,} with GPUs"),
        KeyNumber("failed", _percent(whole.failed, whole.jobs), "of all jobs; cancelled jobs are not failed"),
        KeyNumber("GPU time of failed jobs", _percent(whole.failed_gpu_hours, whole.gpu_hours), "of all"),
        KeyNumber("median queue delay", _duration(whole.queue_s.get(50)), f"99%: {_duration(whole.queue_s.get(99))}"),
    ]
    if site_gpus is not None:
        numbers.insert(0, KeyNumber("utilization", f"{use.utilization(site_gpus):.1%}", f"of {site_gpus:,} GPUs"))
    begin, end = (str(moment).replace("T", " ") for moment in (use.begin, use.end))
    facts = [("dump", source), ("from", begin), ("to", end)]
    if use.steps:
        facts.append(("job steps", f"{use.steps:,}, included in the time of their jobs"))
    body = [
        "<header><h1>Usage of the site</h1></header>",
        number_cards(numbers),
        fact_list(facts),
        f'<div class="charts">{"".join(pictures)}</div>',
        *(f"<h2>{title}</h2>{_groups_table(use, kind)}" for kind, title in _TITLES.items() if use.by[kind]),
        _bad_lines(use),
        footer(sum(count for _, count, _, _ in use.bad_lines)),
    ]
    return document("site", body)


def _cpu_jobs(use: SiteUse) -> int:
    return sum(group.jobs for group in use.by["size"] if group.name == "CPU only")


def _groups_table(use: SiteUse, kind: str) -> str:
    rows = [_group_row(group, use.whole) for group in use.by[kind]]
    more = use.shown_of[kind] - len(rows)
    if more > 0:
        rows.append(f"<tr><td>{more:,} more</td></tr>")
    head = (
        "",
        ">jobs",
        ">GPU hours",
        ">share",
        ">failed",
        ">GPU time failed",
        ">queue 50%",
        ">95%",
        ">99%",
        ">run 50%",
    )
    return table((*head, ">95%"), rows)


def _group_row(group: JobGroup, whole: JobGroup) -> str:
    cells = [
        f"{group.jobs:,}",
        f"{group.gpu_hours:,.1f}",
        _percent(group.gpu_hours, whole.gpu_hours),
        _percent(group.failed, group.jobs),
        _percent(group.failed_gpu_hours, group.gpu_hours),
        *(_duration(group.queue_s.get(percent)) for percent in (50, 95, 99)),
        *(_duration(group.run_s.get(percent)) for percent in (50, 95)),
    ]
    numbers = "".join(f'<td class="number">{cell}</td>' for cell in cells)
    return f"<tr><td>{html.escape(group.name)}</td>{numbers}</tr>"


def _bad_lines(use: SiteUse) -> str:
    if not use.bad_lines:
        return ""
    rows = (
        f'<tr><td>{html.escape(defect)}</td><td class="number">{count:,}</td><td class="number">{line:,}</td>'
        f"<td>{html.escape(text)}</td></tr>"
        for defect, count, line, text in use.bad_lines
    )
    return f"<h2>Unreadable lines</h2>{table(('defect', '>lines', '>first line', 'its beginning'), rows)}"


def _percent(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else ""


def _duration(seconds: float | None) -> str:
    return "" if seconds is None else render_duration(seconds)
