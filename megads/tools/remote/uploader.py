"""Process that uploads a run's checkpoints to checkpoint.upload; the ranks never wait for it.

    python -m megads.tools.remote.uploader <run.dir>

In a SLURM job of several nodes, one uploader runs next to the launcher and selects what is uploaded. One more runs on
each other node, as a task of an srun step. Each uploads a share of the files.

It polls the run directory for committed checkpoints. The newest is uploaded first, then older ones that the retention
policy keeps in the store. A failure is recorded as an event, and retried with increasing delay. The process ends when
the run is over (end of its standard input) and the last checkpoint is uploaded, or checkpoint.upload_wait_s after the
run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import NoReturn

from megads.api import (
    CONFIG_FILE,
    EXIT_BUG,
    EXIT_OK,
    MANIFEST_FILE,
    CheckpointError,
    EventWriter,
    MegadsError,
    MetricHistory,
    RootConfig,
    best_loss_key,
    leave_signals_to_the_launcher,
    list_checkpoints,
    load_frozen,
    read_manifest,
    temporary_path,
)
from megads.checkpoint.config import Retention
from megads.runtime.environment import slurm_variables
from megads.runtime.run_dir import upload_status_path
from megads.tools.remote.store import RemoteError, RemoteStore
from megads.tools.remote.upload import (
    CheckpointUpload,
    RemoteInUse,
    RemoteLease,
    pin_checkpoint,
    pins,
    remote_checkpoints,
    remote_folder,
    remove_surplus,
    unpin,
)

_PRIORITY = 10
_POLL_S = 0.5
_FIRST_RETRY_S, _LAST_RETRY_S, _LAST_RETRY_AT_END_S = 2.0, 300.0, 10.0
_STATUS_EVERY_S = 0.5
_QUIET_S = 15.0


class _GivenUp(Exception):
    """Aborts the upload of a checkpoint that is superseded, or no longer worth completing."""


class Uploader:
    """Uploads the checkpoints of one run directory.

    Args:
        config: config of the run.
        run_dir: the run directory.
        is_over: returns whether the run is over.
        events: writer of events.jsonl.
        tell: called with the step being uploaded, the uploaded bytes and the total bytes.
        tries: number of consecutive failures after which it raises; None retries forever.
        node: number of this node.
        num_nodes: number of nodes that upload; node 0 selects the checkpoint and commits it.
    """

    def __init__(
        self,
        config: RootConfig,
        run_dir: Path,
        is_over: Callable[[], bool],
        events: EventWriter,
        tell: Callable[[int, int, int], None] = lambda *_: None,
        tries: int | None = None,
        node: int = 0,
        num_nodes: int = 1,
    ):
        self._config, self._run_dir, self._is_over, self._events = config, run_dir, is_over, events
        self._tell, self._tries, self._node, self._num_nodes = tell, tries, node, num_nodes
        self._url = config.checkpoint.upload_url(config.run.id)
        self._failures, self._retry_s, self._told = 0, _FIRST_RETRY_S, ""
        # Sequence and digest of the complete checkpoints in the store, by step; None if not listed yet.
        self._there: dict[int, tuple[int, str]] | None = None
        self._read: dict[tuple[Path, int, int], tuple[int, str]] = {}
        self._damaged: set[str] = set()
        self._parts_removed = False
        self._step: int | None = None
        self.uploaded: list[int] = []
        """Steps of the checkpoints that this process has uploaded."""
        key = best_loss_key(config)
        self._losses = MetricHistory(run_dir, key) if key is not None else None

    def run(self) -> None:
        """Uploads until the run is over and its last checkpoint is in the store.

        Raises:
            CheckpointError, OSError: the last failure, if the number of tries is limited.
        """
        while True:
            try:
                store = RemoteStore(self._url)
                if self._node:
                    return self._help(store)
                lease = RemoteLease(store)
                with lease:
                    lease.take(lambda: None, lambda who: self._fail(f"{who}; waiting for it"))
                    return self._upload_all(store, lease)
            except (CheckpointError, OSError) as error:
                self._failures += 1
                if self._tries is not None and self._failures >= self._tries:
                    raise
                self._there = None
                self._fail(str(error))
                self._pause()

    def _pause(self) -> None:
        """Waits before the next try, shorter at the end of the run."""
        until = time.monotonic() + self._retry_s
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(_POLL_S, left))
            if self._is_over():
                until = min(until, time.monotonic() + _LAST_RETRY_AT_END_S)
        self._retry_s = min(2 * self._retry_s, _LAST_RETRY_S)

    def _fail(self, message: str) -> None:
        """Records a failure, once for each cause."""
        if message != self._told:
            self._told = message
            self._events.write("upload_failed", level="warning", step=self._step, url=self._url, message=message)

    def _upload_all(self, store: RemoteStore, lease: RemoteLease) -> None:
        for pin in pins(self._run_dir):
            if not _is_local(pin):
                unpin(pin)
        self._remove_parts(store)
        while True:
            # Checked first, so that everything committed before the end is found.
            over = self._is_over()
            folder = self._next(store)
            if folder is not None:
                with suppress(_GivenUp):
                    self._upload(store, lease, folder)
            elif over:
                return
            else:
                time.sleep(_POLL_S)

    def _remove_parts(self, store: RemoteStore) -> None:
        """Removes, once, parts left in the store by killed uploads of this run."""
        if self._parts_removed:
            return
        self._parts_removed = True
        # Other nodes may already upload these.
        steps = [CheckpointUpload(store, self._run_dir, pin).step for pin in pins(self._run_dir)]
        busy = [remote_folder(step) for step in steps] if self._num_nodes > 1 else []
        try:
            removed = store.remove_parts(busy)
        except RemoteError as error:
            self._events.write("upload_parts_left", level="debug", url=self._url, message=str(error))
            return
        if removed.count:
            self._events.write("upload_parts_removed", url=self._url, count=removed.count, bytes=removed.bytes)

    def _local(self) -> dict[int, tuple[int, str]]:
        """Sequence and digest of the committed checkpoints of the run directory, by step; reads each manifest once."""
        found = {}
        for step, folder in list_checkpoints(self._run_dir).items():
            with suppress(FileNotFoundError, CheckpointError):
                about = (folder / MANIFEST_FILE).stat()
                known = (folder, about.st_ino, about.st_mtime_ns)
                if known not in self._read:
                    manifest = read_manifest(folder)
                    self._read[known] = manifest.sequence, manifest.digest()
                if self._read[known][1] not in self._damaged:
                    found[step] = self._read[known]
        return found

    def _next(self, store: RemoteStore) -> Path | None:
        """The newest checkpoint, then older ones that retention keeps in the store; None if none is missing there."""
        local = self._local()
        if not local:
            return None
        if self._there is None:
            self._there = {
                step: (found.sequence, found.manifest.digest())
                for step, found in remote_checkpoints(store).items()
                if found.manifest is not None and found.sequence
            }
        lacking = [step for step in local if local[step] != self._there.get(step)]
        if not lacking:
            return None
        newest, keep = max(local, key=local.__getitem__), self._retention()
        reasons = keep.reasons({step: sequence for step, (sequence, _) in (self._there | local).items()})
        wanted = [step for step in lacking if step == newest or not keep.recent or reasons[step]]
        if not wanted:
            return None
        return list_checkpoints(self._run_dir).get(max(wanted, key=local.__getitem__))

    def _newest_lacking(self) -> int | None:
        """Step of the newest checkpoint if the store lacks it, else of the checkpoint being uploaded."""
        local = self._local()
        newest = max(local, key=local.__getitem__, default=None)
        return newest if newest is not None and local[newest] != (self._there or {}).get(newest) else self._step

    def _retention(self) -> Retention:
        losses = self._losses.values() if self._losses is not None else {}
        return self._config.checkpoint.upload_retention(losses)

    def _upload(self, store: RemoteStore, lease: RemoteLease, folder: Path) -> None:
        pin = pin_checkpoint(folder)
        if pin is None:
            return
        begin = time.monotonic()
        digest = read_manifest(folder).digest()

        def go_on() -> None:
            if not lease.is_held():
                raise RemoteInUse(f"another process uploads to {self._url}")
            self._require_worth(pin)

        upload = CheckpointUpload(
            store, self._run_dir, pin, go_on, lambda done: self._say(upload, done), 0, self._num_nodes
        )
        self._step = upload.step
        self._say(upload, 0)
        try:
            go_on()
            upload.open()
            upload.send()
            upload.commit()
        except RemoteError:
            raise
        except CheckpointError as error:
            # The local file is damaged; ranks that load it will report it too.
            self._damaged.add(digest)
            unpin(pin)
            self._fail(f"{folder.name} is not uploaded: {error}")
            return
        seconds = time.monotonic() - begin
        unpin(pin)
        removed = remove_surplus(store, self._retention(), [upload.step])
        self._there, self._failures, self._retry_s, self._told = None, 0, _FIRST_RETRY_S, ""
        self.uploaded.append(upload.step)
        self._events.write(
            "checkpoint_uploaded",
            step=upload.step,
            url=store.url,
            upload_s=round(seconds, 3),
            bytes=upload.sent_bytes,
            bytes_per_s=round(upload.sent_bytes / max(seconds, 1e-9)),
            removed=removed,
        )
        self._step = None

    def _require_worth(self, pin: Path) -> None:
        """Raises _GivenUp if a newer checkpoint takes precedence, or the pinned files take space the next one needs."""
        if _is_local(pin):
            if self._is_over() and self._step != self._newest_lacking():
                raise _GivenUp
            return
        size = sum(path.stat().st_size for path in pin.iterdir())
        if self._is_over() or shutil.disk_usage(self._run_dir).free < size:
            reason = "the run is over" if self._is_over() else "the disk has no space for the next one"
            unpin(pin)
            self._fail(f"{pin.name} is not uploaded: it was removed here meanwhile, and {reason}")
            raise _GivenUp

    def _say(self, upload: CheckpointUpload, done_bytes: int) -> None:
        self._tell(upload.step, done_bytes, upload.share_bytes)

    def _help(self, store: RemoteStore) -> None:
        """Uploads this node's share of the checkpoints that node 0 selects, until the run is over and none is left."""
        quiet_since = time.monotonic()
        while not self._is_over() or time.monotonic() - quiet_since < _QUIET_S:
            for pin in pins(self._run_dir):
                quiet_since = time.monotonic()
                # Node 0 unpins a checkpoint that is complete or no longer worth uploading.
                with suppress(FileNotFoundError):
                    upload = CheckpointUpload(store, self._run_dir, pin, node=self._node, num_nodes=self._num_nodes)
                    # Node 0 removes the mark of a file that is no longer in the store.
                    if not upload.is_brought:
                        upload.send()
            time.sleep(_POLL_S)


