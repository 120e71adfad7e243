#!/usr/bin/env python3
"""Layouts, schedules and failures over NCCL with several ranks on one GPU (cluster.ranks_per_gpu), one case a process.

    python -m scripts.bench.gpu_nccl --case "tp2" [--device cuda|cpu] [--work runs/bench]
    python -m scripts.bench.gpu_nccl --list

A case prints its verdict, which gpu.sh shows in its table: what holds, or where it differs. On a CPU the same commands
run over gloo with smaller models. NCCL reaches the ranks of one GPU through sockets, so that times mean nothing. A case
that hangs is ended by its own limit, and its launcher's by `cluster.timeout_s`. It prints what its commands do as it
happens, and on SIGTERM or SIGABRT how far they came, the ends of their logs, and their stacks (gpu_progress.py).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

from megads.runtime.metrics import read_json_lines
from scripts.bench.gpu_lines import add_line_options, appender
from scripts.bench.gpu_progress import Progress
from scripts.bench.synthetic_dataset import write
from scripts.bench.training_speed import SAME_LOSS
from tests.command import Command, StartCommand, checkpoint_of, checksums, commands_in, events_of, steps_of

VOCABULARY = 512
WAIT_S = 600.0
"""Longest wait within a case, whose own limit is shorter."""
TIMEOUT_S, COMPILING_S, BUSY_S = 45.0, 80.0, 400.0
"""Timeouts of a collective, with which a deadlock ends a run, with a message, before the case's limit: usually, while
a peer may compile kernels, and on a CPU that other work may share."""
BF16_SPLITS = 5
"""Micro-batch splits of the reference whose differences bound a layout's in bf16 (N4 of docs/numerics.md)."""


Steps = list[dict[str, Any]]
"""What a run computed, step by step."""


@dataclass(frozen=True)
class Place:
    """Where a case runs.

    Attributes:
        cuda: on the GPU, over NCCL; else on the CPU, over gloo.
        folder: folder of the case, removed at the end.
        caches: folder that cases share, for caches of compiled kernels.
        progress: prints what the commands do.
    """

    cuda: bool
    folder: Path
    caches: Path
    progress: Progress = field(default_factory=Progress)

    @property
    def device(self) -> str:
        return "cuda" if self.cuda else "cpu"

    def choose(self, on_gpu: str, on_cpu: str) -> tuple[str, ...]:
        """Overrides for the device, given as words separated by spaces."""
        return tuple((on_gpu if self.cuda else on_cpu).split())


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
    """

    name: str
    judge: Callable[[Place], tuple[str, bool]]
    expected_s: float = 30.0
    most_s: float = 75.0
    group: str = ""
    kernels: bool = False


class NotJudged(Exception):
    """A command of a case failed, or the case could not be set up."""


def ranks_of(words: str) -> int:
    """Number of ranks of a layout, from overrides such as parallel.tp=2."""
    count = 1
    for word in words.split():
        key, _, value = word.partition("=")
        if key in ("parallel.tp", "parallel.pp", "parallel.dp", "parallel.cp"):
            count *= int(value)
    return count


@contextmanager
def started(place: Place) -> Iterator[StartCommand]:
    """Yields a starter of `megads` commands in the case's folder that are watched; kills those still running."""
    with commands_in(place.folder) as megads, place.progress.of(megads) as watched:
        yield watched


def begin(megads: StartCommand, *words: str, variables: Mapping[str, str] = {}) -> Command:
    """Starts a command with this process's packages, which prints its stacks on SIGABRT."""
    ours = {"PYTHONPATH": os.environ.get("PYTHONPATH", ""), "PYTHONFAULTHANDLER": "1"}
    return megads(*words, variables=ours | dict(variables))


