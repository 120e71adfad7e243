"""Plan of a run, from its config: memory per rank and step time.

A run that does not fit into the machine's memory is refused before a rank starts. The step time is estimated for
`megads plan`, and for the comparison with measured steps in `megads report`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from megads.api import (
    GRADIENT_STAGES,
    PROCESS_BYTES,
    ConfigError,
    ContextParallelKind,
    EngineKind,
    Implementation,
    Machine,
    ModelConfig,
    ParallelConfig,
    Precision,
    Recompute,
    RootConfig,
    available_memory,
    gib,
    parameter_count,
    phase_config,
)
from megads.config.root import for_each_phase
from megads.model.model_size import active_parameter_count
from megads.ops.resolve import assumes_fused_kernels
from megads.runtime.machine_memory import HEAP_SHARE
from megads.tools.plan.collectives import FLAT, Network, context_choices
from megads.tools.plan.devices import Device, find_device
from megads.tools.plan.execution import MEGADS, Execution
from megads.tools.plan.memory import MemoryPlan, StageMemory, memory_plan
from megads.tools.plan.step_estimate import StepEstimate, StepModel
from megads.tools.plan.workload import Workload

_REFERENCE_DEVICE, _ANY_VOCABULARY = "h100", 32768
"""What `choose_context_kind` estimates on, and for."""


@dataclass(frozen=True)
class MemoryNeed:
    """Memory that the ranks on a machine need, and memory that is available; in bytes.

    Attributes:
        needed: memory needed on one GPU, or by all ranks on a CPU, including processes and heap fragmentation.
        available: free memory of the fullest GPU, or a rank's share of it, or of the machine.
        per_gpu: whether the values are for one GPU, or for a rank's share of one.
        ranks_per_gpu: number of ranks that share a GPU.
    """

    needed: int
    available: int
    per_gpu: bool
    ranks_per_gpu: int = 1

    @property
    def fits(self) -> bool:
        return self.needed <= self.available

    def __str__(self) -> str:
        subject = ("a GPU" if self.ranks_per_gpu == 1 else "a share of a GPU") if self.per_gpu else "all ranks"
        return f"{subject} {gib(self.needed)} of {gib(self.available)} available"


def memory_need(machine: Machine, plan: MemoryPlan) -> MemoryNeed:
    """Returns the memory that a run needs on a machine, and what is available there."""
    if machine.per_gpu:
        share = machine.available // machine.ranks_per_gpu
        return MemoryNeed(plan.fullest_device.device_peak, share, per_gpu=True, ranks_per_gpu=machine.ranks_per_gpu)
    ranks = plan.ranks_per_stage * len(plan.stages)
    needed = round(plan.all_ranks * HEAP_SHARE) + ranks * PROCESS_BYTES
    return MemoryNeed(needed, machine.available, per_gpu=False)


def memory_for_ranks(machine: Machine, parallel: ParallelConfig) -> int:
    """Bytes of one rank's share of its GPU; on a CPU, bytes for the tensors of one rank of each stage together."""
    if machine.per_gpu:
        return machine.available // machine.ranks_per_gpu
    ranks_per_stage = parallel.world_size // parallel.pp
    return int((machine.available - parallel.world_size * PROCESS_BYTES) / HEAP_SHARE / ranks_per_stage)


def bytes_per_element(config: RootConfig) -> int:
    """Bytes per element of weights and activations."""
    return 2 if config.train.precision is Precision.bf16 else 4


