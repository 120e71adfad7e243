"""The root schema of `megads train`: composes the config of every package, and checks settings across sections."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from megads.checkpoint.config import CheckpointConfig
from megads.config.layout_checks import check_layout, check_operators, why_no_cuda_graphs
from megads.config.phases import (
    PhaseSpan,
    check_phases,
    check_positions,
    check_skips,
    check_weights,
    expanded_phases,
    parse_phases,
    phase_at,
    phase_spans,
    phase_stream_starts,
    sample_at_token,
    steps_of_length,
    values_in_force,
    with_mixes,
    with_phase_rates,
    with_values,
)
from megads.config.train import DialConfig, Precision, TrainConfig
from megads.data.config import DataConfig
from megads.data.sampling.batch_size import BatchSizeSchedule
from megads.data.tokenizer_config import SMALLEST_VOCABULARY, SMALLEST_WANTED, Engine, TextTokenizerConfig
from megads.engine.deepspeed_options import check_deepspeed_options
from megads.engine.unsupported import EngineRequest, check_engine
from megads.errors import ConfigError
from megads.evaluate.config import EvaluationConfig, loss_key
from megads.model.config import ModelConfig, Position
from megads.model.model_size import shapes_of_any_vocabulary
from megads.ops.attention_kinds import AttentionWork, unsupported_reason
from megads.ops.config import Implementation, OpsConfig
from megads.optim.config import OptimConfig
from megads.optim.groups import require_matches
from megads.optim.schedule import LearningRate, RateScheduleName, ScheduleConfig
from megads.parallel.config import EngineKind, ParallelConfig, exchanged_kv_heads, resolve_engine
from megads.resilience.config import ResilienceConfig
from megads.runtime.config import ClusterConfig, ConsoleKind, LoggingConfig, RunConfig
from megads.runtime.registry import BLOCKS, HOOKS, OPTIMIZERS, SCHEDULES, TRACKERS, import_plugins

if TYPE_CHECKING:
    from megads.data.indexed.recorded import DataRecord
    from megads.data.sampling.runs import TrainSource, ValidationSource


@dataclass
class RootConfig:
    """All settings of `megads train`."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """Model architecture."""
    engine: EngineKind = EngineKind.auto
    """Training engine. native: megads' own, for ZeRO-0 and 1, with every pipeline schedule; imports DeepSpeed only for
    optim.impl=deepspeed. deepspeed: DeepSpeed's PipelineEngine with 1F1B for ZeRO-0 and 1, its ZeRO engine for ZeRO-2
    and 3. auto: native for ZeRO-0 and 1, deepspeed for ZeRO-2 and 3, which only DeepSpeed has. Checkpoints are the
    same, so a run can switch (docs/layouts.md)."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """Parallel layout."""
    ops: OpsConfig = field(default_factory=OpsConfig)
    """Kernel implementations."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """Length and batch sizes of training."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """Optimizer."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Learning-rate schedule."""
    data: DataConfig = field(default_factory=DataConfig)
    """Training and validation data."""
    tokenizer: TextTokenizerConfig = field(default_factory=TextTokenizerConfig)
    """Tokenizer."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Saving and loading checkpoints."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """Validation."""
    run: RunConfig = field(default_factory=RunConfig)
    """Run id and run directory."""
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    """Logging and trackers."""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    """Nodes, devices, restarts and timeouts."""
    resilience: ResilienceConfig = field(default_factory=ResilienceConfig)
    """Detection of numerical faults."""
    dial: DialConfig = field(default_factory=DialConfig)
    """One number that sets a whole recipe, with experiment=dial."""
    plugins: list[str] = field(default_factory=list)
    """Your own modules to import; they register hooks, model blocks, optimizers, schedules, readers or trackers
    (docs/extending.md)."""
    hooks: dict[str, Any] = field(default_factory=dict)
    """Hooks to run from your plugins, with their settings: hooks.<name>.<setting>=<value>, or hooks.<name>={}."""

    deepspeed: dict[str, Any] = field(default_factory=dict)
    """Extra DeepSpeed settings for engine=deepspeed, e.g. deepspeed.zero_optimization.reduce_bucket_size=50000000.
    Settings that would change the computed result are rejected."""

    @property
    def resolved_engine(self) -> EngineKind:
        """The engine that trains, native or deepspeed."""
        return resolve_engine(self.engine, self.parallel.zero_stage)

    def resolve_plugins(self) -> None:
        """Imports the plugins; validates and completes the options of every registered component in the config.

        Raises:
            ConfigError: a plugin cannot be imported, a component is not registered, or one of its options is invalid.
        """
        import_plugins(self.plugins)
        optim, schedule, block = self.optim, self.schedule, self.model.block
        block.options = BLOCKS.complete(block.name, block.options, "model.block.name", "model.block.options")
        optim.options = OPTIMIZERS.complete(optim.name, optim.options, "optim.name", "optim.options")
        schedule.options = SCHEDULES.complete(schedule.name, schedule.options, "schedule.name", "schedule.options")
        self.data.reader.complete_options("data.reader")
        HOOKS.complete_all(self.hooks, "hooks")
        TRACKERS.complete_all(self.logging.trackers, "logging.trackers")


def check_config(config: RootConfig) -> None:
    """Checks every section of the config, then constraints across sections.

    Raises:
        ConfigError: the config cannot be run; gives the value, the reason and the remedy.
    """
    computed = (config.model, config.parallel, config.ops, config.train, config.optim, config.schedule)
    read_and_kept = (config.data, config.tokenizer, config.checkpoint, config.evaluation, config.run, config.logging)
    for part in (*computed, *read_and_kept, config.cluster, config.resilience, config.dial):
        part.check()
    _check_engine(config)
    _check_optimizer(config)
    config.resilience.check_repeatable(config.train.deterministic)
    _check_run_phases(config)
    for_each_phase(config, _check_across_sections)
    check_schedule(config)
    _check_vocabulary(config)
    _check_best(config)
    _check_profile(config)
    _check_debugging(config)


def _check_across_sections(config: RootConfig) -> None:
    """Checks constraints across sections whose values may differ between training phases."""
    config.train.check_sizes()
    config.model.check()
    config.parallel.check()
    check_attention(config)
    check_operators(config.ops, config.train.float8, config.model, config.parallel)
    check_layout(config.model, config.parallel, config.train.seq_len)
    _check_batches(config)
    _check_positions(config)


def for_each_phase(config: RootConfig, check: Callable[[RootConfig], object]) -> None:
    """Calls a check with the config of every training phase, or with the run's config if it has no phases.

    Raises:
        ConfigError: the check failed; the message starts with the name of the phase.
    """
    if not config.train.phases:
        check(config)
    for phase in parse_phases(config.train.phases):
        of_phase = phase_config(config, phase.place)
        try:
            check(of_phase)
        except ConfigError as error:
            raise ConfigError(f"{phase.name}: {error}") from error


def _check_run_phases(config: RootConfig) -> None:
    """Checks the order of the training phases and their compatibility with the rest of the config."""
    if phases := parse_phases(config.train.phases):
        # First of all, as the checks below compute with these values.
        for_each_phase(config, lambda of_phase: of_phase.train.check_sizes())
        for_each_phase(config, lambda of_phase: _check_ranks_of_phase(config, of_phase))
        check_positions(phases, config.model)
        check_phases(phases, run_spans(config), config.train, config.data, config.parallel.recompute)
        learning_rate(config)
    check_weights(config.data, phases)


def _check_ranks_of_phase(config: RootConfig, of_phase: RootConfig) -> None:
    """Checks that a phase has as many ranks as the run, which keeps its machines."""
    if of_phase.parallel.world_size != config.parallel.world_size:
        raise ConfigError(
            f"{of_phase.parallel.product} = {of_phase.parallel.world_size} ranks, but the run has "
            f"{config.parallel.product} = {config.parallel.world_size}: a phase keeps the ranks of the run; change "
            "parallel.cp and parallel.dp of the phase so that their product stays the same"
        )


def why_no_graphs(config: RootConfig) -> str:
    """Why CUDA graphs are not supported in some training phase of a run, and what to set; empty if they are."""
    reasons = list[str]()

    def note(of_phase: RootConfig) -> None:
        float8, engine = of_phase.train.fp8, of_phase.resolved_engine
        reasons.append(why_no_cuda_graphs(of_phase.model, of_phase.parallel, float8, engine))

    for_each_phase(config, note)
    return next(filter(None, reasons), "")


def check_shape(config: RootConfig) -> None:
    """Checks what a plan needs: model, layout, batch sizes and cluster, but not data or run length.

    Raises:
        ConfigError: the model cannot be built in this layout.
    """
    config.model.check()
    config.parallel.check()
    config.ops.check()
    config.optim.check()
    config.train.check_sizes()
    config.cluster.check()
    if config.optim.groups:
        require_matches(config.optim, shapes_of_any_vocabulary(config.model))
    _check_engine(config)
    for_each_phase(config, _check_shape_of_phase)


def _check_shape_of_phase(config: RootConfig) -> None:
    config.train.check_sizes()
    check_operators(config.ops, config.train.float8, config.model, config.parallel)
    check_layout(config.model, config.parallel, config.train.seq_len)
    _check_batches(config)
    _check_positions(config)


def attention_work(
    config: RootConfig, kind: ModelConfig, *, cuda: bool | None = None, fused: bool | None = None
) -> AttentionWork:
    """Returns the requirements of a run on the attention kernel of some layers, per rank.

    Args:
        config: config of the run.
        kind: settings of these layers, see `ModelConfig.layer_kinds`.
        cuda: whether ranks compute on GPUs; None if unknown.
        fused: whether megads' own kernels are loaded; None follows ops.impl.
    """
    parallel, work = config.parallel, kind.attention_work(config.parallel.tp)
    exchanging = parallel.ulysses_size
    return replace(
        work,
        heads=work.heads // exchanging,
        kv_heads=exchanged_kv_heads(work.kv_heads, exchanging) // exchanging,
        bf16=config.train.precision is Precision.bf16,
        cuda=cuda,
        impl=config.ops.impl if fused is None else Implementation.fused if fused else Implementation.torch,
        seq_len=config.train.seq_len,
        micro_batch_size=config.train.micro_batch_size,
        context=parallel.core_cp,
        ring=parallel.is_ring,
        documents=config.data.document_mask,
        deterministic=config.train.deterministic,
    )


def check_attention(config: RootConfig, *, cuda: bool | None = None) -> None:
    """Raises ConfigError if the requested attention kernel does not support the run; see `attention_work`."""
    for kind, _ in config.model.layer_kinds():
        if reason := unsupported_reason(kind.attention, attention_work(config, kind, cuda=cuda)):
            raise ConfigError(f"model.attention = {kind.attention} {reason}")


def _check_engine(config: RootConfig) -> None:
    """Checks what the engine supports, and the settings passed on to DeepSpeed."""
    bf16 = config.train.precision is Precision.bf16
    check_engine(
        EngineRequest(
            config.engine, config.model, config.parallel, config.optim, config.ops, bf16=bf16, fp8=config.train.fp8
        )
    )
    check_deepspeed_options(config.deepspeed, config.resolved_engine, config.parallel.zero_stage, bf16=bf16)


def _check_optimizer(config: RootConfig) -> None:
    """Checks the optimizer against model block and muP, its parameter groups, and weight averaging."""
    if config.optim.groups:
        require_matches(config.optim, shapes_of_any_vocabulary(config.model))
    if config.optim.is_muon and config.model.block.is_custom:
        raise ConfigError(
            f"optim.name = muon is not supported with model.block.name = {config.model.block.name}: it is unknown "
            "which parameters of a plugin's block are matrices, and how many matrices each one fuses; use "
            "optim.name=adamw, lamb or lion"
        )
    if config.model.mup.base_width is not None:
        is_known = config.optim.name in ("adamw", "lion", "muon")
        if not is_known or config.optim.options.get("qkv") == "head":
            given = "options.qkv = head" if is_known else f"name = {config.optim.name}"
            raise ConfigError(
                f"optim.{given} is not supported with model.mup.base_width: the scaling of its updates with the width "
                "is not established; use optim.name=adamw, lion or muon (qkv=projection)"
            )
    if config.evaluation.average and config.optim.ema_decay is None:
        raise ConfigError(
            "evaluation.average = true validates a running average of the weights, but optim.ema_decay = null keeps "
            "none: set optim.ema_decay, for example 0.9999, or remove evaluation.average"
        )


def _check_batches(config: RootConfig) -> None:
    """Every global batch, those of the ramp included, must split evenly into micro-batches of every replica."""
    schedule = batch_size_schedule(config)
    # With training phases, only the batch size of this phase is checked.
    schedule = BatchSizeSchedule(config.train.global_batch_size) if schedule.changes else schedule
    schedule.check(config.train.micro_batch_size, config.parallel.dp)


def check_schedule(config: RootConfig) -> None:
    """Checks the learning-rate schedule in samples, whichever units it is given in.

    Raises:
        ConfigError: the decay does not end after the warmup, does not start between the warmup's end and its own, or a
            warmup that the schedule needs is missing.
    """
    warmup, end = _samples_of(config, "warmup") or 0, _samples_of(config, "decay")
    share = config.schedule.warmup_share
    warmup = 0 if share is not None else warmup
    if config.schedule.name == RateScheduleName.inverse_sqrt and warmup == 0 and not share:
        raise ConfigError(
            "schedule.name = inverse_sqrt without a warmup: the rate optim.lr * sqrt(warmup / samples) needs one; set "
            "schedule.warmup_samples, warmup_tokens, warmup_steps or warmup_share"
        )
    if end is not None and end <= warmup:
        raise ConfigError(
            f"{_setting_of(config, 'decay')}: the decay must end after the warmup, {_setting_of(config, 'warmup')}, "
            f"but ends at sample {end:,} with a warmup of {warmup:,} samples"
        )
    start = config.schedule.decay_start_samples
    if start is not None and (end is not None or config.train.length_is_known):
        rate = learning_rate(config)
        warmup, end = rate.warmup, rate.end
        if not warmup <= start < end:
            origin = f" of schedule.decay_from = {given}" if (given := config.schedule.decay_from) else ""
            raise ConfigError(
                f"schedule.decay_start_samples = {start:,}{origin}: the decay must start between the end of the "
                f"warmup, sample {warmup:,}, and its own end, sample {end:,}: change it, or how long the run trains"
            )


def _setting_of(config: RootConfig, what: str) -> str:
    """The schedule's key that sets the warmup or the decay, with its value."""
    names = [f"{what}_{unit}" for unit in ("steps", "tokens", "samples")]
    name = next((name for name in names if getattr(config.schedule, name) is not None), names[-1])
    return f"schedule.{name} = {getattr(config.schedule, name)}"


