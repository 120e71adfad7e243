"""Operations on checkpoints in an object store: upload, download, list and verify."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from megads.api import (
    CONFIG_FILE,
    EXIT_OK,
    CheckpointError,
    ConfigError,
    EventWriter,
    Progress,
    check_url,
    list_checkpoints,
    load_frozen,
)
from megads.checkpoint.config import step_folder
from megads.tools.checkpoints.command import manifest_cells, print_table
from megads.tools.checkpoints.config import CheckpointActionConfig
from megads.tools.generate import run_path
from megads.tools.output_folder import require_free_space, require_replaceable, write_origin
from megads.tools.remote.download import fetch_file, open_remote_run, remote_run, restore_newest
from megads.tools.remote.store import RemoteStore
from megads.tools.remote.upload import RemoteCheckpoint, remote_checkpoints
from megads.tools.remote.uploader import Uploader

_DOWNLOADED_BY = "megads checkpoint download"
_TRIES = 3


def upload(run: str, url: str | None) -> str:
    """Uploads the files of a run's checkpoints that a store lacks; continues an interrupted upload.

    Args:
        run: path or name of the run.
        url: URL of the store; None uses the run's checkpoint.upload.

    Returns:
        A summary to print.

    Raises:
        ConfigError: no URL is given and the run has no checkpoint.upload.
        CheckpointError: there are no checkpoints, or the store fails three times in a row.
    """
    run_dir = run_path(run)
    config = load_frozen(run_dir / CONFIG_FILE, complete=False)
    if url is not None:
        check_url(url, "output")
        config = replace(config, checkpoint=replace(config.checkpoint, upload=url))
    if config.checkpoint.upload is None:
        raise ConfigError(
            f"{run_dir} was started without checkpoint.upload: give output=<url>, such as s3://bucket/prefix"
        )
    if not list_checkpoints(run_dir):
        raise CheckpointError(f"{run_dir} holds no checkpoints")
    with closing(EventWriter(run_dir)) as events, Progress("uploading checkpoints") as progress:

        def tell(step: int, done_bytes: int, total_bytes: int) -> None:
            progress.update(done_bytes, f"step {step:,} of {total_bytes / 1e6:,.1f} MB")

        uploader = Uploader(config, run_dir, lambda: True, events, tell, _TRIES)
        uploader.run()
    steps = ", ".join(f"{step:,}" for step in sorted(uploader.uploaded))
    done = (
        f"uploaded step{'s' * (len(uploader.uploaded) > 1)} {steps}" if steps else "all checkpoints are already there"
    )
    return f"{config.checkpoint.upload_url(config.run.id)}: {done}"


@dataclass(frozen=True)
class Downloaded:
    """Result of `download`.

    Attributes:
        folder: folder of the new run, which has one checkpoint.
        step: step of the checkpoint.
        skipped: newer checkpoints that were skipped because they are not usable, with the reason.
    """

    folder: Path
    step: int
    skipped: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"not usable: {text}" for text in self.skipped]
        lines += [f"{self.folder}: step {self.step:,}", f"continue it: megads train ... checkpoint.load={self.folder}"]
        return "\n".join(lines)


def download(config: CheckpointActionConfig) -> Downloaded:
    """Downloads the newest usable checkpoint of a run in a store, or that of a step, with the run's records.

    The same command continues an interrupted download.

    Raises:
        ConfigError: the output exists and may not be replaced.
        CheckpointError: there is no usable checkpoint, or it cannot be written.
    """
    output = Path(str(config.output))
    if list_checkpoints(output) or not output.exists():
        require_replaceable(output, config.overwrite, _DOWNLOADED_BY)
    store, candidates = open_remote_run(config.run)
    if config.wanted_steps:
        candidates = [found for found in candidates if found.step in config.wanted_steps]
        if not candidates:
            raise CheckpointError(f"{config.run} has no complete checkpoint of step {config.wanted_steps[0]}")
    size = max(found.manifest.nbytes for found in candidates if found.manifest is not None)
    require_free_space(output, size)
    output.mkdir(parents=True, exist_ok=True)
    write_origin(output, _DOWNLOADED_BY)
    with Progress(f"fetching from {store.url}", size) as progress:
        restored = restore_newest(store, output, candidates, tell=progress.update)
    return Downloaded(output, restored.manifest.run.state["step"], restored.skipped)


def list_remote(url: str) -> None:
    """Prints one line per checkpoint of a run in a store. Reads only manifests.

    Raises:
        CheckpointError: the run has no checkpoints.
    """
    store, found = _found(url, None)
    rows: list[Sequence[str]] = []
    newest = max(found.values(), key=lambda checkpoint: checkpoint.sequence)
    for step, checkpoint in found.items():
        manifest = checkpoint.manifest
        if manifest is None or checkpoint.problem:
            rows.append((f"{step:,}", *[""] * 4, f"not usable: {checkpoint.problem}"))
        else:
            rows.append((f"{step:,}", *manifest_cells(manifest), "newest" if checkpoint is newest else ""))
    print_table(("step", "samples", "tokens", "layout", "size", ""), rows)
    print(store.url)


def verify_remote(url: str, steps: Sequence[int] | None) -> int:
    """Downloads every file of checkpoints, verifies its checksums, and prints the result for each checkpoint.

    One file at a time is on disk, in the folder for temporary files.

    Returns:
        The exit code: 4 if a checkpoint is damaged, otherwise 0.

    Raises:
        CheckpointError: a requested checkpoint does not exist.
    """
    store, found = _found(url, steps)
    code = EXIT_OK
    for step, checkpoint in found.items():
        name, begin_s = step_folder(Path(), step).name, time.monotonic()
        try:
            _verify(store, checkpoint)
        except CheckpointError as error:
            code, said = error.exit_code, f"damaged: {error}"
        else:
            assert checkpoint.manifest is not None
            rate = checkpoint.manifest.nbytes / 1e6 / max(time.monotonic() - begin_s, 1e-9)
            said = f"sound: {len(checkpoint.manifest.files):,} files, {rate:,.1f} MB/s"
        print(f"{store.url}/checkpoints/{name}: {said}", flush=True)
    return code


def _verify(store: RemoteStore, checkpoint: RemoteCheckpoint) -> None:
    manifest = checkpoint.manifest
    if manifest is None or checkpoint.problem:
        raise CheckpointError(checkpoint.problem)
    done = 0
    with (
        Progress(f"verifying step {checkpoint.step:,}", manifest.nbytes) as progress,
        tempfile.TemporaryDirectory(prefix="megads-verify-") as folder,
    ):
        for name in sorted(manifest.files):
            fetch_file(store, checkpoint, Path(folder), name)
            (Path(folder) / name).unlink()
            done += manifest.files[name].bytes
            progress.update(done)


def _found(url: str, steps: Sequence[int] | None) -> tuple[RemoteStore, dict[int, RemoteCheckpoint]]:
    store, step = remote_run(url)
    found = remote_checkpoints(store)
    wanted = [step] if step is not None else list(steps or found)
    missing = [at for at in wanted if at not in found]
    if missing or not found:
        there = f"it has {', '.join(map(str, found))}" if found else "it has none"
        raise CheckpointError(f"{store.url} has no checkpoint{f' of step {missing[0]}' if missing else ''}; {there}")
    return store, {at: found[at] for at in sorted(wanted)}