def _is_local(pin: Path) -> bool:
    """Whether the checkpoint that these hard links pin is still in the run directory."""
    folder = pin.with_name(pin.name.removeprefix(".").rpartition(".")[0])
    with suppress(OSError):
        return (pin / MANIFEST_FILE).samefile(folder / MANIFEST_FILE)
    return False


class _Status:
    """Writer of the upload status, which the launcher shows.

    Args:
        run_dir: the run directory.
    """

    def __init__(self, run_dir: Path):
        self._path, self._at = upload_status_path(run_dir), 0.0

    def write(self, step: int, done_bytes: int, total_bytes: int) -> None:
        """Writes the status, at most twice a second."""
        if time.monotonic() - self._at < _STATUS_EVERY_S and done_bytes < total_bytes:
            return
        self._at = time.monotonic()
        partial = temporary_path(self._path)
        with suppress(OSError):
            partial.write_text(json.dumps({"step": step, "done_bytes": done_bytes, "total_bytes": total_bytes}))
            partial.replace(self._path)


class _End:
    """Detects the end of the run, which is the end of standard input.

    Args:
        limit_s: time after it at which this process exits in any case, because no other may be left to kill it.
    """

    def __init__(self, limit_s: float):
        self._limit_s, self._came = limit_s, threading.Event()
        threading.Thread(target=self._watch, name="end of the run", daemon=True).start()

    def __call__(self) -> bool:
        return self._came.is_set()

    def _watch(self) -> None:
        while os.read(0, 1):
            continue
        self._came.set()
        time.sleep(self._limit_s)
        os._exit(CheckpointError.exit_code)