def _check_positions(config: RootConfig) -> None:
    """Checks that sequences are not longer than the number of learned positions."""
    train, model = config.train, config.model
    if model.position == Position.learned and train.seq_len > model.max_seq_len:
        raise ConfigError(
            f"train.seq_len = {train.seq_len} exceeds model.max_seq_len = {model.max_seq_len}, the number of learned "
            "positions: lower train.seq_len, raise model.max_seq_len, or use model.position=alibi or rope"
        )


def _check_vocabulary(config: RootConfig) -> None:
    """Checks that tokenizer training has raw text, and that its vocabulary fits the model."""
    size, rows = config.tokenizer.vocab_size, config.model.vocab_size
    if size is not None and config.data.raw is None:
        raise ConfigError(
            f"tokenizer.vocab_size = {size} only applies to a tokenizer trained on data.raw, but data.train is set, "
            "which is already tokenized: remove it"
        )
    if config.tokenizer.engine is not Engine.auto and config.data.raw is None:
        raise ConfigError(
            f"tokenizer.engine = {config.tokenizer.engine.value} only applies to data.raw, but data.train is set, "
            "which is already tokenized: remove it"
        )
    if size is not None and rows is not None and rows < size:
        raise ConfigError(
            f"model.vocab_size = {rows} is below tokenizer.vocab_size = {size}: set model.vocab_size=null, which uses "
            "the tokenizer's, or lower tokenizer.vocab_size"
        )
    learns = config.data.raw is not None and config.tokenizer.path is None
    if learns and rows is not None and rows < SMALLEST_VOCABULARY:
        raise ConfigError(
            f"model.vocab_size = {rows} is too small for a tokenizer: it {SMALLEST_WANTED}; set model.vocab_size=null, "
            "which uses the tokenizer's"
        )


