"""`megads checkpoint reshard`: the same values in other files, and a run that continues from them."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megads.checkpoint.manifest import read_manifest
from megads.checkpoint.rank_file import DTYPE_NAMES
from megads.checkpoint.read import CheckpointHandle, load_unsharded, open_checkpoint, read_into
from megads.checkpoint.store import save_parts
from megads.engine.interface import Shard
from megads.errors import CheckpointError, ConfigError
from megads.runtime.metrics import LedgerRecord
from megads.tools.checkpoints import command as checkpoints
from megads.tools.checkpoints.command import Resharded, average, reshard, verify
from megads.tools.checkpoints.config import CheckpointAction, CheckpointActionConfig
from megads.tools.generate import dataset_prefixes
from megads.train.resume import find_resume_point
from tests.checkpoint.random_layouts import global_tensors, random_layout, run_record, shards_of
from tests.command import StartCommand, checkpoint_of, checksums, events_of, small_model, steps_of
from tests.distributed import run_ranks
from tests.small_run import hot_model, model_config, write_dataset, write_run
from tests.test_resume import damage

SOFTWARE = {"python": "3.0.0", "torch": "1.0.0", "threads": "64"}
"""Software versions of the run, other than those of the tests."""
LARGEST_ROW_BYTES = 6 * 7 * 4


def do(run: Path, output: Path, files: int = 3, **keys: object) -> Resharded:
    config = CheckpointActionConfig(
        CheckpointAction.reshard, str(run), output=str(output), files=files, **keys  # type: ignore[arg-type]
    )  # fmt: skip
    config.check()
    return reshard(config)


def odd_tensors() -> dict[str, Tensor]:
    """Tensors of every dtype, with the bit patterns that a conversion or a sum would change."""
    bits = [0x7FC00001, 0x7F800001, -0x80000000, 0x00000001, 0x7F800000, 0x3F800001]
    patterns = torch.tensor(bits, dtype=torch.int64).to(torch.int32)
    return {
        "weight/odd": patterns.repeat(5, 1).view(torch.float32),
        "exp_avg/odd": patterns.repeat(5, 1).view(torch.int32).view(torch.bfloat16).clone(),
        "state/odd": torch.arange(9, dtype=torch.float64).div(3).reshape(9, 1),
        "count/odd": torch.arange(2**62, 2**62 + 4),
        "scale/odd": torch.tensor(0.1),
    }


def write_source(run_dir: Path, step: int = 6) -> Path:
    """A checkpoint of four ranks with rectangles of every kind."""
    parts = [shards_of(part, global_tensors(step)) for part in random_layout(step, 4)]
    parts[0] += [Shard(key, tuple(t.shape), (0,) * t.dim(), t) for key, t in odd_tensors().items()]
    record = replace(run_record(step), ledger=LedgerRecord(7, "0" * 32))
    return save_parts(run_dir, parts, record, versions=SOFTWARE)


def bytes_of(tensors: dict[str, Tensor]) -> dict[str, bytes]:
    return {key: tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for key, tensor in tensors.items()}


def holds_the_source(handle: CheckpointHandle, step: int = 6) -> bool:
    """Whether a checkpoint has every tensor of `write_source`, bit for bit and in its dtype."""
    wanted = global_tensors(step) | odd_tensors()
    stored = {key: list(handle.parts_of(key)) for key in handle.manifest.tensors}
    dtypes = {key: {DTYPE_NAMES[tensor.dtype]} for key, tensor in wanted.items()}
    assert {key: {part.dtype for part in parts} for key, parts in stored.items()} == dtypes
    found = {key: torch.empty_like(tensor) for key, tensor in wanted.items()}
    read_into(handle, [Shard(key, tuple(t.shape), (0,) * t.dim(), t) for key, t in found.items()])
    return bytes_of(found) == bytes_of(wanted)


@pytest.mark.always("4-100")
@pytest.mark.parametrize("block_bytes", [1, 100, 2**26])
@pytest.mark.parametrize("files", [1, 2, 4, 7, 100_000])
def test_there_and_back(files: int, block_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a value that is converted, or lost at the boundary of a file or block; a row in two files; the record of
    another run, or of the software that resharded; and files that are empty or of very different sizes."""
    monkeypatch.setattr(checkpoints, "_BLOCK_BYTES", block_bytes)
    before = open_checkpoint(write_source(tmp_path / "run"))
    made = do(tmp_path / "run", tmp_path / "out", files)
    after = open_checkpoint(tmp_path / "out")
    assert holds_the_source(before) and holds_the_source(after)
    assert after.manifest.run == replace(before.manifest.run, ledger=None)
    assert after.manifest.software == SOFTWARE
    names = sorted(after.manifest.files)
    assert names == [f"rank_{number:05d}.safetensors" for number in range(made.files)]
    assert made.files == files if files < 10 else 30 < made.files < files
    sizes = [sum(tensor.nbytes for tensor in load_file(after.folder / name).values()) for name in names]
    assert max(abs(size - sum(sizes) / made.files) for size in sizes) <= LARGEST_ROW_BYTES
    parts = [part for key in after.manifest.tensors for part in after.parts_of(key)]
    assert len(parts) < len(after.manifest.tensors) + made.files
    do(tmp_path / "out", tmp_path / "back", 4)
    assert holds_the_source(open_checkpoint(tmp_path / "back"))


