"""Assembles checked micro-batches: tokens stay in the dataset's narrow dtype until the last cast.

Shape suffixes: m = micro-batches, b = micro-batch size, n = m * b samples, s = sequence length, t = s + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from megads.batch import BatchInfo, MicroBatch
from megads.data.indexed import Array, IntArray
from megads.data.runs import Runs, SampleSource, copy_tokens, document_starts, loss_mask, token_at, widest_dtype
from megads.errors import DataError


@dataclass(frozen=True)
class Packing:
    """What a micro-batch says of the documents that share a sample.

    Attributes:
        document_mask: fill BatchInfo.document_starts.
        reset_positions: fill BatchInfo.position_ids_bs, from 0 in every document.
        mask_eod: no loss on the first token of a document that starts within a sample.
    """

    document_mask: bool = False
    reset_positions: bool = False
    mask_eod: bool = False


PLAIN = Packing()
"""Samples without borders."""


def assemble(
    source: SampleSource, ids_mb: IntArray, vocab_size: int, needs_tokens: bool, packing: Packing
) -> list[MicroBatch]:
    """Makes the micro-batches of samples; no Python work a sample but one copy a document.

    Args:
        source: where the samples come from.
        ids_mb: int64 [m, b], their numbers.
        vocab_size: every token must be below it.
        needs_tokens: False gives the info only; no token is read then.
        packing: what is told of document borders.

    Returns:
        m micro-batches. A sample that the source does not have, and what follows a sample's last token, holds token 0
        and is masked.

    Raises:
        DataError: a token is not in the vocabulary; dataset, document and offset are named. Or a file was cut short or
            written to.
    """
    if not (needs_tokens or packing.document_mask or packing.reset_positions):
        return [MicroBatch(BatchInfo(torch.from_numpy(ids_b), seq_len=source.seq_len)) for ids_b in ids_mb]
    runs = source.runs(ids_mb.reshape(-1))
    infos = _infos(runs, ids_mb, source.seq_len, packing)
    if not needs_tokens:
        return [MicroBatch(info) for info in infos]
    tokens_nt = np.zeros((ids_mb.size, source.seq_len + 1), widest_dtype(runs))
    # Before, for a message in place of a signal; afterwards, because the lost end of a page reads as zeros.
    for part in runs:
        part.dataset.require_whole()
    copy_tokens(runs, tokens_nt)
    for part in runs:
        part.dataset.require_unwritten()
    _check_tokens(runs, tokens_nt, vocab_size)
    mask_ns = loss_mask(runs, ids_mb.size, source.seq_len, packing.mask_eod)
    size = ids_mb.shape[1]
    return [
        _micro_batch(info, tokens_nt[first : first + size], mask_ns[first : first + size])
        for info, first in zip(infos, range(0, ids_mb.size, size), strict=True)
    ]


def _infos(runs: Sequence[Runs], ids_mb: IntArray, seq_len: int, packing: Packing) -> list[BatchInfo]:
    count, size = ids_mb.shape
    starts: Sequence[IntArray | None] = [None] * count
    if packing.document_mask or packing.reset_positions:
        starts = list(document_starts(runs, ids_mb.size, seq_len).reshape(count, size, seq_len))
    return [_info(ids_b, starts_bs, seq_len, packing) for ids_b, starts_bs in zip(ids_mb, starts, strict=True)]


def _info(ids_b: IntArray, starts_bs: IntArray | None, seq_len: int, packing: Packing) -> BatchInfo:
    if starts_bs is None:
        return BatchInfo(torch.from_numpy(ids_b), seq_len=seq_len)
    positions_bs = np.arange(seq_len) - starts_bs if packing.reset_positions else None
    return BatchInfo(
        torch.from_numpy(ids_b),
        position_ids_bs=None if positions_bs is None else torch.from_numpy(positions_bs),
        document_starts=torch.from_numpy(starts_bs) if packing.document_mask else None,
        seq_len=seq_len,
    )


def _micro_batch(info: BatchInfo, tokens_bt: Array, mask_bs: npt.NDArray[np.float32]) -> MicroBatch:
    return MicroBatch(
        info,
        torch.from_numpy(tokens_bt[:, :-1].astype(np.int64)),
        torch.from_numpy(tokens_bt[:, 1:].astype(np.int64)),
        torch.from_numpy(mask_bs),
    )


def _check_tokens(runs: Sequence[Runs], tokens_nt: Array, vocab_size: int) -> None:
    if tokens_nt.min() >= 0 and tokens_nt.max() < vocab_size:
        return
    row, place = (int(at) for at in np.argwhere((tokens_nt < 0) | (tokens_nt >= vocab_size))[0])
    dataset, document, offset = token_at(runs, row, place)
    raise DataError(
        f"{dataset.prefix}: document {document} holds token {tokens_nt[row, place]}, model.vocab_size is "
        f"{vocab_size} (at token {offset} of the document); use the vocabulary size of the tokenizer that made the "
        "dataset, or make the dataset anew with `megads preprocess`"
    )
