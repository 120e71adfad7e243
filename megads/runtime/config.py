"""Config of a run's identity, logging and cluster; parsing of durations, SLURM's format included."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from megads.errors import ConfigError
from megads.runtime.heartbeat import LOST_AFTER_S

_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
LONGEST_WAIT_S = 86400.0 * 7
"""Upper limit of configurable timeouts: some system calls take milliseconds in 31 bits."""


class ClusterKind(StrEnum):
    """Where the ranks run."""

    auto = "auto"
    local = "local"
    slurm = "slurm"
    external = "external"


class HangAction(StrEnum):
    """Action when ranks hang."""

    auto = "auto"
    warn = "warn"
    kill = "kill"
    ignore = "ignore"


@dataclass
class RunConfig:
    """Name, directory and lifetime of a run."""

    id: str | None = None
    """Name of the run. null: derived from the config, so that the same command continues the same run."""
    dir: str | None = None
    """Run directory; null: runs/<run.id>."""
    name: str | None = None
    """First part of a derived run.id; null: the name of the experiment, else of the model."""
    exit_after: str | None = None
    """Longest duration of one start, for example 90s, 30m, 1.5d or 1-12:00:00: after it the run saves and stops, and
    exits 6 if work remains."""
    save_before_limit_s: float | None = None
    """Seconds before the SLURM job's time limit at which to save and stop; null: from measured step and save
    times."""
    stop_timeout_s: float | None = None
    """Seconds from a stop request until the ranks are killed and the run ends with its last checkpoint; null: from
    measured step and save times, at least five minutes. A rank whose process is stopped (SIGSTOP) ends the wait after
    ten seconds."""
    kill_switch: str | None = None
    """Path of a file, for example in a shared folder of the group. While it exists, the run stops after its current
    step (exit 5) and does not start; <run.dir>/stop does the same."""
    dry_run: bool = False
    """Check the config, print what would run and where it would write, and exit without starting anything."""
    prepare_only: bool = False
    """Preprocess text, check the data and build the index maps of the run, then exit, so that the cluster job does not
    wait for them. Starts no ranks, and needs neither their memory nor their GPUs."""
    allow_changes: list[str] = field(default_factory=list)
    """Keys that this start may change although they determine the samples of the run, for example [train.seed];
    tokenizer allows another tokenizer, data allows data files that changed in place, records allows a run whose own
    records (the folder configs) were removed. Any other such change is refused."""
    check_memory: bool = True
    """Refuse a run whose planned memory exceeds what this machine has; false: start it anyway."""

    def check(self) -> None:
        """Raises ConfigError if run.id or run.name is not a plain folder name, or a duration or timeout is invalid."""
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
    """Console output of a run."""

    auto = "auto"
    live = "live"
    plain = "plain"
    quiet = "quiet"


_WANDB_PROJECT_CHARS = 128
_WANDB_TAG_CHARS = 64


class WandbMode(StrEnum):
    """Mode of Weights & Biases."""

    auto = "auto"
    disabled = "disabled"
    offline = "offline"
    online = "online"


@dataclass
class WandbConfig:
    """Weights & Biases logging, in <run.dir>/wandb, by a separate process whose failure does not affect the run."""

    mode: WandbMode = WandbMode.auto
    """disabled, offline (`wandb sync` uploads it later) or online; auto: WANDB_MODE, else offline for
    users who have logged in to W&B, and disabled for others."""
    project: str = "megads"
    """W&B project."""
    entity: str | None = None
    """User or team that owns the project; null: the account's default."""
    tags: list[str] = field(default_factory=list)
    """Tags of the run, of 1 to 64 characters."""

    def check(self) -> None:
        """Raises ConfigError on a project or tag that W&B does not take."""
        project = self.project
        if not 0 < len(project) <= _WANDB_PROJECT_CHARS or set(project) & set("/\\#?%:"):
            raise ConfigError(
                f"logging.wandb.project = {project!r}: want a name of 1 to {_WANDB_PROJECT_CHARS} characters without "
                "any of / \\ # ? % :; the owner goes into logging.wandb.entity"
            )
        for tag in self.tags:
            if not 0 < len(tag) <= _WANDB_TAG_CHARS:
                raise ConfigError(
                    f"logging.wandb.tags: {tag!r} has {len(tag)} characters, and W&B takes tags of 1 to "
                    f"{_WANDB_TAG_CHARS}"
                )


