"""Coordinated evaluation of several checkpoints: equal results whatever is killed, and no unit computed twice."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megads.errors import EXIT_OK, CheckpointError, ConfigError, MegadsError, RankKilled
from megads.runtime.lease import claimed
from megads.runtime.metrics import EventWriter, read_json_lines
from megads.tools.evaluate.command import evaluate
from megads.tools.evaluate.config import EvaluateConfig, EvaluationLauncher, EvaluationLayoutConfig
from megads.tools.evaluate.coordinate import current_plan, write_all_results
from megads.tools.evaluate.evaluation_plan import EvaluationPlan, find_checkpoints, make_plan, plan_digest
from megads.tools.evaluate.harness_tasks import load_tasks
from megads.tools.evaluate.packing import WorkUnit
from megads.tools.evaluate.work_queue import METRICS, MODEL, QueueState, WorkerRecord, WorkQueue
from megads.tools.evaluate.worker import MetricsWorker, ModelWorker
from tests.command import Command, StartCommand
from tests.small_run import hot_model, model_config, write_dataset, write_run
from tests.tools.evaluate.test_command import COMMON, TASKS

pytest.importorskip("lm_eval")

DOCUMENTS, STEPS = 25, (1, 2, 3)
NAMES = ("choose", "go_on", "read")
ARGUMENTS = ("run=run", "tasks=[choose,both]", "tasks_folder=tasks", "device=cpu", "batch_size=3")


def make_run(folder: Path) -> None:
    """Writes a run of three checkpoints and three tasks, whose documents differ in length and count as 10 s each."""
    prefix = write_dataset(folder / "data")
    for step in STEPS:
        model = hot_model(model_config())
        with torch.no_grad():
            next(iter(model.parameters())).mul_(1 + step / 4)
        write_run(folder / "run", prefix, model, step)
    EventWriter(folder / "run").write("start")
    for name in NAMES:
        task = folder / "tasks" / name
        task.mkdir(parents=True)
        (task / "task.yaml").write_text(f"task: {name}\n{COMMON}{TASKS[name]}")
        questions = [f"def attention_{i}(query" + " key" * (i % 7) for i in range(DOCUMENTS)]
        (task / "rows.jsonl").write_text(
            "".join(json.dumps({"question": question, "answer": ", key)"}) + "\n" for question in questions)
        )
    (folder / "tasks" / "group.yaml").write_text(
        "group: both\ntask: [go_on, read]\naggregate_metric_list: [{metric: bits_per_byte}, {metric: exact_match}]\n"
    )
    (folder / "run" / "evaluation").mkdir()
    kinds = ("multiple_choice", "generate_until", "loglikelihood_rolling")
    times = [
        {"task": name, "kind": kind, "documents": 1.0, "seconds": 10.0, "metric_s": 0.0, "parameters": 10**5,
         "device": "cpu", "fewshot": 0}
        for name, kind in zip(NAMES, kinds, strict=True)
    ]  # fmt: skip
    (folder / "run" / "evaluation" / "times.jsonl").write_text("".join(json.dumps(line) + "\n" for line in times))


def results_in(folder: Path) -> dict[str, Any]:
    """The task entries in the newest results of each checkpoint, without times and paths."""
    found = {}
    for step in STEPS:
        files = sorted(folder.glob(f"step_{step:08d}/results_*.json"))
        if files:
            content = json.loads(files[-1].read_text())
            keys = ("results", "groups", "group_subtasks", "configs", "versions", "n-shot", "n-samples", "task_hashes",
                    "higher_is_better")  # fmt: skip
            for config in content["configs"].values():
                del config["metadata"]["config_source"]
            found[f"step_{step:08d}"] = {key: content.get(key) for key in keys}
    return found


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of plain evaluations, one checkpoint after the other."""
    folder = tmp_path_factory.mktemp("plain")
    make_run(folder)
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("HF_HOME", str(folder / "cache"))
        # The threads of each of two workers on two cores.
        torch.set_num_threads(1)
        for step in STEPS:
            run = f"run/checkpoints/step_{step:08d}"
            config = EvaluateConfig(
                run,
                tasks=["choose", "both"],
                tasks_folder="tasks",
                device="cpu",
                batch_size=3,
                output=f"out/{run[-13:]}",
            )
            assert evaluate(config) == EXIT_OK
        torch.set_num_threads(threads)
    return results_in(folder / "out")


