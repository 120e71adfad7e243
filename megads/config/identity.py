"""Identity of a run: the keys that determine its samples, its initial weights, its data and its tokenizer.

A start that resumes from a checkpoint may change any other key. It may change these only if run.allow_changes lists
them.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from megads.config.root import RootConfig, batch_size_schedule, planned_steps, run_spans
from megads.data.config import Order
from megads.data.indexed.recorded import DataRecord
from megads.data.sampling.sampler import require_same_skips, skips_of
from megads.errors import ConfigError, DataError
from megads.runtime.url import is_url

EffectiveValue = Callable[[RootConfig, int], Any]
"""Returns the effective value of a config's key for a run trained up to a sample; None if it has no effect."""

DATA, TOKENIZER, RECORDS = "data", "tokenizer", "records"
"""Names in run.allow_changes for changes that are not config keys."""
_SKIP, INIT_FROM = "data.skip", "checkpoint.init_from"
_TEXT = "prepares another dataset from data.raw, which is identified by its content"
_MIX = "changes the mix from the current sample on"
_LENGTH = "sets the length of the run, not its samples; for data.order = megatron see train.steps"
_BATCH = "sets the number of samples per step, not which samples follow"
_WHERE = "sets where and how data is read, not which"
_COMPUTED = "sets how samples are computed, not which"


def _in_megatrons_order(value: Callable[[RootConfig], Any]) -> EffectiveValue:
    """An effective value for data.order = megatron only; the default order does not depend on it."""
    return lambda config, _: value(config) if config.data.order is Order.megatron else None


def _left_out(config: RootConfig, samples: int) -> list[tuple[int, int]]:
    return skips_of(config.data.skip, batch_size_schedule(config)).skipped_before(samples)


def _lengths(config: RootConfig, samples: int) -> int | str:
    """Sequence length; if phases change it, a description of everything that determines the tokens trained so far."""
    spans = run_spans(config)
    lengths = {span.seq_len for span in spans} or {config.train.seq_len}
    if len(lengths) == 1:
        return lengths.pop()
    begun = (span for span in spans if span.first_sample < max(samples, 1))
    shown = (f"{s.seq_len} from sample {s.first_sample} on in batches of {s.global_batch_size}" for s in begun)
    return f"{', then '.join(shown)}, as parts of {max(lengths)}"


def _first_weights(config: RootConfig, _: int) -> str:
    given = config.checkpoint.init_from
    if given is None:
        return "null"
    return given.rstrip("/") if is_url(given) else str(Path(given).resolve())