def finish(command: Command, what: str, codes: tuple[int, ...] = (0,)) -> tuple[int, str]:
    """Waits for a command and returns its exit code and output; the item's own limit ends a hang.

    Raises:
        NotJudged: it ended with another exit code.
    """
    ended = command.end(3600.0)
    if ended.code not in codes:
        print(ended.out[-3000:], ended.err[-6000:])
        last = (ended.err.strip() or ended.out.strip() or "no output").splitlines()[-1]
        raise NotJudged(f"{what} ended with exit code {ended.code}: {last}")
    return ended.code, ended.out


def verified(layout: str, place: Place, variables: Mapping[str, str] = {}, steps: int = 2) -> tuple[str, bool]:
    """`megads verify_layout`: loss, gradients, weights and validation against one process of plain torch on the CPU."""
    words = (
        *("verify_layout", *layout.split(), f"verify.device={place.device}", f"verify.steps={steps}", "--json"),
        *(f"cluster.ranks_per_gpu={ranks_of(layout)}", f"verify.dir={place.folder / 'verify'}"),
        # Four layers, so that each of four pipeline stages has one.
        *(f"verify.timeout_s={TIMEOUT_S if place.cuda else BUSY_S}", "ops.impl=torch", "model.num_layers=4"),
    )
    with started(place) as megads:
        code, out = finish(begin(megads, *words, variables=variables), "verify_layout", (0, 7))
    content = json.loads(out)
    checks = content["checks"]
    failed = [check for check in checks if not check["passed"]]
    if failed or code:
        worst = failed[0]["faults"][0] if failed and failed[0]["faults"] else f"exit code {code}"
        return f"DIFFERS in {len(failed)} of {len(checks)} checks: {worst}; {content['likely_cause']}", False
    bounded = [check for check in checks if check["bound"]]
    nearest = max(bounded, key=lambda check: check["found"] / check["bound"])
    said = f"nearest to its bound: {nearest['what']} in {nearest['precision']}, {nearest['found']:.1e} of "
    return f"{len(checks)} checks hold, {content['ranks']} ranks; {said}{nearest['bound']:.0e}", True


TRAINING = (
    *("train.precision=bf16", "evaluation.at_end=false", "logging.wandb.mode=disabled", "cluster.max_restarts=0"),
    *("cluster.peak_tflops=1", "schedule.warmup_samples=4", "optim.lr=1e-4"),
    "optim.min_lr=0",
    *(f"model.vocab_size={VOCABULARY}", "cluster.threads_per_rank=1"),
)
FLEX = "model.attention=flex"
"""A fixed kind of attention: runs that are compared bit for bit must not each choose by their own timings."""
MEDIUM = f"model.num_layers=8 model.hidden_size=512 model.num_heads=8 train.seq_len=512 {FLEX}"
BATCH = ("train.global_batch_size=8", "train.micro_batch_size=2")
SMALL = "model.num_layers=4 model.hidden_size=48 model.num_heads=6 train.seq_len=32"


def training(place: Place, layout: str, *words: str, timeout_s: float = TIMEOUT_S) -> tuple[str, ...]:
    """Overrides of `megads train` on data of the case; a rank may compile kernels while its peer waits."""
    prefix = place.folder / "data"
    if not prefix.with_suffix(".idx").exists():
        write(prefix, 10**6 if place.cuda else 10**5, VOCABULARY)
    shared = f"cluster.ranks_per_gpu={ranks_of(layout)}"
    limit = f"cluster.timeout_s={timeout_s if place.cuda else BUSY_S}"
    return ("train", f"data.train=[{{path: {prefix}}}]", *TRAINING, limit, shared, *layout.split(), *words)


