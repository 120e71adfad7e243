"""torch's compilers as megads calls them: torch.compile, and those of C++ extensions."""

import fcntl
import functools
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megads.runtime.environment import set_default, user_cache_dir
from megads.runtime.progress import Progress


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function compiled by torch.compile at its first call, once per shape of its arguments."""
    quote_library_path()
    return torch.compile(function, dynamic=False)


@functools.cache
def quote_library_path() -> None:
    """Quotes the folder of torch's libraries, which torch 2.13's compiler command (`-L<folder>`) forgets to do.

    Where the folder has a space, torch.compile's trial compilation that looks for vector instructions fails, so that
    its code for CPUs is scalar without a word, and FlexAttention and extensions such as DeepSpeed's kernels do not
    link.
    """
    from torch.utils import cpp_extension  # imported late: takes 0.2 s, and only torch.compile needs it

    cpp_extension.TORCH_LIB_PATH = shlex.quote(cpp_extension.TORCH_LIB_PATH)


@contextmanager
def compiled_alone() -> Iterator[None]:
    """Context in which torch compiles and loads a C++ extension, in megads' cache and one process at a time.

    torch marks a build in progress by a file `lock`, which a killed process leaves behind; every later build waits for
    its removal, forever and without a word. In a folder that only megads uses, under a lock that the kernel releases,
    such a file is left over. If the user has set TORCH_EXTENSIONS_DIR, nothing is removed.

    Raises:
        OSError: the folder cannot be written.
    """
    quote_library_path()
    # torch's own folder is shared between its versions.
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    folder = user_cache_dir() / "torch_extensions" / f"{python}-torch{torch.__version__}"
    if set_default("TORCH_EXTENSIONS_DIR", str(folder)) != str(folder):
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "megads.lock").open("w") as lock:
        with Progress("waiting for another process that compiles an extension"):
            fcntl.flock(lock, fcntl.LOCK_EX)
        for left in folder.glob("*/lock"):
            left.unlink(missing_ok=True)
        yield
