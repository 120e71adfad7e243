"""When a run validates, and how text is generated."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

from omegaconf import MISSING

from megads.errors import ConfigError
from megads.runtime.registry import import_plugins


@dataclass
class EvaluationConfig:
    """Validation covers the same tokens in every layout and at every step."""

    every_steps: int = 0
    """Steps between validations; 0 validates at the end only."""
    at_end: bool = True
    """Validate after the last step."""
    max_tokens: int | None = None
    """Tokens of each validation set, rounded up to whole windows that are evenly spaced over it; null is all of it. The
    metrics say how many were validated on (valid/<name>/tokens)."""
    average: bool = False
    """Validate the running average of the weights, too (optim.ema_decay): valid/<name>/average_loss."""
    by_position: bool = False
    """Losses of ranges of positions, too, each twice as long as the one before: valid/<name>/position_<first>."""
    tasks: list[str] = field(default_factory=list)
    """Tasks, groups or tags of lm-eval to evaluate in mid-run (pip install 'megads[evaluate]'; docs/evaluate.md)."""
    tasks_folder: str | None = None
    """Folder of your own tasks' YAML files."""
    tasks_every_steps: int = 0
    """Steps between evaluations of the tasks; 0 evaluates them at the end only, if at_end says so."""
    tasks_limit: int | None = None
    """Most documents of each task. All tasks together never read more than three quarters of a validation's tokens, so
    as not to take longer; null is as many documents as that allows, and needs a validation set."""
    tasks_fewshot: int | None = None
    """Examples before each document; null leaves that to the task."""

    def check(self) -> None:
        """Raises ConfigError on a negative interval or a subset of nothing."""
        for name in ("tasks_every_steps", "tasks_fewshot"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"evaluation.{name} = {value}: must not be negative")
        if self.tasks_limit is not None and self.tasks_limit < 1:
            raise ConfigError(f"evaluation.tasks_limit = {self.tasks_limit}: must be at least 1, or null")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ConfigError(f"evaluation.max_tokens = {self.max_tokens}: must be at least 1, or null for all")
        if self.every_steps < 0:
            raise ConfigError(f"evaluation.every_steps = {self.every_steps}: must not be negative")


def loss_key(name: str) -> str:
    """Of a validation set's loss in the metrics."""
    return f"valid/{name}/loss"


class WeightPrecision(StrEnum):
    """Dtype of weights and activations in generation."""

    auto = "auto"
    bf16 = "bf16"
    fp32 = "fp32"


@dataclass
class GenerateConfig:
    """`megads generate`: continues prompts with a trained model, in one process."""

    run: str = MISSING
    """A run's folder (its newest usable checkpoint is taken) or a checkpoint's folder."""
    prompt: str | None = None
    """Text to continue, taken literally; without any prompt they are read from stdin, line by line."""
    prompts: list[str] = field(default_factory=list)
    """Several texts to continue."""
    input: str | None = None
    """File of prompts: JSONL with a prompt field, or any other file with one a line."""
    prompt_field: str = "prompt"
    """JSON field that holds the prompt."""
    output: str | None = None
    """JSONL file to write the completions to; null prints them."""
    overwrite: bool = False
    """Replace an existing output."""
    tokenizer: str | None = None
    """Tokenizer file, which must be the run's; null takes the run's own copy."""
    max_new_tokens: int = 128
    """Longest completion."""
    temperature: float = 0.8
    """Divides the logits; below 1 prefers likely tokens, 0 always takes the likeliest."""
    top_p: float = 0.95
    """Draw among the likeliest tokens whose probabilities reach this sum; 1 draws among all."""
    top_k: int = 0
    """Draw among this many of the likeliest tokens; 0 draws among all."""
    seed: int = 1234
    """Of the draws; the same seed gives the same text, whatever else is in the batch."""
    end_of_document: str = "auto"
    """Token that ends a completion: auto (the dataset's, or with chat that of an answer), none, or a token of the
    tokenizer."""
    chat: bool = False
    """Take each prompt for a user's message: the run's chat template puts it in its place, and the answer is printed
    alone."""
    batch_size: int = 8
    """Prompts that are continued together."""
    echo: bool = True
    """Print the prompt in front of its completion."""
    precision: WeightPrecision = WeightPrecision.auto
    """bf16, fp32, or auto: bf16 on a GPU, fp32 on a CPU."""
    device: str = "auto"
    """auto (a GPU where there is one), cpu, cuda or cuda:<number>."""
    plugins: list[str] = field(default_factory=list)
    """Modules of your own to import, for a model with a block of yours; a checkpoint imports nothing."""

    def settle_plugins(self) -> None:
        """Imports the plugins; see `UsesPlugins`."""
        import_plugins(self.plugins)

    def check(self) -> None:
        """Raises ConfigError on a value out of range and on prompts from several places."""
        for name in ("max_new_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)}: must be at least 1")
        if not math.isfinite(self.temperature):
            raise ConfigError(f"temperature = {self.temperature}: must be a finite number")
        for name in ("temperature", "top_k", "seed"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} = {getattr(self, name)}: must not be negative")
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"top_p = {self.top_p}: must be above 0 and at most 1")
        given = [name for name in ("prompt", "prompts", "input") if getattr(self, name) not in (None, [])]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} are both given: say in one way what to continue")
        if self.output is not None and not given:
            raise ConfigError(f"output = {self.output}: give prompt, prompts or input to write completions of")
