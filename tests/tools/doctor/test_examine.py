"""Checks that fail themselves."""

from __future__ import annotations

from megads.tools.doctor.examine import run_checks, worst
from megads.tools.doctor.finding import Finding, Status, note, ok, problem


def test_a_check_that_fails_is_a_finding() -> None:
    """Catches a doctor that crashes because a check raises."""

    def broken() -> list[Finding]:
        raise OSError("no such device")

    findings = run_checks({"first": broken, "second": lambda: [ok("second", "fine")]})
    assert [finding.check for finding in findings] == ["first", "second"]
    assert "OSError: no such device" in findings[0].found
    assert worst(findings) == Status.note


def test_worst() -> None:
    """Catches statuses compared alphabetically."""
    assert worst([ok("a", ""), problem("b", "", "", ""), note("c", "", "", "")]) == Status.problem
    assert worst([]) == Status.ok
