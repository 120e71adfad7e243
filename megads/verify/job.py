"""What the ranks of a verification are told, and the files of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megads.parallel.config import ParallelConfig
from megads.runtime.control_plane import decode, encode
from megads.verify.scenario import Scenario


@dataclass(frozen=True)
class Job:
    """What every rank does.

    Attributes:
        parallel: the layout.
        scenarios: trained one after another, each on an engine of its own.
        corpus: prefix of the dataset that the data path is checked on.
        timeout_s: longest wait for a peer.
        defect: module:function, called first; tests break something with it.
    """

    parallel: ParallelConfig
    scenarios: tuple[Scenario, ...]
    corpus: Path
    timeout_s: float
    defect: str = ""

    def write(self, folder: Path) -> None:
        """Leaves it for the ranks."""
        (folder / "job.json").write_bytes(encode(self, Job))

    @classmethod
    def read(cls, folder: Path) -> Job:
        """Reads what `write` left; raises UnhealthyNode on anything else."""
        return decode((folder / "job.json").read_bytes(), Job, 0)  # type: ignore[no-any-return]


def result_path(folder: Path, rank: int) -> Path:
    """Where a rank leaves its RankRun of every scenario."""
    return folder / f"rank_{rank:05d}.pt"
