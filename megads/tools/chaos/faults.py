"""The faults that a campaign injects, each with what must follow it."""

from __future__ import annotations

import random
import resource
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import psutil

from megads.checkpoint.manifest import MANIFEST_FILE
from megads.data.indexed.writer import IndexedDatasetAppender
from megads.errors import EXIT_INTERRUPTED, ConfigError, DataError, Preempted, StopRequested
from megads.runtime.run_dir import METRICS_FILE
from megads.tools.chaos.attacked_run import AttackedRun
from megads.tools.chaos.hook import order_path

_SLOW_S, _FULL_S = 3.0, 1.0
_STEPS_OF_A_FULL_DISK = 30
"""More than a small run trains while its disk is full: its last save needs room, and so does its first one."""
_PERIOD_S = 0.05
_STRANGER_BYTES = 512
_TENSORS = "*.safetensors"


class Consequence(StrEnum):
    """What must follow a fault."""

    unharmed = "the run goes on"
    in_place = "a restart in place"
    again = "the same command goes on"
    refused = "the next start is refused until the fault is mended"


@dataclass(frozen=True)
class Target:
    """What a fault may be injected into.

    Attributes:
        run: the run.
        dataset: prefix of its data.
        random: chooses.
    """

    run: AttackedRun
    dataset: Path
    random: random.Random

    @property
    def rank(self) -> int:
        """One of the ranks."""
        return self.random.randrange(self.run.num_ranks)


@dataclass(frozen=True)
class Injected:
    """A fault that was injected.

    Attributes:
        where: into what, in words.
        mend: takes back what the run itself cannot mend.
        further: overrides of a start that is to be refused.
        codes: of the command that the fault ends, or of the start that it refuses; empty where nobody is left to say.
        passed_by: the next start must name what it did not use.
    """

    where: str
    mend: Callable[[], None] = lambda: None
    further: tuple[str, ...] = ()
    codes: tuple[int, ...] = ()
    passed_by: bool = False


@dataclass(frozen=True)
class Fault:
    """One kind of fault.

    Attributes:
        name: of the kind.
        text: what happens.
        consequence: what must follow.
        inject: does it; None where there is nothing to do it to at this moment.
    """

    name: str
    text: str
    consequence: Consequence
    inject: Callable[[Target], Injected | None]


def _signal_rank(number: signal.Signals) -> Callable[[Target], Injected | None]:
    def inject(target: Target) -> Injected | None:
        rank = target.rank
        process = target.run.rank(rank)
        if process is None:
            return None
        process.send_signal(number)
        return Injected(f"rank {rank}")

    return inject


def _order(order: str) -> Callable[[Target], Injected | None]:
    """Has a rank go wrong from inside, after its current step."""

    def inject(target: Target) -> Injected | None:
        rank = target.rank
        path = order_path(target.run.run_dir, rank)
        path.write_text(order)
        # One that came after the last step is no fault.
        if not target.run.wait_until(lambda: not path.exists(), 30.0):
            path.unlink(missing_ok=True)
            return None
        return Injected(f"rank {rank}")

    return inject


def _slow_rank(target: Target) -> Injected | None:
    """Half of its time for some seconds, in slices."""
    rank = target.rank
    process = target.run.rank(rank)
    if process is None:
        return None

    until = time.monotonic() + _SLOW_S
    with suppress(psutil.NoSuchProcess):
        while time.monotonic() < until:
            process.suspend()
            time.sleep(_PERIOD_S)
            process.resume()
            time.sleep(_PERIOD_S)
    return Injected(f"rank {rank}, for {_SLOW_S:.0f} s")


def _signal_writer(number: signal.Signals) -> Callable[[Target], Injected | None]:
    def inject(target: Target) -> Injected | None:
        writers = target.run.writers()
        if not writers:
            return None
        writer = target.random.choice(writers)
        with suppress(psutil.NoSuchProcess):
            writer.send_signal(number)
            return Injected("the writer of a rank")
        return None

    return inject


def _full_disk(target: Target) -> Injected | None:
    """No file of a rank or a writer grows for some seconds; the kernel answers as a full disk does."""
    run = target.run
    ranks = [process for number in range(run.num_ranks) if (process := run.rank(number)) is not None]
    processes = [*ranks, *run.writers()]

    def limit(most_bytes: int) -> None:
        for process in processes:
            with suppress(psutil.NoSuchProcess, ProcessLookupError):
                hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)[1]
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (most_bytes, hard))

    steps_left = run.events("start")[-1]["total_steps"] - run.last_step
    if not processes or not run.checkpoints() or steps_left < _STEPS_OF_A_FULL_DISK:
        return None
    limit(1)
    time.sleep(_FULL_S)
    limit(resource.RLIM_INFINITY)
    return Injected(f"all ranks and writers, for {_FULL_S:.0f} s")


