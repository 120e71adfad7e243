"""The training engine: token-mean loss, settings, skipped steps, memory, and saving and loading of its state."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megads.batch import MicroBatch
from megads.engine.interface import Shard, StepResult, TrainEngine
from megads.model.config import ModelConfig
from megads.model.gpt import GPT, token_losses
from megads.model.model_size import parameter_count, parameter_shapes
from megads.parallel.config import ParallelConfig
from megads.parallel.grid import single_rank_grid
from megads.parallel.loss import TokenMeanLoss
from tests import parity
from tests.distributed import run_ranks
from tests.parity import LAYOUTS, Scenario, build_engine, scenario_with, step_batches

distributed = pytest.mark.distributed


@pytest.mark.parametrize("seed", range(40))
def test_the_loss_is_the_token_mean_exactly(seed: int) -> None:
    """Catches a mean of means, a division by dp or the number of micro-batches, and masked tokens that count (N9)."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    dp, micro_batches, batch, seq_len, vocab = (rng.randint(1, n) for n in (4, 4, 3, 9, 11))
    shape = (dp, micro_batches, batch, seq_len)
    logits = torch.randn(*shape, vocab, dtype=torch.float64, generator=generator).requires_grad_()
    labels = torch.randint(0, vocab, shape, generator=generator)
    kept = torch.tensor([rng.randint(1, seq_len) for _ in range(dp * micro_batches * batch)]).view(
        dp, micro_batches, batch
    )
    mask = (torch.arange(seq_len) < kept[..., None]).float()

    loss = TokenMeanLoss(vocab, single_rank_grid())
    loss.scale = 1 / mask.sum(dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    for rank in range(dp):
        for index in range(micro_batches):
            here = (rank, index)
            total = total + loss(logits[here], (labels[here], mask[here]))
    (ours,) = torch.autograd.grad(total, logits)

    chosen = mask.bool()
    mean = F.cross_entropy(logits[chosen], labels[chosen])
    (theirs,) = torch.autograd.grad(mean, logits)
    torch.testing.assert_close(total, mean, rtol=1e-14, atol=0)
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-16)
    assert not ours[~chosen].any()


def _facts(scenario: Scenario, parallel: ParallelConfig) -> dict[str, Any]:
    engine = build_engine(scenario, parallel)
    result = engine.step(step_batches(scenario, 0, engine.grid.dp.rank, parallel.dp), scenario.lr)
    optimizer = engine.optimizer
    return {
        "result": result,
        "bounds": engine.bounds,
        "steps": engine.optimizer_steps,
        "weights": {str(p.dtype) for p in optimizer.parameters},
        "state": {str(shard.tensor.dtype) for shard in engine.named_shards(owned=False)},
        "left": [bucket.gradient for bucket in optimizer.buckets] + [p.grad for p in engine.module.parameters()],
        "optimizer": type(optimizer.base).__name__,
        "groups": {(group["lr"], group["weight_decay"]) for group in optimizer.param_groups},
    }


@distributed
def test_settings_reach_the_engine_and_every_rank_reports_the_same_step() -> None:
    """Catches weights or optimizer states in the wrong dtype, gradients not freed after the step, a learning rate or
    weight decay that is not passed on, and ranks that report different losses."""
    scenario = scenario_with(masked=True, precision="bfloat16", lr=3e-4)
    every = run_ranks(_facts, 4, scenario, LAYOUTS["pp2dp2"])
    tokens = sum(int(batch.loss_mask_bs.sum()) for batch in step_batches(scenario, 0))
    for facts in every:
        result = facts["result"]
        assert isinstance(result, StepResult) and result == every[0]["result"]
        assert (result.tokens, result.skipped, result.culprit) == (tokens, False, None)
        assert type(result.loss) is float and type(result.grad_norm) is float
        assert facts["bounds"] == [0, 2, 6], "embedding and a block; two blocks, the norm and the head"
        assert facts["steps"] == 1
        assert facts["weights"] == {"torch.bfloat16"} and facts["state"] == {"torch.float32"}
        assert not any(gradient is not None for gradient in facts["left"])
        assert facts["groups"] == {(3e-4, 0.0), (3e-4, scenario.optim.weight_decay)}
        assert facts["optimizer"] == "FusedAdamW"


