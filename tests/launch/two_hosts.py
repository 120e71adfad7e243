"""Two hosts on this machine: network, mount and UTS namespaces, joined by a veth pair, with a rank on each.

`python -m tests.launch.two_hosts <run_dir>` is to be run in namespaces of its own (`OUTERMOST`), prints the agents'
reports and exits; `--hold <names>` only creates hosts of these names, for `held_hosts`. Each host's name resolves to
127.0.1.1 on itself, as Debian and Ubuntu set it up, and to the address of its network interface on the other host.
Agents and ranks are the real ones; what srun would do, this program does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("host-a", "host-b")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
INTERFACES = ("uplink-a", "uplink-b")
OUTERMOST = ("unshare", *(() if os.getuid() == 0 else ("--user", "--map-root-user")), "--net", "--mount", "--uts")
"""Command line before a program that may create hosts; without root, in a user namespace."""
_TIMEOUT_S = 60.0
_RANK_TIMEOUT_S = 20.0
_HOST = 'hostname "$1"; mount --bind "$2" /etc/hosts; ip link set lo up; echo ready; exec cat'


@contextmanager
def hosts(folder: Path, names: Sequence[str] = NAMES) -> Iterator[list[int]]:
    """Creates two hosts; yields the pid of a process in each, for nsenter.

    Args:
        folder: folder for the files that take the place of /etc/hosts.
        names: addresses under which the hosts know each other; the first part is the name of the host.

    Raises:
        OSError: a command is missing.
        RuntimeError: namespaces or virtual interfaces are not permitted here.
    """
    holders = []
    try:
        for number, name in enumerate(names):
            table, host_name = folder / f"hosts_{number}", name.partition(".")[0]
            others = [
                f"{address} {other} {other.partition('.')[0]}"
                for address, other in zip(ADDRESSES, names, strict=True)
                if other != name
            ]
            table.write_text("\n".join(["127.0.0.1 localhost", f"127.0.1.1 {name} {host_name}", *others]) + "\n")
            # The host lasts as long as this process's end of the pipe.
            holder = subprocess.Popen(
                ["unshare", "--net", "--mount", "--uts", "sh", "-ec", _HOST, "sh", host_name, str(table)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            holders.append(holder)
            assert holder.stdout is not None
            if holder.stdout.readline() != "ready\n":
                raise RuntimeError("unshare, mount or ip failed, see above")
        pids = [holder.pid for holder in holders]
        ends = [f"{name} netns {pid}" for name, pid in zip(INTERFACES, pids, strict=True)]
        _run(f"ip link add {ends[0]} type veth peer name {ends[1]}")
        for pid, interface, address in zip(pids, INTERFACES, ADDRESSES, strict=True):
            _run(f"nsenter --target {pid} --net ip address add {address}/24 dev {interface}")
            _run(f"nsenter --target {pid} --net ip link set {interface} up")
        yield pids
    finally:
        for holder in holders:
            holder.communicate()


@contextmanager
def held_hosts(folder: Path, names: Sequence[str]) -> Iterator[list[tuple[str, ...]]]:
    """Creates two hosts for programs that this process starts; yields the command line before a program on each.

    Skips the test where that is not permitted.

    Args:
        folder: folder for the files that take the place of /etc/hosts.
        names: as those of `hosts`.
    """
    # Imported here: ranks and agents import this module, too.
    import pytest

    command = [*OUTERMOST, sys.executable, "-m", "tests.launch.two_hosts", str(folder), "--hold", *names]
    try:
        process = subprocess.Popen(
            command,
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    except OSError as error:
        pytest.skip(f"two hosts need namespaces: {error}")
    with process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        pids = json.loads(process.stdout.readline() or "null")
        if not isinstance(pids, list):
            pytest.skip(f"two hosts are not possible here: {pids or ''} {process.stderr.read().strip()}")
        user = () if os.getuid() == 0 else ("--user", "--preserve-credentials")
        try:
            yield [(*_on(pid), *user) for pid in pids]
        finally:
            process.stdin.close()


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stderr.strip()}")


def launch(run_dir: Path, pids: list[int]) -> list[Mapping[str, Any]]:
    """Starts an agent with one rank on each host, this process being on the first; returns the agents' reports."""
    from megads.launch.node_agent import AGENT, MessageKind, place_of
    from megads.runtime.control_store import ControlStore
    from megads.runtime.ports import launcher_address, read_secret, secret_path, start_secret

    with start_secret(run_dir, None):
        control = ControlStore(read_secret(secret_path(run_dir, None)), launcher_address(NAMES[0], NAMES))
        control.assign({name: place_of(number, 2, name) for number, name in enumerate(NAMES)})
        rank = ("-m", "tests.launch.two_hosts", str(run_dir), "--rank")
        agent = (sys.executable, *AGENT, str(run_dir), "--store", f"{control.host}:{control.port}")
        agents = [
            subprocess.Popen(
                [*_on(pid), *agent, "--ranks", "1", "--threads", "1", "--cpu", "--", *rank],
                env=os.environ | {"SLURMD_NODENAME": name},
            )
            for pid, name in zip(pids, NAMES, strict=True)
        ]
        reports: list[Mapping[str, Any]] = []
        deadline = time.monotonic() + _TIMEOUT_S
        while len(reports) < 2 and time.monotonic() < deadline:
            reports += [found["report"] for found in control.hear() if found["kind"] == MessageKind.report]
            time.sleep(0.1)
        control.order_end()
        for process in agents:
            process.wait()
    return sorted(reports, key=lambda report: report["node"])


def _on(pid: int) -> tuple[str, ...]:
    """Command line before a program that runs on the host of a process."""
    return ("nsenter", "--target", str(pid), "--net", "--mount", "--uts", "--wdns=.")


def _rank(run_dir: Path) -> int:
    """Body of a rank: opens the control plane as in training and gathers the host names over it."""
    import socket

    import torch

    from megads.runtime.distributed import world

    with world(torch.device("cpu"), _RANK_TIMEOUT_S) as control:
        print("met", *control.gather(socket.gethostname(), str))
    return 0


def main() -> None:
    """Runs a rank, or creates the hosts and runs the launcher on the first of them."""
    run_dir = Path(sys.argv[1])
    if sys.argv[2:] == ["--rank"]:
        from megads.launch.rank import run_rank, start_rank

        start_rank(run_dir)
        run_rank(run_dir, lambda: _rank(run_dir))
    if sys.argv[2:3] == ["--launcher"]:
        print(json.dumps(launch(run_dir, [int(pid) for pid in sys.argv[3:]])))
        return
    try:
        if sys.argv[2:3] == ["--hold"]:
            with hosts(run_dir, sys.argv[3:]) as pids:
                print(json.dumps(pids), flush=True)
                sys.stdin.read()
            return
        with hosts(run_dir) as pids:
            command = [*_on(pids[0]), sys.executable, "-m", "tests.launch.two_hosts", str(run_dir), "--launcher"]
            sys.exit(subprocess.run([*command, *map(str, pids)], check=False).returncode)
    except (OSError, RuntimeError) as error:
        print(json.dumps({"not permitted": str(error)}))


if __name__ == "__main__":
    main()
