"""Tests that a run that lost its machine resumes from object storage: the real command, a real S3 server."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.command import StartCommand, checkpoint_of, checksums, events_of, small_model, steps_of
from tests.s3_server import S3Server, s3_server

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


def flip(checkpoint: Path) -> None:
    path = min(checkpoint.glob("*.safetensors"))
    content = bytearray(path.read_bytes())
    content[-7] ^= 4
    path.write_bytes(content)


@pytest.mark.slow
def test_a_run_continues_elsewhere_from_its_upload(corpus: Path, megads: StartCommand, s3: S3Server) -> None:
    """Catches files that a start needs but that are not uploaded, losses that differ, and secrets in written files.

    The run directory is lost after step 4; at step 6 all its checkpoints are damaged; another run loads from the URL.
    """
    overrides = small_model(
        corpus, parallel__dp=2, checkpoint__every_steps=2, schedule__name="constant", model__hidden_dropout=0.1,
    )  # fmt: skip
    reference, run_dir, other = (megads.folder / name for name in ("reference", "run", "other"))

    def train(steps: int, folder: Path, *more: str) -> str:
        ended = megads("train", *overrides, f"train.steps={steps}", f"run.dir={folder}", *more, variables=s3.variables)
        code, out, err = ended.end()
        assert code == 0, err
        return out

    train(8, reference)
    uploaded = ("run.id=lost", f"checkpoint.upload={s3.url}")
    train(4, run_dir, *uploaded)
    assert {event["step"] for event in events_of(run_dir, "checkpoint_uploaded")} == {2, 4}
    shutil.rmtree(run_dir)
    assert "fetched step_00000004" in train(6, run_dir, *uploaded)
    assert events_of(run_dir, "resume")[-1]["step"] == 4 and steps_of(run_dir) == steps_of(reference)[:6]
    for step in (4, 6):
        flip(checkpoint_of(run_dir, step))
    assert "fetched step_00000006" in train(8, run_dir, *uploaded)
    assert events_of(run_dir, "checkpoint_restored")[-1]["step"] == 6
    assert steps_of(run_dir) == steps_of(reference)
    assert checksums(checkpoint_of(run_dir, 8)) == checksums(checkpoint_of(reference, 8))
    train(8, other, "run.id=other", f"checkpoint.load={s3.url}/lost/checkpoints/step_00000006")
    assert checksums(checkpoint_of(other, 8)) == checksums(checkpoint_of(reference, 8))
    secret = s3.variables["AWS_SECRET_ACCESS_KEY"].encode()
    assert not [path for path in run_dir.rglob("*") if path.is_file() and secret in path.read_bytes()]
    assert not [key for key in s3.objects() if secret in s3.get(key)]


@pytest.mark.slow
def test_unusable_upload_targets_are_refused_at_the_start(corpus: Path, megads: StartCommand, s3: S3Server) -> None:
    """Catches a run that trains for hours before it reports that its checkpoints cannot be uploaded."""
    overrides = small_model(corpus, train__steps=2, run__dir=megads.folder / "run")
    for url, variables, told in (
        ("s3://nobucket/x", s3.variables, "bucket does not exist"),
        (s3.url, {**s3.variables, "AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "Could not connect"),
        (f"file://{megads.folder}", {}, "is the run directory itself"),
    ):
        run_id = "run.id=run"
        code, _, err = megads("train", *overrides, run_id, f"checkpoint.upload={url}", variables=variables).end()
        assert code == 2 and told in err, err
    assert not (megads.folder / "run").exists()
