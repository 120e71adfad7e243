"""The dataloader: turns sample ids into checked micro-batches, with a prefetching thread.

Tokens keep the dataset's narrow dtype until the last conversion. Shape suffixes: m = micro-batches, b = micro-batch
size, n = m * b samples, s = sequence length, t = s + 1.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import numpy.typing as npt
import torch

from megads.batch import BatchInfo, MicroBatch
from megads.data.indexed.dataset import Array, IntArray
from megads.data.sampling.batch_size import BatchSizeSchedule
from megads.data.sampling.index_maps import lower_thread_priority
from megads.data.sampling.runs import (
    Runs,
    SampleSource,
    TrainSource,
    ValidationSource,
    attention_pairs,
    copy_tokens,
    document_starts,
    loss_mask,
    token_at,
    widest_dtype,
)
from megads.data.sampling.sampler import balanced_ids, batch_hash, micro_batch_ids, ordered_ids
from megads.errors import DataError

POLL_S = 0.1
LOOK_AHEAD_S = 10.0
"""Interval at which the need for the next index map is checked."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Packing:
    """How micro-batches treat documents that share a sample.

    Attributes:
        document_mask: fill BatchInfo.document_starts.
        reset_positions: fill BatchInfo.position_ids_bs, from 0 in every document.
        mask_eod: no loss on the first token of a document that starts within a sample.
        balanced: in training, distribute the samples of a step over ranks and micro-batches by `attention_pairs`.
    """

    document_mask: bool = False
    reset_positions: bool = False
    mask_eod: bool = False
    balanced: bool = False


PLAIN = Packing()
"""Packing without document boundaries."""


@dataclass(frozen=True)
class LoaderShare:
    """What one rank reads of every batch.

    Attributes:
        micro_batch_size: samples in one forward pass of one rank.
        dp_rank: data-parallel rank.
        dp: number of data-parallel ranks.
        vocab_size: vocabulary size; every token must be below it.
        needs_tokens: whether to read tokens and labels; if not, micro-batches have only their info.
        packing: treatment of documents that share a sample; the same on every pipeline stage.
    """

    micro_batch_size: int
    dp_rank: int
    dp: int
    vocab_size: int
    needs_tokens: bool = True
    packing: Packing = PLAIN

    def assemble(self, source: SampleSource, ids_mb: IntArray) -> list[MicroBatch]:
        """Builds micro-batches from samples, see the function `assemble`."""
        return assemble(source, ids_mb, self.vocab_size, self.needs_tokens, self.packing)


@dataclass(frozen=True)
class LookAhead:
    """How far ahead remote tokens are requested.

    Attributes:
        steps: number of steps after the one that is read; 0 requests none.
        most_bytes: maximum size of the requested blocks for this rank; one step may exceed it.
    """

    steps: int = 0
    most_bytes: int = 0


NO_LOOK_AHEAD = LookAhead()
"""For local data."""


def assemble(
    source: SampleSource, ids_mb: IntArray, vocab_size: int, needs_tokens: bool, packing: Packing
) -> list[MicroBatch]:
    """Builds micro-batches from samples; the only Python work per sample is one copy per document.

    Args:
        source: source of the samples.
        ids_mb: int64 [m, b], sample indices.
        vocab_size: vocabulary size; every token must be below it.
        needs_tokens: whether to read tokens; if False, micro-batches have only their info.
        packing: treatment of documents that share a sample.

    Returns:
        m micro-batches. Samples that do not exist, and positions after a sample's last token, hold token 0 and are
        masked.

    Raises:
        DataError: a token is not in the vocabulary (the message names dataset, document and offset), or a file was
            truncated or written to.
    """
    if not (needs_tokens or packing.document_mask or packing.reset_positions):
        return [MicroBatch(BatchInfo(torch.from_numpy(ids_b), seq_len=source.seq_len)) for ids_b in ids_mb]
    runs = source.runs(ids_mb.reshape(-1))
    infos = _infos(runs, ids_mb, source.seq_len, packing)
    if not needs_tokens:
        return [MicroBatch(info) for info in infos]
    tokens_nt = np.zeros((ids_mb.size, source.seq_len + 1), widest_dtype(runs))
    # Checked before, to avoid SIGBUS, and afterwards, because the missing end of a page reads as zeros.
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
        f"{dataset.name}: document {document} holds token {tokens_nt[row, place]}, model.vocab_size is "
        f"{vocab_size} (at token {offset} of the document); use the vocabulary size of the tokenizer that made the "
        "dataset, or make the dataset anew with `megads preprocess`"
    )


