"""Starts a run: checks the config and the data, freezes the config into the run directory and starts the ranks."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megads.config import RootConfig, check_attention, check_config, planned_steps
from megads.errors import EXIT_OK, ConfigError, MegadsError
from megads.frozen_config import config_dict, config_digest, derive_run_id, load_frozen, record_config
from megads.launch.attempts import Attempts, Ended
from megads.launch.launcher import LaunchSpec
from megads.launch.placement import SlurmPlacement, find_placement
from megads.launch.preflight_data import (
    build_index_maps,
    data_fault,
    describe_data,
    guard_data,
    locate_data,
    prepare_data,
    require_data,
)
from megads.launch.rank_server import RankServer
from megads.monitor.console import Console
from megads.monitor.console_choice import open_console
from megads.monitor.trackers import wanted_trackers
from megads.ops.config import Kernels
from megads.ops.resolve import choose, prepare
from megads.runtime.environment import rank_variables, rehearsal_folder, share_of_cores
from megads.runtime.lease import claimed
from megads.runtime.machine_memory import may_have_gpus
from megads.runtime.metrics import EventWriter
from megads.runtime.run_dir import CONFIG_FILE

if TYPE_CHECKING:
    from megads.data.prepare import Preparation
    from megads.launch.preflight_memory import Machine


from collections.abc import Callable

from megads.errors import StopRequested
from megads.runtime.metrics import read_json_lines
from megads.runtime.run_dir import EVENTS_FILE
from megads.runtime.stop import REQUESTED, read_stop, stop_path

# What changes nothing of what a finished run has computed.
_ELSEWHERE = ("run", "logging", "cluster")
_GROUP_WRITABLE = 0o2775


@dataclass(frozen=True)
class StartRequest:
    """What a command line asks of a start, beside its config.

    Attributes:
        choices: option taken in each config group, None for none.
        claimed_dirs: output places that earlier points of the same sweep named; shared by all its points.
        describe: returns what a dry run shows, from the config, a line about the data, what was chosen of the layout
            and why, and the machine.
    """

    choices: Mapping[str, str | None]
    claimed_dirs: set[str]
    describe: Callable[[RootConfig, str, Sequence[str], Machine], str]


def start_run(config: RootConfig, start: StartRequest) -> int:
    """Starts or continues the run that the config describes and returns its exit code.

    Raises:
        MegadsError: it cannot be started; the scheduler has been told what follows.
    """
    check_config(config)
    placement = None if config.run.prepare_only else find_placement(config)
    try:
        with _early_server(config, placement) as server:
            return _run(config, start, placement, server).exit_code
    except MegadsError as error:
        _hand_over(placement, config, Ended(error.exit_code))
        raise


@contextmanager
def _early_server(config: RootConfig, placement: SlurmPlacement | None) -> Iterator[RankServer | None]:
    """Has what ranks import imported while the launcher checks the run; None where ranks are not forked from here."""
    parallel, given = config.parallel, config.cluster.threads_per_rank
    if placement is not None or config.run.dry_run or config.run.prepare_only or may_have_gpus():
        yield None
        return
    server = RankServer(rank_variables(given or share_of_cores(parallel.world_size), cuda=False))
    try:
        yield server
    finally:
        server.close()


def _run(config: RootConfig, start: StartRequest, placement: SlurmPlacement | None, server: RankServer | None) -> Ended:
    """Prepares and starts the run; returns how it ended."""
    # It pulls in torch, for which the tab key must not wait.
    from megads.launch.preflight_memory import settle_auto, this_machine
    from megads.resume import continue_data

    _refuse_shared_place(config, start.claimed_dirs)
    config, preparation = locate_data(config)
    config = place(config, start.choices)
    config = continue_data(config, Path(str(config.run.dir)))
    known, data = describe_data(config, preparation)
    # Looked at once: what was chosen to fit must not be refused for what another process took a moment later.
    machine = this_machine(len(placement.nodes) if placement else 1)
    known, choices = settle_auto(known, machine)
    if config.run.dry_run:
        print(start.describe(known, data, choices, machine))
        return Ended(EXIT_OK)
    # Named before, by what the user asked for: what fits may differ when the same command is given again.
    config = dataclasses.replace(config, parallel=known.parallel)
    if not config.run.prepare_only:
        refuse_early(config, known, preparation, machine)
    run_dir = Path(str(config.run.dir))
    job = placement.allocation.job if placement else None
    with (
        claimed(run_dir, job) as lease,
        open_console(run_dir, sys.stdout, config.logging, str(config.run.id), planned_steps(config)) as console,
    ):
        console.say(f"run {config.run.id} in {run_dir}, {config.parallel.world_size} ranks")
        for choice in choices:
            console.say(choice)
        say_ops(prepare(config.ops, console.say, cuda=machine.per_gpu, optimizer=config.optim.impl), console)
        config = prepare_data(config, preparation, run_dir, console)
        if placement and is_finished(config):
            console.say(f"finished before, at step {planned_steps(config)}: nothing to do")
            ended = Ended(EXIT_OK)
        else:
            _check_against_last_start(config, preparation, console)
            if config.run.prepare_only:
                build_index_maps(config, console)
                ended = Ended(EXIT_OK)
            else:
                record_config(config, run_dir)
                spec = dataclasses.replace(launch_spec(config), lease=lease.number)
                ended = Attempts(config, spec, placement, lease, server).run(console)
    # The run directory is free again for whoever comes next.
    _hand_over(placement, config, ended)
    return ended


def _check_against_last_start(config: RootConfig, preparation: Preparation | None, console: Console) -> None:
    """Says what changed since the run's last start, and checks the data against what the run saw of it."""
    run_dir = Path(str(config.run.dir))
    changes = _changes(run_dir, config)
    for change in changes:
        console.say(f"changed since the last start: {_told(change)}", "warning")
    guard_data(config, preparation, run_dir)
    if changes and not config.run.prepare_only:
        with closing(EventWriter(run_dir)) as events:
            told = "; ".join(map(_told, changes))
            events.write("config_changed", level="warning", message=told, changes=changes)


