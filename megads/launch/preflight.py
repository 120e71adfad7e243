"""Resolves a run before its ranks start (name, folder, data, layout on this machine) and refuses an invalid one."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megads.checkpoint.config import checkpoints_folder, named_by_latest, step_of
from megads.config.frozen import derive_run_id, load_frozen
from megads.config.root import (
    RootConfig,
    batch_size_schedule,
    check_attention,
    check_schedule,
    for_each_phase,
    open_run_data,
    planned_steps,
    run_spans,
    unstaged,
)
from megads.data.config import DatasetConfig
from megads.data.tokenizer_config import Engine
from megads.errors import CheckpointError, ConfigError, DataError, StopRequested
from megads.launch.initial_weights import find_initial_weights, with_tokenizer_of_weights
from megads.launch.node_ranks import require_devices
from megads.launch.object_storage import object_storage, with_local_load
from megads.launch.run_length import resolve_length
from megads.launch.slurm_ranks import SlurmPlacement
from megads.monitor.console import Console
from megads.monitor.trackers import enabled_trackers
from megads.ops.config import Kernels
from megads.ops.resolve import choose
from megads.runtime import environment
from megads.runtime.config import ClusterKind
from megads.runtime.optional_tools import require_tool
from megads.runtime.run_dir import CONFIG_FILE
from megads.runtime.stop import REQUESTED, read_stop, stop_path
from megads.runtime.url import is_url

if TYPE_CHECKING:
    from megads.checkpoint.initial import WeightSource
    from megads.launch.external_ranks import JobRendezvous
    from megads.launch.layout import Machine
    from megads.launch.raw_text import TextPreparation

_GROUP_WRITABLE = 0o2775


@dataclass(frozen=True)
class PlannedData:
    """A run's data, prepared or not.

    Attributes:
        text: one-line description of the data.
        preparation: preparation of data.raw; None for a dataset that the user supplied.
        vocab_size: vocabulary size, or its maximum for a tokenizer that is still to be trained; None if unknown.
        made: whether all of the data is prepared.
    """

    text: str
    preparation: TextPreparation | None = None
    vocab_size: int | None = None
    made: bool = False

    def planned(self, config: RootConfig) -> RootConfig:
        """Returns the config with the vocabulary size, if known, so that memory and FLOPs can be planned."""
        return config if self.vocab_size is None else _with_vocabulary(config, self.vocab_size)

    def exactly_known(self, config: RootConfig) -> RootConfig:
        """Returns the config with the vocabulary size if it is certain before the data is prepared."""
        learns = self.preparation is not None and self.preparation.tokenizer_content is None and not self.made
        return config if learns else self.planned(config)


@dataclass(frozen=True)
class ResolvedRun:
    """A run as it will start: the requested and the resolved config.

    Attributes:
        asked: the config as composed.
        config: the config with run.id, run.dir, the dataset and an explicit layout. `prepare_data` adds the vocabulary
            size and the length, `accept_start` the data mixes of earlier starts; then it is frozen for the ranks.
        data: the run's data.
        machine: machine that the ranks run on.
        placement: nodes of the ranks in a SLURM job; None for this machine.
        choices: lines that explain how the layout and the starting point were chosen.
        made: fields of the event about the prepared data; None if the user supplied the dataset.
        weights: weights of another run to start from; None for random initialization and for a resumed run.
        meeting: the processes that a platform started as the ranks; None if the launcher starts the ranks.
    """

    asked: RootConfig
    config: RootConfig
    data: PlannedData
    machine: Machine
    placement: SlurmPlacement | None = None
    choices: tuple[str, ...] = ()
    made: Mapping[str, Any] | None = None
    weights: WeightSource | None = None
    meeting: JobRendezvous | None = None

    @property
    def run_dir(self) -> Path:
        return Path(str(self.config.run.dir))

    @property
    def planned(self) -> RootConfig:
        """The config with the vocabulary size for which memory and FLOPs are planned before the data is prepared."""
        return self.data.planned(self.config)


def resolve_run(
    asked: RootConfig,
    choices: Mapping[str, str | None],
    placement: SlurmPlacement | None = None,
    meeting: JobRendezvous | None = None,
) -> ResolvedRun:
    """Resolves what the config leaves open; creates and writes nothing.

    Args:
        asked: checked config.
        choices: selected option of each config group.
        placement: nodes of the SLURM job; None for this machine.
        meeting: the processes that a platform started as the ranks.

    Raises:
        MegadsError: the data or the initial weights are missing or do not fit.
    """
    # Imports torch, which would delay shell completion.
    from megads.config.identity import check_allowed
    from megads.launch.layout import resolve_auto, this_machine

    check_allowed(asked.run.allow_changes)
    object_storage(asked)  # refuses a URL without the tool
    _refuse_history(asked)
    _refuse_replicas(asked, placement, meeting)
    config, data = locate_data(asked)
    config = with_local_load(with_decay_start(place(config, choices)))
    weights, beginning = find_initial_weights(config, data.exactly_known(config).model)
    # Read once: a layout chosen to fit must not be refused because another process allocates memory meanwhile.
    nodes = len(placement.nodes) if placement else meeting.num_machines if meeting else 1
    machine = this_machine(nodes, config.cluster.ranks_per_gpu)
    known, reasons = resolve_auto(data.planned(config), machine)
    # The run was named before this choice, which may differ when the same command is run again.
    config = dataclasses.replace(config, parallel=known.parallel, engine=known.engine, ops=known.ops)
    if data.made and known.model.vocab_size is not None:
        settled, told = resolve_length(data.planned(config))
        config = dataclasses.replace(config, train=settled.train)
        reasons = [*reasons, *([told] if told else [])]
    return ResolvedRun(
        asked, config, data, machine, placement, (*beginning, *reasons), weights=weights, meeting=meeting
    )


def _refuse_history(config: RootConfig) -> None:
    if config.data.history:
        raise ConfigError(
            f"data.history has {len(config.data.history)} mixes: megads train itself fills it in when a run resumes; "
            "leave it out, and give data.phases to change the mix at a sample"
        )


def _refuse_replicas(config: RootConfig, placement: SlurmPlacement | None, meeting: JobRendezvous | None) -> None:
    if not config.checkpoint.replicate:
        return
    require_tool("remote.replicas", "checkpoint.replicate=true")
    if meeting is not None:
        raise ConfigError(
            f"checkpoint.replicate = true with ranks that {meeting.me.source} started: a platform may restart them on "
            "other machines, which do not hold the copies; set checkpoint.replicate=false, or use cluster=slurm"
        )
    # The nodes may be unknown when a SLURM job is planned or prepared from outside.
    unknown = placement is None and config.cluster.kind is ClusterKind.slurm
    if not unknown and (placement is None or len(placement.nodes) == 1):
        raise ConfigError(
            "checkpoint.replicate = true, but all ranks are on one node: there is no other to hold a copy of its local "
            "checkpoints. They survive a crash without it: set checkpoint.replicate=false, or use two nodes or more"
        )


def place(config: RootConfig, choices: Mapping[str, str | None]) -> RootConfig:
    """Returns the config with run.id and run.dir filled in.

    Args:
        config: config as composed.
        choices: selected option of each config group; the run is named after the experiment, else after the model.
    """
    name = config.run.name or choices.get("experiment") or choices.get("model") or "run"
    run_id = config.run.id or derive_run_id(config, name.replace("/", "-"))
    run_dir = config.run.dir or f"runs/{run_id}"
    return dataclasses.replace(config, run=dataclasses.replace(config.run, id=run_id, dir=run_dir))


def with_decay_start(config: RootConfig) -> RootConfig:
    """Returns the config with schedule.decay_from resolved: the start of the decay, and the checkpoint to load.

    Raises:
        CheckpointError: the checkpoint does not exist.
        ConfigError: another key contradicts it.
    """
    given, load, wanted = config.schedule.decay_from, config.checkpoint.load, config.schedule.decay_start_samples
    if given is None:
        return config
    if is_url(given):
        raise ConfigError(
            f"schedule.decay_from = {given}: must be a folder; fetch it first with `megads checkpoint download`"
        )
    if load not in ("auto", given):
        raise ConfigError(
            f"schedule.decay_from = {given} continues that checkpoint, but checkpoint.load = {load}: leave it out"
        )
    start = _decided_start(config)
    if start is None:
        if not Path(given).is_dir():
            raise CheckpointError(f"schedule.decay_from = {given}: there is no such folder")
        # Imports torch, which would delay shell completion.
        from megads.checkpoint.manifest import read_manifest
        from megads.checkpoint.read import given_folder

        start = int(read_manifest(given_folder(Path(given))).run.state["samples"])
    if wanted not in (None, start):
        raise ConfigError(
            f"schedule.decay_start_samples = {wanted}, but schedule.decay_from = {given} has {start} samples: give one"
        )
    schedule = dataclasses.replace(config.schedule, decay_start_samples=start)
    checkpoint = dataclasses.replace(config.checkpoint, load=given)
    found = dataclasses.replace(config, schedule=schedule, checkpoint=checkpoint)
    # A decay that starts at or after its end would silently keep the peak learning rate.
    check_schedule(found)
    return found


def _decided_start(config: RootConfig) -> int | None:
    """Start of the decay in an earlier start of the run: its checkpoint may be deleted or no longer the newest."""
    try:
        before = load_frozen(Path(str(config.run.dir)) / CONFIG_FILE, complete=False).schedule
    except ConfigError:
        return None
    return before.decay_start_samples if before.decay_from == config.schedule.decay_from else None


def check_before_start(run: ResolvedRun) -> None:
    """Refuses a run that cannot work, before text is prepared, a run directory created or a rank started.

    Raises:
        StopRequested: a user has stopped the run.
        ConfigError: there are too few GPUs, a tracker is not installed, requested kernels are not available, an
            evaluation task does not exist, or the run does not fit the machine's memory.
        DataError: the dataset, or that of a task, is missing, damaged or too small.
    """
    from megads.launch.layout import run_planner

    refuse_stopped_run(run.config)
    if run.placement is None and run.meeting is None and environment.rehearsal_folder() is None:
        ranks_per_gpu = run.config.cluster.ranks_per_gpu
        require_devices(run.config.parallel.world_size, "parallel.tp * cp * pp * dp", ranks_per_gpu)
    enabled_trackers(run.config.logging)
    if run.config.logging.memory_snapshot and not run.machine.per_gpu:
        raise ConfigError(
            "logging.memory_snapshot = true records GPU memory, but the ranks compute on the CPU: remove it"
        )
    chosen_kernels(run.config, run.machine)
    run_planner().refuse_unfit(run.planned, run.machine)
    if run.config.evaluation.tasks:
        require_tool("evaluate.task_hook", "evaluation.tasks").require_tasks(run.config.evaluation)
    if run.data.preparation is None:
        require_data(run.config)


def chosen_kernels(config: RootConfig, machine: Machine) -> Kernels:
    """Returns the implementation of the operators that the run would use.

    Args:
        config: config of the run.
        machine: machine that the ranks would run on.

    Raises:
        ConfigError: requested kernels, or a requested kind of attention, are not available on that machine.
    """
    for_each_phase(config, lambda of_phase: check_attention(of_phase, cuda=machine.per_gpu))
    return choose(config.ops, cuda=machine.per_gpu, optimizer=config.optim.impl)


def refuse_stopped_run(config: RootConfig) -> None:
    """Refuses a run that a user has stopped and not released; creates the folder of run.kill_switch.

    Raises:
        StopRequested: a file that stops the run exists.
        ConfigError: the folder of run.kill_switch cannot be created.
    """
    if config.run.kill_switch is not None:
        _make_reachable(Path(config.run.kill_switch).parent)
    found = stopping_files(config)
    if found:
        raise StopRequested(f"the run is stopped by {found[0]}, nothing was started: remove the file to go on")


def stopping_files(config: RootConfig) -> list[Path]:
    """Returns the files with which a user stopped the run; each of them prevents it from starting."""
    run_dir = Path(str(config.run.dir))
    found = [stop_path(run_dir)] if read_stop(run_dir) == REQUESTED else []
    if config.run.kill_switch is not None and Path(config.run.kill_switch).exists():
        found.append(Path(config.run.kill_switch))
    return found


def _make_reachable(folder: Path) -> None:
    """Creates the folder with write permission for the group, so that each member can create the file."""
    if folder.is_dir():
        return
    try:
        folder.mkdir(parents=True)
        folder.chmod(_GROUP_WRITABLE)
    except OSError as error:
        raise ConfigError(
            f"run.kill_switch: the folder {folder} cannot be created ({error.strerror}): create it, or use another"
        ) from error


def locate_data(config: RootConfig) -> tuple[RootConfig, PlannedData]:
    """Determines where a run's data is, prepared or not, so that the run can be named after it; prepares nothing.

    Args:
        config: checked config.

    Returns:
        The config with data.train instead of data.raw, the prepared tokenizer's path, and model.vocab_size if the
        dataset already determines it; and the data.

    Raises:
        ConfigError: the tokenizer does not fit the config, or the vocabulary size is unknown.
        CheckpointError: the initial weights, whose tokenizer is to be used, do not exist.
        DataError: the text or the dataset does not exist.
    """
    from megads.data.indexed.dataset import idx_path
    from megads.data.indexed.stream import local_prefix, streamed_text
    from megads.launch.raw_text import plan_preparation

    config = with_tokenizer_of_weights(config)
    if config.data.raw is None:
        config = _with_dataset_vocabulary(config)
        missing = [path for path in config.data.paths if not idx_path(local_prefix(path, config.data.stream)).exists()]
        text = ", ".join(item.path for item in config.data.train) + streamed_text(config.data)
        if absent := [idx_path(path) for path in missing if not is_url(path)]:
            text += f"; {absent[0]} is not there: the run will be refused without it"
        return config, PlannedData(text, made=not missing)
    preparation = plan_preparation(config, _cache_dir(config))
    rows = config.model.vocab_size
    if rows is not None and rows < preparation.vocab_size:
        raise ConfigError(
            f"model.vocab_size = {rows} is below the {preparation.vocab_size} tokens of tokenizer.path = "
            f"{config.tokenizer.path}: set model.vocab_size=null, which takes the tokenizer's, or give another one"
        )
    data = dataclasses.replace(config.data, raw=None, train=[DatasetConfig(str(preparation.prefix))])
    # The ids do not depend on the tokenizer engine, and neither must the run's name.
    tokenizer = dataclasses.replace(
        config.tokenizer, path=str(preparation.tokenizer_file), vocab_size=None, engine=Engine.auto
    )
    return dataclasses.replace(config, data=data, tokenizer=tokenizer), _planned_data(preparation)


def _planned_data(preparation: TextPreparation) -> PlannedData:
    try:
        prepared = preparation.find()
    except DataError as error:
        text = f"{preparation.prefix}, would be made anew ({error}) from {preparation}"
        return PlannedData(text, preparation, preparation.vocab_size)
    if prepared is None:
        text = f"{preparation.prefix}, would be made from {preparation}"
        return PlannedData(text, preparation, preparation.vocab_size)
    text = f"{preparation.prefix}, made before: {prepared}"
    return PlannedData(text, preparation, prepared.sidecar.vocab_size, made=True)


def require_data(config: RootConfig) -> None:
    """Raises DataError if the data is missing, damaged or too small.

    Every rank opens the data too, but a mistyped path should be reported before the ranks start.
    """
    here = unstaged(config)
    for first_sample in trained_phases(config):
        open_run_data(here, at_sample=first_sample)


def prepare_data(run: ResolvedRun, console: Console) -> ResolvedRun:
    """Prepares the data if needed and checks that it suffices for the run; does not touch the run directory.

    Returns:
        The run with model.vocab_size, the run length and `made` set.

    Raises:
        ConfigError: the cache cannot be written to.
        DataError: the text cannot be read or is too small.
    """
    from megads.launch.raw_text import find_or_make

    preparation, raw = run.data.preparation, run.asked.data.raw_patterns
    if preparation is None:
        return run
    start_s = time.monotonic()
    prepared, cached = find_or_make(preparation, console)
    made = {
        "message": f"{'found' if cached else 'made'} {prepared}",
        "cached": cached,
        "path": str(prepared.prefix),
        "input": raw,
        "tokens": prepared.sidecar.tokens,
        "vocab_size": prepared.sidecar.vocab_size,
        "seconds": round(time.monotonic() - start_s, 3),
    }
    console.print_line(f"data: {made['message']}")
    config, told = resolve_length(_with_vocabulary(run.config, prepared.sidecar.vocab_size))
    if told:
        console.print_line(told)
    if config.model.vocabulary > 2 * prepared.sidecar.vocab_size:
        console.print_line(
            f"model.vocab_size = {config.model.vocabulary:,} is far above the tokenizer's "
            f"{prepared.sidecar.vocab_size:,}: model.vocab_size=null takes the tokenizer's",
            "warning",
        )
    try:
        require_data(config)
    except DataError as error:
        raise DataError(f"data.raw = {', '.join(raw)}: {error}") from error
    return dataclasses.replace(run, config=config, made=made)


def trained_phases(config: RootConfig) -> list[int]:
    """Returns the first sample of every training phase that the run reaches; [0] without phases."""
    spans = run_spans(config)
    end = planned_steps(config) if spans else 0
    return [0, *(span.first_sample for span in spans if 0 < span.first_step < end)]


def build_index_maps(config: RootConfig, console: Console) -> None:
    """Builds the index maps of the whole planned run, of one epoch if its length is unknown; reports their number.

    Raises:
        DataError: the data is missing, damaged or too small.
    """
    start_s = time.monotonic()
    # The maps of the last training phase continue those of the phases before it.
    train, _ = open_run_data(unstaged(config), at_sample=trained_phases(config)[-1])
    # The length of train.minutes is unknown until a start has timed its steps.
    known = config.train.length_is_known
    samples = batch_size_schedule(config).samples_after(planned_steps(config)) if known else train.samples_per_epoch
    maps = train.build_maps(samples)
    console.print_line(f"prepared: {maps} index maps in {time.monotonic() - start_s:.1f} s; the run was not started")
    if config.data.stage_to is not None and config.data.cache_dir is None:
        console.print_line(
            f"data.stage_to = {config.data.stage_to}: each node looks for index maps next to its copy; set "
            "data.cache_dir so that it finds these",
            "warning",
        )


def data_fault(config: RootConfig) -> DataError | None:
    """Returns the current error of the run's data, to explain a crash; None if the data is intact."""
    try:
        require_data(config)
    except DataError as error:
        return error
    return None


