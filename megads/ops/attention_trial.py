"""What the kinds of attention are tried on (`megads.ops.autotune`): a run's shapes, and their error against fp64.

For the error only some queries have a gradient, so that fp64 is needed for those alone; their keys are all there.

Shape suffixes: b = batch, n = heads, m = heads of keys and values, s = query, t = key, d = head dim, r = tried queries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megads.ops.autotune import Step
from megads.ops.philox import DropoutMask
from megads.ops.softmax import masked_softmax

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries [b, n, s, d], keys and values [b, m, t, d] to [b, n, s, d], masks and biases included."""
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
        mask: of the probabilities; None: nothing is dropped.
    """

    q_bnsd: Tensor
    k_bmtd: Tensor
    v_bmtd: Tensor
    grad_bnsd: Tensor
    slopes_n: Tensor | None = None
    places_s: Tensor | None = None
    starts_bs: Tensor | None = None
    mask: DropoutMask | None = None


class AttentionTrial:
    """Ways to compute attention on one problem, see `megads.ops.autotune.TuningTask`.

    Args:
        problem: what all compute.
    """

    name = "model.attention"
    remedy = "choose another kind, for example model.attention=sdpa"

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.device = problem.q_bnsd.device

    def step(self, candidate: Attend) -> Step:
        """Attention of queries, keys and values that want gradients."""
        return _step(candidate, self.problem)

    def error(self, candidate: Attend) -> float:
        """See `TuningTask.error`; the exact result is computed for `tried_queries`, beside all keys."""
        problem, tried_r = self.problem, tried_queries(self.problem)
        # Without a gradient of their own, the other queries have no share in those of keys and values.
        some = torch.zeros_like(problem.grad_bnsd)
        some[:, :, tried_r] = problem.grad_bnsd[:, :, tried_r]
        asked = replace(problem, grad_bnsd=some)
        out, q, k, v = _attended(candidate, asked)
        return _error((out[:, :, tried_r], q[:, :, tried_r], k, v), asked, tried_r)


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
    mask: DropoutMask | None = None,
) -> Tensor:
    """dropout(softmax(q k^T / sqrt(d) + bias)) v with scores in memory, by torch's operators, [b, n, s, d].

    In fp64 it is what others are held to, in a lower dtype it is the yardstick of their errors.
    """
    (_, heads, queries, dim), (_, shared, keys, _) = q_bnsd.shape, k_bmtd.shape
    k_bntd, v_bntd = (x.repeat_interleave(heads // shared, 1) for x in (k_bmtd, v_bmtd))
    weights_bnst = masked_softmax(q_bnsd @ k_bntd.transpose(-1, -2), dim**-0.5, slopes_n, places_s, starts_bs)
    if mask is not None:
        places_s = torch.arange(queries, device=q_bnsd.device) if places_s is None else places_s
        weights_bnst = weights_bnst * mask.keep(heads, places_s, keys) * mask.scale
    return weights_bnst @ v_bntd


def _step(way: Attend, problem: Problem) -> Step:
    leaves = [x.detach().requires_grad_() for x in (problem.q_bnsd, problem.k_bmtd, problem.v_bmtd)]

    def backward(out: Tensor) -> list[Tensor]:
        return [out.detach(), *torch.autograd.grad(out, leaves, problem.grad_bnsd)]

    return lambda: way(*leaves), backward


def _attended(way: Attend, problem: Problem) -> list[Tensor]:
    """Output and gradients of queries, keys and values."""
    forward, backward = _step(way, problem)
    return backward(forward())


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
    one, heads, mask = slice(sample, sample + 1), slice(first * group, (first + 1) * group), problem.mask
    if mask is not None:
        mask = replace(mask, samples_b=mask.samples_b[one], first_head=mask.first_head + heads.start)
    places_s = torch.arange(problem.q_bnsd.shape[2], device=tried_r.device)
    return Problem(
        problem.q_bnsd[one, heads, tried_r],
        problem.k_bmtd[one, first : first + 1],
        problem.v_bmtd[one, first : first + 1],
        problem.grad_bnsd[one, heads, tried_r],
        None if problem.slopes_n is None else problem.slopes_n[heads],
        (places_s if problem.places_s is None else problem.places_s)[tried_r],
        None if problem.starts_bs is None else problem.starts_bs[one, tried_r],
        mask,
    )


def _plain(part: Problem, dtype: torch.dtype) -> list[Tensor]:
    """Output and gradients by plain torch in a dtype."""
    q, k, v, grad = (x.to(dtype) for x in (part.q_bnsd, part.k_bmtd, part.v_bmtd, part.grad_bnsd))

    def attend(q_bnsd: Tensor, k_bmtd: Tensor, v_bmtd: Tensor) -> Tensor:
        return plain_attention(q_bnsd, k_bmtd, v_bmtd, part.slopes_n, part.places_s, part.starts_bs, part.mask)

    return _attended(attend, replace(part, q_bnsd=q, k_bmtd=k, v_bmtd=v, grad_bnsd=grad))
