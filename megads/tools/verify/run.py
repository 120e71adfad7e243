"""What a training did: how it is put together from what its ranks hold, and what their data loaders gave them."""

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

from megads.batch import MicroBatch
from megads.data.indexed.dataset import IndexedDataset
from megads.data.indexed.writer import IndexedDatasetWriter
from megads.data.sampling.batch_size import BatchSizeSchedule
from megads.data.sampling.loader import Packing, TrainLoader
from megads.data.sampling.samples import TrainSamples
from megads.engine.interface import Shard
from megads.errors import NumericalError
from megads.model.config import ModelConfig
from megads.optim.groups import AVERAGE
from megads.tools.verify.scenario import Scenario

FloatArray = npt.NDArray[np.float32]


class TensorPart(NamedTuple):
    """A Shard's copy that can travel between processes."""

    key: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    values: FloatArray

    @property
    def where(self) -> tuple[slice, ...]:
        """The rectangle in the global tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.values.shape, strict=True))


def pieces(shards: Iterable[Shard]) -> list[TensorPart]:
    """Copies of shards."""
    return [TensorPart(s.key, s.global_shape, s.offset, s.tensor.detach().cpu().numpy().copy()) for s in shards]


@dataclass
class Stream:
    """What data loaders gave.

    Attributes:
        hashes: batch_hash of every step.
        contents: digest of every row that a rank was given, by what it is and the sample's number.
    """

    hashes: list[str] = field(default_factory=list)
    contents: dict[str, str] = field(default_factory=dict)


@dataclass
class RankRun:
    """What one rank saw and holds; see Run.

    Attributes:
        initial: its own weights before the first step.
        shards: what it owns after the last step.
        held: the same with its copies of what another rank owns.
        gradients: what it owns of the first step's.
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
    """Writes what a rank has for the process that started it: tensors and plain values, no pickled classes."""
    plain = []
    for run in runs:
        content = {**vars(run), "stream": vars(run.stream)}
        for name in _PIECES:
            content[name] = [(*piece[:3], torch.from_numpy(piece.values)) for piece in content[name]]
        plain.append(content)
    torch.save(plain, path)


def read_runs(path: Path) -> list[RankRun]:
    """Reads what `write_runs` wrote; runs nothing of it."""
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
    """What a training did.

    Attributes:
        losses, norms: of every step.
        tokens: unmasked tokens of every step.
        initial, weights: full fp32 master weights before the first and after the last step.
        gradients: full gradients of the first step, reduced, before clipping.
        validation: loss sum and tokens over the validation set on the initial weights.
        replicas: for every tensor of which ranks hold copies, how many elements differ between them in the end.
        reductions: dtype and number of elements of every gradient reduction.
        disagreements: what ranks report differently although all report it of the whole run.
        stream: the samples; several digests where ranks were given different rows under one number.
        model: what was trained, by which key biases are found.
        weight_bound: relative deviation that rounding may cause in a weight.
        averages: full running averages of the weights after the last step, where one is kept.
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


def join(ranks: Sequence[RankRun], model: ModelConfig) -> Run:
    """Puts together what the ranks of one training hold.

    Args:
        ranks: of one training, in order.
        model: what they trained.

    Raises:
        NumericalError: what ranks own overlaps or leaves holes.
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
    run.replicas = differing_copies([piece for rank in ranks for piece in rank.held])
    run.stream = _join_streams([rank.stream for rank in ranks])
    run.reductions = set().union(*(rank.reductions for rank in ranks))
    return run


def assemble(
    found: Iterable[TensorPart | tuple[str, tuple[int, ...], tuple[int, ...], FloatArray]], kind: str
) -> dict[str, FloatArray]:
    """Full tensors of one kind from rectangles.

    Raises:
        NumericalError: an element is covered by several rectangles, or by none.
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


def differing_copies(held: Iterable[TensorPart]) -> dict[str, int]:
    """Elements that differ bitwise between the copies of each tensor that has some; 0 where all is well."""
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
    """Writes documents of unequal length, so that samples start in mid-document; a run reads them in several epochs."""
    random = np.random.default_rng(scenario.seed)
    with IndexedDatasetWriter(prefix, np.int32) as writer:
        for _ in range(_DOCUMENTS):
            size = int(random.integers(1, 3 * scenario.seq_len))
            writer.append(random.integers(0, scenario.model.vocabulary, size))


def read_stream(prefix: Path, scenario: Scenario, dp_rank: int = 0, dp: int = 1, needs_tokens: bool = True) -> Stream:
    """What a rank's loader yields over the scenario's steps.

    Args:
        prefix: the dataset that `write_corpus` wrote.
        scenario: its batches, sequence length and steps.
        dp_rank: the rank's place among the data-parallel ranks.
        dp: data-parallel ranks.
        needs_tokens: False on pipeline stages in the middle.
    """
    dataset = IndexedDataset(prefix)
    samples = TrainSamples(dataset, range(dataset.num_documents), scenario.seq_len, scenario.seed)
    schedule = BatchSizeSchedule(scenario.global_batch_size)
    stream = Stream()
    with TrainLoader(
        samples,
        schedule,
        scenario.micro_batch_size,
        dp_rank,
        dp,
        scenario.model.vocabulary,
        needs_tokens=needs_tokens,
        packing=_PACKING,
    ) as loader:
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