def _check_best(config: RootConfig) -> None:
    """Checks that checkpoint.keep_best has a validation loss at the steps that are saved."""
    kept, every, validated = config.checkpoint.keep_best, config.checkpoint.every_steps, config.evaluation.every_steps
    if not kept:
        return
    begin = f"checkpoint.keep_best = {kept} compares validation losses, but "
    names = config.data.valid_names
    if not names:
        raise ConfigError(
            f"{begin}data.split = {config.data.split} holds out no validation set and data.valid is null: set one of "
            "them, or checkpoint.keep_best=0"
        )
    if config.checkpoint.best_by is not None and config.checkpoint.best_by not in names:
        raise ConfigError(
            f"checkpoint.best_by = {config.checkpoint.best_by} is not a validation set of this run, which has "
            f"{', '.join(names)}: choose one of them, or null for the first one"
        )
    if not every:
        raise ConfigError(
            f"{begin}checkpoint.every_steps = 0 saves by time and at the end: set checkpoint.every_steps and "
            "evaluation.every_steps to the same number, or checkpoint.keep_best=0"
        )
    if not validated:
        when = "at the end only" if config.evaluation.at_end else "never"
        raise ConfigError(
            f"{begin}evaluation.every_steps = 0 validates {when}: set evaluation.every_steps to checkpoint.every_steps "
            f"= {every}, or checkpoint.keep_best=0"
        )
    both = math.lcm(every, validated)
    if both > max(every, validated) and config.train.length_is_known and both > planned_steps(config):
        raise ConfigError(
            f"{begin}with checkpoint.every_steps = {every} and evaluation.every_steps = {validated} step {both} is the "
            f"first that is both saved and validated, and the run has {planned_steps(config)} steps: use "
            f"evaluation.every_steps={every}, or a divisor of it"
        )


