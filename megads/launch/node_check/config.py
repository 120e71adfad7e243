"""What the health check of nodes looks at, and what it takes for healthy."""

from __future__ import annotations

from dataclasses import dataclass

from megads.errors import ConfigError
from megads.runtime.config import LONGEST_WAIT_S, ClusterKind

# Each is a process of its own.
_MOST_CHECKERS = 256


@dataclass
class CheckNodesConfig:
    """The check of the nodes of a SLURM job, or of this machine."""

    cluster: ClusterKind | None = None
    """slurm: every node of the SLURM job that this is called in; local: this machine; null is slurm inside a job."""
    checkers: int = 1
    """Processes that take part on this machine with cluster=local, paired with each other as nodes are."""
    folder: str = "runs"
    """Where every node writes and reads a file: the folder that runs are written to."""
    timeout_s: float = 60.0
    """A node that has not answered by then is not healthy; the same for its measurements and each round of pairs."""
    seconds: float = 0.5
    """How long each speed is measured."""
    min_of_median: float = 0.5
    """A node whose matrix products run at less than this share of the median of all nodes is not healthy."""
    min_disk_of_median: float = 0.02
    """The same for writing to and reading from `folder`, whose speed depends on who else uses it."""
    min_tflops: float = 0.0
    """TFLOP/s that every device must reach in matrix products, whatever the median."""
    min_disk_mb_per_s: float = 1.0
    """MB/s that every node must reach in writing to `folder`."""
    min_disk_free_gib: float = 0.2
    """Free space that every node must see in `folder`, in GiB."""
    min_memory_gib: float = 0.25
    """Memory that must be available on every node, in GiB."""
    max_clock_offset_s: float = 5.0
    """Most difference between a node's clock and this one's, beyond what the network leaves uncertain."""
    json: bool = False
    """Print JSON instead of a table."""

    def check(self) -> None:
        """Raises ConfigError on what can never be met or means nothing."""
        for name in ("timeout_s", "seconds"):
            if not 0 < getattr(self, name) <= LONGEST_WAIT_S:
                raise ConfigError(f"{name} = {getattr(self, name)}: must be positive, and at most {LONGEST_WAIT_S:.0f}")
        if not 1 <= self.checkers <= _MOST_CHECKERS:
            raise ConfigError(f"checkers = {self.checkers}: must be from 1 to {_MOST_CHECKERS}")
        if self.checkers > 1 and self.cluster is ClusterKind.slurm:
            raise ConfigError(f"checkers = {self.checkers} with cluster=slurm: there is one on every node of the job")
        for name in ("min_of_median", "min_disk_of_median"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)}: must be at least 0 and below 1")
