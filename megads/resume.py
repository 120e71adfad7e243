"""Where a start of a run goes on: which checkpoint, and what of the ledger."""

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
from megads.config import RootConfig, batch_size_schedule, config_at, run_spans
from megads.data.config import DataConfig
from megads.data.indexed.recorded import DataRecord, read_record, renamed_datasets
from megads.data.indexed.run_tokenizer import TokenizerRecord
from megads.data.sampling.blend import continued
from megads.data.sampling.datasets import train_weights
from megads.data.sampling.sampler import skips_of
from megads.engine.interface import Shard, TrainEngine
from megads.errors import CheckpointError
from megads.frozen_config import config_of_start
from megads.identity import Change, changed_data, changed_keys, require_allowed_data
from megads.model.config import ModelConfig
from megads.resilience.hooks import SavedState
from megads.resilience.rollbacks import pending_rollback
from megads.runtime.distributed import ControlPlane
from megads.runtime.environment import rank_environment
from megads.runtime.hooks import TrainState
from megads.runtime.metrics import EventWriter, LedgerRecord, MetricsWriter
from megads.runtime.url import is_url
from megads.stages import parse_stages, stream_starts, with_mixes


@dataclass(frozen=True)
class Origin:
    """Where a start takes its weights from.

    Attributes:
        checkpoint: that it continues, verified; None for a start at step 0.
        weights: of another run, for a start at step 0; None draws them.
        from_path: the checkpoint is the one that checkpoint.load names.
        passed_by: later checkpoints that are not used, each with its reason.
    """

    checkpoint: CheckpointHandle | None
    weights: WeightSource | None
    from_path: bool
    passed_by: tuple[str, ...] = ()

    @property
    def gives_weights(self) -> bool:
        """Whether every weight is read, so that none need be drawn."""
        return self.checkpoint is not None or self.weights is not None

    @property
    def samples(self) -> int:
        """Consumed so far."""
        return self.checkpoint.state["samples"] if self.checkpoint is not None else 0


def find_origin(config: RootConfig, run_dir: Path, control: ControlPlane, local: LocalSaves | None = None) -> Origin:
    """Finds the checkpoint that the config names, else the newest usable one of this run, else weights; collective.

    A path in checkpoint.load goes first, once: the same command after a crash or a requeue must not throw away what
    came after. With checkpoint.load=none only what came after that start counts.

    Args:
        config: of this start.
        run_dir: the run's folder.
        control: of all ranks.
        local: this rank's local checkpoints; None: it has none.

    Raises:
        CheckpointError: a checkpoint is there but cannot be used, or is of another model.
        ConfigError: its samples are not those that this config goes on with, or weights are of another model.
        DataError: its data or its tokenizer is another one.
    """
    load = config.checkpoint.load
    from_path = on_first(control, lambda: goes_to_path(load, run_dir), bool)
    history = on_first(control, lambda: own_history(load, run_dir), History | None)
    handle: CheckpointHandle | None = None
    not_used: list[str] = []
    if local is not None:
        local.open(run_dir, control, history or EVERYTHING)
        if not from_path and history is not None:
            not_used = local.find()
            handle = local.base
    if handle is None and history is not None:
        handle = find_checkpoint(run_dir, load if from_path else "auto", control, history)
    if handle is None:
        given = config.checkpoint.init_from
        fetched = fetched_folder(given, run_dir) if given is not None and is_url(given) else None
        weights = None if given is None else open_source(given, control, fetched)
        return Origin(None, weights, from_path=False, passed_by=tuple(not_used))
    check_model(handle, asdict(trained_model(config, handle.state["samples"])))
    now = read_record(run_dir)
    if now is not None:
        # The launcher has looked at the newest one; this one may be older.
        changes_of_run(_past(handle.home, handle.folder, handle.manifest), config, now)
    return Origin(handle, None, from_path, passed_by=(*not_used, *handle.passed_by))


