from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from megads.batch import BatchInfo
from megads.data.batch_size import BatchSizeSchedule
from megads.data.batches import Packing, assemble
from megads.data.blend_config import DatasetConfig
from megads.data.config import DataConfig, PackingMode
from megads.data.indexed import IndexedDataset
from megads.data.loader import TrainLoader, validation_batches
from megads.data.packed import PackedSamples, PackedValidation, TurnWriter
from megads.errors import ConfigError, DataError
from megads.frozen_config import load_frozen
from megads.model.gpt import GPT
from tests.command import Ended, StartCommand, events_of, small_model, steps_of, validations_of

SEQ_LEN = 16
VOCAB_SIZE = 500
BORDERS = Packing(document_mask=True, reset_positions=True)
Pair = tuple[list[int], list[int]]


def random_pairs(count: int, seed: int = 0, longest: int = 7) -> list[Pair]:
    """Pairs without equal ones: every document starts with its number; prompts may be empty."""
    random = np.random.default_rng(seed)
    pairs = []
    for number in range(count):
        tokens = [number, *random.integers(0, VOCAB_SIZE, int(random.integers(1, 2 * longest))).tolist()]
        cut = int(random.integers(0, len(tokens)))
        pairs.append((tokens[:cut], tokens[cut:]))
    return pairs


def write_pairs(prefix: Path, pairs: list[Pair]) -> IndexedDataset:
    with TurnWriter(prefix, np.uint16) as writer:
        for prompt, response in pairs:
            writer.append_turns(prompt, response)
    return IndexedDataset(prefix)


def documents_of(source: PackedSamples, ids: range) -> list[tuple[list[int], list[int], list[int]]]:
    """(tokens, places whose loss counts, positions) of every document of samples, from their batches."""
    found = []
    [batch] = assemble(source, np.array(ids)[None], VOCAB_SIZE, True, BORDERS)
    assert batch.tokens_bs is not None and batch.labels_bs is not None and batch.loss_mask_bs is not None
    assert batch.info.position_ids_bs is not None
    for row, [runs] in enumerate(source.runs(np.array([i])) for i in ids):
        whole = [*batch.tokens_bs[row].tolist(), int(batch.labels_bs[row, -1])]
        mask, positions = [*batch.loss_mask_bs[row].tolist(), 0.0], [*batch.info.position_ids_bs[row].tolist(), -1]
        assert sum(mask[int(runs.lengths.sum()) :]) == 0, "padding is learnt"
        for place, length in zip(runs.places.tolist(), runs.lengths.tolist(), strict=True):
            span = slice(place, place + length)
            assert mask[place + length - 1] == 0, "the first token of a document is learnt from the one before"
            learnt = [at + 1 for at, counts in enumerate(mask[span]) if counts]
            found.append((whole[span], learnt, positions[span][: SEQ_LEN - place]))
    return found


def test_every_pair_is_read_whole_once_an_epoch(tmp_path: Path) -> None:
    """Catches pairs that are lost, cut or doubled, prompts that are learnt, responses that are not, positions that do
    not restart, epochs of equal order or unequal length."""
    pairs = random_pairs(150)
    source = PackedSamples(write_pairs(tmp_path / "pairs", pairs), range(150), SEQ_LEN, seed=3)
    size, orders = source.samples_per_epoch, []
    for epoch in range(3):
        found = documents_of(source, range(epoch * size, (epoch + 1) * size))
        orders.append([tokens[0] for tokens, _, _ in found])
        assert sorted(orders[-1]) == list(range(150))
        for tokens, learnt, positions in found:
            prompt, response = pairs[tokens[0]]
            assert tokens == prompt + response
            assert learnt == list(range(max(len(prompt), 1), len(tokens)))
            assert positions == list(range(len(positions)))
    assert len({tuple(order) for order in orders}) == 3
    again = PackedSamples(source.dataset, range(150), SEQ_LEN, seed=3)
    other = PackedSamples(source.dataset, range(150), SEQ_LEN, seed=4)
    numbers = np.arange(2 * size)
    assert np.array_equal(again.dataset_samples(numbers)[::-1], source.dataset_samples(numbers[::-1]))
    assert not np.array_equal(other.dataset_samples(numbers), source.dataset_samples(numbers))
    assert source.counts.fill > 0.9, source.counts


