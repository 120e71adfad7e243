"""Report of a site on one HTML page, with its charts; `site` computes what it shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from megads.api import render_duration
from megads.tools.report.config import ReportConfig
from megads.tools.report.html_page import (
    KeyNumber,
    WrittenReport,
    fact_list,
    number_cards,
    table,
    write_pages,
)
from megads.tools.report.site import MOST_GROUPS, SiteUse, read_use
from megads.tools.report.style import BLUE, CYCLE, ORANGE, Chart, close_panel, open_panel
from megads.tools.report.summary import short

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
    use = read_use(config.site)
    charts = [
        Chart("busy", "GPUs in use over the time of the dump", partial(_draw_busy, use), wide=True),
        Chart("sizes", "Share of jobs and of GPU time by GPUs per job", partial(_draw_sizes, use)),
        Chart("queue", "Cumulative share of jobs by queue delay, one curve per job size", partial(_draw_queue, use)),
    ]
    for name, description, kind, title in (
        ("states", "GPU hours by final state", "state", "GPU time by state"),
        ("causes", "GPU hours of failed jobs by cause", "cause", "GPU time of failed jobs"),
        ("users", "GPU hours of the largest users", "user", "GPU time by user"),
        ("accounts", "GPU hours by account", "account", "GPU time by account"),
    ):
        charts.append(Chart(name, description, partial(_draw_bars, use, kind, title)))
    folder = Path(config.output or DEFAULT_FOLDER)
    unreadable = sum(lines.count for lines in use.bad_lines.values())
    return write_pages(folder, charts, "site", partial(_page, use, config.site_gpus, config.site), unreadable)


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
    # matplotlib does not shorten labels; a very long name would leave no room for the bars.
    names = [group.name for group in groups]
    axes.set_yticks(places, [name if len(name) <= _LETTERS else f"{name[: _LETTERS - 1]}…" for name in names])
    axes.set_ylim(len(groups) - 0.4, -0.6)
    axes.grid(visible=False)
    axes.grid(visible=True, axis="x")
    axes.xaxis.set_major_formatter(lambda value, _position: short(value))
    close_panel(axes, "GPU hours", "")
    return figure


_TITLES = {
    "state": "By state",
    "cause": "Failures by cause",
    "size": "By GPUs per job",
    "partition": "By partition",
    "account": "By account",
    "user": "By user",
}


def _page(use: SiteUse, site_gpus: int | None, source: str, pictures: Sequence[str]) -> list[str]:
    whole = use.whole
    on_average = f"{whole.gpu_hours / use.hours:,.1f} GPUs on average" if use.hours else ""
    cpu_jobs = sum(group.jobs for group in use.by["size"] if group.name == "CPU only")
    failed_time = _percent(whole.failed_gpu_hours, whole.gpu_hours)
    numbers = [
        KeyNumber("GPU hours", f"{whole.gpu_hours:,.0f}", on_average),
        KeyNumber("jobs", f"{whole.jobs:,}", f"{whole.jobs - cpu_jobs:,} with GPUs"),
        KeyNumber("failed", _percent(whole.failed, whole.jobs), "of all jobs; cancelled jobs are not failed"),
        KeyNumber("GPU time of failed jobs", failed_time, "of all"),
        KeyNumber("median queue delay", _duration(whole.queue_s, "p50"), f"99%: {_duration(whole.queue_s, 'p99')}"),
    ]
    if site_gpus is not None:
        numbers.insert(0, KeyNumber("utilization", f"{use.utilization(site_gpus):.1%}", f"of {site_gpus:,} GPUs"))
    begin, end = (str(moment).replace("T", " ") for moment in (use.begin, use.end))
    facts = [("dump", source), ("from", begin), ("to", end)]
    if use.steps:
        facts.append(("job steps", f"{use.steps:,}, included in the time of their jobs"))
    bad = [(defect, f"{lines.count:,}", f"{lines.line:,}", lines.text) for defect, lines in use.bad_lines.items()]
    bad_table = table(("defect", ">lines", ">first line", "its beginning"), bad)
    return [
        "<header><h1>Usage of the site</h1></header>",
        number_cards(numbers),
        fact_list(facts),
        f'<div class="charts">{"".join(pictures)}</div>',
        *(f"<h2>{title}</h2>{_groups_table(use, kind)}" for kind, title in _TITLES.items() if use.by[kind]),
        f"<h2>Unreadable lines</h2>{bad_table}" if bad else "",
    ]


def _groups_table(use: SiteUse, kind: str) -> str:
    rows: list[Sequence[str]] = [
        (
            group.name,
            f"{group.jobs:,}",
            f"{group.gpu_hours:,.1f}",
            _percent(group.gpu_hours, use.whole.gpu_hours),
            _percent(group.failed, group.jobs),
            _percent(group.failed_gpu_hours, group.gpu_hours),
            *(_duration(group.queue_s, percent) for percent in ("p50", "p95", "p99")),
            *(_duration(group.run_s, percent) for percent in ("p50", "p95")),
        )
        for group in use.by[kind][:MOST_GROUPS]
    ]
    more = len(use.by[kind]) - len(rows)
    if more > 0:
        rows.append((f"{more:,} more",))
    head = "|>jobs|>GPU hours|>share|>failed|>GPU time failed|>queue 50%|>95%|>99%|>run 50%|>95%"
    return table(head.split("|"), rows)


def _percent(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else ""


def _duration(percentiles: Mapping[str, float], name: str) -> str:
    return render_duration(percentiles[name]) if name in percentiles else ""
