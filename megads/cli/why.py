"""`megads why`: shows the samples that a step of a run trained on."""

from __future__ import annotations

from megads.cli.verb import Invocation, Verb
from megads.errors import EXIT_OK
from megads.runtime.environment import use_passive_openmp_wait
from megads.tools.inspect.why_config import WhyConfig


def run(config: WhyConfig, _invocation: Invocation) -> int:
    """Finds and prints the samples of the step."""
    config.check()
    use_passive_openmp_wait()
    # Shell completion imports this module, so torch is imported late.
    from megads.tools.inspect.why import explain
    from megads.tools.inspect.why_output import as_json, as_text

    found = explain(config)
    print(as_json(found) if config.json else as_text(found, config.max_characters, config.tokens))
    return EXIT_OK


VERB = Verb("why", WhyConfig, run, flags={"json": "json=true"})
