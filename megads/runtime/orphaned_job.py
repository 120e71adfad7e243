"""A SLURM job whose launcher went with its node.

With sbatch --no-kill SLURM leaves a job running when it loses a node, even the one of the batch script: what is left of
the job would hold its nodes until the time limit, with nobody to start anything on them.
"""

from __future__ import annotations

import sys
import time

from megads.errors import ConfigError
from megads.runtime import environment, slurm

_POLL_S = 2.0
_GIVE_UP_S = 900.0
# SLURM marks a node that does not answer with a star, before it takes it to be down.
_GONE = ("*", "DOWN", "FAIL", "NOT_RESPONDING")


def send_back_when_orphaned() -> str:
    """Puts the job back into the queue once SLURM finds the batch script's node gone; returns what happened.

    Called on another node of the job when the launcher is not there any more. Does nothing where the job ends by
    itself: then the launcher ended, and not its node. SLURM may end this process before, with its step.
    """
    job = environment.slurm_variables().get("SLURM_JOB_ID")
    if job is None:
        return ""
    deadline = time.monotonic() + _GIVE_UP_S
    first: str | None = None
    while time.monotonic() < deadline:
        try:
            found = slurm.fields(slurm.ask("scontrol", "--oneliner", "show", "job", job))
            first = found.get("Restarts", "0") if first is None else first
            if found.get("JobState") != "RUNNING" or found.get("Restarts", "0") != first:
                return f"job {job} is {found.get('JobState')}: it ends without help"
            host = found.get("BatchHost", "")
            state = slurm.fields(slurm.ask("scontrol", "--oneliner", "show", "node", host)).get("State", "")
            if any(sign in state for sign in _GONE):
                slurm.ask("scontrol", "requeue", job)
                return f"job {job} is requeued: its batch script was on {host}, which is {state}"
        except ConfigError as error:
            sys.stdout.write(f"{error}\n")  # the agent's log
        time.sleep(_POLL_S)
    return f"job {job} still runs, and its batch node answers"
