"""Opens the datasets of a run's config; with data.stage_to, from copies on the node's own disk."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import shutil
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import xxhash

from megads.data.config import DataConfig, Order, PackingMode, Weighting
from megads.data.indexed.dataset import IndexedDataset, bin_path, idx_path
from megads.data.indexed.recorded import DataRecord, holds_the_same
from megads.data.indexed.sidecar import Sidecar, carried_path, read_sidecar, sidecar_path
from megads.data.indexed.stream import open_indexed
from megads.data.indexed.verified_once import file_state, require_unchanged
from megads.data.sampling.batch_size import BatchSizeSchedule
from megads.data.sampling.blend import (
    BalancedOrder,
    BlendedSamples,
    BlendPart,
    ContinuedOrder,
    Interleaving,
    MixPhase,
    MixSchedule,
    mixes,
)
from megads.data.sampling.packed import PackedSamples, PackedValidation
from megads.data.sampling.sampler import skips_of
from megads.data.sampling.samples import PartSamples, SampleLengths, TrainSamples, ValidationSamples, split_documents
from megads.errors import ConfigError, DataError, reason_of
from megads.runtime.files import atomic_writer, read_json
from megads.runtime.optional_tools import require_tool
from megads.runtime.progress import Progress

_COPIED_BYTES = 1 << 23
"""Bytes that are copied at a time from a dataset to a disk of the node."""
log = logging.getLogger(__name__)


def open_datasets(
    config: DataConfig,
    seq_len: int,
    seed: int,
    vocab_size: int,
    samples: int = 0,
    schedule: BatchSizeSchedule | None = None,
    record: DataRecord | None = None,
    lengths: SampleLengths | None = None,
) -> tuple[BlendPart | BlendedSamples, dict[str, ValidationSamples | PackedValidation]]:
    """Opens training and validation data and checks that they fit the model and each other.

    With data.valid set, all documents of the datasets are trained on; otherwise data.split divides each dataset.

    Args:
        config: data config.
        seq_len: number of predicted tokens per sample.
        seed: shuffling seed.
        vocab_size: the model's vocabulary size; every token must be below it.
        samples: planned number of samples of the run; 0 if unknown, which disables the check of max_epochs.
        schedule: batch-size schedule, which maps steps to samples; None is one sample per step.
        record: data record of the run; None if there is none.
        lengths: sample lengths, if they differ between the training phases of the run.

    Returns:
        Training samples, and validation windows by the set's name; empty if data.split gives validation nothing.

    Raises:
        ConfigError: the config names no data, or the run needs more epochs of a dataset than allowed.
        DataError: data is missing, corrupt, too small, or made for another vocabulary.
    """
    config.check()
    items = config.blended
    datasets = [open_dataset(config, item.path, record) for item in items]
    valid_datasets = {name: open_dataset(config, path, record) for name, path in config.valid_paths.items()}
    # Datasets that only earlier blends used are not checked.
    named = [dataset for item, dataset in zip(items, datasets, strict=True) if item in config.train]
    _check_sidecars([*named, *valid_datasets.values()], vocab_size)
    if valid_datasets:
        train_documents = [range(dataset.num_documents) for dataset in datasets]
        held_out = {name: (dataset, range(dataset.num_documents)) for name, dataset in valid_datasets.items()}
    else:
        splits = [split_documents(dataset, config.split) for dataset in datasets]
        train_documents = [train for train, _ in splits]
        held_out = {
            config.share_name(item): (dataset, split[1])
            for item, dataset, split in zip(items, datasets, splits, strict=True)
            if item in config.train
        }
    schedule = schedule or BatchSizeSchedule(1)
    train = _train_samples(config, datasets, train_documents, seq_len, seed, samples, schedule, lengths)
    valid = {
        name: validation_source(config, dataset, documents, seq_len)
        for name, (dataset, documents) in held_out.items()
        if documents
    }
    return train, valid


def train_weights(config: DataConfig) -> list[float]:
    """Opens data.train and returns each dataset's weight, see `blend_weights`; a single dataset is not opened."""
    if len(config.train) == 1:
        return [1.0]
    datasets = [open_indexed(item.path, config.stream) for item in config.train]
    whole = bool(config.valid_paths)
    documents = [range(some.num_documents) if whole else split_documents(some, config.split)[0] for some in datasets]
    return blend_weights(config, datasets, documents)