@dataclass
class TensorBoardConfig:
    """TensorBoard logging, in <run.dir>/tensorboard, by the same process as W&B."""

    enabled: bool = False
    """Write event files; view them with `tensorboard --logdir runs`."""


@dataclass
class MlflowConfig:
    """MLflow logging, by the same process as W&B; all starts of a run continue one MLflow run."""

    enabled: bool = False
    """Record to MLflow."""
    uri: str | None = None
    """Folder of the file store, relative to the working directory, or MLflow's address of another store; null:
    <run.dir>/mlflow. Runs with one folder are shown together (docs/report.md)."""
    experiment: str = "megads"
    """MLflow experiment."""

    def check(self) -> None:
        """Raises ConfigError on an experiment or folder without a name."""
        if not self.experiment.strip():
            raise ConfigError(f"logging.mlflow.experiment = {self.experiment!r}: want a name")
        if self.uri is not None and not self.uri.strip():
            raise ConfigError("logging.mlflow.uri is empty: want a folder, or null for <run.dir>/mlflow")


@dataclass
class LoggingConfig:
    """Console output, trackers and measurements."""

    level: str = "info"
    """Log level: debug, info, warning or error."""
    every_steps: int = 1
    """Steps between lines of the plain console; metrics.jsonl has every step."""
    console: ConsoleKind = ConsoleKind.auto
    """live (a panel), plain (lines) or quiet (warnings and errors only); auto: live on a terminal, plain elsewhere and
    in CI jobs (CI=true)."""
    wandb: WandbConfig = field(default_factory=WandbConfig)
    """Weights & Biases."""
    tensorboard: TensorBoardConfig = field(default_factory=TensorBoardConfig)
    """TensorBoard."""
    mlflow: MlflowConfig = field(default_factory=MlflowConfig)
    """MLflow."""
    trackers: dict[str, Any] = field(default_factory=dict)
    """Trackers from plugins, each with its options: logging.trackers.<name>.<option>=<value>, or
    logging.trackers.<name>={} (docs/extending.md)."""
    timeline_every_steps: int | None = None
    """Record a timeline of the actions of every rank in every n-th step, in <run.dir>/timeline; null: never."""
    straggler_every_steps: int | None = 10
    """Time the forward and backward passes of every n-th step on every rank, and report stragglers: ranks that are
    slower than others with the same work; null: never."""
    layer_norms_every_steps: int | None = None
    """Measure the gradient norm and the root mean square of the output of each layer in every n-th step
    (layers/<layer>/grad_norm and activation_rms in metrics.jsonl); null: never."""
    experts_every_steps: int | None = 10
    """Record the load of the experts of each layer in every n-th step (layers/<layer>/max_load, dead_experts and
    router_entropy in metrics.jsonl); null: never."""
    profile_steps: list[int] | None = None
    """First and last step to profile with torch.profiler, for example [10, 12]: one trace per rank in <run.dir>/traces,
    and a table in the report; null: none. A running job profiles its next steps on request (docs/debugging.md)."""
    memory_snapshot: bool = False
    """Record every allocation of GPU memory with its Python stack, and write a snapshot for pytorch.org/memory_viz to
    <run.dir>/traces after the profiled steps and at an out-of-memory error. Needs a GPU."""
    flush_s: float = 10.0
    """Longest wait, in seconds, for trackers at the end of a run; the rest can be sent later."""

    def check(self) -> None:
        """Raises ConfigError on an unknown level or an invalid interval, range, tracker, wait or W&B project."""
        if self.level not in ("debug", "info", "warning", "error"):
            raise ConfigError(f"logging.level = {self.level!r}: want debug, info, warning or error")
        if self.every_steps < 1:
            raise ConfigError(f"logging.every_steps = {self.every_steps}: must be at least 1")
        for measured in ("timeline", "straggler", "layer_norms", "experts"):
            name = f"{measured}_every_steps"
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"logging.{name} = {value}: must be at least 1, or null for none")
        steps = self.profile_steps
        if steps is not None and not (len(steps) == 2 and 1 <= steps[0] <= steps[1]):
            raise ConfigError(
                f"logging.profile_steps = {steps}: want the first and the last step, counted from 1, for example "
                "[10,12], or null for none"
            )
        for name in ("wandb", "tensorboard", "mlflow"):
            if name in self.trackers:
                raise ConfigError(f"logging.trackers.{name}: this tracker is built in, with settings in logging.{name}")
        if not 0 <= self.flush_s <= LONGEST_WAIT_S:
            raise ConfigError(f"logging.flush_s = {self.flush_s}: must be from 0 to {LONGEST_WAIT_S:.0f}")
        self.wandb.check()
        self.mlflow.check()


