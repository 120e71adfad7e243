"""Profiles of steps (logging.profile_steps, or on request): a trace of torch.profiler for each rank.

Ranges of the trace name the actions of the step (`TrainEngine.watch_spans`) and the part of the model that runs;
`operators` adds up the time of each part.
"""

from __future__ import annotations

import gzip
import json
import logging
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler import profile, record_function

from megads.api import (
    EMBEDDING,
    HEAD,
    EventWriter,
    Heartbeat,
    Span,
    StepInfo,
    TrainEngine,
    TrainState,
    atomic_writer,
    temporary_path,
)
from megads.tools.profile import memory_snapshot
from megads.tools.profile.timeline import clock_offset_s
from megads.tools.profile.trace_files import METADATA, trace_path

SAVING_A_PROFILE = "saving a profile"
"""Phase of the heartbeats in which a trace is written; like a save, it may take longer than a step."""
CLOCK_READINGS = 20
_COMPRESSION = 4
_CALLED = ("forward", "add_and_norm")
"""Methods by which the model calls its parts."""
_log = logging.getLogger(__name__)


def part_of(layer: str, path: str) -> str:
    """Returns the part of the model that a module belongs to; empty if it is that of the module around it.

    Args:
        layer: name of the layer in the whole model, such as `blocks.3`.
        path: path of the module in the layer, such as `attention.q_norm`; empty for the layer itself.
    """
    name = path.rpartition(".")[2]
    if "norm" in (name or layer):
        return "norm"
    if name in ("attention", "mlp"):
        return "attention" if name == "attention" else "MLP"
    if path:
        return ""
    return {EMBEDDING: "embedding", HEAD: "head and loss"}.get(layer, "block")


@contextmanager
def model_ranges(layers: Iterable[tuple[str, nn.Module]], *, inner: bool) -> Iterator[None]:
    """Names the parts of the model in the traces that are recorded inside the block, for example
    `attention: blocks.3.attention`.

    The methods of each part are replaced on the object: hooks would keep CUDA graphs from being replayed.

    Args:
        layers: the layers of this rank, with their names in the whole model.
        inner: whether to name the parts of layers, too; torch.compile would compile a block again for it.
    """
    with ExitStack() as restored:
        for layer_name, layer in layers:
            for path, module in layer.named_modules() if inner else [("", layer)]:
                if part := part_of(layer_name, path):
                    name = f"{part}: {f'{layer_name}.{path}' if path else layer_name}"
                    for method in _CALLED:
                        if hasattr(module, method):
                            restored.callback(_restore, module, method, module.__dict__.get(method))
                            setattr(module, method, _named(getattr(module, method), name))
        yield