def test_what_does_not_fit_is_counted(tmp_path: Path) -> None:
    """Catches a long pair that stops the run or vanishes unseen, a pair without anything to learn, and a conversation
    of which only the first answer, or a question, is learnt."""
    pairs: list[Pair] = [([0] * 10, [1] * 20), ([0] * 17, [1] * 3), ([0] * 5, []), ([], [1]), ([0] * 3, [1] * 3)]
    source = PackedSamples(write_pairs(tmp_path / "pairs", pairs), range(5), SEQ_LEN, seed=0)
    assert (source.counts.truncated, source.counts.dropped, source.counts.samples) == (1, 3, 2)
    found = sorted(documents_of(source, range(2)), key=lambda document: len(document[0]))
    assert [(len(tokens), learnt) for tokens, learnt, _ in found] == [(6, [3, 4, 5]), (17, list(range(10, 17)))]
    with pytest.raises(DataError, match="none of documents 1 to 3 has a token to learn"):
        PackedValidation(source.dataset, range(1, 4), SEQ_LEN)
    with TurnWriter(tmp_path / "mixed", np.uint16) as writer:
        writer.append_turns([7, 8, 9])
        writer.append_turns([3], [4], [5, 5], [6], [2])
    mixed = PackedSamples(IndexedDataset(tmp_path / "mixed"), range(2), SEQ_LEN, seed=0)
    assert documents_of(mixed, range(1)) == [
        ([3, 4, 5, 5, 6, 2], [1, 4], [0, 1, 2, 3, 4, 5]),
        ([7, 8, 9], [1, 2], [0, 1, 2]),
    ]


def test_long_documents_are_trained_to_their_end(tmp_path: Path) -> None:
    """Catches tails that nobody trains, tokens that are predicted twice or never where a document is split, and a fill
    that says nothing of what is left out."""
    random = np.random.default_rng(0)
    documents = [list(range(size)) for size in [*random.lognormal(2.5, 1.2, 80).astype(int) + 1, 16, 17, 18, 33, 34]]
    with TurnWriter(tmp_path / "texts", np.uint16) as writer:
        for document in documents:
            writer.append_turns(document)
        writer.append_turns([5] * 10, [6] * 20)
    dataset = IndexedDataset(tmp_path / "texts")
    source = PackedSamples(dataset, range(len(documents) + 1), SEQ_LEN, seed=0)
    learnt = []
    for tokens, places, positions in documents_of(source, range(source.samples_per_epoch)):
        if tokens[0] != 5 or tokens[-1] != 6:
            learnt += [tokens[place] for place in places]
        assert positions == list(range(len(positions))) and len(tokens) <= SEQ_LEN + 1
    assert sorted(learnt) == sorted(token for document in documents for token in document[1:])
    counts, total = source.counts, sum(map(len, documents)) + 30
    single = sum(len(document) == 1 for document in documents)
    assert counts.tokens == total and counts.dropped == single
    assert counts.split == sum(len(document) > SEQ_LEN + 1 for document in documents)
    assert counts.truncated == 1 and counts.left_out_tokens == 30 - (SEQ_LEN + 1) + single
    valid = PackedValidation(dataset, range(len(documents)), SEQ_LEN)
    batches = itertools.chain(*validation_batches(valid, 3, 0, 1, VOCAB_SIZE, True, 2, BORDERS))
    masks = [float(batch.loss_mask_bs.sum()) for batch in batches if batch.loss_mask_bs is not None]
    assert sum(masks) == len(learnt)


@pytest.mark.parametrize("one", ["document_mask", "reset_positions"])
def test_pairs_that_would_read_each_other_are_refused(one: str) -> None:
    """Catches a packed run whose pairs are context, or an offset, to the pairs after them."""
    config = DataConfig(train=[DatasetConfig("pairs")], packing=PackingMode.best_fit, **{one: True})
    with pytest.raises(ConfigError, match="pairs that share a sample would read each other; set both to true"):
        config.check()


