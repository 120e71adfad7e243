"""Dropout (Srivastava et al. 2014) with masks that are a pure function of position, from the generator Philox4x32-10.

The generator is counter-based (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"). A mask is not stored
and has no state: forward pass, backward pass and recomputation generate the same mask, on a CPU or a GPU, for any part
of it that a rank holds. megads' kernels generate the same bits (kernels/cpu/philox.h, kernels/cuda/philox.cuh).

The key is 64 bits from (seed, site). The counter of eight consecutive elements is (element / 8, position, low word of
the sample's number, next 16 bits of that number and 16 bits of the head). Of the four output words, element 2i takes
the lower half of word i and element 2i + 1 the upper half; an element is dropped if its 16 bits are below the
threshold.

Shape suffixes: b = batch, n = heads, s = positions (queries or tokens), e = elements (keys or features), h = hidden
size.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megads.ops.config import DRAWN_AT_ONCE, TORCH, KernelOp, Kernels
from megads.ops.device_cache import device_cache

RESOLUTION = 2**16
"""Dropout probabilities are multiples of 1 / RESOLUTION."""
ELEMENTS = 8
"""Elements per counter."""
ROUNDS, MULTIPLIERS, WEYL = 10, (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
WORD = 2**32 - 1


def site_key(seed: int, site: str) -> int:
    """Key of a dropout site in the model, as a signed 64-bit integer.

    Args:
        seed: seed of the run.
        site: name of the site, for example "blocks.3.mlp_dropout".
    """
    digest = hashlib.blake2b(struct.pack("<q", seed) + site.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def threshold_of(p: float) -> int:
    """Number of 16-bit values, out of RESOLUTION, that drop an element: p rounded to 1 / RESOLUTION, and below 1."""
    return min(round(p * RESOLUTION), RESOLUTION - 1)


@dataclass(frozen=True, eq=False)
class DropoutMask:
    """Dropout mask of a micro-batch at one site; its elements are computed on demand.

    Attributes:
        key: `site_key` of seed and site.
        threshold: `threshold_of` the dropout probability.
        samples_b: int64 global number of each sample, on the device of the input.
        first_head: index of this rank's first head in the unsharded model; 0 if there are no heads.
    """

    key: int
    threshold: int
    samples_b: Tensor
    first_head: int = 0

    @property
    def scale(self) -> float:
        """Factor of the kept elements; it makes the expectation exactly equal to that without dropout."""
        return RESOLUTION / (RESOLUTION - self.threshold)

    @property
    def arguments(self) -> tuple[Tensor, int, int, int]:
        """The mask as arguments of megads' operators."""
        return self.samples_b, self.key, self.threshold, self.first_head

    def keep(self, heads: int, places_s: Tensor, elements: int, first: int = 0) -> Tensor:
        """Bool [b, n, s, e], True for elements that are kept.

        Args:
            heads: number of heads, starting at `first_head`.
            places_s: int64 position of every row in its sample.
            elements: number of elements.
            first: index of the first element.
        """
        batch, rows_of_sample = len(self.samples_b), heads * len(places_s)
        heads_n = torch.arange(self.first_head, self.first_head + heads, device=places_s.device)
        sizes = (batch, heads, len(places_s))
        samples_b11 = self.samples_b[:, None, None]
        counters = (
            places_s.expand(sizes),
            (samples_b11 & WORD).expand(sizes),
            (((samples_b11 >> 32 & 0xFFFF) << 16) | heads_n[:, None]).expand(sizes),
        )
        rows = [x.reshape(-1, 1) for x in counters]
        before, offset = divmod(first, ELEMENTS)
        groups = -(-(offset + elements) // ELEMENTS)
        groups_g = torch.arange(before, before + groups, device=places_s.device)
        kept = torch.empty(batch * rows_of_sample, groups * ELEMENTS, dtype=torch.bool, device=places_s.device)
        at_once = max(1, DRAWN_AT_ONCE // (groups * ELEMENTS))
        for start in range(0, batch * rows_of_sample, at_once):
            block = slice(start, start + at_once)
            bits = philox_bits(self.key, groups_g, *(x[block] for x in rows))
            # Unsigned 16-bit numbers compare like signed ones with the highest bit flipped.
            torch.ge(bits.bitwise_xor_(-(2**15)), self.threshold - 2**15, out=kept[block])
        return kept[:, offset : offset + elements].reshape(*sizes, elements)


@device_cache(8)
def _multipliers(device: torch.device) -> tuple[Tensor, Tensor]:
    """Philox's multipliers [2, 1, 1], and in reverse order; created on the device, which avoids a synchronization."""
    first, second = (torch.full((1, 1, 1), factor, dtype=torch.int64, device=device) for factor in MULTIPLIERS)
    return torch.cat([first, second]), torch.cat([second, first])


def philox_bits(key: int, first_g: Tensor, second_r1: Tensor, third_r1: Tensor, fourth_r1: Tensor) -> Tensor:
    """Random bits of counters (first, second, third, fourth), int16 [r, 8 g].

    Words are the lower halves of int64; multiplication wraps, so its bits equal those of the unsigned product.

    Args:
        key: key, 64 bits.
        first_g: first word of the counters, the same in every row, int64 [g].
        second_r1: second word of the counters of each row, int64 [r, 1].
        third_r1: third word, int64 [r, 1].
        fourth_r1: fourth word, int64 [r, 1].
    """
    device = first_g.device
    # Words 0 and 2 are multiplied, and their products swapped: in every other round word 2 comes first.
    multiplied = torch.empty(2, len(second_r1), len(first_g), dtype=torch.int64, device=device)
    multiplied[0] = first_g
    multiplied[1] = third_r1
    others: Tensor | tuple[Tensor, Tensor] = (second_r1, fourth_r1)
    words = [key & WORD, key >> 32 & WORD]
    for index in range(ROUNDS):
        product = multiplied * _multipliers(device)[index % 2]
        torch.bitwise_right_shift(product, 32, out=multiplied)
        for half in (0, 1):
            multiplied[half] ^= others[1 - half]
            multiplied[half] ^= words[(1 - half) if index % 2 == 0 else half]
        multiplied &= WORD
        others = product
        words = [(word + step) & WORD for word, step in zip(words, WEYL, strict=True)]
    assert isinstance(others, Tensor)
    both = multiplied | others << 32
    return both.movedim(0, -1).contiguous().view(torch.int16).flatten(1)


def dropout(
    x_bsh: Tensor,
    mask: DropoutMask,
    places_s: Tensor | None = None,
    residual_bsh: Tensor | None = None,
    kernels: Kernels = TORCH,
) -> Tensor:
    """x * keep * scale + residual, in x's dtype. megads' kernel rounds once, saves no mask and regenerates it.

    Plain PyTorch saves the mask, one byte per element, since generating it is expensive there.

    Args:
        x_bsh: input; megads' kernel is used if `megads.ops.config.kernel_supports` it, and computes in fp32 internally.
        mask: dropout mask; its rows are tokens, its elements features.
        places_s: int64 position of every token in its sample; None: 0..s-1.
        residual_bsh: residual in x's dtype; None: nothing is added.
        kernels: selects the implementation.
    """
    assert mask.first_head == 0 and len(mask.samples_b) == len(x_bsh), (
        f"{len(x_bsh)} rows, but {len(mask.samples_b)} numbers of samples"
    )
    if kernels.takes(KernelOp.dropout, x_bsh):
        residual_bsh = None if residual_bsh is None else residual_bsh.contiguous()
        samples_b, key, threshold, _ = mask.arguments
        out: Tensor = torch.ops.megads.dropout(x_bsh.contiguous(), residual_bsh, places_s, samples_b, key, threshold)
        return out
    places_s = torch.arange(x_bsh.shape[1], device=x_bsh.device) if places_s is None else places_s
    dropped_bsh = x_bsh * mask.keep(1, places_s, x_bsh.shape[2])[:, 0] * mask.scale
    return dropped_bsh if residual_bsh is None else residual_bsh + dropped_bsh


def register() -> None:
    """Registers the fake implementation and autograd of the operator; requires that the library is loaded."""

    @torch.library.register_fake("megads::dropout")
    def _(
        x: Tensor, residual: Tensor | None, places: Tensor | None, samples: Tensor, key: int, threshold: int
    ) -> Tensor:
        return torch.empty_like(x)

    def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, residual, places, samples, ctx.key, ctx.threshold = inputs
        ctx.has_residual = residual is not None
        ctx.save_for_backward(places, samples)

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        found = torch.ops.megads.dropout(grad.contiguous(), None, *ctx.saved_tensors, ctx.key, ctx.threshold)
        return found, grad if ctx.has_residual else None, None, None, None, None

    torch.library.register_autograd("megads::dropout", backward, setup_context=save)