def _waits(scenario: Scenario, parallel: ParallelConfig) -> list[str]:
    engine = build_engine(scenario, parallel)
    batches = step_batches(scenario, 0, engine.grid.dp.rank, parallel.dp)
    before, seen = [shard.tensor.clone() for shard in engine.named_shards(owned=False)], list[str]()

    def changed() -> bool:
        now = [shard.tensor for shard in engine.named_shards(owned=False)]
        return not all(torch.equal(one, other) for one, other in zip(before, now, strict=True))

    engine.watch_gradients(lambda _: seen.append("gradients"))
    engine.before_update(lambda: seen.append("changed" if changed() else "as it was"))
    engine.step(batches, scenario.lr)
    engine.before_update(None)
    seen.append("changed" if changed() else "as it was")
    engine.step(batches, scenario.lr)
    return seen


@distributed
@pytest.mark.quick("pp2dp2", "dp2zero3")
@pytest.mark.parametrize("name", ["pp2dp2", "dp2zero2", "dp2zero3"])
def test_an_update_waits_for_readers_of_the_state(name: str) -> None:
    """Catches an update that does not wait for a copy of the state, one that waits before the backward pass, which
    would not overlap with the copy, and a removed wait that is still called."""
    parallel = {
        **LAYOUTS, "dp2zero2": ParallelConfig(dp=2, zero_stage=2), "dp2zero3": ParallelConfig(dp=2, zero_stage=3)
    }[name]  # fmt: skip
    for seen in run_ranks(_waits, parallel.world_size, scenario_with(), parallel):
        assert seen == ["gradients", "as it was", "changed"]


def _unequal_steps(scenario: Scenario, layout: str) -> dict[str, Any]:
    parallel = LAYOUTS[layout]
    engine = build_engine(scenario, parallel)
    many = step_batches(scenario, 0, engine.grid.dp.rank, parallel.dp)
    one = step_batches(scenario, 1, engine.grid.dp.rank, parallel.dp)[:1]
    blind = [replace(batch, loss_mask_bs=torch.zeros_like(batch.loss_mask_bs)) for batch in one]
    first = engine.step(many, 0.0)
    before = engine.evaluate(many[:2])
    return {
        "first": first,
        "second": engine.step(one, 0.0),
        "blind": engine.step(blind, 0.0),
        "evaluations": [before, engine.evaluate(many[:2])],
        "again": engine.step(many, 0.0),
    }


@distributed
@pytest.mark.quick("pp2", "zero2dp2")
@pytest.mark.parametrize("layout", ["pp2", "zero2dp2", "zero3dp2"])
def test_steps_do_not_depend_on_what_came_before(layout: str) -> None:
    """Catches a batch-size ramp that divides by the first step's micro-batches, gradients left over from the last step,
    dropout in evaluation, none in training after an evaluation, and NaN for a step without unmasked tokens."""
    model = replace(parity.MODEL, hidden_dropout=0.2, attention_dropout=0.2)
    scenario = scenario_with(masked=True, model=model, clip_grad=0.0)
    found, other = run_ranks(_unequal_steps, 2, scenario, layout)
    assert found == other
    assert found["first"] == found["again"]
    assert found["blind"] == StepResult(loss=0.0, tokens=0, grad_norm=0.0)
    assert found["evaluations"][0] == found["evaluations"][1]
    reference = GPT(model, scenario.seed, parity.initial_weights(scenario))

    def loss_of(batches: list[MicroBatch]) -> Tensor:
        losses = (token_losses(reference(b.tokens_bs, b.info), b.labels_bs) * b.loss_mask_bs for b in batches)
        return torch.stack([each.sum() for each in losses]).sum()

    dp = LAYOUTS[layout].dp
    batches = [step_batches(scenario, 1, rank, dp)[0] for rank in range(dp)]
    tokens = sum(float(b.loss_mask_bs.sum()) for b in batches)
    loss = loss_of(batches) / tokens
    loss.backward()
    norm = torch.cat([p.grad.flatten() for p in reference.parameters()]).norm().item()
    assert found["second"].tokens == tokens
    assert found["second"].loss == pytest.approx(loss.item(), rel=1e-6)
    assert found["second"].grad_norm == pytest.approx(norm, rel=1e-5)
    reference.eval()
    with torch.no_grad():
        summed = loss_of([batch for rank in range(dp) for batch in step_batches(scenario, 0, rank, dp)[:2]])
    assert found["evaluations"][0].loss_sum == pytest.approx(float(summed), rel=1e-6)


SPOILED = 1
"""The data-parallel rank whose samples contain a token that no other rank has."""


