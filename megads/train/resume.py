"""Resuming a run: selects the checkpoint, loads weights and state, and truncates the ledger."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from megads.checkpoint.config import EVERYTHING, History, fetched_folder, list_checkpoints, step_folder
from megads.checkpoint.fresh_start import continues_fresh_start, leaves_a_ledger, own_history, recorded_history
from megads.checkpoint.initial import WeightSource, open_source, read_weights
from megads.checkpoint.local import LocalCheckpoint
from megads.checkpoint.local_files import newest_in_memory, node_folder
from megads.checkpoint.local_saves import LocalSaves
from megads.checkpoint.manifest import Manifest, newest_manifest, read_manifest, read_sequence
from megads.checkpoint.read import (
    CheckpointHandle,
    check_model,
    find_checkpoint,
    given_folder,
    with_averages_from_weights,
)
from megads.checkpoint.shared_read import read_shards
from megads.checkpoint.store import on_first
from megads.config.frozen import config_of_start
from megads.config.identity import RECORDS, Change, changed_data, changed_keys, require_allowed_data
from megads.config.phases import parse_phases, phase_stream_starts, with_mixes
from megads.config.root import RootConfig, batch_size_schedule, config_at, run_spans
from megads.data.config import DataConfig
from megads.data.indexed.recorded import DataRecord, read_record, renamed_datasets
from megads.data.indexed.run_tokenizer import TokenizerRecord
from megads.data.sampling.blend import continued
from megads.data.sampling.datasets import train_weights
from megads.data.sampling.sampler import skips_of
from megads.engine.interface import Shard, TrainEngine
from megads.errors import CheckpointError, ConfigError
from megads.model.config import ModelConfig
from megads.model.gpt import initial_value
from megads.resilience.hooks import SavedState
from megads.resilience.rollbacks import pending_rollback
from megads.runtime.distributed import ControlPlane
from megads.runtime.hooks import TrainState
from megads.runtime.metrics import EventWriter, LedgerRecord, MetricsWriter
from megads.runtime.run_dir import recorded_config_path, recorded_data_path
from megads.runtime.url import is_url
from megads.train.run_context import RunContext


@dataclass(frozen=True)
class LoadSource:
    """The source of a start's weights.

    Attributes:
        checkpoint: verified checkpoint to resume from; None for a start at step 0.
        weights: weights of another run for a start at step 0; None for random initialization.
        from_path: whether the checkpoint is the path in checkpoint.load.
        skipped: later checkpoints that are not used, each with the reason.
    """

    checkpoint: CheckpointHandle | None
    weights: WeightSource | None
    from_path: bool
    skipped: tuple[str, ...] = ()

    @property
    def has_weights(self) -> bool:
        """Whether all weights are loaded, so that none need to be initialized."""
        return self.checkpoint is not None or self.weights is not None

    @property
    def samples(self) -> int:
        """Samples consumed so far."""
        return self.checkpoint.state["samples"] if self.checkpoint is not None else 0


def find_load_source(config: RootConfig, run_dir: Path, control: ControlPlane, local: LocalSaves | None) -> LoadSource:
    """Finds the source of the weights: the configured checkpoint, else the newest usable one of this run, else
    checkpoint.init_from. Collective.

    A path in checkpoint.load has precedence only once: the same command after a crash or a requeue must not discard the
    training since. With checkpoint.load=none only checkpoints saved after that start are used.

    Args:
        config: config of this start.
        run_dir: the run directory.
        control: control plane of all ranks.
        local: local checkpoints of this rank; None if they are off.

    Raises:
        CheckpointError: a checkpoint exists but is not usable, or is of another model.
        ConfigError: this config would not continue with the checkpoint's samples, or the weights are of another model.
        DataError: data or tokenizer differ from those of the checkpoint.
    """
    load = config.checkpoint.load
    from_path = on_first(control, lambda: loads_given_path(load, run_dir), bool)
    history = on_first(control, lambda: own_history(load, run_dir), History | None)
    not_used = list[str]()
    handle: CheckpointHandle | None = None
    if local is not None:
        local.open(run_dir, control, history or EVERYTHING)
        if not from_path and history is not None:
            not_used, handle = local.find(), local.base
    if handle is None and history is not None:
        handle = find_checkpoint(run_dir, load if from_path else "auto", control, history)
    if handle is None:
        given = config.checkpoint.init_from
        fetched = fetched_folder(given, run_dir) if given is not None and is_url(given) else None
        weights = None if given is None else open_source(given, control, fetched)
        return LoadSource(None, weights, from_path=False, skipped=tuple(not_used))
    check_model(handle, asdict(model_config_at(config, handle.state["samples"])))
    now = read_record(run_dir)
    if now is not None:
        # The launcher has checked the newest checkpoint; this one may be older.
        run_changes(_resume_point(handle.home, handle.folder, handle.manifest), config, now)
    return LoadSource(handle, None, from_path, skipped=(*not_used, *handle.skipped))


def resume(origin: LoadSource, run: RunContext, engine: TrainEngine, state: TrainState) -> None:
    """Loads weights and state from the origin, and truncates the ledger to the same step.

    Raises:
        CheckpointError: a tensor is missing, or was damaged in the meantime.
        ConfigError: the weights are of another model.
    """
    config, run_dir, events, metrics = run.config, run.run_dir, run.events, run.metrics
    load, handle = config.checkpoint.load, origin.checkpoint
    if handle is None:
        if origin.skipped:
            events.write("fresh_start", level="warning", step=0, passed_by=list(origin.skipped))
        left = leaves_a_ledger(load, run_dir, run.environment.lease)
        continue_ledger(metrics, events, 0, keep_copy=left)
        if origin.weights is not None:
            load_initial_weights(origin.weights, config, engine, events)
        return

    def read(shards: list[Shard]) -> None:
        wanted = with_averages_from_weights(handle, shards)
        report = read_shards(handle, wanted, engine.grid, config.checkpoint.read)
        events.write("checkpoint_read", level="debug", step=handle.state["step"], **asdict(report))

    engine.load_shards(read, handle.optimizer_steps)
    state.load_state_dict(handle.state)
    events.write(
        "resume",
        step=state.step,
        checkpoint=handle.name,
        from_replicas=list(handle.from_replicas) if isinstance(handle, LocalCheckpoint) else [],
        note=load_path_note(origin, load, run_dir),
        passed_by=list(origin.skipped),
        software_differences=handle.software_differences(),
    )
    own = handle.home.absolute() == run_dir.absolute()
    known = handle.manifest.run.ledger if own else None
    left = origin.from_path or pending_rollback(run_dir) is not None
    continue_ledger(metrics, events, state.step, known, keep_copy=left)


def load_path_note(origin: LoadSource, load: str, run_dir: Path) -> str:
    """Returns a note on an effect of checkpoint.load that the user may not expect; empty if there is none."""
    assert origin.checkpoint is not None
    if origin.from_path:
        last = max(list_checkpoints(run_dir), default=0)
        if last > origin.checkpoint.state["step"]:
            return f"checkpoint.load={load}: the run's own later checkpoints, up to step {last}, are not used"
    elif load != "auto":
        return f"an earlier start loaded checkpoint.load={load}: this one resumes from a checkpoint saved after it"
    return ""


def load_initial_weights(source: WeightSource, config: RootConfig, engine: TrainEngine, events: EventWriter) -> None:
    """Loads the weights of another run into a new run; optimizer state and counters are not loaded."""
    # The launcher has checked the newest checkpoint; this one may be older or newer.
    adapted = source.check_model(config.model)
    fresh = initial_value(config.model, config.train.seed)
    engine.load_shards(lambda shards: read_weights(source, shards, fresh), optimizer_steps=0)
    events.write(
        "init_from",
        step=0,
        source=source.path,
        checkpoint=str(source.handle.folder),
        source_step=source.step,
        manifest_digest=source.handle.manifest.digest(),
        adapted=adapted,
        passed_by=list(source.handle.skipped),
    )


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that a start resumes from, by its manifest; the ranks verify its tensors.

    Attributes:
        run_dir: directory of the run that wrote the checkpoint.
        folder: folder of the checkpoint.
        manifest: manifest of the checkpoint.
        config: config of the start that wrote it; None if it was not kept.
        data: record of that start's data; None if there is none.
    """

    run_dir: Path
    folder: Path
    manifest: Manifest
    config: RootConfig | None
    data: DataRecord | None

    @property
    def samples(self) -> int:
        """Samples consumed so far."""
        return self.manifest.run.state["samples"]

    @property
    def tokenizer(self) -> TokenizerRecord | None:
        """Tokenizer of the run; None if an earlier version wrote the checkpoint, see `DataRecord.tokenizer_sha256`."""
        return self.manifest.run.tokenizer or (self.data.tokenizer if self.data is not None else None)

    @property
    def lost_records(self) -> str:
        """The records of the start that wrote the checkpoint whose digests it holds, but which are gone; empty if there
        are none. Without them it is not known whether this start continues with the same samples."""
        run = self.manifest.run
        lost = [] if self.config is not None else [recorded_config_path(self.run_dir, run.config_digest)]
        digest = run.data_digest
        if digest is not None and (self.data is None or self.data.digest != digest):
            kept = recorded_data_path(self.run_dir, digest)
            lost += [] if kept.is_file() else [kept]
        return " and ".join(str(path.relative_to(self.run_dir)) for path in lost)

    def check_model(self, config: RootConfig) -> None:
        """Raises CheckpointError if the checkpoint is of another model."""
        check_model(CheckpointHandle(self.folder, self.manifest), asdict(model_config_at(config, self.samples)))


