"""Tests docs/extending.md as written: its package, its command and its notebook, outside of the source tree."""

from __future__ import annotations

import csv
import json
import random
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.command import (
    Ended,
    StartCommand,
    checkpoint_of,
    checksums,
    events_of,
    steps_of,
)

PAGE = (Path(__file__).parent.parent / "docs" / "extending.md").read_text()
# Overrides that the page does not need: a small model on a busy machine.
SMALL = (
    "model.num_layers=2", "model.hidden_size=48", "model.num_heads=6", "train.seq_len=16", "train.global_batch_size=8",
    "train.micro_batch_size=2", "train.precision=fp32", "cluster.peak_tflops=1", "cluster.threads_per_rank=1",
    "tokenizer.vocab_size=300", "logging.wandb.mode=disabled",
    # The tracker's process imports torch with the plugin, on a machine that other tests use too.
    "logging.flush_s=100",
)  # fmt: skip


def fences(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def files() -> dict[str, str]:
    """The page's Python code by its first line: a file of the package, or the notebook."""
    return {fence.partition("\n")[0].removeprefix("# "): fence for fence in fences("python")}


def write_page(folder: Path) -> None:
    """Writes the page's package, and text for its reader."""
    for name, text in files().items():
        if name.endswith(".py"):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text)
    words, generator = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"], random.Random(0)
    (folder / "texts").mkdir()
    with (folder / "texts" / "a.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["id", "body"])
        rows.writerows([n, " ".join(generator.choices(words, k=30))] for n in range(300))


def page_command(*, drop: tuple[str, ...] = ()) -> list[str]:
    """The page's command without the word megads, and without the keys in `drop`."""
    (text,) = [fence for fence in fences("bash") if "run.id=extended" in fence]
    _, *words = shlex.split(text.replace("\\\n", " "))
    return [word for word in words if word.partition("=")[0] not in drop]


def run_notebook(folder: Path) -> str:
    """Runs the page's notebook; returns its output."""
    done = subprocess.run(
        [sys.executable, "-c", files()["notebook"]], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def refused(ended: Ended, *texts: str) -> None:
    assert (ended.code, "Traceback" in ended.err) == (2, False), ended.err
    for text in texts:
        assert text in ended.err


@pytest.mark.slow
@pytest.mark.distributed
def test_the_pages_plugins_train_on_one_process(megads: StartCommand) -> None:
    """Catches a page whose code does not run, and a registered part without effect."""
    write_page(megads.folder)
    words = page_command(drop=("parallel.tp", "parallel.pp", "train.steps"))
    ended = megads(*words, *SMALL, "train.steps=2").end()
    assert ended.code == 0, ended.err
    run_dir = megads.folder / "runs" / "extended"
    assert [event["step"] for event in events_of(run_dir, "loss_alarm")] == [1, 2]
    assert (run_dir / "losses.txt").read_text().splitlines()[0] == f"1 {steps_of(run_dir)[0]['loss']!r}"
    manifest = json.loads((checkpoint_of(run_dir, 2) / "manifest.json").read_text())
    assert manifest["software"]["plugin my_package"].startswith("0.1, source ")
    keys = manifest["tensors"].keys()
    assert {"momentum/blocks.1.custom.up.weight", "weight/blocks.0.custom.attention.qkv.weight"} <= keys
    assert not any(key.startswith("exp_avg") for key in keys)
    assert run_notebook(megads.folder).splitlines()[-1].startswith("2 2 ")


@pytest.mark.slow
@pytest.mark.distributed
def test_typos_in_plugin_keys_are_refused_like_built_in_ones(megads: StartCommand) -> None:
    """Catches a misspelt plugin, part or setting that is accepted, and a traceback instead of the cause."""
    write_page(megads.folder)
    words = (*page_command(), *SMALL)
    refused(megads(*words, "plugins=[my_packag]").end(), "there is no module my_packag", "install it")
    refused(megads(*words, "hooks.loss_alarm.aboev=1").end(), "unknown key hooks.loss_alarm.aboev: did you mean above?")
    refused(
        megads(*words, "optim.name=signun", "optim.options={}").end(), "no optimizer 'signun': did you mean signum?"
    )
    (megads.folder / "my_package" / "hook.py").write_text("import megads\n1 / 0\n")
    refused(megads(*words).end(), "my_package cannot be imported: ZeroDivisionError", "hook.py:2")


@pytest.mark.slow
@pytest.mark.distributed
def test_the_pages_plugins_survive_a_kill_and_another_layout(megads: StartCommand) -> None:
    """Catches a rank without the plugin, plugin state that is not saved, and parts that depend on the layout."""
    write_page(megads.folder)
    words = page_command(drop=("run.id",))
    reference, killed, other = (megads.folder / "runs" / name for name in ("reference", "killed", "other"))
    ended = megads(*words, *SMALL, "run.id=reference").end()
    assert ended.code == 0, ended.err
    command = megads(*words, *SMALL, "run.id=killed")
    command.wait_for(lambda: len(steps_of(killed)) >= 3 if (killed / "metrics.jsonl").exists() else False)
    time.sleep(random.uniform(0.0, 0.05))
    command.kill_everything()
    again = megads(*words, *SMALL, "run.id=killed").end()
    assert again.code == 0, again.err
    assert events_of(killed, "resume")[0]["software_differences"] == []
    assert steps_of(killed) == steps_of(reference)
    assert checksums(checkpoint_of(killed, 8)) == checksums(checkpoint_of(reference, 8))
    (megads.folder / "my_package" / "__init__.py").open("a").write("__version__ = '0.2'\n")
    layout = ("parallel.tp=1", "parallel.pp=1", "parallel.dp=2", f"checkpoint.load={checkpoint_of(reference, 6)}")
    ended = megads(*words, *SMALL, "run.id=other", *layout).end()
    assert ended.code == 0, ended.err
    (difference,) = events_of(other, "resume")[0]["software_differences"]
    assert difference.startswith("plugin my_package: 0.1, source ") and " then, 0.2, source " in difference
    first, theirs = steps_of(other)[0], steps_of(reference)[6]
    assert first["batch_hash"] == theirs["batch_hash"]
    assert first["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
    assert first["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
