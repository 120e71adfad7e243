"""Runs the probe process during the other checks and turns its results into findings."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from megads.ops.attention_kinds import AttentionKind, AttentionWork, why_not
from megads.ops.config import Implementation
from megads.tools.doctor.finding import Finding, note, ok, problem, size
from megads.tools.doctor.software import ask, installed_version


@dataclass(frozen=True)
class ProbeResult:
    """Results of the probe process.

    Attributes:
        results: result of each probe that succeeded.
        errors: exception of each probe that failed.
        interrupted: probe that was running when the process died or was stopped; later probes did not run.
        ending: how the process died or was stopped.
    """

    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    interrupted: str | None = None
    ending: str = ""

    @property
    def slow(self) -> bool:
        """Whether the process was stopped by the timeout."""
        return self.ending.startswith("took")


class ProbeProcess:
    """Context manager that runs the probe process in the background.

    Args:
        timeout_s: longest run time of the process.
    """

    def __init__(self, timeout_s: float):
        self._timeout_s = timeout_s

    def __enter__(self) -> ProbeProcess:
        self._deadline = time.monotonic() + self._timeout_s
        self._output = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "megads.tools.doctor.probe"],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.DEVNULL,
            # A new process group, so that its forked ranks are killed with it.
            start_new_session=True,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()
        self._output.close()

    def _end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def outcome(self) -> ProbeResult:
        """Waits for the probe until its deadline and returns its results."""
        try:
            code = self._process.wait(max(0.0, self._deadline - time.monotonic()))
            ending = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        except subprocess.TimeoutExpired:
            self._end()
            ending = f"took longer than {self._timeout_s:.0f} s"
        self._output.seek(0)
        return read_outcome(self._output.read(), ending)


def read_outcome(text: str, ending: str) -> ProbeResult:
    """Parses the probe's output.

    Args:
        text: output of the process; the last line may be cut.
        ending: how the process ended.
    """
    outcome = ProbeResult()
    begun: str | None = None
    for line in text.splitlines():
        try:
            said = json.loads(line)
        except ValueError:
            break
        begun = said.get("begin")
        if "result" in said:
            outcome.results[said["end"]] = said["result"]
        elif "error" in said:
            outcome.errors[said["end"]] = said["error"]
    if begun is None and (outcome.results or outcome.errors):
        return outcome
    return ProbeResult(outcome.results, outcome.errors, begun or "start", ending)


_USUAL_HEAD_DIM = 64


def _describe_attention(cuda: bool) -> Finding:
    """Lists the values of model.attention that work here with ALiBi in bf16, and why the others do not.

    Whether the kernels are compiled is a separate finding. Whether one suits a model is checked by its run.

    Args:
        cuda: whether there is a GPU to train on.
    """
    work = AttentionWork(
        head_dim=_USUAL_HEAD_DIM, heads=1, kv_heads=1, alibi=True, bf16=True, cuda=cuda, impl=Implementation.fused
    )
    reasons = {kind: why_not(kind, work) for kind in AttentionKind if kind is not AttentionKind.auto}
    there = ", ".join(kind for kind, reason in reasons.items() if not reason)
    # Keep only the part about the machine of "is for GPUs (cuDNN), but this run is on a CPU: use ...".
    others = [f"{kind} {reason.split(': ')[0].split(', but')[0]}" for kind, reason in reasons.items() if reason]
    return ok("attention", "; ".join([there, *others]))


# Importing torch and DeepSpeed takes two to three seconds from a local disk.
_SLOW_IMPORT_S = 15.0
# Tensor cores support bf16 since Ampere.
_BF16_CAPABILITY = [8, 0]
_MOSTLY_FREE = 0.9
# Largest absolute error of GELU in fp32 on inputs up to 4: a few ULPs.
_KERNEL_ERROR = 2e-6


def judge_probe(outcome: ProbeResult) -> list[Finding]:
    """Returns the findings of all probes."""
    return [
        *_judge_import("torch", outcome),
        *_judge_import("deepspeed", outcome),
        *_judge_gloo(outcome),
        *_judge_gpus(outcome),
        *_judge_kernels(outcome),
        *_judge_attention(outcome),
    ]


def _judge_import(name: str, outcome: ProbeResult) -> list[Finding]:
    remedy = f"python -c 'import {name}' shows the full error; reinstall it"
    if name in outcome.errors:
        return [problem(f"import {name}", outcome.errors[name], "nothing can be trained", remedy)]
    if outcome.interrupted == name or (name == "torch" and outcome.interrupted == "start"):
        if not outcome.slow:
            return [problem(f"import {name}", f"Python {outcome.ending}", "nothing can be trained", remedy)]
        cost = "every rank pays for it at every start; a busy machine or a slow file system is the usual cause"
        return [note(f"import {name}", outcome.ending, cost, "put the environment on a local disk; timeout_s=60 waits")]
    if name not in outcome.results:
        return [_untried(f"import {name}", outcome)]
    result = outcome.results[name]
    version = result.get("version") or installed_version(name) or "of unknown version"
    cuda = "" if name != "torch" else f", {'CUDA ' + result['cuda'] if result['cuda'] else 'without CUDA'}"
    found = f"{name} {version}{cuda}, imported in {result['seconds']:.1f} s"
    if result["seconds"] > _SLOW_IMPORT_S:
        cost = "every rank pays for it at every start"
        return [note(f"import {name}", found, cost, "put the environment on a local disk or into a container image")]
    return [ok(f"import {name}", found)]


def _untried(check: str, outcome: ProbeResult) -> Finding:
    reason = "torch cannot be imported" if "torch" in outcome.errors else f"the probe {outcome.ending}"
    return note(check, f"not checked: {reason}", "whether it works is unknown", "see the other findings first")


def _judge_gloo(outcome: ProbeResult) -> list[Finding]:
    if "gloo" not in {*outcome.results, *outcome.errors, outcome.interrupted}:
        return [_untried("collectives", outcome)]
    result = outcome.results.get("gloo")
    if result and result["seconds"] is not None:
        return [ok("collectives", f"gloo, two processes, correct all-reduce after {result['seconds']:.2f} s")]
    if outcome.interrupted == "gloo" and outcome.slow:
        # The probe itself detects a network that does not respond, within seconds of its start.
        cost = "whether ranks can communicate is unknown; a busy machine is the usual cause"
        return [note("collectives", outcome.ending, cost, "timeout_s=60 waits")]
    failure = result["failure"] if result else outcome.errors.get("gloo", outcome.ending)
    cost = "ranks cannot communicate, not even on this machine"
    if result and result["interface"]:
        remedy = "export GLOO_SOCKET_IFNAME=lo (works here), or make the host name resolve to a local address"
    else:
        remedy = "check for a firewall or proxy on the loopback interface: python -m torch.distributed.run shows more"
    return [problem("collectives", f"gloo between two processes: {failure}", cost, remedy)]


def _judge_kernels(outcome: ProbeResult) -> list[Finding]:
    remedy = "remove the folder ops in the cache folder to recompile the kernels, or train with ops.impl=torch"
    result = outcome.results.get("kernels")
    stopped = outcome.interrupted == "kernels"
    if stopped and outcome.slow:
        cost = "whether they are correct is unknown; a busy machine is the usual cause"
        return [note("kernels", outcome.ending, cost, "timeout_s=60 waits")]
    wrong = outcome.errors.get("kernels") or (f"Python {outcome.ending}" if stopped else None)
    if result is None and wrong is None:
        return [_untried("kernels", outcome)]
    if result is not None:
        if result["state"] == "not compiled":
            return [ok("kernels", "not compiled yet: compiled at the first run on a CPU, in some seconds")]
        if result["state"] == "unavailable":
            cost = "training on a CPU uses torch's operators, which are slower; results are the same"
            return [note("kernels", "none", cost, result["reason"])]
        if result["error"] <= _KERNEL_ERROR:
            return [ok("kernels", "compiled for this machine: ops.impl=fused")]
        wrong = f"GELU is off by {result['error']:.1e}"
    return [problem("kernels", str(wrong), "training on a CPU crashes or gives wrong results", remedy)]


def _judge_attention(outcome: ProbeResult) -> list[Finding]:
    gpus = outcome.results.get("gpus")
    return [] if gpus is None else [_describe_attention(bool(gpus["gpus"]))]


def _judge_gpus(outcome: ProbeResult) -> list[Finding]:
    driver = ask("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    if "gpus" not in outcome.results:
        if "gpus" in outcome.errors:
            cost = "training on GPUs fails"
            return [problem("gpu", outcome.errors["gpus"], cost, "nvidia-smi; CUDA_VISIBLE_DEVICES= trains on the CPU")]
        return [_untried("gpu", outcome)]
    result = outcome.results["gpus"]
    if result["gpus"]:
        return describe_gpus(result, (driver or "unknown").splitlines()[0])
    if not driver:
        return [ok("gpu", "none: trains on the CPU")]
    cost = "training uses the CPU, up to a thousand times slower"
    if not outcome.results.get("torch", {}).get("cuda"):
        return [note("gpu", f"driver {driver.splitlines()[0]}, but torch is a CPU build", cost, "install a CUDA torch")]
    reason = result.get("reason") or "torch sees none"
    return [
        problem(
            "gpu",
            f"driver {driver.splitlines()[0]}, but {reason}",
            cost,
            "update the driver, or install a torch build for it",
        )
    ]


def describe_gpus(result: dict[str, Any], driver: str) -> list[Finding]:
    """Returns findings about the GPUs: models, bf16, free memory, NCCL and peer access.

    Args:
        result: result of the GPU probe, with at least one GPU.
        driver: version of the driver.
    """
    gpus = result["gpus"]
    names = sorted({gpu["name"] for gpu in gpus})
    findings = [
        ok("gpu", f"{len(gpus)} x {', '.join(names)}, {size(gpus[0]['total_bytes'])} each, driver {driver}"),
    ]
    if len(names) > 1:
        cost = "every step waits for the slowest GPU"
        findings.append(note("gpu models", ", ".join(names), cost, "select equal GPUs with CUDA_VISIBLE_DEVICES"))
    old = [index for index, gpu in enumerate(gpus) if gpu["capability"] < _BF16_CAPABILITY]
    if old:
        cost = "train.precision=bf16 is emulated and slow there"
        findings.append(note("bf16", f"not in hardware on GPU {_list(old)}", cost, "train.precision=fp32"))
    taken = [index for index, gpu in enumerate(gpus) if gpu["free_bytes"] < _MOSTLY_FREE * gpu["total_bytes"]]
    if taken:
        cost = "training has less memory and is slower"
        findings.append(
            note("gpu memory", f"in use by others on GPU {_list(taken)}", cost, "nvidia-smi lists the processes")
        )
    if result["nccl"] is None:
        cost = "GPUs cannot communicate"
        findings.append(problem("nccl", "not in this torch build", cost, "install a torch build with NCCL"))
    else:
        findings.append(ok("nccl", result["nccl"]))
    if result["apart"]:
        pairs = ", ".join(f"{a}-{b}" for a, b in result["apart"][:4])
        cost = "their transfers go through host memory; do not place tensor-parallel ranks on such a pair"
        found = f"{len(result['apart'])} pairs without peer access, for example {pairs}"
        findings.append(note("peer access", found, cost, "nvidia-smi topo -m; switch off ACS or IOMMU"))
    elif len(gpus) > 1:
        findings.append(ok("peer access", "between all GPUs"))
    return findings


def _list(numbers: list[int]) -> str:
    return ", ".join(str(number) for number in numbers)