def _check_profile(config: RootConfig) -> None:
    steps = config.logging.profile_steps
    if steps is not None and config.train.length_is_known and steps[1] > planned_steps(config):
        raise ConfigError(
            f"logging.profile_steps = {steps} goes beyond the end of the run at step {planned_steps(config)}: profile "
            "earlier steps, or train for longer"
        )


def _check_debugging(config: RootConfig) -> None:
    """Checks that the rank to debug exists, and that a rank in this process is the only one."""
    ranks, rank = config.parallel.world_size, config.cluster.debug_rank
    if config.cluster.in_process and ranks > 1:
        raise ConfigError(
            f"cluster.in_process = true runs one rank, but parallel.tp * cp * pp * dp = {ranks}: set them to 1, or use "
            "cluster.debug_rank=<rank> to debug one of several ranks"
        )
    if config.cluster.in_process and config.logging.console is ConsoleKind.live:
        raise ConfigError(
            "logging.console = live is drawn over the debugger that cluster.in_process = true is for: use "
            "logging.console=auto"
        )
    if rank is not None and rank >= ranks:
        raise ConfigError(f"cluster.debug_rank = {rank}: the run has ranks 0 to {ranks - 1}")


def best_loss_key(config: RootConfig) -> str | None:
    """Returns the metric by which checkpoint.keep_best ranks checkpoints; None if it keeps none."""
    given = config.checkpoint.best_by
    names = config.data.valid_names if given is None else [given]
    return loss_key(names[0]) if config.checkpoint.keep_best and names else None


