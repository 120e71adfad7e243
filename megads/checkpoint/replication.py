"""Copies of local checkpoints in the memory of another node (checkpoint.replicate), which `megads.tools.remote` makes.

Without checkpoint.replicate, `Unreplicated` takes their place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from megads.checkpoint.config import CheckpointConfig
from megads.checkpoint.local_files import LocalCommit, Saved
from megads.errors import CheckpointError
from megads.runtime.distributed import ControlPlane
from megads.runtime.environment import RankEnvironment
from megads.runtime.optional_tools import require_tool


@dataclass(frozen=True)
class ReplicaProgress:
    """Replication of the last local checkpoint, over all ranks.

    Attributes:
        busy: whether a rank is still sending it.
        complete: whether other nodes hold complete replicas of all ranks.
        failed: why ranks could not send one, for the first few of them; empty if all could.
        restarted: processes that died since the last call and were restarted.
    """

    busy: bool = False
    complete: bool = False
    failed: str = ""
    restarted: str = ""


class Replication(Protocol):
    """Replication of a rank's local checkpoints.

    Attributes:
        is_on: whether other nodes may hold replicas.
    """

    is_on: bool

    def open(self, node: Path, control: ControlPlane) -> str:
        """Connects the ranks; `node` is the run's folder in this node's memory. Collective.

        Returns why replication is not possible; empty if it is.
        """
        ...

    def allocate(self, size: int, free_bytes: int) -> str:
        """Allocates memory for the replicas that this rank keeps of images of `size` bytes; collective.

        Returns why a rank could not; empty if all could.
        """
        ...

    def send(self, image: Path, saved: Saved, start: int, base: Saved | None) -> None:
        """Sends an image to another node once it is committed; returns at once."""
        ...

    def progress(self) -> ReplicaProgress:
        """Progress over all ranks; collective."""
        ...

    def fetch(self, saved: Saved, holders: Sequence[int], image: Path) -> LocalCommit:
        """Fetches a local checkpoint of this rank from the node of one of the ranks `holders`.

        Raises:
            CheckpointError: no node provides it.
        """
        ...

    def remove(self) -> None:
        """Ends replication, and frees the memory of the replicas that this rank keeps."""
        ...

    def close(self) -> None:
        """Ends replication; complete replicas are kept for the next start."""
        ...


class Unreplicated:
    """Takes the place of `Replication` where no node keeps replicas of another."""

    is_on = False

    def open(self, node: Path, control: ControlPlane) -> str:
        return ""

    def allocate(self, size: int, free_bytes: int) -> str:
        return ""

    def send(self, image: Path, saved: Saved, start: int, base: Saved | None) -> None:
        """Does nothing."""

    def progress(self) -> ReplicaProgress:
        return ReplicaProgress()

    def fetch(self, saved: Saved, holders: Sequence[int], image: Path) -> LocalCommit:
        raise CheckpointError("no node holds it")

    def remove(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


def replication(config: CheckpointConfig, environment: RankEnvironment, timeout_s: float) -> Replication:
    """Returns the replication that checkpoint.replicate asks for; called before this process has threads: it may fork.

    Args:
        config: checkpoint.replicate.
        environment: environment of this rank.
        timeout_s: a process that takes longer is considered hung.

    Raises:
        ConfigError: the tool is not installed.
    """
    if not config.replicate:
        return Unreplicated()
    tool = require_tool("remote.replicas", "checkpoint.replicate=true")
    return cast(Replication, tool.Replicas(environment, timeout_s))
