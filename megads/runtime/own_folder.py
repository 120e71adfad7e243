"""Folders of this user in places where every user may write: the temporary folder and /dev/shm.

Their names are predictable, so that the processes of a node find the same folder. Another user may have made a folder
of that name first, with planted content: every such folder is made or refused here, and nowhere else.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

_OTHERS_WRITE = 0o022


def own_path(kind: str = "", suffix: str = "", root: Path | None = None) -> Path:
    """Returns the path of a folder of this user; it may not exist, and may not be this user's.

    Args:
        kind: what it holds, for example "cache".
        suffix: distinguishes several folders of this kind.
        root: where it is; None is the temporary folder.
    """
    parts = ("megads", kind, str(os.getuid()), suffix)
    return (root or Path(tempfile.gettempdir())) / "-".join(filter(None, parts))


def make_own(folder: Path) -> Path:
    """Creates a folder that no other user can write to, or accepts it if it is there; returns it.

    Raises:
        OSError: it cannot be created; it is a link or no folder, belongs to another user, or others can write to it.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    if not is_users_folder(folder):
        raise PermissionError(
            1,
            "it is a link, belongs to another user, or others can write to it: what it holds is not used",
            str(folder),
        )
    return folder


def is_users_folder(folder: Path) -> bool:
    """Whether a folder exists, is no link, belongs to this user, and cannot be written to by others."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & _OTHERS_WRITE
