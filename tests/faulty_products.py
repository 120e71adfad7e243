"""Flips bits in what a rank's matrix products compute, once or for good."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megads.ops import linear as products

_RESULT_IS_FIRST_ARGUMENT = ("linear_into", "add_weight_gradient")


def flip_bits(tensor: Tensor, element: int, bit: int) -> None:
    """Flips one bit of some elements side by side, in place: dropout, or rounding of a sum, may hide a single one."""
    words = tensor.detach().view(torch.int16 if tensor.element_size() == 2 else torch.int32)
    places = torch.arange(element, element + 8) % words.numel()
    index = torch.unravel_index(places, words.shape)
    # A mantissa of bf16 has seven bits.
    words[index] ^= 1 << (bit % 7 if tensor.element_size() == 2 else bit)


class FaultyProducts:
    """Breaks the matrix products of this process from `install` to `remove`.

    Args:
        wrong: given the number of a product since `install`, from 0; returns the first element and the bit that flip.
            None: the product is right.
        kinds: of products that are counted, names of functions of megads.ops.linear.
    """

    def __init__(self, wrong: Callable[[int], tuple[int, int] | None], *kinds: str) -> None:
        self._wrong, self._kinds, self._count = wrong, kinds or ("linear", "linear_into"), 0
        self._right: dict[str, Any] = {}

    def install(self) -> None:
        """Breaks them."""
        for kind in self._kinds:
            self._right[kind] = getattr(products, kind)
            setattr(products, kind, self._faulty(kind))

    def remove(self) -> None:
        """Mends them."""
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
    """A transient fault: the product with this number."""
    return lambda count: (5, bit) if count == number else None


def always_the_same(_count: int) -> tuple[int, int]:
    """A persistent fault that repeats itself: every product has the same wrong bit."""
    return 5, 20


def at_random(count: int) -> tuple[int, int]:
    """A persistent fault that does not: every product has another wrong bit."""
    return 5 + count, 8 + count % 7
