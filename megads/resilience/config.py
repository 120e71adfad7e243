"""What a run does about numerical faults. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from megads.errors import ConfigError


class SpikeAction(StrEnum):
    """What follows a loss spike."""

    off = "off"
    warn = "warn"
    roll_back = "roll_back"


@dataclass
class SpikeConfig:
    """When a rise of the training loss is a spike, and what follows. See docs/reliability.md."""

    action: SpikeAction = SpikeAction.warn
    """off: the loss is not watched. warn: a spike is an event (loss_spike). roll_back: the run goes back to the newest
    checkpoint before the spike, leaves out the samples from shortly before its first step to its detection, and goes
    on."""
    threshold: float = 6.0
    """A loss is high when it is above the median of the steps before by so many standard deviations of their noise,
    estimated from the median absolute deviation, and by 2%."""
    patience_steps: int = 3
    """Steps in a row that the loss must be high. Ten times such a rise, together with a gradient norm far above its own
    median, is a spike at once."""
    window_steps: int = 128
    """Steps that the median is taken of. A run is not watched before it has made so many, and the patience."""
    max_rollbacks: int = 5
    """Rollbacks of a run; one more spike ends it (exit 7)."""

    def check(self) -> None:
        """Raises ConfigError on numbers by which nothing or everything would be a spike."""
        if not 1.0 <= self.threshold < float("inf"):
            raise ConfigError(f"resilience.spikes.threshold = {self.threshold}: must be at least 1; 6 is usual")
        for name, least in (("patience_steps", 1), ("window_steps", 8), ("max_rollbacks", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"resilience.spikes.{name} = {getattr(self, name)}: must be at least {least}")
        if self.window_steps < 2 * self.patience_steps:
            raise ConfigError(
                f"resilience.spikes.window_steps = {self.window_steps} is less than twice patience_steps = "
                f"{self.patience_steps}: the median would follow the spike; use {8 * self.patience_steps} or more"
            )


@dataclass
class ResilienceConfig:
    """Numerical faults that a run looks for."""

    spikes: SpikeConfig = field(default_factory=SpikeConfig)
    """Loss spikes."""
    check_replicas_every_steps: int = 0
    """Steps between checks for flipped bits in weights and optimizer state: copies on several ranks must be equal, and
    what has no copy must not change before the next update. A divisor of checkpoint.every_steps lets no state be saved
    unchecked. 0: none."""
    check_compute_every_steps: int = 0
    """Interval, in steps, at which a step is computed twice before it changes the weights: each rank computes its own
    samples and those of another data-parallel rank, or its own twice if there is none, and the results are compared bit
    for bit. If they differ, two more computations decide: a transient fault is not applied, a persistent one ends the
    run (exit 9). Both are events (compute_differs) that name the rank. 0: never."""
    check_suspicious_steps: bool = False
    """Compute a step again before it changes the weights when its loss or gradient norm is as high as in a loss spike
    (resilience.spikes), as check_compute_every_steps does. Every step then waits for the device once more, and computes
    the gradient norm twice."""
    rerun_nonfinite: bool = False
    """Compute a step that was not finite once more, from the same weights and samples. If it is finite then, the fault
    was transient, and training goes on as if nothing had been; else it is persistent, and the step is skipped. Both are
    events (step_rerun), with the rank at fault."""

    def check(self) -> None:
        """Raises ConfigError where a setting makes no sense."""
        self.spikes.check()
        for name in ("check_replicas_every_steps", "check_compute_every_steps"):
            if getattr(self, name) < 0:
                raise ConfigError(f"resilience.{name} = {getattr(self, name)}: must not be negative")
        if self.check_suspicious_steps and self.spikes.action is SpikeAction.off:
            raise ConfigError(
                "resilience.check_suspicious_steps = true, but resilience.spikes.action = off, and so nobody watches "
                "the loss: use resilience.spikes.action=warn"
            )

    def check_repeatable(self, deterministic: bool) -> None:
        """Raises ConfigError if computations are compared that need not be reproducible (train.deterministic)."""
        if self.checks_compute and not deterministic:
            raise ConfigError(
                "resilience.check_compute_every_steps and check_suspicious_steps compare computations bit for bit, but "
                "train.deterministic = false: leave it true"
            )

    @property
    def checks_compute(self) -> bool:
        """Whether steps may be computed twice."""
        return self.check_compute_every_steps > 0 or self.check_suspicious_steps