def broken_value(where: str, scenario: Scenario, dp: int) -> Callable[[str, tuple[int, ...]], Tensor]:
    """Initial weights that make the weights, the forward pass or the backward pass of a step non-finite; for `data`,
    the forward pass of one data-parallel rank."""
    hot = parity.hot_weights(scenario.seed)
    tokens = [
        {t for b in step_batches(scenario, 0, rank, dp) for t in b.tokens_bs.flatten().tolist()} for rank in range(dp)
    ]

    def value(name: str, shape: tuple[int, ...]) -> Tensor:
        full = hot(name, shape)
        if where == "weights" and name == "blocks.2.mlp.down.bias":
            full[3] = float("inf")
        if where == "forward" and name == "final_norm.weight":
            full *= 1e38
        if where == "data" and name == "embedding.word.weight":
            full[min(tokens[SPOILED] - tokens[1 - SPOILED])] = 3e38  # finite, but its variance is not
        if where == "backward" and name.startswith("embedding"):
            # All embeddings are equal and zero: two LayerNorms without variance each scale gradients by 1 / sqrt(eps).
            full = torch.ones(shape) if name == "embedding.norm.weight" else torch.zeros(shape)
        return full

    return value


def broken_step(where: str, layout: str) -> dict[str, Any]:
    """A step that must be skipped, and the next ones of this engine and of another, with sound weights."""
    model = replace(parity.MODEL, tie_embeddings=False, norm_eps=1e-42 if where == "backward" else 1e-5)
    scenario, parallel = scenario_with(model=model), LAYOUTS[layout]
    good = build_engine(scenario, parallel)
    engine = build_engine(scenario, parallel, broken_value(where, scenario, parallel.dp))
    before, batches = state(engine), step_batches(scenario, 0, engine.grid.dp.rank, parallel.dp)
    result = engine.step(batches, 1e-3)
    untouched = state(engine).keys() == before.keys() and all(
        np.array_equal(values, before[place], equal_nan=True) for place, values in state(engine).items()
    )
    steps = engine.optimizer_steps
    engine.load_shards(filling_from(state(good)), 0)
    after = [e.step(batches, 1e-3) for e in (engine, good)] if where != "backward" else []
    return {"result": result, "untouched": untouched, "steps": steps, "after": after}


def check_skipped(ranks: list[dict[str, Any]], where: str, rank: int | None, parameter: str | None) -> None:
    """Checks what `broken_step` returned on each rank: the culprit, and that nothing changed."""
    for found in ranks:
        result = found["result"]
        assert result.skipped and result.culprit is not None and result.culprit.where == where
        assert rank is None or result.culprit.rank == rank
        assert parameter is None or parameter in result.culprit.parameters
        assert result.grad_norm == float("inf") and found["untouched"] and found["steps"] == 0
        if found["after"]:
            assert found["after"][0] == found["after"][1] and not found["after"][0].skipped


@distributed
@pytest.mark.quick("weights-pp2", "forward-pp2", "backward-pp2", "weights-zero3dp2")
@pytest.mark.parametrize(
    ("where", "layout"),
    [
        *(("weights", "pp2"), ("forward", "pp2"), ("backward", "pp2")),
        *(("weights", "zero3dp2"), ("data", "zero2dp2"), ("data", "zero3dp2"), ("backward", "zero3dp2")),
    ],
)
def test_a_nonfinite_step_changes_nothing_and_names_its_culprit(where: str, layout: str) -> None:
    """Catches DeepSpeed's silent skip, a rank blamed for values that it received, moments or counters that a skipped
    step changes, and NaN left in gradient buffers or partitions that corrupts the next, finite step."""
    stages = {"weights": 1, "forward": 1, "backward": 0}
    rank = stages[where] if layout == "pp2" else SPOILED if where == "data" else None
    parameter = {"weights": "blocks.2.mlp.down.bias", "backward": "embedding.word.weight"}.get(where)
    check_skipped(run_ranks(broken_step, 2, where, layout), "forward" if where == "data" else where, rank, parameter)


Place = tuple[str, tuple[int, ...], tuple[int, ...]]


def state(engine: TrainEngine) -> dict[Place, np.ndarray]:
    """Copies of all shards that this rank holds."""
    shards = engine.named_shards(owned=False)
    return {(s.key, s.offset, tuple(s.tensor.shape)): s.tensor.numpy().copy() for s in shards}


