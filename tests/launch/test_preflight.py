"""Data of a run before it starts: data.raw, vocabulary sizes, run ids and run.prepare_only."""

from __future__ import annotations

import dataclasses
import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from megads.config.frozen import derive_run_id, load_frozen
from megads.config.root import RootConfig, check_config
from megads.data.config import DatasetConfig
from megads.data.indexed.dataset import IndexedDataset
from megads.data.indexed.sidecar import Sidecar, read_sidecar, write_sidecar
from megads.data.indexed.writer import IndexedDatasetWriter
from megads.data.sampling.samples import TrainSamples
from megads.errors import ConfigError, DataError, MegadsError
from megads.launch.preflight import _refuse_replicas, locate_data, resolve_run
from megads.launch.slurm_ranks import SlurmPlacement
from megads.parallel.config import Recompute
from megads.runtime.config import ClusterConfig, ClusterKind
from megads.runtime.slurm import Allocation, Node, SlurmJob
from tests.command import StartCommand, events_of, steps_of

SENTENCE = "One does not simply train a model on {}; one reads {} of its samples first.\n"
# Small and quick; with cluster.peak_tflops the machine's peak is not measured.
QUICK = ("train.steps=3", "train.seq_len=32", "train.global_batch_size=2", "cluster.peak_tflops=1")


def text(number: int, lines: int = 40) -> str:
    return "".join(SENTENCE.format(number * line, line) for line in range(lines))


