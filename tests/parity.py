"""One small model on hot weights, trained unsharded and in any layout: what the parity tests compare.

At BLOOM's init a wrong ALiBi slope hides below 1e-6, so weights here have std 0.2, gains and biases are random, six
heads bring in the odd ALiBi slopes, and 509 tokens leave padding rows in every tensor-parallel layout.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import deepspeed
import numpy as np
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe import schedule
from torch import Tensor

from megads.batch import BatchInfo, MicroBatch
from megads.data.sampler import micro_batch_ids
from megads.engine.build import build_train_engine
from megads.engine.interface import Shard, TrainEngine
from megads.engine.pipeline_engine import StageEngine
from megads.engine.sharded_training import ShardedTrainEngine
from megads.model.config import ModelConfig
from megads.model.dropout import Dropout
from megads.model.gpt import GPT
from megads.model.initialise import parameter_generator
from megads.model.loss import token_losses
from megads.model.stages import TIED_PARAMETER
from megads.optim.config import OptimConfig
from megads.optim.groups import parameter_groups
from megads.parallel.config import ParallelConfig
from megads.parallel.grid import build_grid
from tests.distributed import run_ranks

# Three blocks over two stages and a vocabulary as large as a block: gloo's order of summation depends on the place in a
# buffer, and the two copies of the tied embedding lie at different places, as they do in large models.
MODEL = ModelConfig(num_layers=3, hidden_size=48, num_heads=6, vocab_size=509, max_seq_len=64)
LAYOUTS = {
    "single": ParallelConfig(),
    "tp2": ParallelConfig(tp=2),
    "pp2": ParallelConfig(pp=2),
    "dp2": ParallelConfig(dp=2),
    "tp3": ParallelConfig(tp=3),
    "tp2pp2": ParallelConfig(tp=2, pp=2),
    "pp2dp2": ParallelConfig(pp=2, dp=2),
    "tp2dp2": ParallelConfig(tp=2, dp=2),
    "pp2dp3": ParallelConfig(pp=2, dp=3),
    "tp2pp2dp2": ParallelConfig(tp=2, pp=2, dp=2),
    "zero2dp2": ParallelConfig(dp=2, zero_stage=2),
    "zero2dp3": ParallelConfig(dp=3, zero_stage=2),
    "zero2tp2dp2": ParallelConfig(tp=2, dp=2, zero_stage=2),
    "zero3dp2": ParallelConfig(dp=2, zero_stage=3),
    "zero3dp3": ParallelConfig(dp=3, zero_stage=3),
    "zero3tp2dp2": ParallelConfig(tp=2, dp=2, zero_stage=3),
    "zero3dp4": ParallelConfig(dp=4, zero_stage=3),
    "hierarchical": ParallelConfig(dp=4, zero_stage=3, zero_shard_size=2),
}


SLOW = ("zero2dp2", "zero2tp2dp2", "zero3dp2", "zero3dp3", "zero3dp4", "zero3tp2dp2", "hierarchical")
"""ZeRO-3 gathers every layer twice a micro-batch: on two cores 50 steps take it 10 to 40 s. The fast tier has shorter
runs of these layouts in tests/engine/test_sharded_training.py."""

LAYOUT_CASES = [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in LAYOUTS]


@dataclass(frozen=True)
class Scenario:
    """What is trained; the same for the reference and every layout."""

    model: ModelConfig = field(default_factory=lambda: MODEL)
    steps: int = 1
    global_batch_size: int = 12
    micro_batch_size: int = 2
    seq_len: int = 16
    precision: str = "float32"
    clip_grad: float = 0.5
    lr: float = 1e-3
    seed: int = 7
    masked: bool = False
    hot: bool = True

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.precision)

    @property
    def optim(self) -> OptimConfig:
        return OptimConfig(lr=self.lr, clip_grad=self.clip_grad)


def hot_value(seed: int) -> Callable[[str, tuple[int, ...]], Tensor]:
    """Weights at which every part of the model matters."""

    def value(name: str, shape: tuple[int, ...]) -> Tensor:
        noise = torch.empty(shape).normal_(0.0, 0.2, generator=parameter_generator(seed, name))
        return noise + 1.0 if name.endswith("norm.weight") else noise

    return value


def sample(scenario: Scenario, sample_id: int) -> tuple[Tensor, Tensor]:
    """Tokens [s + 1] and mask [s] of one sample; with `masked`, 1 to s tokens count."""
    generator = torch.Generator().manual_seed(1000 + sample_id)
    tokens = torch.randint(0, scenario.model.vocab_size, (scenario.seq_len + 1,), generator=generator)
    mask = torch.ones(scenario.seq_len)
    if scenario.masked:
        mask[1 + (sample_id * 5) % scenario.seq_len :] = 0.0
    return tokens, mask


def micro_batch(scenario: Scenario, ids: Any) -> MicroBatch:
    rows = [sample(scenario, int(i)) for i in ids]
    tokens, mask = torch.stack([t for t, _ in rows]), torch.stack([m for _, m in rows])
    info = BatchInfo(sample_ids=torch.as_tensor(np.asarray(ids)))
    return MicroBatch(info=info, tokens_bs=tokens[:, :-1], labels_bs=tokens[:, 1:], loss_mask_bs=mask)


def step_batches(scenario: Scenario, step: int, dp_rank: int = 0, dp: int = 1) -> list[MicroBatch]:
    first = step * scenario.global_batch_size
    ids = micro_batch_ids(first, scenario.global_batch_size, scenario.micro_batch_size, dp_rank, dp)
    return [micro_batch(scenario, row) for row in ids]


@dataclass
class Run:
    """What a training run did.

    Attributes:
        losses, norms: of every step.
        initial, weights: full fp32 master weights before the first and after the last step.
        gradients: full gradients of the first step, reduced, before clipping.
        validation: loss sum and tokens over VALIDATION_SAMPLES samples on the initial weights.
        replicas: for every tensor that several ranks hold, the digests of their copies after the last step.
        reductions: dtype and number of elements of every gradient reduction.
        dropout_masks: digest of one mask per dropout site and tensor-parallel rank.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    initial: dict[str, np.ndarray] = field(default_factory=dict)
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    gradients: dict[str, np.ndarray] = field(default_factory=dict)
    validation: tuple[float, int] = (0.0, 0)
    replicas: dict[str, set[str]] = field(default_factory=dict)
    reductions: set[tuple[str, int]] = field(default_factory=set)
    dropout_masks: dict[str, dict[int, str]] = field(default_factory=dict)