@dataclass
class ClusterConfig:
    """Machine or SLURM job that the run uses, and handling of its failures."""

    kind: ClusterKind = ClusterKind.auto
    """local: all ranks on this machine; slurm: on the nodes of the SLURM job, one agent per node started by srun;
    external: a platform has started one process per rank (torchrun, a PyTorchJob, one srun task per rank), this process
    is one of them, and the platform restarts them; auto: external if RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT,
    srun, or the platform's list of machines say that there are several, else local."""
    threads_per_rank: int | None = None
    """CPU threads per rank, the same on all ranks; null: OMP_NUM_THREADS if it is set, else the cores of the machine
    divided evenly, but no more than the model's shapes occupy."""
    bind_cores: bool = False
    """Bind each rank to an equal share of the machine's cores, adjacent cores together. Only for machines or SLURM jobs
    that nothing else uses: two runs at the same time would bind to the same cores."""
    peak_tflops: float | None = None
    """Peak TFLOP/s of one device, for MFU; null: the known value of the GPU, or measured once on a CPU and cached."""
    ranks_per_node: int | None = None
    """Number of consecutive ranks per node. null on SLURM: one rank per GPU, else the ranks divided evenly. Without
    SLURM only the table of the layout uses it, and null leaves nodes out of that table."""
    ranks_per_gpu: int = 1
    """Number of consecutive ranks that share a GPU, for tests: one GPU stands in for this many. NCCL takes each rank to
    be on a host of its own and communicates over sockets, which is slow. Each rank may use this share of the GPU's free
    memory. Without GPUs it has no effect."""
    nodes: int | None = None
    """Number of nodes of the SLURM job, for a dry run outside of it; inside, SLURM provides it. submit.sh sets it."""
    srun_options: list[str] = field(default_factory=list)
    """Additional options of the srun that starts the agents, as in ["--container-image=/images/megads.sqsh"]."""
    wrapper: list[str] = field(default_factory=list)
    """Command prefix of each agent, as in [apptainer, exec, --nv, /images/megads.sif]."""
    max_requeues: int = 100
    """Maximum number of requeues of one SLURM job, which a run requests when it exits 6; 0: none."""
    spare_nodes: int = 0
    """Nodes of the SLURM job in addition to those the layout needs, to replace nodes that fail or that the health check
    rejects; the job must be submitted with sbatch --no-kill."""
    check_nodes: bool | None = None
    """Check the health of the job's nodes before the first start and after every fault, as megads check_nodes does;
    null: if there are spare nodes."""
    max_restarts: int | None = None
    """Maximum number of consecutive in-place restarts of the ranks, from the last checkpoint, after a rank was killed,
    hung or failed in its own code, or a node was lost; then the run exits 8. A restart that saves a later checkpoint
    resets the count. The second consecutive restart waits some seconds, each further one twice as long. A run that
    fails twice in the same way at the same step ends at once. null: 10 with spare nodes, else 3. 0: the run ends at the
    first fault."""
    chain: bool = False
    """The job is a task of a job array whose tasks continue one run in turn: no requeue, and a run that is finished,
    stopped or refused cancels the pending tasks. Set by scripts/slurm/submit.sh --chain."""
    gpu_memory_gib: float | None = None
    """Memory of one GPU, for `megads plan device=cuda` on a machine without GPUs; null: it is not checked whether the
    run fits."""
    timeout_s: float = 600.0
    """Timeout of collectives, in seconds."""
    heartbeat_timeout_s: float | None = 300.0
    """A rank that sends no heartbeat for this many seconds, because its process is stopped or native code holds the
    GIL, is killed and named (exit 9). null: none is killed. In either case a warning names the rank within seconds."""
    hang_action: HangAction = HangAction.auto
    """Action when a rank hangs: it is in one phase for far longer than the run's phases of that kind took, and all
    others wait for it. kill: collect evidence in <run.dir>/evidence, name the rank and end the start (exit 9, or a
    restart). warn: the same without ending it. ignore: no hang detection. auto: kill if a restart follows
    (cluster.max_restarts), else warn."""
    hang_min_s: float | None = None
    """Seconds below which a step never counts as hung; five times as long for a phase that reads or writes files, ten
    times for a hook. null: 20, or 120 with ops.compile, which may recompile at any step; with cluster.ranks_per_gpu
    that many times as long."""
    in_process: bool = False
    """Run the only rank in the process of the command itself, for a debugger: breakpoint(), `python -m pdb -m megads
    train ...`, debugpy, an IDE. It writes to the terminal instead of a log. A failure ends the run with its
    traceback; nothing is restarted (docs/debugging.md)."""
    debug_rank: int | None = None
    """Rank that waits for a debugger before it trains: debugpy if it is installed, else pdb. Timeouts of collectives,
    heartbeats and hang detection are off, and nothing is restarted (docs/debugging.md); null: none."""
    debug_port: int = 5678
    """Port of 127.0.0.1 on the node of debug_rank that debugpy listens on."""
    gc_every_steps: int | None = 50
    """Steps between runs of Python's garbage collector, at the same steps on all ranks, so that no rank waits for
    another's. null: automatic collection, for hooks that leave large objects in reference cycles."""

    @property
    def checks_nodes(self) -> bool:
        """Whether nodes are checked, with the default of check_nodes resolved."""
        return self.check_nodes if self.check_nodes is not None else self.spare_nodes > 0

    @property
    def is_debugged(self) -> bool:
        """Whether a rank may be stopped by a debugger for any time."""
        return self.in_process or self.debug_rank is not None

    @property
    def collective_timeout_s(self) -> float:
        """Timeout of collectives; that of a debugged run is the longest possible one."""
        return LONGEST_WAIT_S if self.is_debugged else self.timeout_s

    @property
    def restarts(self) -> int:
        """Maximum number of consecutive restarts, with the default of max_restarts resolved; 0 for a debugged run."""
        if self.is_debugged:
            return 0
        return self.max_restarts if self.max_restarts is not None else 10 if self.spare_nodes else 3

    @property
    def kills_hung(self) -> bool:
        """Whether a start that hangs is ended, with the default of hang_action resolved."""
        action = self.hang_action
        return self.restarts > 0 if action is HangAction.auto else action is HangAction.kill

    def check(self) -> None:
        """Raises ConfigError on invalid sizes, timeouts and debugging keys, and on SLURM keys without cluster=slurm."""
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
        for name in ("nodes", "threads_per_rank", "ranks_per_node", "ranks_per_gpu", "gc_every_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"cluster.{name} = {value}: must be at least 1")
        for name in ("peak_tflops", "gpu_memory_gib", "hang_min_s"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"cluster.{name} = {value}: must be positive")
        self._check_timeouts()
        self._check_debugging()

    def _check_debugging(self) -> None:
        if self.in_process and self.kind in (ClusterKind.slurm, ClusterKind.external):
            raise ConfigError(
                f"cluster.in_process = true runs the rank in this process, but cluster = {self.kind} starts ranks in "
                "others: use cluster=local, or cluster.debug_rank=<rank>"
            )
        if self.in_process and self.debug_rank is not None:
            raise ConfigError(
                f"cluster.in_process = true and cluster.debug_rank = {self.debug_rank}: set one of them; a rank in "
                "this process needs no port"
            )
        if self.debug_rank is not None and self.debug_rank < 0:
            raise ConfigError(f"cluster.debug_rank = {self.debug_rank}: must not be negative")
        if not 1 <= self.debug_port <= 65535:
            raise ConfigError(f"cluster.debug_port = {self.debug_port}: must be from 1 to 65535")

    def _check_timeouts(self) -> None:
        """Checks the range of timeouts, which clocks and PyTorch limit; a busy machine delays heartbeats by seconds."""
        for name, least_s in (("timeout_s", 0.001), ("heartbeat_timeout_s", LOST_AFTER_S)):
            value = getattr(self, name)
            if value is not None and not least_s <= value <= LONGEST_WAIT_S:
                raise ConfigError(f"cluster.{name} = {value}: must be from {least_s:g} to {LONGEST_WAIT_S:.0f} seconds")


def parse_duration(text: str) -> float:
    """Returns a duration in seconds: 90s, 30m, 2h30m, 1.5d, or SLURM's 12:00:00 and 1-12:00:00; a number is seconds.

    Raises:
        ValueError: the text is not a duration, or not positive.
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
    """Returns the seconds of [days-]hours:minutes:seconds or minutes:seconds; None for any other text."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+(?::\d+){1,2})", text)
    if match is None:
        return None
    seconds = 0.0
    for part in match[2].split(":"):
        seconds = 60 * seconds + int(part)
    return 86400 * int(match[1] or 0) + seconds
