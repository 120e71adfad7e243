"""The loss that a model must beat: that of the best one without context."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megads.data.indexed import Array, IntArray
from megads.data.runs import Runs, ValidationSource, copy_tokens, loss_mask, token_at, widest_dtype
from megads.data.samples import WindowSubset
from megads.errors import DataError

CHUNK_TOKENS = 1 << 22
SAMPLED_TOKENS = 1 << 24
"""Of a larger set so many are counted, in windows that are evenly spaced over it."""
# A token id above this is damage: counting it would take memory for that many tokens.
MAX_TOKEN_ID = 1 << 24


def unigram_entropy(valid: ValidationSource) -> float:
    """Computes the loss of the best model that ignores context, on the tokens that validation predicts, or a sample.

    Args:
        valid: the validation set.

    Returns:
        Entropy, in nats, of the distribution of its labels.

    Raises:
        DataError: a token that cannot be one.
    """
    valid = WindowSubset(valid, SAMPLED_TOKENS)
    counts: IntArray = np.zeros(0, np.int64)
    windows_a_chunk = max(CHUNK_TOKENS // (valid.seq_len + 1), 1)
    for begin in range(0, len(valid), windows_a_chunk):
        windows = np.arange(begin, min(begin + windows_a_chunk, len(valid)))
        runs = valid.runs(windows)
        tokens_bt = np.zeros((windows.size, valid.seq_len + 1), widest_dtype(runs))
        copy_tokens(runs, tokens_bt)
        if tokens_bt.min() < 0 or tokens_bt.max() > MAX_TOKEN_ID:
            raise _impossible_token(runs, tokens_bt)
        counted = loss_mask(runs, windows.size, valid.seq_len, mask_eod=False) == 1
        more = np.bincount(tokens_bt[:, 1:][counted], minlength=counts.size)
        more[: counts.size] += counts
        counts = more
    probabilities = counts[counts > 0] / counts.sum()
    return float(-(probabilities * np.log(probabilities)).sum())


def _impossible_token(runs: Sequence[Runs], tokens_bt: Array) -> DataError:
    row, place = (int(at) for at in np.argwhere((tokens_bt < 0) | (tokens_bt > MAX_TOKEN_ID))[0])
    dataset, document, _ = token_at(runs, row, place)
    return DataError(
        f"{dataset.prefix}: document {document} holds token {tokens_bt[row, place]}, which no vocabulary has; "
        "make the dataset anew with `megads preprocess`"
    )
