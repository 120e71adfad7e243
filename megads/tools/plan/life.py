"""Discrete-event simulation of a run's lifetime on a cluster: failures, detection, restarts and checkpoints.

Failures are a Poisson process in wall time and are sampled independently of the plan: two plans with the same seed see
the same failures, so their results differ only because of the plan. Time between two failures is computed in closed
form for all runs at once, so a month at 16,384 GPUs (some 230 failures per run, 64 runs) takes a fraction of a second.

The optimal checkpoint interval follows Young and Daly. The interval is the training time in seconds between two saves,
M the mean time between failures (MTBF), `stall` the time that training is blocked by a save. A synchronous save blocks
until it is written. An asynchronous save blocks only for the copy, and the checkpoint is usable `write` seconds later:
a failure loses that time as well, which costs the same at every interval and does not move the optimum.

Published interruptions of training jobs are given by cause, as rates per GPU-hour, with the state that each kind of
failure loses. Rates scale with the number of GPUs: MTBF is proportional to 1 / GPUs (arXiv 2410.21680, section III).
For jobs much larger than those of the source this is an extrapolation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum, StrEnum

import numpy as np
from numpy.typing import NDArray

HOUR_S = 3600.0


class FailureSign(StrEnum):
    """Symptom of a failure."""

    crash = "crash"
    """A process or node exits, or reports a fatal error."""
    hang = "hang"
    """No process exits; detected because a step takes too long."""
    silent = "silent"
    """The step completes with a wrong result."""


class FailureScope(StrEnum):
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
    sign: FailureSign = FailureSign.crash
    loss: FailureScope = FailureScope.node

    @property
    def loses_node(self) -> bool:
        """Whether at least one node has to be replaced."""
        return self.loss is not FailureScope.process


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
        FailureCause("software bug", 54, loss=FailureScope.process),
        FailureCause("network switch or cable", 35, FailureSign.hang, FailureScope.nodes),
        FailureCause("host maintenance", 32),
        FailureCause("GPU SRAM memory", 19),
        FailureCause("GPU system processor", 17),
        FailureCause("network card", 7, FailureSign.hang),
        FailureCause("NCCL watchdog timeout", 7, FailureSign.hang, FailureScope.process),
        FailureCause("silent data corruption", 6, FailureSign.silent),
        FailureCause("GPU thermal", 6),
        FailureCause("SSD", 3),
        FailureCause("power supply", 3),
        FailureCause("server chassis", 2),
        FailureCause("IO expansion board", 2),
        FailureCause("dependency", 2, loss=FailureScope.process),
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
        FailureCause("CUDA error", 21, loss=FailureScope.process),
        FailureCause("node failure", 16),
        FailureCause("ECC error", 12),
        FailureCause("network error", 12, FailureSign.hang, FailureScope.nodes),
        FailureCause("S3 storage error", 10, loss=FailureScope.process),
        FailureCause("NCCL timeout", 6, FailureSign.hang, FailureScope.process),
        FailureCause("NCCL remote error", 3, loss=FailureScope.process),
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


def young_interval(stall_s: float, mean_time_between_s: float) -> float:
    """Young's interval, sqrt(2 * stall * M) (A first order approximation to the optimum checkpoint interval, 1974)."""
    return math.sqrt(2 * stall_s * mean_time_between_s)


def daly_first_order(stall_s: float, mean_time_between_s: float, restart_s: float) -> float:
    """Daly's first-order interval, sqrt(2 * stall * (M + R)) - stall (FGCS 22, 2006, equation 9)."""
    return max(math.sqrt(2 * stall_s * (mean_time_between_s + restart_s)) - stall_s, 0.0)


