"""Configuration of the optimizers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from omegaconf import MISSING

from megads.errors import ConfigError
from megads.ops.config import Implementation
from megads.runtime.registry import OPTIMIZERS

MUON_BATCH_ELEMENTS = 2**26
"""Maximum elements of a batch of same-shape matrices in Muon; temporary memory is about four times that."""


class OptimizerName(StrEnum):
    """The built-in optimizers; plugins register others."""

    adamw = "adamw"
    lamb = "lamb"
    lion = "lion"
    muon = "muon"


@dataclass
class LambOptions:
    """Options of LAMB, in addition to AdamW's settings."""

    adapt_all: bool = False
    """Apply the trust ratio to biases and norms, too."""
    max_ratio: float | None = None
    """Upper bound of the trust ratio; null: none."""

    def check(self) -> None:
        """Raises ConfigError on invalid values."""
        if self.max_ratio is not None and not self.max_ratio > 0:
            raise ConfigError(f"optim.options.max_ratio = {self.max_ratio}: must be positive, or null for any ratio")


@dataclass
class LionOptions:
    """Decay rates of Lion (Chen et al. 2023), which differ from those of Adam's moments."""

    beta1: float = 0.9
    """Weight of the momentum in the update direction."""
    beta2: float = 0.99
    """Decay rate of the momentum."""

    def check(self) -> None:
        """Raises ConfigError on rates outside [0, 1)."""
        if not all(0 <= beta < 1 for beta in (self.beta1, self.beta2)):
            raise ConfigError(
                f"optim.options.beta1 = {self.beta1}, optim.options.beta2 = {self.beta2}: want values in [0, 1)"
            )


class MuonPrecision(StrEnum):
    """Dtype of the Newton-Schulz iteration and of the matrices communicated for it."""

    auto = "auto"
    bf16 = "bf16"
    fp32 = "fp32"


class QKVSplit(StrEnum):
    """How Muon splits the fused QKV weight into matrices to orthogonalize."""

    projection = "projection"
    head = "head"


@dataclass
class MuonOptions:
    """Options of Muon for the matrices of blocks; all other parameters use AdamW with optim.betas and optim.eps."""

    momentum: float = 0.95
    """Decay rate of the momentum."""
    nesterov: bool = True
    """Nesterov momentum: the update direction is the momentum after another update with the same gradient."""
    steps: int = 5
    """Number of Newton-Schulz iterations."""
    precision: MuonPrecision = MuonPrecision.auto
    """auto, bf16 or fp32; auto is the dtype of the model weights (train.precision)."""
    qkv: QKVSplit = QKVSplit.projection
    """Matrices of the fused QKV weight: projection (one each of all queries, keys and values) or head (one per
    head)."""

    def check(self) -> None:
        """Raises ConfigError on invalid values."""
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"optim.options.momentum = {self.momentum}: want a value in [0, 1)")
        if self.steps < 1:
            raise ConfigError(f"optim.options.steps = {self.steps}: must be at least 1, usual is 5")


OPTIMIZERS.reserve(OptimizerName.lamb.value, LambOptions)
OPTIMIZERS.reserve(OptimizerName.lion.value, LionOptions)
OPTIMIZERS.reserve(OptimizerName.muon.value, MuonOptions)


@dataclass
class GroupConfig:
    """A group of parameters with its own learning-rate factor or weight decay."""

    pattern: str = MISSING
    """Case-sensitive glob over parameter names as in checkpoints: * matches any characters including dots, ? one
    character, [03] or [0-3] one of those. For example *.mlp.*, or embedding.word.weight."""
    lr_scale: float | None = None
    """Factor of the learning rate at every step; 0 freezes the parameters; null: from earlier entries, else 1."""
    weight_decay: float | None = None
    """Weight decay of all matching parameters, including biases and norms; null: from earlier entries, else
    optim.weight_decay."""