def model_config_at(config: RootConfig, samples: int) -> ModelConfig:
    """Returns the model config of the training phase that trained the last of the first `samples` samples."""
    return config_at(config, max(samples - 1, 0)).model


def find_resume_point(load: str, run_dir: Path) -> ResumePoint | None:
    """Finds the checkpoint that a start most likely resumes from; the ranks skip it if it is damaged.

    Args:
        load: value of checkpoint.load.
        run_dir: the run directory, which need not exist.

    Returns:
        The checkpoint; None for a start at step 0.

    Raises:
        CheckpointError: the path in checkpoint.load is not a checkpoint.
        DataError: the record of its data is damaged.
    """
    if load == "none" and not continues_fresh_start(run_dir):
        return None
    if loads_given_path(load, run_dir):
        folder = given_folder(Path(load))
        return _resume_point(folder.parent.parent, folder, read_manifest(folder))
    history = own_history(load, run_dir)
    newest = newest_manifest(run_dir, history) if history is not None else None
    return None if newest is None else _resume_point(run_dir, step_folder(run_dir, newest.run.state["step"]), newest)


def find_resume_point_in_memory(root: Path, run_dir: Path) -> ResumePoint | None:
    """Finds the newest local checkpoint on this node, for a run without a checkpoint on disk.

    Args:
        root: value of checkpoint.local_folder.
        run_dir: the run directory.

    Returns:
        The checkpoint; None if there is none, or if it belongs to a run directory that no longer exists.
    """
    newest = newest_in_memory(root, run_dir)
    past = None if newest is None else _resume_point(run_dir, node_folder(root, run_dir), newest)
    return past if past is not None and past.config is not None else None