def resume(
    origin: Origin,
    config: RootConfig,
    run_dir: Path,
    engine: TrainEngine,
    state: TrainState,
    events: EventWriter,
    metrics: MetricsWriter,
) -> None:
    """Reads weights and state from where they come from; the ledger goes on from the same step.

    Raises:
        CheckpointError: a tensor is missing, or was damaged meanwhile.
        ConfigError: weights are of another model.
    """
    load, handle = config.checkpoint.load, origin.checkpoint
    if handle is None:
        if origin.passed_by:
            events.write("fresh_start", level="warning", step=0, passed_by=list(origin.passed_by))
        left = leaves_a_ledger(load, run_dir, rank_environment().lease)
        continue_ledger(metrics, events, 0, keep_copy=left)
        if origin.weights is not None:
            take_weights(origin.weights, config, engine, events)
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
        note=note_of_path(origin, load, run_dir),
        passed_by=list(origin.passed_by),
        software_differences=handle.software_differences(),
    )
    own = handle.home.absolute() == run_dir.absolute()
    known = handle.manifest.run.ledger if own else None
    left = origin.from_path or pending_rollback(run_dir) is not None
    continue_ledger(metrics, events, state.step, known, keep_copy=left)


def note_of_path(origin: Origin, load: str, run_dir: Path) -> str:
    """What a user who gave checkpoint.load might not expect."""
    assert origin.checkpoint is not None
    if origin.from_path:
        last = max(list_checkpoints(run_dir), default=0)
        if last > origin.checkpoint.state["step"]:
            return f"checkpoint.load={load}: what the run has saved itself, up to step {last}, is left behind"
    elif load != "auto":
        return f"an earlier start went on from checkpoint.load={load}: this one takes what came after it"
    return ""


def take_weights(source: WeightSource, config: RootConfig, engine: TrainEngine, events: EventWriter) -> None:
    """Puts the weights of another run into a new one; optimizer and counters stay."""
    # The launcher has looked at the newest one; this one may be older, or newer.
    adapted = source.check_model(config.model)
    engine.load_shards(lambda shards: read_weights(source, shards), optimizer_steps=0)
    events.write(
        "init_from",
        step=0,
        source=source.path,
        checkpoint=str(source.handle.folder),
        source_step=source.step,
        manifest_digest=source.handle.manifest.digest(),
        adapted=adapted,
        passed_by=list(source.handle.passed_by),
    )


@dataclass(frozen=True)
class Past:
    """What a start goes on from, as far as a manifest tells: its tensors are for the ranks to verify.

    Attributes:
        run_dir: of the run that wrote the checkpoint.
        folder: the checkpoint.
        manifest: what it holds.
        config: of the start that wrote it; None where that was not kept.
        data: what the data of that start held; None where that was not recorded.
    """

    run_dir: Path
    folder: Path
    manifest: Manifest
    config: RootConfig | None
    data: DataRecord | None

    @property
    def samples(self) -> int:
        """Consumed so far."""
        return self.manifest.run.state["samples"]

    @property
    def tokenizer(self) -> TokenizerRecord | None:
        """Of the run; None where an earlier version wrote the checkpoint, see `DataRecord.tokenizer_sha256`."""
        return self.manifest.run.tokenizer or (self.data.tokenizer if self.data is not None else None)

    def check_model(self, config: RootConfig) -> None:
        """Raises CheckpointError where the checkpoint is of another model."""
        check_model(CheckpointHandle(self.folder, self.manifest), asdict(trained_model(config, self.samples)))


def trained_model(config: RootConfig, samples: int) -> ModelConfig:
    """Returns the model of the training stage that trained the last of so many samples."""
    return config_at(config, max(samples - 1, 0)).model


