"""The training phases of a run, `train.phases`: where each ends, and which settings it changes.

Everything here is a pure function of the config. A start trains the phase that its counters lie in, so a run that is
killed at any point resumes in the same phase. A change of batch size, sequence length, RoPE, layout or recomputation
stays in force until a later phase changes it again.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megads.config.train import TrainConfig
from megads.data.config import DataConfig, DataPhaseConfig, Order, PackingMode, Weighting
from megads.errors import ConfigError
from megads.model.config import LayerKind, ModelConfig, Position
from megads.optim.schedule import LearningRate, RateScheduleName, ScheduleConfig
from megads.parallel.config import Recompute
from megads.runtime.registry import SCHEDULES

if TYPE_CHECKING:
    from megads.data.sampling.sampler import Skips

T = TypeVar("T")

UNITS = ("steps", "samples", "tokens")
"""Units of a phase's end."""
SHAPE_KEYS = (
    "train.seq_len",
    "train.global_batch_size",
    "train.micro_batch_size",
    "model.max_seq_len",
    "model.rope_theta",
    "model.rope_scaling",
    "parallel.cp",
    "parallel.cp_kind",
    "parallel.cp_ulysses",
    "parallel.dp",
    "parallel.recompute",
    "parallel.recompute_interval",
    "parallel.recompute_blocks",
)
"""Keys whose value stays in force until a later phase changes it."""
_NOT_OF_A_PHASE = ("decay_from", "decay_start_samples")
RATE_KEYS = (
    "optim.lr",
    "optim.min_lr",
    *(f"schedule.{field.name}" for field in fields(ScheduleConfig) if field.name not in _NOT_OF_A_PHASE),
)
"""Keys that start a new learning-rate schedule, for this phase and those after it."""
NEXT_PHASE = "next_phase"
"""Field of a start's `end` event: number of the phase that the launcher starts next."""
WEIGHTS = "weights"
"""Key of an entry: mixing weights of data.train from this phase on."""
_LEAVES = ("schedule.options",)
_LENGTH, _SAMPLES, _MICRO_BATCH = "train.seq_len", "train.global_batch_size", "train.micro_batch_size"
_REPLICAS = "parallel.dp"