def first_use(schedule: str, cold: bool, place: Place) -> tuple[str, bool]:
    """Trains with a schedule: cold with empty caches and lazily loaded kernels, warm with filled ones loaded eagerly.

    Kernels that are compiled or loaded at first use synchronise the device, while a peer may wait in a p2p kernel.
    FlexAttention's, by Triton, are not covered by CUDA_MODULE_LOADING.
    """
    caches = place.caches / schedule
    if cold:
        shutil.rmtree(caches, ignore_errors=True)
    variables = {
        "CUDA_MODULE_LOADING": "LAZY" if cold else "EAGER",
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
    }
    sizes = place.choose(MEDIUM, SMALL)
    words = (*sizes, *BATCH, "train.steps=3", "ops.impl=torch")
    layouts = {"": place.folder / "one", f"parallel.pp=2 parallel.schedule={schedule}": place.folder / "two"}
    with started(place) as megads:
        commands = [
            begin(
                megads,
                *training(place, layout, *words, f"run.dir={run_dir}", timeout_s=COMPILING_S),
                variables=variables,
            )
            for layout, run_dir in layouts.items()
        ]
        for command in commands:
            finish(command, "training")
    theirs, ours = (steps_of(run_dir)[0]["loss"] for run_dir in layouts.values())
    off = abs(ours / theirs - 1)
    seconds = [
        line["step_time_s"] for line in read_json_lines(place.folder / "two" / "metrics.jsonl") if "loss" in line
    ]
    said = f"{len(seconds)} steps, the first in {seconds[0]:.1f} s; first loss off by {off:.1e} of {SAME_LOSS:.0e}"
    return said, off <= SAME_LOSS


def exchanged(connections: int, place: Place) -> tuple[str, bool]:
    """Interleaved 1F1B whose messages exceed what NCCL buffers, with a number of hardware queues.

    With one queue, two sends to one peer in a row can block the receives that they depend on (docs/layouts.md).
    """
    layout = "parallel.pp=2 parallel.schedule=interleaved parallel.virtual_stages=2"
    # A message of 4 x 2,048 x 2,560 bf16 elements has 40 MiB.
    sizes = place.choose(
        "model.num_layers=4 model.hidden_size=2560 model.num_heads=20 train.seq_len=2048 train.micro_batch_size=4 "
        f"train.global_batch_size=16 {FLEX}",
        f"{SMALL} train.micro_batch_size=2 train.global_batch_size=8",
    )
    run_dir = place.folder / "run"
    words = training(place, layout, *sizes, "train.steps=3", "ops.impl=torch", f"run.dir={run_dir}")
    with started(place) as megads:
        finish(begin(megads, *words, variables={"CUDA_DEVICE_MAX_CONNECTIONS": str(connections)}), "training")
    mib = 4 * 2048 * 2560 * 2 / 2**20 if place.cuda else 2 * 32 * 48 * 2 / 2**20
    said = f"{len(steps_of(run_dir))} steps of 4 micro-batches, messages of {mib:.3g} MiB, CONNECTIONS={connections}"
    return f"{said}; this checkout's exchange, an older one is not run", True


LOG_LINE = "--- rank "


def pid_of(run_dir: Path, rank: int) -> int:
    """Process id of a rank's last start, from its log."""
    lines = (run_dir / "logs" / f"rank_{rank:05d}.log").read_text(errors="replace").splitlines()
    return int(next(line for line in reversed(lines) if line.startswith(LOG_LINE)).split("pid ")[1].split(",")[0])


def last_step(run_dir: Path) -> int:
    """Last step in a run's metrics.jsonl; 0 before the first."""
    steps = steps_of(run_dir) if (run_dir / "metrics.jsonl").exists() else []
    return int(steps[-1]["step"]) if steps else 0


def saved_and_trained(run_dir: Path, step: int) -> bool:
    """Whether a run has saved this step and trained another one."""
    return (checkpoint_of(run_dir, step) / "manifest.json").exists() and last_step(run_dir) > step


def was_restarted(run_dir: Path, times: int) -> bool:
    """Whether a run has been restarted in place so many times."""
    return len(events_of(run_dir, "restart")) == times


