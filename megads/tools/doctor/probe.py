"""Checks that can crash or hang, in a separate process: `python -m megads.tools.doctor.probe`.

The process prints one line of JSON when a probe begins and one with its result, so that the parent knows which probe
was running when it died. Output of libraries goes to stderr. The parent starts it beside the other checks and turns its
results into findings.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Any

from megads.ops.attention_kinds import AttentionKind, AttentionWork, unsupported_reason
from megads.ops.config import Implementation
from megads.runtime.environment import child_environment, rank_variables
from megads.runtime.ports import LOOPBACK, listen
from megads.tools.doctor.finding import Finding, note, ok, problem, size
from megads.tools.doctor.software import ask, installed_version

ALL_REDUCE_S = 2.0
"""Timeout of a collective between two processes on this machine."""


def probe_torch() -> dict[str, Any]:
    """Imports torch."""
    start = time.perf_counter()
    import torch

    return {
        "version": torch.__version__,
        "seconds": time.perf_counter() - start,
        "cuda": torch.version.cuda,
        "path": str(torch.__file__),
    }


def probe_gloo() -> dict[str, Any]:
    """Runs an all-reduce over two processes on gloo's default network interface; if that fails, on the loopback."""
    start = time.perf_counter()
    failure = _all_reduce({})
    if failure is None:
        return {"seconds": time.perf_counter() - start, "interface": None}
    again = _all_reduce({"GLOO_SOCKET_IFNAME": "lo"})
    return {"seconds": None, "failure": failure, "interface": "lo" if again is None else None}


def _all_reduce(variables: Mapping[str, str]) -> str | None:
    """Runs an all-reduce between two forked processes; returns the error, or None."""
    children: dict[int, int] = {}
    with child_environment(variables), listen(LOOPBACK) as server:
        for rank in range(2):
            read_end, write_end = os.pipe()
            child = os.fork()
            if child == 0:
                _run_rank(rank, server, write_end)
            os.close(write_end)
            children[child] = read_end
    failures = [failure for child, pipe in children.items() if (failure := _outcome(child, pipe))]
    return failures[0] if failures else None


def _run_rank(rank: int, server: socket.socket, pipe: int) -> None:
    """Body of a forked rank: writes the error, if any, to the pipe and exits. Rank 0 serves the store."""
    signal.alarm(round(ALL_REDUCE_S) + 1)
    try:
        import torch
        import torch.distributed as dist
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        torch.set_num_threads(1)
        limit, port = timedelta(seconds=ALL_REDUCE_S), server.getsockname()[1]
        descriptor = server.fileno() if rank == 0 else None
        store = TCPStore(LOOPBACK, port, 2, rank == 0, limit, wait_for_workers=False, master_listen_fd=descriptor)
        dist.init_process_group("gloo", timeout=limit, store=store, world_size=2, rank=rank)
        value = torch.tensor([rank + 1.0])
        dist.all_reduce(value)
        message = "" if value.item() == 3.0 else f"1 + 2 gave {value.item()}"
    except BaseException as error:
        message = f"{type(error).__name__}: {first_line(error)}"
    os.write(pipe, message.encode()[:1000])
    # No clean-up: it could hang, and the objects belong to the parent.
    os._exit(0)


def _outcome(child: int, pipe: int) -> str | None:
    """Waits for a forked rank, which is ended by its alarm at the latest; returns its error, or None."""
    with os.fdopen(pipe, "rb") as file:
        message = file.read().decode(errors="replace")
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        killed = os.WTERMSIG(status)
        if killed == signal.SIGALRM:
            return f"no result within {ALL_REDUCE_S:.0f} s"
        return f"killed by {signal.Signals(killed).name}"
    return message or None


