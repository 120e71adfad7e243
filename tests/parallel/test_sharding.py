"""Applying a sharding table: shards tile every tensor, hold slices of the full values, and layers equal torch's."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megads.batch import BatchInfo
from megads.errors import ConfigError
from megads.model.attention import AttentionCore
from megads.model.config import ModelConfig, Position
from megads.model.gpt import layer_specs
from megads.model.layers import Dropout
from megads.model.model_size import parameter_shapes
from megads.model.sharding import SHARDING, sharding_of
from megads.ops.config import FUSED, TORCH, Implementation, OpsConfig
from megads.ops.resolve import load
from megads.parallel.config import ParallelConfig, padded_rows
from megads.parallel.embedding import VocabParallelEmbedding, add_sorted, lookup, spread
from megads.parallel.grid import Axis
from megads.parallel.partition import ParallelStyle, ShardingTable
from megads.parallel.region_linear import Region
from megads.parallel.sharding import (
    ColumnParallelBranches,
    ColumnParallelLinear,
    ParameterPlacement,
    RowParallelBranches,
    RowParallelLinear,
    VocabParallelHead,
    materialise,
    shard_layer,
)
from megads.parallel.weight_gradients import TiedGradient, WeightGradients, linear
from tests.distributed import run_ranks
from tests.parallel.main_grads import FlatMainGrads
from tests.parallel.test_region_linear import tensor_axis
from tests.parallel.test_weight_gradients import Taken

# Over 3 ranks, 7 rows leave padding on the last rank; 4 rows leave it nothing but padding.
CONFIG = ModelConfig(
    num_layers=1, hidden_size=24, num_heads=6, ffn_size=36, vocab_size=7, max_seq_len=5,
    position=Position.learned, tie_embeddings=False,
)  # fmt: skip
Sharded = list[tuple[nn.Module, dict[str, ParameterPlacement], str]]
INFO = BatchInfo(sample_ids=torch.tensor([0, 1]))
FFN = 12
# Over 3 ranks: divisible; a rank half filled with padding; a rank with padding only.
VOCAB_CASES = [(6, False), (5, False), (4, False), (5, True)]
LENGTH = 6
ROWS, HIDDEN = 11, 6


def axis_of(rank: int, size: int) -> Axis:
    return Axis(rank, tuple(range(size)), None)


def full_value(name: str, shape: tuple[int, ...]) -> Tensor:
    """All elements of all tensors differ and are nonzero."""
    return 1.0 + torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) + 1e5 * len(name)


def sharded(config: ModelConfig, rank: int, size: int, sequence_parallel: bool = False) -> Sharded:
    """Every layer, sharded for one rank and filled."""
    layers = []
    for spec in layer_specs(config, 0):
        with torch.device("meta"):
            layer = spec.build()
        layer, placements = shard_layer(
            layer, spec.name, sharding_of(config), axis_of(rank, size), sequence_parallel=sequence_parallel
        )
        layers.append((materialise(layer, placements, full_value, torch.device("cpu")), placements, spec.name))
    return layers


@pytest.mark.parametrize("size", [1, 2, 3, 6])
@pytest.mark.parametrize(("vocab_size", "kv_heads"), [(7, None), (4, None), (7, 1), (7, 3)])
def test_shards_tile_every_tensor(size: int, vocab_size: int, kv_heads: int | None) -> None:
    """Catches shards that overlap, leave holes or hold wrong values, and padding that is not zero."""
    if kv_heads is not None and kv_heads % size and size % kv_heads:
        pytest.skip("neither number of KV heads and ranks divides the other")
    head_size = None if kv_heads is None else 6
    config = replace(CONFIG, vocab_size=vocab_size, num_kv_heads=kv_heads, head_size=head_size)
    shapes = parameter_shapes(config)
    covered = {name: torch.zeros(shape) for name, shape in shapes.items()}
    replicated = set()
    for rank in range(size):
        for layer, placements, prefix in sharded(config, rank, size):
            for path, parameter in layer.named_parameters():
                place = placements[path]
                assert place.key == f"{prefix}.{path}" and place.global_shape == shapes[place.key]
                assert parameter.tensor_model_parallel is (place.dim is not None)
                whole = full_value(place.key, place.global_shape)
                if place.dim is None:
                    replicated.add(place.key)
                    assert torch.equal(parameter, whole) and place.local_shape == place.global_shape
                    covered[place.key] += 1.0 / size
                    continue
                real = parameter.narrow(place.dim, 0, place.length)
                padding = parameter.narrow(place.dim, place.length, parameter.shape[place.dim] - place.length)
                assert torch.equal(real, place.part_of(whole))
                assert real.shape == place.local_shape and not padding.any()
                for part in place.held:
                    covered[place.key].narrow(place.dim, part.start, len(part)).add_(1)
    for name, count in covered.items():
        torch.testing.assert_close(count, torch.ones_like(count), msg=f"{name} is not covered once")
    assert all(
        "norm" in name or "position" in name or name.endswith(("dense.bias", "down.bias")) for name in replicated
    )


@pytest.mark.parametrize("rank", [0, 2])
def test_attention_cores_get_the_ranks_heads(rank: int) -> None:
    """Catches an attention core that keeps all heads, so that every rank applies the dropout of the first ones."""
    modules = [module for layer, _, _ in sharded(CONFIG, rank, 3) for module in layer.modules()]
    (core,) = (module for module in modules if isinstance(module, AttentionCore))
    assert core.heads == range(2 * rank, 2 * rank + 2)


@pytest.mark.parametrize(("size", "sequence_parallel"), [(3, True), (3, False), (1, True)])
def test_parameters_on_sequence_shards_are_marked_partial(size: int, sequence_parallel: bool) -> None:
    """Catches a norm, row-parallel bias or position table that is not marked gradient_partial, a dropout on sequence
    shards that is not sharded, one inside a region that is, and sequence sharding on a single rank."""
    on_shards = sequence_parallel and size > 1
    layers = sharded(CONFIG, size - 1, size, sequence_parallel)
    for layer, placements, _ in layers:
        for path, parameter in layer.named_parameters():
            assert parameter.gradient_partial is (on_shards and placements[path].dim is None), path
    dropouts = [module for layer, _, _ in layers for module in layer.modules() if isinstance(module, Dropout)]
    for dropout in dropouts:
        inside = dropout.site == "blocks.0.attention.core.dropout"
        assert dropout.shard == ((size - 1, size) if on_shards and not inside else (0, 1)), dropout.site


def test_one_full_tensor_in_memory_at_a_time() -> None:
    """Catches an initialization that allocates the full layer, or the full model, before it slices."""
    alive: list[weakref.ref[Tensor]] = []

    def value(name: str, shape: tuple[int, ...]) -> Tensor:
        assert not [ref for ref in alive if ref() is not None], f"another full tensor is alive when {name} is drawn"
        full = full_value(name, shape)
        alive.append(weakref.ref(full))
        return full

    for spec in layer_specs(CONFIG, 0):
        with torch.device("meta"):
            layer = spec.build()
        layer, placements = shard_layer(layer, spec.name, SHARDING, axis_of(1, 2), sequence_parallel=False)
        assert all(parameter.is_meta for parameter in layer.parameters()), "memory was taken before the cut"
        materialise(layer, placements, value, torch.device("cpu"))
    assert len(alive) == len(parameter_shapes(CONFIG))


def test_sizes_that_do_not_divide_are_refused() -> None:
    """Catches features that are silently dropped where the axis size does not divide them."""
    with torch.device("meta"):
        layer = nn.ModuleDict({"up": nn.Linear(4, 6)})
    table = ShardingTable(parameters={"blocks.*.up": ParallelStyle.column})
    with pytest.raises(ConfigError, match=r"blocks.0.up: 6 features are not divisible by parallel.tp = 4"):
        shard_layer(layer, "blocks.0", table, axis_of(0, 4), sequence_parallel=False)


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def pair_weights() -> list[Tensor]:
    return [random(FFN, HIDDEN, seed=1), random(FFN, seed=2), random(HIDDEN, FFN, seed=3), random(HIDDEN, seed=4)]


def whole_pair() -> tuple[Tensor, Tensor, list[Tensor]]:
    """Output, input gradient and weight gradients of linear, GELU, linear in one process."""
    x, (w1, b1, w2, b2) = (
        random(2, LENGTH, HIDDEN, seed=0).requires_grad_(),
        [w.requires_grad_() for w in pair_weights()],
    )
    y = F.linear(F.gelu(F.linear(x, w1, b1)), w2, b2)
    (y * random(2, LENGTH, HIDDEN, seed=9)).sum().backward()
    return y.detach(), x.grad, [w.grad for w in (w1, b1, w2, b2)]


def own_tokens(x: Tensor, axis: Axis, sequence_parallel: bool) -> Tensor:
    """This rank's part of activations [b, s, h]: its tokens under sequence parallelism, else all."""
    return x.chunk(axis.size, dim=1)[axis.rank] if sequence_parallel else x


