"""Gathers what `megads why` prints: samples, their text, and the losses of their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from megads.checkpoint.read import CheckpointHandle, check_model, load_unsharded, nearest_checkpoint
from megads.config import RootConfig
from megads.data.batches import Packing, assemble
from megads.data.carried_tokenizer import find_tokenizer
from megads.data.indexed import IntArray
from megads.data.origin import SampleOrigin, Stretch, sample_origins
from megads.data.sampler import micro_batch_ids
from megads.data.tokenizer import tokenizing
from megads.errors import ConfigError, DataError
from megads.evaluate.config import WeightPrecision
from megads.evaluate.placement import choose_device, choose_dtype
from megads.evaluate.token_losses import losses_of
from megads.frozen_config import config_dict
from megads.parallel.context import held_chunks
from megads.parallel.grid import GridCoordinate, place_of
from megads.runtime.run_dir import find_run
from megads.tools.inspect.trained_step import TrainedStep, open_step
from megads.tools.inspect.why_config import LossChoice, WhyConfig

Losses = npt.NDArray[np.float32]


@dataclass(frozen=True)
class RankShare:
    """What one rank read of the step.

    Attributes:
        rank: the rank.
        place: its coordinates.
        chunks: ranges of places that it holds of every sample; one of the whole without context parallelism.
    """

    rank: int
    place: GridCoordinate
    chunks: tuple[range, ...]


@dataclass(frozen=True)
class ShownSample:
    """One sample.

    Attributes:
        origin: where it came from; of a rank's share, what the rank holds.
        micro_batch: in which it was computed, counted on its replica.
        losses: fp32 [s + 1], of each token given those before it, NaN for the first; None where none was computed.
    """

    origin: SampleOrigin
    micro_batch: int
    losses: Losses | None

    def losses_in(self, stretch: Stretch) -> Losses | None:
        """fp32 [n], the losses of a stretch's tokens."""
        return None if self.losses is None else self.losses[stretch.place : stretch.place + stretch.tokens.size]

    def counted_losses(self) -> Losses:
        """The losses of the tokens on which the loss counts."""
        if self.losses is None:
            return np.zeros(0, np.float32)
        parts = [self.losses_in(stretch)[stretch.counted] for stretch in self.origin.stretches]  # type: ignore[index]
        return np.concatenate(parts) if parts else np.zeros(0, np.float32)


@dataclass(frozen=True)
class Explanation:
    """All that is printed.

    Attributes:
        run_dir: the run's folder.
        trained: the step.
        share: of one rank, None for the whole global batch.
        samples: those to show, in order.
        num_samples: of the step, or of the rank's share of it.
        weights: the checkpoint that gave the losses.
        notes: what a reader should know.
        tokenizers: by dataset; none for one that has no tokenizer.
    """

    run_dir: Path
    trained: TrainedStep
    share: RankShare | None
    samples: tuple[ShownSample, ...]
    num_samples: int
    weights: CheckpointHandle | None
    notes: tuple[str, ...]
    tokenizers: dict[str, Tokenizer]

    def text(self, stretch: Stretch) -> str | None:
        """A stretch's text, None where nothing can decode it."""
        tokenizer = self.tokenizers.get(stretch.dataset)
        with tokenizing(f"the tokenizer of {stretch.dataset}"):
            return None if tokenizer is None else tokenizer.decode(stretch.tokens.tolist(), skip_special_tokens=False)

    def token_texts(self, stretch: Stretch) -> list[str]:
        """The text of each of its tokens; empty where nothing can decode them."""
        tokenizer = self.tokenizers.get(stretch.dataset)
        ids = stretch.tokens.tolist()
        with tokenizing(f"the tokenizer of {stretch.dataset}"):
            return ["" if tokenizer is None else tokenizer.decode([i], skip_special_tokens=False) for i in ids]