def probe_gpus() -> dict[str, Any]:
    """Reads the properties and free memory of every GPU, and which pairs lack peer access."""
    import torch

    if not torch.cuda.is_available():
        reason = None
        if torch.version.cuda:
            try:
                torch.cuda.init()
            except Exception as error:
                reason = first_line(error)
        return {"gpus": [], "reason": reason}
    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        gpus.append(
            {
                "name": properties.name,
                "free_bytes": free,
                "total_bytes": total,
                "capability": [properties.major, properties.minor],
            }
        )
    pairs = [(a, b) for a in range(len(gpus)) for b in range(len(gpus)) if a != b]
    apart = [[a, b] for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
    nccl = None
    with suppress(Exception):
        nccl = ".".join(str(part) for part in torch.cuda.nccl.version())
    return {"gpus": gpus, "apart": apart, "nccl": nccl}


def probe_deepspeed() -> dict[str, Any]:
    """Imports DeepSpeed as a rank does."""
    import torch

    with child_environment(rank_variables(1, cuda=torch.cuda.is_available())):
        start = time.perf_counter()
        from megads.engine.deepspeed_adapter import require_deepspeed

        seconds = time.perf_counter() - start
        require_deepspeed()
    return {"seconds": seconds}


def probe_deepspeed_attributes() -> dict[str, Any]:
    """Looks for the undocumented attributes of DeepSpeed that megads uses."""
    from megads.engine.deepspeed_private import NEWEST_SEEN, PRIVATE, moved_attributes

    return {"moved": moved_attributes(), "number": sum(map(len, PRIVATE.values())), "seen": NEWEST_SEEN}


def probe_kernels() -> dict[str, Any]:
    """Loads megads' CPU kernels, if they are compiled, and compares one of them with PyTorch."""
    from megads.ops.build import KernelsUnavailable, library_path

    try:
        path = library_path()
    except KernelsUnavailable as error:
        return {"state": "unavailable", "reason": str(error)}
    if not path.exists():
        return {"state": "not compiled"}
    import torch

    from megads.ops.activation import gelu
    from megads.ops.config import FUSED, TORCH
    from megads.ops.resolve import load_library

    load_library(path)
    x = torch.linspace(-4.0, 4.0, 33)
    return {"state": "loaded", "error": float((gelu(x, FUSED) - gelu(x, TORCH)).abs().max())}


def first_line(error: BaseException) -> str:
    """Returns the first non-empty line of an error's message, or the name of its type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


# The gloo probe forks, so it must run before any probe that starts threads or CUDA.
PROBES: Mapping[str, Callable[[], dict[str, Any]]] = {
    "torch": probe_torch,
    "gloo": probe_gloo,
    "gpus": probe_gpus,
    "deepspeed": probe_deepspeed,
    "kernels": probe_kernels,
    "deepspeed attributes": probe_deepspeed_attributes,
}


def main() -> None:
    """Runs every probe and reports failures; if importing torch fails, skips the other probes."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def print_line(line: Mapping[str, Any]) -> None:
        out.write(json.dumps(line) + "\n")
        out.flush()

    for name, probe in PROBES.items():
        print_line({"begin": name})
        try:
            print_line({"end": name, "result": probe()})
        except Exception as error:
            print_line({"end": name, "error": f"{type(error).__name__}: {first_line(error)}"})
            if name == "torch":
                # All other probes need torch.
                break
    out.close()
    # Skips the libraries' exit handlers, which could fail or hang after an error.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()


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
    reasons = {kind: unsupported_reason(kind, work) for kind in AttentionKind if kind is not AttentionKind.auto}
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


def probe_findings(outcome: ProbeResult) -> list[Finding]:
    """Returns the findings of all probes."""
    return [
        *_judge_import("torch", outcome),
        *_judge_import("deepspeed", outcome),
        *_judge_deepspeed_attributes(outcome),
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


def _judge_deepspeed_attributes(outcome: ProbeResult) -> list[Finding]:
    name = "deepspeed attributes"
    result = outcome.results.get(name)
    if "deepspeed" in outcome.errors:
        return []
    if result is None:
        return [_untried(name, outcome)]
    if not result["moved"]:
        return [ok(name, f"the {result['number']} undocumented ones that megads uses are there")]
    cost = "engine=deepspeed, which ZeRO-2 and 3 need, fails or trains wrongly; the native engine is not affected"
    return [
        problem(name, f"not there: {', '.join(result['moved'])}", cost, f"pip install 'deepspeed=={result['seen']}'")
    ]


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
