"""`megads chaos`: injects real faults into a run and checks that nothing is lost."""

from __future__ import annotations

import sys

from megads.cli.verb import Invocation, Verb
from megads.errors import EXIT_OK, CheckpointError, ConfigError
from megads.tools.chaos.config import ChaosConfig


def run(config: ChaosConfig, _invocation: Invocation) -> int:
    """Runs a campaign of faults, or lists them."""
    config.check()
    from megads.tools.chaos.campaign import Campaign, as_json, list_faults, select_faults, show, write

    if config.dry_run:
        list_faults(select_faults(config))
        return EXIT_OK
    out = sys.stderr if config.json else sys.stdout
    result = Campaign(config, lambda line: print(line, file=out, flush=True)).run()
    path = write(result)
    if config.json:
        print(as_json(result))
    else:
        show(result)
        print(path)
    if result.failed:
        raise CheckpointError(f"{len(result.failed)} of {len(result.results)} faults were not survived; see {path}")
    if result.missing:
        raise ConfigError(
            f"only {len(result.results)} of {result.asked} faults were injected within minutes = {config.minutes:g}: "
            f"raise minutes, or lower faults; see {path}"
        )
    return EXIT_OK


VERB = Verb("chaos", ChaosConfig, run, flags={"--json": "json=true"})
