"""DeepSpeed's plain engine with ZeRO-2 or ZeRO-3, taught what our numerics contract asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from megads.batch import MicroBatch
from megads.engine.whole_model import WholeModel
from megads.engine.zero_state import FlatPartitions, ParameterPartitions, ZeroState
from megads.parallel.grid import Axis, ParallelGrid
from megads.runtime.spans import SpanRecorder


class GridGroups:
    """Our grid as the model-parallel unit that DeepSpeed asks for its groups: its data axis is our shard axis.

    Subgroups of a hierarchical layout do not know of each other; `ShardedEngine` sums over them.
    """

    def __init__(self, grid: ParallelGrid) -> None:
        self._grid = grid

    def get_data_parallel_group(self) -> Any:
        return self._grid.shard.group

    def get_data_parallel_rank(self) -> int:
        return self._grid.shard.rank

    def get_data_parallel_world_size(self) -> int:
        return self._grid.shard.size

    def get_model_parallel_group(self) -> Any:
        return self._grid.tp.group

    def get_model_parallel_rank(self) -> int:
        return self._grid.tp.rank

    def get_model_parallel_world_size(self) -> int:
        return self._grid.tp.size


def sharded_config(
    stage: int, precision: torch.dtype, micro_batch_size: int, clip: float, bucket_elements: int
) -> dict[str, Any]:
    """The DeepSpeed settings of ZeRO-2 and ZeRO-3; everything else is decided by our own config."""
    zero = {
        "stage": stage,
        # A buffer of one bucket is allocated whatever the model's size.
        "reduce_bucket_size": bucket_elements,
        "overlap_comm": False,
    }
    if stage == 3:
        zero |= {
            # Gradients wait for their reduction where autograd put them, not in a buffer that is there all the time.
            "contiguous_gradients": False,
            # Each layer's weights are gathered for its forward pass and again for its backward pass, one bucket ahead;
            # those that the look-ahead meets again at the turn are kept.
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": bucket_elements,
            "stage3_param_persistence_threshold": 0,
            "memory_efficient_linear": False,
        }
    return {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        # The token mean divides by the micro-batches, whose number changes from step to step.
        "gradient_accumulation_steps": 1,
        "gradient_clipping": clip,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": precision is torch.bfloat16},
        # Without these DeepSpeed would reduce, and add micro-batches up, in bf16.
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "steps_per_print": None,
        # It makes the host wait for the device at the start and end of every micro-batch.
        "timers": {"throughput": {"enabled": False}},
    }


def shard_weights(stage: nn.Module, grid: ParallelGrid, precision: torch.dtype, config: dict[str, Any]) -> None:
    """Cuts the weights of a stage over the shard axis, in place; those cut before are left alone."""
    groups = GridGroups(grid)
    deepspeed.zero.Init(
        module=stage,
        data_parallel_group=groups.get_data_parallel_group(),
        config_dict_or_path=config,
        dtype=precision,
        mpu=groups,
    )


class ShardedEngine(DeepSpeedEngine):  # type: ignore[misc]
    """What differs from the stock engine:

    - gradients are sums: what DeepSpeed averages by is undone in the loss, so that ZeRO-2 divides nothing in bf16;
    - the number of micro-batches may differ from step to step;
    - subgroups of a hierarchical layout sum their gradients once a step, in fp32;
    - gradients of parameters that sequence parallelism replicates are summed over tensor parallelism;
    - each rank notes what it did to make a step non-finite.
    """

    module: WholeModel

    def __init__(self, module: WholeModel, optimizer: Optimizer, config: dict[str, Any], grid: ParallelGrid) -> None:
        groups = GridGroups(grid)
        super().__init__(
            args=None,
            model=module,
            optimizer=optimizer,
            mpu=groups,
            config=config,
            config_class=DeepSpeedConfig(config, groups),
        )
        self.replica = grid.replica
        self.state: ZeroState
        if self.zero_optimization_stage() == 3:
            self.state = ParameterPartitions(self.optimizer)
            # Its reduce-scatter divides what it has already cast to fp32.
            self.averaged_over = grid.shard.size
        else:
            self.state = FlatPartitions(self.optimizer)
            # It would divide the bf16 gradients before it casts them.
            self.optimizer.gradient_average = False
            self.averaged_over = 1
        self.spans = SpanRecorder(self.device)
        self.gradient_norms: dict[Parameter, Tensor] = {}
        self.forward_finite = torch.ones((), dtype=torch.bool, device=self.device)
        for parameter in module.parameters():
            if getattr(parameter, "sequence_partial", False):
                parameter.register_hook(lambda grad: summed_over(grid.tp, grad))
            parameter.register_hook(lambda grad, parameter=parameter: self._note_gradient(parameter, grad))

    def _note_gradient(self, parameter: Parameter, grad: Tensor) -> None:
        # This rank's own gradient, before the reduction spreads a non-finite one; stays on the device.
        norm = torch.linalg.vector_norm(grad, dtype=torch.float32)
        known = self.gradient_norms.get(parameter)
        self.gradient_norms[parameter] = norm if known is None else known + norm

    def accumulate(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """Forward, backward and reduction of every micro-batch; returns the sum of the losses."""
        self.module.train()
        self.gradient_norms = {}
        self.forward_finite.fill_(True)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for index, batch in enumerate(micro_batches):
            self.set_gradient_accumulation_boundary(index == len(micro_batches) - 1)
            with self.spans.span("forward", index, 0):
                loss = self(batch.to(self.device))
            self.forward_finite &= torch.isfinite(loss.detach())
            with self.spans.span("backward", index, 0):
                self.backward(loss)
            total += loss.detach()
        if self.replica.size > 1:
            dist.all_reduce(self.optimizer.grad_partitions_flat_buffer, group=self.replica.group)
        return total

    @torch.no_grad()
    def evaluate_sum(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """Forward only; returns the sum of the losses."""
        self.module.eval()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for batch in micro_batches:
            total += self.module(batch.to(self.device))
        return total


def summed_over(axis: Axis, grad: Tensor) -> Tensor:
    """The sum of a gradient over an axis, added up in fp32."""
    total = grad.float() if grad.dtype is not torch.float32 else grad.clone()
    dist.all_reduce(total, group=axis.group)
    return total.to(grad.dtype)
