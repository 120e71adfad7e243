"""`megads why` on trained runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from megads.cli.verb import Invocation
from megads.cli.why import run
from megads.data.indexed.dataset import IndexedDataset, bin_path
from megads.data.indexed.sidecar import find_tokenizer
from megads.data.indexed.writer import TurnWriter
from megads.errors import ConfigError, DataError
from megads.tools.inspect.why import Explanation, explain
from megads.tools.inspect.why_config import LossChoice, WhyConfig
from megads.tools.inspect.why_output import as_text
from tests.command import StartCommand, events_of, small_model, steps_of
from tests.small_run import TOKENS, write_dataset

pytestmark = pytest.mark.distributed

HOT = {"model__init_std": 0.2, "optim__lr": 0.01, "checkpoint__every_steps": 1, "checkpoint__keep": 0}


def explained(run_dir: Path, step: int, **changes: object) -> Explanation:
    """Returns what `megads why` finds about a step."""
    return explain(WhyConfig(run=str(run_dir), step=step, json=True, **changes))  # type: ignore[arg-type]


def require_what_was_trained(run_dir: Path, step: int, *shares: Explanation) -> None:
    """Requires that the shown tokens are the datasets', and their loss with the weights before the step the step's."""
    line = steps_of(run_dir)[step - 1]
    losses = []
    for share in shares:
        for sample in share.samples:
            for stretch in sample.origin.stretches:
                document = IndexedDataset(stretch.dataset).document_tokens(stretch.document)
                assert document.size == stretch.document_tokens
                assert document[stretch.offset :][: stretch.tokens.size].tolist() == stretch.tokens.tolist()
            losses.append(sample.counted_losses())
    found = np.concatenate(losses).astype(np.float64)
    before = steps_of(run_dir)[step - 2]["tokens"] if step > 1 else 0
    assert found.size == line["tokens"] - before
    assert found.mean() == pytest.approx(line["loss"], rel=1e-5)


@pytest.fixture(scope="module")
def blend(corpus: Path, module_megads: StartCommand) -> Path:
    """A run over a blend with a phase, a skip and a batch ramp, continued in another layout with one more skip."""
    folder = module_megads.folder
    other = write_dataset(folder / "other")
    data = f"[{{path: {corpus}, weight: 3, max_epochs: 9}}, {{path: other/corpus, weight: 1, max_epochs: 9, name: o}}]"
    changes = HOT | {
        "data__train": data,
        "data__phases": "[{from_sample: 8, weights: [1, 1]}]",
        "train__batch_ramp": "{start: 4, increment: 4, samples: 16}",
        "data__document_mask": "true",
        "run__id": "blend",
    }
    starts: list[dict[str, object]] = [
        {"train__steps": 3, "parallel__dp": 2, "data__skip": "[{samples: [4, 9]}]"},
        {"train__steps": 5, "data__skip": "[{samples: [4, 9]}, {steps: [4, 4]}]"},
    ]
    for start in starts:
        ended = module_megads("train", *small_model(corpus, **changes, **start)).end()
        assert ended.code == 0, ended.err
    assert other == folder / "other" / "corpus"
    shifted = starts[1] | {"train__steps": 6, "data__skip": "[{samples: [4, 9]}, {steps: [3, 3]}]"}
    refused = module_megads("train", *small_model(corpus, **changes, **shifted)).end()
    assert refused.code == 2 and "that are trained already left out" in refused.err, refused.err
    return folder / "runs" / "blend"


@pytest.mark.slow
def test_why_shows_the_documents_that_a_blended_run_trained_on(blend: Path) -> None:
    """Catches samples, documents or offsets other than those trained on, whose loss would not be the step's, and the
    wrong config for a step before a change: step 2 had other micro-batches than step 5."""
    for step in (2, 3, 5):
        found = explained(blend, step)
        assert found.trained.data_recorded and found.weights is not None
        assert found.weights.state["step"] == max(step - 1, 1)
        require_what_was_trained(blend, step, found)
    assert [explained(blend, step, loss=LossChoice.none).trained.config.parallel.dp for step in (3, 4)] == [2, 1]
    shares = [explained(blend, 3, rank=rank) for rank in (0, 1)]
    require_what_was_trained(blend, 3, *shares)
    samples = [[sample.origin.sample for sample in share.samples] for share in shares]
    first = steps_of(blend)[1]["samples"]
    assert samples == [[first, first + 1, first + 4, first + 5][: len(samples[0])], samples[1]]
    assert sorted(samples[0] + samples[1]) == list(range(first, steps_of(blend)[2]["samples"]))


@pytest.mark.always
def test_why_prints_every_document_as_text_and_json(blend: Path, module_megads: StartCommand) -> None:
    """Catches output that omits a document, and text for a dataset without a tokenizer, whose ids mean nothing."""
    other = module_megads.folder / "other" / "corpus"
    ended = module_megads("why", "run=blend", "step=5", "json=true").end()
    assert ended.code == 0, ended.err
    content = json.loads(ended.out)
    documents = [document for sample in content["shown"] for document in sample["documents"]]
    texts = {Path(document["dataset"]).parent.name: document["text"] for document in documents}
    assert texts.pop(other.parent.name) in "".join(_texts(other)) and set(texts.values()) == {None}
    assert content["batch_hash"] == steps_of(blend)[4]["batch_hash"] and content["weights"]["after_step"] == 4
    assert content["notes"][-1].startswith("no text, token ids instead: no tokenizer found")
    text = as_text(explained(blend, 5), max_characters=60, tokens=True)
    assert all(f"{document['document']:,}" in text for document in documents)
    assert max(map(len, text.split("\nsample ", 1)[1].splitlines())) <= 120


def _texts(prefix: Path) -> list[str]:
    dataset, tokenizer = IndexedDataset(prefix), find_tokenizer([prefix], None).tokenizer
    assert tokenizer.get_vocab_size() <= TOKENS
    documents = (dataset.document_tokens(number).tolist() for number in range(dataset.num_documents))
    return [tokenizer.decode(document, skip_special_tokens=False) for document in documents]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"run": "nowhere", "step": 1}, "run = nowhere: there is no such run directory"),
        ({"step": 6}, "step = 6: runs/blend/metrics.jsonl has steps 1 to 5"),
        ({"step": 0}, "step = 0: steps are counted from 1"),
        ({"step": 3, "rank": 2}, "rank = 2: the step was trained by 2 ranks"),
        ({"step": 3, "first": 99}, "first = 99: there are 8 samples"),
    ],
)
def test_why_refuses_an_absent_run_step_rank_or_sample(
    blend: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, object], expected: str
) -> None:
    """Catches an exception without a message, or an empty answer, for an absent run, step, rank or sample."""
    monkeypatch.chdir(blend.parent.parent)
    config = WhyConfig(**({"run": "blend", "json": True} | given))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=expected):
        run(config, Invocation({}, set()))


@pytest.mark.slow
def test_why_shows_packed_pairs_as_context_ranks_read_them(module_megads: StartCommand) -> None:
    """Catches packed documents, prompt losses or chunks of a context-parallel rank other than the run's."""
    prefix, run_dir = module_megads.folder / "pairs", module_megads.folder / "packed"
    random = np.random.default_rng(0)
    with TurnWriter(prefix, np.uint16) as writer:
        for _ in range(120):
            writer.append_turns(*(random.integers(0, 509, size) for size in random.integers(1, 12, 2)))
    packed = HOT | {
        "data__packing": "best_fit", "data__document_mask": "true", "data__reset_positions": "true",
        "model__position": "rope", "parallel__cp": 2, "train__steps": 2, "run__dir": run_dir,
    }  # fmt: skip
    ended = module_megads("train", *small_model(prefix, **packed)).end()
    assert ended.code == 0, ended.err
    require_what_was_trained(run_dir, 2, explained(run_dir, 2))
    require_what_was_trained(run_dir, 2, explained(run_dir, 2, rank=0), explained(run_dir, 2, rank=1))
    places = {s.place for sample in explained(run_dir, 2, rank=0).samples for s in sample.origin.stretches}
    assert not places & {5, 6, 7, 8, 9, 10, 11}, "rank 0 holds the first and the last of four chunks"


