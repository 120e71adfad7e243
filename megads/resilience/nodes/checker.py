"""A node's side of the check: sets its clock against the coordinator's, measures, exchanges data as it is told."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo, Store  # type: ignore[attr-defined]

from megads.resilience.nodes.board import Board
from megads.resilience.nodes.measure import compute_devices, measure

ELEMENTS = 1 << 20
"""Of what each of a pair sends, 4 MB."""


def run_checker(board: Board, node: str) -> None:
    """Takes part in a check to its end.

    Args:
        board: where the coordinator is.
        node: name of this node.
    """
    # Threads of a core that others use too wait for each other: then products would show the load, not the node.
    torch.set_num_threads(1)
    asked = time.time()
    board.put(f"hello/{node}", asked)
    settings = board.wait(f"settings/{node}", 60.0)
    if settings is None:
        return
    answered = time.time()
    # As NTP does: the answer is taken to come from the middle of the time that asking took.
    clock = ((asked + answered) / 2 - settings["time"], (answered - asked) / 2)
    board.put(f"measured/{node}", measure(Path(settings["folder"]), settings["seconds"], clock).encode())
    number = 0
    # Long, as the coordinator waits for the slowest node between two rounds.
    while (pairs := board.wait(f"round/{number}", 4 * settings["timeout_s"])) not in (None, []):
        for pair in pairs:
            if node in pair:
                store = board.part(f"pair/{number}/{pair[0]}")
                board.put(f"paired/{number}/{node}", exchange(store, pair.index(node), settings["timeout_s"]))
        number += 1


def exchange(store: Store, rank: int, timeout_s: float) -> str:
    """Gathers known data between two nodes; returns what went wrong, empty for nothing.

    Args:
        store: where the two meet.
        rank: 0 or 1.
        timeout_s: after which the other is given up.
    """
    device = compute_devices()[0]
    try:
        group = _pair_group(store, rank, device, timedelta(seconds=timeout_s))
        gathered = [torch.empty(ELEMENTS, device=device) for _ in range(2)]
        work = group.allgather([gathered], [known_data(rank).to(device)])
        work.wait(timedelta(seconds=timeout_s))
    except RuntimeError as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    for sender, data in enumerate(gathered):
        wrong = int((data.cpu() != known_data(sender)).sum())
        if wrong:
            return f"{wrong} of {ELEMENTS} elements of {'its own' if sender == rank else 'the other'} are wrong"
    return ""


def known_data(rank: int) -> Tensor:
    """What a rank of a pair sends: [ELEMENTS], fp32, integers."""
    return ((torch.arange(ELEMENTS) * 31 + rank * 97) % 251).float()


def _pair_group(store: Store, rank: int, device: torch.device, timeout: timedelta) -> Any:
    """A process group of two: NCCL between GPUs, gloo between CPUs."""
    if device.type == "cuda":
        from torch.distributed import ProcessGroupNCCL  # type: ignore[attr-defined]

        torch.cuda.set_device(device)
        options = ProcessGroupNCCL.Options()
        options._timeout = timeout
        return ProcessGroupNCCL(store, rank, 2, options)
    return ProcessGroupGloo(store, rank, 2, timeout=timeout)
