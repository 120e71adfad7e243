"""A store never holds an incomplete checkpoint that looks complete: uploads are killed at every operation."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megads.checkpoint.config import Retention
from megads.errors import CheckpointError
from megads.tools.remote import upload as upload_module
from megads.tools.remote.store import RemoteError, RemoteFile, RemoteStore
from megads.tools.remote.upload import CheckpointUpload, pin_checkpoint, pins, remote_checkpoints, remove_surplus, unpin
from tests.checkpoint.small_checkpoints import write_checkpoint
from tests.tools.remote.uploads import complete, fetched_seeds, upload


class Killed(BaseException):
    """Simulates SIGKILL: nothing catches it or cleans up after it, as for a killed process."""


class CountingStore(RemoteStore):
    """Records the operations that modify or list the store, and dies before or after one of them."""

    def __init__(self, url: str, die_at: int = -1, after: bool = False):
        super().__init__(url)
        self.die_at, self.after, self.operations = die_at, after, list[str]()

    def _one(self, what: str, action: Callable[[], Any]) -> Any:
        number = len(self.operations)
        self.operations.append(what)
        if number == self.die_at and not self.after:
            raise Killed
        result = action()
        if number == self.die_at:
            raise Killed
        return result

    def put(self, local: Path, name: str, sent: Callable[[int], None] = lambda _: None) -> RemoteFile:
        result: RemoteFile = self._one(f"put {name}", lambda: super(CountingStore, self).put(local, name, sent))
        return result

    def remove(self, name: str) -> None:
        self._one(f"remove {name}", lambda: super(CountingStore, self).remove(name))

    def files(self, folder: str) -> dict[str, RemoteFile]:
        result: dict[str, RemoteFile] = self._one(f"list {folder}", lambda: super(CountingStore, self).files(folder))
        return result


def puts(store: CountingStore) -> list[str]:
    return [what.removeprefix("put ") for what in store.operations if what.startswith("put ")]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store"


def test_the_manifest_comes_last(tmp_path: Path, url: str) -> None:
    """Catches a checkpoint that is visible before its files, its ledger and the run's records are in the store."""
    folder = write_checkpoint(tmp_path / "run", 4)
    (tmp_path / "run" / "hugging_face").mkdir()
    (tmp_path / "run" / "hugging_face" / "config.json").write_text("{}")
    store = CountingStore(url)
    sent = upload(store, folder)
    checkpoint = "checkpoints/step_00000004"
    assert puts(store)[:3] == [f"{checkpoint}/rank_{rank:05d}.safetensors" for rank in range(3)]
    records = {"config.yaml", "tokenizer.json", "configs/0123.yaml", "hugging_face/config.json"}
    assert set(puts(store)[3:7]) == records
    assert puts(store)[7:] == [f"{checkpoint}/metrics.jsonl", f"{checkpoint}/manifest.json"]
    assert sent.sent_bytes == sent.share_bytes == sum(f.bytes for f in sent.manifest.files.values())
    for path in folder.iterdir():
        assert store.read(f"{checkpoint}/{path.name}") == path.read_bytes(), "not the very bytes"
    assert fetched_seeds(store, tmp_path) == {4: 4} and not pins(tmp_path / "run")


@pytest.mark.quick("nothing-True", "another-False", "the same tensors-True")
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("replaces", ["nothing", "another", "the same tensors"])
def test_killed_at_every_operation(after: bool, replaces: str, tmp_path: Path, url: str) -> None:
    """Catches an incomplete checkpoint that looks complete, an upload that starts over, and one that never completes.

    Step 2 is in the store already; step 4 is uploaded over nothing, over other tensors, or over the same tensors.
    """
    old, new = tmp_path / "old", tmp_path / "new"
    write_checkpoint(new, 2)
    if replaces != "nothing":
        write_checkpoint(old, 4, seed=4 if replaces == "the same tensors" else 40)
    write_checkpoint(new, 3)
    folder = write_checkpoint(new, 4)

    def begin() -> None:
        shutil.rmtree(tmp_path / "store", ignore_errors=True)
        upload(RemoteStore(url), new / "checkpoints" / "step_00000002")
        if replaces != "nothing":
            upload(RemoteStore(url), old / "checkpoints" / "step_00000004")

    begin()
    whole = CountingStore(url)
    upload(whole, folder)
    assert len(whole.operations) >= 7
    before = 40 if replaces == "another" else 4
    for number in range(len(whole.operations)):
        begin()
        store = CountingStore(url, number, after)
        with pytest.raises(Killed):
            upload(store, folder)
        seeds = fetched_seeds(RemoteStore(url), tmp_path / f"killed_{number}")
        assert seeds[2] == 2 and seeds.get(4, 4) in (4, before), whole.operations[number]
        rest = CountingStore(url)
        upload(rest, folder)
        last = {path for path in puts(store) if "rank_" in path} - ({puts(store)[-1]} if puts(store) else set())
        assert not last & set(puts(rest)), f"sent again after {whole.operations[number]}"
        assert fetched_seeds(RemoteStore(url), tmp_path / f"done_{number}") == {2: 2, 4: 4}
        unpin(folder.with_name(f".{folder.name}.upload"))


