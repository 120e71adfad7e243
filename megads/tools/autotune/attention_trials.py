"""Autotuning of attention on a GPU: every implementation that supports the run is benchmarked on the run's shapes.

Results are stored in the user's cache, keyed by everything they depend on; to measure again, remove the file, or the
folder `attention` of the cache. For the error against fp64 (see `benchmark`) only some queries get a gradient, so that
the fp64 reference is computed for those alone, with all keys.

Shape suffixes: b = batch, s = query, t = key, n = heads, m = heads of keys and values, d = head dim, r = test queries.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor

from megads.api import (
    FUSED,
    TORCH,
    AttentionCore,
    AttentionKind,
    AttentionWork,
    BatchInfo,
    ConfigError,
    Implementation,
    ModelConfig,
    unsupported_reason,
)
from megads.ops.attention_kinds import FLASH_PACKAGE
from megads.ops.dropout import DropoutMask
from megads.ops.softmax import masked_softmax
from megads.tools.autotune.benchmark import (
    Step,
    TuningResult,
    cache_file,
    cache_key,
    compare,
    device_name,
    examine_candidate,
    fastest,
    read_cached,
    write_cached,
)

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Maps queries [b, n, s, d], keys and values [b, m, t, d] to [b, n, s, d], with masks and biases applied."""
MOST_TRIED = 1024
"""Maximum number of queries whose fp64 reference is computed."""
MOST_SCORES = 2**25
"""Maximum elements of one fp64 score tensor of a group of heads; several are alive at the same time."""


