"""Accepts or refuses a start, and writes the records of an accepted one; no other module changes these records.

The decision is made before the run directory is claimed. A refused start leaves the directory unchanged, or absent.

A start also executes the rollbacks that ranks decided on: it skips samples and deletes checkpoints.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megads.checkpoint.config import EVERYTHING, list_checkpoints
from megads.config.frozen import config_dict, load_frozen, record_config
from megads.config.phases import NEXT_PHASE
from megads.config.root import RootConfig, planned_steps
from megads.config.train import AUTO, LENGTHS
from megads.errors import EXIT_OK, CheckpointError, ConfigError, UnhealthyNode
from megads.launch.preflight import ResolvedRun, require_data
from megads.launch.run_length import RunLength, find_run_length
from megads.resilience.rollbacks import (
    LEFT_BEHIND,
    discarded_checkpoints,
    pending_rollback,
    recorded_rollbacks,
    skips_with_rollbacks,
)
from megads.runtime.lease import claimed
from megads.runtime.metrics import EventWriter, read_json_lines
from megads.runtime.run_dir import CONFIG_FILE, EVENTS_FILE
from megads.runtime.slurm import SlurmJob

if TYPE_CHECKING:
    from megads.config.identity import Change
    from megads.data.indexed.recorded import DataRecord
    from megads.data.indexed.run_tokenizer import TokenizerSource
    from megads.train.resume import ResumePoint


def with_rollbacks(config: RootConfig, past: ResumePoint) -> RootConfig:
    """Returns the config with the samples that the run's rollbacks skip in data.skip.

    Args:
        config: config of the start, as requested.
        past: checkpoint that it resumes from.
    """
    run_dir = Path(str(config.run.dir))
    if past.config is None or past.run_dir != run_dir:
        return config
    rollbacks, before = recorded_rollbacks(run_dir), past.config.data.skip
    skips = skips_with_rollbacks(config.data.skip, rollbacks, before, past.manifest.digest())
    return replace(config, data=replace(config.data, skip=skips))


def finish_rollback(run_dir: Path, job: SlurmJob | None) -> None:
    """Completes a rollback that was interrupted before the ranks started again; see `discard_after_rollback`.

    Args:
        run_dir: the run directory, on which nobody holds a lease.
        job: SLURM job of this process; None outside of SLURM.
    """
    if _discarded(run_dir):
        with claimed(run_dir, job):
            discard_after_rollback(run_dir)


def discard_after_rollback(run_dir: Path) -> bool:
    """Deletes the checkpoints after the one that the last rollback returns to; the caller holds the lease on the run.

    The digests of their manifests are recorded first, so that a copy restored from checkpoint.upload is deleted again.

    Returns:
        Whether a rollback is pending that no start has executed yet.
    """
    from megads.checkpoint.local import forget
    from megads.checkpoint.store import discard

    pending, found = pending_rollback(run_dir), _discarded(run_dir)
    if pending is not None and set(found.values()) - discarded_checkpoints(run_dir):
        checkpoints = {str(step): digest for step, digest in found.items() if digest}
        with closing(EventWriter(run_dir)) as events:
            events.write(LEFT_BEHIND, step=pending.checkpoint_step, checkpoints=checkpoints)
    if pending is not None:
        # A local checkpoint of a later step may descend from a checkpoint that is kept.
        forget(run_dir)
    discard(run_dir, list(found))
    return pending is not None


def _discarded(run_dir: Path) -> dict[int, str]:
    """Digests of the checkpoints that rollbacks discard, by step; empty for an unreadable checkpoint."""
    from megads.checkpoint.fresh_start import recorded_history
    from megads.checkpoint.manifest import read_manifest, read_sequence

    history = recorded_history(run_dir) or EVERYTHING
    pending, gone = pending_rollback(run_dir), discarded_checkpoints(run_dir)
    if pending is None and not gone:
        return {}
    found: dict[int, str] = {}
    for step, folder in list_checkpoints(run_dir).items():
        digest = ""
        with suppress(CheckpointError):
            digest = read_manifest(folder).digest()
        came_after = pending is not None and step > pending.checkpoint_step
        if digest in gone or (came_after and history.has(folder, read_sequence(folder))):
            found[step] = digest
    return found


# Config sections that do not affect what a finished run has computed.
_NEUTRAL_SECTIONS = ("run", "logging", "cluster")


@dataclass(frozen=True)
class AcceptedStart:
    """A start that may write to its run directory.

    Attributes:
        resolved: the run, with its data prepared and the data mixes of earlier starts in its config.
        past: checkpoint that the run most likely resumes from; None for a new run.
        data: record of the run's data.
        tokenizer: tokenizer of the run; None if unknown.
        allowed: changes to the run that run.allow_changes permits.
        settings: other keys that differ from the last start, with both values and their change class.
        origin: directory of the run whose weights or state this run starts from, if its token ids mean the same.
        length: number of steps that train.minutes stands for; None if the length is given otherwise, or if a timing
            start has to measure it first.
    """

    resolved: ResolvedRun
    past: ResumePoint | None
    data: DataRecord
    tokenizer: TokenizerSource | None
    allowed: tuple[Change, ...]
    settings: tuple[Mapping[str, Any], ...]
    origin: Path | None = None
    length: RunLength | None = None

    @property
    def changed_settings(self) -> list[str]:
        """The changed settings, one line each."""
        return [f"{change['key']} {change['before']} -> {change['after']}" for change in self.settings]

    def print_changes(self, print_line: Callable[[str, str], None]) -> None:
        """Reports the length of train.minutes, large data that is only sampled for damage, and what changed since the
        last start, as a warning where it affects training.

        Args:
            print_line: called with a line and its level.
        """
        from megads.config.identity import effect_of
        from megads.data.indexed.recorded import unverified_data

        if self.length is not None:
            print_line(self.length.text, "info")
        if sampled := unverified_data(self.resolved.config.data):
            print_line(sampled, "info")
        past = self.past
        if past is not None and past.lost_records and past.run_dir != self.resolved.run_dir:
            lost = f"{past.run_dir} has no {past.lost_records}"
            print_line(f"{lost}: whether this run continues with the same data and settings is not checked", "warning")
        for change, text in zip(self.settings, self.changed_settings, strict=True):
            if change["class"] == "warn":
                print_line(f"changed since the last start: {text}; {effect_of(change['key'])}", "warning")
            else:
                print_line(f"changed since the last start: {text}", "info")

    def record(self) -> None:
        """Writes the start's records; the caller holds the lease on the run directory.

        Raises:
            UnhealthyNode: ranks of an earlier start, which are being ended, have saved a checkpoint just now.
        """
        from megads.checkpoint.fresh_start import begin_fresh_start, continues_fresh_start, forget_fresh_start
        from megads.data.indexed.recorded import write_record
        from megads.data.indexed.run_tokenizer import keep_files_of_run, keep_tokenizer

        run_dir, config = self.resolved.run_dir, self.resolved.config
        if not self.is_current():
            raise UnhealthyNode(
                f"ranks of an earlier start still saved a checkpoint in {run_dir} while this start began; they are "
                "being ended, so start again"
            )
        if self.tokenizer is not None:
            keep_tokenizer(run_dir, self.tokenizer)
        if self.origin is not None:
            keep_files_of_run(self.origin, run_dir)
        write_record(run_dir, self.data)
        record_config(config, run_dir)
        if config.checkpoint.load != "none":
            forget_fresh_start(run_dir)
        elif not continues_fresh_start(run_dir):
            begin_fresh_start(run_dir)
        with closing(EventWriter(run_dir)) as events:
            if self.length is not None:
                self.length.record(events)
            if self.resolved.made is not None:
                events.write("data", **self.resolved.made)
            if self.settings:
                message = "; ".join(self.changed_settings)
                level = "warning" if any(change["class"] == "warn" for change in self.settings) else "info"
                events.write("config_changed", level=level, message=message, changes=list(self.settings))
            if self.allowed:
                samples = self.past.samples if self.past is not None else 0
                events.write(
                    "run_changed",
                    level="warning",
                    message=f"{'; '.join(map(str, self.allowed))} from sample {samples} on, as run.allow_changes says",
                    samples=samples,
                    changes=[dataclasses.asdict(change) for change in self.allowed],
                )

    def is_current(self) -> bool:
        """Whether the run would still resume from the same checkpoint: another start may have trained it meanwhile."""
        from megads.train.resume import find_resume_point

        found = find_resume_point(self.resolved.config.checkpoint.load, self.resolved.run_dir)
        before, now = (None if past is None else past.manifest.digest() for past in (self.past, found))
        return before == now

    def finished(self) -> str:
        """Message that the run is already finished and which key to raise; empty if steps remain."""
        config, past = self.resolved.config, self.past
        if past is None or past.run_dir != self.resolved.run_dir or not config.train.length_is_known:
            return ""
        step, planned = past.manifest.run.state["step"], planned_steps(config)
        if step > planned:
            asked = self.resolved.asked
            return (
                f"finished at step {step}, beyond the {planned} of {length_key(asked)}: {longer(asked, step)} to go on"
            )
        if step < planned or not is_finished(config) or not self._usable(past):
            return ""
        return finished_text(self.resolved)

    def _usable(self, past: ResumePoint) -> bool:
        """Whether the last checkpoint is intact; not checked on SLURM, where one node would need too long for it."""
        from megads.checkpoint.read import open_checkpoint

        if self.resolved.placement is not None:
            return True
        try:
            return bool(open_checkpoint(past.folder))
        except CheckpointError:
            return False


def accept_start(resolved: ResolvedRun) -> AcceptedStart:
    """Decides whether a run whose data is prepared may start; writes nothing.

    Raises:
        ConfigError: a key that determines the run's samples changed, or the initial weights are of another model.
        DataError: the data or the tokenizer changed or is missing, or the initial weights have another tokenizer.
        CheckpointError: checkpoint.load names no checkpoint, or one of another model.
    """
    from megads.config.identity import TOKENIZER, with_init_from
    from megads.data.indexed.recorded import record_data, with_former
    from megads.data.indexed.run_tokenizer import kept_tokenizer, source_of_run, tokenizer_of_data
    from megads.data.indexed.stream import local_prefix
    from megads.launch.initial_weights import changed_tokenizer
    from megads.train.resume import continue_data, find_resume_point, find_resume_point_in_memory, run_changes

    config, run_dir = resolved.config, resolved.run_dir
    length = _recorded_length(config, run_dir)
    config = config if length is None else length.applied(config)
    prefixes = [local_prefix(path, config.data.stream) for path in config.data.paths]
    source = tokenizer_of_data(prefixes, config.tokenizer.path)
    past = find_resume_point(config.checkpoint.load, run_dir)
    if past is not None and past.tokenizer is not None and source is None:
        source = source_of_run(past.run_dir, past.tokenizer)
    data = record_data(config.data, resolved.asked.data.raw_patterns, source.record if source else None)
    allowed: tuple[Change, ...] = ()
    if past is None and resolved.weights is not None:
        allowed = changed_tokenizer(resolved.weights, source, config.run.allow_changes)
        resolved.weights.check_model(config.model)
    if past is not None:
        _require_length(config, past)
        config = with_rollbacks(with_init_from(config, past.config), past)
        allowed = tuple(run_changes(past, config, data))
        past.check_model(config)
        if past.run_dir == run_dir and past.tokenizer is not None:
            kept_tokenizer(run_dir, past.tokenizer.sha256)
        config = continue_data(config, past, data)
        data = with_former(data, config.data)
    elif config.checkpoint.load == AUTO:
        in_memory = find_resume_point_in_memory(Path(config.checkpoint.local_folder), run_dir)
        if in_memory is not None:
            _require_length(config, in_memory)
            # A changed run could not resume from a checkpoint held only in memory: it would start over and lose it.
            allowed = tuple(run_changes(in_memory, config, data))
            in_memory.check_model(config)
    resolved = dataclasses.replace(resolved, config=config)
    if length is not None and not length.is_recorded:
        # Whether the data suffices depends on the length.
        require_data(config)
    settings = tuple(changes_since_last_start(config))
    if past is not None and past.data is not None and data.is_same_as(past.data):
        settings = tuple(_without_moves(settings))
    started_from = past or resolved.weights
    same_tokens = not any(change.key == TOKENIZER for change in allowed)
    origin = started_from.run_dir if started_from is not None and same_tokens else None
    return AcceptedStart(resolved, past, data, source, allowed, settings, origin, length)


def _without_moves(settings: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields changed settings; paths under which the same data are found now are no change of the training."""

    def without_paths(value: Any) -> Any:
        return [{**item, "path": ""} for item in value] if isinstance(value, list) else ""

    for change in settings:
        moved = change["key"] in ("data.raw", "tokenizer.path")
        if change["key"] == "data.train":
            moved = without_paths(change["before"]) == without_paths(change["after"])
        yield {**change, "class": "safe"} if moved else change