def test_a_store_that_lost_or_changed_a_file_gets_it_again(tmp_path: Path, url: str) -> None:
    """Catches an upload that trusts its own record of earlier uploads although the store disagrees."""
    folder = write_checkpoint(tmp_path / "run", 4)
    store = CountingStore(url)
    pin = pin_checkpoint(folder)
    assert pin is not None
    CheckpointUpload(store, tmp_path / "run", pin).send()
    first, second = (tmp_path / "store" / "checkpoints" / folder.name / f"rank_0000{i}.safetensors" for i in (0, 1))
    first.unlink()
    second.write_bytes(second.read_bytes()[:-1])
    again = CountingStore(url)
    upload(again, folder)
    assert [path[-17:] for path in puts(again)[:2]] == ["00000.safetensors", "00001.safetensors"]
    assert fetched_seeds(store, tmp_path) == {4: 4}


def test_a_file_that_somebody_changes_before_the_commit(tmp_path: Path, url: str) -> None:
    """Catches a manifest written for files that are no longer the ones verified in the store."""
    folder = write_checkpoint(tmp_path / "run", 4)
    pin = pin_checkpoint(folder)
    assert pin is not None
    started = CheckpointUpload(RemoteStore(url), tmp_path / "run", pin)
    started.send()
    (tmp_path / "store" / "checkpoints" / folder.name / "rank_00002.safetensors").unlink()
    with pytest.raises(RemoteError, match="changed or removed by another process"):
        started.commit()
    assert complete(RemoteStore(url)) == []


def test_a_damaged_checkpoint_is_not_uploaded(tmp_path: Path, url: str) -> None:
    """Catches a local file with a flipped bit that is uploaded over intact tensors."""
    folder = write_checkpoint(tmp_path / "run", 4)
    path = folder / "rank_00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 8
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="checksum"):
        upload(RemoteStore(url), folder)
    assert complete(RemoteStore(url)) == []


def test_what_retention_removes_is_uploaded_to_its_end(tmp_path: Path, url: str) -> None:
    """Catches an upload whose files retention deletes, and a ledger that is not that checkpoint's."""
    folder = write_checkpoint(tmp_path / "run", 4)
    wanted = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    pin = pin_checkpoint(folder)
    assert pin is not None
    shutil.rmtree(folder)
    (tmp_path / "run" / "metrics.jsonl").write_bytes(b'{"step": 1}\n')
    started = CheckpointUpload(RemoteStore(url), tmp_path / "run", pin)
    started.send()
    started.commit()
    assert fetched_seeds(RemoteStore(url), tmp_path) == {4: 4}
    assert RemoteStore(url).read("checkpoints/step_00000004/metrics.jsonl") == wanted