@pytest.mark.slow
def test_why_shows_what_balanced_ranks_read(corpus: Path, module_megads: StartCommand) -> None:
    """Catches samples of a rank in the order that balancing has changed."""
    run_dir = module_megads.folder / "balanced"
    changes = HOT | {"data__document_mask": "true", "data__balance_documents": "true", "parallel__dp": 2}
    words = small_model(corpus, **changes, train__micro_batch_size=2, train__steps=2, run__dir=run_dir)
    ended = module_megads("train", *words).end()
    assert ended.code == 0, ended.err
    shares = [explained(run_dir, 2, rank=rank) for rank in range(2)]
    require_what_was_trained(run_dir, 2, *shares)
    require_what_was_trained(run_dir, 2, explained(run_dir, 2))
    of_ranks = [[sample.origin.sample for sample in share.samples] for share in shares]
    assert sorted([*of_ranks[0], *of_ranks[1]]) == list(range(12, 24)) and of_ranks[0] != [12, 13, 16, 17, 20, 21]


@pytest.mark.slow
def test_why_follows_megatrons_order_and_refuses_changed_data(corpus: Path, module_megads: StartCommand) -> None:
    """Catches an answer about other data than was trained on, and a run that continues with it: the order of the
    samples, and with it batch_hash, stays the same if only tokens change. Also catches Megatron's order, which depends
    on the run's length, changing for samples that were already trained on."""
    prefix, run_dir = module_megads.folder / "copy", module_megads.folder / "megatron"
    for ending in (".bin", ".idx"):
        shutil.copy(f"{corpus}{ending}", f"{prefix}{ending}")
    changes = HOT | {"data__order": "megatron", "run__dir": run_dir, "data__split": "[1, 0]"}
    ended = module_megads("train", *small_model(prefix, train__steps=2, **changes)).end()
    assert ended.code == 0, ended.err
    require_what_was_trained(run_dir, 2, explained(run_dir, 2))
    ended = module_megads("train", *small_model(prefix, train__steps=3, **changes)).end()
    assert ended.code == 2 and "= 36, but the run was trained with 24 up to sample 24" in ended.err, ended.err
    original = bin_path(prefix).read_bytes()
    bin_path(prefix).write_bytes(original[:1000] + bytes([original[1000] ^ 1]) + original[1001:])
    with pytest.raises(DataError, match=r"copy\.bin holds other tokens than before"):
        explained(run_dir, 2)
    ended = module_megads("train", *small_model(prefix, train__steps=2, **changes)).end()
    assert ended.code == 3 and "copy.bin holds other tokens than before" in ended.err, ended.err
    assert len(steps_of(run_dir)) == 2 and len(events_of(run_dir, "start")) == 1
    bin_path(prefix).unlink()
    with pytest.raises(DataError, match="no such file"):
        explained(run_dir, 2)


def test_why_refuses_a_step_whose_hash_differs(blend: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an explanation of samples that the step did not have: here metrics.jsonl has another run's hash."""
    monkeypatch.chdir(blend.parent.parent)
    forged = tmp_path / "forged"
    shutil.copytree(blend, forged, ignore=shutil.ignore_patterns("checkpoints"))
    metrics = forged / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace(steps_of(blend)[2]["batch_hash"], "0123456789abcdef"))
    with pytest.raises(DataError, match="samples of hash 0123456789abcdef, the data and config of today"):
        explained(forged, 3)
    with pytest.raises(ConfigError, match="has steps 1 to 5"):
        explained(forged, 7)
