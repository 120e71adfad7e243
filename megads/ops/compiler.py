"""Whether torch.compile has what it needs."""

from __future__ import annotations

import importlib.util

from megads.errors import ConfigError
from megads.ops.build import KernelsUnavailable, find_compiler
from megads.ops.config import Compile


def require_compiler(compiled: Compile, *, cuda: bool) -> None:
    """Refuses to compile where that cannot work.

    Args:
        compiled: what the user asked for.
        cuda: the model is on GPUs.

    Raises:
        ConfigError: the compiler's own compiler is missing, or there are no GPUs for CUDA graphs.
    """
    if compiled is Compile.none:
        return
    if compiled is Compile.graphs and not cuda:
        raise ConfigError(
            "ops.compile = graphs captures CUDA graphs, but the model is on a CPU: use ops.compile=blocks or none"
        )
    try:
        find_compiler()
    except KernelsUnavailable as error:
        raise ConfigError(f"ops.compile = {compiled} cannot run: {error}; or use ops.compile=none") from None
    if cuda and importlib.util.find_spec("triton") is None:
        raise ConfigError(
            f"ops.compile = {compiled} cannot run: torch compiles for GPUs by triton, which is not installed; install "
            "the triton that this torch names (pip show torch), or use ops.compile=none"
        )
