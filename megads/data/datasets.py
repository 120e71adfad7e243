"""Opens the datasets that a run's config names."""

from __future__ import annotations

from pathlib import Path

from megads.data.config import DataConfig, PackingMode
from megads.data.indexed import IndexedDataset
from megads.data.packed import PackedSamples, PackedValidation
from megads.data.samples import TrainSamples, ValidationSamples, split_documents
from megads.data.sidecar import Sidecar, read_sidecar, sidecar_path
from megads.data.staging import staged
from megads.errors import DataError


def open_datasets(
    config: DataConfig, seq_len: int, seed: int, vocab_size: int
) -> tuple[TrainSamples | PackedSamples, ValidationSamples | PackedValidation | None]:
    """Opens training and validation data and checks that they fit the model and each other.

    With data.valid set, training takes all documents of its dataset; else data.split divides them.

    Args:
        config: which data.
        seq_len: tokens that a sample predicts.
        seed: of the training order.
        vocab_size: the model's; every token must be below it.

    Returns:
        Training samples, and validation windows or None when data.split gives validation nothing.

    Raises:
        ConfigError: the config names no data.
        DataError: data is missing, corrupt, too small, or made for another vocabulary.
    """
    config.check()
    path = config.train[0].path
    dataset = open_dataset(config, path)
    sidecar = _checked_sidecar(dataset, vocab_size)
    if config.valid is None:
        train_documents, valid_documents = split_documents(dataset, config.split)
        valid_dataset = dataset
    else:
        train_documents = range(dataset.num_documents)
        valid_dataset = open_dataset(config, config.valid)
        valid_documents = range(valid_dataset.num_documents)
        _check_same_tokenizer(path, sidecar, config.valid, _checked_sidecar(valid_dataset, vocab_size))
    train = train_source(config, dataset, train_documents, seq_len, seed)
    valid = validation_source(config, valid_dataset, valid_documents, seq_len) if valid_documents else None
    return train, valid


def open_dataset(config: DataConfig, path: str) -> IndexedDataset:
    """The dataset at a prefix, or its copy on this node where data.stage_to asks for one."""
    return IndexedDataset(path if config.stage_to is None else staged(path, config.stage_to))


def train_source(
    config: DataConfig, dataset: IndexedDataset, documents: range, seq_len: int, seed: int
) -> TrainSamples | PackedSamples:
    """Training samples of some documents of one dataset, as data.packing says."""
    if config.packing is PackingMode.best_fit:
        return PackedSamples(dataset, documents, seq_len, seed)
    return TrainSamples(dataset, documents, seq_len, seed, config.cache_dir)


def validation_source(
    config: DataConfig, dataset: IndexedDataset, documents: range, seq_len: int
) -> ValidationSamples | PackedValidation:
    """Validation windows of some documents of one dataset, as data.packing says."""
    if config.packing is PackingMode.best_fit:
        return PackedValidation(dataset, documents, seq_len)
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
    if sidecar.max_token_id >= vocab_size:
        raise DataError(
            f"{path}: the dataset's largest token is {sidecar.max_token_id} and its tokenizer has {sidecar.vocab_size} "
            f"tokens, model.vocab_size is {vocab_size}; set model.vocab_size={sidecar.vocab_size}"
        )
    return sidecar


def _check_same_tokenizer(train_path: str, train: Sidecar | None, valid_path: str, valid: Sidecar | None) -> None:
    if train is None or valid is None or train.tokenizer_sha256 == valid.tokenizer_sha256:
        return
    raise DataError(
        f"{sidecar_path(valid_path)}: made with the tokenizer {valid.tokenizer_sha256[:12]}, "
        f"{Path(train_path).name} with {train.tokenizer_sha256[:12]}; preprocess both with one tokenizer"
    )
