"""Decides which implementation runs, before anything is computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megads.errors import ConfigError
from megads.ops import build_cuda
from megads.ops.apex import load_apex, require_apex
from megads.ops.build import KernelsUnavailable, build, library_path
from megads.ops.compiler import require_compiler
from megads.ops.config import OPTIMIZER_OPS, Compile, Implementation, KernelOp, OpsConfig

Prepare = Callable[[], object]


@dataclass(frozen=True)
class Kernels:
    """Which implementation computes each operator of a run.

    Attributes:
        model: of the model's operators and the loss: fused, torch, apex, or auto, which is `tuned`.
        optimizer: of gradient norms and AdamW, likewise.
        reason: why not others; empty where nothing had to be decided.
        compiled: what torch.compile compiles.
        loss_chunk: tokens whose logits are in memory at a time; None goes by their size.
        tuned: under auto the operators that megads' kernels compute, as measured on the GPU (`megads.engine.autotune`);
            torch computes the others. None: not measured yet.
    """

    model: Implementation
    optimizer: Implementation
    reason: str = ""
    compiled: Compile = Compile.none
    loss_chunk: int | None = None
    tuned: frozenset[KernelOp] | None = None

    def fused(self, op: KernelOp) -> bool:
        """Whether megads' kernel computes this operator."""
        impl = self.optimizer if op in OPTIMIZER_OPS else self.model
        return impl is Implementation.fused or (impl is Implementation.auto and op in (self.tuned or ()))

    @property
    def loaded(self) -> bool:
        """Megads' kernels are in this process, whether the model takes them or only tries them."""
        return self.model in (Implementation.fused, Implementation.auto)

    @property
    def text(self) -> str:
        """For the console and the event."""
        apart = f", optim.impl: {self.optimizer}" if self.optimizer is not self.model else ""
        model = str(self.model)
        if Implementation.auto in (self.model, self.optimizer):
            model += " (each operator is measured on the GPU)" if self.tuned is None else f" ({self._tuned_text})"
        return f"ops.impl: {model}{apart}{f' ({self.reason})' if self.reason else ''}"

    @property
    def _tuned_text(self) -> str:
        names = ", ".join(op for op in KernelOp if self.fused(op))
        return f"megads' kernels: {names}; torch's: the others" if names else "torch's operators"


TORCH = Kernels(Implementation.torch, Implementation.torch)
"""Torch's operators as they are."""
FUSED = Kernels(Implementation.fused, Implementation.fused)
"""Megads' kernels wherever there is one."""


def choose(config: OpsConfig, *, cuda: bool, optimizer: Implementation = Implementation.auto) -> Kernels:
    """What would run here; compiles and loads nothing.

    Args:
        config: what the user asked for.
        cuda: the model is on GPUs.
        optimizer: what the user asked for there; auto: what the model takes.

    Raises:
        ConfigError: fused or apex was asked for and cannot be had.
    """
    return _choose(config, optimizer, cuda, lambda: (library_path(), cuda and build_cuda.library_path()), _nothing)


def prepare(
    config: OpsConfig, say: Callable[[str], None], *, cuda: bool, optimizer: Implementation = Implementation.auto
) -> Kernels:
    """The same, and compiles the kernels where they are needed and missing.

    Args:
        config: what the user asked for.
        say: told what is being waited for.
        cuda: the model is on GPUs.
        optimizer: see `choose`.

    Raises:
        ConfigError: fused or apex was asked for and cannot be had.
    """
    return _choose(config, optimizer, cuda, lambda: (build(say), cuda and build_cuda.build_library(say)), _nothing)


def load(
    config: OpsConfig, say: Callable[[str], None], *, cuda: bool, optimizer: Implementation = Implementation.auto
) -> Kernels:
    """The same, and loads the kernels into this process: a rank's.

    Args:
        config: what the user asked for.
        say: told what is being waited for.
        cuda: the model is on GPUs.
        optimizer: see `choose`.

    Raises:
        ConfigError: fused or apex was asked for and cannot be had.
    """
    # It imports torch, for which a launcher must not wait.
    from megads.ops.library import load_cuda_library, load_library

    def get() -> None:
        load_library(build(say))
        if cuda:
            load_cuda_library(build_cuda.build_library(say))

    return _choose(config, optimizer, cuda, get, load_apex)


def plans_fused(config: OpsConfig, *, cuda: bool) -> bool:
    """Whether memory goes by megads' own kernels; under auto on GPUs it goes by torch's operators.

    Autotuning leaves out kernels that keep more than torch's. Apex' norms keep what torch's keep, and need not be here
    for a plan.

    Args:
        config: what the user asked for.
        cuda: the model would be on GPUs.

    Raises:
        ConfigError: fused was asked for and cannot be had.
    """
    return config.impl is not Implementation.apex and choose(config, cuda=cuda).model is Implementation.fused


def _nothing(_key: str) -> None:
    """Apex is compiled by its own project."""


def _choose(
    config: OpsConfig, optimizer: Implementation, cuda: bool, get: Prepare, get_apex: Callable[[str], object]
) -> Kernels:
    require_compiler(config.compile, cuda=cuda)
    model, reason = _take("ops.impl", config.impl, cuda, get, get_apex)
    own = model
    if optimizer is not Implementation.auto:
        own, _ = _take("optim.impl", optimizer, cuda, get, get_apex)
    return Kernels(model, own, reason, config.compile, config.loss_chunk)


def _take(
    key: str, impl: Implementation, cuda: bool, get: Prepare, get_apex: Callable[[str], object]
) -> tuple[Implementation, str]:
    """What runs, and why not others."""
    if impl is Implementation.torch:
        return impl, ""
    if impl is Implementation.apex:
        require_apex(key, cuda=cuda)
        get_apex(key)
        return impl, ""
    try:
        get()
    except KernelsUnavailable as error:
        if impl is Implementation.fused:
            raise ConfigError(f"{key} = fused cannot run: {error}; or use {key}=auto, which does without") from None
        return Implementation.torch, str(error)
    # Which of them are exact and faster than torch's on this GPU is measured before training.
    return Implementation.auto if cuda and impl is Implementation.auto else Implementation.fused, ""
