"""Explicit values for what a config leaves to the machine: threads of a rank, the pipeline partition, recomputation,
CUDA graphs where these are ruled out.

What a run needs in time and memory is known to `megads plan`. Where megads.tools is not installed, `NoRunPlanner` is
used: nothing is refused for its memory, `parallel.recompute=auto` recomputes nothing, `parallel.cp_kind=auto` is
allgather, and `ops.cuda_graphs=auto` is false.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from statistics import fmean
from typing import Protocol, cast

from megads.config.dial import dial_text, explain_dial
from megads.config.root import RootConfig, why_no_graphs
from megads.model.config import ModelConfig
from megads.model.model_size import block_flops, head_flops, recompute_flops
from megads.parallel.config import ContextParallelKind, ParallelConfig, Partition, Recompute
from megads.runtime.machine_memory import available_memory, free_gpu_memory
from megads.runtime.optional_tools import find_tool

FLOPS_PER_THREAD = 50e6
"""FLOPs of a block's forward pass over a micro-batch per CPU thread. With fewer, waking threads costs as much as they
save: on two cores a second thread made a step 12% faster at 50 M FLOPs per block and 25% faster at 200 M."""


def useful_threads(config: RootConfig) -> int | None:
    """Returns the number of CPU threads per rank that the shapes of the run occupy, at least one.

    Args:
        config: a config whose model need not be complete; its vocabulary may still be unknown.

    Returns:
        None for a plugin's block, which would have to be built.
    """
    model, train, parallel = config.model, config.train, config.parallel
    if model.block.is_custom:
        return None
    tokens = train.micro_batch_size * train.seq_len / (parallel.cp * parallel.tp)
    forward = sum(count * block_flops(kind, train.seq_len).forward for kind, count in model.layer_kinds())
    return max(1, int(tokens * forward / model.num_layers / FLOPS_PER_THREAD))


@dataclass(frozen=True)
class Machine:
    """Memory of the machine that ranks run on.

    Attributes:
        available: free bytes of the fullest GPU, or of the machine, which all ranks share.
        per_gpu: whether ranks are on GPUs.
        ranks_per_gpu: number of ranks that share a GPU.
    """

    available: int
    per_gpu: bool
    ranks_per_gpu: int = 1


def this_machine(nodes: int = 1, ranks_per_gpu: int = 1) -> Machine:
    """Returns the machine on which `megads train` would start ranks: this machine's GPUs, else its CPU.

    Args:
        nodes: number of identical machines over which the ranks are evenly distributed.
        ranks_per_gpu: number of ranks that share a GPU.
    """
    free_gpus = free_gpu_memory()
    if free_gpus:
        return Machine(min(free_gpus), per_gpu=True, ranks_per_gpu=ranks_per_gpu)
    return Machine(nodes * available_memory(), per_gpu=False)


class RunPlanner(Protocol):
    """What starting a run asks of `megads plan`."""

    def choose_context_kind(self, config: RootConfig) -> tuple[RootConfig, str]:
        """Replaces parallel.cp_kind=auto by an explicit value; the second item explains it, empty for no choice."""
        ...

    def choose_recompute(self, config: RootConfig, machine: Machine) -> tuple[RootConfig, str]:
        """Replaces parallel.recompute=auto by an explicit value; the second item explains it, empty for no choice."""
        ...

    def graphs_fit(self, config: RootConfig, machine: Machine) -> tuple[bool, str]:
        """Returns whether a run fits a machine's GPUs with CUDA graphs, and a text with the memory."""
        ...

    def refuse_unfit(self, config: RootConfig, machine: Machine) -> None:
        """Raises ConfigError if the run does not fit the machine."""
        ...


class NoRunPlanner:
    """Takes the place of `megads plan` where it is not installed: time and memory of a run are unknown."""

    def choose_context_kind(self, config: RootConfig) -> tuple[RootConfig, str]:
        if config.parallel.cp_kind is not ContextParallelKind.auto:
            return config, ""
        parallel = dataclasses.replace(config.parallel, cp_kind=ContextParallelKind.allgather)
        line = "parallel.cp_kind=auto is allgather: megads.tools, which estimates the others, is not installed"
        return dataclasses.replace(config, parallel=parallel), line if parallel.cp > 1 else ""

    def choose_recompute(self, config: RootConfig, machine: Machine) -> tuple[RootConfig, str]:
        if config.parallel.recompute is not Recompute.auto:
            return config, ""
        parallel = dataclasses.replace(config.parallel, recompute=Recompute.none)
        line = "parallel.recompute=auto recomputes nothing: megads.tools, which plans memory, is not installed"
        return dataclasses.replace(config, parallel=parallel), line

    def graphs_fit(self, config: RootConfig, machine: Machine) -> tuple[bool, str]:
        return False, "megads.tools, which measures them, is not installed"

    def refuse_unfit(self, config: RootConfig, machine: Machine) -> None:
        """Does nothing."""