@dataclass(frozen=True)
class TrainPhase:
    """One entry of train.phases.

    Attributes:
        place: index in the list, from 0.
        unit: unit of its end, one of UNITS; empty for the last phase, which ends with the run.
        until: its end, counted in that unit from the start of the run.
        changes: the settings that the entry changes, by dotted key.
    """

    place: int
    unit: str
    until: int
    changes: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Name of the phase in messages."""
        return f"train.phases[{self.place}]"

    @property
    def has_own_schedule(self) -> bool:
        """Whether the phase starts a learning-rate schedule of its own."""
        return any(key in RATE_KEYS for key in self.changes)


def parse_phases(entries: Sequence[Any]) -> tuple[TrainPhase, ...]:
    """Reads train.phases.

    Raises:
        ConfigError: an entry is malformed, has no end or several, or changes a key that a phase may not change.
    """
    return tuple(_parse(entry, place, place + 1 == len(entries)) for place, entry in enumerate(entries))


def _parse(entry: Any, place: int, is_last: bool) -> TrainPhase:
    name = f"train.phases[{place}]"
    if not isinstance(entry, Mapping):
        raise ConfigError(
            f"{name} = {entry!r}: want an entry like {{until_steps: 1000, train: {{global_batch_size: 512}}}}"
        )
    changes = dict(_flat(entry))
    ends = {unit: changes.pop(f"until_{unit}") for unit in UNITS if changes.get(f"until_{unit}") is not None}
    if is_last and ends:
        raise ConfigError(
            f"{name} is the last phase and sets until_{next(iter(ends))}: the last phase ends with the run, at "
            "train.steps, samples or tokens; remove it"
        )
    if not is_last and len(ends) != 1:
        found = " and ".join(f"until_{unit} = {end}" for unit, end in ends.items()) or "it has no end"
        raise ConfigError(f"{name}: {found}: every phase but the last needs one of until_steps, until_samples, "
                          "until_tokens, counted from the beginning of the run")  # fmt: skip
    unit, until = next(iter(ends.items()), ("", 0))
    if unit and (isinstance(until, bool) or not isinstance(until, int | float) or until < 1 or until != int(until)):
        raise ConfigError(f"{name}.until_{unit} = {until!r}: want a whole number above 0")
    for key in changes:
        if key != WEIGHTS and key not in RATE_KEYS and not key.startswith(SHAPE_KEYS):
            raise ConfigError(
                f"{name} sets {key}, which cannot change in the middle of a run. A phase may change "
                f"{', '.join(SHAPE_KEYS)}, the mix of data.train (weights), optim.lr, optim.min_lr and schedule.*"
            )
    return TrainPhase(place, unit, int(until), changes)


def _flat(content: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and name not in _LEAVES:
            yield from _flat(value, f"{name}.")
        else:
            yield name, value


def with_values(part: T, values: Mapping[str, Any], where: str) -> T:
    """Returns a copy of a config section with some values replaced; their types are checked.

    Args:
        part: the section, a dataclass.
        values: new values by key within the section, dotted for nested sections.
        where: origin of the values, for messages.

    Raises:
        ConfigError: a key does not exist, or a value has the wrong type.
    """
    nested = OmegaConf.create({})
    for key, value in values.items():
        OmegaConf.update(nested, key, value, force_add=True)
    try:
        return cast(T, OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(part), nested)))
    except OmegaConfBaseException as error:
        raise ConfigError(f"{where}: {error.full_key}: {str(error).splitlines()[0]}") from error


def values_in_force(phases: Sequence[TrainPhase], config: object) -> list[dict[str, Any]]:
    """Returns, for each phase, the values in force of every key of SHAPE_KEYS that any phase sets.

    Args:
        phases: phases of the run.
        config: config of the run.
    """
    keys = dict.fromkeys(key for phase in phases for key in phase.changes if key.startswith(SHAPE_KEYS))
    keeps_tokens = bool(_value(config, "train.keep_batch_tokens")) and _LENGTH in keys
    keys |= dict.fromkeys((_LENGTH, _SAMPLES, _MICRO_BATCH)) if keeps_tokens else {}
    now, found = {key: _value(config, key) for key in keys}, []
    for phase in phases:
        before, now = now, now | {key: value for key, value in phase.changes.items() if key in keys}
        if keeps_tokens and now[_LENGTH] != before[_LENGTH]:
            replicas = now.get(_REPLICAS, _value(config, _REPLICAS))
            now = now | {key: size for key, size in _batch_of_same_tokens(phase, before, now, replicas).items()
                         if key not in phase.changes}  # fmt: skip
        found.append(now)
    return found


def _batch_of_same_tokens(
    phase: TrainPhase, before: Mapping[str, Any], now: Mapping[str, Any], replicas: Any
) -> dict[str, int]:
    """Batch sizes that have the tokens of those before it with the sequence length of a phase; empty for values of the
    wrong type, which `with_values` rejects.

    Raises:
        ConfigError: the sequence length does not divide the tokens of a step.
    """
    length, old_length, samples, micro = now[_LENGTH], *(before[key] for key in (_LENGTH, _SAMPLES, _MICRO_BATCH))
    if not all(type(value) is int and value > 0 for value in (length, old_length, samples, micro, replicas)):
        return {}
    if samples * old_length % length and _SAMPLES not in phase.changes:
        raise ConfigError(
            f"{phase.name}: train.seq_len = {length:,} does not divide the {samples * old_length:,} tokens of a step "
            f"({samples:,} samples of {old_length:,}), which train.keep_batch_tokens=true keeps: set the phase's "
            "train.global_batch_size"
        )
    kept = samples * old_length // length
    batch = now[_SAMPLES] if _SAMPLES in phase.changes else kept
    largest = max(1, micro * old_length // length)
    fitting = (size for size in range(largest, 0, -1) if type(batch) is int and batch % (size * replicas) == 0)
    return {_SAMPLES: kept, _MICRO_BATCH: next(fitting, 1)}


def _value(config: object, key: str) -> Any:
    """Value of a dotted key; None for a key that does not exist, which `with_values` rejects."""
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name, None)
    return value


def expanded_phases(phases: Sequence[TrainPhase], values: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Returns train.phases with the `values_in_force` in every entry, so that none depends on the others."""
    return [
        ({f"until_{phase.unit}": phase.until} if phase.unit else {}) | dict(phase.changes) | dict(of_phase)
        for phase, of_phase in zip(phases, values, strict=True)
    ]


