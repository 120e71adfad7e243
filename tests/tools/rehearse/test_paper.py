"""Checks of a job's options before anything runs."""

from __future__ import annotations

import getpass
from pathlib import Path

import pytest

from megads.tools.doctor.finding import Status, note, ok, problem
from megads.tools.rehearse.paper import (
    check_output,
    check_requeue,
    check_signal,
    of_this_machine,
    refused_options,
    why_unwritable,
)
from megads.tools.rehearse.request import Request, read_request


def request(folder: Path, *options: str) -> Request:
    script = folder / "job.sbatch"
    script.write_text("#!/bin/bash\n" + "".join(f"#SBATCH {option}\n" for option in options))
    return read_request(["sbatch", str(script)])


@pytest.mark.parametrize(
    ("options", "place"),
    [
        ((), "."),
        (("--output=logs/%x.%u.out",), "logs"),
        (("--output=logs/o", "--error=logs/e"), "logs"),
        (("--chdir=sub", "--output=logs/o"), "sub/logs"),
        (("--chdir=sub",), "sub"),
    ],
)
def test_folders_of_the_output_that_are_there(tmp_path: Path, options: tuple[str, ...], place: str) -> None:
    """Catches a folder that is looked for elsewhere than where SLURM writes: relative names are relative to --chdir."""
    (tmp_path / place).mkdir(parents=True, exist_ok=True)
    found = check_output(request(tmp_path, *options), tmp_path)
    assert (found.status, found.found) == (Status.ok, f"{tmp_path / place} can be written to")


@pytest.mark.parametrize(
    ("options", "missing"),
    [
        (("--output=logs/o",), "logs"),
        (("--output=o", "--error=errors/e"), "errors"),
        (("--chdir=sub", "--output=o"), "sub"),
        (("--output=%x/o",), "job.sbatch"),
        (("--job-name=mine", "--output=%x/%u/o"), f"mine/{getpass.getuser()}"),
    ],
)
def test_folders_of_the_output_that_are_not_there(tmp_path: Path, options: tuple[str, ...], missing: str) -> None:
    """Catches a job that SLURM ends without a message: its folder, under the job's real name, does not exist."""
    (tmp_path / "job.sbatch").touch()
    if missing == "job.sbatch":  # %x is the script's name, a file
        (tmp_path / "there").mkdir()
        found = check_output(request(tmp_path, *options), tmp_path / "there")
        missing = "there/job.sbatch"
    else:
        found = check_output(request(tmp_path, *options), tmp_path)
    assert found.status is Status.problem and found.check == "output folder"
    assert f"{tmp_path / missing} of --output=" in found.found and found.found.endswith("does not exist")
    assert f"mkdir -p {tmp_path / missing}" in found.remedy


@pytest.mark.parametrize(
    ("options", "status", "said"),
    [
        ((), Status.ok, "megads train asks SLURM for the time limit"),
        (("--signal=B:USR1@300",), Status.ok, "USR1, 300 s before the end, to the script"),
        (("--signal=USR2@60",), Status.ok, "USR2, 60 s before the end, to the steps that srun started"),
    ],
)
def test_the_signal_before_the_end(tmp_path: Path, options: tuple[str, ...], status: Status, said: str) -> None:
    """Catches a signal reported as sent to the script although it is sent to the ranks."""
    found = check_signal(request(tmp_path, *options))
    assert found.status is status and said in found.found


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ((), Status.note),
        (("--requeue",), Status.ok),
        (("--no-requeue",), Status.problem),
        (("--requeue", "--no-requeue"), Status.problem),
        (("--no-requeue", "--requeue"), Status.ok),
    ],
)
def test_whether_a_job_is_put_back(tmp_path: Path, options: tuple[str, ...], status: Status) -> None:
    """Catches the first of two options that is used instead of the last."""
    assert check_requeue(request(tmp_path, *options)).status is status


def test_what_sbatch_says_in_one_line() -> None:
    """Catches a message that repeats the program's name, or its advice to run --help."""
    said = 'sbatch: error: Invalid --time\nsbatch: error: Batch job failed\nTry "sbatch --help" for more\n'
    found = refused_options(said)
    assert (found.status, found.found) == (Status.problem, "Invalid --time; Batch job failed")


def test_what_may_be_otherwise_on_the_cluster() -> None:
    """Catches a file missing on this machine that is reported as a problem of the job, and a problem of the job that is
    reported as a note."""
    findings = [
        problem("data", "no such file", "the run stops", "make it"),
        problem("signal", "none", "the run is lost", "ask for one"),
        note("run folder", "found", "slow", "move it"),
        ok("data", "there"),
    ]
    moved = of_this_machine(findings)
    assert [finding.status for finding in moved] == [Status.note, Status.problem, Status.note, Status.ok]
    assert moved[0].cost == "unless the cluster differs, the run stops" and moved[1:] == findings[1:]


def test_a_folder_that_nobody_can_write_to(tmp_path: Path) -> None:
    """Catches a probe that leaves files behind, or that takes a file for a folder."""
    assert why_unwritable(tmp_path / "not" / "yet" / "there") == "" and not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    reason = why_unwritable(tmp_path / "file")
    assert reason == f"cannot be written to (Not a directory: {tmp_path / 'file'})"
