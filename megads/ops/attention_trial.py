"""Tries ways to compute attention on the device: is each exact, are its bits the same again, how long does it take.

Exact is what has at most twice the error of plain torch in the same dtype, against fp64: a kernel that rounds more
would train another model. For that only some queries have a gradient, so that fp64 is needed for those alone; their
keys are all there.

Shape suffixes: b = batch, n = heads, m = heads of keys and values, s = query, t = key, d = head dim, r = tried queries.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megads.errors import ConfigError
from megads.ops.softmax import masked_softmax

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries [b, n, s, d], keys and values [b, m, t, d] to [b, n, s, d], masks and biases included."""
ROUNDS = 10
MOST_ERROR = 2.0
"""Times the error of plain torch."""
MOST_TRIED = 1024
"""Queries whose exact result is computed."""
MOST_SCORES = 2**25
"""Elements of the scores of one group of heads in fp64, of which several are alive."""


@dataclass(frozen=True)
class Problem:
    """One attention to compute, forward and backward.

    Attributes:
        q_bnsd: queries, on the device and in the dtype of the run.
        k_bmtd: keys.
        v_bmtd: values.
        grad_bnsd: gradient of the output.
        slopes_n: fp32 ALiBi slope of every head; None: no bias.
        places_s: int64 place of every query among the keys; None: 0..s-1.
        starts_bs: int64 first key that a query sees; None: 0.
    """

    q_bnsd: Tensor
    k_bmtd: Tensor
    v_bmtd: Tensor
    grad_bnsd: Tensor
    slopes_n: Tensor | None = None
    places_s: Tensor | None = None
    starts_bs: Tensor | None = None


@dataclass(frozen=True)
class Outcome:
    """What the trial of one way showed.

    Attributes:
        reason: why it is not to be taken; empty where nothing speaks against it.
        error: the largest of output and gradients, in errors of plain torch; None where it did not run.
        repeats: two runs had the same bits.
        time_ms: of forward and backward together, the median; None where it was not timed.
        kept_bytes: memory that is kept between forward and backward, beside the inputs, the output included; None where
            that is not known, as on a CPU.
        peak_bytes: the most beside the inputs, likewise.
    """

    reason: str = ""
    error: float | None = None
    repeats: bool = False
    time_ms: float | None = None
    kept_bytes: int | None = None
    peak_bytes: int | None = None


def compare(ways: Mapping[str, Attend], problem: Problem, rounds: int = ROUNDS) -> dict[str, Outcome]:
    """Tries each way by itself, then times those that are exact, in turns.

    Args:
        ways: by name.
        problem: what all compute.
        rounds: timings of each.

    Returns:
        What came out, by name, in the order given.

    Raises:
        ConfigError: a way left the device in a state in which nothing else can be tried.
    """
    outcomes = {}
    for name, way in ways.items():
        try:
            outcomes[name] = examine(way, problem)
        except RuntimeError as failure:  # not the way's own, which is its reason: a kernel that wrote where it must not
            raise ConfigError(
                f"the trial of model.attention = {name} left {problem.q_bnsd.device} unusable "
                f"({_first_line(failure)}): choose another kind, for example model.attention=sdpa"
            ) from failure
    exact = {name: way for name, way in ways.items() if not outcomes[name].reason}
    for name, times in _times_ms(exact, problem, rounds).items():
        kept, peak = _bytes(exact[name], problem)
        median = statistics.median(times)
        outcomes[name] = replace(outcomes[name], time_ms=median, kept_bytes=kept, peak_bytes=peak)
    return outcomes


def quickest(outcomes: Mapping[str, Outcome]) -> str | None:
    """The name of the quickest of those with the same bits on every run, else of all that may be taken; None: none may.

    A resume continues bit for bit only with gradients that repeat.
    """
    timed = {name: outcome for name, outcome in outcomes.items() if outcome.time_ms is not None}
    repeating = {name: outcome for name, outcome in timed.items() if outcome.repeats} or timed
    return min(repeating, key=lambda name: repeating[name].time_ms or 0.0, default=None)


def examine(way: Attend, problem: Problem) -> Outcome:
    """Runs a way twice and holds it to fp64; whatever it raises is the reason not to take it."""
    tried_r = tried_queries(problem)
    # Without a gradient of their own, the other queries have no share in those of keys and values.
    some = torch.zeros_like(problem.grad_bnsd)
    some[:, :, tried_r] = problem.grad_bnsd[:, :, tried_r]
    asked = replace(problem, grad_bnsd=some)
    try:
        whole = (_attended(way, problem), _attended(way, problem))
        repeats = all(torch.equal(x, y) for x, y in zip(*whole, strict=True))
        out, q, k, v = _attended(way, asked)
    except Exception as failure:
        _free(problem.q_bnsd.device)
        return Outcome(reason=f"{type(failure).__name__}: {_first_line(failure)}")
    error = _error((out[:, :, tried_r], q[:, :, tried_r], k, v), asked, tried_r)
    _free(problem.q_bnsd.device)
    if not error <= MOST_ERROR:
        return Outcome(f"its error is {error:.3g} times that of plain torch", error, repeats)
    return Outcome("", error, repeats)