def state_folder(folder: Path) -> Path:
    """Folder of the work queue."""
    (found,) = (path for path in (folder / "run/evaluation/coordinator").iterdir() if (path / "plan.json").is_file())
    return found


def parts_done(folder: Path) -> int:
    return len(list(folder.glob("run/evaluation/coordinator/*/parts/*.json")))


def units_of(folder: Path) -> list[dict[str, Any]]:
    return json.loads((state_folder(folder) / "plan.json").read_text())["units"]  # type: ignore[no-any-return]


def computed(folder: Path) -> int:
    """Number of computed units; a unit computed twice counts twice."""
    lines = read_json_lines(folder / "run" / "evaluation" / "times.jsonl")
    return sum(line.get("documents", 0) > 0 for line in lines) - len(NAMES)


def live_members(folder: Path, role: str = "model") -> list[WorkerRecord]:
    workers = WorkQueue(state_folder(folder), [], 3).read_state().workers
    return [one for one in workers if one.role == role]


def start_evaluation(megads: StartCommand, *more: str, variables: Mapping[str, str] = {}) -> Command:
    """Evaluates all checkpoints with two workers, which cache them in a folder of the test."""
    memory = megads.folder / "memory"
    memory.mkdir(exist_ok=True)
    return megads(
        "evaluate", *ARGUMENTS, "checkpoints=all", "workers=2", f"staging_folder={memory}", *more,
        variables={"HF_HOME": str(megads.folder / "cache"), **variables},
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.distributed
def test_results_are_those_of_plain_evaluations(megads: StartCommand, plain: dict[str, Any]) -> None:
    """Catches parts merged wrongly, answers that depend on the worker, a group without its mean, a missing event or
    table, cached checkpoints left in memory, and a second command that computes a unit again."""
    folder = megads.folder
    make_run(folder)
    ended = start_evaluation(megads, "priority={read: 1}").end()
    assert ended.code == EXIT_OK, ended
    units = units_of(folder)
    assert len(units) > 3 * len(STEPS), "long tasks are split"
    assert results_in(folder / "run" / "evaluation") == plain
    assert computed(folder) == len(units) and not list((folder / "memory").iterdir())
    table = json.loads((folder / "run" / "evaluation" / "table.json").read_text())
    assert [one["step"] for one in table["checkpoints"]] == list(STEPS)
    found = plain["step_00000002"]["results"]["choose"]["acc,none"]
    assert table["checkpoints"][1]["metrics"]["choose/acc"] == found and f"{found:.4f}" in ended.out
    assert (folder / "run" / "evaluation" / "table.png").read_bytes().startswith(b"\x89PNG")
    events = [event for event in read_json_lines(folder / "run" / "events.jsonl") if event["event"] == "evaluation"]
    assert [event["step"] for event in events] == list(STEPS)

    assert start_evaluation(megads, "priority={read: 1}").end().code == EXIT_OK
    assert computed(folder) == len(units) and results_in(folder / "run" / "evaluation") == plain


@pytest.mark.slow
@pytest.mark.distributed
def test_killed_workers(megads: StartCommand, plain: dict[str, Any]) -> None:
    """Catches a unit that is lost with its worker, killed workers that are not replaced, and units computed again."""
    folder = megads.folder
    make_run(folder)
    running = start_evaluation(megads)
    running.wait_for(lambda: parts_done(folder) >= 3)
    for worker in live_members(folder):
        os.kill(worker.pid, signal.SIGKILL)
    ended = running.end()
    assert ended.code == EXIT_OK, ended
    assert "is started again" in ended.err
    assert results_in(folder / "run" / "evaluation") == plain
    # A kill may fall between writing the answers of a unit and recording their time.
    assert abs(computed(folder) - len(units_of(folder))) <= 2


@pytest.mark.slow
@pytest.mark.distributed
def test_no_model_worker_is_left(megads: StartCommand) -> None:
    """Catches an evaluation that hangs because model workers have no start left while other workers are alive."""
    folder = megads.folder
    make_run(folder)
    running = start_evaluation(megads, "attempts=1")
    running.wait_for(
        lambda: (
            len(list(folder.glob("run/evaluation/coordinator/*/workers/*.json"))) == 3
            and len(live_members(folder)) == 2
        )
    )
    for worker in live_members(folder):
        os.kill(worker.pid, signal.SIGKILL)
    ended = running.end(60)
    assert ended.code == RankKilled.exit_code, ended
    assert "model-0 ended with -9" in ended.err and "that was its last start" in ended.err
    assert "no worker is left" in ended.err


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("everything", [False, True])
def test_a_killed_coordinator(megads: StartCommand, plain: dict[str, Any], everything: bool) -> None:
    """Catches workers that outlive the coordinator, a second command that starts over, and memory never freed."""
    folder = megads.folder
    make_run(folder)
    running = start_evaluation(megads)
    running.wait_for(lambda: parts_done(folder) >= 3)
    workers = live_members(folder)
    if everything:
        running.kill_everything()
        assert list((folder / "memory").iterdir()), "nobody was left to clean up"
    else:
        os.kill(running.process.pid, signal.SIGKILL)
        running.process.wait()
    done = parts_done(folder)
    ended = start_evaluation(megads).end()
    assert ended.code == EXIT_OK, ended
    assert results_in(folder / "run" / "evaluation") == plain
    assert computed(folder) <= len(units_of(folder)) + len(workers) and done >= 3
    assert not list((folder / "memory").iterdir())


@pytest.mark.slow
@pytest.mark.distributed
def test_what_fails_is_named_and_the_rest_is_there(megads: StartCommand, plain: dict[str, Any]) -> None:
    """Catches an evaluation that ends at the first damaged checkpoint, or that does not report it."""
    folder = megads.folder
    make_run(folder)
    (file,) = folder.glob("run/checkpoints/step_00000002/*.safetensors")
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    ended = start_evaluation(megads, "attempts=2").end()
    assert ended.code == CheckpointError.exit_code, ended
    for name in NAMES:
        assert f"failed: {name} on step_00000002" in ended.err
    assert "checksum" in ended.err and "Traceback" not in ended.err
    others = {name: found for name, found in plain.items() if name != "step_00000002"}
    assert results_in(folder / "run" / "evaluation") == others


def test_workers_in_one_process(folder: Path, plain: dict[str, Any]) -> None:
    """Catches, without processes, parts merged wrongly, answers that depend on their part, and a group without its
    mean."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    config = EvaluateConfig(
        "run", checkpoints="all", tasks=["choose", "both"], tasks_folder="tasks", device="cpu", batch_size=3, workers=2,
        staging_folder=str(folder),
    )  # fmt: skip
    checkpoints, tasks = find_checkpoints(config), load_tasks(config.tasks, Path("tasks"))
    plan = make_plan(config, checkpoints, tasks, 2, "cpu", {})
    queue = WorkQueue(folder / "state", plan.units, attempts=1)
    plan.write(queue.folder)
    assert EvaluationPlan.read(queue.folder) == plan
    record = WorkerRecord.of_this_process(role="model")
    with queue.joined(record) as presence:
        worker = ModelWorker(plan, queue, tasks, presence)
        worker.work()
        worker.close()
        MetricsWorker(plan, queue, tasks, presence).work()
    torch.set_num_threads(threads)
    assert write_all_results(config, plan, tasks, queue) == EXIT_OK
    assert results_in(folder / "run" / "evaluation") == plain and computed(folder) == len(plan.units)
    assert len(plan.units) > 3 * len(STEPS)


def test_parts_that_do_not_fit_are_made_again(folder: Path) -> None:
    """Catches an evaluation that hangs on a damaged part or on documents that changed while it ran, and such parts that
    the next start accepts."""
    config = EvaluateConfig(
        "run", checkpoints="last:1", tasks=["choose", "read"], tasks_folder="tasks", device="cpu", batch_size=3,
        workers=2, staging_folder=str(folder),
    )  # fmt: skip
    checkpoints, tasks = find_checkpoints(config), load_tasks(config.tasks, Path("tasks"))
    plan = make_plan(config, checkpoints, tasks, 2, "cpu", {})
    queue = WorkQueue(folder / "state", plan.units, attempts=1)
    record = WorkerRecord.of_this_process(role="model")
    with queue.joined(record) as presence:
        worker = ModelWorker(plan, queue, tasks, presence)
        worker.work()
        first, last = (next(unit for unit in plan.units if unit.task == name) for name in ("choose", "read"))
        content = json.loads(queue.path(first).read_text())
        for kind in content["kinds"].values():
            kind["requests"] = "of others"
        queue.path(first).write_text(json.dumps(content))
        queue.path(last).write_text("{")
        MetricsWorker(plan, queue, tasks, presence).work()
        state = queue.read_state()
        assert {unit.id for unit in plan.units} <= state.failed.keys() and not state.busy and not state.done
        assert "changed during the evaluation" in state.failed[first.id][0]
        assert "damaged" in state.failed[last.id][0]
        queue.forget_attempts()
        assert len(queue.read_state().open_units(MODEL)) == len(plan.units)
        worker.work()
        worker.close()
        MetricsWorker(plan, queue, tasks, presence).work()
    assert write_all_results(config, plan, tasks, queue) == EXIT_OK


def test_changed_documents_are_another_evaluation(folder: Path) -> None:
    """Catches results of earlier documents that are reused, and an evaluation that starts over without a reason."""

    def identity(limit: int | None = None, examples: int | None = None) -> str:
        config = EvaluateConfig(
            "run", checkpoints="all", tasks=["choose"], tasks_folder="tasks", limit=limit, num_fewshot=examples
        )
        return plan_digest(config, find_checkpoints(config), load_tasks(config.tasks, Path("tasks"), examples))

    before, of_three, with_examples = identity(), identity(3), identity(3, 1)
    assert identity() == before != of_three
    rows = folder / "tasks" / "choose" / "rows.jsonl"
    lines = rows.read_text().splitlines()
    rows.write_text("\n".join([*lines[:-1], lines[-1].replace("attention", "retention")]))
    assert identity() != before and identity(3) == of_three
    # Few-shot examples may be any of the documents.
    assert identity(3, 1) != with_examples


def test_a_copy_has_a_plan_of_its_own(folder: Path) -> None:
    """Catches a copy of a run that writes its results to the original, whose workers seem alive."""
    config = EvaluateConfig("run", checkpoints="all", tasks=["choose"], tasks_folder="tasks", device="cpu", workers=1)
    tasks, state = load_tasks(config.tasks, Path("tasks")), folder / "state"

    def planned(config: EvaluateConfig) -> EvaluationPlan:
        checkpoints = find_checkpoints(config)
        new = partial(make_plan, config, checkpoints, tasks, config.workers or 1, "cpu")
        return current_plan(state, config, checkpoints, new)[0]

    plan = planned(config)
    with WorkQueue(state, plan.units, 1).joined(WorkerRecord.of_this_process(role="model")):
        assert planned(replace(config, workers=2)) == plan
        copied = planned(replace(config, run=str(shutil.copytree("run", "copy"))))
    assert all(one.output.is_relative_to(folder / "copy") for one in copied.checkpoints)
    assert EvaluationPlan.read(state) == copied


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, which contains a run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    make_run(tmp_path)
    return tmp_path


REFUSED: list[tuple[dict[str, Any], type[MegadsError], str]] = [
    ({"checkpoints": "some"}, ConfigError, r"checkpoints = some: want all, last:<n>, or steps"),
    ({"checkpoints": []}, ConfigError, r"checkpoints = \[\]: want all"),
    ({"checkpoints": [7]}, CheckpointError, "has no step 7; it has 1, 2, 3"),
    ({"workers": 0}, ConfigError, "workers = 0"),
    ({"workers": 1, "device": "cuda:1"}, ConfigError, "each worker takes its own GPU"),
    ({"workers": 1, "device": "cuda"}, ConfigError, "device = cuda, but no GPU is visible"),
    ({"workers": 1, "staging_folder": "nowhere"}, ConfigError, "staging_folder = nowhere: no folder"),
    ({"checkpoints": "all", "tasks": []}, ConfigError, "a coordinator evaluates tasks only"),
    ({"checkpoints": "all", "data": ["valid"]}, ConfigError, "a coordinator evaluates tasks only"),
    ({"checkpoints": "all", "layout": EvaluationLayoutConfig(tp=2)}, ConfigError, "hold a whole model each"),
    ({"checkpoints": "all", "priority": {"chose": 1}}, ConfigError, "priority: chose is not evaluated"),
    ({"run": ["run", "run"]}, ConfigError, "give every run once"),
    ({"dry_run": True}, ConfigError, "belongs to a coordinator"),
    ({"workers": 1, "nodes": 2}, ConfigError, "nodes = 2: belongs to launcher=slurm"),
    (
        {"launcher": EvaluationLauncher.slurm, "sbatch": "nowhere"},
        ConfigError,
        "sbatch = nowhere: there is no such script",
    ),
]


def test_refusals_and_the_dry_run(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a traceback, an error without a remedy, and a dry run that leaves files or prints nothing."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    given: dict[str, Any] = {"run": "run", "tasks": ["choose", "both"], "tasks_folder": "tasks", "device": "cpu"}
    for changes, kind, said in REFUSED:
        with pytest.raises(kind, match=said):
            evaluate(EvaluateConfig(**(given | changes)))
    with claimed(folder / "elsewhere" / "coordinator"), pytest.raises(ConfigError, match="is in use by process"):
        evaluate(EvaluateConfig(**(given | {"workers": 1, "output": "elsewhere"})))
    changes = {"checkpoints": "last:2", "workers": 2, "dry_run": True, "priority": {"choose": 3}}
    assert evaluate(EvaluateConfig(**(given | changes))) == EXIT_OK
    out = capsys.readouterr().out
    assert "step_00000003" in out and "step_00000001" not in out and "one job per task would take" in out
    assert out.index("choose") < out.index("read")
    assert [path.name for path in (folder / "run" / "evaluation").iterdir()] == ["times.jsonl"]


def test_attempts_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches endless attempts at a unit that kills its worker, two claims of one unit, and a dead worker's claim."""
    unit = WorkUnit("a", "t", 0, 1, 1.0)
    queue = WorkQueue(tmp_path, [unit], attempts=2)
    alive = WorkerRecord.of_this_process(role="model")
    dead = replace(alive, born=alive.born + 1)
    with queue.joined(alive), queue.joined(dead):
        state = queue.read_state()
        assert [worker.name for worker in state.workers] == [alive.name]
        assert queue.claim(unit.id, state, dead.name) and not queue.claim(unit.id, state, alive.name)
        assert queue.read_state().open_units(MODEL) == [unit]
        assert queue.claim(unit.id, queue.read_state(), alive.name)
        queue.forget_attempts()
        assert queue.read_state().busy == {unit.id: alive.name}
        queue.fail(unit.id, 2, "it is broken", 3)
        assert queue.read_state().failed == {unit.id: ("it is broken", 3)}
        queue.forget_attempts()
        assert queue.read_state().open_units(MODEL) == [unit]
        for _ in range(2):
            assert queue.claim(unit.id, queue.read_state(), dead.name)
        assert queue.read_state().failed[unit.id][1] == RankKilled.exit_code


def test_when_an_evaluation_cannot_go_on(tmp_path: Path) -> None:
    """Catches an evaluation that waits for workers that nobody starts, or that ends while a worker is busy."""
    parts = [WorkUnit("a", "t", 0, 2, 1.0), WorkUnit("a", "t", 1, 2, 1.0), WorkUnit("a", "u", 0, 1, 1.0)]
    queue = WorkQueue(tmp_path, parts, 1)
    first, second, other = (unit.id for unit in parts)
    of_t, of_u = (unit.id for unit in queue.units[METRICS])
    state = partial(QueueState, queue.units)
    assert state().has_useful_workers({"model"}) and not state().has_useful_workers({"metrics"})
    assert state(workers=[WorkerRecord.of_this_process(role="model")]).has_useful_workers(set())
    half = state(done={first, other})
    assert half.has_useful_workers({"metrics"}), "u waits for its metrics"
    assert not state(done={first, other, of_u}).has_useful_workers({"metrics"})
    assert state(done={first, second}, busy={other: "somebody"}).has_useful_workers({"model"})
    measuring = state(done={first, second, other}, busy={of_t: "x", of_u: "y"})
    assert measuring.has_useful_workers({"metrics"}) and not measuring.has_useful_workers({"model"})
    assert not measuring.is_over() and state(done={of_u}, failed={second: ("broken", 1)}).is_over()
