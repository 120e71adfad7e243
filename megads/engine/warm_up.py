"""Runs every pass of a new shape once before the first message of a step.

The first pass of a shape compiles and loads its kernels. Here all ranks do so at the same time, instead of each when
the first message reaches it, and no message waits meanwhile.
"""

from __future__ import annotations

import math
import sys
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from megads.batch import MicroBatch, copy_to
from megads.engine.optimizer import BucketOptimizer
from megads.engine.stage_pipeline import StagePipeline, activation_shape
from megads.parallel.pipeline_actions import Action, ActionKind
from megads.parallel.weight_gradients import WeightGradients

_BACKWARDS = (ActionKind.backward, ActionKind.backward_input)
"""Kinds of backward passes; the second includes the deferred weight gradients."""


class WarmUp:
    """Runs the passes of a pipeline rank's stages for each new shape of activations.

    Inputs from other stages are zeros. Results and gradients are discarded: the caller must reset the optimizer's
    gradients, as at the start of every step. The only communication is that inside of a stage, over tensor- and
    context-parallel ranks: they run the same passes.

    Args:
        module: this rank's stages.
        optimizer: optimizer of their parameters.
        weight_gradients: weight gradients of their layers, which a split backward pass defers.

    Attributes:
        enabled: whether `run` does anything: on GPUs with pipeline parallelism.
    """

    def __init__(self, module: StagePipeline, optimizer: BucketOptimizer, weight_gradients: WeightGradients) -> None:
        self._module, self._optimizer, self._weight_gradients = module, optimizer, weight_gradients
        self._device, self._trace = module.spec.device, module.spec.grid.trace
        self.enabled = self._device.type == "cuda" and module.spec.parallel.pp > 1
        self._warm: set[tuple[bool, tuple[int, ...]]] = set()

    def run(self, actions: Sequence[Action], micro_batches: Sequence[MicroBatch]) -> None:
        """Runs every kind of pass once for each shape that is new.

        Args:
            actions: this rank's actions of the step, or of the evaluation if gradients are disabled.
            micro_batches: micro-batches of the step on this rank.
        """
        if not self.enabled:
            return
        trains = torch.is_grad_enabled()
        shapes = {(trains, activation_shape(batch, self._module.spec)): batch for batch in reversed(micro_batches)}
        new = {shape: batch for shape, batch in shapes.items() if shape not in self._warm}
        if not new:
            return
        begin = time.perf_counter()
        used = {action.kind for action in actions}
        kinds = [kind for kind in _BACKWARDS if kind in used] if trains else [None]
        self._optimizer.begin(overlap=False)
        with self._trace.paused(), self.unwatched():
            for batch in new.values():
                for stage in self._module.chunks:
                    for kind in kinds:
                        self._run_pass(kind, batch, stage)
        self._warm |= set(new)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        what = "training" if trains else "evaluation"
        shapes_text = ", ".join("x".join(map(str, shape)) for _, shape in new)
        took = time.perf_counter() - begin
        sys.stdout.write(f"warmed up the passes of {what} for activations of {shapes_text} in {took:.1f} s\n")

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """Context in which neither forward hooks nor the loss' recorder see the passes."""
        layers = [layer for chunk in self._module.chunks.values() for layer in chunk]
        hooks = [layer._forward_hooks for layer in layers]
        try:
            for layer in layers:
                layer._forward_hooks = OrderedDict()
            with self._module.token_loss.recorded_by(None):
                yield
        finally:
            for layer, own in zip(layers, hooks, strict=True):
                layer._forward_hooks = own

    def _run_pass(self, kind: ActionKind | None, batch: MicroBatch, stage: int) -> None:
        """Runs a stage's passes on zeros, or on the micro-batch's own tokens and labels; the results are discarded.

        Args:
            kind: kind of the backward pass; None: only a forward pass.
            batch: the micro-batch.
            stage: the virtual stage.
        """
        module = self._module
        info = batch.info.to(self._device)
        if module.is_first(stage):
            assert batch.tokens_bs is not None
            hidden = copy_to(batch.tokens_bs, self._device)
        else:
            dtype = next(module.parameters()).dtype
            hidden = torch.zeros(activation_shape(batch, module.spec), dtype=dtype, device=self._device)
            hidden.requires_grad_(kind is not None)
        if module.is_last(stage):
            output = module.loss(hidden, info, batch.targets_on(self._device))
        else:
            output = module(stage, hidden, info)
            torch.linalg.vector_norm(output.detach(), math.inf)  # as NativeEngine._run_forward
        gradient = None if module.is_last(stage) else torch.zeros_like(output)
        if kind is ActionKind.backward:
            torch.autograd.backward(output, gradient)
        elif kind is ActionKind.backward_input:
            with self._weight_gradients.defer() as gradients:
                torch.autograd.backward(output, gradient)
            with torch.no_grad():
                gradients.compute(self._optimizer)
