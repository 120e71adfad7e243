"""Tests that `megads rehearse` finds eight planted mistakes on a private SLURM, and passes a good script."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from megads.errors import ConfigError
from megads.launch.launcher import EXIT_KILLED
from megads.tools.rehearse.private_slurm import PrivateSlurm
from megads.tools.rehearse.request import read_words
from tests.command import REPOSITORY, Ended, StartCommand

GOOD = """#!/bin/bash
#SBATCH --nodes=1 --gpus-per-node=1 --time=30
#SBATCH --signal=B:USR1@60
#SBATCH --requeue
#SBATCH --output=%x-%j.out
set -e
trap '' USR1
exec megads train cluster=slurm "$@"
"""
RUN = ("train.steps=100", "model.vocab_size=509", "checkpoint.every_steps=50", "cluster.gpu_memory_gib=80")


class Rehearse:
    """Rehearses commands in a folder with `megads` on the PATH and a dataset named corpus."""

    def __init__(self, start: StartCommand, corpus: Path):
        self._start, self._corpus = start, corpus
        self.variables: dict[str, str] = {}
        folder = start.folder / "bin"
        folder.mkdir()
        (folder / "megads").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m megads.cli.main "$@"\n')
        (folder / "megads").chmod(0o755)
        self._path = f"{folder}:{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"

    def __call__(
        self, script: str | Path, *overrides: str, options: Sequence[str] = (), own: Sequence[str] = ()
    ) -> Ended:
        """Rehearses a script; `options` are sbatch's, `own` those of megads rehearse."""
        path = script if isinstance(script, Path) else self._start.folder / "my.sbatch"
        if isinstance(script, str):
            path.write_text(script)
        words = ["sbatch", *options, str(path), *RUN, f"data.train=[{{path: {self._corpus}}}]", *overrides]
        return self._start("rehearse", *own, "--", *words, variables={"PATH": self._path, **self.variables}).end(
            timeout_s=900.0
        )


@pytest.fixture
def rehearse(megads: StartCommand, corpus: Path) -> Rehearse:
    return Rehearse(megads, corpus)


def rows(ended: Ended) -> dict[str, tuple[str, str]]:
    """Status and text of each check."""
    found = re.findall(r"^(ok|note|problem) +(\w+(?: \w+)?)  +(.*)$", ended.out, re.MULTILINE)
    return {check: (status, text) for status, check, text in found}


def problems(ended: Ended) -> dict[str, str]:
    """Text of each problem; checks that the exit code agrees."""
    found = {check: text for check, (status, text) in rows(ended).items() if status == "problem"}
    assert ended.code == (ConfigError.exit_code if found else 0), ended.out + ended.err
    return found


def test_the_good_script_passes(rehearse: Rehearse, tmp_path: Path) -> None:
    """Catches false alarms, omitted steps of a job's life cycle, and files left in the user's folder."""
    before = set(tmp_path.iterdir())
    ended = rehearse(
        REPOSITORY / "scripts" / "slurm" / "train.sbatch",
        *("model.num_layers=4", "parallel.tp=4", "parallel.pp=2", "parallel.dp=2", "train.global_batch_size=16"),
        options=("--nodes=2", "--gpus-per-node=8", "--account=any", "--partition=gpu,long", "--constraint=a100"),
    )
    assert problems(ended) == {} and "No problem found" in ended.out
    assert {"training", "signal handled", "requeued", "resumed", "memory", "layout"} <= set(rows(ended))
    assert all(status == "ok" for status, _ in rows(ended).values()), ended.out
    assert {path for path in tmp_path.iterdir() if path.suffix not in (".out", ".err")} == before


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--nodse=2",), "no option --nodse"),
        (("--time=soon",), "Invalid --time specification"),
        (("--signal=B:USR9@60",), "Invalid --signal specification"),
    ],
)
def test_mistake_1_options(rehearse: Rehearse, options: tuple[str, ...], said: str) -> None:
    """Catches undetected options that only the real sbatch would refuse."""
    assert said in problems(rehearse(GOOD, options=options))["options"]


def test_mistakes_2_to_7_on_paper(rehearse: Rehearse) -> None:
    """Catches mistakes that options and config show before training, but that one rehearsal does not all report.

    A layout that does not fit the nodes, a model that does not fit the GPUs, a missing dataset, folders that cannot be
    written to, and no requeue.
    """
    found = problems(
        rehearse(
            GOOD,
            *("model=bloom_176b", "parallel.tp=2", "parallel.dp=2", "train.micro_batch_size=2"),
            *("data.train=[{path: nowhere/corpus}]", "run.dir=/proc/runs/mine", "checkpoint.load=none"),
            options=("--output=logs/%j.out", "--no-requeue", "--nodes=2", "--gpus-per-node=8"),
            own=("--gpu-memory-gib", "40"),
        )
    )
    assert set(found) == {
        *("requeue", "output folder", "layout", "data", "memory", "run folder"),
    }
    assert "4 ranks" in found["layout"] and "16 together" in found["layout"]
    assert "nowhere/corpus" in found["data"] and "40.0 GiB" in found["memory"]
    assert "/proc/runs/mine" in found["run folder"] and "logs" in found["output folder"]


def test_mistakes_3_and_4_sizes_and_tokenizer(rehearse: Rehearse, tmp_path: Path) -> None:
    """Catches sizes checked on the scaled model, which divide although the user's do not, and a missing tokenizer."""
    (tmp_path / "text.txt").write_text("some text\n" * 100)
    raw = ("data.train=[]", f"data.raw={tmp_path}/text.txt", "tokenizer.path=none.json", "model.vocab_size=null")
    found = problems(rehearse(GOOD, "model.num_heads=4", "parallel.tp=3", *raw))
    assert "not divisible by parallel.tp = 3" in found["sizes"] and "none.json" in found["data"]


