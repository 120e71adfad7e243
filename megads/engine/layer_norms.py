"""Norms of every layer's gradient and output, where they are asked for: they show which layer begins to diverge."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megads.engine.interface import Shard, TrainEngine
from megads.model.config import ModelConfig
from megads.model.stage_names import EMBEDDING, HEAD, is_block
from megads.runtime.hooks import StepInfo, TrainState
from megads.runtime.metrics import MetricsWriter

FINAL_NORM = "final_norm"


def layer_names(model: ModelConfig) -> list[str]:
    """The model's layers in order; a head that is the embedding is counted with it."""
    names = [EMBEDDING, *(f"blocks.{number}" for number in range(model.num_layers)), FINAL_NORM, HEAD]
    return names[:-1] if model.tie_embeddings else names


class LayerNormsHook:
    """Measures every n-th step and writes a line of metrics: `layers/<layer>/grad_norm` and `/activation_rms`.

    The gradient's is the 2-norm before clipping, whose squares add up to that of `grad_norm`. The output's is the root
    mean square over all elements of the step's micro-batches; the head has none. Sums stay on the device until the step
    is over, when ranks add them and the host reads them once.

    Args:
        engine: that trains.
        layers: of the whole model.
        every_steps: n.
        metrics: where the line goes.
    """

    def __init__(self, engine: TrainEngine, layers: Sequence[str], every_steps: int, metrics: MetricsWriter) -> None:
        self._engine, self._layers, self._every_steps, self._metrics = engine, list(layers), every_steps, metrics
        self._number = {name: number for number, name in enumerate(self._layers)}
        self._sums = self._zeros()

    def _zeros(self) -> Tensor:
        """fp64 [3, layers]: squares of gradients, squares of outputs, and how many elements these are."""
        return torch.zeros(3, len(self._layers), dtype=torch.float64, device=self._engine.device)

    def on_start(self, state: TrainState) -> None:
        self._prepare(state.step + 1)

    def on_step(self, info: StepInfo) -> None:
        if info.step % self._every_steps == 0:
            self._engine.watch_activations(None)
            self._write(info)
        if not info.last:
            self._prepare(info.step + 1)

    def on_end(self, state: TrainState) -> None:
        pass

    def _prepare(self, step: int) -> None:
        if step % self._every_steps == 0:
            self._sums = self._zeros()
            self._engine.watch_gradients(self._note_gradients)
            self._engine.watch_activations(self._note_output)

    def _note_gradients(self, shards: list[Shard]) -> None:
        for shard in shards:
            parts = shard.key.partition("/")[2].split(".")
            name = ".".join(parts[:2]) if is_block(".".join(parts)) else parts[0]
            self._sums[0, self._number[name]] += _square(shard.tensor)

    def _note_output(self, name: str, hidden: Tensor) -> None:
        number = self._number[name]
        self._sums[1, number] += _square(hidden)
        self._sums[2, number] += hidden.numel()

    def _write(self, info: StepInfo) -> None:
        """Collective over the world."""
        if self._engine.grid.world_size > 1:
            dist.all_reduce(self._sums)
        gradients, outputs, elements = self._sums.tolist()
        if self._engine.grid.rank:
            return
        line: dict[str, float] = {"step": info.step, "samples": info.samples, "tokens": info.tokens}
        for name, gradient, output, count in zip(self._layers, gradients, outputs, elements, strict=True):
            line[f"layers/{name}/grad_norm"] = gradient**0.5
            if count:
                line[f"layers/{name}/activation_rms"] = (output / count) ** 0.5
        self._metrics.write(line)


def _square(x: Tensor) -> Tensor:
    """The sum of squares, added up in fp32 at least without a copy of x; fp64 scalar on its device."""
    return torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32)).double().square()
