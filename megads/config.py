"""The root schema of `megads train`: composes every room's config, checks what spans rooms."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from megads.checkpoint.config import CheckpointConfig
from megads.data.config import DataConfig
from megads.data.prepare.config import SMALLEST_VOCABULARY, SMALLEST_WANTED, Engine, TextTokenizerConfig
from megads.data.sampling.batch_size import BatchSizeSchedule
from megads.engine.deepspeed_options import check_deepspeed_options
from megads.errors import ConfigError
from megads.evaluate.config import EvaluationConfig, loss_key
from megads.model.config import ModelConfig, Position, has_attention_core
from megads.ops.attention_kinds import AttentionWork, why_not
from megads.ops.config import Compile, Implementation, OpsConfig
from megads.optim.config import OptimConfig
from megads.optim.schedule import LearningRate, ScheduleConfig, ScheduleName
from megads.parallel.config import GRADIENT_STAGES, ParallelConfig, Partition, Recompute
from megads.parallel.partition import stage_bounds
from megads.resilience.config import ResilienceConfig
from megads.runtime.config import ClusterConfig, LoggingConfig, RunConfig
from megads.runtime.registry import BLOCKS, HOOKS, OPTIMIZERS, SCHEDULES, TRACKERS, import_plugins

if TYPE_CHECKING:
    from megads.data.indexed.recorded import DataRecord
    from megads.data.sampling.runs import TrainSource, ValidationSource

LENGTHS = ("steps", "samples", "tokens", "epochs")
AUTO = "auto"


class Precision(StrEnum):
    """Dtype of weights and activations; gradients accumulate and reduce in fp32 in both."""

    bf16 = "bf16"
    fp32 = "fp32"

    @classmethod
    def refused(cls) -> dict[str, str]:
        """Values that people ask for, and why they are not offered."""
        reason = (
            "fp16 is not supported: its gradients underflow without loss scaling, which megads does not have; use bf16"
        )
        return dict.fromkeys(("fp16", "float16", "half"), reason)


@dataclass
class BatchRampConfig:
    """Grows the global batch from `start` by `increment` in equal shares of `samples` up to train.global_batch_size."""

    start: int = 0
    """Global batch size at the first step; 0 switches the ramp off."""
    increment: int = 1
    """Samples added at each rise."""
    samples: int = 0
    """Samples over which the batch grows."""


@dataclass
class TrainConfig:
    """How long and on what batches a run trains. Exactly one of steps, samples, tokens and epochs is set."""

    global_batch_size: int = 8
    """Samples a step, over all ranks."""
    micro_batch_size: int = 1
    """Samples in one forward pass of one data-parallel rank."""
    seq_len: int = 128
    """Tokens a sample."""
    steps: int | str | None = field(default=None, metadata={"choices": (AUTO,)})
    """Length of training in steps. auto goes by the amount of text: four passes, at most 20 tokens for each parameter
    of the blocks, at least 200 steps."""
    samples: int | None = None
    """Length of training in samples."""
    tokens: int | None = None
    """Length of training in tokens, padding included."""
    epochs: float | None = None
    """Length of training in passes over the training data, 0.5 for half of it."""
    batch_ramp: BatchRampConfig = field(default_factory=BatchRampConfig)
    """Growth of the global batch size."""
    precision: Precision = Precision.bf16
    """bf16 or fp32."""
    seed: int = 1234
    """Seed of weights, data order and dropout."""
    deterministic: bool = True
    """On a GPU: take torch's deterministic algorithms, so that a resumed run goes on bit for bit. false lets it choose,
    for attention's backward pass above all. A CPU computes the same bits either way."""
    z_loss: float = 0.0
    """Weight of log(Z)^2, Z the sum of exp(logit), in every token's loss, which keeps logits from drifting (PaLM:
    1e-4); 0 switches it off. Losses in metrics are the cross entropy alone."""
    max_nonfinite_steps: int = 5
    """Non-finite steps in a row that a run survives, skipping each; one more ends it (exit 7)."""

    def check(self) -> None:
        """Raises ConfigError on a length given twice or never, and on sizes below one."""
        given = {name: getattr(self, name) for name in LENGTHS if getattr(self, name) is not None}
        if len(given) != 1:
            found = ", ".join(f"train.{name} = {value}" for name, value in given.items()) or "none of them is set"
            raise ConfigError(
                f"train needs exactly one of steps, samples, tokens and epochs, but {found}: "
                "set one (for example train.steps=100, or train.steps=auto) and the others to null"
            )
        if isinstance(self.steps, str) and self.steps != AUTO:
            raise ConfigError(f"train.steps = {self.steps}: must be an integer or auto")
        if self.epochs is not None and not 0 < self.epochs < math.inf:
            raise ConfigError(f"train.epochs = {self.epochs}: must be above 0")
        counts = [name for name in given if name != "epochs" and given[name] != AUTO]
        self.check_sizes("max_nonfinite_steps", *counts)
        if not 0 <= self.z_loss < math.inf:
            raise ConfigError(f"train.z_loss = {self.z_loss}: must be 0 (off) or positive, for example 1e-4")
        if self.seed < 0:
            raise ConfigError(f"train.seed = {self.seed}: must not be negative")

    @property
    def length_is_known(self) -> bool:
        """Whether the length is a number of steps, samples or tokens, and does not wait for the data."""
        return self.steps != AUTO and self.epochs is None

    def check_sizes(self, *others: str) -> None:
        """Raises ConfigError on batch and sequence sizes, and other fields, below one."""
        for name in ("global_batch_size", "micro_batch_size", "seq_len", *others):
            if getattr(self, name) < 1:
                raise ConfigError(f"train.{name} = {getattr(self, name)}: must be at least 1")


