"""Starts a run: resolves it, freezes its config, starts its ranks, and restarts them after a failure."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megads.config.frozen import load_frozen
from megads.config.root import RootConfig, check_config
from megads.engine.deepspeed_options import build_adam, uses_deepspeed
from megads.errors import (
    EXIT_BUG,
    EXIT_CODES,
    EXIT_OK,
    ConfigError,
    MegadsError,
    Preempted,
    RankKilled,
    RestartsExhausted,
    StopRequested,
    UnhealthyNode,
)
from megads.launch.acceptance import AcceptedStart, accept_start, finish_rollback, finished_text
from megads.launch.attempts import Attempts, JobEnd, launch_spec, open_run_console, print_plan
from megads.launch.external_ranks import JobRendezvous, follow
from megads.launch.launcher import EXIT_KILLED
from megads.launch.layout import run_planner, useful_threads
from megads.launch.node_agent import collect_signals
from megads.launch.node_ranks import NodePart
from megads.launch.object_storage import object_storage
from megads.launch.preflight import (
    ResolvedRun,
    build_index_maps,
    check_before_start,
    locate_data,
    place,
    prepare_data,
    resolve_run,
    saved_step,
    stopping_files,
)
from megads.launch.rank_server import RankServer
from megads.launch.scheduler import cancel_job_chain
from megads.launch.slurm_ranks import SlurmPlacement, find_slurm_placement
from megads.monitor.console import Console
from megads.ops.config import Float8Recipe, Implementation
from megads.ops.resolve import prepare
from megads.runtime import environment, progress
from megads.runtime.config import ConsoleKind
from megads.runtime.lease import claimed, refuse_in_use
from megads.runtime.machine_memory import may_have_gpus
from megads.runtime.platform import PlatformRank, find_platform_rank
from megads.runtime.run_dir import CONFIG_FILE, refuse_unwritable
from megads.runtime.url import is_url

_INTERRUPTED = (
    EXIT_KILLED,
    *(kind.exit_code for kind in (StopRequested, Preempted, RestartsExhausted, UnhealthyNode, RankKilled)),
)
"""Exit codes of runs that the same command can continue."""


@dataclass(frozen=True)
class StartRequest:
    """Parameters of a start that are not in its config.

    Attributes:
        choices: selected option of each config group, None for none.
        claimed_dirs: values of run.dir or run.id of earlier points of the same sweep; shared by all its points.
        describe: returns the text that a dry run shows.
        on_run_dir: called with the run directory, before anything is written to it.
    """

    choices: Mapping[str, str | None]
    claimed_dirs: set[str]
    describe: Callable[[ResolvedRun], str]
    on_run_dir: Callable[[Path], None] = lambda _run_dir: None


def start_run(asked: RootConfig, start: StartRequest) -> int:
    """Starts or resumes the run that the config describes, and returns its exit code.

    Raises:
        MegadsError: the run cannot be started; the SLURM job has been requeued, or its chain ended, if necessary.
    """
    me = find_platform_rank(asked.cluster.kind)
    quiet = asked.logging.console is ConsoleKind.quiet or asked.logging.level in ("warning", "error")
    # In a terminal with a debugger nothing may be redrawn.
    quiet = quiet or (me is not None and me.rank > 0) or asked.cluster.in_process
    progress.configure(quiet=quiet, plain_on_stdout=not asked.run.dry_run)
    progress.enter("planning the run")
    try:
        return _lead(asked, start) if me is None else _join(asked, start, me)
    finally:
        progress.leave()
        progress.configure(quiet=False, plain_on_stdout=False)


def _join(asked: RootConfig, start: StartRequest, me: PlatformRank) -> int:
    """Takes part in the run whose ranks a platform has started, of which this process is one."""
    check_config(asked)
    if asked.cluster.in_process:
        raise ConfigError(
            f"cluster.in_process = true, but {me.source} started this process, and the rank trains in a child of it: "
            "start the command alone, or use cluster.debug_rank=<rank>"
        )
    meeting = JobRendezvous(me, asked.cluster.timeout_s)
    if me.rank:
        return _follow(asked, start, meeting)
    code = EXIT_BUG
    try:
        meeting.join(asked)
        code = _lead(asked, start, meeting)
    except MegadsError as error:
        code = error.exit_code
        raise
    finally:
        meeting.end(code)
    return code


def _follow(asked: RootConfig, start: StartRequest, meeting: JobRendezvous) -> int:
    """Trains as one rank of a run whose launcher is the process of rank 0; returns the run's exit code."""

    def part_of(lease: int) -> NodePart:
        # Rank 0 prepared the data and wrote the config.
        run_dir = Path(str(place(locate_data(asked)[0], start.choices).run.dir))
        config = load_frozen(run_dir / CONFIG_FILE)
        return dataclasses.replace(launch_spec(config), lease=lease).node_part(1)

    try:
        meeting.join(asked)
        code = follow(meeting, part_of, collect_signals())
    except BaseException as error:
        meeting.fail(error)
        raise
    if code:
        text = f"rank {meeting.me.rank}: the run ended with exit code {code} ({EXIT_CODES.get(code, 'unknown')})"
        print(f"megads: {text}; the output of rank 0 says why", file=sys.stderr, flush=True)
    return code


