"""Published interruptions of training jobs by cause, as rates a GPU and hour, and what each kind of failure takes away.

A rate is scaled by the number of GPUs: the time between failures falls as 1 / GPUs (arXiv 2410.21680, section III). Far
beyond a source's own size it is an extrapolation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

HOUR_S = 3600.0


class Sign(StrEnum):
    """How a failure shows."""

    crash = "crash"
    """A process or a node ends, or says that it cannot go on."""
    hang = "hang"
    """Nobody ends: a step that lasts too long is the sign."""
    silent = "silent"
    """The step is computed, and wrong."""


class Loss(StrEnum):
    """What a failure takes away, and so where the state that the run goes on from must lie."""

    process = "process"
    """Ranks, which start again on the same node: checkpoints in its memory are there."""
    node = "node"
    """A node, and what lies in its memory."""
    nodes = "nodes"
    """Several nodes at once, as those behind one switch: copies in each other's memory may be gone, too."""


@dataclass(frozen=True)
class FailureCause:
    """Interruptions of one cause.

    Attributes:
        name: as in the source.
        count: interruptions in the source's period; also a fraction, where the source gives a rate.
        sign: how they show.
        loss: what they take away.
    """

    name: str
    count: float
    sign: Sign = Sign.crash
    loss: Loss = Loss.node

    @property
    def loses_node(self) -> bool:
        """Whether a node is not used any more."""
        return self.loss is not Loss.process


@dataclass(frozen=True)
class FailureTable:
    """A published table of failures.

    Attributes:
        title: where it was published.
        gpu_hours: GPU hours in which the interruptions were counted.
        gpus: of the jobs they were counted on.
        causes: the rows.
        remark: what the figures are not.
    """

    title: str
    gpu_hours: float
    gpus: int
    causes: tuple[FailureCause, ...]
    remark: str = ""

    @property
    def interruptions(self) -> float:
        """Of all causes."""
        return sum(cause.count for cause in self.causes)

    def per_second(self, cause: FailureCause, gpus: float) -> float:
        """Interruptions a second of one cause on so many GPUs."""
        return cause.count / self.gpu_hours * gpus / HOUR_S

    def mean_time_between_s(self, gpus: float) -> float:
        """Seconds between two interruptions of any cause on so many GPUs."""
        return self.gpu_hours * HOUR_S / (self.interruptions * gpus)


# The paper gives counts; signs and losses are megads' reading of them.
LLAMA3 = FailureTable(
    "The Llama 3 Herd of Models (arXiv 2407.21783), Table 5: 54 days of 405B on 16,384 H100",
    gpu_hours=16_384 * 54 * 24,
    gpus=16_384,
    causes=(
        FailureCause("faulty GPU", 148),
        FailureCause("GPU HBM3 memory", 72),
        FailureCause("software bug", 54, loss=Loss.process),
        FailureCause("network switch or cable", 35, Sign.hang, Loss.nodes),
        FailureCause("host maintenance", 32),
        FailureCause("GPU SRAM memory", 19),
        FailureCause("GPU system processor", 17),
        FailureCause("network card", 7, Sign.hang),
        FailureCause("NCCL watchdog timeout", 7, Sign.hang, Loss.process),
        FailureCause("silent data corruption", 6, Sign.silent),
        FailureCause("GPU thermal", 6),
        FailureCause("SSD", 3),
        FailureCause("power supply", 3),
        FailureCause("server chassis", 2),
        FailureCause("IO expansion board", 2),
        FailureCause("dependency", 2, loss=Loss.process),
        FailureCause("CPU", 2),
        FailureCause("system memory", 2),
    ),
)

# Exposure: the row of NVLink errors has 54 failures x 800 GPUs x 868.1 minutes, 30.25% of the GPU time of all jobs that
# failed. The rows of jobs of a few GPUs (connection errors, the scripts' own errors) say nothing about large jobs.
ACME = FailureTable(
    "Characterization of Large Language Model Development in the Datacenter (Hu et al., NSDI 2024, arXiv 2403.07648), "
    "Table 3: infrastructure failures of six months on A100",
    gpu_hours=54 * 800 * 868.1 / 60 / 0.3025,
    gpus=800,
    causes=(
        FailureCause("NVLink error", 54),
        FailureCause("CUDA error", 21, loss=Loss.process),
        FailureCause("node failure", 16),
        FailureCause("ECC error", 12),
        FailureCause("network error", 12, Sign.hang, Loss.nodes),
        FailureCause("S3 storage error", 10, loss=Loss.process),
        FailureCause("NCCL timeout", 6, Sign.hang, Loss.process),
        FailureCause("NCCL remote error", 3, loss=Loss.process),
    ),
    # Written down from memory, and no copy of the paper was at hand to compare it with.
    remark="counted per GPU hour of the jobs that failed, so the rates are upper bounds; not compared with the paper",
)

RSC1 = FailureTable(
    "Revisiting Reliability in Large-Scale Machine Learning Research Clusters (arXiv 2410.21680): 6.50 failures in "
    "1,000 node-days of 8 A100 on RSC-1",
    gpu_hours=1000 * 8 * 24,
    gpus=16_000,
    causes=(FailureCause("any hardware", 6.50),),
    remark="not told apart by cause",
)

RSC2 = FailureTable(
    "Revisiting Reliability in Large-Scale Machine Learning Research Clusters (arXiv 2410.21680): 2.34 failures in "
    "1,000 node-days of 8 A100 on RSC-2",
    gpu_hours=1000 * 8 * 24,
    gpus=8_000,
    causes=(FailureCause("any hardware", 2.34),),
    remark="not told apart by cause",
)

TABLES: Mapping[str, FailureTable] = {"llama3": LLAMA3, "acme": ACME, "rsc1": RSC1, "rsc2": RSC2}
"""By the name that `megads plan` gives them."""
