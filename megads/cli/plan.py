"""`megads plan`: parameters, memory per rank and FLOPs of the run that the same overrides would train."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from megads.cli.verb import Invocation, Verb
from megads.config import RootConfig, check_shape
from megads.errors import EXIT_OK


class Device(StrEnum):
    """Where the ranks would compute."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


@dataclass
class PlanConfig(RootConfig):
    """The config of `megads train`, and how to print the plan."""

    json: bool = False
    """Print JSON instead of tables."""
    ranks: bool = False
    """Say also which rank holds what."""
    device: Device = Device.auto
    """Where ranks would compute; auto is this machine's GPUs, or its CPU."""


def run(config: PlanConfig, _invocation: Invocation) -> int:
    """Prints the plan; starts and allocates nothing."""
    # The tab key imports this module for its schema and must not wait for torch.
    from megads.cli.plan_output import show

    check_shape(config)
    show(config, config.device.value, as_text=not config.json, ranks=config.ranks)
    return EXIT_OK


VERB = Verb("plan", PlanConfig, run)
