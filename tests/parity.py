"""One small model on hot weights, trained unsharded and in any layout: what the parity tests compare.

At BLOOM's init a wrong ALiBi slope hides below 1e-6, so weights here have std 0.2, gains and biases are random, six
heads bring in the odd ALiBi slopes, and 101 tokens leave padding rows in every tensor-parallel layout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megads.batch import BatchInfo, MicroBatch
from megads.data.sampler import micro_batch_ids
from megads.engine.training import PipelineTrainEngine
from megads.model.config import ModelConfig
from megads.model.gpt import GPT
from megads.model.initialise import parameter_generator
from megads.model.loss import token_losses
from megads.model.stages import TIED_PARAMETER
from megads.optim.config import OptimConfig
from megads.optim.groups import parameter_groups
from megads.parallel.config import ParallelConfig
from megads.parallel.grid import build_grid

MODEL = ModelConfig(num_layers=4, hidden_size=48, num_heads=6, vocab_size=101, max_seq_len=64)
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
}


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
    """What a training run did."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, np.ndarray] = field(default_factory=dict)
    weights: dict[str, np.ndarray] = field(default_factory=dict)


def initial_weights(scenario: Scenario) -> Any:
    return hot_value(scenario.seed) if scenario.hot else None


def train_reference(scenario: Scenario) -> Run:
    """Plain torch on one process: autograd, fp32 gradient sums over micro-batches, clip, AdamW on fp32 masters."""
    model = GPT(scenario.model, scenario.seed, initial_weights(scenario)).to(scenario.dtype)
    working = model.parameters_by_name()
    masters = {name: p.detach().float().clone() for name, p in working.items()}
    groups = parameter_groups(masters.items(), tied_name=TIED_PARAMETER, weight_decay=scenario.optim.weight_decay)
    adamw = torch.optim.AdamW(groups, lr=scenario.lr, betas=tuple(scenario.optim.betas), eps=scenario.optim.eps)
    run = Run()
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


def build_engine(scenario: Scenario, parallel: ParallelConfig) -> PipelineTrainEngine:
    grid = build_grid(parallel, dist.get_rank(), dist.get_world_size())
    return PipelineTrainEngine(
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


def _gradient_pieces(engine: PipelineTrainEngine) -> list[tuple[str, tuple[int, ...], int | None, int, int, np.ndarray]]:
    """This rank's reduced gradients before clipping: key, global shape, cut dim, start, length, values."""
    optimizer = engine._engine.optimizer
    flat = [g for group in optimizer.fp32_groups_gradients for g in group]
    pieces = []
    for p, grad in zip(optimizer.parameters, flat, strict=True):
        place = p.placement
        pieces.append((place.key, place.global_shape, place.dim, place.start, place.length, grad.view(p.shape).numpy().copy()))
    return pieces


def _rank_train(scenario: Scenario, parallel: ParallelConfig, mutate: Callable[[], None] | None) -> dict[str, Any]:
    if mutate is not None:
        mutate()
    engine = build_engine(scenario, parallel)
    losses, norms, gradients = [], [], []
    inner_step = engine._engine.optimizer.step

    def recording_step() -> None:
        if not gradients:
            gradients.extend(_gradient_pieces(engine))
        inner_step()

    engine._engine.optimizer.step = recording_step
    for step in range(scenario.steps):
        result = engine.step(step_batches(scenario, step, engine.grid.dp.rank, parallel.dp), scenario.lr)
        losses.append(result.loss)
        norms.append(result.grad_norm)
    shards = [(s.key, s.global_shape, s.offset, s.tensor.numpy()) for s in engine.named_shards()]
    return {"losses": losses, "norms": norms, "gradients": gradients, "shards": shards}


def assemble(shards: list[tuple[str, tuple[int, ...], tuple[int, ...], np.ndarray]], kind: str) -> dict[str, np.ndarray]:
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


def train_layout(scenario: Scenario, parallel: ParallelConfig, mutate: Callable[[], None] | None = None) -> Run:
    """Trains over gloo ranks; losses and norms must agree on all ranks."""
    from tests.distributed import run_ranks

    results = run_ranks(_rank_train, parallel.world_size, scenario, parallel, mutate)
    for result in results:
        assert result["losses"] == results[0]["losses"], "ranks report different losses"
        assert result["norms"] == results[0]["norms"], "ranks report different norms"
    run = Run(losses=results[0]["losses"], norms=results[0]["norms"])
    run.weights = assemble([s for r in results for s in r["shards"]], "weight")
    for result in results:
        for key, shape, dim, start, length, values in result["gradients"]:
            full = run.gradients.setdefault(key, np.full(shape, np.nan, np.float32))
            if dim is None:
                full[...] = values
            else:
                where = tuple(slice(start, start + length) if d == dim else slice(None) for d in range(len(shape)))
                full[where] = values[tuple(slice(0, length) if d == dim else slice(None) for d in range(len(shape)))]
    return run


def relative(value: np.ndarray, reference: np.ndarray) -> float:
    """||value - reference|| / ||reference||, in fp64."""
    reference = reference.astype(np.float64)
    return float(np.linalg.norm(value.astype(np.float64) - reference) / max(np.linalg.norm(reference), 1e-30))


def scenario_with(**changes: Any) -> Scenario:
    return replace(Scenario(), **changes)
