"""How a run is named, where it writes and how its processes start; durations as people and SLURM write them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from megads.errors import ConfigError
from megads.runtime.heartbeat import LOST_AFTER_S

_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
LONGEST_WAIT_S = 86400.0 * 7
"""Most that a wait can be set to: some of the system's calls count milliseconds in 31 bits."""


class ClusterKind(StrEnum):
    """Where the ranks run."""

    local = "local"
    slurm = "slurm"


class HangAction(StrEnum):
    """What follows when ranks hang."""

    auto = "auto"
    warn = "warn"
    kill = "kill"
    ignore = "ignore"


@dataclass
class RunConfig:
    """Identity and place of a run."""

    id: str | None = None
    """Name of the run; null derives one from the config, so that the same command continues the same run."""
    dir: str | None = None
    """Folder the run writes to; null is runs/<run.id>."""
    name: str | None = None
    """First part of a derived run.id; null is the experiment's name, else the model's."""
    exit_after: str | None = None
    """Length of one start: then it saves and stops, and exits 6 if work remains; as 90s, 30m, 1.5d, 1-12:00:00."""
    save_before_limit_s: float | None = None
    """Seconds before the SLURM job's time limit at which to save and stop; null measures steps and saves."""
    stop_timeout_s: float | None = None
    """Seconds from a request to stop until the ranks are killed and the last checkpoint counts; null measures steps and
    saves, and allows five minutes at least. A rank whose process is stopped ends the wait after ten seconds."""
    kill_switch: str | None = None
    """A file, for example in a folder of the group, that stops the run after its current step (exit 5) and keeps it
    from starting; <run.dir>/stop does the same."""
    dry_run: bool = False
    """Check the config and print what would run and where it would write; start nothing."""
    prepare_only: bool = False
    """Prepare text, check the data and build the index maps that the run will need, then end: the job on the cluster
    does not wait for them. Starts no rank, and asks for no memory or GPU of one."""
    allow_changes: list[str] = field(default_factory=list)
    """Keys that this start may change although they say what the samples of the run are, for example [train.seed];
    tokenizer for another tokenizer, data for data that changed in its place. Without it such a start is refused."""
    check_memory: bool = True
    """Refuse a run whose planned memory this machine does not have; false tries all the same."""

    def check(self) -> None:
        """Raises ConfigError on an id that is no plain folder name, and on times that are none."""
        if self.exit_after is not None:
            try:
                parse_duration(self.exit_after)
            except ValueError as error:
                raise ConfigError(f"run.exit_after = {error}") from None
        if self.save_before_limit_s is not None and self.save_before_limit_s < 0:
            raise ConfigError(f"run.save_before_limit_s = {self.save_before_limit_s}: must not be negative")
        if self.stop_timeout_s is not None and self.stop_timeout_s <= 0:
            raise ConfigError(f"run.stop_timeout_s = {self.stop_timeout_s}: must be positive")
        for name in ("id", "name"):
            value = getattr(self, name)
            if value is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", value):
                raise ConfigError(
                    f"run.{name} = {value!r}: want letters, digits, '.', '_' and '-' only; a path goes into run.dir"
                )


class ConsoleKind(StrEnum):
    """How a run is shown."""

    auto = "auto"
    live = "live"
    plain = "plain"
    quiet = "quiet"


class WandbMode(StrEnum):
    """Where wandb records."""

    auto = "auto"
    disabled = "disabled"
    offline = "offline"
    online = "online"


@dataclass
class WandbConfig:
    """Recording with Weights & Biases, in <run.dir>/wandb, by a process beside the run that can fail without harm."""

    mode: WandbMode = WandbMode.auto
    """disabled, offline (`wandb sync` sends it later) or online; auto is WANDB_MODE, else offline if installed."""
    project: str = "megads"
    """Project on the server."""
    entity: str | None = None
    """User or team that owns the project; null is the account's default."""
    tags: list[str] = field(default_factory=list)
    """Labels of the run."""


@dataclass
class TensorBoardConfig:
    """Recording for TensorBoard, in <run.dir>/tensorboard, by the same process."""

    enabled: bool = False
    """Write event files: `tensorboard --logdir runs` shows them."""