def _pair(sequence_parallel: bool, chunks: int) -> list[Any]:
    axis = tensor_axis()
    region = Region(axis, sequence_parallel, chunks)
    column = ColumnParallelLinear(HIDDEN, FFN, region).double()
    row = RowParallelLinear(FFN, HIDDEN, region).double()
    width = FFN // axis.size
    share = slice(axis.rank * width, (axis.rank + 1) * width)
    w1, b1, w2, b2 = pair_weights()
    with torch.no_grad():
        column.weight.copy_(w1[share])
        column.bias.copy_(b1[share])
        row.weight.copy_(w2[:, share])
        row.bias.copy_(b2)
    x = own_tokens(random(2, LENGTH, HIDDEN, seed=0), axis, sequence_parallel).requires_grad_()
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        opened = column(x)
    assert 2 * LENGTH * HIDDEN not in kept or not sequence_parallel, "the gathered sequence is kept"
    y = row(F.gelu(opened))
    (y * own_tokens(random(2, LENGTH, HIDDEN, seed=9), axis, sequence_parallel)).sum().backward()
    return [
        t.detach().numpy() for t in (y, x.grad, column.weight.grad, column.bias.grad, row.weight.grad, row.bias.grad)
    ]


@pytest.mark.quick("2-False-1", "2-True-2", "2-False-100", "3-True-1", "3-False-2", "3-True-100")
@pytest.mark.distributed
@pytest.mark.parametrize("chunks", [1, 2, 100])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_a_column_row_pair_equals_the_unsharded_layers(size: int, sequence_parallel: bool, chunks: int) -> None:
    """Catches a bias added on every rank, a missing all-reduce or reduce-scatter in either direction, shards or chunks
    with the wrong rows or tokens, and an all-gathered sequence that is saved for the backward pass."""
    y, x_grad, (w1, b1, w2, b2) = whole_pair()
    results = run_ranks(_pair, size, sequence_parallel, chunks)
    for rank, found in enumerate(results):
        axis, share = Axis(rank, tuple(range(size)), None), slice(rank * FFN // size, (rank + 1) * FFN // size)
        mine = [own_tokens(t, axis, sequence_parallel) for t in (y, x_grad)]
        for value, expected in zip(found, (*mine, w1[share], b1[share], w2[:, share]), strict=False):
            torch.testing.assert_close(torch.from_numpy(value), expected, rtol=1e-12, atol=1e-12)
    # Every rank adds the row-parallel bias to its own tokens only, so its gradient is the sum over ranks.
    biases = [torch.from_numpy(found[-1]) for found in results]
    for bias in [sum(biases)] if sequence_parallel else biases:
        torch.testing.assert_close(bias, b2, rtol=1e-12, atol=1e-12)


def _branches(sequence_parallel: bool, chunks: int, fused: bool) -> list[Any]:
    """Two branches of one input, each a column and a row layer, with shared and with separate collectives."""
    axis = tensor_axis()
    region, gradients = Region(axis, sequence_parallel, chunks, FUSED if fused else TORCH), WeightGradients()
    columns = [ColumnParallelLinear(HIDDEN, FFN, region).double() for _ in range(2)]
    rows = [RowParallelLinear(FFN, HIDDEN, region).double() for _ in range(2)]
    parameters = [parameter for layer in (*columns, *rows) for parameter in layer.parameters()]
    for seed, parameter in enumerate(parameters):
        with torch.no_grad():
            parameter.copy_(random(*parameter.shape, seed=seed))
    enter, leave = ColumnParallelBranches(region), RowParallelBranches(region)

    def together(x: Tensor) -> Tensor:
        return leave([F.gelu(opened) for opened in enter(x, *columns)], rows)

    def apart(x: Tensor) -> Tensor:
        return sum(row(F.gelu(column(x))) for column, row in zip(columns, rows, strict=True))

    results = []
    for function, defer in ((together, False), (apart, False), (together, True)):
        x = own_tokens(random(2, LENGTH, HIDDEN, seed=0), axis, sequence_parallel).requires_grad_()
        for layer in (*columns, *rows):
            layer.zero_grad()
            layer.weight_gradients = gradients if defer else None
        y = function(x)
        loss = (y * own_tokens(random(2, LENGTH, HIDDEN, seed=9), axis, sequence_parallel)).sum()
        if defer:
            with gradients.defer() as deferred:
                loss.backward()
            assert all(layer.weight.grad is None for layer in (*columns, *rows))
            with torch.no_grad():
                deferred.compute(Taken(lambda weight, gradient: setattr(weight, "grad", gradient.compute())))
        else:
            loss.backward()
        results.append([t.detach().numpy() for t in (y, x.grad, *(p.grad for p in parameters))])
    return results


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("sequence_parallel", "chunks", "fused"),
    [(False, 1, False), (False, 2, False), (True, 1, False), (True, 2, False), (True, 2, True)],
)
def test_branches_sharing_a_collective_equal_separate_ones(sequence_parallel: bool, chunks: int, fused: bool) -> None:
    """Catches a branch that the shared collective omits or counts twice, in the forward or backward pass, a bias of the
    other branch, and deferred weight gradients that use another layer's input."""
    for together, apart, defer in run_ranks(_branches, 2, sequence_parallel, chunks, fused):
        for found in (together, defer):
            for value, expected in zip(found, apart, strict=True):
                torch.testing.assert_close(torch.from_numpy(value), torch.from_numpy(expected), rtol=1e-12, atol=1e-12)