def _signal_launcher(number: signal.Signals, *codes: int, twice: bool = False) -> Callable[[Target], Injected | None]:
    def inject(target: Target) -> Injected | None:
        run = target.run
        if not run.running:
            return None
        run.launcher.send_signal(number)
        if twice:
            run.wait_until(lambda: bool(run.events("stop_requested")), 30.0)
            with suppress(ProcessLookupError):
                run.launcher.send_signal(number)
        return Injected("the command", codes=codes)

    return inject


def _power_cut(target: Target) -> Injected | None:
    target.run.kill_everything()
    return Injected("the command, all ranks and writers")


def _lost_memory(target: Target) -> Injected | None:
    """As a node does that is started again: what only memory held is gone."""
    target.run.kill_everything()
    shutil.rmtree(target.run.memory, ignore_errors=True)
    return Injected("everything, and the node's memory")


def _damage_memory(target: Target) -> Injected | None:
    run = target.run
    run.kill_everything()
    images = sorted(run.memory.rglob(_TENSORS))
    if not images:
        return Injected("everything; no checkpoint was in memory")
    image = target.random.choice(images)
    _flip_bit(image, target.random)
    return Injected(f"everything, and one bit of {image.parent.parent.name}'s local checkpoint")


def _damage_disk(damage: Callable[[Path, random.Random], None], pattern: str) -> Callable[[Target], Injected | None]:
    """Damages a file of the newest checkpoint on disk, with nothing left in memory; leaves the only one alone, without
    which the run ends with exit 4 as it should."""

    def inject(target: Target) -> Injected | None:
        run = target.run
        run.kill_everything()
        shutil.rmtree(run.memory, ignore_errors=True)
        checkpoints = run.checkpoints()
        if len(checkpoints) < 2:
            return Injected(f"everything, and no file: {len(checkpoints)} checkpoints on disk")
        newest = checkpoints[-1]
        path = target.random.choice(sorted(newest.glob(pattern)))
        damage(path, target.random)
        return Injected(f"everything, and {newest.name}/{path.name}", passed_by=True)

    return inject


def _flip_bit(path: Path, draw: random.Random) -> None:
    with path.open("r+b") as file:
        place = draw.randrange(path.stat().st_size)
        file.seek(place)
        byte = file.read(1)[0] ^ (1 << draw.randrange(8))
        file.seek(place)
        file.write(bytes([byte]))


def _truncate(path: Path, draw: random.Random) -> None:
    with path.open("r+b") as file:
        file.truncate(draw.randrange(path.stat().st_size))


def _remove(path: Path, _draw: random.Random) -> None:
    path.unlink()


def _torn_ledger(target: Target) -> Injected | None:
    """As after a power cut in the middle of a write."""
    target.run.kill_everything()
    with (target.run.run_dir / METRICS_FILE).open("ab") as ledger:
        ledger.write(b'{"step": 7, "samples": 11')
    return Injected("everything, and half a line at the end of metrics.jsonl")


def _second_start(target: Target) -> Injected | None:
    """The same command while the run trains: it must be refused, and the run not notice it."""
    second = target.run.give_command()
    code = second.wait(120)
    if not target.run.running:
        return None
    return Injected(f"a second start, which ended with exit code {code}", codes=(code,))


