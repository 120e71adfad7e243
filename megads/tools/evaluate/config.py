"""Config of `megads evaluate`."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from megads.api import LONGEST_WAIT_S, ConfigError, ParallelConfig, WeightPrecision, import_plugins


@dataclass
class EvaluationLayoutConfig:
    """Parallel layout of the evaluation, on processes of this machine; independent of the training layout."""

    tp: int = 1
    """Tensor parallel size."""
    pp: int = 1
    """Pipeline stages."""
    dp: int = 1
    """Data parallel size; the requests are divided among the replicas."""
    cp: int = 1
    """Context parallel size."""
    ep: int = 1
    """Number of ranks over which the experts of a layer are divided; divides cp * dp."""

    @property
    def parallel(self) -> ParallelConfig:
        """The layout as a ParallelConfig."""
        return ParallelConfig(tp=self.tp, pp=self.pp, dp=self.dp, cp=self.cp, ep=self.ep, zero_stage=0)


KEY, NUMBER = "{key}", "{number}"
"""Placeholders of needle.statement."""


@dataclass
class NeedleConfig:
    """Needles in haystacks: a fact in unrelated text, and a question about it at the end."""

    lengths: list[int] = field(default_factory=list)
    """Lengths of the haystacks in tokens, answer included; empty evaluates no needles."""
    depths: list[float] = field(default_factory=lambda: [0.0, 0.25, 0.5, 0.75, 1.0])
    """Places of the needle: 0 is the beginning of the text, 1 its end, before the question; it follows the nearest
    end of a sentence."""
    samples: int = 5
    """Haystacks of each length and depth, with other text, keys and numbers."""
    distractors: int = 4
    """Wrong answers with which the right one competes by its log likelihood."""
    decoys: int = 0
    """Further needles in each haystack, at random places, with other keys, whose numbers are wrong answers; at most
    distractors. Without them, a model that repeats any number of the text is right."""
    digits: int = 6
    """Digits of the numbers."""
    statement: str = "The number of the {key} is {number}."
    """The needle, with {key} and {number}."""
    question: str | None = None
    """The question at the end, with {key}; null: the statement up to the number."""
    text: str | None = None
    """Text of the haystacks: a file that `megads preprocess` reads; null: a text of megads. Its sentences are put in
    random order, and repeated if they are too few."""
    seed: int = 1234
    """Seed of text order, keys and numbers."""

    def check(self) -> None:
        """Raises ConfigError if a value is out of range."""
        least = {"samples": 1, "distractors": 1, "decoys": 0, "digits": 1, "seed": 0}
        for name, minimum in least.items():
            if getattr(self, name) < minimum:
                raise ConfigError(f"needle.{name} = {getattr(self, name)}: must be at least {minimum}")
        if self.decoys > self.distractors:
            raise ConfigError(
                f"needle.decoys = {self.decoys} exceeds needle.distractors = {self.distractors}, of which it takes the "
                "numbers: lower it, or raise needle.distractors"
            )
        for name in ("lengths", "depths"):
            values = getattr(self, name)
            if len(set(values)) < len(values):
                raise ConfigError(f"needle.{name} = {values}: give every value once")
        if not self.depths or not all(0.0 <= depth <= 1.0 for depth in self.depths):
            raise ConfigError(f"needle.depths = {self.depths}: want numbers from 0 to 1")
        if any(length < 1 for length in self.lengths):
            raise ConfigError(f"needle.lengths = {self.lengths}: must be at least 1")
        if self.statement.count(NUMBER) != 1 or KEY not in self.statement.partition(NUMBER)[0]:
            raise ConfigError(f"needle.statement = {self.statement}: want {KEY}, and after it {NUMBER} once")
        if self.question is not None and KEY not in self.question:
            raise ConfigError(f"needle.question = {self.question}: want {KEY}, which it asks for")


class EvaluationLauncher(StrEnum):
    """Launcher of the coordinator's workers."""

    local = "local"
    slurm = "slurm"