def step_workload(config: RootConfig, *, cuda: bool) -> Workload:
    """Returns the workload of one step of a run.

    Args:
        config: config of the run.
        cuda: whether the ranks compute on GPUs.
    """
    train = config.train
    return Workload(
        seq_len=train.seq_len,
        micro_batch_size=train.micro_batch_size,
        micro_batches=micro_batches(config),
        weight_bytes=bytes_per_element(config),
        # The current step, the prefetched ones, and the one being read.
        steps_loaded=config.data.prefetch_steps + 2,
        cuda=cuda,
        document_mask=config.data.document_mask,
        fused=assumes_fused_kernels(config.ops, cuda=cuda),
        loss_chunk=config.ops.loss_chunk,
        mlp_chunk=config.ops.mlp_chunk,
        optim=config.optim,
        # ops.cuda_graphs=auto is eager at first, and where graphs do not fit.
        cuda_graphs=config.ops.cuda_graphs is True,
        save_every_steps=config.checkpoint.every_steps,
        float8=config.train.float8,
    )


def plan_of(
    config: RootConfig, *, cuda: bool, ranks: Collection[int] | None = None, worst_load: bool = False
) -> MemoryPlan:
    """Returns the memory plan of the ranks of a run.

    Args:
        config: config of the run.
        cuda: whether the ranks compute on GPUs.
        ranks: pipeline ranks to plan; None plans all.
        worst_load: see `Workload`.
    """
    workload = replace(step_workload(config, cuda=cuda), worst_load=worst_load)
    return memory_plan(config.model, config.parallel, workload, ranks)


def worst_load_peak(config: RootConfig, *, cuda: bool) -> int | None:
    """Returns the peak memory of a rank whose experts get all tokens, in bytes; None if the load does not matter."""
    if not config.model.moe.enabled or config.parallel.ep == 1:
        return None
    return plan_of(config, cuda=cuda, worst_load=True).largest.peak


def largest_phase(config: RootConfig, *, cuda: bool) -> RootConfig:
    """Returns the config of the training phase with the highest peak memory of a rank; `config` without phases."""

    def peak(of_phase: RootConfig) -> int:
        parallel = of_phase.parallel
        if parallel.recompute is Recompute.auto:
            of_phase = dataclasses.replace(of_phase, parallel=with_blocks(parallel, [0]))
        return plan_of(of_phase, cuda=cuda).largest.peak

    phases = [phase_config(config, place) for place in range(len(config.train.phases))]
    return max(phases, key=peak, default=config)


def micro_batches(config: RootConfig) -> int:
    """Returns the micro-batches of one data-parallel rank in a step of the full batch size."""
    return config.train.global_batch_size // (config.train.micro_batch_size * config.parallel.dp)


def choose_context_kind(config: RootConfig) -> tuple[RootConfig, str]:
    """Replaces parallel.cp_kind=auto by the kind with the shortest estimated step on H100s.

    It also chooses parallel.cp_ulysses, unless that is given: 1, or heads are exchanged inside a node of H100s. The
    choice is the same on every machine, so that a run continues with it anywhere.

    Returns:
        The config, and a line that compares the kinds; empty if the kind is not auto, or samples are not divided.
    """
    parallel = config.parallel
    if parallel.cp_kind is not ContextParallelKind.auto:
        return config, ""
    device, seconds = find_device(_REFERENCE_DEVICE), dict[tuple[ContextParallelKind, int], float]()
    choices = context_choices(config.model, parallel, device.ranks_per_node)
    if parallel.cp_ulysses > 1:  # the user's own
        kinds = (kind for kind, _ in choices if kind is not ContextParallelKind.ulysses)
        choices = tuple(dict.fromkeys((kind, parallel.cp_ulysses) for kind in kinds))
    layouts = {choice: dataclasses.replace(parallel, cp_kind=choice[0], cp_ulysses=choice[1]) for choice in choices}
    if len(choices) == 1:
        line = "parallel.cp_kind=auto is allgather, the only kind that the model allows" if parallel.cp > 1 else ""
        return dataclasses.replace(config, parallel=layouts[choices[0]]), line
    # Recomputation may still be auto, and the vocabulary unknown: the difference between the kinds does not depend on
    # either.
    recompute = Recompute.none if parallel.recompute is Recompute.auto else parallel.recompute
    model = dataclasses.replace(config.model, vocab_size=config.model.vocab_size or _ANY_VOCABULARY)
    for choice, layout in layouts.items():
        known = dataclasses.replace(layout, recompute=recompute)
        seconds[choice] = step_of(dataclasses.replace(config, model=model, parallel=known), device).step_time_s
    best = min(choices, key=lambda choice: seconds[choice])
    texts = {(kind, size): f"{kind} with cp_ulysses={size}" if size > 1 else f"{kind}" for kind, size in choices}
    compared = ", ".join(f"{texts[choice]} {found:.4g} s" for choice, found in seconds.items())
    line = f"parallel.cp_kind=auto is {texts[best]}: estimated steps on {device.name}s are {compared}"
    return dataclasses.replace(config, parallel=layouts[best]), line


