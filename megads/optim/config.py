"""The optimizer's settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megads.errors import ConfigError
from megads.ops.config import Implementation


@dataclass
class OptimConfig:
    """AdamW (Loshchilov and Hutter 2019) with decoupled weight decay on matrices only, or a plugin's optimizer."""

    name: str = field(default="adamw", metadata={"choices": ("adamw",)})
    """adamw, or the name of an optimizer that a plugin registers (docs/extending.md)."""
    options: dict[str, Any] = field(default_factory=dict)
    """Settings of a plugin's optimizer, by their names."""
    lr: float = 3e-4
    """Peak learning rate."""
    min_lr: float = 0.0
    """Learning rate at the end of the decay."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """Decay of AdamW's first and second moment."""
    eps: float = 1e-8
    """Added to the root of AdamW's second moment."""
    weight_decay: float = 0.1
    """Decoupled decay; biases and every norm are exempt, by name."""
    clip_grad: float = 1.0
    """Largest global gradient norm; 0 switches clipping off."""
    impl: Implementation = Implementation.auto
    """Whose kernels compute the gradient norm and AdamW; auto: as ops.impl. fused: megads' own. torch: torch's. apex:
    NVIDIA apex', on GPUs. State and checkpoints are the same, so a run may go on with another. DeepSpeed's optimizer,
    under parallel.zero_stage 2 and 3, is around torch's always."""

    def check(self) -> None:
        """Raises ConfigError on values that cannot train."""
        if self.lr <= 0 or not 0 <= self.min_lr <= self.lr:
            raise ConfigError(f"optim.lr = {self.lr}, optim.min_lr = {self.min_lr}: want 0 <= min_lr <= lr, lr > 0")
        if len(self.betas) != 2 or not all(0 <= b < 1 for b in self.betas):
            raise ConfigError(f"optim.betas = {self.betas}: want two values in [0, 1)")
        if self.clip_grad < 0:
            raise ConfigError(f"optim.clip_grad = {self.clip_grad}: must be 0 (off) or positive")
        if not self.is_adamw:
            self._check_plugin()

    @property
    def is_adamw(self) -> bool:
        """Whether the optimizer is the built-in one."""
        return self.name == "adamw"

    def _check_plugin(self) -> None:
        """Raises ConfigError on settings of AdamW that no plugin's optimizer reads."""
        adamw = OptimConfig()
        for key in ("betas", "eps", "impl"):
            if getattr(self, key) != getattr(adamw, key):
                raise ConfigError(
                    f"optim.{key} = {getattr(self, key)} only applies to optim.name=adamw, but optim.name = "
                    f"{self.name}: remove it; optim.options holds the settings of a plugin's optimizer"
                )
