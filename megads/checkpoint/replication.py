"""Copies of local checkpoints in the memory of another node (checkpoint.replicate), which `megads.tools.remote` makes.

The default of `Replication` keeps none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from megads.checkpoint.config import CheckpointConfig
from megads.checkpoint.local_files import LocalCommit, Saved
from megads.errors import CheckpointError
from megads.runtime.distributed import ControlPlane
from megads.runtime.environment import RankEnvironment
from megads.runtime.metrics import EventWriter
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


class Replication:
    """Replication of a rank's local checkpoints. This class keeps no replicas; the tool's `Replicas` overrides it.

    Attributes:
        is_on: whether other nodes may hold replicas.
    """

    is_on = False

    def open(self, node: Path, control: ControlPlane) -> str:
        """Connects the ranks; collective.

        Args:
            node: existing folder of the run in this node's memory.
            control: control plane of all ranks.

        Returns:
            Why replication is not possible; empty if it is.
        """
        return ""

    def find(self, held: list[set[Saved]], usable: Callable[[LocalCommit], bool]) -> dict[Saved, list[int]]:
        """Finds replicas of an earlier start; collective.

        Args:
            held: start and step of the local checkpoints that each rank has on its own node, by rank; those that it can
                fetch are added.
            usable: whether this start can continue from a local checkpoint.

        Returns:
            The ranks from whose nodes this rank can fetch each local checkpoint.
        """
        return {}

    def allocate(self, size: int, free_bytes: int) -> str:
        """Allocates memory for the replicas that each rank keeps; collective.

        Args:
            size: bytes of an image of this rank.
            free_bytes: this rank's share of the node's free memory.

        Returns:
            Why a rank could not allocate it; empty if all could.
        """
        return ""

    def send(self, image: Path, saved: Saved, start: int, base: Saved | None) -> None:
        """Sends a committed image to another node; returns at once. May be called by another thread.

        Args:
            image: folder of the image.
            saved: start and step of the image.
            start: lease number of this start.
            base: start and step of the local checkpoint that this start continued from; None: none.
        """

    def progress(self) -> ReplicaProgress:
        """Progress over all ranks; collective."""
        return ReplicaProgress()

    def report(self, progress: ReplicaProgress, events: EventWriter, step: int) -> None:
        """Records what is new in the progress of this step as events."""

    def fetch(self, saved: Saved, holders: Sequence[int], image: Path) -> LocalCommit:
        """Fetches a local checkpoint of this rank from the first node that provides it intact.

        Args:
            saved: start and step of the local checkpoint.
            holders: ranks whose nodes hold it.
            image: folder for the image.

        Raises:
            CheckpointError: no node provides it.
        """
        raise CheckpointError("no node holds it")

    def remove(self) -> None:
        """Ends replication, and frees the memory of the replicas that this rank keeps."""

    def close(self) -> None:
        """Ends replication; complete replicas are kept for the next start."""


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
        return Replication()
    tool = require_tool("remote.replicas", "checkpoint.replicate=true")
    return cast(Replication, tool.Replicas(environment, timeout_s))
