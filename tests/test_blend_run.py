"""A blend with phases, skips and named validation sets, through the real command."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megads.config.frozen import load_frozen
from megads.config.root import open_run_data
from megads.data.indexed.dataset import IndexedDataset
from megads.data.indexed.writer import IndexedDatasetWriter
from megads.data.sampling.blend import BlendedSamples
from tests.command import StartCommand, events_of, small_model, steps_of, validations_of

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def reversed_corpus(corpus: Path, prefix: Path, documents: int) -> Path:
    """Writes other documents of the same vocabulary."""
    dataset = IndexedDataset(corpus)
    with IndexedDatasetWriter(prefix, np.int32) as writer:
        for document in range(documents):
            writer.append(dataset.document_tokens(document)[::-1])
    return prefix


def test_a_blend_is_the_same_in_two_layouts_and_over_a_resume(corpus: Path, megads: StartCommand) -> None:
    """Catches a blend, phase or skip that depends on the layout or on restarts (N2), a skip that no event records, and
    a validation on one set only."""
    other = reversed_corpus(corpus, megads.folder / "other", 6)
    changes = {
        "data__train": f"[{{path: {corpus}, weight: 3}}, {{path: {other}, weight: 1, max_epochs: 9}}]",
        "data__skip": "[{steps: [2, 2]}]",
        "data__phases": "[{from_sample: 36, weights: [1, 1]}]",
        "data__valid": f"{{same: {corpus}, reversed: {other}}}",
        "evaluation__every_steps": 0,
        "evaluation__max_tokens": 50,
    }
    whole, parted = megads.folder / "whole", megads.folder / "parted"
    assert megads("train", *small_model(corpus, train__steps=4, run__dir=whole, **changes)).end().code == 0
    halves = ({"train__steps": 2, "parallel__dp": 2}, {"train__steps": 4, "parallel__dp": 2})
    for half in halves:
        ended = megads("train", *small_model(corpus, run__dir=parted, run__id="x", **changes, **half)).end()
        assert ended.code == 0, ended.err
    hashes = [[line["batch_hash"] for line in steps_of(run)] for run in (whole, parted)]
    assert len(set(hashes[0])) == 4 and hashes[0] == hashes[1]
    (skip,), (blend,) = events_of(whole, "skip"), events_of(whole, "blend")
    assert skip["left_out"] == [[12, 24]] and skip["samples"] == 12
    assert sum(blend["planned_samples"]) == 48 and min(blend["planned_samples"]) > 10
    names = {key for line in validations_of(whole) for key in line if key.endswith("/loss")}
    assert names == {"valid/same/loss", "valid/reversed/loss"}
    validated = [line for run in (whole, parted) for line in validations_of(run) if "valid/same/tokens" in line]
    assert [line["valid/same/tokens"] for line in validated] == [64, 64, 64]


def test_a_mix_changed_on_resume_applies_from_there(corpus: Path, megads: StartCommand) -> None:
    """Catches a changed blend that applies from the start of the run, one that `why` does not know, and immutable
    settings that are changed silently."""
    other = reversed_corpus(corpus, megads.folder / "other", 12)
    run_dir = megads.folder / "runs" / "mixed"
    changes = {"run__dir": run_dir, "run__id": "mixed", "data__split": "[1, 0]"}
    first = small_model(corpus, train__steps=2, **changes)
    mixed = f"[{{path: {other}, weight: 1, max_epochs: 9}}, {{path: {corpus}, weight: 1}}]"
    then = small_model(corpus, train__steps=4, data__train=mixed, **changes)
    for command in (first, then, [*then, "train.steps=5"]):
        ended = megads("train", *command).end()
        assert ended.code == 0, ended.err
    config = load_frozen(run_dir / "config.yaml")
    weights = [(mix.from_sample, mix.weights) for mix in config.data.history]
    assert weights == [(0, {str(corpus): 1.0}), (24, {str(other): 1.0, str(corpus): 1.0})]
    samples, _ = open_run_data(config)
    assert isinstance(samples, BlendedSamples)
    datasets, places = samples.place(np.arange(60))
    assert places[datasets == 0].tolist() == list(range(42)) and places[datasets == 1].tolist() == list(range(18))
    for step in (1, 4):
        assert megads("why", f"run={run_dir}", f"step={step}", "loss=none").end().code == 0
    ended = megads("train", *then, "data.history=[{from_sample: 9, weights: {a: 1}}]").end()
    assert ended.code == 2 and "megads train itself fills it in" in ended.err
    for change, found in (("train.seed=2", 1234), ("train.seq_len=8", 16), ("data.order=megatron", "default")):
        ended = megads("train", *then, change).end()
        key, _, value = change.partition("=")
        assert ended.code == 2 and f"{key} = {value}, but the run was trained with {found} up to" in ended.err