def filling_from(saved: dict[Place, np.ndarray]) -> Callable[[list[Shard]], None]:
    def fill(shards: list[Shard]) -> None:
        for shard in shards:
            shard.tensor.copy_(torch.from_numpy(saved[shard.key, shard.offset, tuple(shard.tensor.shape)]))

    return fill


KINDS = ("weight", "exp_avg", "exp_avg_sq")
ROUND_TRIP = scenario_with(masked=True)


def _train_save_and_continue(name: str) -> dict[str, Any]:
    """Trains two steps, then the third here and on a second engine of the same layout that loads the state."""
    parallel = LAYOUTS[name]
    scenario = parity.fitted(ROUND_TRIP, parallel)
    engine = build_engine(scenario, parallel)
    batches = [step_batches(scenario, step, engine.grid.dp.rank, parallel.dp) for step in range(3)]
    for batch in batches[:2]:
        engine.step(batch, scenario.lr)
    saved, owned, steps = state(engine), parity.pieces(engine.named_shards()), engine.optimizer_steps
    result = engine.step(batches[2], scenario.lr)

    other = build_engine(replace(scenario, seed=99), parallel)
    other.load_shards(filling_from(saved), steps)
    resumed = other.step(batches[2], scenario.lr)
    after, after_resumed = state(engine), state(other)
    bitwise = all(np.array_equal(values, after_resumed[place]) for place, values in after.items())
    return {"owned": owned, "steps": steps, "result": result, "resumed": resumed, "bitwise": bitwise}


def load_and_continue(name: str, full: dict[str, dict[str, np.ndarray]], steps: int) -> dict[str, Any]:
    parallel = LAYOUTS[name]
    scenario = parity.fitted(ROUND_TRIP, parallel)
    engine = build_engine(replace(scenario, seed=99), parallel)

    def fill(shards: list[Shard]) -> None:
        for shard in shards:
            kind, _, key = shard.key.partition("/")
            assert full[kind][key].shape == shard.global_shape
            where = tuple(slice(o, o + n) for o, n in zip(shard.offset, shard.tensor.shape, strict=True))
            shard.tensor.copy_(torch.from_numpy(full[kind][key][where]))

    engine.load_shards(fill, steps)
    owned, loaded_steps = parity.pieces(engine.named_shards()), engine.optimizer_steps
    result = engine.step(step_batches(scenario, 2, engine.grid.dp.rank, parallel.dp), scenario.lr)
    return {"owned": owned, "steps": loaded_steps, "result": result}


def everything(results: list[dict[str, Any]]) -> dict[str, dict[str, np.ndarray]]:
    """All tensors by kind and name; asserts that the owned shards of all ranks cover each element exactly once."""
    shards = [shard for result in results for shard in result["owned"]]
    return {kind: parity.assemble(shards, kind) for kind in KINDS}


def check_round_trips(layout: str, others: Sequence[str]) -> None:
    """Moves state from a layout into itself and others; the next step must be that of an uninterrupted run."""
    trained = run_ranks(_train_save_and_continue, LAYOUTS[layout].world_size, layout)
    full, steps, result = everything(trained), trained[0]["steps"], trained[0]["result"]
    for kind in KINDS:
        assert {name: values.shape for name, values in full[kind].items()} == parameter_shapes(parity.MODEL)
        assert all(values.any() for values in full[kind].values()), f"{kind} of some parameter is zero"
    assert steps == 2
    for rank in trained:
        assert rank["bitwise"] and rank["resumed"] == result, "the same layout must continue bit for bit"

    for name in others:
        loaded = run_ranks(load_and_continue, LAYOUTS[name].world_size, name, full, steps)
        back = everything(loaded)
        for kind in KINDS:
            assert all(np.array_equal(back[kind][key], values) for key, values in full[kind].items()), (name, kind)
        assert loaded[0]["steps"] == steps
        assert loaded[0]["result"].loss == pytest.approx(result.loss, rel=1e-6)
        assert loaded[0]["result"].grad_norm == pytest.approx(result.grad_norm, rel=1e-5)


