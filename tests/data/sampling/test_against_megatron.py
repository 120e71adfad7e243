"""Megatron's order against megatron-core's own datasets, over random blends: every token of every sample."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from megads.data.config import DataConfig, DatasetConfig, Order
from megads.data.indexed.writer import IndexedDatasetWriter
from megads.data.sampling.datasets import open_datasets
from megads.data.sampling.loader import PLAIN, assemble

pytestmark = pytest.mark.slow
DATASETS, VOCAB_SIZE = 60, 1000


weights = st.one_of(
    st.integers(1, 100).map(lambda number: number / 100),
    st.integers(1, 9).map(float),
    st.floats(1e-4, 1e3, allow_nan=False),
)
blends = st.lists(
    st.tuples(st.integers(0, DATASETS - 1), weights), min_size=1, max_size=DATASETS, unique_by=lambda x: x[0]
)


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Datasets of 2 to 40 documents of various lengths."""
    folder, random = tmp_path_factory.mktemp("datasets"), np.random.default_rng(0)
    made = []
    for number in range(DATASETS):
        with IndexedDatasetWriter(folder / f"set_{number}", np.uint16) as writer:
            for size in random.integers(1, random.integers(20, 300), random.integers(1, 40)):
                writer.append(random.integers(0, VOCAB_SIZE, size))
            writer.append(random.integers(0, VOCAB_SIZE, 80))
        made.append(str(folder / f"set_{number}"))
    return made


@pytest.fixture(scope="module")
def world() -> Iterator[None]:
    """A process group of one rank, because megatron-core queries its rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def megatron(paths: list[str], given: list[float] | None, seq_len: int, seed: int, samples: int, cache: Path) -> Any:
    """megatron-core's training dataset."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
        from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    tokenizer = SimpleNamespace(vocab_size=VOCAB_SIZE, eod=0, pad=-1, unique_identifiers={"class": "none"})
    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=seq_len,
        blend=(paths, given),
        split="1,0,0",
        path_to_cache=str(cache),
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, [samples, 0, 0], lambda: True, config).build()[0]


@settings(max_examples=500, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(blend=blends, seq_len=st.integers(4, 64), seed=st.integers(0, 2**31), samples=st.integers(1, 400))
def test_samples_equal_those_of_megatron(
    world: None,
    prefixes: list[str],
    tmp_path: Path,
    blend: list[tuple[int, float]],
    seq_len: int,
    seed: int,
    samples: int,
) -> None:
    """Catches blend weights, shares, epochs, shuffles or sample boundaries that are not Megatron's: any one shifts all
    later samples."""
    paths = [prefixes[number] for number, _ in blend]
    shares = [weight for _, weight in blend]
    try:
        theirs = megatron(paths, shares if len(blend) > 1 else None, seq_len, seed, samples, tmp_path)
    except IndexError:
        reject()  # Megatron rounds a dataset's number of samples up, and then finds the dataset too short
    train = [DatasetConfig(path, weight, max_epochs=1e9) for path, weight in zip(paths, shares, strict=True)]
    if len(blend) == 1:
        train[0].weight = None
    config = DataConfig(train=train, split=[1.0, 0.0], order=Order.megatron, cache_dir=str(tmp_path))
    ours, _ = open_datasets(config, seq_len, seed, VOCAB_SIZE, samples)
    [batch] = assemble(ours, np.arange(samples)[None], VOCAB_SIZE, True, PLAIN)
    assert batch.tokens_bs is not None and batch.labels_bs is not None
    for number in range(samples):
        sample = theirs[number]
        assert np.array_equal(batch.tokens_bs[number], sample["tokens"]), number
        assert np.array_equal(batch.labels_bs[number], sample["labels"]), number