def rule_out_graphs(config: RootConfig, machine: Machine | None) -> tuple[RootConfig, str]:
    """Replaces ops.cuda_graphs=auto by false where CUDA graphs are not supported, or do not fit.

    Args:
        config: config of the run.
        machine: machine that the run starts on; None if unknown.

    Returns:
        The config, and a line that explains false, or says that the run will measure. The line is empty if the value is
        not auto, or it is not known whether graphs fit.
    """
    if not config.ops.graphs_undecided:
        return config, ""
    if machine is not None and not machine.per_gpu:
        reason = "the model is on a CPU"
    elif reason := why_no_graphs(config):
        reason = f"not supported with {reason}"
    elif machine is None or config.model.vocab_size is None:
        return config, ""
    else:
        fits, reason = run_planner().graphs_fit(config, machine)
        if fits:
            return config, f"ops.cuda_graphs=auto is decided by measurement after the first steps: {reason}"
    eager = dataclasses.replace(config, ops=dataclasses.replace(config.ops, cuda_graphs=False))
    return eager, f"ops.cuda_graphs=auto is false: {reason}"


def run_planner() -> RunPlanner:
    """Returns `megads.tools.plan.run_plan`, or `NoRunPlanner` where it is not installed."""
    found = find_tool("plan.run_plan")
    return NoRunPlanner() if found is None else cast(RunPlanner, found)


def resolve_auto(config: RootConfig, machine: Machine | None) -> tuple[RootConfig, list[str]]:
    """Replaces auto values of the engine and the layout by explicit ones: the partition, the kind of context
    parallelism, then recomputation, and CUDA graphs where they are ruled out.

    Args:
        config: config of the run.
        machine: machine that the run starts on; None if unknown, which leaves recomputation unchanged.

    Returns:
        The config, and lines that explain the values, beginning with those of a dial, which are one text of several
        lines; none if there is no dial and nothing is auto, or nothing can be chosen yet.
    """
    recipe = explain_dial(config)
    choices = [dial_text(recipe)] if recipe else []
    config = dataclasses.replace(config, engine=config.resolved_engine)
    if config.parallel.partition is Partition.auto and config.model.vocab_size is not None:
        parallel = with_estimated_partition(config.model, config.parallel, config.train.seq_len)
        config = dataclasses.replace(config, parallel=parallel)
        _, *blocks, head = parallel.layer_costs or (0.0, 1.0, 0.0)
        others = f", a block {min(blocks):.3g} to {max(blocks):.3g} of the mean" if len(set(blocks)) > 1 else ""
        choices.append(
            f"parallel.partition=auto: by FLOPs the head weighs {head / fmean(blocks):.3g} blocks, the embedding "
            f"none{others}"
        )
    config, choice = run_planner().choose_context_kind(config)
    choices += [choice] if choice else []
    if machine is not None:
        config, choice = run_planner().choose_recompute(config, machine)
        choices += [choice] if choice else []
    config, choice = rule_out_graphs(config, machine)
    choices += [choice] if choice else []
    return config, choices


def with_estimated_partition(model: ModelConfig, parallel: ParallelConfig, seq_len: int) -> ParallelConfig:
    """Replaces parallel.partition=auto by the layers' costs in FLOPs; returns other layouts unchanged.

    Recomputation is included in the block cost only if it applies to all blocks.

    Args:
        model: model config.
        parallel: the layout; `recompute` may still be auto.
        seq_len: tokens per sample.
    """
    if parallel.partition is not Partition.auto:
        return parallel
    everywhere = parallel.recompute_interval == 1 and parallel.recompute_blocks is None
    mode = parallel.recompute if everywhere and parallel.recompute is not Recompute.auto else Recompute.none
    kinds = [block_flops(kind, seq_len).total + recompute_flops(kind, seq_len)[mode] for kind, _ in model.layer_kinds()]
    blocks = [kinds[model.kind_of(index)] for index in range(model.num_layers)]
    mean = sum(blocks) / model.num_layers
    head = round(head_flops(model).total / mean, 4)
    costs = [0.0, *((round(block / mean, 4) for block in blocks) if len(set(kinds)) > 1 else [1.0]), head]
    return dataclasses.replace(parallel, partition=Partition.weighted, layer_costs=costs)
