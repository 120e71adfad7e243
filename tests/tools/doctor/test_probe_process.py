"""Tests what doctor reports of the probe process, for all ways in which it can end, and of what its probes find."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from megads.engine import deepspeed_private
from megads.ops import build
from megads.ops.attention_kinds import AttentionKind
from megads.tools.doctor import probe
from megads.tools.doctor.finding import Finding, Status, note, ok, problem
from megads.tools.doctor.probe import (
    PROBES,
    ProbedGpu,
    describe_attention,
    describe_gpus,
    describe_unused_driver,
    read_findings,
)


def printed(*checks: str, begun: str = "") -> str:
    """Output of a process that finished some checks and began another."""
    lines = [
        json.dumps(line)
        for check in checks
        for line in ({"begin": check}, {"end": check, "findings": [asdict(ok(check, "fine"))]})
    ]
    return "\n".join([*lines, json.dumps({"begin": begun})] if begun else lines) + "\n"


def statuses(findings: list[Finding]) -> dict[str, Status]:
    return {finding.check: finding.status for finding in findings}


def test_all_findings_are_read() -> None:
    """Catches a finding that is lost, and a good result that is called bad."""
    assert read_findings(printed(*PROBES), "exited with 0") == [ok(check, "fine") for check in PROBES]


@pytest.mark.parametrize("check", PROBES)
def test_a_crash_is_blamed_on_what_was_begun(check: str) -> None:
    """Catches a segmentation fault that discards the results of earlier checks, or is blamed on another one."""
    done = list(PROBES)[: list(PROBES).index(check)]
    text = printed(*done, begun=check)
    findings = read_findings(text, "was killed by SIGSEGV")
    (finding,) = [finding for finding in findings if finding.status is Status.problem]
    assert (finding.check, finding.found) == (check, "Python was killed by SIGSEGV")
    assert finding.cost and finding.remedy and [found.check for found in findings] == list(PROBES)
    # A truncated line is ignored.
    assert read_findings(text + '{"end": "impo', "was killed by SIGSEGV") == findings


def test_too_slow_is_a_note() -> None:
    """Catches a slow machine reported as broken, and checks that did not run reported as run."""
    for done in range(len(PROBES)):
        checks = list(PROBES)
        findings = statuses(read_findings(printed(*checks[:done], begun=checks[done]), "took longer than 7 s"))
        expected = [Status.ok] * done + [Status.note] * (len(checks) - done)
        assert findings == dict(zip(checks, expected, strict=True))
    assert statuses(read_findings("", "exited with 1"))["import torch"] == Status.problem


def test_a_broken_torch_is_one_problem() -> None:
    """Catches a list of consequences that hides the root cause."""
    failed = problem("import torch", "ImportError: no libcudart", "nothing can be trained", "reinstall it")
    lines = [{"begin": "import torch"}, {"end": "import torch", "findings": [asdict(failed)]}]
    first, *others = read_findings("\n".join(map(json.dumps, lines)), "exited with 0")
    assert first == failed and len(others) == len(PROBES) - 1
    assert {(finding.status, finding.found) for finding in others} == {
        (Status.note, "not checked: torch cannot be imported")
    }


def test_moved_attributes_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a DeepSpeed without an attribute that megads sets, which is called fine."""
    assert probe.check_attributes().status is Status.ok
    owner = "deepspeed.runtime.engine.DeepSpeedEngine"
    monkeypatch.setattr(deepspeed_private, "moved_attributes", lambda: [f"{owner}._broadcast_model"])
    finding = probe.check_attributes()
    assert finding.status is Status.problem and finding.found.endswith("DeepSpeedEngine._broadcast_model")
    assert "native engine is not affected" in finding.cost
    assert finding.remedy == f"pip install 'deepspeed=={deepspeed_private.NEWEST_SEEN}'"