def blend_weights(config: DataConfig, datasets: Sequence[IndexedDataset], documents: Sequence[range]) -> list[float]:
    """Returns each dataset's weight; the weights do not sum to 1.

    They are not normalized, because Python 3.11, Python 3.12 and NumPy give different sums of the same floats.

    Args:
        config: determines where the weights come from.
        datasets: datasets of data.train.
        documents: documents of each that are trained on.
    """
    if len(datasets) == 1:
        return [1.0]
    if config.weights is Weighting.explicit:
        return [item.weight or 0.0 for item in config.train]
    if config.weights is Weighting.documents:
        return [float(len(part)) for part in documents]
    tokens = [float(dataset.num_tokens_of(part)) for dataset, part in zip(datasets, documents, strict=True)]
    if config.weights is Weighting.tokens:
        return tokens
    # Rounded, because the last digits of a power depend on the C library.
    return [round((count / max(tokens)) ** (1 / config.temperature), 12) for count in tokens]


def _train_samples(
    config: DataConfig,
    datasets: Sequence[IndexedDataset],
    documents: Sequence[range],
    seq_len: int,
    seed: int,
    samples: int,
    schedule: BatchSizeSchedule,
    lengths: SampleLengths | None = None,
) -> BlendPart | BlendedSamples:
    weights = blend_weights(config, datasets, documents) if not config.history else [1.0] * len(datasets)
    skips = skips_of(config.skip, schedule)
    # The end of the run's stream, including skipped ranges.
    total = int(skips.apply(np.array([samples - 1]))[0]) + 1 if samples else 0
    pairs = list(zip(datasets, documents, strict=True))
    parts: list[BlendPart]
    order: Interleaving | None = None
    if config.order is Order.megatron:
        tool = require_tool("megatron_order", "data.order=megatron")
        parts, order = tool.megatron_blend(config, datasets, documents, weights, seq_len, seed, total)
    elif lengths is not None:
        units = [TrainSamples(*pair, lengths.unit, seed, config.cache_dir) for pair in pairs]
        parts = [PartSamples(unit, seq_len) for unit in units]
    else:
        parts = [train_source(config, *pair, seq_len, seed) for pair in pairs]
    if lengths is None and len(parts) == 1 and not skips.ranges and config.train[0].max_epochs is None:
        return parts[0]
    if order is None:
        order = MixSchedule([MixPhase(first, BalancedOrder(mix)) for first, mix in _mixes(config, weights)])
    if lengths is not None:
        order = ContinuedOrder(order, lengths)
    _check_epochs(config, parts, order, total)
    return BlendedSamples(parts, order, skips)


def _mixes(config: DataConfig, weights: Sequence[float]) -> list[tuple[int, Sequence[float]]]:
    """Returns (first sample, weights for config.blended) of each blend."""
    if not config.history:
        return [(0, weights), *((phase.from_sample, phase.weights) for phase in config.phases)]
    by_path = [(mix.from_sample, mix.weights) for mix in mixes(config, ())]
    return [(first, [some.get(item.path, 0.0) for item in config.blended]) for first, some in by_path]


