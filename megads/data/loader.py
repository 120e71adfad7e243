"""From sample numbers to checked micro-batches, read ahead by a thread.

Shape suffixes: b = micro-batch size, s = sequence length.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import numpy.typing as npt
import torch

from megads.batch import BatchInfo, MicroBatch
from megads.data.batch_size import BatchSizeSchedule
from megads.data.blend import BlendedSamples
from megads.data.indexed import IntArray
from megads.data.sampler import batch_hash, micro_batch_ids
from megads.data.samples import TrainSamples, ValidationSamples
from megads.errors import DataError

POLL_S = 0.1


@dataclass(frozen=True)
class Packing:
    """What a micro-batch says of the documents that share a sample.

    Attributes:
        document_mask: fill BatchInfo.document_starts.
        reset_positions: fill BatchInfo.position_ids_bs, from 0 in every document.
    """

    document_mask: bool = False
    reset_positions: bool = False

    def info(self, samples: BlendedSamples | TrainSamples | ValidationSamples, ids: IntArray) -> BatchInfo:
        """BatchInfo of the samples with these numbers, int64 [b]; reads no token."""
        sample_ids = torch.from_numpy(ids)
        if not (self.document_mask or self.reset_positions):
            return BatchInfo(sample_ids, seq_len=samples.seq_len)
        starts_bs = np.empty((ids.size, samples.seq_len), np.int64)
        for row, sample in enumerate(ids):
            samples.read_document_starts(int(sample), starts_bs[row])
        positions_bs = np.arange(samples.seq_len) - starts_bs
        return BatchInfo(
            sample_ids,
            position_ids_bs=torch.from_numpy(positions_bs) if self.reset_positions else None,
            document_starts=torch.from_numpy(starts_bs) if self.document_mask else None,
            seq_len=samples.seq_len,
        )


@dataclass(frozen=True)
class StepBatch:
    """One rank's share of one step.

    Attributes:
        micro_batches: in the order of computation.
        samples: global batch size of the step, over all ranks.
        batch_hash: hash of the step's global samples; the same on every rank.
        first_sample: samples consumed before the step.
    """

    micro_batches: list[MicroBatch]
    samples: int
    batch_hash: str
    first_sample: int


class TrainLoader:
    """Iterates over steps for ever; one daemon thread reads ahead.

    An exception in the thread reaches the consumer as it is, at the step that it spoilt.

    Args:
        samples: where the tokens come from.
        schedule: global batch size of each step.
        micro_batch_size: samples in one forward pass of this rank.
        dp_rank: this rank's place among the data-parallel ranks.
        dp: data-parallel ranks.
        vocab_size: every token must be below it.
        start_sample: samples consumed before the first step.
        needs_tokens: False on pipeline stages that are neither first nor last: they get the info only.
        prefetch_steps: steps that wait in the queue.
        packing: what every stage is told of document borders.
    """

    def __init__(
        self,
        samples: BlendedSamples | TrainSamples,
        schedule: BatchSizeSchedule,
        micro_batch_size: int,
        dp_rank: int,
        dp: int,
        vocab_size: int,
        start_sample: int = 0,
        needs_tokens: bool = True,
        prefetch_steps: int = 2,
        packing: Packing = Packing(),
    ) -> None:
        self._samples = samples
        self._schedule = schedule
        self._micro_batch_size = micro_batch_size
        self._dp_rank, self._dp = dp_rank, dp
        self._vocab_size = vocab_size
        self._needs_tokens = needs_tokens
        self._packing = packing
        self._queue: queue.Queue[StepBatch | BaseException] = queue.Queue(maxsize=prefetch_steps)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._produce, args=(start_sample,), name="train-loader", daemon=True)
        self._thread.start()

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
        """Ends the thread; the iterator is exhausted from then on."""
        self._closed.set()
        self._thread.join()

    def __enter__(self) -> TrainLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _produce(self, first_sample: int) -> None:
        try:
            while not self._closed.is_set():
                batch = self._load(first_sample)
                self._put(batch)
                first_sample += batch.samples
        except BaseException as error:
            # Whatever it is, the consumer must not wait for a thread that is gone.
            self._put(error)

    def _put(self, item: StepBatch | BaseException) -> None:
        while not self._closed.is_set():
            try:
                self._queue.put(item, timeout=POLL_S)
            except queue.Full:
                continue
            return

    def _load(self, first_sample: int) -> StepBatch:
        size = self._schedule.at(first_sample)
        ids = micro_batch_ids(first_sample, size, self._micro_batch_size, self._dp_rank, self._dp)
        order = self._samples.dataset_samples(np.arange(first_sample, first_sample + size))
        return StepBatch(
            micro_batches=[self._micro_batch(of_micro_batch) for of_micro_batch in ids],
            samples=size,
            batch_hash=batch_hash(order),
            first_sample=first_sample,
        )

    def _micro_batch(self, ids: IntArray) -> MicroBatch:
        info = self._packing.info(self._samples, ids)
        if not self._needs_tokens:
            return MicroBatch(info)
        block = np.empty((ids.size, self._samples.seq_len + 1), np.int64)
        for row, sample in enumerate(ids):
            self._samples.read(int(sample), block[row])
        _check_tokens(self._samples, ids, block, self._vocab_size)
        return _with_tokens(info, block, np.ones((ids.size, self._samples.seq_len), np.float32))


def validation_batches(
    valid: ValidationSamples,
    micro_batch_size: int,
    dp_rank: int,
    dp: int,
    vocab_size: int,
    needs_tokens: bool,
    micro_batches_per_call: int,
    packing: Packing = Packing(),
) -> Iterator[list[MicroBatch]]:
    """Deals the whole validation set to the ranks as the training sampler would.

    Args:
        valid: the windows.
        micro_batch_size: windows in one forward pass of one rank.
        dp_rank: this rank's place among the data-parallel ranks.
        dp: data-parallel ranks.
        vocab_size: every token must be below it.
        needs_tokens: False gives the info only.
        micro_batches_per_call: micro-batches in each list; the last list may be shorter.
        packing: what every stage is told of document borders.

    Yields:
        Lists of micro-batches, as many and as long on every rank. Places beyond the last window are fully masked;
        their sample_ids go on counting.

    Raises:
        DataError: a token is not in the vocabulary.
    """
    block = micro_batch_size * dp
    ids = micro_batch_ids(0, -(-len(valid) // block) * block, micro_batch_size, dp_rank, dp)
    for begin in range(0, len(ids), micro_batches_per_call):
        yield [
            _validation_micro_batch(valid, of_micro_batch, vocab_size, needs_tokens, packing)
            for of_micro_batch in ids[begin : begin + micro_batches_per_call]
        ]


def _validation_micro_batch(
    valid: ValidationSamples, ids: IntArray, vocab_size: int, needs_tokens: bool, packing: Packing
) -> MicroBatch:
    info = packing.info(valid, ids)
    if not needs_tokens:
        return MicroBatch(info)
    block = np.zeros((ids.size, valid.seq_len + 1), np.int64)
    mask = np.zeros((ids.size, valid.seq_len), np.float32)
    for row, window in enumerate(ids):
        if window < len(valid):
            valid.read(int(window), block[row], mask[row])
    _check_tokens(valid, ids, block, vocab_size)
    return _with_tokens(info, block, mask)


def _with_tokens(info: BatchInfo, block: IntArray, mask: npt.NDArray[np.float32]) -> MicroBatch:
    tokens = torch.from_numpy(block)
    return MicroBatch(info, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), torch.from_numpy(mask))


def _check_tokens(
    samples: BlendedSamples | TrainSamples | ValidationSamples, ids: IntArray, block: IntArray, vocab_size: int
) -> None:
    if block.min() >= 0 and block.max() < vocab_size:
        return
    row, column = (int(place) for place in np.argwhere((block < 0) | (block >= vocab_size))[0])
    sample = int(ids[row])
    raise DataError(
        f"{samples.dataset_at(sample).prefix}: document {samples.document_at(sample, column)} holds token "
        f"{block[row, column]}, model.vocab_size is {vocab_size}; use the vocabulary size of the tokenizer that made "
        "the dataset, or make the dataset anew with `megads preprocess`"
    )