def test_collectives_that_fail_name_the_interface_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a host name that resolves to an unreachable address, the usual cause, reported without its remedy."""
    works = {"lo"}
    monkeypatch.setattr(
        probe, "_all_reduce", lambda given: None if works & {*given.values()} else "RuntimeError: no route"
    )
    (finding,) = probe.probe_gloo()
    assert finding.status is Status.problem and "GLOO_SOCKET_IFNAME=lo" in finding.remedy
    works.clear()
    (finding,) = probe.probe_gloo()
    assert finding.status is Status.problem and "firewall" in finding.remedy and "no route" in finding.found


def test_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Catches a missing compiler that is reported as a problem, and wrong kernels that are called good."""
    monkeypatch.setattr(build, "library_path", lambda: tmp_path / "none.so")
    (finding,) = probe.probe_kernels()
    assert finding.status is Status.ok and "not compiled yet" in finding.found

    def unavailable() -> Path:
        raise build.KernelsUnavailable("there is no C++ compiler: install one")

    monkeypatch.setattr(build, "library_path", unavailable)
    (finding,) = probe.probe_kernels()
    assert finding.status is Status.note and "install one" in finding.remedy


def test_gpus() -> None:
    """Catches old, mixed, occupied and unconnected GPUs that are called good."""
    gpu = ProbedGpu("H100", 79 * 2**30, 80 * 2**30, [9, 0])
    assert set(statuses(describe_gpus([gpu, gpu], [], "2.27.7", "580.1")).values()) == {Status.ok}
    old = replace(gpu, name="V100", free_bytes=2**30, capability=[7, 0])
    found = {finding.check: finding for finding in describe_gpus([gpu, old], [(0, 1), (1, 0)], None, "580.1")}
    assert found["nccl"].status is Status.problem
    for check in ("gpu models", "bf16", "gpu memory", "peer access"):
        assert found[check].status is Status.note and found[check].remedy
    assert "GPU 1" in found["fp8"].found and "train.fp8 is refused" in found["fp8"].found
    assert "GPU 1" in found["bf16"].found and "0-1, 1-0" in found["peer access"].found


def test_attention_of_this_machine() -> None:
    """Catches a GPU's attention kernels listed for a CPU, and a kind that is left out without a reason."""
    for cuda, there, reason in (
        (False, "fused, fused_softmax, sdpa, augmented", "cudnn is for GPUs (cuDNN)"),
        (True, "fused_softmax, sdpa, augmented", "fused is for CPUs"),
    ):
        kinds, *others = describe_attention(cuda).found.split("; ")
        assert kinds.startswith(there) and reason in others
        assert {part.split()[0] for part in others} | set(kinds.split(", ")) == set(AttentionKind) - {"auto"}


def test_a_finding_survives_json() -> None:
    """Catches a status that is read as text, which equals no severity in a comparison by identity."""
    found = note("disk", "slow", "time", "move")
    assert Finding.from_json(json.loads(json.dumps(asdict(found)))) == found
    assert Finding.from_json(asdict(found)).status is Status.note


@pytest.mark.parametrize(
    ("driver", "cuda", "status", "found", "remedy"),
    [
        ("580.65.06", None, Status.note, "a CPU build", "runs torch built for CUDA 13 and CUDA 12 ("),
        ("535.104.05", None, Status.note, "a CPU build", "driver 535.104.05 runs torch built for CUDA 12 ("),
        ("470.82", None, Status.note, "a CPU build", "update it to 525 or newer"),
        (
            "535.104.05", "13.0", Status.problem, "built for CUDA 13.0, which needs driver 580 or newer",
            "driver 535.104.05 runs torch built for CUDA 12 (",
        ),
        ("535.104.05", "12.6", Status.problem, "torch says so", "nvidia-smi shows"),
        ("unknown", "13.0", Status.problem, "torch says so", "nvidia-smi shows"),
    ],
)  # fmt: skip
def test_the_torch_that_fits_the_driver_is_named(
    driver: str, cuda: str | None, status: Status, found: str, remedy: str
) -> None:
    """Catches a user of a cluster who is told to update a driver, and not which torch runs on it."""
    finding = describe_unused_driver(driver, cuda, "torch says so")
    assert finding.status is status and found in finding.found and remedy in finding.remedy
