"""Evaluates small checkpoints on small tasks with the real coordinator and with one job per task; results must match.

    python -m scripts.bench.evaluation_coordinator [--checkpoints 3] [--tasks 4] [--documents 300] [--workers 2]

One job per task is `megads evaluate run=<checkpoint> tasks=[<task>]`, as many at once as the coordinator has workers,
each on its share of the cores, in the order of checkpoints and tasks. The coordinator runs twice: without measured
times, and in a fresh copy with the times of the first run. The model is small, so the fixed cost of a job (starting
Python, torch and lm-eval) is a larger share than on a GPU; the simulation (evaluation_packing) covers larger models.
Only meaningful on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megads.checkpoint.manifest import RunRecord
from megads.checkpoint.store import save_checkpoint
from megads.data.prepare.config import PreprocessConfig, TokenizerConfig
from megads.data.prepare.preprocess import preprocess
from megads.data.prepare.tokenizer import train_tokenizer
from megads.engine.interface import Shard
from megads.model.config import ModelConfig
from megads.model.gpt import GPT
from megads.runtime.environment import available_core_numbers
from scripts.bench.results import Verdict, add_results_option, record

VOCABULARY, LENGTH = 400, 128
TEXTS = [f"def attention_{i}(query, key): return softmax(query @ key) * {i} + {i * 7919}\n" for i in range(200)]
COMMON = "dataset_path: json\ndataset_kwargs: {data_files: {test: rows.jsonl}}\ntest_split: test\n"
KINDS = {
    "choose": 'output_type: multiple_choice\ndoc_to_text: "{{question}}"\ndoc_to_target: 0\n'
    "doc_to_choice: [', key)', return, softmax]\ntarget_delimiter: ''\n",
    "read": 'output_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: "{{question}}"\n'
    "metric_list: [{metric: bits_per_byte}]\n",
    "go_on": 'output_type: generate_until\ndoc_to_text: "{{question}}"\ndoc_to_target: "{{answer}}"\n'
    'generation_kwargs: {until: ["\\n"], max_gen_toks: 16}\nmetric_list: [{metric: exact_match}]\n',
}


def make(folder: Path, checkpoints: int, tasks: int, documents: int) -> list[str]:
    """Creates a run in a folder, and tasks, each with half the documents of the one before; returns the task names."""
    (folder / "data").mkdir(parents=True)
    text, tokenizer, prefix = folder / "data" / "text.jsonl", folder / "data" / "any.json", folder / "data" / "corpus"
    text.write_text("".join(json.dumps({"text": line}) + "\n" for line in TEXTS))
    train_tokenizer(TokenizerConfig(input=[str(text)], output=str(tokenizer), vocab_size=VOCABULARY))
    preprocess(PreprocessConfig(input=[str(text)], tokenizer=str(tokenizer), output=str(prefix)))
    shape = ModelConfig(num_layers=4, hidden_size=256, num_heads=8, vocab_size=VOCABULARY + 8, max_seq_len=LENGTH)
    for step in range(1, checkpoints + 1):
        model = GPT(shape, seed=step)
        shards = [
            Shard(f"weight/{name}", tuple(weight.shape), (0,) * weight.dim(), weight.detach().float().contiguous())
            for name, weight in model.parameters_by_name().items()
        ]
        state = {"step": step, "samples": step, "tokens": step}
        about = json.loads(json.dumps(asdict(model.config)))
        save_checkpoint(folder / "run", shards, RunRecord(state, step, "digest", about, {"tp": 1, "pp": 1, "dp": 1}))
    (folder / "run" / "config.yaml").write_text(f"data:\n  train:\n  - path: {prefix}\n")
    names = []
    for number in range(tasks):
        kind = list(KINDS)[number % len(KINDS)]
        names.append(f"{kind}_{number}")
        place = folder / "tasks" / names[-1]
        place.mkdir(parents=True)
        (place / "task.yaml").write_text(f"task: {names[-1]}\n{COMMON}{KINDS[kind]}")
        rows = [
            {"question": f"def attention_{i}(query" + " key" * (i % 11), "answer": ", key)"}
            for i in range(max(documents >> number, 8))
        ]
        (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return names


def command(folder: Path, names: Sequence[str], *more: str) -> list[str]:
    """Command line of an evaluation."""
    listed = f"tasks=[{','.join(names)}]"
    return [
        sys.executable,
        "-m",
        "megads.cli.main",
        "evaluate",
        listed,
        f"tasks_folder={folder}/tasks",
        "device=cpu",
        *more,
    ]


def one_job_a_task(folder: Path, names: Sequence[str], workers: int, environment: dict[str, str]) -> float:
    """Seconds of one job per task, as many at once as there are workers."""
    cores = available_core_numbers()
    width = max(len(cores) // workers, 1)
    free = [cores[number * width % len(cores) :][:width] for number in range(workers)]
    checkpoints = sorted((folder / "run" / "checkpoints").glob("step_*"))
    waiting = [(checkpoint, name) for checkpoint in checkpoints for name in names]
    running: list[tuple[subprocess.Popen[bytes], list[int]]] = []
    begin = time.perf_counter()
    while waiting or running:
        for job in [job for job in running if job[0].poll() is not None]:
            if job[0].returncode:
                raise RuntimeError(f"a job failed with {job[0].returncode}")
            running.remove(job)
            free.append(job[1])
        while waiting and free:
            (checkpoint, name), own = waiting.pop(0), free.pop(0)
            output = f"output={folder}/jobs/{checkpoint.name}/{name}"
            words = [
                "taskset",
                "--cpu-list",
                ",".join(map(str, own)),
                *command(folder, [name], f"run={checkpoint}", output),
            ]
            process = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            running.append((process, own))
        time.sleep(0.05)
    return time.perf_counter() - begin


def coordinated(folder: Path, names: Sequence[str], workers: int, environment: dict[str, str]) -> float:
    """Seconds of the coordinator."""
    begin = time.perf_counter()
    words = command(folder, names, f"run={folder}/run", "checkpoints=all", f"workers={workers}")
    subprocess.run(words, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - begin


def results(files: Sequence[Path]) -> dict[str, Any]:
    """lm-eval's results of each task, by checkpoint and task."""
    found: dict[str, Any] = {}
    for path in files:
        content = json.loads(path.read_text())
        step = Path(content["config"]["model_args"]["pretrained"]).name
        found |= {f"{step}/{task}": values for task, values in content["results"].items()}
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints times and ratios, and compares results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", type=int, default=3)
    parser.add_argument("--tasks", type=int, default=4)
    parser.add_argument("--documents", type=int, default=300, help="documents of the first task")
    parser.add_argument("--workers", type=int, default=2)
    add_results_option(parser)
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        environment = {**os.environ, "HF_HOME": str(folder / "cache")}
        names = make(folder / "first", given.checkpoints, given.tasks, given.documents)
        first_s = coordinated(folder / "first", names, given.workers, environment)
        shutil.copytree(folder / "first", folder / "second")
        for left in (folder / "second" / "run" / "evaluation").iterdir():
            if left.is_dir():
                shutil.rmtree(left)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        second_s = coordinated(folder / "second", names, given.workers, environment)
        between = resource.getrusage(resource.RUSAGE_CHILDREN)
        jobs_s = one_job_a_task(folder / "first", names, given.workers, environment)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        ours = results(sorted((folder / "second" / "run" / "evaluation").glob("step_*/results_*.json")))
        theirs = results(sorted((folder / "first" / "jobs").glob("*/*/results_*.json")))
    if ours != theirs:
        raise SystemExit(f"results differ: {[key for key in theirs if ours.get(key) != theirs[key]]}")
    cpu_s = [
        later.ru_utime + later.ru_stime - earlier.ru_utime - earlier.ru_stime
        for earlier, later in ((before, between), (between, after))
    ]
    print(f"results of {len(theirs)} tasks are equal")
    print(f"one job a task {jobs_s:.1f} s, coordinator {first_s:.1f} s, with measured times {second_s:.1f} s")
    print(f"CPU time: one job a task {cpu_s[1]:.1f} s, coordinator {cpu_s[0]:.1f} s, {cpu_s[1] / cpu_s[0]:.2f} times")
    work = f"evaluation, {given.tasks} small tasks x {given.checkpoints}, {given.workers} workers, real"
    verdict = Verdict(0, work, f"{second_s:.1f} s", "one job a task", f"{jobs_s:.1f} s", jobs_s / second_s, 1.8)
    figures = {"jobs_s": jobs_s, "first_s": first_s, "second_s": second_s, "cpu_s": cpu_s}
    record(given.append, "evaluation_coordinator", figures, [verdict])


if __name__ == "__main__":
    main()
