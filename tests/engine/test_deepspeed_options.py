"""Which DeepSpeed settings are passed on."""

from __future__ import annotations

from typing import Any

import pytest

from megads.engine.deepspeed_options import check_deepspeed_options, with_options
from megads.errors import ConfigError

ZERO = "zero_optimization"


@pytest.mark.parametrize(
    ("options", "stage", "said"),
    [
        ({"bf16": {"enabled": True}}, 2, "deepspeed.bf16 cannot be set: train.precision"),
        ({"communication_data_type": "bf16"}, 2, "reduce in fp32"),
        ({"gradient_clipping": 1.0}, 3, "optim.clip_grad decides it"),
        ({"optimizer": {"type": "Adam"}}, 3, "optim and schedule decide it"),
        ({"gradient_accumulation_steps": 4}, 3, "train.global_batch_size"),
        ({ZERO: {"stage": 1}}, 2, "parallel.zero_stage decides it"),
        ({ZERO: {"offload_optimizer": {"device": "cpu"}}}, 3, "on the device"),
        ({ZERO: {"overlap_com": True}}, 3, "is not passed on: did you mean overlap_comm?"),
        ({"zero_optimisation": {}}, 3, "is not passed on: did you mean zero_optimization?"),
        ({ZERO: 3}, 3, "want settings by name"),
        ({ZERO: {"stage3_max_live_parameters": 1}}, 2, "only applies to parallel.zero_stage=3"),
        ({"dump_state": True}, 1, "only applies to parallel.zero_stage=2 and 3"),
    ],
)
def test_refused_with_the_reason(options: dict[str, Any], stage: int, said: str) -> None:
    """Catches an accepted setting that changes what is computed, or that DeepSpeed would silently ignore."""
    with pytest.raises(ConfigError) as raised:
        check_deepspeed_options(options, stage)
    assert said in str(raised.value)


def test_passed_settings_join_those_of_megads() -> None:
    """Catches a ZeRO setting that replaces all of megads' own."""
    options = {"dump_state": True, ZERO: {"reduce_bucket_size": 7}}
    check_deepspeed_options(options, 2)
    check_deepspeed_options({}, 1)
    joined = with_options({"gradient_clipping": 1.0, ZERO: {"stage": 2, "reduce_bucket_size": 5}}, options)
    assert joined == {"gradient_clipping": 1.0, "dump_state": True, ZERO: {"stage": 2, "reduce_bucket_size": 7}}
