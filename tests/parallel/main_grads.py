"""The main_grad of one weight, as the optimizer holds it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megads.parallel.weight_gradients import Addend


class FlatMainGrads:
    """Implements `megads.parallel.weight_gradients.MainGrads` for one weight.

    Attributes:
        sums: fp32 main_grad; its contents before the first gradient are ignored.
        finished: number of calls of `done`.
    """

    def __init__(self, weight: Tensor) -> None:
        self.sums, self.finished, self._first = torch.full(weight.shape, torch.nan), 0, True

    def add(self, _weight: nn.Parameter, gradient: Addend) -> None:
        gradient.add_to(self.sums, self._first)
        self._first = False

    def done(self, _weight: nn.Parameter) -> None:
        self.finished += 1
