"""Judges of scripts.bench.gpu_runs: each runs `megads` commands, and says what holds, or where it differs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

from megads.runtime.metrics import read_json_lines
from megads.runtime.run_dir import METRICS_FILE
from scripts.bench.gpu_progress import Progress
from scripts.bench.synthetic_dataset import write
from tests.command import Command, StartCommand, checkpoint_of, checksums, commands_in, events_of, steps_of

VOCABULARY = 512
WAIT_S = 600.0
"""Longest wait within a case, whose own limit is shorter."""
TIMEOUT_S, COMPILING_S, BUSY_S = 45.0, 80.0, 400.0
"""Timeouts of a collective, with which a deadlock ends a run, with a message, before the case's limit: usually, while
a peer may compile kernels, and on a CPU that other work may share."""
SAME_LOSS = 2e-4
"""Relative bound on the first loss of two layouts in bf16: N4 of docs/numerics.md."""
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
        shared: folder that cases share: caches of compiled kernels, data.
        run: name of the run of gpu.sh.
        overrides: overrides of `megads train` in the layouts.
        progress: prints what the commands do.
    """

    cuda: bool
    folder: Path
    shared: Path
    run: str = ""
    overrides: tuple[str, ...] = ()
    progress: Progress = field(default_factory=Progress)

    @property
    def device(self) -> str:
        return "cuda" if self.cuda else "cpu"

    def choose(self, on_gpu: str, on_cpu: str) -> tuple[str, ...]:
        """Overrides for the device, given as words separated by spaces."""
        return tuple((on_gpu if self.cuda else on_cpu).split())


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
    caches = place.shared / "nccl_caches" / schedule
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
    return f"{', '.join(seen)}; restarted {len(signals)} x; {bit_equal(calm, hit)}"


def bit_equal(calm: Path, hit: Path) -> str:
    """Says that two runs are bit-equal.

    Raises:
        NotJudged: they are not.
    """
    theirs, ours = steps_of(calm), steps_of(hit)
    if ours != theirs:
        step = next((a["step"] for a, b in zip(ours, theirs, strict=False) if a != b), min(len(ours), len(theirs)))
        raise NotJudged(f"NOT EQUAL from step {step}: {len(ours)} and {len(theirs)} steps")
    last = theirs[-1]["step"]
    if checksums(checkpoint_of(hit, last)) != checksums(checkpoint_of(calm, last)):
        raise NotJudged("NOT EQUAL: the same losses, other tensors in the last checkpoint")
    return f"{last} steps and all tensors bit-equal"


def resumed(words: str, place: Place) -> tuple[str, bool]:
    """A run with dropout, killed with its launcher after a checkpoint and started again: bit-equal (N5)."""
    every, killed_after, steps = (20, 23, 60) if place.cuda else (10, 13, 30)
    sizes = place.choose(
        "model.num_layers=8 model.hidden_size=512 model.num_heads=8 model.vocab_size=50304 train.seq_len=1024 "
        "train.global_batch_size=16 train.micro_batch_size=4",
        f"{SMALL} train.global_batch_size=4 train.micro_batch_size=2",
    )
    dropout = ("model.hidden_dropout=0.1", "model.attention_dropout=0.1", "run.check_memory=false")
    wanted = (*sizes, *dropout, *words.split(), f"train.steps={steps}", f"checkpoint.every_steps={every}")
    common, calm, hit = training(place, "", *wanted), place.folder / "calm", place.folder / "hit"
    with started(place) as megads:
        first = begin(megads, *common, f"run.dir={calm}")
        # The second start uses what the first one has measured: both must choose the same operators.
        first.wait_for(lambda: last_step(calm) > 0, WAIT_S)
        second = begin(megads, *common, f"run.dir={hit}")
        second.wait_for(lambda: last_step(hit) >= killed_after and saved_and_trained(hit, every), WAIT_S)
        second.kill_everything()
        killed = last_step(hit)
        again = begin(megads, *common, f"run.dir={hit}")
        finish(first, "the undisturbed run")
        finish(again, "the resumed run")
    starts = [event["step"] for event in events_of(hit, "resume")]
    if len(starts) != 1 or killed == steps:
        raise NotJudged(f"resumed {len(starts)} times instead of once, killed after step {killed} of {steps}")
    return f"{bit_equal(calm, hit)}; killed after {killed}, resumed from {starts[0]}", True


SPEED = (
    "train.precision=bf16", "evaluation.at_end=false", "checkpoint.load=none", "logging.every_steps=5",
    "optim.lr=6e-4",
)  # fmt: skip
ON_GPU = (
    "model=gpt3_125m train.steps=40 train.seq_len=2048 train.global_batch_size=64 train.micro_batch_size=8 "
    "schedule.warmup_samples=640"
)
ON_CPU = (
    f"{SMALL} model.vocab_size={VOCABULARY} train.steps=4 train.global_batch_size=8 train.micro_batch_size=2 "
    "cluster.peak_tflops=1 cluster.threads_per_rank=1 schedule.warmup_samples=4"
)


def measured(layout: str, place: Place) -> tuple[str, bool]:
    """Speed and memory of `megads train`; the first layout's first loss is the reference of the others'."""
    prefix = place.shared / ("synthetic" if place.cuda else "synthetic_small")
    if not prefix.with_suffix(".idx").exists():
        write(prefix, 8 * 10**6 if place.cuda else 10**5, 50257 if place.cuda else VOCABULARY)
    run_dir, data = place.folder / "run", f"data.train=[{{path: {prefix}}}]"
    words = (*place.choose(ON_GPU, ON_CPU), *SPEED, data, *place.overrides, *layout.split(), f"run.dir={run_dir}")
    with started(place) as megads:
        finish(begin(megads, "train", *words), "training")
    reference = place.shared / f"first_loss_{place.run}.json"
    expected = json.loads(reference.read_text()) if layout and reference.exists() else None
    if not layout:
        reference.write_text(json.dumps(steps_of(run_dir)[0]["loss"]))
    return speed(run_dir, 10 if place.cuda else 1, expected)


def speed(run_dir: Path, skip: int, first_loss: float | None) -> tuple[str, bool]:
    """Medians of a run's steps after the first `skip`, and whether its first loss is the expected one, if any."""
    steps = [line for line in read_json_lines(run_dir / METRICS_FILE) if "tokens_per_s" in line]
    middle = {key: median(step[key] for step in steps[skip:]) for key in ("step_time_s", "tokens_per_s", "mfu")}
    memory = max(step["peak_memory_bytes"] for step in steps) / 2**30
    said = f"{len(steps) - skip} steps, {middle['step_time_s'] * 1e3:.0f} ms, {middle['tokens_per_s']:,.0f} tokens/s, "
    said += f"MFU {middle['mfu']:.1%}, {memory:.1f} GiB"
    if first_loss is None:
        return said, True
    off = abs(steps[0]["loss"] / first_loss - 1)
    return f"{said}, first loss off by {off:.1e}{'' if off <= SAME_LOSS else ': NOT THE SAME'}", off <= SAME_LOSS


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
                begin(megads, *training(place, layout, *sizes, f"train.micro_batch_size={micro}", f"run.dir={run_dir}"))
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
