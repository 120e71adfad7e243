"""What is evaluated, and on what."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from megads.errors import ConfigError
from megads.evaluate.config import WeightPrecision
from megads.parallel.config import ParallelConfig
from megads.runtime.config import LONGEST_WAIT_S
from megads.runtime.registry import import_plugins


@dataclass
class EvaluationLayoutConfig:
    """Processes of this machine that evaluate together, whatever layout trained."""

    tp: int = 1
    """Tensor parallel size."""
    pp: int = 1
    """Pipeline stages."""
    dp: int = 1
    """Replicas of the model, which share the requests out."""
    cp: int = 1
    """Context parallel size."""

    @property
    def parallel(self) -> ParallelConfig:
        """The same as a training's layout."""
        return ParallelConfig(tp=self.tp, pp=self.pp, dp=self.dp, cp=self.cp, zero_stage=0)


class EvaluationLauncher(StrEnum):
    """Where workers run."""

    local = "local"
    slurm = "slurm"


@dataclass
class EvaluateConfig:
    """`megads evaluate`: lm-eval's tasks, and perplexity and bits per byte of texts."""

    run: Any = MISSING
    """A run's folder (its newest usable checkpoint is taken), a checkpoint's folder, or what `megads import` made; with
    a list of them all are evaluated."""
    checkpoints: Any = None
    """Several checkpoints of each run: all, last:<n>, or a list of steps. They are evaluated by a coordinator: workers
    take parts of tasks, the longest first."""
    tasks: list[str] = field(default_factory=list)
    """Tasks, groups or tags of lm-eval; without any, and without data, the run's validation sets are measured."""
    tasks_folder: str | None = None
    """Folder of your own tasks' YAML files."""
    data: list[str] = field(default_factory=list)
    """Texts to measure: files of text, JSONL files (text_field), prefixes of `megads preprocess`, or valid: the run's
    validation sets."""
    text_field: str = "text"
    """JSON field that holds the text."""
    limit: int | None = None
    """Documents of each task or text; null is all."""
    num_fewshot: int | None = None
    """Examples before each document; null leaves that to the task."""
    batch_size: int = 8
    """Rows in one forward pass of one process."""
    output: str | None = None
    """Folder of the results; null is evaluation/<checkpoint> in the run's folder."""
    log_samples: bool = False
    """Write every document and answer, too, as lm-eval does."""
    bootstrap_iters: int = 100_000
    """Draws for the errors of metrics that have no formula for one; 0 leaves out all errors."""
    tokenizer: str | None = None
    """Tokenizer file, which must be the run's; null takes the run's own copy."""
    precision: WeightPrecision = WeightPrecision.auto
    """bf16, fp32, or auto: bf16 on a GPU, fp32 on a CPU."""
    device: str = "auto"
    """auto (a GPU where there is one), cpu, cuda or cuda:<number>; of several processes auto or cpu."""
    layout: EvaluationLayoutConfig = field(default_factory=EvaluationLayoutConfig)
    """The layout."""
    timeout_s: float = 600.0
    """Seconds that a process of a layout waits for another before it gives up."""
    workers: int | None = None
    """Processes of a coordinator's node that hold a model, each on its share of the cores, or on a GPU; null is one a
    GPU, or one."""
    metric_workers: int = 1
    """Processes of a coordinator's node that compute metrics and their errors, on the CPU."""
    priority: dict[str, Any] = field(default_factory=dict)
    """By task: those of a higher priority come first; 0 unless given."""
    attempts: int = 3
    """At a part of a task, before it is given up; the others go on."""
    staging_folder: str = "/dev/shm"
    """Folder in memory into which one process of a node reads a checkpoint, for all its workers."""
    staging_gib: float | None = None
    """Most memory of a node that checkpoints take there; null is half of what is free. What does not fit is read by
    each worker for itself."""
    launcher: EvaluationLauncher = EvaluationLauncher.local
    """Where a coordinator's workers run: local, or slurm, as a job array of one task a node."""
    nodes: int = 1
    """launcher=slurm: tasks of the array."""
    sbatch: str = "scripts/slurm/evaluate.sbatch"
    """launcher=slurm: the script that is submitted."""
    sbatch_options: str = ""
    """launcher=slurm: options of sbatch before the script, as in a shell: '--partition=debug --gpus-per-node=4'."""
    dry_run: bool = False
    """Print what a coordinator would do, and how long it may take, and evaluate nothing."""
    plugins: list[str] = field(default_factory=list)
    """Modules of your own to import, for a model with a block of yours; a checkpoint imports nothing."""

    def settle_plugins(self) -> None:
        """Imports the plugins; see `UsesPlugins`."""
        import_plugins(self.plugins)

    @property
    def runs(self) -> list[str]:
        """The runs as a list."""
        given = self.run if isinstance(self.run, list) else [self.run]
        return [str(name) for name in given]

    @property
    def coordinated(self) -> bool:
        """Whether a coordinator evaluates: several runs or checkpoints, or with several workers."""
        return (
            self.checkpoints is not None
            or isinstance(self.run, list)
            or self.workers is not None
            or self.launcher is EvaluationLauncher.slurm
        )

    def check(self) -> None:
        """Raises ConfigError on a value out of range."""
        if self.coordinated:
            self._check_coordinated()
        elif self.dry_run:
            raise ConfigError("dry_run = true: belongs to a coordinator: give checkpoints or workers")
        for name in ("batch_size", "limit", "timeout_s"):
            value = getattr(self, name)
            if value is not None and not value >= 1:
                raise ConfigError(f"{name} = {value}: must be at least 1")
        for name in ("num_fewshot", "bootstrap_iters"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"{name} = {value}: must not be negative")
        if self.timeout_s > LONGEST_WAIT_S:
            raise ConfigError(f"timeout_s = {self.timeout_s}: must be at most {LONGEST_WAIT_S:.0f}")
        if self.layout.parallel.world_size > 1 and self.device not in ("auto", "cpu"):
            raise ConfigError(f"device = {self.device}: of several processes each takes its own; give auto or cpu")

    def _check_coordinated(self) -> None:
        for name in ("workers", "metric_workers", "attempts", "nodes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} = {value}: must be at least 1")
        for name, value in self.priority.items():
            if type(value) is not int:
                raise ConfigError(f"priority.{name} = {value}: must be a whole number")
        if self.staging_gib is not None and self.staging_gib < 0:
            raise ConfigError(f"staging_gib = {self.staging_gib}: must not be negative")
        self._check_launcher()
        runs = self.runs
        twice = {name for name in runs if runs.count(name) > 1}
        if not runs or twice:
            raise ConfigError(f"run = {self.run}: give every run once")
        if self.layout.parallel.world_size > 1:
            raise ConfigError(
                "layout: a coordinator's workers hold a whole model each; leave layout out, or leave out checkpoints "
                "and workers"
            )
        if not self.tasks or self.data:
            what = f"data = {self.data}" if self.data else "tasks = []"
            raise ConfigError(
                f"{what}: a coordinator evaluates tasks only; texts and validation sets are measured without "
                "checkpoints and workers"
            )

    def _check_launcher(self) -> None:
        if self.launcher is EvaluationLauncher.local:
            for name in ("nodes", "sbatch_options"):
                if getattr(self, name) != getattr(EvaluateConfig, name):
                    raise ConfigError(f"{name} = {getattr(self, name)}: belongs to launcher=slurm")
            if not (Path(self.staging_folder).is_dir() and os.access(self.staging_folder, os.W_OK | os.X_OK)):
                raise ConfigError(
                    f"staging_folder = {self.staging_folder}: no folder that can be written to; give one in memory, "
                    "such as /dev/shm"
                )
        elif not Path(self.sbatch).is_file():
            raise ConfigError(f"sbatch = {self.sbatch}: there is no such script; give the path of your site's own")