def _lead(asked: RootConfig, start: StartRequest, meeting: JobRendezvous | None = None) -> int:
    """Launches the run: on this machine, on the nodes of a SLURM job, or as the processes that a platform started."""
    placement = None
    try:
        check_config(asked)
        placement = None if asked.run.prepare_only or meeting is not None else find_slurm_placement(asked)
        with _early_server(asked, placement, meeting) as server:
            _refuse_shared_place(asked, start.claimed_dirs)
            resolved = resolve_run(asked, start.choices, placement, meeting)
            start.on_run_dir(resolved.run_dir)
            if asked.run.dry_run:
                accepted = _preview(resolved)
                print(start.describe(accepted.resolved if accepted else resolved))
                if accepted:
                    accepted.print_changes(lambda text, _level: print(text))
                if resolved.planned.model.vocab_size is not None:
                    run_planner().refuse_unfit(resolved.planned, resolved.machine)
                return EXIT_OK
            ended = _run(resolved, server)
            # After the run directory is released for the next job.
            _requeue(placement, resolved.config, ended)
            return ended.exit_code
    except MegadsError as error:
        _requeue(placement, asked, JobEnd(error.exit_code))
        raise


@contextmanager
def _early_server(
    config: RootConfig, placement: SlurmPlacement | None, meeting: JobRendezvous | None
) -> Iterator[RankServer | None]:
    """Starts a rank server, which imports while the launcher checks the run; None if it does not fork the ranks."""
    elsewhere = placement is not None or meeting is not None
    if elsewhere or config.cluster.in_process or config.run.dry_run or config.run.prepare_only or may_have_gpus():
        yield None
        return
    ranks, cluster = config.parallel.world_size, config.cluster
    threads = environment.threads_of_rank(ranks, cluster.threads_per_rank, useful_threads(config))
    deepspeed = uses_deepspeed(config.resolved_engine, config.optim.impl)
    server = RankServer(environment.rank_variables(threads, cuda=False), deepspeed=deepspeed)
    try:
        yield server
    finally:
        server.close()


def _run(resolved: ResolvedRun, server: RankServer | None) -> JobEnd:
    """Prepares and starts the run; returns how it ended."""
    config, placement, storage = resolved.config, resolved.placement, object_storage(resolved.asked)
    job = placement.allocation.job if placement else None
    if not config.run.prepare_only:
        check_before_start(resolved)
        refuse_unwritable(resolved.run_dir)
        refuse_in_use(resolved.run_dir, job)
    with open_run_console(resolved) as console:
        ranks = "1 rank" if config.parallel.world_size == 1 else f"{config.parallel.world_size} ranks"
        console.print_line(f"run {config.run.id} in {resolved.run_dir}, {ranks}")
        for choice in resolved.choices:
            console.print_line(choice)
        for hint in _hints(resolved):
            console.print_line(hint, "warning")
        kernels = prepare(config.ops, console.print_line, cuda=resolved.machine.per_gpu, optimizer=config.optim.impl)
        # A warning if faster kernels are unavailable, such as without a compiler.
        console.print_line(kernels.text, "warning" if kernels.reason else "info")
        if config.optim.impl is Implementation.deepspeed:
            build_adam(console.print_line, cuda=resolved.machine.per_gpu)
        if not config.run.prepare_only:
            storage.prepare_checkpoints(config, resolved.asked.checkpoint.load, console, job)
        progress.enter("checking the data")
        if not config.run.prepare_only:
            finish_rollback(resolved.run_dir, job)
        prepared = prepare_data(resolved, console)
        accepted = accept_start(prepared)
        resolved = accepted.resolved
        if config.run.prepare_only:
            build_index_maps(resolved.config, console)
            return JobEnd(EXIT_OK)
        if finished := accepted.finished():
            console.print_line(finished)
            return JobEnd(EXIT_OK)
        print_plan(accepted, console)
        with claimed(resolved.run_dir, job) as lease:
            if not accepted.is_current():
                # The lease of a launcher that was stopped, or lost its network, has expired; its ranks trained on.
                console.print_line("another start trained the run meanwhile: this one is prepared again", "warning")
                accepted = accept_start(prepared)
                resolved = accepted.resolved
                if finished := accepted.finished():
                    console.print_line(finished)
                    return JobEnd(EXIT_OK)
                print_plan(accepted, console)
            accepted.record()
            with storage.uploading(resolved.config, placement.allocation if placement else None) as uploads:
                again = dataclasses.replace(prepared, made=None)
                attempts = Attempts(resolved, lease, server, lambda: accept_start(again))
                ended = attempts.run(console)
                if uploads is not None:
                    uploads.finish(ended.exit_code, console)
        _say_what_follows(attempts.resolved, ended, console)
        return ended