def daly_interval(stall_s: float, mean_time_between_s: float) -> float:
    """Daly's higher-order interval (A higher order estimate of the optimum checkpoint interval, FGCS 22, 2006, eq. 37).

    sqrt(2 d M) * (1 + sqrt(d / 2M) / 3 + (d / 2M) / 9) - d for d < 2M, else M. Within 0.2% of the optimum of
    `expected_share` up to d = M/2.
    """
    half = stall_s / (2 * mean_time_between_s)
    if half >= 1:
        return mean_time_between_s
    return young_interval(stall_s, mean_time_between_s) * (1 + math.sqrt(half) / 3 + half / 9) - stall_s


def expected_share(
    interval_s: float, stall_s: float, write_s: float, restart_s: float, mean_time_between_s: float
) -> float:
    """Expected goodput (share of wall time that is useful training) under failures from a Poisson process.

    Failures may also occur during a restart. A run saves once every `interval_s + stall_s`, and a checkpoint is usable
    `write_s` later, so exp(-write/M) / (exp((interval + stall)/M) - 1) checkpoints are expected between two failures,
    in M * exp(restart/M) seconds. For write = 0 the result is the inverse of Daly's complete cost (2006, equation 20).

    Args:
        interval_s: training time between two saves.
        stall_s: time that each save blocks training.
        write_s: time from the end of the stall until the checkpoint survives a failure.
        restart_s: time from a failure to the next step: detection, restart and load.
        mean_time_between_s: mean time between failures (MTBF).
    """
    mean = mean_time_between_s
    if math.isinf(mean):
        return interval_s / (interval_s + stall_s)
    kept = math.exp(-write_s / mean) / math.expm1((interval_s + stall_s) / mean)
    return interval_s * kept / (mean * math.exp(restart_s / mean))


FloatArray = NDArray[np.float64]
DAY_S = 24 * HOUR_S
_DEFAULT_INTERVAL_S = HOUR_S
"""Checkpoint interval for a tier that no failure of the table needs."""
_LEAST_INTERVAL_S = 1.0
"""Minimum checkpoint interval, for saves that cost nothing."""
_GRID = np.geomspace(0.25, 4.0, 17)
"""Intervals to try, as multiples of the formula's interval."""


class FailureCosts(IntEnum):
    """Components of the time lost to a failure, in chronological order; lost work last."""

    detect = 0
    wait = 1
    restart = 2
    load = 3
    lost_work = 4


@dataclass(frozen=True)
class SaveTier:
    """Checkpoint costs of one storage tier.

    Attributes:
        every_s: training time between two saves.
        stall_s: time that each save blocks training.
        write_s: time from the end of the stall until the checkpoint survives a failure.
        load_s: time to load a checkpoint at a restart.
    """

    every_s: float
    stall_s: float
    write_s: float
    load_s: float


@dataclass(frozen=True)
class Life:
    """A run on a cluster; all times in seconds unless stated otherwise.

    Attributes:
        table: failure rates by cause.
        gpus: number of GPUs, all of which the run needs.
        days: wall time in days.
        disk: checkpoints on disk, which survive every failure.
        memory: local checkpoints, in node memory; None if there are none.
        copies: whether each node's local checkpoints are replicated on another node and survive the loss of one.
        crash_s: detection time of a crash.
        hang_s: detection time of a hang.
        silent_s: detection time of silent corruption; work done meanwhile is lost, and its checkpoints are not used.
        restart_s: time from detection, or from the arrival of a replacement node, to the load of the checkpoint.
        spares: number of spare nodes.
        replace_s: time to get a replacement node when no spare is available.
        repair_s: mean time until a failed node is repaired and becomes a spare.
    """

    table: FailureTable
    gpus: int
    days: float
    disk: SaveTier
    memory: SaveTier | None
    copies: bool
    crash_s: float
    hang_s: float
    silent_s: float
    restart_s: float
    spares: int
    replace_s: float
    repair_s: float

    @property
    def horizon_s(self) -> float:
        """Simulated wall time."""
        return self.days * DAY_S

    @property
    def mean_time_between_s(self) -> float:
        """MTBF over all causes."""
        return self.table.mean_time_between_s(self.gpus)

    def detection_s(self, cause: FailureCause) -> float:
        """Detection time of a failure of this cause."""
        return {FailureSign.crash: self.crash_s, FailureSign.hang: self.hang_s, FailureSign.silent: self.silent_s}[
            cause.sign
        ]

    def survives_in_memory(self, cause: FailureCause) -> bool:
        """Whether the run can resume from a local checkpoint after a failure of this cause."""
        if self.memory is None or cause.sign is FailureSign.silent:
            return False
        return cause.loss is FailureScope.process or (self.copies and cause.loss is FailureScope.node)

    def needs(self, *, memory: bool) -> float:
        """MTBF of the failures that a tier (memory or disk) recovers from; infinite if there are none."""
        rate = sum(
            self.table.per_second(cause, self.gpus)
            for cause in self.table.causes
            if self.survives_in_memory(cause) is memory
        )
        return 1 / rate if rate else math.inf

    def expected_failures(self, cause: FailureCause) -> float:
        """Expected number of failures of this cause in the simulated time."""
        return self.table.per_second(cause, self.gpus) * self.horizon_s


