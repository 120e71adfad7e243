"""Events of a start: `start` and `end`, and those about its data and training phase."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import torch

from megads.config.phases import NEXT_PHASE, phase_at
from megads.config.root import (
    RootConfig,
    planned_steps,
    run_spans,
)
from megads.data.indexed.stream import StreamMeter
from megads.data.sampling.blend import BlendedSamples, ContinuedOrder
from megads.data.sampling.packed import PackedSamples
from megads.data.sampling.runs import TrainSource
from megads.engine.interface import TrainEngine
from megads.model.model_size import parameter_count
from megads.ops.config import Float8Recipe, Kernels
from megads.runtime.hooks import TrainState
from megads.runtime.metrics import EventWriter
from megads.runtime.stop import clear_stop
from megads.train.setup import end_sample


def record_start(
    config: RootConfig,
    digest: str,
    engine: TrainEngine,
    device: torch.device,
    kernels: Kernels,
    state: TrainState,
    events: EventWriter,
) -> None:
    """Writes the `start` event: model size, layout, device, operators."""
    events.write(
        "start",
        step=state.step,
        total_steps=planned_steps(config),
        parameters=parameter_count(config.model),
        precision=config.train.precision.value,
        **({} if config.train.fp8 is Float8Recipe.none else {"fp8": config.train.fp8.value}),
        layout=" ".join(f"{axis}{size}" for axis, size in config.parallel.sizes.items()),
        zero_stage=config.parallel.zero_stage,
        engine=config.resolved_engine.value,
        stages=engine.bounds,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        ops=kernels.text.removeprefix("ops.impl: "),
        threads_per_rank=torch.get_num_threads(),
        checkpoints=config.checkpoint.when,
        config_digest=digest,
    )


def record_samples(config: RootConfig, samples: TrainSource, state: TrainState, events: EventWriter) -> None:
    """Writes the events about packed documents, blended datasets, skipped samples and a training phase that begins."""
    _record_phase(config, samples, state, events)
    for part in samples.parts if isinstance(samples, BlendedSamples) else [samples]:
        if isinstance(part, PackedSamples):
            events.write("packed", dataset=part.dataset.name, **asdict(part.counts))
    if not isinstance(samples, BlendedSamples):
        return
    taken = samples.counts_by_dataset(end_sample(config, state))
    events.write(
        "blend",
        step=state.step,
        datasets=[part.dataset.name for part in samples.parts],
        samples_per_epoch=[part.samples_per_epoch for part in samples.parts],
        planned_samples=taken.tolist(),
        order=config.data.order.value,
        mixes=[asdict(mix) for mix in config.data.history],
    )
    if config.data.skip:
        ranges = samples.skips.left_out()
        events.write("skip", step=state.step, left_out=ranges, samples=sum(end - first for first, end in ranges))


def _record_phase(config: RootConfig, samples: TrainSource, state: TrainState, events: EventWriter) -> None:
    """Writes the `training_phase` event if a phase begins, with the tokens skipped between it and the one before."""
    spans = run_spans(config)
    span = phase_at(spans, state.samples) if spans else None
    if span is None or span.first_sample != state.samples:
        return
    left_out = [0]
    if isinstance(samples, BlendedSamples) and isinstance(samples.order, ContinuedOrder):
        left_out = samples.order.left_out_tokens.tolist()
    events.write(
        "training_phase",
        step=state.step,
        samples=state.samples,
        phase=span.place + 1,
        phases=len(spans),
        global_batch_size=span.global_batch_size,
        seq_len=span.seq_len,
        left_out_tokens=sum(left_out),
        message=f"{span.place + 1} of {len(spans)} begins after step "
        f"{state.step:,}: {span.global_batch_size:,} samples of {span.seq_len:,} tokens a step",
    )


def record_end(
    config: RootConfig, state: TrainState, reason: str, events: EventWriter, run_dir: Path, meter: StreamMeter
) -> None:
    """Writes the `end` event of this start, with the next training phase if there is one, and clears a stop request."""
    spans, more = run_spans(config), {}
    if spans and not reason and state.step < planned_steps(config):
        more = {NEXT_PHASE: phase_at(spans, state.samples).place + 1}
    if config.data.urls:
        events.write("streamed", level="debug", step=state.step, datasets=config.data.urls, **meter.total())
    events.write("end", step=state.step, stopped=reason, **more)
    if reason and events.enabled:
        clear_stop(run_dir)