@dataclass(frozen=True)
class PhaseSpan:
    """The span of a run that a phase covers.

    Attributes:
        place: index of the phase, from 0.
        first_step: steps done when it begins.
        first_sample: samples consumed when it begins.
        first_token: tokens consumed when it begins, padding included.
        global_batch_size: samples per step.
        seq_len: tokens per sample.
        steps: number of steps in the phase; None for the last phase, which ends with the run.
    """

    place: int
    first_step: int
    first_sample: int
    first_token: int
    global_batch_size: int
    seq_len: int
    steps: int | None

    def steps_until(self, unit: str, end: int) -> int:
        """Whole steps of this phase up to a position in the run; negative if that lies before the phase."""
        if unit == "steps":
            return end - self.first_step
        if unit == "samples":
            return (end - self.first_sample) // self.global_batch_size
        return (end - self.first_token) // (self.global_batch_size * self.seq_len)

    def sample_after(self, steps: int) -> int:
        """Samples consumed by the run after `steps` steps of this phase."""
        return self.first_sample + steps * self.global_batch_size

    @property
    def end_sample(self) -> int | None:
        """Samples consumed when it ends; None for the last phase."""
        return None if self.steps is None else self.sample_after(self.steps)


def phase_spans(phases: Sequence[TrainPhase], batches: Sequence[tuple[int, int]]) -> tuple[PhaseSpan, ...]:
    """Returns the consecutive spans of a run's phases, each of whole steps.

    Args:
        phases: phases of the run.
        batches: (global batch size, sequence length) of each phase.

    Raises:
        ConfigError: a phase has no whole step.
    """
    found: list[PhaseSpan] = []
    step = sample = token = 0
    for phase, (size, seq_len) in zip(phases, batches, strict=True):
        span = PhaseSpan(phase.place, step, sample, token, size, seq_len, None)
        if phase.unit:
            steps = span.steps_until(phase.unit, phase.until)
            if steps < 1:
                raise ConfigError(
                    f"{phase.name}.until_{phase.unit} = {phase.until:,}: the phase begins at step {step:,}, sample "
                    f"{sample:,}, token {token:,} of the run and has no whole step of {size:,} samples of {seq_len:,} "
                    "tokens; ends are counted from the beginning of the run"
                )
            span = replace(span, steps=steps)
            step, sample, token = step + steps, sample + steps * size, token + steps * size * seq_len
        found.append(span)
    return tuple(found)


def phase_at(spans: Sequence[PhaseSpan], samples: int) -> PhaseSpan:
    """Returns the phase that trains the next step after `samples` samples."""
    return spans[bisect_right(spans, samples, key=lambda span: span.first_sample) - 1]


def steps_of_length(spans: Sequence[PhaseSpan], unit: str, length: int) -> int:
    """Returns the whole steps of a run whose length is given in `unit`; the run may end before its last phase."""
    for span in spans:
        steps = span.steps_until(unit, length)
        if span.steps is None or steps <= span.steps:
            return span.first_step + max(0, steps)
    raise AssertionError("the last phase has no end")


def sample_at_token(spans: Sequence[PhaseSpan], token: int) -> int:
    """Returns the samples of a run that hold `token` tokens, rounded up."""
    span = spans[bisect_right(spans, token, key=lambda span: span.first_token) - 1]
    return span.first_sample - (span.first_token - token) // span.seq_len


def with_phase_rates(
    rate: LearningRate, phases: Sequence[TrainPhase], spans: Sequence[PhaseSpan], end: int
) -> LearningRate:
    """Returns the learning rate of a run whose phases may have schedules of their own.

    Such a schedule counts from the start of its phase. By default it starts at the final rate of the previous schedule
    and decays until the end of the run. A later phase does not change the rates before it.

    Args:
        rate: learning rate of the first phases.
        phases: phases of the run.
        spans: spans of the phases.
        end: length of the run in samples.

    Raises:
        ConfigError: the schedule of a phase is invalid.
    """
    for phase in phases:
        first = spans[phase.place].first_sample
        if not phase.has_own_schedule or first >= end:
            continue
        try:
            piece = _rate_of_phase(rate, phase, spans, end - first)
        except ConfigError as error:
            raise ConfigError(f"{phase.name}: {error}") from error
        rate = replace(rate, later=(*rate.later, piece))
    return rate