def _recorded_length(config: RootConfig, run_dir: Path) -> RunLength | None:
    """Number of steps of train.minutes, unless this is a fresh start, which measures anew."""
    if config.train.minutes is None:
        return None
    if config.checkpoint.load == "none":
        from megads.checkpoint.fresh_start import continues_fresh_start

        if not continues_fresh_start(run_dir):
            return None
    return find_run_length(config, run_dir)


def _require_length(config: RootConfig, past: ResumePoint) -> None:
    """Refuses to measure a run that has trained already: the time of its first steps is not known."""
    if not config.train.length_is_known:
        step = past.manifest.run.state["step"]
        raise ConfigError(
            f"train.minutes = {config.train.minutes:g}, but the run continues step {step} of {past.run_dir}, whose "
            "length was not given in minutes: it is fixed before the first step. Set train.minutes=null and "
            f"train.steps above {step}, or start from the weights in a new run with checkpoint.init_from"
        )


def length_key(config: RootConfig) -> str:
    """Returns the key that sets the length of the run, with its value."""
    return next(f"train.{key} = {value}" for key in LENGTHS if (value := getattr(config.train, key)) is not None)


def finished_text(resolved: ResolvedRun) -> str:
    """Returns a message that the run reached its planned end, and which key to raise."""
    step = planned_steps(resolved.config)
    return f"finished at step {step}: {longer(resolved.asked, step)} to go on"


