"""`megads watch`: serves a page that shows runs live."""

from __future__ import annotations

from megads.cli.verb import Invocation, Verb
from megads.errors import EXIT_OK
from megads.tools.report.watch.config import WatchConfig, require_packages


def run(config: WatchConfig, _invocation: Invocation) -> int:
    """Serves the page until interrupted."""
    config.check()
    require_packages()
    from megads.tools.report.watch.server import serve

    serve(config)
    return EXIT_OK


VERB = Verb("watch", WatchConfig, run)