@dataclass
class RootConfig:
    """Everything `megads train` can be told."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """The model's shape."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """The layout over processes."""
    ops: OpsConfig = field(default_factory=OpsConfig)
    """Which implementation computes."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """Length and batches."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """The optimizer."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """The learning rate."""
    data: DataConfig = field(default_factory=DataConfig)
    """The data."""
    tokenizer: TextTokenizerConfig = field(default_factory=TextTokenizerConfig)
    """The tokenizer."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Saving and resuming."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """Validation."""
    run: RunConfig = field(default_factory=RunConfig)
    """Name and place."""
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    """Console."""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    """The machine."""
    resilience: ResilienceConfig = field(default_factory=ResilienceConfig)
    """Numerical faults."""
    plugins: list[str] = field(default_factory=list)
    """Modules of your own to import, which register hooks, model blocks, optimizers, schedules, readers or trackers
    (docs/extending.md)."""
    hooks: dict[str, Any] = field(default_factory=dict)
    """Hooks of your plugins to run, each with its settings: hooks.<name>.<setting>=<value>, or hooks.<name>={}."""

    deepspeed: dict[str, Any] = field(default_factory=dict)
    """Extra DeepSpeed settings for parallel.zero_stage=2 and 3, where DeepSpeed's own ZeRO engine trains, for example
    deepspeed.zero_optimization.overlap_comm=true; those that would change what is computed are refused."""

    def settle_plugins(self) -> None:
        """Imports the plugins, and checks and completes the settings of every part that the config names.

        Raises:
            ConfigError: a plugin cannot be imported, there is no such part, or a setting does not fit it.
        """
        import_plugins(self.plugins)
        optim, schedule, block = self.optim, self.schedule, self.model.block
        block.options = BLOCKS.complete(block.name, block.options, "model.block.name", "model.block.options")
        optim.options = OPTIMIZERS.complete(optim.name, optim.options, "optim.name", "optim.options")
        schedule.options = SCHEDULES.complete(schedule.name, schedule.options, "schedule.name", "schedule.options")
        self.data.reader.settle("data.reader")
        HOOKS.complete_all(self.hooks, "hooks")
        TRACKERS.complete_all(self.logging.trackers, "logging.trackers")