def initial_weights(scenario: Scenario) -> Any:
    return hot_value(scenario.seed) if scenario.hot else None


def train_reference(scenario: Scenario) -> Run:
    """Plain torch on one process: autograd, fp32 gradient sums over micro-batches, clip, AdamW on fp32 masters."""
    model = GPT(scenario.model, scenario.seed, initial_weights(scenario)).to(scenario.dtype)
    working = model.parameters_by_name()
    masters = {name: p.detach().float().clone() for name, p in working.items()}
    groups = parameter_groups(masters.items(), tied_name=TIED_PARAMETER, weight_decay=scenario.optim.weight_decay)
    adamw = torch.optim.AdamW(groups, lr=scenario.lr, betas=tuple(scenario.optim.betas), eps=scenario.optim.eps)
    run = Run(validation=_reference_loss(model, scenario))
    run.initial = {name: m.numpy().copy() for name, m in masters.items()}
    for step in range(scenario.steps):
        batches = step_batches(scenario, step)
        total = sum(float(b.loss_mask_bs.sum()) for b in batches)
        loss_sum = 0.0
        for master in masters.values():
            master.grad = torch.zeros_like(master)
        for batch in batches:
            logits = model(batch.tokens_bs, batch.info)
            loss = (token_losses(logits, batch.labels_bs) * batch.loss_mask_bs).sum() / total
            for p in working.values():
                p.grad = None
            loss.backward()
            loss_sum += loss.item()
            for name, p in working.items():
                masters[name].grad += p.grad.float()
        if step == 0:
            run.gradients = {name: m.grad.numpy().copy() for name, m in masters.items()}
        limit = scenario.clip_grad or float("inf")
        run.norms.append(float(torch.nn.utils.clip_grad_norm_(masters.values(), limit, foreach=False)))
        run.losses.append(loss_sum)
        adamw.step()
        with torch.no_grad():
            for name, p in working.items():
                p.copy_(masters[name])
    run.weights = {name: m.numpy() for name, m in masters.items()}
    return run


