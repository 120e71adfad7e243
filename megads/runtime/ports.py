"""Open ports of a run: their addresses, and the secret with which its processes authenticate each other.

A server listens on a single address, the loopback for runs on one machine. The secret of one start is passed in a file
of mode 600 in the run directory, which every agent and rank can read anyway. Environment variables are unsuitable:
`apptainer exec --cleanenv` drops them, srun sends them through the scheduler, and all child processes of a rank inherit
them. Command lines are public. A rank's environment contains the file's path only.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import secrets
import socket
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from megads.errors import ConfigError, UnhealthyNode
from megads.runtime import environment

_BYTES = 32
_PATTERN = ".secret*"
_POLL_S = 0.1
APPEARS_WITHIN_S = 30.0
"""Seconds to wait for the file: a shared file system may show it to another node seconds later."""


class Secret:
    """A key known only to the processes of a start; names, proofs and seals are derived from it.

    Args:
        key: 32 random bytes.
    """

    def __init__(self, key: bytes):
        if len(key) != _BYTES:
            raise ValueError(f"a secret has {_BYTES} bytes, not {len(key)}")
        self._key = key

    def __repr__(self) -> str:
        return "Secret(...)"

    @classmethod
    def random(cls) -> Secret:
        """Returns a new random secret."""
        return cls(secrets.token_bytes(_BYTES))

    @classmethod
    def decode(cls, text: str) -> Secret:
        """Decodes the output of `encode`; raises ValueError, without quoting the text, on anything else."""
        try:
            return cls(bytes.fromhex(text.strip()))
        except ValueError:
            raise ValueError("it contains no secret") from None

    def encode(self) -> str:
        """Returns the key as hex digits, for a file of mode 600 or a pipe."""
        return self._key.hex()

    def proof(self, purpose: str, *parts: bytes) -> bytes:
        """Returns the HMAC-SHA256 of `purpose` and `parts`, 32 bytes."""
        mac = hmac.new(self._key, digestmod=hashlib.sha256)
        for part in (purpose.encode(), *parts):
            mac.update(len(part).to_bytes(8, "big") + part)
        return mac.digest()

    def name(self, purpose: str) -> str:
        """Returns an unguessable prefix for a part of a store."""
        return self.proof("name", purpose.encode()).hex()

    def seal(self, purpose: str, text: str) -> str:
        """Returns a text with a proof that it comes from this start."""
        return f"{self.proof(f'seal {purpose}', text.encode()).hex()} {text}"

    def unseal(self, purpose: str, sealed: bytes) -> str | None:
        """Returns the text given to `seal`; None if it was not sealed with this secret and for this purpose."""
        proof, _, text = sealed.partition(b" ")
        expected = self.proof(f"seal {purpose}", text).hex().encode()
        return text.decode() if hmac.compare_digest(proof, expected) else None


def secret_path(run_dir: Path, lease: int | None) -> Path:
    """Returns the file of a start's secret; that of an earlier start no longer exists for its orphaned ranks."""
    return run_dir / (".secret" if lease is None else f".secret_start_{lease}")


@contextmanager
def start_secret(run_dir: Path, lease: int | None) -> Iterator[None]:
    """Creates the secret of a start for the duration of the block; the caller holds the lease of the run directory.

    Secrets left by killed starts are removed, as others may have read or planted them.

    Args:
        run_dir: run directory.
        lease: number of the start.

    Raises:
        ConfigError: the file cannot be written, or cannot be protected from others.
    """
    path = secret_path(run_dir, lease)
    try:
        for old in run_dir.glob(_PATTERN):
            old.unlink()
        _write(path, Secret.random())
    except OSError as error:
        with suppress(OSError):
            path.unlink()
        raise ConfigError(
            f"{path} cannot be written ({error.strerror}): make its folder writable, free some space there, or choose "
            "another with run.dir=<path>"
        ) from error
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()


def _write(path: Path, secret: Secret) -> None:
    """Creates the file; fails if it exists."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w") as file:
        # An inherited ACL may have added permissions.
        os.fchmod(file.fileno(), 0o600)
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        if mode & 0o077:
            path.unlink()
            raise ConfigError(
                f"{path} has mode {mode:03o} where 600 was asked for: the file system does not keep permissions, and "
                "others could read the secret of this start; choose another folder with run.dir=<path>"
            )
        file.write(secret.encode() + "\n")


def read_secret(path: Path, within_s: float = APPEARS_WITHIN_S) -> Secret:
    """Reads the secret of the start that this process belongs to.

    Args:
        path: file of the secret.
        within_s: seconds to wait for the file to appear.

    Raises:
        UnhealthyNode: the file does not exist, is readable by others, or does not contain a secret.
    """
    deadline = time.monotonic() + within_s
    while True:
        try:
            with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
                mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
                if mode & 0o077:
                    raise UnhealthyNode(f"{path} has mode {mode:03o}, not 600: others may know this start's secret")
                return Secret.decode(file.read(4 * _BYTES))
        except FileNotFoundError:
            if time.monotonic() > deadline:
                raise UnhealthyNode(
                    f"{path} is not there on {environment.node_name()}: the start that this process belongs to is "
                    "over, or this node does not see the run directory"
                ) from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise UnhealthyNode(f"{path} cannot be read on {environment.node_name()}: {reason}") from None
        time.sleep(_POLL_S)


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


def gloo_interface(peer: str) -> str | None:
    """Returns the network interface for gloo on this node of several; None if gloo's own choice is right.

    gloo listens on the first address of this machine's host name. In many /etc/hosts that is 127.0.1.1, at which no
    other node reaches it, and without any usable address it takes 127.0.0.1. In both cases it is to use the interface
    of the route to the launcher, as the launcher does for its own store.

    Args:
        peer: address of the launcher's store. If it is one of this machine, its own interface is returned.

    Raises:
        ConfigError: the address does not resolve.
        OSError: there is no route to it.
    """
    if not _is_loopback(_address_of_host_name()):
        return None
    source = address_towards(peer)
    if _is_loopback(source):
        return None  # all nodes are on this machine, as in a rehearsal
    import psutil

    names = [name for name, found in psutil.net_if_addrs().items() if source in [each.address for each in found]]
    return names[0] if names else None


def _address_of_host_name() -> str:
    """The address that gloo listens on by default: the first one of the host name that belongs to this machine."""
    with suppress(OSError):
        for family, kind, protocol, _, target in socket.getaddrinfo(socket.gethostname(), 0, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(target)
                return str(target[0])
    return LOOPBACK


def _resolve(address: str) -> str:
    try:
        return str(socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigError(f"the node address {address} does not resolve here: {error}") from error


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