def test_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a whole file or tensor in memory. Mapped pages of the source do not count: the kernel can reclaim
    them."""
    monkeypatch.setattr(checkpoints, "_BLOCK_BYTES", 2**20)
    rows, mib = torch.ones(96 * 256, 1024), 1024
    save_parts(tmp_path / "run", [[Shard("weight/a", (96 * 256, 1024), (0, 0), rows)]], run_record(1))
    do(tmp_path / "run", tmp_path / "warm")
    start_kib = peak_kib = _anonymous_kib()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak_kib
        while not done.is_set():
            peak_kib = max(peak_kib, _anonymous_kib())
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    for files in (1, 5):
        do(tmp_path / "run", tmp_path / f"out{files}", files)
    done.set()
    watcher.join()
    assert peak_kib - start_kib < 16 * mib


def _anonymous_kib() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def test_which_checkpoint(tmp_path: Path) -> None:
    """Catches another checkpoint than the requested one, and an older one instead of a damaged newest one."""
    run, out = tmp_path / "run", tmp_path / "out"
    for step in (2, 9, 6):
        write_source(run, step)
    for given, keys, step in ((run, {}, 6), (run, {"steps": 9}, 9), (run, {"steps": [2]}, 2)):
        do(given, out, overwrite=True, **keys)
        assert open_checkpoint(out).state["step"] == step
    do(checkpoint_of(run, 2), out, overwrite=True)
    assert open_checkpoint(out).state["step"] == 2
    with pytest.raises(CheckpointError, match="has no checkpoint of step 3; it has 2, 6, 9"):
        do(run, tmp_path / "other", steps=3)
    damage(checkpoint_of(run, 6))
    with pytest.raises(CheckpointError, match=r"step_00000006: .* fails its checksum") as refused:
        do(run, tmp_path / "other")
    assert refused.value.exit_code == 4
    with pytest.raises(CheckpointError, match="checksum"):
        do(run, out, overwrite=True)
    assert open_checkpoint(out).state["step"] == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


def test_a_file_that_goes_away_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an incomplete output where a training run deletes the checkpoint that is being read."""
    source = write_source(tmp_path / "run")

    def opened(path: Path) -> CheckpointHandle:
        handle = open_checkpoint(path)
        max(source.glob("*.safetensors")).unlink()
        return handle

    monkeypatch.setattr(checkpoints, "open_checkpoint", opened)
    with pytest.raises(CheckpointError, match=r"rank_00003\.safetensors: No such file"):
        do(tmp_path / "run", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_outputs_that_are_taken(tmp_path: Path) -> None:
    """Catches a source that its output overwrites, and overwrite=true that deletes a folder of another command, or a
    resharded folder in which a run was trained."""
    run, out = tmp_path / "run", tmp_path / "out"
    write_source(run)
    (tmp_path / "link").symlink_to(run)
    for output, told in (
        (run, "is .*/run, which is only read"),
        (tmp_path / "link", "is .*/run, which is only read"),
        (run / "checkpoints" / "other", "is inside .*/run"),
        (tmp_path, "contains .*/run"),
    ):
        with pytest.raises(ConfigError, match=told):
            do(run, output, overwrite=True)
    with pytest.raises(ConfigError, match="is inside"):
        do(checkpoint_of(run, 6), run / "out")
    do(run, out)
    with pytest.raises(ConfigError, match="exists; choose another folder or give overwrite=true"):
        do(run, out)
    do(run, out, 2, overwrite=True)
    assert len(open_checkpoint(out).manifest.files) == 2
    with pytest.raises(ConfigError, match="was not created by megads checkpoint average"):
        average(CheckpointActionConfig(CheckpointAction.average, str(run), output=str(out), overwrite=True))
    (out / "events.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match="was not created by megads checkpoint reshard"):
        do(run, out, overwrite=True)


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"files": 2}, "reshard needs output=<folder>"),
        ({"output": "x"}, "reshard needs files=<number>"),
        ({"output": "x", "files": 0}, "files = 0: must be at least 1"),
        ({"output": "x", "files": -1}, "files = -1: must be at least 1"),
        ({"output": "x", "files": 2, "steps": [1, 2]}, "reshard takes one checkpoint; give one step"),
        ({"action": CheckpointAction.verify, "files": 2}, "verify makes no files: leave files=2 out"),
    ],
)
def test_bad_keys(keys: dict[str, object], told: str) -> None:
    """Catches keys that are silently ignored."""
    with pytest.raises(ConfigError, match=told):
        CheckpointActionConfig(**({"action": CheckpointAction.reshard, "run": "run"} | keys)).check()  # type: ignore[arg-type]


