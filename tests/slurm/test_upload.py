"""Uploads of checkpoints to checkpoint.upload from all nodes of a job: a real SLURM, a real store in a folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megads.tools.remote.run_storage import UPLOAD_STEP
from megads.tools.remote.store import RemoteStore
from megads.tools.remote.upload import remote_checkpoints
from tests.command import checkpoint_of, checksums, events_of
from tests.slurm.jobs import Jobs
from tests.slurm.training import Training


def steps_named(run: Training, job: str, name: str) -> list[str]:
    """Running steps of a job with a given name."""
    lines = run.jobs.cluster.command("squeue", "--noheader", "--steps", "--jobs", job, "--format", "%i %j").splitlines()
    return [line.split()[0] for line in lines if line.split()[1:] == [name]]


@pytest.mark.parametrize("lost", [False, True], ids=["undisturbed", "step_killed_twice"])
def test_nodes_share_the_upload(lost: bool, jobs: Jobs, corpus: Path, tmp_path: Path) -> None:
    """Catches a job in which one node uploads all files while the others are idle, and a killed step whose files are
    never uploaded."""
    run = Training(
        jobs, corpus, tmp_path / "run", run__id="shared", train__steps=1000 if lost else 40,
        checkpoint__upload=f"file://{tmp_path}/backup",
    )  # fmt: skip
    job = run.submit()
    for _ in range(2 if lost else 0):
        jobs.wait_until(lambda: len(steps_named(run, job, UPLOAD_STEP)) == 1, "the step", job)
        (step,) = steps_named(run, job, UPLOAD_STEP)
        jobs.cluster.command("scancel", "--signal=KILL", step)
        jobs.wait_until(lambda step=step: step not in steps_named(run, job, UPLOAD_STEP), "the end of the step", job)
    assert jobs.wait_for(job) == "COMPLETED", jobs.output(job)
    found = remote_checkpoints(RemoteStore(f"file://{tmp_path}/backup/shared"))
    last = max(found)
    assert last == (1000 if lost else 40) and not found[last].problem
    here = checksums(checkpoint_of(run.run_dir, last))
    shutil.rmtree(run.run_dir / "checkpoints")
    shutil.copytree(tmp_path / "backup" / "shared" / "checkpoints", run.run_dir / "checkpoints")
    assert checksums(checkpoint_of(run.run_dir, last)) == here
    sent = {event["step"]: event["bytes"] for event in events_of(run.run_dir, "checkpoint_uploaded")}
    manifest = found[last].manifest
    assert manifest is not None and len(manifest.files) == 2
    told = [event["message"] for event in events_of(run.run_dir, "upload_failed")]
    if lost:
        assert sent[last] == manifest.nbytes, "this node alone"
        assert [message.partition("; log")[0].rpartition(": ")[2] for message in told] == [
            "2 nodes upload now",
            "1 nodes upload now",
        ]
    else:
        assert told == [] and 0 < sent[last] < manifest.nbytes
