"""Checks of a job's options, before anything runs."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from megads.api import user_name
from megads.tools.doctor.finding import Finding, Status, note, ok, problem
from megads.tools.rehearse.private_slurm import PrivateSlurm
from megads.tools.rehearse.request import Request, UnknownOptionError

# Checks that depend on files of this machine.
_OF_A_MACHINE = ("data", "output folder", "run folder", "weights")
_SITE_TIMEOUT_S = 20.0
_LOCAL_SLURM = "local SLURM"
_CLUSTER_NAME = re.compile(r"^ClusterName\s*=\s*(\S+)", re.MULTILINE)
# Errors of sbatch if no SLURM can be reached.
_NO_SITE = ("configuration source", "contact slurm controller", "DNS SRV", "Unable to process configuration")


def check_options(request: Request, cluster: PrivateSlurm, script: Path) -> Finding:
    """Submits a held job with all options to the private cluster, so that the real sbatch checks them, and cancels it.

    Args:
        request: the user's request.
        cluster: the private cluster.
        script: copy of the script in which the #SBATCH lines are disabled.
    """
    command = ["sbatch", "--parsable", "--hold", *request.checked_words(), str(script)]
    done = subprocess.run(command, env=cluster.environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        return refused_options(done.stderr)
    cluster.command("scancel", done.stdout.strip().partition(";")[0])
    asked = f"{request.nodes} node{'s' * (request.nodes > 1)}"
    return ok("options", f"accepted by sbatch: {asked}, GPUs per node: {request.gpus_per_node or 'none requested'}")


def refused_options(error: UnknownOptionError | str) -> Finding:
    """Returns the finding for an option that sbatch rejects."""
    lines = [line.removeprefix("sbatch: ").removeprefix("error: ") for line in str(error).strip().splitlines()]
    said = "; ".join(line for line in lines if line and not line.startswith("Try "))
    return problem("options", said, "the job would not be accepted", "correct the option (man sbatch)")


def check_site(request: Request, words: list[str], elsewhere: bool) -> list[Finding]:
    """Asks the SLURM cluster of this machine, if there is one, whether it would accept the job.

    Args:
        request: the user's request.
        words: the user's command without `sbatch`.
        elsewhere: the job is for another cluster, so that this one is not asked.
    """
    if elsewhere:
        return []
    done = _asked("sbatch", "--test-only", *words)
    if done is None:
        return []
    said = (done.stderr or done.stdout).strip()
    if done.returncode == 0:
        return [ok(_LOCAL_SLURM, f"{_cluster_name()} accepts it: {said.splitlines()[-1].removeprefix('sbatch: ')}")]
    if any(text in said for text in _NO_SITE):
        return []
    cost = f"the job of {request.nodes} nodes would not be accepted, or would wait forever"
    found = "; ".join(line.removeprefix("sbatch: ").removeprefix("error: ") for line in said.splitlines())
    remedy = "sinfo lists partitions, nodes and limits; request what exists. For a job of another cluster: --elsewhere"
    return [problem(_LOCAL_SLURM, f"{_cluster_name()}: {found}", cost, remedy)]


def _cluster_name() -> str:
    """Returns the name of the cluster that SLURM's commands on this machine talk to."""
    done = _asked("scontrol", "show", "config")
    found = _CLUSTER_NAME.search(done.stdout) if done is not None else None
    return f"cluster {found[1]}" if found else "this machine's cluster"


def _asked(*command: str) -> subprocess.CompletedProcess[str] | None:
    """Runs a command of this machine's SLURM; None if it is missing or does not answer."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_SITE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None


def check_signal(request: Request) -> Finding:
    """Tells who makes the job save before its time limit: a signal that it requests, or megads, which asks SLURM."""
    signal = request.signal
    if signal is None:
        return ok("signal", "not requested: megads train asks SLURM for the time limit, and saves before it")
    text = f"{signal.name}, {signal.seconds} s before the end, to "
    if signal.to_script:
        return ok("signal", f"{text}the script")
    return ok("signal", f"{text}the steps that srun started (without B:)")


def check_requeue(request: Request) -> Finding:
    """Checks that the job may be requeued."""
    last = request.last_of("requeue", "no-requeue")
    if last == "no-requeue":
        cost = "after a preemption, a node failure or its time limit the job is not requeued"
        return problem("requeue", "--no-requeue", cost, "use --requeue")
    if last is None:
        cost = "whether the job is requeued depends on the site (JobRequeue)"
        return note("requeue", "neither --requeue nor --no-requeue", cost, "add #SBATCH --requeue")
    return ok("requeue", "allowed")


def check_output(request: Request, folder: Path) -> Finding:
    """Checks that the files of standard output and error can be written.

    Args:
        request: the user's request.
        folder: folder in which sbatch is called.
    """
    base = folder / (request.value("chdir") or "")
    patterns = [request.value("output") or "slurm-%j.out", *filter(None, [request.value("error")])]
    names = {"%x": request.value("job-name") or request.script.name, "%u": user_name()}
    for pattern in patterns:
        filled = re.sub("%[xu]", lambda found: names[found.group()], pattern)
        place = (base / filled).parent
        reason = "does not exist" if not place.is_dir() else why_unwritable(place)
        if reason:
            remedy = f"mkdir -p {place} before you submit, or choose another folder"
            cost = "SLURM ends the job at its start without a message"
            return problem("output folder", f"{place} of --output={pattern} {reason}", cost, remedy)
    return ok("output folder", f"{(base / patterns[0]).parent} can be written to")


def of_this_machine(findings: Sequence[Finding]) -> list[Finding]:
    """Returns the findings with problems of files and folders turned into notes: the cluster may have them."""
    return [
        note(finding.check, finding.found, "unless the cluster differs, " + finding.cost, finding.remedy)
        if finding.status is Status.problem and finding.check in _OF_A_MACHINE
        else finding
        for finding in findings
    ]


def why_unwritable(folder: Path) -> str:
    """Tries to write to a folder, or to its nearest existing parent; returns the error, or an empty string."""
    place = folder.absolute()
    try:
        while not place.exists():
            place = place.parent
        with tempfile.TemporaryDirectory(dir=place, prefix=".megads-rehearsal-"):
            return ""
    except OSError as error:
        return f"cannot be written to ({error.strerror}: {place})"
