"""Training engine for ZeRO-2, ZeRO-3 and hierarchical sharding, without pipeline: every rank runs all stages.

DeepSpeed's ZeRO-2 and ZeRO-3 wrap a base optimizer: PyTorch's AdamW, or another update rule on the master weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import compress
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from megads.batch import MicroBatch
from megads.engine.deepspeed_adapter import ZeroExecutor, ZeroPiece, gather_as_one, shard_weights, zero_settings
from megads.engine.deepspeed_state import (
    PartitionedEngine,
    ZeroMasterState,
    make_optimizer,
    master_layouts,
    tie_weights,
)
from megads.engine.interface import Culprit, EngineSpec
from megads.engine.stage_pipeline import build_layer, local_shape, run_layers, wrap_blocks
from megads.engine.train_engine import agree_on_culprit, not_finite
from megads.model.config import EMBEDDING, HEAD, TIED_PARAMETER
from megads.model.gpt import layer_specs
from megads.optim.groups import BUCKET_ELEMENTS, bucket_elements, parameter_groups
from megads.parallel.grid import Axis
from megads.parallel.loss import TokenMeanLoss
from megads.parallel.sharding import placement_of


class ShardedModel(nn.Module):
    """This rank's tensor-parallel shard of every layer, and the loss.

    Args:
        spec: specification of the engine.
        loss: loss of a micro-batch.
        shard: called with every layer as soon as it is built, so that ZeRO-3 can partition its weights before the next
            one is initialized; no rank ever holds the whole model.

    Attributes:
        offload: offloads the blocks' activations; None if they stay on the device.
    """

    def __init__(self, spec: EngineSpec, loss: TokenMeanLoss, shard: Callable[[nn.Module], None] | None = None) -> None:
        super().__init__()
        self.loss = loss
        tied = spec.model.tie_embeddings
        self.tied_key = TIED_PARAMETER if tied else None
        layers: dict[str, nn.Module] = {}
        rows: tuple[int, ...] = ()
        for layer_spec in layer_specs(spec.model, spec.seed):
            layer = build_layer(layer_spec, spec).to(spec.precision)
            if tied and layer_spec.name == HEAD:
                tie_weights(layers[EMBEDDING].word, layer, rows)  # type: ignore[arg-type]
            if layer_spec.name == EMBEDDING:
                rows = tuple(layer.word.weight.shape)  # type: ignore[union-attr, arg-type]
            if shard is not None:
                shard(layer)
                for module in layer.modules():
                    if getattr(module, "is_chunked", False):  # its layers are called once for each chunk
                        gather_as_one(module)
            layers[layer_spec.name] = layer
        self.names, self.layers = tuple(layers), nn.ModuleList(layers.values())
        self.offload = wrap_blocks(layers, spec)

    def forward(self, batch: MicroBatch) -> Tensor:
        """Returns the scaled loss of a micro-batch on the model's device; fp64 scalar."""
        assert batch.tokens_bs is not None and batch.labels_bs is not None and batch.loss_mask_bs is not None
        *layers, head = self.layers
        hidden = run_layers(layers, batch.tokens_bs, batch.info)
        return self.loss.of_head(head, hidden, batch.info, (batch.labels_bs, batch.loss_mask_bs))


def all_reduced_fp32(axis: Axis, grad: Tensor) -> Tensor:
    """All-reduces a gradient over an axis in fp32; returns it in its own dtype."""
    total = grad.float() if grad.dtype is not torch.float32 else grad.clone()
    dist.all_reduce(axis.recorded(total), group=axis.group)
    return total.to(grad.dtype)


