"""Decides which implementation runs, before anything is computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megads.errors import ConfigError
from megads.ops import build_cuda
from megads.ops.build import KernelsUnavailable, build, library_path
from megads.ops.compiler import require_compiler
from megads.ops.config import Implementation, OpsConfig


@dataclass(frozen=True)
class Choice:
    """The implementation that a run uses.

    Attributes:
        fused: megads' own kernels; else torch's operators.
        reason: why not the others; empty where nothing had to be decided.
    """

    fused: bool
    reason: str = ""

    @property
    def text(self) -> str:
        """For the console and the event."""
        return f"ops.impl: {'fused' if self.fused else 'torch'}{f' ({self.reason})' if self.reason else ''}"


def choose(config: OpsConfig, *, cuda: bool) -> Choice:
    """What would run here; compiles and loads nothing.

    Args:
        config: what the user asked for.
        cuda: the model is on GPUs.

    Raises:
        ConfigError: fused was asked for and cannot be had.
    """
    return _choose(config, cuda, lambda: (library_path(), cuda and build_cuda.library_path()))


def prepare(config: OpsConfig, say: Callable[[str], None], *, cuda: bool) -> Choice:
    """The same, and compiles the kernels where they are needed and missing.

    Args:
        config: what the user asked for.
        say: told what is being waited for.
        cuda: the model is on GPUs.

    Raises:
        ConfigError: fused was asked for and cannot be had.
    """
    return _choose(config, cuda, lambda: (build(say), cuda and build_cuda.build_library(say)))


def load(config: OpsConfig, say: Callable[[str], None], *, cuda: bool) -> Choice:
    """The same, and loads the kernels into this process: a rank's.

    Args:
        config: what the user asked for.
        say: told what is being waited for.
        cuda: the model is on GPUs.

    Raises:
        ConfigError: fused was asked for and cannot be had.
    """
    # It imports torch, for which a launcher must not wait.
    from megads.ops.library import load_cuda_library, load_library

    def get() -> None:
        load_library(build(say))
        if cuda:
            load_cuda_library(build_cuda.build_library(say))

    return _choose(config, cuda, get)


def _choose(config: OpsConfig, cuda: bool, get: Callable[[], object]) -> Choice:
    require_compiler(config.compile, cuda=cuda)
    if config.impl is Implementation.torch:
        return Choice(fused=False)
    if cuda and config.impl is Implementation.auto:
        # They are proven on a CPU only, lane by lane: nobody is to train with them unawares.
        return Choice(fused=False, reason="the CUDA kernels have not run on a GPU yet; ops.impl=fused takes them")
    try:
        get()
    except KernelsUnavailable as error:
        if config.impl is Implementation.fused:
            raise ConfigError(
                f"ops.impl = fused cannot run: {error}; or use ops.impl=auto, which does without"
            ) from None
        return Choice(fused=False, reason=str(error))
    return Choice(fused=True)