def _rate_of_phase(before: LearningRate, phase: TrainPhase, spans: Sequence[PhaseSpan], samples: int) -> LearningRate:
    span = spans[phase.place]
    given = {key: value for key, value in phase.changes.items() if key in RATE_KEYS}
    if "schedule.name" not in given:
        raise ConfigError(
            f"sets {next(iter(given))} without schedule.name: this starts a new schedule with the phase; set its name"
        )
    at = before(span.first_sample) if span.first_sample else before.optim.lr
    of_optim = {"lr": at} | {key[6:]: value for key, value in given.items() if key.startswith("optim.")}
    if of_optim["lr"] == 0:
        raise ConfigError("the learning rate is 0 where the phase begins: set its optim.lr")
    optim = with_values(before.optim, of_optim, "optim")
    optim.check()
    keys = {key[9:]: value for key, value in given.items() if key.startswith("schedule.")}
    schedule = with_values(ScheduleConfig(), keys, "schedule")
    schedule.options = SCHEDULES.complete(schedule.name, schedule.options, "schedule.name", "schedule.options")
    schedule.check()
    warmup = _samples_from(span, spans, schedule, "warmup") or 0
    decayed = _samples_from(span, spans, schedule, "decay")
    end = decayed if decayed is not None else samples
    rate = LearningRate(optim, schedule, warmup, end, begin=span.first_sample, clock=before.clock).with_warmup_share()
    if end <= rate.warmup and schedule.name != RateScheduleName.inverse_sqrt:
        raise ConfigError(f"the decay must end after the warmup of {rate.warmup:,} samples, but ends after {end:,}")
    if schedule.name == RateScheduleName.inverse_sqrt and rate.warmup == 0:
        raise ConfigError("schedule.name = inverse_sqrt needs a warmup: set schedule.warmup_samples")
    return rate


def _samples_from(span: PhaseSpan, spans: Sequence[PhaseSpan], schedule: ScheduleConfig, what: str) -> int | None:
    """A phase's warmup or decay in samples from its start, whichever unit it is given in; None if it is not set."""
    steps, tokens = getattr(schedule, f"{what}_steps"), getattr(schedule, f"{what}_tokens")
    if steps is not None:
        return sample_after_step(spans, span.first_step + steps) - span.first_sample
    if tokens is not None:
        return sample_at_token(spans, span.first_token + tokens) - span.first_sample
    samples: int | None = getattr(schedule, f"{what}_samples")
    return samples


def sample_after_step(spans: Sequence[PhaseSpan], step: int) -> int:
    """Returns the samples consumed by the first `step` steps of a run."""
    span = spans[bisect_right(spans, step, key=lambda span: span.first_step) - 1]
    return span.sample_after(step - span.first_step)


def phase_stream_starts(spans: Sequence[PhaseSpan], skips: Skips) -> list[int]:
    """Returns the index of every phase's first sample in the training stream, skipped samples included."""
    # Imported here, as it would delay shell completion.
    import numpy as np

    return [int(skips.apply(np.array([span.first_sample - 1]))[0]) + 1 if span.first_sample else 0 for span in spans]


def check_skips(spans: Sequence[PhaseSpan], skips: Skips) -> None:
    """Raises ConfigError if a skipped range extends into a phase with another sequence length."""
    for begin, end in skips.ranges:
        for before, span in pairwise(spans):
            if begin < span.first_sample < end and before.seq_len != span.seq_len:
                raise ConfigError(
                    f"data.skip leaves out samples {begin:,} to {end:,}, but train.phases[{span.place}] begins within "
                    f"this range, at {span.first_sample:,}, with another train.seq_len: give a range on each side of it"
                )


def with_mixes(data: DataConfig, phases: Sequence[TrainPhase], starts: Sequence[int]) -> DataConfig:
    """Returns the config section `data` with the phases' mixing weights as data.phases.

    Args:
        data: config section of the run.
        phases: phases of the run.
        starts: see `phase_stream_starts`.
    """
    mixes = [
        DataPhaseConfig(start, [float(weight) for weight in phase.changes[WEIGHTS]])
        for phase, start in zip(phases, starts, strict=True)
        if WEIGHTS in phase.changes
    ]
    return replace(data, phases=mixes) if mixes else data


