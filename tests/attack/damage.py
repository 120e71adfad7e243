"""A run with all its files, and ways to damage a file."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tests.attack.command_lines import copy_template
from tests.command import steps_of
from tests.fork_server import ForkServer
from tests.small_run import TOKENS, write_dataset

TRAIN = [
    "train", "run.dir=run", "run.id=run", "model.num_layers=1", "model.hidden_size=16", "model.num_heads=2",
    f"model.vocab_size={TOKENS + 2}", "train.steps=4", "train.seq_len=16", "train.global_batch_size=4",
    "train.precision=fp32", "data.train=[{path: corpus, max_epochs: 9}]", "data.split=[0.9,0.1]",
    "checkpoint.every_steps=2", "checkpoint.keep=0", "cluster.peak_tflops=1", "cluster.threads_per_rank=1",
    "logging.timeline_every_steps=2", "ops.impl=torch", "optim.impl=torch",
]  # fmt: skip
READERS = {
    "report": ["report", "run=run"],
    "why": ["why", "run=run", "step=2", "device=cpu"],
    "generate": ["generate", "run=run", "prompt=def", "max_new_tokens=3", "device=cpu"],
    "check": ["dataset", "check", "input=corpus"],
    "inspect": ["dataset", "inspect", "input=corpus", "count=2"],
    "dry run": [*TRAIN, "run.dry_run=true"],
}
"""Command lines that read the files of a run without resuming it."""

# Read only by people.
_FOR_PEOPLE = (".log", ".html", ".png", ".svg", ".out", ".err", ".lock")

Damage = Callable[[Path, random.Random], None]


def _rewrite(change: Callable[[bytes, random.Random], bytes]) -> Damage:
    return lambda path, draw: path.write_bytes(change(path.read_bytes(), draw)) and None


def _flip(content: bytes, draw: random.Random) -> bytes:
    flipped = bytearray(content or b"\0")
    flipped[draw.randrange(len(flipped))] ^= 1 << draw.randrange(8)
    return bytes(flipped)


def _replaced(make: Callable[[Path], object]) -> Damage:
    def damage(path: Path, draw: random.Random) -> None:
        path.unlink()
        make(path)

    return damage


DAMAGES: dict[str, Damage] = {
    "removed": _replaced(lambda path: None),
    "empty": _rewrite(lambda content, draw: b""),
    "cut in the middle": _rewrite(lambda content, draw: content[: draw.randrange(1 + len(content))]),
    "without its last byte": _rewrite(lambda content, draw: content[:-1]),
    "only its first byte": _rewrite(lambda content, draw: content[:1]),
    "a flipped bit": _rewrite(_flip),
    "many flipped bits": _rewrite(lambda content, draw: _flip(_flip(_flip(content, draw), draw), draw)),
    "zeros": _rewrite(lambda content, draw: bytes(len(content))),
    "noise": _rewrite(lambda content, draw: draw.randbytes(len(content))),
    "noise at its end": _rewrite(lambda content, draw: content + draw.randbytes(40)),
    "a line at its end": _rewrite(lambda content, draw: content + b'{"step": 1e999, "event": []}\n'),
    "twice": _rewrite(lambda content, draw: content + content),
    "no UTF-8": _rewrite(lambda content, draw: content[:40] + b"\xff\xfe\x80" + content[40:]),
    "a list": _rewrite(lambda content, draw: b"[]\n"),
    "a number": _rewrite(lambda content, draw: b"7\n"),
    "null": _rewrite(lambda content, draw: b"null\n"),
    "a text": _rewrite(lambda content, draw: b'"text"\n'),
    "an empty object": _rewrite(lambda content, draw: b"{}\n"),
    "NaN": _rewrite(lambda content, draw: b"NaN\n"),
    "a number without end": _rewrite(lambda content, draw: b"1" * 5000 + b"\n"),
    "nesting without end": _rewrite(lambda content, draw: b"[" * 200_000),
    "a folder": _replaced(lambda path: path.mkdir()),
    "a link to itself": _replaced(lambda path: path.symlink_to(path.name)),
    "a link to nowhere": _replaced(lambda path: path.symlink_to("nowhere")),
    "a pipe": _replaced(os.mkfifo),
    "a device without end": _replaced(lambda path: path.symlink_to("/dev/zero")),
}


def write_cut_off_run(folder: Path, server: ForkServer) -> list[dict[str, object]]:
    """Trains four steps, then removes the last checkpoint, as if the run had been killed before it.

    Returns:
        The steps of the uninterrupted run.
    """
    write_dataset(folder)
    outcome = server(folder, TRAIN)
    assert outcome.code == 0, outcome
    steps = steps_of(folder / "run")
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    shutil.rmtree(folder / "run" / "checkpoints" / "step_00000004")
    (folder / "run" / "checkpoints" / "latest").write_text("step_00000002\n")
    return steps


def files_of(folder: Path) -> list[str]:
    """Paths of all files that a program may read, relative to the folder."""
    found = [path for path in folder.rglob("*") if path.is_file() and path.suffix not in _FOR_PEOPLE]
    names = sorted(str(path.relative_to(folder)) for path in found)
    return [name for name in names if not name.startswith((".std", ".outside", "tmp/", "text.jsonl"))]


def damaged_copy(template: Path, folder: Path, name: str, damage: str) -> Path:
    """Returns a copy of the folder in which one file is damaged; deterministic for given names."""
    copy_template(template, folder)
    path = folder / name
    DAMAGES[damage](path, random.Random(f"{name} {damage}"))
    # A recently touched lease without content is watched for half a minute, as its holder may be alive.
    with suppress(FileNotFoundError):
        os.utime(path, (0, 0), follow_symlinks=False)
    return folder
