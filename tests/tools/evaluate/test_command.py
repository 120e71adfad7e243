"""`megads evaluate`: its files, cached answers, refusals and perplexities."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from megads.batch import BatchInfo
from megads.config.frozen import freeze
from megads.config.root import RootConfig, open_run_data
from megads.data.config import DatasetConfig
from megads.data.indexed.sidecar import FoundTokenizer, find_tokenizer
from megads.data.sampling.loader import LoaderShare, validation_batches
from megads.errors import EXIT_OK, CheckpointError, ConfigError, DataError, MegadsError
from megads.model.gpt import GPT, token_losses
from megads.runtime.metrics import EventWriter, read_json_lines
from megads.tools.evaluate.command import evaluate
from megads.tools.evaluate.config import EvaluateConfig, EvaluationLayoutConfig
from megads.tools.evaluate.job import TokenBytes, documents
from megads.tools.evaluate.scoring import rolling_rows
from tests.small_run import TEXTS, hot_model, model_config, write_dataset, write_run

pytest.importorskip("lm_eval")

ROWS = [{"question": f"def attention_{i}(query", "answer": ", key)"} for i in range(6)]
COMMON = "dataset_path: json\ndataset_kwargs: {data_files: {test: rows.jsonl}}\ntest_split: test\n"
TASKS = {
    "choose": 'output_type: multiple_choice\ndoc_to_text: "{{question}}"\ndoc_to_choice: [", key)", "return"]\n'
    "doc_to_target: 0\ntarget_delimiter: ''\n",
    "go_on": 'output_type: generate_until\ndoc_to_text: "{{question}}"\ndoc_to_target: "{{answer}}"\n'
    'generation_kwargs: {until: ["\\n"], max_gen_toks: 4}\nmetric_list: [{metric: exact_match}]\n',
    "read": 'output_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: "{{question}}"\n'
    "metric_list: [{metric: bits_per_byte}]\n",
    "long": 'output_type: generate_until\ndoc_to_text: "{{question}}"\ndoc_to_target: "{{answer}}"\n'
    "metric_list: [{metric: exact_match}]\n",
    "nothing": 'output_type: multiple_choice\ndoc_to_text: "{{question}}"\ndoc_to_choice: [a, b]\ndoc_to_target: 0\n',
    "broken": "output_type: multiple_choice\ndoc_to_text: !function nowhere.text\n",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder with a run, its data and tasks; the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    prefix = write_dataset(tmp_path / "data")
    run = write_run(tmp_path / "run", prefix, hot_model(model_config()))
    EventWriter(run).write("start")
    for name, text in TASKS.items():
        task = tmp_path / "tasks" / name
        task.mkdir(parents=True)
        (task / "task.yaml").write_text(f"task: {name}\n{COMMON}{text}")
        rows = [] if name == "nothing" else ROWS
        (task / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tasks" / "group.yaml").write_text("group: both\ntask: [go_on, read]\n")
    return tmp_path


def config(**changes: Any) -> EvaluateConfig:
    given: dict[str, Any] = {"run": "run", "device": "cpu", "tasks_folder": "tasks" if "tasks" in changes else None}
    return EvaluateConfig(**(given | changes))


def results(folder: Path) -> list[dict[str, Any]]:
    """Contents of lm-eval's files, oldest first."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("run/evaluation/step_*/results_*.json"))]


