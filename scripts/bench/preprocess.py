#!/usr/bin/env python3
"""Benchmark 8, from JSON lines to an indexed dataset: megads against a loop like Megatron's preprocess_data.py.

The peer is reimplemented here: lines through a pool of processes, one document at a time through Hugging Face
`tokenizers`, token lists back to one writer. datatrove is a second peer if it is installed. Sides alternate; their
tokens are compared byte for byte. The measure is CPU time, including child processes. Run from the repository:
python -m scripts.bench.preprocess --megabytes 24
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import multiprocessing
import random
import resource
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from megads.data.indexed.dataset import HEADER, MAGIC, VERSION
from megads.data.indexed.sidecar import load_tokenizer
from megads.data.tokenizer_config import Engine
from megads.runtime.environment import available_cores, tokenize_on_one_thread
from megads.tools.prepare.config import PreprocessConfig, TokenizerConfig
from megads.tools.prepare.preprocess import preprocess
from megads.tools.prepare.tokenizer import train_tokenizer
from scripts.bench.results import Verdict, add_results_option, record

ROW = 8
PEERS = ("peer", "datatrove")
LARGEST_DOCUMENT = 200_000
"""In characters."""
ENCODER: dict[str, Tokenizer] = {}


def write_real_text(path: Path, size: int) -> None:
    """Writes the sources and texts installed with Python and its packages, half of each by bytes."""
    found: dict[bool, dict[str, Path]] = {True: {}, False: {}}
    for folder in {sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")}:
        for file in Path(folder).rglob("*"):
            if file.suffix in (".py", ".md", ".rst", ".txt") and file.is_file():
                found[file.suffix == ".py"][hashlib.sha256(str(file.relative_to(folder)).encode()).hexdigest()] = file
    documents, seen = [], set()
    for files in found.values():
        room = size // 2
        for _, file in sorted(files.items()):
            text = file.read_bytes().decode(errors="ignore")
            # The peers convert text that spells a special token to the token.
            if not text or text in seen or len(text) > LARGEST_DOCUMENT or "<|endoftext|>" in text:
                continue
            seen.add(text)
            documents.append(text)
            room -= len(text)
            if room <= 0:
                break
    random.Random(0).shuffle(documents)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))


def start_encoder(tokenizer_file: str) -> None:
    """Loads the tokenizer in a process of the peer's pool."""
    tokenize_on_one_thread()
    ENCODER["it"] = load_tokenizer(tokenizer_file)


def encode(line: str) -> list[int]:
    """Encodes one line in a process of the peer's pool."""
    return [*ENCODER["it"].encode(json.loads(line)["text"], add_special_tokens=False).ids, 0]


def peer(text: Path, tokenizer_file: str, output: Path, workers: int) -> None:
    """A plain implementation of the same task: one writer, `workers` encoding processes."""
    sizes: list[int] = []

    def write_all(encoded: Iterator[list[int]]) -> None:
        with Path(f"{output}.bin").open("wb") as tokens:
            for ids in encoded:
                tokens.write(np.array(ids, dtype=np.uint16).tobytes(order="C"))
                sizes.append(len(ids))

    with text.open() as lines:
        if workers == 1:
            start_encoder(tokenizer_file)
            write_all(map(encode, lines))
        else:
            with multiprocessing.get_context("spawn").Pool(workers, start_encoder, (tokenizer_file,)) as pool:
                write_all(pool.imap(encode, lines, 32))
    ends = 2 * np.cumsum([0, *sizes], dtype=np.int64)
    with Path(f"{output}.idx").open("wb") as index:
        index.write(HEADER.pack(MAGIC, VERSION, 8, len(sizes), len(sizes) + 1))
        index.write(np.array(sizes, np.int32).tobytes() + ends[:-1].tobytes())
        index.write(np.arange(len(sizes) + 1, dtype=np.int64).tobytes())


def datatrove(text: Path, tokenizer_file: str, output: Path, workers: int) -> None:
    """datatrove's reader of JSON lines and its tokenizing writer, in this process."""
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer
    from datatrove.utils.logging import logger

    assert workers == 1
    logger.remove()
    tokenize_on_one_thread()
    read = JsonlReader(str(text.parent), glob_pattern=text.name)
    write = DocumentTokenizer(str(output), tokenizer_file, eos_token="<|endoftext|>", shuffle_documents=False)
    write.run(read.run())
    next(output.glob("*.ds")).rename(f"{output}.bin")


def ours(text: Path, tokenizer_file: str, output: Path, workers: int, engine: Engine = Engine.hf) -> None:
    """megads preprocess."""
    asked = PreprocessConfig(
        input=[str(text)], tokenizer=tokenizer_file, output=str(output), workers=workers, overwrite=True, engine=engine
    )
    preprocess(asked)


