"""Flips bits in the results of a rank's GEMMs, once or persistently."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megads.ops import linear as products

_RESULT_IS_FIRST_ARGUMENT = ("linear_into", "add_weight_gradient")


def flip_bits(tensor: Tensor, element: int, bit: int) -> None:
    """Flips one bit in each of eight adjacent elements, in place: dropout, or rounding, may hide a single one."""
    words = tensor.detach().view(torch.int16 if tensor.element_size() == 2 else torch.int32)
    places = torch.arange(element, element + 8) % words.numel()
    index = torch.unravel_index(places, words.shape)
    # The mantissa of bf16 has seven bits.
    words[index] ^= 1 << (bit % 7 if tensor.element_size() == 2 else bit)


class FaultyProducts:
    """Makes the GEMMs of this process faulty from `install` to `remove`.

    Args:
        wrong: maps the number of a GEMM since `install`, from 0, to the first element and the bit to flip. None: the
            GEMM is correct.
        kinds: GEMMs that are counted, names of functions of megads.ops.linear.
    """

    def __init__(self, wrong: Callable[[int], tuple[int, int] | None], *kinds: str) -> None:
        self._wrong, self._kinds, self._count = wrong, kinds or ("linear", "linear_into"), 0
        self._right: dict[str, Any] = {}

    def install(self) -> None:
        """Replaces the GEMMs by faulty ones."""
        for kind in self._kinds:
            self._right[kind] = getattr(products, kind)
            setattr(products, kind, self._faulty(kind))

    def remove(self) -> None:
        """Restores the GEMMs."""
        for kind, right in self._right.items():
            setattr(products, kind, right)
        self._right = {}

    def _faulty(self, kind: str) -> Callable[..., Any]:
        right = self._right[kind]

        def multiply(*args: Any, **kwargs: Any) -> Any:
            out = right(*args, **kwargs)
            where = self._wrong(self._count)
            self._count += 1
            if where is not None:
                flip_bits(args[0] if kind in _RESULT_IS_FIRST_ARGUMENT else out, *where)
            return out

        return multiply


def once(number: int, bit: int = 20) -> Callable[[int], tuple[int, int] | None]:
    """A transient fault: flips bits in the GEMM with this number."""
    return lambda count: (5, bit) if count == number else None


def always_the_same(_count: int) -> tuple[int, int]:
    """A persistent, reproducible fault: flips the same bit in every GEMM."""
    return 5, 20


def at_random(count: int) -> tuple[int, int]:
    """A persistent, non-reproducible fault: flips a different bit in every GEMM."""
    return 5 + count, 8 + count % 7