def records(number: int) -> bytes:
    return "".join(json.dumps({"text": text(number + n, 4)}) + "\n" for n in range(20)).encode()


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A folder `my/` with every file type."""
    my = tmp_path / "my"
    (my / "deep").mkdir(parents=True)
    (my / "a.txt").write_text(text(1))
    (my / "b.md.gz").write_bytes(gzip.compress(text(2).encode()))
    (my / "c.jsonl").write_bytes(records(3))
    (my / "deep" / "d.jsonl.zst").write_bytes(zstandard.compress(records(4)))
    pq.write_table(pa.table({"text": [text(5), text(6)]}), my / "deep" / "e.parquet")
    return my


def raw_config(raw: object, **changes: object) -> RootConfig:
    config = RootConfig()
    config.train.steps, config.model.vocab_size, config.data.raw = 1, None, raw
    for name, value in changes.items():
        section, key = name.split("__")
        setattr(getattr(config, section), key, value)
    return config


@pytest.mark.slow
@pytest.mark.distributed
def test_one_command_goes_from_text_to_a_model_and_resumes(megads: StartCommand, corpus: Path) -> None:
    """Catches text prepared twice, a second start that does not resume its run, and new text that resumes the old run.

    Recomputation that is chosen before the vocabulary is known must be frozen as values, which ranks can read.
    """
    command_line = ("train", "data.raw=my", "parallel.recompute=auto", *QUICK)
    first = megads(*command_line).end()
    assert first.code == 0, first.err
    assert "data: making runs/data-cache/" in first.out and "learnt from it" in first.out
    [run_dir] = (megads.folder / "runs").glob("tiny-*")
    assert [step["step"] for step in steps_of(run_dir)] == [1, 2, 3]
    frozen = load_frozen(run_dir / "config.yaml")
    prefix = megads.folder / frozen.data.train[0].path
    sidecar = read_sidecar(prefix)
    assert sidecar is not None and frozen.data.raw is None
    assert 257 < sidecar.vocab_size == frozen.model.vocab_size <= 512
    assert first.out.count("parallel.recompute=auto recomputes nothing") == 1
    assert (frozen.parallel.recompute, frozen.parallel.recompute_blocks) == (Recompute.none, None)
    assert megads.folder / str(frozen.tokenizer.path) == prefix.parent / "tokens.tokenizer.json"
    times = {path: path.stat().st_mtime_ns for path in prefix.parent.iterdir()}

    second = megads(*command_line, "train.steps=4").end()
    assert second.code == 0, second.err
    assert "data: found" in second.out and "making" not in second.out
    assert [event["cached"] for event in events_of(run_dir, "data")] == [False, True]
    assert {path: path.stat().st_mtime_ns for path in times} == times
    assert len(events_of(run_dir, "resume")) == 1

    (corpus / "a.txt").write_text(text(7))
    described = megads(*command_line, "run.dry_run=true").end()
    assert described.code == 0 and "would be made from 5 files" in described.out
    assert run_dir.name not in described.out
    assert len([path for path in prefix.parent.parent.iterdir() if path.is_dir()]) == 1


@pytest.mark.distributed
def test_dry_run_writes_and_tokenizes_nothing(megads: StartCommand, corpus: Path) -> None:
    """Catches a dry run that tokenizes or writes files, and one that does not say what would be made."""
    result = megads("train", "data.raw=[my/*.txt, my/deep]", "run.dry_run=true", *QUICK).end()
    assert result.code == 0, result.err
    for part in ("would be made from 3 files", "a tokenizer of up to 512 tokens", "vocabulary 512", "runs/data-cache/"):
        assert part in result.out
    assert [path.name for path in megads.folder.iterdir()] == ["my"]


@pytest.mark.distributed
def test_a_dry_run_says_that_the_dataset_is_missing(megads: StartCommand) -> None:
    """Catches a dry run that finds nothing wrong with a run which is refused when it starts."""
    result = megads("train", "data.train=[{path: no/corpus}]", "model.vocab_size=300", "run.dry_run=true", *QUICK).end()
    assert result.code == 0 and "no/corpus.idx is not there: the run will be refused" in " ".join(result.out.split())


MISTAKES: list[tuple[tuple[str, ...], int, str]] = [
    (("data.raw=my/*.csv",), 3, "data.raw my/*.csv: matches no file in"),
    (("data.raw=my", "data.train=[{path: x}]"), 2, "are both set"),
    (("data.raw=[]",), 2, "data.raw = []: want a file, folder or glob"),
    (("data.raw=my", "model.vocab_size=100"), 2, "model.vocab_size = 100 is too small for a tokenizer"),
    (("data.raw=short.txt",), 3, "documents of 7 tokens cannot be split"),
    (("data.raw=short.txt", "data.split=[1,0]"), 3, "have 7 tokens, one sample needs train.seq_len + 1 = 129"),
    (("data.raw=my", "data.text_field=body"), 3, "no column 'body'; it has text"),
    (("data.raw=cut.jsonl.zst",), 3, "cut.jsonl.zst: reading failed"),
    (("data.raw=empty",), 3, "no documents"),
]


@pytest.mark.distributed
@pytest.mark.usefixtures("corpus")
@pytest.mark.parametrize(("arguments", "code", "message"), MISTAKES)
def test_beginners_mistakes_are_named(
    megads: StartCommand, arguments: tuple[str, ...], code: int, message: str
) -> None:
    """Catches a traceback, a wrong exit code, or an error that shows only in a rank's log."""
    folder = megads.folder
    (folder / "short.txt").write_text("hello!")
    (folder / "cut.jsonl.zst").write_bytes(zstandard.compress(records(1))[:-9])
    (folder / "empty").mkdir()
    (folder / "empty" / "a.txt").touch()
    result = megads("train", "train.steps=1", *arguments).end()
    assert (result.code, "Traceback" in result.err) == (code, False), result.err
    assert message in result.err
    assert not list(folder.glob("runs/data-cache/.*"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer__vocab_size": 300, "model__vocab_size": 299}, "299 is below tokenizer.vocab_size = 300"),
        ({"tokenizer__vocab_size": 256}, "tokenizer.vocab_size = 256: must be at least 257"),
        ({"tokenizer__vocab_size": 300, "tokenizer__path": "t.json"}, "leave one of them out"),
        ({"tokenizer__vocab_size": 300, "data__raw": None, "data__train": [DatasetConfig("x")]}, "trained on data.raw"),
        ({"tokenizer__end_of_document": ""}, "tokenizer.end_of_document is empty"),
        ({"tokenizer__min_frequency": 0}, "tokenizer.min_frequency = 0"),
        ({"data__raw": 5}, "data.raw = 5: want"),
        ({"data__raw": ["a", ""]}, "want a file"),
    ],
)  # fmt: skip
def test_contradicting_settings_are_refused(changes: dict[str, object], message: str) -> None:
    """Catches a setting that is silently ignored, and a model too small for its tokenizer."""
    with pytest.raises(ConfigError) as caught:
        check_config(raw_config("my", **changes))
    assert message in str(caught.value)


def test_vocab_size_defaults_to_the_datasets(make_indexed: Path) -> None:
    """Catches a model.vocab_size that the user must look up, and a user's value that is changed."""
    config = raw_config(None, data__train=[DatasetConfig(str(make_indexed))])
    assert locate_data(config)[0].model.vocab_size == 999
    config.model.vocab_size = 2000
    assert locate_data(config)[0].model.vocab_size == 2000


@pytest.fixture
def make_indexed(tmp_path: Path) -> Path:
    """A sidecar of a dataset whose tokenizer has 999 tokens."""
    write_sidecar(tmp_path / "made", Sidecar("ab" * 32, 999, 5, 0, 1, 6, 6, 0, {}, [], []))
    return tmp_path / "made"


def test_an_unknown_vocabulary_size_is_refused_with_the_key(make_indexed: Path, tmp_path: Path) -> None:
    """Catches a guessed vocabulary size, and a tokenizer other than the dataset's that is accepted."""
    from tests.corpus import write_corpus

    cases: list[tuple[dict[str, object], type[MegadsError], str]] = [
        ({"data__train": [DatasetConfig(str(tmp_path / "none"))]}, DataError, "no such file"),
        ({"data__train": [DatasetConfig(str(write_corpus(tmp_path / "c")))]}, ConfigError, "set model.vocab_size"),
        (
            {"data__train": [DatasetConfig(str(make_indexed))], "tokenizer__path": __file__},
            DataError,
            "is not the tokenizer that made",
        ),
    ]
    for changes, kind, message in cases:
        with pytest.raises(kind, match=message):
            locate_data(raw_config(None, **changes))