def choose_recompute(config: RootConfig, machine: Machine) -> tuple[RootConfig, str]:
    """Replaces parallel.recompute=auto by the numbers of recomputed blocks with which the run fits a machine.

    Args:
        config: config of the run.
        machine: machine that the run starts on.

    Returns:
        The config with explicit values, or unchanged; and a line that explains them. The line is empty if the value is
        not auto, or cannot be chosen yet: a dry run may not know the vocabulary size before the data is prepared.
    """
    parallel = config.parallel
    if parallel.recompute is not Recompute.auto or config.model.vocab_size is None:
        return config, ""
    largest = largest_phase(config, cuda=machine.per_gpu)
    peaks = peaks_by_blocks(config.model, parallel, step_workload(largest, cuda=machine.per_gpu))
    choose = fewest_per_stage if machine.per_gpu else fewest_for_all
    blocks = choose(peaks, memory_for_ranks(machine, parallel))
    chosen, without = (
        dataclasses.replace(config, parallel=with_blocks(parallel, numbers)) for numbers in (blocks, [0])
    )
    need, need_without = (
        memory_need(machine, plan_of(dataclasses.replace(largest, parallel=c.parallel), cuda=machine.per_gpu))
        for c in (chosen, without)
    )
    if not any(blocks):
        return chosen, f"parallel.recompute=auto recomputes nothing: {need}"
    return chosen, (
        f"parallel.recompute=auto recomputes {', '.join(map(str, blocks))} blocks, stage by stage: {need}, without it "
        f"{gib(need_without.needed)}"
    )


def with_graphs(config: RootConfig) -> RootConfig:
    """Returns the config with CUDA graphs."""
    return dataclasses.replace(config, ops=dataclasses.replace(config.ops, cuda_graphs=True))


def graphs_fit(config: RootConfig, machine: Machine) -> tuple[bool, str]:
    """Returns whether a run with a known vocabulary fits a machine's GPUs with CUDA graphs, and a text with the
    memory."""
    need = memory_need(machine, plan_of(largest_phase(with_graphs(config), cuda=True), cuda=True))
    return need.fits, f"with graphs, {need}"


def with_blocks(parallel: ParallelConfig, blocks: Sequence[int]) -> ParallelConfig:
    """Returns the layout with explicit numbers of recomputed blocks; no recomputation if all are 0."""
    chosen = list(blocks) if any(blocks) else None
    return dataclasses.replace(
        parallel, recompute=Recompute.full if chosen else Recompute.none, recompute_blocks=chosen
    )


def peaks_by_blocks(model: ModelConfig, parallel: ParallelConfig, workload: Workload) -> list[list[int]]:
    """Returns the peak memory in bytes as [stage][blocks], by pipeline stage and number of its recomputed blocks.

    On GPUs it includes the memory of the CUDA context and of the communicators.
    """
    stages = memory_plan(model, with_blocks(parallel, [0]), workload).stages
    counts = [len(stage.recomputation) for stage in stages]
    plans = [
        memory_plan(model, with_blocks(parallel, [min(blocks, count) for count in counts]), workload)
        for blocks in range(max(counts) + 1)
    ]
    return [
        [plans[blocks].stages[stage].device_peak for blocks in range(count + 1)] for stage, count in enumerate(counts)
    ]


