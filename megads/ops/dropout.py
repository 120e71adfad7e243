"""Dropout (Srivastava et al. 2014) whose masks are a pure function of place, by the generator Philox4x32-10.

The generator is counter-based (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"). A mask is not stored
and has no state: forward, backward and recomputation draw it again, on a CPU or a GPU, whatever part of it a rank
holds. megads' own kernels draw the same bits (kernels/cpu/philox.h, kernels/cuda/philox.cuh).

The key is 64 bits of (seed, site). The counter of eight elements beside each other is (element / 8, place, low word of
the sample's number, next 16 bits of that number and 16 bits of the head). Of the four words that come out, element 2i
takes the lower half of word i and element 2i + 1 the upper one; an element is dropped if its 16 bits are below the
threshold.

Shape suffixes: b = batch, n = heads, s = places (queries or tokens), e = elements (keys or features), h = hidden size.
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
"""A probability is a multiple of 1 / RESOLUTION."""
ELEMENTS = 8
"""Of one counter."""
ROUNDS, MULTIPLIERS, WEYL = 10, (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
WORD = 2**32 - 1


def site_key(seed: int, site: str) -> int:
    """Key of a place in the model, for example "blocks.3.mlp_dropout", as a signed 64-bit integer.

    Args:
        seed: the run's.
        site: the name.
    """
    digest = hashlib.blake2b(struct.pack("<q", seed) + site.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def threshold_of(p: float) -> int:
    """Values of 16 bits, of RESOLUTION, that drop an element: p rounded to a multiple of 1 / RESOLUTION, below 1."""
    return min(round(p * RESOLUTION), RESOLUTION - 1)


@dataclass(frozen=True, eq=False)
class DropoutMask:
    """What the mask of a micro-batch at one site follows from, beside the place in it.

    Attributes:
        key: of seed and site, `site_key`.
        threshold: `threshold_of` the probability of a zero.
        samples_b: int64 number of each sample, on the device of what is dropped.
        first_head: number of head 0 in the whole model; 0 where there are no heads.
    """

    key: int
    threshold: int
    samples_b: Tensor
    first_head: int = 0

    @property
    def scale(self) -> float:
        """Factor of what stays: the expectation is what it is without dropout, exactly."""
        return RESOLUTION / (RESOLUTION - self.threshold)

    @property
    def arguments(self) -> tuple[Tensor, int, int, int]:
        """What operators of ours take in the place of a mask."""
        return self.samples_b, self.key, self.threshold, self.first_head

    def keep(self, heads: int, places_s: Tensor, elements: int) -> Tensor:
        """True for what stays, bool [b, n, s, e].

        Args:
            heads: n, from `first_head` on.
            places_s: int64 place of every row in its sample.
            elements: e, from 0 on.
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
        groups = -(-elements // ELEMENTS)
        groups_g = torch.arange(groups, device=places_s.device)
        kept = torch.empty(batch * rows_of_sample, groups * ELEMENTS, dtype=torch.bool, device=places_s.device)
        at_once = max(1, DRAWN_AT_ONCE // (groups * ELEMENTS))
        for start in range(0, batch * rows_of_sample, at_once):
            block = slice(start, start + at_once)
            bits = philox_bits(self.key, groups_g, *(x[block] for x in rows))
            # Unsigned numbers of 16 bits compare like signed ones with the highest bit turned.
            torch.ge(bits.bitwise_xor_(-(2**15)), self.threshold - 2**15, out=kept[block])
        return kept[:, :elements].reshape(*sizes, elements)


@device_cache(8)
def _multipliers(device: torch.device) -> tuple[Tensor, Tensor]:
    """Philox's factors [2, 1, 1], and the same in the other order; made on the device, so that no host waits for it."""
    first, second = (torch.full((1, 1, 1), factor, dtype=torch.int64, device=device) for factor in MULTIPLIERS)
    return torch.cat([first, second]), torch.cat([second, first])


def philox_bits(key: int, first_g: Tensor, second_r1: Tensor, third_r1: Tensor, fourth_r1: Tensor) -> Tensor:
    """Random bits of counters (first, second, third, fourth), int16 [r, 8 g].

    Words are int64 whose lower halves count; a product wraps, so that its bits are those of the unsigned one.

    Args:
        key: 64 bits.
        first_g: the first words of every row's counters, int64.
        second_r1: the second word of a row's counters, int64 [r, 1]; third and fourth likewise.
        third_r1: see there.
        fourth_r1: see there.
    """
    device = first_g.device
    # Words 0 and 2 are multiplied. Their products change places: in every other round word 2 comes first.
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
    """x * keep * scale + residual, of x's dtype; the kernel rounds once, keeps nothing and draws the mask again.

    Plain torch keeps the mask, a byte an element: drawing it costs more there.

    Args:
        x_bsh: what `megads.ops.config.kernel_takes` goes to the kernel, which computes in fp32 inside.
        mask: its rows are tokens, its elements features.
        places_s: int64 place of every token in its sample; None: 0..s-1.
        residual_bsh: of x's dtype; None: nothing is added.
        kernels: whose kernel computes.
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
    """Tells torch the shape of the result and the gradients; the library is loaded."""

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