def longer(asked: RootConfig, step: int) -> str:
    """Returns how to continue a run beyond a step: which key to raise or to set."""
    return f"raise {length_key(asked).split()[0]}" if asked.train.steps != AUTO else f"set train.steps above {step}"


def is_finished(config: RootConfig) -> bool:
    """Returns whether the last start of the run, with the same config, reached its planned end.

    Args:
        config: config of the run, with the values that depend on the data filled in.
    """
    run_dir = Path(str(config.run.dir))
    last: dict[str, dict[str, Any]] = {str(e.get("event")): e for e in read_json_lines(run_dir / EVENTS_FILE)}
    end, left = last.get("end", {}), last.get("exit", {})
    if left.get("exit_code") != EXIT_OK or end.get("stopped") or end.get("step", -1) < planned_steps(config):
        return False
    if left["time"] < last.get("launch", left)["time"] or config.checkpoint.load != "auto":
        return False
    try:
        return _computed(load_frozen(run_dir / CONFIG_FILE)) == _computed(config)
    except ConfigError:
        return False


def _computed(config: RootConfig) -> dict[str, Any]:
    return {section: content for section, content in config_dict(config).items() if section not in _NEUTRAL_SECTIONS}


def following_phase(run_dir: Path) -> int:
    """Returns the number of the training phase after the one that ended last; 0 for none."""
    ends = [event for event in read_json_lines(run_dir / EVENTS_FILE) if event.get("event") == "end"]
    return int(ends[-1].get(NEXT_PHASE, 0)) if ends else 0


def changes_since_last_start(config: RootConfig) -> list[dict[str, Any]]:
    """Lists the keys outside `run` whose values differ from the last start, with both values and `change_class`; the
    value of a key that only one of the two has is None at the other."""
    from megads.config.identity import change_class

    try:
        last = load_frozen(Path(str(config.run.dir)) / CONFIG_FILE)
    except ConfigError:
        return []
    before, after = (dict(_flat(config_dict(each))) for each in (last, config))
    # A timing start has no length yet.
    fixed = ("train.steps", "train.minutes") if last.train.minutes is not None else ()
    return [
        {"key": key, "before": before.get(key), "after": after.get(key), "class": change_class(key).value}
        # Options of optimizers, hooks and tasks can be removed.
        for key in {**after, **before}
        if before.get(key) != after.get(key) and not key.startswith("run.") and key not in fixed
    ]


def _flat(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
