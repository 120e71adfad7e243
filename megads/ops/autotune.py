"""Autotuning: checks and times every way to compute one thing, on the device and the shapes of a run.

A candidate is taken only if its error against fp64 is at most twice that of plain torch in the same dtype: a kernel
that rounds more would train another model. `megads.engine.attention_trials` tunes attention with it,
`megads.engine.autotune` the other operators. Results are kept in the user's cache, a JSON file for each key.
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

import megads
from megads.errors import ConfigError
from megads.ops.resolve import loaded_kernels
from megads.runtime.environment import user_cache_dir
from megads.runtime.files import read_json

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)

Step = tuple[Callable[[], Any], Callable[[Any], list[Tensor]]]
"""Forward pass, and backward pass, which takes what the forward pass returned and returns outputs and gradients."""

ROUNDS = 10
WARM_UP_ROUNDS = 2
MAX_ERROR_RATIO = 2.0
"""Largest error of a candidate, as a multiple of that of plain torch."""
_AHEAD_CYCLES = 4_000_000
"""Clock cycles for which a GPU idles before a timed step, about two milliseconds: the host issues the step meanwhile,
so that device time is measured and not Python's."""


class TuningTask(Protocol[T_contra]):
    """One thing to compute, forward and backward, for which there are several candidates.

    Attributes:
        name: what is tuned, for messages, for example "model.attention".
        remedy: what the user does if the trial breaks the device.
        device: where.
    """

    name: str
    remedy: str
    device: torch.device

    def step(self, candidate: T_contra) -> Step:
        """Prepares one computation with inputs of its own; the preparation is not timed."""

    def error(self, candidate: T_contra) -> float:
        """Largest error of outputs and gradients against fp64, as a multiple of plain torch's in the same dtype."""


@dataclass(frozen=True)
class TuningResult:
    """What the trial of one candidate showed.

    Attributes:
        reason: why it cannot be taken; empty where it can.
        error: the largest of outputs and gradients, as a multiple of plain torch's; None where it did not run.
        repeats: two runs gave the same bits.
        time_ms: of forward and backward together, the median; None where it was not timed.
        kept_bytes: memory kept between forward and backward, beside the inputs, the output included; None where that is
            not known, as on a CPU.
        peak_bytes: the peak beside the inputs, likewise.
    """

    reason: str = ""
    error: float | None = None
    repeats: bool = False
    time_ms: float | None = None
    kept_bytes: int | None = None
    peak_bytes: int | None = None


class DeviceBroken(ConfigError):
    """A candidate left the device in a state in which nothing else can run, for example by an illegal access.

    Attributes:
        candidate: its name.
    """

    def __init__(self, message: str, candidate: str) -> None:
        super().__init__(message)
        self.candidate = candidate


def compare(candidates: Mapping[str, T], trial: TuningTask[T], rounds: int = ROUNDS) -> dict[str, TuningResult]:
    """Checks each candidate, then times those that are exact, in turns.

    Args:
        candidates: by name.
        trial: what all compute.
        rounds: timed steps of each.

    Returns:
        Outcomes by name, in the order given.

    Raises:
        DeviceBroken: a candidate left the device in a state in which nothing else can run.
    """
    outcomes = {name: examine(name, candidate, trial) for name, candidate in candidates.items()}
    exact = {name: candidates[name] for name, found in outcomes.items() if not found.reason}
    for name, times in _times_ms(exact, trial, rounds).items():
        kept, peak = _bytes(exact[name], trial)
        outcomes[name] = replace(outcomes[name], time_ms=statistics.median(times), kept_bytes=kept, peak_bytes=peak)
    return outcomes


def fastest(outcomes: Mapping[str, TuningResult], *, deterministic: bool = True) -> str | None:
    """The name of the fastest candidate; None: none runs.

    Args:
        outcomes: of all candidates.
        deterministic: those whose bits are the same on every run come first: a resume continues bit for bit only with
            gradients that repeat.
    """
    timed = {name: found for name, found in outcomes.items() if found.time_ms is not None}
    repeating = {name: found for name, found in timed.items() if found.repeats or not deterministic} or timed
    return min(repeating, key=lambda name: repeating[name].time_ms or 0.0, default=None)