@torch.no_grad()
def _reference_loss(model: GPT, scenario: Scenario) -> tuple[float, int]:
    loss_sum, tokens = 0.0, 0
    for sample_id in range(VALIDATION_SAMPLES):
        batch = micro_batch(scenario, [sample_id])
        losses = token_losses(model(batch.tokens_bs, batch.info), batch.labels_bs)
        loss_sum += float((losses * batch.loss_mask_bs).sum())
        tokens += int(batch.loss_mask_bs.sum())
    return loss_sum, tokens


def build_engine(scenario: Scenario, parallel: ParallelConfig) -> TrainEngine:
    grid = build_grid(parallel, dist.get_rank(), dist.get_world_size())
    return build_train_engine(
        scenario.model,
        parallel,
        scenario.optim,
        grid,
        precision=scenario.dtype,
        micro_batch_size=scenario.micro_batch_size,
        seed=scenario.seed,
        device=torch.device("cpu"),
        value=initial_weights(scenario),
    )


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


@contextmanager
def recorded_reductions(engine: TrainEngine, seen: set[tuple[str, int]]) -> Iterator[None]:
    """Notes dtype and size of every gradient reduction."""
    collectives = ("all_reduce", "reduce_scatter_tensor", "reduce_scatter", "reduce")
    places = [(dist, name) for name in collectives] + [(deepspeed.comm.comm.cdb, "reduce_scatter_function")]
    originals = {(holder, name): getattr(holder, name) for holder, name in places}
    groups = [axis.group for axis in (engine.grid.data, engine.grid.shard, engine.grid.replica) if axis.size > 1]

    def spy(original: Callable[..., Any], only: list[Any] | None) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensor = args[0] if args else kwargs.get("tensor", kwargs.get("output"))
            group = kwargs.get("group")
            if only is None or (group in only and tensor.numel() > LARGEST_SCALARS):
                seen.add((str(tensor.dtype), tensor.numel()))
            return original(*args, **kwargs)

        return call

    @contextmanager
    def spied(only: list[Any] | None) -> Iterator[None]:
        for (holder, name), original in originals.items():
            setattr(holder, name, spy(original, only))
        try:
            yield
        finally:
            for (holder, name), original in originals.items():
                setattr(holder, name, original)

    if isinstance(engine, ShardedTrainEngine):  # hooks of the backward pass reduce, among tensor-parallel sums
        with spied(groups):
            yield
        return
    inner = StageEngine._INSTRUCTION_MAP[schedule.ReduceGrads]

    def reduce(stage_engine: StageEngine) -> None:
        with spied(None):
            inner(stage_engine)

    StageEngine._INSTRUCTION_MAP[schedule.ReduceGrads] = reduce
    try:
        yield
    finally:
        StageEngine._INSTRUCTION_MAP[schedule.ReduceGrads] = inner


LARGEST_SCALARS = 2
"""Elements of the largest message on the data axis that carries counts and losses, no gradients."""


def _replicas(engine: TrainEngine) -> dict[str, str]:
    """Digest of every tensor of this rank that must be equal on the ranks that hold the same part of it."""
    tp, found = engine.grid.tp.rank, {}
    for p in engine._engine.module.parameters():
        place = p.placement
        if p.numel():  # ZeRO-3 holds no whole parameter
            found[f"working/{place.key}/{0 if place.dim is None else tp}"] = digest(p)
    for shard in engine.named_shards(owned=False):
        found[f"{shard.key}/{shard.offset}+{tuple(shard.tensor.shape)}"] = digest(shard.tensor)
    return found


def _dropout_masks(engine: TrainEngine) -> dict[str, str]:
    found = {}
    info = BatchInfo(sample_ids=torch.tensor([3, 4]))
    for module in engine._engine.module.modules():
        if isinstance(module, Dropout):
            mask = Dropout(0.5, module.seed, module.site)
            mask.stream = module.stream
            found[module.site] = digest(mask(torch.ones(2, 8, 8), info))
    return found


