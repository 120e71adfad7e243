"""The sums of one weight's gradients, as the optimizer has them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megads.parallel.weight_gradients import Addend


class FlatMainGrads:
    """What `megads.parallel.weight_gradients.MainGrads` asks for, of one weight.

    Attributes:
        sums: fp32; what was in memory before the first gradient does not count.
        finished: how many passes were said to be done.
    """

    def __init__(self, weight: Tensor) -> None:
        self.sums, self.finished, self._first = torch.full(weight.shape, torch.nan), 0, True

    def add(self, _weight: nn.Parameter, gradient: Addend) -> None:
        gradient.add_to(self.sums, self._first)
        self._first = False

    def done(self, _weight: nn.Parameter) -> None:
        self.finished += 1
