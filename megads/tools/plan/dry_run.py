"""Output of `megads train run.dry_run=true`: a description of the run that would start."""

from __future__ import annotations

import textwrap

from megads.config.frozen import config_digest
from megads.config.phases import phase_at
from megads.config.root import RootConfig, batch_size_schedule, learning_rate, phase_config, planned_steps, run_spans
from megads.config.train import AUTO, Precision
from megads.launch.layout import Machine, useful_threads
from megads.launch.preflight import ResolvedRun, chosen_kernels, saved_step
from megads.model.config import ModelConfig
from megads.model.model_size import parameter_count
from megads.ops.processor import describe_gemm
from megads.optim.schedule import RateScheduleName
from megads.parallel.config import Partition
from megads.runtime.environment import requested_threads, threads_of_rank
from megads.runtime.machine_memory import gib
from megads.runtime.rich_console import output_width
from megads.tools.plan.disk_need import disk_need
from megads.tools.plan.dry_run_warnings import warnings_of
from megads.tools.plan.run_plan import engine_text, memory_text, plan_of
from megads.tools.plan.tables import (
    forecast_of,
    is_simulation_feasible,
    local_checkpoint_memory,
    parameter_group_text,
    phase_text,
    rank_text,
    schedule_line,
    schedule_text,
)

_DRY_RUN_WIDTH = 120
"""Width of the dry run's tables in a file or pipe, in characters."""


def _precision(config: RootConfig, machine: Machine) -> str:
    """The dtype, and on CPUs how GEMMs are computed in it."""
    precision = config.train.precision
    if machine.per_gpu:
        return str(precision)
    ours = chosen_kernels(config, machine).loaded
    return f"{precision}, on {describe_gemm(bf16=precision is Precision.bf16, kernels=ours)}"


def describe_run(resolved: ResolvedRun) -> str:
    """Returns the text of a dry run."""
    config, machine = resolved.planned, resolved.machine
    train, parallel, model = phase_config(config, 0).train, config.parallel, config.model
    micro_batches = train.global_batch_size // (train.micro_batch_size * parallel.dp)
    threads = threads_of_rank(parallel.world_size, config.cluster.threads_per_rank, useful_threads(config))
    by = " (OMP_NUM_THREADS)" if requested_threads() and config.cluster.threads_per_rank is None else ""
    ramp = f", growing from {train.batch_ramp.start}" if train.batch_ramp.start else ""
    need = disk_need(resolved)
    vocabulary, memory = "vocabulary and parameters not known before the data is there", "not known yet"
    if model.vocab_size is not None:
        vocabulary = f"vocabulary {model.vocab_size:,}, {parameter_count(model):,} parameters"
        memory = memory_text(config, machine)
    rows = {
        "run": f"{config.run.id}: {_beginning(resolved)}",
        "writes to": config.run.dir,
        "ranks": f"{parallel.world_size} = {parallel.product}, threads of each {threads}{by}",
        "engine": engine_text(config),
        "model": f"{model.num_layers} layers, hidden {model.hidden_size}, {_heads(model)}, {model.position}; "
        f"{vocabulary}",
        "batch": f"{train.global_batch_size} samples{ramp} = {micro_batches} micro-batches x {train.micro_batch_size} "
        f"samples x {parallel.dp} replicas; {train.global_batch_size * train.seq_len:,} tokens a step",
        "memory": memory,
        **_local_row(config, machine),
        **_pipeline_rows(config),
        **({"chosen": "; ".join(resolved.choices)} if resolved.choices else {}),
        "length": _length(config),
        "rate": _learning_rate(config),
        "precision": _precision(config, machine),
        "kernels": chosen_kernels(config, machine).text,
        "data": resolved.data.text,
        "disk": str(need) if need is not None else "not known before the data is there",
        "config": f"sha256 {config_digest(config)[:8]}",
    }
    lines = ["dry run: nothing was started"]
    for name, value in rows.items():
        row = f"  {name:<10} {value}"
        # A file or a pipe has whole lines.
        width = output_width(len(row))
        lines += textwrap.wrap(row, width, subsequent_indent=" " * 13, break_on_hyphens=False, break_long_words=False)
    if parallel.partition is Partition.auto:
        lines.append("layers of each rank not known yet: parallel.partition=auto depends on the vocabulary size")
    elif parallel.world_size > 1:
        lines += [
            *schedule_text(config, machine, output_width(_DRY_RUN_WIDTH)),
            rank_text(config, output_width(_DRY_RUN_WIDTH), cuda=machine.per_gpu),
        ]
    lines += phase_text(config, output_width(_DRY_RUN_WIDTH), cuda=machine.per_gpu)
    lines += parameter_group_text(config, output_width(_DRY_RUN_WIDTH))
    lines += [f"warning: {warning}" for warning in warnings_of(resolved)]
    return "\n".join(lines)


