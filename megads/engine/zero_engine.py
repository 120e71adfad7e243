"""Training engine for ZeRO-2, ZeRO-3 and hierarchical sharding, without pipeline: every rank runs all stages.

DeepSpeed's ZeRO-2 and ZeRO-3 wrap a base optimizer: PyTorch's AdamW, or another update rule on the master weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import compress
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from megads.batch import MicroBatch
from megads.engine.deepspeed_adam import deepspeed_adamw
from megads.engine.deepspeed_adapter import (
    ZeroExecutor,
    ZeroPiece,
    ZeroState,
    prepare_deepspeed,
    shard_weights,
    zero_settings,
)
from megads.engine.interface import Culprit, EngineSpec, Replica
from megads.engine.stage_pipeline import build_stage, local_shape, placement_of, run_stages, wrap_blocks
from megads.engine.timeline import SpanRecorder
from megads.engine.train_engine import (
    BaseTrainEngine,
    HeldTensors,
    agree_on_culprit,
    not_finite,
    replica_lines,
    same_bits,
)
from megads.model.config import EMBEDDING, HEAD, TIED_PARAMETER, fused_rows, sharding_of
from megads.model.gpt import stage_specs
from megads.optim.config import OptimConfig
from megads.optim.groups import AVERAGE, BUCKET_ELEMENTS, bucket_elements, parameter_groups, parameter_role, state_kinds
from megads.optim.masters import MasterLayout, MasterLine, MasterUpdate, ParameterRun, UpdateRule, update_average
from megads.optim.optimizers import make_rule
from megads.parallel.grid import Axis, ParallelGrid
from megads.parallel.loss import TokenMeanLoss
from megads.parallel.weight_gradients import SplitLayer, TiedGradient


class RuleDrivenByZero(Optimizer):
    """Applies an update rule to the fp32 masters that DeepSpeed substitutes for the parameters, some at a time.

    DeepSpeed clips the gradients before and skips non-finite steps.

    Attributes:
        layouts: layouts of the masters, set once DeepSpeed has created them.
    """

    def __init__(self, groups: list[dict[str, Any]], rule: UpdateRule, lr: float) -> None:
        """Initializes the parameter groups.

        Args:
            groups: parameter groups with `params`, `lr_scale` and `weight_decay`.
            rule: the update rule.
            lr: initial learning rate.
        """
        super().__init__(groups, {"lr": lr})
        self._rule, self.layouts = rule, dict[Tensor, MasterLayout]()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates the masters that are currently in the parameter groups."""
        assert closure is None
        updates = []
        for group in self.param_groups:
            for master in group["params"]:
                state = {kind: tensor for kind, tensor in self.state[master].items() if kind != "step"}
                taken = self.state[master]["step"].add_(1.0)
                how = (group["lr"], group["weight_decay"], int(taken.item()))
                updates.append(MasterUpdate(master.detach(), master.grad, state, *how, self.layouts[master]))
        self._rule(updates)


def make_zero_optimizer(groups: list[dict[str, Any]], spec: EngineSpec) -> Optimizer:
    """Builds the configured optimizer.

    Args:
        groups: parameter groups from `megads.optim.groups.parameter_groups`.
        spec: specification of the engine.
    """
    optim = spec.optim
    if rule := deepspeed_adamw(optim, spec.device):
        return RuleDrivenByZero(groups, rule, optim.lr)
    if optim.is_adamw:
        beta1, beta2 = optim.betas
        return torch.optim.AdamW(groups, lr=optim.lr, betas=(beta1, beta2), eps=optim.eps, fused=True)
    line, fused = MasterLine.of_zero3(spec.grid), fused_rows(spec.model)
    return RuleDrivenByZero(groups, make_rule(optim, line, spec.kernels, fused, spec.precision), optim.lr)


def master_layouts(state: ZeroState, grid: ParallelGrid, tied_key: str | None, *, muon: bool) -> list[MasterLayout]:
    """Returns the positions of the parameters in each of a rank's masters.

    Args:
        state: state of the ZeRO optimizer.
        grid: the ranks.
        tied_key: name of the tied embedding parameter; None if there is none.
        muon: see `parameter_role`.
    """
    held = {(piece.master, piece.parameter): (piece.first, piece.start, piece.length) for piece in state.pieces()}
    layouts = []
    for master, parameters in enumerate(state.parameters):
        runs = []
        for parameter in parameters:
            place = placement_of(parameter)
            counted = place.dim is not None or grid.tp.is_first
            where = held.get((master, parameter), (0, 0, 0))
            runs.append(
                ParameterRun(place.key, local_shape(parameter), place.dim, counted, *where, place.held_by_ranks)
            )
        role = parameter_role(runs[0].name, tied=runs[0].name == tied_key, muon=muon)
        layouts.append(MasterLayout(role, tuple(runs)))
    return layouts


