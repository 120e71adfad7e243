"""lm-eval tasks during training, on the training ranks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megads.data.indexed.sidecar import FoundTokenizer, load_tokenizer
from megads.errors import ConfigError
from megads.evaluate.config import EvaluationConfig
from megads.monitor.console import render_validation
from megads.runtime.heartbeat import Heartbeat
from megads.runtime.hooks import TrainState
from megads.runtime.metrics import EventWriter, MetricsWriter, read_json_lines
from megads.tools.evaluate.command import evaluate
from megads.tools.evaluate.config import EvaluateConfig
from megads.tools.evaluate.harness_tasks import documents_per_task, load_tasks, metric_values
from megads.tools.evaluate.scoring import Batching, ModelScoringEngine, Scorer
from megads.tools.evaluate.task_hook import TaskEvaluationHook, TaskRequest
from megads.tools.report.charts import draw_tasks
from megads.tools.report.history import read_history
from megads.tools.report.page import run_body
from megads.tools.trackers.feed import numbers
from tests.command import StartCommand, small_model
from tests.small_run import TOKENS, hot_model, model_config, write_dataset

pytest.importorskip("lm_eval")

from megads.tools.evaluate.harness import HarnessModel

TASK = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: rows.jsonl}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
"""
CHOICE = 'doc_to_choice: [", key)", "return"]\ndoc_to_target: 0\ntarget_delimiter: ""\n'
TEXT = (
    'doc_to_target: "x"\ngeneration_kwargs: {until: ["\\n"], max_gen_toks: 3}\nmetric_list: [{metric: exact_match}]\n'
)


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of two tasks."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "tasks"
    folder.mkdir()
    for name, kind, rest in (("choose", "multiple_choice", CHOICE), ("go_on", "generate_until", TEXT)):
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, kind=kind) + rest)
    rows = [{"question": f"def attention_{i}(query"} for i in range(40)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def lines_of(run_dir: Path) -> list[dict[str, Any]]:
    return [line for line in read_json_lines(run_dir / "metrics.jsonl") if any(key.startswith("eval/") for key in line)]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    "layout",
    [("parallel.pp=2",), ("parallel.dp=2", "parallel.zero_stage=3")],
    ids=str,
)
def test_in_mid_run(
    tasks: Path, megads: StartCommand, layout: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a rank that hangs, losses that differ from those of a run without tasks, scores that are not those of the
    checkpoint, and results that the console or the report does not show."""
    prefix = write_dataset(megads.folder / "data")
    given = [
        *small_model(
            prefix, train__steps=4, train__global_batch_size=4, evaluation__every_steps=2, model__vocab_size=303
        ),
        *layout,
        "data.split=[0.5, 0.5]",
        "model.max_seq_len=16",
    ]
    asked = ["evaluation.tasks=[choose, go_on]", f"evaluation.tasks_folder={tasks}", "evaluation.tasks_every_steps=3"]
    with_tasks = megads("train", *given, *asked, "run.id=asked").end()
    assert with_tasks.code == 0, with_tasks.err
    without = megads("train", *given, "run.id=plain").end()
    assert without.code == 0, without.err
    runs = megads.folder / "runs"
    losses = [
        [line["loss"] for line in read_json_lines(runs / name / "metrics.jsonl") if "loss" in line]
        for name in ("asked", "plain")
    ]
    assert losses[0] == losses[1]
    found = lines_of(runs / "asked")
    assert [line["step"] for line in found] == [3, 4] and re.search(r"tasks at step 3 \| choose/acc", with_tasks.out)
    # Half of all 40 texts of about 25 tokens are the validation set.
    documents = found[-1]["eval/choose/documents"]
    assert 0 < documents < 40
    monkeypatch.chdir(megads.folder)
    config = EvaluateConfig("asked", tasks=["choose"], tasks_folder=str(tasks), limit=documents, device="cpu")
    assert evaluate(config) == 0
    (results,) = (runs / "asked" / "evaluation").glob("step_*/results_*.json")
    wanted = metric_values(json.loads(results.read_text()))
    assert found[-1]["eval/choose/acc"] == wanted["choose/acc"]
    history = read_history(runs / "asked")
    (drawn,) = (task for task in history.tasks if task.name == "choose/acc")
    assert drawn.step.tolist() == [3, 4] and drawn.value[-1] == wanted["choose/acc"]
    assert draw_tasks(history) is not None
    page = "".join(run_body(history, []))
    assert "choose/acc" in page and "Evaluations" in page


@pytest.mark.distributed
def test_bad_tasks_are_refused_before_anything_starts(tasks: Path, megads: StartCommand) -> None:
    """Catches bad tasks that only fail on the ranks after minutes, and a run directory of a refused start."""
    prefix = write_dataset(megads.folder / "data")
    given = [*small_model(prefix, train__steps=2), f"evaluation.tasks_folder={megads.folder / 'data'}"]
    refused = megads("train", *given, "evaluation.tasks=[choose]", "run.id=refused").end()
    assert refused.code == 2 and "holds no YAML file of a task" in refused.err, refused.err
    assert not (megads.folder / "runs" / "refused").exists()


def counted(tasks: Path, prefix: Path, most_tokens: int | None, limit: int | None = None) -> dict[str, int]:
    tokenizer = load_tokenizer(f"{prefix}.tokenizer.json")
    found = FoundTokenizer(tokenizer, prefix, TOKENS, tokenizer.token_to_id("<|endoftext|>"), verified=True)
    scorer = Scorer(ModelScoringEngine(hot_model(model_config())), model_config(), Batching(2, 32, lengths=(16, 32)))
    alone, counter = scorer.counting()
    model = HarnessModel(alone, found)
    return documents_per_task(model, counter, load_tasks(["choose", "go_on"], tasks), most_tokens, limit)


def test_as_many_documents_as_a_validation_takes(tasks: Path, tmp_path: Path) -> None:
    """Catches completions that count as one forward pass, a budget that every task takes in full, and a lost limit."""
    prefix = write_dataset(tmp_path / "data")
    assert counted(tasks, prefix, None) == {"choose": 40, "go_on": 40}
    assert counted(tasks, prefix, None, limit=7) == {"choose": 7, "go_on": 7}
    few, many = counted(tasks, prefix, 1024), counted(tasks, prefix, 2048)
    # A forward pass reads 64 tokens: two choices of two documents, or one of the three tokens that two documents
    # generate, each in a pass of its own.
    assert 0 < few["go_on"] < few["choose"] < 40
    assert few["choose"] <= 1024 // 2 // 32 and few["go_on"] <= 1024 // 2 // 32 // 3 + 1
    assert all(many[name] >= few[name] for name in few) and many != few
    assert counted(tasks, prefix, 2048, limit=3) == {"choose": 3, "go_on": 3}
    with pytest.raises(ConfigError, match="one document of go_on takes 192 tokens where the tasks may take 200"):
        counted(tasks, prefix, 200)


def test_lines_of_tasks_are_shown() -> None:
    """Catches task results that are shown as a validation, and standard errors of metrics in the console."""
    line = {"step": 7, "samples": 3, "eval/a/acc": 0.5, "eval/a/acc_stderr": 0.1, "eval/a/documents": 9}
    assert render_validation(line) == "tasks at step 7 | a/acc 0.5"
    assert numbers(line) == {"eval/a/acc": 0.5, "eval/a/acc_stderr": 0.1, "eval/a/documents": 9.0}
    assert render_validation({"step": 7, "valid/x/loss": 1.0}).startswith("validation at step 7 | x: loss 1.0000")


def test_an_evaluation_that_a_kill_prevented_is_made_up_for(tasks: Path, tmp_path: Path) -> None:
    """Catches a due evaluation that is missing after a resume, one that is written twice, and one that is not due."""
    prefix = write_dataset(tmp_path / "data")
    tokenizer = load_tokenizer(f"{prefix}.tokenizer.json")
    found = FoundTokenizer(tokenizer, prefix, TOKENS, tokenizer.token_to_id("<|endoftext|>"), verified=True)
    scorer = Scorer(ModelScoringEngine(hot_model(model_config())), model_config(), Batching(2, 32))
    model = HarnessModel(scorer, found)

    def resume(step: int) -> list[int]:
        metrics, events = MetricsWriter(tmp_path, enabled=True), EventWriter(tmp_path)
        hook = TaskEvaluationHook(
            scorer,
            lambda: TaskRequest(model, load_tasks(["choose"], tasks), {"choose": 3}),
            EvaluationConfig(tasks=["choose"], tasks_every_steps=2),
            5,
            metrics,
            events,
            Heartbeat(),
        )
        hook.on_start(TrainState(step=step))
        metrics.close()
        return [line["step"] for line in lines_of(tmp_path)]

    assert resume(0) == [] and resume(3) == []
    assert resume(4) == [4] and resume(4) == [4]
    assert resume(5) == [4, 5]
