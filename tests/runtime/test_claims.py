"""Claims of parts by participants, through files in a shared folder."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from megads.runtime import claims as claims_module
from megads.runtime.claims import Claims, Participant, Presence, link_claim, live_members

PARTS = ["a", "b", "c", "d"]


def change(folder: Path, claims: Claims, *, silent_s: float = 0, **fields: object) -> None:
    """Changes fields of a participant's file, and makes it `silent_s` older."""
    path = folder / "participants" / claims.identity
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    seconds = path.stat().st_mtime - silent_s
    os.utime(path, (seconds, seconds))


def test_every_part_is_claimed_once(tmp_path: Path) -> None:
    """Catches a part that two processes take, and a part that no process takes."""
    with Claims(tmp_path, PARTS) as first, Claims(tmp_path, PARTS) as second:
        assert [first.take_any(0), second.take_any(1), first.take_any(0), second.take_any(3)] == ["a", "b", "c", "d"]
        assert first.take_any(0) is None and not second.take("a") and not first.take("a")
        first.finish("a", {"tokens": 3})
        assert second.finished() == {"a": {"tokens": 3}}
        assert not link_claim(tmp_path / "claims" / "a.1", second.identity), "it is there"
        assert first.holds("a") and first.holder("b") == second.holder("b") != "another process"


def test_parts_of_the_dead_are_taken_over(tmp_path: Path) -> None:
    """Catches parts that stay claimed by a dead process here or on another machine, and parts taken from live ones."""
    with Claims(tmp_path, PARTS) as own:
        here, there, slow, ended = (Claims(tmp_path, PARTS) for _ in range(4))
        for claims, part in zip((here, there, slow, ended), PARTS, strict=True):
            claims.__enter__()
            assert claims.take(part)
        change(tmp_path, here, born=1)
        change(tmp_path, there, machine="another", silent_s=60)
        # Its pid is not of this machine.
        change(tmp_path, slow, machine="another", pid=1 << 30, silent_s=20)
        ended.__exit__(None, None, None)
        assert [own.take_any(0) for _ in range(4)] == ["a", "b", "d", None]
        assert slow.holds("c") and own.holds("a") and not here.holds("a")
        assert not own.take("c")
        for claims in (here, there, slow):
            claims.__exit__(None, None, None)
        assert own.take_any(2) == "c"


def test_a_damaged_part_can_be_claimed_again(tmp_path: Path) -> None:
    """Catches a damaged part that stays finished for its own process or for others."""
    with Claims(tmp_path, PARTS) as own:
        assert own.take("a")
        own.finish("a", {})
    with Claims(tmp_path, PARTS) as later:
        assert not later.take("a")
        later.forget("a")
        assert later.finished() == {} and later.take("a")


def test_live_and_dead_workers_are_told_apart(tmp_path: Path) -> None:
    """Catches a live worker of another node taken for dead, a dead one taken for alive, and an ignored damaged file."""
    own = Participant.of_this_process()
    with Presence(tmp_path / "own", own), Presence(tmp_path / "there", own), Presence(tmp_path / "silent", own):
        for name, silent_s in (("there", 20), ("silent", 60)):
            path = tmp_path / name
            path.write_text(json.dumps(json.loads(path.read_text()) | {"machine": "another", "node": name}))
            os.utime(path, (path.stat().st_mtime - silent_s,) * 2)
        (tmp_path / "damaged").write_text("{")
        (tmp_path / ".now.x").touch()
        found = {None if one is None else one.node for one in live_members(tmp_path, Participant)}
        assert found == {own.node, "there", None}
    assert not list(live_members(tmp_path / "nowhere", Participant))
    assert {path.name for path in tmp_path.iterdir()} == {"damaged", ".now.x"}


def test_a_worker_taken_for_dead_writes_its_file_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a live worker whose removed file is not written again, or whose file is not touched regularly."""
    monkeypatch.setattr(claims_module, "BEAT_S", 0.01)
    path = tmp_path / "own"
    with Presence(path, Participant.of_this_process()) as presence:
        presence.change(node="renamed")
        path.unlink()
        while not path.exists():
            time.sleep(0.01)
        assert json.loads(path.read_text())["node"] == "renamed"
        os.utime(path, (1, 1))
        while path.stat().st_mtime < 2:
            time.sleep(0.01)
    assert not path.exists()
