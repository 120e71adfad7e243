"""What `megads plan` is asked."""

from __future__ import annotations

from dataclasses import dataclass, field

from megads.config import RootConfig
from megads.errors import ConfigError
from megads.plan.devices import DEVICES, find_device
from megads.tools.plan.cost_config import CostConfig
from megads.tools.plan.life_config import LifetimeConfig

_HERE = ("auto", "cpu", "cuda")
"""Values of device that name no device of which the speed is known."""


@dataclass
class PlanConfig(RootConfig):
    """The config of `megads train`, and how to print the plan."""

    json: bool = False
    """Print JSON instead of tables."""
    ranks: bool = False
    """Say also which rank holds what."""
    device: str = field(default="auto", metadata={"choices": (*_HERE, *DEVICES)})
    """Where ranks would compute: auto (this machine's GPUs, or its CPU), cpu, cuda, a device by name, which also plans
    the time of a step, or the file of one that megads calibrate measured (.yaml)."""
    nic_gigabytes_per_s: float | None = None
    """Network of each device, one direction, where it is not the usual one of the device that is named."""
    pod_ranks: int | None = None
    """Ranks whose network ports reach each other at full speed; null: all do."""
    oversubscription: float = 1.0
    """How many times slower the network is beyond a pod."""
    search: bool = False
    """Search for the quickest layouts that fit: parallel.* and train.micro_batch_size are what is searched."""
    gpus: int | None = None
    """Devices of a search, and GPUs of the cluster for life and budget_hours; null is what the layout takes."""
    schedules: bool = False
    """Compare all pipeline schedules that this layout can have."""
    timeline: str | None = None
    """Draw the step that the schedule plans, all ranks over time, into this file: .svg or .png, or .json for Perfetto
    and chrome://tracing."""
    plot: str | None = None
    """Draw where the time of a step goes on the device that is named, into this file: .png, .svg or .html."""
    rank_tflops: float | None = None
    """TFLOPs that a rank achieves, for a schedule's times in seconds; null leaves times relative and messages free."""
    link_gigabytes_per_s: float | None = None
    """Speed of messages in one direction between two pipeline ranks; null costs nothing."""
    link_latency_us: float = 0.0
    """Latency of a message between two pipeline ranks."""
    life: bool = False
    """Print what failures cost the run on a cluster instead (docs/life.md)."""
    lifetime: LifetimeConfig = field(default_factory=LifetimeConfig)
    """The cluster of life=true."""
    budget_hours: float | None = None
    """Print what gpus can train in so many hours instead (docs/life.md)."""
    device_tflops: float | None = None
    """TFLOPs that a GPU achieves while it trains, for budget_hours; null is rank_tflops, or what is planned for
    the layout where device is named."""
    cost: CostConfig = field(default_factory=CostConfig)
    """Prices and scaling law of budget_hours."""

    def check_cluster(self) -> None:
        """Raises ConfigError on a cluster that cannot be, and on two questions at once."""
        if self.gpus is not None and self.gpus < 1:
            raise ConfigError(f"gpus = {self.gpus}: must be at least 1")
        for name in ("budget_hours", "device_tflops"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} = {value}: must be positive")
        if self.life and self.budget_hours is not None:
            raise ConfigError("life=true and budget_hours are two plans: ask for one of them")

    @property
    def names_device(self) -> bool:
        """Whether the speed of the device is known."""
        return self.device not in _HERE

    def check_device(self) -> None:
        """Raises ConfigError on a device that is none, on a network that cannot be, and a search without a device."""
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
        """Raises ConfigError on speeds that no machine has, and on a picture of a kind that nobody can draw."""
        for name in ("rank_tflops", "link_gigabytes_per_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} = {value}: must be positive")
        if self.link_latency_us < 0:
            raise ConfigError(f"link_latency_us = {self.link_latency_us}: must not be negative")
        if self.rank_tflops is None and (self.link_gigabytes_per_s is not None or self.link_latency_us):
            raise ConfigError(
                "link_gigabytes_per_s and link_latency_us need rank_tflops, which says how long a pass takes beside a "
                "message: set it, for example rank_tflops=150"
            )
        if self.plot is not None and not self.plot.endswith((".png", ".svg", ".html")):
            raise ConfigError(f"plot = {self.plot}: must end in .png, .svg or .html")
        if self.plot is not None and not (self.names_device and not self.search):
            raise ConfigError(
                f"plot = {self.plot} draws the time of a layout's step: needs a device whose speed is known, one of "
                f"{', '.join(DEVICES)}, or a file that megads calibrate wrote, and no search=true"
            )
        if self.timeline is not None and not self.timeline.endswith((".svg", ".png", ".json")):
            raise ConfigError(f"timeline = {self.timeline}: must end in .svg, .png or .json")
