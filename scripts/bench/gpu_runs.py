#!/usr/bin/env python3
"""Runs of `megads` for scripts/bench/gpu.sh, one case a process; each judges its runs and prints a verdict.

    python -m scripts.bench.gpu_runs --case "tp2" [--device cuda|cpu] [--work runs/bench] [key=value ...]
    python -m scripts.bench.gpu_runs --list

Stage nccl: layouts, schedules and failures over NCCL with several ranks on one GPU (cluster.ranks_per_gpu), which NCCL
reaches through sockets, so that times mean nothing. Stage resume: a run that is killed and started again continues bit
for bit. Stage layouts: speed and memory in each layout that fits the GPUs (key=value: overrides); the first loss must
be that of one GPU with torch's operators. On a CPU the same commands run over gloo with smaller models. A case that
hangs is ended by its own limit, and its launcher's by `cluster.timeout_s`. It prints what its commands write
as it happens, and on SIGTERM or SIGABRT their stacks (gpu_progress.py).
"""

from __future__ import annotations

import argparse
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from scripts.bench.gpu_judges import (
    NotJudged,
    Place,
    compared_in_bf16,
    compared_in_fp32,
    exchanged,
    first_use,
    measured,
    ranks_of,
    replayed,
    resumed,
    resumed_and_waits,
    survived,
    verified,
)
from scripts.bench.gpu_table import add_line_options, appender


@dataclass(frozen=True)
class Case:
    """One case.

    Attributes:
        name: short name.
        judge: runs it; returns the verdict, and whether it is the wanted one.
        expected_s: expected duration, from one run on an H200 for the cases that finished there; see CASES.
        most_s: time limit.
        group: cases of the same group that follow each other run concurrently.
        kernels: whether it needs megads' CUDA kernels.
        stage: nccl, resume or layouts.
        devices: number of GPUs that it needs.
    """

    name: str
    judge: Callable[[Place], tuple[str, bool]]
    expected_s: float = 30.0
    most_s: float = 75.0
    group: str = ""
    kernels: bool = False
    stage: str = "nccl"
    devices: int = 1


def layout(name: str, words: str, group: str, expected_s: float = 55.0) -> Case:
    """A case that verifies a layout."""
    return Case(name, partial(verified, words), expected_s, 120.0, group=group)


