"""Config of `megads plan`: the run, prices and scaling laws (`budget_hours`), and the cluster (`life=true`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from megads.api import ConfigError, RootConfig
from megads.tools.plan.devices import DEVICES, find_device

_MOST_RUNS = 1_000


def _require_sizes(config: object, prefix: str = "", *, positive: Sequence[str] = (), zero: Sequence[str] = ()) -> None:
    """Raises ConfigError unless fields are above 0 (`positive`), or at least 0 (`zero`); null is allowed.

    Args:
        config: config with these fields.
        prefix: what precedes a field's name in the config's keys.
        positive: names of fields that must be above 0.
        zero: names of fields that may also be 0.
    """
    for name in (*zero, *positive):
        value, may_be_zero = getattr(config, name), name in zero
        if value is not None and not (value >= 0 if may_be_zero else value > 0):
            raise ConfigError(f"{prefix}{name} = {value}: must {'not be negative' if may_be_zero else 'be positive'}")


class FailureSource(StrEnum):
    """A published table of failures (megads/tools/plan/life.py)."""

    llama3 = "llama3"
    acme = "acme"
    rsc1 = "rsc1"
    rsc2 = "rsc2"


@dataclass
class LifetimeConfig:
    """Failures, detection, restarts and checkpoints of a run; docs/notes/life.md says how defaults were measured."""

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
        _require_sizes(
            self,
            "lifetime.",
            zero=(
                *("save_stall_s", "save_write_s", "load_s", "memory_stall_s", "memory_write_s", "memory_load_s"),
                *("crash_s", "hang_s", "silent_s", "restart_s", "replace_s", "spares", "seed"),
            ),
            positive=("days", "step_time_s", "tokens_per_s", "save_every_s", "memory_every_s", "repair_hours"),
        )
        if not 2 <= self.runs <= _MOST_RUNS:
            raise ConfigError(f"lifetime.runs = {self.runs}: must lie between 2 and {_MOST_RUNS:,}")


class LawName(StrEnum):
    """A published scaling law (megads/tools/plan/budget.py)."""

    epoch2024 = "epoch2024"
    hoffmann2022 = "hoffmann2022"


@dataclass
class CostConfig:
    """Prices, power and scaling law of a budget."""

    law: LawName = LawName.epoch2024
    """Scaling law: Hoffmann et al. 2022, approach 3, as published or with Epoch's corrected coefficients of 2024."""
    effective_time: float = 1.0
    """Effective training time (goodput) as a share, as estimated by megads plan life=true."""
    gpu_hour_price: float | None = None
    """Price of one GPU hour, in any currency."""
    gpu_watts: float | None = None
    """Mean power of a GPU including its share of the node, in watts; gives the energy."""
    pue: float = 1.0
    """Power usage effectiveness: power of the whole site over that of its computers."""
    kwh_price: float | None = None
    """Price of a kilowatt-hour, in the same currency; needs gpu_watts."""

    def check(self) -> None:
        """Raises ConfigError on invalid values."""
        _require_sizes(self, "cost.", positive=("gpu_hour_price", "gpu_watts", "kwh_price"))
        if not 0 < self.effective_time <= 1:
            raise ConfigError(f"cost.effective_time = {self.effective_time}: must be above 0 and at most 1")
        if not self.pue >= 1:
            raise ConfigError(f"cost.pue = {self.pue}: must be at least 1")
        if self.kwh_price is not None and self.gpu_watts is None:
            raise ConfigError("cost.kwh_price needs cost.gpu_watts to compute the energy")


_HERE = ("auto", "cpu", "cuda")
"""Values of `device` that do not name a device of known speed."""


_NEEDS_DEVICE = (
    f"needs a device whose speed is known, one of {', '.join(DEVICES)}, or a file that megads calibrate wrote"
)


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
    longest_sequence: bool = False
    """Find the longest sequence that fits into memory, for every recomputation mode and context-parallel size with as
    many ranks."""
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
        _require_sizes(self, positive=("budget_hours", "device_tflops"))
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
        _require_sizes(self, positive=("nic_gigabytes_per_s", "oversubscription", "pod_ranks"))
        if self.oversubscription < 1:
            raise ConfigError(f"oversubscription = {self.oversubscription}: must be at least 1")
        if self.search and not self.names_device:
            raise ConfigError(f"search = true with device = {self.device}: {_NEEDS_DEVICE}")

    def check_schedule(self) -> None:
        """Raises ConfigError on invalid speeds and on unsupported file types of `timeline` and `plot`."""
        _require_sizes(self, positive=("rank_tflops", "link_gigabytes_per_s"), zero=("link_latency_us",))
        if self.rank_tflops is None and (self.link_gigabytes_per_s is not None or self.link_latency_us):
            raise ConfigError(
                "link_gigabytes_per_s and link_latency_us need rank_tflops, which gives the compute time to "
                "compare p2p with: set it, for example rank_tflops=150"
            )
        if self.plot is not None and not self.plot.endswith((".png", ".svg", ".html")):
            raise ConfigError(f"plot = {self.plot}: must end in .png, .svg or .html")
        if self.plot is not None and not (self.names_device and not self.search):
            raise ConfigError(
                f"plot = {self.plot} draws the step time of one layout: {_NEEDS_DEVICE}, without search=true"
            )
        if self.timeline is not None and not self.timeline.endswith((".svg", ".png", ".json")):
            raise ConfigError(f"timeline = {self.timeline}: must end in .svg, .png or .json")
