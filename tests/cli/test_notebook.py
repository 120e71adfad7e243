"""`megads.train(...)`: the command `megads train` from Python."""

from __future__ import annotations

import importlib
import io
import math
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import hydra
import numpy as np
import pytest
from hydra.core.hydra_config import HydraConfig

import megads
from megads.cli.entry import compose_typed, hydra_initialized, prepare_composing
from megads.cli.notebook import _overrides
from megads.cli.train import VERB
from megads.config.root import RootConfig
from megads.errors import CheckpointError, ConfigError
from tests.command import StartCommand, checkpoint_of, checksums, events_of, small_model, steps_of, validations_of


def composed(*overrides: str) -> RootConfig:
    """The config of some overrides, as `megads.train` composes it."""
    given = prepare_composing(VERB, overrides)
    with hydra_initialized("train"):
        config: RootConfig = compose_typed("train", VERB.schema, given).config
    return config


def test_the_function_outlives_imports_of_the_package() -> None:
    """Catches a `megads.train` that is a package which cannot be called, once one of its modules is imported."""
    resume = importlib.import_module("megads.train.resume")
    assert callable(megads.train) and megads.train.resume is resume


@pytest.mark.parametrize(
    "text", ["it's", 'say "x"', "a,b", "${oc.env:HOME}", "[1]", "null", "12", " x=y ", "back\\slash\\", "é 漢", "~"]
)
def test_texts_arrive_as_they_are(text: str) -> None:
    """Catches a Python text that Hydra reads as a list, a number, null or an interpolation."""
    assert composed(*_overrides({"run.name": text})).run.name == text


def test_a_mapping_is_what_the_command_line_is() -> None:
    """Catches values of Python that become others in the config: truth values, null, paths, NumPy's numbers, lists."""
    config: dict[str, Any] = {
        "experiment": "first",
        "model": "tiny_llama",
        "data": {"raw": None, "train": [{"path": Path("a b/c"), "weight": np.float32(0.5)}, {"path": "d"}]},
        "train": {"steps": np.int64(20), "micro_batch_size": 4},
        "optim.lr": 1e-05,
        "optim.betas": (0.9, 0.99),
        "checkpoint.async_save": False,
        "deepspeed": {"wall_clock_breakdown": True, "zero": {"stage": 3}},
    }
    line = """
        experiment=first model=tiny_llama data.raw=null train.steps=20 train.micro_batch_size=4 optim.lr=1e-05
        optim.betas=[0.9,0.99] checkpoint.async_save=false deepspeed.wall_clock_breakdown=true deepspeed.zero.stage=3
    """.split()  # noqa: SIM905
    wanted = composed(*line, "data.train=[{path: 'a b/c', weight: 0.5}, {path: d}]")
    assert composed(*_overrides(config)) == wanted


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (["optim.lrr=3"], "unknown key optim.lrr: did you mean optim.lr"),
        ([{"train": {"stepz": 3}}], "train.stepz"),
        ([{"model": "none_such"}], "none_such"),
        ([{"optim.lr": math.nan}], "must be a finite number"),
        ([{"optim.lr": object()}], "optim.lr = <object object at"),
        (["-m", "optim.lr=1,2"], "-m: megads.train takes overrides only"),
        (["--config-dir", "mine"], "--config-dir: megads.train takes overrides only"),
    ],
)
def test_a_refused_config_raises_the_message(config: list[Any], message: str, capfd: pytest.CaptureFixture) -> None:
    """Catches a SystemExit that ends the notebook's kernel, and a message that only the terminal shows."""
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
        megads.train(*config)
    assert "megads train:" not in capfd.readouterr().err