def test_what_reads_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches an output that `verify` refuses, or with other weights, tokenizer or data for `generate` and `export`."""
    model = hot_model(model_config())
    write_run(tmp_path / "run", write_dataset(tmp_path / "data"), model)
    (tmp_path / "run" / "hugging_face").mkdir()
    own = ("tokenizer.json", "chat_template.jinja", "tokenizer.0123456789abcdef.json")
    names = (*own, "hugging_face/generation_config.json")
    for name in names:
        (tmp_path / "run" / name).write_text(name)
    do(tmp_path / "run", tmp_path / "out", 5)
    assert verify(str(tmp_path / "out"), None) == 0 and "sound" in capsys.readouterr().out
    loaded = load_unsharded(open_checkpoint(tmp_path / "out"), torch.device("cpu"), torch.float32)
    for name, weight in model.parameters_by_name().items():
        assert torch.equal(loaded.parameters_by_name()[name], weight), name
    assert dataset_prefixes(tmp_path / "out") == dataset_prefixes(tmp_path / "run") != []
    assert all((tmp_path / "out" / name).read_text() == name for name in names)


def reshard_killed_at(folder: Path, event_number: int) -> str:
    """Reshards, and is killed by SIGKILL before the given file operation (open, mkdir, rename, ...) on the output."""
    seen = 0

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        path = str(arguments[0]) if arguments and isinstance(arguments[0], str | os.PathLike) else ""
        if path.startswith((f"{folder}/out", f"{folder}/.out")) and (event.startswith("os.") or event == "open"):
            seen += 1
            if seen == event_number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    do(folder / "run", folder / "out", 3)
    return "made"


@pytest.mark.slow
@pytest.mark.distributed
def test_a_kill(tmp_path: Path) -> None:
    """Catches an incomplete output under the final name, and partial files of a killed command that stay."""
    write_source(tmp_path / "run")
    kills = 0
    for event_number in range(1, 400, 11):
        try:
            assert run_ranks(reshard_killed_at, 1, tmp_path, event_number) == ["made"]
            break
        except AssertionError as error:
            assert "the process died" in str(error)
        kills += 1
        if (tmp_path / "out").exists():
            assert holds_the_source(open_checkpoint(tmp_path / "out"))
            shutil.rmtree(tmp_path / "out")
    assert kills > 3, "the kills did not hit the command"
    assert holds_the_source(open_checkpoint(tmp_path / "out"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


@pytest.mark.distributed
@pytest.mark.slow
def test_training_goes_on_from_it(corpus: Path, megads: StartCommand) -> None:
    """Catches lost state (moments, step counts, position in data and schedule), and lost records of the run, without
    which a start cannot detect changed settings."""
    overrides = small_model(
        corpus, train__precision="bf16", parallel__tp=2, train__steps=4, checkpoint__every_steps=2, checkpoint__keep=0,
        model__hidden_dropout=0.1,
    )  # fmt: skip
    run, out, other = megads.folder / "run", megads.folder / "out", megads.folder / "other"
    assert megads("train", *overrides, f"run.dir={run}").end().code == 0
    ended = megads("checkpoint", "reshard", f"run={run}", f"output={out}", "files=5", "steps=2").end()
    assert ended.code == 0, ended.err
    assert "step 2 in 5 files, 2 before" in ended.out
    source, past = find_resume_point(str(checkpoint_of(run, 2)), other), find_resume_point(str(out), other)
    assert source is not None and past is not None and source.data is not None and source.config is not None
    assert (past.config, past.data) == (source.config, source.data)
    refused = megads("train", *overrides, f"checkpoint.load={out}", f"run.dir={other}", "train.seed=99").end()
    assert refused.code == 2 and "train.seed" in refused.err
    wanted, state = steps_of(run)[2:], checksums(checkpoint_of(run, 4))
    run.rename(megads.folder / "elsewhere")
    ended = megads("train", *overrides, f"checkpoint.load={out}", f"run.dir={other}").end()
    assert ended.code == 0, ended.err
    (event,) = events_of(other, "resume")
    assert (event["step"], event["software_differences"]) == (2, [])
    assert steps_of(other) == wanted and len(wanted) == 2
    assert checksums(checkpoint_of(other, 4)) == state
    assert read_manifest(checkpoint_of(other, 4)).run.state["step"] == 4
