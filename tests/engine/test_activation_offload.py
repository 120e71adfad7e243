"""Offloading changes no bit: loss, norm and weights against the same layout without it, dropout on; the bytes moved are
those of the plan; copies are ordered with the passes as a GPU needs it, one block ahead."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor

from megads.batch import BatchInfo
from megads.config.layout_checks import check_operators
from megads.engine import activation_offload
from megads.engine.activation_offload import ActivationOffload, BlockPass, HostBuffers, Streams
from megads.errors import ConfigError
from megads.model.config import ModelConfig
from megads.ops.config import Compile, Float8, Implementation, OpsConfig
from megads.parallel.config import ContextParallelKind, EngineKind, Offload, ParallelConfig, Recompute
from megads.parallel.schedule import ScheduleName
from megads.tools.plan.activations import block_ops
from megads.tools.plan.memory_timeline import kept_bytes
from megads.tools.plan.micro_batch import BatchSizes
from tests.distributed import run_ranks
from tests.engine.stream_clock import OrderedStreams
from tests.engine.test_moe import scenario as expert_scenario
from tests.parity import MODEL, Scenario, build_engine, digest, evaluate, fitted, step_batches

pytestmark = pytest.mark.distributed

# Six micro-batches per replica: several are in flight in every pipeline.
SCENARIO = Scenario(
    model=replace(MODEL, num_layers=4, hidden_dropout=0.1, attention_dropout=0.1),
    steps=2,
    global_batch_size=12,
    documents=True,
)
LAYOUTS = {
    "single": ParallelConfig(),
    "tp2sp": ParallelConfig(tp=2, sequence_parallel=True),
    "pp2": ParallelConfig(pp=2),
    "pp2 interleaved": ParallelConfig(pp=2, schedule=ScheduleName.interleaved),
    "pp2 zb_v": ParallelConfig(pp=2, schedule=ScheduleName.zb_v, first_stage_blocks=1, last_stage_blocks=1),
    "cp2 ulysses": ParallelConfig(cp=2, cp_kind=ContextParallelKind.ulysses),
    "dp2, small buckets": ParallelConfig(dp=2, bucket_elements=8192),
    "zero2": ParallelConfig(dp=2, zero_stage=2),
    "zero3tp2": ParallelConfig(tp=2, dp=2, zero_stage=3),
}
MODES = [Recompute.none, Recompute.selective, Recompute.full]
PRECISIONS = ["float32", "bfloat16"]
FUSED = OpsConfig(Implementation.fused)


def train(scenario: Scenario, parallel: ParallelConfig) -> tuple[dict[str, Any], dict[str, int]]:
    """This rank's results, which must be bitwise equal, and what was offloaded; every tensor is, however small."""
    activation_offload.SMALLEST_OFFLOADED_BYTES = 1
    scenario = fitted(scenario, parallel)
    engine = build_engine(scenario, parallel)
    validation = evaluate(engine, scenario)
    steps = [
        engine.step(step_batches(scenario, step, engine.grid.dp.rank, parallel.dp), scenario.lr)
        for step in range(scenario.steps)
    ]
    shards = {f"{s.key} {s.offset}": digest(s.tensor) for s in engine.named_shards(owned=False)}
    results = {"steps": [(s.loss, s.grad_norm) for s in steps], "validation": validation, "shards": shards}
    offload = engine.module.offload
    return results, {} if offload is None else counts_of(offload)


def counts_of(offload: ActivationOffload) -> dict[str, int]:
    return {
        "to host": offload.to_host_bytes,
        "to device": offload.to_device_bytes,
        "in use": offload.host.in_use,
        "allocated": offload.host.allocated_bytes,
        "most": offload.host.most_bytes,
    }


def offloaded(parallel: ParallelConfig, **changes: Any) -> ParallelConfig:
    return replace(parallel, offload=Offload.activations, **changes)


def train_all(cases: list[tuple[Scenario, ParallelConfig]]) -> list[Any]:
    return [train(scenario, parallel) for scenario, parallel in cases]


@functools.cache
def runs(layout: str, precision: str) -> dict[Recompute | None, list[Any]]:
    """Results of every rank, by recomputation mode, None without offloading; one start of ranks for all."""
    parallel, scenario = LAYOUTS[layout], replace(SCENARIO, precision=precision)
    modes = [None, *MODES]
    cases = [(scenario, parallel if mode is None else offloaded(parallel, recompute=mode)) for mode in modes]
    by_rank = run_ranks(train_all, parallel.world_size, cases)
    return dict(zip(modes, (list(of_case) for of_case in zip(*by_rank, strict=True)), strict=True))


