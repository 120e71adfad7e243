"""Tests the demo's time limit in CI."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from scripts.demo.time_limit import describe, judge, limit_s

SCRIPT = Path(__file__).parents[3] / "scripts" / "demo" / "time_limit.py"


def test_the_limit_is_that_of_the_processor() -> None:
    """Catches the limit of an AVX2 processor for one with AVX-512, and one core that has to do as two."""
    assert limit_s({"avx2", "avx512f"}, 2) == 180
    assert limit_s({"avx2", "fma"}, 2) == 270
    assert limit_s({"asimd", "sve"}, 64) == 270
    assert limit_s({"avx512f"}, 1) == 450


def test_a_slow_demo_fails_unless_the_machine_was_busy() -> None:
    """Catches a demo of 46 minutes that CI accepts, and one that fails because of another program."""
    passed, line = judge(2760, 180, 0.01)
    assert not passed and line.endswith("TOO SLOW") and "2760 s" in line
    passed, line = judge(200, 180, 0.5)
    assert passed and "NOT JUDGED" in line
    assert judge(170, 180, 0.0)[0] and judge(170, 180, 0.9)[0]


def test_the_commands_own_failure_is_kept() -> None:
    """Catches a demo that fails quickly and is reported as fast."""
    done = subprocess.run(
        [sys.executable, SCRIPT, "bash", "-c", "echo '== 1/4 corpus'; exit 7"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 7 and done.stdout.startswith("== 1/4 corpus\ndemo: 0 s after installation")


def test_the_processor_is_named() -> None:
    """Catches a CI log that does not say on which processor a time was measured."""
    assert "processor: " in describe() and "instruction sets: " in describe()
