"""Config of the cluster for `megads plan life=true`."""

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
"""Failures per run above which the simulation is refused; up to here it takes about a minute."""


class FailureSource(StrEnum):
    """A published table of failures (megads/plan/failures.py)."""

    llama3 = "llama3"
    acme = "acme"
    rsc1 = "rsc1"
    rsc2 = "rsc2"


@dataclass
class LifetimeConfig:
    """Failures, detection, restarts and checkpoints of a run; docs/life.md says how the defaults were measured."""

    failures: FailureSource = FailureSource.llama3
    """Published failures by cause, scaled by GPUs and time: Llama 3's 54 days on 16,384 H100; Acme's (upper bounds);
    Meta's research clusters RSC-1 and RSC-2 (one rate for all causes)."""
    days: float = 30.0
    """Wall time of the run, in days."""
    step_time_s: float | None = None
    """Step time in seconds: gives checkpoint intervals from checkpoint.every_steps and local_every_steps, and hang_s;
    null is the planned step time if a device is named."""
    tokens_per_s: float | None = None
    """Tokens per second of all GPUs in training: gives the number of tokens trained in the given days; null is the
    planned value if a device is named."""
    save_every_s: float | None = None
    """Checkpoint interval on disk, in seconds of training; null is checkpoint.every_steps if that and step_time_s are
    set, else Daly's optimum."""
    save_stall_s: float = 0.5
    """Time that training blocks for a checkpoint: its copy to memory, or all of it with checkpoint.async_save=false."""
    save_write_s: float = 60.0
    """Time from there until it is committed, overlapped with training; 0 if training blocks for the whole write."""
    load_s: float = 60.0
    """Time to find, verify and load a checkpoint from disk."""
    memory_every_s: float | None = None
    """Interval of local checkpoints (docs/checkpoints.md), in seconds of training; null is checkpoint.local_every_steps
    if that and step_time_s are set, else none are written."""
    memory_stall_s: float = 0.1
    """Time that training blocks for a local checkpoint."""
    memory_write_s: float = 5.0
    """Time from there until it and its copy on another node are complete."""
    memory_load_s: float = 5.0
    """Time to load a local checkpoint, or its copy from another node."""
    memory_copies: bool | None = None
    """Whether local checkpoints survive the loss of a node; null is checkpoint.replicate."""
    crash_s: float = 2.0
    """Detection time of a failure that ends a process or node."""
    hang_s: float | None = None
    """Detection time of a hang; null is megads' limit of 15 steps, at least 20 s, or 60 s without step_time_s."""
    silent_s: float = 600.0
    """Detection time of silent data corruption: resilience.check_replicas_every_steps times the step time."""
    restart_s: float = 60.0
    """Time from detection to the start of loading: commands to all nodes, processes, communicators."""
    spares: int = 0
    """Spare nodes, which replace a lost node at once (docs/nodes.md)."""
    replace_s: float = 600.0
    """Time until the scheduler provides another node if no spare is available."""
    repair_hours: float = 24.0
    """Mean time to repair of a node, after which it is a spare."""
    runs: int = 64
    """Number of simulated runs."""
    seed: int = 0
    """Random seed of the failures."""

    def check(self) -> None:
        """Raises ConfigError on invalid values."""
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
        """Raises ConfigError if a run has so many failures that its simulation takes minutes."""
        if failures > _MOST_FAILURES:
            raise ConfigError(
                f"{failures:,.0f} failures in lifetime.days = {self.days:g} are too many to simulate (at most "
                f"{_MOST_FAILURES:,}): plan fewer days; the effective share stays the same"
            )