def _wide_pair(fused: bool) -> list[Any]:
    """Output and gradients, in fp32, of layers whose chunks are wide enough for megads' own GEMM kernel."""
    load(OpsConfig(Implementation.fused), print, cuda=False)
    region = Region(tensor_axis(), sequence_parallel=True, chunks=2, kernels=FUSED if fused else TORCH)
    column, row = ColumnParallelLinear(48, 64, region), RowParallelLinear(64, 48, region)
    parameters = [*column.parameters(), *row.parameters()]
    for seed, parameter in enumerate(parameters):
        with torch.no_grad():
            parameter.copy_(random(*parameter.shape, seed=seed))
    x = random(2, 40, 48, seed=7).float().requires_grad_()
    y = row(column(x))
    y.sum().backward()
    return [t.detach().numpy() for t in (y, x.grad, *(p.grad for p in parameters))]


@pytest.mark.distributed
@pytest.mark.usefixtures("kernels")
def test_chunks_by_our_gemm_equal_torchs() -> None:
    """Catches chunks for which megads' GEMM kernel assumes the wrong row stride, and a bias that it omits."""
    for ours, theirs in zip(run_ranks(_wide_pair, 2, True), run_ranks(_wide_pair, 2, False), strict=True):
        for found, wanted in zip(map(torch.from_numpy, ours), map(torch.from_numpy, theirs), strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5 * wanted.abs().max().item())


