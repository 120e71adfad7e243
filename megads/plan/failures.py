"""Published interruptions of training jobs by cause, as rates per GPU-hour, and what state each kind of failure loses.

Rates scale with the number of GPUs: MTBF is proportional to 1 / GPUs (arXiv 2410.21680, section III). For jobs much
larger than those of the source this is an extrapolation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

HOUR_S = 3600.0


class Sign(StrEnum):
    """Symptom of a failure."""

    crash = "crash"
    """A process or node exits, or reports a fatal error."""
    hang = "hang"
    """No process exits; detected because a step takes too long."""
    silent = "silent"
    """The step completes with a wrong result."""


class Loss(StrEnum):
    """What a failure loses, which determines the checkpoints that the run can resume from."""

    process = "process"
    """Ranks, which restart on the same node: checkpoints in its memory survive."""
    node = "node"
    """One node, including checkpoints in its memory."""
    nodes = "nodes"
    """Several nodes at once, such as those behind one switch: their copies of each other's checkpoints may be lost."""


@dataclass(frozen=True)
class FailureCause:
    """Interruptions of one cause.

    Attributes:
        name: name of the cause in the source.
        count: number of interruptions in the source's period; may be fractional if the source gives a rate.
        sign: symptom of these failures.
        loss: what these failures lose.
    """

    name: str
    count: float
    sign: Sign = Sign.crash
    loss: Loss = Loss.node

    @property
    def loses_node(self) -> bool:
        """Whether at least one node has to be replaced."""
        return self.loss is not Loss.process


@dataclass(frozen=True)
class FailureTable:
    """A published table of failures.

    Attributes:
        title: source of the table.
        gpu_hours: GPU-hours in which the interruptions were counted.
        gpus: number of GPUs of the observed jobs.
        causes: rows of the table.
        remark: limitations of the figures.
    """

    title: str
    gpu_hours: float
    gpus: int
    causes: tuple[FailureCause, ...]
    remark: str = ""

    @property
    def interruptions(self) -> float:
        """Number of interruptions of all causes."""
        return sum(cause.count for cause in self.causes)

    def per_second(self, cause: FailureCause, gpus: float) -> float:
        """Failure rate of one cause on `gpus` GPUs, in interruptions per second."""
        return cause.count / self.gpu_hours * gpus / HOUR_S

    def mean_time_between_s(self, gpus: float) -> float:
        """MTBF over all causes on `gpus` GPUs, in seconds."""
        return self.gpu_hours * HOUR_S / (self.interruptions * gpus)


# The paper gives counts; symptoms and losses are megads' interpretation.
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

# Exposure: the NVLink error row has 54 failures x 800 GPUs x 868.1 minutes, 30.25% of the GPU time of all failed jobs.
# Rows of jobs with few GPUs (connection errors, errors of the scripts) are left out: they do not apply to large jobs.
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
    # Written from memory; no copy of the paper was available to check the figures.
    remark="counted per GPU-hour of failed jobs, so the rates are upper bounds; not checked against the paper",
)

RSC1 = FailureTable(
    "Revisiting Reliability in Large-Scale Machine Learning Research Clusters (arXiv 2410.21680): 6.50 failures in "
    "1,000 node-days of 8 A100 on RSC-1",
    gpu_hours=1000 * 8 * 24,
    gpus=16_000,
    causes=(FailureCause("any hardware", 6.50),),
    remark="not broken down by cause",
)

RSC2 = FailureTable(
    "Revisiting Reliability in Large-Scale Machine Learning Research Clusters (arXiv 2410.21680): 2.34 failures in "
    "1,000 node-days of 8 A100 on RSC-2",
    gpu_hours=1000 * 8 * 24,
    gpus=8_000,
    causes=(FailureCause("any hardware", 2.34),),
    remark="not broken down by cause",
)

TABLES: Mapping[str, FailureTable] = {"llama3": LLAMA3, "acme": ACME, "rsc1": RSC1, "rsc2": RSC2}
"""Failure tables by the name used in `megads plan`."""
