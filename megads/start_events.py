"""What a start of a run writes into events.jsonl about itself."""

from __future__ import annotations

from dataclasses import asdict

import torch

from megads.config import RootConfig, batch_size_schedule, planned_steps
from megads.data.blend import BlendedSamples
from megads.data.packed import PackedSamples
from megads.data.runs import TrainSource
from megads.engine.interface import TrainEngine
from megads.frozen_config import config_digest
from megads.ops.config import Kernels
from megads.plan.model_size import parameter_count
from megads.runtime.hooks import TrainState
from megads.runtime.metrics import EventWriter


def record_start(
    config: RootConfig,
    engine: TrainEngine,
    device: torch.device,
    kernels: Kernels,
    state: TrainState,
    events: EventWriter,
) -> None:
    """Writes what starts: sizes, layout, device, operators.

    Args:
        config: of the run.
        engine: what trains.
        device: this rank's.
        kernels: which implementation computes each operator.
        state: where the run stands.
        events: of the run.
    """
    events.write(
        "start",
        step=state.step,
        total_steps=planned_steps(config),
        parameters=parameter_count(config.model),
        precision=config.train.precision.value,
        layout=" ".join(f"{axis}{size}" for axis, size in config.parallel.sizes.items()),
        zero_stage=config.parallel.zero_stage,
        stages=engine.bounds,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        ops=kernels.text.removeprefix("ops.impl: "),
        threads_per_rank=torch.get_num_threads(),
        config_digest=config_digest(config),
    )


def record_samples(config: RootConfig, samples: TrainSource, state: TrainState, events: EventWriter) -> None:
    """Writes how documents were packed, which datasets are blended and which samples of the stream are left out.

    Args:
        config: of the run.
        samples: what it trains on.
        state: where the run stands.
        events: of the run.
    """
    for part in samples.parts if isinstance(samples, BlendedSamples) else [samples]:
        if isinstance(part, PackedSamples):
            events.write("packed", dataset=part.dataset.prefix, **asdict(part.counts))
    if not isinstance(samples, BlendedSamples):
        return
    taken = samples.taken(batch_size_schedule(config).samples_after(planned_steps(config)))
    events.write(
        "blend",
        step=state.step,
        datasets=[part.dataset.prefix for part in samples.parts],
        samples_per_epoch=[part.samples_per_epoch for part in samples.parts],
        planned_samples=taken.tolist(),
        order=config.data.order.value,
        mixes=[asdict(mix) for mix in config.data.history],
    )
    if config.data.skip:
        ranges = samples.skips.left_out()
        events.write("skip", step=state.step, left_out=ranges, samples=sum(end - first for first, end in ranges))
