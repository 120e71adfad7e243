"""`megads diagnose`: finds the root cause of a failed run, and whether a restart helps."""

from __future__ import annotations

from megads.cli.verb import Invocation, Verb
from megads.errors import EXIT_OK
from megads.tools.diagnose.config import DiagnoseConfig


def run(config: DiagnoseConfig, _invocation: Invocation) -> int:
    """Reads the logs and prints the root cause."""
    config.check()
    from megads.tools.diagnose.command import as_json, diagnose, show

    found = diagnose(config)
    if config.json:
        print(as_json(found, config.templates))
    else:
        show(found, config.templates)
    return EXIT_OK


VERB = Verb("diagnose", DiagnoseConfig, run, flags={"--json": "json=true"})
