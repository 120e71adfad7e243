"""Where servers of a run listen: on one address, the loopback's where everybody is on this machine."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence

from megads.errors import ConfigError

LOOPBACK = "127.0.0.1"
_BACKLOG = 4096
_ANY_PORT = 9


def listen(address: str) -> socket.socket:
    """A socket that listens on a free port of one address.

    Raises:
        ConfigError: it is no address of this machine.
    """
    try:
        family, _, _, _, target = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        return socket.create_server(target[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"this process cannot listen on {address} ({error.strerror or error}), at which the nodes are to reach it: "
            "on SLURM it runs on the first node of the job, whose NodeAddr must be an address of that node"
        ) from error


def launcher_address(own: str, nodes: Sequence[str]) -> str:
    """The address of this machine at which the nodes of a job reach it, as a number.

    A name may mean the loopback on the machine that bears it (127.0.1.1 in many an /etc/hosts) and another address on
    all others: then it is the one from which this machine reaches them.

    Args:
        own: address of this machine, as the scheduler says.
        nodes: those of the job's nodes.

    Raises:
        ConfigError: a name does not resolve.
    """
    resolved = _resolve(own)
    if not _is_loopback(resolved):
        return resolved
    # One that is not the loopback's is enough: thousands of names take a name server a while.
    other = next((address for address in map(_resolve, nodes) if not _is_loopback(address)), None)
    if other is None:
        return resolved
    try:
        return address_towards(other)
    except OSError as error:
        raise ConfigError(f"{own} is a loopback address here, and there is no way to {other}: {error}") from error


def address_towards(host: str) -> str:
    """The address of this machine from which it reaches a host, as a number.

    Raises:
        ConfigError: the host's name does not resolve.
        OSError: there is no way to it.
    """
    other = _resolve(host)
    with socket.socket(socket.AF_INET6 if ":" in other else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((other, _ANY_PORT))  # sends nothing: the kernel only looks for the way
        return str(probe.getsockname()[0])


def _resolve(address: str) -> str:
    try:
        return str(socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigError(f"the node address {address} does not resolve here: {error}") from error


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
