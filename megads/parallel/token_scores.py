"""Log-likelihoods of given tokens and greedy (argmax) predictions per position, with a sharded vocabulary.

Shape suffixes: b = batch, s = tokens of this context rank, t = this rank's share of them, h = hidden size, r = rows of
the vocabulary that this rank holds, n = sequences that are scored together, l = their whole length, p = positions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megads.batch import BatchInfo
from megads.ops.config import chunk_tokens
from megads.parallel.grid import Axis, ParallelGrid, vocab_range
from megads.parallel.loss import rows_of, vocab_parallel_token_losses


class RowScores(NamedTuple):
    """Scores of a model for sequences of tokens.

    Attributes:
        log_likelihoods_nl: log-probability in nats of the label of each unmasked position, fp64.
        likeliest_nl: most likely token at each unmasked position, int64; the smallest token id in case of ties.
    """

    log_likelihoods_nl: Tensor
    likeliest_nl: Tensor


class ScoreRecorder:
    """Computes scores in place of the loss, and stores them.

    Args:
        vocab_size: vocabulary size without padding.
        axis: the tensor-parallel axis.
    """

    def __init__(self, vocab_size: int, axis: Axis) -> None:
        self._vocab_size, self._axis = vocab_size, axis
        self._found: list[tuple[BatchInfo, Tensor, Tensor]] = []

    def __call__(self, head: nn.Module, hidden_bth: Tensor, info: BatchInfo, targets: tuple[Tensor, Tensor]) -> Tensor:
        """Scores the unmasked tokens of a micro-batch, in chunks to bound the memory of the logits.

        Args:
            head: the output projection.
            hidden_bth: input of the head.
            info: description of the micro-batch.
            targets: labels and mask, [b, s].

        Returns:
            The sum of the losses of unmasked tokens, fp64 scalar.
        """
        labels_bs, mask_bs = targets
        batch, tokens = labels_bs.shape
        log_likelihoods_bs = torch.zeros(batch, tokens, dtype=torch.float64, device=labels_bs.device)
        likeliest_bs = torch.zeros_like(labels_bs)
        room = chunk_tokens(labels_bs.numel(), rows_of(head) * hidden_bth.element_size(), hidden_bth.device.type)
        if hidden_bth.shape[1] != tokens:
            # With sequence parallelism a rank has a share of every sequence, so chunks are whole sequences.
            step = max(1, room // tokens)
            for first in range(0, batch, step):
                part = slice(first, first + step)
                log_likelihoods_bs[part], likeliest_bs[part] = self._scores(
                    head(hidden_bth[part], info), labels_bs[part]
                )
        else:
            counted_m = mask_bs.flatten().nonzero()[:, 0]
            # At least one token, as all ranks that share the head's weights must call it.
            counted_m = counted_m if len(counted_m) else counted_m.new_zeros(1)
            flat_mh = hidden_bth.flatten(0, 1)
            for part_c in counted_m.split(room):
                found = self._scores(head(flat_mh[part_c][None], info), labels_bs.flatten()[part_c][None])
                log_likelihoods_bs.view(-1)[part_c], likeliest_bs.view(-1)[part_c] = found[0][0], found[1][0]
        self._found.append((info, log_likelihoods_bs, likeliest_bs))
        return -(log_likelihoods_bs * mask_bs).sum()

    def _scores(self, logits_bsr: Tensor, labels_bs: Tensor) -> tuple[Tensor, Tensor]:
        likeliest_bs = argmax_tokens(logits_bsr, self._vocab_size, self._axis)
        losses_bs = vocab_parallel_token_losses(logits_bsr, labels_bs, self._vocab_size, self._axis)
        return -losses_bs.double(), likeliest_bs

    def share(self, num_rows: int, length: int, grid: ParallelGrid, loss_rank: int, device: torch.device) -> RowScores:
        """Returns the scores of all sequences to every rank, on the CPU; collective over the world.

        Args:
            num_rows: number of sequences, with sample_ids from 0; samples with a higher id are padding.
            length: length of a whole sequence.
            grid: the grid of ranks.
            loss_rank: pipeline rank that holds the last stage.
            device: device of this rank.
        """
        values_2nl = torch.zeros(2, num_rows, length, dtype=torch.float64, device=device)
        # All tensor-parallel ranks have the same values, so only one contributes to the sum.
        if grid.pp.rank == loss_rank and grid.tp.is_first:
            for info, log_likelihoods_bs, likeliest_bs in self._found:
                counted_b = info.sample_ids < num_rows
                places_s = info.sequence_index
                if places_s is None:
                    places_s = torch.arange(length, device=device)
                where = info.sample_ids[counted_b][:, None], places_s
                values_2nl[0][where] = log_likelihoods_bs[counted_b]
                values_2nl[1][where] = likeliest_bs[counted_b].double()
        if grid.world_size > 1:
            dist.all_reduce(values_2nl)
        log_likelihoods_nl, likeliest_nl = values_2nl.cpu().unbind()
        return RowScores(log_likelihoods_nl, likeliest_nl.long())


class PositionLosses(ScoreRecorder):
    """Sums losses by token position, in place of the loss.

    Args:
        vocab_size: vocabulary size without padding.
        axis: the tensor-parallel axis.
        positions: number of positions.
        device: device of this rank.
    """

    def __init__(self, vocab_size: int, axis: Axis, positions: int, device: torch.device) -> None:
        super().__init__(vocab_size, axis)
        self._sums_2p = torch.zeros(2, positions, dtype=torch.float64, device=device)

    def __call__(self, head: nn.Module, hidden_bth: Tensor, info: BatchInfo, targets: tuple[Tensor, Tensor]) -> Tensor:
        """See ScoreRecorder; accumulates the scores immediately instead of storing them."""
        loss = super().__call__(head, hidden_bth, info, targets)
        labels_bs, mask_bs = targets
        _, log_likelihoods_bs, _ = self._found.pop()
        positions_bs = info.positions(labels_bs.shape[1], labels_bs.device).expand_as(labels_bs).flatten()
        counted_bs = mask_bs.double()
        self._sums_2p[0].index_add_(0, positions_bs, (-log_likelihoods_bs * counted_bs).flatten())
        self._sums_2p[1].index_add_(0, positions_bs, counted_bs.flatten())
        return loss

    def sums(self, grid: ParallelGrid, loss_rank: int) -> Tensor:
        """Sum of losses and number of tokens per position, fp64 [2, p] on the CPU; collective over the world."""
        # All tensor-parallel ranks have the same values, so only one contributes to the sum.
        if grid.pp.rank != loss_rank or not grid.tp.is_first:
            self._sums_2p.zero_()
        if grid.world_size > 1:
            dist.all_reduce(self._sums_2p)
        return self._sums_2p.cpu()


def argmax_tokens(logits_bsr: Tensor, vocab_size: int, axis: Axis) -> Tensor:
    """Token with the largest logit (the smallest id in case of ties), int64 [b, s], the same on all ranks of the axis.

    Args:
        logits_bsr: logits of this rank's rows, including padding.
        vocab_size: vocabulary size without padding.
        axis: the tensor-parallel axis.
    """
    start, valid = vocab_range(vocab_size, axis, logits_bsr.shape[-1])
    if not valid:
        own_bs = logits_bsr.new_full(logits_bsr.shape[:-1], float("-inf"), dtype=torch.float32)
        tokens_bs = torch.full_like(own_bs, vocab_size, dtype=torch.int64)
    else:
        largest = logits_bsr[..., :valid].max(dim=-1)
        own_bs, tokens_bs = largest.values.float(), largest.indices + start
    if axis.size > 1:
        largest_bs = own_bs.clone()
        dist.all_reduce(largest_bs, op=dist.ReduceOp.MAX, group=axis.group)
        tokens_bs = tokens_bs.masked_fill(own_bs != largest_bs, vocab_size)
        dist.all_reduce(tokens_bs, op=dist.ReduceOp.MIN, group=axis.group)
    return tokens_bs