def attacked(place: Place, layout: str, words: tuple[str, ...], every: int, signals: tuple[int, ...]) -> str:
    """Trains a run undisturbed and, at the same time, one whose rank 1 gets a signal after each checkpoint.

    Args:
        place: where it runs.
        layout: overrides of the layout.
        words: further overrides, with train.steps.
        every: steps between checkpoints.
        signals: what rank 1 gets, one after the other.

    Returns:
        What was seen; both runs are bit-equal.

    Raises:
        NotJudged: a signal came too late, was not noticed, or the runs differ.
    """
    calm, hit = place.folder / "calm", place.folder / "hit"
    common = training(place, layout, *words, f"checkpoint.every_steps={every}")
    seen = []
    with started(place) as megads:
        first = begin(megads, *common, f"run.dir={calm}")
        survivor = (f"cluster.max_restarts={len(signals)}", "cluster.heartbeat_timeout_s=10", f"run.dir={hit}")
        second = begin(megads, *common, *survivor)
        for count, number in enumerate(signals, start=1):
            second.wait_for(partial(saved_and_trained, hit, count * every), WAIT_S)
            sent = time.monotonic()
            os.kill(pid_of(hit, 1), number)
            second.wait_for(partial(was_restarted, hit, count), WAIT_S)
            seen.append(f"{signal.Signals(number).name} noticed in {time.monotonic() - sent:.0f} s")
        finish(first, "the undisturbed run")
        finish(second, "the attacked run")
    theirs, ours = steps_of(calm), steps_of(hit)
    if ours != theirs:
        step = next((a["step"] for a, b in zip(ours, theirs, strict=False) if a != b), min(len(ours), len(theirs)))
        raise NotJudged(f"NOT EQUAL from step {step}: {len(ours)} and {len(theirs)} steps")
    last = theirs[-1]["step"]
    if checksums(checkpoint_of(hit, last)) != checksums(checkpoint_of(calm, last)):
        raise NotJudged("NOT EQUAL: the same losses, other tensors in the last checkpoint")
    return f"{', '.join(seen)}; restarted {len(signals)} x; {last} steps and all tensors bit-equal"


def survived(place: Place) -> tuple[str, bool]:
    """SIGKILL, then SIGSTOP of a rank of two: noticed, restarted from the checkpoint, bit-equal at the end."""
    sizes = place.choose(f"{MEDIUM} train.steps=60", f"{SMALL} train.steps=90")
    every = 20 if place.cuda else 30
    return attacked(
        place, "parallel.dp=2", (*sizes, *BATCH, "ops.impl=torch"), every, (signal.SIGKILL, signal.SIGSTOP)
    ), True


LARGE = "parallel.tp=2 parallel.pp=2"
LARGE_SIZES = (
    f"model=gpt3_350m train.seq_len=512 train.global_batch_size=16 {FLEX}",
    f"{SMALL} train.global_batch_size=16",
)


def compared_in_fp32(place: Place) -> tuple[str, bool]:
    """GPT-3 350M on four ranks for 20 steps against one process: N3's bounds on losses and gradient norms."""
    sizes = (*place.choose(*LARGE_SIZES), "train.steps=20", "train.precision=fp32", "train.micro_batch_size=8")
    runs = {"": place.folder / "one", LARGE: place.folder / "four"}
    with started(place) as megads:
        commands = [
            begin(megads, *training(place, layout, *sizes, "ops.impl=torch", f"run.dir={run_dir}"))
            for layout, run_dir in runs.items()
        ]
        for command in commands:
            finish(command, "training")
    return within_n3(*map(steps_of, runs.values()))


def within_n3(one: Steps, several: Steps) -> tuple[str, bool]:
    """Whether losses and gradient norms of a layout are within N3's bounds of one process's, on the same samples."""
    bounds = {"loss": (1e-6, 1e-5), "grad_norm": (1e-5, 1e-4)}
    if [line["batch_hash"] for line in one] != [line["batch_hash"] for line in several]:
        return "NOT THE SAME SAMPLES", False
    worst = {
        key: [abs(ours[key] / theirs[key] - 1) for ours, theirs in zip(several, one, strict=True)] for key in bounds
    }
    holds = all(worst[key][0] <= first and max(worst[key]) <= later for key, (first, later) in bounds.items())
    said = ", ".join(f"{key} {off[0]:.1e} in step 1, {max(off):.1e} in {len(off)}" for key, off in worst.items())
    return f"{'N3 holds' if holds else 'EXCEEDS N3'}: {said}; weights are not compared", holds


