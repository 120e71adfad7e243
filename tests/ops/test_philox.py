"""Philox and the dropout masks made from it: published answers, the kernels' bits, and deterministic statistics."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import megads.ops.dropout
from megads.ops.config import FUSED
from megads.ops.dropout import WORD, DropoutMask, dropout, philox_bits, site_key, threshold_of

P = 0.1


def mask(samples: list[int], *, seed: int = 1, site: str = "blocks.3.core", p: float = P, head: int = 0) -> DropoutMask:
    return DropoutMask(site_key(seed, site), threshold_of(p), torch.tensor(samples), head)


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((WORD,) * 4, -1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0_A4093822,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_answers(counter: tuple[int, ...], key: int, words: tuple[int, ...]) -> None:
    """Catches a generator that is not Philox4x32-10: these are the known answers of Random123 (kat_vectors)."""
    first, *others = (torch.tensor([word]) for word in counter)
    bits = philox_bits(key, first, *(word[:, None] for word in others))
    assert [int(word) & WORD for word in bits.view(torch.int32).flatten()] == list(words)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("width", [1, 8, 61, 300])
def test_cpu_kernels_draw_the_same_bits(width: int) -> None:
    """Catches a misplaced lane, word, half or counter, a key or sample id that loses one half, and a wrong tail."""
    samples = [5, 2**33 + 5, 2**32 - 1]
    for places in (None, torch.tensor([7, 2**31, 0, 70_000])):
        drawn = mask(samples, p=0.5)
        kept = drawn.keep(1, torch.arange(4) if places is None else places, width)[:, 0]
        assert torch.equal(dropout(torch.ones(3, 4, width), drawn, places, kernels=FUSED), kept * drawn.scale)


def test_rows_drawn_in_pieces_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a large mask whose pieces use counters of other pieces."""
    whole = mask([3, 9]).keep(3, torch.arange(20), 37)
    monkeypatch.setattr(megads.ops.dropout, "DRAWN_AT_ONCE", 7 * 40)
    assert torch.equal(mask([3, 9]).keep(3, torch.arange(20), 37), whole)
    assert torch.equal(mask([9], head=1).keep(2, torch.arange(5, 20), 37), whole[1:, 1:, 5:])


@pytest.mark.parametrize("p", [1e-12, 0.1, 0.25, 1 - 1e-9])
def test_dropout_has_its_rate_and_scale(p: float) -> None:
    """Catches p used as the keep probability, and a scale that is not the inverse of the keep probability."""
    drawn = mask([0], p=p)
    assert abs(drawn.threshold / 2**16 - p) <= 2**-16
    assert drawn.scale * (1 - drawn.threshold / 2**16) == pytest.approx(1.0, abs=1e-12)
    kept = drawn.keep(1, torch.arange(1000), 1000).double().mean()
    rate = 1 - drawn.threshold / 2**16
    assert abs(kept - rate) <= 4 * math.sqrt(rate * (1 - rate) / 1e6)


def correlation(x: Tensor, y: Tensor) -> float:
    """Correlation of two masks, in standard deviations under independence."""
    x, y = (z.double().flatten() - z.double().mean() for z in (x, y))
    return float((x * y).mean() / (x.std() * y.std()) * math.sqrt(x.numel()))


def dependent() -> dict[str, float]:
    """Indices along which masks are correlated by more than 4 standard deviations."""
    shape = (4, torch.arange(128), 256)
    base = mask([11, 12]).keep(*shape)
    others = {
        "seed": mask([11, 12], seed=2).keep(*shape),
        "site": mask([11, 12], site="blocks.4.core").keep(*shape),
        "sample": mask([12, 13]).keep(*shape),
        "high word of the sample": mask([11 + 2**32, 12 + 2**32]).keep(*shape),
        "head": mask([11, 12], head=1).keep(*shape),
        "query": mask([11, 12]).keep(4, torch.arange(1, 129), 256),
    }
    found = {name: correlation(base, other) for name, other in others.items()}
    for step in (1, 2, 3, 4, 5, 6, 7, 8, 16):
        found[f"keys {step} apart"] = correlation(base[..., step:], base[..., :-step])
    found["samples of a batch"] = correlation(base[0], base[1])
    return {name: value for name, value in found.items() if abs(value) > 4}


def test_every_index_matters_and_neighbours_are_independent() -> None:
    """Catches masks that repeat or are correlated along any index: seed, site, sample, its high word, head, query, key,
    and elements that share a counter. The masks are the same in every run."""
    assert dependent() == {}


SITE_KEY, KEEP = site_key, DropoutMask.keep
LEFT_OUT: dict[str, tuple[str, Callable[..., Any]]] = {
    "seed": ("site_key", lambda _, site: SITE_KEY(0, site)),
    "site": ("site_key", lambda seed, _: SITE_KEY(seed, "")),
    "sample": ("keep", lambda drawn, *shape: KEEP(replace(drawn, samples_b=drawn.samples_b * 0), *shape)),
    "high word of the sample": (
        "keep", lambda drawn, *shape: KEEP(replace(drawn, samples_b=drawn.samples_b & WORD), *shape),
    ),
    "head": ("keep", lambda drawn, *shape: KEEP(replace(drawn, first_head=0), *shape)),
    "query": ("keep", lambda drawn, heads, places_s, keys: KEEP(drawn, heads, places_s * 0, keys)),
    "keys 8 apart": (
        "keep", lambda drawn, heads, places_s, keys: KEEP(drawn, heads, places_s, 8).repeat(1, 1, 1, keys // 8),
    ),
}  # fmt: skip
"""Defects of the generator, by the index that they ignore: the function that is replaced, and its replacement."""


@pytest.mark.parametrize("index", LEFT_OUT)
def test_a_mask_that_ignores_an_index_fails_the_statistics(monkeypatch: pytest.MonkeyPatch, index: str) -> None:
    """Catches statistics that pass although the mask ignores an index."""
    name, defect = LEFT_OUT[index]
    if name == "site_key":
        monkeypatch.setitem(globals(), "site_key", defect)
    else:
        monkeypatch.setattr(DropoutMask, name, defect)
    assert index in dependent()


def test_counts_of_rows_and_columns_are_binomial() -> None:
    """Catches rows, columns, heads or samples that drop too often or too evenly: chi-square of their counts."""
    dropped = ~mask([3, 2**32 + 4]).keep(8, torch.arange(256), 512)
    for dims in ((0, 1, 2), (0, 1, 3), (0, 2, 3), (1, 2, 3), (0, 1), (2, 3)):
        counts = dropped.sum(dims).double().flatten()
        of_one, rate = dropped.numel() / counts.numel(), threshold_of(P) / 2**16
        chi_square = float(((counts - of_one * rate) ** 2).sum() / (of_one * rate * (1 - rate)))
        freedom = counts.numel()
        assert abs(chi_square - freedom) < 4 * math.sqrt(2 * freedom), dims
    assert abs(float(dropped.double().mean()) - threshold_of(P) / 2**16) < 4 * math.sqrt(0.09 / dropped.numel())


def test_keys_are_distinct() -> None:
    """Catches seeds and sites that are combined so that neighbors collide."""
    sites = [f"blocks.{number}.core" for number in range(20)]
    assert len({site_key(seed, site) for seed in range(-3, 30) for site in sites}) == 33 * 20
    assert replace(mask([0]), key=site_key(1, "blocks.3.core")).key == mask([0]).key
