"""What is evaluated, and on what."""

from __future__ import annotations

from dataclasses import dataclass, field

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


@dataclass
class EvaluateConfig:
    """`megads evaluate`: lm-eval's tasks, and perplexity and bits per byte of texts."""

    run: str = MISSING
    """A run's folder (its newest usable checkpoint is taken), a checkpoint's folder, or what `megads import` made."""
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
    plugins: list[str] = field(default_factory=list)
    """Modules of your own to import, for a model with a block of yours; a checkpoint imports nothing."""

    def settle_plugins(self) -> None:
        """Imports the plugins; see `UsesPlugins`."""
        import_plugins(self.plugins)

    def check(self) -> None:
        """Raises ConfigError on a value out of range."""
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
