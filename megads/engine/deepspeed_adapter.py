"""Adapter to DeepSpeed's ZeRO engine; only `megads/engine` imports DeepSpeed.

What DeepSpeed does:

- engine=native: nothing, except that optim.impl=deepspeed calls its AdamW kernels (`deepspeed_adam`);
- engine=deepspeed, ZeRO-0 and 1: the whole step: 1F1B, p2p, backward passes, gradient accumulation and reduction,
  clipping, optimizer (PipelineEngine.train_batch, BF16_Optimizer);
- engine=deepspeed, ZeRO-2 and 3: partitions gradients and weights over ranks, all-gathers and reduces them, clips, and
  runs the optimizer step (DeepSpeedEngine); megads calls it micro-batch by micro-batch.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from math import inf, prod
from typing import Any, NamedTuple, Protocol

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils.z3_leaf_module import set_z3_leaf_module
from packaging.version import Version
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from megads.engine.deepspeed_options import with_options
from megads.engine.interface import EngineSpec
from megads.engine.stage_pipeline import local_shape
from megads.errors import ConfigError
from megads.parallel.grid import ParallelGrid

OLDEST = Version("0.19.8")


def require_deepspeed(version: str = deepspeed.__version__) -> None:
    """Rejects DeepSpeed releases that train wrongly.

    0.17.6 and 0.18.2 sum pipeline gradients over micro-batches; 0.18.9 to 0.19.2 divide them by their number at every
    stage (DeepSpeed #8152). Up to 0.19.7, ZeRO-3 takes steps whose gradients are not finite, except in fp16.

    Raises:
        ConfigError: the version is older than 0.19.8.
    """
    if Version(version) < OLDEST:
        raise ConfigError(f"DeepSpeed {version} trains wrongly in some layouts: install deepspeed>={OLDEST}")


def prepare_deepspeed() -> None:
    """Initializes DeepSpeed on the existing default process group; call before building any DeepSpeed object.

    Raises:
        ConfigError: see `require_deepspeed`.
    """
    require_deepspeed()
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # On a CPU DeepSpeed would JIT-compile a shared-memory collective, which takes 93 s and crashes without a C++
    # compiler. Reading its table of compatible ops would probe every op and compile some; an empty table disables both.
    deepspeed.ops.__compatible_ops__ = {}
    deepspeed.init_distributed(dist_backend=dist.get_backend(), dist_init_required=False, auto_mpi_discovery=False)


def freeze_gc() -> None:
    """Excludes the objects that exist now from garbage collection; imported modules live as long as the process anyway.

    DeepSpeed may force a collection while it builds an engine, which takes half a second each.
    """
    gc.freeze()


def zero_settings(spec: EngineSpec, bucket_elements: int) -> dict[str, Any]:
    """Returns the DeepSpeed settings of a ZeRO stage, derived from megads' config.

    Args:
        spec: specification of the engine.
        bucket_elements: gradient elements that ZeRO-1 in fp32, ZeRO-2 and ZeRO-3 reduce in one collective.
    """
    stage = spec.parallel.zero_stage
    zero = {
        "stage": stage,
        # DeepSpeed allocates a buffer of one bucket regardless of the model's size.
        "reduce_bucket_size": bucket_elements,
        "overlap_comm": False,
    }
    if stage == 3:
        zero |= {
            # Gradients stay where autograd put them until they are reduced, not in a permanently allocated buffer.
            "contiguous_gradients": False,
            # Each layer's weights are all-gathered for its forward pass and again for its backward pass, prefetched one
            # bucket ahead; those that the prefetch reuses at the turn from forward to backward are kept.
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": bucket_elements,
            "stage3_param_persistence_threshold": 0,
            "memory_efficient_linear": False,
        }
    settings = {
        "train_micro_batch_size_per_gpu": spec.micro_batch_size,
        # The token mean accounts for the micro-batches, whose number may change from step to step.
        "gradient_accumulation_steps": 1,
        "gradient_clipping": spec.optim.clip_grad,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": spec.precision is torch.bfloat16},
        # Without these DeepSpeed would reduce gradients, and accumulate them over micro-batches, in bf16.
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "steps_per_print": None,
        # Synchronizes with the device at the start and end of every micro-batch.
        "timers": {"throughput": {"enabled": False}},
    }
    return with_options(settings, spec.deepspeed)


class GridGroups:
    """The process grid as DeepSpeed's model-parallel unit (mpu); its data axis is the grid's shard axis.

    DeepSpeed sees one subgroup of a hierarchical layout only; `megads.engine.zero_engine` all-reduces across subgroups.
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


def shard_weights(layer: nn.Module, grid: ParallelGrid, precision: torch.dtype, settings: dict[str, Any]) -> None:
    """Partitions the weights of a layer over the shard axis (ZeRO-3), in place, unless they are already partitioned.

    Args:
        layer: a layer of this rank.
        grid: the ranks.
        precision: dtype of the weights.
        settings: DeepSpeed settings.
    """
    groups = GridGroups(grid)
    deepspeed.zero.Init(
        module=layer,
        data_parallel_group=groups.get_data_parallel_group(),
        config_dict_or_path=settings,
        dtype=precision,
        mpu=groups,
    )


def gather_as_one(module: nn.Module) -> None:
    """Makes ZeRO-3 all-gather the weights of all layers of a module when it is called, and not one after the other."""
    set_z3_leaf_module(module, True)


class ZeroPiece(NamedTuple):
    """A range of elements of one flattened local parameter that this rank updates under ZeRO-2 or ZeRO-3.

    Attributes:
        parameter: the parameter.
        first: index of the range's first element in the flattened parameter.
        master: index of the optimizer's flat fp32 tensor that holds the range.
        start: index of the first element in that tensor.
        length: number of elements.
    """

    parameter: Parameter
    first: int
    master: int
    start: int
    length: int


class ZeroState(Protocol):
    """State of DeepSpeed's ZeRO optimizer, independent of the stage."""

    @property
    def masters(self) -> list[Tensor]:
        """Flat fp32 master weights of this rank."""
        ...

    @property
    def parameters(self) -> list[list[Parameter]]:
        """The parameters of each master, including those outside this rank's part, in the same order on all ranks."""
        ...

    def pieces(self) -> Iterator[ZeroPiece]:
        """Yields all ranges that this rank updates, padding excluded."""
        ...

    def gradients(self) -> list[Tensor]:
        """The reduced fp32 gradient of every piece, flat, in the order of `pieces`. Available between the last backward
        pass and the optimizer step."""
        ...

    def refresh_weights(self) -> None:
        """Derives the working weights from the master weights; collective."""
        ...


class FlatPartitions:
    """State of ZeRO-1 in fp32 and of ZeRO-2: a group's parameters are concatenated and split into equal partitions.

    Args:
        optimizer: DeepSpeedZeroOptimizer.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    @property
    def masters(self) -> list[Tensor]:
        """See ZeroState.masters."""
        return list(self._optimizer.single_partition_of_fp32_groups)

    @property
    def parameters(self) -> list[list[Parameter]]:
        """See ZeroState.parameters."""
        return [list(group) for group in self._optimizer.bit16_groups]

    def pieces(self) -> Iterator[ZeroPiece]:
        """See ZeroState.pieces."""
        for group, (parameters, master) in enumerate(zip(self.parameters, self.masters, strict=True)):
            size = master.numel()
            begin = dist.get_rank(self._optimizer.real_dp_process_group[group]) * size
            offset = 0
            for parameter in parameters:
                start, stop = max(begin, offset), min(begin + size, offset + parameter.numel())
                if start < stop:
                    yield ZeroPiece(parameter, start - offset, group, start - begin, stop - start)
                offset += parameter.numel()

    def gradients(self) -> list[Tensor]:
        """See ZeroState.gradients."""
        # Looked up by position: the list also contains padding, only some of which DeepSpeed marks.
        at: dict[tuple[int, int], Tensor] = {}
        for group in range(len(self.masters)):
            start = 0
            for gradient in self._optimizer.averaged_gradients[group]:
                at[group, start] = gradient
                start += gradient.numel()
        return [at[piece.master, piece.start].flatten() for piece in self.pieces()]

    def refresh_weights(self) -> None:
        """See ZeroState.refresh_weights."""
        self._optimizer.update_lp_params()


class ParameterPartitions:
    """State of ZeRO-3: every parameter is split into equal parts, the last one padded.

    Args:
        optimizer: DeepSpeedZeroOptimizer_Stage3.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    @property
    def masters(self) -> list[Tensor]:
        """See ZeroState.masters."""
        return list(self._optimizer.fp32_partitioned_groups_flat)

    @property
    def parameters(self) -> list[list[Parameter]]:
        """See ZeroState.parameters."""
        return [list(group) for group in self._optimizer.fp16_groups]

    def pieces(self) -> Iterator[ZeroPiece]:
        """See ZeroState.pieces."""
        rank = dist.get_rank(self._optimizer.dp_process_group)
        for group, parameters in enumerate(self._optimizer.fp16_groups):
            offset = 0
            for parameter in parameters:
                size = parameter.partition_numel()
                first = rank * size
                length = min(size, prod(local_shape(parameter)) - first)
                if length > 0:
                    yield ZeroPiece(parameter, first, group, offset, length)
                offset += size

    def gradients(self) -> list[Tensor]:
        """See ZeroState.gradients."""
        flat = self._optimizer.grad_partitions_flat_buffer
        begins = [0]
        for master in self.masters:
            begins.append(begins[-1] + master.numel())
        return [flat.narrow(0, begins[piece.master] + piece.start, piece.length) for piece in self.pieces()]

    def refresh_weights(self) -> None:
        """See ZeroState.refresh_weights."""
        optimizer = self._optimizer
        with torch.no_grad():
            optimizer._partition_all_parameters()
            for group in range(len(self.masters)):
                optimizer._reassign_or_swap_out_partitioned_parameters(group)
            if optimizer.persistent_parameters:
                optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)