def _named(compute: Callable[..., Any], name: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with record_function(name):
            return compute(*args, **kwargs)

    return call


def _restore(module: nn.Module, method: str, own: Callable[..., Any] | None) -> None:
    del module.__dict__[method]
    if own is not None:
        module.__dict__[method] = own


@dataclass(frozen=True)
class ProfiledSteps:
    """A range of steps to profile.

    Attributes:
        first: first step.
        last: last step.
        memory: whether to record the allocations of GPU memory in these steps.
    """

    first: int
    last: int
    memory: bool = False


class ProfileHook:
    """Hook that profiles a range of steps and writes the trace of each rank to a separate file.

    Args:
        engine: training engine.
        run_dir: the run directory.
        events: event log.
        beats: heartbeat of this rank.
        steps: steps to profile; None: none until `ask` is called.
        inner: whether parts of layers are named, see `model_ranges`.
        snapshot: whether the allocations of GPU memory are recorded during the whole run, so that a snapshot is due.
    """

    def __init__(
        self,
        engine: TrainEngine,
        run_dir: Path,
        events: EventWriter,
        beats: Heartbeat,
        steps: ProfiledSteps | None = None,
        *,
        inner: bool = True,
        snapshot: bool = False,
    ) -> None:
        self._engine, self._run_dir, self._events, self._beats = engine, run_dir, events, beats
        self._steps, self._inner, self._snapshot = steps, inner, snapshot
        self._profiler: profile | None = None
        self._opened = ExitStack()
        self._begun = 0

    def ask(self, steps: ProfiledSteps) -> None:
        """Profiles further steps, the first of which is the next one; ignored while steps are profiled."""
        if self._profiler is not None:
            _log.warning("the request to profile is ignored: steps are being profiled")
            return
        self._steps = steps
        self._prepare(steps.first)

    def on_start(self, state: TrainState) -> None:
        self._prepare(state.step + 1)

    def on_step(self, info: StepInfo) -> None:
        if self._steps is not None and self._profiler is not None and (info.last or info.step >= self._steps.last):
            self._finish(self._profiler, info.step)
        if not info.last:
            self._prepare(info.step + 1)

    def on_end(self, state: TrainState) -> None:
        pass

    def _prepare(self, step: int) -> None:
        if self._steps is None or not self._steps.first <= step <= self._steps.last:
            return
        if self._profiler is None:
            self._begin(self._steps, step)
        # The spans of the step become ranges of the trace.
        self._engine.watch_spans(_ignore)

    def _begin(self, steps: ProfiledSteps, step: int) -> None:
        # First, as it is a collective.
        offset_s = clock_offset_s(self._engine.grid.control)
        cuda = self._engine.device.type == "cuda"
        if torch.autograd._profiler_enabled():
            _log.warning("steps are not profiled: another profiler is running in this process")
            self._steps = None
            return
        if steps.memory and not self._snapshot:
            if cuda:
                memory_snapshot.start()
                self._opened.callback(memory_snapshot.stop)
            else:
                _log.warning("the memory is not recorded: the ranks compute on the CPU")
        # torch.profiler.profile uses this class, and imports torch's compiler first, for seconds.
        profiler = profile(use_device="cuda" if cuda else None, record_shapes=True, use_kineto=True, acc_events=True)
        self._opened.enter_context(model_ranges(self._engine.layers(), inner=self._inner))
        profiler.__enter__()
        grid = self._engine.grid
        torch.autograd._add_metadata_json(
            METADATA,
            json.dumps(
                {
                    "rank": grid.rank,
                    **{axis: getattr(grid, axis).rank for axis in ("pp", "tp", "cp", "dp")},
                    "first_step": step,
                    "has_head": any(name == HEAD for name, _ in self._engine.layers()),
                    "clock_offset_s": offset_s,
                }
            ),
        )
        # The clock of the trace is another one than that of the timelines. Several times, because the process may be
        # suspended between reading this clock and the trace's.
        for _ in range(CLOCK_READINGS):
            with record_function(f"monotonic {time.monotonic():.9f}"):
                pass
        self._profiler, self._begun = profiler, step

    def _finish(self, profiler: profile, step: int) -> None:
        """Stops the profiler and writes the trace."""
        assert self._steps is not None
        self._beats.enter(SAVING_A_PROFILE)
        profiler.__exit__(None, None, None)
        self._profiler = None
        grid = self._engine.grid
        path = trace_path(self._run_dir, self._begun, step, grid.rank, grid.pp.rank)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_trace(profiler, path)
            if self._engine.device.type == "cuda" and (self._snapshot or self._steps.memory):
                memory_snapshot.dump(memory_snapshot.snapshot_path(path))
        except OSError as error:
            # A full disk, or another file at this path, must not end the run.
            _log.warning("the profile of steps %d to %d was not written: %s", self._begun, step, error)
            return
        finally:
            self._opened.close()
        self._events.write(
            "profiled",
            first_step=self._begun,
            last_step=step,
            folder=str(path.parent),
            message=f"steps {self._begun} to {step}; the traces are in {path.parent}, for ui.perfetto.dev",
        )


def _ignore(_spans: Sequence[Span]) -> None:
    """A watch of spans that needs only the ranges."""


def write_trace(profiler: profile, path: Path) -> None:
    """Writes the trace of a stopped profiler, compressed and at once.

    Raises:
        OSError: the disk is full, or the file cannot be created.
    """
    plain = temporary_path(path)
    unfinished = plain.with_name(f"{plain.name}.tmp")  # torch writes to it, and renames it
    try:
        # torch ignores write errors, and would compress what it has written in the temporary folder.
        profiler.export_chrome_trace(str(plain))
        _require_complete(plain)
        with (
            plain.open("rb") as trace,
            atomic_writer(path) as file,
            gzip.GzipFile(path.stem, "wb", _COMPRESSION, file) as packed,
        ):
            shutil.copyfileobj(trace, packed, 1 << 20)
    except RuntimeError as error:
        raise OSError(f"torch.profiler cannot write it: {error}") from error
    finally:
        plain.unlink(missing_ok=True)
        unfinished.unlink(missing_ok=True)


def _require_complete(path: Path) -> None:
    """Raises OSError if a JSON object is missing, or has no end."""
    if not path.exists():
        raise OSError("torch.profiler cannot write it; see its message above")
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 64))
        if not file.read().rstrip().endswith(b"}"):
            raise OSError(f"{path.name} is incomplete: is the disk full?")
