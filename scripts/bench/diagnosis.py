"""Throughput of `megads diagnose` on large logs: `python -m scripts.bench.diagnosis [--megabytes 300]`.

Three logs of that size: a trainer's lines of 64 ranks, which have few templates; the same with a line of random text
after each, which has as many templates as lines; and the first as .gz. Each ends in an error, which must be found.
"""

from __future__ import annotations

import argparse
import gzip
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from megads.tools.diagnose.causes import Cause
from megads.tools.diagnose.decision import decide
from megads.tools.diagnose.inputs import survey_file

_ERROR = b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
_WORDS = ["".join(random.Random(seed).choices("abcdefghijklmnopqrstuvwxyz", k=seed % 8 + 2)) for seed in range(5000)]


def lines(random_text: bool) -> Iterator[bytes]:
    """Yields the lines of an endless log."""
    draw, step = random.Random(1), 0
    while True:
        step += 1
        yield (
            f"[2026-01-{step // 86400 % 28 + 1:02d} {step // 3600 % 24:02d}:{step // 60 % 60:02d}:{step % 60:02d}] "
            f"[rank{step % 64}]: iteration {step}/2000000 | time per iteration (ms): {draw.random() * 1000:.1f} "
            f"| lm loss: {draw.random() * 10:.6E} | grad norm: {draw.random():.3f}\n"
        ).encode()
        if random_text:
            yield f"sample: {' '.join(draw.choices(_WORDS, k=14))}\n".encode()


def write(path: Path, num_bytes: int, random_text: bool) -> None:
    """Writes a log of about `num_bytes`."""
    with path.open("wb") as file:
        for line in lines(random_text):
            file.write(line)
            if file.tell() > num_bytes:
                break
        file.write(_ERROR)


def main() -> None:
    """Writes the logs, reads them, and prints a line for each."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.diagnosis", description=__doc__)
    parser.add_argument("--megabytes", type=int, default=300)
    num_bytes = parser.parse_args().megabytes * 1_000_000
    with tempfile.TemporaryDirectory() as folder:
        plain, mixed, packed = (Path(folder) / name for name in ("plain.log", "random_text.log", "packed.log.gz"))
        write(plain, num_bytes, random_text=False)
        write(mixed, num_bytes, random_text=True)
        packed.write_bytes(gzip.compress(plain.read_bytes(), 1))
        for path in (plain, mixed, packed):
            begin = time.perf_counter()
            survey = survey_file(path, path.name)
            found = decide([survey])
            seconds = time.perf_counter() - begin
            assert found.cause == Cause.cuda_oom and found.evidence[0].line == survey.lines
            size = survey.num_bytes / 1e6
            print(
                f"{path.name:<16} {size:6.0f} MB  {survey.lines:>9,} lines  {len(survey.kinds):>6,} kinds  "
                f"{seconds:5.1f} s  {size / seconds:5.0f} MB/s"
            )


if __name__ == "__main__":
    main()