def test_a_checkpoint_that_goes_away_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches hard links to part of a checkpoint, or to parts of two, that are taken for one checkpoint."""
    folder = write_checkpoint(tmp_path / "run", 4)
    good, names = upload_module.os.link, list[str]()

    def link(source: Path, target: Path) -> None:
        names.append(Path(source).name)
        if len(names) == 2:
            shutil.rmtree(folder)
        good(source, target)

    monkeypatch.setattr(upload_module.os, "link", link)
    assert pin_checkpoint(folder) is None and not list((tmp_path / "run" / "checkpoints").glob("*step*"))
    assert pin_checkpoint(folder) is None


def test_nodes_share_the_work(tmp_path: Path, url: str) -> None:
    """Catches a file that two nodes upload, one that none uploads, and a commit that does not wait for another node."""
    folder = write_checkpoint(tmp_path / "run", 4)
    pin = pin_checkpoint(folder)
    assert pin is not None
    stores = [CountingStore(url) for _ in range(2)]
    nodes = [
        CheckpointUpload(store, tmp_path / "run", pin, node=node, num_nodes=2) for node, store in enumerate(stores)
    ]
    nodes[0].send()
    waits: list[int] = []

    def other_node() -> None:
        waits.append(1)
        if len(waits) == 3:
            nodes[1].send()

    nodes[0]._go_on = other_node
    nodes[0].commit()
    assert [len(["rank_" in path for path in puts(store) if "rank_" in path]) for store in stores] == [2, 1]
    assert fetched_seeds(RemoteStore(url), tmp_path) == {4: 4}


def test_the_files_of_a_lost_node_are_taken_over(tmp_path: Path, url: str) -> None:
    """Catches a lost node whose files are never uploaded, and a commit that waits for it forever."""
    folder = write_checkpoint(tmp_path / "run", 4)
    pin = pin_checkpoint(folder)
    assert pin is not None
    started = CheckpointUpload(RemoteStore(url), tmp_path / "run", pin, node=0, num_nodes=2)
    started.send()
    started.commit(take_over_s=0.1)
    assert fetched_seeds(RemoteStore(url), tmp_path) == {4: 4}


def test_an_upload_that_was_given_up(tmp_path: Path, url: str) -> None:
    """Catches a node that does not resend what the store has lost since, and an upload that fails because of it."""
    pin, store = pin_checkpoint(write_checkpoint(tmp_path / "run", 4)), RemoteStore(url)
    assert pin is not None
    first, second = (CheckpointUpload(store, tmp_path / "run", pin, node=node, num_nodes=2) for node in range(2))
    second.send()
    assert second.is_brought
    for name in second._share:
        store.remove(f"checkpoints/step_00000004/{name}")
    first.open()
    assert not second.is_brought
    second.send()
    first.send()
    first.commit(take_over_s=1e9)
    assert fetched_seeds(store, tmp_path) == {4: 4}


def test_retention(tmp_path: Path, url: str) -> None:
    """Catches deletion of the newest or of one that keep_every keeps, a remnant that looks complete, and leftovers."""
    store = RemoteStore(url)
    for step in (2, 4, 6, 8):
        upload(store, write_checkpoint(tmp_path / "run", step))
    store.remove("checkpoints/step_00000006/manifest.json")
    assert [c.step for c in remote_checkpoints(store).values() if c.problem] == [6]
    assert remove_surplus(store, Retention(1, 4), spare=[6]) == ["step_00000002"]
    assert sorted(remote_checkpoints(store)) == [4, 6, 8]
    assert remove_surplus(store, Retention(1)) == ["step_00000004"]
    assert sorted(remote_checkpoints(store)) == [8]
    assert remove_surplus(store, Retention(0)) == []
    dying = CountingStore(url, 1, after=True)
    upload(RemoteStore(url), write_checkpoint(tmp_path / "run", 9))
    with pytest.raises(Killed):
        remove_surplus(dying, Retention(1))
    assert fetched_seeds(RemoteStore(url), tmp_path) == {9: 9}, "what is left of step 8 looks complete"


@pytest.mark.parametrize("what", ["truncated", "flipped", "empty"])
def test_a_damaged_manifest_is_no_checkpoint(what: str, tmp_path: Path, url: str) -> None:
    """Catches a manifest that is read without its checksum."""
    store = RemoteStore(url)
    upload(store, write_checkpoint(tmp_path / "run", 4))
    path = "checkpoints/step_00000004/manifest.json"
    content = bytearray(store.read(path) or b"")
    if what == "flipped":
        content[len(content) // 2] ^= 1
    store.write(path, {"truncated": bytes(content[:-9]), "flipped": bytes(content), "empty": b""}[what])
    found = remote_checkpoints(store)[4]
    assert found.problem and not found.sequence
