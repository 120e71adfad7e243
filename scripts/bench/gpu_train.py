#!/usr/bin/env python3
"""Training steps of one size by one side, in a process of its own: its memory and its failures are its alone.

    python -m scripts.bench.gpu_train --size 1.3b --side fused [--device cuda] [--append bench.jsonl]

BLOOM-like models (ALiBi, embedding norm, tied embeddings, V 50,304, S 2,048) in bf16 with fp32 masters and moments:
megads' engine with ops.impl=fused, torch, apex, and with ops.compile, and Hugging Face's BloomForCausalLM, eager and
compiled, under autocast with torch's fused AdamW, which keeps weights and moments in fp32. All begin with the same
weights and see the same tokens. megads' attention is the quickest that gpu_attention found in the same run of gpu.sh,
else what model.attention=auto chooses. Its micro-batch is the largest that the memory plan says fits, recomputing only
where none else does; Hugging Face's follows from a rough count of its explicit attention. Where memory runs out all the
same, half of it is tried.

A step is timed by the device's events, waiting for the device before and after; median. MFU is model FLOPs
(megads.plan.flops: 6 a matrix weight and token, 12 L h S for attention, nothing for recomputation) over the data
sheet's dense bf16 peak (megads.plan.peak).
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace

import torch

from megads.model.attention_kinds import AttentionKind
from megads.parallel.config import ParallelConfig, Recompute
from megads.plan.memory import Workload, memory_plan
from megads.plan.parameters import parameter_count
from megads.plan.peak import device_peak_tflops
from megads.plan.throughput import throughput
from megads.runtime.environment import available_cores, exported
from megads.runtime.machine_memory import GPU_PROCESS_BYTES
from scripts.bench.device_clock import step_seconds
from scripts.bench.gpu_lines import Line, add_line_options, appender, lines_of_runs
from scripts.bench.processes import ONE_RANK, Turn, UnavailableError, peak_resident_bytes
from scripts.bench.training_sides import TrainingWork, hugging_face_side, megads_side

VOCABULARY, SEQ_LEN = 50304, 2048
LEARNING_RATE = 1e-4
"""Without a warm-up; at larger ones rounding alone soon tells trainings of such models apart."""
SIZES = {
    "125m": {"layers": 12, "hidden": 768, "heads": 12, "batch": 32},
    "350m": {"layers": 24, "hidden": 1024, "heads": 16, "batch": 32},
    "760m": {"layers": 24, "hidden": 1536, "heads": 16, "batch": 16},
    "1.3b": {"layers": 24, "hidden": 2048, "heads": 16, "batch": 16},
}
"""GPT-3's (Brown et al. 2020, table 2.1); samples a step as many as make a step of about a second."""
SMALL = TrainingWork(2, 48, 6, 512, batch=4, seq_len=32, precision="bf16", device="cpu", micro_batch=2)
"""Does it run? Any size stands for it on a CPU."""
SIDES: dict[str, Callable[[TrainingWork], Turn]] = {
    "fused": lambda work: megads_side(work, "fused"),
    "torch": lambda work: megads_side(work, "torch"),
    "fused_compiled": lambda work: megads_side(work, "fused", "blocks"),
    "fused_graphs": lambda work: megads_side(work, "fused", "graphs"),
    "apex": lambda work: megads_side(work, "apex"),
    "hf": lambda work: hugging_face_side(work, compiled=False, autocast=True),
    "hf_compiled": lambda work: hugging_face_side(work, compiled=True, autocast=True),
}
OF_KERNELS = {AttentionKind.fused.value, AttentionKind.fused_softmax.value}
"""Kinds of attention that need megads' own kernels."""
WARM_UP = 3
ROUNDS, FEWEST_ROUNDS, TIMED_S = 10, 3, 12.0
"""Timed steps, and after how many seconds of them no further one begins, but for the fewest."""
SPARE = 0.95
"""Of the free memory what a plan may fill: the allocator leaves holes."""
LARGEST_MICRO_BATCH = 16
_SCORES_BYTES = 10
"""Of an element of the attention scores, of all that Hugging Face's layers keep of them: a rough figure from its code
(bf16 and fp32 scores, fp32 probabilities), not measured."""


