"""Results of a training run, assembled from its ranks, and the batches of their dataloaders."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megads.api import (
    AVERAGE,
    IndexedDataset,
    IndexedDatasetWriter,
    LoaderShare,
    MicroBatch,
    ModelConfig,
    NumericalError,
    Packing,
    Shard,
    TrainSamples,
)
from megads.data.sampling.batch_size import BatchSizeSchedule
from megads.data.sampling.loader import TrainLoader
from megads.tools.verify.scenario import Scenario

FloatArray = npt.NDArray[np.float32]


class TensorPart(NamedTuple):
    """A copy of a Shard that can be sent between processes."""

    key: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    values: FloatArray

    @property
    def where(self) -> tuple[slice, ...]:
        """Slices of the rectangle in the global tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.values.shape, strict=True))


def pieces(shards: Iterable[Shard]) -> list[TensorPart]:
    """Copies shards to numpy."""
    return [TensorPart(s.key, s.global_shape, s.offset, s.tensor.detach().cpu().numpy().copy()) for s in shards]


@dataclass
class Stream:
    """Batches of a dataloader, as digests.

    Attributes:
        hashes: batch_hash of every step.
        contents: digest of every row of a batch; the key names the kind of the row and the sample id.
    """

    hashes: list[str] = field(default_factory=list)
    contents: dict[str, str] = field(default_factory=dict)


@dataclass
class RankRun:
    """Results of one rank; see Run for the other attributes.

    Attributes:
        initial: weights that the rank owns, before the first step.
        shards: state that the rank owns, after the last step.
        held: `shards` and the rank's copies of state that other ranks own.
        gradients: gradients of the first step that the rank owns.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    initial: list[TensorPart] = field(default_factory=list)
    shards: list[TensorPart] = field(default_factory=list)
    held: list[TensorPart] = field(default_factory=list)
    gradients: list[TensorPart] = field(default_factory=list)
    validation: tuple[float, int] = (0.0, 0)
    reductions: set[tuple[str, int]] = field(default_factory=set)
    stream: Stream = field(default_factory=Stream)


_PIECES = ("initial", "shards", "held", "gradients")


def write_runs(path: Path, runs: Sequence[RankRun]) -> None:
    """Writes the results of a rank for the parent process as tensors and plain values, without pickled classes."""
    plain = []
    for run in runs:
        content = {**vars(run), "stream": vars(run.stream)}
        for name in _PIECES:
            content[name] = [(*piece[:3], torch.from_numpy(piece.values)) for piece in content[name]]
        plain.append(content)
    torch.save(plain, path)


def read_runs(path: Path) -> list[RankRun]:
    """Reads the output of `write_runs` without executing pickled code."""
    runs = []
    for content in torch.load(path, weights_only=True):
        for name in _PIECES:
            content[name] = [
                TensorPart(key, shape, offset, values.numpy()) for key, shape, offset, values in content[name]
            ]
        runs.append(RankRun(**{**content, "stream": Stream(**content["stream"])}))
    return runs


@dataclass
class Run:
    """Results of a training run.

    Attributes:
        losses: loss of every step.
        norms: gradient norm of every step.
        tokens: unmasked tokens of every step.
        initial: full fp32 master weights before the first step.
        weights: full fp32 master weights after the last step.
        gradients: full reduced gradients of the first step, before clipping.
        validation: loss sum and number of tokens of the validation set, with the initial weights.
        replicas: number of elements that differ between replicas after the last step, for every replicated tensor.
        reductions: dtype and number of elements of every gradient reduction.
        disagreements: descriptions of global values that ranks report differently.
        stream: digests of the samples; several digests under one key if ranks read different rows.
        model: config of the model, needed to find key biases.
        weight_bound: maximum relative deviation of a weight that rounding may cause.
        averages: full running averages of the weights after the last step; empty if none are kept.
        float8: whether layers multiplied in FP8.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    initial: dict[str, FloatArray] = field(default_factory=dict)
    weights: dict[str, FloatArray] = field(default_factory=dict)
    gradients: dict[str, FloatArray] = field(default_factory=dict)
    validation: tuple[float, int] = (0.0, 0)
    replicas: dict[str, int] = field(default_factory=dict)
    reductions: set[tuple[str, int]] = field(default_factory=set)
    disagreements: list[str] = field(default_factory=list)
    stream: Stream = field(default_factory=Stream)
    model: ModelConfig = field(default_factory=ModelConfig)
    weight_bound: float = 1e-4
    averages: dict[str, FloatArray] = field(default_factory=dict)
    float8: bool = False


def join(ranks: Sequence[RankRun], model: ModelConfig) -> Run:
    """Assembles the results of the ranks of one training run.

    Args:
        ranks: results of all ranks, in order.
        model: config of the model.

    Raises:
        NumericalError: the shards of the ranks overlap or leave gaps.
    """
    first = ranks[0]
    run = Run(first.losses, first.norms, first.tokens, validation=first.validation, model=model)
    for number, rank in enumerate(ranks):
        for what in ("losses", "norms", "tokens", "validation"):
            ours, theirs = getattr(rank, what), getattr(first, what)
            if ours != theirs:
                run.disagreements.append(f"{what} {ours} of rank {number}, {theirs} of rank 0")
    run.initial = assemble([piece for rank in ranks for piece in rank.initial], "weight")
    run.weights = assemble([piece for rank in ranks for piece in rank.shards], "weight")
    run.averages = assemble([piece for rank in ranks for piece in rank.shards], AVERAGE)
    run.gradients = assemble([piece for rank in ranks for piece in rank.gradients], "gradient")
    run.replicas = count_differing_copies([piece for rank in ranks for piece in rank.held])
    run.stream = _join_streams([rank.stream for rank in ranks])
    run.reductions = set().union(*(rank.reductions for rank in ranks))
    return run


