"""`megads checkpoint` on checkpoints in a remote store."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megads.cli.checkpoint import run
from megads.cli.verb import Invocation
from megads.config.frozen import freeze
from megads.config.root import RootConfig
from megads.errors import CheckpointError, ConfigError
from megads.runtime.config import RunConfig
from megads.tools.checkpoints.config import CheckpointAction, CheckpointActionConfig
from megads.tools.remote.store import RemoteStore
from tests.checkpoint.small_checkpoints import seed_of, write_checkpoint
from tests.tools.remote.uploads import complete


def do(action: CheckpointAction, given: object, **keys: object) -> int:
    return run(CheckpointActionConfig(action, str(given), **keys), Invocation({}, set()))  # type: ignore[arg-type]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run with checkpoints of steps 2 and 4, which was started without checkpoint.upload."""
    run_dir = tmp_path / "run"
    for step in (2, 4):
        write_checkpoint(run_dir, step)
    freeze(replace(RootConfig(), run=RunConfig(id="name", dir=str(run_dir))), run_dir / "config.yaml")
    return run_dir


@pytest.mark.always
def test_upload_list_verify_download(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches an action that takes the URL for a folder, one that misses damage, and an unreadable download."""
    root, url = f"file://{tmp_path}/store", f"file://{tmp_path}/store/name"
    with pytest.raises(ConfigError, match="give output=<url>"):
        do(CheckpointAction.upload, run_dir)
    assert do(CheckpointAction.upload, run_dir, output=root) == 0
    assert "uploaded steps 2, 4" in capsys.readouterr().out
    assert do(CheckpointAction.upload, run_dir, output=root) == 0
    assert "all checkpoints are already there" in capsys.readouterr().out
    assert [found.step for found in complete(RemoteStore(url))] == [4, 2]
    assert do(CheckpointAction.list, url) == 0 and do(CheckpointAction.verify, url) == 0
    said = capsys.readouterr().out
    assert "newest" in said and said.count(": sound: 3 files") == 2
    assert do(CheckpointAction.download, url, output=str(tmp_path / "back")) == 0 and seed_of(tmp_path / "back") == 4
    assert (
        do(CheckpointAction.download, url, steps=2, output=str(tmp_path / "two")) == 0
        and seed_of(tmp_path / "two") == 2
    )
    with pytest.raises(ConfigError, match="exists"):
        do(CheckpointAction.download, url, output=str(tmp_path / "back"))
    path = tmp_path / "store/name/checkpoints/step_00000004/rank_00002.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    capsys.readouterr()
    assert do(CheckpointAction.verify, url) == 4
    said = capsys.readouterr().out
    assert "step_00000004: damaged" in said and "step_00000002: sound" in said
    with pytest.raises(CheckpointError, match="no checkpoint of step 3; it has 2, 4"):
        do(CheckpointAction.verify, url, steps=[3])


@pytest.mark.parametrize(
    ("action", "given", "keys", "told"),
    [
        ("average", "s3://bucket/x", {"output": "x"}, "takes a folder"),
        ("upload", "s3://bucket/x", {}, "takes a folder"),
        ("download", "runs/x", {"output": "x"}, "download takes a URL"),
        ("download", "s3://bucket/x", {}, "download needs output"),
        ("download", "s3://bucket/x", {"output": "x", "steps": [1, 2]}, "give one step"),
        ("list", "s3://a:b@bucket/x", {}, "holds credentials"),
    ],
)
def test_what_is_refused(action: str, given: str, keys: dict[str, object], told: str) -> None:
    """Catches a URL or folder in a place for the other, incomplete arguments, and credentials in a URL."""
    with pytest.raises(ConfigError, match=told):
        do(CheckpointAction[action], given, **keys)