@dataclass(frozen=True)
class Fit:
    """How a size is trained in the memory at hand.

    Attributes:
        micro_batch: samples in one forward pass.
        recompute: none, selective or full.
        planned_bytes: what the plan says that it takes.
    """

    micro_batch: int
    recompute: str
    planned_bytes: int


def fit_of(work: TrainingWork, fused: bool, free_bytes: int) -> Fit:
    """The largest micro-batch whose plan fits, with as little recomputation as any fits; else the smallest of all."""
    found = None
    for recompute in (Recompute.none, Recompute.selective, Recompute.full):
        for micro_batch in halves(min(work.batch, LARGEST_MICRO_BATCH)):
            workload = Workload(
                seq_len=work.seq_len, micro_batch_size=micro_batch, micro_batches=work.batch // micro_batch,
                weight_bytes=work.dtype.itemsize, cuda=work.device == "cuda", fused=fused,
            )  # fmt: skip
            plan = memory_plan(work.model, ParallelConfig(recompute=recompute), workload)
            found = Fit(micro_batch, recompute.value, plan.largest.peak)
            if found.planned_bytes + GPU_PROCESS_BYTES <= SPARE * free_bytes:
                return found
    assert found is not None
    return found


def hugging_face_fit(work: TrainingWork, free_bytes: int) -> Fit:
    """The same for a model that has all attention scores in memory and fp32 logits; weights and moments are fp32."""
    tokens_bytes = work.layers * (_SCORES_BYTES * work.heads * work.seq_len + 34 * work.hidden)
    tokens_bytes += 12 * work.vocabulary  # logits, their fp32 copy and its gradient, in part at the same time
    for micro_batch in halves(min(work.batch, LARGEST_MICRO_BATCH)):
        planned = 16 * parameter_count(work.model) + micro_batch * work.seq_len * tokens_bytes
        if planned <= SPARE * free_bytes:
            break
    return Fit(micro_batch, Recompute.none.value, planned)


def halves(number: int) -> Iterator[int]:
    """The number, half of it, and so on to 1."""
    while number:
        yield number
        number //= 2


def quickest_attention(lines: Iterable[Line], kernels: bool) -> str:
    """The quickest kind of attention among results of gpu_attention that gives the same bits again; auto, which tries
    them on the size's own shapes, where there are none.

    Args:
        lines: of any benchmark.
        kernels: megads' own are there.
    """
    done = [line for line in lines if line["bench"] == "gpu_attention" and line["outcome"] == "done"]
    kinds = {kind.value for kind in AttentionKind} - (set() if kernels else OF_KERNELS)
    able = [line for line in done if line["kind"] in kinds and line["repeats"]]
    return str(min(able, key=lambda line: line["us"])["kind"]) if able else AttentionKind.auto.value


def work_of(size: str, side: str, device: str, attention: str) -> tuple[TrainingWork, Fit]:
    """What is trained, with the micro-batch that fits the device's free memory."""
    if device == "cpu":
        fit = fit_of(SMALL, side.startswith("fused"), 2**33)
        return replace(SMALL, attention=attention), replace(fit, micro_batch=2)
    work = TrainingWork(**SIZES[size], vocabulary=VOCABULARY, seq_len=SEQ_LEN, precision="bf16", device=device,
                        lr=LEARNING_RATE, attention=attention)  # fmt: skip
    free_bytes, _ = torch.cuda.mem_get_info()
    hugging_face = side.startswith("hf")
    fit = hugging_face_fit(work, free_bytes) if hugging_face else fit_of(work, side.startswith("fused"), free_bytes)
    return replace(work, micro_batch=fit.micro_batch, recompute=fit.recompute), fit


