"""Preparation of raw text: with real tokenizers and files, and with processes that are killed or wait for a lock."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from megads.data.config import DataConfig, TextSpecialTokens
from megads.data.indexed.dataset import IndexedDataset
from megads.data.indexed.recorded import written_checksums
from megads.data.indexed.sidecar import Sidecar, load_tokenizer, read_sidecar
from megads.data.indexed.verified_once import file_state, require_unchanged
from megads.data.sampling.samples import split_documents
from megads.data.tokenizer_config import TextTokenizerConfig
from megads.errors import ConfigError, DataError, MegadsError
from megads.tools.prepare import preparation
from megads.tools.prepare.preparation import (
    ContentDigests,
    Preparation,
    PreparedCorpus,
    cut_few_documents,
    default_vocab_size,
    plan_preparation,
    split_off_end,
)
from megads.tools.prepare.text_files import size_text
from tests.data.conftest import MakeDataset

REPOSITORY = Path(__file__).parents[3]

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "models", "learn", "to", "write"]
PROGRAM = """
import sys
from pathlib import Path
from megads.data.config import DataConfig
from megads.data.tokenizer_config import TextTokenizerConfig
from megads.tools.prepare.preparation import plan_preparation
preparation = plan_preparation(DataConfig(raw="text"), TextTokenizerConfig(vocab_size=600), None, Path("cache"))
prepared = preparation.make(lambda line: print(line, flush=True))
print(Path(f"{prepared.prefix}.bin").stat().st_ino)
"""


def prose(number: int, words: int = 400) -> str:
    return " ".join(WORDS[(number * 7 + word * word) % len(WORDS)] for word in range(words)) + ".\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with files of three kinds in text/."""
    monkeypatch.chdir(tmp_path)
    text = tmp_path / "text"
    text.mkdir()
    (text / "a.txt").write_text(prose(1))
    (text / "b.md").write_text(prose(2))
    (text / "c.jsonl").write_text(
        "".join(json.dumps({"text": prose(n), "body": prose(n + 9)}) + "\n" for n in range(9))
    )
    return tmp_path


def plan(
    raw: object = "text", model_vocab_size: int | None = None, cache: str = "cache", **changes: object
) -> Preparation:
    data, tokenizer = DataConfig(raw=raw), TextTokenizerConfig()
    for name, value in changes.items():
        setattr(data if hasattr(data, name) else tokenizer, name, value)
    return plan_preparation(data, tokenizer, model_vocab_size, Path(cache))


def make(raw: object = "text", **changes: object) -> PreparedCorpus:
    return plan(raw, **changes).make(lambda _: None)