def check_config(config: RootConfig) -> None:
    """Checks every room's config, then what spans rooms.

    Raises:
        ConfigError: the config cannot be run; says the value, why, and what to change.
    """
    for part in (
        config.model,
        config.parallel,
        config.ops,
        config.train,
        config.optim,
        config.schedule,
        config.data,
        config.tokenizer,
        config.checkpoint,
        config.evaluation,
        config.run,
        config.logging,
        config.cluster,
        config.resilience,
    ):
        part.check()
    check_attention(config)
    _check_optimizer(config)
    _check_average(config)
    check_deepspeed_options(config.deepspeed, config.parallel.zero_stage)
    _check_compile(config)
    _check_layout(config)
    _check_batches(config)
    check_schedule(config)
    _check_positions(config)
    _check_vocabulary(config)
    _check_best(config)


def check_shape(config: RootConfig) -> None:
    """Checks what a plan needs: model, layout, batches and machine; neither data nor a length.

    Raises:
        ConfigError: the shape cannot be built.
    """
    config.model.check()
    config.parallel.check()
    config.ops.check()
    config.train.check_sizes()
    config.cluster.check()
    _check_layout(config)
    _check_batches(config)
    _check_positions(config)


def attention_work(config: RootConfig, *, cuda: bool | None = None, fused: bool | None = None) -> AttentionWork:
    """What a rank of a run asks of attention.

    Args:
        config: the run.
        cuda: ranks compute on GPUs; None where that is not known.
        fused: megads' own kernels are loaded, or not; None goes by ops.impl.
    """
    loaded = config.ops.impl if fused is None else Implementation.fused if fused else Implementation.torch
    return replace(
        config.model.attention_work(config.parallel.tp),
        bf16=config.train.precision is Precision.bf16,
        cuda=cuda,
        impl=loaded,
        seq_len=config.train.seq_len,
        micro_batch_size=config.train.micro_batch_size,
        context=config.parallel.cp,
        documents=config.data.document_mask,
        deterministic=config.train.deterministic,
    )


def check_attention(config: RootConfig, *, cuda: bool | None = None) -> None:
    """Raises ConfigError where the attention that was asked for cannot do the run's work; see `attention_work`."""
    reason = why_not(config.model.attention, attention_work(config, cuda=cuda))
    if reason:
        raise ConfigError(f"model.attention = {config.model.attention} {reason}")


def _check_optimizer(config: RootConfig) -> None:
    """DeepSpeed's optimizer, which shards gradients and weights, is around torch's; Muon must know its matrices."""
    impl, stage = config.optim.impl, config.parallel.zero_stage
    if stage in GRADIENT_STAGES and impl in (Implementation.fused, Implementation.apex):
        raise ConfigError(
            f"optim.impl = {impl} is for parallel.zero_stage = 0 and 1, but parallel.zero_stage = {stage}: there "
            "DeepSpeed's optimizer calls torch's operators; use optim.impl=auto"
        )
    if config.optim.is_muon and config.model.block.is_custom:
        raise ConfigError(
            f"optim.name = muon cannot be had with model.block.name = {config.model.block.name}: which of a plugin's "
            "parameters are matrices, and how many of them are in one, is not known; use optim.name=adamw, lamb or lion"
        )


def _check_average(config: RootConfig) -> None:
    """There is an average to validate."""
    if config.evaluation.average and config.optim.ema_decay is None:
        raise ConfigError(
            "evaluation.average = true validates a running average of the weights, but optim.ema_decay = null keeps "
            "none: set optim.ema_decay, as 0.9999, or leave evaluation.average out"
        )


