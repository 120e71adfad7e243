"""Autotuning: checks and benchmarks all implementations of an operator, on the device and shapes of a run.

A candidate is used only if its error against fp64 is at most twice that of plain PyTorch in the same dtype: larger
rounding errors would change training. `attention_trials` tunes attention with it, `choice` the
other operators. Results are kept in the user's cache, one JSON file per key.
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
from megads.api import ConfigError, read_json, user_cache_dir
from megads.ops.resolve import loaded_kernels

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)

Step = tuple[Callable[[], Any], Callable[[Any], list[Tensor]]]
"""Forward pass, and backward pass, which takes the forward pass's result and returns outputs and gradients."""

ROUNDS = 10
WARM_UP_ROUNDS = 2
MAX_ERROR_RATIO = 2.0
"""Maximum error of a candidate, as a multiple of that of plain PyTorch."""
_AHEAD_CYCLES = 4_000_000
"""Clock cycles for which the GPU sleeps before a timed step, about two milliseconds: meanwhile the host launches the
step, so that device time is measured without launch overhead."""


class TuningTask(Protocol[T_contra]):
    """A computation, forward and backward, with several candidate implementations.

    Attributes:
        name: what is tuned, for messages, for example "model.attention".
        remedy: what the user can do if a candidate leaves the device unusable.
        device: device of the computation.
    """

    name: str
    remedy: str
    device: torch.device

    def step(self, candidate: T_contra) -> Step:
        """Prepares one computation with new inputs; the preparation is not timed."""

    def error(self, candidate: T_contra) -> float:
        """Largest error of outputs and gradients against fp64, as a multiple of plain PyTorch's in the same dtype."""


@dataclass(frozen=True)
class TuningResult:
    """Result of testing one candidate.

    Attributes:
        reason: why it cannot be used; empty if it can.
        error: largest error of outputs and gradients, as a multiple of plain PyTorch's; None if it did not run.
        repeats: whether two runs gave bitwise equal results.
        time_ms: median time of forward and backward together; None if it was not timed.
        kept_bytes: memory kept between forward and backward, including the output but not the inputs; None if unknown,
            as on a CPU.
        peak_bytes: peak memory without the inputs; None if unknown.
    """

    reason: str = ""
    error: float | None = None
    repeats: bool = False
    time_ms: float | None = None
    kept_bytes: int | None = None
    peak_bytes: int | None = None


class DeviceBroken(ConfigError):
    """A candidate left the device unusable, for example by an illegal memory access.

    Attributes:
        candidate: name of the candidate.
    """

    def __init__(self, message: str, candidate: str) -> None:
        super().__init__(message)
        self.candidate = candidate


def compare(candidates: Mapping[str, T], trial: TuningTask[T], rounds: int = ROUNDS) -> dict[str, TuningResult]:
    """Checks each candidate, then times the accurate ones in interleaved rounds.

    Args:
        candidates: candidates by name.
        trial: the computation.
        rounds: timed steps per candidate.

    Returns:
        Results by name, in the given order.

    Raises:
        DeviceBroken: a candidate left the device unusable.
    """
    outcomes = {name: examine_candidate(name, candidate, trial) for name, candidate in candidates.items()}
    exact = {name: candidates[name] for name, found in outcomes.items() if not found.reason}
    for name, times in _times_ms(exact, trial, rounds).items():
        kept, peak = _bytes(exact[name], trial)
        outcomes[name] = replace(outcomes[name], time_ms=statistics.median(times), kept_bytes=kept, peak_bytes=peak)
    return outcomes


def fastest(outcomes: Mapping[str, TuningResult], *, deterministic: bool = True) -> str | None:
    """The name of the fastest candidate; None if none was timed.

    Args:
        outcomes: results of all candidates.
        deterministic: prefer candidates that are deterministic, since a bitwise exact resume requires deterministic
            gradients.
    """
    timed = {name: found for name, found in outcomes.items() if found.time_ms is not None}
    repeating = {name: found for name, found in timed.items() if found.repeats or not deterministic} or timed
    return min(repeating, key=lambda name: repeating[name].time_ms or 0.0, default=None)


def examine_candidate(name: str, candidate: T, trial: TuningTask[T]) -> TuningResult:
    """Runs a candidate twice and compares it with fp64; an exception that it raises is the reason not to use it.

    Raises:
        DeviceBroken: it left the device unusable.
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
    """The largest error of several results, each as a multiple of PyTorch's; errors are 2-norms of the difference from
    fp64.

    The denominator is at least a tenth of the dtype's rounding error, or four times it for single numbers, whose error
    is a matter of chance.

    Args:
        ours: results of the candidate.
        torchs: results of plain PyTorch from the same inputs.
        exact: results in fp64.
    """
    largest = 0.0
    for mine, theirs, right in zip(ours, torchs, exact, strict=True):
        rounding = (0.1 if right.numel() > 1 else 4.0) * _eps(mine.dtype) * right.norm().item()
        off, yardstick = ((x.double() - right).norm().item() for x in (mine, theirs))
        ratio = off / max(yardstick, rounding) if off else 0.0
        largest = ratio if not ratio <= largest else largest  # max() would ignore a NaN
    return largest


def _eps(dtype: torch.dtype) -> float:
    # Results in fp64, such as a loss, were computed in fp32.
    return max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)


def _run(candidate: T, trial: TuningTask[T]) -> list[Tensor]:
    forward, backward = trial.step(candidate)
    return backward(forward())


def _times_ms(candidates: Mapping[str, T], trial: TuningTask[T], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of forward and backward in interleaved rounds, without the warm-up rounds."""
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
    """(kept, peak) memory of a step without its inputs; None on a CPU, where it is not measured."""
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
    """Frees a trial's cached memory for the next one or for training; raises RuntimeError if the device is unusable."""
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
    """The name of the GPU, or the type of any other device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def cache_key(device: torch.device, work: Mapping[str, object]) -> str:
    """Hash, 16 hex digits, of everything that a result depends on: device, software, and the work with its shapes."""
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
    """Path of the cached result of a key; if the file is removed, the next run measures again."""
    return user_cache_dir() / folder / f"{key}.json"


def read_cached(file: Path) -> Any:
    """The content of a cache file; None if it is missing or incomplete."""
    try:
        return read_json(file)
    except (OSError, ValueError):
        return None


def write_cached(file: Path, content: object) -> None:
    """Writes a cache file atomically; if that fails, the next start only has to measure again."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".partial", delete=False) as partial:
            partial.write(json.dumps(content, indent=1) + "\n")
        Path(partial.name).replace(file)
    except OSError as error:
        logging.getLogger(__name__).warning("autotuning results cannot be cached: %s", error)