def ours_fast(text: Path, tokenizer_file: str, output: Path, workers: int) -> None:
    """The same with engine=fast."""
    ours(text, tokenizer_file, output, workers, Engine.fast)


def cpu_s() -> float:
    """CPU seconds of this process and its finished children."""
    return sum(
        used.ru_utime + used.ru_stime
        for used in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def timed(side: Callable[..., Any], *arguments: Any) -> tuple[float, float]:
    """Wall-clock and CPU seconds; the latter are meaningful on a shared machine too."""
    start_s, start_cpu_s = time.perf_counter(), cpu_s()
    side(*arguments)
    return time.perf_counter() - start_s, cpu_s() - start_cpu_s


def measure(folder: Path, arguments: argparse.Namespace) -> tuple[dict[str, list[tuple[float, float]]], int]:
    """Alternates the sides; returns wall-clock and CPU seconds by side, and the tokens that each writes."""
    text, tokenizer_file = folder / "text.jsonl", str(folder / "tokenizer.json")
    write_real_text(text, arguments.megabytes * 10**6)
    train_tokenizer(TokenizerConfig(input=[str(text)], output=tokenizer_file, vocab_size=arguments.vocab_size))
    many = available_cores()
    sides = {"peer, 1 process": (peer, 1), "megads, 1 worker": (ours, 1)}
    if importlib.util.find_spec("datatrove"):
        sides["datatrove, 1 process"] = (datatrove, 1)
    if many > 1:
        sides |= {f"peer, {many} processes": (peer, many), f"megads, {many} workers": (ours, many)}
    if importlib.util.find_spec("gigatoken"):
        sides |= {f"megads fast, {workers}": (ours_fast, workers) for workers in sorted({1, many})}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    expected = Path(f"{folder / 'peer'}.bin")
    for _ in range(arguments.repeats):
        for name, (side, workers) in sides.items():
            output = folder / side.__name__
            seconds[name].append(timed(side, text, tokenizer_file, output, workers))
            for ending in (".bin",) if side is datatrove else (".bin", ".idx"):
                made, wanted = Path(f"{output}{ending}"), expected.with_suffix(ending)
                assert made.read_bytes() == wanted.read_bytes(), f"{name}: {ending} differs"
    return seconds, expected.stat().st_size // 2


def ratio(theirs: list[tuple[float, float]], ours: list[tuple[float, float]]) -> float:
    """CPU seconds of a peer over megads' in the same round, median over the rounds."""
    return statistics.median(their_s / our_s for (_, their_s), (_, our_s) in zip(theirs, ours, strict=True))


def verdicts_of(seconds: dict[str, list[tuple[float, float]]], tokens: int) -> list[Verdict]:
    """Compares each of megads' sides with the peers that have as many processes, in CPU seconds."""
    found = []
    for name, rounds in seconds.items():
        workers = next(int(word) for word in name.split() if word.isdigit())
        rate = tokens / statistics.median(used_s for _, used_s in rounds) / 1e6
        for against in PEERS:
            theirs = next((other for other in seconds if other.startswith(f"{against}, {workers}")), None)
            if name.startswith("megads") and theirs is not None:
                times = ratio(seconds[theirs], rounds)
                unit = "M tokens a CPU second"
                found.append(Verdict(ROW, name, f"{rate:.3g} {unit}", theirs, f"{rate / times:.3g} {unit}", times, 3.0))
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=24, help="size of the text")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--vocab-size", type=int, default=32000, help="size of the tokenizer trained on the text")
    parser.add_argument("--folder", type=Path, default=None, help="folder to write to (default: a temporary folder)")
    add_results_option(parser)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        seconds, tokens = measure(Path(folder), arguments)
    print(f"{arguments.megabytes} MB of text, {tokens:,} tokens, medians of {arguments.repeats}, in turns:")
    for name, rounds in seconds.items():
        wall_s, used_s = map(statistics.median, zip(*rounds, strict=True))
        print(
            f"  {name:<20} CPU {used_s:6.2f} s  {tokens / used_s / 1e6:5.2f} M tokens a CPU second  "
            f"{ratio(seconds['peer, 1 process'], rounds):5.2f} x;  clock {wall_s:6.2f} s"
        )
    middles = {name: tuple(map(statistics.median, zip(*rounds, strict=True))) for name, rounds in seconds.items()}
    figures = {"megabytes": arguments.megabytes, "tokens": tokens, "clock_and_cpu_s": middles}
    record(arguments.append, "preprocess", figures, verdicts_of(seconds, tokens))


if __name__ == "__main__":
    main()