def own_rows(table: Tensor, axis: Axis) -> Tensor:
    """This rank's rows of a vocabulary table; padding rows hold NaN, which reveals any use of them."""
    rows = padded_rows(len(table), axis.size)
    padding = torch.full((rows * axis.size - len(table), table.shape[1]), float("nan"), dtype=table.dtype)
    return torch.cat([table, padding])[axis.rank * rows : (axis.rank + 1) * rows]


def all_tokens(vocab_size: int) -> Tensor:
    """[2, 3 * vocab_size]: every token three times, in order and reversed."""
    return torch.stack([torch.arange(vocab_size), torch.arange(vocab_size).flip(0)]).repeat(1, 3)


def _embedding(vocab_size: int, sequence_parallel: bool) -> list[Any]:
    axis = tensor_axis()
    layer = VocabParallelEmbedding(padded_rows(vocab_size, axis.size), HIDDEN, axis, sequence_parallel).double()
    with torch.no_grad():
        layer.weight.copy_(own_rows(random(vocab_size, HIDDEN, seed=5), axis))
    y = layer(all_tokens(vocab_size))
    (y * own_tokens(random(2, 3 * vocab_size, HIDDEN, seed=9), axis, sequence_parallel)).sum().backward()
    return [y.detach().numpy(), layer.weight.grad.numpy()]