def _rank_train(scenario: Scenario, parallel: ParallelConfig, mutate: Callable[[], None] | None) -> dict[str, Any]:
    if mutate is not None:
        mutate()
    engine = build_engine(scenario, parallel)
    losses, norms, gradients = [], [], []
    reductions: set[tuple[str, int]] = set()

    def watch(shards: list[Shard]) -> None:
        gradients.extend(_copies(shards))
        engine.watch_gradients(None)

    engine.watch_gradients(watch)
    initial = _shards(engine)
    validation = evaluate(engine, scenario, parallel)
    with recorded_reductions(engine, reductions):
        for step in range(scenario.steps):
            result = engine.step(step_batches(scenario, step, engine.grid.dp.rank, parallel.dp), scenario.lr)
            losses.append(result.loss)
            norms.append(result.grad_norm)
    assert reductions or engine.grid.data.size == 1, "the spy saw no gradient"
    return {
        "losses": losses, "norms": norms, "gradients": gradients, "initial": initial, "shards": _shards(engine),
        "validation": validation, "replicas": _replicas(engine), "reductions": reductions,
        "dropout_masks": _dropout_masks(engine), "tp": engine.grid.tp.rank,
    }  # fmt: skip


def _shards(engine: TrainEngine) -> list[tuple[Any, ...]]:
    return _copies(engine.named_shards())


def _copies(shards: list[Shard]) -> list[tuple[Any, ...]]:
    return [(s.key, s.global_shape, s.offset, s.tensor.numpy().copy()) for s in shards]


VALIDATION_SAMPLES = 7


