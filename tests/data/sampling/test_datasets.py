from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megads.data.config import DataConfig, DatasetConfig
from megads.data.indexed.dataset import IndexedDataset, bin_path, idx_path
from megads.data.indexed.sidecar import Sidecar, carried_path, sidecar_path, write_sidecar
from megads.data.sampling.datasets import node_local_copy, open_datasets
from megads.data.sampling.samples import TrainSamples
from megads.errors import ConfigError, DataError
from tests.data.conftest import VOCAB_SIZE, MakeDataset

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


def test_training_and_validation_documents_are_disjoint(make_dataset: MakeDataset) -> None:
    """Catches training on validation documents."""
    dataset = make_dataset([20] * 100)
    describe(dataset)
    train, valid = open_datasets(config_of(dataset, split=[0.9, 0.1]), SEQ_LEN, 1, VOCAB_SIZE)
    assert isinstance(train, TrainSamples)
    assert (train.documents, valid["held_out"].documents) == (range(90), range(90, 100))


def test_validation_can_be_disabled(make_dataset: MakeDataset) -> None:
    """Catches an error where the user disables validation."""
    train, valid = open_datasets(config_of(make_dataset([20] * 3), split=[1.0, 0.0]), SEQ_LEN, 1, VOCAB_SIZE)
    assert isinstance(train, TrainSamples)
    assert valid == {} and train.documents == range(3)


def test_a_separate_validation_dataset_leaves_all_documents_to_training(make_dataset: MakeDataset) -> None:
    """Catches a split that removes documents from training although a validation dataset is given."""
    dataset, held_out = make_dataset([20] * 10), make_dataset([9, 9], name="valid")
    train, valid = open_datasets(config_of(dataset, valid=held_out.prefix), SEQ_LEN, 1, VOCAB_SIZE)
    assert isinstance(train, TrainSamples)
    found = valid["held_out"]
    assert (train.documents, found.documents, found.dataset.prefix) == (range(10), range(2), held_out.prefix)


def test_seed_and_cache_folder_reach_the_sampler(make_dataset: MakeDataset) -> None:
    """Catches a seed that is not passed on."""
    config = config_of(make_dataset([20] * 100))
    orders = [open_datasets(config, SEQ_LEN, seed, VOCAB_SIZE)[0].sample_keys(np.arange(50)) for seed in (1, 1, 2)]
    assert orders[0].tolist() == orders[1].tolist() != orders[2].tolist()


def test_missing_data_is_answered_with_the_command_that_makes_it(tmp_path: Path) -> None:
    """Catches an error that leaves a new user without a next step."""
    config = DataConfig(train=[DatasetConfig(str(tmp_path / "none"))])
    with pytest.raises(DataError, match=r"none.idx: no such file; make the dataset with `megads preprocess"):
        open_datasets(config, SEQ_LEN, 1, VOCAB_SIZE)
    with pytest.raises(ConfigError, match=r"data.train has 0 datasets"):
        open_datasets(DataConfig(), SEQ_LEN, 1, VOCAB_SIZE)


def test_a_model_with_too_small_a_vocabulary_is_refused_at_the_start(make_dataset: MakeDataset) -> None:
    """Catches a run that fails at the first rare token instead of at its start."""
    dataset = make_dataset([20] * 100)
    describe(dataset)
    with pytest.raises(DataError, match=r"set model.vocab_size=1000"):
        open_datasets(config_of(dataset), SEQ_LEN, 1, VOCAB_SIZE - 1)


def test_a_sidecar_of_another_dataset_is_refused(make_dataset: MakeDataset) -> None:
    """Catches a sidecar that is accepted although it describes another dataset."""
    dataset = make_dataset([20] * 100)
    write_sidecar(dataset.prefix, replace(describe(dataset), tokens=7))
    with pytest.raises(DataError, match="describes 100 documents of 7 tokens"):
        open_datasets(config_of(dataset), SEQ_LEN, 1, VOCAB_SIZE)


@pytest.mark.fault(16)
def test_another_tokenizer_beside_the_dataset_is_refused(make_dataset: MakeDataset) -> None:
    """Catches a run that accepts another tokenizer than the one that made the dataset: the model would train on ids
    that `generate` decodes to other text."""
    dataset = make_dataset([20] * 100)
    content = b'{"version": "1.0"}'
    write_sidecar(dataset.prefix, replace(describe(dataset), tokenizer_sha256=hashlib.sha256(content).hexdigest()))
    carried_path(dataset.prefix).write_bytes(content)
    open_datasets(config_of(dataset), SEQ_LEN, 1, VOCAB_SIZE)
    carried_path(dataset.prefix).write_bytes(content + b" ")
    with pytest.raises(DataError, match=r"tokenizer\.json: its sha256 starts with .* not the tokenizer that made"):
        open_datasets(config_of(dataset), SEQ_LEN, 1, VOCAB_SIZE)