def test_mistake_6_the_signal_does_not_reach_the_launcher(rehearse: Rehearse) -> None:
    """Catches an undetected script without exec: its shell gets the signal, and the launcher does not."""
    found = problems(rehearse(GOOD.replace("exec megads", "megads")))
    assert set(found) == {"signal handled"} and "did not receive" in found["signal handled"]


def test_a_job_without_a_signal_saves_before_its_limit(rehearse: Rehearse) -> None:
    """Catches a missing --signal called a problem, although the launcher asks SLURM for the time limit itself."""
    ended = rehearse(GOOD.replace("#SBATCH --signal=B:USR1@60\n", ""))
    assert problems(ended) == {}
    assert "the time limit: saved at step" in rows(ended)["signal handled"][1] and rows(ended)["resumed"][0] == "ok"


def test_a_signal_to_the_steps_is_handled(rehearse: Rehearse) -> None:
    """Catches agents that die of a --signal without B:, which only steps get, instead of forwarding it to the launcher;
    and a dataset of the cluster whose absence fails a rehearsal on a laptop."""
    script = GOOD.replace("B:USR1", "USR1").replace("trap", "module load cuda\ntrap")
    ended = rehearse(script, "data.train=[{path: nowhere}]", own=("--elsewhere", "--without", "module"))
    found = problems(ended)
    assert not found and "to the steps" in rows(ended)["signal handled"][1]
    assert rows(ended)["data"][0] == "note" and "nowhere" in rows(ended)["data"][1]


def test_mistake_7_a_run_that_is_another_one_after_the_requeue(rehearse: Rehearse) -> None:
    """Catches an undetected run.id that contains the start time: every restart begins a new run."""
    found = problems(rehearse(GOOD.replace('"$@"', 'run.id="mine-$(date +%s)" "$@"')))
    assert set(found) == {"resumed"} and "the first wrote to runs/mine-" in found["resumed"]


def test_mistake_8_overrides(rehearse: Rehearse) -> None:
    """Catches an undetected unknown key, which is found only by composing the config."""
    assert "did you mean parallel.tp" in problems(rehearse(GOOD, "parallel.tpp=2"))["overrides"]


def test_mistake_8_the_environment(rehearse: Rehearse) -> None:
    """Catches undetected typos in the script's setup, in a script that stops there and in one that continues."""
    typo = "source venvs/megads/bin/activate\nmodule load cuda/99\n"
    stopping = problems(rehearse(GOOD.replace("trap", f"{typo}trap")))
    assert set(stopping) == {"script"} and "line 7: venvs/megads/bin/activate" in stopping["script"]
    careless = problems(rehearse(GOOD.replace("set -e", "").replace("trap", f"{typo}trap")))
    assert "line 8: module: command not found" in careless["script"]


def test_an_ended_rehearsal_leaves_nothing(megads: StartCommand, tmp_path: Path) -> None:
    """Catches daemons, jobs and folders left behind by Ctrl-C or SIGTERM during a rehearsal."""
    (tmp_path / "sleep.sbatch").write_text(GOOD.replace("exec megads", "sleep 319 #"))
    places = Path(tempfile.mkdtemp())
    for number in (signal.SIGINT, signal.SIGTERM):
        command = megads("rehearse", "--", "sbatch", "sleep.sbatch", variables={"TMPDIR": str(places)})
        command.wait_for(lambda: len(_sleepers()) == 1)
        command.process.send_signal(number)
        assert command.end().code == EXIT_KILLED
        assert _sleepers() == [] and list(places.iterdir()) == []
    places.rmdir()


def _sleepers() -> list[psutil.Process]:
    return [process for process in psutil.process_iter(["cmdline"]) if "319" in (process.info["cmdline"] or [])]


def test_the_site_is_asked_where_there_is_one(rehearse: Rehearse, slurm_cluster: PrivateSlurm) -> None:
    """Catches a job that the private SLURM accepts but the real one, here of four nodes, would refuse."""
    site = str(slurm_cluster.folder / "slurm.conf")
    rehearse.variables["SLURM_CONF"] = site
    found = problems(rehearse(GOOD, options=("--nodes=5", "--partition=gpu")))
    assert "invalid partition specified: gpu" in found["local SLURM"]
    ended = rehearse(GOOD, options=("--partition=gpu", "--no-requeue"), own=("--elsewhere",))
    assert set(problems(ended)) == {"requeue"}, "one mistake is one problem, and another cluster is not asked"
    assert slurm_cluster.command("squeue", "--noheader") == "", "nothing is queued there"


def test_options_take_values_as_in_the_real_sbatch(slurm_cluster: PrivateSlurm) -> None:
    """Catches an option of this SLURM that megads does not know, or whose value it parses as the script."""
    listed = re.findall(r"^ +(?:-\w,? +)?--([a-z][a-z-]+)", slurm_cluster.command("sbatch", "--help"), re.MULTILINE)
    assert len(listed) > 80
    for name in sorted(set(listed) - {"help", "usage", "version"}):
        done = subprocess.run(
            ["sbatch", f"--{name}"],
            env=slurm_cluster.environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        (option,), rest = read_words([f"--{name}", "next"])
        takes_value = "requires an argument" in done.stderr
        assert (option.name, option.value, rest) == (name, *(("next", []) if takes_value else (None, ["next"])))
