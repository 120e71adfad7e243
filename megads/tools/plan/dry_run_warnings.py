"""Warnings about a run that can start but looks misconfigured.

A dry run shows all of them, a start only `warmup_warnings`; none prevents a start.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from megads.checkpoint.config import list_checkpoints
from megads.config.frozen import load_frozen
from megads.config.root import RootConfig, batch_size_schedule, learning_rate, planned_steps, run_spans
from megads.config.train import Precision
from megads.errors import ConfigError, MegadsError
from megads.launch.preflight import ResolvedRun
from megads.launch.run_length import warmup_warnings
from megads.optim.schedule import LearningRate
from megads.runtime.run_dir import CONFIG_FILE

_FAR_BELOW = 4
_VOCABULARY_SHARE, _VOCABULARY_ROWS = 1.1, 256
"""Factor and constant up to which rows beyond the tokenizer's tokens are taken for padding or reserved ids."""


@dataclass(frozen=True)
class LastStart:
    """State left by an earlier start of the same run.

    Attributes:
        step: step of the newest checkpoint.
        config: config of that start.
    """

    step: int
    config: RootConfig


def warnings_of(resolved: ResolvedRun) -> list[str]:
    """Returns the warnings about a run, one line each; reads the run directory and the dataset's sidecar."""
    config = resolved.planned
    found = plan_warnings(config, _tokenizer_tokens(resolved), _last_start(config, resolved.run_dir))
    # Imports torch, which would delay shell completion.
    from megads.tools.plan.disk_need import disk_need

    need = disk_need(resolved)
    return [*found, need.warning] if need is not None and need.warning else found


def plan_warnings(config: RootConfig, tokenizer_tokens: int | None = None, last: LastStart | None = None) -> list[str]:
    """Returns the warnings about a plan, one line each, with the value and the remedy.

    Args:
        config: config of the run.
        tokenizer_tokens: vocabulary size of the data's tokenizer; None if unknown.
        last: the start that this one continues; None for a new run.
    """
    if not config.train.length_is_known:
        return [*_model_warnings(config, tokenizer_tokens)]
    return [
        *_model_warnings(config, tokenizer_tokens),
        *warmup_warnings(config),
        *_zero_lr_warnings(config),
        *(_continuation_warnings(config, last) if last is not None else ()),
    ]


def _model_warnings(config: RootConfig, tokenizer_tokens: int | None) -> Iterator[str]:
    longest, rows = config.model.max_seq_len, config.model.vocab_size
    seq_len = max((span.seq_len for span in run_spans(config)), default=config.train.seq_len)
    if seq_len * _FAR_BELOW <= longest:
        yield (
            f"train.seq_len = {seq_len:,} is far below model.max_seq_len = {longest:,}: the model never trains on "
            f"texts of more than {seq_len:,} tokens; raise train.seq_len, or lower model.max_seq_len"
        )
    if config.model.scores_in_memory:
        capped = config.model.attention_logit_softcap is not None
        which = "model.attention_logit_softcap" if capped else "model.attention_sinks"
        parallel, train = config.parallel, config.train
        scores = train.micro_batch_size * config.model.num_heads * seq_len**2 // (parallel.tp * parallel.cp)
        size = scores * (2 if train.precision is Precision.bf16 else 4) / 2**20
        yield (
            f"{which} is set, which no fused attention kernel supports: the attention scores of a micro-batch "
            f"are materialized, {size:,.1f} MiB per block; a smaller train.seq_len or train.micro_batch_size takes less"
        )
    if rows is None or tokenizer_tokens is None:
        return
    if rows > _VOCABULARY_SHARE * tokenizer_tokens + _VOCABULARY_ROWS:
        yield (
            f"model.vocab_size = {rows:,}, but the tokenizer has {tokenizer_tokens:,} tokens: the other "
            f"{rows - tokenizer_tokens:,} rows are never trained; set model.vocab_size=null, which takes the "
            "tokenizer's, or give the model's own tokenizer as tokenizer.path"
        )


def _zero_lr_warnings(config: RootConfig) -> Iterator[str]:
    last, rate = planned_steps(config), learning_rate(config)
    if last == 0 or _lr_at(config, rate, last) > 0:
        return
    # A learning rate that has reached 0 stays there, except at the ends of cycles before the last one.
    steps = range(1, last + 1) if config.schedule.cycles == 1 and not rate.later else range(last, last + 1)
    first = steps[bisect_left(steps, True, key=lambda step: _lr_at(config, rate, step) == 0)]
    which = f"steps {first:,} to {last:,}, which change" if first < last else f"step {last:,}, the last, which changes"
    yield (
        f"the learning rate is 0 in {which} no weight: set optim.min_lr, for example to a tenth of "
        f"optim.lr: optim.min_lr={config.optim.lr / 10:g}"
    )


def _continuation_warnings(config: RootConfig, last: LastStart) -> Iterator[str]:
    steps, step = planned_steps(config), last.step
    if step > steps:
        yield (
            f"the run's newest checkpoint is of step {step:,}, beyond train.steps = {steps:,}: nothing would be "
            "trained; raise the length, or start another run with run.id=<name>"
        )
        return
    rate, end = learning_rate(config), learning_rate(last.config).end
    now, before = (_lr_at(config, some, step + 1) for some in (rate, replace(rate, end=end)))
    if step < steps and now != before:
        yield (
            f"the decay of the learning rate was planned to end at {end:,} samples, and now ends at {rate.end:,}: at "
            f"step {step + 1:,} the rate is {now:.3g} in place of {before:.3g}; schedule.decay_samples={end} "
            "keeps the plan, and optim.min_lr is then the rate after its end"
        )


def _lr_at(config: RootConfig, rate: LearningRate, step: int) -> float:
    return rate(batch_size_schedule(config).samples_after(step))


def _tokenizer_tokens(resolved: ResolvedRun) -> int | None:
    from megads.data.indexed.sidecar import read_sidecar
    from megads.data.indexed.stream import local_prefix

    if resolved.data.vocab_size is not None or not resolved.config.data.train:
        return resolved.data.vocab_size
    try:
        data = resolved.config.data
        sidecar = read_sidecar(local_prefix(data.train[0].path, data.stream))
    except MegadsError:
        return None
    return sidecar.vocab_size if sidecar is not None else None


def _last_start(config: RootConfig, run_dir: Path) -> LastStart | None:
    checkpoints = list_checkpoints(run_dir) if config.checkpoint.load == "auto" else {}
    if not checkpoints:
        return None
    try:
        return LastStart(max(checkpoints), load_frozen(run_dir / CONFIG_FILE, complete=False))
    except ConfigError:
        return None