@dataclass
class LoggingConfig:
    """What the console shows, and who else is told."""

    level: str = "info"
    """debug, info, warning or error."""
    every_steps: int = 1
    """Steps between plain console lines; metrics.jsonl has every step."""
    console: ConsoleKind = ConsoleKind.auto
    """live (a panel), plain (lines), quiet (warnings and errors only); auto is live on a terminal, plain
    elsewhere and in CI jobs (CI=true)."""
    wandb: WandbConfig = field(default_factory=WandbConfig)
    """Weights & Biases."""
    tensorboard: TensorBoardConfig = field(default_factory=TensorBoardConfig)
    """TensorBoard."""
    trackers: dict[str, Any] = field(default_factory=dict)
    """Trackers of your plugins, each with its settings: logging.trackers.<name>.<setting>=<value>, or
    logging.trackers.<name>={} (docs/extending.md)."""
    timeline_every_steps: int | None = None
    """Time every n-th step on every rank, action by action, in <run.dir>/timeline; null times none."""
    straggler_every_steps: int | None = 10
    """Time the forward and backward passes of every n-th step on every rank, and name ranks that are slower than others
    with the same work; null times none."""
    layer_norms_every_steps: int | None = None
    """Measure the gradient norm and the root mean square of the output of each layer in every n-th step
    (layers/<layer>/grad_norm and activation_rms in metrics.jsonl); null measures none."""
    flush_s: float = 10.0
    """Longest wait for wandb and TensorBoard at the end of a run; what is missing then can be sent later."""

    def check(self) -> None:
        """Raises ConfigError on an unknown level, interval or wait."""
        if self.level not in ("debug", "info", "warning", "error"):
            raise ConfigError(f"logging.level = {self.level!r}: want debug, info, warning or error")
        if self.every_steps < 1:
            raise ConfigError(f"logging.every_steps = {self.every_steps}: must be at least 1")
        for name in ("timeline_every_steps", "straggler_every_steps", "layer_norms_every_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"logging.{name} = {value}: must be at least 1, or null for none")
        for name in ("wandb", "tensorboard"):
            if name in self.trackers:
                raise ConfigError(f"logging.trackers.{name}: this tracker is built in, with settings in logging.{name}")
        if not 0 <= self.flush_s <= LONGEST_WAIT_S:
            raise ConfigError(f"logging.flush_s = {self.flush_s}: must be from 0 to {LONGEST_WAIT_S:.0f}")
        if not self.wandb.project or "/" in self.wandb.project:
            raise ConfigError(
                f"logging.wandb.project = {self.wandb.project!r}: want a name without '/'; "
                "the owner goes into logging.wandb.entity"
            )


@dataclass
class ClusterConfig:
    """The machine."""

    kind: ClusterKind = ClusterKind.local
    """local: every rank on this machine; slurm: on the nodes of the SLURM job, one agent a node started by srun."""
    threads_per_rank: int | None = None
    """CPU threads of each rank, equal on all; null shares the cores out evenly."""
    bind_cores: bool = False
    """Keep each rank to an equal share of the machine's cores, neighbours together. For machines, or SLURM jobs, that
    nothing else uses: of two runs side by side that do it both would take the same cores."""
    peak_tflops: float | None = None
    """Peak of one device for MFU; null takes the known figure of the GPU, or measures the CPU once and caches it."""
    ranks_per_node: int | None = None
    """Neighbouring ranks that share a node. On SLURM null is a rank a GPU, else the ranks shared out evenly; elsewhere
    it is for the table of which rank holds what, and null leaves nodes out of it."""
    nodes: int | None = None
    """Nodes that a SLURM job will have, for a dry run outside of it; inside, the job tells. submit.sh fills it in."""
    srun_options: list[str] = field(default_factory=list)
    """Further options of the srun that starts the agents, as in ["--container-image=/images/megads.sqsh"]."""
    wrapper: list[str] = field(default_factory=list)
    """Words before each agent's command, as in [apptainer, exec, --nv, /images/megads.sif]."""
    max_requeues: int = 100
    """Most requeues of one SLURM job that a run asks for when it exits 6; 0 asks for none."""
    spare_nodes: int = 0
    """Nodes of the SLURM job beyond those the layout needs, to take the place of nodes that fail or that the health
    check rejects; the job must be submitted with sbatch --no-kill."""
    check_nodes: bool | None = None
    """Check the health of the job's nodes before the first start and after every fault, as megads check_nodes does;
    null does so where there are spare nodes."""
    max_restarts: int | None = None
    """Most times in a row that the ranks are started again in place, from the last checkpoint, after a rank was killed,
    hung or failed in its own code, or a node was lost; then the run exits 8. A restart that saves a later checkpoint
    makes the count begin anew, and the second one in a row waits some seconds, each further one twice as long. A run
    that fails twice in the same way at the same step ends at once. null is 10 with spare nodes, else 3; with 0 the run
    ends at the first fault."""
    chain: bool = False
    """The job is a task of an array whose tasks continue one run after the other: no requeue, and a run that is
    finished, stopped or refused cancels the tasks that wait. Set by scripts/slurm/submit.sh --chain."""
    gpu_memory_gib: float | None = None
    """Memory of one GPU, for `megads plan device=cuda` on a machine that has none; null leaves open whether it fits."""
    timeout_s: float = 600.0
    """A collective that hangs this long fails."""
    heartbeat_timeout_s: float | None = 300.0
    """A rank whose process sends no heartbeat for this long, because it is stopped or native code holds its
    interpreter, is killed and named (exit 9). null kills none; a warning names the rank within seconds either way."""
    hang_action: HangAction = HangAction.auto
    """What follows when a rank is in one phase for far longer than the run's own phases of that kind took, and all
    others wait for it: kill collects evidence in <run.dir>/evidence, names the rank and ends the start (exit 9, or a
    restart), warn does all but end it, ignore does not look; auto is kill where a restart follows
    (cluster.max_restarts), else warn."""
    hang_min_s: float | None = None
    """A step that takes less never counts as hung; a phase that reads or writes files takes five times as long, a
    hook ten times. null is 20 seconds, or 120 with ops.compile, which may compile again at any step."""
    gc_every_steps: int | None = 50
    """Steps between two runs of Python's garbage collector, at the same steps on all ranks, so that none waits for
    another's. null leaves it to Python, for hooks that leave large objects in reference cycles."""

    @property
    def checks_nodes(self) -> bool:
        """Whether nodes are checked, the default resolved."""
        return self.check_nodes if self.check_nodes is not None else self.spare_nodes > 0

    @property
    def restarts(self) -> int:
        """Most restarts, the default resolved."""
        return self.max_restarts if self.max_restarts is not None else 10 if self.spare_nodes else 3

    @property
    def kills_hung(self) -> bool:
        """Whether a start that hangs is ended, the default resolved."""
        action = self.hang_action
        return self.restarts > 0 if action is HangAction.auto else action is HangAction.kill

    def check(self) -> None:
        """Raises ConfigError on non-positive sizes, and on keys of SLURM without it."""
        for name in ("max_requeues", "spare_nodes", "max_restarts"):
            if (getattr(self, name) or 0) < 0:
                raise ConfigError(f"cluster.{name} = {getattr(self, name)}: must not be negative")
        if self.spare_nodes and self.restarts == 0:
            raise ConfigError(
                f"cluster.spare_nodes = {self.spare_nodes} with cluster.max_restarts = 0: no spare could ever take a "
                "place; raise max_restarts, or ask for fewer nodes"
            )
        if self.kind is not ClusterKind.slurm:
            for name in ("srun_options", "wrapper", "chain", "spare_nodes", "check_nodes"):
                if getattr(self, name):
                    raise ConfigError(f"cluster.{name} = {getattr(self, name)}: needs cluster=slurm")
        for name in ("nodes", "threads_per_rank", "ranks_per_node", "gc_every_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"cluster.{name} = {value}: must be at least 1")
        for name in ("peak_tflops", "gpu_memory_gib", "hang_min_s"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"cluster.{name} = {value}: must be positive")
        self._check_timeouts()

    def _check_timeouts(self) -> None:
        """Within what clocks and timeouts of torch can hold; a busy machine delays heartbeats by seconds."""
        for name, least_s in (("timeout_s", 0.001), ("heartbeat_timeout_s", LOST_AFTER_S)):
            value = getattr(self, name)
            if value is not None and not least_s <= value <= LONGEST_WAIT_S:
                raise ConfigError(f"cluster.{name} = {value}: must be from {least_s:g} to {LONGEST_WAIT_S:.0f} seconds")


def parse_duration(text: str) -> float:
    """Returns a duration in seconds: 90s, 30m, 2h30m, 1.5d, or SLURM's 12:00:00 and 1-12:00:00; a number is seconds.

    Raises:
        ValueError: it is none, or not positive.
    """
    seconds = _seconds(text.strip())
    if seconds is None or seconds <= 0:
        raise ValueError(f"{text!r} is no duration: want 90s, 30m, 2h30m, 1.5d, or 1-12:00:00")
    return seconds


def _seconds(text: str) -> float | None:
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text)
    if re.fullmatch(r"(\d+(\.\d+)?[smhd])+", text):
        return sum(float(number) * _UNITS_S[unit] for number, unit in re.findall(r"([\d.]+)([smhd])", text))
    return clock_seconds(text)


def clock_seconds(text: str) -> float | None:
    """Returns the seconds of [days-]hours:minutes:seconds or minutes:seconds; None where it is neither."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+(?::\d+){1,2})", text)
    if match is None:
        return None
    seconds = 0.0
    for part in match[2].split(":"):
        seconds = 60 * seconds + int(part)
    return 86400 * int(match[1] or 0) + seconds
