"""The launcher's part of checkpoint.upload, see `megads.launch.object_storage`.

It checks the store before a start, restores checkpoints that the run directory lost, supervises the processes that
upload, and waits for the last checkpoint.
"""

from __future__ import annotations

import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

from megads.api import (
    EXIT_KILLED,
    Allocation,
    CheckpointConfig,
    CheckpointError,
    ConfigError,
    Console,
    EventWriter,
    Preempted,
    Progress,
    RootConfig,
    SlurmJob,
    checkpoints_folder,
    claimed,
    for_srun,
    is_url,
    list_checkpoints,
    node_name,
    read_json,
    step_options,
)
from megads.checkpoint.config import LATEST_FILE, fetched_folder
from megads.checkpoint.fresh_start import continues_fresh_start, recorded_history
from megads.launch.launcher import SideProcess
from megads.runtime.run_dir import upload_status_path, uploader_log_path
from megads.runtime.slurm import slurmd_answers
from megads.tools.remote.download import (
    Restored,
    has_usable,
    newest_first,
    newest_intact_sequence,
    open_remote_run,
    restore_newest,
)
from megads.tools.remote.store import RemoteError, RemoteStore, within
from megads.tools.remote.upload import RemoteCheckpoint, remote_checkpoints
from megads.train.resume import find_resume_point, loads_given_path

ANSWER_S = 30.0
"""Time at the start after which a store that has not answered counts as unreachable."""
UPLOAD_STEP = "megads-upload"
"""Name of the srun step with the uploaders on other nodes."""
_MOST_RESTARTS = 5
_MOST_STEPS = 2
_END_STEP_S = 10.0
_FIRST_RESTART_S = 5.0
_WATCH_S = 0.5
_KILL_MARGIN_S = 5.0
"""The uploader observes checkpoint.upload_wait_s itself; after this margin it is taken to hang."""
_NOT_WAITED_FOR = (Preempted.exit_code, EXIT_KILLED)
"""Exit codes after which the launcher does not wait for the upload; the next start continues it."""


def prepare_checkpoints(config: RootConfig, asked_load: str, console: Console, job: SlurmJob | None) -> None:
    """Fetches remote checkpoints that the start needs into the run directory.

    Args:
        config: config of the start, with checkpoint.load as a folder.
        asked_load: checkpoint.load as requested.
        console: reports what is fetched.
        job: SLURM job of this process; None outside of SLURM.

    Raises:
        ConfigError: the store cannot be used at the first start of a run, or holds a later checkpoint of this run that
            this start would not resume from.
        CheckpointError: there is no usable checkpoint at the URL, or the only checkpoints are in the store and none is
            usable.
    """
    run_dir = Path(str(config.run.dir))
    if is_url(asked_load):
        _fetch_given(asked_load, Path(config.checkpoint.load), run_dir, console, job)
    if config.checkpoint.upload is not None:
        _prepare_upload(config, run_dir, console, job)
    if config.checkpoint.init_from is not None and is_url(config.checkpoint.init_from):
        _fetch_weights(config.checkpoint, run_dir, console, job)


def _fetch_weights(config: CheckpointConfig, run_dir: Path, console: Console, job: SlurmJob | None) -> None:
    """Fetches checkpoint.init_from, unless the run has it already or resumes from its own checkpoint."""
    assert config.init_from is not None
    local = fetched_folder(config.init_from, run_dir)
    if (checkpoints_folder(local) / LATEST_FILE).is_file() or find_resume_point(config.load, run_dir) is not None:
        return
    store, candidates = open_remote_run(config.init_from)
    with claimed(run_dir, job):
        _restore(store, local, candidates, console)


def _fetch_given(url: str, local: Path, run_dir: Path, console: Console, job: SlurmJob | None) -> None:
    if (checkpoints_folder(local) / LATEST_FILE).is_file() or not loads_given_path(str(local), run_dir):
        return
    store, candidates = open_remote_run(url)
    with claimed(run_dir, job):
        _restore(store, local, candidates, console)


def _prepare_upload(config: RootConfig, run_dir: Path, console: Console, job: SlurmJob | None) -> None:
    url, load = config.checkpoint.upload_url(config.run.id), config.checkpoint.load
    refuse_own_folder(url, run_dir)
    try:
        store = within(ANSWER_S, lambda: RemoteStore(url, ANSWER_S / 3), url)
        within(ANSWER_S, lambda: _probe(store), url)
        found = within(ANSWER_S, lambda: remote_checkpoints(store), url)
    except RemoteError as error:
        if not list_checkpoints(run_dir):
            raise ConfigError(
                f"checkpoint.upload = {config.checkpoint.upload} cannot be used: {error}. Correct the URL, the "
                "credentials or the bucket's permissions, or leave checkpoint.upload out"
            ) from error
        console.print_line(
            f"checkpoint.upload does not answer ({error}): training continues, uploads are retried", "warning"
        )
        return
    own = recorded_history(run_dir) if load == "none" and continues_fresh_start(run_dir) else None
    local = max(newest_intact_sequence(run_dir), own.after if own is not None else 0)
    newer = [checkpoint for checkpoint in newest_first(found) if checkpoint.sequence > local]
    if not newer:
        return
    if (load == "none" and own is None) or loads_given_path(load, run_dir):
        raise ConfigError(
            f"{url} has a checkpoint of step {newer[0].step} of this run, from which checkpoint.load = {load} would "
            "not resume, and new checkpoints would be mixed with it: choose another run.id, or remove it there"
        )
    with claimed(run_dir, job):
        try:
            restored = _restore(RemoteStore(url), run_dir, newer, console)
        except RemoteError:
            raise
        except CheckpointError as error:
            if not local:
                raise CheckpointError(f"{error}; another run.id starts afresh") from error
            console.print_line(f"{error}: the run resumes from its own checkpoint", "warning")
            return
        _note(run_dir, restored, url)


