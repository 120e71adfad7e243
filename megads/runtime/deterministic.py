"""Makes a GPU compute the same bits every time (https://docs.pytorch.org/docs/stable/notes/randomness.html)."""

from __future__ import annotations

import torch

from megads.runtime.environment import fix_cublas_workspace


def make_deterministic(device: torch.device) -> None:
    """Takes torch's deterministic algorithms from here on, in this process; before its first matrix product on a GPU.

    A CPU computes the same bits anyway, with as many threads.

    Args:
        device: that this process computes on.
    """
    if device.type != "cuda":
        return
    fix_cublas_workspace()
    torch.use_deterministic_algorithms(True)
    # Else every tensor that is made empty would be filled first; nothing here reads what nobody wrote.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
