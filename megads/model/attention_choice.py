"""Chooses how attention is computed on a GPU: by trying every kind that can do the run's work, on its own shapes.

What was found is kept in the user's cache, under all that it depends on; removing the file, or the folder
`attention` of the cache, makes the next run try anew.

Shape suffixes: b = batch, s = query, t = key, n = heads, m = heads of keys and values, d = head dim.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor

from megads.batch import BatchInfo
from megads.errors import ConfigError
from megads.model.attention import AttentionCore
from megads.model.attention_kinds import FLASH_PACKAGE, AttentionKind, AttentionWork, why_not
from megads.model.config import ModelConfig
from megads.ops.attention_trial import Attend, AttentionTrial, Problem
from megads.ops.autotune import (
    TuningResult,
    cache_file,
    cache_key,
    compare,
    device_name,
    examine,
    fastest,
    read_cached,
    write_cached,
)
from megads.ops.config import Implementation

TRIED = (
    *(AttentionKind.sdpa, AttentionKind.cudnn, AttentionKind.flash),
    *(AttentionKind.flex, AttentionKind.augmented, AttentionKind.fused_softmax),
)
FOLDER = "attention"
"""Of the user's cache."""
MOST_KEPT = 1.5
"""Times the memory of sdpa's inputs and output."""
DOCUMENTS_OF_A_SAMPLE = 4
"""Of the trial's packed samples; those of the data are not known."""


@dataclass(frozen=True)
class AttentionChoice:
    """The kind that a run takes, and why.

    Attributes:
        kind: to put into the model's config.
        source: where it comes from, for people.
        key: of all that the choice depends on; empty where nothing was tried.
        outcomes: of each kind that was tried, and the reasons why the others were not.
    """

    kind: AttentionKind
    source: str
    key: str = ""
    outcomes: Mapping[str, TuningResult] | None = None

    @property
    def text(self) -> str:
        """One line for people: the choice, the times, and why others were left out, the reasons cut short."""
        if not self.outcomes:
            return f"{self.kind} ({self.source})"
        timed = [(name, found.time_ms) for name, found in self.outcomes.items() if found.time_ms is not None]
        times = [f"{name} {time_ms:.3g} ms" for name, time_ms in sorted(timed, key=lambda pair: pair[1])]
        unsteady = [f"{name}: other bits on every run" for name, found in self.outcomes.items() if _unsteady(found)]
        others = [f"{name}: {shorten(found.reason, 80)}" for name, found in self.outcomes.items() if found.reason]
        return "; ".join([f"{self.kind} ({self.source})", *times, *unsteady, *others])

    def to_dict(self) -> dict[str, Any]:
        """For a file, an event, or another rank."""
        outcomes = {name: asdict(found) for name, found in (self.outcomes or {}).items()}
        return {"kind": self.kind.value, "source": self.source, "key": self.key, "outcomes": outcomes}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> AttentionChoice:
        """Reads what `to_dict` returned; raises ValueError, KeyError or TypeError on anything else."""
        outcomes = {str(name): TuningResult(**found) for name, found in content["outcomes"].items()}
        return cls(AttentionKind(content["kind"]), str(content["source"]), str(content["key"]), outcomes)


def _unsteady(found: TuningResult) -> bool:
    return found.time_ms is not None and not found.repeats


def choose_attention(
    model: ModelConfig,
    work: AttentionWork,
    device: torch.device,
    *,
    places_s: Tensor | None = None,
    earlier: Callable[[str], AttentionChoice | None] = lambda _key: None,
    rounds: int = 10,
) -> AttentionChoice:
    """The kind of attention of a run: what the user asked for, or the quickest that is exact.

    A CPU's choice is not measured: `AttentionKind.auto` is the fused kernel there, or sdpa. A kind that the user asked
    for on a GPU is tried once.

    Args:
        model: the model.
        work: what one rank computes, everything known.
        device: where.
        places_s: int64 place of every query of this rank among the keys; None: it has whole samples.
        earlier: what the run took at an earlier start, if it was chosen under the same key: it goes on with that, or
            its numbers would not be those of a run that never stopped.
        rounds: timings of each kind.

    Raises:
        ConfigError: what was asked for does not run here, or nothing does.
    """
    if not work.cuda:
        return AttentionChoice(model.attention, "nothing is measured")
    if model.attention is not AttentionKind.auto:
        return _asked_for(model, work, device, places_s)
    key = choice_key(work, device)
    known = earlier(key)
    if known is not None:
        return replace(known, source="as at the run's earlier start")
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
) -> AttentionChoice:
    """Tries kinds of attention on a run's shapes and takes the quickest; arguments as of `choose_attention`.

    Raises:
        ConfigError: none of them can be taken.
    """
    problem, info = trial_problem(model, work, device, places_s)
    reasons = {kind: why_not(kind, work) for kind in kinds}
    ways = {kind.value: _way(model, work, kind, info) for kind, reason in reasons.items() if not reason}
    tried = compare(ways, AttentionTrial(problem), rounds)
    inputs = sum(x.nbytes for x in (problem.q_bnsd, problem.k_bmtd, problem.v_bmtd))
    outcomes = {kind.value: tried.get(kind.value, TuningResult(reasons[kind])) for kind in kinds}
    outcomes = within_plan(outcomes, inputs)
    best = fastest(outcomes)
    if best is None:
        found = "; ".join(f"{name}: {outcome.reason}" for name, outcome in outcomes.items())
        raise ConfigError(f"model.attention = auto finds nothing that computes attention here: {found}")
    return AttentionChoice(AttentionKind(best), "measured", outcomes=outcomes)


