"""What can be said of a job from its options alone, before anything runs."""

from __future__ import annotations

import getpass
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from megads.tools.doctor.finding import Finding, Status, note, ok, problem
from megads.tools.rehearse.private_slurm import PrivateSlurm
from megads.tools.rehearse.request import Request, UnknownOptionError

# What depends on the files of a machine.
_OF_A_MACHINE = ("data", "output folder", "run folder", "weights")
_SITE_TIMEOUT_S = 20.0
# What sbatch says where no SLURM can be reached.
_NO_SITE = ("configuration source", "contact slurm controller", "DNS SRV", "Unable to process configuration")


def check_options(request: Request, cluster: PrivateSlurm, script: Path) -> Finding:
    """Lets the real sbatch of a private cluster read every option; the job is held and taken back.

    Args:
        request: the user's.
        cluster: to ask.
        script: whose #SBATCH lines are switched off.
    """
    command = ["sbatch", "--parsable", "--hold", *request.checked_words(), str(script)]
    done = subprocess.run(command, env=cluster.environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        return refused_options(done.stderr)
    cluster.command("scancel", done.stdout.strip().partition(";")[0])
    asked = f"{request.nodes} node{'s' * (request.nodes > 1)}"
    return ok("options", f"sbatch takes them: {asked}, GPUs of each: {request.gpus_per_node or 'none asked for'}")


def refused_options(error: UnknownOptionError | str) -> Finding:
    """Returns the finding that sbatch does not take an option."""
    lines = [line.removeprefix("sbatch: ").removeprefix("error: ") for line in str(error).strip().splitlines()]
    said = "; ".join(line for line in lines if line and not line.startswith("Try "))
    return problem("options", said, "the job would not be accepted", "correct the option (man sbatch)")


def check_site(request: Request, words: list[str]) -> list[Finding]:
    """Asks the SLURM that this machine belongs to, where there is one, whether it would take the job.

    Args:
        request: the user's.
        words: the user's command without `sbatch`.
    """
    try:
        done = subprocess.run(
            ["sbatch", "--test-only", *words], capture_output=True, text=True, timeout=_SITE_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    said = (done.stderr or done.stdout).strip()
    if done.returncode == 0:
        return [ok("your cluster", f"takes it: {said.splitlines()[-1].removeprefix('sbatch: ')}")]
    if any(text in said for text in _NO_SITE):
        return []
    cost = f"the job of {request.nodes} nodes would not be accepted, or would wait for ever"
    found = "; ".join(line.removeprefix("sbatch: ").removeprefix("error: ") for line in said.splitlines())
    return [problem("your cluster", found, cost, "sinfo lists partitions, nodes and limits; ask for what is there")]


def check_signal(request: Request) -> Finding:
    """Says whether the job is told of its end in time."""
    signal = request.signal
    if signal is None:
        return problem(
            "signal",
            "the script asks for none",
            "SLURM kills the job at its time limit, and what was not saved is lost",
            "add #SBATCH --signal=B:USR1@300",
        )
    text = f"{signal.name}, {signal.seconds} s before the end, to "
    if signal.to_script:
        return ok("signal", f"{text}the script")
    return ok("signal", f"{text}what srun started (without B:)")


def check_requeue(request: Request) -> Finding:
    """Says whether the job may be put back into the queue."""
    last = request.last_of("requeue", "no-requeue")
    if last == "no-requeue":
        return problem(
            "requeue",
            "--no-requeue",
            "after a preemption, a lost node or its time limit the job ends for good",
            "write --requeue",
        )
    if last is None:
        return note(
            "requeue",
            "neither --requeue nor --no-requeue",
            "whether the job goes on by itself depends on the site (JobRequeue)",
            "add #SBATCH --requeue",
        )
    return ok("requeue", "allowed")


def check_output(request: Request, folder: Path) -> Finding:
    """Says whether the files of standard output and error can be written.

    Args:
        request: the user's.
        folder: in which sbatch is called.
    """
    base = folder / (request.value("chdir") or "")
    patterns = [request.value("output") or "slurm-%j.out", *filter(None, [request.value("error")])]
    names = {"%x": request.value("job-name") or request.script.name, "%u": getpass.getuser()}
    for pattern in patterns:
        filled = re.sub("%[xu]", lambda found: names[found.group()], pattern)
        place = (base / filled).parent
        reason = "is not there" if not place.is_dir() else why_unwritable(place)
        if reason:
            return problem(
                "output folder",
                f"{place} of --output={pattern} {reason}",
                "SLURM ends the job at its start, and no file says why",
                f"mkdir -p {place} before you submit, or name another folder",
            )
    return ok("output folder", f"{(base / patterns[0]).parent} can be written to")


def of_this_machine(findings: Sequence[Finding]) -> list[Finding]:
    """Returns the findings with problems of files and folders as notes: on another machine they may be there."""
    return [
        note(finding.check, finding.found, "unless this is otherwise on the cluster, " + finding.cost, finding.remedy)
        if finding.status is Status.problem and finding.check in _OF_A_MACHINE
        else finding
        for finding in findings
    ]


def why_unwritable(folder: Path) -> str:
    """Tries to write into a folder, or into the nearest one above that exists; returns what failed, or nothing."""
    place = folder.absolute()
    try:
        while not place.exists():
            place = place.parent
        with tempfile.TemporaryDirectory(dir=place, prefix=".megads-rehearsal-"):
            return ""
    except OSError as error:
        return f"cannot be written to ({error.strerror}: {place})"