@pytest.mark.distributed
@pytest.mark.parametrize(("vocab_size", "sequence_parallel"), VOCAB_CASES)
def test_the_sharded_embedding_equals_the_unsharded_one(vocab_size: int, sequence_parallel: bool) -> None:
    """Catches a token looked up on two ranks or none, and padding rows that are read or get a gradient."""
    whole = nn.Embedding(vocab_size, HIDDEN, _weight=random(vocab_size, HIDDEN, seed=5))
    y = whole(all_tokens(vocab_size))
    (y * random(2, 3 * vocab_size, HIDDEN, seed=9)).sum().backward()
    rows = padded_rows(vocab_size, 3)
    padded = torch.cat([whole.weight.grad, torch.zeros(3 * rows - vocab_size, HIDDEN, dtype=torch.float64)])
    for rank, (found, grad) in enumerate(run_ranks(_embedding, 3, vocab_size, sequence_parallel)):
        expected = own_tokens(y.detach(), Axis(rank, (0, 1, 2), None), sequence_parallel)
        assert torch.equal(torch.from_numpy(found), expected)
        torch.testing.assert_close(torch.from_numpy(grad), padded[rank * rows : (rank + 1) * rows])


def _head(vocab_size: int, sequence_parallel: bool) -> list[Any]:
    axis = tensor_axis()
    layer = VocabParallelHead(padded_rows(vocab_size, axis.size), HIDDEN, Region(axis, sequence_parallel)).double()
    with torch.no_grad():
        layer.weight.copy_(own_rows(random(vocab_size, HIDDEN, seed=6), axis).nan_to_num())
    x = own_tokens(random(2, 3, HIDDEN, seed=0), axis, sequence_parallel).requires_grad_()
    logits = layer(x, INFO)
    cotangent = own_rows(random(vocab_size, 6, seed=7), axis).nan_to_num().t().reshape(2, 3, -1)
    (logits * cotangent).sum().backward()
    return [logits.detach().numpy(), x.grad.numpy(), layer.weight.grad.numpy()]


@pytest.mark.distributed
@pytest.mark.parametrize(("vocab_size", "sequence_parallel"), VOCAB_CASES)
def test_the_sharded_head_equals_the_unsharded_one(vocab_size: int, sequence_parallel: bool) -> None:
    """Catches an input gradient that covers only this rank's vocabulary rows, and rows in the wrong place."""
    weight, x = random(vocab_size, HIDDEN, seed=6).requires_grad_(), random(2, 3, HIDDEN, seed=0).requires_grad_()
    logits = F.linear(x, weight)
    (logits * random(vocab_size, 6, seed=7).t().reshape(2, 3, -1)).sum().backward()
    results = run_ranks(_head, 3, vocab_size, sequence_parallel)
    gathered = torch.cat([torch.from_numpy(found) for found, _, _ in results], dim=-1)
    torch.testing.assert_close(gathered[..., :vocab_size], logits.detach(), rtol=1e-12, atol=1e-12)
    grads = torch.cat([torch.from_numpy(grad) for _, _, grad in results])
    torch.testing.assert_close(grads[:vocab_size], weight.grad, rtol=1e-12, atol=1e-12)
    for rank, (_, x_grad, _) in enumerate(results):
        expected = own_tokens(x.grad, Axis(rank, (0, 1, 2), None), sequence_parallel)
        torch.testing.assert_close(torch.from_numpy(x_grad), expected, rtol=1e-12, atol=1e-12)


def test_rows_of_the_vocabulary_are_aligned() -> None:
    """Catches rows padded to a multiple over all ranks instead of on each, and a GPU's default on a CPU."""
    multiple = ParallelConfig().rows_multiple(cuda=True)
    assert [padded_rows(50257, size, multiple) for size in (1, 8)] == [50304, 6400]
    assert ParallelConfig().rows_multiple(cuda=False) == 1
    assert {ParallelConfig(vocab_multiple=64).rows_multiple(cuda=cuda) for cuda in (False, True)} == {64}


def test_every_rank_has_equally_many_vocabulary_rows() -> None:
    """Catches ranks with different numbers of rows, and padding where none is needed."""
    assert [padded_rows(vocab, 3) for vocab in (4, 5, 6, 7)] == [2, 2, 2, 3]
    assert padded_rows(250_880, 4) * 4 == 250_880


def drawn(dtype: torch.dtype) -> tuple[Tensor, nn.Parameter, Tensor]:
    """Token ids of which one occurs over a thousand times, others once or never; the table; an output gradient."""
    generator = torch.Generator().manual_seed(2)
    rows = torch.zeros(2, 600, dtype=torch.int64)
    rows[1, :8] = torch.arange(3, 11)
    table, grad = (torch.randn(shape, generator=generator).to(dtype) for shape in ((ROWS, HIDDEN), (2, 600, HIDDEN)))
    return rows, nn.Parameter(table), grad


