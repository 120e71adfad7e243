"""Checks that can crash or hang, in a separate process: `python -m megads.tools.doctor.probe`.

The process prints one line of JSON when a check begins and one with its findings, so that the parent, which runs the
other checks meanwhile, knows what was running when the process died. Output of libraries goes to stderr.
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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from megads.api import (
    AttentionKind,
    AttentionWork,
    Implementation,
    child_environment,
    gib,
    listen,
    rank_variables,
    unsupported_reason,
)
from megads.runtime.ports import LOOPBACK
from megads.tools.doctor.finding import Finding, Status, note, ok, problem
from megads.tools.doctor.software import ask, installed_version

ALL_REDUCE_S = 2.0
"""Timeout of a collective between two processes on this machine."""
# Importing torch and DeepSpeed takes two to three seconds from a local disk.
_SLOW_IMPORT_S = 15.0
# Tensor cores support bf16 since Ampere.
_BF16_CAPABILITY = [8, 0]
# They support FP8 since Ada and Hopper.
_FP8_CAPABILITY = [8, 9]
_MOSTLY_FREE = 0.9
_USUAL_HEAD_DIM = 64
# Largest absolute error of GELU in fp32 on inputs up to 4: a few ULPs.
_KERNEL_ERROR = 2e-6


def probe_torch() -> list[Finding]:
    """Imports torch."""
    start = time.perf_counter()
    import torch

    seconds = time.perf_counter() - start
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    return [_imported("torch", f"{torch.__version__}, {cuda}", seconds)]


def _imported(name: str, version: str, seconds: float) -> Finding:
    found = f"{name} {version}, imported in {seconds:.1f} s"
    if seconds <= _SLOW_IMPORT_S:
        return ok(f"import {name}", found)
    cost = "every rank pays for it at every start"
    return note(f"import {name}", found, cost, "put the environment on a local disk or into a container image")


def probe_gloo() -> list[Finding]:
    """Runs an all-reduce over two processes on gloo's default network interface; if that fails, on the loopback."""
    start = time.perf_counter()
    failure = _all_reduce({})
    if failure is None:
        seconds = time.perf_counter() - start
        return [ok("collectives", f"gloo, two processes, correct all-reduce after {seconds:.2f} s")]
    if _all_reduce({"GLOO_SOCKET_IFNAME": "lo"}) is None:
        remedy = "export GLOO_SOCKET_IFNAME=lo (works here), or make the host name resolve to a local address"
    else:
        remedy = "check for a firewall or proxy on the loopback interface: python -m torch.distributed.run shows more"
    cost = "ranks cannot communicate, not even on this machine"
    return [problem("collectives", f"gloo between two processes: {failure}", cost, remedy)]


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
    failures = []
    for child, pipe in children.items():
        # The alarm ends a rank that hangs.
        with os.fdopen(pipe, "rb") as file:
            message = file.read().decode(errors="replace")
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            name = signal.Signals(os.WTERMSIG(status)).name
            message = f"no result within {ALL_REDUCE_S:.0f} s" if name == "SIGALRM" else f"killed by {name}"
        failures += [message] if message else []
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
        message = error_text(error)
    os.write(pipe, message.encode()[:1000])
    # No clean-up: it could hang, and the objects belong to the parent.
    os._exit(0)