KEYS: Mapping[str, EffectiveValue | str] = {
    "train.seed": lambda config, _: config.train.seed,
    "train.seq_len": _lengths,
    "train.steps": _in_megatrons_order(lambda config: batch_size_schedule(config).samples_after(planned_steps(config))),
    "train.samples": _LENGTH,
    "train.tokens": _LENGTH,
    "train.epochs": _LENGTH,
    "train.minutes": _LENGTH,
    "train.min_steps": _LENGTH,
    "train.global_batch_size": _BATCH,
    "train.micro_batch_size": _BATCH,
    "train.batch_ramp": _BATCH,
    "train.phases": "affects later samples only; changes of the sequence length so far count as train.seq_len",
    "train.keep_batch_tokens": "changes later batches only; those so far count as train.seq_len",
    "train.precision": _COMPUTED,
    "train.fp8": _COMPUTED,
    "train.fp8_bf16_blocks": _COMPUTED,
    "train.deterministic": _COMPUTED,
    "train.z_loss": _COMPUTED,
    "train.max_nonfinite_steps": _COMPUTED,
    "data.order": lambda config, _: config.data.order.value,
    "data.megatron_theta": _in_megatrons_order(lambda config: config.data.megatron_theta),
    "data.train": _in_megatrons_order(lambda config: [(item.path, item.weight) for item in config.data.train]),
    "data.split": lambda config, _: (
        "none, as data.valid is set" if config.data.valid_paths else list(config.data.split)
    ),
    "data.packing": lambda config, _: config.data.packing.value,
    "data.document_mask": lambda config, _: config.data.document_mask,
    "data.reset_positions": lambda config, _: config.data.reset_positions,
    "data.mask_eod": lambda config, _: config.data.mask_eod,
    "data.balance_documents": "sets which rank computes a sample, not which samples a step has",
    _SKIP: _left_out,
    "data.weights": _MIX,
    "data.temperature": _MIX,
    "data.phases": _MIX,
    "data.history": _MIX,
    "data.raw": _TEXT,
    "data.text_field": _TEXT,
    "data.prompt_field": _TEXT,
    "data.input_field": _TEXT,
    "data.response_field": _TEXT,
    "data.messages_field": _TEXT,
    "data.chat_template": _TEXT,
    "data.cut_documents": _TEXT,
    "data.encoding": _TEXT,
    "data.max_rejected": "only refuses text",
    "data.extensions": _TEXT,
    "data.reader": _TEXT,
    "data.valid": "affects validation only; that it disables data.split counts as a change of data.split",
    "data.cache_dir": _WHERE,
    "data.stage_to": _WHERE,
    "data.stream": _WHERE,
    "data.prefetch_steps": _WHERE,
    "tokenizer.path": "the tokenizer is identified by its content",
    "tokenizer.vocab_size": _TEXT,
    "tokenizer.min_frequency": _TEXT,
    "tokenizer.end_of_document": _TEXT,
    "tokenizer.begin_of_document": _TEXT,
    "tokenizer.text_special_tokens": _TEXT,
    "tokenizer.engine": _COMPUTED,
    INIT_FROM: _first_weights,
}
"""Every key of train, data and tokenizer, and checkpoint.init_from: a function that returns the effective value if the
key determines the samples, their order or the initial weights; else the reason why it does not."""


class ChangeClass(StrEnum):
    """Effect of a config change between two starts of a run."""

    safe = "safe"
    """Later losses stay the same, up to numerical differences between layouts and kernels."""
    warn = "warn"
    """The run trains differently from here on, see `effect_of`."""
    refuse = "refuse"
    """Later samples would not continue those already trained; run.allow_changes permits it by name."""


_SAFE_SECTIONS = ("parallel", "ops", "deepspeed", "checkpoint", "evaluation", "logging", "cluster", "run", "dial")
_SAFE_KEYS = (
    "train.micro_batch_size",
    "train.deterministic",
    "train.max_nonfinite_steps",
    "model.attention",
    "optim.impl",
    "optim.ema_decay",
    "data.valid",
    "data.stream",
    "data.max_rejected",
    "tokenizer.engine",
)


def change_class(key: str) -> ChangeClass:
    """Returns the change class of a key that `changed_keys` does not reject, for example optim.lr."""
    section = key.partition(".")[0]
    if section in _SAFE_SECTIONS or KEYS.get(key) == _WHERE or key.startswith(_SAFE_KEYS):
        return ChangeClass.safe
    return ChangeClass.warn


_EFFECTS = {"engine": "its steps agree with the other engine's within rounding, not bit for bit"}


def effect_of(key: str) -> str:
    """Returns the effect of a change of a key whose class is warn, to show to the user."""
    return _EFFECTS.get(key, "the run trains differently from here on")


@dataclass(frozen=True)
class Change:
    """A change of a run's identity since it was trained.

    Attributes:
        key: config key, DATA or TOKENIZER.
        before: old value.
        after: new value.
    """

    key: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.key} {self.before} -> {self.after}"


def check_allowed(names: Sequence[str]) -> None:
    """Raises ConfigError if run.allow_changes lists a name that is unknown or needs no permission."""
    known = [DATA, TOKENIZER, RECORDS, *(key for key, entry in KEYS.items() if callable(entry))]
    for name in names:
        if name not in known:
            reason = KEYS.get(name)
            nearest = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {nearest[0]}?" if nearest else ""
            why = f"this key may change anyway ({reason})" if reason else f"names are {', '.join(known)}{hint}"
            raise ConfigError(f"run.allow_changes has {name}: {why}")