def fewest_per_stage(peaks: Sequence[Sequence[int]], limit: int) -> list[int]:
    """Returns the fewest recomputed blocks of each stage with which a rank of it fits its own device.

    The first stages of 1F1B hold the most micro-batches and need the most recomputation.

    Args:
        peaks: peak memory of a rank in bytes, [stage][blocks].
        limit: memory of a device in bytes.

    Returns:
        The number of blocks of each stage; if none fits, the number with the least memory.
    """
    return [next((blocks for blocks, peak in enumerate(row) if peak <= limit), row.index(min(row))) for row in peaks]


def fewest_for_all(peaks: Sequence[Sequence[int]], limit: int) -> list[int]:
    """Returns few recomputed blocks with which one rank of every stage fit into the memory that they share.

    Greedy: the next recomputed block is one of the stage where it saves the most, the one with the most micro-batches
    in flight.

    Args:
        peaks: peak memory of a rank in bytes, [stage][blocks].
        limit: size of the shared memory in bytes.

    Returns:
        The number of blocks of each stage; if nothing fits, the numbers beyond which recomputation saves no memory.
    """
    blocks = [0] * len(peaks)
    while sum(row[count] for row, count in zip(peaks, blocks, strict=True)) > limit:
        savings = [
            row[count] - row[count + 1] if count + 1 < len(row) else 0 for row, count in zip(peaks, blocks, strict=True)
        ]
        best = savings.index(max(savings))
        if savings[best] <= 0:
            break
        blocks[best] += 1
    return blocks


def refuse_unfit(config: RootConfig, machine: Machine) -> None:
    """Raises ConfigError if the run does not fit the machine; names the largest rank and its largest part."""
    if config.run.check_memory:
        for_each_phase(config, lambda of_phase: _refuse_unfit(of_phase, machine))


def _refuse_unfit(config: RootConfig, machine: Machine) -> None:
    plan = plan_of(config, cuda=machine.per_gpu)
    need = memory_need(machine, plan)
    if need.fits:
        return
    largest = plan.fullest_device if need.per_gpu else plan.largest
    name, size = max(parts(largest).items(), key=lambda part: part[1])
    every_block = all(mode is Recompute.full for stage in plan.stages for mode in stage.recomputation)
    remedy = "" if every_block else "set parallel.recompute=full, "
    together, place = "", "this machine"
    if need.per_gpu:  # more ranks help only if each has its own memory
        remedy += "raise parallel.tp, cp, pp or dp, lower train.micro_batch_size or train.seq_len"
        share = f"its share of a GPU (cluster.ranks_per_gpu={need.ranks_per_gpu})"
        place = "its GPU" if need.ranks_per_gpu == 1 else share
    else:
        remedy += "lower train.micro_batch_size, train.seq_len or parallel.dp"
        ranks = plan.ranks_per_stage * len(plan.stages)
        together = "" if ranks == 1 else f", all {ranks} ranks together {gib(need.needed)}"
    raise ConfigError(
        f"rank {largest.first_rank} needs {gib(largest.peak)}, {gib(size)} of it {name}{together}; {place} has "
        f"{gib(need.available)} available: {remedy}, use a smaller model, or set run.check_memory=false to try"
    )


def engine_text(config: RootConfig) -> str:
    """Returns the engine of a run, to show to the user, and what its plan does not cover."""
    engine, stage = config.resolved_engine, config.parallel.zero_stage
    unplanned = engine is EngineKind.deepspeed and stage not in GRADIENT_STAGES
    note = "; memory and step time are planned for the native engine" if unplanned else ""
    return f"{engine}, ZeRO-{stage}{note}"


def parameter_text(model: ModelConfig) -> str:
    """Returns the number of parameters, and of those that a token uses if the model has experts."""
    used = f" ({active_parameter_count(model):,} for a token)" if model.moe.enabled else ""
    return f"{parameter_count(model):,} parameters{used}"


