"""Admits the processes that joined a world: all prove that they know the secret of the start, or the run ends."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Sequence

import torch

from megads.errors import UnhealthyNode
from megads.runtime.control_plane import ControlPlane
from megads.runtime.run_secret import Secret

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
