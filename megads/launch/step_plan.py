"""The time of a step of a config: what `megads plan` prints, and `megads report` compares with what was measured."""

from __future__ import annotations

from dataclasses import replace

from megads.config import RootConfig
from megads.launch.preflight_memory import Machine, micro_batches
from megads.ops.resolve import plans_fused
from megads.plan.collectives import FLAT, Network
from megads.plan.devices import Device, find_device
from megads.plan.operators import MEGADS, Execution
from megads.plan.step_estimate import StepEstimate, StepModel, StepShape
from megads.runtime.machine_memory import available_memory
from megads.train_config import Precision


def connected_device(name: str, config: RootConfig, nic_gigabytes_per_s: float | None = None) -> Device:
    """A device by name or file, in the precision of a config and as its cluster connects it.

    Args:
        name: as of `find_device`.
        config: of the run.
        nic_gigabytes_per_s: of the network, where it is not the usual one.

    Raises:
        ConfigError: there is none, or its peak in the run's precision is not known.
    """
    device = find_device(name)
    if config.cluster.ranks_per_node is not None:
        device = replace(device, ranks_per_node=config.cluster.ranks_per_node)
    if nic_gigabytes_per_s is not None:
        device = replace(device, nic_gigabytes_per_s=nic_gigabytes_per_s)
    return device if config.train.precision is Precision.bf16 else device.in_fp32()


def machine_of(device: Device) -> Machine:
    """The memory of a device that was asked for by name."""
    if device.on_cpu:
        return Machine(available_memory(), per_gpu=False)
    return Machine(int(device.memory_gib * 2**30), per_gpu=True)


def execution_of(config: RootConfig, device: Device) -> Execution:
    """How megads runs the config on a device: on CPUs its kernels add gradients inside of products, on GPUs determinism
    takes another kernel for attention."""
    if not device.on_cpu:
        return replace(MEGADS, repeatable=config.train.deterministic, cuda_graphs=config.ops.cuda_graphs)
    return replace(MEGADS, sums_in_product=plans_fused(config.ops, cuda=False))


def shape_of(config: RootConfig) -> StepShape:
    """What a step of the full batch size computes."""
    checkpoint = config.checkpoint
    return StepShape(
        seq_len=config.train.seq_len,
        micro_batch_size=config.train.micro_batch_size,
        micro_batches=micro_batches(config),
        width=2 if config.train.precision is Precision.bf16 else 4,
        save_every_steps=checkpoint.every_steps,
    )


def step_model_of(config: RootConfig, device: Device, network: Network = FLAT) -> StepModel:
    """The step of a config; nothing in the layout is auto any more."""
    return StepModel(config.model, config.parallel, shape_of(config), device, network, execution_of(config, device))


def step_of(config: RootConfig, device: Device, network: Network = FLAT) -> StepEstimate:
    """The time of a step; nothing in the layout is auto any more."""
    return step_model_of(config, device, network).estimate()