class ZeroMasterState:
    """Optimizer state and running averages of the masters, and the step count.

    Args:
        optimizer: base optimizer of ZeRO.
        masters: flat fp32 master tensors.
        layouts: layout of each master.
        optim: config of the optimizer.
    """

    def __init__(
        self, optimizer: Optimizer, masters: list[Tensor], layouts: list[MasterLayout], optim: OptimConfig
    ) -> None:
        self._optimizer, self._masters, self._ema_decay = optimizer, masters, optim.ema_decay
        self._averages = [] if optim.ema_decay is None else [master.detach().clone() for master in masters]
        if isinstance(optimizer, RuleDrivenByZero):
            optimizer.layouts = dict(zip(masters, layouts, strict=True))
        # An update rule reads the step count on the host.
        counts_on = torch.device("cpu") if isinstance(optimizer, RuleDrivenByZero) else masters[0].device
        # Created before the first step, so that a checkpoint of step 0 has the same tensors as any other.
        for master, layout in zip(masters, layouts, strict=True):
            kinds = state_kinds(optim, layout.role)
            optimizer.state[master] = {
                "step": torch.zeros((), dtype=torch.float32, device=counts_on),
                **{kind: torch.zeros_like(master, requires_grad=False) for kind in kinds},
            }

    def of(self, piece: ZeroPiece) -> dict[str, Tensor]:
        """Flat views of the master weight, optimizer state and running average of one piece, by kind."""
        master = self._masters[piece.master]
        state = {kind: tensor for kind, tensor in self._optimizer.state[master].items() if kind != "step"}
        averages = {AVERAGE: self._averages[piece.master]} if self._averages else {}
        tensors = {"weight": master.data, **state, **averages}
        return {kind: tensor.narrow(0, piece.start, piece.length) for kind, tensor in tensors.items()}

    @torch.no_grad()
    def update_averages(self) -> None:
        """Updates the running averages, if any, after a step that was not skipped."""
        for average, master in zip(self._averages, self._masters, strict=False):
            assert self._ema_decay is not None
            update_average(average, master.data, self._ema_decay)

    @torch.no_grad()
    def swap_averages(self) -> None:
        """Swaps masters and averages; needs memory for a copy of one master."""
        for average, master in zip(self._averages, self._masters, strict=True):
            held = master.data.clone()
            master.data.copy_(average)
            average.copy_(held)

    @property
    def steps(self) -> int:
        """Number of optimizer steps taken, skipped steps excluded."""
        return int(self._optimizer.state[self._masters[0]]["step"].item())

    def set_steps(self, steps: int) -> None:
        """Sets the step count used for bias correction."""
        for master in self._masters:
            self._optimizer.state[master]["step"].fill_(float(steps))


def tie_weights(embedding: SplitLayer, head: SplitLayer, shape: tuple[int, ...]) -> None:
    """Ties the output projection to the embedding's weight; their two gradients are added in fp32.

    Args:
        embedding: the embedding; ZeRO-3 may have partitioned its weight already.
        head: output projection with the same vocabulary.
        shape: shape of the weight before partitioning.
    """
    head.weight = embedding.weight
    head.weight_gradients = embedding.weight_gradients = TiedGradient(shape)


class WholeModel(nn.Module):
    """This rank's tensor-parallel shard of every stage, and the loss.

    Args:
        spec: specification of the engine.
        loss: loss of a micro-batch.
        shard: called with every stage as soon as it is built, so that ZeRO-3 can partition its weights before the next
            one is initialized; no rank ever holds the whole model.
    """

    def __init__(self, spec: EngineSpec, loss: TokenMeanLoss, shard: Callable[[nn.Module], None] | None = None) -> None:
        super().__init__()
        self.loss = loss
        tied = spec.model.tie_embeddings
        self.tied_key = TIED_PARAMETER if tied else None
        stages: dict[str, nn.Module] = {}
        rows: tuple[int, ...] = ()
        for stage_spec in stage_specs(spec.model, spec.seed):
            stage = build_stage(stage_spec, spec).to(spec.precision)
            if tied and stage_spec.name == HEAD:
                tie_weights(stages[EMBEDDING].word, stage, rows)  # type: ignore[arg-type]
            if stage_spec.name == EMBEDDING:
                rows = tuple(stage.word.weight.shape)  # type: ignore[union-attr, arg-type]
            if shard is not None:
                shard(stage)
            stages[stage_spec.name] = stage
        self.names, self.stages = tuple(stages), nn.ModuleList(stages.values())
        wrap_blocks(stages, spec.parallel, 0, spec.kernels.compiled, sharding_of(spec.model))

    def forward(self, batch: MicroBatch) -> Tensor:
        """Returns the scaled loss of a micro-batch on the model's device; fp64 scalar."""
        assert batch.tokens_bs is not None and batch.labels_bs is not None and batch.loss_mask_bs is not None
        *stages, head = self.stages
        hidden = run_stages(stages, batch.tokens_bs, batch.info)
        return self.loss.of_head(head, hidden, batch.info, (batch.labels_bs, batch.loss_mask_bs))