def _check_epochs(config: DataConfig, parts: Sequence[BlendPart], order: Interleaving, total: int) -> None:
    """Checks max_epochs, so that a run does not overfit a small dataset unnoticed."""
    taken = order.counts(total)
    for place, (item, part) in enumerate(zip(config.blended, parts, strict=True)):
        named = f"data.train[{config.train.index(item)}] ({item.path})" if item in config.train else item.path
        allowed = item.max_epochs if item.max_epochs is not None else (1.0 if len(parts) > 1 else None)
        count = int(taken[place])
        if allowed is None or count <= int(allowed * part.samples_per_epoch):
            continue
        limit = int(allowed * part.samples_per_epoch)
        enough = bisect_right(range(total), limit, key=lambda number: int(order.counts(number)[place])) - 1
        raise ConfigError(
            f"{named} has {part.samples_per_epoch} samples an epoch and the run of {total} "
            f"samples takes {count} of it, {count / part.samples_per_epoch:.2f} epochs; max_epochs = {allowed:g} "
            f"allows {limit}: set its max_epochs to {count / part.samples_per_epoch + 0.005:.2f}, lower its weight, or "
            f"train on at most {enough} samples"
        )


def open_dataset(config: DataConfig, path: str, record: DataRecord | None = None) -> IndexedDataset:
    """Opens the dataset at a prefix or URL; with data.stage_to its copy on this node.

    Args:
        config: data config of the run.
        path: prefix or URL.
        record: data record of the run, with which files that are written to later are compared.
    """
    found = next((some for some in record.datasets if some.path == path), None) if record is not None else None
    prefix = path if config.stage_to is None else node_local_copy(path, config.stage_to)
    return open_indexed(prefix, config.stream, partial(holds_the_same, found) if found is not None else None)


def train_source(
    config: DataConfig, dataset: IndexedDataset, documents: range, seq_len: int, seed: int
) -> TrainSamples | PackedSamples:
    """Returns training samples of some documents of one dataset, according to data.packing."""
    if config.packing is PackingMode.best_fit:
        return PackedSamples(dataset, documents, seq_len, seed, config.cache_dir)
    return TrainSamples(dataset, documents, seq_len, seed, config.cache_dir)


def validation_source(
    config: DataConfig, dataset: IndexedDataset, documents: range, seq_len: int
) -> ValidationSamples | PackedValidation:
    """Returns validation windows of some documents of one dataset, according to data.packing."""
    if config.packing is PackingMode.best_fit:
        return PackedValidation(dataset, documents, seq_len, config.cache_dir)
    return ValidationSamples(dataset, documents, seq_len)


def _checked_sidecar(dataset: IndexedDataset, vocab_size: int) -> Sidecar | None:
    sidecar = read_sidecar(dataset.prefix)
    if sidecar is None:
        return None
    path = sidecar_path(dataset.prefix)
    if (sidecar.documents, sidecar.tokens) != (dataset.num_documents, dataset.num_tokens):
        raise DataError(
            f"{path}: describes {sidecar.documents} documents of {sidecar.tokens} tokens, the dataset has "
            f"{dataset.num_documents} of {dataset.num_tokens}: they do not belong together; make the dataset anew with "
            "`megads preprocess overwrite=true`"
        )
    carried = carried_path(dataset.prefix)
    if carried.is_file() and (found := hashlib.sha256(carried.read_bytes()).hexdigest()) != sidecar.tokenizer_sha256:
        raise DataError(
            f"{carried}: its sha256 starts with {found[:12]}, {path} says {sidecar.tokenizer_sha256[:12]}: it is not "
            "the tokenizer that made the dataset, and decodes it to other text; put the right one back, or delete it"
        )
    if sidecar.max_token_id >= vocab_size:
        raise DataError(
            f"{path}: the dataset's largest token is {sidecar.max_token_id} and its tokenizer has {sidecar.vocab_size} "
            f"tokens, model.vocab_size is {vocab_size}; set model.vocab_size={sidecar.vocab_size}"
        )
    return sidecar


def _check_sidecars(datasets: Sequence[IndexedDataset], vocab_size: int) -> None:
    """Checks that each dataset fits its sidecar and the model, and that all were made with one tokenizer."""
    first: tuple[str, Sidecar] | None = None
    for dataset in datasets:
        sidecar = _checked_sidecar(dataset, vocab_size)
        if sidecar is None:
            continue
        if first is None:
            first = (dataset.prefix, sidecar)
        elif sidecar.tokenizer_sha256 != first[1].tokenizer_sha256:
            raise DataError(
                f"{sidecar_path(dataset.prefix)}: made with the tokenizer {sidecar.tokenizer_sha256[:12]}, "
                f"{Path(first[0]).name} with {first[1].tokenizer_sha256[:12]}; preprocess both with one tokenizer"
            )


