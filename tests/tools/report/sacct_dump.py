"""Synthetic output of a site's `sacct --parsable2`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from megads.tools.report.sacct import FIELDS

HEADER = "|".join((*FIELDS, "Eligible"))


def line(job: int = 1, **given: str) -> str:
    """One job of 8 GPUs that waited for a minute and ran for two hours."""
    values = {
        "JobID": str(job),
        "User": "ada",
        "Account": "physics",
        "Partition": "gpu",
        "State": "COMPLETED",
        "ExitCode": "0:0",
        "Submit": "2026-03-01T00:00:00",
        "Start": "2026-03-01T00:01:00",
        "ElapsedRaw": "7200",
        "AllocTRES": "billing=64,cpu=64,gres/gpu:h100=8,gres/gpu=8,mem=512G,node=1",
        "Eligible": "2026-03-01T00:00:00",
    }
    return "|".join((values | given)[name] for name in (*FIELDS, "Eligible"))


def synthetic_lines(jobs: int, seed: int) -> Iterator[str]:
    """The header and `jobs` jobs of half a year, a few of which take most of the GPU time."""
    draw = np.random.default_rng(seed)
    gpus = draw.choice([0, 1, 2, 4, 8, 16, 64, 256, 1024], jobs, p=[0.2, 0.4, 0.1, 0.1, 0.14, 0.03, 0.02, 0.008, 0.002])
    submit = np.datetime64("2026-01-01T00:00:00") + np.sort(draw.integers(0, 180 * 86_400, jobs)).astype(
        "timedelta64[s]"
    )
    wait = draw.lognormal(3 + 0.5 * np.log1p(gpus), 1.5).astype(np.int64)
    start = np.datetime_as_string(submit + wait.astype("timedelta64[s]"))
    run = np.minimum(draw.lognormal(6, 2, jobs).astype(np.int64), 14 * 86_400)
    kinds = [("COMPLETED", "0:0"), ("FAILED", "1:0"), ("FAILED", "137:0"), ("CANCELLED by 1001", "0:15"),
             ("TIMEOUT", "0:0"), ("NODE_FAIL", "0:0"), ("OUT_OF_MEMORY", "0:125")]  # fmt: skip
    kind = draw.choice(len(kinds), jobs, p=[0.6, 0.2, 0.03, 0.1, 0.04, 0.01, 0.02])
    user = draw.zipf(1.3, jobs) % 500
    yield HEADER
    submitted = np.datetime_as_string(submit)
    for job in range(jobs):
        state, code = kinds[kind[job]]
        tres = f"billing=8,cpu=8,gres/gpu={gpus[job]},mem=64G,node=1" if gpus[job] else "billing=8,cpu=8,mem=64G,node=1"
        yield (
            f"{job + 1}|user{user[job]}|account{user[job] % 20}|{('gpu', 'debug')[job % 5 == 0]}|{state}|{code}|"
            f"{submitted[job]}|{start[job]}|{run[job]}|{tres}|{submitted[job]}"
        )


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{text}\n" for text in lines))
    return path
