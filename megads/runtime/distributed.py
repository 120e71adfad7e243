"""Joins and leaves the world of processes."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from megads.errors import UnhealthyNode
from megads.runtime.control_plane import ControlPlane, open_control_plane
from megads.runtime.environment import rank_environment, secret_file, store_address
from megads.runtime.run_secret import Secret, read_secret

_NONCE_BYTES = 32
_PURPOSE = "admission"
_SHOWN = 8
_REMEDY = (
    "nothing of the run was told to it; keep other users and networks off the run's ports (docs/slurm.md, Ports and "
    "strangers), look for ranks of an earlier start that still live, and start again"
)


def admit(control: ControlPlane, secret: Secret | None) -> None:
    """Makes sure that every rank belongs to this start; collective, before anything else is exchanged.

    Each rank sends a nonce, then the HMAC of all nonces, its rank and the world's size: a proof of an earlier start, or
    of another rank, serves nobody.

    Args:
        control: of all ranks.
        secret: of the start; None for a process started by hand. Where no rank has one, none is asked for.

    Raises:
        UnhealthyNode: a rank has no secret, or another one.
    """
    if control.world_size == 1:
        return
    own = bytes([secret is not None]) + secrets.token_bytes(_NONCE_BYTES)
    nonces = control.gather_bytes(torch.tensor(list(own), dtype=torch.uint8))
    without = [rank for rank, has in enumerate(nonces[:, 0].tolist()) if not has]
    if len(without) == control.world_size:
        return
    if secret is None or without:
        raise UnhealthyNode(
            f"{_ranks(without)} of {control.world_size} joined without the secret that the others have: " + _REMEDY
        )
    transcript = hashlib.sha256(nonces.numpy().tobytes()).digest()

    def proof(rank: int) -> bytes:
        return secret.proof(_PURPOSE, transcript, str(rank).encode(), str(control.world_size).encode())

    shown = control.gather_bytes(torch.tensor(list(proof(control.rank)), dtype=torch.uint8))
    wrong = [r for r, row in enumerate(shown) if not hmac.compare_digest(proof(r), row.numpy().tobytes())]
    if 2 * len(wrong) > control.world_size:
        # Most ranks agree with each other, not with this one.
        wrong = [control.rank]
    if wrong:
        raise UnhealthyNode(
            f"{_ranks(wrong)} of {control.world_size} joined with another secret than this start's: {_REMEDY}"
        )


def _ranks(numbers: Sequence[int]) -> str:
    more = f" and {len(numbers) - _SHOWN} more" if len(numbers) > _SHOWN else ""
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers[:_SHOWN]))}{more}"


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