def _resume_point(home: Path, folder: Path, manifest: Manifest) -> ResumePoint:
    config = config_of_start(home, manifest.run.config_digest)
    return ResumePoint(home, folder, manifest, config, read_record(home, manifest.run.data_digest))


def continue_data(config: RootConfig, past: ResumePoint, now: DataRecord) -> RootConfig:
    """Returns the config with the data mixes of earlier starts added.

    Args:
        config: config of this start; its samples continue those already trained.
        past: checkpoint that the start resumes from.
        now: record of this start's data.

    Raises:
        ConfigError: the mix changes, and a dataset occurs twice.
    """
    before = past.config
    if before is None or past.samples == 0:
        return config
    skips = skips_of(config.data.skip, batch_size_schedule(config))
    end = int(skips.apply(np.array([past.samples - 1]))[0]) + 1
    moved = set(config.data.paths) - set(before.data.paths)
    renamed = renamed_datasets(past.data, now) if moved else {}
    data = continued(_with_mixes(config), _with_mixes(before), end, train_weights, renamed)
    return replace(config, data=replace(data, phases=config.data.phases))


def _with_mixes(config: RootConfig) -> DataConfig:
    """The config section `data` with the mixes of the run's training phases."""
    starts = phase_stream_starts(run_spans(config), skips_of(config.data.skip, batch_size_schedule(config)))
    return with_mixes(config.data, parse_phases(config.train.phases), starts)


