"""Where a start of a run goes on: which checkpoint, and what of the ledger."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from megads.checkpoint.config import list_checkpoints
from megads.checkpoint.manifest import Manifest, newest_manifest, read_manifest
from megads.checkpoint.read import CheckpointHandle, check_model, find_checkpoint, given_folder, read_into
from megads.checkpoint.store import on_first
from megads.config import RootConfig, batch_size_schedule, planned_steps
from megads.data.config import Order
from megads.data.indexed.dataset import idx_path
from megads.data.indexed.recorded import read_record, record_data, renamed_datasets
from megads.data.sampling.blend import continued
from megads.data.sampling.datasets import train_weights
from megads.data.sampling.sampler import require_same_past, skips_of
from megads.engine.interface import TrainEngine
from megads.errors import ConfigError
from megads.frozen_config import config_of_start
from megads.runtime.hooks import TrainState
from megads.runtime.metrics import EventWriter, LedgerRecord, MetricsWriter


def resume(
    config: RootConfig,
    run_dir: Path,
    engine: TrainEngine,
    state: TrainState,
    events: EventWriter,
    metrics: MetricsWriter,
) -> None:
    """Continues from the checkpoint that the config names, else from the newest usable one of this run, else afresh.

    A path in checkpoint.load goes first, once: the same command after a crash or a requeue must not throw away what
    came after. The ledger goes on from the same step.

    Raises:
        CheckpointError: a checkpoint is there but cannot be used.
        ConfigError: data.skip changes what it was trained on.
    """
    load, control, note = config.checkpoint.load, engine.grid.control, ""
    to_path = on_first(control, lambda: goes_to_path(load, run_dir), bool)
    handle = find_checkpoint(run_dir, load if to_path or load == "none" else "auto", control)
    if handle is None:
        continue_ledger(metrics, events, 0, keep_copy=load == "none")
        return
    check_model(handle, asdict(config.model))
    require_skips_ahead(config, handle)
    if to_path:
        later = [step for step in list_checkpoints(run_dir) if step > handle.state["step"]]
        if later:
            note = f"checkpoint.load={load}: what the run has saved itself, up to step {later[-1]}, is left behind"
    elif load != "auto":
        note = f"an earlier start went on from checkpoint.load={load}: this one takes what came after it"
    engine.load_shards(lambda shards: read_into(handle, shards), handle.optimizer_steps)
    state.load_state_dict(handle.state)
    events.write(
        "resume",
        step=state.step,
        checkpoint=handle.folder.name,
        note=note,
        passed_by=list(handle.passed_by),
        software_differences=handle.software_differences(),
    )
    own = handle.folder.parent.parent == run_dir.absolute()
    continue_ledger(metrics, events, state.step, handle.manifest.run.ledger if own else None, keep_copy=to_path)


def continue_data(config: RootConfig, run_dir: Path) -> RootConfig:
    """Returns the config with the mixes of datasets that the run had before, if it goes on.

    Args:
        config: of this start.
        run_dir: the run's folder, which need not exist.

    Raises:
        CheckpointError: checkpoint.load names none.
        ConfigError: a change under which what comes could not follow what was trained, or a history of the user's.
        DataError: a dataset is missing or damaged.
    """
    if config.data.history:
        raise ConfigError(
            f"data.history has {len(config.data.history)} mixes: megads train itself fills it in when a run goes on; "
            "leave it out, and give data.phases to change the mix at a sample"
        )
    load, home = config.checkpoint.load, run_dir
    manifest: Manifest | None
    if goes_to_path(load, run_dir):
        folder = given_folder(Path(load))
        home, manifest = folder.parent.parent, read_manifest(folder)
    else:
        manifest = newest_manifest(run_dir) if load != "none" else None
    if manifest is None or manifest.run.state["samples"] == 0:
        return config
    before = config_of_start(home, manifest.run.config_digest)
    if before is None:
        return config
    samples = manifest.run.state["samples"]
    require_same_stream(before, config, samples)
    if not all(idx_path(path).exists() for path in config.data.paths):
        return config  # data.raw is not prepared yet, or somebody else will say what is missing
    skips = skips_of(config.data.skip, batch_size_schedule(config))
    end = int(skips.apply(np.array([samples - 1]))[0]) + 1
    moved = set(config.data.paths) - set(before.data.paths)
    renamed = renamed_datasets(read_record(home), record_data(config.data)) if moved else {}
    return replace(config, data=continued(config.data, before.data, end, train_weights, renamed))


def require_same_stream(before: RootConfig, now: RootConfig, samples: int) -> None:
    """Refuses settings under which the samples to come could not follow those that were trained.

    Raises:
        ConfigError: names the key and both values.
    """

    def settings(config: RootConfig) -> dict[str, object]:
        data, train = config.data, config.train
        found: dict[str, object] = {
            "train.seed": train.seed,
            "train.seq_len": train.seq_len,
            "data.order": data.order.value,
            "data.packing": data.packing.value,
            "data.split": list(data.split) if not data.valid_paths else "none, as data.valid is set",
        }
        if data.order is Order.megatron:
            found["data.megatron_theta"] = data.megatron_theta
            found["data.train"] = [(item.path, item.weight) for item in data.train]
            planned = batch_size_schedule(config).samples_after(planned_steps(config))
            found["train.steps (samples of the whole run, which Megatron's order depends on)"] = planned
        return found

    past, wanted = settings(before), settings(now)
    for key in wanted:
        if key in past and past[key] != wanted[key]:
            raise ConfigError(
                f"{key} = {wanted[key]}, but the run was trained with {past[key]} up to sample {samples}: what comes "
                "would not follow that, some samples would be repeated and others lost. Go back to that value, or "
                "start a new run with another run.id"
            )


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


def continue_ledger(
    metrics: MetricsWriter, events: EventWriter, step: int, known: LedgerRecord | None = None, *, keep_copy: bool
) -> None:
    """Cuts the ledger back to a step, see `MetricsWriter.drop_after`; what is damaged or put aside becomes an event."""
    note = metrics.drop_after(step, known, keep_copy)
    if note:
        events.write("ledger", level="warning", step=step, message=note)


def require_skips_ahead(config: RootConfig, handle: CheckpointHandle) -> None:
    """Refuses a data.skip that changes which samples a checkpoint was trained on.

    Raises:
        ConfigError: it would shift what comes after.
    """
    before = config_of_start(handle.folder.parent.parent, handle.manifest.run.config_digest)
    if before is not None:
        past, now = (skips_of(some.data.skip, batch_size_schedule(some)) for some in (before, config))
        require_same_past(past, now, handle.state["samples"])
