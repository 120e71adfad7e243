"""Starts of a run with local checkpoints, and what they leave in memory."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from megads.checkpoint.async_saves import AsyncSaves
from megads.checkpoint.config import CheckpointConfig
from megads.checkpoint.hook import CheckpointHook
from megads.checkpoint.local import RECORD_FILE
from megads.checkpoint.local_files import committed, node_folder
from megads.checkpoint.local_saves import LocalSaves
from megads.checkpoint.rank_file import whole
from megads.checkpoint.read import read_into
from megads.checkpoint.writer import CheckpointWriter, SaveState
from megads.runtime.distributed import open_control_plane
from megads.runtime.environment import RankEnvironment
from megads.runtime.hooks import TrainState
from megads.runtime.metrics import EventWriter, read_json_lines
from megads.runtime.run_dir import EVENTS_FILE
from tests.checkpoint.random_layouts import SHAPES, all_equal, global_tensors, random_layout, run_record
from tests.checkpoint.stepping import SteppedEngine, take_step

COMPUTATION = "what the run computes"


def holding_engine() -> SteppedEngine:
    """An engine whose ranks also hold the parts of weight/a that the next rank owns."""
    control = open_control_plane()
    layout = random_layout(7, control.world_size)
    if control.world_size == 1:
        layout = [[(key, whole(shape)) for key, shape in SHAPES.items()]]
    own, others = layout[control.rank], layout[(control.rank + 1) % control.world_size]
    return SteppedEngine(own, [part for part in others if part not in own and part[0] == "weight/a"])


def memory_of(run_dir: Path, node: int) -> Path:
    """The folder that represents a node's memory."""
    return run_dir / ("memory" if node == 0 else f"memory_{node}")


class Run:
    """A rank of one start of a run with local checkpoints.

    Args:
        run_dir: folder of the run.
        start: number of the start.
        behind: whether checkpoints are written to disk in the background.
        num_nodes: number of nodes over which the ranks are spread, each with its own memory folder.
        options: fields of CheckpointConfig.
    """

    def __init__(self, run_dir: Path, start: int = 1, behind: bool = False, num_nodes: int = 1, **options: Any) -> None:
        control = open_control_plane()
        per_node = control.world_size // num_nodes
        node, local_rank = divmod(control.rank, per_node)
        self.memory, self.run_dir = memory_of(run_dir, node), run_dir
        self.memory.mkdir(exist_ok=True)
        self.writer = CheckpointWriter(control.rank, control.world_size) if behind else None
        config = CheckpointConfig(
            **{
                "every_steps": 0, "async_save": behind, "local_every_steps": 1, "local_folder": str(self.memory),
                **options,
            }
        )  # fmt: skip
        environment = RankEnvironment(control.rank, local_rank, control.world_size, per_node, lease=start)
        self.saves = LocalSaves(config, environment, COMPUTATION, 20.0)
        self.engine, self.state = holding_engine(), TrainState()
        events = EventWriter(run_dir, enabled=control.rank == 0)
        self.saves.open(run_dir, control)
        self.skipped, self.base = self.saves.find(), self.saves.base
        if self.base is not None:
            read_into(self.base, self.engine.named_shards(owned=False), control.rank)
            self.state.load_state_dict(self.base.state)
        engine: Any = self.engine
        background = AsyncSaves(config, self.saves, self.writer)
        self.hook = CheckpointHook(engine, run_dir, config, run_record(0), self.state, events, background=background)
        self.hook.on_start(self.state)

    def step(self, last: bool = False, skipped: bool = False) -> None:
        take_step(self.engine, self.state, self.hook, last=last, skipped=skipped)

    def wait(self) -> None:
        """Waits until the last local checkpoint of this rank is complete."""
        if self.saves._copy is not None:
            self.saves._copy.sealed.result()

    def wait_for_copy(self) -> None:
        """Waits until the background copies of the last step's hook are in its image."""
        self.engine.wait()

    def wait_for_disk(self) -> None:
        """Waits until this rank's last checkpoint that is written in the background is on disk."""
        deadline = time.monotonic() + 30
        while self.writer is not None and self.writer.progress().state is SaveState.writing:
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def close(self) -> None:
        """Closes what the death of the process would close."""
        if self.writer is not None:
            self.writer.close()
        self.saves.close()

    def found(self) -> int:
        """Step of the checkpoint that was found; asserts that its tensors are those of that step."""
        if self.base is None:
            return 0
        step = self.base.state["step"]
        assert all_equal(self.engine.named_shards(owned=False), global_tensors(step)), f"step {step} is torn"
        return step


@contextmanager
def started(run_dir: Path, start: int = 1, **options: Any) -> Iterator[Run]:
    with closing(Run(run_dir, start, **options)) as run:
        yield run


def events_of(run_dir: Path) -> list[dict[str, Any]]:
    return list(read_json_lines(run_dir / EVENTS_FILE))


def trained(run_dir: Path, steps: int, start: int = 1, **options: Any) -> None:
    """Runs a start that ends, as if killed, once the local checkpoint of its last step is complete."""
    with started(run_dir, start, **options) as run:
        for _ in range(steps):
            run.step()
            run.wait()


def files_of(run_dir: Path, rank: int = 0) -> dict[int, Path]:
    """The complete images, by step."""
    folder = node_folder(run_dir / "memory", run_dir) / f"rank_{rank:05d}"
    return {step: path for (_, step), (path, _) in sorted(committed(folder).items())}


class Kept:
    """A copy of what a start left in memory, which can be restored for another try."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir, self._copy = run_dir, run_dir / "kept"
        shutil.copytree(run_dir / "memory", self._copy)
        self._record = (run_dir / RECORD_FILE).read_bytes()

    def put_back(self) -> None:
        shutil.rmtree(self._run_dir / "memory")
        shutil.copytree(self._copy, self._run_dir / "memory")
        (self._run_dir / RECORD_FILE).write_bytes(self._record)


def flip(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)