def formula_interval(life: Life, *, memory: bool = False) -> float:
    """Daly's interval for the failures that a tier recovers from; at least the time to write a checkpoint."""
    tier = life.memory if memory else life.disk
    assert tier is not None
    mean = life.needs(memory=memory)
    if math.isinf(mean):
        return max(_DEFAULT_INTERVAL_S, tier.write_s)
    return max(daly_interval(tier.stall_s, mean), tier.write_s, _LEAST_INTERVAL_S)


@dataclass(frozen=True)
class LifeResult:
    """Results of the simulated runs.

    Attributes:
        shares: goodput (useful training time over wall time) of each run.
        failures: number of failures by cause, mean over runs.
        seconds: lost seconds, [`FailureCosts`, cause], mean over runs.
        stall_s: seconds that saves blocked training, mean over runs.
    """

    shares: FloatArray
    failures: FloatArray
    seconds: FloatArray
    stall_s: float

    @property
    def share(self) -> float:
        """Goodput, mean over runs."""
        return float(self.shares.mean())

    @property
    def confidence(self) -> float:
        """Half-width of the 95% confidence interval of the mean goodput."""
        return float(1.96 * self.shares.std(ddof=1) / math.sqrt(len(self.shares)))

    @property
    def range(self) -> tuple[float, float]:
        """Interval that contains the goodput of 95% of the runs."""
        low, high = np.quantile(self.shares, [0.025, 0.975])
        return float(low), float(high)


def simulate(life: Life, runs: int, seed: int) -> LifeResult:
    """Simulates `runs` runs over the full wall time.

    Args:
        life: the run and its cluster.
        runs: number of simulated runs, at least 2.
        seed: random seed of the failures.
    """
    clock = _RunClock(life, runs)
    for times, causes, repairs in _failures(life, runs, seed):
        clock.advance(np.minimum(times, life.horizon_s))
        struck = np.flatnonzero(times < life.horizon_s)
        clock.fail(struck, causes[struck], repairs[struck])
    return LifeResult(clock.done / life.horizon_s, clock.failures / runs, clock.spent / runs, clock.stall_s / runs)


def _failures(life: Life, runs: int, seed: int) -> Iterator[tuple[FloatArray, NDArray[np.int64], FloatArray]]:
    """Yields time, cause and repair time of every run's next failure, until all runs are past the simulated time."""
    draw = np.random.default_rng(seed)
    rates = np.array([life.table.per_second(cause, life.gpus) for cause in life.table.causes])
    now = np.zeros(runs)
    while (now < life.horizon_s).any():
        now = now + draw.exponential(1 / rates.sum(), runs)
        causes = np.searchsorted(np.cumsum(rates) / rates.sum(), draw.random(runs), side="right")
        yield now, np.minimum(causes, len(rates) - 1), draw.exponential(life.repair_s, runs)