def test_layouts_and_resumes_agree(tmp_path: Path) -> None:
    """Catches packed batches that depend on dp, micro-batch size or where the reading starts (N2)."""
    source = PackedSamples(write_pairs(tmp_path / "pairs", random_pairs(60)), range(60), SEQ_LEN, seed=1)
    seen = []
    for dp, micro, start in ((1, 6, 0), (2, 3, 0), (3, 1, 0), (1, 2, 12)):
        rows: dict[int, tuple[list[int], list[float]]] = {}
        hashes: list[str] = []
        for rank in range(dp):
            schedule = BatchSizeSchedule(12)
            with TrainLoader(source, schedule, micro, rank, dp, VOCAB_SIZE, start, packing=BORDERS) as loader:
                steps = list(itertools.islice(loader, 4 - start // 12))
            hashes = [step.batch_hash for step in steps]
            for batch in itertools.chain(*(step.micro_batches for step in steps)):
                assert batch.tokens_bs is not None and batch.loss_mask_bs is not None
                columns = (batch.info.sample_ids.tolist(), batch.tokens_bs.tolist(), batch.loss_mask_bs.tolist())
                rows |= {sample: (tokens, mask) for sample, tokens, mask in zip(*columns, strict=True)}
        seen.append((hashes, rows))
    assert seen[0] == seen[1] == seen[2]
    assert seen[3][0] == seen[0][0][1:] and seen[3][1].items() <= seen[0][1].items()


def test_validation_predicts_every_response_once(tmp_path: Path) -> None:
    """Catches a layout that drops or repeats packed windows, and a token count that is not what the loss is over."""
    pairs = random_pairs(40)
    valid = PackedValidation(write_pairs(tmp_path / "pairs", pairs), range(7, 40), SEQ_LEN)
    expected = sorted(token for prompt, response in pairs[7:] for token in response[0 if prompt else 1 :])
    for dp, micro in ((1, 3), (2, 2), (3, 4)):
        learnt: list[int] = []
        for rank in range(dp):
            for batch in itertools.chain(*validation_batches(valid, micro, rank, dp, VOCAB_SIZE, True, 2, BORDERS)):
                assert batch.labels_bs is not None and batch.loss_mask_bs is not None
                learnt += batch.labels_bs[batch.loss_mask_bs == 1].tolist()
        assert sorted(learnt) == expected


def loss_of_pairs_alone(model: GPT, pairs: list[Pair]) -> tuple[float, int]:
    """Mean loss over response tokens with each pair in a sample of its own, and their number."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for prompt, response in pairs:
        tokens = torch.tensor([prompt + response])
        with torch.no_grad():
            logits = model(tokens[:, :-1], BatchInfo(torch.tensor([0])))[0].double()
        losses = torch.nn.functional.cross_entropy(logits[:, :VOCAB_SIZE], tokens[0, 1:], reduction="none")
        total += losses[max(len(prompt) - 1, 0) :].sum()
        count += len(tokens[0]) - max(len(prompt), 1)
    return float(total) / count, count


def train_pairs(megads: StartCommand, prefix: Path, name: str, **changes: int | Path) -> Ended:
    overrides = small_model(
        prefix, data__packing="best_fit", data__document_mask="true", data__reset_positions="true",
        data__split="[0.8, 0.2]", model__position="learned", model__init_std=0.2, model__vocab_size=VOCAB_SIZE,
        train__seq_len=SEQ_LEN, train__steps=3, run__dir=name, **changes,
    )  # fmt: skip
    return megads("train", *overrides).end()


@pytest.mark.distributed
def test_pairs_train_as_if_each_were_alone(tmp_path: Path, megads: StartCommand) -> None:
    """Catches loss on prompts or padding, pairs that see each other, positions that go on counting, a mean that is not
    over the response tokens of the global batch, and layouts that differ in any of it (N9)."""
    pairs = random_pairs(150)
    dataset = write_pairs(tmp_path / "pairs", pairs)
    four: dict[str, int | Path] = {"parallel__dp": 2, "parallel__pp": 2, "data__stage_to": tmp_path / "local"}
    for name, changes in (("one", {}), ("four", four)):
        ended = train_pairs(megads, tmp_path / "pairs", name, **changes)
        assert ended.code == 0, ended.err
    config = load_frozen(tmp_path / "one" / "config.yaml")
    source = PackedSamples(dataset, range(120), SEQ_LEN, config.train.seed)
    first_step = [pairs[tokens[0]] for tokens, _, _ in documents_of(source, range(12))]
    loss, count = loss_of_pairs_alone(GPT(config.model, config.train.seed).eval(), first_step)
    one, other = steps_of(tmp_path / "one"), steps_of(tmp_path / "four")
    assert one[0]["tokens"] == count and one[0]["loss"] == pytest.approx(loss, rel=1e-6)
    assert events_of(tmp_path / "one", "packed")[0]["documents"] == 120
    for ours, theirs in zip(one, other, strict=True):
        assert (ours["tokens"], ours["batch_hash"]) == (theirs["tokens"], theirs["batch_hash"])
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    assert len(list((tmp_path / "local").glob("*.bin"))) == 1, "ranks of a node copied twice, or read the original"
    held_out = [validations_of(tmp_path / name)[-1]["valid/held_out/loss"] for name in ("one", "four")]
    assert held_out[0] == pytest.approx(held_out[1], rel=1e-5)