def probe_gpus() -> list[Finding]:
    """Looks at every GPU, and lists the attention kernels for this machine."""
    import torch

    # The parent, which has time to wait for nvidia-smi, sends the driver's version.
    driver = sys.stdin.readline().strip()
    if torch.cuda.is_available():
        gpus = []
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            free, total = torch.cuda.mem_get_info(index)
            capability = [properties.major, properties.minor]
            gpus.append(ProbedGpu(properties.name, int(free), int(total), capability))
        pairs = [(a, b) for a in range(len(gpus)) for b in range(len(gpus)) if a != b]
        apart = [(a, b) for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
        nccl = None
        with suppress(AttributeError, RuntimeError):  # a build of torch without NCCL
            nccl = ".".join(str(part) for part in torch.cuda.nccl.version())
        return [*describe_gpus(gpus, apart, nccl, driver or "unknown"), describe_attention(cuda=True)]
    if not driver:
        return [ok("gpu", "none: trains on the CPU"), describe_attention(cuda=False)]
    reason = "torch sees no GPU"
    if torch.version.cuda:
        try:
            torch.cuda.init()
        except Exception as error:
            reason = first_line(error)
    finding = describe_unused_driver(driver, torch.version.cuda, reason)
    return [finding, describe_attention(cuda=False)]


_DRIVER_OF_CUDA = {13: 580, 12: 525}
"""Oldest driver that runs programs of any version of a CUDA release (NVIDIA: CUDA compatibility, minor versions)."""


def cuda_for_driver(driver: str) -> str:
    """Returns which of torch's CUDA builds a driver runs, for messages.

    Args:
        driver: version of the driver, such as 535.104.05.
    """
    major = driver.partition(".")[0]
    number = int(major) if major.isdecimal() else 0
    newest = next((release for release, oldest in _DRIVER_OF_CUDA.items() if number >= oldest), None)
    if newest is None:
        return f"no CUDA build of torch 2.9 or newer: update it to {min(_DRIVER_OF_CUDA.values())} or newer"
    others = [f"CUDA {release}" for release in _DRIVER_OF_CUDA if release < newest]
    return " and ".join([f"torch built for CUDA {newest}", *others])


def describe_unused_driver(driver: str, cuda: str | None, reason: str) -> Finding:
    """Returns the finding about a driver whose GPUs torch does not use, with the build of torch that fits it.

    Args:
        driver: version of the driver.
        cuda: CUDA version that torch was built for; None for a CPU build.
        reason: what torch says.
    """
    cost = "training uses the CPU, up to a thousand times slower"
    fitting = f"driver {driver} runs {cuda_for_driver(driver)} (docs/install.md, On a cluster)"
    if cuda is None:
        return note("gpu", f"driver {driver}, but torch is a CPU build", cost, f"install a CUDA torch: {fitting}")
    needed = _DRIVER_OF_CUDA.get(int(cuda.partition(".")[0]), 0)
    major = driver.partition(".")[0]
    if major.isdecimal() and int(major) < needed:
        reason = f"torch is built for CUDA {cuda}, which needs driver {needed} or newer"
        return problem("gpu", f"driver {driver}, but {reason}", cost, f"update the driver, or: {fitting}")
    remedy = f"nvidia-smi shows whether the driver works, CUDA_VISIBLE_DEVICES may hide GPUs; {fitting}"
    return problem("gpu", f"driver {driver}, but {reason}", cost, remedy)


@dataclass(frozen=True)
class ProbedGpu:
    """A GPU, with its compute capability as [major, minor]."""

    name: str
    free_bytes: int
    total_bytes: int
    capability: list[int]


def describe_gpus(gpus: list[ProbedGpu], apart: list[tuple[int, int]], nccl: str | None, driver: str) -> list[Finding]:
    """Returns findings about the GPUs: models, bf16, free memory, NCCL and peer access.

    Args:
        gpus: the GPUs, at least one.
        apart: pairs of GPUs without peer access.
        nccl: version of NCCL; None if torch has none.
        driver: version of the driver.
    """
    names = sorted({gpu.name for gpu in gpus})
    findings = [ok("gpu", f"{len(gpus)} x {', '.join(names)}, {gib(gpus[0].total_bytes)} each, driver {driver}")]
    if len(names) > 1:
        cost = "every step waits for the slowest GPU"
        findings.append(note("gpu models", ", ".join(names), cost, "select equal GPUs with CUDA_VISIBLE_DEVICES"))
    if old := ", ".join(str(index) for index, gpu in enumerate(gpus) if gpu.capability < _BF16_CAPABILITY):
        cost = "train.precision=bf16 is emulated and slow there"
        findings.append(note("bf16", f"not in hardware on GPU {old}", cost, "train.precision=fp32"))
    if without := ", ".join(str(index) for index, gpu in enumerate(gpus) if gpu.capability < _FP8_CAPABILITY):
        found = f"FP8 is not in hardware on GPU {without}"
        findings.append(ok("fp8", f"{found}: train.fp8 is refused there, unless ops.fp8_emulation=true"))
    busy = [index for index, gpu in enumerate(gpus) if gpu.free_bytes < _MOSTLY_FREE * gpu.total_bytes]
    if taken := ", ".join(map(str, busy)):
        cost = "training has less memory and is slower"
        findings.append(note("gpu memory", f"in use by others on GPU {taken}", cost, "nvidia-smi lists the processes"))
    if nccl is None:
        cost = "GPUs cannot communicate"
        findings.append(problem("nccl", "not in this torch build", cost, "install a torch build with NCCL"))
    else:
        findings.append(ok("nccl", nccl))
    if apart:
        pairs = ", ".join(f"{a}-{b}" for a, b in apart[:4])
        cost = "their transfers go through host memory; do not place tensor-parallel ranks on such a pair"
        found = f"{len(apart)} pairs without peer access, for example {pairs}"
        findings.append(note("peer access", found, cost, "nvidia-smi topo -m; switch off ACS or IOMMU"))
    elif len(gpus) > 1:
        findings.append(ok("peer access", "between all GPUs"))
    return findings


def describe_attention(cuda: bool) -> Finding:
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


def probe_kernels() -> list[Finding]:
    """Loads megads' CPU kernels, if they are compiled, and compares one of them with PyTorch."""
    from megads.api import KernelsUnavailable
    from megads.ops.build import library_path

    try:
        path = library_path()
    except KernelsUnavailable as error:
        cost = "training on a CPU uses torch's operators, which are slower; results are the same"
        return [note("kernels", "none", cost, str(error))]
    if not path.exists():
        return [ok("kernels", "not compiled yet: compiled at the first run on a CPU, in some seconds")]
    import torch

    from megads.api import FUSED, TORCH, gelu
    from megads.ops.resolve import load_library

    load_library(path)
    x = torch.linspace(-4.0, 4.0, 33)
    error_size = float((gelu(x, FUSED) - gelu(x, TORCH)).abs().max())
    if error_size > _KERNEL_ERROR:
        raise ArithmeticError(f"GELU is off by {error_size:.1e}")
    return [ok("kernels", "compiled for this machine: ops.impl=fused")]


def probe_deepspeed() -> list[Finding]:
    """Imports DeepSpeed as a rank does, and checks its attributes."""
    import torch

    with child_environment(rank_variables(1, cuda=torch.cuda.is_available())):
        start = time.perf_counter()
        from megads.engine.deepspeed_adapter import require_deepspeed

        seconds = time.perf_counter() - start
        require_deepspeed()
    imported = _imported("deepspeed", installed_version("deepspeed") or "of unknown version", seconds)
    return [imported, check_attributes()]


def check_attributes() -> Finding:
    """Looks for the undocumented attributes of DeepSpeed that megads uses."""
    from megads.engine.deepspeed_private import NEWEST_SEEN, PRIVATE, moved_attributes

    name = "deepspeed attributes"
    try:
        moved = moved_attributes()
    except OSError as error:
        return note(name, f"not checked: {error}", "whether it works is unknown", "reinstall deepspeed with its source")
    if not moved:
        return ok(name, f"the {sum(map(len, PRIVATE.values()))} undocumented ones that megads uses are there")
    cost = "engine=deepspeed, which ZeRO-2 and 3 need, fails or trains wrongly; the native engine is not affected"
    return problem(name, f"not there: {', '.join(moved)}", cost, f"pip install 'deepspeed=={NEWEST_SEEN}'")


def first_line(error: BaseException) -> str:
    """Returns the first non-empty line of an error's message, or the name of its type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def error_text(error: BaseException) -> str:
    """Returns the type of an error and the first line of its message."""
    return f"{type(error).__name__}: {first_line(error)}"


@dataclass(frozen=True)
class Probe:
    """A check of the process.

    Attributes:
        run: returns the findings.
        cost: effect on training if it fails or crashes.
        remedy: what the user can do then.
    """

    run: Callable[[], list[Finding]]
    cost: str
    remedy: str


_REINSTALL = "python -c 'import {0}' shows the full error; reinstall it"
# The gloo probe forks, so it must run before any probe that starts threads or CUDA.
PROBES: Mapping[str, Probe] = {
    "import torch": Probe(probe_torch, "nothing can be trained", _REINSTALL.format("torch")),
    "collectives": Probe(probe_gloo, "ranks cannot communicate, not even on this machine", "see the message"),
    "gpu": Probe(probe_gpus, "training on GPUs fails", "nvidia-smi; CUDA_VISIBLE_DEVICES= trains on the CPU"),
    "kernels": Probe(
        probe_kernels,
        "training on a CPU crashes or gives wrong results",
        "remove the folder ops in the cache folder to recompile the kernels, or train with ops.impl=torch",
    ),
    "import deepspeed": Probe(probe_deepspeed, "nothing can be trained", _REINSTALL.format("deepspeed")),
}


def main() -> None:
    """Runs every probe and prints its findings; if importing torch fails, skips the other probes."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def print_line(line: Mapping[str, Any]) -> None:
        out.write(json.dumps(line) + "\n")
        out.flush()

    for check, probe in PROBES.items():
        print_line({"begin": check})
        try:
            print_line({"end": check, "findings": [asdict(finding) for finding in probe.run()]})
        except Exception as error:
            failed = problem(check, error_text(error), probe.cost, probe.remedy)
            print_line({"end": check, "findings": [asdict(failed)]})
            if check == "import torch":
                break
    out.close()
    # Skips the libraries' exit handlers, which could fail or hang after an error.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()


@contextmanager
def probe_process(timeout_s: float) -> Iterator[Callable[[], list[Finding]]]:
    """Context manager that runs the probes in the background; yields a function that waits for their findings.

    Args:
        timeout_s: longest run time of the process.
    """
    deadline = time.monotonic() + timeout_s
    with (
        tempfile.TemporaryFile("w+") as output,
        subprocess.Popen(
            [sys.executable, "-m", "megads.tools.doctor.probe"],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.DEVNULL,
            text=True,
            # A new process group, so that its forked ranks are killed with it.
            start_new_session=True,
        ) as process,
    ):

        def kill() -> None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

        def findings() -> list[Finding]:
            try:
                code = process.wait(max(0.0, deadline - time.monotonic()))
                ending = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
            except subprocess.TimeoutExpired:
                kill()
                process.wait()
                ending = f"took longer than {timeout_s:.0f} s"
            output.seek(0)
            return read_findings(output.read(), ending)

        try:
            driver = ask("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or ""
            assert process.stdin is not None
            with suppress(BrokenPipeError), process.stdin as pipe:
                pipe.write(driver.partition("\n")[0] + "\n")
            yield findings
        finally:
            kill()


def read_findings(text: str, ending: str) -> list[Finding]:
    """Reads the findings of all probes from the output of the process.

    Args:
        text: output of the process; the last line may be cut.
        ending: how the process ended.
    """
    found: dict[str, list[Finding]] = {}
    running: str | None = "import torch"
    for line in text.splitlines():
        try:
            said = json.loads(line)
        except ValueError:
            break
        running = said.get("begin")
        if "end" in said:
            found[said["end"]] = [Finding.from_json(finding) for finding in said["findings"]]
    findings = list[Finding]()
    no_torch = any(finding.status is Status.problem for finding in found.get("import torch", []))
    for check, probe in PROBES.items():
        if check in found:
            findings += found[check]
        elif check != running:
            reason = "torch cannot be imported" if no_torch else f"the probe {ending}"
            cost = "whether it works is unknown"
            findings.append(note(check, f"not checked: {reason}", cost, "see the other findings first"))
        elif ending.startswith("took"):
            cost = "whether it works is unknown; a busy machine or a slow file system is the usual cause"
            findings.append(note(check, ending, cost, "timeout_s=60 waits; a rank waits at every start"))
        else:
            findings.append(problem(check, f"Python {ending}", probe.cost, probe.remedy))
    return findings