def changed_keys(before: RootConfig, now: RootConfig, samples: int, allowed: Collection[str]) -> list[Change]:
    """Returns the permitted changes of keys in KEYS that determine a run's identity.

    Args:
        before: config of the start whose checkpoint the run resumes from.
        now: config of this start.
        samples: samples consumed so far.
        allowed: value of run.allow_changes.

    Raises:
        ConfigError: changes that are not permitted; the message gives all of them with both values.
    """
    values = {key: (entry(before, samples), entry(now, samples)) for key, entry in KEYS.items() if callable(entry)}
    # A key that has an effect on one side only changes with the key that enables it.
    changes = [Change(key, *pair) for key, pair in values.items() if pair[0] != pair[1] and None not in pair]
    refused = [change for change in changes if change.key not in allowed]
    if any(change.key == _SKIP for change in refused):
        past, wanted = (skips_of(some.data.skip, batch_size_schedule(some)) for some in (before, now))
        require_same_skips(past, wanted, samples)
    if refused:
        names = ",".join(change.key for change in refused)
        found = "; ".join(f"{c.key} = {c.after}, but the run was trained with {c.before}" for c in refused)
        why, back = "later samples would not continue those already trained", "Restore the old value"
        if names == INIT_FROM:
            why, back = "initial weights are loaded once, and this run would keep its own", "Remove it to continue"
        raise ConfigError(
            f"{found} up to sample {samples}: {why}. {back}, start a new run with another run.id, or allow it with "
            f"run.allow_changes=[{names}]"
        )
    return changes


def with_init_from(config: RootConfig, before: RootConfig | None) -> RootConfig:
    """Returns the config with checkpoint.init_from of the earlier start, which a resumed run need not repeat.

    Args:
        config: config of this start.
        before: config of the start whose checkpoint it resumes from; None if it was not kept.
    """
    if before is None or config.checkpoint.init_from is not None:
        return config
    return replace(config, checkpoint=replace(config.checkpoint, init_from=before.checkpoint.init_from))


def changed_data(before: DataRecord, now: DataRecord) -> list[Change]:
    """Returns the changes of data with unchanged names, and of the tokenizer.

    Args:
        before: record of the data when the run was trained.
        now: record of the data now.
    """
    texts = before.changes(now)
    changes = [Change(DATA, "as recorded", "; ".join(texts))] if texts else []
    if before.tokenizer_sha256 and now.tokenizer and before.tokenizer_sha256 != now.tokenizer.sha256:
        known = before.tokenizer or f"sha256 {before.tokenizer_sha256[:12]}"
        changes.append(Change(TOKENIZER, str(known), str(now.tokenizer)))
    return changes


def require_allowed_data(changes: Sequence[Change], run: str, allowed: Collection[str]) -> None:
    """Rejects changes of data and tokenizer that run.allow_changes does not permit.

    Args:
        changes: see `changed_data`.
        run: directory of the trained run.
        allowed: value of run.allow_changes.

    Raises:
        DataError: a change is not permitted; the message gives both values.
    """
    refused = {change.key: change for change in changes if change.key not in allowed}
    if not refused:
        return
    wrong, remedy = "", "Restore the data"
    if found := refused.get(DATA):
        wrong = f"the data of {run} changed since it was trained: {found.after}. "
    if found := refused.get(TOKENIZER):
        wrong += (
            f"the data was made with another tokenizer ({found.after}) than {run} was trained with ({found.before}): "
            "its token ids stand for other text. "
        )
        remedy = f"Prepare the data with tokenizer.path={run}/tokenizer.json" if DATA not in refused else remedy
    raise DataError(
        f"{wrong}Later steps would not continue those already trained. {remedy}, start a new run with another "
        f"run.id, or allow it with run.allow_changes=[{','.join(refused)}]"
    )
