"""Steps with captured micro-batches equal those of the same engine without capture.

On a CPU a replay calls the captured function, with the host state of the capture.

Graphs that read reallocated memory, which only CUDA can have, are for tests/engine/test_gpu.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from megads.engine import micro_batch_graphs
from megads.engine.interface import PassTimes
from megads.engine.micro_batch_graphs import EAGER_STEPS, MicroBatchGraphs
from megads.errors import ConfigError
from megads.ops.device_cache import device_cache, record_cached_results
from megads.runtime.hooks import Span
from tests import parity
from tests.distributed import run_ranks
from tests.engine.test_moe import scenario as expert_scenario
from tests.parity import LAYOUTS, MODEL, build_engine, digest, scenario_with, step_batches

pytestmark = pytest.mark.distributed

DROPOUT = replace(MODEL, hidden_dropout=0.1, attention_dropout=0.1)


class Replays:
    """Replaces CUDA graphs on a CPU: host state that has changed since the capture does not affect a replay.

    Args:
        inner: the stage engine whose passes are captured.
        decided: whether it uses graphs; else it is to measure.
    """

    def __init__(self, inner: Any, *, decided: bool = True) -> None:
        self._inner, self.captured = inner, 0
        micro_batch_graphs.capture = self.capture  # type: ignore[assignment]
        if not decided:
            return
        inner._graphs = MicroBatchGraphs(inner, inner.optimizer, inner.module.token_loss, torch.device("cpu"))

    def capture(self, run: Callable[[], Any], _pool: object) -> Callable[[], Any]:
        """Runs the function for its effects on host state, and restores the main_grads and statistics of experts."""
        self.captured += 1
        loss, optimizer, balance = self._inner.module.token_loss, self._inner.optimizer, self._inner._balance
        added_to = [bucket._allocated() for bucket in optimizer.buckets]
        added_to += [] if balance is None else [balance._statistics, balance._overflow]
        values = [tensor.clone() for tensor in added_to]
        scale, unwritten = loss.scale, optimizer.unwritten()
        run()
        for tensor, value in zip(added_to, values, strict=True):
            tensor.copy_(value)

        def replay() -> Any:
            layers = [layer for chunk in self._inner.module.chunks.values() for layer in chunk]
            hooks = [layer._forward_hooks.copy() for layer in layers]
            now = loss.scale, optimizer.unwritten()
            loss.scale = scale
            optimizer.update_unwritten(unwritten)
            for layer in layers:
                layer._forward_hooks.clear()
            outputs = run()
            for layer, known in zip(layers, hooks, strict=True):
                layer._forward_hooks.update(known)
            loss.scale = now[0]
            optimizer.update_unwritten(now[1])
            return outputs

        return replay


def _trained(layout: str, captures: bool) -> dict[str, Any]:
    """Results of the steps, the state, spans of one step, number of captures, whether the batches are unchanged, and
    watched activations."""
    parallel = LAYOUTS[layout]
    scenario = parity.fitted(scenario_with(model=DROPOUT, masked=True, documents=True), parallel)
    engine = build_engine(scenario, parallel)
    replays = Replays(engine) if captures else None  # type: ignore[attr-defined]
    results, spans, batches = [], list[Span](), []
    for step in range(EAGER_STEPS + 3):
        batches.append(step_batches(scenario, step, engine.grid.dp.rank, parallel.dp))
        if step == EAGER_STEPS + 2:
            engine.watch_spans(spans.extend)
        results.append(engine.step(batches[-1], scenario.lr))
    seen: list[str] = []
    engine.watch_activations(lambda name, _output: seen.append(name))
    results.append(engine.step(batches[0], scenario.lr))
    engine.watch_activations(None)
    results.append(engine.step(batches[1], scenario.lr))
    again = [step_batches(scenario, step, engine.grid.dp.rank, parallel.dp) for step in range(len(batches))]
    kept = all(
        torch.equal(one.tokens_bs, other.tokens_bs)  # type: ignore[arg-type]
        for left, right in zip(batches, again, strict=True)
        for one, other in zip(left, right, strict=True)
    )
    state = {(shard.key, shard.offset): digest(shard.tensor) for shard in engine.named_shards(owned=False)}
    passes = [(span.kind, span.micro_batch) for span in spans if span.micro_batch is not None]
    return {
        "results": results,
        "state": state,
        "passes": passes,
        "captures": replays.captured if replays else 0,
        "kept": kept,
        "seen": seen,
    }


@pytest.mark.parametrize("layout", ["single", "dp2"])
def test_micro_batch_graphs_change_no_bit(layout: str) -> None:
    """Catches a micro-batch that is not copied or overwrites its caller's, a gradient that is added to the last step's
    or overwrites another micro-batch's, a stale loss scale, document masks of the captured micro-batch, and activation
    hooks that are not called because a graph is replayed."""
    size = LAYOUTS[layout].world_size
    plain, captured = (run_ranks(_trained, size, layout, captures) for captures in (False, True))
    for one, other in zip(plain, captured, strict=True):
        assert one["results"] == other["results"] and one["state"] == other["state"]
        assert [kind for kind in one["passes"] if kind[0] in ("forward", "backward")] == other["passes"]
        assert one["seen"] == other["seen"] and one["seen"]
        assert other["kept"] and other["captures"] == 4 and one["captures"] == 0


FACTOR = 2.2
"""A capacity factor that some steps exceed."""


def _experts_trained(captures: bool) -> dict[str, Any]:
    """Results of steps of experts with a capacity, the third of them with half of the micro-batches, and the state."""
    plain = expert_scenario("mixtral")
    scenario = replace(plain, model=replace(plain.model, moe=replace(plain.model.moe, capacity_factor=FACTOR)))
    engine = build_engine(scenario, LAYOUTS["single"])
    replays = Replays(engine) if captures else None  # type: ignore[attr-defined]
    results = []
    for step in range(EAGER_STEPS + 6):
        batches = step_batches(scenario, step)
        results.append(engine.step(batches[: len(batches) // 2] if step == EAGER_STEPS + 1 else batches, scenario.lr))
    state = {(shard.key, shard.offset): digest(shard.tensor) for shard in engine.named_shards(owned=False)}
    return {"results": results, "state": state, "captures": replays.captured if replays else 0}


def test_graphs_of_experts_change_no_bit() -> None:
    """Catches statistics that are not reset before a replayed step, the number of tokens of another batch size in a
    graph, and an overflow that is replayed in place of computed without a capacity."""
    (plain,), (captured,) = (run_ranks(_experts_trained, 1, captures) for captures in (False, True))
    assert plain["results"] == captured["results"] and plain["state"] == captured["state"]
    assert {result.experts.recomputed for result in captured["results"][EAGER_STEPS:]} == {False, True}
    assert captured["captures"] == 8, "two graphs each of the first and the other micro-batches, for two batch sizes"


def _measured(name: str, captures: bool | None) -> dict[str, Any]:
    """Results of steps with graphs decided after the second, the state, and what the decision was asked with.

    Args:
        name: layout, or experts.
        captures: the decision; None: nothing is measured.
    """
    layout = LAYOUTS["single" if name == "experts" else name]
    scenario = parity.fitted(scenario_with(model=DROPOUT, masked=True, documents=True), layout)
    if name == "experts":
        plain = expert_scenario("mixtral")
        scenario = replace(plain, model=replace(plain.model, moe=replace(plain.model.moe, capacity_factor=FACTOR)))
    engine = build_engine(scenario, layout)
    inner: Any = engine
    replays = Replays(inner, decided=False)
    asked: list[PassTimes] = []
    seen: list[str] = []

    def choose(times: PassTimes) -> bool:
        asked.append(times)
        return bool(captures)

    results = []
    for step in range(EAGER_STEPS + 3):
        results.append(engine.step(step_batches(scenario, step, engine.grid.dp.rank, layout.dp), scenario.lr))
        if captures is not None:
            engine.watch_activations(lambda name, _output: seen.append(name))
            engine.choose_cuda_graphs(choose)
            engine.watch_activations(None)
    state = {(shard.key, shard.offset): digest(shard.tensor) for shard in engine.named_shards(owned=False)}
    kept = [bucket._main_grad is not None for bucket in inner.optimizer.buckets]
    return {
        "results": results,
        "state": state,
        "asked": asked,
        "seen": seen,
        "captures": replays.captured,
        "replayed": inner._graphs is not None,
        "kept": kept,
    }


@pytest.mark.parametrize("name", ["single", "dp2", "experts"])
def test_measuring_graphs_changes_no_bit(name: str) -> None:
    """Catches gradients or statistics of experts that a measurement leaves behind, hooks that see its passes, main_grad
    that stays allocated in eager mode, and a decision that is not followed or asked for again."""
    size = LAYOUTS.get(name, LAYOUTS["single"]).world_size
    plain, eager, captured = (run_ranks(_measured, size, name, captures) for captures in (None, False, True))
    for one, *others in zip(plain, eager, captured, strict=True):
        for other in others:
            assert one["results"] == other["results"] and one["state"] == other["state"]
            (times,) = other["asked"]
            assert times.host_ms > 0 and times.device_ms > 0 and not times.failure and times.micro_batches > 1
            assert (times.reduce_ms > 0) is (name == "dp2")
            assert other["seen"] == [] and other["captures"] == 4, "both pairs of graphs are tried, and kept"
        assert [other["replayed"] for other in others] == [False, True]
        assert not any(others[0]["kept"]) and all(others[1]["kept"])


def _fallen_back() -> tuple[list[Any], list[Any], list[PassTimes]]:
    scenario, asked = scenario_with(), list[PassTimes]()
    results = []
    for measures in (False, True):
        engine = build_engine(scenario, LAYOUTS["single"])
        inner: Any = engine

        def capture(run: Any, _pool: object) -> Any:
            run()
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nand more")

        def choose(times: PassTimes) -> bool:
            asked.append(times)
            return False

        micro_batch_graphs.capture = capture  # type: ignore[assignment]
        for step in range(EAGER_STEPS + 2):
            results.append(engine.step(step_batches(scenario, step), scenario.lr))
            if measures:
                engine.choose_cuda_graphs(choose)
        assert inner._graphs is None
    return results[: len(results) // 2], results[len(results) // 2 :], asked


def test_a_run_that_cannot_be_captured_goes_on_without_graphs() -> None:
    """Catches a measurement that ends the run, or half a pass that it leaves behind."""
    ((plain, measured, (times,)),) = run_ranks(_fallen_back, 1)
    assert plain == measured
    assert times.device_ms is None and "not permitted when stream is capturing" in times.failure


def _refused() -> str:
    scenario = scenario_with()
    engine = build_engine(scenario, LAYOUTS["single"])

    def capture(_run: Any, _pool: object) -> Any:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nand more")

    micro_batch_graphs.capture = capture  # type: ignore[assignment]
    inner: Any = engine  # type: ignore[attr-defined]
    inner._graphs = MicroBatchGraphs(inner, inner.optimizer, inner.module.token_loss, torch.device("cpu"))
    for step in range(EAGER_STEPS):
        engine.step(step_batches(scenario, step), scenario.lr)
    with pytest.raises(ConfigError) as caught:
        engine.step(step_batches(scenario, EAGER_STEPS), scenario.lr)
    return str(caught.value)


def test_a_failed_capture_names_the_option_to_set() -> None:
    """Catches a bare CUDA error that does not name the option to set."""
    (said,) = run_ranks(_refused, 1)
    assert "not permitted when stream is capturing)" in said and said.endswith("set ops.cuda_graphs=false")


def test_caches_keep_what_a_graph_still_reads() -> None:
    """Catches a mask that a cache evicts while a graph still reads it."""
    made: list[int] = []

    @device_cache(1)
    def table(size: int) -> torch.Tensor:
        made.append(size)
        return torch.arange(size)

    before = table(3)
    with record_cached_results() as kept:
        assert table(3) is before
        table(4)
    table(5)
    assert made == [3, 4, 5] and kept[0] is before and kept[1].tolist() == [0, 1, 2, 3]