def _hand_over(placement: SlurmPlacement | None, config: RootConfig, ended: Ended) -> None:
    """Sees to what follows a SLURM job, and says it."""
    if placement is None or config.run.dry_run:
        return
    said = placement.hand_over(config, ended.exit_code, ended.excluded)
    if said:
        print(said, flush=True)


def say_ops(kernels: Kernels, console: Console) -> None:
    """Says which kernels will compute; a missing compiler is worth a warning, as it costs speed."""
    console.say(kernels.text, "warning" if kernels.reason else "info")


def refuse_early(config: RootConfig, known: RootConfig, preparation: Preparation | None, machine: Machine) -> None:
    """Refuses what cannot run before text is prepared, a run directory made or a rank started.

    Args:
        config: as `locate_data` returned it.
        known: the same with its vocabulary, which counts, and is known before the text is prepared.
        preparation: what to prepare.
        machine: where the ranks would run.

    Raises:
        StopRequested: somebody stopped the run.
        ConfigError: a tracker is not installed, kernels were asked for and cannot be had, or the run does not fit this
            machine's memory.
        DataError: the dataset is missing, damaged or too little.
    """
    from megads.launch.preflight_memory import refuse_unfit

    refuse_while_stopped(config)
    wanted_trackers(config.logging)
    chosen_kernels(config, machine)
    refuse_unfit(known, machine)
    if preparation is None:
        require_data(config)


def chosen_kernels(config: RootConfig, machine: Machine) -> Kernels:
    """Returns which implementation of the operators would run.

    Args:
        config: of the run.
        machine: where the ranks would run.

    Raises:
        ConfigError: kernels, or a kind of attention, were asked for and cannot be had there.
    """
    check_attention(config, cuda=machine.per_gpu)
    return choose(config.ops, cuda=machine.per_gpu, optimizer=config.optim.impl)


