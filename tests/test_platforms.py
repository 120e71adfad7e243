"""Manifests of scripts/platforms: valid, and started on two hosts with the variables that their platforms set."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from megads.cli.entry import config_dir
from megads.errors import Preempted, RankKilled, UnhealthyNode
from tests.command import Command, StartCommand, checkpoint_of, checksums, events_of, small_model, steps_of
from tests.launch.two_hosts import held_hosts
from tests.platforms import FOLDER, PLATFORMS, Container, manifest, smaller

ON_PATH = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
TORCHRUN = {"pytorchjob", "sagemaker", "vertex"}
"""Platforms whose manifests start torchrun, which ends with 1 whatever the ranks end with."""

POD = {
    "type": "object",
    "required": ["spec"],
    "properties": {
        "spec": {
            "type": "object",
            "required": ["containers"],
            "properties": {
                "terminationGracePeriodSeconds": {"type": "integer", "minimum": 60},
                "containers": {
                    "type": "array",
                    "minItems": 1,
                    "items": {
                        "type": "object",
                        "required": ["name", "image", "command", "args"],
                        "properties": {
                            name: {"type": "array", "items": {"type": "string"}} for name in ("command", "args")
                        },
                    },
                },
            },
        }
    },
}
REPLICAS = {
    "type": "object",
    "required": ["replicas", "template"],
    "properties": {"replicas": {"type": "integer", "minimum": 1}, "template": POD},
}
STRINGS = {"type": "array", "items": {"type": "string", "maxLength": 256}}
SCHEMAS: dict[str, dict[str, Any]] = {
    "pytorchjob": {
        "required": ["apiVersion", "kind", "metadata", "spec"],
        "properties": {
            "apiVersion": {"const": "kubeflow.org/v1"},
            "kind": {"const": "PyTorchJob"},
            "metadata": {"required": ["name"]},
            "spec": {
                "required": ["pytorchReplicaSpecs"],
                "additionalProperties": False,
                "properties": {
                    "nprocPerNode": {"type": "string"},
                    "elasticPolicy": {"type": "object"},
                    "runPolicy": {
                        "properties": {"backoffLimit": {"type": "integer"}, "cleanPodPolicy": {"type": "string"}}
                    },
                    "pytorchReplicaSpecs": {
                        "additionalProperties": False,
                        "required": ["Master", "Worker"],
                        "properties": {"Master": REPLICAS, "Worker": REPLICAS},
                    },
                },
            },
        },
    },
    "volcano": {
        "required": ["apiVersion", "kind", "metadata", "spec"],
        "properties": {
            "apiVersion": {"const": "batch.volcano.sh/v1alpha1"},
            "kind": {"const": "Job"},
            "metadata": {"required": ["name"]},
            "spec": {
                "required": ["tasks", "schedulerName"],
                "properties": {
                    "minAvailable": {"type": "integer"},
                    "maxRetry": {"type": "integer"},
                    "plugins": {"additionalProperties": STRINGS},
                    "policies": {
                        "type": "array",
                        # Volcano's webhook refuses 0, and a policy with both or none of them.
                        "items": {
                            "required": ["action"],
                            "oneOf": [{"required": ["event"]}, {"required": ["exitCode"]}],
                            "properties": {"exitCode": {"type": "integer", "minimum": 1}},
                        },
                    },
                    "tasks": {"type": "array", "items": REPLICAS | {"required": ["name", "replicas", "template"]}},
                },
            },
        },
    },
    "sagemaker": {
        "required": [
            *("TrainingJobName", "AlgorithmSpecification", "RoleArn", "OutputDataConfig", "ResourceConfig"),
            "StoppingCondition",
        ],
        "properties": {
            "AlgorithmSpecification": {
                "required": ["TrainingImage", "TrainingInputMode", "ContainerEntrypoint", "ContainerArguments"],
                "properties": {
                    "ContainerEntrypoint": STRINGS | {"maxItems": 100},
                    "ContainerArguments": STRINGS | {"maxItems": 100},
                },
            },
            "ResourceConfig": {"required": ["InstanceType", "InstanceCount", "VolumeSizeInGB"]},
            "StoppingCondition": {"required": ["MaxRuntimeInSeconds"]},
        },
    },
    "vertex": {
        "required": ["workerPoolSpecs"],
        "additionalProperties": False,
        "properties": {
            "scheduling": {"type": "object"},
            "workerPoolSpecs": {
                "type": "array",
                "minItems": 2,
                "maxItems": 4,
                "items": {
                    "required": ["replicaCount", "machineSpec", "containerSpec"],
                    "properties": {
                        "containerSpec": {
                            "required": ["imageUri"],
                            "properties": {"command": STRINGS, "args": STRINGS},
                        }
                    },
                },
            },
        },
    },
}


@pytest.mark.parametrize("name", PLATFORMS)
def test_manifests_fit_the_platform(name: str) -> None:
    """Catches a field that a platform does not know or take: YAML reads `data.train=[{path: x}]` as a mapping."""
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema, of the extra [dev], is not installed")
    content = manifest(name)
    jsonschema.validate(content, SCHEMAS[name])
    for key in SCHEMAS[name]["required"]:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({other: value for other, value in content.items() if other != key}, SCHEMAS[name])
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(PLATFORMS)


@pytest.mark.parametrize("name", PLATFORMS)
def test_the_layout_of_a_manifest_has_a_rank_for_every_gpu(name: str) -> None:
    """Catches replicas or GPUs that were changed without the layout: megads refuses the run."""
    containers = PLATFORMS[name](manifest(name))
    for container in containers:
        overrides = dict(argument.split("=", 1) for argument in container.arguments)
        assert int(overrides["parallel.dp"]) == sum(other.gpus for other in containers)
        assert (config_dir() / "experiment" / f"{overrides['experiment']}.yaml").exists()
        assert container.arguments == containers[0].arguments and overrides["run.dir"]


def test_volcano_restarts_what_can_continue() -> None:
    """Catches a preempted or killed run that Volcano takes for failed, and a refused config that it starts again."""
    policies = manifest("volcano")["spec"]["policies"]
    restarted = {policy["exitCode"] for policy in policies if policy.get("exitCode")}
    assert restarted == {kind.exit_code for kind in (Preempted, UnhealthyNode, RankKilled)}
    # The first policy that fits counts.
    assert [policy["action"] for policy in policies if policy.get("event") == "PodFailed"] == ["TerminateJob"]
    assert all(policy["action"] == "RestartJob" for policy in policies[: len(restarted)])


class Job:
    """The containers of a manifest's job, on two hosts.

    Args:
        folder: working directory of the containers.
        containers: two.
        entries: command lines before a program on each host.
        overrides: take the place of the manifest's.
    """

    def __init__(
        self, folder: Path, containers: Sequence[Container], entries: Sequence[Sequence[str]], overrides: Sequence[str]
    ):
        self.started = [
            Command(
                folder,
                (*container.command[1:], *overrides),
                container.command[0],
                container.variables | ON_PATH,
                program=entry,
            )
            for container, entry in zip(containers, entries, strict=True)
        ]

    def codes(self) -> list[int]:
        """Waits for the containers to end; returns their exit codes."""
        return [command.end().code for command in self.started]

    def said(self) -> str:
        return "\n".join(command.end().err for command in self.started)


@contextmanager
def job_of(name: str, folder: Path, overrides: Sequence[str]) -> Iterator[Any]:
    """Yields a function that starts the job of a manifest; kills what is left."""
    containers = PLATFORMS[name](smaller(manifest(name)))
    jobs: list[Job] = []
    with held_hosts(folder, [container.host for container in containers]) as entries:

        def start() -> Job:
            jobs.append(Job(folder, containers, entries, overrides))
            return jobs[-1]

        try:
            yield start
        finally:
            for command in [command for job in jobs for command in job.started]:
                command.close()


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("name", PLATFORMS)
def test_a_platforms_restart_continues_bit_for_bit(
    name: str, corpus: Path, megads: StartCommand, tmp_path: Path
) -> None:
    """Catches containers that train a run each, hosts whose processes do not meet under the names that the platform
    gives them, and a restart that begins anew or continues differently."""
    ours, theirs = megads.folder / "ours", megads.folder / "theirs"
    overrides = small_model(corpus, parallel__dp=2, train__steps=40, checkpoint__every_steps=4)
    with job_of(name, tmp_path, [*overrides, f"run.dir={theirs}"]) as start:
        killed = start()
        killed.started[0].wait_for(lambda: len(steps_of(theirs)) >= 6 and checkpoint_of(theirs, 4).exists())
        for command in killed.started:
            command.kill_everything()
        assert len(steps_of(theirs)) < 40
        again = start()
        assert again.codes() == [0, 0], again.said()
    assert len(events_of(theirs, "resume")) == 1 and events_of(theirs, "launch")[0]["ranks"] == 2
    assert len(events_of(theirs, "launch")[0]["nodes"]) == 2
    ended = megads("train", *overrides, f"run.dir={ours}").end()
    assert ended.code == 0, ended.err
    assert steps_of(theirs) == steps_of(ours)
    assert checksums(checkpoint_of(theirs, 40)) == checksums(checkpoint_of(ours, 40))


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("name", ["volcano", "pytorchjob"])
def test_sigterm_to_one_container_saves_and_the_other_ends_too(
    name: str, corpus: Path, megads: StartCommand, tmp_path: Path
) -> None:
    """Catches a preempted pod whose work is lost, and an exit code that tells the platform nothing."""
    run_dir = megads.folder / "run"
    overrides = small_model(corpus, parallel__dp=2, train__steps=100000, run__dir=run_dir)
    with job_of(name, tmp_path, overrides) as start:
        job = start()
        job.started[0].wait_for(lambda: len(steps_of(run_dir)) >= 2)
        job.started[1].process.send_signal(signal.SIGTERM)
        codes = job.codes()
        assert codes == [6, 6] if name not in TORCHRUN else 0 not in codes, job.said()
    (saved,) = events_of(run_dir, "checkpoint_saved")
    assert saved["step"] == len(steps_of(run_dir))


@pytest.mark.slow
@pytest.mark.distributed
def test_one_ranks_failure_gives_all_containers_its_exit_code(
    corpus: Path, megads: StartCommand, tmp_path: Path
) -> None:
    """Catches a platform that is told the job succeeded, or that restarts what cannot succeed."""
    run_dir = megads.folder / "run"
    overrides = small_model(corpus, parallel__dp=2, train__steps=100000, run__dir=run_dir)
    with job_of("volcano", tmp_path, overrides) as start:
        job = start()
        job.started[0].wait_for(lambda: len(steps_of(run_dir)) >= 2)
        rank = next(process for process in job.started[1].processes() if "megads.launch.rank" in process.cmdline())
        rank.send_signal(signal.SIGKILL)
        assert job.codes() == [RankKilled.exit_code] * 2, job.said()


@pytest.mark.slow
@pytest.mark.distributed
def test_torchrun_on_two_nodes_restarts_the_ranks_of_both(corpus: Path, megads: StartCommand, tmp_path: Path) -> None:
    """Catches agents of torchrun whose ranks do not find each other over the network, and a restart after which one of
    them waits for the other."""
    run_dir = megads.folder / "run"
    overrides = small_model(corpus, parallel__dp=2, train__steps=60, checkpoint__every_steps=2, run__dir=run_dir)
    options = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-endpoint=node-0:29500"]
    command = ["torchrun", *options, "--max-restarts=1", "--no-python", "megads", "train"]
    with held_hosts(tmp_path, ["node-0", "node-1"]) as entries:
        job = Job(tmp_path, [Container("", command, [], {}, 0)] * 2, entries, overrides)
        try:
            job.started[0].wait_for(lambda: len(steps_of(run_dir)) >= 5)
            rank = next(process for process in job.started[1].processes() if "megads.launch.rank" in process.cmdline())
            rank.send_signal(signal.SIGKILL)
            assert job.codes() == [0, 0], job.said()
        finally:
            for one in job.started:
                one.close()
    assert len(events_of(run_dir, "launch")) == 2 and len(events_of(run_dir, "resume")) == 1
    assert [line["step"] for line in steps_of(run_dir)] == list(range(1, 61))


@pytest.mark.slow
@pytest.mark.distributed
def test_ray_trains_in_a_placement_group_and_restarts_after_a_failure(
    corpus: Path, megads: StartCommand, tmp_path: Path
) -> None:
    """Catches bundles that train a run each, a killed rank after which the run ends, and an exit code that is lost."""
    pytest.importorskip("ray", reason="Ray, of the extra [ray], is not installed")
    run_dir = megads.folder / "run"
    overrides = small_model(corpus, parallel__dp=2, train__steps=60, checkpoint__every_steps=2, run__dir=run_dir)
    script = str(FOLDER / "ray_placement_group.py")
    words = ("--ranks=2", "--gpus=0", "--max-restarts=1", *overrides)
    command = Command(tmp_path, words, script, ON_PATH, program=(sys.executable,))
    try:
        command.wait_for(lambda: len(steps_of(run_dir)) >= 5)
        ranks = [
            one
            for one in psutil.process_iter(["cmdline"])
            if {"megads.launch.rank", str(run_dir)} <= set(one.info["cmdline"] or ())
        ]
        ranks[-1].send_signal(signal.SIGKILL)
        ended = command.end()
    finally:
        command.close()
    assert ended.code == 0, ended.err
    assert len(events_of(run_dir, "launch")) == 2 and len(events_of(run_dir, "resume")) == 1
