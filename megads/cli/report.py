"""`megads report`: a run as one HTML page and a few pictures."""

from __future__ import annotations

from megads.cli.verb import Invocation, Verb
from megads.errors import EXIT_OK, ConfigError
from megads.report.config import ReportConfig


def run(config: ReportConfig, _invocation: Invocation) -> int:
    """Writes the report and says where it is."""
    config.check()
    require_matplotlib()
    from megads.report.write import write_report

    written = write_report(config)
    print(f"report:  {written.page}")
    print(f"picture: {written.pictures[0]}")
    if written.trace is not None:
        print(f"trace:   {written.trace}, for ui.perfetto.dev")
    return EXIT_OK


def require_matplotlib() -> None:
    """Raises ConfigError where pictures cannot be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"reports are drawn with matplotlib, and {error.name} is not installed: pip install 'megads[report]', or "
            "in a checkout pip install -e '.[report]' -c constraints.txt"
        ) from error


VERB = Verb("report", ReportConfig, run)
