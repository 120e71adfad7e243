"""Gets DeepSpeed ready: a release that can be trusted, on the process group we made, compiling nothing."""

from __future__ import annotations

import logging

import deepspeed
import torch.distributed as dist
from packaging.version import Version

from megads.errors import ConfigError

OLDEST = Version("0.19.3")


def require_deepspeed(version: str = deepspeed.__version__) -> None:
    """Refuses releases that train wrong.

    0.17.6 and 0.18.2 sum pipeline gradients over micro-batches; 0.18.9 to 0.19.2 divide them by the number of
    micro-batches at every stage (DeepSpeed #8152).

    Raises:
        ConfigError: the version is older than 0.19.3.
    """
    if Version(version) < OLDEST:
        raise ConfigError(f"DeepSpeed {version} scales pipeline gradients wrongly: install deepspeed>={OLDEST}")


def prepare_deepspeed() -> None:
    """Joins DeepSpeed to the running default process group; call before anything of DeepSpeed's is built.

    Raises:
        ConfigError: see `require_deepspeed`.
    """
    require_deepspeed()
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # On a CPU DeepSpeed would JIT-compile a shared-memory collective: 93 s, and a crash without a C++ compiler. Reading
    # the table would probe every op, and run the compiler for some: an empty one says that none is to be had.
    deepspeed.ops.__compatible_ops__ = {}
    deepspeed.init_distributed(dist_backend=dist.get_backend(), dist_init_required=False, auto_mpi_discovery=False)
