"""Joins and leaves the world of processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from megads.runtime.admission import admit
from megads.runtime.control_plane import ControlPlane, open_control_plane
from megads.runtime.environment import rank_environment, secret_file, store_address
from megads.runtime.run_secret import Secret, read_secret


@contextmanager
def world(device: torch.device, timeout_s: float) -> Iterator[ControlPlane]:
    """Default process group from the environment, gloo on CPU and NCCL on CUDA; yields the control plane beside it.

    Ranks that a launcher started meet under a name that strangers cannot guess, and are admitted (`admission.admit`).

    Left through a barrier only when all went well: on failure no further collective is started. Without the barrier
    small gloo jobs sometimes abort at exit.

    Args:
        device: of this rank.
        timeout_s: of every collective.

    Raises:
        UnhealthyNode: a process that does not belong to this start has joined.
    """
    path = secret_file()
    secret = read_secret(path) if path is not None else None
    backend, timeout = "nccl" if device.type == "cuda" else "gloo", timedelta(seconds=timeout_s)
    # Without device_id. With it torch makes each further group, used or not, by a collective over the whole world;
    # without it a group costs nothing before its members use it. And with it all p2p of a group shares one communicator
    # and its stream, where without it each pair of ranks has its own: a receive that waits would hold up the sends that
    # its own message depends on, and schedules would deadlock (tests/engine/test_stream_order.py).
    dist.init_process_group(backend, timeout=timeout, **_meeting(secret, timeout))
    control = open_control_plane(timeout)
    admit(control, secret)
    yield control
    control.barrier()
    dist.destroy_process_group()


def _meeting(secret: Secret | None, timeout: timedelta) -> dict[str, Any]:
    """Where the ranks of a start meet, for init_process_group; nothing for ranks started by hand, as torch has it."""
    if secret is None:
        return {}
    rank, (host, port) = rank_environment(), store_address()
    store = TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
    return {"store": PrefixStore(secret.name("ranks"), store), "rank": rank.rank, "world_size": rank.world_size}