@dataclass(frozen=True)
class AttentionProblem:
    """Inputs of one attention, forward and backward.

    Attributes:
        q_bnsd: queries, on the device and in the dtype of the run.
        k_bmtd: keys.
        v_bmtd: values.
        grad_bnsd: gradient of the output.
        slopes_n: fp32 ALiBi slope of every head; None for no bias.
        places_s: int64 position of every query among the keys; None for 0..s-1.
        starts_bs: int64 first key that a query attends to; None for 0.
        mask: dropout mask of the probabilities; None for no dropout.
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
    """Tuning task for attention on one problem, see `benchmark.TuningTask`.

    Args:
        problem: the inputs of all candidates.
    """

    name = "model.attention"
    remedy = "choose another kind, for example model.attention=sdpa"

    def __init__(self, problem: AttentionProblem) -> None:
        self.problem = problem
        self.device = problem.q_bnsd.device

    def step(self, candidate: Attend) -> Step:
        """Returns forward and backward pass of attention; queries, keys and values require gradients."""
        return _step(candidate, self.problem)

    def error(self, candidate: Attend) -> float:
        """See `TuningTask.error`; the fp64 reference is computed for `sampled_queries` only, with all keys."""
        problem, tried_r = self.problem, sampled_queries(self.problem)
        # With a zero output gradient, the other queries do not contribute to the gradients of keys and values.
        some = torch.zeros_like(problem.grad_bnsd)
        some[:, :, tried_r] = problem.grad_bnsd[:, :, tried_r]
        asked = replace(problem, grad_bnsd=some)
        out, q, k, v = _attended(candidate, asked)
        return _error((out[:, :, tried_r], q[:, :, tried_r], k, v), asked, tried_r)


def sampled_queries(problem: AttentionProblem) -> Tensor:
    """Returns the indices of the queries that are compared with fp64, evenly spread, int64 [r]."""
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
    """Computes dropout(softmax(q k^T / sqrt(d) + bias)) v with PyTorch operators and materialized scores, [b, n, s, d].

    In fp64 it is the reference; in a lower dtype its error is the unit in which other errors are measured.
    """
    (_, heads, queries, dim), (_, shared, keys, _) = q_bnsd.shape, k_bmtd.shape
    k_bntd, v_bntd = (x.repeat_interleave(heads // shared, 1) for x in (k_bmtd, v_bmtd))
    weights_bnst = masked_softmax(q_bnsd @ k_bntd.transpose(-1, -2), dim**-0.5, slopes_n, places_s, starts_bs)
    if mask is not None:
        places_s = torch.arange(queries, device=q_bnsd.device) if places_s is None else places_s
        weights_bnst = weights_bnst * mask.keep(heads, places_s, keys) * mask.scale
    return weights_bnst @ v_bntd


def _step(way: Attend, problem: AttentionProblem) -> Step:
    leaves = [x.detach().requires_grad_() for x in (problem.q_bnsd, problem.k_bmtd, problem.v_bmtd)]

    def backward(out: Tensor) -> list[Tensor]:
        return [out.detach(), *torch.autograd.grad(out, leaves, problem.grad_bnsd)]

    return lambda: way(*leaves), backward


def _attended(way: Attend, problem: AttentionProblem) -> list[Tensor]:
    """Output, and gradients of queries, keys and values."""
    forward, backward = _step(way, problem)
    return backward(forward())


def _error(found: Sequence[Tensor], problem: AttentionProblem, tried_r: Tensor) -> float:
    """Largest error of output and gradients, as a multiple of plain PyTorch's error. Computed for one group of heads at
    a time, and for the first and last sample only, to limit fp64 memory."""
    heads, shared = problem.q_bnsd.shape[1], problem.k_bmtd.shape[1]
    group, samples = heads // shared, sorted({0, len(problem.q_bnsd) - 1})
    sums = torch.zeros(4, 3, dtype=torch.float64)  # squares of: candidate's errors, plain PyTorch's errors, fp64 values
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
    # With one token, gradients of queries and keys are rounding errors only.
    rounding_4 = 0.1 * torch.finfo(problem.q_bnsd.dtype).eps * torch.maximum(exact_4, exact_4[0].expand(4))
    return float((ours_4 / torch.maximum(theirs_4, rounding_4)).max())


def _part(problem: AttentionProblem, sample: int, first: int, group: int, tried_r: Tensor) -> AttentionProblem:
    """The part of a problem with one sample and one key head: the tested queries of the heads that share it."""
    one, heads, mask = slice(sample, sample + 1), slice(first * group, (first + 1) * group), problem.mask
    if mask is not None:
        mask = replace(mask, samples_b=mask.samples_b[one], first_head=mask.first_head + heads.start)
    places_s = torch.arange(problem.q_bnsd.shape[2], device=tried_r.device)
    return AttentionProblem(
        problem.q_bnsd[one, heads, tried_r],
        problem.k_bmtd[one, first : first + 1],
        problem.v_bmtd[one, first : first + 1],
        problem.grad_bnsd[one, heads, tried_r],
        None if problem.slopes_n is None else problem.slopes_n[heads],
        (places_s if problem.places_s is None else problem.places_s)[tried_r],
        None if problem.starts_bs is None else problem.starts_bs[one, tried_r],
        mask,
    )


def _plain(part: AttentionProblem, dtype: torch.dtype) -> list[Tensor]:
    """Output and gradients of plain PyTorch attention in a given dtype."""
    q, k, v, grad = (x.to(dtype) for x in (part.q_bnsd, part.k_bmtd, part.v_bmtd, part.grad_bnsd))

    def attend(q_bnsd: Tensor, k_bmtd: Tensor, v_bmtd: Tensor) -> Tensor:
        return plain_attention(q_bnsd, k_bmtd, v_bmtd, part.slopes_n, part.places_s, part.starts_bs, part.mask)

    return _attended(attend, replace(part, q_bnsd=q, k_bmtd=k, v_bmtd=v, grad_bnsd=grad))


TRIED = (
    *(AttentionKind.sdpa, AttentionKind.cudnn, AttentionKind.flash),
    *(AttentionKind.flex, AttentionKind.augmented, AttentionKind.fused_softmax),
)
FOLDER = "attention"
"""Subfolder of the user's cache."""
MOST_KEPT = 1.5
"""Maximum memory saved for backward, as a multiple of sdpa's inputs and what sdpa saves."""
DOCUMENTS_OF_A_SAMPLE = 4
"""Documents per packed sample in the trial; their number in the data is not known."""


@dataclass(frozen=True)
class TunedAttention:
    """The attention kind that a run uses, and how it was chosen.

    Attributes:
        kind: attention kind, for the model's config.
        source: origin of the choice, for display.
        key: cache key of everything that the choice depends on; empty if nothing was measured.
        outcomes: result of every kind; for kinds that were not tried, the reason.
    """

    kind: AttentionKind
    source: str
    key: str = ""
    outcomes: Mapping[str, TuningResult] | None = None

    @property
    def text(self) -> str:
        """One line for display: the choice, the times, and the shortened reasons why other kinds were excluded."""
        if not self.outcomes:
            return f"{self.kind} ({self.source})"
        timed = [(name, found.time_ms) for name, found in self.outcomes.items() if found.time_ms is not None]
        times = [f"{name} {time_ms:.3g} ms" for name, time_ms in sorted(timed, key=lambda pair: pair[1])]
        unsteady = [f"{name}: not bitwise reproducible" for name, found in self.outcomes.items() if _unsteady(found)]
        others = [f"{name}: {shorten(found.reason, 80)}" for name, found in self.outcomes.items() if found.reason]
        return "; ".join([f"{self.kind} ({self.source})", *times, *unsteady, *others])

    def to_dict(self) -> dict[str, Any]:
        """Converts to a dict for a file, an event, or another rank."""
        outcomes = {name: asdict(found) for name, found in (self.outcomes or {}).items()}
        return {"kind": self.kind.value, "source": self.source, "key": self.key, "outcomes": outcomes}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> TunedAttention:
        """Reads what `to_dict` returned; raises ValueError, KeyError or TypeError on anything else."""
        outcomes = {str(name): TuningResult(**found) for name, found in content["outcomes"].items()}
        return cls(AttentionKind(content["kind"]), str(content["source"]), str(content["key"]), outcomes)


