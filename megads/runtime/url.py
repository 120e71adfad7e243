"""Validation of URLs of checkpoint stores and datasets. Does not import torch."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from urllib.parse import urlsplit

from megads.errors import ConfigError

LOCAL_SCHEMES = ("file", "local")
# They do not persist data beyond this process, or are views of other stores.
_NO_STORES = (
    *("memory", "data", "zip", "tar", "libarchive", "git", "github", "reference", "root", "dir"),
    *("cached", "blockcache", "filecache", "simplecache", "generic", "asynclocal"),
)
_READ_ONLY = ("http", "https")


def is_url(text: str) -> bool:
    """Whether a text is a URL and not a path."""
    return "://" in text


def check_url(url: str, key: str, holds: str = "checkpoints", read_only: bool = False) -> None:
    """Refuses URLs that cannot be file stores; checks only the text and installed packages.

    Args:
        url: URL, for example "s3://bucket/prefix".
        key: config key, for the message.
        holds: content of the store, for the message.
        read_only: whether a read-only store is acceptable.

    Raises:
        ConfigError: the URL is malformed, contains credentials, has a scheme that does not store files, or its driver
            is not installed.
    """
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ConfigError(f"{key} is no URL ({error}): give one like s3://bucket/prefix") from None
    if parts.username is not None or parts.password is not None or "@" in parts.netloc:
        raise ConfigError(
            f"{key} holds credentials: remove them from the URL and set them as the driver expects them "
            "(AWS_ACCESS_KEY_ID, AWS_PROFILE, GOOGLE_APPLICATION_CREDENTIALS)"
        )
    if not is_url(url):
        path = Path(url).absolute() if url else "/path"
        raise ConfigError(f"{key} = {url}: no URL; a folder is file://{path}, a bucket s3://bucket/prefix")
    if "::" in url or parts.query or parts.fragment or any(ord(letter) < 33 for letter in url):
        raise ConfigError(f"{key} = {url}: want scheme://bucket/prefix, with no space, '?', '#' or '::'")
    if ".." in parts.path.split("/"):
        raise ConfigError(f"{key} = {url}: leave '..' out")
    scheme = parts.scheme
    if scheme in LOCAL_SCHEMES and (parts.netloc or not parts.path.strip("/")):
        raise ConfigError(f"{key} = {url}: want an absolute path, as in file:///shared/checkpoints")
    if scheme not in LOCAL_SCHEMES and not parts.netloc:
        raise ConfigError(f"{key} = {url}: the bucket is missing, as in {scheme}://bucket/prefix")
    if scheme in _NO_STORES or (scheme in _READ_ONLY and not read_only):
        raise ConfigError(f"{key} = {url}: {scheme}:// keeps no {holds}; take s3://, gs:// or file://")
    _require_driver(scheme, url, key)


def _require_driver(scheme: str, url: str, key: str) -> None:
    # Imported late: it imports asyncio, which slows shell completion down.
    import fsspec
    from fsspec.registry import known_implementations

    known = known_implementations.get(scheme)
    if known is not None:
        package = str(known["class"]).partition(".")[0]
        if importlib.util.find_spec(package) is None:
            extra = {"s3fs": "megads[s3]", "gcsfs": "megads[gcs]"}.get(package, package)
            raise ConfigError(f"{key} = {url}: {scheme}:// needs the package {package}: pip install '{extra}'")
        return
    try:
        fsspec.get_filesystem_class(scheme)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"{key} = {url}: {error}; take s3://, gs:// or file://") from None
