"""Does a run fit? The plan of a config, compared with the machine before any rank starts."""

from __future__ import annotations

from dataclasses import dataclass

from megads.config import Precision, RootConfig
from megads.errors import ConfigError
from megads.plan.memory import MemoryPlan, StageMemory, Workload, memory_plan
from megads.runtime.machine_memory import (
    GPU_PROCESS_BYTES,
    HEAP_SHARE,
    PROCESS_BYTES,
    available_memory,
    free_gpu_memory,
)


@dataclass(frozen=True)
class Room:
    """What the ranks on this machine need, and what it has; in bytes.

    Attributes:
        needed: of one GPU, or of all ranks together on a CPU; processes and holes in their heaps included.
        available: free on the fullest GPU, or on the machine.
        per_gpu: whether the figures are of one GPU.
    """

    needed: int
    available: int
    per_gpu: bool

    @property
    def fits(self) -> bool:
        return self.needed <= self.available


def plan_of(config: RootConfig, *, cuda: bool) -> MemoryPlan:
    """Memory of every rank of a run.

    Args:
        config: the run.
        cuda: ranks compute on GPUs.
    """
    train = config.train
    workload = Workload(
        seq_len=train.seq_len,
        micro_batch_size=train.micro_batch_size,
        micro_batches=micro_batches(config),
        weight_bytes=2 if train.precision is Precision.bf16 else 4,
        # The running step, those in the queue, and the one being read.
        steps_loaded=config.data.prefetch_steps + 2,
        cuda=cuda,
    )
    return memory_plan(config.model, config.parallel, workload)


def micro_batches(config: RootConfig) -> int:
    """Micro-batches of one data-parallel rank in a step of the full batch size."""
    return config.train.global_batch_size // (config.train.micro_batch_size * config.parallel.dp)


def room_for(plan: MemoryPlan, free_gpus: list[int]) -> Room:
    """What the plan needs of this machine, on which all ranks run.

    Args:
        plan: the run's memory.
        free_gpus: free bytes of every GPU; empty on a CPU.
    """
    if free_gpus:
        return Room(plan.largest.peak + GPU_PROCESS_BYTES, min(free_gpus), per_gpu=True)
    ranks = plan.ranks_per_stage * len(plan.stages)
    return Room(round(plan.all_ranks * HEAP_SHARE) + ranks * PROCESS_BYTES, available_memory(), per_gpu=False)


def refuse_unfit(config: RootConfig) -> None:
    """Raises ConfigError when the run cannot fit, with the largest rank and its largest part."""
    if not config.run.check_memory:
        return
    free_gpus = free_gpu_memory()
    plan = plan_of(config, cuda=bool(free_gpus))
    room = room_for(plan, free_gpus)
    if room.fits:
        return
    largest = plan.largest
    name, size = max(parts(largest).items(), key=lambda part: part[1])
    ranks = plan.ranks_per_stage * len(plan.stages)
    together = "" if room.per_gpu or ranks == 1 else f", all {ranks} ranks together {gib(room.needed)}"
    place = "its GPU" if room.per_gpu else "this machine"
    raise ConfigError(
        f"rank {largest.first_rank} needs {gib(largest.peak)}, {gib(size)} of it {name}{together}; {place} has "
        f"{gib(room.available)} available: {_remedy(room)}, use a smaller model, or set run.check_memory=false to try"
    )


def _remedy(room: Room) -> str:
    """More ranks help where each has memory of its own; on one machine they share it."""
    if room.per_gpu:
        return "raise parallel.tp, parallel.pp or parallel.dp, lower train.micro_batch_size or train.seq_len"
    return "lower train.micro_batch_size, train.seq_len or parallel.dp"


def memory_line(config: RootConfig) -> str:
    """One line about the run's memory, for people."""
    free_gpus = free_gpu_memory()
    plan = plan_of(config, cuda=bool(free_gpus))
    room = room_for(plan, free_gpus)
    verdict = "fits" if room.fits else "does not fit"
    subject = "a GPU" if room.per_gpu else "all ranks"
    return (
        f"at most {gib(plan.largest.peak)} a rank (rank {plan.largest.first_rank}); {subject} {gib(room.needed)} "
        f"of {gib(room.available)} available: {verdict}"
    )


def parts(stage: StageMemory) -> dict[str, int]:
    """What makes up the peak of a rank, by name, in bytes."""
    return {
        "weights": stage.weights,
        "gathered weights": stage.fullest.gathered,
        "working gradients": stage.fullest.gradients,
        "fp32 gradients": stage.fp32_gradients,
        "fp32 masters and moments": stage.masters + stage.adam_moments,
        "activations in flight": stage.fullest.activations,
        "logits and loss": stage.fullest.loss,
        "working tensors": stage.fullest.working,
        "pipeline buffers": stage.pipeline_buffers,
        "attention bias": stage.attention_bias,
        "reduction copies": stage.fullest.transient,
    }


def gib(size: int) -> str:
    """12.3 GiB; MiB below one GiB."""
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.1f} MiB"