def _check_compile(config: RootConfig) -> None:
    """Compiled blocks want their weights in place, CUDA graphs each micro-batch's backward pass after its forward."""
    compiled, parallel = config.ops.compile, config.parallel
    if compiled is Compile.none:
        return
    graphs = compiled is Compile.graphs
    for wrong, found, reason, wanted in (
        (
            parallel.zero_stage == 3,
            "parallel.zero_stage = 3",
            "weights that are gathered when a layer is called, of which a compiler knows nothing",
            "parallel.zero_stage=1 or 2",
        ),
        (
            graphs and parallel.pp > 1,
            f"parallel.pp = {parallel.pp}",
            "several micro-batches between their forward and backward pass, whose memory a graph would reuse",
            "parallel.pp=1",
        ),
        (
            graphs and parallel.recompute is not Recompute.none,
            f"parallel.recompute = {parallel.recompute}",
            "forward passes inside of the backward pass, whose memory a graph would reuse",
            "parallel.recompute=none",
        ),
    ):
        if wrong:
            other = "blocks or none" if graphs and "zero_stage" not in found else "none"
            raise ConfigError(
                f"ops.compile = {compiled} cannot be had with {found}: {reason}; set {wanted}, or ops.compile={other}"
            )


def _check_layout(config: RootConfig) -> None:
    """The model must divide over tensor parallel ranks and pipeline stages, samples over context parallel ranks."""
    model, tp = config.model, config.parallel.tp
    for name, value in (
        ("num_heads", model.num_heads),
        ("num_kv_heads", model.kv_heads),
        ("ffn_width", model.ffn_width),
    ):
        if value % tp:
            shown = "model.ffn_size (4 * hidden_size unless set)" if name == "ffn_width" else f"model.{name}"
            raise ConfigError(
                f"{shown} = {value} is not divisible by parallel.tp = {tp}: every tensor parallel rank takes an equal "
                "share; lower parallel.tp or change the model"
            )
    _check_stages(config)
    _check_context_parallel(config)
    _check_sequence_parallel(config)


def _check_stages(config: RootConfig) -> None:
    """Every stage needs a block, but for a first and a last one that are told to do without."""
    model, parallel = config.model, config.parallel
    alone = (parallel.first_stage_blocks, parallel.last_stage_blocks).count(0)
    if model.num_layers < parallel.num_stages - alone:
        stages = f"parallel.pp = {parallel.pp}"
        remedy = "lower parallel.pp"
        if parallel.num_stages > parallel.pp:
            virtual = parallel.num_stages // parallel.pp
            stages = f"parallel.pp * virtual_stages = {parallel.pp} * {virtual}"
            remedy = "lower one of them"
        raise ConfigError(
            f"model.num_layers = {model.num_layers} is below {stages}: every pipeline stage needs a block; {remedy}"
        )
    estimated = parallel.partition is Partition.auto
    known = replace(parallel, partition=Partition.weighted) if estimated else parallel
    stage_bounds([1.0] * (model.num_layers + 2), known)


def _check_sequence_parallel(config: RootConfig) -> None:
    """Every tensor parallel rank must get an equal share of the tokens."""
    parallel, seq_len = config.parallel, config.train.seq_len
    cuts = parallel.cp * parallel.tp
    if not parallel.sequence_parallel or parallel.tp == 1 or seq_len % cuts == 0:
        return
    ranks = f"parallel.tp = {parallel.tp}"
    if parallel.cp > 1:
        ranks = f"parallel.cp * tp = {parallel.cp} * {parallel.tp}"
    raise ConfigError(
        f"train.seq_len = {seq_len} is not divisible by {ranks}: with parallel.sequence_parallel every rank takes an "
        f"equal share of the tokens; use a train.seq_len that is a multiple of {cuts}, or "
        "parallel.sequence_parallel=false"
    )


def _check_context_parallel(config: RootConfig) -> None:
    """Every context parallel rank takes two equal chunks of a sample; keys and values meet in attention cores."""
    if config.parallel.cp > 1 and not has_attention_core(config.model):
        raise ConfigError(
            f"parallel.cp = {config.parallel.cp} needs a block that names its attention core, where keys and values of "
            f"all ranks meet, but the sharding table of model.block.name = {config.model.block.name} names none; set "
            "parallel.cp=1"
        )
    chunks = 2 * config.parallel.cp
    if config.parallel.cp > 1 and config.train.seq_len % chunks:
        raise ConfigError(
            f"train.seq_len = {config.train.seq_len} is not divisible by 2 * parallel.cp = {chunks}: every context "
            "parallel rank takes two equal chunks of a sample; change train.seq_len to "
            f"{-(-config.train.seq_len // chunks) * chunks}, or lower parallel.cp"
        )