def batch_size_schedule(config: RootConfig) -> BatchSizeSchedule:
    """Returns the global batch size over the run.

    Raises:
        ConfigError: the ramp does not fit the global batch size.
    """
    ramp, spans = config.train.batch_ramp, run_spans(config)
    changes = tuple((span.first_sample, span.global_batch_size) for span in spans)
    return BatchSizeSchedule(config.train.global_batch_size, ramp.start, ramp.increment, ramp.samples, changes)


def run_spans(config: RootConfig) -> tuple[PhaseSpan, ...]:
    """Returns the spans of a run's training phases, from the config of the run or of any of its phases."""
    phases = parse_phases(config.train.phases)
    if not phases:
        return ()
    size, length = "train.global_batch_size", "train.seq_len"
    own = {size: config.train.global_batch_size, length: config.train.seq_len}
    values = [own | of_phase for of_phase in values_in_force(phases, config)]
    return phase_spans(phases, [(of_phase[size], of_phase[length]) for of_phase in values])


def phase_config(config: RootConfig, place: int) -> RootConfig:
    """Returns the config of one training phase of a run.

    Keys that phases change have the values of this phase; learning rate, batch size and data mix remain functions of
    the whole run. The phases that train.phases describes stay the same. A run without phases returns its own config.

    Args:
        config: config of the run, or of any of its phases.
        place: index of the phase, from 0.

    Raises:
        ConfigError: a value has the wrong type.
    """
    phases = parse_phases(config.train.phases)
    if not phases:
        return config
    values = values_in_force(phases, config)
    parts: dict[str, Any] = {}
    for section in ("train", "model", "parallel"):
        of_section = {
            key.partition(".")[2]: value for key, value in values[place].items() if key.startswith(f"{section}.")
        }
        parts[section] = with_values(getattr(config, section), of_section, section)
    parts["train"].phases = expanded_phases(phases, values)
    return replace(config, **parts)


