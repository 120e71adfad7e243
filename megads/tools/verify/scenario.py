"""Scenarios that the reference and every layout train: scaled-down runs in which every part affects the result.

With BLOOM's initialization, the effect of a wrong ALiBi slope is below 1e-6. Scenarios therefore use weights of std 0.2
and random gains and biases.
Shape suffixes: b = micro-batch size, s = sequence length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megads.api import (
    AXES,
    BatchInfo,
    ConfigError,
    EngineKind,
    Float8,
    Float8Recipe,
    Implementation,
    MicroBatch,
    ModelConfig,
    OpsConfig,
    OptimConfig,
    OptimizerName,
    ParallelConfig,
    Partition,
    Recompute,
    decode,
    encode,
    micro_batch_ids,
)
from megads.model.gpt import InitialValue, parameter_generator

# Three blocks over two stages and a vocabulary as large as a block: gloo's order of summation depends on the buffer
# offset, and the two copies of the tied embedding are at different offsets, as in large models. Six heads include the
# odd ALiBi slopes, and 509 tokens need padding rows in every tensor-parallel layout.
MODEL = ModelConfig(num_layers=3, hidden_size=48, num_heads=6, vocab_size=509, max_seq_len=64)
VALIDATION_SAMPLES = 7
"""Size of the validation set; leaves incomplete last micro-batches in most layouts."""


@dataclass(frozen=True)
class Scenario:
    """Settings of a training run, the same for the reference and every layout.

    Attributes:
        model: config of the model.
        steps: number of optimizer steps.
        global_batch_size: samples per step.
        micro_batch_size: samples per micro-batch.
        seq_len: tokens per sample.
        precision: name of the torch dtype of weights and activations.
        clip_grad: maximum gradient norm; gradients with hot weights have a norm of about 2.
        lr: learning rate of every step.
        seed: seed of the weights.
        masked: whether the loss mask keeps only the first 1 to all tokens of a sample.
        counted: number of tokens at the start of a sample that the loss mask keeps; None applies `masked` only.
        hot: whether to use `hot_weights` weights instead of the model's initialization.
        heat: standard deviation of `hot_weights` weights as a multiple of 0.2.
        spread: range of the magnitudes of features in `hot_weights`, as powers of two; 0: the same for all. FP8 numbers
            are relative, so that scales only matter if features differ much.
        documents: whether samples hold several documents, with boundaries passed to the model.
        document_mask: whether attention is restricted to documents; requires `documents`.
        reset_positions: whether positions restart at each document; requires `documents`.
        z_loss: weight of the z-loss.
        optimizer: all other optimizer settings.
        ops: operator implementations of the layout; the reference uses PyTorch's.
        engine: training engine of the layout.
        float8: which linear layers multiply in FP8.
    """

    model: ModelConfig = field(default_factory=lambda: MODEL)
    steps: int = 1
    global_batch_size: int = 12
    micro_batch_size: int = 2
    seq_len: int = 24
    precision: str = "float32"
    clip_grad: float = 0.5
    lr: float = 1e-3
    seed: int = 7
    masked: bool = False
    counted: int | None = None
    hot: bool = True
    heat: float = 1.0
    spread: int = 0
    documents: bool = False
    document_mask: bool = True
    reset_positions: bool = True
    z_loss: float = 0.0
    optimizer: OptimConfig = field(default_factory=OptimConfig)
    ops: OpsConfig = field(default_factory=lambda: OpsConfig(Implementation.torch))
    engine: EngineKind = EngineKind.auto
    float8: Float8 = field(default_factory=Float8)

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.precision)
        return dtype

    @property
    def optim(self) -> OptimConfig:
        return replace(self.optimizer, lr=self.lr, min_lr=0.0, clip_grad=self.clip_grad)


def hot_weights(seed: int, heat: float = 1.0, gain: float = 1.0, spread: int = 0) -> InitialValue:
    """Initial weights with which every part of the model affects the result; see Scenario.heat.

    Args:
        seed: seed of the weights.
        heat: their standard deviation as a multiple of 0.2.
        gain: mean of norm weights.
        spread: see Scenario.spread.
    """

    def value(name: str, shape: tuple[int, ...]) -> Tensor:
        noise = torch.empty(shape).normal_(0.0, 0.2 * heat, generator=parameter_generator(seed, name))
        values = noise + gain if name.endswith("norm.weight") else noise
        if spread and name.startswith("blocks."):
            generator = parameter_generator(seed, f"{name}/spread")
            for dim, features in enumerate(shape):
                powers = torch.randint(-spread, 1, (features,), generator=generator)
                values *= torch.exp2(powers.float()).view(-1, *(1 for _ in shape[dim + 1 :]))
        return values

    return value


def initial_weights(scenario: Scenario) -> InitialValue | None:
    """Initial weights of a scenario; None is the model's initialization."""
    gain = 0.0 if scenario.model.norm_zero_centered else 1.0
    return hot_weights(scenario.seed, scenario.heat, gain, scenario.spread) if scenario.hot else None