class ZeroExecutor(DeepSpeedEngine):  # type: ignore[misc]
    """Runs a module under ZeRO-2 or ZeRO-3: reduces gradients during the backward pass, clips, and steps.

    Reduced gradients are sums. Where DeepSpeed averages, the loss is scaled by `averaged_over` to compensate; ZeRO-2
    does not average, so that no division happens in bf16.

    Attributes:
        state: state of the optimizer.
        averaged_over: number by which DeepSpeed divides gradients.
    """

    state: ZeroState

    def __init__(self, module: nn.Module, optimizer: Optimizer, settings: dict[str, Any], grid: ParallelGrid) -> None:
        """Wraps module and optimizer.

        Args:
            module: returns the loss of a micro-batch; under ZeRO-3 its weights are already partitioned.
            optimizer: optimizer whose state is to be sharded.
            settings: see `zero_settings`.
            grid: the ranks.
        """
        groups = GridGroups(grid)
        freeze_gc()
        super().__init__(
            args=None,
            model=module,
            optimizer=optimizer,
            mpu=groups,
            config=settings,
            config_class=DeepSpeedConfig(settings, groups),
        )
        if self.shards_weights:
            self.state = ParameterPartitions(self.optimizer)
            # The reduce-scatter divides after the cast to fp32.
            self.averaged_over = grid.shard.size
        else:
            self.state = FlatPartitions(self.optimizer)
            # DeepSpeed would divide the bf16 gradients before the cast.
            self.optimizer.gradient_average = False
            self.averaged_over = 1

    def begin_micro_batch(self, *, last: bool) -> None:
        """Prepares a micro-batch; call before its forward pass.

        Args:
            last: whether it is the last micro-batch of the step; their number may differ between steps.
        """
        self.set_gradient_accumulation_boundary(last)

    def drop_gradients(self) -> None:
        """Drops the gradients accumulated since the last step, as DeepSpeed's step does after an overflow."""
        self.optimizer.zero_grad()
        if self.shards_weights:
            self.optimizer._pre_step()
            return
        self.optimizer._release_preflattened_grad_buffers()
        for group in self.optimizer.averaged_gradients:
            self.optimizer.averaged_gradients[group] = self.optimizer.all_grad_tensors[group] = None

    @property
    def shards_weights(self) -> bool:
        """Whether this is ZeRO-3."""
        return bool(self.zero_optimization_stage() == 3)

    def skip_step(self) -> None:
        """Ends a step without changing weights and optimizer, as DeepSpeed's step does after an overflow."""
        self.drop_gradients()
        self.optimizer.overflow, self._global_grad_norm = True, inf

    def set_learning_rate(self, learning_rate: float) -> None:
        """Sets the learning rate of the next step."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate * group["lr_scale"]

    @property
    def reduced_gradients(self) -> Tensor:
        """This rank's part of ZeRO-3's reduced gradients, flat fp32; may be modified in place before a step."""
        gradients: Tensor = self.optimizer.grad_partitions_flat_buffer
        return gradients

    @property
    def skipped(self) -> bool:
        """Whether the last step was skipped because of a non-finite gradient."""
        return bool(self.optimizer.overflow)

    @property
    def norm(self) -> Tensor:
        """Global 2-norm of the last step's gradients before clipping, fp64 scalar on the device."""
        norm = self.get_global_grad_norm()
        if isinstance(norm, Tensor):
            return norm.detach().to(self.device, torch.float64)
        return torch.full((), norm, dtype=torch.float64, device=self.device)