def states(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


@pytest.mark.always
def test_the_prepared_corpus_holds_the_text(folder: Path) -> None:
    """Catches lost text, a saved tokenizer that does not decode the dataset, and temporary files that stay."""
    prepared = make()
    dataset = IndexedDataset(prepared.prefix)
    tokens = dataset.stream(range(dataset.num_documents)).tolist()
    tokenizer = load_tokenizer(prepared.tokenizer_file)
    texts = [prose(1), prose(2), *(prose(n) for n in range(9))]
    assert tokenizer.decode(tokens, skip_special_tokens=False) == "".join(text + "<|endoftext|>" for text in texts)
    assert prepared.sidecar.vocab_size == tokenizer.get_vocab_size() <= 512
    assert sorted(path.name for path in prepared.prefix.parent.iterdir()) == [
        "tokens.bin", "tokens.idx", "tokens.json", "tokens.tokenizer.json",
    ]  # fmt: skip
    assert [path.name for path in Path("cache").glob(".*")] == []


def test_a_second_start_reuses_the_prepared_corpus(folder: Path) -> None:
    """Catches text that is tokenized again at every start, and a cache key that depends on the path of the text."""
    first = make()
    before = states(first.prefix.parent)
    assert plan().find() == first and make() == first
    (folder / "text").rename(folder / "moved")
    assert plan(raw=["moved"]).find() == first
    assert states(first.prefix.parent) == before


def test_other_text_or_settings_make_another_corpus(folder: Path) -> None:
    """Catches a cached corpus of another text, field or tokenizer that is reused after a change."""
    made = make()
    given = folder / "given.json"
    given.write_bytes(made.tokenizer_file.read_bytes())
    keys = [
        plan(**changes).folder
        for changes in (
            {}, {"text_field": "body"}, {"vocab_size": 300}, {"min_frequency": 3}, {"end_of_document": None},
            {"text_special_tokens": TextSpecialTokens.parse}, {"begin_of_document": "<|endoftext|>"},
            {"path": str(given)}, {"raw": ["text/c.jsonl", "text/a.txt"]}, {"raw": ["text/a.txt", "text/c.jsonl"]},
        )
    ]  # fmt: skip
    (folder / "text" / "a.txt").write_text(prose(1).upper())
    keys.append(plan().folder)
    (folder / "text" / "a.txt").rename(folder / "text" / "a.jsonl")
    keys.append(plan().folder)
    assert len(set(keys)) == len(keys)


def test_a_given_tokenizer_is_used_and_kept(folder: Path) -> None:
    """Catches a given tokenizer that is ignored, and a run that cannot decode once the user's file is gone."""
    make(vocab_size=270).tokenizer_file.rename("mine.json")
    prepared = make(path="mine.json")
    assert prepared.sidecar.vocab_size == 270
    assert prepared.tokenizer_file.read_bytes() == Path("mine.json").read_bytes()


def test_a_trained_tokenizer_stays_within_the_models_vocabulary(folder: Path) -> None:
    """Catches a default vocabulary size that exceeds the model's."""
    assert plan().vocab_size == 512
    assert plan(model_vocab_size=300).vocab_size == 300
    assert plan(model_vocab_size=9999, vocab_size=700).vocab_size == 700
    sizes = [default_vocab_size(size) for size in (0, 10**5, 10**6, 10**7, 10**8, 10**12)]
    assert sizes == [512, 512, 2048, 8192, 16384, 32768]


@pytest.mark.quick("gone-tokens.bin", "cut-tokens.idx", "other-tokens.json")
@pytest.mark.parametrize("name", ["tokens.bin", "tokens.idx", "tokens.json", "tokens.tokenizer.json"])
@pytest.mark.parametrize("damage", ["gone", "cut", "other"])
def test_a_damaged_prepared_corpus_is_prepared_again(folder: Path, name: str, damage: str) -> None:
    """Catches training on an incomplete cached dataset, and a failure where the dataset can be prepared again."""
    prepared = make()
    whole = {path.name: path.read_bytes() for path in prepared.prefix.parent.iterdir()}
    path = prepared.prefix.parent / name
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(whole[name][: len(whole[name]) // 2] if damage == "cut" else b'{"version": "1.0"}')
    said: list[str] = []
    assert plan().make(said.append) == prepared
    assert {path.name: path.read_bytes() for path in prepared.prefix.parent.iterdir()} == whole
    assert len(said) == 1 and "damaged and is prepared again" in said[0]


def test_text_that_changes_during_preparation_is_refused(folder: Path) -> None:
    """Catches tokens of the new text that are cached under the hash of the old text."""
    preparation = plan()
    (folder / "text" / "a.txt").write_text("something else")
    with pytest.raises(DataError, match=r"a.txt: changed while it was read"):
        preparation.make(lambda _: None)
    assert preparation.find() is None and not list(Path("cache").glob(".*"))


def start() -> subprocess.Popen[str]:
    """Starts a process that prepares text/ in the current folder."""
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.mark.slow
def test_a_kill_during_preparation_leaves_no_corpus_that_is_used(folder: Path) -> None:
    """Catches an incomplete dataset that the next start uses, partial files that make it fail, finished blocks that are
    tokenized again, and a continued preparation whose files differ from those of an uninterrupted one."""
    (folder / "text" / "large.jsonl").write_text("".join(json.dumps({"text": prose(n) * 6}) + "\n" for n in range(150)))
    process = start()
    deadline = time.monotonic() + 60
    while not list(Path("cache").glob(".*.partial/.tokens.bin.*.partial")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    preparation = plan(vocab_size=600)
    assert preparation.find() is None
    assert list(Path("cache").glob(".*.partial"))
    said: list[str] = []
    made = preparation.make(said.append)
    whole = {path.name: path.read_bytes() for path in made.prefix.parent.iterdir()}
    assert not list(Path("cache").glob(".*"))
    assert said[0] == "continuing from the finished parts of an earlier start"
    assert said[1].endswith("parts kept from an earlier start")
    shutil.rmtree(made.prefix.parent)
    preparation.make(lambda _: None)
    assert {path.name: path.read_bytes() for path in made.prefix.parent.iterdir()} == whole


def test_two_processes_prepare_a_corpus_once(folder: Path) -> None:
    """Catches two processes that write the same files, and a second one that fails instead of waiting for the lock."""
    preparation = plan(vocab_size=600)
    Path("cache").mkdir(exist_ok=True)
    with preparation.folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        processes = [start(), start()]
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("waiting for process")
    made = [process.communicate(timeout=60)[0].split()[-1] for process in processes]
    assert made[0] == made[1] == str(Path(f"{preparation.prefix}.bin").stat().st_ino)


BAD_TEXTS: list[tuple[str, bytes, str]] = [
    ("a.txt", b"", "no documents, 1 file rejected: 1 x empty text"),
    ("a.txt", bytes(range(256)) * 9, "no documents, 1 file rejected: 1 x not UTF-8"),
    ("a.jsonl", bytes(range(256)) * 9, "no documents, .* lines rejected"),
    ("a.jsonl", b'{"body": "x"}\n', "no field 'text'.*another is named with data.text_field"),
    ("a.jsonl.gz", b"\x1f\x8b\x08\x00", "reading failed"),
    ("a.parquet", b"PAR1", "reading parquet failed"),
]


@pytest.mark.parametrize(("name", "content", "message"), BAD_TEXTS)
def test_bad_text_is_refused_and_leaves_nothing(folder: Path, name: str, content: bytes, message: str) -> None:
    """Catches a traceback, and an incomplete corpus that the next start uses."""
    Path(name).write_bytes(content)
    preparation = plan(raw=name)
    with pytest.raises(DataError, match=message):
        preparation.make(lambda _: None)
    assert preparation.find() is None and not list(Path("cache").glob(".*"))


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"raw": "none/*.txt"}, DataError, r"data.raw none/\*.txt: matches no file"),
        ({"path": "none.json"}, DataError, "none.json: no such tokenizer file"),
        ({"path": "text/a.txt"}, DataError, "is not a tokenizer file"),
        ({"path": "mine.json", "end_of_document": "</s>"}, ConfigError, "tokenizer.end_of_document = </s>: .* special"),
        ({"path": "mine.json", "begin_of_document": "<s>"}, ConfigError, "begin_of_document = <s>: .* special"),
        ({"cache": "text/a.txt/cache"}, ConfigError, "choose another folder with data.cache_dir"),
    ],
)  # fmt: skip
def test_bad_settings_are_refused_at_once(
    folder: Path, changes: dict[str, object], kind: type[MegadsError], message: str
) -> None:
    """Catches bad settings that fail only after tokenization, and a message that names another command's key."""
    Path("mine.json").write_bytes(make(vocab_size=300, cache="other").tokenizer_file.read_bytes())
    with pytest.raises(kind, match=message):
        plan(**changes)  # type: ignore[arg-type]


