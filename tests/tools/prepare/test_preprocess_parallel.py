"""Parallel preprocessing with real processes, kills and pipes, against a simple sequential reference."""

from __future__ import annotations

import gzip
import json
import os
import signal
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from megads.data.indexed.sidecar import Sidecar, read_sidecar
from megads.errors import ConfigError, DataError
from megads.runtime.claims import Claims
from megads.tools.prepare import distributed
from megads.tools.prepare.config import PreprocessConfig, TokenizerConfig
from megads.tools.prepare.preprocess import PreprocessReport, TaskReport, preprocess, preprocess_together
from megads.tools.prepare.tokenizer import train_tokenizer
from megads.tools.prepare.tokenizing import Tokenizing, parts_path

REPOSITORY = Path(__file__).parents[3]

WORDS = ["the", "quick", "brown fox", "naïve", "jumps\n\n", "🚀", "over", "a", "lazy", "dog", "learns", "to", "write"]
MEBIBYTE = 1 << 20


def prose(number: int) -> str:
    random = np.random.default_rng(number)
    return " ".join(WORDS[choice] for choice in random.integers(0, len(WORDS), random.integers(20, 900)))


def lines_of(start: int, size: int) -> bytes:
    """About `size` bytes of JSON lines, with blank and broken ones between them."""
    made = bytearray()
    number = start
    while len(made) < size:
        number += 1
        made += b"\n" if number % 50 == 0 else b"{broken\n" if number % 97 == 0 else b""
        made += json.dumps({"text": prose(number)}, ensure_ascii=number % 2 == 0).encode() + b"\n"
    return bytes(made)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every file type, larger than several blocks, and a tokenizer next to it."""
    root = tmp_path_factory.mktemp("parallel")
    folder = root / "text"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + lines_of(0, 2 * MEBIBYTE).rstrip(b"\n"))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines_of(10_000, 5 * MEBIBYTE // 4), 1))
    (folder / "c.txt").write_text(" ".join(prose(number) for number in range(20_000, 20_600)))
    (folder / "d.txt").write_text(prose(30_000))
    # One line that spans several blocks, and an empty file.
    (folder / "e.jsonl").write_text(json.dumps({"text": prose(7) * 700}) + '\n{"text": "after"}\n[]\n')
    (folder / "f.jsonl").write_text("")
    pq.write_table(pa.table({"text": [prose(number) for number in range(40_000, 40_300)]}), folder / "g.parquet")
    train_tokenizer(TokenizerConfig(input=[str(folder / "d.txt")], output=str(root / "tokenizer.json"), vocab_size=400))
    return root


def config_of(corpus: Path, output: Path, **changes: object) -> PreprocessConfig:
    config = PreprocessConfig(
        input=[str(corpus / "text")], tokenizer=str(corpus / "tokenizer.json"), output=str(output)
    )
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def documents_of(folder: Path) -> tuple[list[str], list[str]]:
    """Documents and broken lines of the files, read in the simplest way."""
    documents, broken = [], []
    for path in sorted(folder.iterdir()):
        if path.suffix == ".txt":
            documents.append(path.read_text())
        elif path.suffix == ".parquet":
            documents += pq.read_table(path)["text"].to_pylist()
        else:
            content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            for number, line in enumerate(content.decode("utf-8-sig").split("\n"), start=1):
                if line.startswith(("{broken", "[")):
                    broken.append(f"{path}:{number}: " + ("not a JSON object" if line == "[]" else "not JSON"))
                elif line:
                    documents.append(json.loads(line)["text"])
    return documents, broken


def megatron_bytes(texts: list[str], tokenizer_file: Path) -> tuple[bytes, bytes]:
    """Contents of .bin and .idx by the format's description, one text at a time."""
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    ids = [[*tokenizer.encode(text, add_special_tokens=False).ids, 0] for text in texts]
    sizes = np.array([len(one) for one in ids], np.int32)
    offsets = 2 * np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)[:-1]))
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, len(ids), len(ids) + 1)
    index = header + sizes.tobytes() + offsets.tobytes() + np.arange(len(ids) + 1, dtype=np.int64).tobytes()
    return np.concatenate([np.array(one, np.uint16) for one in ids]).tobytes(), index