def exact(rows: Tensor, grad: Tensor) -> Tensor:
    return torch.zeros(ROWS, HIDDEN, dtype=torch.float64).index_add_(0, rows.flatten(), grad.double().flatten(0, 1))


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 2**-8)])
def test_a_rows_gradients_are_not_rounded_one_by_one(dtype: torch.dtype, bound: float) -> None:
    """Catches a sum over tokens in bf16: after a few hundred, addends of the same size are lost in rounding."""
    rows, table, grad = drawn(dtype)
    lookup(rows, table, None).backward(grad)
    assert table.grad is not None and table.grad.dtype is dtype
    expected = exact(rows, grad)
    assert ((table.grad - expected).norm(dim=1) <= bound * expected.norm(dim=1)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embedding_gradients_go_straight_to_main_grad(dtype: torch.dtype) -> None:
    """Catches a gradient tensor in addition to main_grad, a main_grad that starts from uninitialized memory, and a lost
    micro-batch, also where the backward pass defers weight gradients."""
    rows, table, grad = drawn(dtype)
    sums = FlatMainGrads(table)
    gradients = WeightGradients(sums)
    lookup(rows, table, gradients).backward(grad)
    with gradients.defer() as deferred:
        lookup(rows, table, gradients).backward(grad)
    deferred.compute(sums)
    assert table.grad is None and sums.finished == 2
    expected = 2 * exact(rows, grad)
    assert ((sums.sums - expected).norm(dim=1) <= 5e-6 * expected.norm(dim=1)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_of_other_ranks_add_nothing(dtype: torch.dtype) -> None:
    """Catches a gradient of another rank's token, zeros that are added to a row one token after another, and other bits
    than with those zeros."""
    rows, table, grad = drawn(dtype)
    foreign = torch.rand(rows.shape, generator=torch.Generator().manual_seed(4)) < 7 / 8
    rows = rows - ROWS * foreign
    out = lookup(rows, table, None, foreign)
    assert not out[foreign].any() and torch.equal(out[~foreign], table[rows[~foreign]])
    out.backward(grad)
    summed = torch.zeros(ROWS, HIDDEN)
    masked = grad.masked_fill(foreign[..., None], 0.0).float()
    summed.index_add_(0, rows.masked_fill(foreign, 0).flatten(), masked.flatten(0, 1))
    assert torch.equal(table.grad, summed.to(dtype))
    spread_rows, spread_grad = spread(foreign.flatten(), rows.flatten(), grad.flatten(0, 1), ROWS)
    of_others = spread_rows[foreign.flatten()].bincount(minlength=ROWS)
    assert of_others.max() <= -(-rows.numel() // ROWS)
    spread_sums = torch.zeros(ROWS, HIDDEN).index_add_(0, spread_rows, spread_grad.float())
    assert torch.equal(spread_sums, summed)


def test_the_gpu_path_adds_every_row() -> None:
    """Catches a GPU path that differs from the CPU's: a row read twice that counts once, or main_grad overwritten."""
    rows, _, grad = drawn(torch.float32)
    sums = torch.ones(ROWS, HIDDEN)
    add_sorted(sums, rows.flatten(), grad.flatten(0, 1))
    assert torch.allclose(sums.double(), 1 + exact(rows, grad), rtol=1e-5, atol=1e-5)


def test_a_tied_weights_gradients_are_added_before_they_are_rounded() -> None:
    """Catches gradients of the tied embedding and output projection that are rounded to bf16 before they are added, and
    a gradient of one micro-batch that is added again in the next."""
    rows, table, grad = drawn(torch.bfloat16)
    x = torch.randn(2, 600, HIDDEN, generator=torch.Generator().manual_seed(3)).bfloat16()
    back = torch.full((2, 600, ROWS), 2.0**-9, dtype=torch.bfloat16)
    gradients = TiedGradient(tuple(table.shape))
    for _ in range(2):
        table.grad = None
        torch.autograd.backward([lookup(rows, table, gradients), linear(x, table, None, gradients)], [grad, back])
        projection = (back.flatten(0, 1).t() @ x.flatten(0, 1)).float()
        assert table.grad is not None
        assert torch.equal(table.grad, (exact(rows, grad).float() + projection).bfloat16())


def test_no_graph_is_built_without_a_gradient() -> None:
    """Catches an autograd graph that is built under no_grad or for a frozen table."""
    rows, table, _ = drawn(torch.float32)
    with torch.no_grad():
        assert not lookup(rows, table, None).requires_grad
    assert not lookup(rows, table.requires_grad_(False), None).requires_grad
