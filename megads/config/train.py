"""Config sections `train`: length, batch sizes, precision and training phases of a run; and `dial`, which sets them.

At its end: keys under their former names. They still work, on the command line, in config files and in the frozen
configs of earlier versions: the value goes to the current key, before anything else reads it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from megads.errors import ConfigError
from megads.ops.config import Float8, Float8Recipe

LENGTHS = ("steps", "samples", "tokens", "epochs", "minutes")
AUTO = "auto"


class Precision(StrEnum):
    """Dtype of weights and activations; gradients are accumulated and reduced in fp32 with either."""

    bf16 = "bf16"
    fp32 = "fp32"

    @classmethod
    def refused(cls) -> dict[str, str]:
        """Other common values, and why they are not supported."""
        reason = (
            "fp16 is not supported: its gradients underflow without loss scaling, which megads does not have; use bf16"
        )
        return dict.fromkeys(("fp16", "float16", "half"), reason)


@dataclass
class BatchRampConfig:
    """Linear ramp of the global batch size: from `start` to train.global_batch_size in steps of `increment`, each held
    for an equal share of `samples`."""

    start: int = 0
    """Global batch size at the first step; 0 disables the ramp."""
    increment: int = 1
    """Samples added to the global batch size at each increase."""
    samples: int = 0
    """Samples over which the batch size grows."""


@dataclass
class TrainConfig:
    """Length and batch sizes of training. Exactly one of steps, samples, tokens, epochs and minutes is set; only
    steps=auto may be combined with minutes."""

    global_batch_size: int = 8
    """Samples per step, over all ranks."""
    micro_batch_size: int = 1
    """Samples per forward pass on one data-parallel rank."""
    seq_len: int = 128
    """Tokens per sample."""
    steps: int | str | None = field(default=None, metadata={"choices": (AUTO,)})
    """Length of training in steps. auto depends on the amount of text: four epochs, at most 20 tokens per parameter of
    the blocks, at least 200 steps."""
    samples: int | None = None
    """Length of training in samples."""
    tokens: int | None = None
    """Length of training in tokens, padding included."""
    epochs: float | None = None
    """Length of training in passes over the training data; may be fractional, for example 0.5."""
    minutes: float | None = None
    """Length of training in minutes of wall time: the first start times a few steps, fixes the number of steps from
    them and records it, so that every later start keeps it (docs/learning-rate.md). Steps and validations count;
    preparation, checkpoints and evaluation tasks do not. With steps=auto the shorter of the two counts."""
    min_steps: int = 50
    """Minimum number of steps of train.minutes, however slow the machine."""
    batch_ramp: BatchRampConfig = field(default_factory=BatchRampConfig)
    """Ramp of the global batch size."""
    phases: list[Any] = field(default_factory=list)
    """Consecutive training phases, for example
    [{until_steps: 1000, train: {global_batch_size: 512}}, {train: {global_batch_size: 1024}}]. Each gives its end
    (until_steps, until_samples or until_tokens, counted from the start of the run; the last one ends with the run) and
    the keys it changes, with weights for the mix (docs/phases.md). data.phases changes only the mix."""
    keep_batch_tokens: bool = False
    """Where a phase changes train.seq_len, keep the tokens of a step: global_batch_size and micro_batch_size become as
    much smaller as samples become longer, unless the phase sets them. Warmup and decay of the learning rate then
    advance with tokens instead of samples (docs/phases.md)."""
    precision: Precision = Precision.bf16
    """Dtype of weights and activations: bf16 or fp32."""
    fp8: Float8Recipe = Float8Recipe.none
    """Multiplies in FP8 in the linear layers of blocks, forward and for the gradients of inputs; weight gradients,
    attention, embedding and head keep train.precision. tensorwise: one scale for each sample and each weight; fastest.
    rowwise: one for each token and each row of a weight; more accurate where features differ much. Scales are the same
    in every layout and micro-batch size. Needs GPUs of compute capability 8.9 or higher; CPUs emulate it slowly
    (docs/fp8.md). Validation and generation do not use it."""
    fp8_bf16_blocks: int = 1
    """Blocks at each end of the model that keep train.precision with train.fp8."""
    seed: int = 1234
    """Seed of weights, data order and dropout."""
    deterministic: bool = True
    """Use PyTorch's deterministic algorithms on GPUs, so that a resumed run is bitwise identical to an uninterrupted
    one. false allows faster ones, mainly in attention's backward pass. On CPUs results are deterministic either way."""
    z_loss: float = 0.0
    """Weight of the z-loss log(Z)^2 per token, with Z the sum of exp(logit), which keeps logits from drifting (PaLM:
    1e-4); 0 disables it. Losses in metrics are the cross entropy without it."""
    max_nonfinite_steps: int = 5
    """Maximum number of consecutive non-finite steps, each of which is skipped; one more ends the run (exit 7)."""

    def check(self) -> None:
        """Raises ConfigError if not exactly one length is set, or a value is out of range."""
        given = {name: getattr(self, name) for name in LENGTHS if getattr(self, name) is not None}
        bounded = given.keys() == {"steps", "minutes"} and self.steps == AUTO
        if len(given) != 1 and not bounded:
            found = ", ".join(f"train.{name} = {value}" for name, value in given.items()) or "none of them is set"
            raise ConfigError(
                f"train needs exactly one of steps, samples, tokens, epochs and minutes, but {found}: "
                "set one (for example train.steps=100, or train.steps=auto) and the others to null; only steps=auto "
                "may be combined with minutes, and the shorter of the two counts"
            )
        if isinstance(self.steps, str) and self.steps != AUTO:
            raise ConfigError(f"train.steps = {self.steps}: must be an integer or auto")
        if self.epochs is not None and not 0 < self.epochs < math.inf:
            raise ConfigError(f"train.epochs = {self.epochs}: must be above 0")
        if self.minutes is not None:
            self._check_minutes()
        counts = [name for name in given if name not in ("epochs", "minutes") and given[name] != AUTO]
        self.check_sizes("max_nonfinite_steps", "min_steps", *counts)
        if not 0 <= self.z_loss < math.inf:
            raise ConfigError(f"train.z_loss = {self.z_loss}: must be 0 (off) or positive, for example 1e-4")
        if self.fp8_bf16_blocks < 0:
            raise ConfigError(f"train.fp8_bf16_blocks = {self.fp8_bf16_blocks}: must not be negative")
        if self.seed < 0:
            raise ConfigError(f"train.seed = {self.seed}: must not be negative")

    @property
    def float8(self) -> Float8:
        """Which linear layers multiply in FP8."""
        return Float8(self.fp8, self.fp8_bf16_blocks)

    def _check_minutes(self) -> None:
        assert self.minutes is not None
        if not 0 < self.minutes < math.inf:
            raise ConfigError(f"train.minutes = {self.minutes}: must be above 0")
        if self.phases:
            raise ConfigError(
                f"train.minutes = {self.minutes:g} is not supported with train.phases: only the first steps are timed, "
                "and those of later phases take longer or shorter; set train.steps, samples or tokens"
            )

    @property
    def length_is_known(self) -> bool:
        """Whether the length is given in steps, samples or tokens, and so depends on neither the data nor the time."""
        return self.steps != AUTO and self.epochs is None and self.minutes is None

    def check_sizes(self, *others: str) -> None:
        """Raises ConfigError if a batch size, the sequence length or another given field is below 1."""
        for name in ("global_batch_size", "micro_batch_size", "seq_len", *others):
            if getattr(self, name) < 1:
                raise ConfigError(f"train.{name} = {getattr(self, name)}: must be at least 1")