def summed_over(axis: Axis, grad: Tensor) -> Tensor:
    """All-reduces a gradient over an axis in fp32; returns it in its own dtype."""
    total = grad.float() if grad.dtype is not torch.float32 else grad.clone()
    dist.all_reduce(axis.recorded(total), group=axis.group)
    return total.to(grad.dtype)


class ZeroEngine(BaseTrainEngine):
    """TrainEngine for ZeRO-2 or ZeRO-3 with tensor parallelism: runs micro-batches through DeepSpeed's ZeRO engine.

    The number of micro-batches may differ between steps. The subgroups of a hierarchical layout all-reduce their
    gradients once per step, in fp32. Gradients of parameters that sequence parallelism replicates are all-reduced over
    the tensor-parallel ranks. Each rank records where non-finite values appear.

    Args:
        spec: specification of the engine.

    Attributes:
        module: the model; under ZeRO-3 its weights are partitioned.
        deepspeed: the DeepSpeed engine.
        masters: state of the base optimizer.
        gradient_norms: 2-norms of this rank's local gradients, before any reduction.
        forward_finite: whether all losses of the step were finite; on the device.
    """

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        prepare_deepspeed()
        settings = zero_settings(spec, BUCKET_ELEMENTS)
        shard = partial(shard_weights, grid=spec.grid, precision=spec.precision, settings=settings)
        module = self.module = WholeModel(spec, self._loss, shard if spec.parallel.zero_stage == 3 else None)
        groups = parameter_groups(
            ((placement_of(p).key, p) for p in module.parameters()),
            tied_name=module.tied_key,
            optim=spec.optim,
            width_scale=spec.model.width_scale(muon=spec.optim.is_muon),
        )
        optimizer = make_zero_optimizer(groups, spec)
        bucket = bucket_elements([prod(local_shape(p)) for p in module.parameters()])
        self.deepspeed = ZeroExecutor(module, optimizer, zero_settings(spec, bucket), spec.grid)
        layouts = master_layouts(self.deepspeed.state, spec.grid, module.tied_key, muon=spec.optim.is_muon)
        self.masters = ZeroMasterState(optimizer, self.deepspeed.state.masters, layouts, spec.optim)
        self.averaged_over = self.deepspeed.averaged_over
        self._whole_weights = spec.parallel.zero_stage < 3
        self._spans, self._trace = SpanRecorder(spec.device), spec.grid.trace
        self.gradient_norms: dict[Parameter, Tensor] = {}
        self.forward_finite = torch.ones((), dtype=torch.bool, device=spec.device)
        for parameter in module.parameters():
            if getattr(parameter, "gradient_partial", False):
                parameter.register_hook(partial(summed_over, spec.grid.tp))
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
        if self._span_watch is not None:
            self._spans.begin()
        self.module.train()
        self.gradient_norms = {}
        self.forward_finite.fill_(True)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for index, batch in enumerate(micro_batches):
            self._trace.context = f"micro-batch {index}"
            self.deepspeed.begin_micro_batch(last=index == len(micro_batches) - 1)
            with self._spans.span("forward", index, 0):
                loss = self.deepspeed(batch.to(self.device))
            self.forward_finite &= torch.isfinite(loss.detach())
            self._trace.record("the loss", loss)
            with self._spans.span("backward", index, 0):
                self.deepspeed.backward(loss)
            total += loss.detach()
        if self.grid.replica.size > 1:
            dist.all_reduce(self.deepspeed.reduced_gradients, group=self.grid.replica.group)
        return total

    def _forget(self) -> None:
        self.deepspeed.forget_gradients()

    def _reduce(self) -> None:
        """Does nothing: `_compute` has already reduced the gradients."""

    @torch.no_grad()
    def _reduced_norm(self) -> Tensor:
        """May differ in the last digits from `_norm`, which DeepSpeed's step computes."""
        state, square = self.deepspeed.state, torch.zeros((), dtype=torch.float64, device=self.device)
        for piece, gradient in zip(state.pieces(), state.gradients(), strict=True):
            if owns(self.grid, piece):
                square += gradient.double().square().sum()
        if self.grid.world_size > 1:
            dist.all_reduce(square)
        return square.sqrt()

    @property
    def _own_norms(self) -> list[Tensor]:
        return list(self.gradient_norms.values())

    def _update(self, learning_rate: float) -> None:
        if self._gradient_watch is not None:
            self._gradient_watch()
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
        if self._span_watch is not None:
            self._span_watch(self._spans.end())
            self._span_watch = None

    @torch.no_grad()
    def _run_evaluation(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        self.module.eval()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for batch in micro_batches:
            total += self.module(batch.to(self.device))
        return total

    @property
    def bounds(self) -> list[int]:
        """One stage holds all layers."""
        return [0, len(self.module.stages)]

    @property
    def optimizer_steps(self) -> int:
        """See TrainEngine.optimizer_steps."""
        return self.masters.steps

    @property
    def _loss_rank(self) -> int:
        return 0

    def _layers(self) -> Iterator[tuple[str, nn.Module]]:
        module = self.module
        return zip(module.names, module.stages, strict=True)

    def _settle(self, norm: float) -> tuple[float, bool]:
        return norm, self.deepspeed.skipped

    def _culprit(self) -> Culprit:
        pieces = list(self.deepspeed.state.pieces())
        cut = not_finite([torch.isfinite(self.masters.of(piece)["weight"]).all() for piece in pieces])
        # A parameter may have several pieces; keep each name once.
        weights = dict.fromkeys(placement_of(piece.parameter).key for piece in compress(pieces, cut))
        broken = not_finite([torch.isfinite(norm) for norm in self.gradient_norms.values()])
        forward_stage = None if self.forward_finite.item() else 0
        gradients = [(0, placement_of(p).key) for p in compress(self.gradient_norms, broken)]
        return agree_on_culprit(self.grid.control, list(weights), forward_stage, gradients)

    def _state(self) -> Iterator[HeldTensors]:
        for piece in self.deepspeed.state.pieces():
            yield HeldTensors(piece.parameter, piece.first, owns(self.grid, piece), self.masters.of(piece))

    def replicas(self) -> list[Replica]:
        """See TrainEngine.replicas."""
        grid, found = self.grid, list[Replica]()
        for parameter in self.module.parameters() if self._whole_weights else ():
            lines = replica_lines(parameter, grid, {"data": grid.data})
            found.append(Replica(f"working_weight/{placement_of(parameter).key}", parameter.data.view(-1), lines))
        for piece in self.deepspeed.state.pieces():
            lines = replica_lines(piece.parameter, grid, {"replica": grid.replica})
            name = placement_of(piece.parameter).key
            found += [Replica(f"{kind}/{name}", flat, lines) for kind, flat in self.masters.of(piece).items()]
        return found

    def stale_weights(self) -> list[str]:
        """See TrainEngine.stale_weights."""
        pieces = list(self.deepspeed.state.pieces()) if self._whole_weights else []
        whole = []
        for piece in pieces:
            own = piece.parameter.data.view(-1).narrow(0, piece.first, piece.length)
            whole.append(same_bits(own, self.masters.of(piece)["weight"].to(own.dtype)))
        return [placement_of(piece.parameter).key for piece in compress(pieces, not_finite(whole))]

    def _gradients(self) -> Iterator[HeldTensors]:
        state = self.deepspeed.state
        for piece, gradient in zip(state.pieces(), state.gradients(), strict=True):
            yield HeldTensors(piece.parameter, piece.first, owns(self.grid, piece), {"gradient": gradient})

    def _set_optimizer_steps(self, steps: int) -> None:
        self.masters.set_steps(steps)

    def _refresh_weights(self) -> None:
        self.deepspeed.state.refresh_weights()

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """See TrainEngine.averaged_weights."""
        if self._update_wait is not None:
            self._update_wait()
        self.masters.swap_averages()
        self._refresh_weights()
        yield
        self.masters.swap_averages()
        self._refresh_weights()


def owns(grid: ParallelGrid, piece: ZeroPiece) -> bool:
    """Whether this rank owns a piece: it is in the first subgroup and, for replicated parameters, the first TP rank."""
    replicated = placement_of(piece.parameter).dim is None
    return grid.replica.is_first and (grid.tp.is_first or not replicated)
