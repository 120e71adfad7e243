"""Runs the probe beside the other checks, and says what it found of torch, DeepSpeed, collectives and GPUs."""

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
    """What the probe said.

    Attributes:
        results: what each probe that worked found.
        errors: the exception of each that failed.
        interrupted: the one that it was at when it died or was stopped; those after it were not tried.
        ending: how it died or was stopped.
    """

    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    interrupted: str | None = None
    ending: str = ""

    @property
    def slow(self) -> bool:
        """It was stopped because it took too long."""
        return self.ending.startswith("took")


class ProbeProcess:
    """A probe that runs from entering the block on.

    Args:
        timeout_s: longest time that it may run.
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
            # Its forked ranks are ended with it.
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
        """Waits for the probe, to its deadline, and returns what it said."""
        try:
            code = self._process.wait(max(0.0, self._deadline - time.monotonic()))
            ending = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        except subprocess.TimeoutExpired:
            self._end()
            ending = f"took longer than {self._timeout_s:.0f} s"
        self._output.seek(0)
        return read_outcome(self._output.read(), ending)


def read_outcome(text: str, ending: str) -> ProbeResult:
    """Reads the probe's lines.

    Args:
        text: what it wrote; the last line may be cut.
        ending: how it ended.
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
    """Says what model.attention may be here for ALiBi in bf16, and why not the others.

    Whether the kernels are compiled is another finding; whether one suits a model, its run says.

    Args:
        cuda: there is a GPU to train on.
    """
    work = AttentionWork(
        head_dim=_USUAL_HEAD_DIM, heads=1, kv_heads=1, alibi=True, bf16=True, cuda=cuda, impl=Implementation.fused
    )
    reasons = {kind: why_not(kind, work) for kind in AttentionKind if kind is not AttentionKind.auto}
    there = ", ".join(kind for kind, reason in reasons.items() if not reason)
    # Of "is for GPUs (cuDNN), but this run is on a CPU: use ..." what is true of the machine.
    others = [f"{kind} {reason.split(': ')[0].split(', but')[0]}" for kind, reason in reasons.items() if reason]
    return ok("attention", "; ".join([there, *others]))


# Imports of both take two to three seconds on a local disk.
_SLOW_IMPORT_S = 15.0
# Tensor cores compute in bf16 from Ampere on.
_BF16_CAPABILITY = [8, 0]
_MOSTLY_FREE = 0.9
# Of GELU in fp32 on inputs up to 4: a few units in the last place.
_KERNEL_ERROR = 2e-6


def judge_probe(outcome: ProbeResult) -> list[Finding]:
    """Returns the findings of everything that was tried in a process of its own."""
    return [
        *_judge_import("torch", outcome),
        *_judge_import("deepspeed", outcome),
        *_judge_gloo(outcome),
        *_judge_gpus(outcome),
        *_judge_kernels(outcome),
        *_judge_attention(outcome),
    ]


def _judge_import(name: str, outcome: ProbeResult) -> list[Finding]:
    remedy = f"python -c 'import {name}' shows the whole error; install it anew"
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
    return note(check, f"not tried: {reason}", "whether it works is not known", "see the other findings first")


def _judge_gloo(outcome: ProbeResult) -> list[Finding]:
    if "gloo" not in {*outcome.results, *outcome.errors, outcome.interrupted}:
        return [_untried("collectives", outcome)]
    result = outcome.results.get("gloo")
    if result and result["seconds"] is not None:
        return [ok("collectives", f"gloo, two processes, all-reduce right after {result['seconds']:.2f} s")]
    if outcome.interrupted == "gloo" and outcome.slow:
        # A network that does not answer is found by the probe itself, within seconds of its start.
        cost = "whether ranks can talk to each other is not known; a busy machine is the usual cause"
        return [note("collectives", outcome.ending, cost, "timeout_s=60 waits")]
    failure = result["failure"] if result else outcome.errors.get("gloo", outcome.ending)
    cost = "ranks cannot talk to each other, not even on this machine"
    if result and result["interface"]:
        remedy = "export GLOO_SOCKET_IFNAME=lo (works here), or let the host name resolve to an address of this machine"
    else:
        remedy = "look for a firewall or a proxy on the loopback: python -m torch.distributed.run shows more"
    return [problem("collectives", f"gloo between two processes: {failure}", cost, remedy)]