@pytest.mark.always
def test_tasks_give_lm_evals_files(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches relative data paths resolved against another folder, a group without its tasks, and an event, a table or
    a file that is missing or incomplete."""
    assert evaluate(config(tasks=["choose", "both", "simple_sequences"], log_samples=True)) == EXIT_OK
    (found,) = results(folder)
    assert set(found["results"]) == {"choose", "both", "go_on", "read", "simple_sequences"}
    assert found["group_subtasks"] == {"both": ["go_on", "read"]}
    assert found["n-samples"]["choose"] == {"original": 6, "effective": 6}
    assert found["config"]["model_args"]["dtype"] == "float32" and found["model_name"].endswith("step_00000003")
    out = folder / "run" / "evaluation" / "step_00000003"
    assert not list(out.glob(".*"))
    (samples,) = out.glob("samples_choose_*.jsonl")
    assert len(samples.read_text().splitlines()) == 6
    assert "exact_match" in capsys.readouterr().out
    *_, event = read_json_lines(folder / "run" / "events.jsonl")
    assert event["event"] == "evaluation" and event["step"] == 3
    assert event["results"]["choose/acc"] == found["results"]["choose"]["acc,none"]


def test_a_finished_task_is_not_asked_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches answers that are computed again, and cached answers of other requests or other weights."""
    asked: list[int] = []
    score = GPT.forward

    def counted(self: GPT, tokens_bs: torch.Tensor, info: BatchInfo) -> torch.Tensor:
        asked.append(len(tokens_bs))
        return score(self, tokens_bs, info)

    monkeypatch.setattr(GPT, "forward", counted)

    def passes(**changes: Any) -> int:
        asked.clear()
        evaluate(config(tasks=["choose", "read"], **changes))
        return sum(asked)

    assert passes(limit=4) == 8 + 4
    assert passes(limit=4) == 0
    first, second = results(folder)
    assert first["results"] == second["results"]
    assert passes(limit=5) == 10 + 5
    yaml = folder / "tasks" / "read" / "task.yaml"
    yaml.write_text(yaml.read_text().replace("{{question}}", "{{answer}}"))
    assert passes(limit=5) == 5
    other = hot_model(model_config())
    with torch.no_grad():
        next(iter(other.parameters())).mul_(1.5)
    write_run(folder / "run", folder / "data" / "corpus", other, step=3)
    assert passes(limit=5) == 15


REFUSED: list[tuple[dict[str, Any], type[MegadsError], str]] = [
    ({"run": "nowhere"}, CheckpointError, "there is no such folder"),
    ({"run": "tasks"}, CheckpointError, "holds no checkpoint"),
    ({"tasks": ["choose"], "tasks_folder": "nowhere"}, ConfigError, "there is no such folder"),
    ({"tasks": ["choose"], "tasks_folder": "data"}, ConfigError, "holds no YAML file"),
    ({"tasks": ["nothing"]}, DataError, "task nothing: has no documents"),
    ({"tasks": ["broken"]}, DataError, "task broken: lm-eval cannot load it"),
    ({"tasks": ["long"]}, ConfigError, "max_gen_toks = 256 tokens to generate, but the model reads 32"),
    ({"data": ["nowhere"]}, DataError, "neither a file nor the prefix"),
    ({"data": ["data/text.jsonl"], "text_field": "body"}, DataError, "has no text in 'body'"),
    ({"data": ["empty.txt"]}, DataError, "holds no text"),
    ({"layout": EvaluationLayoutConfig(tp=4)}, ConfigError, "not divisible by layout.tp = 4"),
    ({"layout": EvaluationLayoutConfig(pp=3)}, ConfigError, "layout.pp"),
    ({"batch_size": 0}, ConfigError, "batch_size = 0"),
    ({"device": "cuda:0", "layout": EvaluationLayoutConfig(dp=2)}, ConfigError, "device = cuda:0"),
    ({"tokenizer": "empty.txt"}, DataError, "empty.txt"),
]


@pytest.mark.parametrize(("changes", "kind", "said"), REFUSED, ids=range(len(REFUSED)))
def test_refusals(folder: Path, changes: dict[str, Any], kind: type[MegadsError], said: str) -> None:
    """Catches a traceback, a message without a remedy, and results of a refused evaluation."""
    (folder / "empty.txt").write_text("")
    with pytest.raises(kind, match=said):
        evaluate(config(**changes))
    assert not results(folder) and not list(folder.glob("run/evaluation/**/.partial"))


@pytest.mark.slow
def test_an_unknown_task_names_the_near_ones(folder: Path) -> None:
    """Catches a message with thousands of names, or none."""
    with pytest.raises(ConfigError, match="tasks = simple_sequence: there is no such task; there are simple_sequences"):
        evaluate(config(tasks=["simple_sequence"], tasks_folder=None))


def test_without_lm_eval(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an import error where the extra is not installed, and perplexities that need it for no reason."""
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ConfigError, match="pip install 'megads\\[evaluate\\]'"):
        evaluate(config(tasks=["choose"]))
    assert evaluate(config(data=["data/text.jsonl"])) == EXIT_OK


def perplexities(folder: Path) -> dict[str, dict[str, float]]:
    (path,) = folder.glob("run/evaluation/step_*/perplexity_*.json")
    return json.loads(path.read_text())["sets"]  # type: ignore[no-any-return]


def test_texts_are_read_as_preprocess_reads_them(folder: Path) -> None:
    """Catches a byte order mark or a character such as U+2028 that ends a line or a file for one command only."""
    odd = ["a small\u2028boat", "the river\x0cand\x85a boat"]
    lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in odd)
    (folder / "odd.jsonl").write_text(f"\ufeff{lines}")
    (folder / "odd.csv").write_text("".join(["id,text\n", *(f'1,"{text}"\n' for text in odd)]))
    (folder / "odd.txt").write_bytes("".join(odd).encode("utf-16"))
    found = find_tokenizer([folder / "data" / "corpus"], None)
    sizes = {
        name: [text.text_bytes for text in documents(str(folder / name), found, "text")]
        for name in ("odd.jsonl", "odd.csv", "odd.txt")
    }
    expected = [len(text.encode()) for text in odd]
    assert sizes == {"odd.jsonl": expected, "odd.csv": expected, "odd.txt": [sum(expected)]}


@pytest.mark.always
def test_texts_are_measured_document_by_document(folder: Path) -> None:
    """Catches bytes of special tokens, a document that attends to another, and a dataset that differs from its text."""
    assert evaluate(config(data=["data/text.jsonl", "data/corpus"])) == EXIT_OK
    text, corpus = perplexities(folder).values()
    assert text == corpus
    assert text["bytes"] == sum(len(line.encode()) for line in TEXTS)
    tokenizer = Tokenizer.from_file("data/corpus.tokenizer.json")
    model, loss, tokens = hot_model(model_config()), 0.0, 0
    end = tokenizer.token_to_id("<|endoftext|>")
    for line in TEXTS:
        ids = torch.tensor([[end, *tokenizer.encode(line).ids]])
        assert ids.shape[1] <= 33
        with torch.no_grad():
            logits = model(ids[:, :-1], BatchInfo(torch.zeros(1, dtype=torch.int64)))
        loss += float(token_losses(logits, ids[:, 1:]).sum())
        tokens += ids.shape[1] - 1
    assert text["tokens"] == tokens
    assert text["loss"] == pytest.approx(loss / tokens, rel=1e-6)
    assert text["perplexity"] == pytest.approx(math.exp(loss / tokens), rel=1e-5)
    assert text["bits_per_byte"] == pytest.approx(loss / math.log(2) / text["bytes"], rel=1e-6)


def test_validation_sets_are_those_of_the_run(folder: Path) -> None:
    """Catches samples other than those of the run's own validations, and bytes of masked tokens."""
    run = RootConfig(model=model_config())
    run.train.steps, run.train.seq_len, run.train.global_batch_size = 3, 16, 2
    run.data.train, run.data.split = [DatasetConfig(path="data/corpus")], [0.8, 0.2]
    freeze(run, folder / "run" / "config.yaml")
    assert evaluate(config()) == EXIT_OK
    ((name, found),) = perplexities(folder).items()
    _, sets = open_run_data(run)
    model, loss, tokens, label_ids = hot_model(model_config()), 0.0, 0, list[int]()
    for batches in validation_batches(sets[name], LoaderShare(1, 0, 1, model.config.vocabulary), 1):
        for batch in batches:
            with torch.no_grad():
                losses = token_losses(model(batch.tokens_bs, batch.info), batch.labels_bs)
            loss += float((losses * batch.loss_mask_bs).sum())
            tokens += int(batch.loss_mask_bs.sum())
            label_ids += batch.labels_bs[batch.loss_mask_bs > 0].tolist()
    assert found["tokens"] == tokens and found["loss"] == pytest.approx(loss / tokens, rel=1e-6)
    text = Tokenizer.from_file("data/corpus.tokenizer.json").decode(label_ids)
    assert found["bytes"] == len(text.encode())


@pytest.mark.parametrize("length", [1, 4, 5, 8, 9, 30])
def test_every_token_is_in_one_window(length: int) -> None:
    """Catches a token that is scored twice or never, and a window longer than the model's sequence length."""
    rows = rolling_rows(range(100, 100 + length), 7, 4)
    assert [token for row in rows for token in row.ids[-row.counted :]] == list(range(100, 100 + length))
    assert all(len(row.ids) <= 5 and 0 < row.counted < len(row.ids) for row in rows)
    assert rows[0].ids[0] == 7 and all(len(row.ids) == 5 for row in rows[1:])


def test_bytes_of_tokens(folder: Path) -> None:
    """Catches characters of several bytes counted as one, or as the replacement character."""
    tokenizer = Tokenizer.from_file("data/corpus.tokenizer.json")
    found = FoundTokenizer(tokenizer, Path("x"), tokenizer.get_vocab_size(), 0, verified=True)
    sizes = TokenBytes(found)
    for text in (*TEXTS[:2], "漢字 é 🚀"):
        ids = tokenizer.encode(text).ids
        assert sum(sizes.count([number]) for number in ids) == sizes.count(ids) == len(text.encode())
    assert sizes.count([tokenizer.token_to_id("<|endoftext|>")]) == 0


@pytest.mark.slow
@pytest.mark.distributed
def test_ranks_of_a_layout(folder: Path, megads: Callable[..., Any]) -> None:
    """Catches ranks that hang, and results that never leave a rank."""
    done = evaluate(config(tasks=["choose"], data=["data/text.jsonl"], output="alone"))
    assert done == EXIT_OK
    arguments = ("run=run", "device=cpu", "tasks=[choose]", "tasks_folder=tasks", "data=[data/text.jsonl]")
    started = megads("evaluate", *arguments, "layout.tp=2", "output=together").end()
    assert started.code == EXIT_OK, started.err
    (alone,), (together,) = (list((folder / name).glob("results_*.json")) for name in ("alone", "together"))
    metrics = [json.loads(path.read_text())["results"]["choose"] for path in (alone, together)]
    assert metrics[0] == metrics[1] and "choose" in started.out


@pytest.mark.slow
@pytest.mark.distributed
def test_what_a_rank_refuses(folder: Path, megads: Callable[..., Any]) -> None:
    """Catches the first rank's error lost among those of other ranks."""
    refused = megads("evaluate", "run=run", "device=cpu", "tasks=[long]", "tasks_folder=tasks", "layout.tp=2").end()
    assert refused.code == 2 and "max_gen_toks = 256" in refused.err and "Traceback" not in refused.err
