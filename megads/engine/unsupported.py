"""Settings that an engine does not support: one table, checked before any rank starts. Imports neither torch nor
DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from megads.errors import ConfigError
from megads.model.config import ModelConfig
from megads.ops.config import Float8Recipe, Implementation, OpsConfig
from megads.optim.config import OptimConfig
from megads.parallel.config import GRADIENT_STAGES, EngineKind, ParallelConfig, resolve_engine
from megads.parallel.schedule import ScheduleName


@dataclass(frozen=True)
class EngineRequest:
    """What a run requires of its engine.

    Attributes:
        engine: config key `engine`.
        model: config `model`.
        parallel: config `parallel`.
        optim: config `optim`.
        ops: config `ops`.
        bf16: whether weights are in bf16.
        fp8: config key `train.fp8`.
    """

    engine: EngineKind
    model: ModelConfig
    parallel: ParallelConfig
    optim: OptimConfig
    ops: OpsConfig
    bf16: bool
    fp8: Float8Recipe = Float8Recipe.none

    @property
    def resolved(self) -> EngineKind:
        """The engine that would train."""
        return resolve_engine(self.engine, self.parallel.zero_stage)

    @property
    def gradients_sharded(self) -> bool:
        """Whether ZeRO-2 or 3 is used."""
        return self.parallel.zero_stage in GRADIENT_STAGES


@dataclass(frozen=True)
class Unsupported:
    """A setting that an engine does not support.

    Attributes:
        engine: native or deepspeed.
        setting: the setting with its value if the run has it, else an empty string.
        reason: why the engine does not support it.
        remedy: a value that the engine supports.
    """

    engine: EngineKind
    setting: Callable[[EngineRequest], str]
    reason: str
    remedy: str


def _on_stages(run: EngineRequest, text: str, *, wrong: bool) -> str:
    """The text if a setting is wrong under ZeRO-0 and 1, where DeepSpeed's PipelineEngine trains."""
    return text if wrong and not run.gradients_sharded else ""


def _zero_stage(run: EngineRequest) -> str:
    return f"parallel.zero_stage = {run.parallel.zero_stage}" if run.gradients_sharded else ""


def _schedule(run: EngineRequest) -> str:
    given = run.parallel.schedule
    return _on_stages(run, f"parallel.schedule = {given}", wrong=given is not ScheduleName["1f1b"])


def _cuda_graphs(run: EngineRequest) -> str:
    return "ops.cuda_graphs = true" if run.ops.cuda_graphs is True else ""


def _overlapped_gather(run: EngineRequest) -> str:
    overlapped = run.parallel.overlap_param_gather
    return _on_stages(run, "parallel.overlap_param_gather = true", wrong=overlapped)


def _optimizer(run: EngineRequest) -> str:
    return _on_stages(run, f"optim.name = {run.optim.name}", wrong=not run.optim.is_adamw)


def _optimizer_kernels(run: EngineRequest) -> str:
    refused = [Implementation.fused, Implementation.apex]
    # ZeRO-2 and 3 call any update rule on master weights that megads knows the layout of.
    refused += [] if run.gradients_sharded else [Implementation.deepspeed]
    return f"optim.impl = {run.optim.impl}" if run.optim.impl in refused else ""


def _bf16_unsharded(run: EngineRequest) -> str:
    return "parallel.zero_stage = 0 with train.precision = bf16" if run.bf16 and not run.parallel.zero_stage else ""


def _tied_copies(run: EngineRequest) -> str:
    parallel, tied = run.parallel, run.model.tie_embeddings and run.parallel.pp > 1 and not run.bf16
    sizes = f"parallel.pp = {parallel.pp} and parallel.cp * dp = {parallel.data_size}"
    text = f"train.precision = fp32 with model.tie_embeddings = true, {sizes}"
    return text if tied and parallel.zero_stage == 1 and parallel.data_size > 2 else ""


def _experts(run: EngineRequest) -> str:
    experts = run.model.moe.num_experts
    return f"model.moe.num_experts = {experts}" if experts else ""


def _float8(run: EngineRequest) -> str:
    return "" if run.fp8 is Float8Recipe.none else f"train.fp8 = {run.fp8}"


UNSUPPORTED: tuple[Unsupported, ...] = (
    Unsupported(
        EngineKind.native,
        _zero_stage,
        "only DeepSpeed's ZeRO engine shards gradients and weights",
        "parallel.zero_stage=1",
    ),
    Unsupported(EngineKind.deepspeed, _schedule, "DeepSpeed's PipelineEngine only has 1F1B", "parallel.schedule=1f1b"),
    Unsupported(
        EngineKind.deepspeed,
        _cuda_graphs,
        "a captured micro-batch adds its gradients to main_grad, which only the native engine's optimizer has",
        "ops.cuda_graphs=false",
    ),
    Unsupported(
        EngineKind.deepspeed,
        _optimizer,
        "with ZeRO-0 and 1 DeepSpeed only runs PyTorch's AdamW here",
        "optim.name=adamw",
    ),
    Unsupported(
        EngineKind.deepspeed,
        _optimizer_kernels,
        "DeepSpeed runs the optimizer step and calls PyTorch's AdamW in it",
        "optim.impl=auto",
    ),
    Unsupported(
        EngineKind.deepspeed,
        _bf16_unsharded,
        "without ZeRO, DeepSpeed accumulates bf16 gradients in bf16 and refuses to do so in fp32",
        "parallel.zero_stage=1",
    ),
    Unsupported(
        EngineKind.deepspeed,
        _tied_copies,
        "DeepSpeed's ZeRO-1 in fp32 adds the gradients of the two copies before it reduces them over data-parallel "
        "ranks, so the copies drift apart with three or more of these (docs/numerics.md, N8)",
        "parallel.zero_stage=0",
    ),
    Unsupported(
        EngineKind.deepspeed,
        _experts,
        "DeepSpeed reduces the gradients of all parameters over the same ranks, but those of experts are reduced over "
        "the ranks that hold the same experts",
        "engine=native with parallel.zero_stage=0 or 1",
    ),
    Unsupported(
        EngineKind.deepspeed,
        _float8,
        "weights are quantized at the start of a step, which only the native engine (ZeRO-0 and 1) does",
        "train.fp8=none",
    ),
    Unsupported(
        EngineKind.deepspeed,
        _overlapped_gather,
        "DeepSpeed's optimizer all-gathers the weights at the end of its step",
        "parallel.overlap_param_gather=false",
    ),
)
"""Everything that an engine refuses; an engine supports whatever is not listed."""


def check_engine(run: EngineRequest) -> None:
    """Rejects a run that its engine does not support.

    Raises:
        ConfigError: gives the setting, the reason, and the engine or the value that would be supported.
    """
    engine = run.resolved
    found = _refused(run)
    if found is None:
        return
    setting, row = found
    given = f"engine = {run.engine}"
    if run.engine is EngineKind.auto:
        given += f", which is {engine} for parallel.zero_stage = {run.parallel.zero_stage}"
    other = EngineKind.native if engine is EngineKind.deepspeed else EngineKind.deepspeed
    can = _refused(replace(run, engine=other)) is None
    remedy = f"use engine={other}, or {row.remedy}" if can else f"use {row.remedy}"
    raise ConfigError(f"{setting} is not supported with {given}: {row.reason}; {remedy}")


def _refused(run: EngineRequest) -> tuple[str, Unsupported] | None:
    """The first setting that the run's engine does not support, with its row; None if it supports all."""
    rows = ((row.setting(run), row) for row in UNSUPPORTED if row.engine is run.resolved)
    return next((found for found in rows if found[0]), None)