class ZeroEngine(PartitionedEngine):
    """TrainEngine for ZeRO-2 or ZeRO-3 with tensor parallelism: runs micro-batches through DeepSpeed's ZeRO engine.

    The number of micro-batches may differ between steps. The subgroups of a hierarchical layout all-reduce their
    gradients once per step, in fp32. Gradients of parameters that sequence parallelism replicates are all-reduced over
    the tensor-parallel ranks. Each rank records where non-finite values appear.

    Args:
        spec: specification of the engine.

    Attributes:
        module: the model; under ZeRO-3 its weights are partitioned.
        deepspeed: the DeepSpeed engine.
        gradient_norms: 2-norms of this rank's local gradients, before any reduction.
    """

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        settings = zero_settings(spec, BUCKET_ELEMENTS)
        shard = partial(shard_weights, grid=spec.grid, precision=spec.precision, settings=settings)
        module = self.module = ShardedModel(spec, self._loss, shard if spec.parallel.zero_stage == 3 else None)
        groups = parameter_groups(
            ((placement_of(p).key, p) for p in module.parameters()),
            tied_name=module.tied_key,
            optim=spec.optim,
            width_scale=spec.model.width_scale(muon=spec.optim.is_muon),
        )
        optimizer = make_optimizer(groups, spec)
        bucket = bucket_elements([prod(local_shape(p)) for p in module.parameters()])
        self.deepspeed = ZeroExecutor(module, optimizer, zero_settings(spec, bucket), spec.grid)
        self.partitions = self.deepspeed.state
        layouts = master_layouts(self.partitions, spec.grid, module.tied_key, muon=spec.optim.is_muon)
        self.masters = ZeroMasterState(optimizer, self.partitions.masters, layouts, spec.optim)
        self.averaged_over = self.deepspeed.averaged_over
        self.gradient_norms: dict[Parameter, Tensor] = {}
        for parameter in module.parameters():
            if getattr(parameter, "gradient_partial", False):
                parameter.register_hook(partial(all_reduced_fp32, spec.grid.tp))
            parameter.register_hook(partial(self._note_gradient, parameter))

    def _note_gradient(self, parameter: Parameter, grad: Tensor) -> None:
        # Local gradient, before the reduction spreads a non-finite value; stays on the device.
        norm = torch.linalg.vector_norm(grad, dtype=torch.float32)
        self._trace.record(f"the gradient of {placement_of(parameter).key}", grad)
        known = self.gradient_norms.get(parameter)
        self.gradient_norms[parameter] = norm if known is None else known + norm

    @property
    def _norm(self) -> Tensor:
        norm: Tensor = self.deepspeed.norm
        return norm

    def _compute(self, micro_batches: Sequence[MicroBatch], *, overlap: bool = True) -> Tensor:
        """Reduces the gradients during the backward pass, regardless of `overlap`."""
        if self._span_watches:
            self._spans.begin()
        self.module.train()
        self.gradient_norms = {}
        self._forward_finite.fill_(True)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for index, batch in enumerate(micro_batches):
            self._trace.context = f"micro-batch {index}"
            self.deepspeed.begin_micro_batch(last=index == len(micro_batches) - 1)
            with self._spans.span("forward", index, 0):
                loss = self.deepspeed(batch.to(self.device))
            self._forward_finite &= torch.isfinite(loss.detach())
            self._trace.record("the loss", loss)
            with self._spans.span("backward", index, 0):
                self.deepspeed.backward(loss)
            total += loss.detach()
        if self.grid.replica.size > 1:
            dist.all_reduce(self.deepspeed.reduced_gradients, group=self.grid.replica.group)
        return total

    def _forget(self) -> None:
        self.deepspeed.drop_gradients()

    def _reduce(self) -> None:
        """Does nothing: `_compute` has already reduced the gradients."""

    @property
    def _own_norms(self) -> list[Tensor]:
        return list(self.gradient_norms.values())

    def _update(self, learning_rate: float) -> None:
        if self._update_wait is not None:
            self._update_wait()
        self.deepspeed.set_learning_rate(learning_rate)
        with self._spans.span("optimizer_step"):
            # Waits for the device, as DeepSpeed's step does anyway.
            if self.deepspeed.shards_weights and self._reduced_norm().isfinite().logical_not():
                self.deepspeed.skip_step()
            else:
                self.deepspeed.step()
            if not self.deepspeed.skipped:
                self.masters.update_averages()

    @torch.no_grad()
    def _run_evaluation(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        self.module.eval()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for batch in micro_batches:
            total += self.module(batch.to(self.device))
        return total

    @property
    def bounds(self) -> list[int]:
        """One pipeline stage holds all layers."""
        return [0, len(self.module.layers)]

    @property
    def _loss_rank(self) -> int:
        return 0

    def layers(self) -> Iterator[tuple[str, nn.Module]]:
        """See TrainEngine.layers."""
        module = self.module
        return zip(module.names, module.layers, strict=True)

    def _finish_step(self, norm: float) -> tuple[float, bool]:
        return norm, self.deepspeed.skipped

    def _culprit(self) -> Culprit:
        pieces = list(self.partitions.pieces())
        cut = not_finite([torch.isfinite(self.masters.views_of(piece)["weight"]).all() for piece in pieces])
        # A parameter may have several pieces; keep each name once.
        weights = dict.fromkeys(placement_of(piece.parameter).key for piece in compress(pieces, cut))
        broken = not_finite([torch.isfinite(norm) for norm in self.gradient_norms.values()])
        forward_stage = None if self._forward_finite.item() else 0
        gradients = [(0, placement_of(p).key) for p in compress(self.gradient_norms, broken)]
        return agree_on_culprit(self.grid.control, list(weights), forward_stage, gradients)

    def _parameters(self) -> Iterator[Parameter]:
        return self.module.parameters()

    def _owns(self, piece: ZeroPiece) -> bool:
        """In the first subgroup and, for replicated parameters, on the first tensor-parallel rank."""
        replicated = placement_of(piece.parameter).dim is None
        return self.grid.replica.is_first and (self.grid.tp.is_first or not replicated)

    def _copies(self, _parameter: Parameter, *, working: bool) -> dict[str, Axis]:
        return {"data": self.grid.data} if working else {"replica": self.grid.replica}
