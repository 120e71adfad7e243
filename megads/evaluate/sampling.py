"""Which token comes next.

Shape suffixes: b = batch, v = vocabulary.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How to choose.

    Attributes:
        temperature: divides the logits; 0 takes the likeliest token.
        top_p: draw among the fewest likeliest tokens whose probabilities sum to at least this (nucleus sampling,
            Holtzman et al. 2020).
        top_k: draw among this many likeliest tokens; 0 draws among all.
        seed: of the draws.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0


def draws(seed: int, sequences: Sequence[int], place: int) -> Tensor:
    """Uniform numbers in [0, 1), fp64 [b]: a pure function of seed, sequence and place in it.

    So a prompt's completion depends neither on the other prompts of its batch nor on when they end.

    Args:
        seed: the user's.
        sequences: number of every row's sequence.
        place: number of the token in its completion.
    """
    messages = [struct.pack("<qqq", seed, place, sequence) + b"generate" for sequence in sequences]
    words = [int.from_bytes(hashlib.blake2b(message, digest_size=8).digest(), "little") for message in messages]
    return torch.tensor([(word >> 11) / 2.0**53 for word in words], dtype=torch.float64)


def next_tokens(logits_bv: Tensor, draws_b: Tensor, sampling: Sampling) -> Tensor:
    """Chooses a token for every row, int64 [b].

    Tokens are ranked by probability and the draw is looked up in their cumulative sum. top_p applies to the
    distribution after temperature and before top_k.

    Args:
        logits_bv: any floating dtype.
        draws_b: a number in [0, 1) for every row, fp64; unused at temperature 0.
        sampling: how.
    """
    if sampling.temperature == 0.0:
        return logits_bv.argmax(dim=-1)
    # Before the division, so that no temperature makes infinities: the largest becomes 0.
    scores_bv = logits_bv.double()
    scores_bv = (scores_bv - scores_bv.amax(dim=-1, keepdim=True)) / sampling.temperature
    ranked_bv, tokens_bv = torch.softmax(scores_bv, dim=-1).sort(dim=-1, descending=True, stable=True)
    cumulative_bv = ranked_bv.cumsum(dim=-1)
    # A token stays while those before it do not reach top_p; the likeliest always stays.
    kept_b = (cumulative_bv - ranked_bv < sampling.top_p).sum(dim=-1)
    if sampling.top_k:
        kept_b = kept_b.clamp(max=sampling.top_k)
    total_b1 = cumulative_bv.gather(-1, kept_b[:, None] - 1)
    place_b1 = torch.searchsorted(cumulative_bv, draws_b.to(logits_bv.device)[:, None] * total_b1, right=True)
    return tokens_bv.gather(-1, torch.minimum(place_b1, kept_b[:, None] - 1))[:, 0]
