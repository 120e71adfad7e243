"""Collects the output of `megads why`: the samples of a step, their text and the losses of their tokens.

Shape suffixes: b = micro-batch size, s = sequence length.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer

from megads.api import (
    CONFIG_FILE,
    EVENTS_FILE,
    GPT,
    METRICS_FILE,
    CheckpointError,
    CheckpointHandle,
    ConfigError,
    DataError,
    DatasetConfig,
    GridCoordinate,
    IntArray,
    MicroBatch,
    Packing,
    RootConfig,
    TrainSource,
    WeightPrecision,
    check_model,
    choose_device,
    choose_dtype,
    config_at,
    config_dict,
    config_of_start,
    find_run,
    find_tokenizer,
    idx_path,
    is_url,
    list_checkpoints,
    load_frozen,
    load_unsharded,
    open_checkpoint,
    open_run_data,
    open_run_tokenizer,
    place_of,
    read_json_lines,
    read_record,
    read_sidecar,
    step_ids,
    token_losses,
    tokenizing,
)
from megads.data.config import MixConfig
from megads.data.indexed.recorded import DataRecord, record_data
from megads.data.sampling.loader import assemble
from megads.data.sampling.runs import DocumentSpan, SampleOrigin, sample_origins
from megads.data.sampling.sampler import batch_hash
from megads.parallel.ring_shifts import context_chunks
from megads.tools.inspect.why_config import LossChoice, WhyConfig


@dataclass(frozen=True)
class TrainedStep:
    """One training step, with its data opened and verified.

    Attributes:
        line: line of the step in metrics.jsonl.
        config: config of the start that trained the step, with data paths resolved from the working directory.
        source: samples of the run.
        data_recorded: whether the tokens were verified against the run's record, not only the order of the samples.
    """

    line: dict[str, Any]
    config: RootConfig
    source: TrainSource
    data_recorded: bool

    @property
    def samples(self) -> IntArray:
        """int64 [global batch size], indices of its samples in the run."""
        end = int(self.line["samples"])
        return np.arange(end - int(self.line["global_batch_size"]), end)


def _open_step(run_dir: Path, step: int) -> TrainedStep:
    """Finds a step in a run directory, opens its data and verifies the batch hash.

    Args:
        run_dir: run directory.
        step: step number, as in metrics.jsonl.

    Raises:
        ConfigError: the step does not exist, or the directory is not a run directory.
        DataError: the data is missing, or is not the data that the step was trained on.
    """
    line = _line_of(run_dir, step)
    config, digest = _config_of(run_dir, step)
    located = _located(config, run_dir)
    recorded = _require_same_content(run_dir, config, located)
    first = int(line["samples"]) - int(line["global_batch_size"])
    located = config_at(located, first)
    source, _ = open_run_data(located, at_sample=first)
    found = TrainedStep(line, located, source, recorded)
    recomputed = batch_hash(source.sample_keys(found.samples))
    if recomputed != line["batch_hash"]:
        reason = f"step {step} was trained by a start whose config ({digest[:8]}) was not kept and differs"
        if digest == "":
            reason = "its config.yaml is not that of the start that trained the step, or its data changed"
        raise DataError(
            f"{run_dir}: step {step} trained on samples of hash {line['batch_hash']}, the data and config of today "
            f"give {recomputed}: {reason}. What is shown would not be what was trained on"
        )
    return found


def _line_of(run_dir: Path, step: int) -> dict[str, Any]:
    path = run_dir / METRICS_FILE
    if not path.is_file():
        raise ConfigError(f"run = {run_dir}: has no {METRICS_FILE}: it is no run directory, or nothing was trained")
    first = last = None
    for line in read_json_lines(path):
        if "loss" not in line or "batch_hash" not in line:
            continue
        if line["step"] == step:
            return line
        first, last = first if first is not None else line["step"], line["step"]
    known = "no step" if last is None else f"steps {first} to {last}"
    raise ConfigError(f"step = {step}: {path} has {known}")


def _config_of(run_dir: Path, step: int) -> tuple[RootConfig, str]:
    """Config of the start that trained a step, or else the latest config; and the expected digest."""
    digest = ""
    for event in read_json_lines(run_dir / EVENTS_FILE):
        # A later start from before the step would have truncated its line and written it again.
        if event.get("event") == "start" and event.get("step", step) < step:
            digest = str(event.get("config_digest", ""))
    config = config_of_start(run_dir, digest) if digest else None
    return config or load_frozen(run_dir / CONFIG_FILE, complete=False), digest


def _located(config: RootConfig, run_dir: Path) -> RootConfig:
    """Resolves the data paths, which are relative to where the run was started: here, or the folder that holds runs/.

    Raises:
        DataError: the data is missing.
    """

    def find(path: str) -> str:
        home = run_dir.resolve().parent
        if is_url(path):
            return path
        # The last candidate is text that a copy of the run prepared again, in a folder named after its hash.
        places = (path, str(home.parent / path), str(home.joinpath(*Path(path).parts[-3:])))
        return next((place for place in places if idx_path(place).exists()), path)

    data = config.data
    valid: Any = data.valid
    if valid is not None:
        valid = find(valid) if isinstance(valid, str) else {name: find(path) for name, path in valid.items()}
    train: list[DatasetConfig] = [dataclasses.replace(item, path=find(item.path)) for item in data.train]
    history = [MixConfig(mix.from_sample, {find(path): w for path, w in mix.weights.items()}) for mix in data.history]
    # Validation sets are named after the paths, so only the folders may differ.
    data = dataclasses.replace(data, train=train, valid=valid, history=history, stage_to=None)
    missing = [path for path in data.paths if not is_url(path) and not idx_path(path).exists()]
    if missing:
        raise DataError(
            f"the data that {run_dir} was trained on is not here ({', '.join(missing)}): run this where the run was "
            "started; for data.raw, the run's own command with run.prepare_only=true makes it again"
        )
    return dataclasses.replace(config, data=data)


def _require_same_content(run_dir: Path, config: RootConfig, located: RootConfig) -> bool:
    """Compares the datasets with the run's record of them; returns whether the record covers all of them.

    Raises:
        DataError: a dataset is missing, damaged or different.
    """
    before = read_record(run_dir)
    if before is None:
        return False
    now = record_data(located.data)
    named = tuple(
        dataclasses.replace(record, path=name) for record, name in zip(now.datasets, config.data.paths, strict=True)
    )
    changes = before.changes(DataRecord(named))
    if changes:
        raise DataError(
            f"the data of {run_dir} is not what it was trained on: {'; '.join(changes)}. Put the data back to see what "
            "the step read"
        )
    return {record.path for record in named} <= {record.path for record in before.datasets}


Losses = npt.NDArray[np.float32]


@dataclass(frozen=True)
class RankShare:
    """The part of a step's global batch that one rank read.

    Attributes:
        rank: global rank.
        place: coordinates of the rank in the grid.
        chunks: ranges of positions of every sample on the rank; one range of all without context parallelism.
    """

    rank: int
    place: GridCoordinate
    chunks: tuple[range, ...]


@dataclass(frozen=True)
class ShownSample:
    """One sample of the step.

    Attributes:
        origin: documents of the sample; restricted to the positions of the rank if one is selected.
        micro_batch: index of its micro-batch on its data-parallel replica.
        losses: fp32 [s + 1], loss of each token given the previous ones, NaN for the first; None if not computed.
    """

    origin: SampleOrigin
    micro_batch: int
    losses: Losses | None

    def span_losses(self, stretch: DocumentSpan) -> Losses | None:
        """fp32 [n], losses of the tokens of a stretch."""
        return None if self.losses is None else self.losses[stretch.place : stretch.place + stretch.tokens.size]

    def counted_losses(self) -> Losses:
        """The losses of the unmasked tokens."""
        if self.losses is None:
            return np.zeros(0, np.float32)
        parts = [self.span_losses(stretch)[stretch.counted] for stretch in self.origin.stretches]  # type: ignore[index]
        return np.concatenate(parts) if parts else np.zeros(0, np.float32)


@dataclass(frozen=True)
class Explanation:
    """Output of `megads why`.

    Attributes:
        run_dir: run directory.
        trained: the step.
        share: part of the selected rank; None for the whole global batch.
        samples: samples to show, in order.
        num_samples: number of samples of the step, or of the selected rank.
        weights: checkpoint used for the losses; None if there are no losses.
        notes: remarks for the reader.
        tokenizers: tokenizer of each dataset; datasets without one are left out.
    """

    run_dir: Path
    trained: TrainedStep
    share: RankShare | None
    samples: tuple[ShownSample, ...]
    num_samples: int
    weights: CheckpointHandle | None
    notes: tuple[str, ...]
    tokenizers: dict[str, Tokenizer]

    def text(self, stretch: DocumentSpan) -> str | None:
        """Text of a stretch; None without a tokenizer."""
        tokenizer = self.tokenizers.get(stretch.dataset)
        with tokenizing(f"the tokenizer of {stretch.dataset}"):
            return None if tokenizer is None else tokenizer.decode(stretch.tokens.tolist(), skip_special_tokens=False)

    def token_texts(self, stretch: DocumentSpan) -> list[str]:
        """Text of each token of a stretch; empty strings without a tokenizer."""
        tokenizer = self.tokenizers.get(stretch.dataset)
        ids = stretch.tokens.tolist()
        with tokenizing(f"the tokenizer of {stretch.dataset}"):
            return ["" if tokenizer is None else tokenizer.decode([i], skip_special_tokens=False) for i in ids]


def explain(config: WhyConfig) -> Explanation:
    """Collects the samples, texts and losses of a step.

    Raises:
        ConfigError: the run, step, rank or sample does not exist.
        DataError: the data is missing or differs from the training data.
    """
    run_dir = find_run(config.run)
    trained = _open_step(run_dir, config.step)
    share = None if config.rank is None else _share(config.rank, trained.config)
    ids_mb = _ids(trained, share)
    flat = ids_mb.reshape(-1)
    if config.first >= flat.size:
        raise ConfigError(f"first = {config.first}: there are {flat.size} samples, the last is number {flat.size - 1}")
    numbers = np.arange(flat.size)[config.first :][: config.shown]
    notes = [] if trained.data_recorded else ["the run did not record its data's content: only its order is verified"]
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
    tokenizers = _tokenizers(run_dir, trained.config, list(prefixes), config.tokenizer, notes)
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
    chunks = tuple(range(chunk * size, (chunk + 1) * size) for chunk in context_chunks(place.cp, parallel.cp))
    return RankShare(rank, place, chunks)


def _ids(trained: TrainedStep, share: RankShare | None) -> IntArray:
    """int64 [micro-batches, samples], sample indices of the rank; or of the whole batch, one row for all replicas."""
    config, samples = trained.config, trained.samples
    of_ranks = step_ids(
        trained.source, int(samples[0]), samples.size, config.train.micro_batch_size, config.parallel.dp,
        balanced=config.data.balance_documents,
    )  # fmt: skip
    return np.concatenate(of_ranks, axis=1) if share is None else of_ranks[share.place.dp]


def _losses(
    config: WhyConfig, run_dir: Path, trained: TrainedStep, samples: IntArray, packing: Packing, notes: list[str]
) -> tuple[CheckpointHandle | None, Sequence[Losses | None]]:
    """The checkpoint, and the token losses of each sample."""
    nothing: Sequence[Losses | None] = [None] * samples.size
    if config.loss is LossChoice.none:
        return None, nothing
    weights, skipped = nearest_checkpoint(run_dir, config.step)
    notes += [f"passed by: {reason}" for reason in skipped]
    if weights is None:
        notes.append("no losses: the run has no usable checkpoint")
        return None, nothing
    model_config = trained.config.model
    check_model(weights, config_dict(trained.config)["model"])
    if max(model_config.hidden_dropout, model_config.attention_dropout) > 0:
        notes.append("losses are computed without dropout, the training had it")
    device = choose_device(config.device)
    model = load_unsharded(weights, device, choose_dtype(WeightPrecision.auto, device))
    # One sample at a time, because the logits of a long sample are large.
    batches = (
        batch
        for sample in samples
        for batch in assemble(trained.source, np.array([[sample]]), model_config.vocabulary, True, packing)
    )
    first = np.full(1, np.nan, np.float32)
    return weights, [np.concatenate((first, losses)) for losses in _losses_of(model, batches, device)]


def _losses_of(model: GPT, batches: Iterable[MicroBatch], device: torch.device) -> Sequence[Losses]:
    """Computes the token losses of micro-batches, without dropout.

    Args:
        model: the model, in evaluation mode.
        batches: micro-batches with tokens.
        device: device of the model.

    Returns:
        fp32 [s] for each sample in order: loss in nats at each position, including masked positions.
    """
    found: list[Losses] = []
    with torch.no_grad():
        for batch in batches:
            assert batch.tokens_bs is not None and batch.labels_bs is not None
            logits = model(batch.tokens_bs.to(device), batch.info.to(device))
            found += list(token_losses(logits, batch.labels_bs.to(device)).float().cpu().numpy())
    return found


def _tokenizers(
    run_dir: Path, config: RootConfig, prefixes: Sequence[str], given: str | None, notes: list[str]
) -> dict[str, Tokenizer]:
    """Tokenizer of each dataset: the run's own if it made the dataset, else the one stored with the dataset."""
    record = read_record(run_dir)
    own = record.tokenizer if record is not None else None
    found = {}
    for prefix in prefixes:
        sidecar = read_sidecar(prefix)
        # Without a sidecar, tokenizer.path of the config names the tokenizer.
        made = config.tokenizer.path is not None if sidecar is None else own and sidecar.tokenizer_sha256 == own.sha256
        try:
            if own is not None and made:
                found[prefix] = open_run_tokenizer(run_dir, own, given, [Path(prefix)]).tokenizer
            else:
                found[prefix] = find_tokenizer([Path(prefix)], given).tokenizer
        except DataError as error:
            if given is not None:
                raise
            notes.append(f"no text, token ids instead: {error}")
    return found


def nearest_checkpoint(run_dir: Path, step: int) -> tuple[CheckpointHandle | None, list[str]]:
    """Finds the usable checkpoint closest to the weights that a step started from.

    Args:
        run_dir: the run's folder, which is not modified.
        step: the step; the checkpoint of the step before it is the closest, and of two equally close ones the earlier
            is taken.

    Returns:
        The checkpoint, None if there is none; and why closer ones are not usable.
    """
    skipped: list[str] = []
    checkpoints = list_checkpoints(run_dir)
    for at in sorted(checkpoints, key=lambda at: (abs(at - (step - 1)), at)):
        try:
            return open_checkpoint(checkpoints[at]), skipped
        except CheckpointError as error:
            skipped.append(f"{checkpoints[at].name}: {error}")
    return None, skipped
