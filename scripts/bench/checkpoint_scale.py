#!/usr/bin/env python3
"""Per-rank cost of checkpoints with many ranks, without their data: BLOOM-176B on 384, 10,272 and 99,984 ranks.

    python -m scripts.bench.checkpoint_scale --folder <disk with 2 million free inodes> [--dp 8 214 2083]

The files are those that tp 4, pp 12 and dp ranks of ZeRO-1 write, with real headers and holes for data. Each step runs
the real code in a separate process: rank 0's writer collects the summaries of the other ranks' files and commits; rank
0 finds the number of the next checkpoint among twenty kept ones; a rank locates its shards in manifest and headers, in
the same layout and in another (tp 8, pp 6). Memory is the peak of the process minus its memory after the imports.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import shutil
import tempfile
import time
from bisect import bisect_right
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from megads.checkpoint.config import step_folder
from megads.checkpoint.manifest import MANIFEST_FILE, RunRecord, newest_sequence, read_manifest, software
from megads.checkpoint.rank_file import Rectangle, describe, encode_header, file_name, summarize
from megads.checkpoint.read import CheckpointHandle, stored_parts
from megads.checkpoint.store import commit, hidden_folder, prepare
from megads.checkpoint.writer import await_part, write_part
from megads.engine.interface import Shard
from megads.engine.train_engine import parameter_shards
from megads.model.model_size import parameter_shapes
from megads.parallel.sharding import ParameterPlacement
from scripts.bench.export import model_of

KINDS = ("weight", "exp_avg", "exp_avg_sq")
KEPT = 20
_COLUMN_CUT = ("attention.dense.weight", "mlp.down.weight")


class Layout:
    """The parts of BLOOM-176B that each rank of a layout saves.

    Args:
        shapes: shapes of the parameters.
        tp, pp, dp: parallel sizes; tp is the fastest axis of the rank order.
    """

    def __init__(self, shapes: dict[str, tuple[int, ...]], tp: int, pp: int, dp: int) -> None:
        self.tp, self.pp, self.dp = tp, pp, dp
        blocks = 1 + max(int(name.split(".")[1]) for name in shapes if name.startswith("blocks."))
        self._stages: list[list[tuple[str, tuple[int, ...]]]] = [[] for _ in range(pp)]
        for name, shape in shapes.items():
            block = int(name.split(".")[1]) if name.startswith("blocks.") else 0 if "embedding" in name else blocks - 1
            self._stages[block * pp // blocks].append((name, shape))

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    def shards(self, rank: int) -> list[Shard]:
        """Returns a rank's meta shards: its share of the flattened parameters of its stage, as in ZeRO-1."""
        tp, pp, dp = rank % self.tp, rank // self.tp % self.pp, rank // self.tp // self.pp
        local = [self._local(name, shape, tp) for name, shape in self._stages[pp]]
        ends = list(accumulate(torch.Size(shape).numel() for _, shape in local))
        share = -(-ends[-1] // self.dp)
        begin, end = dp * share, min((dp + 1) * share, ends[-1])
        found = []
        for index in range(bisect_right(ends, begin), len(local)):
            place, shape = local[index]
            start = ends[index] - torch.Size(shape).numel()
            if start >= end:
                break
            first = max(begin, start) - start
            if tp and place.dim is None:
                # Unsharded parameters belong to the first tensor-parallel rank.
                continue
            flat = torch.empty(min(end, ends[index]) - start - first, device="meta")
            found += [shard for kind in KINDS for shard in parameter_shards(kind, place, shape, first, flat)]
        return found

    def _local(self, name: str, shape: tuple[int, ...], tp: int) -> tuple[ParameterPlacement, tuple[int, ...]]:
        dim = 1 if name.endswith(_COLUMN_CUT) else 0 if len(shape) == 2 else None
        if dim is None:
            return ParameterPlacement(name, shape), shape
        length = shape[dim] // self.tp
        local = tuple(length if d == dim else extent for d, extent in enumerate(shape))
        return ParameterPlacement(name, shape, dim, (range(tp * length, (tp + 1) * length),)), local


def write_holes(folder: Path, layout: Layout) -> None:
    """Writes each rank's file, whose data is a hole, and the summary from which rank 0's writer learns of it."""
    for rank in range(layout.world_size):
        shards = layout.shards(rank)
        layouts, notes = describe(shards)
        header = encode_header(layouts, notes([f"{rank:032x}"] * len(shards)))
        path = folder / file_name(rank)
        with path.open("xb") as file:
            file.write(header)
            file.truncate(len(header) + sum(entry.nbytes for entry in layouts))
        write_part(folder, rank, (summarize(path, shards), sorted({shard.key for shard in shards})))


def cost(work: Callable[..., str], *arguments: Any) -> tuple[str, str]:
    """Returns seconds, megabytes and remark of a function call."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.perf_counter()
    said = work(*arguments)
    seconds = time.perf_counter() - begin
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return f"{seconds:.3g} s, {grown / 1024:,.0f} MB", said


def measured(work: Callable[..., str], *arguments: Any) -> tuple[str, str]:
    """Returns `cost` in a separate process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        return pool.submit(cost, work, *arguments).result()


def collect_and_commit(partial: Path, final: Path, record: RunRecord, ranks: int) -> str:
    """Runs the commit of rank 0's writer after all others have written."""
    parts = [await_part(partial, rank, lambda: False) for rank in range(ranks)]
    commit(partial, final, record, parts, software())
    return f"manifest of {(final / MANIFEST_FILE).stat().st_size / 1e6:.3g} MB"


def number_among_kept(run_dir: Path) -> str:
    return f"number {newest_sequence(run_dir)}"


def load(folder: Path, layout: Layout, rank: int) -> str:
    """Reads manifest and headers as a rank does to locate all of its shards."""
    handle = CheckpointHandle(folder, read_manifest(folder))
    headers = set()
    for shard in layout.shards(rank):
        target, found = Rectangle(shard.offset, tuple(shard.tensor.shape)), 0
        for part, overlap in stored_parts(handle, shard, rank):
            headers.add(part.file)
            found += overlap.elements
        assert found == target.elements, shard.key
    return f"{len(handle.headers)} headers read, {len(headers)} files needed"


def simulate(folder: Path, shapes: dict[str, tuple[int, ...]], dp: int) -> list[tuple[str, str, str]]:
    """Returns all measurements of one size: what, cost, remark."""
    run_dir, saved, other = folder / f"dp{dp}", Layout(shapes, 4, 12, dp), Layout(shapes, 8, 6, dp)
    record = RunRecord({"step": 1, "samples": 1, "tokens": 1}, 1, "", {}, {"tp": 4, "pp": 12, "dp": dp})
    final = step_folder(run_dir, 1)
    partial = hidden_folder(final, "partial")
    prepare(partial)
    write_holes(partial, saved)
    lines = [("rank 0 commits", *measured(collect_and_commit, partial, final, record, saved.world_size))]
    for step in range(2, KEPT + 1):
        step_folder(run_dir, step).mkdir()
        os.link(final / MANIFEST_FILE, step_folder(run_dir, step) / MANIFEST_FILE)
    lines.append((f"the newest of {KEPT}", *measured(number_among_kept, run_dir)))
    middle = saved.world_size // 2
    lines.append(("a rank starts, same layout", *measured(load, final, saved, middle)))
    lines.append(("a rank starts, tp 8 pp 6", *measured(load, final, other, middle)))
    shutil.rmtree(run_dir)
    return lines


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dp", type=int, nargs="+", default=[8, 214, 2083])
    parser.add_argument("--folder", type=Path, help="folder for temporary files")
    arguments = parser.parse_args()
    shapes = parameter_shapes(model_of("bloom_176b"))
    table = Table("ranks", "what", "cost", "")
    for dp in arguments.dp:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            for line in simulate(Path(folder), shapes, dp):
                table.add_row(f"{48 * dp:,}", *line)
    Console().print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
