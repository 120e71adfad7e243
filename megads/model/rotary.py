"""Rotary position embedding (Su et al. 2021, RoFormer): frequencies, tables, and the module of an attention layer.

Features i and i + d/2 of a head form a pair that is rotated by the angle position * theta^(-2i/d), so that the dot
product of a query and a key depends on the distance of their positions. The paper pairs adjacent features; pairing
halves, as in Llama and GPT-NeoX, is equivalent up to the order of a head's features. With model.rotary_fraction, d is
the number of a head's first features that are rotated.

Shape suffixes: b = batch, s = position, n = heads, d = head dim, r = d/2 pairs of features.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from megads.batch import BatchInfo, MicroBatchCache
from megads.model.rope_scaling import RopeScaling, RopeScalingConfig
from megads.ops.config import TORCH, Kernels
from megads.ops.device_cache import device_cache
from megads.ops.rotary import rotate

Tables = tuple[Tensor, Tensor]
_RESTARTED: MicroBatchCache[Tables] = MicroBatchCache()

UNSCALED = RopeScalingConfig()


def rotary_tables(
    positions: Tensor,
    rotary_dim: int,
    theta: float,
    dtype: torch.dtype,
    scaling: RopeScalingConfig = UNSCALED,
    seq_len: int = 0,
) -> Tables:
    """Cosine and sine tables of rotary embedding, each [..., s, 1, r] for integer positions [..., s].

    Angles are always computed in fp64: near position 10^6, adjacent fp32 numbers are 0.06 radians apart. Both tables
    are multiplied by `scaling.rotation_scale`, which scales attention scores by its square (Peng et al. 2023, equation
    22; Ding et al. 2024).

    Args:
        positions: position of each token.
        rotary_dim: number of rotated features.
        theta: base of the frequencies.
        dtype: dtype of the result.
        scaling: scaling of the frequencies.
        seq_len: length of the tokens' sequence, on which some scalings depend.
    """
    pairs_r = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=positions.device) / rotary_dim
    angles = positions[..., None, None] * scaled_frequencies(theta**-pairs_r, theta, scaling, seq_len)
    size = scaling.rotation_scale
    return (size * angles.cos()).to(dtype), (size * angles.sin()).to(dtype)


def scaled_frequencies(frequencies_r: Tensor, theta: float, scaling: RopeScalingConfig, seq_len: int = 0) -> Tensor:
    """Rotary frequencies in radians per position, fp64 [r], scaled for sequences longer than those of pretraining.

    Args:
        frequencies_r: unscaled frequencies, theta^(-2 i / d) for pair i.
        theta: base of the frequencies.
        scaling: scaling method; see the papers cited there.
        seq_len: length of the sequence.
    """
    slowed_r = frequencies_r / scaling.factor
    turns_r = scaling.original_max_seq_len * frequencies_r / (2 * math.pi)
    pairs = len(frequencies_r)
    numbers_r = torch.arange(pairs, dtype=torch.float64, device=frequencies_r.device)
    match scaling.kind:
        case RopeScaling.none:
            return frequencies_r
        case RopeScaling.linear:
            return slowed_r
        case RopeScaling.dynamic:
            ratio = scaling.effective_length(seq_len) / scaling.original_max_seq_len
            growth = scaling.factor * ratio - scaling.factor + 1.0
            # A base b growth^(d / (d - 2)) divides the frequency of pair i by growth^(2 i / (d - 2)), d = 2 pairs.
            return frequencies_r * growth ** -(numbers_r / (pairs - 1))
        case RopeScaling.longrope:
            long = scaling.effective_length(seq_len) > scaling.original_max_seq_len
            factors = scaling.long_factor if long else scaling.short_factor
            return frequencies_r / torch.tensor(factors, dtype=torch.float64, device=frequencies_r.device)
        case RopeScaling.llama3:
            low, high = scaling.low_freq_factor, scaling.high_freq_factor
            kept_r = ((turns_r - low) / (high - low)).clamp(0.0, 1.0)
        case RopeScaling.yarn:

            def pair_of(turns: float) -> float:
                """Fractional index of the pair that makes `turns` rotations in original_max_seq_len positions."""
                return pairs * math.log(scaling.original_max_seq_len / (2 * math.pi * turns)) / math.log(theta)

            first = max(math.floor(pair_of(scaling.beta_fast)), 0)
            last = min(math.ceil(pair_of(scaling.beta_slow)), 2 * pairs - 1)
            kept_r = 1.0 - ((numbers_r - first) / max(last - first, 1e-3)).clamp(0.0, 1.0)
    return kept_r * frequencies_r + (1.0 - kept_r) * slowed_r


@device_cache(8)
def _place_tables(
    count: int,
    rotary_dim: int,
    theta: float,
    scaling: RopeScalingConfig,
    device: torch.device,
    dtype: torch.dtype,
    places_s: Tensor | None,
    effective_length: int,
) -> Tables:
    """Rotary tables for positions that do not restart within a sample; cached by the identity of `places_s`."""
    places_s = torch.arange(count, device=device) if places_s is None else places_s
    return rotary_tables(places_s, rotary_dim, theta, dtype, scaling, effective_length)


class Rotary(nn.Module):
    """Rotary position embedding of one attention layer; no parameters.

    Args:
        rotary_dim: number of a head's first features that are rotated, even.
        theta: base of the frequencies.
        scaling: scaling of the frequencies.
        interleaved: whether adjacent features form a pair; False: halves.
    """

    def __init__(
        self, rotary_dim: int, theta: float, scaling: RopeScalingConfig = UNSCALED, interleaved: bool = False
    ) -> None:
        super().__init__()
        self.rotary_dim, self.theta, self.scaling, self.interleaved = rotary_dim, theta, scaling, interleaved
        self.prepared: Tables | None = None

    def forward(
        self, q_bsnd: Tensor, k_bsnd: Tensor, info: BatchInfo, kernels: Kernels = TORCH
    ) -> tuple[Tensor, Tensor]:
        """Rotates queries and keys by the positions of the tokens that this rank holds.

        Args:
            q_bsnd: queries.
            k_bsnd: keys.
            info: description of the micro-batch.
            kernels: kernel implementation.
        """
        if torch.compiler.is_compiling() and self.prepared is not None:
            tables = self.prepared
        else:
            tables = self._tables_for(q_bsnd, info)
        return rotate(q_bsnd, *tables, kernels, self.interleaved), rotate(k_bsnd, *tables, kernels, self.interleaved)

    def prepare(self, hidden_bsh: Tensor, info: BatchInfo) -> None:
        """Computes or looks up the tables for a compiled block, see `AttentionCore.prepare`."""
        self.prepared = self._tables_for(hidden_bsh, info)

    def _tables_for(self, x_bs: Tensor, info: BatchInfo) -> Tables:
        """Tables for the tokens, device and precision of a tensor [b, s, ...]."""
        return self.tables(x_bs.shape[1], x_bs.device, torch.promote_types(x_bs.dtype, torch.float32), info)

    def tables(self, count: int, device: torch.device, dtype: torch.dtype, info: BatchInfo) -> Tables:
        """Cosine and sine tables for `count` tokens, computed once for all layers."""
        positions_bs, how = info.position_ids_bs, (self.rotary_dim, self.theta)
        length = self.scaling.effective_length(count if info.seq_len is None else info.seq_len)
        if positions_bs is None and info.row_lengths is None:
            return _place_tables(count, *how, self.scaling, device, dtype, info.sequence_index, length)

        def make() -> Tables:
            places = info.positions(count, device)
            if info.row_lengths is None:
                return rotary_tables(places, *how, dtype, self.scaling, length)
            rows = zip(places.expand(len(info.row_lengths), -1), info.row_lengths, strict=True)
            tables = [rotary_tables(places_s, *how, dtype, self.scaling, own) for places_s, own in rows]
            cosines, sines = zip(*tables, strict=True)
            return torch.stack(cosines), torch.stack(sines)

        return _RESTARTED.get(info, (*how, self.scaling, dtype), make)