def check_phases(
    phases: Sequence[TrainPhase], spans: Sequence[PhaseSpan], train: TrainConfig, data: DataConfig, recompute: Recompute
) -> None:
    """Checks that phases are compatible with the run's length, batch size, recomputation and data.

    Raises:
        ConfigError: they are not compatible.
    """
    lengths = {span.seq_len for span in spans}
    modes = [key for phase in phases for key in phase.changes if key.startswith("parallel.recompute")]
    mixes = [phase for phase in phases if WEIGHTS in phase.changes]
    kinds = [phase.changes.get("parallel.cp_kind") for phase in phases]
    for wrong, found, why in (
        (
            not train.length_is_known,
            "train.steps = auto, train.epochs or train.minutes",
            "set train.steps, samples or tokens",
        ),
        (train.batch_ramp.start, "train.batch_ramp", "make each batch size a phase"),
        (modes and recompute is Recompute.auto, "parallel.recompute = auto", "set it for all phases or for none"),
        ("auto" in kinds, "parallel.cp_kind = auto in a phase", "name the kind"),
        (mixes and data.phases, "data.phases", "give the weights in the phases"),
        (mixes and data.raw is not None, "data.raw", "a mix is of datasets, data.train"),
        (mixes and mixes[0].place == 0, "weights in the first phase", "it has the weights of data.train"),
        (mixes and data.order is Order.megatron, "data.order = megatron", "it has one mix for the whole run"),
        (len(lengths) > 1 and data.order is Order.megatron, "data.order = megatron", "it has one train.seq_len"),
        (len(lengths) > 1 and data.packing is PackingMode.best_fit, "data.packing = best_fit", "it has one length"),
    ):
        if wrong:
            raise ConfigError(f"train.phases is not supported with {found}: {why}")
    for span in spans:
        if max(lengths) % span.seq_len:
            raise ConfigError(
                f"{phases[span.place].name}: train.seq_len = {span.seq_len} does not divide {max(lengths)}, the "
                "longest of all phases: shorter samples are parts of longer ones, so that no text is trained twice or "
                "left out"
            )
    for phase in mixes:
        weights = phase.changes[WEIGHTS]
        numbers = isinstance(weights, list) and all(isinstance(w, int | float) and 0 <= w < math.inf for w in weights)
        if not numbers or len(weights) != len(data.train) or not sum(weights) > 0:
            raise ConfigError(
                f"{phase.name}.weights = {weights}: want {len(data.train)} numbers, one for each dataset of "
                "data.train, none negative and one above 0"
            )


def check_positions(phases: Sequence[TrainPhase], model: ModelConfig) -> None:
    """Checks that changes of the position encoding are possible and have an effect.

    Args:
        phases: phases of the run.
        model: model of the run; the keys that are read here do not change with its phases.

    Raises:
        ConfigError: a phase changes the number of learned positions, or RoPE of a model of which no layer uses it.
    """
    for phase in phases:
        if model.position is Position.learned and "model.max_seq_len" in phase.changes:
            raise ConfigError(
                f"{phase.name} sets model.max_seq_len, the number of learned positions, which are weights and cannot "
                "change in the middle of a run: set model.max_seq_len to the longest train.seq_len for the whole run, "
                "or use model.position=rope or alibi"
            )
        for name in ("rope_theta", "rope_scaling"):
            changed = next((key for key in phase.changes if key.startswith(f"model.{name}")), None)
            if changed is not None and (why := _no_effect_of_rope(model, name)):
                raise ConfigError(f"{phase.name} sets {changed}, which has no effect, as {why}: leave it out")


def with_rope(model: ModelConfig, changes: Mapping[str, Any]) -> ModelConfig:
    """Returns a model config with other values of rope_theta and rope_scaling.

    Args:
        model: config of a model.
        changes: new values, such as rope_scaling.factor, by key within `model`.

    Raises:
        ConfigError: a value is invalid, or has no effect on the model.
    """
    for key, value in changes.items():
        if why := _no_effect_of_rope(model, key.partition(".")[0]):
            raise ConfigError(f"{key} = {value} has no effect, as {why}: leave it out")
    changed = with_values(model, changes, "model")
    changed.check()
    return changed


def _no_effect_of_rope(model: ModelConfig, name: str) -> str:
    """Returns why a change of a model's rope_theta or rope_scaling changes no layer; empty if it changes one."""
    kinds = model.layer_pattern or [LayerKind()]
    rotary = [kind for kind in kinds if (kind.position or model.position) is Position.rope]
    if any(getattr(kind, name) is None for kind in rotary):
        return ""
    if rotary:
        return f"every rotary layer of model.layer_pattern has a {name} of its own"
    return f"model.position = {model.position} has no rotary embedding"


def check_weights(data: DataConfig, phases: Sequence[TrainPhase]) -> None:
    """Rejects a dataset of weight 0 that no later mix gives a weight.

    Args:
        data: config section of the run.
        phases: phases of the run, checked.

    Raises:
        ConfigError: there is such a dataset; the message names it.
    """
    if data.weights is not Weighting.explicit or len(data.train) < 2:
        return
    mixes = [phase.weights for phase in data.phases]
    mixes += [phase.changes[WEIGHTS] for phase in phases if WEIGHTS in phase.changes]
    for place, item in enumerate(data.train):
        if item.weight == 0 and not any(weights[place] > 0 for weights in mixes):
            raise ConfigError(
                f"data.train[{place}] ({item.path}): weight = {item.weight}, and no mix of data.phases or train.phases "
                "gives it another: every dataset of a blend needs a weight above 0; remove the dataset, or set a weight"
            )
