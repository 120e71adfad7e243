from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megads.data.blend_config import DatasetConfig
from megads.data.carried_tokenizer import carried_path
from megads.data.config import DataConfig
from megads.data.datasets import open_datasets
from megads.data.indexed import IndexedDataset
from megads.data.samples import TrainSamples
from megads.data.sidecar import Sidecar, write_sidecar
from megads.errors import ConfigError, DataError

from .conftest import VOCAB_SIZE, MakeDataset

SEQ_LEN = 8


def describe(dataset: IndexedDataset) -> Sidecar:
    """Writes a sidecar that fits the dataset."""
    tokens = dataset.num_tokens
    sidecar = Sidecar("ab", VOCAB_SIZE, VOCAB_SIZE - 1, 0, dataset.num_documents, tokens, tokens, 0, {}, [], [])
    write_sidecar(dataset.prefix, sidecar)
    return sidecar


def config_of(dataset: IndexedDataset, **changes: object) -> DataConfig:
    config = DataConfig(train=[DatasetConfig(dataset.prefix)])
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def test_split_of_one_dataset(make_dataset: MakeDataset) -> None:
    """Catches training on validation documents."""
    dataset = make_dataset([20] * 100)
    describe(dataset)
    train, valid = open_datasets(config_of(dataset, split=[0.9, 0.1]), SEQ_LEN, 1, VOCAB_SIZE)
    assert isinstance(train, TrainSamples)
    assert (train.documents, valid["held_out"].documents) == (range(90), range(90, 100))


def test_no_validation_share(make_dataset: MakeDataset) -> None:
    """Catches an error where the user wants no validation."""
    train, valid = open_datasets(config_of(make_dataset([20] * 3), split=[1.0, 0.0]), SEQ_LEN, 1, VOCAB_SIZE)
    assert isinstance(train, TrainSamples)
    assert valid == {} and train.documents == range(3)


def test_a_validation_dataset_of_its_own(make_dataset: MakeDataset) -> None:
    """Catches a split that still takes documents from training."""
    dataset, held_out = make_dataset([20] * 10), make_dataset([9, 9], name="valid")
    train, valid = open_datasets(config_of(dataset, valid=held_out.prefix), SEQ_LEN, 1, VOCAB_SIZE)
    assert isinstance(train, TrainSamples)
    found = valid["held_out"]
    assert (train.documents, found.documents, found.dataset.prefix) == (range(10), range(2), held_out.prefix)


def test_seed_and_cache_folder_arrive(make_dataset: MakeDataset) -> None:
    """Catches a seed that is not passed on."""
    config = config_of(make_dataset([20] * 100))
    orders = [open_datasets(config, SEQ_LEN, seed, VOCAB_SIZE)[0].dataset_samples(np.arange(50)) for seed in (1, 1, 2)]
    assert orders[0].tolist() == orders[1].tolist() != orders[2].tolist()


def test_missing_data_names_the_command(tmp_path: Path) -> None:
    """Catches an error that leaves a new user without a next step."""
    config = DataConfig(train=[DatasetConfig(str(tmp_path / "none"))])
    with pytest.raises(DataError, match=r"none.idx: no such file; make the dataset with `megads preprocess"):
        open_datasets(config, SEQ_LEN, 1, VOCAB_SIZE)
    with pytest.raises(ConfigError, match=r"data.train has 0 datasets"):
        open_datasets(DataConfig(), SEQ_LEN, 1, VOCAB_SIZE)


def test_a_model_with_too_small_a_vocabulary_is_refused_at_the_start(make_dataset: MakeDataset) -> None:
    """Catches a run that dies at the first rare token instead of at its start."""
    dataset = make_dataset([20] * 100)
    describe(dataset)
    with pytest.raises(DataError, match=r"set model.vocab_size=1000"):
        open_datasets(config_of(dataset), SEQ_LEN, 1, VOCAB_SIZE - 1)


def test_a_sidecar_of_another_dataset_is_refused(make_dataset: MakeDataset) -> None:
    """Catches a dataset copied over another without its sidecar."""
    dataset = make_dataset([20] * 100)
    write_sidecar(dataset.prefix, replace(describe(dataset), tokens=7))
    with pytest.raises(DataError, match="describes 100 documents of 7 tokens"):
        open_datasets(config_of(dataset), SEQ_LEN, 1, VOCAB_SIZE)


def test_another_tokenizer_beside_the_dataset_is_refused(make_dataset: MakeDataset) -> None:
    """Catches a tokenizer copied over the one that made the dataset: the model would be trained on ids that `generate`
    reads as other text."""
    dataset = make_dataset([20] * 100)
    content = b'{"version": "1.0"}'
    write_sidecar(dataset.prefix, replace(describe(dataset), tokenizer_sha256=hashlib.sha256(content).hexdigest()))
    carried_path(dataset.prefix).write_bytes(content)
    open_datasets(config_of(dataset), SEQ_LEN, 1, VOCAB_SIZE)
    carried_path(dataset.prefix).write_bytes(content + b" ")
    with pytest.raises(DataError, match=r"tokenizer\.json: its sha256 starts with .* not the tokenizer that made"):
        open_datasets(config_of(dataset), SEQ_LEN, 1, VOCAB_SIZE)


def test_two_tokenizers_are_refused(make_dataset: MakeDataset) -> None:
    """Catches a validation loss that means nothing because its ids are another tokenizer's."""
    dataset, held_out = make_dataset([20] * 10), make_dataset([9, 9], name="valid")
    describe(dataset)
    write_sidecar(held_out.prefix, replace(describe(held_out), tokenizer_sha256="cd"))
    with pytest.raises(DataError, match="preprocess both with one tokenizer"):
        open_datasets(config_of(dataset, valid=held_out.prefix), SEQ_LEN, 1, VOCAB_SIZE)
