"""Which DeepSpeed settings are passed on."""

from __future__ import annotations

from typing import Any

import pytest

from megads.engine.deepspeed_options import check_deepspeed_options, with_options
from megads.errors import ConfigError
from megads.parallel.config import EngineKind

ZERO = "zero_optimization"


@pytest.mark.parametrize(
    ("options", "stage", "said"),
    [
        ({"bf16": {"enabled": True}}, 2, "deepspeed.bf16 cannot be set: train.precision"),
        ({"communication_data_type": "bf16"}, 2, "reduce in fp32"),
        ({"gradient_clipping": 1.0}, 3, "optim.clip_grad decides it"),
        ({"optimizer": {"type": "Adam"}}, 3, "optim and schedule decide it"),
        ({"gradient_accumulation_steps": 4}, 3, "train.global_batch_size"),
        ({"pipeline": {"activation_checkpoint_interval": 1}}, 1, "parallel decides layout, recomputation"),
        ({ZERO: {"stage": 1}}, 2, "parallel.zero_stage decides it"),
        ({ZERO: {"offload_optimizer": {"device": "cpu"}}}, 3, "on the device"),
        ({ZERO: {"overlap_com": True}}, 3, "is not passed on: did you mean overlap_comm?"),
        ({"zero_optimisation": {}}, 3, "is not passed on: did you mean zero_optimization?"),
        ({ZERO: 3}, 3, "want settings by name"),
        ({ZERO: {"stage3_max_live_parameters": 1}}, 2, "is only read by ZeRO-3, but this run uses ZeRO-2: remove it"),
        ({ZERO: {"allgather_bucket_size": 1}}, 3, "ZeRO-1 in bf16 and ZeRO-1 in fp32 and ZeRO-2, but"),
        ({ZERO: {"overlap_comm": True}}, 1, "is only read by ZeRO-2 and ZeRO-3, but this run uses ZeRO-1 in bf16"),
        ({ZERO: {"reduce_bucket_size": 7}}, 1, "but this run uses ZeRO-1 in bf16"),
        ({ZERO: {"allgather_bucket_size": 7}}, 0, "but this run uses ZeRO-0"),
    ],
)
def test_settings_that_break_the_numerics_are_refused(options: dict[str, Any], stage: int, said: str) -> None:
    """Catches an accepted setting that changes what is computed, or that DeepSpeed would silently ignore."""
    with pytest.raises(ConfigError) as raised:
        check_deepspeed_options(options, EngineKind.deepspeed, stage, bf16=True)
    assert said in str(raised.value)


def test_deepspeed_settings_are_refused_under_the_native_engine() -> None:
    """Catches a setting of DeepSpeed that has no effect because megads' own engine trains."""
    with pytest.raises(ConfigError, match=r"deepspeed\.dump_state only applies to engine=deepspeed, but"):
        check_deepspeed_options({"dump_state": True}, EngineKind.native, 1, bf16=True)
    check_deepspeed_options({}, EngineKind.native, 1, bf16=True)


def test_settings_that_zero1_reads_are_accepted() -> None:
    """Catches a refusal of what DeepSpeed's ZeRO-1 reads, which differs between bf16 and fp32."""
    check_deepspeed_options({ZERO: {"allgather_bucket_size": 8}}, EngineKind.deepspeed, 1, bf16=True)
    both = {"allgather_bucket_size": 8, "reduce_bucket_size": 8}
    check_deepspeed_options({ZERO: both, "wall_clock_breakdown": True}, EngineKind.deepspeed, 1, bf16=False)


def test_passed_settings_are_merged_into_those_of_megads() -> None:
    """Catches a ZeRO setting that replaces all of megads' own."""
    options = {"dump_state": True, ZERO: {"reduce_bucket_size": 7}}
    check_deepspeed_options(options, EngineKind.deepspeed, 2, bf16=True)
    joined = with_options({"gradient_clipping": 1.0, ZERO: {"stage": 2, "reduce_bucket_size": 5}}, options)
    assert joined == {"gradient_clipping": 1.0, "dump_state": True, ZERO: {"stage": 2, "reduce_bucket_size": 7}}