def test_training_and_validation_with_two_tokenizers_are_refused(make_dataset: MakeDataset) -> None:
    """Catches a meaningless validation loss, over token ids of another tokenizer."""
    dataset, held_out = make_dataset([20] * 10), make_dataset([9, 9], name="valid")
    describe(dataset)
    write_sidecar(held_out.prefix, replace(describe(held_out), tokenizer_sha256="cd"))
    with pytest.raises(DataError, match="preprocess both with one tokenizer"):
        open_datasets(config_of(dataset, valid=held_out.prefix), SEQ_LEN, 1, VOCAB_SIZE)


COPY = "import sys; from megads.data.sampling.datasets import node_local_copy; print(node_local_copy(*sys.argv[1:]))"

# Copies a block, reports it and hangs, as on a lost filesystem.
HANGING_COPY = """
import sys, time
from megads.data.sampling import datasets
datasets._COPIED_BYTES = 64
def hang(self, done_bytes, note=""):
    print("copying", flush=True)
    time.sleep(600)
datasets.Progress.update = hang
datasets.node_local_copy(sys.argv[1], sys.argv[2])
"""


def files_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.suffix != ".lock"}


def test_a_node_local_copy_is_equal_reused_and_follows_the_data(make_dataset: MakeDataset, tmp_path: Path) -> None:
    """Catches a copy that differs from the dataset, a second copy of the same data, stale tokens read after the dataset
    was rebuilt with the same sizes, and training on a truncated copy."""
    prefix, folder = make_dataset([5, 9, 30]).prefix, str(tmp_path / "local")
    copy = node_local_copy(prefix, folder)
    assert bin_path(copy).read_bytes() == bin_path(prefix).read_bytes()
    assert idx_path(copy).read_bytes() == idx_path(prefix).read_bytes()
    inode = bin_path(copy).stat().st_ino
    assert node_local_copy(prefix, folder) == copy and bin_path(copy).stat().st_ino == inode
    os.truncate(bin_path(copy), 10)
    assert node_local_copy(prefix, folder) == copy and bin_path(copy).read_bytes() == bin_path(prefix).read_bytes()
    make_dataset(documents=[[1] * 5, [2] * 9, [3] * 30])
    assert IndexedDataset(node_local_copy(prefix, folder)).document_tokens(1).tolist() == [2] * 9
    config = DataConfig(train=[DatasetConfig(prefix)], stage_to=folder, split=[1, 0])
    train, _ = open_datasets(config, 8, 0, 1000)
    assert [str(Path(runs.dataset.prefix).parent) for runs in train.runs(np.arange(1))] == [folder]


def test_a_killed_copy_leaves_no_dataset_and_no_lock(make_dataset: MakeDataset, tmp_path: Path) -> None:
    """Catches an incomplete copy that is used, and ranks that wait forever for the one that was killed."""
    prefix, folder = make_dataset([50, 90]).prefix, tmp_path / "local"
    killed = subprocess.Popen(
        [sys.executable, "-c", HANGING_COPY, prefix, str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert killed.stdout is not None and killed.stdout.readline() == "copying\n"
    waiting = subprocess.Popen([sys.executable, "-c", COPY, prefix, str(folder)], stdout=subprocess.PIPE, text=True)
    time.sleep(1)
    assert waiting.poll() is None, "it did not wait for the first"
    killed.send_signal(signal.SIGKILL)
    copy = waiting.communicate(timeout=60)[0].strip()
    killed.communicate()
    assert bin_path(copy).read_bytes() == bin_path(prefix).read_bytes()
    assert not [name for name in files_in(folder) if name.endswith(".partial")]


def test_an_unusable_copy_folder_is_refused_naming_the_key(make_dataset: MakeDataset, tmp_path: Path) -> None:
    """Catches a traceback, or a full disk, in place of an error message that names the key and the remedy."""
    prefix = make_dataset([50]).prefix
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"data.stage_to = .*file: .* cannot be copied there: .*; give a writable"):
        node_local_copy(prefix, str(tmp_path / "file"))
    with sidecar_path(prefix).open("wb") as sparse:
        sparse.truncate(shutil.disk_usage(tmp_path).free + (1 << 34))
    with pytest.raises(ConfigError, match=r"corpus takes .* GB, .* GB are free; make room"):
        node_local_copy(prefix, str(tmp_path / "full"))
    assert files_in(tmp_path / "full") == set()