def validation_ids(scenario: Scenario, dp_rank: int, dp: int) -> Any:
    """Ids of this rank's validation micro-batches; those from VALIDATION_SAMPLES on are filling and fully masked."""
    block = scenario.micro_batch_size * dp
    return micro_batch_ids(0, -(-VALIDATION_SAMPLES // block) * block, scenario.micro_batch_size, dp_rank, dp)


def evaluate(engine: TrainEngine, scenario: Scenario, parallel: ParallelConfig) -> tuple[float, int]:
    batches = []
    for ids in validation_ids(scenario, engine.grid.dp.rank, parallel.dp):
        batch = micro_batch(scenario, ids)
        filling = torch.as_tensor(np.asarray(ids)) >= VALIDATION_SAMPLES
        batches.append(replace(batch, loss_mask_bs=batch.loss_mask_bs.masked_fill(filling[:, None], 0.0)))
    result = engine.evaluate(batches)
    return result.loss_sum, result.tokens


def assemble(shards: list[tuple[Any, ...]], kind: str) -> dict[str, np.ndarray]:
    """Full tensors of one kind from rectangles; every element must be covered once."""
    full: dict[str, np.ndarray] = {}
    covered: dict[str, np.ndarray] = {}
    for key, shape, offset, values in shards:
        prefix, _, name = key.partition("/")
        if prefix != kind:
            continue
        full.setdefault(name, np.zeros(shape, np.float32))
        covered.setdefault(name, np.zeros(shape, np.int32))
        where = tuple(slice(o, o + n) for o, n in zip(offset, values.shape, strict=True))
        full[name][where] = values
        covered[name][where] += 1
    assert all((c == 1).all() for c in covered.values()), "shards overlap or leave holes"
    return full


def fitted(scenario: Scenario, parallel: ParallelConfig) -> Scenario:
    """The same batches in the largest micro-batches that divide them over the layout."""
    sizes = range(scenario.micro_batch_size, 0, -1)
    fitting = next(size for size in sizes if scenario.global_batch_size % (size * parallel.dp) == 0)
    return replace(scenario, micro_batch_size=fitting)


def train_layout(scenario: Scenario, parallel: ParallelConfig, mutate: Callable[[], None] | None = None) -> Run:
    """Trains over gloo ranks and puts what the ranks hold together."""
    scenario = fitted(scenario, parallel)
    results = run_ranks(_rank_train, parallel.world_size, scenario, parallel, mutate)
    run = Run(losses=results[0]["losses"], norms=results[0]["norms"], validation=results[0]["validation"])
    for result in results:
        for what in ("losses", "norms", "validation"):
            assert result[what] == results[0][what], f"ranks report different {what}"
        run.reductions |= result["reductions"]
        for name, value in result["replicas"].items():
            run.replicas.setdefault(name, set()).add(value)
        for site, value in result["dropout_masks"].items():
            run.dropout_masks.setdefault(site, {})[result["tp"]] = value
    run.initial = assemble([s for r in results for s in r["initial"]], "weight")
    run.weights = assemble([s for r in results for s in r["shards"]], "weight")
    run.gradients = assemble([s for r in results for s in r["gradients"]], "gradient")
    return run


def relative(value: np.ndarray, reference: np.ndarray) -> float:
    """||value - reference|| / ||reference||, in fp64."""
    reference = reference.astype(np.float64)
    return float(np.linalg.norm(value.astype(np.float64) - reference) / max(np.linalg.norm(reference), 1e-30))


def scenario_with(**changes: Any) -> Scenario:
    return replace(Scenario(), **changes)


# The checks: each returns what is wrong, so that a test can assert that nothing is and a mutant that something is.


def check_initial_weights(run: Run, reference: Run) -> list[str]:
    """N1: the same seed gives bitwise the same full weights."""
    assert run.initial.keys() == reference.initial.keys()
    return [name for name, values in reference.initial.items() if not np.array_equal(run.initial[name], values)]


def check_first_step(run: Run, reference: Run) -> list[str]:
    """N3: loss 1e-6, grad norm 1e-5, every gradient 1e-5 of its norm."""
    faults = []
    if abs(run.losses[0] / reference.losses[0] - 1) > 1e-6:
        faults.append(f"loss {run.losses[0]} against {reference.losses[0]}")
    if abs(run.norms[0] / reference.norms[0] - 1) > 1e-5:
        faults.append(f"grad norm {run.norms[0]} against {reference.norms[0]}")
    assert run.gradients.keys() == reference.gradients.keys()
    for name, gradient in reference.gradients.items():
        # Not `>`, so that a NaN, a gradient no rank held, is a fault.
        if not relative(run.gradients[name], gradient) <= 1e-5:
            faults.append(f"gradient of {name} off by {relative(run.gradients[name], gradient):.1e} of its norm")
    return faults


def check_curve(run: Run, reference: Run) -> list[str]:
    """N3: over all steps loss 1e-5 and grad norm 1e-4; in the end every weight 1e-4. All relative."""
    faults = []
    for step, (loss, norm) in enumerate(zip(run.losses, run.norms, strict=True), start=1):
        if not abs(loss / reference.losses[step - 1] - 1) <= 1e-5:
            faults.append(f"loss of step {step}: {loss} against {reference.losses[step - 1]}")
        if not abs(norm / reference.norms[step - 1] - 1) <= 1e-4:
            faults.append(f"grad norm of step {step}: {norm} against {reference.norms[step - 1]}")
    for name, weight in reference.weights.items():
        ours, theirs = without_key_bias(name, run.weights[name]), without_key_bias(name, weight)
        if not relative(ours, theirs) <= 1e-4:
            faults.append(f"{name} off by {relative(ours, theirs):.1e} of its norm")
    return faults


def without_key_bias(name: str, values: np.ndarray) -> np.ndarray:
    """Leaves out the key biases: softmax does not feel them, their gradient is rounding noise that Adam blows up."""
    if not name.endswith("attention.qkv.bias"):
        return values
    return np.delete(values.reshape(MODEL.num_heads, 3, -1), 1, axis=1)


def check_replicas(run: Run, reference: Run) -> list[str]:
    """N8: copies of one tensor are bitwise equal on all ranks that hold it."""
    del reference
    return sorted(name for name, digests in run.replicas.items() if len(digests) > 1)


def check_reduction_dtype(run: Run, reference: Run) -> list[str]:
    """N7: every gradient collective carries fp32."""
    del reference
    return [f"{dtype} reduction of {numel}" for dtype, numel in sorted(run.reductions) if dtype != "torch.float32"]


def check_validation(run: Run, reference: Run) -> list[str]:
    """N10: the token mean over the whole validation set, its incomplete last batch included."""
    (loss, tokens), (expected, expected_tokens) = run.validation, reference.validation
    if tokens == expected_tokens and abs(loss / expected - 1) <= 1e-6:
        return []
    return [f"validation {loss} over {tokens} tokens against {expected} over {expected_tokens}"]


def check_dropout_streams(run: Run, reference: Run) -> list[str]:
    """Attention dropout differs between tensor-parallel ranks, every other dropout is the same on all of them."""
    del reference
    faults = []
    for site, by_rank in run.dropout_masks.items():
        wanted = len(by_rank) if "core" in site else 1
        if len(set(by_rank.values())) != wanted:
            faults.append(f"{site}: {len(set(by_rank.values()))} masks on {len(by_rank)} ranks, want {wanted}")
    return faults