def _unsteady(found: TuningResult) -> bool:
    return found.time_ms is not None and not found.repeats


def tune_attention(
    model: ModelConfig,
    work: AttentionWork,
    device: torch.device,
    *,
    places_s: Tensor | None = None,
    earlier: Callable[[str], TunedAttention | None] = lambda _key: None,
    rounds: int = 10,
) -> TunedAttention:
    """Chooses the attention kind of a run: the one requested by the user, or the fastest that is accurate.

    On a CPU nothing is measured: `AttentionKind.auto` is the fused kernel there, or sdpa. On a GPU a kind that the user
    requested is tried once. Ring attention has one implementation, which is not measured either.

    Args:
        model: model config.
        work: attention of one rank, with all fields known.
        device: device to measure on.
        places_s: int64 position of every query of this rank among the keys; None if the rank has whole samples.
        earlier: returns the choice of an earlier start of the run with the same key. It is reused, as another kernel
            would make the run numerically different from an uninterrupted one.
        rounds: number of timings of each kind.

    Raises:
        ConfigError: the requested kind does not run on the device, or no kind does.
    """
    if not work.cuda or work.ring:
        return TunedAttention(model.attention, "nothing is measured")
    if model.attention is not AttentionKind.auto:
        return _asked_for(model, work, device, places_s)
    key = attention_key(work, device)
    known = earlier(key)
    if known is not None:
        return replace(known, source="as in the run's earlier start")
    cached = _read(key)
    if cached is not None:
        return replace(cached, source="measured before")
    choice = measure(model, work, device, TRIED, places_s=places_s, rounds=rounds)
    choice = replace(choice, key=key)
    write_cached(cache_file(FOLDER, key), choice.to_dict())
    return choice


def measure(
    model: ModelConfig,
    work: AttentionWork,
    device: torch.device,
    kinds: tuple[AttentionKind, ...],
    *,
    places_s: Tensor | None = None,
    rounds: int = 10,
) -> TunedAttention:
    """Benchmarks attention kinds on a run's shapes and returns the fastest; arguments as in `tune_attention`.

    Raises:
        ConfigError: none of them is usable.
    """
    problem, info = random_problem(model, work, device, places_s)
    reasons = {kind: unsupported_reason(kind, work) for kind in kinds}
    ways = {kind.value: _way(model, work, kind, info) for kind, reason in reasons.items() if not reason}
    tried = compare(ways, AttentionTrial(problem), rounds)
    inputs = sum(x.nbytes for x in (problem.q_bnsd, problem.k_bmtd, problem.v_bmtd))
    outcomes = {kind.value: tried.get(kind.value, TuningResult(reasons[kind])) for kind in kinds}
    outcomes = within_memory_plan(outcomes, inputs)
    best = fastest(outcomes, deterministic=work.deterministic is not False)
    if best is None:
        found = "; ".join(f"{name}: {outcome.reason}" for name, outcome in outcomes.items())
        raise ConfigError(f"model.attention = auto finds no usable attention kernel on this device: {found}")
    return TunedAttention(AttentionKind(best), "measured", outcomes=outcomes)


def within_memory_plan(outcomes: Mapping[str, TuningResult], inputs: int) -> dict[str, TuningResult]:
    """Excludes kinds that save much more memory for backward than sdpa, on which memory plans for auto are based.

    Args:
        outcomes: results by kind.
        inputs: bytes of queries, keys and values, which sdpa also saves.
    """
    planned = outcomes.get(AttentionKind.sdpa.value, TuningResult()).kept_bytes

    def judged(found: TuningResult) -> TuningResult:
        if planned is None or found.kept_bytes is None or found.kept_bytes <= MOST_KEPT * (planned + inputs):
            return found
        kept, of_sdpa = (f"{size / 2**20:,.0f} MiB" for size in (found.kept_bytes, planned))
        reason = f"keeps {kept} per layer, sdpa {of_sdpa}, by which memory is planned"
        return replace(found, reason=reason, time_ms=None)

    return {name: judged(found) for name, found in outcomes.items()}


