"""What makes a run the same run: the keys that say what its samples are, its first weights, its data, its tokenizer.

A start that goes on from a checkpoint may change anything else. What is here it may change only where run.allow_changes
names it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from megads.config import RootConfig, batch_size_schedule, planned_steps, run_spans
from megads.data.config import Order
from megads.data.indexed.recorded import DataRecord
from megads.data.sampling.sampler import require_same_past, skips_of
from megads.errors import ConfigError, DataError
from megads.runtime.url import is_url

EffectiveValue = Callable[[RootConfig, int], Any]
"""Returns the value of a key of a config, for a run that is trained up to a sample; None where it does not count."""

DATA, TOKENIZER = "data", "tokenizer"
"""Names in run.allow_changes of what no key tells."""
_SKIP, INIT_FROM = "data.skip", "checkpoint.init_from"
_TEXT = "makes another dataset of data.raw, which is known by its content"
_MIX = "changes the mix, which counts from the sample where it changes"
_LENGTH = "how long, not what; in Megatron's order see train.steps"
_BATCH = "how many samples a step takes, not which come next"
_WHERE = "where and how data is read, not which"
_COMPUTED = "how samples are computed, not which"


def _in_megatrons_order(value: Callable[[RootConfig], Any]) -> EffectiveValue:
    """What counts there only; the default order depends on nothing of the kind."""
    return lambda config, _: value(config) if config.data.order is Order.megatron else None


def _left_out(config: RootConfig, samples: int) -> list[tuple[int, int]]:
    return skips_of(config.data.skip, batch_size_schedule(config)).left_out_before(samples)


def _lengths(config: RootConfig, samples: int) -> int | str:
    """The length of samples; with training stages that change it, what decides on which tokens they have had."""
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
    "train.global_batch_size": _BATCH,
    "train.micro_batch_size": _BATCH,
    "train.batch_ramp": _BATCH,
    "train.stages": "what is still to come; what they have changed of lengths counts as train.seq_len",
    "train.precision": _COMPUTED,
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
    _SKIP: _left_out,
    "data.weights": _MIX,
    "data.temperature": _MIX,
    "data.phases": _MIX,
    "data.history": _MIX,
    "data.raw": _TEXT,
    "data.text_field": _TEXT,
    "data.prompt_field": _TEXT,
    "data.response_field": _TEXT,
    "data.messages_field": _TEXT,
    "data.chat_template": _TEXT,
    "data.cut_documents": _TEXT,
    "data.encoding": _TEXT,
    "data.extensions": _TEXT,
    "data.reader": _TEXT,
    "data.valid": "validation; that data.split does not count beside it is seen there",
    "data.cache_dir": _WHERE,
    "data.stage_to": _WHERE,
    "data.stream": _WHERE,
    "data.prefetch_steps": _WHERE,
    "tokenizer.path": "the tokenizer is known by its content",
    "tokenizer.vocab_size": _TEXT,
    "tokenizer.min_frequency": _TEXT,
    "tokenizer.end_of_document": _TEXT,
    "tokenizer.text_special_tokens": _TEXT,
    "tokenizer.engine": _COMPUTED,
    INIT_FROM: _first_weights,
}
"""Every key of train, data and tokenizer: its value in force where it says what the samples are or which come next;
else the reason why it does not. And where the first weights came from."""


class ChangeClass(StrEnum):
    """What a change between two starts of a run means for it."""

    safe = "safe"
    """The losses to come are the same, within what layouts and kernels may differ by."""
    warn = "warn"
    """The run trains differently from here on."""
    refuse = "refuse"
    """The samples to come would not continue those that were trained; run.allow_changes allows it by name."""


_SAFE_ROOMS = ("parallel", "ops", "deepspeed", "checkpoint", "evaluation", "logging", "cluster", "run")
_SAFE_KEYS = (
    "train.micro_batch_size",
    "train.deterministic",
    "train.max_nonfinite_steps",
    "model.attention",
    "optim.impl",
    "optim.ema_decay",
    "data.valid",
    "data.stream",
    "tokenizer.engine",
)


def change_class(key: str) -> ChangeClass:
    """Returns the class of a change of a key that `changed_keys` does not refuse, as in optim.lr."""
    room = key.partition(".")[0]
    if room in _SAFE_ROOMS or KEYS.get(key) == _WHERE or key.startswith(_SAFE_KEYS):
        return ChangeClass.safe
    return ChangeClass.warn


@dataclass(frozen=True)
class Change:
    """What differs from how the run was trained.

    Attributes:
        key: of the config, or DATA or TOKENIZER.
        before: how it was.
        after: how it would be.
    """

    key: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.key} {self.before} -> {self.after}"


def check_allowed(names: Sequence[str]) -> None:
    """Raises ConfigError where run.allow_changes names what need not, or cannot, be allowed."""
    known = [DATA, TOKENIZER, *(key for key, entry in KEYS.items() if callable(entry))]
    for name in names:
        if name not in known:
            reason = KEYS.get(name)
            nearest = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {nearest[0]}?" if nearest else ""
            why = f"this key may change without it: {reason}" if reason else f"names are {', '.join(known)}{hint}"
            raise ConfigError(f"run.allow_changes has {name}: {why}")


def changed_keys(before: RootConfig, now: RootConfig, samples: int, allowed: Collection[str]) -> list[Change]:
    """Lists the changes of keys that say what the samples are.

    Args:
        before: of the start whose checkpoint the run goes on from.
        now: of this start.
        samples: consumed so far.
        allowed: run.allow_changes.

    Raises:
        ConfigError: one that is not allowed; names all of them with both values.
    """
    values = {key: (entry(before, samples), entry(now, samples)) for key, entry in KEYS.items() if callable(entry)}
    # What is in force on one side only changes with what puts it in force.
    changes = [Change(key, *pair) for key, pair in values.items() if pair[0] != pair[1] and None not in pair]
    refused = [change for change in changes if change.key not in allowed]
    if any(change.key == _SKIP for change in refused):
        past, wanted = (skips_of(some.data.skip, batch_size_schedule(some)) for some in (before, now))
        require_same_past(past, wanted, samples)
    if refused:
        names = ",".join(change.key for change in refused)
        found = "; ".join(f"{c.key} = {c.after}, but the run was trained with {c.before}" for c in refused)
        why, back = "the samples to come would not continue those that were trained", "Go back to that"
        if names == INIT_FROM:
            why, back = "weights are taken once, and this run would keep its own", "Leave it out to go on with those"
        raise ConfigError(
            f"{found} up to sample {samples}: {why}. {back}, start a new run with another run.id, or allow it with "
            f"run.allow_changes=[{names}]"
        )
    return changes


def with_first_weights(config: RootConfig, before: RootConfig | None) -> RootConfig:
    """Returns the config of a start that goes on, which need not say again where the run's first weights came from.

    Args:
        config: of this start.
        before: of the start whose checkpoint it goes on from; None where that was not kept.
    """
    if before is None or config.checkpoint.init_from is not None:
        return config
    return replace(config, checkpoint=replace(config.checkpoint, init_from=before.checkpoint.init_from))


def changed_data(before: DataRecord, now: DataRecord) -> list[Change]:
    """Lists what changed of the data under its name, and whether its tokenizer is another one.

    Args:
        before: what the data held when the run was trained.
        now: what it holds.
    """
    texts = before.changes(now)
    changes = [Change(DATA, "as recorded", "; ".join(texts))] if texts else []
    if before.tokenizer_sha256 and now.tokenizer and before.tokenizer_sha256 != now.tokenizer.sha256:
        known = before.tokenizer or f"sha256 {before.tokenizer_sha256[:12]}"
        changes.append(Change(TOKENIZER, str(known), str(now.tokenizer)))
    return changes


def require_allowed_data(changes: Sequence[Change], run: str, allowed: Collection[str]) -> None:
    """Refuses changes of data and tokenizer that are not allowed.

    Args:
        changes: see `changed_data`.
        run: the folder of the run that was trained.
        allowed: run.allow_changes.

    Raises:
        DataError: names what differs, with both values.
    """
    refused = {change.key: change for change in changes if change.key not in allowed}
    if not refused:
        return
    wrong, remedy = "", "Put the data back"
    if found := refused.get(DATA):
        wrong = f"the data of {run} changed since it was trained: {found.after}. "
    if found := refused.get(TOKENIZER):
        wrong += (
            f"the data was made with another tokenizer ({found.after}) than {run} was trained with ({found.before}): "
            "its ids mean other text. "
        )
        remedy = f"Make the data with tokenizer.path={run}/tokenizer.json" if DATA not in refused else remedy
    raise DataError(
        f"{wrong}The steps to come would not continue those that were trained. {remedy}, start a new run with another "
        f"run.id, or allow it with run.allow_changes=[{','.join(refused)}]"
    )