def _check_batches(config: RootConfig) -> None:
    """Every global batch, those of the ramp included, must split evenly into micro-batches of every replica."""
    batch_size_schedule(config).check(config.train.micro_batch_size, config.parallel.dp)


def check_schedule(config: RootConfig) -> None:
    """Checks the learning rate's course in samples, whichever units it is given in.

    Raises:
        ConfigError: the decay does not end after the warmup, or does not start between the two, or there is no warmup
            where the schedule needs one.
    """
    warmup, end = _samples_of(config, "warmup") or 0, _samples_of(config, "decay")
    if config.schedule.name == ScheduleName.inverse_sqrt and warmup == 0:
        raise ConfigError(
            "schedule.name = inverse_sqrt without a warmup: the rate is optim.lr * sqrt(warmup / samples), which needs "
            "one; set schedule.warmup_samples, warmup_tokens or warmup_steps"
        )
    if end is not None and end <= warmup:
        raise ConfigError(
            f"{_setting_of(config, 'decay')}: the decay must end after the warmup, {_setting_of(config, 'warmup')}, "
            f"but ends at sample {end:,} with a warmup of {warmup:,} samples"
        )
    start = config.schedule.decay_start_samples
    if start is not None and (end is not None or config.train.length_is_known):
        end = learning_rate(config).end
        if not warmup <= start < end:
            origin = f" of schedule.decay_from = {given}" if (given := config.schedule.decay_from) else ""
            raise ConfigError(
                f"schedule.decay_start_samples = {start:,}{origin}: the decay must start between the end of the "
                f"warmup, sample {warmup:,}, and its own end, sample {end:,}: change it, or how long the run trains"
            )


def _setting_of(config: RootConfig, what: str) -> str:
    """The schedule's key that gives the warmup or the decay, with its value."""
    names = [f"{what}_{unit}" for unit in ("steps", "tokens", "samples")]
    name = next((name for name in names if getattr(config.schedule, name) is not None), names[-1])
    return f"schedule.{name} = {getattr(config.schedule, name)}"


def _check_positions(config: RootConfig) -> None:
    """Sequences must fit the positions."""
    train, model = config.train, config.model
    if model.position == Position.learned and train.seq_len > model.max_seq_len:
        raise ConfigError(
            f"train.seq_len = {train.seq_len} exceeds model.max_seq_len = {model.max_seq_len}, the number of learned "
            "positions: lower train.seq_len, raise model.max_seq_len, or use model.position=alibi or rope"
        )


def _check_vocabulary(config: RootConfig) -> None:
    """A tokenizer is learnt from raw text only, and its tokens must fit the model."""
    size, rows = config.tokenizer.vocab_size, config.model.vocab_size
    if size is not None and config.data.raw is None:
        raise ConfigError(
            f"tokenizer.vocab_size = {size} is for a tokenizer to learn from data.raw, but data.train is set, whose "
            "tokenizer is made: leave it out"
        )
    if config.tokenizer.engine is not Engine.auto and config.data.raw is None:
        raise ConfigError(
            f"tokenizer.engine = {config.tokenizer.engine.value} is for the text of data.raw, but data.train is set, "
            "which is tokenized: leave it out"
        )
    if size is not None and rows is not None and rows < size:
        raise ConfigError(
            f"model.vocab_size = {rows} is below tokenizer.vocab_size = {size}: set model.vocab_size=null, which takes "
            "the tokenizer's, or lower tokenizer.vocab_size"
        )
    learns = config.data.raw is not None and config.tokenizer.path is None
    if learns and rows is not None and rows < SMALLEST_VOCABULARY:
        raise ConfigError(
            f"model.vocab_size = {rows} has no room for a tokenizer: it {SMALLEST_WANTED}; set model.vocab_size=null, "
            "which takes the tokenizer's"
        )


