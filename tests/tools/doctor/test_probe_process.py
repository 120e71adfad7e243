"""Tests the findings that doctor derives from the probe's results, for all ways in which the probe can end."""

from __future__ import annotations

import copy
from typing import Any

from megads.ops.attention_kinds import AttentionKind
from megads.tools.doctor.finding import Finding, Status
from megads.tools.doctor.probe import ProbeResult, describe_gpus, probe_findings, read_outcome

TORCH = '{"begin": "torch"}\n{"end": "torch", "result": {"version": "2.13.0", "seconds": 1.5, "cuda": null}}\n'
GOOD = (
    TORCH
    + '{"begin": "gloo"}\n{"end": "gloo", "result": {"seconds": 0.1, "interface": null}}\n'
    + '{"begin": "gpus"}\n{"end": "gpus", "result": {"gpus": [], "reason": null}}\n'
    + '{"begin": "kernels"}\n{"end": "kernels", "result": {"state": "loaded", "error": 2e-7}}\n'
    + '{"begin": "deepspeed attributes"}\n'
    + '{"end": "deepspeed attributes", "result": {"moved": [], "number": 9, "seen": "0.19.8"}}\n'
    + '{"begin": "deepspeed"}\n{"end": "deepspeed", "result": {"seconds": 0.5}}\n'
)


def statuses(outcome: ProbeResult) -> dict[str, Status]:
    return {finding.check: finding.status for finding in probe_findings(outcome)}


def test_all_well() -> None:
    """Catches a finding that is lost, and a good result that is called bad."""
    found = statuses(read_outcome(GOOD, "exited with 0"))
    assert {check: found[check] for check in ("import torch", "import deepspeed", "collectives")} == {
        "import torch": Status.ok,
        "import deepspeed": Status.ok,
        "collectives": Status.ok,
    }


def test_moved_attributes_are_named() -> None:
    """Catches a DeepSpeed without an attribute that megads sets, which is called fine."""
    moved = GOOD.replace('"moved": []', '"moved": ["deepspeed.runtime.engine.DeepSpeedEngine._broadcast_model"]')
    (finding,) = [found for found in probe_findings(read_outcome(moved, "ended")) if found.status is Status.problem]
    assert finding.check == "deepspeed attributes" and finding.found.endswith("DeepSpeedEngine._broadcast_model")
    assert "native engine is not affected" in finding.cost and finding.remedy == "pip install 'deepspeed==0.19.8'"


def test_a_crash_is_blamed_on_what_was_begun() -> None:
    """Catches a segmentation fault in DeepSpeed that discards torch's results."""
    outcome = read_outcome(GOOD[: GOOD.rindex('{"end"')], "was killed by SIGSEGV")
    (finding,) = [finding for finding in probe_findings(outcome) if finding.status == Status.problem]
    assert (finding.check, finding.found) == ("import deepspeed", "Python was killed by SIGSEGV")
    # A truncated line is ignored.
    assert read_outcome(GOOD[:-30], "was killed by SIGSEGV") == outcome


def test_too_slow_is_a_note() -> None:
    """Catches a slow machine reported as broken, and checks that did not run reported as run."""
    assert statuses(read_outcome('{"begin": "torch"}\n', "took longer than 7 s")) == {
        "import torch": Status.note,
        "import deepspeed": Status.note,
        "deepspeed attributes": Status.note,
        "collectives": Status.note,
        "gpu": Status.note,
        "kernels": Status.note,
    }
    assert statuses(read_outcome("", "exited with 1"))["import torch"] == Status.problem
    gloo_begun = '{"begin": "torch"}\n{"end": "torch", "result": {"seconds": 1, "cuda": null}}\n{"begin": "gloo"}\n'
    assert statuses(read_outcome(gloo_begun, "took longer than 7 s"))["collectives"] == Status.note
    assert statuses(read_outcome(gloo_begun, "was killed by SIGSEGV"))["collectives"] == Status.problem
    kernels_begun = (
        '{"begin": "torch"}\n{"end": "torch", "result": {"seconds": 1, "cuda": null}}\n{"begin": "kernels"}\n'
    )
    assert statuses(read_outcome(kernels_begun, "took longer than 7 s"))["kernels"] == Status.note
    assert statuses(read_outcome(kernels_begun, "was killed by SIGILL"))["kernels"] == Status.problem