class _RunClock:
    """State of all simulated runs; positions are seconds of useful training."""

    def __init__(self, life: Life, runs: int) -> None:
        causes = life.table.causes
        self._life = life
        self._detect = np.array([life.detection_s(cause) for cause in causes])
        self._loses_node = np.array([cause.loses_node for cause in causes])
        self._from_memory = np.array([life.survives_in_memory(cause) for cause in causes])
        memory = life.memory
        self._speed = memory.every_s / (memory.every_s + memory.stall_s) if memory else 1.0
        self._now, self.done, self._on_disk, self._in_memory = (np.zeros(runs) for _ in range(4))
        self._down = np.zeros((4, runs))
        self._cause = np.zeros(runs, dtype=np.int64)
        self._spare_at = np.zeros((runs, life.spares))
        self.failures = np.zeros(len(causes))
        self.spent = np.zeros((len(FailureCosts), len(causes)))
        self.stall_s = 0.0

    def advance(self, until: FloatArray) -> None:
        """Advances to these times: first the remaining downtime of the last failure, then training."""
        left = until - self._now
        for part in range(len(self._down)):
            used = np.minimum(self._down[part], left)
            self._down[part] -= used
            left = left - used
            self.spent[part] += np.bincount(self._cause, used, minlength=len(self.failures))
        self._train(left)
        self._now = until

    def _train(self, seconds: FloatArray) -> None:
        """Trains and saves. Stalls of local saves are short and are modelled as a uniform slowdown."""
        disk, memory, speed = self._life.disk, self._life.memory, self._speed
        # Rounding must not move a position exactly at a save to before it.
        base = np.floor(self.done / disk.every_s + 1e-9) * disk.every_s
        since_save = np.maximum(self.done - base, 0.0)
        cycle = disk.every_s / speed + disk.stall_s
        time = seconds + since_save / speed
        cycles = np.floor(time / cycle)
        trained = cycles * disk.every_s + np.minimum((time - cycles * cycle) * speed, disk.every_s) - since_save
        self.done = self.done + trained
        self.stall_s += float((seconds - trained).sum())
        written = np.maximum(np.floor((time - disk.write_s) / cycle), 0.0)
        self._on_disk = np.maximum(self._on_disk, base + np.where(written > 0, written * disk.every_s, -disk.every_s))
        if memory is not None:
            kept = np.floor((self.done - memory.write_s * speed) / memory.every_s + 1e-9) * memory.every_s
            self._in_memory = np.maximum(self._in_memory, np.minimum(kept, self.done))

    def fail(self, struck: NDArray[np.int64], causes: NDArray[np.int64], repairs: FloatArray) -> None:
        """Rolls these runs back to their latest usable checkpoint and records their downtime."""
        life, done = self._life, self.done[struck]
        in_memory = self._from_memory[causes] & (self._in_memory[struck] >= self._on_disk[struck])
        position = np.where(in_memory, self._in_memory[struck], self._on_disk[struck])
        self.spent[FailureCosts.lost_work] += np.bincount(causes, done - position, minlength=len(self.failures))
        self.failures += np.bincount(causes, minlength=len(self.failures))
        self.done[struck], self._in_memory[struck] = position, position
        load = np.where(in_memory, life.memory.load_s, life.disk.load_s) if life.memory else life.disk.load_s
        detect = self._detect[causes]
        wait = self._replacement(struck, causes, self._now[struck] + detect, repairs)
        self._down[:, struck] = np.stack(np.broadcast_arrays(detect, wait, life.restart_s, load))
        self._cause[struck] = causes

    def _replacement(
        self, struck: NDArray[np.int64], causes: NDArray[np.int64], known: FloatArray, repairs: FloatArray
    ) -> FloatArray:
        """Seconds until lost nodes are replaced, by the first available spare or by a newly provisioned node."""
        lost = self._loses_node[causes]
        wait = np.where(lost, self._life.replace_s, 0.0)
        if self._life.spares:
            spare = self._spare_at[struck].argmin(axis=1)
            spare_wait = np.maximum(self._spare_at[struck, spare] - known, 0.0)
            takes = lost & (spare_wait <= self._life.replace_s)
            wait = np.where(takes, spare_wait, wait)
            self._spare_at[struck[takes], spare[takes]] = (known + repairs)[takes]
        return wait