LAYOUTS = (
    "",
    "ops.impl=fused",
    "parallel.dp=2",
    "parallel.dp=2 parallel.bucket_elements=1000000000",  # no overlap, to measure its benefit
    "parallel.dp=2 parallel.overlap_param_gather=true",
    "parallel.dp=2 parallel.zero_stage=0",
    "parallel.dp=2 parallel.zero_stage=2",
    "parallel.dp=2 parallel.zero_stage=3",
    "parallel.tp=2",
    "parallel.tp=2 parallel.sequence_parallel=true",
    "parallel.cp=2",
    "parallel.cp=2 parallel.cp_kind=ulysses",
    "parallel.cp=2 parallel.cp_kind=ring",
    "parallel.cp=4 parallel.cp_ulysses=2",
    "parallel.cp=4 parallel.cp_ulysses=2 parallel.cp_kind=ring",
    "parallel.pp=2",
    "parallel.pp=2 parallel.recompute=full",
    "parallel.pp=2 parallel.schedule=interleaved",
    "parallel.pp=2 parallel.schedule=zb_h1",
    "parallel.pp=2 parallel.schedule=zb_v",
    "parallel.pp=2 parallel.schedule=dualpipe_v",
    "parallel.dp=4 parallel.zero_stage=3 parallel.zero_shard_size=2",
    "parallel.tp=2 parallel.sequence_parallel=true parallel.pp=2 parallel.dp=2",
)
"""Of stage layouts; the first one is the reference."""
GATHERED = "parallel.tp=2 parallel.sequence_parallel=true parallel.dp=2 parallel.overlap_param_gather=true"
CHUNKED = "parallel.tp=2 parallel.sequence_parallel=true parallel.tp_chunks=2"
# expected_s is from one NVIDIA H200, imports included: 39 to 60 s for a layout beside three others, 44 to 63 s for two
# trainings at once. Cases that have not finished there go first, after a check that anything works at all: 32
# connections (stopped after 30 s), SIGKILL (110 s), 350M in fp32 (120 s), and two that were not started. Of ulysses,
# overlapped gathers, the ring and the last four expected_s is an estimate.
CASES = (
    layout("tp2", "parallel.tp=2", "two ranks"),
    layout("dp2", "parallel.dp=2", "two ranks"),
    Case("interleaved pp2 v2 m4, 32 connections", partial(exchanged, 32), 70.0, 130.0, group="interleaved"),
    Case("interleaved pp2 v2 m4, 1 connection", partial(exchanged, 1), 70.0, 130.0, group="interleaved"),
    Case("dp2, SIGKILL and SIGSTOP of a rank", survived, 160.0, 240.0),
    Case("350M tp2 pp2 in fp32", compared_in_fp32, 200.0, 300.0),
    Case("350M tp2 pp2 in bf16", compared_in_bf16, 200.0, 300.0),
    Case("350M tp2 pp2, killed; host waits", resumed_and_waits, 200.0, 300.0),
    layout("cp2", "parallel.cp=2", "layouts"),
    layout("tp2, sequence parallel, tp_chunks 2", CHUNKED, "layouts"),
    layout("pp2 1f1b", "parallel.pp=2", "layouts"),
    layout("pp4 1f1b", "parallel.pp=4", "layouts"),
    layout("tp2 pp2, engine=deepspeed", "engine=deepspeed parallel.tp=2 parallel.pp=2", "layouts"),
    Case("zb_v, cold", partial(first_use, "zb_v", True), 60.0, 120.0, group="cold"),
    Case("dualpipe_v, cold", partial(first_use, "dualpipe_v", True), 60.0, 120.0, group="cold"),
    layout("ZeRO-2", "parallel.dp=2 parallel.zero_stage=2", "many ranks", 60.0),
    layout("ZeRO-3", "parallel.dp=2 parallel.zero_stage=3", "many ranks", 60.0),
    layout("tp2 cp2", "parallel.tp=2 parallel.cp=2", "many ranks", 60.0),
    layout("cp2, ulysses", "parallel.cp=2 parallel.cp_kind=ulysses", "many ranks", 60.0),
    layout("tp2 dp2, overlapped gathers", GATHERED, "many ranks", 60.0),
    layout("cp4, ring", "parallel.cp=4 parallel.cp_kind=ring", "many ranks", 60.0),
    layout("cp4, ulysses 2 x ring", "parallel.cp=4 parallel.cp_ulysses=2 parallel.cp_kind=ring", "many ranks", 60.0),
    layout("tp2 pp2 dp2", "parallel.tp=2 parallel.pp=2 parallel.dp=2", "", 60.0),
    # Loading all kernels eagerly takes longer than compiling those of FlexAttention.
    Case("zb_v, warm", partial(first_use, "zb_v", False), 65.0, 120.0, group="warm"),
    Case("dualpipe_v, warm", partial(first_use, "dualpipe_v", False), 65.0, 120.0, group="warm"),
    Case("CUDA graphs, dropout, documents, recompute", replayed, 45.0, 110.0, group="kernels", kernels=True),
    *(
        Case(f"resumed, {words}", partial(resumed, words), 100.0, 185.0, "checks", "fused" in words, "resume")
        for words in ("ops.impl=fused", "ops.impl=fused ops.cuda_graphs=true", "ops.impl=torch")
    ),
    *(
        Case(words or "one device", partial(measured, words), 30.0, 90.0, stage="layouts", devices=ranks_of(words))
        for words in LAYOUTS
    ),
)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=[case.name for case in CASES], metavar="NAME", help="case to run, see --list")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    parser.add_argument("--work", type=Path, default=Path("runs/bench"))
    parser.add_argument("overrides", nargs="*", help="overrides of megads train in the layouts")
    add_line_options(parser)
    arguments = parser.parse_args()
    if arguments.list or arguments.case is None:
        print("\n".join(case.name for case in CASES))
        return 0
    (case,) = [case for case in CASES if case.name == arguments.case]
    arguments.work.mkdir(parents=True, exist_ok=True)
    work = arguments.work.resolve()
    begin_s = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="case_", dir=work))
    place = Place(arguments.device == "cuda", folder, work, arguments.run, tuple(arguments.overrides))
    place.progress.end_on(signal.SIGTERM, signal.SIGABRT)
    try:
        text, good = case.judge(place)
    except NotJudged as error:
        text, good = str(error), False
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    line = {"name": case.name, "verdict": text, "good": good, "seconds": time.monotonic() - begin_s}
    appender(arguments, "gpu_runs")(line)
    print(text)
    if not good:
        print(f"NotJudged: {text}" if "ended with exit code" in text else f"AssertionError: {text}")
    return int(not good)


if __name__ == "__main__":
    raise SystemExit(main())