def refuse_own_folder(url: str, run_dir: Path) -> None:
    """Raises ConfigError if the upload folder and the run directory contain each other."""
    parts = urlsplit(url)
    if parts.scheme in ("file", "local"):
        there, here = Path(parts.path).resolve(), run_dir.resolve()
        if there.is_relative_to(here) or here.is_relative_to(there):
            raise ConfigError(f"checkpoint.upload: {url} is the run directory itself: choose another folder")


def _probe(store: RemoteStore) -> None:
    """Raises RemoteError if writing, reading or removing a file in the store fails."""
    name, content = f".probe-{uuid.uuid4().hex[:12]}", b"megads"
    store.write(name, content)
    if store.read(name) != content:
        raise RemoteError(f"{store.url}/{name} is not what was written")
    store.remove(name)


def restore_lost(config: RootConfig, console: Console) -> bool:
    """Restores the newest checkpoint from the store if the run directory has no usable one.

    The caller holds the lease on the run directory.

    Returns:
        Whether a checkpoint was restored.
    """
    run_dir = Path(str(config.run.dir))
    if config.checkpoint.upload is None or config.checkpoint.load == "none" or has_usable(run_dir):
        return False
    try:
        store = RemoteStore(config.checkpoint.upload_url(config.run.id))
        restored = _restore(store, run_dir, newest_first(remote_checkpoints(store)), console)
    except CheckpointError as error:
        console.print_line(f"checkpoint.upload has no usable checkpoint either: {error}", "warning")
        return False
    _note(run_dir, restored, store.url)
    return True


def _restore(store: RemoteStore, run_dir: Path, candidates: Sequence[RemoteCheckpoint], console: Console) -> Restored:
    size = max((c.manifest.nbytes for c in candidates if c.manifest is not None), default=0)
    begin_s = time.monotonic()
    with Progress(f"fetching a checkpoint from {store.url}", size) as progress:
        restored = restore_newest(store, run_dir, candidates, tell=progress.update)
    seconds, nbytes = time.monotonic() - begin_s, restored.manifest.nbytes
    console.print_line(
        f"fetched {restored.folder.name} from {store.url}: {nbytes / 1e6:,.1f} MB in {seconds:.1f} s, "
        f"{nbytes / 1e6 / max(seconds, 1e-9):,.1f} MB/s"
    )
    for text in restored.skipped:
        console.print_line(f"not usable there: {text}", "warning")
    return restored


def _note(run_dir: Path, restored: Restored, url: str) -> None:
    with closing(EventWriter(run_dir)) as events:
        events.write(
            "checkpoint_restored",
            step=restored.manifest.run.state["step"],
            url=url,
            folder=restored.folder.name,
            bytes=restored.manifest.nbytes,
            passed_by=list(restored.skipped),
        )


