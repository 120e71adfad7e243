"""Restores what a run directory lost from a store, but nothing that is damaged."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megads.checkpoint.config import LATEST_FILE
from megads.checkpoint.manifest import read_manifest
from megads.errors import CheckpointError
from megads.tools.remote.download import (
    fetch_description,
    has_usable,
    newest_first,
    newest_intact_sequence,
    open_remote_run,
    remote_run,
    restore_newest,
)
from megads.tools.remote.store import RemoteError, RemoteStore
from megads.tools.remote.upload import remote_checkpoints
from tests.checkpoint.small_checkpoints import seed_of, write_checkpoint
from tests.tools.remote.uploads import upload


@pytest.fixture
def store(tmp_path: Path) -> RemoteStore:
    """A store with checkpoints of steps 2, 4 and 6."""
    store = RemoteStore(f"file://{tmp_path}/store/run")
    for step in (2, 4, 6):
        upload(store, write_checkpoint(tmp_path / "run", step))
    return store


def restore(store: RemoteStore, run_dir: Path) -> int:
    restored = restore_newest(store, run_dir, newest_first(remote_checkpoints(store)))
    return int(restored.manifest.run.state["step"])


def damage(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "flipped":
        content[-5] ^= 2
    elif how == "header":
        content[40] ^= 2
    path.write_bytes(content[:-1] if how == "truncated" else content)
    if how == "missing":
        path.unlink()


def test_an_empty_folder_gets_all_that_a_start_needs(store: RemoteStore, tmp_path: Path) -> None:
    """Catches a restored checkpoint without ledger, configs or tokenizer, and one that `latest` does not name."""
    here, back = tmp_path / "run", tmp_path / "back"
    settings = here / "hugging_face" / "config.json"
    settings.parent.mkdir()
    settings.write_text("{}")
    store.put(settings, "hugging_face/config.json")
    assert restore(store, back) == 6 and seed_of(back) == 6
    records = ("config.yaml", "tokenizer.json", "configs/0123.yaml", "hugging_face/config.json")
    for name in (*records, "metrics.jsonl", "checkpoints/latest"):
        assert (back / name).read_bytes() == (here / name).read_bytes(), name
    left = sorted(path.name for path in (back / "checkpoints").iterdir())
    assert left == [LATEST_FILE, "step_00000006"], "a hidden folder stays"


@pytest.mark.parametrize("how", ["flipped", "header", "truncated", "missing"])
def test_a_damaged_one_is_passed_by(how: str, store: RemoteStore, tmp_path: Path) -> None:
    """Catches a damaged file that is restored, and a restore that stops at the first damaged checkpoint."""
    damage(tmp_path / "store/run/checkpoints/step_00000006/rank_00001.safetensors", how)
    back = tmp_path / "back"
    assert restore(store, back) == 4 and seed_of(back) == 4
    assert not (back / "checkpoints" / ".step_00000006.partial").exists()
    for step in (2, 4):
        damage(tmp_path / f"store/run/checkpoints/step_0000000{step}/rank_00000.safetensors", how)
    shutil.rmtree(back)
    with pytest.raises(CheckpointError, match="is usable"):
        restore(store, back)
    assert not list(back.glob("checkpoints/step_*"))


def test_a_killed_restore_goes_on(store: RemoteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a restore that looks complete too early, and one that downloads again what is there already."""
    back, fetched = tmp_path / "back", list[str]()
    good = RemoteStore.get

    def get(self: RemoteStore, name: str, local: Path, *rest: object) -> None:
        if len(fetched) == 2 and name.endswith(".safetensors"):
            raise RemoteError("the store is gone")
        fetched.append(name)
        good(self, name, local, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(RemoteStore, "get", get)
    with pytest.raises(RemoteError, match="gone"):
        restore(store, back)
    assert not list(back.glob("checkpoints/step_*")) and len(fetched) == 2
    first = fetched.copy()
    fetched[:] = ["", "", ""]
    assert restore(store, back) == 6 and seed_of(back) == 6
    assert not set(first) & set(fetched)


def test_what_is_here_and_sound_stays(store: RemoteStore, tmp_path: Path) -> None:
    """Catches a restore that overwrites a run's own files, and one that loses its old metrics."""
    back = tmp_path / "back"
    write_checkpoint(back, 1)
    own = (back / "metrics.jsonl").read_bytes()
    (back / "config.yaml").write_text("own\n")
    assert restore(store, back) == 6
    assert (back / "metrics.1.jsonl").read_bytes() == own and (back / "config.yaml").read_text() == "own\n"
    with (back / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7}\n')
    shutil.rmtree(back / "checkpoints")
    assert restore(store, back) == 6
    assert (back / "metrics.jsonl").read_text().endswith('{"step": 7}\n'), "the ranks cut it back themselves"


def test_a_damaged_ledger_does_not_come_back(store: RemoteStore, tmp_path: Path) -> None:
    """Catches restored metrics that are not those of the checkpoint."""
    damage(tmp_path / "store/run/checkpoints/step_00000006/metrics.jsonl", "flipped")
    assert restore(store, tmp_path / "back") == 6
    assert not list((tmp_path / "back").glob("*metrics*"))


def test_a_damaged_folder_here_gives_way(store: RemoteStore, tmp_path: Path) -> None:
    """Catches a run directory judged intact by its file names alone, and a damaged folder that is not replaced."""
    run_dir = tmp_path / "run"
    assert newest_intact_sequence(run_dir) == 3 and has_usable(run_dir)
    assert newest_intact_sequence(tmp_path / "nothing") == 0 and not has_usable(tmp_path / "nothing")
    damage(run_dir / "checkpoints/step_00000006/rank_00001.safetensors", "truncated")
    assert newest_intact_sequence(run_dir) == 2
    damage(run_dir / "checkpoints/step_00000004/rank_00001.safetensors", "header")
    assert newest_intact_sequence(run_dir) == 1 and has_usable(run_dir)
    damage(run_dir / "checkpoints/step_00000002/rank_00001.safetensors", "flipped")
    assert newest_intact_sequence(run_dir) == 1 and not has_usable(run_dir)
    assert restore(store, run_dir) == 6 and seed_of(run_dir) == 6


def test_urls_of_runs_and_checkpoints(store: RemoteStore, tmp_path: Path) -> None:
    """Catches the URL of a checkpoint mistaken for a run's, and an error that does not say what is there."""
    url = f"file://{tmp_path}/store/run"
    for given in (url, f"{url}/", f"{url}/checkpoints"):
        assert (remote_run(given)[0].url, remote_run(given)[1]) == (url, None)
        assert [found.step for found in open_remote_run(given)[1]] == [6, 4, 2]
    assert [found.step for found in open_remote_run(f"{url}/checkpoints/step_00000004")[1]] == [4]
    store.remove("checkpoints/step_00000004/manifest.json")
    with pytest.raises(CheckpointError, match=r"step_00000004: its upload was not completed"):
        open_remote_run(f"{url}/checkpoints/step_00000004")
    with pytest.raises(CheckpointError, match="there is no complete checkpoint"):
        open_remote_run(f"{url}x")


def test_a_description_has_no_tensors(store: RemoteStore, tmp_path: Path) -> None:
    """Catches a download of gigabytes of tensors to read a model's name, and stale results of an earlier download: a
    checkpoint that is no longer the newest, or a record that has changed."""
    about = tmp_path / "cache" / "about"
    about.mkdir(parents=True)
    (about / "config.yaml").write_text("of another run")
    folder = fetch_description(store.url, about)
    assert folder == about / "checkpoints" / "step_00000006" and read_manifest(folder).run.state["step"] == 6
    assert [path.name for path in folder.iterdir()] == ["manifest.json"]
    assert (about / "config.yaml").read_bytes() == (tmp_path / "run" / "config.yaml").read_bytes()
    folder = fetch_description(f"{store.url}/checkpoints/step_00000004", about)
    assert [path.name for path in (about / "checkpoints").iterdir()] == ["step_00000004"] == [folder.name]
    with pytest.raises(CheckpointError, match="there is no complete checkpoint"):
        fetch_description(f"{store.url}/checkpoints/step_00000005", about)
    assert folder.exists() and [path.name for path in about.parent.iterdir()] == ["about"]


def test_two_starts_look_at_the_same_time(store: RemoteStore, tmp_path: Path) -> None:
    """Catches a start that fails because another one replaces the same folder, and leftovers of either."""
    about = tmp_path / "cache" / "about"
    with ThreadPoolExecutor(4) as pool:
        for looked in [pool.submit(fetch_description, store.url, about) for _ in range(40)]:
            assert looked.result().name == "step_00000006"
    assert read_manifest(about / "checkpoints" / "step_00000006").run.state["step"] == 6
    assert [path.name for path in about.parent.iterdir()] == ["about"]