def node_local_copy(prefix: str, folder: str) -> str:
    """Returns the prefix of a dataset's copy on this node; the first process makes the copy, the others wait.

    The name of the copy depends on the index, and on size and time of the tokens, so changed data is copied again. The
    record with the checksums is written last, after the copy has been read back, so an incomplete copy of a killed
    process is never used. The system releases the lock of a killed process, so that the next one can begin.

    Args:
        prefix: prefix of the dataset.
        folder: folder on a disk of this node.

    Raises:
        ConfigError: the folder cannot be written to or has too little space.
        DataError: the dataset cannot be read, changes meanwhile, or the copy differs from it.
    """
    fingerprint = IndexedDataset(prefix).fingerprint()
    sources = [path for path in (bin_path(prefix), idx_path(prefix), sidecar_path(prefix)) if path.exists()]
    content = [fingerprint, *(file_state(path)[:2] for path in sources)]
    name = f"{Path(prefix).name}-{hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]}"
    copy = Path(folder) / name
    try:
        copy.parent.mkdir(parents=True, exist_ok=True)
        with _locked(copy.with_name(f"{name}.lock")):
            if not _is_complete(copy):
                _copy(sources, prefix, copy)
    except OSError as error:
        raise ConfigError(
            f"data.stage_to = {folder}: {prefix} cannot be copied there: {reason_of(error)}; give a writable folder on "
            "a disk of the node, or null"
        ) from error
    return str(copy)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _record_path(copy: Path) -> Path:
    return Path(f"{copy}.staged.json")


def _is_complete(copy: Path) -> bool:
    """Whether the record and all files with the recorded sizes exist."""
    try:
        sizes = read_json(_record_path(copy))["bytes"]
        return all(copy.with_name(name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _copy(sources: list[Path], prefix: str, copy: Path) -> None:
    # Partial files of killed processes would fill the disk.
    for unfinished in copy.parent.glob(f".{copy.name}.*.partial"):
        unfinished.unlink(missing_ok=True)
    total = sum(path.stat().st_size for path in sources)
    free = shutil.disk_usage(copy.parent).free
    if total > free:
        raise ConfigError(
            f"data.stage_to = {copy.parent}: {prefix} takes {total / 1e9:,.2f} GB, {free / 1e9:,.2f} GB are free; make "
            "room, give another folder, or null"
        )
    sizes, digests, done_bytes = {}, {}, 0
    with Progress(f"copying {Path(prefix).name} to data.stage_to", total) as progress:
        for source in sources:
            target = Path(f"{copy}{source.name.removeprefix(Path(prefix).name)}")
            state = file_state(source)
            digests[target.name] = _copy_file(source, target, progress, done_bytes)
            require_unchanged(source, state)
            if (found := _digest(target)) != digests[target.name]:
                raise DataError(
                    f"{target}: reads back as {found}, {source} is {digests[target.name]}: the disk of "
                    f"data.stage_to = {copy.parent} is damaged; give another folder"
                )
            sizes[target.name] = state[0]
            done_bytes += state[0]
    with atomic_writer(_record_path(copy)) as file:
        file.write(json.dumps({"source": prefix, "bytes": sizes, "xxh3_128": digests}, indent=1).encode())
    log.info("copied %s to %s: %.1f MB", prefix, copy, total / 1e6)


def _copy_file(source: Path, target: Path, progress: Progress, done_bytes: int) -> str:
    """Copies in large sequential reads; returns the digest of the source."""
    digest = xxhash.xxh3_128()
    with source.open("rb", buffering=0) as file, atomic_writer(target) as out:
        while block := file.read(_COPIED_BYTES):
            digest.update(block)
            out.write(block)
            done_bytes += len(block)
            progress.update(done_bytes)
    return str(digest.hexdigest())


def _digest(path: Path) -> str:
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