def tried_queries(problem: Problem) -> Tensor:
    """Indices of the queries that are held to fp64, spread over all of them, int64 [r]."""
    (_, heads, queries, _), (_, shared, keys, _) = problem.q_bnsd.shape, problem.k_bmtd.shape
    count = min(queries, MOST_TRIED, max(16, MOST_SCORES // (heads // shared * keys)))
    return torch.linspace(0, queries - 1, count, device=problem.q_bnsd.device, dtype=torch.float64).round().long()


def plain_attention(
    q_bnsd: Tensor,
    k_bmtd: Tensor,
    v_bmtd: Tensor,
    slopes_n: Tensor | None = None,
    places_s: Tensor | None = None,
    starts_bs: Tensor | None = None,
) -> Tensor:
    """softmax(q k^T / sqrt(d) + bias) v with scores in memory, by torch's operators, [b, n, s, d].

    In fp64 it is what others are held to, in a lower dtype it is the yardstick of their errors.
    """
    group = q_bnsd.shape[1] // k_bmtd.shape[1]
    k_bntd, v_bntd = k_bmtd.repeat_interleave(group, 1), v_bmtd.repeat_interleave(group, 1)
    scores_bnst = q_bnsd @ k_bntd.transpose(-1, -2)
    return masked_softmax(scores_bnst, q_bnsd.shape[-1] ** -0.5, slopes_n, places_s, starts_bs) @ v_bntd


def _attended(way: Attend, problem: Problem) -> list[Tensor]:
    """Output and gradients of queries, keys and values."""
    leaves = [x.detach().requires_grad_() for x in (problem.q_bnsd, problem.k_bmtd, problem.v_bmtd)]
    out = way(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, problem.grad_bnsd)]


def _error(found: Sequence[Tensor], problem: Problem, tried_r: Tensor) -> float:
    """The largest error of output and gradients, in errors of plain torch. One group of heads at a time, first and last
    sample alone, so that fp64 has room."""
    heads, shared = problem.q_bnsd.shape[1], problem.k_bmtd.shape[1]
    group, samples = heads // shared, sorted({0, len(problem.q_bnsd) - 1})
    sums = torch.zeros(4, 3, dtype=torch.float64)  # of squares: our errors, those of plain torch, exact values
    for sample in samples:
        for first in range(shared):
            part = _part(problem, sample, first, group, tried_r)
            of_keys, of_queries = slice(first, first + 1), slice(first * group, (first + 1) * group)
            heads_of = (of_queries, of_queries, of_keys, of_keys)
            ours = [x[sample : sample + 1, some] for x, some in zip(found, heads_of, strict=True)]
            theirs, exact = _plain(part, part.q_bnsd.dtype), _plain(part, torch.float64)
            errors = [(x - right, y - right, right) for x, y, right in zip(ours, theirs, exact, strict=True)]
            sums += torch.tensor([[float(x.double().square().sum()) for x in row] for row in errors])
    ours_4, theirs_4, exact_4 = sums.sqrt().unbind(1)
    # With one token gradients of queries and keys are nothing but rounding.
    rounding_4 = 0.1 * torch.finfo(problem.q_bnsd.dtype).eps * torch.maximum(exact_4, exact_4[0].expand(4))
    return float((ours_4 / torch.maximum(theirs_4, rounding_4)).max())


def _part(problem: Problem, sample: int, first: int, group: int, tried_r: Tensor) -> Problem:
    """One sample's queries that share one head of keys, of those that are tried."""
    one, heads = slice(sample, sample + 1), slice(first * group, (first + 1) * group)
    places_s = torch.arange(problem.q_bnsd.shape[2], device=tried_r.device)
    return Problem(
        problem.q_bnsd[one, heads, tried_r],
        problem.k_bmtd[one, first : first + 1],
        problem.v_bmtd[one, first : first + 1],
        problem.grad_bnsd[one, heads, tried_r],
        None if problem.slopes_n is None else problem.slopes_n[heads],
        (places_s if problem.places_s is None else problem.places_s)[tried_r],
        None if problem.starts_bs is None else problem.starts_bs[one, tried_r],
    )


def _plain(part: Problem, dtype: torch.dtype) -> list[Tensor]:
    """Output and gradients by plain torch in a dtype."""
    q, k, v, grad = (x.to(dtype) for x in (part.q_bnsd, part.k_bmtd, part.v_bmtd, part.grad_bnsd))

    def attend(q_bnsd: Tensor, k_bmtd: Tensor, v_bmtd: Tensor) -> Tensor:
        return plain_attention(q_bnsd, k_bmtd, v_bmtd, part.slopes_n, part.places_s, part.starts_bs)

    return _attended(attend, replace(part, q_bnsd=q, k_bmtd=k, v_bmtd=v, grad_bnsd=grad))


def _times_ms(ways: Mapping[str, Attend], problem: Problem, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of forward and backward in interleaved rounds; the first two are not counted."""
    device, times = problem.q_bnsd.device, {name: list[float]() for name in ways}
    for round_ in range(rounds + 2):
        for name, way in ways.items():
            taken_ms = _time_on_gpu(way, problem) if device.type == "cuda" else _time_on_cpu(way, problem)
            if round_ >= 2:
                times[name].append(taken_ms)
    return times


def _time_on_gpu(way: Attend, problem: Problem) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    _attended(way, problem)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def _time_on_cpu(way: Attend, problem: Problem) -> float:
    begin = time.perf_counter()
    _attended(way, problem)
    return 1e3 * (time.perf_counter() - begin)


def _bytes(way: Attend, problem: Problem) -> tuple[int, int] | tuple[None, None]:
    """(kept, peak) of the memory that it takes beside the problem; a CPU does not count it."""
    device = problem.q_bnsd.device
    if device.type != "cuda":
        return None, None
    leaves = [x.detach().requires_grad_() for x in (problem.q_bnsd, problem.k_bmtd, problem.v_bmtd)]
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    out = way(*leaves)
    kept = torch.cuda.memory_allocated(device) - before
    torch.autograd.grad(out, leaves, problem.grad_bnsd)
    return kept, torch.cuda.max_memory_allocated(device) - before


def _free(device: torch.device) -> None:
    """Gives back what a trial held, so that the next one, or training, has room."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:200] if lines else "without a message"
