"""Estimated step time of a config, for `megads plan` and for the comparison with measured steps in `megads report`."""

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


def execution_of(config: RootConfig, device: Device) -> Execution:
    """Returns how megads executes the config on a device.

    On CPUs its kernels accumulate weight gradients inside the GEMM; on GPUs determinism needs another attention kernel.
    """
    if not device.on_cpu:
        return replace(MEGADS, repeatable=config.train.deterministic, cuda_graphs=config.ops.cuda_graphs)
    return replace(MEGADS, fused_wgrad_accumulation=plans_fused(config.ops, cuda=False))


def shape_of(config: RootConfig) -> StepShape:
    """Returns the shape of a step of the full batch size."""
    checkpoint = config.checkpoint
    return StepShape(
        seq_len=config.train.seq_len,
        micro_batch_size=config.train.micro_batch_size,
        micro_batches=micro_batches(config),
        width=2 if config.train.precision is Precision.bf16 else 4,
        save_every_steps=checkpoint.every_steps,
    )


def step_model_of(config: RootConfig, device: Device, network: Network = FLAT) -> StepModel:
    """Returns the step model of a config whose layout has no auto values."""
    return StepModel(config.model, config.parallel, shape_of(config), device, network, execution_of(config, device))


def step_of(config: RootConfig, device: Device, network: Network = FLAT) -> StepEstimate:
    """Returns the estimated step time of a config whose layout has no auto values."""
    return step_model_of(config, device, network).estimate()