def _beginning(resolved: ResolvedRun) -> str:
    """Whether a start would continue the run, and from where."""
    load = resolved.asked.checkpoint.load
    step = 0 if load == "none" else saved_step(resolved.run_dir, load)
    return f"continues from step {step:,}" if step else "new"


def _local_row(config: RootConfig, machine: Machine) -> dict[str, str]:
    """Memory of local checkpoints as a row; empty without local checkpoints."""
    if not config.checkpoint.local_every_steps or config.model.vocab_size is None:
        return {}
    size, text = local_checkpoint_memory(config, plan_of(config, cuda=machine.per_gpu))
    return {"local": f"{gib(size)} a rank {text}"}


def _length(config: RootConfig) -> str:
    if (minutes := config.train.minutes) is not None:
        bound = f", at most as many as train.steps = {AUTO} allows" if config.train.steps == AUTO else ""
        return (
            f"as many steps as {minutes:g} min of training take{bound}: the first start times a few steps, then fixes "
            "the number for all starts of the run"
        )
    if not config.train.length_is_known:
        return "not known before the data is there"
    steps = planned_steps(config)
    samples = batch_size_schedule(config).samples_after(steps)
    tokens = samples * config.train.seq_len
    if spans := run_spans(config):
        last = phase_at(spans, max(samples - 1, 0))
        tokens = last.first_token + (samples - last.first_sample) * last.seq_len
    return f"{steps:,} steps, {samples:,} samples, {tokens:,} tokens"


def _learning_rate(config: RootConfig) -> str:
    """For example 0.0003 after a warmup to sample 100 (step 13), cosine to 3e-05 at sample 8,000 (step 1,000)."""
    optim, schedule = config.optim, config.schedule
    if not config.train.length_is_known:
        return f"{optim.lr:g}, {schedule.name}"
    rate, steps_for = learning_rate(config), batch_size_schedule(config).steps_for

    def at(samples: int) -> str:
        return f"sample {samples:,} (step {steps_for(samples):,})"

    warmup = f" after a warmup to {at(rate.warmup)}" if rate.warmup else ""
    stable = f", stable to {at(rate.stable_until)}" if schedule.name == RateScheduleName.wsd else ""
    fall = f", {schedule.decay_shape.value if stable else schedule.name} to {optim.min_lr:g} at {at(rate.end)}"
    if schedule.name in (RateScheduleName.constant, RateScheduleName.inverse_sqrt):
        fall = f", {schedule.name}"
    cycles = f" in {schedule.cycles} cycles" if schedule.cycles > 1 else ""
    later = (
        f"{it.schedule.name} from {at(it.begin)} on, {it.optim.lr:.3g} to {it.optim.min_lr:g}" for it in rate.later
    )
    return "; then ".join([f"{optim.lr:g}{warmup}{stable}{fall}{cycles}", *later])


def _heads(model: ModelConfig) -> str:
    """For example "8 heads", or "8 heads on 2 KV heads" with grouped-query attention."""
    shared = f" on {model.kv_heads} KV heads" if model.queries_per_kv > 1 else ""
    return f"{model.num_heads} heads{shared}"


def _pipeline_rows(config: RootConfig) -> dict[str, str]:
    """Predicted bubble of the pipeline schedule as a row; empty without pipeline parallelism."""
    if config.parallel.pp == 1 or config.model.vocab_size is None:
        return {}
    if not is_simulation_feasible(config):
        return {"pipeline": f"{config.parallel.schedule}; a step with so many micro-batches is not simulated"}
    return {"pipeline": schedule_line(forecast_of(config))}
