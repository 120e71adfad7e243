"""`megads compare`: whether a run is within the tolerance of a reference run, and where it left it."""

from __future__ import annotations

from megads.cli.verb import Invocation, Verb
from megads.errors import EXIT_OK, NumericalError
from megads.tools.compare.config import CompareConfig


def run(config: CompareConfig, _invocation: Invocation) -> int:
    """Compares the runs and prints where they differ.

    Raises:
        NumericalError: the run is not within the tolerance.
    """
    config.check()
    # Shell completion imports this module, so numpy is imported late.
    from megads.tools.compare.comparison import compare
    from megads.tools.compare.output import as_json, as_text, verdict

    found = compare(config)
    print(as_json(found) if config.json else as_text(found))
    if not found.is_within:
        raise NumericalError(verdict(found))
    return EXIT_OK


VERB = Verb("compare", CompareConfig, run, flags={"--json": "json=true"})
