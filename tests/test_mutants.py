"""Each known defect, applied to the running code, makes a named parity check fail; without it the check passes.

A parity test that lives through its mutant proves nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch.nn.functional as F
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch import Tensor

import megads.engine.sharded_training
import megads.engine.stage_pipeline
import megads.engine.token_mean
import megads.engine.training
import megads.optim.groups
from megads.engine.optimizer import Fp32GradientOptimizer
from megads.engine.pipeline_engine import StageEngine
from megads.engine.sharded_engine import ShardedEngine
from megads.engine.token_mean import TokenMeanLoss
from megads.model.attention import AttentionCore
from megads.optim.groups import Role
from megads.parallel import collectives, cross_entropy
from megads.parallel.collectives import leave_region
from megads.parallel.table import Stream
from megads.parallel.tensor import RowParallelLinear, padded_rows
from tests import parity
from tests.parity import LAYOUTS, Run, Scenario, scenario_with, train_layout, train_reference

pytestmark = pytest.mark.distributed


def local_alibi_slopes() -> None:
    def narrow(self: AttentionCore, rank: int, size: int) -> None:
        self.heads = range(len(self.heads) // size)

    AttentionCore.narrow = narrow


def missing_tensor_parallel_mark() -> None:
    inner = megads.engine.stage_pipeline.materialise

    def materialise(*args: Any) -> Any:
        stage = inner(*args)
        for name, parameter in stage.named_parameters():
            if name.endswith("mlp.up.weight"):
                parameter.tensor_model_parallel = False
        return stage

    megads.engine.stage_pipeline.materialise = materialise


def bf16_reduction() -> None:
    inner = megads.engine.training.deepspeed_config

    def config(*args: Any) -> Any:
        return inner(*args) | {"communication_data_type": "bf16"}

    megads.engine.training.deepspeed_config = config


def bf16_reduction_of_shards() -> None:
    inner = megads.engine.sharded_training.sharded_config

    def config(*args: Any) -> Any:
        return inner(*args) | {"communication_data_type": "bf16"}

    megads.engine.sharded_training.sharded_config = config


def divided_by_the_shards_twice() -> None:
    inner = ShardedEngine.__init__

    def init(self: ShardedEngine, *args: Any) -> None:
        inner(self, *args)
        self.averaged_over = 1

    ShardedEngine.__init__ = init


def micro_batches_overwrite_each_other() -> None:
    DeepSpeedZeroOptimizer_Stage3.clear_backward_seen_flag = lambda self: None


def subgroups_average_their_gradients() -> None:
    inner = ShardedEngine.accumulate

    def accumulate(self: ShardedEngine, micro_batches: Any) -> Tensor:
        total = inner(self, micro_batches)
        self.optimizer.grad_partitions_flat_buffer /= self.replica.size
        return total

    ShardedEngine.accumulate = accumulate


def summed_micro_batches() -> None:
    DeepSpeedEngine.backward = functools.partialmethod(DeepSpeedEngine.backward, scale_wrt_gas=False)


def tied_sum_before_data_parallel_reduce() -> None:
    StageEngine._INSTRUCTION_MAP |= {
        schedule.ReduceTiedGrads: PipelineEngine._exec_reduce_tied_grads,
        schedule.ReduceGrads: PipelineEngine._exec_reduce_grads,
    }


def no_backward_all_reduce_of_column_layers() -> None:
    collectives._EnterRegion.backward = staticmethod(lambda ctx, grad: (grad, None))


def row_bias_on_every_rank() -> None:
    def forward(self: RowParallelLinear, x: Tensor) -> Tensor:
        return leave_region(F.linear(x, self.weight, self.bias), self.axis)

    RowParallelLinear.forward = forward


def padding_in_the_softmax() -> None:
    inner = cross_entropy.vocab_parallel_token_losses

    def losses(logits: Tensor, labels: Tensor, vocab_size: int, axis: Any) -> Tensor:
        return inner(logits, labels, padded_rows(vocab_size, axis.size) * axis.size, axis)

    megads.engine.token_mean.vocab_parallel_token_losses = losses


def equal_attention_dropout_on_all_ranks() -> None:
    table = megads.engine.stage_pipeline.SHARDING
    shared = dict.fromkeys(table.dropouts, Stream.shared)
    megads.engine.stage_pipeline.SHARDING = replace(table, dropouts=shared)


def clipping_skipped_on_higher_ranks() -> None:
    inner = Fp32GradientOptimizer.get_grads_for_norm

    def grads(self: Fp32GradientOptimizer, for_clipping: bool = False) -> Any:
        if for_clipping and self.mpu.get_slice_parallel_rank() > 0:
            return []
        return inner(self, for_clipping)

    Fp32GradientOptimizer.get_grads_for_norm = grads


def mean_of_micro_batch_means() -> None:
    inner = TokenMeanLoss.__call__

    def loss(self: TokenMeanLoss, logits: Tensor, targets: tuple[Tensor, Tensor]) -> Tensor:
        self.scale = 1.0 / targets[1].sum().double()
        return inner(self, logits, targets)

    TokenMeanLoss.__call__ = loss


def embedding_norm_decays() -> None:
    inner = megads.optim.groups.parameter_role

    def role(name: str, tied: bool = False) -> Role:
        return Role.decay if name.startswith("embedding.norm") else inner(name, tied)

    megads.optim.groups.parameter_role = role


@dataclass(frozen=True)
class Case:
    """A defect, the layout and scenario in which it shows, and the check that must see it."""

    defect: Callable[[], None]
    layout: str
    check: Callable[[Run, Run], list[str]]
    scenario: Scenario = field(default_factory=Scenario)


CASES = [
    Case(local_alibi_slopes, "tp2", parity.check_first_step),
    Case(missing_tensor_parallel_mark, "tp2", parity.check_first_step),
    Case(bf16_reduction, "dp2", parity.check_reduction_dtype),
    Case(missing_tensor_parallel_mark, "zero2tp2dp2", parity.check_first_step),
    Case(bf16_reduction_of_shards, "zero2dp2", parity.check_reduction_dtype),
    Case(bf16_reduction_of_shards, "zero3dp2", parity.check_reduction_dtype),
    Case(divided_by_the_shards_twice, "zero3dp2", parity.check_first_step),
    Case(micro_batches_overwrite_each_other, "zero3dp2", parity.check_first_step),
    Case(subgroups_average_their_gradients, "hierarchical", parity.check_first_step),
    Case(summed_micro_batches, "pp2", parity.check_first_step),
    Case(tied_sum_before_data_parallel_reduce, "pp2dp3", parity.check_replicas, scenario_with(steps=10)),
    Case(no_backward_all_reduce_of_column_layers, "tp2", parity.check_first_step),
    Case(row_bias_on_every_rank, "tp2", parity.check_first_step),
    Case(padding_in_the_softmax, "tp2", parity.check_first_step),
    Case(equal_attention_dropout_on_all_ranks, "tp2", parity.check_dropout_streams),
    Case(clipping_skipped_on_higher_ranks, "tp2", parity.check_replicas),
    Case(mean_of_micro_batch_means, "dp2", parity.check_first_step, scenario_with(masked=True)),
    Case(embedding_norm_decays, "single", parity.check_curve, scenario_with(steps=5)),
]


class Runs:
    """Healthy runs, each trained once for all the cases that need it."""

    def __init__(self) -> None:
        self._references: list[tuple[Scenario, Run]] = []
        self._layouts: list[tuple[Scenario, str, Run]] = []

    def reference(self, scenario: Scenario) -> Run:
        for known, run in self._references:
            if known == scenario:
                return run
        self._references.append((scenario, train_reference(scenario)))
        return self._references[-1][1]

    def layout(self, scenario: Scenario, name: str) -> Run:
        for known, layout, run in self._layouts:
            if (known, layout) == (scenario, name):
                return run
        self._layouts.append((scenario, name, train_layout(scenario, LAYOUTS[name])))
        return self._layouts[-1][2]


@pytest.fixture(scope="module")
def runs() -> Runs:
    return Runs()


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.defect.__name__}-{case.layout}")
def test_defect_is_caught(case: Case, runs: Runs) -> None:
    """Catches a parity check that cannot fail."""
    reference = runs.reference(case.scenario)
    assert case.check(runs.layout(case.scenario, case.layout), reference) == [], "the check fails without the defect"
    mutant = train_layout(case.scenario, LAYOUTS[case.layout], case.defect)
    assert case.check(mutant, reference) != [], f"{case.check.__name__} does not see {case.defect.__name__}"
