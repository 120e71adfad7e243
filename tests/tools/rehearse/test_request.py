"""Parsing of a user's sbatch command, and the job that the rehearsal submits for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from megads.errors import ConfigError
from megads.tools.rehearse.request import Request, UnknownOptionError, read_request

SCRIPT = """#!/bin/bash
# a comment
#SBATCH --nodes=48 --gpus-per-node=8   # in one line
##SBATCH --account=switched-off
#SBATCH -J bloom -t 20:00:00
#SBATCH --constraint=a100

#SBATCH --signal=B:SIGUSR1@300
echo started
#SBATCH --nodes=7
"""


def request(tmp_path: Path, *words: str, script: str = SCRIPT) -> Request:
    path = tmp_path / "train.sbatch"
    path.write_text(script)
    return read_request(["sbatch", *words, str(path), "model=tiny", "--looks=like-an-option"])


def test_script_and_command_line_are_joined_as_sbatch_joins_them(tmp_path: Path) -> None:
    """Catches options read from commented-out or later lines, and a script that overrides the command line."""
    asked = request(tmp_path, "-N2", "--job-n", "mine")
    assert (asked.nodes, asked.gpus_per_node, asked.value("job-name")) == (2, 8, "mine")
    assert asked.value("account") is None and asked.value("time") == "20:00:00"
    assert asked.arguments == ("model=tiny", "--looks=like-an-option")
    assert asked.signal is not None
    assert (asked.signal.name, asked.signal.to_script, asked.signal.seconds) == ("USR1", True, 300)


@pytest.mark.parametrize(
    ("words", "nodes", "gpus"),
    [
        (("--gres=gpu:a100:4",), 48, 4),
        (("--gres=craynetwork:1,gpu",), 48, 1),
        (("--nodes=2-4", "-G", "8"), 2, 4),
        (("--gpus-per-task=a100:2", "--ntasks-per-node=4"), 48, 8),
        (("--gpus-per-task=1", "--nodes=2", "--ntasks=8"), 2, 4),
    ],
)
def test_gpus_are_read_however_asked_for(tmp_path: Path, words: tuple[str, ...], nodes: int, gpus: int) -> None:
    """Catches a layout that is compared with the wrong number of GPUs."""
    asked = request(tmp_path, *words, script=SCRIPT.replace(" --gpus-per-node=8", ""))
    assert (asked.nodes, asked.gpus_per_node) == (nodes, gpus)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--nodse=2",), "sbatch has no option --nodse"),
        (("--ntasks-per=2",), "it may be --ntasks-per-core or"),
        (("-Z",), "sbatch has no option -Z"),
    ],
)
def test_options_that_sbatch_lacks_are_named(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    """Catches a misspelt option whose value is taken for the script."""
    with pytest.raises(UnknownOptionError, match=said):
        request(tmp_path, *words)
    with pytest.raises(UnknownOptionError, match=f"line 2, .*{said}"):
        request(tmp_path, script=f"#!/bin/bash\n#SBATCH {words[0]}\n")


def test_what_cannot_be_rehearsed_is_refused(tmp_path: Path) -> None:
    """Catches a rehearsal of something other than what the user meant."""
    for command in ([], ["srun", "x"], ["sbatch"], ["sbatch", "--wrap=x"], ["sbatch", str(tmp_path / "none.sbatch")]):
        with pytest.raises(ConfigError):
            read_request(command)
    with pytest.raises(ConfigError, match="heterogeneous"):
        request(tmp_path, script="#!/bin/bash\n#SBATCH -N1\n#SBATCH hetjob\n#SBATCH -N2\n")


def test_the_scaled_job_keeps_the_script_and_leaves_the_site_out(tmp_path: Path) -> None:
    """Catches a private SLURM that is asked for 48 nodes or an A100, and a script with shifted or changed lines."""
    asked = request(tmp_path, "--array=3-9%1", "--export=NONE")
    words = asked.scaled_words(2, 1, tmp_path / "out", {"A": "b"})
    assert {"--nodes=2", "--gpus-per-node=1", "--array=3-4%1", "--export=A=b", "--time=20:00:00"} <= set(words)
    assert not [word for word in words if "constraint" in word or word == "--nodes=48"]
    asked.write_script(tmp_path / "copy")
    before, after = SCRIPT.splitlines(), (tmp_path / "copy").read_text().splitlines()
    changed = [new for old, new in zip(before, after, strict=True) if old != new]
    assert all(line.startswith("##SBATCH") for line in changed) and len(changed) == 5


@pytest.mark.parametrize(
    ("words", "nodes"),
    [
        (("--ntasks=8", "--ntasks-per-node=4"), 2),
        (("--ntasks=9", "--ntasks-per-node=4"), 3),
        (("--ntasks=1", "--ntasks-per-node=4"), 1),
        (("--ntasks=8",), 1),
        ((), 1),
        (("--nodes=3", "--ntasks=8", "--ntasks-per-node=4"), 3),
    ],
)
def test_nodes_follow_from_tasks(tmp_path: Path, words: tuple[str, ...], nodes: int) -> None:
    """Catches a partly filled last node that is not counted."""
    assert request(tmp_path, *words, script="#!/bin/bash\n").nodes == nodes