@dataclass
class OptimConfig:
    """Optimizer: AdamW (Loshchilov and Hutter 2019), another built-in one (docs/optimizers.md), or a plugin's; all with
    decoupled weight decay of matrices only."""

    name: str = field(default=OptimizerName.adamw.value, metadata={"choices": tuple(map(str, OptimizerName))})
    """adamw, lamb, lion, muon, or the name of an optimizer that a plugin registers (docs/extending.md)."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of lamb, lion, muon (docs/optimizers.md) or a plugin's optimizer, by name."""
    lr: float = 3e-4
    """Peak learning rate."""
    min_lr: float = 0.0
    """Learning rate at the end of the decay."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """Decay rates of the first and second moments of AdamW and LAMB."""
    eps: float = 1e-8
    """Added to the square root of the second moment in AdamW and LAMB."""
    weight_decay: float = 0.1
    """Decoupled weight decay; biases and norms are exempt, by name."""
    clip_grad: float = 1.0
    """Maximum global gradient norm; 0: no clipping."""
    ema_decay: float | None = None
    """Decay rate of an exponential moving average (EMA) of the weights, updated every step, for example 0.9999; null:
    no EMA. Validation uses it with evaluation.average, `megads export` with average=true (docs/optimizers.md)."""
    groups: list[GroupConfig] = field(default_factory=list)
    """Learning-rate factors and weight decays by parameter, for example [{pattern: "embedding.*", lr_scale: 0.5,
    weight_decay: 0}]. If several entries match, the last one that sets a value applies (docs/optimizers.md)."""
    impl: Implementation = Implementation.auto
    """Implementation of the gradient norm and AdamW. auto: as ops.impl; fused: megads' kernels; torch: PyTorch; apex:
    NVIDIA apex, on GPUs; deepspeed: CPUAdam on CPUs and FusedAdam on GPUs, for AdamW only, with PyTorch's norm. State
    and checkpoints are the same, so a run can switch. With engine=deepspeed, where DeepSpeed calls the
    optimizer, only torch (auto) is supported, and with ZeRO-2 and 3 also deepspeed."""

    def check(self) -> None:
        """Raises ConfigError on invalid values."""
        if self.lr <= 0 or not 0 <= self.min_lr <= self.lr:
            raise ConfigError(f"optim.lr = {self.lr}, optim.min_lr = {self.min_lr}: want 0 <= min_lr <= lr, lr > 0")
        if len(self.betas) != 2 or not all(0 <= b < 1 for b in self.betas):
            raise ConfigError(f"optim.betas = {self.betas}: want two values in [0, 1)")
        if self.clip_grad < 0:
            raise ConfigError(f"optim.clip_grad = {self.clip_grad}: must be 0 (off) or positive")
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise ConfigError(
                f"optim.ema_decay = {self.ema_decay}: want a value between 0 and 1, or null for no average"
            )
        for place, group in enumerate(self.groups):
            self._check_group(f"optim.groups[{place}]", group)
        if self.impl is Implementation.deepspeed and self.is_built_in and not self.is_adamw:
            raise ConfigError(
                f"optim.impl = deepspeed only applies to optim.name=adamw, but optim.name = {self.name}: remove it"
            )
        self._check_unread()

    @staticmethod
    def _check_group(name: str, group: GroupConfig) -> None:
        """Raises ConfigError on an entry that changes nothing or has invalid values."""
        if not group.pattern or group.pattern == MISSING:
            raise ConfigError(f"{name} has no pattern: give one over parameter names, as in '*.mlp.*'")
        if group.lr_scale is None and group.weight_decay is None:
            raise ConfigError(f"{name}, {group.pattern!r}, changes nothing: set lr_scale, weight_decay or both")
        for key in ("lr_scale", "weight_decay"):
            value = getattr(group, key)
            if value is not None and not 0 <= value < math.inf:
                raise ConfigError(f"{name}.{key} = {value}: want a finite number, 0 or above")

    @property
    def is_adamw(self) -> bool:
        """Whether the optimizer is AdamW."""
        return self.name == OptimizerName.adamw

    @property
    def is_muon(self) -> bool:
        """Whether the optimizer is Muon for the matrices of blocks, with AdamW for all other parameters."""
        return self.name == OptimizerName.muon

    @property
    def is_built_in(self) -> bool:
        """Whether the optimizer is built in; False: a plugin's."""
        return OPTIMIZERS.is_reserved(self.name)

    @property
    def typed_options(self) -> Any:
        """`options` as the dataclass of a built-in optimizer, with defaults for missing ones."""
        return OPTIMIZERS.reserved_options(self.name, self.options)

    def _check_unread(self) -> None:
        """Raises ConfigError on settings that the optimizer does not read."""
        unread: tuple[str, ...] = () if self.is_built_in else ("betas", "eps", "impl")
        readers = "optim.name=adamw, lamb and muon"
        if self.name == OptimizerName.lion:
            unread = ("betas", "eps")
        defaults = OptimConfig()
        for key in unread:
            if getattr(self, key) != getattr(defaults, key):
                of_lion = "lion's decay rates are optim.options.beta1 and beta2, and it has no eps"
                other = of_lion if self.is_built_in else "optim.options holds the settings of a plugin's optimizer"
                raise ConfigError(
                    f"optim.{key} = {getattr(self, key)} only applies to {readers}, but optim.name = {self.name}: "
                    f"remove it; {other}"
                )