def explain(config: WhyConfig) -> Explanation:
    """Finds what a step trained on.

    Raises:
        ConfigError: no such run, step, rank or sample.
        DataError: the data is not what was trained on.
    """
    run_dir = find_run(config.run)
    trained = open_step(run_dir, config.step)
    share = None if config.rank is None else _share(config.rank, trained.config)
    ids_mb = _ids(trained, share)
    flat = ids_mb.reshape(-1)
    if config.first >= flat.size:
        raise ConfigError(f"first = {config.first}: there are {flat.size} samples, the last is number {flat.size - 1}")
    numbers = np.arange(flat.size)[config.first :][: config.shown]
    notes = [] if trained.data_recorded else ["this run did not record what its data held: its order is verified only"]
    packing = Packing(
        trained.config.data.document_mask, trained.config.data.reset_positions, trained.config.data.mask_eod
    )
    weights, losses = _losses(config, run_dir, trained, flat[numbers], packing, notes)
    origins = sample_origins(trained.source, flat[numbers], packing.mask_eod)
    samples = [
        ShownSample(origin if share is None else origin.cut(share.chunks), int(number) // ids_mb.shape[1], of_sample)
        for origin, number, of_sample in zip(origins, numbers, losses, strict=True)
    ]
    prefixes = dict.fromkeys(stretch.dataset for origin in origins for stretch in origin.stretches)
    tokenizers = _tokenizers(list(prefixes), config.tokenizer, notes)
    return Explanation(run_dir, trained, share, tuple(samples), flat.size, weights, tuple(notes), tokenizers)


def _share(rank: int, config: RootConfig) -> RankShare:
    parallel, seq_len = config.parallel, config.train.seq_len
    if rank >= parallel.world_size:
        raise ConfigError(
            f"rank = {rank}: the step was trained by {parallel.world_size} ranks, {parallel.product}; the last is "
            f"{parallel.world_size - 1}"
        )
    place = place_of(rank, parallel)
    if parallel.cp == 1:
        return RankShare(rank, place, (range(seq_len),))
    size = seq_len // (2 * parallel.cp)
    chunks = tuple(range(chunk * size, (chunk + 1) * size) for chunk in held_chunks(place.cp, parallel.cp))
    return RankShare(rank, place, chunks)


def _ids(trained: TrainedStep, share: RankShare | None) -> IntArray:
    """int64 [micro-batches, samples], numbers of the samples; of the whole batch as the replicas together take them."""
    train, dp = trained.config.train, trained.config.parallel.dp
    samples = trained.samples
    if share is None:
        return samples.reshape(-1, train.micro_batch_size * dp)
    return micro_batch_ids(int(samples[0]), samples.size, train.micro_batch_size, share.place.dp, dp)


def _losses(
    config: WhyConfig, run_dir: Path, trained: TrainedStep, samples: IntArray, packing: Packing, notes: list[str]
) -> tuple[CheckpointHandle | None, Sequence[Losses | None]]:
    """The checkpoint and the losses of each sample's tokens."""
    nothing: Sequence[Losses | None] = [None] * samples.size
    if config.loss is LossChoice.none:
        return None, nothing
    weights, passed_by = nearest_checkpoint(run_dir, config.step)
    notes += [f"passed by: {reason}" for reason in passed_by]
    if weights is None:
        notes.append("no losses: the run has no usable checkpoint")
        return None, nothing
    model_config = trained.config.model
    check_model(weights, config_dict(trained.config)["model"])
    if max(model_config.hidden_dropout, model_config.attention_dropout) > 0:
        notes.append("losses are computed without dropout, the training had it")
    device = choose_device(config.device)
    model = load_unsharded(weights, device, choose_dtype(WeightPrecision.auto, device))
    # One sample at a time: the logits of a long one are large enough.
    batches = (
        batch
        for sample in samples
        for batch in assemble(trained.source, np.array([[sample]]), model_config.vocabulary, True, packing)
    )
    first = np.full(1, np.nan, np.float32)
    return weights, [np.concatenate((first, losses)) for losses in losses_of(model, batches, device)]


def _tokenizers(prefixes: Sequence[str], given: str | None, notes: list[str]) -> dict[str, Tokenizer]:
    found = {}
    for prefix in prefixes:
        try:
            found[prefix] = find_tokenizer([Path(prefix)], given).tokenizer
        except DataError as error:
            if given is not None:
                raise
            notes.append(f"no text, token ids instead: {error}")
    return found
