"""What `megads train run.dry_run=true` prints: everything about a run but the run."""

from __future__ import annotations

from megads.config import RootConfig, batch_size_schedule, planned_steps
from megads.frozen_config import config_digest
from megads.launch.preflight import ResolvedRun, chosen_kernels
from megads.launch.preflight_memory import memory_line
from megads.model.config import ModelConfig
from megads.parallel.config import Partition
from megads.plan.parameters import parameter_count
from megads.runtime.environment import share_of_cores
from megads.tools.plan.rank_table import rank_text
from megads.tools.plan.schedule_table import can_be_simulated, outlook_of, schedule_line, schedule_text

_TABLE_WIDTH = 120
"""Characters of the table of ranks."""


def describe_run(resolved: ResolvedRun) -> str:
    """Returns what a run would do, for run.dry_run."""
    config, machine = resolved.planned, resolved.machine
    train, parallel, model = config.train, config.parallel, config.model
    steps = planned_steps(config)
    batches = batch_size_schedule(config)
    samples = batches.samples_after(steps)
    micro_batches = train.global_batch_size // (train.micro_batch_size * parallel.dp)
    threads = config.cluster.threads_per_rank or share_of_cores(parallel.world_size)
    ramp = f", growing from {train.batch_ramp.start}" if train.batch_ramp.start else ""
    vocabulary, memory = "vocabulary and parameters not known before the data is there", "not known either"
    if model.vocab_size is not None:
        vocabulary = f"vocabulary {model.vocab_size:,}, {parameter_count(model):,} parameters"
        memory = memory_line(config, machine)
    rows = {
        "run": config.run.id,
        "writes to": config.run.dir,
        "ranks": f"{parallel.world_size} = {parallel.product}, threads of each {threads}",
        "model": f"{model.num_layers} layers, hidden {model.hidden_size}, {_heads(model)}, {model.position}; "
        f"{vocabulary}",
        "batch": f"{train.global_batch_size} samples{ramp} = {micro_batches} micro-batches x {train.micro_batch_size} "
        f"samples x {parallel.dp} replicas; {train.global_batch_size * train.seq_len:,} tokens a step",
        "memory": memory,
        **_pipeline_rows(config),
        **({"chosen": "; ".join(resolved.choices)} if resolved.choices else {}),
        "length": f"{steps:,} steps, {samples:,} samples, {samples * train.seq_len:,} tokens",
        "precision": str(train.precision),
        "kernels": chosen_kernels(config, machine).text,
        "data": resolved.data.text,
        "config": f"sha256 {config_digest(config)[:8]}",
    }
    lines = ["dry run: nothing was started", *(f"  {name:<10} {value}" for name, value in rows.items())]
    if parallel.partition is Partition.auto:
        lines.append("which rank holds what is not known before the vocabulary is: parallel.partition=auto goes by it")
    elif parallel.world_size > 1:
        lines += [*schedule_text(config, machine, _TABLE_WIDTH), rank_text(config, _TABLE_WIDTH)]
    return "\n".join(lines)


def _heads(model: ModelConfig) -> str:
    """As in 8 heads, or 8 heads on 2 of keys."""
    shared = f" on {model.kv_heads} of keys" if model.queries_per_kv > 1 else ""
    return f"{model.num_heads} heads{shared}"


def _pipeline_rows(config: RootConfig) -> dict[str, str]:
    """What the pipeline's schedule promises, as a row of the dry run; none without a pipeline."""
    if config.parallel.pp == 1 or config.model.vocab_size is None:
        return {}
    if not can_be_simulated(config):
        return {"pipeline": f"{config.parallel.schedule}; a step of so many micro-batches is not simulated"}
    return {"pipeline": schedule_line(outlook_of(config))}
