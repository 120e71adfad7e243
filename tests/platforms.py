"""The containers that platforms start for the manifests of scripts/platforms, with the variables that they set.

Variables are those of the operators' sources: training-operator 1.9 (pkg/controller.v1/pytorch/envvar.go, master.go),
Volcano 1.12 (pkg/controllers/job/plugins), and of the documentation of SageMaker and Vertex AI.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parents[1] / "scripts" / "platforms"


@dataclass(frozen=True)
class Container:
    """A container as a platform starts it.

    Attributes:
        host: name of its machine, under which the others reach it.
        command: command line without the arguments.
        arguments: the overrides of megads.
        variables: what the platform adds to the environment.
        gpus: number of GPUs of the container.
    """

    host: str
    command: list[str]
    arguments: list[str]
    variables: dict[str, str]
    gpus: int


def manifest(name: str) -> dict[str, Any]:
    """Returns a manifest of scripts/platforms, in which the parts that YAML shares are separate."""
    return json.loads(json.dumps(yaml.safe_load((FOLDER / f"{name}.yaml").read_text())))


def smaller(content: dict[str, Any]) -> dict[str, Any]:
    """Returns a manifest with two containers of one process each, as two cores can run them."""
    made = copy.deepcopy(content)
    if made.get("kind") == "PyTorchJob":
        made["spec"]["nprocPerNode"] = "1"
    if made.get("apiVersion", "").startswith("batch.volcano.sh"):
        made["spec"]["tasks"][1]["replicas"] = 1
    for pool in made.get("workerPoolSpecs", []):
        # Vertex AI does not say how many GPUs a machine has; torchrun counts them, or cores where there are none.
        script = pool["containerSpec"]["command"][2]
        pool["containerSpec"]["command"][2] = script.replace("--no-python", "--nproc-per-node=1 --no-python")
    return made


def _of_pod(template: dict[str, Any], host: str, variables: dict[str, str]) -> Container:
    (container,) = template["spec"]["containers"]
    gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
    return Container(host, container["command"], container["args"], variables, gpus)


def of_pytorchjob(job: dict[str, Any]) -> list[Container]:
    """The pods of a PyTorchJob."""
    name, spec = job["metadata"]["name"], job["spec"]
    replicas = spec["pytorchReplicaSpecs"]
    pods = [(role, number) for role in ("Master", "Worker") for number in range(replicas[role]["replicas"])]
    per_node = spec.get("nprocPerNode", "auto")
    world_size = len(pods) * (int(per_node) if per_node.isdecimal() else 1)
    found = []
    for rank, (role, number) in enumerate(pods):
        variables = {
            "PYTHONUNBUFFERED": "1",
            "MASTER_PORT": "23456",
            "PET_MASTER_PORT": "23456",
            "MASTER_ADDR": f"{name}-master-0",
            "PET_MASTER_ADDR": f"{name}-master-0",
            "WORLD_SIZE": str(world_size),
            "RANK": str(rank),
            "PET_NODE_RANK": str(rank),
            "PET_NPROC_PER_NODE": per_node,
            "PET_NNODES": str(len(pods)),
        }
        found.append(_of_pod(replicas[role]["template"], f"{name}-{role.lower()}-{number}", variables))
    return found


def of_volcano(job: dict[str, Any]) -> list[Container]:
    """The pods of a Volcano job with the plugins pytorch and svc, of which env is a part."""
    name, spec = job["metadata"]["name"], job["spec"]
    assert spec["plugins"]["pytorch"] == ["--master=master", "--worker=worker", "--port=23456"]
    hosts = {
        task["name"]: [f"{name}-{task['name']}-{number}.{name}" for number in range(task["replicas"])]
        for task in spec["tasks"]
    }
    pods = [(task, number) for task in spec["tasks"] for number in range(task["replicas"])]
    found = []
    for rank, (task, number) in enumerate(pods):
        variables = {
            "MASTER_ADDR": hosts["master"][0],
            "MASTER_PORT": "23456",
            "WORLD_SIZE": str(len(pods)),
            "RANK": str(rank),
            "VK_TASK_INDEX": str(number),
            "VC_TASK_INDEX": str(number),
        }
        for key, listed in hosts.items():
            variables |= {f"VC_{key.upper()}_HOSTS": ",".join(listed), f"VC_{key.upper()}_NUM": str(len(listed))}
        found.append(_of_pod(task["template"], hosts[task["name"]][number], variables))
    return found


def of_sagemaker(request: dict[str, Any]) -> list[Container]:
    """The containers of a training job of SageMaker whose image has the training toolkit."""
    hosts = [f"algo-{number + 1}" for number in range(request["ResourceConfig"]["InstanceCount"])]
    algorithm = request["AlgorithmSpecification"]
    assert request["ResourceConfig"]["InstanceType"] == "ml.p5.48xlarge"
    return [
        Container(
            host,
            algorithm["ContainerEntrypoint"],
            algorithm["ContainerArguments"],
            # The test's machine has no GPU.
            {"SM_HOSTS": json.dumps(hosts), "SM_CURRENT_HOST": host, "SM_NUM_GPUS": "0", "SM_NUM_CPUS": "2"},
            gpus=8,
        )
        for host in hosts
    ]


def of_vertex(job: dict[str, Any]) -> list[Container]:
    """The containers of a custom job of Vertex AI."""
    pools = {f"workerpool{number}": pool for number, pool in enumerate(job["workerPoolSpecs"])}
    hosts = {
        pool: [f"cmle-training-{pool}-ab-{number}:2222" for number in range(spec["replicaCount"])]
        for pool, spec in pools.items()
    }
    found = []
    for pool, spec in pools.items():
        for number, host in enumerate(hosts[pool]):
            task = {"type": pool, "index": number, "trial": ""}
            variables = {"CLUSTER_SPEC": json.dumps({"cluster": hosts, "environment": "cloud", "task": task})}
            container, gpus = spec["containerSpec"], spec["machineSpec"]["acceleratorCount"]
            found.append(Container(host.partition(":")[0], container["command"], container["args"], variables, gpus))
    return found


PLATFORMS: dict[str, Callable[[dict[str, Any]], list[Container]]] = {
    "pytorchjob": of_pytorchjob,
    "volcano": of_volcano,
    "sagemaker": of_sagemaker,
    "vertex": of_vertex,
}