@dataclass(frozen=True)
class StepBatch:
    """One rank's share of one step.

    Attributes:
        micro_batches: in the order of computation.
        samples: global batch size of the step, over all ranks.
        batch_hash: hash of the keys of the step's samples, over all ranks; the same on every rank.
        first_sample: samples consumed before the step.
    """

    micro_batches: list[MicroBatch]
    samples: int
    batch_hash: str
    first_sample: int


class TrainLoader:
    """Infinite iterator over steps; one daemon thread prefetches, another builds the index maps of the next epoch.

    An exception in the prefetching thread is raised in the consumer at the step that failed.

    Args:
        source: source of the samples.
        schedule: global batch size of each step.
        share: what this rank reads of it.
        start_sample: samples consumed before the first step.
        prefetch_steps: size of the prefetch queue in steps.
        end_sample: end of the run; samples from it on are only prefetched. None if unknown.
        look_ahead: how far ahead remote tokens are requested.
    """

    def __init__(
        self,
        source: TrainSource,
        schedule: BatchSizeSchedule,
        share: LoaderShare,
        start_sample: int = 0,
        prefetch_steps: int = 2,
        end_sample: int | None = None,
        look_ahead: LookAhead = NO_LOOK_AHEAD,
    ) -> None:
        self._source = source
        self._look_ahead = look_ahead
        self._requested: deque[tuple[int, int]] = deque()
        self._next_request = start_sample
        self._schedule, self._share = schedule, share
        self._queue: queue.Queue[StepBatch | BaseException] = queue.Queue(maxsize=prefetch_steps)
        self._closed = threading.Event()
        self._read_samples, self._end_sample = start_sample, end_sample
        self._threads = [
            threading.Thread(target=self._produce, args=(start_sample,), name="train-loader", daemon=True),
            threading.Thread(target=self._build_ahead, name="index-maps", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def __iter__(self) -> Iterator[StepBatch]:
        return self

    def __next__(self) -> StepBatch:
        while not self._closed.is_set():
            try:
                item = self._queue.get(timeout=POLL_S)
            except queue.Empty:
                continue
            if isinstance(item, BaseException):
                self.close()
                raise item
            return item
        raise StopIteration

    def close(self) -> None:
        """Stops the threads; the iterator is exhausted afterwards."""
        self._closed.set()
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> TrainLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _produce(self, first_sample: int) -> None:
        try:
            while not self._closed.is_set():
                if self._share.needs_tokens and self._look_ahead.steps:
                    self._fetch_ahead(first_sample)
                batch = self._load(first_sample)
                self._put(batch)
                first_sample += batch.samples
                self._read_samples = first_sample
        except BaseException as error:
            # Any exception must reach the consumer, which would otherwise wait for a dead thread.
            self._put(error)

    def _build_ahead(self) -> None:
        """Builds maps before they are needed; a failure is logged, and raised when the map is needed."""
        lower_thread_priority()
        while not self._closed.wait(LOOK_AHEAD_S):
            try:
                self._source.build_next_maps(self._read_samples, self._end_sample, self._closed)
            except Exception as error:
                log.warning("the next index map could not be built ahead of time: %s", error)

    def _put(self, item: StepBatch | BaseException) -> None:
        while not self._closed.is_set():
            try:
                self._queue.put(item, timeout=POLL_S)
            except queue.Full:
                continue
            return

    def _fetch_ahead(self, first_sample: int) -> None:
        """Requests the tokens of the next step, and of those after it."""
        while self._requested and self._requested[0][0] < first_sample:
            self._requested.popleft()
        while len(self._requested) <= self._look_ahead.steps:
            last_bytes = self._requested[-1][1] if self._requested else 0
            if sum(size for _, size in self._requested) + last_bytes > self._look_ahead.most_bytes:
                return
            if self._end_sample is not None and self._next_request >= self._end_sample:
                return
            size = self._schedule.at(self._next_request)
            ids = self._ids(self._next_request, size)
            self._requested.append((self._next_request, request(self._source, ids)))
            self._next_request += size

    def _ids(self, first_sample: int, size: int) -> IntArray:
        share, balanced = self._share, self._share.packing.balanced
        of_ranks = step_ids(self._source, first_sample, size, share.micro_batch_size, share.dp, balanced=balanced)
        return of_ranks[share.dp_rank]

    def _load(self, first_sample: int) -> StepBatch:
        size = self._schedule.at(first_sample)
        ids = self._ids(first_sample, size)
        keys = self._source.sample_keys(np.arange(first_sample, first_sample + size))
        return StepBatch(
            micro_batches=self._share.assemble(self._source, ids),
            samples=size,
            batch_hash=batch_hash(keys),
            first_sample=first_sample,
        )


def step_ids(
    source: SampleSource, first_sample: int, global_batch_size: int, micro_batch_size: int, dp: int, *, balanced: bool
) -> IntArray:
    """Returns int64 [dp, micro-batches, micro_batch_size], the sample ids of one step for every data-parallel rank.

    Args:
        source: source of the samples.
        first_sample: samples consumed before the step.
        global_batch_size: samples in the step.
        micro_batch_size: samples in one forward pass of one rank.
        dp: number of data-parallel ranks.
        balanced: see `Packing`.

    Raises:
        ConfigError: the batch does not divide into micro-batches.
    """
    if not balanced:
        return ordered_ids(first_sample, global_batch_size, micro_batch_size, dp)
    runs = source.runs(np.arange(first_sample, first_sample + global_batch_size))
    pairs_n = attention_pairs(runs, global_batch_size, source.seq_len)
    return balanced_ids(first_sample, pairs_n, micro_batch_size, dp)


def request(source: SampleSource, ids_mb: IntArray) -> int:
    """Starts fetching the tokens of samples that are remote.

    Args:
        source: source of the samples.
        ids_mb: int64 [m, b], sample indices.

    Returns:
        Bytes that they take in this node's cache.
    """
    runs = source.runs(ids_mb.reshape(-1))
    return sum(part.dataset.fetch_ahead(part.starts, part.starts + part.lengths) for part in runs)


def validation_batches(
    valid: ValidationSource, share: LoaderShare, micro_batches_per_call: int
) -> Iterator[list[MicroBatch]]:
    """Distributes the validation set over the ranks like the training sampler.

    Args:
        valid: validation windows.
        share: what this rank reads of them.
        micro_batches_per_call: micro-batches in each list; the last list may be shorter.

    Yields:
        Lists of micro-batches, the same number and lengths on every rank. Rows beyond the last window are fully masked;
        their sample_ids continue counting.

    Raises:
        DataError: a token is not in the vocabulary.
    """
    block = share.micro_batch_size * share.dp
    ids = micro_batch_ids(0, -(-len(valid) // block) * block, share.micro_batch_size, share.dp_rank, share.dp)
    remote = share.needs_tokens and any(part.dataset.is_remote for part in valid.runs(ids[:1].reshape(-1)))
    for begin in range(0, len(ids), micro_batches_per_call):
        following = ids[begin + micro_batches_per_call : begin + 2 * micro_batches_per_call]
        if remote and following.size:
            request(valid, following)
        yield share.assemble(valid, ids[begin : begin + micro_batches_per_call])


def num_validation_batches(windows: int, micro_batch_size: int, dp: int, micro_batches_per_call: int) -> int:
    """Returns the number of lists that `validation_batches` yields for this many windows."""
    micro_batches = -(-windows // (micro_batch_size * dp))
    return -(-micro_batches // micro_batches_per_call)