def compared_in_bf16(place: Place) -> tuple[str, bool]:
    """The same in bf16: the layout differs from the mean of one process's micro-batch splits by at most N4's bound."""
    sizes = (*place.choose(*LARGE_SIZES), "train.steps=20", "ops.impl=torch")
    wanted = [("", 2**power) for power in range(BF16_SPLITS)] + [(LARGE, 8)]
    folders = [place.folder / f"run_{number}" for number in range(len(wanted))]
    at_once = len(wanted) if place.cuda else 2
    with started(place) as megads:
        for begin_at in range(0, len(wanted), at_once):
            some = list(zip(wanted, folders, strict=True))[begin_at : begin_at + at_once]
            commands = [
                begin(
                    megads,
                    *training(place, layout, *sizes, f"train.micro_batch_size={micro}", f"run.dir={run_dir}"),
                )
                for (layout, micro), run_dir in some
            ]
            for command in commands:
                finish(command, "training")
    *splits, found = ([line["loss"] for line in steps_of(folder)] for folder in folders)
    return within_n4(splits, found)


def within_n4(splits: Sequence[Sequence[float]], found: Sequence[float]) -> tuple[str, bool]:
    """Whether a layout's losses are within N4's bound of the mean of one process's micro-batch splits.

    Their forward passes hardly differ at first, unlike those of N4's test, which also reorders the features. The bound
    is therefore never below that of the first loss.
    """
    spread = worst = 0.0
    for losses, ours in zip(zip(*splits, strict=True), found, strict=True):
        spread = max(spread, *(abs(a - b) for a, b in combinations(losses, 2)))
        mean = sum(losses) / len(losses)
        worst = max(worst, abs(ours - mean) / max(3 * spread, SAME_LOSS * mean))
    said = f"at most {worst:.2f} of the bound, {SAME_LOSS:.0e} or three times the spread of {len(splits)} splits"
    return f"{'N4 holds' if worst <= 1 else 'EXCEEDS N4'} in {len(found)} steps: {said}", worst <= 1


def resumed_and_waits(place: Place) -> tuple[str, bool]:
    """The same killed once: bit-equal (N5). Both runs count where the host waits for the GPU."""
    sizes = (
        *place.choose(*LARGE_SIZES),
        *("train.steps=12", "train.micro_batch_size=8", "ops.impl=torch"),
        *("plugins=[scripts.bench.host_waits]", "hooks.host_waits.after=2"),
    )
    said = attacked(place, LARGE, sizes if place.cuda else (*sizes, "train.steps=40"), 5 if place.cuda else 15,
                    (signal.SIGKILL,))  # fmt: skip
    waits = [json.loads(path.read_text()) for path in sorted((place.folder / "calm").glob("host_waits_*.json"))]
    if len(waits) != ranks_of(LARGE):
        raise NotJudged(f"{len(waits)} of {ranks_of(LARGE)} ranks counted waits of the host")
    most = max(waits, key=lambda found: sum(found.values()))
    where = ", ".join(f"{place_} {count:g}" for place_, count in sorted(most.items())) or "none"
    return f"{said}; host waits in a step: {where}", True