def test_a_hydra_application_can_train(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Catches a call that fails in a program with Hydra, or that takes the program's own config away."""
    (tmp_path / "mine" / "experiment").mkdir(parents=True)
    (tmp_path / "mine" / "app.yaml").write_text("size: 3\n")
    (tmp_path / "mine" / "experiment" / "own.yaml").write_text("# @package _global_\noptim: {lr: 0.123}\n")
    (tmp_path / "notes.txt").write_text("text\n" * 200)
    with hydra.initialize_config_dir(str(tmp_path / "mine"), version_base="1.3"):
        HydraConfig.instance().set_config(hydra.compose("app", return_hydra_config=True))
        megads.train(
            f"hydra.searchpath=[file://{tmp_path / 'mine'}]",
            {"experiment": "own", "model": "tiny", "train.steps": 1, "run.dry_run": True},
            {"data.raw": tmp_path / "notes.txt", "run.dir": tmp_path / "run"},
        )
        assert hydra.compose("app").size == 3 and HydraConfig.get().job.config_name == "app"
    assert "dry run" in capsys.readouterr().out and not (tmp_path / "run").exists()


class CellStream(io.TextIOBase):
    """Text of a notebook's cell, whose descriptor is that of the server's terminal, as ipykernel's stream has it."""

    encoding = "utf-8"  # type: ignore[assignment]

    def __init__(self, terminal: Path) -> None:
        self.terminal, self.text = terminal.open("w"), ""

    def fileno(self) -> int:
        return self.terminal.fileno()

    def write(self, text: str) -> int:
        self.text += text
        return len(text)


@pytest.mark.distributed
def test_a_run_returns_its_handle(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a handle of another run or state, a failure that returns as if the run had trained, and lines of a run
    that appear in the terminal of the notebook server, where nobody looks."""
    run_dir = tmp_path / "run"
    overrides = small_model(corpus, run__dir=run_dir, evaluation__every_steps=2)
    streams = CellStream(tmp_path / "out"), CellStream(tmp_path / "err")
    monkeypatch.setattr(sys, "stdout", streams[0])
    monkeypatch.setattr(sys, "stderr", streams[1])
    run = megads.train(*overrides, {"train.steps": 3})
    said = streams[0].text
    assert all(line in said for line in ("starting ranks", "step 3/3 | loss", "finished at step 3"))
    assert sys.stdout is streams[0]
    for stream in streams:
        stream.terminal.flush()
        assert Path(stream.terminal.name).read_text() == ""
    assert (run.exit_code, run.run_dir, str(run)) == (0, run_dir, str(run_dir))
    assert repr(run) == f"run {run_dir}: finished"
    assert run.metrics["loss"] == [line["loss"] for line in steps_of(run_dir)] and len(run.metrics) == 3
    (loss,) = (name for name in run.metrics.columns if name.startswith("valid/") and name.endswith("/loss"))
    validated = run.metrics[["step", loss]].dropna().to_dict()
    assert validated == {key: [line[key] for line in validations_of(run_dir)] for key in ("step", loss)}
    assert run.checkpoint == checkpoint_of(run_dir, 3) and run.load_model(device="cpu").step == 3
    assert run.events == megads.read_events(run) and run.config.train.steps == 3
    assert megads.train(*overrides, {"train.steps": 3}).exit_code == 0
    assert len(steps_of(run_dir)) == 3
    with pytest.raises(CheckpointError, match=r"checkpoint\.load"):
        megads.train(*overrides, {"train.steps": 3, "checkpoint.load": "nowhere"})
    for stream in streams:
        stream.terminal.close()


BROKEN_PLUGIN = """
from dataclasses import dataclass

import megads

@dataclass
class BrokenOptions:
    pass

@megads.register_hook("broken", BrokenOptions)
class Broken(megads.Hook):
    def __init__(self, options, context):
        pass

    def on_step(self, info):
        raise OverflowError("a bug of the plugin")
"""


@pytest.mark.distributed
def test_a_failed_run_raises_with_its_cause(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a program that goes on with the model of a run that has failed."""
    (tmp_path / "overflowing_plugin.py").write_text(BROKEN_PLUGIN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.syspath_prepend(tmp_path)
    overrides = small_model(corpus, run__dir=tmp_path / "run", plugins="[overflowing_plugin]", train__steps=2)
    with pytest.raises(megads.RunFailed, match="OverflowError: a bug of the plugin") as failed:
        megads.train(*overrides, {"hooks.broken": {}})
    assert failed.value.exit_code == 1 and failed.value.run.run_dir == tmp_path / "run"


INTERRUPTED = """
import sys, megads

for _ in range(2):
    run = megads.train(*sys.argv[1:])
    print("returned", run.exit_code, repr(run), flush=True)
"""


@pytest.mark.distributed
def test_an_interrupted_call_saves_and_the_same_call_continues_bit_for_bit(
    corpus: Path, megads: StartCommand, tmp_path: Path
) -> None:
    """Catches an interrupt that ends Python, or loses a step; and a run that differs from the command's."""
    overrides = small_model(corpus, train__steps=120, train__micro_batch_size=12, logging__every_steps=50)
    reference, run_dir = tmp_path / "reference", tmp_path / "run"
    command = [sys.executable, "-c", INTERRUPTED, *overrides, f"run.dir={run_dir}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None and len(steps_of(run_dir)) < 3:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    returned = [line for line in out.splitlines() if line.startswith("returned")]
    stopped = "stopped on request, after saving; the same call continues it"
    assert returned == [f"returned 5 run {run_dir}: {stopped}", f"returned 0 run {run_dir}: finished"], out + err
    assert "SIGINT: saving and stopping" in out and err == ""
    (resumed,) = events_of(run_dir, "resume")
    assert 3 <= resumed["step"] < 120
    assert megads("train", *overrides, f"run.dir={reference}").end().code == 0
    assert steps_of(run_dir) == steps_of(reference)
    assert checksums(checkpoint_of(run_dir, 120)) == checksums(checkpoint_of(reference, 120))


def test_an_interrupt_before_the_ranks_start_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a handle of a run that does not exist."""
    monkeypatch.setattr("megads.launch.start.resolve_run", lambda *_: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        megads.train("model=tiny", "train.steps=1", "data.raw=notes")