def _hints(resolved: ResolvedRun) -> Iterator[str]:
    """Yields what the user may not have meant about the nodes and cores that the run uses, and FP8 on them."""
    config, placement = resolved.config, resolved.placement
    if config.train.fp8 is not Float8Recipe.none and (config.ops.fp8_emulation or not resolved.machine.per_gpu):
        yield f"train.fp8 = {config.train.fp8} is emulated: the numbers of FP8, but slower than train.fp8=none"
    nodes = environment.slurm_variables().get("SLURM_JOB_NUM_NODES", "1")
    if placement is None and resolved.meeting is None and nodes not in ("", "1"):
        yield f"this SLURM job has {nodes} nodes, but the run uses only this one: cluster=slurm uses all of them"
    cpus = environment.cpus_of_job()
    if placement is not None and cpus is not None and cpus < placement.ranks_per_node:
        yield (
            f"the job has {cpus} CPUs on this node for {placement.ranks_per_node} ranks, which will wait for each "
            "other: ask for whole nodes (#SBATCH --exclusive) or for more cores (--cpus-per-task)"
        )
    given, asked = environment.requested_threads(), config.cluster.threads_per_rank
    if given is not None and asked is not None and given != asked:
        yield f"OMP_NUM_THREADS = {given} has no effect: cluster.threads_per_rank = {asked} takes precedence"
    if placement is None and given is None and asked is None and not resolved.machine.per_gpu:
        cores, load = environment.available_cores(), os.getloadavg()[0]
        threads = environment.threads_of_rank(config.parallel.world_size, None, useful_threads(config))
        if threads > 1 and load > cores / 2:
            yield (
                f"this machine is busy (load {load:.1f} on {cores} cores): threads that wait for each other may be "
                f"slower than fewer; cluster.threads_per_rank={threads // 2} leaves cores to the others"
            )


def _preview(resolved: ResolvedRun) -> AcceptedStart | None:
    """Accepts or refuses the run of a dry run as a start would; None if the data that this needs is missing."""
    known = dataclasses.replace(resolved, config=resolved.planned)
    # A start would fetch it.
    unseen = is_url(resolved.asked.checkpoint.load) and not Path(known.config.checkpoint.load).is_dir()
    if known.config.model.vocab_size is None or not resolved.data.made or unseen:
        return None
    return accept_start(known)


def _say_what_follows(resolved: ResolvedRun, ended: JobEnd, console: Console) -> None:
    """Reports that the run is finished, or how to continue it; on SLURM `_requeue` reports it."""
    config = resolved.config
    if ended.exit_code == EXIT_OK:
        console.print_line(finished_text(resolved))
        return
    if resolved.placement is not None:
        return
    in_memory = _say_what_memory_holds(resolved, console) if config.checkpoint.local_every_steps else 0
    if ended.exit_code in _INTERRUPTED:
        load = config.checkpoint.load
        step = max(saved_step(resolved.run_dir, load), in_memory)
        where = f"continues it from step {step}" if step else "starts it from step 0: it has no checkpoint yet"
        if load == "none" and step:
            where = f"with checkpoint.load=auto {where}; with checkpoint.load=none it starts afresh"
        files = stopping_files(config)
        first = f"remove {' and '.join(map(str, files))}, then " if files else ""
        console.print_line(f"interrupted: {first}the same command {where}")


def _say_what_memory_holds(resolved: ResolvedRun, console: Console) -> int:
    """Reports the memory that local checkpoints occupy until the run is resumed; returns their step."""
    from megads.checkpoint.local_files import held_in_memory, node_folder

    root = Path(resolved.config.checkpoint.local_folder)
    step, size = held_in_memory(root, resolved.run_dir)
    if size:
        console.print_line(
            f"this machine's memory holds the state of step {step} for the next start: {size / 2**30:.2f} GiB in "
            f"{node_folder(root, resolved.run_dir)}, which can be removed"
        )
    return step


def _requeue(placement: SlurmPlacement | None, config: RootConfig, ended: JobEnd) -> None:
    """Requeues the SLURM job or ends its chain, and reports it; without a placement the start was refused early."""
    if config.run.dry_run or (placement is None and not config.cluster.chain):
        return
    said = (
        cancel_job_chain(ended.exit_code)
        if placement is None
        else placement.requeue_or_end_chain(config, ended.exit_code, ended.excluded)
    )
    if said:
        print(said, flush=True)


def _refuse_shared_place(config: RootConfig, claimed_dirs: set[str]) -> None:
    """Refuses a run.id or run.dir that an earlier point of the sweep uses: the second would resume the first."""
    given = config.run.dir or config.run.id
    if given is None:
        return
    if given in claimed_dirs:
        raise ConfigError(
            f"run.id or run.dir = {given} is shared by several points of the sweep: leave it out, so that every point "
            "gets its own, or sweep over it too"
        )
    claimed_dirs.add(given)