_MOST_LAYERS = 256
"""Deepest model of the dial; at its width of 16,384 it has 824 billion parameters."""


@dataclass
class DialConfig:
    """The dial of experiment=dial: one number that sets model, batch size, learning rate and length (docs/dial.md)."""

    depth: int | None = None
    """Number of layers, from which the recipe of experiment=dial follows; null: no recipe."""
    aspect_ratio: int = 64
    """Width of the model (model.hidden_size) per layer."""
    tokens_per_parameter: float = 20.0
    """Length of training in tokens per parameter of the blocks' matrices (Hoffmann et al. 2022)."""
    minutes: float | None = None
    """Length of training in minutes instead (train.minutes); batch size and weight decay are those of the compute that
    dial.tflops does in this time."""
    tflops: float = 0.05
    """Achieved training speed in TFLOP/s of all devices together, without embedding and head, for dial.minutes: 0.05 of
    two CPU cores, 200 to 400 of an H100. It is not measured, so that the same command has the same recipe on every
    machine. An error by a factor of 10 changes the batch size by a factor of 2."""

    def check(self) -> None:
        """Raises ConfigError on invalid values."""
        if self.depth is not None and not 1 <= self.depth <= _MOST_LAYERS:
            raise ConfigError(f"dial.depth = {self.depth}: must be from 1 to {_MOST_LAYERS} layers")
        for name in ("aspect_ratio", "tokens_per_parameter", "minutes", "tflops"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"dial.{name} = {value}: must be above 0")


RENAMED: Mapping[str, str] = {"train.stages": "train.phases", "verify.stage": "verify.phase"}
"""Current name of a key, by its former name."""


def rename_overrides(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """Replaces former keys in the overrides of a command line.

    Args:
        overrides: arguments such as key=value, ++key=value or ~key.

    Returns:
        The overrides, other arguments unchanged, and the former keys among them.

    Raises:
        ConfigError: a key is given under both names.
    """
    given = {_key_of(argument) for argument in overrides}
    found = [key for key in RENAMED if key in given]
    for key in found:
        _require_one_name(key, given, "the command line")
    keys = [_key_of(argument) for argument in overrides]
    renamed = [arg.replace(key, RENAMED.get(key, key), 1) for arg, key in zip(overrides, keys, strict=True)]
    return renamed, found


def _key_of(argument: str) -> str:
    return argument.partition("=")[0].lstrip("+~")


def rename_keys(content: dict[Any, Any], where: str, package: str = "") -> list[str]:
    """Renames former keys in a config, in place.

    Args:
        content: the config as nested dicts.
        where: origin of the config, for messages.
        package: section that the content belongs to; empty for the root.

    Returns:
        The former keys that had a value.

    Raises:
        ConfigError: a key is given under both names.
    """
    found = []
    for former, current in RENAMED.items():
        section, _, name = former.rpartition(".")
        values = content if package == section else content.get(section) if not package else None
        if not isinstance(values, dict) or name not in values:
            continue
        new_name = current.rpartition(".")[2]
        _require_one_name(former, {former, *([current] if new_name in values else ())}, where)
        value = values[name]
        # Keeps the order of the keys, as Hydra merges them in it.
        items = [(new_name if key == name else key, item) for key, item in values.items()]
        values.clear()
        values.update(items)
        if value not in (None, []):
            found.append(former)
    return found


def _require_one_name(former: str, given: set[str], where: str) -> None:
    if RENAMED[former] in given:
        raise ConfigError(f"{where} gives both {former} and {RENAMED[former]}, its current name: remove {former}")
