"""`megads plan`: parameters, memory per rank and FLOPs of the run with the same overrides."""

from __future__ import annotations

from megads.cli.verb import Invocation, Verb, config_dir
from megads.config.root import check_shape
from megads.errors import EXIT_OK
from megads.tools.plan.config import PlanConfig


def run(config: PlanConfig, _invocation: Invocation) -> int:
    """Prints the plan without starting or allocating anything."""
    # Shell completion imports this module, so torch is imported late.
    config.check_cluster()
    config.check_device()
    if config.life:
        from megads.tools.plan.life_output import show_life

        show_life(config)
        return EXIT_OK
    if config.budget_hours is not None:
        from megads.tools.plan.budget import show_budget

        check_shape(config)
        show_budget(config, config_dir())
        return EXIT_OK
    from megads.tools.plan.output import show

    if not config.search:
        check_shape(config)
    config.check_schedule()
    show(config)
    return EXIT_OK


VERB = Verb("plan", PlanConfig, run)
