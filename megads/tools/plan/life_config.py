"""What `megads plan life=true` can be told of a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from megads.errors import ConfigError

_MAY_BE_ZERO = (
    "save_stall_s",
    "save_write_s",
    "load_s",
    "memory_stall_s",
    "memory_write_s",
    "memory_load_s",
    "crash_s",
    "hang_s",
    "silent_s",
    "restart_s",
    "replace_s",
)
_POSITIVE = ("days", "step_time_s", "tokens_per_s", "save_every_s", "memory_every_s", "repair_hours")
_MOST_RUNS = 1_000
_MOST_FAILURES = 20_000
"""Of one run; the simulations take a minute."""


class FailureSource(StrEnum):
    """A published table of failures (megads/plan/failures.py)."""

    llama3 = "llama3"
    acme = "acme"
    rsc1 = "rsc1"
    rsc2 = "rsc2"


@dataclass
class LifetimeConfig:
    """Failures, detection, restarts and saves of a run; what a default was measured with is in docs/life.md."""

    failures: FailureSource = FailureSource.llama3
    """Published failures by cause, scaled by GPUs and time: Llama 3's 54 days on 16,384 H100; Acme's (upper bounds);
    Meta's research clusters RSC-1 and RSC-2 (one rate for all causes)."""
    days: float = 30.0
    """Days of wall time."""
    step_time_s: float | None = None
    """Seconds of a step: gives intervals from checkpoint.every_steps and local_every_steps, and hang_s; null is what is
    planned where device is named."""
    tokens_per_s: float | None = None
    """Of all GPUs, while they train: says how many tokens the days come to; null is what is planned where device is
    named."""
    save_every_s: float | None = None
    """Seconds of training between two checkpoints on disk; null is checkpoint.every_steps where that and
    step_time_s are set, else Daly's optimum."""
    save_stall_s: float = 0.5
    """Steps wait so long for a checkpoint: its copy in memory, or all of it with checkpoint.async=false."""
    save_write_s: float = 60.0
    """From there until it is committed, beside the training; 0 where the steps wait for all of it."""
    load_s: float = 60.0
    """To find, verify and load a checkpoint from disk."""
    memory_every_s: float | None = None
    """Seconds of training between two local checkpoints (docs/checkpoints.md); null is checkpoint.local_every_steps
    where that and step_time_s are set, else none are written."""
    memory_stall_s: float = 0.1
    """Steps wait so long for a local checkpoint."""
    memory_write_s: float = 5.0
    """From there until it and its copy on another node are complete."""
    memory_load_s: float = 5.0
    """To load a local checkpoint, or its copy from another node."""
    memory_copies: bool | None = None
    """Local checkpoints survive the loss of a node; null is checkpoint.replicate."""
    crash_s: float = 2.0
    """From a failure to its detection, where a process or node ends."""
    hang_s: float | None = None
    """The same where nobody ends; null is megads' limit of 15 steps, at least 20 s, and 60 s without step_time_s."""
    silent_s: float = 600.0
    """The same where only the values are wrong: resilience.check_replicas_every_steps times a step."""
    restart_s: float = 60.0
    """From there to the load of the state: orders to all nodes, processes, communicators."""
    spares: int = 0
    """Idle nodes that take the place of a lost one at once (docs/nodes.md)."""
    replace_s: float = 600.0
    """Until the scheduler gives another node where no spare is ready."""
    repair_hours: float = 24.0
    """Mean time until a broken node is a spare one."""
    runs: int = 64
    """Runs that are simulated."""
    seed: int = 0
    """Of the failures."""

    def check(self) -> None:
        """Raises ConfigError on what cannot be simulated."""
        for names, least, words in ((_MAY_BE_ZERO, False, "not be negative"), (_POSITIVE, True, "be positive")):
            for name in names:
                value = getattr(self, name)
                if value is None:
                    continue
                if not (value > 0 if least else value >= 0):
                    raise ConfigError(f"lifetime.{name} = {value}: must {words}")
        if self.spares < 0:
            raise ConfigError(f"lifetime.spares = {self.spares}: must not be negative")
        if not 2 <= self.runs <= _MOST_RUNS:
            raise ConfigError(f"lifetime.runs = {self.runs}: must lie between 2 and {_MOST_RUNS:,}")
        if self.seed < 0:
            raise ConfigError(f"lifetime.seed = {self.seed}: must not be negative")

    def check_failures(self, failures: float) -> None:
        """Raises ConfigError where a run meets so many failures that simulating it takes minutes."""
        if failures > _MOST_FAILURES:
            raise ConfigError(
                f"{failures:,.0f} failures in lifetime.days = {self.days:g} are too many to simulate (at most "
                f"{_MOST_FAILURES:,}): plan fewer days; the share is the same"
            )
