"""Config of `megads plan`."""

from __future__ import annotations

from dataclasses import dataclass, field

from megads.config import RootConfig
from megads.errors import ConfigError
from megads.plan.devices import DEVICES, find_device
from megads.tools.plan.cost_config import CostConfig
from megads.tools.plan.life_config import LifetimeConfig

_HERE = ("auto", "cpu", "cuda")
"""Values of `device` that do not name a device of known speed."""


@dataclass
class PlanConfig(RootConfig):
    """Config of `megads train`, plus what to plan and how to print it."""

    json: bool = False
    """Print JSON instead of tables."""
    ranks: bool = False
    """Also print which layers, heads and vocabulary rows each rank holds."""
    device: str = field(default="auto", metadata={"choices": (*_HERE, *DEVICES)})
    """Device of each rank: auto (this machine's GPUs, or its CPU), cpu, cuda, or, to plan the time of a step too, the
    name of a device or a device file written by megads calibrate (.yaml)."""
    nic_gigabytes_per_s: float | None = None
    """Network bandwidth of each device in one direction, in GB/s; null is the default of the named device."""
    pod_ranks: int | None = None
    """Ranks in a pod, within which the network runs at full bandwidth; null: all ranks are in one pod."""
    oversubscription: float = 1.0
    """Factor by which network bandwidth between pods is lower than within one."""
    search: bool = False
    """Search parallel.* and train.micro_batch_size for the fastest layouts that fit into memory."""
    gpus: int | None = None
    """Number of devices for search, and of GPUs for life and budget_hours; null: the ranks of the layout."""
    schedules: bool = False
    """Compare all pipeline schedules that are possible with this layout."""
    timeline: str | None = None
    """Draw the simulated step (all pipeline ranks over time) into this file: .svg or .png, or .json for Perfetto and
    chrome://tracing."""
    plot: str | None = None
    """Draw the breakdown of the step time on the named device into this file: .png, .svg or .html."""
    rank_tflops: float | None = None
    """Achieved TFLOPs per rank, for schedule times in seconds; null: times are relative, and p2p costs nothing."""
    link_gigabytes_per_s: float | None = None
    """Bandwidth of p2p between two pipeline ranks in one direction, in GB/s; null: unlimited."""
    link_latency_us: float = 0.0
    """Latency of p2p between two pipeline ranks, in microseconds."""
    life: bool = False
    """Instead of this plan, print what failures cost the run on a cluster (docs/life.md)."""
    lifetime: LifetimeConfig = field(default_factory=LifetimeConfig)
    """Cluster, failures and checkpoints for life=true."""
    budget_hours: float | None = None
    """Instead of this plan, print what `gpus` GPUs can train in this many hours (docs/life.md)."""
    device_tflops: float | None = None
    """Achieved TFLOPs per GPU in training, for budget_hours; null is rank_tflops, or, with a named device, the value
    planned for the layout."""
    cost: CostConfig = field(default_factory=CostConfig)
    """Prices and scaling law for budget_hours."""

    def check_cluster(self) -> None:
        """Raises ConfigError on invalid cluster values, or if both `life` and `budget_hours` are set."""
        if self.gpus is not None and self.gpus < 1:
            raise ConfigError(f"gpus = {self.gpus}: must be at least 1")
        for name in ("budget_hours", "device_tflops"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} = {value}: must be positive")
        if self.life and self.budget_hours is not None:
            raise ConfigError("life=true and budget_hours are two plans: set only one of them")

    @property
    def names_device(self) -> bool:
        """Whether `device` names a device of known speed."""
        return self.device not in _HERE

    def check_device(self) -> None:
        """Raises ConfigError on an unknown device, invalid network values, or a search without a named device."""
        if self.names_device:
            find_device(self.device)
        for name in ("nic_gigabytes_per_s", "oversubscription", "pod_ranks"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} = {value}: must be positive")
        if self.oversubscription < 1:
            raise ConfigError(f"oversubscription = {self.oversubscription}: must be at least 1")
        if self.search and not self.names_device:
            raise ConfigError(
                f"search = true with device = {self.device}: needs a device whose speed is known, one of "
                f"{', '.join(DEVICES)}, or a file that megads calibrate wrote"
            )

    def check_schedule(self) -> None:
        """Raises ConfigError on invalid speeds and on unsupported file types of `timeline` and `plot`."""
        for name in ("rank_tflops", "link_gigabytes_per_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} = {value}: must be positive")
        if self.link_latency_us < 0:
            raise ConfigError(f"link_latency_us = {self.link_latency_us}: must not be negative")
        if self.rank_tflops is None and (self.link_gigabytes_per_s is not None or self.link_latency_us):
            raise ConfigError(
                "link_gigabytes_per_s and link_latency_us need rank_tflops, which gives the compute time to "
                "compare p2p with: set it, for example rank_tflops=150"
            )
        if self.plot is not None and not self.plot.endswith((".png", ".svg", ".html")):
            raise ConfigError(f"plot = {self.plot}: must end in .png, .svg or .html")
        if self.plot is not None and not (self.names_device and not self.search):
            raise ConfigError(
                f"plot = {self.plot} draws the step time of one layout: needs a device whose speed is known, one of "
                f"{', '.join(DEVICES)}, or a file that megads calibrate wrote, without search=true"
            )
        if self.timeline is not None and not self.timeline.endswith((".svg", ".png", ".json")):
            raise ConfigError(f"timeline = {self.timeline}: must end in .svg, .png or .json")