def examine(name: str, candidate: T, trial: TuningTask[T]) -> TuningResult:
    """Runs a candidate twice and compares it with fp64; whatever it raises is the reason not to take it.

    Raises:
        DeviceBroken: it left the device in a state in which nothing else can run.
    """
    failure, found = "", TuningResult()
    try:
        first, second = (_run(candidate, trial) for _ in range(2))
        repeats = all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
        del first, second
        error = trial.error(candidate)
        found = TuningResult("", error, repeats)
        if not error <= MAX_ERROR_RATIO:
            found = replace(found, reason=f"its error is {error:.3g} times that of plain torch")
    except Exception as raised:
        failure = first_line(raised)
        found = TuningResult(reason=f"{type(raised).__name__}: {failure}")
    try:
        _free(trial.device)
    except RuntimeError as raised:
        raise DeviceBroken(
            f"the trial of {trial.name} = {name} left {trial.device} unusable ({failure or first_line(raised)}): "
            f"{trial.remedy}",
            name,
        ) from raised
    return found


def error_ratio(ours: list[Tensor], torchs: list[Tensor], exact: list[Tensor]) -> float:
    """The largest error of several results, each as a multiple of torch's; errors are 2-norms, relative to fp64.

    Differences below a tenth of the dtype's rounding error (four for single numbers, where it is a matter of chance)
    do not count.

    Args:
        ours: the candidate's results.
        torchs: plain torch's, from the same inputs.
        exact: the same in fp64.
    """
    largest = 0.0
    for mine, theirs, right in zip(ours, torchs, exact, strict=True):
        rounding = (0.1 if right.numel() > 1 else 4.0) * _eps(mine.dtype) * right.norm().item()
        off, yardstick = ((x.double() - right).norm().item() for x in (mine, theirs))
        ratio = off / max(yardstick, rounding) if off else 0.0
        largest = ratio if not ratio <= largest else largest  # max() would pass over a NaN
    return largest


def _eps(dtype: torch.dtype) -> float:
    # What is given in fp64, such as a loss, was computed in fp32.
    return max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)


def _run(candidate: T, trial: TuningTask[T]) -> list[Tensor]:
    forward, backward = trial.step(candidate)
    return backward(forward())


def _times_ms(candidates: Mapping[str, T], trial: TuningTask[T], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of forward and backward in interleaved rounds; the first ones are not counted."""
    times = {name: list[float]() for name in candidates}
    for round_ in range(WARM_UP_ROUNDS + rounds):
        for name, candidate in candidates.items():
            step = trial.step(candidate)
            took_ms = _time_on_gpu(*step) if trial.device.type == "cuda" else _time_on_cpu(*step)
            if round_ >= WARM_UP_ROUNDS:
                times[name].append(took_ms)
    return times


def _time_on_gpu(forward: Callable[[], Any], backward: Callable[[Any], list[Tensor]]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_AHEAD_CYCLES)
    begin.record()
    backward(forward())
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def _time_on_cpu(forward: Callable[[], Any], backward: Callable[[Any], list[Tensor]]) -> float:
    begin = time.perf_counter()
    backward(forward())
    return 1e3 * (time.perf_counter() - begin)


def _bytes(candidate: T, trial: TuningTask[T]) -> tuple[int, int] | tuple[None, None]:
    """(kept, peak) of the memory that a step takes beside its inputs; a CPU does not count it."""
    device = trial.device
    if device.type != "cuda":
        return None, None
    forward, backward = trial.step(candidate)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    state = forward()
    kept = torch.cuda.memory_allocated(device) - before
    backward(state)
    return kept, torch.cuda.max_memory_allocated(device) - before


def _free(device: torch.device) -> None:
    """Gives back what a trial held, so that the next one, or training, has room; raises RuntimeError where the device
    no longer computes."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    torch.zeros(1, device=device).item()


def first_line(error: Exception) -> str:
    """The first line of an error's message, at most 200 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:200] if lines else "without a message"


def device_name(device: torch.device) -> str:
    """The GPU's name, else the type of the device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def cache_key(device: torch.device, work: Mapping[str, object]) -> str:
    """Sixteen hex digits of all that a result depends on: device, software, and the work, its shapes above all."""
    parts = {
        "device": device_name(device),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "megads": megads.__version__,
        "kernels": loaded_kernels(),
        "work": {name: str(value) for name, value in work.items()},
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def cache_file(folder: str, key: str) -> Path:
    """Where the result of this key is kept; removing the file makes the next run measure anew."""
    return user_cache_dir() / folder / f"{key}.json"


def read_cached(file: Path) -> Any:
    """The file's content; None where there is no file, or not a whole one."""
    try:
        return read_json(file)
    except (OSError, ValueError):
        return None


def write_cached(file: Path, content: object) -> None:
    """Writes the file whole or not at all; a cache that cannot be written costs the next start its measurement."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".partial", delete=False) as partial:
            partial.write(json.dumps(content, indent=1) + "\n")
        Path(partial.name).replace(file)
    except OSError as error:
        logging.getLogger(__name__).warning("what autotuning measured is not kept: %s", error)