def within_plan(outcomes: Mapping[str, TuningResult], inputs: int) -> dict[str, TuningResult]:
    """Leaves out what keeps much more memory than sdpa, by which a run with model.attention=auto is planned.

    Args:
        outcomes: by kind.
        inputs: bytes of queries, keys and values, which sdpa keeps, too.
    """
    planned = outcomes.get(AttentionKind.sdpa.value, TuningResult()).kept_bytes

    def judged(found: TuningResult) -> TuningResult:
        if planned is None or found.kept_bytes is None or found.kept_bytes <= MOST_KEPT * (planned + inputs):
            return found
        kept, of_sdpa = (f"{size / 2**20:,.0f} MiB" for size in (found.kept_bytes, planned))
        return replace(found, reason=f"keeps {kept} a layer, sdpa {of_sdpa}, by which the run is planned", time_ms=None)

    return {name: judged(found) for name, found in outcomes.items()}


def _asked_for(
    model: ModelConfig, work: AttentionWork, device: torch.device, places_s: Tensor | None
) -> AttentionChoice:
    """What the user asked for, if it runs; a large error is told, not refused."""
    kind = model.attention
    problem, info = trial_problem(model, work, device, places_s)
    found = examine(kind.value, _way(model, work, kind, info), AttentionTrial(problem))
    if found.error is None:
        raise ConfigError(
            f"model.attention = {kind} does not run on {device_name(device)} with this model's shapes "
            f"({found.reason}): use model.attention=auto"
        )
    return AttentionChoice(kind, "asked for", outcomes={kind.value: found})


def trial_problem(
    model: ModelConfig, work: AttentionWork, device: torch.device, places_s: Tensor | None
) -> tuple[Problem, BatchInfo]:
    """Random inputs of a run's shapes, in memory as the model has them: views of one projection."""
    assert work.seq_len is not None and work.micro_batch_size is not None and work.bf16 is not None
    batch, keys, queries = work.micro_batch_size, work.seq_len, work.seq_len // work.context
    dtype, group = torch.bfloat16 if work.bf16 else torch.float32, work.heads // work.kv_heads
    generator = torch.Generator(device).manual_seed(0)

    def drawn(length: int, *shape: int) -> Tensor:
        return torch.randn(batch, length, *shape, work.head_dim, generator=generator, device=device).to(dtype)

    q_bsnd, k_bsmd, v_bsmd = (x.flatten(2, 3) for x in drawn(keys, work.kv_heads, group + 2).split((group, 1, 1), 3))
    starts_bs = _packed(batch, keys, device) if work.documents else None
    if places_s is not None:
        q_bsnd = drawn(queries, work.heads)  # a copy of the rank's own, beside gathered keys
        starts_bs = None if starts_bs is None else starts_bs[:, places_s]
    info = BatchInfo(torch.arange(batch, device=device), None, starts_bs, places_s, keys)
    core = _core(model, work, AttentionKind.sdpa)
    problem = Problem(
        q_bsnd.transpose(1, 2),
        k_bsmd.transpose(1, 2),
        v_bsmd.transpose(1, 2),
        drawn(queries, work.heads).transpose(1, 2),
        core.slopes(device),
        places_s,
        core.starts(info, queries, device),
        core.dropout.mask(info, device, core.heads.start) if core.dropout.active else None,
    )
    return problem, info


def _packed(batch: int, length: int, device: torch.device) -> Tensor:
    """Places at which the documents of packed samples start, int64 [b, s]; every sample has its own borders."""
    share = -(-length // DOCUMENTS_OF_A_SAMPLE)
    places_s = torch.arange(length, device=device)
    shift_b = torch.arange(batch, device=device)[:, None] * (share // 3 + 1) % length
    borders_bs = (places_s + shift_b) // share * share - shift_b
    return borders_bs.clamp_(min=0)


def _core(model: ModelConfig, work: AttentionWork, kind: AttentionKind) -> AttentionCore:
    """The attention of a rank: the first share of the heads."""
    core = AttentionCore(replace(model, attention=kind), 0, "trial")
    core.narrow(0, model.num_heads // work.heads)
    core.fused = work.impl is Implementation.fused
    return core


def _way(model: ModelConfig, work: AttentionWork, kind: AttentionKind, info: BatchInfo) -> Attend:
    """Attention of one kind, which raises RuntimeError where the model would take another in its place."""
    core = _core(model, work, kind)

    def attend(q_bnsd: Tensor, k_bmtd: Tensor, v_bmtd: Tensor) -> Tensor:
        if core.taken(q_bnsd) is not kind:
            raise RuntimeError(f"there is no kernel for {q_bnsd.dtype} on {device_name(q_bnsd.device)}")
        out_bnsd: Tensor = core(q_bnsd, k_bmtd, v_bmtd, info)
        return out_bnsd

    return attend


def choice_key(work: AttentionWork, device: torch.device) -> str:
    """Of all that a choice depends on: device, software, and the work."""
    return cache_key(device, {FLASH_PACKAGE: _version(FLASH_PACKAGE), **asdict(work)})


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _read(key: str) -> AttentionChoice | None:
    """None where nothing whole is kept under this key: it is measured anew and written over."""
    try:
        choice = AttentionChoice.from_dict(read_cached(cache_file(FOLDER, key)))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return choice if choice.key == key else None
