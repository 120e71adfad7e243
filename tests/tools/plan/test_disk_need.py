"""The disk space that a dry run predicts, against what a run writes."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest

from megads.checkpoint.config import CheckpointConfig, list_checkpoints
from megads.config.frozen import load_frozen
from megads.config.root import RootConfig
from megads.tools.plan import disk_need
from megads.tools.plan.disk_need import DiskNeed, checkpoint_bytes
from tests.command import StartCommand

MIB = 1 << 20
NEED = DiskNeed(
    checkpoint=10 * MIB, most=3, present=0, kept="checkpoint.keep = 2", data="prepared data about 5.0 MiB",
    data_to_make=10 * MIB, free=50 * MIB, data_free=None, run_dir=Path("runs/x"),
)  # fmt: skip


def files_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


@pytest.mark.slow
@pytest.mark.distributed
def test_a_run_writes_what_was_said(megads: StartCommand) -> None:
    """Catches optimizer state that is omitted or counted twice, replicas that are counted, a vocabulary that is not the
    tokenizer's, and prepared data that is measured without its tokenizer."""
    (megads.folder / "text.txt").write_text("".join(f"Line {number} of a text.\n" for number in range(30_000)))
    command = (
        *("train", "data.raw=text.txt", "tokenizer.vocab_size=4096", "train.steps=3", "checkpoint.every_steps=1"),
        *("run.dir=run", "parallel.dp=2", "cluster.peak_tflops=1"),
    )
    dry = megads(*command, "run.dry_run=true").end()
    assert dry.code == 0 and "3 at the same time" in dry.out, dry.err
    ended = megads(*command).end()
    assert ended.code == 0, ended.err
    written = [files_in(folder) for folder in list_checkpoints(megads.folder / "run").values()]
    said = checkpoint_bytes(load_frozen(megads.folder / "run" / "config.yaml"))
    assert len(written) == 2 and written == [pytest.approx(said, rel=0.02)] * 2
    [made] = [path for path in (megads.folder / "data-cache").iterdir() if path.is_dir()]
    again = megads(*command, "train.steps=4", "run.dry_run=true").end()
    assert f"prepared data {files_in(made) / MIB:,.1f} MiB, there already" in again.out, again.err


@pytest.mark.parametrize(
    ("keep", "every", "steps", "there", "most"),
    [
        (2, 0, 100, [], 3),
        (2, 0, 2, [], 2),
        (0, 0, 100, [], 1),
        (2, 50, 100, [], 2),
        (2, 10, 100, [], 3),
        (1, 10, 100, [], 3),
        (3, 10, 100, [], 4),
        (0, 10, 100, [], 10),
        (0, 30, 100, [], 4),
        (0, 30, 100, [30, 60], 4),
        (2, 10, 100, [80, 90], 3),
        (2, 10, 100, [90, 100], 2),
    ],
)
def test_checkpoints_at_the_same_time(keep: int, every: int, steps: int, there: list[int], most: int) -> None:
    """Catches a count without the checkpoint that is written while the old ones still exist, and the last one omitted
    or counted twice."""
    config = RootConfig()
    config.checkpoint.keep, config.checkpoint.every_steps, config.train.steps = keep, every, steps
    assert disk_need._max_on_disk(config, dict.fromkeys(there, Path())) == most
    config.checkpoint.every_minutes = 0
    assert every or disk_need._max_on_disk(config, {}) == 1


def test_checkpoints_that_stay_for_good() -> None:
    """Catches checkpoints kept for their step or their loss, or of earlier starts, that are not counted, or counted
    twice: a run whose losses are the worst case for the disk has exactly the predicted maximum."""
    draw = random.Random(3)
    for _ in range(300):
        config, every = RootConfig(), draw.randint(1, 3)
        config.train.steps, config.checkpoint = draw.randint(1, 30), CheckpointConfig(every, keep=draw.randint(1, 3))
        config.checkpoint.keep_every, config.checkpoint.keep_best = every * draw.randint(0, 3), draw.randint(0, 3)
        multiple = config.checkpoint.keep_every
        # Earlier steps have lower losses, except those that are kept for their step.
        losses = {step: float(step) + (1000 if multiple and not step % multiple else 0) for step in range(1, 31)}
        keep = config.checkpoint.retention(losses, newest_is_proven=False)
        start, said, most, there = draw.randint(0, config.train.steps - 1), 0, 0, dict[int, int]()
        for step in range(1, config.train.steps + 1):
            if step == start + 1:
                said, most = disk_need._max_on_disk(config, dict.fromkeys(there, Path())), len(there)
            if step % every == 0 or step == config.train.steps:
                there[step] = step
                most = max(most, len(there))
                for gone in keep.surplus(there):
                    del there[gone]
        assert said == most, (config.checkpoint, config.train.steps, start)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"free": 40 * MIB}, ""),
        (
            {"free": 39 * MIB},
            "the disk of runs/x has 39.0 MiB free, and the run has to write 40.0 MiB (3 checkpoints at",
        ),
        ({"free": 39 * MIB, "present": 1}, ""),
        ({"free": 39 * MIB, "data_free": 10 * MIB}, ""),
        ({"free": 29 * MIB, "data_free": 10 * MIB}, "the run has to write 30.0 MiB"),
        ({"data_free": 9 * MIB}, "the disk of the prepared data has 9.0 MiB free, and prepared data about 5.0 MiB"),
    ],
)
def test_warnings(changes: dict[str, int], said: str) -> None:
    """Catches a full disk without a warning, existing checkpoints that are counted again, and data on another disk that
    is counted on the run's."""
    need = dataclasses.replace(NEED, **changes)
    assert said in need.warning and bool(said) == bool(need.warning)
    assert "a checkpoint 10.0 MiB, 3 at the same time 30.0 MiB (checkpoint.keep = 2); prepared data" in str(need)