def config_at(config: RootConfig, samples: int) -> RootConfig:
    """Returns the config of the training phase after a number of samples, see `phase_config`."""
    spans = run_spans(config)
    return phase_config(config, phase_at(spans, samples).place) if spans else config


def planned_steps(config: RootConfig) -> int:
    """Returns the length of training in whole steps, whichever unit it is given in.

    Raises:
        ValueError: the length depends on data or time that is not resolved yet, see `megads.launch.run_length`.
    """
    train = config.train
    if not train.length_is_known:
        raise ValueError(
            f"train.steps = {train.steps}, epochs = {train.epochs}, minutes = {train.minutes}: not resolved yet"
        )
    if train.steps is not None:
        return int(train.steps)
    if spans := run_spans(config):
        unit = "samples" if train.samples is not None else "tokens"
        return steps_of_length(spans, unit, getattr(train, unit) or 0)
    samples = train.samples if train.samples is not None else (train.tokens or 0) // train.seq_len
    return batch_size_schedule(config).steps_for(samples)


def learning_rate(config: RootConfig) -> LearningRate:
    """Returns the learning rate over a run of known length.

    Raises:
        ConfigError: the schedule of a training phase is invalid.
    """
    schedule, spans, phases = config.schedule, run_spans(config), parse_phases(config.train.phases)
    warmup, end = _samples_of(config, "warmup"), _samples_of(config, "decay")
    last = batch_size_schedule(config).samples_after(planned_steps(config)) if end is None or phases else 0
    clock = [(span.first_sample, span.first_token, span.seq_len) for span in spans if config.train.keep_batch_tokens]
    decay = (warmup or 0, last if end is None else end, schedule.decay_start_samples)
    rate = LearningRate(config.optim, schedule, *decay, clock=tuple(clock)).with_warmup_share()
    return with_phase_rates(rate, phases, spans, last) if phases else rate


def _samples_of(config: RootConfig, what: str) -> int | None:
    """The schedule's warmup or decay in samples, whichever unit it is given in; None if it is not set."""
    schedule, spans = config.schedule, run_spans(config)
    steps, tokens = getattr(schedule, f"{what}_steps"), getattr(schedule, f"{what}_tokens")
    if steps is not None:
        return batch_size_schedule(config).samples_after(steps)
    if tokens is not None:
        return sample_at_token(spans, int(tokens)) if spans else -(-int(tokens) // config.train.seq_len)
    samples: int | None = getattr(schedule, f"{what}_samples")
    return samples


def unstaged(config: RootConfig) -> RootConfig:
    """Returns the config with which the launcher opens the data: only ranks copy it to data.stage_to, as the launcher
    may run on a node that does not train."""
    return replace(config, data=replace(config.data, stage_to=None))


def open_run_data(
    config: RootConfig, record: DataRecord | None = None, at_sample: int = 0
) -> tuple[TrainSource, Mapping[str, ValidationSource]]:
    """Opens a run's training and validation data, see `megads.data.sampling.datasets.open_datasets`.

    Args:
        config: config of the run, or of one of its training phases.
        record: record of the run's data; None if there is none.
        at_sample: samples consumed so far; selects the training phase whose data is opened.
    """
    from megads.data.sampling.datasets import open_datasets
    from megads.data.sampling.sampler import skips_of
    from megads.data.sampling.samples import SampleLengths

    train, schedule, spans = config.train, batch_size_schedule(config), run_spans(config)
    # 0 if the length is unknown yet, so that no dataset counts as too small.
    samples = schedule.samples_after(planned_steps(config)) if train.length_is_known else 0
    data, seq_len, lengths = config.data, train.seq_len, None
    if spans:
        skips = skips_of(data.skip, schedule)
        check_skips(spans, skips)
        starts, place = phase_stream_starts(spans, skips), phase_at(spans, at_sample).place
        data = with_mixes(data, parse_phases(train.phases), starts)
        seq_len, end = spans[place].seq_len, spans[place].end_sample
        if len({span.seq_len for span in spans}) > 1:
            lengths = SampleLengths(tuple((start, of.seq_len) for start, of in zip(starts, spans, strict=True)), place)
            samples = min(samples, end if end is not None else samples)
    return open_datasets(data, seq_len, train.seed, config.model.vocabulary, samples, schedule, record, lengths)