@pytest.mark.slow
@distributed
@pytest.mark.parametrize(
    ("layout", "others"),
    [
        ("tp2pp2dp2", ("pp2dp3", "tp3", "tp2sp", "cp2")),
        ("pp2 zb_v", ("pp2 interleaved", "tp2pp2", "pp2dp2 dualpipe_v", "pp2 zb_h1")),
        ("zero3tp2dp2", ("tp2pp2", "zero2dp3")),
        ("hierarchical", ("zero3dp3",)),
        ("tp2pp2", ("hierarchical",)),
    ],
)
def test_state_loads_in_other_layouts(layout: str, others: tuple[str, ...]) -> None:
    """Catches shards that overlap, leave gaps, contain padding or are owned by every subgroup, moments or counters that
    are not restored, weights that are loaded into the master weights only, and virtual stages whose state is not found
    where another schedule placed it."""
    check_round_trips(layout, others)


MEMORY = scenario_with(
    model=ModelConfig(num_layers=2, hidden_size=128, num_heads=4, vocab_size=4096), precision="bfloat16"
)


def live_storages() -> dict[int, int]:
    """Bytes of every distinct storage that a live tensor uses, by address."""
    found = {}
    for candidate in gc.get_objects():
        if issubclass(type(candidate), Tensor) and candidate.device.type != "meta":
            for tensor in (candidate, candidate.grad if candidate.is_leaf else None):
                if tensor is not None:
                    storage = tensor.untyped_storage()
                    found[storage.data_ptr()] = storage.nbytes()
    return found


def _bytes_per_parameter(dp: int) -> tuple[float, bool]:
    gc.collect()
    before = live_storages()
    parallel = ParallelConfig(dp=dp)
    engine = build_engine(MEMORY, parallel)
    engine.step(step_batches(MEMORY, 0, engine.grid.dp.rank, dp), MEMORY.lr)
    gc.collect()
    taken = sum(size for address, size in live_storages().items() if address not in before)

    def fill(shards: list[Shard]) -> None:
        for shard in shards:
            shard.tensor.fill_(0.1)

    engine.load_shards(fill, 1)
    working = [p for p in engine.module.parameters() if p.dim() == 2]
    return taken / parameter_count(MEMORY.model), all(bool((p == torch.tensor(0.1).bfloat16()).all()) for p in working)


@distributed
@pytest.mark.parametrize("dp", [1, 2])
def test_memory_per_parameter_stays_within_its_budget(dp: int) -> None:
    """Catches a second copy of the weights, gradients not freed after the step (the budget is 2 + 12 / dp bytes), and
    loaded master weights that are not copied to the bf16 weights."""
    for bytes_per_parameter, loaded in run_ranks(_bytes_per_parameter, dp, dp):
        assert bytes_per_parameter == pytest.approx(2 + 12 / dp, rel=0.02)
        assert loaded


class LargestOutputs(TorchDispatchMode):
    """Records the largest tensor that any operation returns, backward passes and custom functions included."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = self.last_dim = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tensors_in(out):
            self.numel = max(self.numel, tensor.numel())
            # Flat parameter buffers are one-dimensional and long, or blocks of them for the norm; logits have a row for
            # each token.
            if tensor.dim() >= 2 and tensor.numel() >= LOGITS.seq_len * tensor.shape[-1]:
                self.last_dim = max(self.last_dim, tensor.shape[-1])
        return out


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


# The logits, 2 x 64 x 509, have more elements than all parameters together.
LOGITS = scenario_with(
    model=ModelConfig(num_layers=1, hidden_size=16, num_heads=2, vocab_size=509), seq_len=64, global_batch_size=2
)


def _largest_outputs(parallel: ParallelConfig) -> tuple[int, int]:
    engine = build_engine(LOGITS, parallel)
    with LargestOutputs() as largest:
        engine.step(step_batches(LOGITS, 0), LOGITS.lr)
        engine.evaluate(step_batches(LOGITS, 0))
    return largest.numel, largest.last_dim


@distributed
def test_no_rank_holds_logits_over_the_whole_vocabulary() -> None:
    """Catches an all-gather of the logits in the loss, its backward pass or the evaluation. A single rank must hold
    them, which shows that the dispatch mode sees them."""
    full = LOGITS.micro_batch_size * LOGITS.seq_len * LOGITS.model.vocab_size
    assert parameter_count(LOGITS.model) < full
    for numel, last_dim in run_ranks(_largest_outputs, 2, LAYOUTS["tp2"]):
        assert numel < full and last_dim < LOGITS.model.vocab_size
    ((numel, last_dim),) = run_ranks(_largest_outputs, 1, LAYOUTS["single"])
    assert numel >= full and last_dim >= LOGITS.model.vocab_size