def assemble(
    found: Iterable[TensorPart | tuple[str, tuple[int, ...], tuple[int, ...], FloatArray]], kind: str
) -> dict[str, FloatArray]:
    """Assembles full tensors of one kind from rectangles.

    Raises:
        NumericalError: an element is covered by several rectangles or by none.
    """
    full: dict[str, FloatArray] = {}
    covered: dict[str, npt.NDArray[np.int32]] = {}
    for piece in map(TensorPart._make, found):
        prefix, _, name = piece.key.partition("/")
        if prefix != kind:
            continue
        full.setdefault(name, np.zeros(piece.global_shape, np.float32))[piece.where] = piece.values
        covered.setdefault(name, np.zeros(piece.global_shape, np.int32))[piece.where] += 1
    for name, times in covered.items():
        if not (times == 1).all():
            raise NumericalError(
                f"{kind} {name}: {np.count_nonzero(times > 1)} elements are owned by several ranks and "
                f"{np.count_nonzero(times == 0)} by none"
            )
    return full


def _join_streams(streams: Sequence[Stream]) -> Stream:
    hashes = [" ".join(sorted(set(of_step))) for of_step in zip(*(s.hashes for s in streams), strict=True)]
    contents: dict[str, set[str]] = {}
    for stream in streams:
        for name, digest in stream.contents.items():
            contents.setdefault(name, set()).add(digest)
    return Stream(hashes, {name: " ".join(sorted(digests)) for name, digests in contents.items()})


def count_differing_copies(held: Iterable[TensorPart]) -> dict[str, int]:
    """Number of elements that differ bitwise between the replicas of each replicated tensor."""
    full: dict[str, npt.NDArray[np.int32]] = {}
    covered: dict[str, npt.NDArray[np.bool_]] = {}
    differing: dict[str, int] = {}
    for piece in held:
        bits = np.ascontiguousarray(piece.values).view(np.int32)
        known = full.setdefault(piece.key, np.zeros(piece.global_shape, np.int32))
        seen = covered.setdefault(piece.key, np.zeros(piece.global_shape, np.bool_))
        copies = seen[piece.where]
        if copies.any():
            differ = int(np.count_nonzero(copies & (known[piece.where] != bits)))
            differing[piece.key] = differing.get(piece.key, 0) + differ
        known[piece.where] = bits
        seen[piece.where] = True
    return differing


_DOCUMENTS = 48
_PACKING = Packing(document_mask=True, reset_positions=True)


def write_corpus(prefix: Path, scenario: Scenario) -> None:
    """Writes documents of different lengths, so that samples start inside documents; a run reads several epochs."""
    random = np.random.default_rng(scenario.seed)
    with IndexedDatasetWriter(prefix, np.int32) as writer:
        for _ in range(_DOCUMENTS):
            size = int(random.integers(1, 3 * scenario.seq_len))
            writer.append(random.integers(0, scenario.model.vocabulary, size))


def read_stream(prefix: Path, scenario: Scenario, dp_rank: int = 0, dp: int = 1, needs_tokens: bool = True) -> Stream:
    """Reads the batches of a rank's dataloader over the steps of a scenario.

    Args:
        prefix: dataset written by `write_corpus`.
        scenario: scenario with batch sizes, sequence length and number of steps.
        dp_rank: data-parallel rank.
        dp: data-parallel size.
        needs_tokens: whether batches contain tokens; False on middle pipeline stages.
    """
    dataset = IndexedDataset(prefix)
    samples = TrainSamples(dataset, range(dataset.num_documents), scenario.seq_len, scenario.seed)
    schedule = BatchSizeSchedule(scenario.global_batch_size)
    stream = Stream()
    vocab_size = scenario.model.vocabulary
    share = LoaderShare(scenario.micro_batch_size, dp_rank, dp, vocab_size, needs_tokens, _PACKING)
    with TrainLoader(samples, schedule, share) as loader:
        for step in itertools.islice(loader, scenario.steps):
            stream.hashes.append(step.batch_hash)
            for batch in step.micro_batches:
                _add(stream, batch)
    return stream


def _add(stream: Stream, batch: MicroBatch) -> None:
    parts = {
        "tokens": batch.tokens_bs,
        "labels": batch.labels_bs,
        "document starts": batch.info.document_starts,
        "positions": batch.info.position_ids_bs,
    }
    for name, rows in parts.items():
        if rows is not None:
            for sample, row in zip(batch.info.sample_ids.tolist(), rows, strict=True):
                stream.contents[f"{name} of sample {sample}"] = _digest(row)


def _digest(row: Tensor) -> str:
    return hashlib.sha256(row.contiguous().numpy().tobytes()).hexdigest()[:16]