def made_at(output: Path) -> tuple[bytes, bytes]:
    return Path(f"{output}.bin").read_bytes(), Path(f"{output}.idx").read_bytes()


@pytest.mark.distributed
def test_any_number_of_workers_gives_megatrons_bytes(corpus: Path, tmp_path: Path) -> None:
    """Catches documents lost, duplicated or reordered at block boundaries, and wrong line numbers after them."""
    texts, broken = documents_of(corpus / "text")
    expected = megatron_bytes(texts, corpus / "tokenizer.json")
    sidecars = []
    for workers in (1, 3):
        made = preprocess(config_of(corpus, tmp_path / f"by{workers}", workers=workers)).sidecar
        assert made_at(tmp_path / f"by{workers}") == expected
        assert not parts_path(str(tmp_path / f"by{workers}")).exists()
        assert [example.split(" (")[0] for example in made.rejected_examples] == broken[:100]
        assert made.rejected_lines == len(broken) > 10
        assert made.text_bytes == sum(len(text.encode()) for text in texts)
        sidecars.append(made)
    assert sidecars[0] == sidecars[1]


@pytest.mark.slow
@pytest.mark.distributed
def test_several_tasks_together_give_megatrons_bytes(corpus: Path, tmp_path: Path) -> None:
    """Catches blocks that two tasks write or none, parts left behind, and a late task that starts again."""
    expected = megatron_bytes(documents_of(corpus / "text")[0], corpus / "tokenizer.json")
    config = config_of(corpus, tmp_path / "together", workers=1, distributed=True)
    with ThreadPoolExecutor(3) as tasks:
        reports = list(tasks.map(preprocess_together, [config] * 3))
    assert made_at(tmp_path / "together") == expected
    alone = preprocess(config_of(corpus, tmp_path / "alone", workers=1)).sidecar
    assert read_sidecar(tmp_path / "together") == alone
    assert [path.name for path in tmp_path.iterdir() if "parts" in path.name] == []
    assert [type(report) for report in reports].count(PreprocessReport) == 1
    # A task of a job array that starts late, or was requeued.
    state = Path(f"{tmp_path}/together.bin").stat()
    late = preprocess_together(config)
    assert isinstance(late, TaskReport) and "nothing is left to do" in str(late)
    assert Path(f"{tmp_path}/together.bin").stat() == state