def _asked_for(
    model: ModelConfig, work: AttentionWork, device: torch.device, places_s: Tensor | None
) -> TunedAttention:
    """Tries the kind that the user requested; a large error is reported but accepted."""
    kind = model.attention
    problem, info = random_problem(model, work, device, places_s)
    found = examine_candidate(kind.value, _way(model, work, kind, info), AttentionTrial(problem))
    if found.error is None:
        raise ConfigError(
            f"model.attention = {kind} does not run on {device_name(device)} with this model's shapes "
            f"({found.reason}): use model.attention=auto"
        )
    return TunedAttention(kind, "requested", outcomes={kind.value: found})


def random_problem(
    model: ModelConfig, work: AttentionWork, device: torch.device, places_s: Tensor | None
) -> tuple[AttentionProblem, BatchInfo]:
    """Returns random inputs with a run's shapes and the model's memory layout: views of one projection."""
    assert work.seq_len is not None and work.micro_batch_size is not None and work.bf16 is not None
    batch, keys, queries = work.micro_batch_size, work.seq_len, work.seq_len // work.context
    dtype, group = torch.bfloat16 if work.bf16 else torch.float32, work.heads // work.kv_heads
    generator = torch.Generator(device).manual_seed(0)

    def drawn(length: int, *shape: int) -> Tensor:
        return torch.randn(batch, length, *shape, work.head_dim, generator=generator, device=device).to(dtype)

    q_bsnd, k_bsmd, v_bsmd = (x.flatten(2, 3) for x in drawn(keys, work.kv_heads, group + 2).split((group, 1, 1), 3))
    starts_bs = _packed(batch, keys, device) if work.documents else None
    if places_s is not None:
        q_bsnd = drawn(queries, work.heads)  # a separate tensor, as keys are gathered from other ranks
        starts_bs = None if starts_bs is None else starts_bs[:, places_s]
    info = BatchInfo(torch.arange(batch, device=device), None, starts_bs, places_s, keys)
    core = _core(model, work, AttentionKind.sdpa)
    problem = AttentionProblem(
        q_bsnd.transpose(1, 2),
        k_bsmd.transpose(1, 2),
        v_bsmd.transpose(1, 2),
        drawn(queries, work.heads).transpose(1, 2),
        core.slopes(device),
        places_s,
        core.visible_from(info, queries, device),
        core.dropout.mask(info, device, core.heads.start) if core.dropout.active else None,
    )
    return problem, info


def _packed(batch: int, length: int, device: torch.device) -> Tensor:
    """Start of each token's document in packed samples, int64 [b, s]; document boundaries differ between samples."""
    share = -(-length // DOCUMENTS_OF_A_SAMPLE)
    places_s = torch.arange(length, device=device)
    shift_b = torch.arange(batch, device=device)[:, None] * (share // 3 + 1) % length
    borders_bs = (places_s + shift_b) // share * share - shift_b
    return borders_bs.clamp_(min=0)


def _core(model: ModelConfig, work: AttentionWork, kind: AttentionKind) -> AttentionCore:
    """The attention core of the first rank's heads."""
    core = AttentionCore(replace(model, attention=kind), 0, "trial")
    core.narrow(0, model.num_heads // work.heads)
    core.kernels = FUSED if work.impl is Implementation.fused else TORCH
    return core


def _way(model: ModelConfig, work: AttentionWork, kind: AttentionKind, info: BatchInfo) -> Attend:
    """Attention of one kind; raises RuntimeError if the model would fall back to another kind."""
    core = _core(model, work, kind)

    def attend(q_bnsd: Tensor, k_bmtd: Tensor, v_bmtd: Tensor) -> Tensor:
        if core.backend(q_bnsd) is not kind:
            raise RuntimeError(f"there is no kernel for {q_bnsd.dtype} on {device_name(q_bnsd.device)}")
        out_bnsd: Tensor = core(q_bnsd, k_bmtd, v_bmtd, info)
        return out_bnsd

    return attend


def attention_key(work: AttentionWork, device: torch.device) -> str:
    """Returns the cache key of a choice: device, software versions, and the attention's shapes and options."""
    measured = asdict(work)
    del measured["ring"]  # nothing is measured for it, and keys of earlier versions stay valid
    return cache_key(device, {FLASH_PACKAGE: _version(FLASH_PACKAGE), **measured})


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _read(key: str) -> TunedAttention | None:
    """The cached choice; None if there is no intact entry for this key, which is then measured and overwritten."""
    try:
        choice = TunedAttention.from_dict(read_cached(cache_file(FOLDER, key)))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return choice if choice.key == key else None
