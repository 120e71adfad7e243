"""Settings that `megads report` rejects before it reads a run."""

from __future__ import annotations

import pytest

from megads.errors import ConfigError
from megads.tools.report.config import ReportConfig


def test_one_run_and_several() -> None:
    """Catches a run id that Hydra parsed as a number, and a list used as a name."""
    assert ReportConfig(run="a").runs == ["a"]
    assert ReportConfig(run=20260101).runs == ["20260101"]
    config = ReportConfig(run=["a", "b"], output="c")
    config.check()
    assert config.runs == ["a", "b"]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (ReportConfig(run=""), "give a run directory"),
        (ReportConfig(run=None), "give a run directory"),
        (ReportConfig(run=[]), "give a run directory"),
        (ReportConfig(run=["a", "a"], output="x"), "names a twice"),
        (ReportConfig(run=list("abcdefghi"), output="x"), "at most 8"),
        (ReportConfig(run=["a", "b"]), "output=runs/comparison"),
        (ReportConfig(run=["a", "b"], output="c", device="h100"), "a step of one run"),
        (ReportConfig(run="a", device="h9000"), "device = h9000"),
        (ReportConfig(site="dump", device="h100"), "does not apply to site"),
    ],
)
def test_refusals(config: ReportConfig, expected: str) -> None:
    """Catches a comparison that overwrites the report of its first run, and missing or contradictory settings."""
    with pytest.raises(ConfigError, match=expected):
        config.check()