def test_a_vocabulary_below_the_given_tokenizers_is_refused(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches tokens without an embedding row, and a vocabulary above the tokenizer's that is not accepted."""
    monkeypatch.chdir(corpus.parent)
    _, data = locate_data(raw_config("my", tokenizer__vocab_size=300))
    assert data.preparation is not None
    data.preparation.make(lambda _: None)
    data.preparation.tokenizer_file.rename("mine.json")
    with pytest.raises(ConfigError, match=r"model\.vocab_size = 299 is below the 300 tokens of tokenizer.path"):
        locate_data(raw_config("my", tokenizer__path="mine.json", model__vocab_size=299))
    config, _ = locate_data(raw_config("my", tokenizer__path="mine.json", model__vocab_size=400))
    assert config.model.vocab_size == 400


def test_a_runs_auto_values_are_resolved_once(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a run id that depends on what fits this machine today, so that the same command starts another run, and a
    memory plan without the vocabulary of a tokenizer that is still to be trained."""
    monkeypatch.chdir(corpus.parent)
    asked = raw_config("my", tokenizer__vocab_size=300, parallel__recompute=Recompute.auto)
    run = resolve_run(asked, {"model": "tiny"})
    assert (run.asked.data.raw, run.asked.run.id) == ("my", None)
    assert run.config.parallel.recompute is not Recompute.auto and run.choices
    by_hand = dataclasses.replace(locate_data(asked)[0], run=run.config.run)
    assert run.config.run.id == derive_run_id(by_hand, "tiny") and run.run_dir == Path("runs", run.config.run.id)
    assert (run.config.model.vocab_size, run.planned.model.vocab_size) == (None, 300)
    assert not Path("runs", run.config.run.id).exists() and run.data.text.startswith(run.config.data.train[0].path)


@pytest.mark.distributed
def test_prepare_only_builds_what_the_run_needs(megads: StartCommand, corpus: Path) -> None:
    """Catches index maps under names that the run does not look for, too few of them, and ranks that are started."""
    with IndexedDatasetWriter(corpus.parent / "many", np.uint16) as writer:
        for number in range(70_000):
            writer.append([number % 500, 1])
    arguments = (
        "data.train=[{path: many, max_epochs: 3}]", "data.split=[1, 0]", "train.seq_len=4", "train.samples=40000",
        "train.global_batch_size=8", "model.vocab_size=512", "run.id=prepared", "logging.console=plain",
    )  # fmt: skip
    result = megads("train", "run.prepare_only=true", *arguments).end()
    assert result.code == 0, result.err
    assert "prepared: 2 index maps" in result.out
    maps = sorted(path.name.split("-")[1] for path in (corpus.parent / "many.cache").glob("*.json"))
    assert maps == ["epoch00000.json", "epoch00001.json"]
    run_dir = corpus.parent / "runs" / "prepared"
    assert not (run_dir / "config.yaml").exists() and not list((run_dir / "logs").glob("rank_*"))
    dataset = IndexedDataset(corpus.parent / "many")
    before = {path: path.stat().st_mtime_ns for path in (corpus.parent / "many.cache").iterdir()}
    TrainSamples(dataset, range(70_000), 4, seed=1234).runs(np.arange(39_990, 40_000))
    assert {path: path.stat().st_mtime_ns for path in (corpus.parent / "many.cache").iterdir()} == before


@pytest.mark.parametrize(
    ("kind", "nodes", "replicate", "refused"),
    [
        (ClusterKind.local, None, True, True),
        (ClusterKind.local, None, False, False),
        (ClusterKind.slurm, None, True, False),
        (ClusterKind.slurm, 1, True, True),
        (ClusterKind.slurm, 1, False, False),
        (ClusterKind.slurm, 2, True, False),
    ],
)
def test_local_copies_need_another_node(kind: ClusterKind, nodes: int | None, replicate: bool, refused: bool) -> None:
    """Catches copies of local checkpoints that have nowhere to go, and a job refused whose nodes are not known yet."""
    config = RootConfig(cluster=ClusterConfig(kind=kind))
    config.checkpoint.replicate = replicate
    names = tuple(Node(f"n{number}", "") for number in range(nodes or 0))
    placement = None if nodes is None else SlurmPlacement(Allocation(SlurmJob("7", 0, ""), names), names, 1)
    if refused:
        with pytest.raises(ConfigError, match="all ranks are on one node"):
            _refuse_replicas(config, placement, None)
    else:
        _refuse_replicas(config, placement, None)