def _cache_dir(config: RootConfig) -> Path:
    if config.data.cache_dir is not None:
        return Path(config.data.cache_dir)
    return (Path(config.run.dir).parent if config.run.dir else Path("runs")) / "data-cache"


def _with_vocabulary(config: RootConfig, vocab_size: int) -> RootConfig:
    """Sets model.vocab_size if the user left it to the tokenizer."""
    if config.model.vocab_size is not None:
        return config
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=vocab_size))


def _with_dataset_vocabulary(config: RootConfig) -> RootConfig:
    """Sets the vocabulary size from the dataset's sidecar; checks that a given tokenizer made the dataset."""
    if config.model.vocab_size is not None and config.tokenizer.path is None:
        return config
    from megads.data.indexed.dataset import IndexedDataset
    from megads.data.indexed.sidecar import read_sidecar, sidecar_path
    from megads.data.indexed.stream import local_prefix

    path = local_prefix(config.data.train[0].path, config.data.stream)
    sidecar = read_sidecar(path)
    if sidecar is None:
        if config.model.vocab_size is None and not config.run.dry_run:
            IndexedDataset(path)
            raise ConfigError(
                f"model.vocab_size is null, which takes the tokenizer's, but {sidecar_path(path)}, which contains "
                "it, does not exist: set model.vocab_size"
            )
        return config
    given = config.tokenizer.path
    if given is not None and _sha256(given) != sidecar.tokenizer_sha256:
        raise DataError(
            f"tokenizer.path = {given}: is not the tokenizer that made {path}, whose sha256 starts with "
            f"{sidecar.tokenizer_sha256[:12]}: give that one, or leave it out"
        )
    return _with_vocabulary(config, sidecar.vocab_size)


def _sha256(path: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError as error:
        raise DataError(f"tokenizer.path = {path}: cannot be read: {error.strerror}") from error


def saved_step(run_dir: Path, load: str = "auto") -> int:
    """Returns the step of the newest committed checkpoint, 0 for none.

    Args:
        run_dir: the run directory.
        load: value of checkpoint.load; with "none", only checkpoints saved since the fresh start count.
    """
    if load == "none":
        from megads.checkpoint.fresh_start import recorded_history
        from megads.checkpoint.local import newest_step

        own = recorded_history(run_dir)
        return newest_step(run_dir, own) if own is not None else 0
    return step_of(Path(named_by_latest(checkpoints_folder(run_dir)))) or 0
