"""Faults that a campaign injects, each with its required consequence."""

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

from megads.api import (
    MANIFEST_FILE,
    METRICS_FILE,
    ConfigError,
    DataError,
    IndexedDatasetAppender,
    Preempted,
    StopRequested,
)
from megads.errors import EXIT_INTERRUPTED
from megads.tools.chaos.attacked_run import AttackedRun
from megads.tools.chaos.hook import fault_order_path

_SLOW_S, _FULL_S = 3.0, 1.0
_STEPS_OF_A_FULL_DISK = 30
"""Fewest remaining steps at which the disk may become full, more than a small run trains meanwhile: its last save must
succeed, as must its first one."""
_PERIOD_S = 0.05
_STRANGER_BYTES = 512
_TENSORS = "*.safetensors"


class Consequence(StrEnum):
    """Required consequence of a fault."""

    unharmed = "the run goes on"
    in_place = "a restart in place"
    again = "the same command goes on"
    refused = "the next start is refused until the fault is mended"


@dataclass(frozen=True)
class Target:
    """Target of a fault.

    Attributes:
        run: the run.
        dataset: path prefix of the run's dataset.
        random: random number generator for choices.
    """

    run: AttackedRun
    dataset: Path
    random: random.Random

    @property
    def rank(self) -> int:
        """A random rank; a different one at each access."""
        return self.random.randrange(self.run.num_ranks)


@dataclass(frozen=True)
class Injected:
    """An injected fault.

    Attributes:
        where: target of the fault, in words.
        mend: reverts damage that the run itself cannot repair.
        further: overrides of the start that must be refused.
        codes: allowed exit codes of the command that the fault ends, or of the start that is refused; empty if the
            command is killed.
        skips_checkpoint: whether the next start must name a checkpoint that it did not use.
    """

    where: str
    mend: Callable[[], None] = lambda: None
    further: tuple[str, ...] = ()
    codes: tuple[int, ...] = ()
    skips_checkpoint: bool = False


@dataclass(frozen=True)
class Fault:
    """One kind of fault.

    Attributes:
        name: name of the kind.
        text: description.
        consequence: required consequence.
        inject: injects the fault; returns None if that is currently impossible.
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
    """Returns a function that makes a rank fail from inside, after its current step."""

    def inject(target: Target) -> Injected | None:
        rank = target.rank
        path = fault_order_path(target.run.run_dir, rank)
        path.write_text(order)
        # An order after the last step is not carried out.
        if not target.run.wait_until(lambda: not path.exists(), 30.0):
            path.unlink(missing_ok=True)
            return None
        return Injected(f"rank {rank}")

    return inject


def _slow_rank(target: Target) -> Injected | None:
    """Stops a rank for half of the time, in short intervals, for a few seconds."""
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
    """Prevents files of ranks and writers from growing for some seconds by RLIMIT_FSIZE, to simulate a full disk."""
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
    """Kills everything and removes the in-memory checkpoints, as a reboot of the node does."""
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
    """Returns a function that damages a file of the newest checkpoint on disk and removes the checkpoints in memory.

    It does not damage the only checkpoint: without one, the run ends with exit 4, as documented.
    """

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
        return Injected(f"everything, and {newest.name}/{path.name}", skips_checkpoint=True)

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
    """Kills everything and leaves a partial line in metrics.jsonl, as after a power failure during a write."""
    target.run.kill_everything()
    with (target.run.run_dir / METRICS_FILE).open("ab") as ledger:
        ledger.write(b'{"step": 7, "samples": 11')
    return Injected("everything, and half a line at the end of metrics.jsonl")


def _second_start(target: Target) -> Injected | None:
    """Starts the same command during training: it must be refused without an effect on the run."""
    second = target.run.give_command()
    code = second.wait(120)
    if not target.run.running:
        return None
    return Injected(f"a second start, which ended with exit code {code}", codes=(code,))


def _strangers(target: Target) -> Injected | None:
    """Sends random bytes to all ports on which the run listens, as a port scanner does."""
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
    """Appends a document to the dataset."""
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
        Fault("stop_rank", "SIGSTOP to a rank, never resumed", _IN_PLACE, _signal_rank(_STOPPED)),
        Fault("hang_rank", "a rank sleeps forever while its peers wait in a collective", _IN_PLACE, _order("sleep")),
        Fault("hold_gil", "native code of a rank holds the GIL forever", _IN_PLACE, _order("hold_gil")),
        Fault("fail_rank", "a rank raises an exception", _IN_PLACE, _order("raise")),
        Fault("exit_rank", "a rank exits without an error message", _IN_PLACE, _order("exit")),
        Fault("slow_rank", "a rank is stopped for half of the time, for seconds", _UNHARMED, _slow_rank),
        Fault("kill_writer", "SIGKILL to a checkpoint writer", _UNHARMED, _signal_writer(_KILLED)),
        Fault("stop_writer", "SIGSTOP to a checkpoint writer, never resumed", _UNHARMED, _signal_writer(_STOPPED)),
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
            # The second signal may arrive after the run has saved and exited.
            _signal_launcher(signal.SIGTERM, EXIT_INTERRUPTED, Preempted.exit_code, twice=True),
        ),
        Fault("lost_memory", "a power cut that also loses the local checkpoints", _AGAIN, _lost_memory),
        Fault("damaged_memory", "a power cut, and a flipped bit in a local checkpoint", _AGAIN, _damage_memory),
        Fault("flipped_bit", "a power cut, and a flipped bit on disk", _AGAIN, _damage_disk(_flip_bit, _TENSORS)),
        Fault("truncated_file", "a power cut, and a file on disk cut off", _AGAIN, _damage_disk(_truncate, _TENSORS)),
        Fault("removed_file", "a power cut, and a file on disk removed", _AGAIN, _damage_disk(_remove, _TENSORS)),
        Fault(
            "damaged_manifest", "a power cut, and a manifest cut off", _AGAIN, _damage_disk(_truncate, MANIFEST_FILE)
        ),
        Fault("torn_ledger", "a power cut while a line of metrics.jsonl is written", _AGAIN, _torn_ledger),
        Fault("changed_data", "a document is added to the dataset", _REFUSED, _changed_data),
        Fault("damaged_index", "the dataset's index is cut off", _REFUSED, _damaged_index),
        Fault("changed_seed", "train.seed is changed", _REFUSED, _changed_seed),
    )
}
"""All kinds of faults by name."""
