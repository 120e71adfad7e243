"""Preprocessing as a job array on a real SLURM, with tasks that are killed and requeued."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from megads.data.tokenizer_config import Engine
from megads.tools.prepare.config import PreprocessConfig, TokenizerConfig
from megads.tools.prepare.preprocess import preprocess
from megads.tools.prepare.tokenizer import train_tokenizer
from megads.tools.prepare.tokenizing import parts_path
from tests.command import REPOSITORY
from tests.slurm.jobs import Jobs
from tests.tools.prepare.test_preprocess_parallel import MEBIBYTE, lines_of, prose

PREPROCESS = REPOSITORY / "scripts" / "slurm" / "preprocess.sbatch"
MEBIBYTES = 64


@dataclass(frozen=True)
class Text:
    """One large file and a few small ones, and the dataset that one process makes of them."""

    folder: Path

    def overrides(self, output: Path) -> list[str]:
        """Returns the overrides that do not concern processes."""
        files = [f"input=[{self.folder / 'text'}]", f"tokenizer={self.folder / 'tokenizer.json'}", f"output={output}"]
        return [*files, "engine=hf"]

    def require_equal(self, output: Path) -> None:
        """Asserts that all files of a dataset equal those of one process."""
        for ending in (".bin", ".idx", ".json", ".tokenizer.json"):
            assert Path(f"{output}{ending}").read_bytes() == Path(f"{self.folder / 'one'}{ending}").read_bytes(), ending
        assert not parts_path(str(output)).exists()


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    """Returns the text with its tokenizer and its dataset."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text(prose(1))
    (folder / "text" / "b.jsonl").write_bytes(MEBIBYTES // 8 * lines_of(0, 8 * MEBIBYTE))
    (folder / "text" / "c.txt").write_text(prose(2))
    tokenizer = folder / "tokenizer.json"
    train_tokenizer(TokenizerConfig(input=[str(folder / "text" / "a.txt")], output=str(tokenizer), vocab_size=300))
    preprocess(
        PreprocessConfig(
            input=[str(folder / "text")], tokenizer=str(tokenizer), output=str(folder / "one"), engine=Engine.hf
        )
    )  # fmt: skip
    return Text(folder)


def tasks_at_work(output: Path) -> dict[int, int]:
    """Returns the process ids of the tasks that have begun, by task number."""
    found = {}
    for path in parts_path(str(output)).glob("tasks-*/participants/[!.]*"):
        pid = json.loads(path.read_text())["pid"]
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        (task,) = [int(word.partition(b"=")[2]) for word in variables if word.startswith(b"SLURM_ARRAY_TASK_ID=")]
        found[task] = pid
    return found


def finished(output: Path) -> int:
    """Returns the number of finished ranges of the input."""
    return len(list(parts_path(str(output)).glob("tasks-*/finished/[!.]*.json")))


def test_an_array_survives_kills_and_requeues(jobs: Jobs, text: Text, tmp_path: Path) -> None:
    """Catches input ranges lost or duplicated when their task is killed, and tasks that wait for a dead one."""
    output = tmp_path / "corpus"
    array = jobs.submit(PREPROCESS, *text.overrides(output), options=("--cpus-per-task=1", "--output=array-%a.out"))

    def said(task: int) -> str:
        return (tmp_path / f"array-{task}.out").read_text()

    jobs.wait_until(lambda: {1, 2} < tasks_at_work(output).keys() and finished(output) > 0, "tasks", f"{array}_0")
    os.kill(tasks_at_work(output)[1], signal.SIGKILL)
    jobs.cluster.command("scontrol", "requeue", f"{array}_2")
    assert finished(output) < MEBIBYTES
    states = [jobs.wait_for(f"{array}_{task}") for task in range(4)]
    assert states == ["COMPLETED", "FAILED", "COMPLETED", "COMPLETED"], [said(task) for task in range(4)]
    text.require_equal(output)
    assert jobs.field(f"{array}_2", "Restarts") == "1"
    whole = [task for task in range(4) if " tokens/s, engine " in said(task)]
    assert len(whole) == 1, "one joins the dataset"

    again = jobs.submit(PREPROCESS, *text.overrides(output), options=("--array=0", "--output=again.out"))
    assert jobs.wait_for(f"{again}_0") == "COMPLETED"
    assert "nothing is left to do" in (tmp_path / "again.out").read_text()


def test_a_cancelled_array_is_continued(jobs: Jobs, text: Text, tmp_path: Path) -> None:
    """Catches finished ranges that the same command processes again, and a lost node that blocks it."""
    output = tmp_path / "corpus"
    options = ("--cpus-per-task=1", "--array=0-1", "--output=array-%a.out")
    array = jobs.submit(PREPROCESS, *text.overrides(output), options=options)
    jobs.wait_until(lambda: finished(output) > 2, "finished stretches", f"{array}_0")
    jobs.cluster.command("scancel", array)
    for task in range(2):
        assert jobs.wait_for(f"{array}_{task}") == "CANCELLED"
    kept = {path: path.stat().st_mtime_ns for path in parts_path(str(output)).glob("tasks-*/*.shard")}
    assert 2 < len(kept) < MEBIBYTES
    assert not Path(f"{output}.bin").exists()

    again = jobs.submit(PREPROCESS, *text.overrides(output), options=("--cpus-per-task=2", *options[1:]))
    jobs.wait_until(lambda: finished(output) > len(kept) or not parts_path(str(output)).exists(), "more", f"{again}_0")
    assert all(path.stat().st_mtime_ns == time_ns for path, time_ns in kept.items() if path.exists())
    lost = jobs.field(f"{again}_1", "NodeList")
    if jobs.state(f"{again}_1") == "RUNNING":
        jobs.cluster.lose_node(lost)
        assert jobs.wait_for(f"{again}_0") == "COMPLETED", (tmp_path / "array-0.out").read_text()
        jobs.cluster.wait_for_nodes("down", [lost])
        jobs.cluster.revive(lost)
    assert jobs.wait_for(f"{again}_1") == "COMPLETED"
    text.require_equal(output)


PIPELINE = """
import sys
from datatrove.executor import SlurmPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from megads.tools.datatrove import MegadsJoin, MegadsWriter

text, tokenizer, output = sys.argv[1:]
writer = MegadsWriter(output, tokenizer)
on = dict(time="10:00", partition="debug", qos="", mem_per_cpu_gb=1)
write = SlurmPipelineExecutor([JsonlReader(text), writer], tasks=3, logging_dir="logs/write", **on)
join = SlurmPipelineExecutor([MegadsJoin(writer)], tasks=1, logging_dir="logs/join", depends=write, **on)
join.run()
print(join.job_id)
"""


def test_a_pipeline_of_datatrove(jobs: Jobs, tmp_path: Path) -> None:
    """Catches pipeline steps that datatrove cannot send to the nodes, and a join that does not wait for the tasks."""
    pytest.importorskip("datatrove", reason="datatrove is not installed: pip install 'megads[datatrove]'")
    (tmp_path / "text").mkdir()
    for number in range(5):
        (tmp_path / "text" / f"{number}.jsonl").write_bytes(lines_of(1000 * number, MEBIBYTE // 8))
    (tmp_path / "words.txt").write_text(prose(1))
    tokenizer = tmp_path / "tokenizer.json"
    train_tokenizer(TokenizerConfig(input=[str(tmp_path / "words.txt")], output=str(tokenizer), vocab_size=300))
    preprocess(
        PreprocessConfig(input=[str(tmp_path / "text")], tokenizer=str(tokenizer), output=str(tmp_path / "one"))
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", PIPELINE, str(tmp_path / "text"), str(tokenizer), str(tmp_path / "out")],
        cwd=tmp_path, env=jobs.environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    job = done.stdout.split()[-1]
    jobs.submitted.append(job)

    def said() -> str:
        return "\n".join(path.read_text() for path in (tmp_path / "logs").rglob("*.out"))

    assert jobs.wait_for(f"{job}_0", timeout_s=400) == "COMPLETED", said()
    for ending in (".bin", ".idx"):
        assert Path(f"{tmp_path / 'out'}{ending}").read_bytes() == Path(f"{tmp_path / 'one'}{ending}").read_bytes()