def sample(scenario: Scenario, sample_id: int) -> tuple[Tensor, Tensor]:
    """Tokens, int64 [s + 1], and loss mask, fp32 [s], of one sample; see Scenario.masked and Scenario.counted."""
    generator = torch.Generator().manual_seed(1000 + sample_id)
    tokens = torch.randint(0, scenario.model.vocabulary, (scenario.seq_len + 1,), generator=generator)
    mask = torch.ones(scenario.seq_len)
    if scenario.masked:
        mask[1 + (sample_id * 5) % scenario.seq_len :] = 0.0
    if scenario.counted is not None:
        mask[scenario.counted :] = 0.0
    return tokens, mask


def document_starts(scenario: Scenario, sample_id: int) -> Tensor:
    """Start position of each token's document, int64 [s]; a sample has three documents of random length."""
    generator = torch.Generator().manual_seed(2000 + sample_id)
    later = 1 + torch.randperm(scenario.seq_len - 1, generator=generator)[:2]
    starts = torch.zeros(scenario.seq_len, dtype=torch.int64)
    starts[later] = later
    return starts.cummax(0).values


def micro_batch(scenario: Scenario, ids: Sequence[int] | np.ndarray) -> MicroBatch:
    """Builds the micro-batch of the samples with these ids."""
    rows = [sample(scenario, int(i)) for i in ids]
    tokens, mask = torch.stack([t for t, _ in rows]), torch.stack([m for _, m in rows])
    info = BatchInfo(sample_ids=torch.as_tensor(np.asarray(ids)))
    if scenario.documents:
        starts_bs = torch.stack([document_starts(scenario, int(i)) for i in ids])
        positions_bs = torch.arange(scenario.seq_len) - starts_bs
        info = BatchInfo(
            info.sample_ids,
            position_ids_bs=positions_bs if scenario.reset_positions else None,
            document_starts=starts_bs if scenario.document_mask else None,
        )
    return MicroBatch(info=info, tokens_bs=tokens[:, :-1], labels_bs=tokens[:, 1:], loss_mask_bs=mask)


def step_batches(scenario: Scenario, step: int, dp_rank: int = 0, dp: int = 1) -> list[MicroBatch]:
    """Micro-batches of a data-parallel rank in a step, distributed as by the training sampler."""
    first = step * scenario.global_batch_size
    ids = micro_batch_ids(first, scenario.global_batch_size, scenario.micro_batch_size, dp_rank, dp)
    return [micro_batch(scenario, row) for row in ids]