def test_a_dry_run_reports_files_sizes_and_tokenizer(folder: Path) -> None:
    """Catches a dry run that omits the number and size of the files, or the tokenizer."""
    size = size_text((folder / "text" / "a.txt").stat().st_size)
    assert str(plan(raw="text/a.txt")).startswith(f"1 file, {size}, a tokenizer of up to 512 tokens learnt from it")
    given = dataclasses.replace(plan(), tokenizer=TextTokenizerConfig(path="mine.json"))
    size = size_text(sum(path.stat().st_size for path in (folder / "text").iterdir()))
    assert str(given) == f"3 files, {size}, tokenizer mine.json"


def describe(dataset: IndexedDataset) -> Sidecar:
    return Sidecar("ab", 999, 998, 0, dataset.num_documents, dataset.num_tokens, 9, 0, {}, [], [])


@pytest.mark.parametrize("sizes", [[50_000], [30_000, 70, 20_000, 0]])
def test_a_long_document_is_divided_into_about_a_hundred_parts(make_dataset: MakeDataset, sizes: list[int]) -> None:
    """Catches a long document that is not divided, a validation share far above data.split's, and lost tokens."""
    dataset = make_dataset(sizes)
    before = np.array(dataset.stream(range(len(sizes))))
    cut = cut_few_documents(Path(dataset.prefix), describe(dataset))
    after = IndexedDataset(dataset.prefix)
    assert np.array_equal(after.stream(range(after.num_documents)), before)
    assert 80 < after.num_documents <= 103
    checksums = written_checksums(dataset.prefix)
    expected = dataclasses.replace(describe(dataset), documents=after.num_documents, **checksums)
    assert cut == read_sidecar(dataset.prefix) == expected
    _, valid = split_documents(after, [0.98, 0.02])
    assert 0.01 < after.stream(valid).size / before.size < 0.04


