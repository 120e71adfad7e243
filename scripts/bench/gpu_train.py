#!/usr/bin/env python3
"""Training steps of one model size by one side, in a separate process, so that its memory and failures affect no other.

    python -m scripts.bench.gpu_train --size 1.3b --side fused [--device cuda] [--append bench.jsonl]

Models: GPT-2 124M (V 50,304, S 1,024), llm-foundry's 1.3B (learned positions, V 50,368, S 2,048), Llama-3-8B (S 4,096,
every block recomputed), BLOOM-1B1 (V 250,880), Llama-3.2-1B (S 2,048, V 128,256), GPT-3 350M in micro-batches of one
sample, and four layers of Qwen3-30B-A3B (V 32,768; 2.6 billion parameters, without balance losses) with a dense model
of equal active size, in bf16 with fp32 master weights, moments and gradients: 18 bytes per parameter, so that 8.03
billion take 134.6 of the 139 GiB of an H200, and quantized weights of train.fp8 have no room. Sides: megads' engine
with ops.impl=fused, torch, apex, with ops.compile, ops.cuda_graphs, train.fp8, train.deterministic=false, and with the
experts' GEMMs in a loop instead of one kernel; Hugging Face's BLOOM and Qwen3-MoE, eager and compiled; torchtitan's
Llama and Qwen3-MoE with compiled blocks; a GPT in plain PyTorch, compiled whole. All peers run under autocast with
torch's fused AdamW, which keeps weights and moments in fp32. All sides of a size start with the same weights and see
the same tokens.

megads uses the attention that model.attention=auto chooses. Its micro-batch is the largest that fits according to the
memory plan, with recomputation only if none fits without; the peers' follows from a rough estimate of their activation
memory. If memory still runs out, half the micro-batch is tried.

A step is timed with device events, synchronizing before and after; median. MFU is model FLOPs (megads.model.model_size:
6 per weight of a matrix and token, 12 L h S for attention, nothing for recomputation) over the dense bf16 peak of the
data sheet (megads.model.peak).
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from megads.engine.micro_batch_graphs import EAGER_STEPS
from megads.model.config import ModelConfig
from megads.model.model_size import parameter_count
from megads.model.moe_config import MoEConfig
from megads.model.peak import device_peak_tflops
from megads.monitor.hooks import throughput
from megads.ops.config import Float8Recipe, KernelOp
from megads.parallel.config import Offload, ParallelConfig, Recompute
from megads.runtime.environment import available_cores, child_environment
from megads.tools.plan.memory import memory_plan
from megads.tools.plan.workload import Workload
from scripts.bench.device_clock import step_seconds
from scripts.bench.gpu_table import PEERS, Line, add_line_options, appender
from scripts.bench.plain_gpt import plain_side
from scripts.bench.processes import ONE_RANK, Turn, UnavailableError, peak_resident_bytes
from scripts.bench.torchtitan_side import torchtitan_side
from scripts.bench.training_sides import TrainingWork, float8_of, hugging_face_side, megads_side

LEARNING_RATE = 1e-4
"""No warmup; at larger learning rates rounding alone soon makes runs of such models diverge from each other."""


@dataclass(frozen=True)
class Size:
    """A model to train.

    Attributes:
        preset: option of conf/model.
        batch: samples per step, enough for a step of a second or more.
        seq_len: tokens per sample.
        vocabulary: overrides the preset's.
        layers: overrides the preset's.
        hidden: overrides the preset's, with `ffn`.
        ffn: overrides the preset's.
        recompute: parallel.recompute; None: as little as fits.
        micro_batch: samples per forward pass; None: as many as fit.
        loss_chunk: ops.loss_chunk.
        dense: replace experts by an MLP as wide as those that a token uses.
    """

    preset: str
    batch: int
    seq_len: int = 2048
    vocabulary: int | None = None
    layers: int | None = None
    hidden: int | None = None
    ffn: int | None = None
    recompute: str | None = None
    micro_batch: int | None = None
    loss_chunk: int | None = None
    dense: bool = False

    @property
    def model(self) -> ModelConfig:
        """Model shape."""
        preset = OmegaConf.merge(
            OmegaConf.structured(ModelConfig), OmegaConf.load(PRESETS / f"{self.preset}.yaml").model
        )
        changes: dict[str, Any] = {
            "vocab_size": self.vocabulary, "num_layers": self.layers, "hidden_size": self.hidden, "ffn_size": self.ffn,
        }  # fmt: skip
        found = OmegaConf.to_object(preset)
        assert isinstance(found, ModelConfig)
        # Peers have other balance losses.
        found = replace(found, moe=replace(found.moe, global_loss=0.0))
        if self.dense:
            found = replace(found, ffn_size=found.moe.top_k * found.expert_width, moe=MoEConfig())
        return replace(found, **{name: value for name, value in changes.items() if value is not None})

    def work(self, device: str) -> TrainingWork:
        """What every side trains."""
        model = self.model
        return TrainingWork(
            model.num_layers, model.hidden_size, model.num_heads, model.vocabulary, self.batch, self.seq_len, "bf16",
            device, self.micro_batch, self.recompute or "none", LEARNING_RATE, loss_chunk=self.loss_chunk, shape=model,
        )  # fmt: skip


PRESETS = Path(__file__).parents[2] / "conf/model"
SIZES = {
    "124m": Size("gpt3_125m", batch=64, seq_len=1024, vocabulary=50304),
    "1.3b": Size("gpt3_1b3", batch=32, vocabulary=50368),
    "8b": Size("llama3_8b", batch=8, seq_len=4096, recompute="full", micro_batch=1, loss_chunk=512),
    "bloom_1b1": Size("bloom_1b1", batch=16),
    "llama_1b": Size("llama3_8b", batch=16, layers=16, hidden=2048, ffn=8192),
    "350m": Size("gpt3_350m", batch=8, micro_batch=1),
    "qwen3_moe": Size("qwen3_30b_a3b", batch=16, layers=4, vocabulary=32768),
    "long": Size("llama3_8b", batch=2, seq_len=65536, layers=8, vocabulary=32768, micro_batch=1, loss_chunk=4096),
    "long_recomputed": Size(
        "llama3_8b",
        batch=2,
        seq_len=65536,
        layers=8,
        vocabulary=32768,
        recompute="full",
        micro_batch=1,
        loss_chunk=4096,
    ),
    "qwen3_dense": Size("qwen3_30b_a3b", batch=16, layers=4, vocabulary=32768, dense=True),
}
SMALL: dict[str, Any] = {"layers": 2, "hidden": 48, "heads": 6, "vocabulary": 512, "batch": 4, "seq_len": 32}
"""Smoke test on a CPU, with the positions, norms and MLP of the size."""
FP8 = {"fused_fp8": Float8Recipe.tensorwise, "fused_fp8_rows": Float8Recipe.rowwise}
"""Recipe of the sides that multiply in FP8."""
SIDES: dict[str, Callable[[TrainingWork], Turn]] = {
    "fused": lambda work: megads_side(work, "fused"),
    "fused_free": lambda work: megads_side(work, "fused", deterministic=False),
    "fused_loop": lambda work: megads_side(work, "fused", left_to_torch=frozenset({KernelOp.grouped_linear})),
    "torch": lambda work: megads_side(work, "torch"),
    "fused_compiled": lambda work: megads_side(work, "fused", "blocks"),
    "fused_graphs": lambda work: megads_side(work, "fused", cuda_graphs=True),
    "fused_graphs_auto": lambda work: megads_side(work, "fused", cuda_graphs="auto"),
    "fused_fp8": lambda work: megads_side(work, "fused", fp8=FP8["fused_fp8"]),
    "fused_fp8_rows": lambda work: megads_side(work, "fused", fp8=FP8["fused_fp8_rows"]),
    "fused_offload": lambda work: megads_side(work, "fused", offload=True),
    "fused_offload_chunks": lambda work: megads_side(work, "fused", offload=True, mlp_chunk=8192),
    "apex": lambda work: megads_side(work, "apex"),
    "hf": lambda work: hugging_face_side(work, compiled=False, autocast=True),
    "hf_compiled": lambda work: hugging_face_side(work, compiled=True, autocast=True),
    "plain": lambda work: plain_side(work, compiled=work.device == "cuda"),
    "torchtitan": lambda work: torchtitan_side(work, compiled=work.device == "cuda"),
}
WARM_UP = EAGER_STEPS + 1
ROUNDS, FEWEST_ROUNDS, TIMED_S = 10, 3, 8.0
"""Timed steps, their minimum number, and seconds after which no step beyond the minimum starts."""
SPARE = 0.95
"""Share of the free memory that a plan may use, because the allocator fragments."""
LARGEST_MICRO_BATCH = 16


@dataclass(frozen=True)
class Fit:
    """How a size is trained in the available memory.

    Attributes:
        micro_batch: samples per forward pass.
        recompute: none, selective or full.
        planned_bytes: planned memory.
    """

    micro_batch: int
    recompute: str
    planned_bytes: int


def fit_of(
    work: TrainingWork, side: str, free_bytes: int, *, fixed: bool = False, fp8: Float8Recipe = Float8Recipe.none
) -> Fit:
    """Returns the largest micro-batch whose plan fits, with the least recomputation that fits; else the smallest plan.

    Args:
        work: what is trained.
        side: name of the side, which says whether megads' kernels are used and what is offloaded.
        free_bytes: free GPU memory.
        fixed: use the work's own recomputation and micro-batch.
        fp8: recipe of FP8.
    """
    found, fused = None, side.startswith("fused")
    modes = [Recompute(work.recompute)] if fixed else [Recompute.none, Recompute.selective, Recompute.full]
    sizes = [work.micro_batch_size] if fixed else list(halves(min(work.batch, LARGEST_MICRO_BATCH)))
    for recompute, micro_batch in product(modes, sizes):
        workload = Workload(
            seq_len=work.seq_len, micro_batch_size=micro_batch, micro_batches=work.batch // micro_batch,
            weight_bytes=work.dtype.itemsize, cuda=work.device == "cuda", fused=fused, loss_chunk=work.loss_chunk,
            mlp_chunk=8192 if side == "fused_offload_chunks" else None, float8=float8_of(work, fp8),
        )  # fmt: skip
        offload = Offload.activations if side.startswith("fused_offload") else Offload.none
        plan = memory_plan(work.model, ParallelConfig(recompute=recompute, offload=offload), workload)
        found = Fit(micro_batch, recompute.value, plan.largest.peak)
        if plan.fullest_device.device_peak <= SPARE * free_bytes:
            return found
    assert found is not None
    return found


def halves(number: int) -> Iterator[int]:
    """Yields the number, half of it, and so on to 1."""
    while number:
        yield number
        number //= 2


def work_of(size: str, side: str, device: str) -> tuple[TrainingWork, Fit]:
    """Returns what is trained, with the micro-batch that fits into the device's free memory."""
    work, fixed = SIZES[size].work(device), SIZES[size].micro_batch is not None
    if device == "cpu":
        moe = work.model.moe
        model = replace(
            work.model, num_layers=2, hidden_size=SMALL["hidden"], num_heads=SMALL["heads"], num_kv_heads=None,
            head_size=None, ffn_size=None, vocab_size=SMALL["vocabulary"], max_seq_len=SMALL["seq_len"],
            moe=replace(moe, num_experts=8, top_k=2, expert_ffn_size=32) if moe.enabled else moe,
        )  # fmt: skip
        work = replace(work, **SMALL, shape=model, lr=1e-3)
        return replace(work, micro_batch=2), replace(fit_of(work, side, 2**33, fixed=fixed), micro_batch=2)
    free_bytes, _ = torch.cuda.mem_get_info()
    if side in PEERS:
        # Nothing plans their memory: the first micro-batch that runs is the one.
        fit = Fit(min(work.batch, LARGEST_MICRO_BATCH), Recompute.none.value, 0)
    else:
        fit = fit_of(work, side, free_bytes, fixed=fixed, fp8=FP8.get(side, Float8Recipe.none))
    return replace(work, micro_batch=fit.micro_batch, recompute=fit.recompute), fit


