"""The core without megads/tools: it trains and resumes; what needs a tool says which one is missing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.command import small_model, steps_of

ROOT = Path(__file__).parents[1]
FOLDERS = ("conf", "kernels", "megads")

RUN_ALL = """
import contextlib, io, json, sys
from megads.cli.main import run
for words in json.load(sys.stdin):
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        code = run(words)
    print(json.dumps([code, errors.getvalue()]))
"""
"""Program that runs commands one after the other: Python and its imports start only once."""


@pytest.mark.distributed
def test_the_core_trains_and_resumes_without_tools(corpus: Path, tmp_path: Path) -> None:
    """Catches a core that imports a tool, or does not start, save, resume and fail without the tools."""
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, tmp_path / folder)
    shutil.rmtree(tmp_path / "megads" / "tools")

    def python(
        option: str, program: str, text: str = "", words: Sequence[str] = ()
    ) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, option, program, *words]
        variables = {**os.environ, "PYTHONPATH": str(tmp_path)}
        return subprocess.run(
            command, cwd=tmp_path, env=variables, input=text, capture_output=True, text=True, timeout=300, check=False
        )

    run = small_model(
        corpus,
        run__dir=tmp_path / "run",
        parallel__dp=2,
        checkpoint__every_steps=2,
        checkpoint__local_every_steps=1,
        checkpoint__local_folder=tmp_path,
    )
    trainings = [["train", *run, f"train.steps={steps}"] for steps in (2, 4)]
    four = (*run, "train.steps=4")
    upload, load = (f"checkpoint.{key}=file://{tmp_path}/backup" for key in ("upload", "load"))
    dataset = f"file://{corpus}"
    refusals: list[tuple[list[str], str]] = [
        (["plan", "model=gpt2_124m"], "megads plan: needs megads.tools"),
        (["train", *four, "run.dry_run=true"], "run.dry_run=true needs megads.tools.plan"),
        (["train", *four, "-m", "optim.lr=1e-3,1e-4"], "-m needs megads.tools.sweep"),
        (["train", *four, upload], f"{upload} needs megads.tools.remote"),
        (["train", *four, "checkpoint.replicate=true"], "checkpoint.replicate=true needs megads.tools.remote"),
        (["train", *four, "data.train=[]", f"data.raw={corpus}.bin"], "data.raw needs megads.tools.prepare"),
        (["preprocess", f"input=[{corpus}.bin]", "tokenizer=x", "output=y"], "megads preprocess: needs megads.tools"),
        (["train", *four, "resilience.rerun_nonfinite=true"], "resilience.rerun_nonfinite needs megads.tools.rerun"),
        (["train", *four, "data.order=megatron"], "data.order=megatron needs megads.tools.megatron_order"),
        (["train", *four, "logging.timeline_every_steps=1"], "timeline_every_steps=1 needs megads.tools.profile"),
        (["train", *four, "logging.tensorboard.enabled=true"], "logging.tensorboard needs megads.tools.trackers"),
        (["train", *four, load], f"{load} needs megads.tools.remote"),
        (["train", *four, f"data.train=[{{path: {dataset}}}]"], f"the dataset {dataset} needs megads.tools.remote"),
    ]
    ended = python("-c", RUN_ALL, json.dumps([*trainings, *(words for words, _ in refusals)]))
    assert ended.returncode == 0, ended.stderr
    results = [json.loads(line) for line in ended.stdout.splitlines()]
    assert results[: len(trainings)] == [[0, ""]] * len(trainings), results
    assert [line["step"] for line in steps_of(tmp_path / "run")] == [1, 2, 3, 4]
    for (code, errors), (words, missing) in zip(results[len(trainings) :], refusals, strict=True):
        assert code == 2 and missing in errors, f"{words}: {errors}"
    completed = {verb: python("-m", "megads.cli.main", words=("__complete", verb, "mod")) for verb in ("plan", "train")}
    assert (completed["plan"].returncode, completed["plan"].stdout) == (0, ""), completed["plan"].stderr
    assert "model." in completed["train"].stdout
