"""What each engine refuses, and which engine takes over."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megads.engine.unsupported import UNSUPPORTED, EngineRequest, check_engine
from megads.errors import ConfigError
from megads.model.config import ModelConfig
from megads.model.moe_config import MoEConfig
from megads.ops.config import Float8Recipe, Implementation, OpsConfig
from megads.optim.config import OptimConfig
from megads.parallel.config import EngineKind, ParallelConfig, resolve_engine
from megads.parallel.schedule import ScheduleName

RUN = EngineRequest(
    EngineKind.deepspeed, ModelConfig(), ParallelConfig(pp=2, dp=2), OptimConfig(), OpsConfig(), bf16=True
)
EXPERTS = ModelConfig(moe=MoEConfig(num_experts=4))
ZERO_2 = {"parallel": ParallelConfig(dp=2, zero_stage=2)}


def request(changes: dict[str, Any]) -> EngineRequest:
    return replace(RUN, **changes)


REFUSED: list[tuple[int, dict[str, Any], str, str]] = [
    (0, ZERO_2 | {"engine": EngineKind.native}, "parallel.zero_stage = 2", "use engine=deepspeed, or parallel.zero"),
    (
        1,
        {"parallel": ParallelConfig(pp=2, schedule=ScheduleName.zb_h1)},
        "parallel.schedule = zb_h1",
        "use engine=native, or parallel.schedule=1f1b",
    ),
    (
        1,
        {"parallel": ParallelConfig(pp=2, schedule=ScheduleName.interleaved, contiguous_micro_batches=4)},
        "parallel.schedule = interleaved",
        "use engine=native",
    ),
    (2, {"ops": OpsConfig(cuda_graphs=True)}, "ops.cuda_graphs = true", "use engine=native, or ops.cuda_graphs=false"),
    (2, ZERO_2 | {"ops": OpsConfig(cuda_graphs=True)}, "ops.cuda_graphs = true", "; use ops.cuda_graphs=false"),
    (3, {"optim": OptimConfig(name="muon")}, "optim.name = muon", "use engine=native, or optim.name=adamw"),
    (3, {"optim": OptimConfig(name="one_of_a_plugin")}, "optim.name = one_of_a_plugin", "use engine=native"),
    *(
        (4, {"optim": OptimConfig(impl=impl)}, f"optim.impl = {impl}", "use engine=native, or optim.impl=auto")
        for impl in (Implementation.fused, Implementation.apex, Implementation.deepspeed)
    ),
    (
        4,
        ZERO_2 | {"engine": EngineKind.auto, "optim": OptimConfig(impl=Implementation.apex)},
        "optim.impl = apex is not supported with engine = auto, which is deepspeed for parallel.zero_stage = 2",
        "; use optim.impl=auto",
    ),
    (
        5,
        {"parallel": ParallelConfig(dp=2, zero_stage=0)},
        "parallel.zero_stage = 0 with train.precision = bf16",
        "use engine=native, or parallel.zero_stage=1",
    ),
    (
        6,
        {"parallel": ParallelConfig(pp=2, dp=3), "model": ModelConfig(tie_embeddings=True), "bf16": False},
        "train.precision = fp32 with model.tie_embeddings = true, parallel.pp = 2 and parallel.cp * dp = 3",
        "use engine=native, or parallel.zero_stage=0",
    ),
    (7, {"model": EXPERTS}, "model.moe.num_experts = 4", "use engine=native"),
    (7, ZERO_2 | {"model": EXPERTS}, "model.moe.num_experts = 4", "with parallel.zero_stage=0 or 1"),
    (8, {"fp8": Float8Recipe.rowwise}, "train.fp8 = rowwise", "use engine=native, or train.fp8=none"),
    (8, ZERO_2 | {"fp8": Float8Recipe.tensorwise}, "train.fp8 = tensorwise", "; use train.fp8=none"),
    (
        9,
        {"parallel": ParallelConfig(pp=2, dp=2, overlap_param_gather=True)},
        "parallel.overlap_param_gather = true",
        "use engine=native, or parallel.overlap_param_gather=false",
    ),
]


@pytest.mark.parametrize(("row", "changes", "setting", "remedy"), REFUSED)
def test_unsupported_settings_are_refused(row: int, changes: dict[str, Any], setting: str, remedy: str) -> None:
    """Catches a run that an engine would train differently, and a remedy that names an engine which refuses it too."""
    with pytest.raises(ConfigError) as raised:
        check_engine(request(changes))
    message = str(raised.value)
    assert message.startswith(setting) and UNSUPPORTED[row].reason in message
    assert remedy in message and message.endswith(UNSUPPORTED[row].remedy)


def test_every_refusal_is_tested() -> None:
    """Catches a row of the table that no run can reach."""
    assert {case[0] for case in REFUSED} == set(range(len(UNSUPPORTED)))


@pytest.mark.parametrize("engine", EngineKind)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"bf16": False, "parallel": ParallelConfig(pp=2, dp=2, zero_stage=0)},
        {"model": ModelConfig(tie_embeddings=True)},
        {"model": ModelConfig(tie_embeddings=True), "parallel": ParallelConfig(dp=4)},
        {"parallel": ParallelConfig(tp=2, cp=2, pp=2, tp_chunks=2, sequence_parallel=True)},
    ],
)
def test_both_engines_accept_what_both_support(engine: EngineKind, changes: dict[str, Any]) -> None:
    """Catches a refusal of runs that the engine supports."""
    check_engine(request(changes | {"engine": engine}))


@pytest.mark.parametrize("optim", [OptimConfig(name="muon"), OptimConfig(ema_decay=0.9), OptimConfig(impl="deepspeed")])  # type: ignore[arg-type]
def test_zero_2_keeps_what_only_the_pipeline_engine_refuses(optim: OptimConfig) -> None:
    """Catches a row for DeepSpeed's PipelineEngine that also refuses runs of its ZeRO engine."""
    check_engine(request(ZERO_2 | {"optim": optim}))


def test_engine_auto_is_native_unless_only_deepspeed_has_the_zero_stage() -> None:
    """Catches another default engine, and a given engine that is replaced."""
    auto = {stage: resolve_engine(EngineKind.auto, stage) for stage in range(4)}
    assert auto == dict.fromkeys((0, 1), EngineKind.native) | dict.fromkeys((2, 3), EngineKind.deepspeed)
    for engine in (EngineKind.native, EngineKind.deepspeed):
        assert {resolve_engine(engine, stage) for stage in range(4)} == {engine}