@pytest.mark.parametrize("sizes", [[500], [10] * 100])
def test_short_and_many_documents_are_not_divided(make_dataset: MakeDataset, sizes: list[int]) -> None:
    """Catches document boundaries that are lost where no document has to be divided."""
    dataset = make_dataset(sizes)
    fingerprint = dataset.fingerprint()
    assert cut_few_documents(Path(dataset.prefix), describe(dataset)).documents == len(sizes)
    assert IndexedDataset(dataset.prefix).fingerprint() == fingerprint


def document_sizes(prepared: PreparedCorpus) -> list[int]:
    dataset = IndexedDataset(prepared.prefix)
    return [len(dataset.document_tokens(document)) for document in range(dataset.num_documents)]


def test_a_book_is_one_document_and_its_end_is_held_out(folder: Path) -> None:
    """Catches a book that is divided into a hundred documents, which are shuffled and do not attend to each other under
    data.document_mask; and a validation share that is missing or not that of data.split."""
    (folder / "book.txt").write_text("".join(prose(number) for number in range(99)))
    whole = sum(document_sizes(make(raw="book.txt", split=[1, 0])))
    for split, share in (([0.98, 0.02], 0.02), ([3, 1], 0.25), ([1, 0], 0), ([0.999999, 0.000001], 256 / whole)):
        sizes = document_sizes(make(raw="book.txt", split=split))
        assert sum(sizes) == whole and sizes[1:] == ([round(share * whole)] if share else [])
    assert document_sizes(make(raw="book.txt", valid="elsewhere")) == [whole]
    assert 90 < len(document_sizes(make(raw="book.txt", cut_documents=100))) <= 100
    assert len(document_sizes(make(raw="book.txt", cut_documents=2))) == 2


def test_few_texts_stay_whole_and_few_records_are_divided(folder: Path) -> None:
    """Catches a validation share of a whole large text where there are few texts, texts that are divided where the last
    one is short, and JSON Lines records that are no longer divided: a continued run would get other documents."""
    (folder / "text" / "c.jsonl").unlink()
    first, second = document_sizes(make(split=[1, 0]))
    (folder / "text" / "c.txt").write_text(prose(3) * 40)
    (folder / "text" / "d.txt").write_text("the end")
    *whole, end = document_sizes(make())
    assert whole[:2] == [first, second] and len(whole) == 3 and end < 256
    (folder / "text" / "d.txt").unlink()
    *_, last, end = document_sizes(make())
    assert end == round(0.02 * (first + second + last + end)) and last > first * 30
    (folder / "text" / "c.txt").unlink()
    (folder / "text" / "c.jsonl").write_text(json.dumps({"text": prose(3) * 40}))
    assert len(document_sizes(make())) > 20


def test_the_held_out_end_agrees_with_the_split(make_dataset: MakeDataset) -> None:
    """Catches a cut after which the split, with one document more, puts the body of a text into validation."""
    for documents in range(1, 99):
        dataset = make_dataset([300] * (documents - 1) + [50_000])
        split_off_end(Path(dataset.prefix), describe(dataset), 0.02)
        after = IndexedDataset(dataset.prefix)
        [*_, valid] = split_documents(after, [0.98, 0.02]) if after.num_documents > 1 else [range(0)]
        assert len(valid) * 50_000 > after.stream(valid).size or after.num_documents == documents


def test_settings_that_do_not_affect_a_text_keep_its_cache_key(folder: Path) -> None:
    """Catches new settings that change the cache key of text that they do not affect, and one that affects the text but
    not the key. The key is that of version 0.1.0, which did not have these settings."""
    (folder / "text" / "d.png").touch()
    before = plan().folder.name
    assert before == "a82eeda77fc9fce5"
    assert plan(extensions=["txt", "md", "jsonl"]).folder.name == before
    assert plan(split=[0.5, 0.5]).folder.name == before
    others = [plan(encoding="cp1252"), plan(cut_documents=7), plan(extensions=["jsonl"]), plan(raw="text/a.txt"),
              plan(raw="text/a.txt", split=[0.5, 0.5])]  # fmt: skip
    names = [before, *(other.folder.name for other in others)]
    (folder / "text" / "a.txt").write_text(prose(1), encoding="utf-16")
    names += [plan().folder.name, plan(encoding="utf-8").folder.name]
    assert len(set(names)) == len(names)


def test_converted_rejected_and_skipped_files_are_reported(folder: Path) -> None:
    """Catches files that are converted, rejected or skipped without a message, also if the corpus is cached."""
    (folder / "text" / "d.txt").write_text(prose(4), encoding="utf-16")
    (folder / "text" / "e.txt").write_bytes("schön".encode("cp1252"))
    (folder / "text" / "f.png").touch()
    assert str(plan()).endswith("; skipped: 1 .png")
    for _ in range(2):
        assert (
            "; skipped: 1 .png; converted: 1 from utf-16-le (text/d.txt); 1 file rejected, the first: text/e.txt: "
            "not UTF-8 (byte 0xf6 in line 1; where it is Western European text, data.encoding=cp1252 or latin-1 reads "
        ) in str(make())
    said = str(make(encoding="cp1252"))
    assert "1 from cp1252 (text/e.txt)" in said and "rejected" not in said