def run(corpus: Path, output: Path, *more: str) -> subprocess.Popen[bytes]:
    command = [
        sys.executable, "-m", "megads.cli.main", "preprocess", f"input=[{corpus / 'text'}]", "workers=2",
        f"tokenizer={corpus / 'tokenizer.json'}", f"output={output}", *more,
    ]  # fmt: skip
    return subprocess.Popen(
        command, env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, cwd=output.parent, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.distributed
def test_a_killed_preprocess_continues_with_its_finished_parts(corpus: Path, tmp_path: Path) -> None:
    """Catches finished parts that are made again after a kill, orphaned workers, and a damaged part in the dataset."""
    output = tmp_path / "corpus"
    process = run(corpus, output)
    workers = []
    deadline = time.monotonic() + 60
    while len(shards := sorted(parts_path(str(output)).glob("*.shard"))) < 3:
        assert process.poll() is None and time.monotonic() < deadline
        workers = psutil.Process(process.pid).children(recursive=True) or workers
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    gone, alive = psutil.wait_procs(workers, timeout=20)
    assert len(gone) >= 2 and not alive
    assert not Path(f"{output}.idx").exists()
    # One finished part is damaged, as by a loss of power; the others must be kept as they are.
    before = {path.name: path.stat().st_ino for path in shards}
    damaged = bytearray(shards[0].read_bytes())
    damaged[-9] ^= 1
    shards[0].write_bytes(damaged)
    process = run(corpus, output)
    said = process.communicate(timeout=60)[0].decode()
    assert process.returncode == 0, said
    assert made_at(output) == megatron_bytes(documents_of(corpus / "text")[0], corpus / "tokenizer.json")
    kept = int(said.split(" parts kept from an earlier start")[0].split()[-1])
    assert 2 <= kept < 20 and len(before) >= 3
    assert [path.name for path in tmp_path.iterdir() if "parts" in path.name] == []


@pytest.mark.slow
@pytest.mark.distributed
def test_sections_of_a_killed_task_are_taken_over(corpus: Path, tmp_path: Path) -> None:
    """Catches sections that are never made because the task that had claimed them was killed."""
    output = tmp_path / "corpus"
    killed = run(corpus, output, "distributed=true", "workers=1")
    deadline = time.monotonic() + 60
    while not list(parts_path(str(output)).glob("tasks-*/finished/*.json")):
        assert killed.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert list(parts_path(str(output)).glob("tasks-*/participants/*")), "it could not say that it ends"
    report = preprocess_together(config_of(corpus, output, workers=1, distributed=True))
    assert isinstance(report, PreprocessReport)
    assert made_at(output) == megatron_bytes(documents_of(corpus / "text")[0], corpus / "tokenizer.json")
    assert not parts_path(str(output)).exists()


def test_a_damaged_part_is_made_again(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a finished part that was damaged on disk and would fail every later task, too; and intact parts of the
    same section that are made again with it."""
    monkeypatch.setattr(distributed, "_MOST_SECTIONS", 1)
    count: list[int] = []
    config = config_of(corpus, tmp_path / "out", input=[str(corpus / "text" / "a.jsonl")], workers=1, distributed=True)
    join = Tokenizing.join

    def damaging(self: Tokenizing, *arguments: Any) -> Sidecar:
        shards = sorted(parts_path(config.output).glob("tasks-*/*.shard"))
        count.append(len(shards))
        shard = shards[1]
        shard.write_bytes(shard.read_bytes()[:-1] + b"x")
        return join(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Tokenizing, "join", damaging)
        with pytest.raises(DataError, match="the disk lost bytes"):
            preprocess_together(config)
    assert not Path(f"{config.output}.bin").exists()
    made = preprocess_together(config)
    assert isinstance(made, PreprocessReport) and made.kept_shards == count[0] - 1 >= 1
    assert preprocess(config_of(corpus, tmp_path / "one", input=config.input)).sidecar == made.sidecar


def test_a_task_taken_over_writes_no_dataset(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a task that was silent for too long and writes the dataset although another task has taken over."""
    config = config_of(corpus, tmp_path / "out", input=[str(corpus / "text" / "d.txt")], workers=1, distributed=True)
    join = Tokenizing.join

    def taken_over(self: Tokenizing, *arguments: Any) -> Sidecar:
        (folder,) = parts_path(config.output).glob("tasks-*")
        (folder / "claims" / "join.2").write_text("another")
        return join(self, *arguments)

    monkeypatch.setattr(Tokenizing, "join", taken_over)
    with pytest.raises(DataError, match="has taken over"):
        preprocess_together(config)
    assert not Path(f"{config.output}.bin").exists() and not Path(f"{config.output}.json").exists()


def test_text_that_changes_during_preprocessing_is_not_joined(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a dataset that mixes two versions of its text."""
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "over the lazy dog"}\n')
    config = config_of(corpus, tmp_path / "out", input=[str(text)], workers=1, distributed=True)
    work = distributed.DistributedTask._work

    def changing(self: distributed.DistributedTask, claims: Claims) -> None:
        work(self, claims)
        text.write_text('{"text": "over the lazy fox"}\n')

    monkeypatch.setattr(distributed.DistributedTask, "_work", changing)
    with pytest.raises(DataError, match="changed"):
        preprocess_together(config)
    assert not Path(f"{config.output}.bin").exists()


def test_a_dataset_of_text_that_has_changed_is_made_again(corpus: Path, tmp_path: Path) -> None:
    """Catches a text that changed after its dataset was made, at equal size, and counts as already done."""
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "over the lazy dog"}\n')
    config = config_of(corpus, tmp_path / "out", input=[str(text)], workers=1, distributed=True)
    assert isinstance(preprocess_together(config), PreprocessReport)
    again = preprocess_together(config)
    assert isinstance(again, TaskReport) and "already made from this input" in str(again)
    text.write_text('{"text": "over the lazy fox"}\n')
    with pytest.raises(ConfigError, match="exists; choose another output"):
        preprocess_together(config)


def test_tasks_with_other_settings_do_not_share_a_dataset(corpus: Path, tmp_path: Path) -> None:
    """Catches tasks of different texts or settings that make one dataset, and a non-distributed start next to them."""
    config = config_of(corpus, tmp_path / "out", workers=1, distributed=True)
    with Claims(parts_path(config.output) / "tasks-0123456789abcdef", ["0"]):
        with pytest.raises(ConfigError, match="with other settings"):
            preprocess_together(config)
        with pytest.raises(ConfigError, match="with other settings"):
            preprocess(config)
    assert isinstance(preprocess_together(config), PreprocessReport)


def test_parts_of_changed_text_are_not_reused(corpus: Path, tmp_path: Path) -> None:
    """Catches a start that reuses the parts of a text that has changed since."""
    text = tmp_path / "text"
    text.mkdir()
    lines = lines_of(5, 5 * MEBIBYTE // 2)
    (text / "a.jsonl").write_bytes(lines)
    (text / "b.jsonl.gz").write_bytes(gzip.compress(lines)[:-100])
    config = config_of(corpus, tmp_path / "out", input=[str(text)], workers=1)
    with pytest.raises(DataError, match=r"b.jsonl.gz: reading failed after"):
        preprocess(config)
    assert len(list(parts_path(config.output).glob("*.shard"))) > 2
    (text / "a.jsonl").write_bytes(lines.replace(b"quick", b"QUICK"))
    (text / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "good"}'))
    made = preprocess(config)
    assert made.kept_shards == 0
    assert made_at(tmp_path / "out") == megatron_bytes(documents_of(text)[0], corpus / "tokenizer.json")


@pytest.mark.distributed
def test_standard_input_is_read_to_its_last_line(corpus: Path, tmp_path: Path) -> None:
    """Catches standard input that is read as a file named -, or loses its last line."""
    lines = lines_of(77, MEBIBYTE).rstrip(b"\n")
    process = run(corpus, tmp_path / "out", "input=[-]")
    said = process.communicate(lines, timeout=60)[0].decode()
    assert process.returncode == 0, said
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.jsonl").write_bytes(lines)
    expected = megatron_bytes(documents_of(tmp_path / "text")[0], corpus / "tokenizer.json")
    assert made_at(tmp_path / "out") == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"workers": 0}, "workers = 0"),
        ({"input": ["-", "a.jsonl"]}, "must stand alone"),
        ({"input": ["-"], "distributed": True}, "cannot be shared"),
    ],
)
def test_bad_settings_are_refused_at_once(
    corpus: Path, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    """Catches invalid settings that only fail later, or in a worker."""
    with pytest.raises(ConfigError, match=message):
        preprocess(config_of(corpus, tmp_path / "out", **change))


def test_two_simultaneous_preprocesses_do_not_share_parts(corpus: Path, tmp_path: Path) -> None:
    """Catches two processes that write the same parts."""
    import fcntl

    config = config_of(corpus, tmp_path / "out")
    parts_path(config.output).mkdir()
    descriptor = os.open(parts_path(config.output), os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(ConfigError, match="another process is making it"):
        preprocess(config)
    os.close(descriptor)
