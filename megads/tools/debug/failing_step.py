"""Describes the step of an unhandled exception: run, samples and documents, module and its arguments."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from itertools import groupby
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Protocol

import numpy as np
from torch import Tensor, nn

from megads.api import CONFIG_FILE, RootConfig, TrainEngine, TrainSource, TrainState, config_digest
from megads.data.sampling.loader import StepBatch

_MOST_NUMBERS, _MOST_ARGUMENTS, _MOST_CHARS = 12, 8, 80


class FailingStep(Protocol):
    """Where a rank is: `megads.train.run_context.StepPlace`."""

    config: RootConfig
    run_dir: Path
    state: TrainState
    engine: TrainEngine | None
    samples: TrainSource | None
    batch: StepBatch | None


def explain(error: BaseException, at: FailingStep) -> None:
    """Adds notes to an exception: the run and its step, the samples and their documents, the failing module.

    Args:
        error: exception with its traceback.
        at: where it was raised.
    """
    try:
        for note in describe(error, at):
            error.add_note(note)
    except Exception as failure:  # A failure in here must not replace the one that it describes.
        error.add_note(f"the failing step cannot be described: {type(failure).__name__}: {failure}")


def describe(error: BaseException, at: FailingStep) -> Iterator[str]:
    """Yields the notes of `explain`."""
    where = f"{at.run_dir / CONFIG_FILE}, sha256 {config_digest(at.config)[:8]}"
    if at.batch is None:
        yield f"before the first step after step {at.state.step} of {at.run_dir} (config: {where})"
    else:
        # The counters include the step once its hooks run.
        step = at.state.step + (at.state.samples == at.batch.first_sample)
        yield f"in step {step} of {at.run_dir} (config: {where})"
        yield _samples(at.batch, at.samples)
    if (failing := _failing_module(error.__traceback__)) is not None:
        module, frame = failing
        name = _names(at.engine).get(id(module), "")
        called = ", ".join(_arguments(frame)) or "no arguments"
        yield f"module {f'{name}, ' if name else ''}{type(module).__name__}, with {called}"


def _samples(batch: StepBatch, source: TrainSource | None) -> str:
    last = batch.first_sample + batch.samples - 1
    own = [int(one) for micro_batch in batch.micro_batches for one in micro_batch.info.sample_ids]
    text = f"samples {batch.first_sample} to {last} of the run, of this rank {_ranges(own)}"
    if source is None:
        return text
    documents = defaultdict[str, set[int]](set)
    for part in source.runs(np.array(own, np.int64)):
        documents[str(part.dataset.prefix)] |= set(part.documents.tolist())
    shown = (f"{prefix} {_ranges(sorted(found))}" for prefix, found in documents.items())
    return f"{text}; documents of {'; '.join(shown)}"


def _ranges(numbers: Sequence[int]) -> str:
    """Numbers as text, consecutive ones as ranges."""
    parts = []
    for _, group in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        parts.append(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}")
    more = f" and {len(parts) - _MOST_NUMBERS} more" if len(parts) > _MOST_NUMBERS else ""
    return ", ".join(parts[:_MOST_NUMBERS]) + more


def _failing_module(traceback: TracebackType | None) -> tuple[nn.Module, FrameType] | None:
    """The innermost module whose code was running, and the frame of that code; None if there is none."""
    found = None
    while traceback is not None:
        frame = traceback.tb_frame
        owner = frame.f_locals.get("self")
        # Frames of nn.Module itself call the module's own code.
        if isinstance(owner, nn.Module) and frame.f_globals.get("__name__") != nn.Module.__module__:
            found = owner, frame
        traceback = traceback.tb_next
    return found


def _names(engine: TrainEngine | None) -> dict[int, str]:
    """Names of the modules of this rank in the whole model, by id."""
    return {
        id(module): f"{layer_name}.{path}" if path else layer_name
        for layer_name, layer in (engine.layers() if engine is not None else ())
        for path, module in layer.named_modules()
    }


def _arguments(frame: FrameType) -> Iterator[str]:
    """Arguments of a frame's function as text: tensors as dtype and shape."""
    info = inspect.getargvalues(frame)
    names = [name for name in info.args if name != "self"][:_MOST_ARGUMENTS]
    for name in names:
        yield f"{name} {_text(info.locals.get(name))}"


def _text(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} on {value.device}"
    if isinstance(value, list | tuple) and any(isinstance(one, Tensor) for one in value):
        return f"({', '.join(_text(one) for one in value[:_MOST_ARGUMENTS])})"
    if is_dataclass(value) and not isinstance(value, type):
        held = ((field.name, getattr(value, field.name, None)) for field in fields(value))
        shown = ", ".join(f"{name} {_text(one)}" for name, one in held if isinstance(one, Tensor))
        return f"{type(value).__name__}({shown})"
    return repr(value)[:_MOST_CHARS] if isinstance(value, int | float | str | None) else type(value).__name__