def test_a_cache_folder_has_a_cachedir_tag(folder: Path) -> None:
    """Catches a cache without CACHEDIR.TAG: the next start would read it as text, and backups would include it."""
    make(cache="some/cache")
    assert Path("some/cache/CACHEDIR.TAG").read_bytes().startswith(b"Signature: 8a477f597d28d172789f06886806bc55")
    assert not Path("some/CACHEDIR.TAG").exists()


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Path of a digest cache that trusts modification times immediately."""
    monkeypatch.setattr(preparation, "SETTLED_NS", -1)
    return tmp_path / "memory.json"


def digest(memory: Path, path: Path) -> str:
    digests = ContentDigests(memory)
    [(_, found, _)] = digests.digest_files([path])
    digests.save()
    return found


def forge(memory: Path, old: str, new: str) -> None:
    """Changes a cached digest, so that a test can see whether it is used."""
    memory.write_text(memory.read_text().replace(old, new))


def test_an_unchanged_file_is_not_read_again(memory: Path, tmp_path: Path) -> None:
    """Catches a second start that reads all unchanged files again, up to a terabyte."""
    path = tmp_path / "a.txt"
    path.write_text("one")
    first = digest(memory, path)
    assert digest(memory, path) == first
    forge(memory, first, "remembered")
    assert digest(memory, path) == "remembered"


def test_content_decides_whether_a_touched_file_changed(memory: Path, tmp_path: Path) -> None:
    """Catches a touched file that is tokenized again, and a change that is missed as size and mtime are the same."""
    path = tmp_path / "a.txt"
    path.write_text("one")
    first = digest(memory, path)
    os.utime(path, (1, 1))
    assert digest(memory, path) == first
    path.write_text("two")
    os.utime(path, (1, 1))
    assert digest(memory, path) != first


def test_a_file_just_written_is_not_trusted(tmp_path: Path) -> None:
    """Catches a second write that is missed because it leaves size and times the same, within one clock tick."""
    path = tmp_path / "a.txt"
    path.write_text("one")
    digest(tmp_path / "memory.json", path)
    assert not (tmp_path / "memory.json").exists()


def test_a_damaged_digest_cache_is_ignored(memory: Path, tmp_path: Path) -> None:
    """Catches a start that fails because the digest cache, which only saves time, is damaged."""
    path = tmp_path / "a.txt"
    path.write_text("one")
    first = digest(memory, path)
    for content in (b"", b"[]", b'{"a": 1}', b"\xff"):
        memory.write_bytes(content)
        assert digest(memory, path) == first


def test_a_file_that_changes_or_vanishes_is_refused(tmp_path: Path) -> None:
    """Catches tokens of one text that are cached under the hash of another."""
    path = tmp_path / "a.txt"
    path.write_text("one")
    state = file_state(path)
    require_unchanged(path, state)
    path.write_text("more")
    with pytest.raises(DataError, match="changed while it was read"):
        require_unchanged(path, state)
    path.unlink()
    with pytest.raises(DataError, match="cannot be read: No such file"):
        require_unchanged(path, state)


def test_progress_counts_bytes_over_all_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches progress that restarts at every file, exceeds the total, or counts files whose digest is cached."""
    told: list[list[int]] = []

    class Told(preparation.Progress):
        def __init__(self, label: str, total_bytes: int) -> None:
            super().__init__(label, total_bytes)
            told.append([total_bytes])

        def update(self, done_bytes: int, note: str = "") -> None:
            told[-1].append(done_bytes)

    monkeypatch.setattr(preparation, "Progress", Told)
    monkeypatch.setattr(preparation, "_BLOCK_BYTES", 4)
    monkeypatch.setattr(preparation, "SETTLED_NS", 0)
    files = [tmp_path / name for name in "ab"]
    for file, text in zip(files, ("123456", "789"), strict=True):
        file.write_text(text)
    time.sleep(0.02)
    digests = ContentDigests(tmp_path / "memory")
    first = digests.digest_files(files)
    assert told == [[9, 4, 6, 9]] and first[0][1] != first[1][1]
    assert digests.digest_files(files) == first and told[1:] == [[0]]