def main() -> NoReturn:
    """Uploads the checkpoints of a run until it is over; never returns."""
    parser = argparse.ArgumentParser(prog="python -m megads.tools.remote.uploader")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--node", type=int, default=0, help="number of this node")
    parser.add_argument("--nodes", type=int, default=1, help="number of nodes that upload")
    parser.add_argument(
        "--task-of-step", action="store_true", help="take the node's number from the task of the srun step"
    )
    arguments = parser.parse_args()
    # Number 0 runs next to the launcher.
    node = 1 + int(slurm_variables()["SLURM_PROCID"]) if arguments.task_of_step else arguments.node
    leave_signals_to_the_launcher()
    code = EXIT_BUG
    try:
        os.nice(_PRIORITY)
        config = load_frozen(arguments.run_dir / CONFIG_FILE)
        status = _Status(arguments.run_dir)
        with closing(EventWriter(arguments.run_dir)) as events:
            is_over = _End(config.checkpoint.upload_wait_s)
            Uploader(
                config, arguments.run_dir, is_over, events, status.write, node=node, num_nodes=arguments.nodes
            ).run()
        code = EXIT_OK
    except MegadsError as error:
        print(f"uploader: {error}", file=sys.stderr)
        code = error.exit_code
    except BaseException:
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # Skips the interpreter's shutdown, in which a storage driver's threads may wait for their server.
    os._exit(code)


if __name__ == "__main__":
    main()
