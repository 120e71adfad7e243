"""Listening addresses of a run's servers: a single address, the loopback for runs on one machine."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence

from megads.errors import ConfigError

LOOPBACK = "127.0.0.1"
_BACKLOG = 4096
_ANY_PORT = 9


def listen(address: str) -> socket.socket:
    """Returns a socket that listens on a free port of one address.

    Raises:
        ConfigError: the address is not one of this machine.
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
    """Returns the numeric address at which the nodes of a job reach this machine.

    The machine's own name may resolve to a loopback address on itself (127.0.1.1 in many /etc/hosts) and to another
    address on all other nodes. In that case the source address of connections to the other nodes is returned.

    Args:
        own: name or address of this machine, as given by the scheduler.
        nodes: names or addresses of the job's nodes.

    Raises:
        ConfigError: a name does not resolve.
    """
    resolved = _resolve(own)
    if not _is_loopback(resolved):
        return resolved
    # One non-loopback address is enough: resolving thousands of names takes a while.
    other = next((address for address in map(_resolve, nodes) if not _is_loopback(address)), None)
    if other is None:
        return resolved
    try:
        return address_towards(other)
    except OSError as error:
        raise ConfigError(f"{own} is a loopback address here, and there is no route to {other}: {error}") from error


def address_towards(host: str) -> str:
    """Returns the numeric source address of connections from this machine to a host.

    Raises:
        ConfigError: the host name does not resolve.
        OSError: there is no route to the host.
    """
    other = _resolve(host)
    with socket.socket(socket.AF_INET6 if ":" in other else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((other, _ANY_PORT))  # sends nothing: the kernel only selects a route
        return str(probe.getsockname()[0])


def _resolve(address: str) -> str:
    try:
        return str(socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigError(f"the node address {address} does not resolve here: {error}") from error


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