def find_past(load: str, run_dir: Path) -> Past | None:
    """Finds the checkpoint that a start will most likely go on from; the ranks pass by one that is damaged.

    Args:
        load: checkpoint.load.
        run_dir: the run's folder, which need not exist.

    Returns:
        None for a start from nothing.

    Raises:
        CheckpointError: checkpoint.load is a path that names none.
        DataError: the record of its data is damaged.
    """
    if load == "none" and not continues_fresh_start(run_dir):
        return None
    if goes_to_path(load, run_dir):
        folder = given_folder(Path(load))
        return _past(folder.parent.parent, folder, read_manifest(folder))
    history = own_history(load, run_dir)
    newest = newest_manifest(run_dir, history) if history is not None else None
    return None if newest is None else _past(run_dir, step_folder(run_dir, newest.run.state["step"]), newest)


def find_past_in_memory(root: Path, run_dir: Path) -> Past | None:
    """Finds what a run without a checkpoint on disk has trained, as local checkpoints on this node tell.

    Args:
        root: checkpoint.local_folder.
        run_dir: the run's folder.

    Returns:
        None where there is nothing, or what is there is of a run directory that is gone.
    """
    newest = newest_in_memory(root, run_dir)
    past = None if newest is None else _past(run_dir, node_folder(root, run_dir), newest)
    return past if past is not None and past.config is not None else None


def _past(home: Path, folder: Path, manifest: Manifest) -> Past:
    config = config_of_start(home, manifest.run.config_digest)
    return Past(home, folder, manifest, config, read_record(home, manifest.run.data_digest))


def continue_data(config: RootConfig, past: Past, now: DataRecord) -> RootConfig:
    """Returns the config with the mixes of datasets that the run had before.

    Args:
        config: of this start; its samples continue those that were trained.
        past: what it goes on from.
        now: what its data holds.

    Raises:
        ConfigError: the mix changes, and a dataset is there twice.
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
    """The section `data` with the mixes of the run's training stages."""
    starts = stream_starts(run_spans(config), skips_of(config.data.skip, batch_size_schedule(config)))
    return with_mixes(config.data, parse_stages(config.train.stages), starts)


def goes_to_path(load: str, run_dir: Path) -> bool:
    """Whether checkpoint.load is a path that the run's newest checkpoint was not trained from.

    The config of the start that wrote it says so: it had the same path.

    Args:
        load: checkpoint.load.
        run_dir: the run's folder.
    """
    if load in ("auto", "none"):
        return False
    newest = newest_manifest(run_dir)
    start = config_of_start(run_dir, newest.run.config_digest) if newest is not None else None
    return start is None or Path(start.checkpoint.load).absolute() != Path(load).absolute()


def saved_up_to(run_dir: Path, step: int) -> SavedState | None:
    """Returns the newest checkpoint of the run of at most this step, for a rollback; the start verifies it.

    Args:
        run_dir: the run's folder.
        step: the last one that may be in it.
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
    """Cuts the ledger back to a step, see `MetricsWriter.drop_after`; what is damaged or put aside becomes an event."""
    if dropped := metrics.steps_after(step):
        first, last = dropped[0], dropped[-1]
        events.write(
            "steps_dropped",
            level="debug",
            step=step,
            last_step=last["step"],
            last_time=last.get("time"),
            # What came between the last step that is kept and the first that is not.
            validate_s=first.get("validate_time_s", 0.0) if first["step"] == step + 1 else 0.0,
            save_s=first.get("save_time_s", 0.0) if first["step"] == step + 1 else 0.0,
        )
    note = metrics.drop_after(step, known, keep_copy)
    if note:
        events.write("ledger", level="warning", step=step, message=note)


def changes_of_run(past: Past, config: RootConfig, now: DataRecord) -> list[Change]:
    """Lists what changes of that by which a run is the same run; run.allow_changes allows all of it.

    Args:
        past: what the run goes on from.
        config: of this start.
        now: what its data holds.

    Raises:
        ConfigError: a key that may not change does.
        DataError: the tokenizer or the data does.
    """
    allowed = config.run.allow_changes
    changes = [] if past.config is None else changed_keys(past.config, config, past.samples, allowed)
    before = replace(past.data or DataRecord(()), tokenizer=past.tokenizer)
    found = changed_data(before, now)
    require_allowed_data(found, str(past.run_dir), allowed)
    return changes + found
