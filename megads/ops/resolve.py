"""Decides what ops.impl and optim.impl stand for on this machine, and loads the compiled operators into torch.

Imports no torch unless kernels are loaded: a launcher must not wait for it.
"""

from __future__ import annotations

import functools
import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path

from megads.errors import ConfigError
from megads.ops.apex import load_apex, require_apex
from megads.ops.build import (
    CUDA_LIBRARY,
    LIBRARY,
    KernelsUnavailable,
    build,
    build_cuda,
    cuda_library_path,
    find_compiler,
    find_nvcc,
    library_path,
)
from megads.ops.config import Compile, Implementation, Kernels, OpsConfig

Prepare = Callable[[], object]


def choose(config: OpsConfig, *, cuda: bool, optimizer: Implementation = Implementation.auto) -> Kernels:
    """What would run here; compiles and loads nothing.

    Args:
        config: what the user asked for.
        cuda: the model is on GPUs.
        optimizer: what the user asked for there; auto: what the model takes.

    Raises:
        ConfigError: fused, apex or CUDA graphs were asked for and cannot be had.
    """
    return _choose(config, optimizer, cuda, lambda: (library_path(), cuda and cuda_library_path()), _nothing)


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
    return _choose(config, optimizer, cuda, lambda: (build(say), cuda and build_cuda(say)), _nothing)


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

    def get() -> None:
        load_library(build(say))
        if cuda:
            load_cuda_library(build_cuda(say))

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
    _require_compiler(config.compile, cuda=cuda)
    if config.cuda_graphs and not cuda:
        raise ConfigError("ops.cuda_graphs = true, but the model is on a CPU: use ops.cuda_graphs=false")
    model, reason = _take("ops.impl", config.impl, cuda, get, get_apex)
    own = model
    if optimizer is not Implementation.auto:
        own, _ = _take("optim.impl", optimizer, cuda, get, get_apex)
    return Kernels(model, own, reason, config.compile, config.cuda_graphs, config.loss_chunk)


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
    if impl is Implementation.deepspeed:
        _require_extension_compiler(key, cuda=cuda)
        return impl, ""
    try:
        get()
    except KernelsUnavailable as error:
        if impl is Implementation.fused:
            raise ConfigError(f"{key} = fused cannot run: {error}; or use {key}=auto, which does without") from None
        return Implementation.torch, str(error)
    # Which of them are exact and faster than torch's on this GPU is measured before training.
    return Implementation.auto if cuda and impl is Implementation.auto else Implementation.fused, ""


def _require_extension_compiler(key: str, *, cuda: bool) -> None:
    """Refuses DeepSpeed's kernels where torch could not compile them; `megads.engine.deepspeed_adam` compiles them.

    Args:
        key: of the config, which asks for them.
        cuda: the model is on GPUs.

    Raises:
        ConfigError: a compiler is missing, or ninja, which drives it.
    """
    try:
        find_compiler()
        if cuda:
            find_nvcc()
    except KernelsUnavailable as error:
        raise ConfigError(f"{key} = deepspeed cannot run: {error}; or use {key}=auto") from None
    if shutil.which("ninja") is None:
        raise ConfigError(
            f"{key} = deepspeed cannot run: torch compiles DeepSpeed's kernels by ninja, which is not on the path: "
            f"install it (pip install ninja), or activate the environment that has it; or use {key}=auto"
        )


def _require_compiler(compiled: Compile, *, cuda: bool) -> None:
    """Refuses torch.compile where it cannot work.

    Args:
        compiled: what the user asked for.
        cuda: the model is on GPUs.

    Raises:
        ConfigError: the compiler's own compiler is missing.
    """
    if compiled is Compile.none:
        return
    try:
        find_compiler()
    except KernelsUnavailable as error:
        raise ConfigError(f"ops.compile = {compiled} cannot run: {error}; or use ops.compile=none") from None
    if cuda and importlib.util.find_spec("triton") is None:
        raise ConfigError(
            f"ops.compile = {compiled} cannot run: torch compiles for GPUs by triton, which is not installed; install "
            "the triton that this torch names (pip show torch), or use ops.compile=none"
        )


@functools.cache
def load_library(path: Path) -> None:
    """Registers the operators of namespace megads; once in a process.

    Args:
        path: what `megads.ops.build.build` returned.

    Raises:
        KernelsUnavailable: the file does not fit this torch.
    """
    _load(path)
    from megads.ops import activation, adamw, attention, cross_entropy, dropout, linear, norm, rotary, softmax

    for operator in (activation, adamw, attention, cross_entropy, dropout, linear, norm, rotary, softmax):
        operator.register()


@functools.cache
def load_cuda_library(path: Path) -> None:
    """Registers the operators' implementations for GPUs, beside what `load_library` registered; once in a process.

    Args:
        path: what `megads.ops.build.build_cuda` returned.

    Raises:
        KernelsUnavailable: the file does not fit this torch.
    """
    _load(path)


def _load(path: Path) -> None:
    import torch

    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise KernelsUnavailable(f"{path} cannot be loaded ({error}): remove it, and it is built anew") from error


def loaded_kernels() -> str:
    """Returns which builds of the kernels this process has loaded, the CPU's first, or "torch" for none."""
    import torch

    paths = [Path(path) for path in torch.ops.loaded_libraries]
    builds = [path.parent.name for name in (LIBRARY, CUDA_LIBRARY) for path in paths if path.name == name]
    return "+".join(builds) or "torch"
