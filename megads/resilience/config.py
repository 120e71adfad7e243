"""Settings for the detection and handling of numerical faults. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from megads.errors import ConfigError


class SpikeAction(StrEnum):
    """Action on a loss spike."""

    off = "off"
    warn = "warn"
    roll_back = "roll_back"


@dataclass
class SpikeConfig:
    """Detection of loss spikes in training, and the action on one. See docs/reliability.md."""

    action: SpikeAction = SpikeAction.warn
    """off: the loss is not monitored. warn: a spike is recorded as an event (loss_spike). roll_back: the run also
    returns to the newest checkpoint before the spike, skips the samples from shortly before its first step to its
    detection, and continues."""
    threshold: float = 6.0
    """A loss is high if it exceeds the median of the previous steps by this number of standard deviations of their
    noise, estimated from the median absolute deviation, and by 2%."""
    patience_steps: int = 3
    """Number of consecutive steps with a high loss that make a spike. A single step is enough if its rise is ten times
    as large and its gradient norm is far above its own median."""
    window_steps: int = 128
    """Number of previous steps in the statistics. Detection starts after window_steps + patience_steps steps."""
    max_rollbacks: int = 5
    """Largest number of rollbacks in a run; one more spike ends it (exit 7)."""

    def check(self) -> None:
        """Raises ConfigError if a value is out of range."""
        if not 1.0 <= self.threshold < float("inf"):
            raise ConfigError(f"resilience.spikes.threshold = {self.threshold}: must be at least 1; 6 is usual")
        for name, least in (("patience_steps", 1), ("window_steps", 8), ("max_rollbacks", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"resilience.spikes.{name} = {getattr(self, name)}: must be at least {least}")
        if self.window_steps < 2 * self.patience_steps:
            raise ConfigError(
                f"resilience.spikes.window_steps = {self.window_steps} is less than twice patience_steps = "
                f"{self.patience_steps}: the spike would raise the median; use {8 * self.patience_steps} or more"
            )


@dataclass
class ResilienceConfig:
    """Detection of numerical faults during training."""

    spikes: SpikeConfig = field(default_factory=SpikeConfig)
    """Loss spikes."""
    check_replicas_every_steps: int = 0
    """Interval, in steps, of checks for flipped bits in weights and optimizer state: replicas on several ranks must be
    equal, and state without a replica must not change before the next update. With a divisor of checkpoint.every_steps,
    every saved state is checked. 0: never."""
    check_compute_every_steps: int = 0
    """Interval, in steps, at which a step is computed twice before it changes the weights: each rank computes its own
    samples and those of another data-parallel rank, or its own twice if there is none, and the results are compared bit
    for bit. If they differ, two more computations decide: the result of a transient fault is not applied, a persistent
    fault ends the run (exit 9). Both are recorded as events (compute_differs) with the rank at fault. 0: never."""
    check_suspicious_steps: bool = False
    """Recompute a step before it changes the weights if its loss or gradient norm is as high as in a loss spike
    (resilience.spikes), as check_compute_every_steps does. Every step then has one more device synchronization and
    computes the gradient norm twice."""
    rerun_nonfinite: bool = False
    """Recompute a non-finite step once from the same weights and samples. If the result is finite, the fault is
    transient and training continues with it; else the fault is persistent and the step is skipped. Both are recorded as
    events (step_rerun) with the rank at fault."""

    def check(self) -> None:
        """Raises ConfigError if a setting is out of range or conflicts with another one."""
        self.spikes.check()
        for name in ("check_replicas_every_steps", "check_compute_every_steps"):
            if getattr(self, name) < 0:
                raise ConfigError(f"resilience.{name} = {getattr(self, name)}: must not be negative")
        if self.check_suspicious_steps and self.spikes.action is SpikeAction.off:
            raise ConfigError(
                "resilience.check_suspicious_steps = true, but with resilience.spikes.action = off the loss is not "
                "monitored: use resilience.spikes.action=warn"
            )

    def check_repeatable(self, deterministic: bool) -> None:
        """Raises ConfigError if computations are compared bit for bit without train.deterministic."""
        if self.checks_compute and not deterministic:
            raise ConfigError(
                "resilience.check_compute_every_steps and check_suspicious_steps compare computations bit for bit, but "
                "train.deterministic = false: leave it true"
            )

    @property
    def corruption_checks(self) -> list[str]:
        """The keys that are on and need `megads.tools.rerun`."""
        keys = ("check_replicas_every_steps", "check_compute_every_steps", "check_suspicious_steps", "rerun_nonfinite")
        return [key for key in keys if getattr(self, key)]

    @property
    def checks_compute(self) -> bool:
        """Whether steps may be computed twice."""
        return self.check_compute_every_steps > 0 or self.check_suspicious_steps