class UploadProcesses:
    """Supervises the uploader processes, from the first start of the ranks to the end of the run.

    One uploader runs next to the launcher. In a SLURM job of several nodes, the tasks of one srun step are the
    uploaders on the other nodes. If the step ends early, it is started once more on the nodes that still answer; if it
    ends again, the launcher's node uploads alone.

    Args:
        config: config of the run.
        allocation: the SLURM allocation; None for this machine alone.
    """

    def __init__(self, config: RootConfig, allocation: Allocation | None = None):
        self._run_dir = Path(str(config.run.dir))
        self._config, self._allocation = config, allocation
        self._wait_s = config.checkpoint.upload_wait_s
        self._others = other_nodes(allocation) if allocation is not None else ()
        self._ending = threading.Event()
        self._process: SideProcess | None = None
        self._step: SideProcess | None = None
        upload_status_path(self._run_dir).unlink(missing_ok=True)
        self._thread = threading.Thread(target=self._watch, name="uploads", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        """Body of the thread: starts the processes, and restarts them after failures."""
        wait_s, failures, steps_failed = _FIRST_RESTART_S, 0, 0
        while True:
            failure, of_step = self._run()
            if not failure:
                return
            if of_step:
                steps_failed += 1
                self._others = self._answering() if steps_failed < _MOST_STEPS else ()
                follows = f"{1 + len(self._others)} nodes upload now"
                self._note(f"the srun step {UPLOAD_STEP}, which uploads on other nodes, {failure}: {follows}")
                continue
            failures += 1
            again = failures <= _MOST_RESTARTS
            follows = f"started again in {wait_s:.0f} s" if again else "not started again"
            self._note(f"the process that uploads checkpoints {failure}: {follows}")
            if not again:
                self._end_step()
            if not again or self._ending.wait(wait_s):
                return
            wait_s *= 2

    def _run(self) -> tuple[str, bool]:
        """Starts and monitors the processes; returns the failure, empty at the end, and whether the step failed."""
        try:
            count = str(1 + len(self._others))
            words = ("-m", "megads.tools.remote.uploader", str(self._run_dir), "--nodes", count)
            if self._others and self._step is None:
                self._step = SideProcess((*words, "--task-of-step"), self._log, self._srun(), for_srun())
            self._process = SideProcess(words, self._log)
            while not self._process.failure:
                if self._ending.wait(_WATCH_S):
                    return "", False
                if self._step is not None and not self._step.is_running:
                    failure = self._step.failure or "ended"
                    # Restarted too, because it must know the new number of nodes; what is uploaded remains.
                    self._process.finish(0.0, lambda: True)
                    self._step = None
                    return failure, True
            return self._process.failure, False
        except OSError as error:
            return f"cannot be started ({error})", False

    def _srun(self) -> tuple[str, ...]:
        count, cluster = str(len(self._others)), self._config.cluster
        options = step_options(self._allocation) if self._allocation is not None else []
        return (
            *("srun", "--nodes", count, "--ntasks", count, "--ntasks-per-node=1", "--overlap"),
            *options,
            *("--nodelist", ",".join(self._others), f"--job-name={UPLOAD_STEP}", "--kill-on-bad-exit=1"),
            *("--export=ALL", "--mpi=none", "--label", *cluster.srun_options, *cluster.wrapper),
        )

    def _answering(self) -> tuple[str, ...]:
        """Other nodes whose slurmd answers."""
        try:
            return tuple(node for node in self._others if slurmd_answers(node))
        except ConfigError:
            return ()

    def _end_step(self) -> None:
        if self._step is not None:
            self._step.terminate(_END_STEP_S)
            self._step = None

    def _note(self, message: str) -> None:
        with closing(EventWriter(self._run_dir)) as events:
            events.write("upload_failed", level="warning", message=f"{message}; log: {self._log}")

    @property
    def _log(self) -> Path:
        return uploader_log_path(self._run_dir)

    def finish(self, exit_code: int, console: Console) -> None:
        """Waits for the upload of the last checkpoint, and warns if it is incomplete; a signal ends the wait.

        Args:
            exit_code: exit code of the run.
            console: shows the warning.
        """
        self._ending.set()
        self._thread.join()
        limit_s = 0.0 if exit_code in _NOT_WAITED_FOR else self._wait_s + _KILL_MARGIN_S
        complete = False
        if self._process is not None and not self._process.failure:
            with _signals_noted() as came, Progress("uploading the last checkpoint") as progress:

                def hurry() -> bool:
                    progress.update(note=_status_text(self._run_dir))
                    return came()

                complete = self._process.finish(limit_s, hurry) and not self._process.failure
        self._end_step()
        if not complete and list_checkpoints(self._run_dir):
            console.print_line(
                f"the last checkpoint is not uploaded yet ({_status_text(self._run_dir) or 'nothing of it'}): the next "
                f"start continues the upload, or megads checkpoint upload run={self._run_dir}; log: {self._log}",
                "warning",
            )

    def kill(self) -> None:
        """Kills the uploaders immediately."""
        self._ending.set()
        self._thread.join()
        if self._process is not None:
            self._process.finish(0.0, lambda: True)
        self._end_step()


def other_nodes(allocation: Allocation) -> tuple[str, ...]:
    """Returns the nodes of a SLURM job except the launcher's."""
    return tuple(node.name for node in allocation.nodes if node.name != node_name())


def _status_text(run_dir: Path) -> str:
    """Status written by the uploader, as text; empty if there is none."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        status = read_json(upload_status_path(run_dir))
        done, total = int(status["done_bytes"]), int(status["total_bytes"])
        return f"step {status['step']}, {100 * done // max(total, 1)}% of {total / 1e6:,.1f} MB"
    return ""


@contextmanager
def _signals_noted() -> Iterator[Callable[[], bool]]:
    """Yields a function that returns whether a signal that asks this process to end was received."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    noted: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda came, _frame: noted.append(came)) for number in numbers}
    try:
        yield lambda: bool(noted)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def uploading(config: RootConfig, allocation: Allocation | None = None) -> Iterator[UploadProcesses | None]:
    """Runs the uploaders during the block, and kills them if it raises; yields None without checkpoint.upload.

    Args:
        config: config of the run.
        allocation: the SLURM allocation; None for this machine alone.
    """
    if config.checkpoint.upload is None:
        yield None
        return
    processes = UploadProcesses(config, allocation)
    try:
        yield processes
    except BaseException:
        processes.kill()
        raise
