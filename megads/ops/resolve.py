"""Resolves ops.impl and optim.impl for this machine, and loads the compiled operators into PyTorch.

Does not import torch unless kernels are loaded, so that the launcher starts quickly.
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
    """Resolves the implementations on this machine, without compiling or loading anything.

    Args:
        config: the user's config.
        cuda: whether the model is on GPUs.
        optimizer: optim.impl; auto: same as the model.

    Raises:
        ConfigError: a requested implementation, torch.compile or CUDA graphs are not available.
    """
    return _choose(config, optimizer, cuda, lambda: (library_path(), cuda and cuda_library_path()), _nothing)


def prepare(
    config: OpsConfig, print_line: Callable[[str], None], *, cuda: bool, optimizer: Implementation = Implementation.auto
) -> Kernels:
    """Like `choose`, and compiles the kernels if they are needed and missing.

    Args:
        config: the user's config.
        print_line: called with progress messages.
        cuda: whether the model is on GPUs.
        optimizer: see `choose`.

    Raises:
        ConfigError: see `choose`.
    """
    return _choose(config, optimizer, cuda, lambda: (build(print_line), cuda and build_cuda(print_line)), _nothing)


def load(
    config: OpsConfig, print_line: Callable[[str], None], *, cuda: bool, optimizer: Implementation = Implementation.auto
) -> Kernels:
    """Like `prepare`, and loads the kernels into this process, which is a rank.

    Args:
        config: the user's config.
        print_line: called with progress messages.
        cuda: whether the model is on GPUs.
        optimizer: see `choose`.

    Raises:
        ConfigError: see `choose`.
    """

    def get() -> None:
        load_library(build(print_line))
        if cuda:
            load_cuda_library(build_cuda(print_line))

    return _choose(config, optimizer, cuda, get, load_apex)


def assumes_fused_kernels(config: OpsConfig, *, cuda: bool) -> bool:
    """Whether memory estimates assume megads' kernels; under auto on GPUs they assume PyTorch's operators.

    Autotuning excludes kernels that keep more activation memory than PyTorch's. Apex's norms keep as much as PyTorch's,
    and need not be installed for a plan. Nor need what GPUs require: the plan may be for another machine.

    Args:
        config: the user's config.
        cuda: whether the model would be on GPUs.

    Raises:
        ConfigError: see `choose`; on CPUs only.
    """
    if cuda or config.impl is Implementation.apex:
        return config.impl is Implementation.fused
    return choose(config, cuda=False).model is Implementation.fused


def _nothing(_key: str) -> None:
    """Does nothing: apex is neither compiled nor loaded here."""


def _choose(
    config: OpsConfig, optimizer: Implementation, cuda: bool, get: Prepare, get_apex: Callable[[str], object]
) -> Kernels:
    _require_compiler(config.compile, cuda=cuda)
    if config.cuda_graphs is True and not cuda:
        raise ConfigError("ops.cuda_graphs = true, but the model is on a CPU: use ops.cuda_graphs=false, or auto")
    model, reason = _take("ops.impl", config.impl, cuda, get, get_apex)
    own = model
    if optimizer is not Implementation.auto:
        own, _ = _take("optim.impl", optimizer, cuda, get, get_apex)
    graphs = None if cuda and config.graphs_undecided else config.cuda_graphs is True
    return Kernels(
        *(model, own, reason, config.compile, graphs),
        loss_chunk=config.loss_chunk,
        fp8_emulation=config.fp8_emulation,
        mlp_chunk=config.mlp_chunk,
    )


def _take(
    key: str, impl: Implementation, cuda: bool, get: Prepare, get_apex: Callable[[str], object]
) -> tuple[Implementation, str]:
    """The resolved implementation, and why a preferred one is not available."""
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
            raise ConfigError(f"{key} = fused cannot run: {error}; or use {key}=auto, which does not need it") from None
        return Implementation.torch, str(error)
    # On GPUs, autotuning decides before training which kernels are accurate and faster than PyTorch's.
    return Implementation.auto if cuda and impl is Implementation.auto else Implementation.fused, ""


def _require_extension_compiler(key: str, *, cuda: bool) -> None:
    """Checks that PyTorch can compile DeepSpeed's kernels; `megads.engine.deepspeed_adam` compiles them.

    Args:
        key: config key that requests them.
        cuda: whether the model is on GPUs.

    Raises:
        ConfigError: a compiler or ninja is missing.
    """
    try:
        find_compiler()
        if cuda:
            find_nvcc()
    except KernelsUnavailable as error:
        raise ConfigError(f"{key} = deepspeed cannot run: {error}; or use {key}=auto") from None
    if shutil.which("ninja") is None:
        raise ConfigError(
            f"{key} = deepspeed cannot run: torch compiles DeepSpeed's kernels with ninja, which is not on the path: "
            f"install it (pip install ninja), or activate the environment that has it; or use {key}=auto"
        )


def _require_compiler(compiled: Compile, *, cuda: bool) -> None:
    """Checks that torch.compile can be used.

    Args:
        compiled: ops.compile.
        cuda: whether the model is on GPUs.

    Raises:
        ConfigError: the C++ compiler, or on GPUs Triton, is missing.
    """
    if compiled is Compile.none:
        return
    try:
        find_compiler()
    except KernelsUnavailable as error:
        raise ConfigError(f"ops.compile = {compiled} cannot run: {error}; or use ops.compile=none") from None
    if cuda and importlib.util.find_spec("triton") is None:
        raise ConfigError(
            f"ops.compile = {compiled} cannot run: torch.compile needs triton on GPUs, which is not installed; install "
            "the version that this torch requires (pip show torch), or use ops.compile=none"
        )


@functools.cache
def load_library(path: Path) -> None:
    """Registers the operators of namespace megads, once per process.

    Args:
        path: result of `megads.ops.build.build`.

    Raises:
        KernelsUnavailable: the library is not compatible with this PyTorch.
    """
    _load(path)
    from megads.ops import activation, adamw, attention, cross_entropy, dropout, float8, linear, norm, rotary, softmax

    for operator in (activation, adamw, attention, cross_entropy, dropout, float8, linear, norm, rotary, softmax):
        operator.register()


@functools.cache
def load_cuda_library(path: Path) -> None:
    """Registers the GPU implementations of the operators that `load_library` declared, once per process.

    Args:
        path: result of `megads.ops.build.build_cuda`.

    Raises:
        KernelsUnavailable: the library is not compatible with this PyTorch.
    """
    _load(path)


def _load(path: Path) -> None:
    import torch

    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise KernelsUnavailable(f"{path} cannot be loaded ({error}): remove it to rebuild it") from error


def loaded_kernels() -> str:
    """Returns the hashes of the kernel builds that this process has loaded, CPU first, or "torch" if none."""
    import torch

    paths = [Path(path) for path in torch.ops.loaded_libraries]
    builds = [path.parent.name for name in (LIBRARY, CUDA_LIBRARY) for path in paths if path.name == name]
    return "+".join(builds) or "torch"