@dataclass
class EvaluateConfig:
    """`megads evaluate`: lm-eval tasks, and perplexity and bits per byte of texts."""

    run: Any = MISSING
    """Run directory (its latest usable checkpoint is used), checkpoint folder or output of `megads import`; or a list
    of these."""
    checkpoints: Any = None
    """Checkpoints of each run to evaluate: all, last:<n>, or a list of steps. A coordinator evaluates them: its workers
    take parts of tasks, the longest first."""
    tasks: list[str] = field(default_factory=list)
    """lm-eval tasks, groups or tags; with neither tasks, data nor needle.lengths, the run's validation sets are
    evaluated."""
    tasks_folder: str | None = None
    """Folder with YAML files of custom tasks."""
    data: list[str] = field(default_factory=list)
    """Texts to evaluate: files that `megads preprocess` reads (see text_field), prefixes of its datasets, or valid: the
    run's validation sets."""
    text_field: str = "text"
    """JSON field, or column, that contains the text."""
    limit: int | None = None
    """Maximum number of documents per task or text; null is all."""
    num_fewshot: int | None = None
    """Number of few-shot examples; null uses the setting of the task."""
    needle: NeedleConfig = field(default_factory=NeedleConfig)
    """Needles in haystacks."""
    seq_len: int | None = None
    """Longest sequence that the model reads, in tokens, for texts, validation sets, tasks and needles; may exceed that
    of the training. null: model.max_seq_len of the checkpoint, and for validation sets the run's train.seq_len."""
    rope_theta: float | None = None
    """Base of the rotary frequencies; null: that of the checkpoint."""
    rope_scaling: dict[str, Any] = field(default_factory=dict)
    """Keys of model.rope_scaling in place of the checkpoint's, for example rope_scaling.kind=yarn. With another kind,
    original_max_seq_len is the checkpoint's model.max_seq_len, and factor the ratio of seq_len to it, unless set."""
    batch_size: int = 8
    """Sequences per forward pass of one process."""
    output: str | None = None
    """Folder of the results; null is evaluation/<checkpoint> in the run directory."""
    log_samples: bool = False
    """Also write every document and answer, as lm-eval does."""
    bootstrap_iters: int = 100_000
    """Bootstrap iterations for standard errors that have no closed form; 0 omits all standard errors."""
    tokenizer: str | None = None
    """Tokenizer file, which must match the run's; null uses the copy in the run directory."""
    precision: WeightPrecision = WeightPrecision.auto
    """bf16, fp32, or auto: bf16 on a GPU, fp32 on a CPU."""
    device: str = "auto"
    """auto (a GPU if available), cpu, cuda or cuda:<number>; with a layout of several processes only auto or cpu."""
    layout: EvaluationLayoutConfig = field(default_factory=EvaluationLayoutConfig)
    """Parallel layout of the evaluation."""
    timeout_s: float = 600.0
    """Timeout in seconds for a process of a layout that waits for another."""
    workers: int | None = None
    """Coordinator: model workers per node, each on one GPU or on a share of the cores; null is one per GPU, or one on
    CPU."""
    metric_workers: int = 1
    """Coordinator: processes per node that compute metrics and standard errors, on the CPU."""
    priority: dict[str, Any] = field(default_factory=dict)
    """Coordinator: priority of each task; higher priorities run first, the default is 0."""
    attempts: int = 3
    """Coordinator: attempts per part of a task before it counts as failed; other parts continue."""
    staging_folder: str = "/dev/shm"
    """Coordinator: in-memory folder where one process per node caches a checkpoint for all workers of the node."""
    staging_gib: float | None = None
    """Coordinator: memory limit per node for cached checkpoints; null is half of the free memory. Each worker reads
    checkpoints that do not fit by itself."""
    launcher: EvaluationLauncher = EvaluationLauncher.local
    """Coordinator: where workers run: local, or slurm (a job array with one task per node)."""
    nodes: int = 1
    """launcher=slurm: number of tasks of the job array."""
    sbatch: str = "scripts/slurm/evaluate.sbatch"
    """launcher=slurm: sbatch script to submit."""
    sbatch_options: str = ""
    """launcher=slurm: sbatch options in shell syntax, for example '--partition=debug --gpus-per-node=4'."""
    dry_run: bool = False
    """Coordinator: only print the plan and its predicted duration."""
    plugins: list[str] = field(default_factory=list)
    """Python modules to import, for models with custom blocks; loading a checkpoint imports none of them."""

    def resolve_plugins(self) -> None:
        """Imports the plugins; see `UsesPlugins`."""
        import_plugins(self.plugins)

    @property
    def runs(self) -> list[str]:
        """The runs as a list, also if only one is given."""
        given = self.run if isinstance(self.run, list) else [self.run]
        return [str(name) for name in given]

    @property
    def coordinated(self) -> bool:
        """Whether a coordinator is used: `checkpoints`, `workers`, a list of runs or launcher=slurm is set."""
        return (
            self.checkpoints is not None
            or isinstance(self.run, list)
            or self.workers is not None
            or self.launcher is EvaluationLauncher.slurm
        )

    def check(self) -> None:
        """Raises ConfigError if a value is out of range or options conflict."""
        least = {"seq_len": 2, "batch_size": 1, "limit": 1, "timeout_s": 1, "num_fewshot": 0, "bootstrap_iters": 0}
        least |= {"workers": 1, "metric_workers": 1, "attempts": 1, "nodes": 1, "staging_gib": 0}
        for name, minimum in least.items():
            value = getattr(self, name)
            if value is not None and not value >= minimum:
                said = f"must be at least {minimum}" if minimum else "must not be negative"
                raise ConfigError(f"{name} = {value}: {said}")
        self.needle.check()
        if self.timeout_s > LONGEST_WAIT_S:
            raise ConfigError(f"timeout_s = {self.timeout_s}: must be at most {LONGEST_WAIT_S:.0f}")
        if self.layout.parallel.world_size > 1 and self.device not in ("auto", "cpu"):
            raise ConfigError(f"device = {self.device}: of several processes each takes its own; give auto or cpu")
        if self.coordinated:
            self._check_coordinated()
            self._check_as_recorded()
        elif self.dry_run:
            raise ConfigError("dry_run = true: belongs to a coordinator: give checkpoints or workers")

    def _check_as_recorded(self) -> None:
        for key in ("seq_len", "rope_theta", "rope_scaling"):
            if getattr(self, key):
                raise ConfigError(
                    f"{key} = {getattr(self, key)}: a coordinator evaluates checkpoints as they are; leave out "
                    "checkpoints and workers"
                )

    def _check_coordinated(self) -> None:
        for name, value in self.priority.items():
            if type(value) is not int:
                raise ConfigError(f"priority.{name} = {value}: must be a whole number")
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
        if not self.runs or len(set(self.runs)) < len(self.runs):
            raise ConfigError(f"run = {self.run}: give every run once")
        if self.layout.parallel.world_size > 1:
            raise ConfigError(
                "layout: a coordinator's workers hold a whole model each; leave layout out, or leave out checkpoints "
                "and workers"
            )
        if not self.tasks or self.data or self.needle.lengths:
            what = f"data = {self.data}" if self.data else "tasks = []"
            what = f"needle.lengths = {self.needle.lengths}" if self.needle.lengths else what
            raise ConfigError(
                f"{what}: a coordinator evaluates tasks only; texts and validation sets are measured without "
                "checkpoints and workers"
            )
