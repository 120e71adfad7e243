"""Keys of checkpoint.* that contradict each other, and URLs that cannot hold checkpoints, are refused."""

from __future__ import annotations

import pytest

from megads.checkpoint.config import CheckpointConfig
from megads.errors import ConfigError


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("bucket/prefix", "no URL; a folder is file:///"),
        ("", "no URL"),
        ("s3://", "the bucket is missing"),
        ("s3:///prefix", "the bucket is missing"),
        ("s3://key:secretword@bucket/x", "holds credentials"),
        ("s3://key@bucket/x", "holds credentials"),
        ("file://relative/path", "absolute path"),
        ("file:///", "absolute path"),
        ("memory://x", "keeps no checkpoints"),
        ("https://example.org/x", "keeps no checkpoints"),
        ("nosuch://bucket/x", "nosuch"),
        ("gs://bucket/x", r"needs the package gcsfs: pip install 'megads\[gcs\]'"),
        ("s3://bucket/x?versionId=3", "no space"),
        ("s3://bucket/a b", "no space"),
        ("simplecache::s3://bucket/x", "no space"),
        ("s3://bucket/../x", "leave '..' out"),
    ],
)
def test_urls_are_refused(url: str, told: str) -> None:
    """Catches a wrong URL that is noticed only hours later, and a password in config.yaml."""
    with pytest.raises(ConfigError, match=told) as refused:
        CheckpointConfig(upload=url).check()
    assert "secretword" not in str(refused.value)


def test_settings_are_refused() -> None:
    """Catches a key that has no effect, and a password that would be written to disk."""
    for changes, told in (
        ({"upload_keep": 2}, "only applies with checkpoint.upload"),
        ({"upload": "file:///x", "upload_keep": -1}, "must not be negative"),
        ({"upload": "file:///x", "upload_wait_s": -1.0}, "want a number of seconds"),
        ({"init_from": "s3://a:b@bucket/x"}, "holds credentials"),
        ({"load": "s3://a:b@bucket/x"}, "holds credentials"),
    ):
        with pytest.raises(ConfigError, match=told):
            CheckpointConfig(**changes).check()  # type: ignore[arg-type]
    CheckpointConfig(upload="s3://bucket/prefix", upload_keep=0, load="s3://bucket/prefix/run").check()
