"""The packing rules of the evaluation coordinator, alone and in simulation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from megads.tools.evaluate.packing import (
    Actual,
    Cluster,
    LoadCosts,
    MeasuredTime,
    TaskCost,
    WorkerView,
    WorkUnit,
    choose,
    lower_bound_s,
    predict_s,
    simulate,
    simulate_jobs,
    split,
)

COSTS = LoadCosts(start_s=5.0, stage_s=20.0, load_s=2.0)
TASKS = 63
A, B = WorkerView("w0", "a"), WorkerView("w1", "b")


def unit(name: str, cost_s: float, priority: int = 0, tail_s: float = 0.0) -> WorkUnit:
    checkpoint, task = name.split("/")
    return WorkUnit(checkpoint, task, 0, 1, cost_s, priority, tail_s)


def chosen(units: Sequence[WorkUnit], worker: WorkerView, *others: WorkerView, cached: str = "ab") -> str | None:
    found = choose(units, worker, others, cached, COSTS)
    return None if found is None else f"{found.checkpoint}/{found.task}"


def test_which_unit_comes_next() -> None:
    """Catches the shortest unit first, a needless model load, a long task that waits for the worker that holds its
    checkpoint, an ignored metric time, and an ignored priority."""
    many = [unit(f"{checkpoint}/{task}", 10.0 + task) for checkpoint in "ab" for task in range(8)]
    assert chosen(many, A, B) == "a/7" and chosen(many, B, A) == "b/7"
    assert chosen([*many, unit("b/long", 250.0)], A, B) == "b/long"
    assert chosen([*many, unit("a/judged", 5.0, tail_s=60.0)], A, B) == "a/judged"
    assert chosen([*many, unit("b/first", 1.0, priority=1)], A) == "b/first"


def test_another_checkpoint_only_where_that_helps() -> None:
    """Catches a worker that loads a model although the worker that holds it would finish sooner, one that never helps,
    and units that no worker takes because their holder is gone."""
    assert chosen([unit("b/1", 1.0)], A, B) is None
    assert chosen([unit("b/1", 1.0)], A) == "b/1"
    assert chosen([unit("b/1", 9.0), unit("b/2", 9.0)], A, B) == "b/1"
    assert chosen([unit("b/1", 9.0), unit("b/2", 9.0)], A, B, cached="a") is None
    assert chosen([unit("b/1", 1.0, priority=1), unit("a/1", 1.0)], A, B) == "a/1"
    assert chosen([], A) is None


def test_new_workers_spread_over_checkpoints() -> None:
    """Catches all workers on one checkpoint, and a node that reads a checkpoint which another node could evaluate."""
    units = [unit(f"{checkpoint}/{task}", 50.0) for checkpoint in "abcd" for task in range(20)]
    workers: list[WorkerView] = []
    for number in range(4):
        new = WorkerView(f"n{number}")
        idle = [WorkerView(f"n{later}") for later in range(number + 1, 4)]
        found = choose(units, new, [*workers, *idle], [view.loaded or "" for view in workers], COSTS)
        assert found is not None
        units.remove(found)
        workers.append(WorkerView(new.name, found.checkpoint))
    assert sorted(view.loaded or "" for view in workers) == list("abcd")
    assert choose(units, WorkerView("x"), [*workers, *(WorkerView(f"y{i}") for i in range(3))], "c", COSTS) is not None


def test_long_tasks_are_split() -> None:
    """Catches parts that are too long, too short or too many, and a restart that splits differently."""
    tasks = [TaskCost("a", "long", 800.0, pieces=1000), TaskCost("a", "short", 10.0, pieces=1000)]
    units = split(tasks, 2)
    longest = 810.0 / 2 / 8
    assert all(one.cost_s <= longest for one in units) and len(units) == 16 + 1
    assert [one.part for one in units if one.task == "long"] == list(range(16))
    assert len(split([TaskCost("a", "long", 800.0, pieces=3)], 2)) == 3
    assert len(split([TaskCost("a", "long", 800.0, pieces=1000, parts=5)], 2)) == 5
    assert len(split(tasks, 1)) == 2
    assert len(split([TaskCost("a", "tiny", 1.0, pieces=1000)], 8)) == 1


def test_times_are_predicted_by_what_was_measured() -> None:
    """Catches times of another task used where the same task was measured, and an ignored model size."""

    def line(task: str, documents: float, seconds: float, parameters: int = 100) -> MeasuredTime:
        return MeasuredTime(task, "multiple_choice", documents, seconds, 0.0, parameters, "cpu", 0)

    history = [line("known", 10, 20.0), line("known", 30, 60.0), line("other", 10, 1000.0)]
    assert predict_s("known", "multiple_choice", 5, 0, 100, history) == pytest.approx(10.0)
    assert predict_s("known", "multiple_choice", 5, 0, 200, history) == pytest.approx(20.0)
    assert predict_s("new", "multiple_choice", 5, 0, 100, history) == pytest.approx(5 * 1080 / 50)
    long, short = (predict_s("new", kind, 5, 0, 100, []) for kind in ("generate_until", "loglikelihood"))
    assert long > short > 0


def test_the_simulation_counts_every_phase() -> None:
    """Catches a phase that takes no time, a link whose bandwidth is not shared, and a metric that is not waited for."""
    tasks = [TaskCost("a", f"{number}", 10.0, tail_s=3.0) for number in range(2)]
    where = Cluster(1, 2, 1, LoadCosts(start_s=5.0, stage_s=4.0, load_s=1.0), unit_s=0.5)
    # Both workers read, one after the other.
    assert simulate_jobs(tasks, where).seconds == pytest.approx(5 + 8 + 1 + 10.5 + 3)
    # One worker reads; one process computes two metrics.
    found = simulate(tasks, where)
    assert found.seconds == pytest.approx(5 + 4 + 1 + 10.5 + 3 + 3)
    assert found.reads == 1 and found.inference_s == pytest.approx(20)


def trace(seed: int, checkpoints: int, prior_error: float) -> tuple[list[TaskCost], Actual]:
    """Tasks on checkpoints, in submission order, with the same times for every checkpoint.

    Inference times have a heavy tail, and one metric in three is a computation; the coordinator's estimates are wrong
    by a log-normal factor.
    """
    draw = np.random.default_rng(seed)
    inference_s = np.clip(draw.lognormal(np.log(113.0), 1.0, TASKS), 10.0, 3600.0)
    computed = draw.random(TASKS) < 1 / 3
    metric_s = np.where(computed, draw.lognormal(np.log(42.0), 1.0, TASKS), 1.0)
    predicted_s, predicted_metric_s = (
        seconds * draw.lognormal(0.0, prior_error, TASKS) for seconds in (inference_s, metric_s)
    )
    tasks, actual = [], {}
    for checkpoint in range(checkpoints):
        for task in draw.permutation(TASKS):
            tail_s = float(predicted_metric_s[task])
            tasks.append(
                TaskCost(f"step_{checkpoint}", f"task_{task:02d}", float(predicted_s[task]), 1000, tail_s=tail_s)
            )
            actual[tasks[-1].key] = float(inference_s[task]), float(metric_s[task])
    return tasks, actual


def cluster(nodes: int) -> Cluster:
    """Nodes of 8 GPUs that share a link of 25 Gb/s to the storage; 14 GB of weights."""
    return Cluster(nodes, 8, 2, LoadCosts(start_s=30.0, stage_s=14e9 / (25e9 / 8), load_s=2.0), unit_s=2.0)


def test_the_rules_beat_one_job_a_task() -> None:
    """Catches a rule that makes an evaluation slower, and units that are lost or computed twice."""
    for seed in range(3):
        (tasks, actual), where = trace(seed, 1, 0.3), cluster(4)
        ours, theirs = simulate(tasks, where, actual), simulate_jobs(tasks, where, actual)
        work = sum(inference_s for inference_s, _ in actual.values())
        assert ours.inference_s == pytest.approx(work) and theirs.inference_s == pytest.approx(work)
        assert lower_bound_s(tasks, where, actual) <= ours.seconds < theirs.seconds / 1.8
    (tasks, actual), where = trace(0, 4, 0.3), cluster(2)
    assert simulate(tasks, where, actual).reads <= 8
    assert simulate(tasks, where, actual).seconds < 1.1 * lower_bound_s(tasks, where, actual)


def test_priorities_end_first() -> None:
    """Catches a high-priority task that ends too late."""
    tasks = [TaskCost("a", f"{n}", 10.0, priority=int(n >= 8)) for n in range(10)]
    found = simulate(tasks, Cluster(1, 2, 1, LoadCosts()))
    assert found.priority_s == {1: 10.0, 0: 50.0}
