"""`megads diagnose`: finds the root cause of a failed run, and whether a restart helps."""

from __future__ import annotations

from megads.cli.verb import Invocation, Verb
from megads.errors import EXIT_OK
from megads.tools.diagnose.config import DiagnoseConfig


def run(config: DiagnoseConfig, _invocation: Invocation) -> int:
    """Reads the logs and prints the root cause."""
    config.check()
    from megads.tools.diagnose.command import FinishedRun, as_json, diagnose, finished_json, show

    found = diagnose(config)
    if isinstance(found, FinishedRun):
        print(
            finished_json(found) if config.json else f"{found.folder}: its last start ended well, nothing to diagnose"
        )
    elif config.json:
        print(as_json(found, config.templates))
    else:
        show(found, config.templates)
    return EXIT_OK


VERB = Verb("diagnose", DiagnoseConfig, run, flags={"--json": "json=true"})
