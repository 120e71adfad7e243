"""torch's compilers as megads calls them: torch.compile, and those of C++ extensions."""

import functools
import shlex
from collections.abc import Callable
from typing import Any

import torch


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