def _strangers(target: Target) -> Injected | None:
    """Somebody who scans ports writes noise to all that the run listens on."""
    ports = set()
    for process in target.run.processes:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            ports |= {at.laddr.port for at in process.net_connections("tcp") if at.status == psutil.CONN_LISTEN}
    noise = target.random.randbytes(_STRANGER_BYTES)

    def call(port: int) -> None:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
            connection.sendall(noise)

    threads = [threading.Thread(target=call, args=(port,)) for port in sorted(ports)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return Injected(f"{len(ports)} ports")


def _changed_data(target: Target) -> Injected | None:
    """One document more at the end of the dataset."""
    target.run.kill_everything()
    saved = _saved(target.dataset)
    with IndexedDatasetAppender(target.dataset, "int32") as writer:
        writer.append([1, 2, 3])
    return Injected("everything, and the data", _restorer(saved), codes=(DataError.exit_code,))


def _damaged_index(target: Target) -> Injected | None:
    target.run.kill_everything()
    saved = _saved(target.dataset)
    _truncate(Path(f"{target.dataset}.idx"), target.random)
    return Injected("everything, and the data's index", _restorer(saved), codes=(DataError.exit_code,))


def _saved(prefix: Path) -> dict[Path, tuple[bytes, int]]:
    files = sorted(prefix.parent.glob(f"{prefix.name}.*"))
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def _restorer(saved: dict[Path, tuple[bytes, int]]) -> Callable[[], None]:
    def restore() -> None:
        for path, (content, _) in saved.items():
            path.write_bytes(content)

    return restore


def _changed_seed(target: Target) -> Injected | None:
    target.run.kill_everything()
    return Injected("everything, and train.seed", further=("train.seed=4242",), codes=(ConfigError.exit_code,))


_KILLED, _STOPPED, _SEGV = signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV
_IN_PLACE, _AGAIN, _UNHARMED, _REFUSED = (
    Consequence.in_place,
    Consequence.again,
    Consequence.unharmed,
    Consequence.refused,
)
FAULTS = {
    fault.name: fault
    for fault in (
        Fault("kill_rank", "SIGKILL to a rank", _IN_PLACE, _signal_rank(_KILLED)),
        Fault("crash_rank", "SIGSEGV to a rank", _IN_PLACE, _signal_rank(_SEGV)),
        Fault("stop_rank", "SIGSTOP to a rank, for good", _IN_PLACE, _signal_rank(_STOPPED)),
        Fault("hang_rank", "a rank sleeps for good while its peers wait in a collective", _IN_PLACE, _order("sleep")),
        Fault("hold_gil", "native code of a rank keeps the interpreter's lock for good", _IN_PLACE, _order("hold_gil")),
        Fault("fail_rank", "a rank raises an exception", _IN_PLACE, _order("raise")),
        Fault("exit_rank", "a rank ends without a word", _IN_PLACE, _order("exit")),
        Fault("slow_rank", "a rank is stopped half of its time, for seconds", _UNHARMED, _slow_rank),
        Fault("kill_writer", "SIGKILL to a process that writes checkpoints", _UNHARMED, _signal_writer(_KILLED)),
        Fault("stop_writer", "SIGSTOP to such a process, for good", _UNHARMED, _signal_writer(_STOPPED)),
        Fault("full_disk", "no file of a rank or writer can grow, for seconds", _UNHARMED, _full_disk),
        Fault("second_start", "the same command while the run trains", _UNHARMED, _second_start),
        Fault("strangers", "random bytes to every port that the run listens on", _UNHARMED, _strangers),
        Fault("kill_launcher", "SIGKILL to the command", _AGAIN, _signal_launcher(_KILLED)),
        Fault("power_cut", "SIGKILL to the command and everything it started", _AGAIN, _power_cut),
        Fault("preempt", "SIGTERM to the command", _AGAIN, _signal_launcher(signal.SIGTERM, Preempted.exit_code)),
        Fault("interrupt", "SIGINT to the command", _AGAIN, _signal_launcher(signal.SIGINT, StopRequested.exit_code)),
        Fault(
            "preempt_twice",
            "a second SIGTERM while the run saves",
            _AGAIN,
            # The second may come when the run has saved and ended.
            _signal_launcher(signal.SIGTERM, EXIT_INTERRUPTED, Preempted.exit_code, twice=True),
        ),
        Fault("lost_memory", "a power cut that takes the local checkpoints, too", _AGAIN, _lost_memory),
        Fault("damaged_memory", "a power cut, and a flipped bit in a local checkpoint", _AGAIN, _damage_memory),
        Fault("flipped_bit", "a power cut, and a flipped bit on disk", _AGAIN, _damage_disk(_flip_bit, _TENSORS)),
        Fault("truncated_file", "a power cut, and a file on disk cut off", _AGAIN, _damage_disk(_truncate, _TENSORS)),
        Fault("removed_file", "a power cut, and a file on disk removed", _AGAIN, _damage_disk(_remove, _TENSORS)),
        Fault(
            "damaged_manifest", "a power cut, and a manifest cut off", _AGAIN, _damage_disk(_truncate, MANIFEST_FILE)
        ),
        Fault("torn_ledger", "a power cut in the middle of a line of the ledger", _AGAIN, _torn_ledger),
        Fault("changed_data", "a document is added to the dataset", _REFUSED, _changed_data),
        Fault("damaged_index", "the dataset's index is cut off", _REFUSED, _damaged_index),
        Fault("changed_seed", "another train.seed", _REFUSED, _changed_seed),
    )
}
"""All kinds by name."""