def _judge_kernels(outcome: ProbeResult) -> list[Finding]:
    remedy = "remove the folder ops in the folder of caches, and they are compiled anew; or train with ops.impl=torch"
    result = outcome.results.get("kernels")
    stopped = outcome.interrupted == "kernels"
    if stopped and outcome.slow:
        cost = "whether they compute what they should is not known; a busy machine is the usual cause"
        return [note("kernels", outcome.ending, cost, "timeout_s=60 waits")]
    wrong = outcome.errors.get("kernels") or (f"Python {outcome.ending}" if stopped else None)
    if result is None and wrong is None:
        return [_untried("kernels", outcome)]
    if result is not None:
        if result["state"] == "not compiled":
            return [ok("kernels", "compiled once, at the first run on a CPU: some seconds")]
        if result["state"] == "unavailable":
            cost = "training on a CPU uses torch's operators, which are slower; results are the same"
            return [note("kernels", "none", cost, result["reason"])]
        if result["error"] <= _KERNEL_ERROR:
            return [ok("kernels", "compiled for this machine: ops.impl=fused")]
        wrong = f"GELU is off by {result['error']:.1e}"
    return [problem("kernels", str(wrong), "training on a CPU crashes, or computes something else", remedy)]


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
        problem("gpu", f"driver {driver.splitlines()[0]}, but {reason}", cost, "update the driver, or fit torch to it")
    ]


def describe_gpus(result: dict[str, Any], driver: str) -> list[Finding]:
    """Returns what the GPUs can do.

    Args:
        result: what the probe of the GPUs found, at least one.
        driver: version of the driver.
    """
    gpus = result["gpus"]
    names = sorted({gpu["name"] for gpu in gpus})
    findings = [
        ok("gpu", f"{len(gpus)} x {', '.join(names)}, {size(gpus[0]['total_bytes'])} each, driver {driver}"),
    ]
    if len(names) > 1:
        cost = "every step waits for the slowest"
        findings.append(note("gpu models", ", ".join(names), cost, "choose equal ones with CUDA_VISIBLE_DEVICES"))
    old = [index for index, gpu in enumerate(gpus) if gpu["capability"] < _BF16_CAPABILITY]
    if old:
        cost = "train.precision=bf16 is emulated and slow there"
        findings.append(note("bf16", f"not in hardware on GPU {_list(old)}", cost, "train.precision=fp32"))
    taken = [index for index, gpu in enumerate(gpus) if gpu["free_bytes"] < _MOSTLY_FREE * gpu["total_bytes"]]
    if taken:
        cost = "less memory and less speed for training"
        findings.append(note("gpu memory", f"in use by others on GPU {_list(taken)}", cost, "nvidia-smi shows by whom"))
    if result["nccl"] is None:
        cost = "GPUs cannot talk to each other"
        findings.append(problem("nccl", "torch has none", cost, "install a torch build with NCCL"))
    else:
        findings.append(ok("nccl", result["nccl"]))
    if result["apart"]:
        pairs = ", ".join(f"{a}-{b}" for a, b in result["apart"][:4])
        cost = "their data goes through the host's memory; tensor parallel ranks should not be such a pair"
        found = f"{len(result['apart'])} pairs without, for example {pairs}"
        findings.append(note("peer access", found, cost, "nvidia-smi topo -m; switch off ACS or IOMMU"))
    elif len(gpus) > 1:
        findings.append(ok("peer access", "between all GPUs"))
    return findings


def _list(numbers: list[int]) -> str:
    return ", ".join(str(number) for number in numbers)