@dataclass(frozen=True)
class Optimum:
    """Disk checkpoint interval with the highest simulated goodput.

    Attributes:
        every_s: the interval.
        share: goodput at this interval.
        low_s: shortest interval that was tried whose goodput is within 0.1 percentage points of the best one tried.
        high_s: longest such interval.
    """

    every_s: float
    share: float
    low_s: float
    high_s: float


def optimal_interval(life: Life, runs: int, seed: int) -> Optimum:
    """Finds the best disk checkpoint interval by simulation, around the formula's interval.

    Every interval sees the same failures. A parabola fitted to goodput over the logarithm of the interval smooths the
    remaining noise.
    """
    tried = np.unique(np.maximum(_GRID * formula_interval(life), life.disk.write_s))
    shares = np.array([simulate(_saving_every(life, every), runs, seed).share for every in tried.tolist()])
    best = int(shares.argmax())
    near = slice(max(best - 4, 0), best + 5)
    every, share = float(tried[best]), float(shares[best])
    if len(tried[near]) >= 5:
        places = np.log(tried[near] / tried[best])
        curve = np.polyfit(places, shares[near], 2)
        if curve[0] < 0:
            place = float(np.clip(-curve[1] / (2 * curve[0]), places[0], places[-1]))
            every, share = every * math.exp(place), float(np.polyval(curve, place))
    good = tried[shares >= shares[best] - 1e-3]
    return Optimum(every, share, float(good[0]), float(good[-1]))


def _saving_every(life: Life, every_s: float) -> Life:
    """The run with this disk interval, but at least the write time: only one save is written at a time."""
    return replace(life, disk=replace(life.disk, every_s=max(every_s, life.disk.write_s)))


def sensitivity(life: Life, runs: int, seed: int) -> list[tuple[str, float]]:
    """Goodput gained by halving one parameter at a time, largest gain first."""
    before = simulate(life, runs, seed).share
    gains = [(name, simulate(halved, runs, seed).share - before) for name, halved in _halved(life)]
    return sorted(gains, key=lambda item: -item[1])


def _halved(life: Life) -> Sequence[tuple[str, Life]]:
    disk, memory = life.disk, life.memory
    detection = replace(life, crash_s=life.crash_s / 2, hang_s=life.hang_s / 2, silent_s=life.silent_s / 2)
    loads = replace(disk, load_s=disk.load_s / 2), memory and replace(memory, load_s=memory.load_s / 2)
    found = [
        ("detection", detection),
        ("restart", replace(life, restart_s=life.restart_s / 2)),
        ("load", replace(life, disk=loads[0], memory=loads[1])),
        ("waiting for a node", replace(life, replace_s=life.replace_s / 2, repair_s=life.repair_s / 2)),
        ("disk checkpoint interval", _saving_every(life, disk.every_s / 2)),
        ("disk checkpoint stall", replace(life, disk=replace(disk, stall_s=disk.stall_s / 2))),
        ("disk checkpoint write time", replace(life, disk=replace(disk, write_s=disk.write_s / 2))),
        ("failure rate", replace(life, table=replace(life.table, gpu_hours=2 * life.table.gpu_hours))),
    ]
    if memory is not None:
        found.append(("local checkpoint interval", replace(life, memory=replace(memory, every_s=memory.every_s / 2))))
    return found