def loads_given_path(load: str, run_dir: Path) -> bool:
    """Whether checkpoint.load is a path that the run's newest checkpoint was not trained from.

    The newest checkpoint was trained from it if the config of the start that wrote it has the same path.

    Args:
        load: value of checkpoint.load.
        run_dir: the run directory.
    """
    if load in ("auto", "none"):
        return False
    newest = newest_manifest(run_dir)
    start = config_of_start(run_dir, newest.run.config_digest) if newest is not None else None
    return start is None or Path(start.checkpoint.load).absolute() != Path(load).absolute()


def newest_up_to(run_dir: Path, step: int) -> SavedState | None:
    """Returns the newest checkpoint of the run up to a step, for a rollback; the next start verifies it.

    Args:
        run_dir: the run directory.
        step: last step that the checkpoint may include.
    """
    history = recorded_history(run_dir) or EVERYTHING
    for at, folder in reversed(list_checkpoints(run_dir).items()):
        if at <= step and history.has(folder, read_sequence(folder)):
            with suppress(CheckpointError):
                return SavedState(at, folder.name, read_manifest(folder).digest())
    return None


def continue_ledger(
    metrics: MetricsWriter, events: EventWriter, step: int, known: LedgerRecord | None = None, *, keep_copy: bool
) -> None:
    """Truncates the ledger to a step, see `MetricsWriter.drop_after`; reports damaged or moved parts as an event."""
    if dropped := metrics.steps_after(step):
        first, last = dropped[0], dropped[-1]
        events.write(
            "steps_dropped",
            level="debug",
            step=step,
            last_step=last["step"],
            last_time=last.get("time"),
            # The run leaves its own history: it need not repeat these steps.
            left=keep_copy,
            # Time spent between the last step that is kept and the first that is dropped.
            validate_s=first.get("validate_time_s", 0.0) if first["step"] == step + 1 else 0.0,
            save_s=first.get("save_time_s", 0.0) if first["step"] == step + 1 else 0.0,
        )
    note = metrics.drop_after(step, known, keep_copy)
    if note:
        events.write("ledger", level="warning", step=step, message=note)


def run_changes(past: ResumePoint, config: RootConfig, now: DataRecord) -> list[Change]:
    """Returns the changes of a run's identity (samples, initial weights, data, tokenizer) that run.allow_changes
    permits.

    Args:
        past: checkpoint that the run resumes from.
        config: config of this start.
        now: record of this start's data.

    Raises:
        ConfigError: a key that must not change has changed, or the records of this run that would show it are gone.
        DataError: the tokenizer or the data has changed.
    """
    allowed = config.run.allow_changes
    changes = [] if past.config is None else changed_keys(past.config, config, past.samples, allowed)
    if past.lost_records and past.run_dir == Path(str(config.run.dir)):
        if RECORDS not in allowed:
            raise ConfigError(
                f"{past.run_dir} has no {past.lost_records} anymore, which the start wrote whose checkpoint would be "
                "continued: whether the data and the settings are the same cannot be checked. Restore the folder "
                f"configs, or go on without the check with run.allow_changes=[{RECORDS}]"
            )
        changes.append(Change(RECORDS, past.lost_records, "not checked"))
    before = replace(past.data or DataRecord(()), tokenizer=past.tokenizer)
    found = changed_data(before, now)
    require_allowed_data(found, str(past.run_dir), allowed)
    return changes + found
