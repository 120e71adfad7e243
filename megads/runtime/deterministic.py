"""Makes a GPU compute the same bits every time (https://docs.pytorch.org/docs/stable/notes/randomness.html)."""

from __future__ import annotations

import torch

from megads.runtime.environment import fix_cublas_workspace, fix_nccl_algorithms


def make_deterministic(device: torch.device) -> None:
    """Takes torch's deterministic algorithms from here on, in this process; before its first matrix product on a GPU
    and its first process group.

    A CPU computes the same bits anyway, with as many threads.

    Args:
        device: that this process computes on.

    Raises:
        ConfigError: the user's NCCL_ALGO does not allow it.
    """
    if device.type != "cuda":
        return
    fix_cublas_workspace()
    fix_nccl_algorithms()
    torch.use_deterministic_algorithms(True)
    # Else every tensor that is made empty would be filled first; nothing here reads what nobody wrote.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def sum_in_fp32() -> None:
    """Keeps cuBLAS from adding up parts of a bf16 or fp16 product in that dtype.

    It may by torch's default: a product that is split over many blocks then rounds each block's part.
    """
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = False
    matmul.allow_fp16_reduced_precision_reduction = False
