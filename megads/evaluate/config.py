"""Settings of validation and text generation."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

from omegaconf import MISSING

from megads.errors import ConfigError
from megads.runtime.registry import import_plugins


@dataclass
class EvaluationConfig:
    """Validation, on the same tokens in every layout and at every step."""

    every_steps: int = 0
    """Steps between validations; 0 validates only at the end."""
    at_end: bool = True
    """Validate after the last step."""
    max_tokens: int | None = None
    """Tokens of each validation set, rounded up to whole windows that are evenly spaced over it; null uses all of it.
    The metric valid/<name>/tokens has the number of tokens used."""
    average: bool = False
    """Also validate the exponential moving average of the weights (optim.ema_decay): valid/<name>/average_loss."""
    by_position: bool = False
    """Also report the loss by position in the window, in ranges each twice as long as the previous one:
    valid/<name>/position_<first>."""
    tasks: list[str] = field(default_factory=list)
    """Tasks, groups or tags of lm-eval to evaluate in the run (pip install 'megads[evaluate]'; docs/evaluate.md)."""
    tasks_folder: str | None = None
    """Folder with YAML files of your own tasks."""
    tasks_every_steps: int = 0
    """Steps between task evaluations; 0 evaluates only at the end, if at_end is set."""
    tasks_limit: int | None = None
    """Maximum number of documents per task. All tasks together read at most three quarters of the tokens of a
    validation, so that they take no longer; null is as many documents as that allows, and needs a validation set."""
    tasks_fewshot: int | None = None
    """Few-shot examples per document; null uses the task's default."""

    def check(self) -> None:
        """Raises ConfigError on a negative interval or an empty subset."""
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
    """Key of a validation set's loss in the metrics."""
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
    """Run directory (its newest usable checkpoint is loaded) or checkpoint directory."""
    prompt: str | None = None
    """Text to continue, taken literally; if no prompt is given, prompts are read from stdin, one per line."""
    prompts: list[str] = field(default_factory=list)
    """Several texts to continue."""
    input: str | None = None
    """File of prompts, read as by megads preprocess: JSON lines, a table or parquet with a prompt field, or text with
    one prompt per line."""
    prompt_field: str = "prompt"
    """JSON field that holds the prompt."""
    output: str | None = None
    """JSONL file to write the completions to; null prints them."""
    overwrite: bool = False
    """Replace an existing output."""
    tokenizer: str | None = None
    """Tokenizer file, which must be identical to the run's; null uses the run's own copy."""
    max_new_tokens: int = 128
    """Maximum length of a completion."""
    temperature: float = 0.8
    """Divisor of the logits; values below 1 favor likely tokens, 0 is greedy decoding."""
    top_p: float = 0.95
    """Sample from the most likely tokens whose probabilities add up to this value; 1 samples from all tokens."""
    top_k: int = 0
    """Sample from this many of the most likely tokens; 0 samples from all tokens."""
    seed: int = 1234
    """Sampling seed; the same seed gives the same text, whatever else is in the batch."""
    end_of_document: str = "auto"
    """Token that ends a completion: auto (the dataset's, those of an imported model's settings, and with chat the one
    that ends an answer), none, or a token of the tokenizer."""
    special_tokens: bool | None = None
    """Add the special tokens that the tokenizer's post-processor adds to a text, such as Llama's BOS, or the one that
    began the documents of the training (tokenizer.begin_of_document); null: for a model imported from Hugging Face, as
    transformers does, and after training with megads as in its documents. With chat the template writes them."""
    chat: bool = False
    """Treat each prompt as a user message: it is rendered with the run's chat template, and only the answer is
    printed."""
    batch_size: int = 8
    """Prompts per batch."""
    echo: bool = True
    """Print the prompt in front of its completion."""
    precision: WeightPrecision = WeightPrecision.auto
    """bf16, fp32, or auto: bf16 on a GPU, fp32 on a CPU."""
    device: str = "auto"
    """auto (a GPU if available), cpu, cuda or cuda:<number>."""
    plugins: list[str] = field(default_factory=list)
    """Your own modules to import, for a model with a custom block; a checkpoint imports nothing."""

    def resolve_plugins(self) -> None:
        """Imports the plugins; see `UsesPlugins`."""
        import_plugins(self.plugins)

    def check(self) -> None:
        """Raises ConfigError on a value out of range and on prompts from several sources."""
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
            raise ConfigError(f"{' and '.join(given)} are both given: give only one of them")
        if self.output is not None and not given:
            raise ConfigError(f"output = {self.output}: give prompt, prompts or input to write completions of")