def test_a_broken_torch_is_one_problem() -> None:
    """Catches a list of consequences that hides the root cause."""
    error = '{"begin": "torch"}\n{"end": "torch", "error": "ImportError: no libcudart"}\n'
    found = statuses(read_outcome(error, "exited with 0"))
    assert [check for check, status in found.items() if status == Status.problem] == ["import torch"]
    assert len(found) == 6


def test_collectives_that_fail_name_the_interface_that_works() -> None:
    """Catches a host name that resolves to an unreachable address, the usual cause, reported without its remedy."""
    failed = '{"seconds": null, "failure": "RuntimeError: no route", "interface": "lo"}'
    outcome = read_outcome(GOOD.replace('{"seconds": 0.1, "interface": null}', failed), "exited with 0")
    (finding,) = [finding for finding in probe_findings(outcome) if finding.check == "collectives"]
    assert finding.status == Status.problem and "GLOO_SOCKET_IFNAME=lo" in finding.remedy


def kernels(result: str) -> Finding:
    outcome = read_outcome(GOOD.replace('{"state": "loaded", "error": 2e-7}', result), "exited with 0")
    (finding,) = [finding for finding in probe_findings(outcome) if finding.check == "kernels"]
    return finding


def test_kernels() -> None:
    """Catches kernels that are wrong or crash and are called good, and a missing compiler reported as a problem."""
    assert kernels('{"state": "loaded", "error": 2e-7}').status == Status.ok
    assert kernels('{"state": "not compiled"}').status == Status.ok
    missing = kernels('{"state": "unavailable", "reason": "there is no C++ compiler: install one"}')
    assert missing.status == Status.note and "install one" in missing.remedy
    assert kernels('{"state": "loaded", "error": 0.5}').status == Status.problem
    cut = GOOD[: GOOD.index('{"end": "kernels"')]
    found = {finding.check: finding for finding in probe_findings(read_outcome(cut, "was killed by SIGILL"))}
    assert found["kernels"].status == Status.problem and "SIGILL" in found["kernels"].found


def test_gpus() -> None:
    """Catches old, mixed, occupied and unconnected GPUs that are called good."""
    gpu = {"name": "H100", "free_bytes": 79 * 2**30, "total_bytes": 80 * 2**30, "capability": [9, 0]}
    good: dict[str, Any] = {"gpus": [gpu, dict(gpu)], "apart": [], "nccl": "2.27.7"}
    assert {finding.status for finding in describe_gpus(good, "580.1")} == {Status.ok}
    bad = copy.deepcopy(good)
    bad["gpus"][1] = {**gpu, "name": "V100", "free_bytes": 2**30, "capability": [7, 0]}
    bad.update(apart=[[0, 1], [1, 0]], nccl=None)
    found = {finding.check: finding for finding in describe_gpus(bad, "580.1")}
    assert found["nccl"].status == Status.problem
    for check in ("gpu models", "bf16", "gpu memory", "peer access"):
        assert found[check].status == Status.note and found[check].remedy
    assert "GPU 1" in found["bf16"].found


def test_attention_of_this_machine() -> None:
    """Catches a GPU's attention kernels listed for a CPU, and a kind that is left out without a reason."""
    gpu = '{"name": "A", "free_bytes": 9, "total_bytes": 9, "capability": [9, 0]}'
    on_gpu = GOOD.replace('"gpus": [], "reason": null', f'"gpus": [{gpu}], "apart": [], "nccl": "2"')
    for text, there, reason in (
        (GOOD, "fused, fused_softmax, sdpa, augmented", "cudnn is for GPUs (cuDNN)"),
        (on_gpu, "fused_softmax, sdpa, augmented", "fused is for CPUs"),
    ):
        found = probe_findings(read_outcome(text, "exited with 0"))
        (finding,) = [finding for finding in found if finding.check == "attention"]
        kinds, *others = finding.found.split("; ")
        assert kinds.startswith(there) and reason in others
        assert {part.split()[0] for part in others} | set(kinds.split(", ")) == set(AttentionKind) - {"auto"}
