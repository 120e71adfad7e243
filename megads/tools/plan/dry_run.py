"""Output of `megads train run.dry_run=true`: the run that would start, and warnings if it looks misconfigured.

A dry run shows all warnings, a start only `warmup_warnings`; none prevents a start.
"""

from __future__ import annotations

import textwrap
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from megads.api import (
    CONFIG_FILE,
    ConfigError,
    MegadsError,
    Partition,
    Precision,
    RootConfig,
    batch_size_schedule,
    config_digest,
    describe_gemm,
    gib,
    list_checkpoints,
    load_frozen,
    output_width,
    phase_config,
    planned_steps,
    read_sidecar,
    requested_threads,
)
from megads.config.phases import phase_at
from megads.config.root import learning_rate, run_spans
from megads.config.train import AUTO
from megads.data.indexed.stream import local_prefix
from megads.launch.layout import useful_threads
from megads.launch.preflight import ResolvedRun, chosen_kernels, saved_step
from megads.launch.run_length import warmup_warnings
from megads.optim.schedule import LearningRate, RateScheduleName
from megads.runtime.environment import threads_of_rank
from megads.tools.plan.disk_need import disk_need
from megads.tools.plan.run_plan import engine_text, memory_text, parameter_text, plan_of
from megads.tools.plan.tables import (
    MAX_COMPARED,
    candidates,
    forecast_of,
    has_groups,
    is_simulation_feasible,
    local_checkpoint_memory,
    parameter_group_table,
    phase_table,
    rank_table,
    schedule_line,
    schedule_table,
    text_of,
)

_FAR_BELOW = 4
_VOCABULARY_SHARE, _VOCABULARY_ROWS = 1.1, 256
"""Factor and constant up to which rows beyond the tokenizer's tokens are taken for padding or reserved ids."""
_DRY_RUN_WIDTH = 120
"""Width of the dry run's tables in a file or pipe, in characters."""


def describe_run(resolved: ResolvedRun) -> str:
    """Returns the text of a dry run."""
    config, machine, kernels = resolved.planned, resolved.machine, chosen_kernels(resolved.planned, resolved.machine)
    train, parallel, model = phase_config(config, 0).train, config.parallel, config.model
    load = resolved.asked.checkpoint.load
    step = 0 if load == "none" else saved_step(resolved.run_dir, load)
    micro_batches = train.global_batch_size // (train.micro_batch_size * parallel.dp)
    threads = threads_of_rank(parallel.world_size, config.cluster.threads_per_rank, useful_threads(config))
    by = " (OMP_NUM_THREADS)" if requested_threads() and config.cluster.threads_per_rank is None else ""
    ramp = f", growing from {train.batch_ramp.start}" if train.batch_ramp.start else ""
    heads = f"{model.num_heads} heads" + (f" on {model.kv_heads} KV heads" if model.queries_per_kv > 1 else "")
    need, is_sized = disk_need(resolved), model.vocab_size is not None
    vocabulary, memory = "vocabulary and parameters not known before the data is there", "not known yet"
    if is_sized:
        vocabulary = f"vocabulary {model.vocab_size:,}, {parameter_text(model)}"
        memory = memory_text(config, machine)
    rows = {
        "run": f"{config.run.id}: {f'continues from step {step:,}' if step else 'new'}",
        "writes to": config.run.dir,
        "ranks": f"{parallel.world_size} = {parallel.product}, threads of each {threads}{by}",
        "engine": engine_text(config),
        "model": f"{model.num_layers} layers, hidden {model.hidden_size}, {heads}, {model.position}; {vocabulary}",
        "batch": f"{train.global_batch_size} samples{ramp} = {micro_batches} micro-batches x {train.micro_batch_size} "
        f"samples x {parallel.dp} replicas; {train.global_batch_size * train.seq_len:,} tokens a step",
        "memory": memory,
    }
    if config.checkpoint.local_every_steps and is_sized:
        size, text = local_checkpoint_memory(config, plan_of(config, cuda=machine.per_gpu))
        rows["local"] = f"{gib(size)} a rank {text}"
    if parallel.pp > 1 and is_sized:
        rows["pipeline"] = f"{parallel.schedule}; a step with so many micro-batches is not simulated"
        if is_simulation_feasible(config):
            rows["pipeline"] = schedule_line(forecast_of(config))
    if chosen := [text for text in resolved.choices if "\n" not in text]:
        rows["chosen"] = "; ".join(chosen)
    bf16 = config.train.precision is Precision.bf16
    gemms = "" if machine.per_gpu else f", on {describe_gemm(bf16=bf16, kernels=kernels.loaded)}"
    rows |= {
        "length": _length(config),
        "rate": _learning_rate(config),
        "precision": f"{config.train.precision}{gemms}",
        "kernels": kernels.text,
        "data": resolved.data.text,
        "disk": str(need) if need is not None else "not known before the data is there",
        "config": f"sha256 {config_digest(config)[:8]}",
    }
    lines, width = ["dry run: nothing was started"], output_width(_DRY_RUN_WIDTH)
    for name, value in rows.items():
        row = f"  {name:<10} {value}"
        lines += textwrap.wrap(
            row,
            output_width(len(row)),  # a file or a pipe has whole lines
            subsequent_indent=" " * 13,
            break_on_hyphens=False,
            break_long_words=False,
        )
    lines += [text for text in resolved.choices if "\n" in text]
    tables = []
    if parallel.partition is Partition.auto:
        lines.append("layers of each rank not known yet: parallel.partition=auto depends on the vocabulary size")
    elif parallel.world_size > 1:
        if parallel.pp > 1 and is_sized and is_simulation_feasible(config, MAX_COMPARED):
            tables.append(schedule_table([one for one in candidates(config, machine) if one.outlook is not None]))
        tables.append(rank_table(config, cuda=machine.per_gpu))
    if config.train.phases:
        tables.append(phase_table(config, cuda=machine.per_gpu))
    if has_groups(config):
        tables.append(parameter_group_table(config))
    lines += [text_of(table, width) for table in tables]
    warnings = plan_warnings(config, _tokenizer_tokens(resolved), _last_start(config, resolved.run_dir))
    warnings += [need.warning] if need is not None and need.warning else []
    return "\n".join([*lines, *(f"warning: {warning}" for warning in warnings)])


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