def validation_ids(scenario: Scenario, dp_rank: int, dp: int) -> np.ndarray:
    """Ids of this rank's validation micro-batches; ids from VALIDATION_SAMPLES on are padding and fully masked."""
    block = scenario.micro_batch_size * dp
    return micro_batch_ids(0, -(-VALIDATION_SAMPLES // block) * block, scenario.micro_batch_size, dp_rank, dp)


def validation_batches(scenario: Scenario, dp_rank: int = 0, dp: int = 1) -> list[MicroBatch]:
    """Micro-batches of a data-parallel rank for the whole validation set."""
    batches = []
    for ids in validation_ids(scenario, dp_rank, dp):
        batch = micro_batch(scenario, ids)
        assert batch.loss_mask_bs is not None
        filling = torch.as_tensor(np.asarray(ids)) >= VALIDATION_SAMPLES
        batches.append(replace(batch, loss_mask_bs=batch.loss_mask_bs.masked_fill(filling[:, None], 0.0)))
    return batches


@dataclass(frozen=True)
class Job:
    """Job of every rank.

    Attributes:
        parallel: parallel layout.
        scenarios: scenarios to train one after another, each with a new engine.
        corpus: prefix of the dataset for the check of the dataloader.
        timeout_s: timeout in seconds for a rank that waits for another.
        defect: module:function that is called first; tests inject defects with it.
        plugins: modules of the user to import first.
        cuda: whether the ranks compute on GPUs.
    """

    parallel: ParallelConfig
    scenarios: tuple[Scenario, ...]
    corpus: Path
    timeout_s: float
    defect: str = ""
    plugins: tuple[str, ...] = ()
    cuda: bool = False

    def write(self, folder: Path) -> None:
        """Writes the job for the ranks."""
        (folder / "job.json").write_bytes(encode(self, Job))

    @classmethod
    def read(cls, folder: Path) -> Job:
        """Reads the output of `write`; raises UnhealthyNode if it is invalid."""
        return decode((folder / "job.json").read_bytes(), Job, 0)  # type: ignore[no-any-return]


def result_path(folder: Path, rank: int) -> Path:
    """File of a rank's results, one RankRun per scenario."""
    return folder / f"rank_{rank:05d}.pt"


DEFAULT_RANKS = 8
# Data-parallel ranks only repeat each other; tensor parallelism is the most error-prone.
_SHRINK_FIRST = ("dp", "pp", "cp", "tp")
_HEAD_DIM = 8
_WINDOW = 5
"""Attention window, smaller than any scaled-down sequence."""
_VOCABULARY = 509
"""A prime number, so that every tensor-parallel layout pads it."""
_SEQ_LEN, _SAMPLES = 16, 8
# Layouts round differently in bf16. Over this many tokens the errors average out; over 100, a pass would be chance.
_BF16_SEQ_LEN, _BF16_SAMPLES = 64, 24
_BF16_STEPS = 3
"""Only the first loss is compared; the other steps check that replicas stay equal."""
_BUCKET = 9000
"""Gives several buckets per rank, as in a large model, that are sharded within a matrix: with 8192, ranks would hold
whole matrices of the smallest models."""
_LAMB_LR = 2e-2
"""Learning rate of LAMB: its updates are relative to the weight norm, and smaller ones would hide a trust ratio error
of one percent."""
_EMA_DECAY = 0.6
"""Maximum EMA decay: with the decay of a long run, the average would still equal the initial weights."""
_SPREAD = 12
"""See Scenario.spread; with FP8."""
_VIRTUAL_STAGES = 4
"""Largest number of virtual stages of a rank: with 8 on two ranks, the small copy has 16 blocks, through which fp32
rounding grows to 1.1e-5 of a gradient on some processors."""
_CLIP = 0.5
"""Gradients with hot weights have a norm of about 2, so every step is clipped."""


@dataclass(frozen=True)
class RequestedSettings:
    """Settings of the user's run that the verification uses.

    Attributes:
        model: config `model`.
        parallel: config `parallel`.
        optim: config `optim`.
        global_batch_size: train.global_batch_size.
        micro_batch_size: train.micro_batch_size.
        seq_len: train.seq_len.
        bf16: whether the run trains in bf16.
        document_mask: data.document_mask.
        reset_positions: data.reset_positions.
        ops: config `ops`.
        z_loss: train.z_loss.
        engine: config `engine`.
        float8: train.fp8 and train.fp8_bf16_blocks.
    """

    model: ModelConfig
    parallel: ParallelConfig
    optim: OptimConfig
    global_batch_size: int
    micro_batch_size: int
    seq_len: int
    bf16: bool
    document_mask: bool = False
    reset_positions: bool = False
    ops: OpsConfig = field(default_factory=OpsConfig)
    z_loss: float = 0.0
    engine: EngineKind = EngineKind.auto
    float8: Float8 = field(default_factory=Float8)


@dataclass(frozen=True)
class Scaled:
    """The scaled-down run to verify.

    Attributes:
        parallel: scaled-down layout; every axis above 1 stays above 1.
        exact: fp32 scenario, which has tight bounds.
        bf16: bf16 scenario; None if the run trains in fp32.
        notes: differences from the user's run, for display.
    """

    parallel: ParallelConfig
    exact: Scenario
    bf16: Scenario | None
    notes: tuple[str, ...]


def scale(wanted: RequestedSettings, max_ranks: int | None, steps: int) -> Scaled:
    """Scales a run down.

    Args:
        wanted: settings of the run, already validated.
        max_ranks: maximum number of ranks; None is DEFAULT_RANKS, or more if the layout needs more to keep each axis
            above 1.
        steps: number of training steps in fp32.

    Raises:
        ConfigError: the layout needs more than `max_ranks` ranks to keep each axis above 1.
    """
    parallel = scale_layout(wanted.parallel, max_ranks)
    model = _scale_model(wanted.model, wanted.parallel, parallel)
    exact = Scenario(
        model=model,
        steps=steps,
        masked=True,
        documents=wanted.document_mask or wanted.reset_positions,
        document_mask=wanted.document_mask,
        reset_positions=wanted.reset_positions,
        z_loss=wanted.z_loss,
        clip_grad=_CLIP if wanted.optim.clip_grad > 0 else 0.0,
        lr=_LAMB_LR if wanted.optim.name == OptimizerName.lamb else Scenario.lr,
        optimizer=_as_exact_as_weights(wanted.optim),
        ops=wanted.ops,
        engine=wanted.engine,
    )
    if wanted.float8.recipe is not Float8Recipe.none:
        exact = replace(
            exact,
            float8=replace(wanted.float8, bf16_blocks=min(1, wanted.float8.bf16_blocks)),
            # Megads' kernels do not take fp64.
            ops=OpsConfig(Implementation.torch, fp8_emulation=True, loss_chunk=wanted.ops.loss_chunk),
            optimizer=replace(exact.optimizer, impl=Implementation.auto),
            precision="float64",
            spread=_SPREAD,
        )
    micro_batches = wanted.global_batch_size // (wanted.micro_batch_size * wanted.parallel.dp)
    exact = _with_batches(exact, wanted, parallel, min(micro_batches, parallel.num_stages + 2), _SEQ_LEN, _SAMPLES)
    bf16 = None
    if wanted.bf16:
        bf16 = _with_batches(exact, wanted, parallel, 1, _BF16_SEQ_LEN, _BF16_SAMPLES)
        # In bf16, a value whose last bits differ between layouts may be rounded to another FP8 number.
        bf16 = replace(bf16, precision="bfloat16", steps=min(steps, _BF16_STEPS), float8=Float8(), spread=0)
        bf16 = replace(bf16, ops=wanted.ops, optimizer=_as_exact_as_weights(wanted.optim))
    return Scaled(parallel, exact, bf16, _notes(wanted, parallel, exact))


def _as_exact_as_weights(optim: OptimConfig) -> OptimConfig:
    """Optimizer settings that reveal errors within a few steps.

    Muon's iteration uses the dtype of the weights, because bf16 is too coarse for the fp32 bounds. The EMA decay is
    lowered to suit the small number of steps.
    """
    if optim.ema_decay is not None:
        optim = replace(optim, ema_decay=min(optim.ema_decay, _EMA_DECAY))
    return replace(optim, options={**optim.options, "precision": "auto"}) if optim.is_muon else optim


def scale_layout(parallel: ParallelConfig, max_ranks: int | None) -> ParallelConfig:
    """Scales a layout down to at most `max_ranks` ranks; every axis above 1 stays above 1, as do virtual stages.

    Raises:
        ConfigError: the layout needs more ranks.
    """
    sizes = {axis: getattr(parallel, axis) for axis in AXES}
    smallest = _smallest(parallel)
    fewest = math.prod(smallest.values())
    limit = max(DEFAULT_RANKS, fewest) if max_ranks is None else max_ranks
    if fewest > limit:
        wide = ", ".join(f"parallel.{axis}" for axis in AXES if sizes[axis] > 1)
        raise ConfigError(
            f"verify.max_ranks = {limit}: {wide} above 1 need at least {fewest} ranks; raise it, or verify the layout "
            "in parts, with one of them at 1"
        )
    for axis in _SHRINK_FIRST:
        others = math.prod(size for other, size in sizes.items() if other != axis)
        if sizes[axis] > 1:
            sizes[axis] = min(sizes[axis], max(smallest[axis], limit // others))
    if _has_shard_groups(parallel) and sizes["cp"] * sizes["dp"] % 2:
        sizes["dp" if sizes["dp"] > smallest["dp"] else "cp"] -= 1
    exchanging = parallel.cp_ulysses
    if parallel.is_two_level:
        exchanging, sizes["cp"] = 2, sizes["cp"] - sizes["cp"] % 2
    elif exchanging > 1:
        exchanging = sizes["cp"]
    small = replace(parallel, **sizes, cp_ulysses=exchanging, bucket_elements=min(parallel.bucket_elements, _BUCKET))
    small.ep = math.gcd(parallel.ep, small.expert_domain)
    if parallel.virtual_stages is not None:
        small.virtual_stages = min(parallel.virtual_stages, _VIRTUAL_STAGES)
    if parallel.zero_shard_size is not None:
        small.zero_shard_size = 2 if _has_shard_groups(parallel) else small.data_size
    return _with_recomputation(_with_few_blocks(small))


def _has_shard_groups(parallel: ParallelConfig) -> bool:
    """Whether there are several ZeRO shard groups, each of which holds the whole model."""
    return parallel.zero_shard_size is not None and parallel.zero_shard_size < parallel.data_size


def _smallest(parallel: ParallelConfig) -> dict[str, int]:
    """Minimum size of every axis: 2 if it is above 1; with subgroups that exchange heads, four context-parallel ranks;
    with shard groups, four data ranks for two groups of two."""
    sizes = {axis: min(2, getattr(parallel, axis)) for axis in AXES}
    if parallel.is_two_level:
        sizes["cp"] = 4
    if _has_shard_groups(parallel) and sizes["cp"] * sizes["dp"] < 4:
        sizes["dp" if parallel.dp > 1 else "cp"] = 4
    return sizes


def _with_few_blocks(parallel: ParallelConfig) -> ParallelConfig:
    """Pipeline partition for a small model: at most one explicitly assigned block on the first and last stage."""
    first, last = parallel.first_stage_blocks, parallel.last_stage_blocks
    return replace(
        parallel,
        # The measurements of auto on a large model do not apply to a small one.
        partition=Partition.weighted if parallel.partition is Partition.auto else parallel.partition,
        layer_costs=None if len(parallel.layer_costs or ()) > 3 else parallel.layer_costs,
        first_stage_blocks=None if first is None else min(1, first),
        last_stage_blocks=None if last is None else min(1, last),
    )


def _with_recomputation(parallel: ParallelConfig) -> ParallelConfig:
    """Recomputed blocks for a small model: at most one per stage; one for auto, which would recompute none here."""
    if parallel.recompute is Recompute.auto:
        return replace(parallel, recompute=Recompute.full, recompute_blocks=[1] * parallel.pp)
    if parallel.recompute_blocks is None:
        return parallel
    return replace(parallel, recompute_blocks=[min(1, blocks) for blocks in parallel.recompute_blocks[: parallel.pp]])


def _scale_model(model: ModelConfig, given: ParallelConfig, parallel: ParallelConfig) -> ModelConfig:
    """Creates a small model with the features of a large one.

    Args:
        model: config of the large model.
        given: layout of the large model.
        parallel: scaled-down layout, by which the small model must be divisible.
    """
    tp = given.tp
    power_of_two = model.num_heads & (model.num_heads - 1) == 0
    # ALiBi slopes follow another rule if the number of heads is not a power of two.
    kept = max(2, 4 // parallel.tp) if power_of_two else max(3, 6 // parallel.tp)
    local = min(model.num_heads // tp, kept)
    ranks = parallel.ulysses_size
    if ranks > 1:
        # KV heads that divide over the ranks that exchange them still do, with more than one query head each.
        divided = model.queries_per_kv > 1 and model.local_kv_heads(tp) % given.ulysses_size == 0
        local = 2 * ranks if divided else ranks * math.ceil(local / ranks)
    heads = parallel.tp * local
    width = heads * min(model.head_dim, _HEAD_DIM)
    ffn = None
    if model.ffn_size is not None:
        ffn = parallel.tp * max(1, round(model.ffn_size / model.hidden_size * width / parallel.tp))
    # One layer of each kind.
    pattern = [
        replace(kind, layers=1, window=None if kind.window is None else min(kind.window, _WINDOW))
        for kind in model.layer_pattern
    ]
    dim, fraction = width // heads, model.rotary_fraction
    mup = model.mup
    if mup.base_width is not None:  # keeps the width multiplier of the large model
        mup = replace(mup, base_width=max(1, round(mup.base_width * width / model.hidden_size)))
    return replace(
        model,
        mup=mup,
        num_layers=min(model.num_layers, max(3, 2 * parallel.num_stages - 1, len(pattern))),
        hidden_size=width,
        num_heads=heads,
        num_kv_heads=_kv_heads(model, tp, heads, parallel.tp),
        ffn_size=ffn,
        window=None if model.window is None else min(model.window, _WINDOW),
        layer_pattern=pattern,
        rotary_fraction=fraction if fraction == 1.0 else max(2, 2 * round(fraction * dim / 2)) / dim,
        vocab_size=min(model.vocab_size or _VOCABULARY, _VOCABULARY),
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )


def _kv_heads(model: ModelConfig, tp: int, heads: int, small_tp: int) -> int | None:
    """Number of KV heads for `heads` query heads; keeps GQA, and several KV heads per rank where the model has them."""
    if model.queries_per_kv == 1:
        return None
    if model.kv_heads < tp:  # several ranks share a KV head
        sharers = [n for n in range(1, tp // model.kv_heads + 1) if small_tp % n == 0 and 2 * _HEAD_DIM % n == 0]
        return small_tp // max(sharers)
    share = heads // small_tp
    most = min(model.kv_heads // tp, share // 2)
    return small_tp * max(count for count in range(1, most + 1) if share % count == 0)


def _with_batches(
    scenario: Scenario,
    wanted: RequestedSettings,
    parallel: ParallelConfig,
    micro_batches: int,
    seq_len: int,
    samples: int,
) -> Scenario:
    """Sets batch and sequence sizes to at least `samples` and `seq_len`, rounded up for the layout."""
    # Context parallelism splits a sample into 2 cp chunks; sequence parallelism splits each rank's part into tp.
    unit = 2 * parallel.cp * parallel.tp
    length = unit * math.ceil(seq_len / unit)
    micro_batch_size = min(wanted.micro_batch_size, 2)
    block = micro_batch_size * parallel.dp
    return replace(
        scenario,
        model=replace(scenario.model, max_seq_len=length),
        seq_len=length,
        micro_batch_size=micro_batch_size,
        global_batch_size=block * max(micro_batches, math.ceil(samples / block)),
    )


def _notes(wanted: RequestedSettings, parallel: ParallelConfig, scenario: Scenario) -> tuple[str, ...]:
    """Notes on the scaled-down layout, the model, the batch and the settings of the comparison."""
    notes = []
    shrunk = [
        f"{a} {getattr(wanted.parallel, a)} -> {getattr(parallel, a)}"
        for a in (*AXES, "ep", "virtual_stages")
        if getattr(wanted.parallel, a) != getattr(parallel, a)
    ]
    if shrunk:
        notes.append(
            f"layout: {', '.join(shrunk)}: {wanted.parallel.world_size} ranks are {parallel.world_size} here "
            "(verify.max_ranks)"
        )
    names = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "ffn_size", "window", "vocab_size")
    sizes = [
        f"{name} {getattr(wanted.model, name) or 'null'} -> {getattr(scenario.model, name)}"
        for name in names
        if getattr(wanted.model, name) != getattr(scenario.model, name)
    ]
    notes.append(f"model: {', '.join(sizes) or 'as it is'}")
    notes.append(
        f"batch: {scenario.global_batch_size} samples of {scenario.seq_len} tokens in micro-batches of "
        f"{scenario.micro_batch_size}, with loss masks that keep 1 to all tokens"
    )
    if wanted.optim.ema_decay != scenario.optimizer.ema_decay:
        notes.append(f"running average: optim.ema_decay {wanted.optim.ema_decay} -> {scenario.optimizer.ema_decay}")
    if scenario.float8.recipe is not Float8Recipe.none:
        notes.append(
            f"train.fp8 = {scenario.float8.recipe} is emulated, in fp64 in place of fp32, so that no value is rounded "
            f"to another FP8 number; features differ by up to 2^{scenario.spread}, so that scales matter; operators "
            "are PyTorch's; bf16 rows are without FP8"
        )
    notes.append(
        "weights of std 0.2, dropout 0, "
        + (f"gradients clipped to {scenario.clip_grad} at every step" if scenario.clip_grad else "no clipping")
    )
    return tuple(notes)