def replayed(place: Place) -> tuple[str, bool]:
    """CUDA graphs with megads' kernels, dropout, documents and recomputation: the same digits as without graphs."""
    sizes = place.choose(
        "model.num_layers=8 model.hidden_size=512 model.num_heads=8 train.seq_len=1024 train.global_batch_size=16 "
        "train.micro_batch_size=4 model.attention=fused_softmax",
        f"{SMALL} train.global_batch_size=8 train.micro_batch_size=2",
    )
    words = (
        *sizes,
        *("train.steps=10", "ops.impl=fused", "parallel.recompute=full", "data.document_mask=true"),
        *("data.reset_positions=true", "model.hidden_dropout=0.1", "model.attention_dropout=0.1"),
    )
    runs = {"without": place.folder / "without", "with": place.folder / "with"}
    with started(place) as megads:
        commands = {
            name: begin(
                megads,
                *training(place, "", *words, f"run.dir={run_dir}"),
                *(["ops.cuda_graphs=true"] if name == "with" and place.cuda else []),
            )
            for name, run_dir in runs.items()
        }
        for name, command in commands.items():
            finish(command, f"the run {name} graphs")
    without, with_graphs = (steps_of(run_dir) for run_dir in runs.values())
    if without != with_graphs:
        step = next(a["step"] for a, b in zip(without, with_graphs, strict=False) if a != b)
        return f"NOT EQUAL from step {step}", False
    return f"{len(without)} steps bit-equal{'' if place.cuda else ', both without graphs on a CPU'}", True


def tested_attention(_place: Place) -> tuple[str, bool]:
    """The tests of attention in fp32, of which four failed on an H200; each is printed as it ends."""
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "tests/model/test_attention_gpu.py"]
    root = Path(__file__).parents[2]
    last = "no output"
    tests = subprocess.Popen([*command, "-k", "float32"], cwd=root, stdout=subprocess.PIPE, text=True)
    try:
        assert tests.stdout is not None
        for line in tests.stdout:
            print(line, end="", flush=True)
            last = line.strip("= \n") or last
        return last, tests.wait() == 0
    finally:
        tests.kill()


def layout(name: str, words: str, group: str, expected_s: float = 55.0) -> Case:
    """A case that verifies a layout."""
    return Case(name, partial(verified, words), expected_s, 120.0, group=group)


CHUNKED = "parallel.tp=2 parallel.sequence_parallel=true parallel.tp_chunks=2"
# expected_s is from one NVIDIA H200, imports included: 39 to 60 s for a layout beside three others, 44 to 63 s for two
# trainings at once. Cases that have not finished there go first, after a check that anything works at all: 32
# connections (stopped after 30 s), SIGKILL (110 s), 350M in fp32 (120 s), and two that were not started. Of the last
# four expected_s is an estimate.
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
    layout("tp2 pp2 dp2", "parallel.tp=2 parallel.pp=2 parallel.dp=2", "", 60.0),
    # Loading all kernels eagerly takes longer than compiling those of FlexAttention.
    Case("zb_v, warm", partial(first_use, "zb_v", False), 65.0, 120.0, group="warm"),
    Case("dualpipe_v, warm", partial(first_use, "dualpipe_v", False), 65.0, 120.0, group="warm"),
    Case("CUDA graphs, dropout, documents, recompute", replayed, 45.0, 110.0, group="kernels", kernels=True),
    Case("attention in fp32, tests", tested_attention, 110.0, 200.0, group="kernels"),
)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=[case.name for case in CASES], metavar="NAME", help="case to run, see --list")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    parser.add_argument("--work", type=Path, default=Path("runs/bench"))
    add_line_options(parser)
    arguments = parser.parse_args()
    if arguments.list or arguments.case is None:
        print("\n".join(case.name for case in CASES))
        return 0
    (case,) = [case for case in CASES if case.name == arguments.case]
    arguments.work.mkdir(parents=True, exist_ok=True)
    work = arguments.work.resolve()
    begin_s = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="nccl_", dir=work))
    place = Place(arguments.device == "cuda", folder, work / "nccl_caches")
    place.progress.end_on(signal.SIGTERM, signal.SIGABRT)
    try:
        text, good = case.judge(place)
    except NotJudged as error:
        text, good = str(error), False
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    line = {"name": case.name, "verdict": text, "good": good, "seconds": time.monotonic() - begin_s}
    appender(arguments, "gpu_nccl")(line)
    print(text)
    if not good:
        print(f"NotJudged: {text}" if "ended with exit code" in text else f"AssertionError: {text}")
    return int(not good)


if __name__ == "__main__":
    raise SystemExit(main())