def memory_text(config: RootConfig, machine: Machine) -> str:
    """Returns a line about the run's memory on a machine, to show to the user."""
    config = largest_phase(config, cuda=machine.per_gpu)
    plan, worst = plan_of(config, cuda=machine.per_gpu), worst_load_peak(config, cuda=machine.per_gpu)
    need = memory_need(machine, plan)
    verdict = "fits" if need.fits else "does not fit"
    load = "" if worst is None else f" with an even load of the experts, {gib(worst)} if one rank's get all tokens"
    return f"at most {gib(plan.largest.peak)} a rank{load} (rank {plan.largest.first_rank}); {need}: {verdict}"


def parts(stage: StageMemory) -> dict[str, int]:
    """Returns the parts of a rank's peak memory by name, in bytes."""
    return {
        "weights": stage.weights,
        **({"quantized weights": stage.quantized_weights} if stage.quantized_weights else {}),
        "gathered weights": stage.fullest.gathered,
        "fp32 gradients": stage.fullest.gradients,
        "fp32 masters and moments": stage.masters + stage.optimizer_state,
        "activations in flight": stage.fullest.activations + (stage.host_activations if stage.on_cpu else 0),
        "logits and loss": stage.fullest.loss,
        "working tensors": stage.fullest.working,
        "pipeline buffers": stage.pipeline_buffers,
        "attention bias": stage.attention_bias,
        "reduction copies": stage.fullest.transient,
    }


def connected_device(name: str, config: RootConfig, nic_gigabytes_per_s: float | None = None) -> Device:
    """Returns a device by name or file, with the precision and the ranks per node of a config.

    Args:
        name: name or file, see `find_device`.
        config: config of the run.
        nic_gigabytes_per_s: network bandwidth per device in GB/s; None uses the device's default.

    Raises:
        ConfigError: the device does not exist, or its peak FLOPs in the run's precision are unknown.
    """
    device = find_device(name)
    if config.cluster.ranks_per_node is not None:
        device = replace(device, ranks_per_node=config.cluster.ranks_per_node)
    if nic_gigabytes_per_s is not None:
        device = replace(device, nic_gigabytes_per_s=nic_gigabytes_per_s)
    return device if config.train.precision is Precision.bf16 else device.in_fp32()


def machine_of(device: Device) -> Machine:
    """Returns the memory of a device as a `Machine`; for a CPU, the memory available on this machine."""
    if device.on_cpu:
        return Machine(available_memory(), per_gpu=False)
    return Machine(int(device.memory_gib * 2**30), per_gpu=True)


def megads_execution(config: RootConfig, device: Device) -> Execution:
    """Returns how megads executes the config on a device.

    On CPUs its kernels accumulate weight gradients inside the GEMM; on GPUs determinism needs another attention kernel.
    `ops.impl=auto` is assumed to find megads' quantization faster than PyTorch's on GPUs.
    """
    if not device.on_cpu:
        quantizes = config.ops.impl in (Implementation.auto, Implementation.fused)
        return replace(
            MEGADS,
            repeatable=config.train.deterministic,
            cuda_graphs=config.ops.cuda_graphs is True,
            fused_quantization=quantizes,
        )
    return replace(MEGADS, fused_wgrad_accumulation=assumes_fused_kernels(config.ops, cuda=False))


def step_model_of(config: RootConfig, device: Device, network: Network = FLAT) -> StepModel:
    """Returns the model of a step of the full batch size, for a config whose layout has no auto values."""
    workload = step_workload(config, cuda=not device.on_cpu)
    return StepModel(config.model, config.parallel, workload, device, network, megads_execution(config, device))


def step_of(config: RootConfig, device: Device, network: Network = FLAT) -> StepEstimate:
    """Returns the estimated step time of a config whose layout has no auto values."""
    return step_model_of(config, device, network).estimate()
