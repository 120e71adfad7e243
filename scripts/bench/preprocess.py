#!/usr/bin/env python3
"""Benchmark 8, from JSON lines to an indexed dataset: megads against a loop like Megatron's preprocess_data.py.

The peer is written here from the algorithm: lines through a pool of processes, one document at a time through Hugging
Face `tokenizers`, token lists back to one writer. Sides alternate; output bytes are compared. Run from the repository:
python -m scripts.bench.preprocess --megabytes 24
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from tokenizers import Tokenizer

from megads.data.config import Engine, PreprocessConfig, TokenizerConfig
from megads.data.indexed_header import HEADER, MAGIC, VERSION
from megads.data.preprocess import preprocess
from megads.data.tokenizer import load_tokenizer, train_tokenizer
from megads.runtime.environment import available_cores, tokenize_on_one_thread
from scripts.bench.results import Verdict, add_results_option, against_rate, record

ROW = 8
ENCODER: dict[str, Tokenizer] = {}


def write_text(path: Path, size: int) -> None:
    """Writes documents of words whose frequencies follow Zipf's law, the same on every machine."""
    random = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlucmfwypvbgk"))
    words = np.array(["".join(random.choice(letters, random.integers(1, 11))) for _ in range(50_000)])
    cumulated = np.cumsum(1.0 / np.arange(1, words.size + 1))
    written = 0
    with path.open("w") as file:
        while written < size:
            length = int(random.lognormal(5.5, 1.0)) + 5
            chosen = words[np.searchsorted(cumulated, random.random(length) * cumulated[-1])]
            written += file.write(json.dumps({"text": " ".join(chosen) + ".\n"}) + "\n")


def start_encoder(tokenizer_file: str) -> None:
    """Loads the tokenizer in a process of the peer's pool."""
    tokenize_on_one_thread()
    ENCODER["it"] = load_tokenizer(tokenizer_file)


def encode(line: str) -> list[int]:
    """Encodes one line, as the peer's pool does."""
    return [*ENCODER["it"].encode(json.loads(line)["text"], add_special_tokens=False).ids, 0]


def peer(text: Path, tokenizer_file: str, output: Path, workers: int) -> None:
    """The same work, plainly: one writer, `workers` processes that encode."""
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


def ours(text: Path, tokenizer_file: str, output: Path, workers: int, engine: Engine = Engine.hf) -> None:
    """megads preprocess."""
    preprocess(
        PreprocessConfig(
            input=[str(text)],
            tokenizer=tokenizer_file,
            output=str(output),
            workers=workers,
            overwrite=True,
            engine=engine,
        )
    )


def ours_fast(text: Path, tokenizer_file: str, output: Path, workers: int) -> None:
    """The same with the fast engine."""
    ours(text, tokenizer_file, output, workers, Engine.fast)


def cpu_s() -> float:
    """Seconds of all cores that this process and its ended children took."""
    return sum(
        used.ru_utime + used.ru_stime
        for used in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def timed(side: Callable[..., Any], *arguments: Any) -> tuple[float, float]:
    """Seconds by the clock and of all cores; the latter count on a machine that others use too."""
    start_s, start_cpu_s = time.perf_counter(), cpu_s()
    side(*arguments)
    return time.perf_counter() - start_s, cpu_s() - start_cpu_s


def measure(folder: Path, megabytes: int, repeats: int, vocab_size: int) -> dict[str, list[tuple[float, float]]]:
    """Alternates the sides; returns seconds by the clock and of all cores by side."""
    text, tokenizer_file = folder / "text.jsonl", str(folder / "tokenizer.json")
    write_text(text, megabytes * 10**6)
    write_text(folder / "sample.jsonl", 4 * 10**6)
    train_tokenizer(TokenizerConfig(input=[str(folder / "sample.jsonl")], output=tokenizer_file, vocab_size=vocab_size))
    many = available_cores()
    sides = {"peer, 1 process": (peer, 1), "megads, 1 worker": (ours, 1)}
    if many > 1:
        sides |= {f"peer, {many} processes": (peer, many), f"megads, {many} workers": (ours, many)}
    if importlib.util.find_spec("gigatoken"):
        sides |= {f"megads fast, {workers}": (ours_fast, workers) for workers in sorted({1, many})}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, (side, workers) in sides.items():
            seconds[name].append(timed(side, text, tokenizer_file, folder / side.__name__, workers))
            if side is not peer:
                for ending in (".bin", ".idx"):
                    assert (
                        Path(f"{folder / side.__name__}{ending}").read_bytes()
                        == Path(f"{folder / 'peer'}{ending}").read_bytes()
                    ), f"{name}: {ending} differs"
    return seconds


def verdicts_of(middles: dict[str, tuple[float, ...]], megabytes: int) -> list[Verdict]:
    """Each side of ours by the clock, against the peer with as many processes; the best engine has to win."""
    peers = {1: "peer, 1 process"} | {int(name.split()[1]): name for name in middles if name.endswith("processes")}
    best = "fast" if any("fast" in name for name in middles) else "worker"
    found = []
    for name, (clock_s, _) in middles.items():
        if not name.startswith("peer"):
            workers = next(int(word) for word in name.split() if word.isdigit())
            rates = megabytes / clock_s, megabytes / middles[peers[workers]][0]
            target = 3.0 if best in name else None
            found.append(against_rate(ROW, name, rates[0], peers[workers], rates[1], "MB/s", target))
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=24, help="size of the JSON lines")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--folder", type=Path, default=None, help="where to write; a temporary one unless given")
    add_results_option(parser)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    try:
        seconds = measure(folder, arguments.megabytes, arguments.repeats, arguments.vocab_size)
    finally:
        shutil.rmtree(folder)
    middles = {name: tuple(map(statistics.median, zip(*found, strict=True))) for name, found in seconds.items()}
    clock, cores = middles["peer, 1 process"]
    print(f"{arguments.megabytes} MB, medians of {arguments.repeats}, load {psutil.getloadavg()[0]:.1f}, side by side:")
    for name, (wall_s, used_s) in middles.items():
        print(
            f"  {name:<18} {wall_s:6.2f} s  {arguments.megabytes / wall_s:6.2f} MB/s  {clock / wall_s:5.2f} x;"
            f"  CPU {used_s:6.2f} s  {cores / used_s:5.2f} x"
        )
    figures = {"megabytes": arguments.megabytes, "clock_and_cpu_s": middles}
    record(arguments.append, "preprocess", figures, verdicts_of(middles, arguments.megabytes))


if __name__ == "__main__":
    main()
