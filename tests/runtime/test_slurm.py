"""Tests the node lists that are passed to SLURM."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from megads.errors import ConfigError
from megads.runtime import slurm
from megads.runtime.slurm import compressed

NAMES = (
    ["n8", "n9", "n10", "n11"],
    ["n10", "n08", "n09", "n7"],
    ["a1", "b01", "b02"],
    ["rack1-n3", "login", "rack1-n1", "rack1-n4"],
)


@pytest.mark.parametrize("names", NAMES)
def test_names_are_compressed_as_slurm_expands_them(names: list[str], tmp_path: Path) -> None:
    """Catches ranks on nodes that were not requested, and nodes without ranks: leading zeros, gaps, other prefixes."""
    if shutil.which("scontrol") is None:
        pytest.skip("scontrol is not on the PATH")
    # scontrol expands a list offline, but not without a configuration file.
    config = tmp_path / "slurm.conf"
    config.write_text("ClusterName=none\nSlurmctldHost=localhost\nNodeName=n1\n")
    command, variables = ["scontrol", "show", "hostnames", compressed(names)], {**os.environ, "SLURM_CONF": str(config)}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    assert sorted(done.stdout.split()) == sorted(names)


def test_a_compressed_list_is_short() -> None:
    """Catches an argument of srun that grows with the number of nodes; needs no SLURM."""
    assert compressed(["n3", "login", "n1", "n4"]) == "login,n[1,3-4]"
    assert compressed(f"gpu-{number:05d}" for number in range(4000)) == "gpu-[00000-03999]"


def test_a_controller_without_an_answer_is_asked_again() -> None:
    """Catches a controller that is given up at the first request without an answer, and a refusal that is repeated."""
    answers: list[Exception | str] = [slurm.ControllerOutage("no answer"), slurm.ControllerOutage("no answer"), "yes"]

    def answer() -> str:
        now = answers.pop(0)
        if isinstance(now, Exception):
            raise now
        return now

    assert slurm.retry_outage(answer, pause_s=0) == "yes"
    answers[:] = [ConfigError("refused"), "yes"]
    with pytest.raises(ConfigError, match="refused"):
        slurm.retry_outage(answer, pause_s=0)
    answers[:] = [slurm.ControllerOutage("no answer"), "yes"]
    with pytest.raises(slurm.ControllerOutage):
        slurm.retry_outage(answer, limit_s=0, pause_s=0)
    assert slurm.is_controller_outage("slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
    assert not slurm.is_controller_outage("Requested operation is presently disabled for job 7")