def warm_turn(work: TrainingWork, side: str) -> tuple[TrainingWork, Turn, list[dict[str, float]]]:
    """Builds a side and warms it up; with half the micro-batch where memory runs out.

    Returns:
        What is trained, its turn, and what the first steps found.

    Raises:
        torch.OutOfMemoryError: a single sample does not fit.
    """
    while True:
        try:
            turn = SIDES[side](work)
            return work, turn, [turn() for _ in range(WARM_UP)]
        except torch.OutOfMemoryError:
            if work.micro_batch_size == 1:
                raise
        # Outside of the except block, whose traceback holds on to all tensors.
        turn = None  # type: ignore[assignment]
        print(f"micro-batch {work.micro_batch_size}: out of memory", flush=True)
        work = replace(work, micro_batch=work.micro_batch_size // 2)
        gc.unfreeze()  # the engine froze what it found, itself from a failed try included
        gc.collect()
        torch.cuda.empty_cache()


def timed(turn: Turn, device: str) -> tuple[list[float], list[dict[str, float]]]:
    """Seconds of every timed step, and what it found."""
    seconds: list[float] = []
    found: list[dict[str, float]] = []
    begin = time.perf_counter()
    while len(seconds) < FEWEST_ROUNDS or (len(seconds) < ROUNDS and time.perf_counter() - begin < TIMED_S):
        seconds.append(step_seconds(lambda: found.append(turn()), device))
    return seconds, found


def measured(size: str, side: str, device: str, attention: str) -> Line:
    """The line of one size and side."""
    cuda = device == "cuda"
    work, fit = work_of(size, side, device, attention)
    about: Line = {"size": size, "side": side, "parameters": parameter_count(work.model)}
    try:
        work, turn, first = warm_turn(work, side)
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        seconds, found = timed(turn, device)
    except UnavailableError as reason:
        return about | {"outcome": "not run", "reason": str(reason)}
    except torch.OutOfMemoryError as error:
        planned = f"planned {fit.planned_bytes / 2**30:.1f} GiB"
        return about | {"outcome": "out of memory", "reason": f"{planned}; {str(error).splitlines()[0]}"}
    step_s = statistics.median(seconds)
    peak = device_peak_tflops(torch.device(device), torch.bfloat16, available_cores())
    speed = throughput(work.tokens, step_s, 1, work.flops / work.tokens, peak)
    steps = [*first, *found]
    return about | asdict(work) | asdict(speed) | {
        "outcome": "done", "step_s": step_s, "seconds": seconds, "flops_per_step": work.flops, "peak_tflops": peak,
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if cuda else peak_resident_bytes(),
        "planned_bytes": fit.planned_bytes,
        "losses": [step["loss"] for step in steps], "grad_norms": [step["grad_norm"] for step in steps],
    }  # fmt: skip


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, required=True)
    parser.add_argument("--side", choices=SIDES, required=True)
    add_line_options(parser)
    arguments = parser.parse_args()
    attention = AttentionKind.auto.value
    if arguments.run and not arguments.side.startswith("hf"):
        earlier = [line for line in lines_of_runs(arguments.append) if line["run"] == arguments.run]
        attention = quickest_attention(earlier, arguments.side.startswith("fused"))
    with exported(ONE_RANK):
        line = measured(arguments.size, arguments.side, arguments.device, attention)
    appender(arguments, "gpu_train")(line)
    if line["outcome"] != "done":
        print(f"{line['outcome']}: {line['reason']}")
        return int(line["outcome"] == "out of memory")
    print(f"{line['step_s'] * 1e3:.1f} ms a step, {line['tokens_per_s']:,.0f} tokens/s, MFU {line['mfu']:.1%}, "
          f"{line['peak_memory_bytes'] / 2**30:.1f} GiB, micro-batch {line['micro_batch']}")  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