def launch_spec(config: RootConfig) -> LaunchSpec:
    """Returns what to start for a config that has its place and its data."""
    run_dir = str(config.run.dir)
    tracked = bool(wanted_trackers(config.logging))
    return LaunchSpec(
        run_dir=Path(run_dir),
        num_ranks=config.parallel.world_size,
        command=("-m", "megads.launch.rank", run_dir, "--digest", config_digest(config)),
        threads_per_rank=config.cluster.threads_per_rank,
        side_command=("-m", "megads.launch.tracker", run_dir, "--follow") if tracked else (),
        flush_s=config.logging.flush_s,
        heartbeat_timeout_s=config.cluster.heartbeat_timeout_s,
        cause_of_bus_error=lambda: data_fault(config),
        # More ranks than this machine has GPUs, if any.
        cpu=rehearsal_folder() is not None,
    )


def place(config: RootConfig, choices: Mapping[str, str | None]) -> RootConfig:
    """Returns the config with run.id and run.dir filled in.

    Args:
        config: as composed.
        choices: option taken in each config group; the experiment, else the model, names the run.
    """
    name = config.run.name or choices.get("experiment") or choices.get("model") or "run"
    run_id = config.run.id or derive_run_id(config, name.replace("/", "-"))
    run_dir = config.run.dir or f"runs/{run_id}"
    return dataclasses.replace(config, run=dataclasses.replace(config.run, id=run_id, dir=run_dir))


def _refuse_shared_place(config: RootConfig, claimed_dirs: set[str]) -> None:
    """Two points of a sweep with one run.id would be one run, the second continuing the first."""
    given = config.run.dir or config.run.id
    if given is None:
        return
    if given in claimed_dirs:
        raise ConfigError(
            f"run.id or run.dir = {given} is shared by several points of the sweep: leave it out, so that every point "
            "gets its own, or sweep over it too"
        )
    claimed_dirs.add(given)


def _changes(run_dir: Path, config: RootConfig) -> list[dict[str, Any]]:
    """Lists the keys outside `run` whose values differ from the last start of the same run, with both values."""
    try:
        before = dict(_flat(config_dict(load_frozen(run_dir / CONFIG_FILE))))
    except ConfigError:
        return []
    return [
        {"key": key, "before": before.get(key), "after": value}
        for key, value in _flat(config_dict(config))
        if before.get(key) != value and not key.startswith("run.")
    ]


def _told(change: Mapping[str, Any]) -> str:
    return f"{change['key']} {change['before']} -> {change['after']}"


def _flat(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def refuse_while_stopped(config: RootConfig) -> None:
    """Refuses a run that somebody stopped and has not allowed to go on; makes the kill switch's folder.

    Raises:
        StopRequested: a file that stops it is there.
        ConfigError: the folder of run.kill_switch cannot be made.
    """
    run_dir = Path(str(config.run.dir))
    switches = [stop_path(run_dir)] if read_stop(run_dir) == REQUESTED else []
    if config.run.kill_switch is not None:
        switch = Path(config.run.kill_switch)
        _make_reachable(switch.parent)
        switches += [switch] if switch.exists() else []
    if switches:
        raise StopRequested(f"the run is stopped by {switches[0]}, nothing was started: remove the file to go on")


def is_finished(config: RootConfig) -> bool:
    """Tells whether the last start of the same run, with the same config, came to its planned end.

    Args:
        config: with everything that the data tells filled in.
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
    return {room: content for room, content in config_dict(config).items() if room not in _ELSEWHERE}


def _make_reachable(folder: Path) -> None:
    """Makes the folder so that every member of the group can put the file there."""
    if folder.is_dir():
        return
    try:
        folder.mkdir(parents=True)
        folder.chmod(_GROUP_WRITABLE)
    except OSError as error:
        raise ConfigError(
            f"run.kill_switch: the folder {folder} cannot be made ({error.strerror}): make it, or name a file elsewhere"
        ) from error
