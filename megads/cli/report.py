"""`megads report`: a run, a sweep, or the utilization of a site, as one HTML page and figures."""

from __future__ import annotations

import json
from pathlib import Path

from megads.cli.verb import Invocation, Verb
from megads.errors import EXIT_OK, ConfigError
from megads.runtime.run_dir import find_run
from megads.tools.report.config import ReportConfig, require_matplotlib

_TABLE_WIDTH = 150
"""Width of a sweep's table in characters."""


def run(config: ReportConfig, _invocation: Invocation) -> int:
    """Writes the report and prints its path."""
    config.check()
    if config.site is not None:
        return _report_site(config)
    require_matplotlib()
    from megads.tools.report.page import write_report
    from megads.tools.sweep.results import SWEEP_FILE

    place = find_run(config.runs[0])
    if (place / SWEEP_FILE).is_file():
        return _report_sweep(config, place)
    written = write_report(config)
    print(f"report:  {written.page}")
    print(f"picture: {written.pictures[0]}")
    if written.said:
        print(f"plan:    {written.said}")
    for trace in written.traces:
        print(f"trace:   {trace}, for ui.perfetto.dev")
    return EXIT_OK


def _report_site(config: ReportConfig) -> int:
    """Writes the report of a site, or prints it as JSON, which does not need matplotlib."""
    if config.json:
        from megads.tools.report.site import read_use, site_json

        print(json.dumps(site_json(read_use(str(config.site)), config.site_gpus), indent=2))
        return EXIT_OK
    require_matplotlib()
    from megads.tools.report.site_page import report_site

    written = report_site(config)
    print(f"report:  {written.page}")
    print(f"picture: {written.pictures[0]}")
    return EXIT_OK


def _report_sweep(config: ReportConfig, folder: Path) -> int:
    """Writes the report of a sweep in its current state, and its tables."""
    from megads.tools.sweep.page import write_page
    from megads.tools.sweep.points import read_points
    from megads.tools.sweep.results import read_record, summary, write_results

    if len(config.runs) > 1 or config.output is not None:
        raise ConfigError(f"run = {folder} is a sweep: give it alone and without output; its folder takes the report")
    record, points = read_record(folder), read_points(folder)
    write_results(folder, record, points)
    print(summary(record, points, _TABLE_WIDTH))
    print(f"report:  {write_page(folder)}")
    return EXIT_OK


VERB = Verb("report", ReportConfig, run, text_keys=("site",))
