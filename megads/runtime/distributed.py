"""Joins and leaves the world of processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from megads.runtime.control_plane import ControlPlane, open_control_plane


@contextmanager
def world(device: torch.device, timeout_s: float) -> Iterator[ControlPlane]:
    """Default process group from the environment, gloo on CPU and NCCL on CUDA; yields the control plane beside it.

    Left through a barrier only when all went well: on failure no further collective is started. Without the barrier
    small gloo jobs sometimes abort at exit.

    Args:
        device: of this rank.
        timeout_s: of every collective.
    """
    backend, timeout = "nccl" if device.type == "cuda" else "gloo", timedelta(seconds=timeout_s)
    # Without device_id. With it torch makes each further group, used or not, by a collective over the whole world;
    # without it a group costs nothing before its members use it. And with it all p2p of a group shares one communicator
    # and its stream, where without it each pair of ranks has its own: a receive that waits would hold up the sends that
    # its own message depends on, and schedules would deadlock (tests/engine/test_stream_order.py).
    dist.init_process_group(backend, timeout=timeout)
    control = open_control_plane(timeout)
    yield control
    control.barrier()
    dist.destroy_process_group()
