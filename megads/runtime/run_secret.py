"""The secret of one start of a run: who knows it belongs to the start, whoever else reaches its ports does not.

It is handed over as a file of mode 600 in the run directory, which every agent and rank reads anyway. The environment
would not do: `apptainer exec --cleanenv` drops it, srun sends it through the scheduler, and everything that a rank
starts inherits it. Command lines are for everyone to read. A rank's environment holds the file's path only.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megads.errors import ConfigError, UnhealthyNode
from megads.runtime import environment

_BYTES = 32
_PATTERN = ".secret*"
_POLL_S = 0.1
APPEARS_WITHIN_S = 30.0
"""A shared file system may show a file to another node seconds later."""


class Secret:
    """A key that never leaves the processes of a start: names, proofs and seals are derived from it.

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
        """A new one."""
        return cls(secrets.token_bytes(_BYTES))

    @classmethod
    def decode(cls, text: str) -> Secret:
        """Reads what `encode` wrote; raises ValueError on anything else, without quoting it."""
        try:
            return cls(bytes.fromhex(text.strip()))
        except ValueError:
            raise ValueError("what is there is no secret") from None

    def encode(self) -> str:
        """The key as hex digits, for a file of mode 600 or a pipe."""
        return self._key.hex()

    def proof(self, purpose: str, *parts: bytes) -> bytes:
        """HMAC-SHA256 of some parts, 32 bytes; equal for nobody else, and for no other purpose."""
        mac = hmac.new(self._key, digestmod=hashlib.sha256)
        for part in (purpose.encode(), *parts):
            mac.update(len(part).to_bytes(8, "big") + part)
        return mac.digest()

    def name(self, purpose: str) -> str:
        """A name that nobody can guess, of a part of a store."""
        return self.proof("name", purpose.encode()).hex()

    def seal(self, purpose: str, text: str) -> str:
        """A text with the proof that it comes from this start."""
        return f"{self.proof(f'seal {purpose}', text.encode()).hex()} {text}"

    def unseal(self, purpose: str, sealed: bytes) -> str | None:
        """The text of `seal`; None for anything that was not sealed with this secret and for this purpose."""
        proof, _, text = sealed.partition(b" ")
        expected = self.proof(f"seal {purpose}", text).hex().encode()
        return text.decode() if hmac.compare_digest(proof, expected) else None


def secret_path(run_dir: Path, lease: int | None) -> Path:
    """Where the secret of a start is; an orphan of an earlier start finds no file of its own any more."""
    return run_dir / (".secret" if lease is None else f".secret_start_{lease}")


@contextmanager
def start_secret(run_dir: Path, lease: int | None) -> Iterator[None]:
    """Makes the secret of a start, which lives as long as the block; the caller holds the run directory.

    What a killed start left is removed: a secret that somebody may have read, or put there, is worth nothing.

    Args:
        run_dir: the run directory.
        lease: number of the start.

    Raises:
        ConfigError: the file cannot be kept from others.
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
    """Makes the file; fails where there is one."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w") as file:
        # An inherited access list may have added to the mode.
        os.fchmod(file.fileno(), 0o600)
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        if mode & 0o077:
            path.unlink()
            raise ConfigError(
                f"{path} has mode {mode:03o} where 600 was asked for: the file system keeps no permissions, and others "
                "could read the secret of this start; choose another folder with run.dir=<path>"
            )
        file.write(secret.encode() + "\n")


def read_secret(path: Path, within_s: float = APPEARS_WITHIN_S) -> Secret:
    """Reads the secret of the start that this process belongs to.

    Args:
        path: of its file.
        within_s: how long it may take to appear.

    Raises:
        UnhealthyNode: it is not there, or is none that only this user could have read.
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