@dataclass(frozen=True)
class LastStart:
    """State left by an earlier start of the same run.

    Attributes:
        step: step of the newest checkpoint.
        config: config of that start.
    """

    step: int
    config: RootConfig


def plan_warnings(config: RootConfig, tokenizer_tokens: int | None = None, last: LastStart | None = None) -> list[str]:
    """Returns the warnings about a plan, one line each, with the value and the remedy.

    Args:
        config: config of the run.
        tokenizer_tokens: vocabulary size of the data's tokenizer; None if unknown.
        last: the start that this one continues; None for a new run.
    """
    found = [*_model_warnings(config, tokenizer_tokens)]
    if config.train.length_is_known:
        found += [*warmup_warnings(config), *_zero_lr_warnings(config)]
        found += _continuation_warnings(config, last) if last is not None else ()
    return found


def _model_warnings(config: RootConfig, tokenizer_tokens: int | None) -> Iterator[str]:
    longest, rows = config.model.max_seq_len, config.model.vocab_size
    seq_len = max((span.seq_len for span in run_spans(config)), default=config.train.seq_len)
    if seq_len * _FAR_BELOW <= longest:
        yield (
            f"train.seq_len = {seq_len:,} is far below model.max_seq_len = {longest:,}: the model never trains on "
            f"texts of more than {seq_len:,} tokens; raise train.seq_len, or lower model.max_seq_len"
        )
    if config.model.scores_in_memory:
        capped = config.model.attention_logit_softcap is not None
        which = "model.attention_logit_softcap" if capped else "model.attention_sinks"
        parallel, train = config.parallel, config.train
        scores = train.micro_batch_size * config.model.num_heads * seq_len**2 // (parallel.tp * parallel.cp)
        size = scores * (2 if train.precision is Precision.bf16 else 4) / 2**20
        yield (
            f"{which} is set, which no fused attention kernel supports: the attention scores of a micro-batch "
            f"are materialized, {size:,.1f} MiB per block; a smaller train.seq_len or train.micro_batch_size takes less"
        )
    if rows is None or tokenizer_tokens is None:
        return
    if rows > _VOCABULARY_SHARE * tokenizer_tokens + _VOCABULARY_ROWS:
        yield (
            f"model.vocab_size = {rows:,}, but the tokenizer has {tokenizer_tokens:,} tokens: the other "
            f"{rows - tokenizer_tokens:,} rows are never trained; set model.vocab_size=null, which takes the "
            "tokenizer's, or give the model's own tokenizer as tokenizer.path"
        )


def _zero_lr_warnings(config: RootConfig) -> Iterator[str]:
    last, rate = planned_steps(config), learning_rate(config)
    if last == 0 or _lr_at(config, rate, last) > 0:
        return
    # A learning rate that has reached 0 stays there, except at the ends of cycles before the last one.
    steps = range(1, last + 1) if config.schedule.cycles == 1 and not rate.later else range(last, last + 1)
    first = steps[bisect_left(steps, True, key=lambda step: _lr_at(config, rate, step) == 0)]
    which = f"steps {first:,} to {last:,}, which change" if first < last else f"step {last:,}, the last, which changes"
    yield (
        f"the learning rate is 0 in {which} no weight: set optim.min_lr, for example to a tenth of "
        f"optim.lr: optim.min_lr={config.optim.lr / 10:g}"
    )


def _continuation_warnings(config: RootConfig, last: LastStart) -> Iterator[str]:
    steps, step = planned_steps(config), last.step
    if step > steps:
        yield (
            f"the run's newest checkpoint is of step {step:,}, beyond train.steps = {steps:,}: nothing would be "
            "trained; raise the length, or start another run with run.id=<name>"
        )
        return
    rate, end = learning_rate(config), learning_rate(last.config).end
    now, before = (_lr_at(config, some, step + 1) for some in (rate, replace(rate, end=end)))
    if step < steps and now != before:
        yield (
            f"the decay of the learning rate was planned to end at {end:,} samples, and now ends at {rate.end:,}: at "
            f"step {step + 1:,} the rate is {now:.3g} in place of {before:.3g}; schedule.decay_samples={end} "
            "keeps the plan, and optim.min_lr is then the rate after its end"
        )


def _lr_at(config: RootConfig, rate: LearningRate, step: int) -> float:
    return rate(batch_size_schedule(config).samples_after(step))


def _tokenizer_tokens(resolved: ResolvedRun) -> int | None:
    if resolved.data.vocab_size is not None or not resolved.config.data.train:
        return resolved.data.vocab_size
    try:
        data = resolved.config.data
        sidecar = read_sidecar(local_prefix(data.train[0].path, data.stream))
    except MegadsError:
        return None
    return sidecar.vocab_size if sidecar is not None else None


def _last_start(config: RootConfig, run_dir: Path) -> LastStart | None:
    checkpoints = list_checkpoints(run_dir) if config.checkpoint.load == "auto" else {}
    if not checkpoints:
        return None
    try:
        return LastStart(max(checkpoints), load_frozen(run_dir / CONFIG_FILE, complete=False))
    except ConfigError:
        return None