# Bytes are moved, whatever they mean.
@pytest.mark.quick(*(f"pp2 zb_v-bfloat16-{mode.value}" for mode in MODES))
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=() if name == "pp2 zb_v" else pytest.mark.slow) for name in LAYOUTS]
)
def test_offloading_changes_no_bit(layout: str, precision: str, mode: Recompute) -> None:
    """Catches activations of another block or micro-batch, a buffer that is overwritten before it is read, and weights
    that ZeRO-3 gathers again but were saved."""
    plain, moved = runs(layout, precision)[None], runs(layout, precision)[mode]
    for (results, counts), (expected, _) in zip(moved, plain, strict=True):
        assert results == expected
        assert counts["in use"] == 0
    assert any(counts["to host"] > 0 for _, counts in moved)
    assert plain[0][0]["steps"][0] != plain[0][0]["steps"][1]


@pytest.mark.quick("experts")
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("scenario", "parallel"),
    [
        pytest.param(replace(SCENARIO, ops=FUSED), LAYOUTS["pp2"], id="kernels"),
        pytest.param(replace(SCENARIO, engine=EngineKind.deepspeed), LAYOUTS["pp2"], id="PipelineEngine"),
        pytest.param(expert_scenario("deepseek"), ParallelConfig(dp=2, ep=2), id="experts"),
        pytest.param(
            expert_scenario("mixtral"), ParallelConfig(dp=2, ep=2, recompute=Recompute.full), id="experts, recomputed"
        ),
    ],
)
def test_other_engines_and_blocks_change_no_bit(scenario: Scenario, parallel: ParallelConfig) -> None:
    """Catches tensors of kernels and experts, whose sizes vary, that are returned in another shape or from another
    micro-batch's buffer."""
    cases = [(scenario, parallel), (scenario, offloaded(parallel))]
    for (expected, _), (results, counts) in run_ranks(train_all, parallel.world_size, cases):
        assert results == expected
        assert counts["to host"] > 0 and counts["in use"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("mode", [Recompute.none, Recompute.full])
def test_compiled_blocks_change_no_bit(mode: Recompute) -> None:
    """Catches graphs that save tensors past the hooks, or that reuse the memory of a saved tensor."""
    scenario = replace(SCENARIO, ops=OpsConfig(Implementation.torch, Compile.blocks))
    plain = ParallelConfig(recompute=mode)
    ((expected, _), (results, counts)), *_ = run_ranks(train_all, 1, [(scenario, plain), (scenario, offloaded(plain))])
    assert results == expected and counts["to host"] > 0 and counts["in use"] == 0


@pytest.mark.parametrize("mode", MODES)
def test_the_bytes_moved_are_what_the_blocks_keep(mode: Recompute) -> None:
    """Catches a tensor that is moved with each of its views, weights or masks that are moved, and a last block that
    leaves although its backward pass begins at once."""
    scenario = replace(SCENARIO, model=replace(SCENARIO.model, attention_dropout=0.0))
    (_, counts), *_ = run_ranks(train, 1, scenario, offloaded(ParallelConfig(recompute=mode)))
    sizes = BatchSizes(scenario.model, 1, scenario.micro_batch_size, scenario.seq_len, 4, document_mask=True)
    passes = scenario.steps * scenario.global_batch_size // scenario.micro_batch_size
    block = kept_bytes(block_ops(sizes, mode))
    assert block == sizes.hidden or mode is not Recompute.full
    assert counts["to host"] == counts["to device"] == passes * (scenario.model.num_layers - 1) * block
    # No more than one micro-batch is in flight, and 12.5% are lost to size classes, besides the alignment.
    assert counts["most"] <= (scenario.model.num_layers - 1) * (1.125 * block + 16 * 512)


class Layer(torch.nn.Module):
    """A block with views of one storage, a product that saves its output, and a weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)

    def forward(self, hidden: Tensor, info: BatchInfo) -> Tensor:
        q, k, v = self.first(hidden).chunk(3, dim=-1)
        return hidden + self.second(torch.sigmoid(q) * torch.tanh(k) + q * v)


LAYERS, WIDTH, TOKENS = 6, 64, 512


def passes_of_a_stack(
    micro_batches: list[str], defect: Callable[[], None] | None = None
) -> tuple[list[Tensor], list[tuple[str, int]], OrderedStreams, ActivationOffload]:
    """Runs a stack of blocks with streams that check their order.

    Args:
        micro_batches: passes in their order: "f0" is the forward pass of micro-batch 0, "b0" its backward pass.
        defect: applied before.

    Returns:
        Gradients; for each block when its backward pass opened and when its tensors were fetched; the streams; and what
        offloaded.
    """
    if defect is not None:
        defect()
    activation_offload.SMALLEST_OFFLOADED_BYTES = 1024
    torch.manual_seed(0)
    ordered = OrderedStreams()
    offload = ActivationOffload(torch.device("cpu"))
    offload.streams = ordered.streams
    layers = [Layer(WIDTH) for _ in range(LAYERS)]
    for index, layer in enumerate(layers):
        offload.wrap(layer, index, moves=index < LAYERS - 1)
    seen: list[tuple[str, int]] = []
    fetch, unpack = BlockPass.fetch, BlockPass._unpack

    def noted_fetch(self: BlockPass) -> None:
        if not self._fetched and self.moves:
            seen.append(("fetch", self.index))
        fetch(self)

    def noted_unpack(self: BlockPass, packed: Any) -> Tensor:
        if not self._opened:
            seen.append(("open", self.index))
        return unpack(self, packed)

    BlockPass.fetch, BlockPass._unpack = noted_fetch, noted_unpack
    try:
        with ordered:
            outputs, infos = {}, {}
            for kind, number in micro_batches:
                if kind == "f":
                    infos[number] = BatchInfo(torch.tensor([int(number)]))
                    hidden = torch.randn(TOKENS, WIDTH, requires_grad=True) * 1.0
                    for layer in layers:
                        hidden = layer(hidden, infos[number])
                    outputs[number] = hidden
                else:
                    outputs.pop(number).square().sum().backward()
                    del infos[number]
    finally:
        BlockPass.fetch, BlockPass._unpack = fetch, unpack
    gradients = [p.grad for layer in layers for p in layer.parameters()]
    return gradients, seen, ordered, offload


ONE_AFTER_ANOTHER = ["f0", "b0", "f1", "b1"]
IN_FLIGHT = ["f0", "f1", "f2", "b0", "f3", "b1", "b2", "b3"]


def expected_gradients(micro_batches: list[str]) -> list[Tensor]:
    torch.manual_seed(0)
    layers = [Layer(WIDTH) for _ in range(LAYERS)]
    outputs, info = {}, BatchInfo(torch.tensor([0]))
    for kind, number in micro_batches:
        if kind == "f":
            hidden = torch.randn(TOKENS, WIDTH, requires_grad=True) * 1.0
            for layer in layers:
                hidden = layer(hidden, info)
            outputs[number] = hidden
        else:
            outputs.pop(number).square().sum().backward()
    return [p.grad for layer in layers for p in layer.parameters()]


@pytest.mark.parametrize("micro_batches", [ONE_AFTER_ANOTHER, IN_FLIGHT], ids=["one after another", "in flight"])
def test_copies_are_ordered_and_one_block_ahead(micro_batches: list[str]) -> None:
    """Catches a tensor that is freed or overwritten while it is copied, one that is read before it has arrived, and
    copies that begin too late to be hidden, or so early that more than two blocks are on the device."""
    gradients, seen, ordered, offload = passes_of_a_stack(micro_batches)
    assert all(map(torch.equal, gradients, expected_gradients(micro_batches)))
    assert not ordered.races and ordered.copies > 4 * LAYERS
    last = LAYERS - 1
    one_pass = [("open", last), ("fetch", last - 1)]
    for index in range(last - 1, 0, -1):
        one_pass += [("open", index), ("fetch", index - 1)]
    assert seen == [*one_pass, ("open", 0)] * (len(micro_batches) // 2)
    assert offload.host.in_use == 0 and offload.to_host_bytes == offload.to_device_bytes > 0


def test_the_device_holds_two_blocks_of_a_micro_batch() -> None:
    """Catches tensors that stay on the device after their copy, or after their block's backward pass."""
    held: list[int] = []
    alive = WeakSet[Any]()
    inner, unpack = activation_offload._Storage.__init__, BlockPass._unpack

    def noted(self: Any, *args: Any) -> None:
        inner(self, *args)
        alive.add(self)

    def counted(self: BlockPass, packed: Any) -> Tensor:
        found = unpack(self, packed)
        held.append(len({one._block_pass for one in alive if one.on_device is not None}))
        return found

    activation_offload._Storage.__init__, BlockPass._unpack = noted, counted
    try:
        passes_of_a_stack(IN_FLIGHT)
    finally:
        activation_offload._Storage.__init__, BlockPass._unpack = inner, unpack
    gc.collect()
    # The block before the last has left when the last block's backward pass begins.
    assert max(held) == 2 and not list(alive)


def test_host_memory_is_reused() -> None:
    """Catches buffers that no later micro-batch finds, also if their sizes change."""
    host = HostBuffers(pinned=False)
    for sizes in ([1000, 70_000, 300_000], [1100, 71_000, 310_000], [5000, 5000, 5000]):
        for _ in range(3):
            buffers = [host.take(size) for size in sizes]
            assert all(size <= len(buffer) <= 1.125 * size + 512 for size, buffer in zip(sizes, buffers, strict=True))
            spans = sorted((buffer.data_ptr(), buffer.data_ptr() + len(buffer)) for buffer in buffers)
            assert all(one[1] <= other[0] for one, other in pairwise(spans))
            for buffer in buffers:
                host.give(buffer)
        assert host.in_use == 0
    assert host.allocated_bytes <= 2 * (1100 + 71_000 + 512_000)


def a_buffer_returned_before_it_is_read() -> None:
    inner = BlockPass.leave

    def leave(self: BlockPass) -> None:
        inner(self)
        for one in self._alive():
            assert one.on_host is not None
            self.offload.host.give(one.on_host)

    BlockPass.leave = leave


def tensors_freed_while_they_leave() -> None:
    inner = BlockPass.arrive_on_host

    def arrive(self: BlockPass, free: bool) -> None:
        self._copied = []
        inner(self, free)

    BlockPass.arrive_on_host = arrive


def copies_that_do_not_wait_for_the_block() -> None:
    inner = BlockPass.leave

    def leave(self: BlockPass) -> None:
        current, streams = self.offload.streams.current(), self.offload.streams
        before, streams.to_host.wait_event = streams.to_host.wait_event, lambda _event: None
        try:
            inner(self)
        finally:
            streams.to_host.wait_event = before
        assert current is streams.current()

    BlockPass.leave = leave


def tensors_read_before_they_arrive() -> None:
    inner = activation_offload._View.tensor

    def tensor(self: Any, streams: Streams) -> Tensor:
        self.storage.arrived = None
        return inner(self, streams)

    activation_offload._View.tensor = tensor


def copies_into_memory_in_use() -> None:
    inner = BlockPass.fetch

    def fetch(self: BlockPass) -> None:
        to_device = self.offload.streams.to_device
        before, to_device.wait_event = to_device.wait_event, lambda _event: None
        try:
            inner(self)
        finally:
            to_device.wait_event = before

    BlockPass.fetch = fetch


def tensors_of_another_block() -> None:
    inner = activation_offload._Storage.host_view

    def host_view(self: Any) -> Tensor:
        kept = self._block_pass.offload.__dict__.setdefault("kept", {})
        return inner(kept.setdefault(self.nbytes, self))

    activation_offload._Storage.host_view = host_view


def a_prefetch_that_is_skipped() -> None:
    ActivationOffload._before = lambda *_: None


def tensors_that_are_never_freed() -> None:
    inner = activation_offload._Storage.__init__

    def init(self: Any, block_pass: BlockPass, tensor: Tensor) -> None:
        inner(self, block_pass, tensor)
        block_pass.__dict__.setdefault("kept", []).append(self)

    activation_offload._Storage.__init__ = init


def _judged(defect: Callable[[], None]) -> list[str]:
    """What the tests above see of a defect, in a process of its own."""
    gradients, seen, ordered, offload = passes_of_a_stack(IN_FLIGHT, defect)
    fetched_ahead = sum(one[0] == "open" and other == ("fetch", one[1] - 1) for one, other in pairwise(seen))
    signs = {
        "race": bool(ordered.races),
        "gradients": not all(map(torch.equal, gradients, expected_gradients(IN_FLIGHT))),
        "not ahead": fetched_ahead < (LAYERS - 1) * len(IN_FLIGHT) // 2,
        "in use": offload.host.in_use > 0,
    }
    return [sign for sign, found in signs.items() if found]


DEFECTS = {
    a_buffer_returned_before_it_is_read: "gradients",
    tensors_freed_while_they_leave: "race",
    copies_that_do_not_wait_for_the_block: "race",
    tensors_read_before_they_arrive: "race",
    copies_into_memory_in_use: "race",
    tensors_of_another_block: "gradients",
    a_prefetch_that_is_skipped: "not ahead",
    tensors_that_are_never_freed: "in use",
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_defects_are_seen(defect: Callable[[], None]) -> None:
    """Catches checks that a defect of streams, buffers or prefetching would pass."""
    assert DEFECTS[defect] in run_ranks(_judged, 1, defect)[0]


def test_cuda_graphs_are_refused() -> None:
    """Catches a captured micro-batch whose replay reads host memory of another one."""
    ops, parallel = OpsConfig(cuda_graphs=True), offloaded(ParallelConfig())
    with pytest.raises(ConfigError, match=r"parallel\.offload = activations.*set parallel\.offload=none"):
        check_operators(ops, Float8(), ModelConfig(vocab_size=64), parallel)