def _check_best(config: RootConfig) -> None:
    """Checkpoints can be compared by their validation loss only if such steps are validated."""
    kept, every, validated = config.checkpoint.keep_best, config.checkpoint.every_steps, config.evaluation.every_steps
    if not kept:
        return
    begin = f"checkpoint.keep_best = {kept} compares validation losses, but "
    names = config.data.valid_names
    if not names:
        raise ConfigError(
            f"{begin}data.split = {config.data.split} sets no validation set aside and data.valid is null: set one of "
            "them, or checkpoint.keep_best=0"
        )
    if config.checkpoint.best_by is not None and config.checkpoint.best_by not in names:
        raise ConfigError(
            f"checkpoint.best_by = {config.checkpoint.best_by} is no validation set of this run, which has "
            f"{', '.join(names)}: choose one of them, or null for the first one"
        )
    if not every:
        raise ConfigError(
            f"{begin}checkpoint.every_steps = 0 saves one checkpoint, at the end: set checkpoint.every_steps and "
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


def best_loss_key(config: RootConfig) -> str | None:
    """Metric by which checkpoint.keep_best compares checkpoints; None where it keeps none."""
    given = config.checkpoint.best_by
    names = config.data.valid_names if given is None else [given]
    return loss_key(names[0]) if config.checkpoint.keep_best and names else None


def batch_size_schedule(config: RootConfig) -> BatchSizeSchedule:
    """Returns the global batch size over the run.

    Raises:
        ConfigError: the ramp does not fit the global batch size.
    """
    ramp = config.train.batch_ramp
    return BatchSizeSchedule(config.train.global_batch_size, ramp.start, ramp.increment, ramp.samples)


def planned_steps(config: RootConfig) -> int:
    """Returns the length of training in whole steps, whichever way it was given.

    Raises:
        ValueError: it is not known before the data is, see `megads.launch.run_length`.
    """
    train = config.train
    if not train.length_is_known:
        raise ValueError(f"train.steps = {train.steps}, train.epochs = {train.epochs} are not settled yet")
    if train.steps is not None:
        return int(train.steps)
    samples = train.samples if train.samples is not None else (train.tokens or 0) // train.seq_len
    return batch_size_schedule(config).steps_for(samples)


def learning_rate(config: RootConfig) -> LearningRate:
    """Returns the learning rate over the run, whose length is known."""
    schedule = config.schedule
    warmup, end = _samples_of(config, "warmup"), _samples_of(config, "decay")
    if end is None:
        end = batch_size_schedule(config).samples_after(planned_steps(config))
    return LearningRate(config.optim, schedule, warmup or 0, end, schedule.decay_start_samples)


def _samples_of(config: RootConfig, what: str) -> int | None:
    """Samples of the schedule's warmup or decay, in whichever unit they are given; None where they are not."""
    schedule = config.schedule
    steps, tokens = getattr(schedule, f"{what}_steps"), getattr(schedule, f"{what}_tokens")
    if steps is not None:
        return batch_size_schedule(config).samples_after(steps)
    if tokens is not None:
        return -(-int(tokens) // config.train.seq_len)
    samples: int | None = getattr(schedule, f"{what}_samples")
    return samples


def open_run_data(
    config: RootConfig, record: DataRecord | None = None
) -> tuple[TrainSource, Mapping[str, ValidationSource]]:
    """Opens a run's training and validation data, see `megads.data.sampling.datasets.open_datasets`."""
    from megads.data.sampling.datasets import open_datasets

    train, schedule = config.train, batch_size_schedule(config)
    # No dataset is too small for a length that is not known yet.
    samples = schedule.samples_after(planned_steps(config)) if train.length_is_known else 0
    return open_datasets(config.data, train.seq_len, train.seed, config.model.vocabulary, samples, schedule, record)