def warm_turn(work: TrainingWork, side: str) -> tuple[TrainingWork, Turn, list[dict[str, float]]]:
    """Builds a side and warms it up; halves the micro-batch if memory runs out.

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
        # Outside of the except block, whose traceback keeps all tensors alive.
        turn = None  # type: ignore[assignment]
        print(f"micro-batch {work.micro_batch_size}: out of memory", flush=True)
        work = replace(work, micro_batch=work.micro_batch_size // 2)
        gc.unfreeze()  # the engine froze existing objects, including those of a failed try
        gc.collect()
        torch.cuda.empty_cache()


def timed(turn: Turn, device: str) -> tuple[list[float], list[dict[str, float]]]:
    """Seconds and results of every timed step."""
    seconds: list[float] = []
    found: list[dict[str, float]] = []
    begin = time.perf_counter()
    while len(seconds) < FEWEST_ROUNDS or (len(seconds) < ROUNDS and time.perf_counter() - begin < TIMED_S):
        seconds.append(step_seconds(lambda: found.append(turn()), device))
    return seconds, found


def measured(size: str, side: str, device: str) -> Line:
    """Returns the result line of one size and side."""
    cuda = device == "cuda"
    work, fit = work_of(size, side, device)
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
    with child_environment(ONE_RANK):
        line = measured(arguments.size, arguments.side, arguments.device)
    appender(arguments, "gpu_train")(line)
    if line["outcome"] != "done":
        print(f"{line['outcome']}: {line['reason']}")
        return int(line["outcome"] == "out of memory")
    memory = f"{line['peak_memory_bytes'] / 2**30:.1f} GiB, micro-batch {line['micro_batch']}"
    speed = f"{line['tokens_per_s']:,.0f} tokens/s, MFU {line['mfu']:.1%}"
    print(f"{line['step_s'] * 1e3:.1f} ms per step, {speed}, {memory}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
